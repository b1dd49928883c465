"""Policy and value over a recurrent cell that both share: torch's LSTM or GRU, then perceptrons.

Gradients are computed over sequences of L steps. The end of an episode cuts a sequence into parts, and the next part
starts with a state of zeros. All parts go through the cell as one packed batch, without padding.

The state at a rollout's first step is stored with it; one pass over the rollout without gradient gives those at the
start of its sequences, and the values. With a *burn-in* of b steps, each update recomputes the state from the one b
steps earlier, with its own parameters (R2D2: Kapturowski et al. 2019); only a rollout's first sequence has no burn-in.

With replay (``RecurrentEncoder``), the critics' loss trains the cell through sequences, as in R2D2: a sequence starts
with its sampler's state, which the burn-in refreshes. Actor and critics read the cell's output at each step, so for
them a batch of sequences is a batch of transitions. No gradient of the actor flows back. Target networks read a target
cell, which runs over the same steps. Departures from R2D2: rewards are scaled, instead of a transform of values; the
cell's gradient is clipped separately from the critics'.

The LSTM's gradient is autograd's. The GRU's is derived here, since autograd would take nine times as long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from spreeze.algorithms.networks.fused_mlp import ActorCriticMlp, ActorCriticSpec, host_copies, orthogonal_
from spreeze.algorithms.optimizers import Encoder
from spreeze.config.algorithm_bases import RecurrentReplayConfig
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.inference.recurrence import CELLS
from spreeze.types import SequenceBatch, TransitionBatch

_GATES = {"lstm": 4, "gru": 3}
Gradients = Callable[[Tensor], Sequence[Tensor]]  # maps the gradient [R, H] of a cell's outputs to those of its weights
_MAX_WEIGHT = 0.9  # weight of the largest error in a sequence's priority; the rest is for the mean (R2D2, section 2.3)
_FORGET = 1  # index of the LSTM's forget gate, whose bias is initialized to 1 (Jozefowicz et al. 2015).


class Sequences(NamedTuple):
    """B sequences of L steps: the starts of episodes in them, and the states before them."""

    begins: np.ndarray  # [B, L], true where an episode begins; never at a rollout's first step, which has its state
    state: Tensor  # [B, S] before the first step, or b steps earlier if there is a burn-in
    burn_in_obs: Tensor | None = None  # [B, b, O]: observations of the burn-in, arbitrary where there is none
    burn_in_begins: np.ndarray | None = None  # [B, b]
    has_burn_in: np.ndarray | None = None  # [B], true where there is one

    def of(self, index: np.ndarray) -> Sequences:
        """The sequences with the indices ``index`` [b]."""
        rows = torch.from_numpy(index).to(self.state.device)
        return self._map(lambda part: part[index] if isinstance(part, np.ndarray) else part.index_select(0, rows))

    def split(self, count: int) -> list[Sequences]:
        """Equal parts, as views."""
        size = len(self.begins) // count
        return [self._map(itemgetter(slice(at * size, (at + 1) * size))) for at in range(count)]

    def repeated(self, count: int) -> Sequences:
        """Copies of all sequences, ``count`` times."""
        return self._map(lambda part: (np if isinstance(part, np.ndarray) else torch).concatenate([part] * count))

    def _map(self, change: Callable[[Any], Any]) -> Sequences:
        changed: list[Any] = [None if part is None else change(part) for part in self]
        return Sequences(*changed)


class Unrolled(NamedTuple):
    """One pass over a rollout of T steps of N environments, in K = T / L sequences each."""

    value: Tensor  # [K N L], in the order of the rows of samples
    next_values: np.ndarray  # [T, N]: values of the states after each step; arbitrary where the MDP ended
    sequences: Sequences


class Packing:
    """Order of the rows of B sequences in a packed batch: all first steps, then all second ones, and so on.

    ``after``: indices of rows that are followed by an extra row, the observation at which an episode was cut off.
    """

    def __init__(self, begins: np.ndarray, after: np.ndarray | None = None) -> None:
        length = begins.shape[1]
        starts = begins.copy()
        starts[:, 0] = True
        part = np.cumsum(starts.reshape(-1)) - 1
        first = np.flatnonzero(starts)
        offset = np.arange(starts.size) - first[part]
        last = part[length - 1 :: length]
        if after is not None:
            part, offset = np.concatenate((part, part[after])), np.concatenate((offset, offset[after] + 1))
        by_length = np.argsort(-np.bincount(part), kind="stable")
        rank = np.empty_like(by_length)
        rank[by_length] = np.arange(len(by_length))
        self.order = torch.from_numpy(np.lexsort((rank[part], offset)))
        self.inverse = torch.argsort(self.order)
        self.batch_sizes = torch.from_numpy(np.bincount(offset))
        first = first[by_length]
        self.sequence = torch.from_numpy(first // length)
        """Index of the sequence of each part, in the order of the batch."""
        self.continues = torch.from_numpy((first % length == 0) & ~begins.reshape(-1)[first])
        """True for a part that starts with its sequence's state."""
        self.last = torch.from_numpy(rank[last])
        """Index of the last part of each sequence [B]."""


