"""Monitors the spread of learners that mix parameters, and which of them are slow."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import numpy as np

from spreeze.metrics import median
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import GroupSample, Recorder
from spreeze.transport.gossip import asynchronous_bound, contraction, mixing_matrix, radius, synchronous_bound
from spreeze.transport.mixing import NORMS, MixMemory
from spreeze.workers.roles import Address

_SLOW = 0.5
_WINDOW_S = 5.0
_NAMED_S = 60.0


def in_lockstep(plan: RunPlan) -> bool:
    """True if all learners mix at every update, as in Proposition 1."""
    return plan.config.data_flow.mixes_parameters and plan.config.gala.max_staleness == 0


class LearnerSpread:
    """Measures how far apart the learners are, and names the slow ones."""

    def __init__(self, plan: RunPlan, memory: MixMemory) -> None:
        self._memory = memory
        self._gala, self._learners = plan.config.gala, plan.learners
        self._beta = contraction(mixing_matrix(self._gala.topology, plan.learners))
        self._gossips = plan.config.data_flow.mixes_parameters and self._gala.mixing == "gossip"
        self._lockstep = in_lockstep(plan)
        self._start = None if plan.earlier.sessions else 0.0
        self._past: deque[tuple[float, list[float]]] = deque()
        self._named_s = [-math.inf] * plan.learners

    def measured(self, groups: tuple[GroupSample, ...], now_s: float, recorder: Recorder) -> tuple[GroupSample, ...]:
        """The groups with what is known of all of them together, as numbers of the first one's learner."""
        found = self._sizes()
        returns = [sampler["episode_return"] for group in groups for sampler in group.samplers if sampler["episodes"]]
        means = [
            float(np.mean([sampler["episode_return"] for sampler in group.samplers if sampler["episodes"]]))
            for group in groups
            if any(sampler["episodes"] for sampler in group.samplers)
        ]
        if len(returns) and len(means) == len(groups):
            found |= {"learners_best": max(means), "learners_spread": max(means) - min(means)}
        self._name_slow([group.learner["updates"] for group in groups], now_s, recorder)
        first = dataclasses.replace(groups[0], learner=groups[0].learner | found)
        return (first, *groups[1:])

    def _sizes(self) -> dict[str, float]:
        """The radius and its bounds; a bound is unknown where the learners do not gossip.

        Both propositions start with equal parameters. After a resume the radius that was measured first comes on top:
        mixing never makes it larger.
        """
        memory, board = self._memory, self._memory.board
        parameters = memory.aligned() if self._lockstep else memory.newest()
        if parameters is None:
            return {}
        found = {"gossip_radius": radius(np.stack(parameters))}
        self._start = found["gossip_radius"] if self._start is None else self._start
        if not self._gossips:
            return found
        numbers = np.full(self._learners, board["number"].min()) if self._lockstep else board["number"]
        both = zip(board["norms"], numbers, strict=True)
        latest = [norms[np.arange(number - NORMS + 1, number + 1) % NORMS] for norms, number in both]
        if self._lockstep:  # the slots of what came after that number hold other updates
            latest = [norms[NORMS // 2 :] for norms in latest]
        largest, staleness = float(board["largest"].max()), float(board["staleness"].max())
        bound = asynchronous_bound(largest, self._gala.topology, self._learners, staleness)
        return found | {
            "gossip_bound_1": self._start + synchronous_bound(np.stack(latest), self._beta),
            "gossip_bound_2": self._start + bound if math.isfinite(bound) else math.nan,
        }

    def _name_slow(self, updates: list[float], now_s: float, recorder: Recorder) -> None:
        """An event for a learner that takes less than half as many updates as the others, at most one a minute."""
        self._past.append((now_s, updates))
        while len(self._past) > 2 and now_s - self._past[1][0] >= _WINDOW_S:
            self._past.popleft()
        then_s, before = self._past[0]
        if now_s - then_s < _WINDOW_S or not all(before):  # one that still loads is not slow
            return
        rates = [max(after - one, 0.0) / (now_s - then_s) for one, after in zip(before, updates, strict=True)]
        for learner, rate in enumerate(rates):
            others = median([*rates[:learner], *rates[learner + 1 :]])
            if others > 0.0 and rate < _SLOW * others and now_s - self._named_s[learner] >= _NAMED_S:
                self._named_s[learner] = now_s
                limit = f" before the staleness limit of {self._gala.max_staleness} rollouts" if self._gossips else ""
                recorder.event(
                    "warning",
                    f"{Address('learner', learner).name} is slow: {rate:.3g} updates/s, "
                    f"the others {others:.3g}; the others do not wait for it{limit}",
                )
