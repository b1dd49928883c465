"""The critic side of every off-policy algorithm here: stacked Q networks, their targets and optimiser.

What it takes from the actor side: next actions (with log-densities folded in by the algorithm) and
fresh actions. What it gives back: dQ/da. Nothing else crosses, so the two sides may live on
different devices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spreeze import ops
from spreeze.algorithms.adam import FlatAdam
from spreeze.networks import Parameters, Tape, mlp_backward, mlp_forward, new_parameters


class _Buffers:
    """Everything whose size depends on the batch."""

    def __init__(self, parameters: Parameters, rows: int, obs_dim: int, action_dim: int) -> None:
        like, stack = parameters.flat, parameters.stack
        self.tape = Tape.allocate(parameters, rows)
        self.first = self.tape.part(0, rows, stack=1)
        self.td_error = like.new_zeros(stack, rows)
        self.target = like.new_zeros(rows)
        self.q_action = like.new_full((rows,), math.nan)
        self.action_gradients = like.new_zeros(stack, action_dim, rows)
        x = like.new_zeros(rows, obs_dim + action_dim)
        self.x_obs, self.x_action_t = x[:, :obs_dim], x[:, obs_dim:].t()
        self.x = x.expand(stack, rows, obs_dim + action_dim)
        self.rows = rows
        self.per_row = like.new_full((), 1.0 / rows)
        # Views made once: at small sizes each costs as much as an addition.
        self.q = [self.tape.out[index, 0] for index in range(stack)]
        self.all_q, self.all_grad = self.tape.out[:, 0], self.tape.grad_out[:, 0]
        self.grad = [self.tape.grad_out[index, 0] for index in range(stack)]


class Critics:
    """S Q networks Q(s, a) as one stacked network."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: tuple[int, ...],
        stack: int,
        lr: float,
        generator: torch.Generator,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        sizes = (obs_dim + action_dim, *hidden_sizes, 1)
        self.online = new_parameters(sizes, stack, device, dtype)
        self.online.initialise(generator)
        self.target = new_parameters(sizes, stack, device, dtype)
        self.target.flat.copy_(self.online.flat)
        self.gradient = new_parameters(sizes, stack, device, dtype)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, lr)
        self._obs_dim, self._action_dim = obs_dim, action_dim
        self._action_weights = self.online.weights[0][:, obs_dim:]
        self._online_first = self.online.first()
        self._buffers: _Buffers | None = None

    def next_value(self, next_obs: Tensor, next_action: Tensor) -> Tensor:
        """Least of the target networks' values (clipped double Q, arXiv 1802.09477, eq. 10).

        Args:
            next_obs: [B, O].
            next_action: [A, B].

        Returns:
            [B], a new tensor.
        """
        buffers = self._sized(next_obs.shape[0])
        buffers.x_obs.copy_(next_obs)
        buffers.x_action_t.copy_(next_action)
        mlp_forward(self.target, buffers.x, buffers.tape)
        return buffers.q[0].clone() if self.online.stack == 1 else torch.minimum(*buffers.q)

    def step(self, obs_action: Tensor, target: Tensor) -> None:
        """One gradient step on ``sum over critics of mean (Q - target)^2 / 2``.

        Args:
            obs_action: [B, O + A].
            target: [B].
        """
        buffers = self._sized(obs_action.shape[0])
        x = obs_action.expand(self.online.stack, -1, -1)
        mlp_forward(self.online, x, buffers.tape)
        torch.sub(buffers.all_q, target, out=buffers.td_error)
        buffers.target = target
        torch.mul(buffers.td_error, buffers.per_row, out=buffers.all_grad)
        mlp_backward(self.online, buffers.tape, x.transpose(1, 2), self.gradient)
        self.adam.step()

    def action_gradient(self, obs: Tensor, action: Tensor, *, least: bool) -> Tensor:
        """dQ/da of each row, Q the least of the critics or the first one alone.

        Args:
            obs: [B, O].
            action: [A, B].
            least: of the critics (SAC); otherwise the first (TD3, DDPG).

        Returns:
            [A, B], a buffer that the next call overwrites.
        """
        buffers = self._sized(obs.shape[0])
        buffers.x_obs.copy_(obs)
        buffers.x_action_t.copy_(action)
        gradients = buffers.action_gradients
        if not least or self.online.stack == 1:
            tape = buffers.first
            buffers.q_action.copy_(mlp_forward(self._online_first, buffers.x[:1], tape)[0, 0])
            tape.grad_out.fill_(1.0)
            mlp_backward(self._online_first, tape, None, None)
            torch.bmm(self._action_weights[:1], tape.grads_t[0], out=gradients[:1])
            return gradients[0]
        mlp_forward(self.online, buffers.x, buffers.tape)
        first, second = buffers.q
        torch.minimum(first, second, out=buffers.q_action)
        # Only the lesser critic of a row has a gradient; a tie goes to the first.
        torch.le(first, second, out=buffers.grad[0])
        torch.gt(first, second, out=buffers.grad[1])
        mlp_backward(self.online, buffers.tape, None, None)
        torch.bmm(self._action_weights, buffers.tape.grads_t[0], out=gradients)
        return gradients[0].add_(gradients[1])

    def update_target(self, tau: float) -> None:
        """Moves the target networks toward the online ones."""
        ops.polyak_(self.target.flat, self.online.flat, tau)

    def metrics(self) -> dict[str, float]:
        """critic_loss, q_mean and critic_grad_norm of the latest step (reads the device)."""
        if self._buffers is None:
            return {}
        error = self._buffers.td_error
        return {
            "critic_loss": error.square().mean().item(),
            "q_mean": (error.mean() + self._buffers.target.mean()).item(),
            "critic_grad_norm": self.adam.gradient_norm,
        }

    def mean_action_value(self) -> float:
        """Mean Q of the latest fresh actions, NaN before the first (reads the device)."""
        return math.nan if self._buffers is None else self._buffers.q_action.mean().item()

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        own = {"online": self.online.flat, "target": self.target.flat}
        return own | {f"adam.{name}": tensor for name, tensor in self.adam.tensors().items()}

    def _sized(self, rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _Buffers(self.online, rows, self._obs_dim, self._action_dim)
        return self._buffers