class RecurrentCell:
    """Torch's LSTM or GRU as views of a flat vector; sequences go through it as one packed batch."""

    def __init__(self, inputs: int, kind: str, size: int, flat: Tensor) -> None:
        """``kind`` is one of ``CELLS``, with ``size`` units; ``flat`` has ``count`` numbers."""
        gates = _GATES[kind] * size
        shapes = ((gates, inputs), (gates, size), (gates,), (gates,))
        self.flat, self.kind, self.size = flat, kind, size
        parts = torch.split(self.flat, [math.prod(shape) for shape in shapes])
        self.weights = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        """The weights by input and by state, and the biases of both."""

    @staticmethod
    def count(inputs: int, kind: str, size: int) -> int:
        """Number of parameters."""
        return _GATES[kind] * size * (inputs + size + 2)

    def initialize(self, generator: torch.Generator) -> None:
        """Draws orthogonal weights for each gate."""
        by_input, by_state, bias, _ = self.weights
        for weight in (by_input, by_state):
            for gate in weight.chunk(_GATES[self.kind]):
                orthogonal_(gate, 1.0, generator)
        if self.kind == "lstm":
            bias[_FORGET * self.size : (_FORGET + 1) * self.size].fill_(1.0)

    def _packed(self, x: Tensor, packing: Packing, state: Tensor) -> tuple[Tensor, Tensor]:
        """The rows x [R, O] in packed order, and the initial states of the parts of sequences."""
        device = x.device
        continues = packing.continues.to(device, x.dtype).unsqueeze(1)
        initial = state.index_select(0, packing.sequence.to(device)) * continues
        return x.index_select(0, packing.order.to(device)), initial

    def _outputs(self, x: Tensor, initial: Tensor, sizes: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs [R, H] of packed rows, and the state after each part."""
        states = [part.unsqueeze(0).contiguous() for part in initial.chunk(CELLS[self.kind], 1)]
        function: Any = torch.lstm if self.kind == "lstm" else torch.gru
        initial_states = states if self.kind == "lstm" else states[0]
        out, *after = function(x, sizes, initial_states, weights, True, 1, 0.0, True, False)
        return out, torch.cat([part[0] for part in after], 1)

    def run(self, x: Tensor, packing: Packing, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [R, H] of rows x [R, O], and the state [B, S] after each sequence; without gradient."""
        packed, initial = self._packed(x, packing, state)
        out, after = self._outputs(packed, initial, packing.batch_sizes, self.weights)
        device = x.device
        return out.index_select(0, packing.inverse.to(device)), after.index_select(0, packing.last.to(device))

    def record(self, x: Tensor, packing: Packing, state: Tensor) -> tuple[Tensor, Gradients]:
        """Outputs [R, H] like ``run``, and a function from their gradients to those of the weights."""
        with torch.no_grad():
            x, initial = self._packed(x, packing, state)
        if self.kind == "lstm":
            out, backward = self._lstm(x, initial, packing.batch_sizes)
        else:
            with torch.no_grad():
                out, _ = self._outputs(x, initial, packing.batch_sizes, self.weights)
            backward = partial(gru_gradients, x, initial, out, packing.batch_sizes.tolist(), self.weights)
        order, inverse = packing.order.to(out.device), packing.inverse.to(out.device)
        return out.detach().index_select(0, inverse), lambda grad: backward(grad.index_select(0, order))

    def _lstm(self, x: Tensor, initial: Tensor, sizes: Tensor) -> tuple[Tensor, Gradients]:
        """Outputs of packed rows, and a function that computes the weights' gradients by autograd."""
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [weight.detach().clone().requires_grad_() for weight in self.weights]
            out, _ = self._outputs(x.clone(), initial.clone(), sizes, leaves)

        def backward(grad: Tensor) -> Sequence[Tensor]:
            with torch.inference_mode(False), torch.enable_grad():
                return torch.autograd.grad(out, leaves, grad.clone())

        return out, backward

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, as ``inference.recurrence`` reads them."""
        by_input, by_state, input_bias, state_bias = self.weights
        cell = {"cell_x": by_input.t(), "cell_h": by_state.t(), "cell_x_bias": input_bias, "cell_h_bias": state_bias}
        return host_copies({name: part.contiguous() for name, part in cell.items()})


class RecurrentActorCritic(ActorCriticMlp):
    """A cell, and policy and value over its output; members as in ``on_policy.MlpActorCritic``."""

    of_value: Tensor | None = None  # None: policy and value share the cell, so their gradient is clipped as a whole

    def __init__(self, obs_dim: int, kind: str, size: int, spec: ActorCriticSpec) -> None:
        super().__init__(size, spec, RecurrentCell.count(obs_dim, kind, size))
        self.meta |= {"recurrent": kind, "recurrent_size": size}
        self.cell, self._grad_cell = (
            RecurrentCell(obs_dim, kind, size, flat) for flat in (self._extra, self._extra_gradient)
        )
        self._features: Tensor | None = None
        """Outputs [M, H] of the cell in the latest forward pass."""
        self._gradients_of: Gradients | None = None
        """Maps the gradient [M, H] of these to those of the cell's weights."""
        self.cell.initialize(spec.generator)
        self._initialize(spec.generator)

    def _state_of(self, sequences: Sequences) -> Tensor:
        """The states [B, S] before the first steps, after the burn-in if there is one."""
        burn_in_obs, begins, has_burn_in = sequences.burn_in_obs, sequences.burn_in_begins, sequences.has_burn_in
        if burn_in_obs is None or begins is None or has_burn_in is None or not has_burn_in.any():
            return sequences.state
        index = torch.from_numpy(np.flatnonzero(has_burn_in)).to(burn_in_obs.device)
        x, packing = burn_in_obs.index_select(0, index), Packing(begins[has_burn_in])
        _, state = self.cell.run(x.flatten(0, 1), packing, sequences.state.index_select(0, index))
        return sequences.state.index_copy(0, index, state)

    def forward(self, obs: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Outputs [K, M] and values [M] at the concatenated rows of sequences; stores all that ``backward`` needs."""
        state = self._state_of(sequences)
        self._features, self._gradients_of = self.cell.record(obs, Packing(sequences.begins), state)
        return self._forward(self._features)

    def backward(self, grad_out: Tensor, grad_value: Tensor) -> None:
        features, gradients_of = self._features, self._gradients_of
        assert features is not None
        assert gradients_of is not None
        first = self._backward(features, grad_out, grad_value)
        gradients = gradients_of(torch.bmm(first, self.networks.weights_t[0]).sum(0))
        self._features = self._gradients_of = None
        for weight, gradient in zip(self._grad_cell.weights, gradients, strict=True):
            weight.copy_(gradient)

    def unroll(
        self,
        obs: Tensor,
        ended: np.ndarray,
        needs_next: np.ndarray,
        next_obs: Tensor,
        state: Tensor,
        *,
        length: int,
        burn_in: int,
    ) -> Unrolled:
        """One pass without gradient over a rollout, from its first state on.

        Args:
            obs: [K N L, O], ordered by sequence: the first ones of all environments, then the second ones.
            ended: [T, N], true where episodes ended.
            needs_next: [T, N], true where the value of the next observation is needed: at truncated steps and the last.
            next_obs: [k, O], those observations, by step and environment.
            state: [N, S] before the first step.
            length: L.
            burn_in: steps before each sequence, at most L.
        """
        (steps, envs), burn_in = ended.shape, min(burn_in, length)
        by_env = obs.view(steps // length, envs, length, -1).transpose(0, 1).reshape(envs, steps, -1)
        begins = np.zeros((envs, steps), bool)
        begins[:, 1:] = ended[:-1].T
        starts = sorted({step for first in range(0, steps, length) for step in (first, max(0, first - burn_in))})
        states, values, cut_off, taken = {0: state}, [], [], 0
        for begin, end in zip(starts, [*starts[1:], steps], strict=True):
            at, env = np.nonzero(needs_next[begin:end])
            x = by_env[:, begin:end].reshape(envs * (end - begin), -1)
            rows, extra = len(x), next_obs[taken : taken + len(at)]
            taken += len(at)
            packing = Packing(begins[:, begin:end], env * (end - begin) + at)
            features, states[end] = self.cell.run(torch.cat((x, extra)), packing, states[begin])
            value = self.values(features)
            values.append(value[:rows].view(envs, end - begin))
            cut_off.append(value[rows:])
        value = torch.cat(values, 1)
        next_values = value.t().roll(-1, 0).cpu().numpy()
        next_values[needs_next] = torch.cat(cut_off).cpu().numpy()
        shape = (envs, steps // length, length)
        return Unrolled(
            value.view(shape).transpose(0, 1).reshape(-1),
            next_values,
            self._sequences(by_env, begins, states, length, burn_in),
        )

    def _sequences(
        self, by_env: Tensor, begins: np.ndarray, states: dict[int, Tensor], length: int, burn_in: int
    ) -> Sequences:
        """The sequences of a rollout, from observations [N, T, O], episode starts [N, T] and states by step."""
        envs, steps = begins.shape
        firsts = range(0, steps, length)
        cut = begins.reshape(envs, -1, length).swapaxes(0, 1).reshape(-1, length)
        state = torch.cat([states[max(0, first - burn_in)] for first in firsts])
        if not burn_in or len(firsts) == 1:
            return Sequences(cut, torch.cat([states[first] for first in firsts]))
        slices = [slice(first - burn_in, first) if first else slice(0, burn_in) for first in firsts]
        return Sequences(
            cut,
            state,
            torch.cat([by_env[:, part] for part in slices]),
            np.concatenate([begins[:, part] for part in slices]),
            np.repeat(np.array(firsts) > 0, envs),
        )

    def policy_arrays(self) -> dict[str, np.ndarray]:
        return self.cell.arrays() | super().policy_arrays()


def gru_gradients(
    x: Tensor, initial: Tensor, out: Tensor, sizes: list[int], weights: Sequence[Tensor], grad_out: Tensor
) -> list[Tensor]:
    """Gradients of the weights of a GRU, given those of its outputs.

    With the gates r, z, n, the recurrent part of n, q = W h + b, and h' = (1 - z) n + z h: the gradient of each gate's
    pre-activation is that of h' times a factor from the forward pass. So only the gradient from h' to h is computed
    step by step; the rest for all rows at once.

    Args:
        x: packed rows [R, O], ``sizes`` of them in each step.
        initial: [P, H], the state of each part before its first step.
        out: [R, H], the outputs.
        sizes: number of parts that have each step, not increasing.
        weights: torch's, for input and state, and their biases.
        grad_out: [R, H].
    """
    by_input, by_state, input_bias, state_bias = weights
    size, starts = out.shape[1], [0, *itertools.accumulate(sizes)]
    before = torch.cat([initial, *(out[start : start + rows] for start, rows in zip(starts, sizes[1:], strict=False))])
    from_x = torch.addmm(input_bias, x, by_input.t())
    from_h = torch.addmm(state_bias, before, by_state.t())
    r, z = torch.sigmoid(from_x[:, : 2 * size] + from_h[:, : 2 * size]).chunk(2, 1)
    q = from_h[:, 2 * size :]
    n = torch.tanh(from_x[:, 2 * size :] + r * q)
    of_new = (1.0 - z) * (1.0 - n * n)
    factors = torch.stack((of_new * q * r * (1.0 - r), (before - n) * z * (1.0 - z), of_new * r), 1)
    grad, of_sums, carried = grad_out.clone(), torch.empty_like(factors), None
    for start, end in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        of_step, sums = grad[start:end], of_sums[start:end]
        if carried is not None:
            of_step[: len(carried)] += carried
        torch.mul(factors[start:end], of_step.unsqueeze(1), out=sums)
        if start:
            carried = torch.addmm(of_step * z[start:end], sums.flatten(1), by_state)
    of_state = of_sums.flatten(1)
    of_input = torch.cat((of_state[:, : 2 * size], grad * of_new), 1)
    return [of_input.t() @ x, of_state.t() @ before, of_input.sum(0), of_state.sum(0)]


def n_step_sums(
    reward: Tensor, terminated: Tensor, valid: Tensor, discount: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Discounted sums of up to n rewards from each slot on, within its episode and its sequence; all are [B, T].

    Also their numbers of rewards, int64 (0 where the slot has no step), and 1.0 where the MDP ended.
    """
    length = reward.shape[1]
    total, ended = torch.zeros_like(reward), torch.zeros_like(reward)
    count = torch.zeros_like(reward, dtype=torch.int64)
    continues = torch.ones_like(reward)
    for age in range(min(steps, length)):
        live = continues[:, : length - age] * valid[:, age:]
        total[:, : length - age] += discount**age * live * reward[:, age:]
        ended[:, : length - age] += live * terminated[:, age:]
        count[:, : length - age] += live.long()
        continues = torch.zeros_like(reward)
        continues[:, : length - age] = live * (1.0 - terminated[:, age:])
    return total, count, ended


class RecurrentEncoder(Encoder):
    """A cell with its target; converts batches of sequences to batches of its outputs."""

    def __init__(
        self,
        obs_dim: int,
        config: RecurrentReplayConfig,
        n_step: int,
        seed: int,
        device: torch.device,
        *,
        lr: float,
        max_norm: float | None = None,
    ) -> None:
        kind, size = config.recurrent, config.recurrent_size
        self.size, self.meta = size, {"recurrent": kind, "recurrent_size": size}

        def make_cell() -> RecurrentCell:
            return RecurrentCell(
                obs_dim, kind, size, torch.zeros(RecurrentCell.count(obs_dim, kind, size), device=device)
            )

        super().__init__(make_cell, lr, torch.Generator().manual_seed(seed + 2), max_norm=max_norm)
        self._burn_in, self._n_step = config.burn_in, n_step
        self._recorded: Gradients | None = None
        self._valid = torch.zeros(0)

    def encode(self, batch: SequenceBatch, noise: torch.Generator) -> TransitionBatch:
        """The B T slots after the burn-in as transitions; stores the data for the gradient in ``step``."""
        first, count = self._burn_in, len(batch.obs)
        begins = batch.begins.cpu().numpy() > 0.0
        state = target_state = batch.state
        with torch.no_grad():
            if first:
                x, packing = batch.obs[:, :first].flatten(0, 1), Packing(begins[:, :first])
                _, state = self.online.run(x, packing, batch.state)
                _, target_state = self.target.run(x, packing, batch.state)
            x = batch.obs[:, first:].flatten(0, 1)
            packing = Packing(np.concatenate((begins[:, first:], np.zeros((count, 1), bool)), 1))
            of_target, _ = self.target.run(x, packing, target_state)
        features, self._recorded = self.online.record(x, packing, state)
        valid, action = batch.valid[:, first:], batch.action[:, first:].flatten(0, 1)
        total, steps, ended = n_step_sums(
            batch.reward[:, first:], batch.terminated[:, first:], valid, batch.discount, self._n_step
        )
        rows, length = torch.arange(count, device=x.device).unsqueeze(1), valid.shape[1]
        index = torch.arange(length, device=x.device) + rows * (length + 1)
        obs, next_index = features[index.flatten()], (index + steps).flatten()
        weight = valid * (valid.numel() / valid.sum().clamp(min=1.0))
        if batch.weight is not None:
            weight = weight * batch.weight.unsqueeze(1)
        self._valid = valid
        return TransitionBatch(
            obs=obs,
            action=action,
            obs_action=torch.cat((obs, action), 1),
            reward=total.flatten(),
            terminated=ended.flatten(),
            discount=(batch.discount ** steps.to(x.dtype)).flatten(),
            next_obs=features[next_index],
            weight=weight.flatten(),
            target_obs=of_target[next_index],
        )

    def step(self, grad_obs: Tensor) -> None:
        """One gradient step, given the derivative [B T, H] of the critics' loss with respect to the outputs."""
        assert self._recorded is not None
        grad = grad_obs.new_zeros(len(self._valid), self._valid.shape[1] + 1, self.size)
        grad[:, :-1] = grad_obs.view(*self._valid.shape, self.size)
        gradients, self._recorded = self._recorded(grad.flatten(0, 1)), None
        for weight, gradient in zip(self.gradient.weights, gradients, strict=True):
            weight.copy_(gradient)
        self.adam.step()

    def row_errors(self, errors: Tensor) -> Tensor:
        """Priorities [B] of sequences, from the errors [B T] of their steps."""
        errors = errors.view(self._valid.shape) * self._valid
        mean = errors.sum(1) / self._valid.sum(1).clamp(min=1.0)
        return _MAX_WEIGHT * errors.amax(1) + (1.0 - _MAX_WEIGHT) * mean
