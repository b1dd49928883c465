"""The base class of all algorithms: name, counters, published policy and bit-exact state, but no update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spreeze.algorithms.networks.fused_mlp import Parameters, dead_units
from spreeze.errors import CheckpointError
from spreeze.inference.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from spreeze.algorithms.optimizers import FlatAdam, FlatRMSProp

LazySnapshot = tuple[Callable[[], dict[str, np.ndarray]], dict[str, Any]]
"""Arrays, which another thread may fetch later, and metadata."""
_GENERATOR = "generator"
_MAX_SEED = 2**63 - 1


class Algorithm(ABC):
    """Name, counters and state; ``off_policy`` and ``on_policy`` add the update."""

    name: str
    _config: Any
    _optimizers: Sequence[FlatAdam | FlatRMSProp]
    updates: int  # updates so far, including skipped ones; a caller that replays recorded updates counts them here

    lr_multiplier = 1.0  # factor of the learning rates, in addition to their schedule

    def __init__(self, generator: torch.Generator, meta: dict[str, Any]) -> None:
        self.updates = 0
        self.generator = generator  # of all random numbers in updates
        self._meta = {"algo": self.name, **meta}

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Finite metrics of the latest update by name, as in ``spreeze.metrics.table`` (reads the device)."""

    def updates_skipped(self) -> int:
        """Gradient steps skipped for a gradient that was not finite: the most of any optimizer (reads the device)."""
        return max(optimizer.skipped for optimizer in self._optimizers)

    @abstractmethod
    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the policy's weights, for ``Policy.from_weights``."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """State of a checkpoint, except the random state."""

    @property
    def gamma(self) -> float:
        """Discount factor per env step."""
        return float(self._config.gamma)

    @abstractmethod
    def _network_optimizers(self) -> Iterable[FlatAdam | FlatRMSProp]:
        """The optimizers of all networks."""

    def _perceptrons(self, batch: Any) -> Iterator[tuple[Parameters, Tensor]]:
        """Trained perceptrons over vectors, each with rows [M, I] for which its hidden units are evaluated."""
        yield from ()

    def health(self, batch: Any = None) -> dict[str, float]:
        """``update_size`` and ``dead_units`` of the current networks, where known (reads the device).

        ``batch`` is the newest of replay; algorithms that learn from rollouts take their latest minibatch.
        """
        with torch.inference_mode():
            sizes = [optimizer.update_size for optimizer in self._network_optimizers()]
            dead = dead_units(self._perceptrons(batch))
        return finite({"update_size": max(sizes, default=math.nan), "dead_units": dead})

    def value_snapshot(self, scale: float) -> LazySnapshot | None:
        """Values that a learner publishes with its policy, for recorded episodes (``episode_recorder.step_values``).

        Rewards were divided by ``scale``. None for networks of images, recurrent ones, custom ones and those of teams.
        """
        return None

    def _values_of(self, network: Parameters, kind: str, scale: float) -> dict[str, Any]:
        """Metadata of ``value_snapshot``: the inputs of ``network`` are "states", or also "actions"."""
        meta = {"scale": scale, "gamma": self.gamma, "values": kind}
        return meta | {"layers": len(network.weights), **network.layers.meta}

    def policy_meta(self) -> dict[str, Any]:
        """JSON values that ``Policy.from_weights`` needs besides the weights."""
        return dict(self._meta)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of networks, targets, optimizers and random state for a bit-exact resume."""
        arrays = {name: tensor.detach().to("cpu", copy=True).numpy() for name, tensor in self._tensors().items()}
        arrays[_GENERATOR] = self.generator.get_state().cpu().numpy().copy()
        return arrays

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        """Restores the result of ``state_arrays``, all or nothing; a CheckpointError for a missing name or other shape.

        False if the random state is from another kind of device (5,056 bytes on a CPU, 16 on a CUDA GPU). Then call
        ``seed_noise``, after ``load_state_json``.
        """
        tensors = self._tensors()
        for name in (*tensors, _GENERATOR):
            if name not in arrays:
                raise CheckpointError(f"checkpoint has no '{name}'; it was made by another algorithm or version")
        for name, tensor in tensors.items():
            if tuple(arrays[name].shape) != tuple(tensor.shape):
                raise CheckpointError(
                    f"checkpoint '{name}' has shape {tuple(arrays[name].shape)}, this network needs "
                    f"{tuple(tensor.shape)}; use the network settings and the environment of the checkpoint"
                )
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(np.array(arrays[name])))
        state = np.array(arrays[_GENERATOR], dtype=np.uint8)
        if state.size != self.generator.get_state().numel():
            return False
        try:
            self.generator.set_state(torch.from_numpy(state))
        except RuntimeError as error:
            raise CheckpointError(f"checkpoint '{_GENERATOR}' does not fit this device: {error}") from None
        return True

    def seed_noise(self, seed: int) -> None:
        """Seeds the noise from ``seed`` and the number of updates, on any device."""
        seeds = np.random.SeedSequence([seed, self.updates]).generate_state(1, np.uint64)
        self.generator.manual_seed(int(seeds[0]) & _MAX_SEED)

    def state_json(self) -> dict[str, Any]:
        """Counters and identity, as JSON values."""
        return {"algo": self.name, "updates": self.updates}

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Restores the result of ``state_json``; a CheckpointError if it is from another algorithm."""
        if state.get("algo") != self.name:
            raise CheckpointError(
                f"checkpoint was made by '{state.get('algo')}', not by '{self.name}'; use the same algorithm"
            )
        self.updates = int(state["updates"])


def finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
