"""Modes put together what ``config/modes.py`` declares: workers, and the channels between them.

A data path is a function that fills an ``Assembly``: ``replay``, ``paced_rollouts`` or ``buffer`` (free running). A
mode's wiring says which, and a mode with a data path of its own names its module.

*spreeze*: samplers write replay and the learner draws from it; they wait only for the band of samples per
insert. ``run.learners`` of these can run side by side.

*tianji* (TianJi): several of these groups, whose learners begin with the same parameters and average them every
``learner.average_interval`` updates, without waiting for each other. What is produced and consumed is held in balance
by each group's band of samples per insert (Eq. 3 of arXiv 2502.20190: as many as in mode serial). Algorithms that learn
from rollouts take each row once from one of two storages, which balances by construction. The paper's controller is
three parts here. Each decides what the others take as given, and says why:

========  ======================  ================================================================================
tuner     before a run            how many samplers there are, their environments and the batch: cores for M_A and M_L
governor  once a second           how many of these samplers work: no more than the learner needs, more if it waits
limiter   at each row and update  who may go on, so that TR_L / TR_A is the serial value, whatever the two decided
========  ======================  ================================================================================

So the ratio does not depend on a good choice of the others; a bad one costs speed alone. Staleness P = B_s / N_s
follows: the batch is fixed, and replay is full or grows as in mode serial.

*hts* (HTS-RL): samplers step environments, inference workers, if asked for, choose their actions, and the learner works
on the previous rollout. Two slots in shared memory are swapped only when one is full and the other used up, so a policy
lags by exactly one rollout. Random numbers are counter-based (seed, environment, episode, step), and inference works in
tiles of a fixed height. So trajectories, parameters and optimiser are the same bits for any number of inference
workers, any timing, and across a resume, as long as the learner is on the CPU (a GPU may sum in another order each
time) and no learning rate follows the clock. Without inference workers, the default, an env step costs half as much.

The successor of a killed sampler repeats the episode's actions and continues; if the observation differs, the run ends
with an error that the environment is not repeatable. A step that raises or gives NaN is not stored (see
``workers.collectors``). The cost of waiting is in ``tests/support/hts_theory.py``, as formulas and a simulation.

*gala* (GALA): several such learners with samplers of their own, which send each other their parameters along a graph
and mix what they receive without waiting.

*impact* (IMPACT): samplers write rollouts into a circular buffer, the learner uses each several times, and the newest
replace the oldest. They wait only for bounds on a rollout's uses. Every step has the version of its policy and its
log-probability, so the algorithm corrects for any lag. A killed sampler begins new episodes. Runs are not repeatable.

*serial*: the same workers take turns in one process.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from spreeze.config.modes import Mode
from spreeze.run_directory import RunDir
from spreeze.runtime.assembly import Assembly
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import Outcome, View
from spreeze.runtime.supervisor import run_workers


def assemble(run: Assembly) -> None:
    """Puts the workers of a run together, whatever its mode.

    Raises:
        ResourceError: there is no room for its memory, or there are too few descriptors.
        ConfigError: a checkpoint does not fit the settings.
    """
    config = run.plan.config
    path = "replay" if config.on_policy is None else "buffer" if config.wiring.free_running else "paced_rollouts"
    own = getattr(_module(config.mode), "assemble", None)
    (own or importlib.import_module(f"{__name__}.{path}").assemble)(run)


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains until a stop condition or an interrupt; ``launcher`` starts the workers, if there are any.

    Raises:
        ResourceError: there is no room for its memory, or a worker could not be started.
        ConfigError: a checkpoint does not fit the settings.
    """
    own = getattr(_module(plan.config.mode), "run_mode", None)
    if own is not None:
        outcome: Outcome = own(plan, run_dir, view, interrupts, launcher)
        return outcome
    return run_workers(assemble, plan, run_dir, view, interrupts, launcher)


def _module(mode: Mode) -> ModuleType | None:
    """The module of a mode that has one, imported only now, since it may load torch."""
    return importlib.import_module(mode.module) if mode.module else None
