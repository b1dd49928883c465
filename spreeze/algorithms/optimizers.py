"""Adam and RMSProp on one flat vector, with a guard against non-finite updates, and networks with their Adam.

Losses are not scaled: float16 would need it for small gradients, but float32, TF32 and bfloat16 all have an exponent of
eight bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import TransitionBatch

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8
_BLOCKS, _MIN_OF_A_BLOCK = 36, 2048
"""Number of parts into which a vector is split for a GPU's fused optimizer, and their least length. Up to 65,536
numbers of a part are one block of threads, and one launch has 36 parts. Unsplit, the 148,000 numbers of two critics are
three blocks, which take 42 us on an H200."""


class _GuardedOptimizer(ABC):
    """Skips gradients with a non-finite norm, clips others to ``max_norm`` (Pascanu et al. 2013, 1211.5063)."""

    def __init__(self, parameters: Tensor, gradient: Tensor, lr: float, eps: float, max_norm: float | None) -> None:
        self._parameters, self._gradient, self.lr, self._eps = parameters, gradient, lr, eps
        self._max_norm = max_norm
        self._v = torch.zeros_like(parameters)
        self._skipped = parameters.new_zeros((), dtype=torch.float32)
        self._norm = parameters.new_zeros(())
        self.exchange: Callable[[Tensor], None] | None = None
        """Called with the gradient before each step, which it may change in place."""
        self.apart: Tensor | None = None
        """1 for components of one part, 0 for the other: the norms of both parts are clipped separately."""
        self._part = torch.zeros_like(gradient[:0])

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of the latest gradient before it was scaled, skipped or not (reads the device)."""
        return self._norm.item()

    @property
    def update_size(self) -> float:
        """Norm of the latest step over that of the parameters; NaN before the first step (reads the device)."""
        norm = torch.linalg.vector_norm
        return float(norm(self._latest_step()) / norm(self._parameters))

    @abstractmethod
    def _latest_step(self) -> Tensor:
        """Change of the parameters in the latest step, computed from the state of the optimizer."""

    @property
    def skipped(self) -> int:
        """Number of gradients not applied (reads the device); checkpoints call it ``refused``."""
        return int(self._skipped.item())

    def step(self) -> None:
        """Applies the gradient, or counts it as skipped if its norm is not finite (reads the device)."""
        if self.exchange is not None:
            self.exchange(self._gradient)
        # Not torch.dot: if matmuls round to bfloat16, it does so, too, and takes ten times as long.
        torch.linalg.vector_norm(self._gradient, out=self._norm)
        if math.isfinite(self._norm.item()):
            self._apply()
        else:
            self._skipped.add_(1.0)

    def _apply(self) -> None:
        if self._max_norm is None:
            return
        if self.apart is None:
            self._gradient.mul_(self._norm.reciprocal().mul_(self._max_norm).clamp_(max=1.0))
            return
        if len(self._part) == 0:
            self._part = torch.zeros_like(self._gradient)
        torch.mul(self._gradient, self.apart, out=self._part)
        if self._gradient.device.type == "cpu":
            self._scale_apart(self._max_norm)
            return
        self._gradient.sub_(self._part)
        for part in (self._gradient, self._part):
            norm = torch.linalg.vector_norm(part)
            part.mul_(norm.reciprocal_().mul_(self._max_norm).clamp_(max=1.0))
        self._gradient.add_(self._part)

    def _scale_apart(self, max_norm: float) -> None:
        """Clips both parts, without a pass over memory if neither is too large."""
        norm, part = self._norm.item(), torch.linalg.vector_norm(self._part).item()
        square = norm**2 - part**2
        if square < 1e-4 * norm**2:  # less would be rounding
            square = torch.linalg.vector_norm(self._gradient - self._part).item() ** 2
        of_rest, of_part = (min(1.0, max_norm / size) if size else 1.0 for size in (math.sqrt(square), part))
        if of_rest < 1.0:
            self._gradient.mul_(of_rest)
        if of_part != of_rest:
            self._gradient.add_(self._part, alpha=of_part - of_rest)


