"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347), also with a lag of one rollout.

An update is an inner loop of K = epochs x minibatches steps phi_0, phi_1 ... phi_K on one rollout. With a lag of one
rollout it depends on the correction:

- delayed: phi_0 = theta(j - 1), which collected the data, with its ratios, values, advantages and normalizer: exactly
  the update of serial PPO. Its displacement is applied to theta(j): ``theta(j + 1) = theta(j) + phi_K - theta(j - 1)``.
  With one epoch and one minibatch that is eq. 6 of HTS-RL (arXiv 2012.09849): one optimizer step with the gradient at
  theta(j - 1). Adam's moments continue from update to update.
- none: phi_0 = theta(j), values of theta(j), ratios to the log-probabilities stored with the data; the authors' release
  does this, and with this ratio it is PPO on data of the previous policy.
- truncated-is: phi_0 = theta(j), ratios to pi_theta(j), each advantage times ``min(1, pi_theta(j) / pi_theta(j - 1))``
  (without gradient), advantages and targets from V-trace with the same weights.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.on_policy import (
    CategoricalDistribution,
    ClippedPolicy,
    Distribution,
    ForwardPass,
    GaussianDistribution,
    MlpActorCritic,
    Samples,
)
from spreeze.config.algorithm_bases import ClippedPolicyConfig, nearest_divisor
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import setting
from spreeze.inference.heads import HALF_LOG_2PI
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import EnvSpec

_MAX_ROWS, _MAX_UNITS = 512, 256  # largest minibatch and layer for which NumPy takes at most four fifths of the time


