"""Q networks for discrete actions: S stacked networks with one output for each action, targets and optimiser.

With ``duelling`` (Wang et al. 2016, arXiv 1511.06581, eq. 9) the last hidden layer has twice the width: its
first half feeds the state value alone, the second the advantages alone, ``Q = V + A - mean A``. Both
streams are one layer whose head has two blocks; the rest of the head stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spreeze import ops
from spreeze.algorithms.adam import FlatAdam
from spreeze.networks import Parameters, Tape, mlp_backward, mlp_forward, new_parameters


class _Buffers:
    """Everything whose size depends on the batch."""

    def __init__(self, parameters: Parameters, rows: int, actions: int) -> None:
        like, stack = parameters.flat, parameters.stack
        self.rows = rows
        self.tape = Tape.allocate(parameters, rows)
        self.per_row = like.new_full((), 1.0 / rows)
        self.td_error = like.new_zeros(stack, rows)
        self.chosen = like.new_zeros(stack, rows)
        self.grad_q = like.new_zeros(stack, actions, rows)
        self.q = like.new_zeros(stack, actions, rows)


class ActionValues:
    """S networks Q(s, .) [K]."""

    def __init__(
        self, obs_dim: int, num_actions: int, hidden_sizes: tuple[int, ...], stack: int, lr: float,
        generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32, *, duelling: bool = False,
    ) -> None:
        sizes = (obs_dim, *hidden_sizes, num_actions)
        if duelling:
            sizes = (obs_dim, *hidden_sizes[:-1], 2 * hidden_sizes[-1], 1 + num_actions)
        self.online = new_parameters(sizes, stack, device, dtype)
        self.online.initialise(generator)
        self._streams = Streams(self.online, num_actions) if duelling else None
        self.target = new_parameters(sizes, stack, device, dtype)
        self.target.flat.copy_(self.online.flat)
        self.gradient = new_parameters(sizes, stack, device, dtype)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, lr)
        self.hidden_sizes, self._num_actions = sizes[1:-1], num_actions
        self.action_value = self.online.flat.new_full((1,), math.nan)
        """[B], expected value of the latest fresh actions; set by algorithms that move an actor."""
        self._buffers: _Buffers | None = None

    def values(self, obs: Tensor, *, target: bool = False) -> Tensor:
        """All actions' values [S, K, B] at obs [B, O], by the online or the target networks.

        Returns:
            A buffer that the next call overwrites.
        """
        buffers = self._sized(obs.shape[0])
        parameters = self.target if target else self.online
        out = mlp_forward(parameters, obs.expand(parameters.stack, -1, -1), buffers.tape)
        return out if self._streams is None else self._streams.join(out, buffers.q)

    def step(
        self, obs: Tensor, action: Tensor, target: Tensor, loss_gradient: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """One gradient step on ``sum over networks of mean loss(Q(s, a) - target)``.

        Args:
            obs: [B, O].
            action: [B], indices, int64.
            target: [B].
            loss_gradient: derivative of the loss by its error; None for half the square.
        """
        buffers, stack = self._sized(obs.shape[0]), self.online.stack
        q = self.values(obs)
        index = action.expand(stack, 1, -1)
        buffers.chosen = torch.gather(q, 1, index)[:, 0]
        torch.sub(buffers.chosen, target, out=buffers.td_error)
        slope = buffers.td_error if loss_gradient is None else loss_gradient(buffers.td_error)
        grad_q = buffers.tape.grad_out if self._streams is None else buffers.grad_q
        grad_q.zero_().scatter_(1, index, (slope * buffers.per_row).unsqueeze(1))
        if self._streams is not None:
            self._streams.split(grad_q, buffers.tape.grad_out)
        x_t = obs.t().expand(stack, -1, -1)
        mlp_backward(self.online, buffers.tape, x_t, self.gradient)
        if self._streams is not None:
            self.gradient.head_weight.mul_(self._streams.mask)
        self.adam.step()

    def least(self, obs: Tensor, *, target: bool = False) -> Tensor:
        """Each action's least value over the networks [K, B] at obs [B, O], a new tensor."""
        return self.values(obs, target=target).amin(0)

    def update_target(self, tau: float) -> None:
        """Moves the target networks toward the online ones."""
        ops.polyak_(self.target.flat, self.online.flat, tau)

    def policy_head(self) -> tuple[Tensor, Tensor]:
        """Weight [K, H] and bias [K] that give the first network's action values."""
        weight, bias = self.online.head_weight[0], self.online.head_bias[0, :, 0]
        return (weight, bias) if self._streams is None else (self._streams.joint @ weight, self._streams.joint @ bias)

    def metrics(self) -> dict[str, float]:
        """critic_loss, q_mean and critic_grad_norm of the latest step (reads the device)."""
        if self._buffers is None:
            return {}
        return {
            "critic_loss": self._buffers.td_error.square().mean().item(),
            "q_mean": self._buffers.chosen.mean().item(),
            "critic_grad_norm": self.adam.gradient_norm,
        }

    def mean_action_value(self) -> float:
        """Mean of ``action_value``."""
        return self.action_value.mean().item()

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        self._buffers = None

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        own = {"online": self.online.flat, "target": self.target.flat}
        return own | {f"adam.{name}": tensor for name, tensor in self.adam.tensors().items()}

    def _sized(self, rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _Buffers(self.online, rows, self._num_actions)
        return self._buffers


class Streams:
    """The linear map between a duelling head's outputs (V, A_1 .. A_K) and the action values."""

    def __init__(self, parameters: Parameters, num_actions: int) -> None:
        like, half = parameters.flat, parameters.sizes[-2] // 2
        self.joint = like.new_full((num_actions, 1 + num_actions), -1.0 / num_actions)
        self.joint[:, 0] = 1.0
        self.joint[:, 1:].diagonal().add_(1.0)
        self._joint_t = self.joint.t()
        self.mask = torch.zeros_like(parameters.head_weight)
        self.mask[:, 0, :half] = 1.0
        self.mask[:, 1:, half:] = 1.0
        # Each stream reads half of the layer, so its initial range is that of half the fan-in.
        parameters.head_weight.mul_(self.mask).mul_(math.sqrt(2.0))
        parameters.head_bias.mul_(math.sqrt(2.0))

    def join(self, out: Tensor, q: Tensor) -> Tensor:
        """``Q = V + A - mean A``: [S, 1 + K, B] into ``q`` [S, K, B]."""
        return torch.matmul(self.joint, out, out=q)

    def split(self, grad_q: Tensor, grad_out: Tensor) -> None:
        """Gradient to the outputs [S, 1 + K, B] from that to the values [S, K, B]."""
        torch.matmul(self._joint_t, grad_q, out=grad_out)
