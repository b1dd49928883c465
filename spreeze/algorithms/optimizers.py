"""Adam and RMSProp on one flat vector, with a guard against non-finite updates.

Losses are not scaled: float16 would need it for small gradients, but float32, TF32 and bfloat16 all have an exponent of
eight bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


class _Guarded:
    """The norm of the latest gradient, and the number of rejected ones."""

    def __init__(self, parameters: Tensor) -> None:
        self._rejected = torch.zeros((), device=parameters.device)
        self._norm = torch.zeros((), device=parameters.device, dtype=parameters.dtype)

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of the latest gradient before it was scaled, rejected or not (reads the device)."""
        return self._norm.item()

    @property
    def rejected(self) -> int:
        """Gradients that were not applied (reads the device)."""
        return int(self._rejected.item())


class FlatAdam(_Guarded):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) that rejects a gradient with a non-finite norm.

    The norm, needed for the metrics anyway, is non-finite if any component is. A CPU reads it at once; on a GPU the
    fused kernel takes the flag, so nothing waits. A gradient whose norm is above ``max_norm`` is scaled down to it
    (Pascanu et al. 2013, arXiv 1211.5063).
    """

    def __init__(
        self, parameters: Tensor, gradient: Tensor, lr: float, eps: float = _EPSILON, max_norm: float | None = None
    ) -> None:
        super().__init__(parameters)
        self._parameters, self._gradient, self.lr, self._eps = parameters, gradient, lr, eps
        self._max_norm = max_norm
        self._m = torch.zeros_like(parameters)
        self._v = torch.zeros_like(parameters)
        self._steps = torch.zeros((), device=parameters.device)
        self._one = torch.ones((), device=parameters.device)
        self._on_cpu = parameters.device.type == "cpu"

    def step(self) -> None:
        """Applies the gradient, or counts it as rejected if its norm is not finite."""
        # Not torch.dot: if matmuls round to bfloat16, it does too and takes ten times as long.
        torch.linalg.vector_norm(self._gradient, out=self._norm)
        if self._on_cpu:
            if math.isfinite(self._norm.item()):
                self.apply()
            else:
                self._rejected.add_(self._one)
            return
        bad = torch.isfinite(self._norm).logical_not_().to(self._steps.dtype)
        self._rejected.add_(bad)
        self._steps.sub_(bad)
        self.apply(bad)

    def apply(self, bad: Tensor | None = None) -> None:
        """Applies the gradient unless ``bad`` (one number) is not 0; counts the step in any case."""
        self._steps.add_(self._one)
        if self._max_norm is not None:
            _scale_down_(self._gradient, self._norm, self._max_norm)
        torch._fused_adam_(
            [self._parameters], [self._gradient], [self._m], [self._v], [], [self._steps], lr=self.lr, beta1=_BETA_1,
            beta2=_BETA_2, weight_decay=0.0, eps=self._eps, amsgrad=False, maximize=False, grad_scale=None,
            found_inf=bad,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {"m": self._m, "v": self._v, "steps": self._steps, "refused": self._rejected}


class FlatRMSProp(_Guarded):
    """RMSProp (Tieleman and Hinton 2012, lecture 6.5), the root before epsilon; rejects and scales as ``FlatAdam``."""

    def __init__(
        self, parameters: Tensor, gradient: Tensor, lr: float, alpha: float, eps: float, max_norm: float
    ) -> None:
        super().__init__(parameters)
        self._parameters, self._gradient, self.lr = parameters, gradient, lr
        self._alpha, self._eps, self._max_norm = alpha, eps, max_norm
        self._v = torch.zeros_like(parameters)

    def step(self) -> None:
        """Applies the gradient, or counts it as rejected if its norm is not finite (reads the device)."""
        torch.linalg.vector_norm(self._gradient, out=self._norm)
        if not math.isfinite(self._norm.item()):
            self._rejected.add_(1.0)
            return
        _scale_down_(self._gradient, self._norm, self._max_norm)
        self._v.mul_(self._alpha).addcmul_(self._gradient, self._gradient, value=1.0 - self._alpha)
        self._parameters.addcdiv_(self._gradient, self._v.sqrt().add_(self._eps), value=-self.lr)

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {"v": self._v, "refused": self._rejected}


def _scale_down_(gradient: Tensor, norm: Tensor, max_norm: float) -> None:
    gradient.mul_(norm.reciprocal().mul_(max_norm).clamp_(max=1.0))
