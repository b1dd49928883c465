"""Policies in NumPy, for samplers, evaluator and visualizer, which never load torch.

For the few observations of a sampler, a forward pass in NumPy is faster than in torch. A row's last bits depend on the
number of rows in a matmul, so ``sample`` always multiplies ``TILE`` rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from spreeze.errors import UsageError, WeightsError
from spreeze.inference.convolution import Trunk, array_of
from spreeze.inference.heads import FORBIDDEN, SamplingHead, head_of
from spreeze.inference.normalizer import obs_scale, scaled
from spreeze.inference.recurrence import Cell
from spreeze.inference.user_modules import CustomNetwork
from spreeze.types import Arrays

TILE = 8  # rows of one matmul in ``sample``: at 2x256, 16 rows take 2.6 times as long, 4 rows three quarters

ACTIVATIONS = ("relu", "tanh", "silu", "gelu", "elu")
"""Activation functions; ``gelu`` is the tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
NORM_EPS = 1e-5  # added to the variance in layer normalization, as by default in torch.nn

State = tuple[np.ndarray, ...]
"""Arrays [N, ...] that a policy keeps between the steps of N episodes; empty before their first step, and always for a
policy without memory. A recurrent policy has one, [N, S]."""
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RecursionError)
"""Errors that malformed metadata and shapes can cause."""
_EXPLORING = "explore."  # prefix of the names of the newest weights in a file with an averaged policy

# As float32 arrays, since a ufunc takes a microsecond to find the type of a Python number.
_ZERO, _HALF = np.array(0.0, np.float32), np.array(0.5, np.float32)
_GELU, _CUBE = np.array(math.sqrt(2.0 / math.pi), np.float32), np.array(0.044715, np.float32)
_NORM_EPS = np.array(NORM_EPS, np.float32)


def with_exploring(arrays: Arrays, exploring: Arrays) -> Arrays:
    """The weights of a policy together with those of exploration, for one file."""
    return arrays | {_EXPLORING + name: array for name, array in exploring.items()}


def exploring_arrays(arrays: Arrays) -> Arrays:
    """The weights of exploration: the policy's, except for those that the file has twice."""
    return arrays | {
        name.removeprefix(_EXPLORING): array for name, array in arrays.items() if name.startswith(_EXPLORING)
    }


def begin_episode(state: State, row: int) -> None:
    """Sets a row of a policy's state to zeros, its value at the start of an episode."""
    for part in state:
        part[row] = 0.0


