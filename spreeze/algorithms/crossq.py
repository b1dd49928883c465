"""CrossQ (Bhatt et al. 2024, arXiv 1902.05605): SAC whose critics have batch normalization and no target networks.

A hidden layer is ``act(norm(x W) + b)``, where ``norm`` uses mean and deviation of each unit over the rows; the next
layer's weights can absorb a gain, so there is none. Rows of replay and their successors (``next_obs`` with the policy's
actions) go through the critics as one batch of 2 B rows, normalized alike, which gives target values and predictions.
The actor's gradient uses the critics with running mean and variance folded into weights and biases: ``plain`` is an
ordinary perceptron.

Departures from the authors' code: no normalization of the critics' input, which ``env.normalize_obs`` scales to unit
variance; plain batch normalization instead of renormalization, whose warm-up of 100,000 updates is a whole run here;
and none in the actor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spreeze.algorithms.distributional import CategoricalCritics, QuantileCritics
from spreeze.algorithms.networks.fused_mlp import Parameters
from spreeze.algorithms.off_policy import Chunk, Critics
from spreeze.algorithms.sac import SAC, SoftActorCriticConfig
from spreeze.config.algorithm_bases import average_setting
from spreeze.config.algorithms import AlgorithmRow
from spreeze.errors import ConfigError
from spreeze.inference.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class CrossQConfig(SoftActorCriticConfig):
    """CrossQ: SAC with batch normalization in place of target networks (Bhatt et al. 2024, arXiv 1902.05605)."""

    policy_average: float = average_setting(0.998)

    def __post_init__(self) -> None:
        super().__post_init__()
        required = {"critic_layer_norm": False, "activation": "relu", "network": ""}
        for name, only in required.items():
            if (value := getattr(self, name)) != only:
                raise ConfigError(f"{name} = {value}: CrossQ has batch normalization and relu only; remove it")


_EPS = 1e-3  # added to variances, as in the authors' code
_MOMENTUM = 0.99  # decay of the running statistics per update, as in the authors' code


class _JointPass:
    """Forward and backward pass of some critics over 2 B rows, those of replay first."""

    def __init__(self, critics: _BatchNormalized, which: slice, rows: int) -> None:
        networks = critics.online, critics.gradient
        has_all = which.stop - which.start == critics.online.stack
        self.online, self.gradient = networks if has_all else (part.one(which.start) for part in networks)
        self.critics, self.rows, (_, *sizes, outputs) = which, rows, critics.online.sizes
        self._means, self._variances = ([part[which] for part in layers] for layers in critics.newest)
        like, num_critics = critics.online.flat, which.stop - which.start
        self._normal, self._hidden, self._grads = (
            [like.new_zeros(num_critics, 2 * rows, size) for size in sizes] for _ in range(3)
        )
        shared = {size: like.new_zeros(num_critics, 2 * rows, size) for size in sizes}
        self._scratch = [shared[size] for size in sizes]
        self._scales = [like.new_zeros(num_critics, 1, size) for size in sizes]
        self.out = like.new_zeros(num_critics, outputs, 2 * rows)

    def forward(self, x: Tensor) -> None:
        """Outputs ``out`` [s, K, 2 B] at inputs x [2 B, I]; fills the statistics of these rows."""
        online, below = self.online, x.expand(len(self.out), -1, -1)
        for index, (weight, bias) in enumerate(zip(online.weights, online.biases, strict=True)):
            normal = torch.bmm(below, weight, out=self._normal[index])
            normal.sub_(torch.mean(normal, 1, keepdim=True, out=self._means[index]))
            square = torch.mul(normal, normal, out=self._scratch[index])
            variance = torch.mean(square, 1, keepdim=True, out=self._variances[index])
            normal.mul_(torch.add(variance, _EPS, out=self._scales[index]).rsqrt_())
            if normal.device.type == "cpu":
                below = torch._add_relu(normal, bias, out=self._hidden[index])  # one pass over memory
            else:
                below = torch.add(normal, bias, out=self._hidden[index]).relu_()
        torch.baddbmm(online.head_bias, online.head_weight, below.transpose(1, 2), out=self.out)

    def backward(self, grad_out: Tensor, x: Tensor) -> None:
        """Fills the gradient from that of the outputs at rows of replay, grad_out [s, K, B].

        With n = scale (s - mean s) over all rows: ds = scale (dn - mean dn - n mean(n dn)). So successors' rows have a
        gradient, although their outputs have none.
        """
        online, gradient, rows, per_row = self.online, self.gradient, self.rows, 0.5 / self.rows
        torch.bmm(grad_out, self._hidden[-1][:, :rows], out=gradient.head_weight)
        torch.sum(grad_out, 2, keepdim=True, out=gradient.head_bias)
        torch.bmm(grad_out.transpose(1, 2), online.head_weight, out=self._grads[-1][:, :rows])
        self._grads[-1][:, rows:].zero_()
        for index in range(len(self._grads) - 1, -1, -1):
            grad, normal, hidden = self._grads[index], self._normal[index], self._hidden[index]
            torch.ops.aten.threshold_backward.grad_input(grad, hidden, 0.0, grad_input=grad)
            bias = torch.sum(grad, 1, keepdim=True, out=gradient.biases[index])
            along = torch.mul(grad, normal, out=self._scratch[index]).sum(1, keepdim=True).mul_(per_row)
            grad.sub_(bias * per_row).addcmul_(normal, along, value=-1.0).mul_(self._scales[index])
            below = self._hidden[index - 1] if index else x.expand(len(grad), -1, -1)
            torch.bmm(below.transpose(1, 2), grad, out=gradient.weights[index])
            if index:
                torch.bmm(grad, online.weights_t[index], out=self._grads[index - 1])


class _BatchNormalized(Critics):
    """Critics, or before another class of critics a mix-in that replaces its passes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.target = self.online
        for bias in self.online.biases:
            bias.zero_()
        like, count = self.online.flat, self.online.stack * sum(self.online.sizes[1:-1])
        self.statistics = torch.cat((like.new_zeros(count), like.new_ones(count)))
        """Running means and variances of all layers."""
        self.means, self.variances = self._split(self.statistics)
        self._of_batch = torch.zeros_like(self.statistics)
        self.newest = self._split(self._of_batch)
        """Means and variances of the latest batch, layer by layer."""
        self._folded = self.online.over(torch.zeros_like(like))
        self._obs_action: Tensor | None = None
        self._joint: list[list[_JointPass]] = []
        self._x = like.new_zeros(0)
        """[2 B, I], inputs of the joint pass."""

    def _split(self, statistics: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views [s, 1, H] of the means of all layers, and of the variances."""
        num_critics, sizes = self.online.stack, self.online.sizes[1:-1]
        parts = torch.split(statistics, [num_critics * size for size in (*sizes, *sizes)])
        views = [part.view(num_critics, 1, -1) for part in parts]
        return views[: len(sizes)], views[len(sizes) :]

    @property
    def plain(self) -> Parameters:
        """The critics as perceptrons without normalization, with the current running statistics folded in."""
        self._fold()
        return self._folded

    def _fold(self) -> None:
        folded = self._folded
        folded.flat.copy_(self.online.flat)
        for weight, bias, mean, variance in zip(folded.weights, folded.biases, self.means, self.variances, strict=True):
            scale = torch.rsqrt(variance + _EPS)
            weight.mul_(scale)
            bias.addcmul_(mean, scale, value=-1.0)

    def update_target(self, tau: float) -> None:
        """Does nothing: there are no target networks."""

    def set_joint_batch(self, obs_action: Tensor) -> None:
        self._obs_action = obs_action

    def _evaluate(self, next_obs: Tensor, next_action: Tensor) -> Any:
        """Fills the buffers' outputs with those of the successors; ``_take_step`` uses those of the rows of replay."""
        assert self._obs_action is not None
        buffers, rows = self._sized(len(next_obs)), len(next_obs)
        if not self._joint or self._joint[0][0].rows != rows:
            self._joint = [[_JointPass(self, chunks[0].critics, rows)] for chunks in buffers.groups]
            self._x = self._obs_action.new_zeros(2 * rows, self._obs_action.shape[1])
        self._x[:rows].copy_(self._obs_action)
        buffers.fill(next_obs, next_action)
        self._x[rows:].copy_(buffers.x)

        def evaluate(passes: list[_JointPass]) -> None:
            for joint in passes:
                joint.forward(self._x)
                buffers.out[joint.critics].copy_(joint.out[:, :, rows:])

        self._run(evaluate, self._joint)
        return buffers

    def _take_step(self, obs_action: Tensor, mean_td_target: Tensor, fill: Callable[[Chunk], None]) -> None:
        buffers, rows = self._sized(len(obs_action)), len(obs_action)
        self.td_error, self.td_target = buffers.td_error, mean_td_target
        for (joint,), chunks in zip(self._joint, buffers.groups, strict=True):
            buffers.out[joint.critics].copy_(joint.out[:, :, :rows])
            for chunk in chunks:
                fill(chunk)

        def differentiate(passes: list[_JointPass]) -> None:
            for joint in passes:
                joint.backward(buffers.grad_out[joint.critics], self._x)

        self._run(differentiate, self._joint)
        self.adam.step()
        total = self._of_batch.sum()  # not finite if the batch is not, whose gradient was skipped
        newest = torch.where(total - total == 0.0, self._of_batch, self.statistics)
        self.statistics.lerp_(newest, 1.0 - _MOMENTUM)

    def action_gradient(self, obs: Tensor, action: Tensor, *, use_min: bool) -> Tensor:
        self._fold()  # the buffers have views of the folded parameters
        return super().action_gradient(obs, action, use_min=use_min)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"statistics": self.statistics}

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._joint, self._obs_action, self._x = [], None, self._x.new_zeros(0)


class _Quantiles(_BatchNormalized, QuantileCritics):
    """Quantiles of the return."""


class _Categories(_BatchNormalized, CategoricalCritics):
    """Probabilities of returns on a grid."""


_KINDS: dict[str, type[_BatchNormalized]] = {
    "twin": _BatchNormalized,
    "quantile": _Quantiles,
    "categorical": _Categories,
}


class CrossQ(SAC):
    """SAC with batch-normalized critics, for continuous actions and vectors."""

    name = "crossq"

    @property
    def effective_tau(self) -> float:
        """1: there are no target networks, so target values use the current weights."""
        return 1.0

    @staticmethod
    def _create_critics(config: Any, *arguments: Any) -> Critics:
        return _KINDS[config.critics](config, *arguments)


ALGORITHMS = (
    AlgorithmRow(
        name="crossq",
        config=CrossQConfig,
        continuous=CrossQ,
        defaults={"env.normalize_obs": True, "crossq.adam_beta1": 0.5, "crossq.policy_delay": 3},
    ),
)