@dataclass(frozen=True, kw_only=True)
class PPOConfig(ClippedPolicyConfig):
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347)."""

    clip_value: bool = setting(False, "clip the value function, with the same range")
    epochs: int = setting(10, "epochs per rollout", low=1, high=1000)
    minibatch_size: int = setting(
        64,
        "env steps per minibatch (SB3: batch_size), rounded so that it divides a rollout",
        unit="env steps",
        low=1,
        high=2**24,
    )

    def minibatches_of(self, rows: int, steps: int = 1) -> int:
        """Equal minibatches, of whole sequences, whose size is nearest to ``minibatch_size``, by ratio."""
        return nearest_divisor(rows // self.sequence_of(steps), rows / self.minibatch_size)


class PPO(ClippedPolicy):
    name = "ppo"
    single_step = False
    _config: PPOConfig

    def __init__(self, spec: EnvSpec, config: PPOConfig, *args: Any, **options: Any) -> None:
        super().__init__(spec, config, *args, **options)
        overridable = ("_policy_derivative", "_value_error", "_penalise")
        is_plain = all(getattr(type(self), name) is getattr(PPO, name) for name in overridable)
        self._small: NumpyGradient | None = None
        if is_plain and not (self._masked or config.clip_value) and _is_small(self.net, self._kind):
            self._small = NumpyGradient(self.net, self._kind, config)

    def _gradient(self, samples: Samples, forward_pass: ForwardPass | None = None) -> None:
        if self._small is None or len(samples.target) > _MAX_ROWS:
            super()._gradient(samples, forward_pass)
            return
        self.on_gradient()
        self._latest = self._small(samples)

    def _update(self, samples: Samples, forward_pass: ForwardPass | None, theta: Tensor | None) -> None:
        config, sequences = self._config, samples.sequences
        minibatches = config.minibatches_of(len(samples.target), 1 if sequences is None else sequences.begins.shape[1])
        start = self.net.flat.clone() if theta is not None else None
        self.optimizer.lr *= self._lr_factor
        divergences: list[Tensor] = []
        with contextlib.nullcontext() if self._small is None else self._small.on_one_thread():
            for epoch in range(config.epochs):
                for part in samples.minibatches(minibatches, self.generator):
                    self._gradient(part)
                    if config.target_kl is not None and epoch == config.epochs - 1:
                        divergences.append(self._divergence())
                    self.optimizer.step()
                    self.updates += 1
        if config.target_kl is not None:
            self._adapt_lr(torch.stack(divergences).mean().item())
        if theta is not None and start is not None:
            self.net.flat.sub_(start).add_(theta)

    def _value_error(self, value: Tensor, samples: Samples) -> Tensor:
        if self._config.clip_value:
            return losses.clipped_value_error(value, samples.target, samples.value, self._config.clip)
        return super()._value_error(value, samples)


def _is_small(net: object, kind: Distribution) -> TypeGuard[MlpActorCritic]:
    """True for a policy and value network on a CPU that NumpyGradient supports, with Gaussian numbers or one choice."""
    return (
        isinstance(net, MlpActorCritic)
        and net.flat.device.type == "cpu"
        and net.layers.custom is None
        and not net.layers.layer_norm
        and net.layers.activation in ("tanh", "relu")
        and max(net.hidden_sizes) <= _MAX_UNITS
        and (isinstance(kind, GaussianDistribution) or (isinstance(kind, CategoricalDistribution) and kind.is_single))
    )


class NumpyGradient:
    """PPO's gradient in NumPy, into ``net.gradient`` as ``OnPolicyAlgorithm._gradient`` does; see ``_is_small``.

    On 64 rows, PyTorch spends more time calling its fifty kernels than on their work.
    """

    def __init__(self, net: MlpActorCritic, kind: Distribution, config: PPOConfig) -> None:
        self._net, self._config = net, config
        networks, gradients = net.networks, net.gradients
        self._is_tanh = net.layers.activation == "tanh"
        self._weights, self._biases = _arrays(networks.weights), _arrays(networks.biases)
        self._head_weight, self._head_bias = _arrays([networks.head_weight, networks.head_bias])
        self._weight_gradients, self._bias_gradients = _arrays(gradients.weights), _arrays(gradients.biases)
        self._head_weight_gradient, self._head_bias_gradient = _arrays([gradients.head_weight, gradients.head_bias])
        self._head_weight_gradient[1, 1:] = self._head_bias_gradient[1, 1:] = 0.0  # unused outputs
        self._kind: _Gaussian | _Softmax = (
            _Gaussian(net.log_std.numpy(), net.grad_log_std.numpy())
            if isinstance(kind, GaussianDistribution)
            else _Softmax(kind)
        )
        self._hidden: list[np.ndarray] = []
        from threadpoolctl import ThreadpoolController  # its import sets a variable of the environment

        self._libraries = ThreadpoolController()

    def on_one_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Context with one thread for NumPy's matmuls: several take four times as long for matrices of this size."""
        context: contextlib.AbstractContextManager[Any] = self._libraries.limit(limits=1, user_api="blas")
        return context

    def _allocate(self, rows: int) -> None:
        dtype, sizes = self._head_weight.dtype, self._net.hidden_sizes
        self._hidden, self._gradients, self._scratch = (
            [np.empty((2, rows, size), dtype) for size in sizes] for _ in range(3)
        )
        self._ones = np.ones(rows, dtype)

    def __call__(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Objective, log-ratio, value and target [M]; the gradient is in ``net.gradient``."""
        config, rows = self._config, len(samples.target)
        if not self._hidden or self._hidden[0].shape[1] != rows:
            self._allocate(rows)
        obs, action, old, advantage, target = (column.numpy() for column in samples.columns[:5])
        value = self._forward(obs)
        log_ratio = self._kind.log_prob(np.dot(self._head_weight[0], self._hidden[-1][0].T), self._head_bias[0], action)
        log_ratio -= old
        ratio = np.exp(log_ratio)
        plain = ratio * advantage
        clipped = np.clip(ratio, 1.0 - config.clip, 1.0 + config.clip)
        clipped *= advantage
        derivative = plain * (plain <= clipped)
        derivative *= -1.0 / rows
        error = value - target
        error *= config.value_coef / rows
        self._backward(obs, self._kind.backward(derivative, config.entropy_coef / rows), error)
        self._net.obs = samples.obs
        arrays = np.minimum(plain, clipped), log_ratio, value
        return *map(torch.from_numpy, arrays), samples.target  # type: ignore[return-value]

    def _forward(self, obs: np.ndarray) -> np.ndarray:
        """Fills the hidden layers of both networks; returns the values [M]."""
        below: Any = (obs, obs)
        for weight, bias, hidden in zip(self._weights, self._biases, self._hidden, strict=True):
            for network in (0, 1):
                np.dot(below[network], weight[network], out=hidden[network])
            hidden += bias
            if self._is_tanh:
                np.tanh(hidden, out=hidden)
            else:
                np.maximum(hidden, 0.0, out=hidden)
            below = hidden
        value: np.ndarray = np.dot(self._hidden[-1][1], self._head_weight[1, 0])
        value += self._head_bias[1, 0, 0]
        return value

    def _backward(self, obs: np.ndarray, grad_out: np.ndarray, error: np.ndarray) -> None:
        """Fills the gradients, from those of the policy's outputs [K, M] and of the values [M]."""
        top, above = self._hidden[-1], self._gradients[-1]
        np.dot(grad_out, top[0], out=self._head_weight_gradient[0])
        np.dot(error, top[1], out=self._head_weight_gradient[1, 0])
        np.dot(grad_out, self._ones, out=self._head_bias_gradient[0, :, 0])
        self._head_bias_gradient[1, 0, 0] = error.sum()
        np.dot(grad_out.T, self._head_weight[0], out=above[0])
        np.multiply(error[:, None], self._head_weight[1, 0], out=above[1])
        for index in range(len(self._hidden) - 1, -1, -1):
            grad, hidden, scratch = self._gradients[index], self._hidden[index], self._scratch[index]
            if self._is_tanh:
                np.multiply(hidden, hidden, out=scratch)
                np.subtract(1.0, scratch, out=scratch)
                grad *= scratch
            else:
                grad *= hidden > 0.0
            for network in (0, 1):
                below = self._hidden[index - 1][network] if index else obs
                np.dot(below.T, grad[network], out=self._weight_gradients[index][network])
                np.dot(self._ones, grad[network], out=self._bias_gradients[index][network, 0])
                if index:
                    np.dot(grad[network], self._weights[index][network].T, out=self._gradients[index - 1][network])


class _Gaussian:
    def __init__(self, log_std: np.ndarray, grad_log_std: np.ndarray) -> None:
        self._log_std, self._grad_log_std = log_std, grad_log_std

    def log_prob(self, out: np.ndarray, bias: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Log-probabilities [M] in nat of actions [M, A] under outputs [K, M] without their ``bias`` [K, 1]."""
        self._scale = np.exp(-self._log_std)[:, None]
        out += bias
        self._z = np.subtract(action.T, out, out=out)
        self._z *= self._scale
        log_prob: np.ndarray = np.einsum("am,am->m", self._z, self._z)
        log_prob *= -0.5
        log_prob -= self._log_std.sum() + len(out) * HALF_LOG_2PI
        return log_prob

    def backward(self, derivative: np.ndarray, entropy_weight: float) -> np.ndarray:
        """Like ``Distribution.backward``, for the latest ``log_prob``."""
        weighted: np.ndarray = self._z * derivative
        self._grad_log_std[:] = np.einsum("am,am->a", self._z, weighted)
        self._grad_log_std -= derivative.sum() + entropy_weight * derivative.size
        weighted *= self._scale
        return weighted


class _Softmax:
    def __init__(self, kind: Distribution) -> None:
        assert isinstance(kind, CategoricalDistribution)
        self._kind = kind

    def log_prob(self, out: np.ndarray, bias: np.ndarray, action: np.ndarray) -> np.ndarray:
        out += bias
        out -= out.max(0)
        out -= np.log(np.exp(out).sum(0))
        self._log_pi, self._at = out, (action[:, 0].astype(np.intp), np.arange(out.shape[1]))
        self._kind.log_pi = [torch.from_numpy(out)]
        log_prob: np.ndarray = out[self._at]
        return log_prob

    def backward(self, derivative: np.ndarray, entropy_weight: float) -> np.ndarray:
        prob, log_pi = np.exp(self._log_pi), self._log_pi
        grad: np.ndarray = -derivative
        if entropy_weight:
            grad = grad + entropy_weight * (log_pi - np.einsum("km,km->m", prob, log_pi))
        grad = prob * grad
        grad[self._at] += derivative
        return grad


def _arrays(tensors: list[Tensor]) -> list[np.ndarray]:
    """Arrays of the tensors that share their memory."""
    return [tensor.numpy() for tensor in tensors]


# The clip already bounds the effect of data of an earlier policy; a delayed displacement by a whole loop of updates is
# applied twice before the data shows its effect.
ALGORITHMS = (
    AlgorithmRow(
        name="ppo",
        config=PPOConfig,
        on_policy=PPO,
        defaults={"rollout.correction": "none"},
        for_discrete={"ppo.entropy_coef": 0.01},
    ),
)
