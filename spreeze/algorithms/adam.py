"""Adam on one flat vector: one fused call for a whole network, and the guard against non-finite updates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


class FlatAdam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) that refuses a gradient with a non-finite norm.

    The norm is needed for the metrics anyway and is non-finite if any component is. On a
    CPU it is read at once; on a GPU the fused kernel takes the flag itself, so nothing waits.
    """

    def __init__(self, parameters: Tensor, gradient: Tensor, lr: float) -> None:
        self._parameters, self._gradient, self._lr = parameters, gradient, lr
        self._m = torch.zeros_like(parameters)
        self._v = torch.zeros_like(parameters)
        self._steps = torch.zeros((), device=parameters.device)
        self._one = torch.ones((), device=parameters.device)
        self._refused = torch.zeros((), device=parameters.device)
        self._norm = torch.zeros((), device=parameters.device, dtype=parameters.dtype)
        self._on_cpu = parameters.device.type == "cpu"

    def step(self) -> None:
        """Applies the gradient, or counts it as refused if its norm is not finite."""
        # Not torch.dot: where products round to bfloat16, it does too, at ten times the time.
        torch.linalg.vector_norm(self._gradient, out=self._norm)
        bad: Tensor | None = None
        if self._on_cpu:
            if not math.isfinite(self._norm.item()):
                self._refused.add_(self._one)
                return
            self._steps.add_(self._one)
        else:
            bad = torch.isfinite(self._norm).logical_not_().to(self._steps.dtype)
            self._refused.add_(bad)
            self._steps.add_(self._one - bad)
        torch._fused_adam_(
            [self._parameters],
            [self._gradient],
            [self._m],
            [self._v],
            [],
            [self._steps],
            lr=self._lr,
            beta1=_BETA_1,
            beta2=_BETA_2,
            weight_decay=0.0,
            eps=_EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=bad,
        )

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of the latest gradient, refused or not (reads the device)."""
        return self._norm.item()

    @property
    def refused(self) -> int:
        """Gradients that were not applied (reads the device)."""
        return int(self._refused.item())

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {"m": self._m, "v": self._v, "steps": self._steps, "refused": self._refused}
