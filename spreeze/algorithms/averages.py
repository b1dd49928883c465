"""Exponential averages of a policy's weights over updates or rollouts, for evaluation, pictures and saved policies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.inference.policy import with_exploring
from spreeze.types import Arrays

_EVERY = 8  # updates between two steps of a PolicyAverage: a step reads and writes all weights of the policy
_NAMES = "policy_average/"  # prefix of the averaged weights' names among the arrays of a learner's state


class PolicyAverage:
    """An exponential average of a policy's weights over updates (Polyak and Juditsky 1992; Tarvainen and Valpola 2017).

    After u updates it keeps ``min(decay, (1 + u) / (10 + u))`` of itself in an update. It takes a step every ``_EVERY``
    updates, or after each launch of several, with the same decay per update; outside of recorded graphs, on the stream
    that they run on.
    """

    def __init__(self, algorithm: OffPolicyAlgorithm, decay: float) -> None:
        self._algorithm, self._decay = algorithm, decay
        self.weights = torch.cat(algorithm.policy_parameters)
        self.updates = 0

    def advance(self, updates: int) -> None:
        """Takes a step if one is due."""
        elapsed = updates - self.updates
        if elapsed >= _EVERY:
            kept = min(self._decay, (1 + updates) / (10 + updates)) ** elapsed
            for average, newest in self._parts():
                average.lerp_(newest, 1.0 - kept)
            self.updates = updates

    def snapshot(self) -> Callable[[], Arrays]:
        """The algorithm's ``policy_snapshot`` with the averaged weights; on a GPU copied before the next update."""
        newest = [online.clone() for _, online in self._parts()]
        for average, online in self._parts():
            online.copy_(average)
        try:
            return self._algorithm.policy_snapshot()
        finally:
            for (_, online), kept in zip(self._parts(), newest, strict=True):
                online.copy_(kept)

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        newest = self._algorithm.policy_parameters
        return list(zip(torch.split(self.weights, [len(part) for part in newest]), newest, strict=True))

    def restore(self, weights: np.ndarray | None, updates: int) -> None:
        """Continues a stored average; restarts at the current weights if none fits."""
        fits = weights is not None and weights.shape == tuple(self.weights.shape)
        newest = torch.cat(self._algorithm.policy_parameters)
        self.weights.copy_(torch.from_numpy(np.array(weights)) if fits else newest)
        self.updates = updates


class RolloutAverage:
    """An exponential average of an on-policy algorithm's policy, one step after each rollout learned from.

    With ``policy_average`` = 0 it is the newest policy. Over u updates it keeps ``policy_average ** u`` of itself,
    after r rollouts no more than r / (9 + r): the first weights are soon forgotten. The running mean and deviation of
    observations are averaged with the weights learned with them.
    """

    def __init__(self, algorithm: OnPolicyAlgorithm) -> None:
        self._algorithm, self._decay = algorithm, algorithm.policy_average
        self._arrays = {name: np.array(array) for name, array in algorithm.policy_arrays().items()}
        self._rollouts, self._updates = 0, algorithm.updates

    def advance(self) -> None:
        """Takes a step from the algorithm's policy."""
        if not self._decay:
            return
        self._rollouts += 1
        kept = min(self._decay ** (self._algorithm.updates - self._updates), self._rollouts / (9 + self._rollouts))
        self._updates = self._algorithm.updates
        for name, array in self._algorithm.policy_arrays().items():
            average = self._arrays[name]
            self._arrays[name] = average + np.float32(1.0 - kept) * (
                array - average
            )  # another thread may still read the old array

    def policy_arrays(self) -> Arrays:
        """The average, and beside it the newest weights, which collect rollouts."""
        newest = dict(self._algorithm.policy_arrays())
        return with_exploring(self._arrays, newest) if self._decay else newest

    def state_arrays(self) -> Arrays:
        if not self._decay:
            return {}
        return {_NAMES + name: array for name, array in self._arrays.items()} | {_NAMES: np.array(self._rollouts)}

    def restore(self, arrays: Arrays) -> None:
        """Continues the average among a learner's arrays; starts again at its policy where there is none."""
        self._updates, self._rollouts = self._algorithm.updates, int(arrays.get(_NAMES, 0))
        for name, array in self._algorithm.policy_arrays().items():
            self._arrays[name] = np.array(arrays.get(_NAMES + name, array))
