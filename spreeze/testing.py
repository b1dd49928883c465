r"""Environments that fail on purpose, seeded and counted, for testing your own setup.

::

    python -m spreeze.train --env spreeze/Faulty-v0 --import spreeze.testing      # SPREEZE_FAULT_ENV=MyRobot-v0

    from spreeze.testing import FaultWrapper
    env = FaultWrapper(MyRobot(), p_crash=1e-4, p_crash_reset=1e-3, p_stall=5e-4, stall_s=3.0)

Each fault is a keyword argument or an environment variable ``SPREEZE_FAULT_<NAME>``; ``SPREEZE_FAULT_WORKERS`` lists
the workers that are affected::

    SPREEZE_FAULT_P_CRASH=1e-4 SPREEZE_FAULT_P_STALL=5e-4 SPREEZE_FAULT_STALL_S=3 SPREEZE_FAULT_WORKERS=sampler-0 \
      python -m spreeze.train --env spreeze/Faulty-v0 --import spreeze.testing --profile pendulum
"""

from __future__ import annotations

from spreeze.envs.faults import ENV_ID, WRAPPED_ID, FaultEnv, Faults, FaultWrapper

__all__ = ["ENV_ID", "WRAPPED_ID", "FaultEnv", "FaultWrapper", "Faults"]
