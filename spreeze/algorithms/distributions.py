"""Kinds of policy of on-policy algorithms: log-probability, entropy and gradient by a network's outputs."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from spreeze import ops


class Distribution(Protocol):
    """Actions given a policy's outputs; ``backward`` and ``entropy`` are of the latest ``log_prob``."""

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities [M] in nat of actions [M, A] under outputs [K, M]."""
        ...

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """Gradient of ``sum(grad_log_prob log pi) - entropy_weight sum H`` to the outputs [K, M]."""
        ...

    def entropy(self) -> float:
        """Mean entropy in nat (reads the device)."""
        ...

    def meta(self) -> dict[str, Any]:
        """What a published policy says of it."""
        ...


class Categorical:
    """One of K actions; outputs are logits, an action its index."""

    def __init__(self, num_actions: int) -> None:
        self._num_actions = num_actions
        self._log_pi: Tensor | None = None
        self._index: Tensor | None = None

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        """Of the actions taken."""
        self._index = action.t().long()
        self._log_pi, chosen = ops.categorical(out, self._index)
        return chosen

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """To the logits."""
        assert self._log_pi is not None
        assert self._index is not None
        return ops.categorical_backward(self._log_pi, self._index, grad_log_prob, entropy_weight)

    def entropy(self) -> float:
        """Mean over the rows."""
        assert self._log_pi is not None
        return -(self._log_pi.exp() * self._log_pi).sum(0).mean().item()

    def meta(self) -> dict[str, Any]:
        """Kind and number of actions."""
        return {"policy": "categorical", "num_actions": self._num_actions}


class Gaussian:
    """Independent Gaussians, not squashed; outputs are means, the log deviations the same everywhere."""

    def __init__(self, log_std: Tensor, grad_log_std: Tensor) -> None:
        self._log_std, self._grad_log_std = log_std, grad_log_std
        self._z: Tensor | None = None

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        """Of the actions taken."""
        self._z, log_prob = ops.gaussian(out, self._log_std, action.t())
        return log_prob

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """To the means; that to the log deviations goes to where it belongs."""
        assert self._z is not None
        grad_mean, grad_log_std = ops.gaussian_backward(self._z, self._log_std, grad_log_prob, entropy_weight)
        self._grad_log_std.copy_(grad_log_std)
        return grad_mean

    def entropy(self) -> float:
        """The same for every row."""
        return ops.gaussian_entropy(self._log_std).item()

    def meta(self) -> dict[str, Any]:
        """Kind and number of action components."""
        return {"policy": "gaussian", "action_dim": len(self._log_std)}
