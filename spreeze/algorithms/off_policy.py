"""Off-policy algorithms: the contract, the order of an update, and their critics.

One update is four functions, two on each side; only their arguments and results cross between the sides::

    actor side                                   critic side
    propose(batch)         -- next actions, log-densities -->  critic_step(batch, ...)
                           -- fresh actions              -->  action_gradient(batch, action)
    actor_step(dq_da)      <-- dQ/da                     --

``update`` runs them in this order on one device or two (``Placement``, the two-GPU split of the Spreeze paper). Each
needs the result of the previous one. With ``overlap``, dQ/da is taken before the critics' step: then two devices can
work at once, and the actor follows the critics of the previous update. Action-side tensors are component-first, [A, B].
An algorithm without an actor (DQN) has no ``action_gradient`` and no ``actor_step``, and nothing crosses back.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.algorithm import Algorithm, finite
from spreeze.algorithms.fused_mlp import (
    ParameterCopy,
    Parameters,
    Tape,
    ThreadPair,
    chunk_rows,
    mlp_backward,
    mlp_forward,
    mlp_gradients,
    new_parameters,
    policy_arrays,
)
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.errors import ConfigError
from spreeze.types import TransitionBatch


class Proposal(NamedTuple):
    """What the actor side sends to the critic side in one update.

    A discrete policy sends the probabilities [K, B] of all actions instead of one action, and their logarithms [K, B];
    dQ/da is then the value of each action [K, B]. DQN sends the index of one action [1, B].
    """

    next_action: Tensor  # [A, B], at next_obs
    next_log_prob: Tensor | None  # [B] in nat; None where the algorithm has no entropy term
    action: Tensor | None  # [A, B], fresh actions at obs; None if this update moves no actor


class Placement:
    """Devices of both sides; counts the bytes that cross."""

    def __init__(self, actor: torch.device, critics: torch.device, *, split: bool) -> None:
        self.actor, self.critics, self.split = actor, critics, split
        self.crossed_bytes = 0
        """So far; a split over one and the same device counts what would cross."""

    @classmethod
    def parse(cls, text: str) -> Placement:
        """``cpu``, ``cuda:0``, or ``ACTOR+CRITICS`` such as ``cuda:0+cuda:1``.

        Raises:
            ConfigError: more than two devices, or not a device.
        """
        names = text.split("+")
        if len(names) > 2:
            raise ConfigError(f"device {text}: expected one device, or two as ACTOR+CRITICS")
        try:
            devices = [torch.device(name) for name in names]
        except RuntimeError:
            raise ConfigError(f"device {text}: expected cpu, cuda:N, or two of them as ACTOR+CRITICS") from None
        return cls(devices[0], devices[-1], split=len(devices) == 2)

    def send(self, proposal: Proposal) -> Proposal:
        if not self.split:
            return proposal
        next_action, next_log_prob, action = proposal
        return Proposal(
            self.to_critics(next_action), None if next_log_prob is None else self.to_critics(next_log_prob),
            None if action is None else self.to_critics(action),
        )

    def to_critics(self, tensor: Tensor) -> Tensor:
        return self._moved(tensor, self.critics)

    def to_actor(self, tensor: Tensor) -> Tensor:
        return self._moved(tensor, self.actor)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not self.split:
            return tensor
        self.crossed_bytes += tensor.element_size() * tensor.nelement()
        # A copy to the CPU must block: otherwise its numbers may be read before they have arrived.
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


class OffPolicyAlgorithm(Algorithm):
    """Networks, losses and update of one algorithm, in this class with a policy that is read from its critics."""

    def __init__(
        self, online: Parameters, critics: CriticNetworks[Any], noise: torch.Generator, meta: dict[str, Any]
    ) -> None:
        super().__init__(noise, meta)
        self._online, self._critic_side = online, critics

    @abstractmethod
    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: actions at ``next_obs``, and fresh ones at ``obs`` where there is an actor; draws all noise."""

    @abstractmethod
    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: one gradient step of the critics toward the target."""

    @abstractmethod
    def update_targets(self) -> None:
        """Moves the target networks and counts the update."""

    def update(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> None:
        """One whole update. A step with a non-finite gradient is not applied but counted.

        ``batch`` is on the critics' device, ``actor_batch`` on the actor's if that is another one (only obs, next_obs).
        """
        self.update_timed(batch, actor_batch)

    def update_timed(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> tuple[float, float]:
        """``update``; returns the seconds of the critic step (with proposals) and of the actor step.

        On a GPU these are the times to enqueue the work, not to do it.
        """
        with torch.inference_mode():
            start_s = perf_counter()
            proposal = self.propose(batch)
            self.critic_step(batch, proposal.next_action, proposal.next_log_prob)
            critic_done_s = perf_counter()
            self.update_targets()
            return critic_done_s - start_s, perf_counter() - critic_done_s

    @property
    def period(self) -> int:
        """Updates after which the same sequence of steps repeats: the steps depend on the update's number only."""
        return 1

    @property
    def noise(self) -> torch.Generator:
        """Source of all noise that updates draw."""
        return self._generator

    @property
    def crossed_bytes(self) -> int:
        """Bytes that have crossed between the sides; 0 on one device. Recorded updates count once."""
        return 0

    def drop_buffers(self) -> None:
        """Frees all memory that depends on the batch size; the next update allocates it again."""
        self._critic_side.drop_buffers()

    def metrics(self) -> dict[str, float]:
        return finite(self._critic_side.metrics())

    def updates_skipped(self) -> int:
        return self._critic_side.rejected()

    def all_finite(self) -> bool:
        """Whether the latest gradients were finite (reads the device)."""
        return math.isfinite(self._critic_side.adam.gradient_norm)

    def policy_arrays(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in policy_arrays(self._online).items()}

    def policy_snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """Copies the policy's weights without waiting for the device.

        The returned function gives them as ``policy_arrays``; it may be called in another thread, and waits there.
        """
        copy = ParameterCopy(self._online)
        return lambda: {name: tensor.numpy() for name, tensor in copy.policy_arrays().items()}

    def _tensors(self) -> dict[str, Tensor]:
        return {f"critics.{name}": tensor for name, tensor in self._critic_side.tensors().items()}


