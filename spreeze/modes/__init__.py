"""Assembly of the modes that ``config/modes.py`` declares: workers, and channels between them.

A data path is a function that fills an ``Assembly``: ``replay_modes`` has that from replay, ``rollout_modes`` those
from rollouts. The data flow of a mode selects it; a mode with its own data path names a module (``serial``,
``device``). ``assets/docs/architecture.md`` draws the data flows.

*tianji* (TianJi, arXiv 2502.20190): the learners of several groups start with equal parameters. The rate limiter keeps
the samples per insert of mode serial (Eq. 3). On-policy algorithms use each row once, from two alternating rollouts,
which balances by construction. The paper's controller consists of three parts:

========  ======================  ================================================================================
tuner     before a run            number of samplers, their environments and the batch size: cores for M_A and M_L
governor  once a second           number of active samplers: as many as the learner needs
limiter   at each row and update  who may proceed, so that TR_L / TR_A has its serial value
========  ======================  ================================================================================

The staleness P = B_s / N_s follows from the fixed batch size and the size of replay.

*hts* (HTS-RL): the policy lag is exactly one rollout. Random numbers are counter-based (seed, environment, episode,
step), and inference uses tiles of fixed height. Results are therefore identical for any number of inference workers,
any timing, and across a resume, with a learner on the CPU and no learning rate that follows the clock. Without
inference workers, the default, an env step costs half as much. The successor of a killed sampler replays the actions of
its episodes; where an observation differs, because the environment is not deterministic, it starts new ones and reports
that. ``tests/support/hts_theory.py`` models the cost of waiting.

*impact* (IMPACT): each step records policy version and log-probability, so the algorithm can correct for any lag. A
restarted sampler starts new episodes.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from spreeze.config.modes import Mode
from spreeze.run_directory import RunDir
from spreeze.runtime.assembly import Assembly
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher
from spreeze.runtime.outcome import Outcome
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import View
from spreeze.runtime.supervisor import run_workers


def assemble(run: Assembly) -> None:
    """Assembles the workers of a run of any mode; raises as ``runtime.assembly.assembled``."""
    config = run.plan.config
    path = "replay_modes" if config.on_policy is None else "rollout_modes"
    custom = getattr(_module(config.mode), "assemble", None)
    (custom or importlib.import_module(f"{__name__}.{path}").assemble)(run)


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains until a stop condition or an interrupt; ``launcher`` starts the workers. Raises as ``run_workers``."""
    custom = getattr(_module(plan.config.mode), "run_mode", None)
    if custom is not None:
        outcome: Outcome = custom(plan, run_dir, view, interrupts, launcher)
        return outcome
    return run_workers(assemble, plan, run_dir, view, interrupts, launcher)


def _module(mode: Mode) -> ModuleType | None:
    """The module of a mode that has one, imported only now, since it may load torch."""
    return importlib.import_module(mode.module) if mode.module else None