class FlatAdam(_GuardedOptimizer):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980). On a GPU the fused kernel reads the flag, so the host never waits."""

    def __init__(
        self, parameters: Tensor, gradient: Tensor, lr: float, eps: float = _EPSILON, max_norm: float | None = None
    ) -> None:
        super().__init__(parameters, gradient, lr, eps, max_norm)
        self._m = torch.zeros_like(parameters)
        self._counts = parameters.new_zeros(2, dtype=torch.float32)
        self._steps, self._skipped = self._counts.unbind()
        self._finite, self._taken = torch.zeros_like(self._steps), torch.zeros_like(self._counts)
        self._if_taken = torch.tensor([1.0, 0.0], device=parameters.device)
        self._bad = self._taken[1]
        self.weight_decay = 0.0
        """Decoupled: a step also subtracts ``lr weight_decay`` times the parameters (AdamW, arXiv 1711.05101)."""
        self.beta1 = _BETA_1
        """Decay per step of the gradient's running mean."""
        self._scaled_lr: Tensor | None = None
        self._one = parameters.new_ones((), dtype=torch.float32)
        self._on_cpu = parameters.device.type == "cpu"
        self._square = torch.zeros_like(self._norm)
        """Square of the gradient's norm, on a GPU."""
        self._parts = [
            list(torch.split(vector, _part_size(vector))) for vector in (parameters, gradient, self._m, self._v)
        ]
        self._steps_of_parts = [self._steps] * len(self._parts[0])

    @property
    def gradient_norm(self) -> float:
        return super().gradient_norm if self._on_cpu else math.sqrt(self._square.item())

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate; a CUDA graph follows it if the first call precedes its recording."""
        if self._scaled_lr is None:
            self._scaled_lr = self._parameters.new_zeros(())
        self._scaled_lr.fill_(self.lr * factor)

    def step(self) -> None:
        """Applies the gradient, or counts it as skipped if its norm is not finite."""
        if self._on_cpu:
            super().step()
            return
        if self.exchange is not None:
            self.exchange(self._gradient)
        torch.dot(self._gradient, self._gradient, out=self._square)  # takes half as long as vector_norm there
        if self._max_norm is not None:
            torch.sqrt(self._square, out=self._norm)
        # Three small kernels, which a GPU runs one after the other; ``isfinite`` alone would be four.
        torch.lt(self._square, math.inf, out=self._finite)  # NaN is not
        torch.eq(self._finite, self._if_taken, out=self._taken)
        self._counts.add_(self._taken)
        self._apply(self._bad)

    def _apply(self, bad: Tensor | None = None) -> None:
        """Applies the gradient if ``bad`` (one number) is 0; without ``bad``, always, and counts the step."""
        super()._apply()
        if bad is None:
            self._steps.add_(self._one)
        fused: Any = torch._fused_adamw_ if self.weight_decay else torch._fused_adam_
        fused(
            *self._parts,
            [],
            self._steps_of_parts,
            lr=self.lr if self._scaled_lr is None else self._scaled_lr,
            beta1=self.beta1,
            beta2=_BETA_2,
            weight_decay=self.weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=bad,
        )

    def _latest_step(self) -> Tensor:
        mean = self._m / (1.0 - self.beta1**self._steps)
        deviation = (self._v / (1.0 - _BETA_2**self._steps)).sqrt_().add_(self._eps)
        step = mean / deviation + self.weight_decay * self._parameters
        return step * (self.lr if self._scaled_lr is None else self._scaled_lr)

    def tensors(self) -> dict[str, Tensor]:
        return {"m": self._m, "v": self._v, "steps": self._steps, "refused": self._skipped}


def _part_size(vector: Tensor) -> int:
    """Length of the parts of a vector for the fused optimizer; on a CPU, the whole length."""
    if vector.device.type == "cpu":
        return len(vector)
    size = max(_MIN_OF_A_BLOCK, -(-len(vector) // _BLOCKS))
    return -(-size // 16) * 16  # each starts on a cache line


class FlatRMSProp(_GuardedOptimizer):
    """RMSProp (Tieleman and Hinton 2012, lecture 6.5), the root before epsilon."""

    def __init__(
        self, parameters: Tensor, gradient: Tensor, lr: float, alpha: float, eps: float, max_norm: float
    ) -> None:
        super().__init__(parameters, gradient, lr, eps, max_norm)
        self._alpha = alpha

    def _apply(self) -> None:
        super()._apply()
        self._v.mul_(self._alpha).addcmul_(self._gradient, self._gradient, value=1.0 - self._alpha)
        self._parameters.addcdiv_(self._gradient, self._v.sqrt().add_(self._eps), value=-self.lr)

    def _latest_step(self) -> Tensor:
        return self._gradient / self._v.sqrt().add_(self._eps) * self.lr

    def tensors(self) -> dict[str, Tensor]:
        return {"v": self._v, "refused": self._skipped}


class FlatNetworks(Protocol):
    """Networks whose parameters are all in one vector."""

    flat: Tensor

    def initialize(self, generator: torch.Generator) -> None:
        """Initializes the parameters."""


F = TypeVar("F", bound=FlatNetworks)


class TrainedNetworks(Generic[F]):
    """The networks of one side: online, gradient, optional target copy, and Adam."""

    def __init__(
        self,
        make: Callable[[], F],
        lr: float,
        generator: torch.Generator,
        *,
        target: bool = True,
        max_norm: float | None = None,
    ) -> None:
        self.online, self.gradient = make(), make()
        self.online.initialize(generator)
        self.target = make() if target else self.online
        self.target.flat.copy_(self.online.flat)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, lr, max_norm=max_norm)

    def update_target(self, tau: float) -> None:
        """Moves the target: ``target += tau (online - target)`` (arXiv 1509.02971, algorithm 1)."""
        self.target.flat.lerp_(self.online.flat, tau)

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        tensors = {"online": self.online.flat} | ({} if self.target is self.online else {"target": self.target.flat})
        return tensors | {f"adam.{name}": tensor for name, tensor in self.adam.tensors().items()}


class Encoder(TrainedNetworks[Any]):
    """Networks before actor and critics, trained only by the critics' loss."""

    size: int  # F: features, the inputs of actor and critics
    meta: dict[str, Any]  # JSON values for samplers

    @abstractmethod
    def encode(self, batch: Any, noise: torch.Generator) -> TransitionBatch:
        """The batch with features instead of observations; stores the data for ``step``."""

    @abstractmethod
    def step(self, grad_obs: Tensor) -> None:
        """One gradient step, given the derivative [B, F] of the critics' loss with respect to the features."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the weights, as samplers read them."""
        arrays: dict[str, np.ndarray] = self.online.arrays()
        return arrays

    def row_errors(self, errors: Tensor) -> Tensor:
        """Errors of rows of replay, from those of the transitions."""
        return errors