class ActorCritic(OffPolicyAlgorithm):
    """An algorithm with an actor beside its critics."""

    def __init__(
        self, actor: ActorNetworks, critics: CriticNetworks[Any], noise: torch.Generator, meta: dict[str, Any],
        placement: Placement | None = None, *, overlap: bool = False,
    ) -> None:
        super().__init__(actor.online, critics, noise, meta)
        self._placement = placement or Placement(noise.device, noise.device, split=False)
        self._overlap = overlap
        self._actor_side = actor

    @abstractmethod
    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critic side: dQ/da."""

    @abstractmethod
    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side: one gradient step."""

    def update_timed(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> tuple[float, float]:
        placement = self._placement
        with torch.inference_mode():
            start_s = perf_counter()
            proposal = placement.send(self.propose(batch if actor_batch is None else actor_batch))
            dq_da: Tensor | None = None
            if self._overlap and proposal.action is not None:
                dq_da = placement.to_actor(self.action_gradient(batch, proposal.action).clone())
            self.critic_step(batch, proposal.next_action, proposal.next_log_prob)
            critic_done_s = perf_counter()
            if proposal.action is not None:
                if dq_da is None:
                    dq_da = placement.to_actor(self.action_gradient(batch, proposal.action))
                self.actor_step(dq_da)
            self.update_targets()
            return critic_done_s - start_s, perf_counter() - critic_done_s

    @property
    def crossed_bytes(self) -> int:
        return self._placement.crossed_bytes

    def metrics(self) -> dict[str, float]:
        return super().metrics() | finite(self._actor_side.metrics(self._critic_side.mean_action_value()))

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._actor_side.drop_buffers()

    def updates_skipped(self) -> int:
        """The critics' steps or the actor's, whichever is more."""
        return max(super().updates_skipped(), self._actor_side.rejected())

    def all_finite(self) -> bool:
        return super().all_finite() and math.isfinite(self._actor_side.adam.gradient_norm)

    def _tensors(self) -> dict[str, Tensor]:
        return {f"actor.{name}": tensor for name, tensor in self._actor_side.tensors().items()} | super()._tensors()


class FlatNetwork(Protocol):
    """Parameters in one flat vector, with a way to draw their first values."""

    flat: Tensor

    def initialise(self, generator: torch.Generator) -> None: ...


N = TypeVar("N", bound=FlatNetwork)


class TrainedNetworks(Generic[N]):
    """The networks of one side: online, gradient, optional target copy, and Adam."""

    def __init__(self, make: Callable[[], N], lr: float, generator: torch.Generator, *, target: bool = True) -> None:
        self.online, self.gradient = make(), make()
        self.online.initialise(generator)
        self.target = make() if target else self.online
        self.target.flat.copy_(self.online.flat)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, lr)
        self._buffers: Any = None
        """Everything whose size depends on the batch."""

    def update_target(self, tau: float) -> None:
        losses.polyak_(self.target.flat, self.online.flat, tau)

    def rejected(self) -> int:
        """Steps that were not applied (reads the device)."""
        return self.adam.rejected

    def drop_buffers(self) -> None:
        self._buffers = None

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        own = {"online": self.online.flat} | ({} if self.target is self.online else {"target": self.target.flat})
        return own | {f"adam.{name}": tensor for name, tensor in self.adam.tensors().items()}


