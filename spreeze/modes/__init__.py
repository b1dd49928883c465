"""Modes: workers, buffers and synchronisation. Wiring only, declared in ``config/modes.py``.

*spreeze*: samplers write replay and the learner draws from it; they wait only for the band of samples per
insert. ``run.learners`` of these can run side by side.

*tianji* (TianJi): several of these groups, whose learners begin with the same parameters and average them every
``learner.average_interval`` updates, without waiting for each other. What is produced and consumed is held in balance
by each group's band of samples per insert. With algorithms that learn from rollouts it is wired as hts and gala are.
How the paper's controller is made up of tuner, limiter and governor is told in its module.

*hts* (HTS-RL): samplers step environments, inference workers, if asked for, choose their actions, and the learner works
on the previous rollout. Two slots in shared memory are swapped only when one is full and the other used up, so a policy
lags by exactly one rollout. Random numbers are counter-based (seed, environment, episode, step), and inference works in
tiles of a fixed height. So trajectories, parameters and optimiser are the same bits for any number of inference
workers, any timing, and across a resume, as long as the learner is on the CPU (a GPU may sum in another order each
time) and no learning rate follows the clock. Without inference workers, the default, an env step costs half as much.

The successor of a killed sampler repeats the episode's actions and continues; if the observation differs, the run ends
with an error that the environment is not repeatable. A step that raises or gives NaN is not stored (see
``workers.collectors``). The cost of waiting is in ``tests/hts_theory.py``, as formulas and a simulation.

*gala* (GALA): several such learners with samplers of their own, which send each other their parameters along a graph
and mix what they receive without waiting.

*impact* (IMPACT): samplers write rollouts into a circular buffer, the learner uses each several times, and the newest
replace the oldest. They wait only for bounds on a rollout's uses. Every step has the version of its policy and its
log-probability, so the algorithm corrects for any lag. A killed sampler begins new episodes. Runs are not repeatable.

*serial*: the same parts in one process, one after the other.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from spreeze.config.modes import Mode
from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import Outcome, View


class ModeModule(Protocol):
    """Interface of a mode's module."""

    def run_mode(
        self, plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH
    ) -> Outcome:
        """Runs to the end and releases everything; ``launcher`` starts the workers, if there are any."""


def load_mode(mode: Mode) -> ModeModule:
    """Imports the module of a mode, only when needed, since it may load torch."""
    module: ModeModule = importlib.import_module(mode.module)
    return module
