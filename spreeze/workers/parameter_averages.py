"""Averages of parameters: of a policy over its updates, and of learners side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.inference.lazy_torch import torch
from spreeze.transport.gossip import Gossip
from spreeze.transport.mixing import as_float32, as_float64

if TYPE_CHECKING:
    from spreeze.workers.replay_statistics import ReplayStatistics

_AVERAGE_EVERY = 8
"""Updates between two steps of the policy's average: a step reads and writes all weights of the policy."""
_SILENT_STEPS = 4
"""Averaging steps without a message from another learner after which it is left out; speeds differ by less."""


class PolicyAverage:
    """An exponential average of a policy's weights over updates (Polyak and Juditsky 1992; Tarvainen and Valpola 2017).

    After u updates it keeps ``min(decay, (1 + u) / (10 + u))`` of itself in an update. It takes a step every
    ``_AVERAGE_EVERY`` updates, or after each launch of several, with the same decay per update; outside of recorded
    graphs, on the stream that they run on.
    """

    def __init__(self, algorithm: OffPolicyAlgorithm, decay: float) -> None:
        self._algorithm, self._decay = algorithm, decay
        self.weights = torch.cat(algorithm.policy_parameters)
        self.updates = 0

    def advance(self, updates: int) -> None:
        """Takes a step if one is due."""
        elapsed = updates - self.updates
        if elapsed >= _AVERAGE_EVERY:
            kept = min(self._decay, (1 + updates) / (10 + updates)) ** elapsed
            for average, newest in self._parts():
                average.lerp_(newest, 1.0 - kept)
            self.updates = updates

    def snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """The algorithm's ``policy_snapshot`` with the averaged weights; on a GPU copied before the next update."""
        newest = [online.clone() for _, online in self._parts()]
        for average, online in self._parts():
            online.copy_(average)
        try:
            return self._algorithm.policy_snapshot()
        finally:
            for (_, online), kept in zip(self._parts(), newest, strict=True):
                online.copy_(kept)

    def _parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        newest = self._algorithm.policy_parameters
        return list(zip(torch.split(self.weights, [len(part) for part in newest]), newest, strict=True))

    def restore(self, weights: np.ndarray | None, updates: int) -> None:
        """Continues a stored average; restarts at the current weights if none fits."""
        fits = weights is not None and weights.shape == tuple(self.weights.shape)
        newest = torch.cat(self._algorithm.policy_parameters)
        self.weights.copy_(torch.from_numpy(np.array(weights)) if fits else newest)
        self.updates = updates


class PeerAverage:
    """The mean of the parameters of learners side by side, as in federated averaging (McMahan et al. 2017).

    Every ``interval`` updates a learner sends its networks, targets and temperature, and the statistics that scale
    inputs and outputs, then takes the mean of these and the newest of each other learner. Moments of the optimizer stay
    its own. No learner waits: one silent for ``_SILENT_STEPS`` of these steps is left out until it sends again.
    """

    def __init__(
        self,
        algorithm: OffPolicyAlgorithm,
        gossip: Gossip,
        interval: int,
        *,
        joins: bool = False,
        statistics: ReplayStatistics | None = None,
    ) -> None:
        """A learner that ``joins`` a running group first takes the mean of the others alone."""
        self._algorithm, self._gossip, self._joins = algorithm, gossip, joins
        self._statistics = statistics
        self._interval, self._due, self._version = interval, -1, 0
        self._newest: dict[int, tuple[np.ndarray, int]] = {}
        """Number of another learner -> its last message, and the own version at which that arrived."""
        self._num_others = -1

    def advance(self, updates: int) -> str | None:
        """Averages if that is due; returns a sentence if the number of other learners in the mean has changed."""
        if self._due < 0:
            self._due = updates + self._interval
        if updates < self._due:
            return None
        self._due = updates + self._interval
        arrays = self._algorithm.state_arrays()
        names = [name for name, array in arrays.items() if array.dtype == np.float32 and "adam" not in name]
        units = np.zeros(0) if self._statistics is None else self._statistics.averaged_statistics()
        message = np.concatenate([*(arrays[name].reshape(-1) for name in names), as_float32(units)])
        self._version += 1
        others = self._living()
        messages = others if self._joins and others else [message, *others]
        if messages is not others:
            self._gossip.send(message, self._version)
        if others:
            self._joins, size = False, len(message) - 2 * len(units)
            mean = np.mean([message[:size] for message in messages], 0)
            parts = np.split(mean, np.cumsum([arrays[name].size for name in names])[:-1])
            means = {name: part.reshape(arrays[name].shape) for name, part in zip(names, parts, strict=True)}
            self._algorithm.load_state_arrays(arrays | means)
            if self._statistics is not None and len(units):
                means_of = np.mean([as_float64(message[size:]) for message in messages], 0)
                self._statistics.set_averaged_statistics(means_of)
        if len(others) == self._num_others:
            return None
        self._num_others = len(others)
        plural = "" if self._num_others == 1 else "s"
        return f"update {updates}: averages parameters with {self._num_others} other learner{plural}"

    def _living(self) -> list[np.ndarray]:
        for message in self._gossip.receive():
            self._newest[message.sender] = message.parameters, self._version
        return [parameters for parameters, since in self._newest.values() if self._version - since < _SILENT_STEPS]