class ActorNetworks(TrainedNetworks[Parameters]):
    """The policy of one algorithm."""

    def metrics(self, mean_action_value: float) -> dict[str, float]:
        """actor_loss and actor_grad_norm of the latest step, given mean Q of its actions (reads the device)."""
        return {"actor_loss": -mean_action_value, "actor_grad_norm": self.adam.gradient_norm}


class CriticNetworks(TrainedNetworks[N]):
    """The action values of one algorithm."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """critic_loss, q_mean and critic_grad_norm of the latest step (reads the device)."""

    def mean_action_value(self) -> float:
        """Mean Q of the latest fresh actions, NaN if there are none (reads the device)."""
        return math.nan


class _Group:
    """Networks that are evaluated together: the whole stack, or one critic."""

    def __init__(
        self, networks: slice, obs_dim: int, online: Parameters, target: Parameters, gradient: Parameters
    ) -> None:
        self.networks, self.online, self.target, self.gradient = networks, online, target, gradient
        self.stack, self.action_weights = online.stack, online.weights[0][:, obs_dim:]


class _Chunk:
    """Views of the buffers for some rows of one group, made once: at small sizes each costs as much as an addition."""

    def __init__(self, group: _Group, buffers: _Buffers, scratch: Tape, rows: slice) -> None:
        own = group.networks
        self.rows, self.is_first = rows, rows.start == 0
        self.tape = scratch.under(buffers.out[own, :, rows], buffers.grad_out[own, :, rows])
        self.all_q, self.all_grad = self.tape.out[:, 0], self.tape.grad_out[:, 0]
        self.x = buffers.x[rows].expand(group.stack, -1, -1)
        self.td_error, self.action_gradients = buffers.td_error[own, rows], buffers.action_gradients[own, :, rows]


class _Buffers:
    """Everything whose size depends on the batch."""

    def __init__(self, parameters: Parameters, rows: int, obs_dim: int, action_dim: int) -> None:
        like, stack = parameters.flat, parameters.stack
        self.out, self.grad_out = like.new_zeros(stack, 1, rows), like.new_zeros(stack, 1, rows)
        self.td_error = like.new_zeros(stack, rows)
        self.target = like.new_zeros(rows)
        self.q_action = like.new_full((rows,), math.nan)
        self.action_gradients = like.new_zeros(stack, action_dim, rows)
        self.gradients: list[Tensor] = list(self.action_gradients)
        self.is_first = torch.zeros(rows, dtype=torch.bool, device=like.device)
        self.least = torch.zeros_like(self.gradients[0])
        self.x = like.new_zeros(rows, obs_dim + action_dim)
        self.x_obs, self.x_action_t = self.x[:, :obs_dim], self.x[:, obs_dim:].t()
        self.rows = rows
        self.per_row = like.new_full((), 1.0 / rows)
        self.q = [self.out[index, 0] for index in range(stack)]
        self.groups: list[tuple[_Group, list[_Chunk]]] = []
        self.first: list[list[_Chunk]] = []
        """Chunks of the first critic alone; with a pair of threads half of the rows for each."""


class Critics(CriticNetworks[Parameters]):
    """S networks Q(s, a) as one stacked network, or one in each thread of a pair.

    On a CPU, batches of more than ``CHUNK_ROWS`` rows go through one critic after the other, in chunks of rows whose
    gradients are summed.
    """

    _buffers: _Buffers | None

    def __init__(
        self, obs_dim: int, action_dim: int, hidden_sizes: tuple[int, ...], stack: int, lr: float,
        generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32,
        pair: ThreadPair | None = None,
    ) -> None:
        sizes = (obs_dim + action_dim, *hidden_sizes, 1)
        super().__init__(lambda: new_parameters(sizes, stack, device, dtype), lr, generator)
        self._obs_dim, self._action_dim = obs_dim, action_dim
        self._pair = pair
        networks = (self.online, self.target, self.gradient)
        self._whole = _Group(slice(0, stack), obs_dim, *networks)
        self._each_critic = [
            _Group(slice(index, index + 1), obs_dim, *(network.one(index) for network in networks))
            for index in range(stack)
        ]

    def _each(self, work: Callable[[_Group, list[_Chunk]], object], buffers: _Buffers) -> None:
        """Runs ``work`` for every group, with a pair of threads for two groups at once."""
        if self._pair is None or len(buffers.groups) == 1:
            for group, chunks in buffers.groups:
                work(group, chunks)
            return
        here, there = buffers.groups
        self._pair.both(lambda: work(*here), lambda: work(*there))

    def next_value(self, next_obs: Tensor, next_action: Tensor) -> Tensor:
        """Minimum [B] of the target networks' values at actions [A, B] (clipped double Q, arXiv 1802.09477, eq. 10)."""
        buffers = self._sized(next_obs.shape[0])
        buffers.x_obs.copy_(next_obs)
        buffers.x_action_t.copy_(next_action)

        def evaluate(group: _Group, chunks: list[_Chunk]) -> None:
            for chunk in chunks:
                mlp_forward(group.target, chunk.x, chunk.tape)

        self._each(evaluate, buffers)
        return buffers.q[0].clone() if self.online.stack == 1 else torch.minimum(*buffers.q)

    def step(self, obs_action: Tensor, target: Tensor) -> None:
        """One gradient step on ``sum over critics of mean (Q - target)^2 / 2``, the target [B]."""
        buffers = self._sized(obs_action.shape[0])
        buffers.target = target

        def differentiate(group: _Group, chunks: list[_Chunk]) -> None:
            for chunk in chunks:
                x = obs_action[chunk.rows].expand(group.stack, -1, -1)
                mlp_forward(group.online, x, chunk.tape)
                torch.sub(chunk.all_q, target[chunk.rows], out=chunk.td_error)
                torch.mul(chunk.td_error, buffers.per_row, out=chunk.all_grad)
                mlp_backward(group.online, chunk.tape, x.transpose(1, 2), group.gradient, add=not chunk.is_first)

        self._each(differentiate, buffers)
        self.adam.step()

    def action_gradient(self, obs: Tensor, action: Tensor, *, least: bool) -> Tensor:
        """dQ/da [A, B] of the critics' minimum or the first critic, in a buffer that the next call overwrites."""
        buffers = self._sized(obs.shape[0])
        buffers.x_obs.copy_(obs)
        buffers.x_action_t.copy_(action)
        if not least or self.online.stack == 1:
            return self._first_gradient(buffers)
        self._each(self._descend, buffers)
        first, second = buffers.q
        torch.minimum(first, second, out=buffers.q_action)
        # Only the lesser critic counts in each row, in a tie the first.
        torch.le(first, second, out=buffers.is_first)
        return torch.where(buffers.is_first, buffers.gradients[0], buffers.gradients[1], out=buffers.least)

    def _first_gradient(self, buffers: _Buffers) -> Tensor:
        first, shares = self._each_critic[0], buffers.first
        if self._pair is None:
            self._descend(first, shares[0])
        else:
            self._pair.both(lambda: self._descend(first, shares[0]), lambda: self._descend(first, shares[1]))
        buffers.q_action.copy_(buffers.q[0])
        return buffers.gradients[0]

    def _descend(self, group: _Group, chunks: list[_Chunk]) -> None:
        """Q and dQ/da of each network of the group, without a sum over rows."""
        for chunk in chunks:
            mlp_forward(group.online, chunk.x, chunk.tape)
            mlp_gradients(group.online, chunk.tape)
            torch.bmm(group.action_weights, chunk.tape.grads_t[0], out=chunk.action_gradients)

    def metrics(self) -> dict[str, float]:
        if self._buffers is None:
            return {}
        error = self._buffers.td_error
        return {
            "critic_loss": error.square().mean().item(),
            "q_mean": (error.mean() + self._buffers.target.mean()).item(),
            "critic_grad_norm": self.adam.gradient_norm,
        }

    def mean_action_value(self) -> float:
        return math.nan if self._buffers is None else self._buffers.q_action.mean().item()

    def _sized(self, rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = self._allocated(rows)
        return self._buffers

    def _allocated(self, rows: int) -> _Buffers:
        buffers = _Buffers(self.online, rows, self._obs_dim, self._action_dim)
        step = chunk_rows(self.online.flat, rows)
        groups = [self._whole] if self._pair is None and rows <= step else self._each_critic
        threads = 1 if self._pair is None else 2
        scratch = [Tape.allocate(groups[0].online, min(step, rows)) for _ in range(threads)]

        def cut(group: _Group, thread: int, begin: int, end: int) -> list[_Chunk]:
            return [_Chunk(group, buffers, scratch[thread], slice(start, min(start + step, end)))
                    for start in range(begin, end, step)]

        buffers.groups = [(group, cut(group, index % threads, 0, rows)) for index, group in enumerate(groups)]
        bounds = pairwise(rows * index // threads for index in range(threads + 1))
        buffers.first = [cut(self._each_critic[0], thread, *ends) for thread, ends in enumerate(bounds)]
        return buffers


class _DiscreteBuffers:
    def __init__(self, parameters: Parameters, rows: int, actions: int) -> None:
        like, stack = parameters.flat, parameters.stack
        self.rows = rows
        self.tape = Tape.allocate(parameters, rows)
        self.per_row = like.new_full((), 1.0 / rows)
        self.td_error = like.new_zeros(stack, rows)
        self.grad_q = like.new_zeros(stack, actions, rows)
        self.q = like.new_zeros(stack, actions, rows)


class ActionValues(CriticNetworks[N]):
    """Networks Q(s, .) [K] that end in a perceptron, optionally with duelling streams."""

    def __init__(
        self, inputs: int, num_actions: int, hidden_sizes: tuple[int, ...], lr: float, generator: torch.Generator,
        make: Callable[[tuple[int, ...]], N], mlp: Callable[[N], Parameters], *, duelling: bool,
    ) -> None:
        sizes = (inputs, *hidden_sizes, num_actions)
        if duelling:
            sizes = (inputs, *hidden_sizes[:-1], 2 * hidden_sizes[-1], 1 + num_actions)
        super().__init__(lambda: make(sizes), lr, generator)
        self._mlp, self._num_actions = mlp(self.online), num_actions
        self._streams = Streams(self._mlp, num_actions) if duelling else None
        self.target.flat.copy_(self.online.flat)
        self.hidden_sizes = sizes[1:-1]
        self._td_error: Tensor | None = None
        self._chosen: Tensor | None = None

    def policy_head(self) -> tuple[Tensor, Tensor]:
        """Weight [K, H] and bias [K] that give the first network's action values."""
        weight, bias = self._mlp.head_weight[0], self._mlp.head_bias[0, :, 0]
        return (weight, bias) if self._streams is None else (self._streams.joint @ weight, self._streams.joint @ bias)

    def metrics(self) -> dict[str, float]:
        if self._td_error is None or self._chosen is None:
            return {}
        return {
            "critic_loss": self._td_error.square().mean().item(),
            "q_mean": self._chosen.mean().item(),
            "critic_grad_norm": self.adam.gradient_norm,
        }

    def drop_buffers(self) -> None:
        self._buffers = self._td_error = self._chosen = None


class DiscreteCritics(ActionValues[Parameters]):
    """S networks over vectors."""

    _buffers: _DiscreteBuffers | None

    def __init__(
        self, obs_dim: int, num_actions: int, hidden_sizes: tuple[int, ...], stack: int, lr: float,
        generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32, *, duelling: bool = False,
    ) -> None:
        super().__init__(
            obs_dim, num_actions, hidden_sizes, lr, generator,
            lambda sizes: new_parameters(sizes, stack, device, dtype), lambda network: network, duelling=duelling,
        )
        self.action_value = self.online.flat.new_full((1,), math.nan)
        """[B], expected value of the latest fresh actions; set by algorithms that move an actor."""

    def values(self, obs: Tensor, *, target: bool = False) -> Tensor:
        """All actions' values [S, K, B] at obs [B, O], in a buffer that the next call overwrites."""
        buffers = self._sized(obs.shape[0])
        parameters = self.target if target else self.online
        out = mlp_forward(parameters, obs.expand(parameters.stack, -1, -1), buffers.tape)
        return out if self._streams is None else self._streams.join(out, buffers.q)

    def step(
        self, obs: Tensor, action: Tensor, target: Tensor, loss_gradient: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """One gradient step on ``sum over networks of mean loss(Q(s, a) - target)``.

        ``action`` [B] holds indices; ``loss_gradient`` is the derivative of the loss by its error, None of error^2 / 2.
        """
        buffers, stack = self._sized(obs.shape[0]), self.online.stack
        q = self.values(obs)
        index = action.expand(stack, 1, -1)
        self._chosen, self._td_error = torch.gather(q, 1, index)[:, 0], buffers.td_error
        torch.sub(self._chosen, target, out=buffers.td_error)
        derivative = buffers.td_error if loss_gradient is None else loss_gradient(buffers.td_error)
        grad_q = buffers.tape.grad_out if self._streams is None else buffers.grad_q
        grad_q.zero_().scatter_(1, index, (derivative * buffers.per_row).unsqueeze(1))
        if self._streams is not None:
            self._streams.split(grad_q, buffers.tape.grad_out)
        x_t = obs.t().expand(stack, -1, -1)
        mlp_backward(self.online, buffers.tape, x_t, self.gradient)
        if self._streams is not None:
            self.gradient.head_weight.mul_(self._streams.mask)
        self.adam.step()

    def least(self, obs: Tensor, *, target: bool = False) -> Tensor:
        """Each action's minimum over the networks [K, B] at obs [B, O], a new tensor."""
        return self.values(obs, target=target).amin(0)

    def mean_action_value(self) -> float:
        return self.action_value.mean().item()

    def _sized(self, rows: int) -> _DiscreteBuffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _DiscreteBuffers(self.online, rows, self._num_actions)
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
        # Each stream reads half of the layer, so its initial range is that for half the fan-in.
        parameters.head_weight.mul_(self.mask).mul_(math.sqrt(2.0))
        parameters.head_bias.mul_(math.sqrt(2.0))

    def join(self, out: Tensor, q: Tensor) -> Tensor:
        """``Q = V + A - mean A``: [S, 1 + K, B] into ``q`` [S, K, B]."""
        return torch.matmul(self.joint, out, out=q)

    def split(self, grad_q: Tensor, grad_out: Tensor) -> None:
        """Gradient to the outputs [S, 1 + K, B] from that to the values [S, K, B]."""
        torch.matmul(self._joint_t, grad_q, out=grad_out)
