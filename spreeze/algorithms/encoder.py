"""Networks before actor and critics, of images or with a memory, and what these share."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from spreeze.algorithms.optimizers import FlatAdam
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import TransitionBatch


class FlatNetworks(Protocol):
    """Networks whose parameters are all in one vector."""

    flat: Tensor

    def initialise(self, generator: torch.Generator) -> None:
        """Initialises the parameters."""


class Encoder(Protocol):
    """Networks before actor and critics, which the critics' loss alone changes."""

    size: int  # F: features, the inputs of actor and critics
    meta: dict[str, Any]
    adam: FlatAdam

    @property
    def online(self) -> FlatNetworks: ...

    def encode(self, batch: Any, noise: torch.Generator) -> TransitionBatch:
        """The batch with features in place of what was observed; keeps what ``step`` needs."""
        ...

    def step(self, grad_obs: Tensor) -> None: ...

    def update_target(self, tau: float) -> None: ...

    def row_errors(self, errors: Tensor) -> Tensor:
        """Errors of rows of replay by those of the transitions."""
        ...

    def arrays(self) -> dict[str, np.ndarray]: ...

    def tensors(self) -> dict[str, Tensor]: ...
