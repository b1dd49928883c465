"""The critic side of every off-policy algorithm here: stacked Q networks, their targets and optimiser.

What it takes from the actor side: next actions (with log-densities folded in by the algorithm) and
fresh actions. What it gives back: dQ/da. Nothing else crosses, so the two sides may live on
different devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spreeze import ops
from spreeze.algorithms.adam import FlatAdam
from spreeze.algorithms.pair import Pair
from spreeze.networks import Parameters, Tape, mlp_backward, mlp_forward, new_parameters


class _Group:
    """Networks whose passes run in one thread: all of them, or one critic in each thread of a pair."""

    def __init__(self, networks: slice, online: Parameters, target: Parameters, gradient: Parameters) -> None:
        self.networks, self.online, self.target, self.gradient = networks, online, target, gradient
        self.stack = online.stack


class _GroupBuffers:
    """Views of the buffers for one group, made once: at small sizes each costs as much as an addition."""

    def __init__(self, group: _Group, tape: Tape, x: Tensor, td_error: Tensor, action_gradients: Tensor) -> None:
        self.tape, self.x = tape, x
        self.td_error, self.action_gradients = td_error[group.networks], action_gradients[group.networks]
        self.all_q, self.all_grad = tape.out[:, 0], tape.grad_out[:, 0]


class _Buffers:
    """Everything whose size depends on the batch."""

    def __init__(self, groups: list[_Group], parameters: Parameters, rows: int, obs_dim: int, action_dim: int) -> None:
        like, stack = parameters.flat, parameters.stack
        tape = Tape.allocate(parameters, rows)
        self.first = tape.part(0, rows, network=0)
        self.halves = tape.part(0, rows // 2, network=0), tape.part(rows // 2, rows, network=0)
        self.td_error = like.new_zeros(stack, rows)
        self.target = like.new_zeros(rows)
        self.q_action = like.new_full((rows,), math.nan)
        self.action_gradients = like.new_zeros(stack, action_dim, rows)
        x = like.new_zeros(rows, obs_dim + action_dim)
        self.x_obs, self.x_action_t = x[:, :obs_dim], x[:, obs_dim:].t()
        self.rows = rows
        self.per_row = like.new_full((), 1.0 / rows)
        self.q = [tape.out[index, 0] for index in range(stack)]
        self.grad = [tape.grad_out[index, 0] for index in range(stack)]
        self.groups = [
            _GroupBuffers(
                group, tape if group.stack == stack else tape.part(0, rows, network=group.networks.start),
                x.expand(group.stack, rows, obs_dim + action_dim), self.td_error, self.action_gradients,
            )
            for group in groups
        ]


class Critics:
    """S Q networks Q(s, a) as one stacked network, or one in each thread of a pair."""

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
        pair: Pair | None = None,
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
        self._online_first = self.online.one(0)
        self._pair = pair
        self._groups = self._grouped()
        self._buffers: _Buffers | None = None

    def _grouped(self) -> list[_Group]:
        if self._pair is None or self.online.stack == 1:
            return [_Group(slice(None), self.online, self.target, self.gradient)]
        return [
            _Group(slice(index, index + 1), self.online.one(index), self.target.one(index), self.gradient.one(index))
            for index in range(2)
        ]

    def _each(self, work: Callable[[_Group, _GroupBuffers], object], buffers: _Buffers) -> None:
        """Does the work for every group, two groups at once."""
        if self._pair is None or len(self._groups) == 1:
            work(self._groups[0], buffers.groups[0])
            return
        self._pair.both(
            lambda: work(self._groups[0], buffers.groups[0]), lambda: work(self._groups[1], buffers.groups[1])
        )

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
        self._each(lambda group, own: mlp_forward(group.target, own.x, own.tape), buffers)
        return buffers.q[0].clone() if self.online.stack == 1 else torch.minimum(*buffers.q)

    def step(self, obs_action: Tensor, target: Tensor) -> None:
        """One gradient step on ``sum over critics of mean (Q - target)^2 / 2``.

        Args:
            obs_action: [B, O + A].
            target: [B].
        """
        buffers = self._sized(obs_action.shape[0])
        buffers.target = target

        def differentiate(group: _Group, own: _GroupBuffers) -> None:
            x = obs_action.expand(group.stack, -1, -1)
            mlp_forward(group.online, x, own.tape)
            torch.sub(own.all_q, target, out=own.td_error)
            torch.mul(own.td_error, buffers.per_row, out=own.all_grad)
            mlp_backward(group.online, own.tape, x.transpose(1, 2), group.gradient)

        self._each(differentiate, buffers)
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
            self._first_gradient(buffers)
            return gradients[0]
        self._each(lambda group, own: mlp_forward(group.online, own.x, own.tape), buffers)
        first, second = buffers.q
        torch.minimum(first, second, out=buffers.q_action)
        # Only the lesser critic of a row has a gradient; a tie goes to the first.
        torch.le(first, second, out=buffers.grad[0])
        torch.gt(first, second, out=buffers.grad[1])

        def descend(group: _Group, own: _GroupBuffers) -> None:
            mlp_backward(group.online, own.tape, None, None)
            torch.bmm(self._action_weights[group.networks], own.tape.grads_t[0], out=own.action_gradients)

        self._each(descend, buffers)
        return gradients[0].add_(gradients[1])

    def _first_gradient(self, buffers: _Buffers) -> None:
        """Q and dQ/da of the first critic alone; no sum goes over rows, so each thread has half of them."""
        def descend(rows: slice, tape: Tape) -> None:
            buffers.q_action[rows] = mlp_forward(self._online_first, buffers.groups[0].x[:1, rows], tape)[0, 0]
            tape.grad_out.fill_(1.0)
            mlp_backward(self._online_first, tape, None, None)
            torch.bmm(self._action_weights[:1], tape.grads_t[0], out=buffers.action_gradients[:1, :, rows])

        if self._pair is None:
            descend(slice(None), buffers.first)
            return
        middle = buffers.rows // 2
        (upper, lower), pair = buffers.halves, self._pair
        pair.both(lambda: descend(slice(0, middle), upper), lambda: descend(slice(middle, None), lower))

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
            self._buffers = _Buffers(self._groups, self.online, rows, self._obs_dim, self._action_dim)
        return self._buffers