class Policy:
    """Computes actions from an actor's weights; an instance serves one thread at a time and refuses a second one."""

    def __init__(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """As ``from_weights``, but malformed metadata may also raise other errors."""
        self._head, activation = head_of(meta, arrays), meta.get("activation", ACTIVATIONS[0])
        if activation not in ACTIVATIONS:
            raise WeightsError(f"weights need the activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        self._activate, self._layer_norm = _ACTIVATE[activation], bool(meta.get("layer_norm"))
        self._mask_dim = self._head.options if meta.get("action_mask") else 0
        self._trunk: Trunk | TeamRows | None = None
        if "cnn" in meta or "team_actions" in meta:
            self._trunk = Trunk(arrays, meta) if "cnn" in meta else TeamRows(arrays, meta)
        self.obs_dim = self._trunk.features if self._trunk else int(meta["obs_dim"])
        self._obs_scale = obs_scale(arrays, self.obs_dim) if self._trunk is None else None
        self._cell = Cell(arrays, meta) if "recurrent" in meta else None
        self._atoms = np.ascontiguousarray(arrays["atoms"], np.float32) if "atoms" in arrays else None
        """[Z]: returns, of which the network then has a logit each for every action."""
        self._custom = CustomNetwork(arrays, meta, self._head.outputs) if "network" in meta else None
        if self._custom is not None:  # its layers only tell its numbers of inputs and outputs
            outputs = self._head.outputs
            self._layers = [(np.zeros((self.obs_dim, outputs), np.float32), np.zeros(outputs, np.float32))]
        else:
            self._layers = []
            names = [(f"w{index}", f"b{index}") for index in range(len(meta.get("hidden_sizes", ())))]
            for weight_name, bias_name in [*names, ("head_w", "head_b")]:
                weight = array_of(arrays, weight_name, (-1, -1))
                self._layers.append((weight, array_of(arrays, bias_name, weight.shape[1:])))
            self._check_sizes()
        self._noise = NoisyLayers(arrays, meta, self._layers) if "noisy" in meta else None
        self._rows = -1
        self._buffers: list[np.ndarray] = []
        self._busy = False  # a lock is too slow
        self._sampling_head = self._head if isinstance(self._head, SamplingHead) else None
        if self._sampling_head is not None:
            row_by_row = self._custom is not None
            noise_dim = self._sampling_head.noise_dim
            self._tile = _Tile(self.obs_dim, self._layers, noise_dim, self._cell, row_by_row=row_by_row)

    def _check_sizes(self) -> None:
        inputs = self.obs_dim
        if self._cell is not None and self._cell.inputs != inputs:
            raise WeightsError(
                f"the weights are inconsistent: the recurrent cell has {self._cell.inputs} inputs, expected {inputs}"
            )
        fan_ins = [inputs if self._cell is None else self._cell.size, *(weight.shape[1] for weight, _ in self._layers)]
        for (weight, _), fan_in in zip(self._layers, fan_ins, strict=False):
            if weight.shape[0] != fan_in:
                raise WeightsError(
                    f"the weights are inconsistent: a layer has {weight.shape[0]} inputs, expected {fan_in}"
                )
        outputs = self._head.outputs * (1 if self._atoms is None else len(self._atoms))
        if fan_ins[-1] != outputs:
            raise WeightsError(f"weights give {fan_ins[-1]} outputs; {outputs} are needed")

    @classmethod
    def from_weights(cls, arrays: Arrays, meta: dict[str, Any]) -> Policy:
        """Builds the policy that ``policy_arrays`` and ``policy_meta`` of an algorithm describe.

        ``obs_mean`` and ``obs_std`` [O] among the arrays enable observation normalization; ``activation`` is one of
        ``ACTIVATIONS`` (default ReLU); ``layer_norm`` normalizes the sums of each hidden layer before their bias is
        added. With ``action_mask`` the last K values of an observation are its mask (``types.EnvSpec``): forbidden
        actions are never chosen. A WeightsError if a layer is missing, shapes do not fit, or the metadata describes no
        policy.
        """
        try:
            return cls(arrays, meta)
        except _MALFORMED as error:
            raise WeightsError(
                f"the weights describe no valid policy: {type(error).__name__}: {str(error)[:200]}"
            ) from None

    def act(self, obs: np.ndarray, state: State, rng: np.random.Generator | None = None) -> tuple[np.ndarray, State]:
        """Actions [N, A] float32, a new array, and the state for the next step.

        Args:
            obs: [N, O] float32, or images uint8 [N, k, *frame].
            state: the state that the previous step of these episodes returned; empty at their first.
            rng: for exploring actions: sampled, with noise, or sometimes random; None: greedy ones.
        """
        if self._busy:
            raise _shared()
        self._busy = True
        try:
            out, state = self._forward(obs, state, rng)
            return self._head.greedy(out) if rng is None else self._head.explore(out, rng), state
        finally:
            self._busy = False

    def outputs(self, obs: np.ndarray) -> np.ndarray:
        """Outputs [N, K] of a network without memory at obs [N, O]: logits, means or values; a new array."""
        return self._forward(obs, ())[0].copy()

    @property
    def state_dim(self) -> int:
        """S: values of the state of one episode; 0 without memory."""
        return 0 if self._cell is None else self._cell.state_dim

    def _state(self, state: State, rows: int) -> np.ndarray:
        """The cell's state [N, S]; zeros for an empty ``state``, as at the start of episodes."""
        if not state:
            return np.zeros((rows, self.state_dim), np.float32)
        shape = (rows, self.state_dim)
        if len(state) != 1 or state[0].shape != shape:
            raise UsageError(
                f"the policy's state has the shapes {[part.shape for part in state]}; expected one array {shape}, as "
                "act returned it, or an empty one where the episodes begin"
            )
        return state[0]

    @property
    def options(self) -> int:
        """K: options of all choices; for policies without choices, outputs of the last layer."""
        return self._head.options

    def sample(self, obs: np.ndarray, noise: np.ndarray, state: State = ()) -> tuple[np.ndarray, np.ndarray, State]:
        """Exploring actions from given noise [N, Z]; each row's result depends bit for bit on that row alone.

        Returns new arrays: actions [N, A] float32, continuous ones not clipped to [-1, 1], their log-probabilities [N]
        float32 in nat, and the state for the next step, as from ``act``. A WeightsError if the policy generates its own
        noise.
        """
        rows = len(obs)
        if self._busy:
            raise _shared()
        self._busy = True
        try:
            if self._cell is not None:
                state = (self._state(state, rows),)
            if rows <= TILE:
                return self._sample_tile(obs, noise, state)
            tiles = []
            for begin in range(0, rows, TILE):
                part = slice(begin, begin + TILE)
                tiles.append(self._sample_tile(obs[part], noise[part], tuple(array[part] for array in state)))
        finally:
            self._busy = False
        action, log_prob, states = zip(*tiles, strict=True)
        joined = tuple(np.concatenate(parts) for parts in zip(*states, strict=True))
        return np.concatenate(action), np.concatenate(log_prob), joined

    def _sample_tile(self, obs: np.ndarray, noise: np.ndarray, state: State) -> tuple[np.ndarray, np.ndarray, State]:
        if self._sampling_head is None:
            raise WeightsError(
                f"a policy of kind {type(self._head).__name__} generates its own noise; only on-policy "
                "algorithms collect with noise from outside"
            )
        tile, rows = self._tile, len(obs)
        inputs = obs if self._trunk is None else self._trunk(obs)
        tile.fill(inputs, noise)
        x = scaled(tile.features, self._obs_scale)
        if self._cell is not None:
            tile.state[:rows], tile.state[rows:] = state[0], 0.0
            next_state = self._cell(x, tile.state, row_by_row=tile.row_by_row)
            x, state = next_state[:, : self._cell.size], (next_state[:rows],)
        out = self._run(x, tile.buffers, tile.row_by_row)
        if self._mask_dim:
            self._apply_mask(inputs, out[:rows])  # unused rows would allow no action, for which softmax is undefined
        action, log_prob = self._sampling_head.sample(out, tile.noise)
        return action[:rows], log_prob[:rows], state

    def _forward(
        self, obs: np.ndarray, state: State, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, State]:
        """Output [N, K] of the network, in a buffer that the next call overwrites, and the next state.

        ``rng`` draws the noise of a noisy network; None: no noise.
        """
        x = inputs = obs if self._trunk is None else self._trunk(obs)
        if len(x) != self._rows:
            self._rows = len(x)
            self._buffers = [np.empty((self._rows, weight.shape[1]), np.float32) for weight, _ in self._layers]
        x = scaled(x, self._obs_scale)
        if self._cell is not None:
            next_state = self._cell(x, self._state(state, self._rows))
            x, state = next_state[:, : self._cell.size], (next_state,)
        out = self._run(x, self._buffers, rng=rng if self._noise is not None else None)
        if self._atoms is not None:
            out = expected_returns(out, self._atoms)
        if self._mask_dim:
            self._apply_mask(inputs, out)
        return out, state

    def _apply_mask(self, inputs: np.ndarray, out: np.ndarray) -> None:
        """Sets the last K outputs [N, K] to minus infinity where the last K of the network's inputs are 0."""
        out[:, -self._mask_dim :][inputs[:, -self._mask_dim :] == 0.0] = FORBIDDEN

    def _run(
        self, x: np.ndarray, buffers: list[np.ndarray], row_by_row: bool = False, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Passes x [N, I] through all layers, in ``buffers``; returns the last one. ``rng`` draws their noise."""
        if self._custom is not None:
            return self._custom(x, buffers[-1], row_by_row=row_by_row)
        last = len(self._layers) - 1
        for index, ((weight, bias), buffer) in enumerate(zip(self._layers, buffers, strict=True)):
            if row_by_row:
                np.matmul(x[:, None], weight, out=buffer[:, None])
            else:
                np.dot(x, weight, out=buffer)
            if rng is not None and self._noise is not None:
                products, bias_noise = self._noise.draw(index, x, rng)
                buffer += products
                bias = bias + bias_noise
            if self._layer_norm and index < last:
                buffer -= buffer.mean(1, keepdims=True)
                variance = np.square(buffer).mean(1, keepdims=True)
                buffer /= np.sqrt(variance + _NORM_EPS)
            buffer += bias
            if index < last:
                self._activate(buffer)
            x = buffer
        return x


def _shared() -> UsageError:
    return UsageError(
        "this Policy is used by two threads at once; create one per thread, or share the result of load_policy()"
    )


def expected_returns(out: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """Mean returns [N, K] from logits [N, K * Z] of the returns ``atoms`` [Z], with a softmax for each action."""
    logits = out.reshape(len(out), -1, len(atoms))
    weights = np.exp(logits - logits.max(2, keepdims=True))
    means: np.ndarray = np.dot(weights, atoms)
    means /= weights.sum(2)
    return means


class TeamRows:
    """Converts a team's observations to inputs of the network that its n agents share: one row per agent."""

    def __init__(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        self._agents, self._obs_dim = len(meta["team_actions"]), int(meta["team_obs_dim"])
        self.features = self._obs_dim + self._agents
        self._scale = obs_scale(arrays, int(meta["obs_dim"]))

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Observations [N, O] to [N * n, o + n], a new array: an agent's own, then its number as one-hot."""
        rows = np.zeros((len(obs), self._agents, self.features), np.float32)
        agents = scaled(obs, self._scale)[:, : self._agents * self._obs_dim]
        rows[:, :, : self._obs_dim] = agents.reshape(len(obs), self._agents, self._obs_dim)
        rows[:, range(self._agents), range(self._obs_dim, self.features)] = 1.0
        return rows.reshape(-1, self.features)


def _silu(x: np.ndarray) -> None:
    # x sigmoid(x); computed with tanh, which cannot overflow.
    x *= _HALF * np.tanh(_HALF * x) + _HALF


def _gelu(x: np.ndarray) -> None:
    x *= _HALF * np.tanh(_GELU * (x + _CUBE * x * x * x)) + _HALF


def _elu(x: np.ndarray) -> None:
    np.copyto(x, np.expm1(np.minimum(x, _ZERO)), where=x < _ZERO)


_ACTIVATE: dict[str, Callable[[np.ndarray], object]] = {
    "relu": lambda x: np.maximum(x, _ZERO, out=x),
    "tanh": lambda x: np.tanh(x, out=x),
    "silu": _silu,
    "gelu": _gelu,
    "elu": _elu,
}


class _Tile:
    """Buffers of ``TILE`` rows for one pass; unused rows are zero."""

    def __init__(
        self,
        inputs: int,
        layers: list[tuple[np.ndarray, np.ndarray]],
        noise_dim: int,
        cell: Cell | None = None,
        *,
        row_by_row: bool = False,
    ) -> None:
        self.features = np.zeros((TILE, inputs), np.float32)
        self.state = np.zeros((TILE, 0 if cell is None else cell.state_dim), np.float32)
        self.noise = np.zeros((TILE, noise_dim), np.float32)
        self.buffers = [np.zeros((TILE, weight.shape[1]), np.float32) for weight, _ in layers]
        weights = [weight for weight, _ in layers] + ([] if cell is None else [cell.weight])
        self.row_by_row = row_by_row or not all(is_position_independent(*weight.shape) for weight in weights)
        self._used = 0

    def fill(self, features: np.ndarray, noise: np.ndarray) -> None:
        rows = len(features)
        self.features[:rows], self.noise[:rows] = features, noise
        if rows < self._used:
            self.features[rows : self._used], self.noise[rows : self._used] = 0.0, 0.0
        self._used = rows


@cache
def is_position_independent(inputs: int, outputs: int) -> bool:
    """True if a row's result in a matmul of ``TILE`` rows does not depend on its position or the other rows.

    A kernel's summation order depends on position and shape only, so one test with full mantissas is enough. If it
    fails, ``sample`` multiplies row by row, at two to four times the cost.
    """
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((inputs, outputs)).astype(np.float32)
    row = rng.standard_normal(inputs).astype(np.float32)
    results = set()
    for position in range(TILE):
        x = rng.standard_normal((TILE, inputs)).astype(np.float32)
        x[position] = row
        results.add(np.dot(x, weight)[position].tobytes())
    return len(results) == 1


class NoisyLayers:
    """The noise of a noisy network's layers (Fortunato et al. 2018, 1706.10295), drawn for each row of each step.

    With the factorised noise of ``algorithms.networks.value_heads``, that of a row's products is ``((x f(e_in))
    deviations) f(e_out)``: one more matmul per layer, without drawing weights.
    """

    def __init__(
        self, arrays: dict[str, np.ndarray], meta: dict[str, Any], layers: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Reads ``noise_w0`` to ``noise_head_b``, those of the head for the streams and outputs it was made of.

        A WeightsError if shapes do not fit those of ``layers``.
        """
        names = [str(index) for index in range(len(layers) - 1)]
        pairs = [*((f"noise_w{name}", f"noise_b{name}") for name in names), ("noise_head_w", "noise_head_b")]
        self._layers = [tuple(np.ascontiguousarray(arrays[name], np.float32) for name in pair) for pair in pairs]
        about = meta["noisy"]
        self._dueling, self._outputs, self._mean = bool(about["duelling"]), int(about["outputs"]), bool(about["mean"])
        for index, (weight, bias) in enumerate(layers):
            noise, x = self._layers[index], np.zeros((1, len(weight)), np.float32)
            fits = noise[0].shape == (len(weight), len(noise[1]))
            if not fits or self.draw(index, x, np.random.default_rng(0))[0].shape[1:] != bias.shape:
                raise WeightsError(f"noise of shape {noise[0].shape} does not fit a layer of shape {weight.shape}")

    def draw(self, index: int, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Noise of the products of inputs ``x`` [N, I] with a layer's weights, and of its bias, both [N, H]."""
        weight, bias = self._layers[index]
        product = np.dot(x * _factors(rng, x.shape), weight)
        outs = _factors(rng, product.shape)
        product *= outs
        outs *= bias
        if index < len(self._layers) - 1:
            return product, outs
        return self._folded(product), self._folded(outs)

    def _folded(self, values: np.ndarray) -> np.ndarray:
        """Noise of the head's outputs from the noise of its streams, or of the mean from the noise of its quantiles."""
        parts = values.reshape(len(values), -1, self._outputs)
        if self._mean:
            parts = parts.mean(2, keepdims=True)
        if self._dueling:
            advantages = parts[:, 1:]
            parts = advantages - advantages.mean(1, keepdims=True) + parts[:, :1]
        return parts.reshape(len(values), -1)


def _factors(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """``sign(e) sqrt|e|`` of standard normal e."""
    normal = rng.standard_normal(shape, np.float32)
    return np.copysign(np.sqrt(np.abs(normal)), normal)
