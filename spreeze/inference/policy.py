"""Policies in NumPy, for samplers, evaluator and visualizer: torch is never loaded there.

For the few observations of a sampler a NumPy pass takes less time than one of torch. A row's last bits depend on how
many rows are multiplied at once, so ``draw`` always multiplies ``TILE`` rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from spreeze.errors import UsageError, WeightsError
from spreeze.inference.convolution import Trunk
from spreeze.inference.heads import FORBIDDEN, Arrays, DrawingHead, Head, head_of
from spreeze.inference.noisy_layers import NoisyLayers
from spreeze.inference.obs_scale import OBS_CLIP, obs_scale, scaled
from spreeze.inference.own_network import OwnNetwork
from spreeze.inference.recurrence import Cell

TILE = 8
"""Rows of one matmul in ``draw``: at 2x256, 16 rows take 2.6 times as long, 4 rows three quarters."""

ACTIVATIONS = ("relu", "tanh", "silu", "gelu", "elu")
"""Functions between layers; ``gelu`` by its tanh formula (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
NORM_EPS = 1e-5
"""Added to the variance in layer normalisation, as torch.nn does by default."""

State = tuple[np.ndarray, ...]
"""Arrays [N, ...] that a policy keeps between the steps of N episodes; empty before their first step, and always where
it has no memory. A recurrent policy has one, [N, S]."""
_ODD = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
    ZeroDivisionError,
    MemoryError,
    RecursionError,
)
"""Errors of metadata and shapes that no algorithm writes."""
_EXPLORING = "explore."
"""Prefix of the names of the newest weights in a file with an averaged policy."""

# As float32 arrays, since a ufunc takes a microsecond to find the type of a Python number.
_ZERO, _HALF = np.array(0.0, np.float32), np.array(0.5, np.float32)
_GELU, _CUBE = np.array(math.sqrt(2.0 / math.pi), np.float32), np.array(0.044715, np.float32)
_NORM_EPS = np.array(NORM_EPS, np.float32)


def with_exploring(arrays: Arrays, exploring: Arrays) -> Arrays:
    """The weights of a policy with those that samplers explore with, for one file."""
    return arrays | {_EXPLORING + name: array for name, array in exploring.items()}


def exploring_arrays(arrays: Arrays) -> Arrays:
    """The weights that samplers explore with: the policy's, except for those that the file has twice."""
    return arrays | {
        name.removeprefix(_EXPLORING): array for name, array in arrays.items() if name.startswith(_EXPLORING)
    }


def begin_episode(state: State, row: int) -> None:
    """Sets a row of a policy's state to zeros, with which each episode starts."""
    for part in state:
        part[row] = 0.0


class Policy:
    """Computes actions by an actor's weights; an instance serves one thread at a time and refuses a second one."""

    def __init__(
        self,
        layers: list[tuple[np.ndarray, np.ndarray]],
        head: Head,
        obs_scale: tuple[np.ndarray, np.ndarray] | None,
        trunk: Trunk | TeamRows | None = None,
        activation: str = "relu",
        layer_norm: bool = False,
        mask_dim: int = 0,
        own: OwnNetwork | None = None,
        cell: Cell | None = None,
        noise: NoisyLayers | None = None,
        atoms: np.ndarray | None = None,
    ) -> None:
        """With ``own`` that is the network, and ``layers`` only say how many inputs and outputs it has.

        A ``cell`` lies between the observation and the ``layers``. Where they explore, ``noise`` is added to them. With
        ``atoms`` [Z] the network gives logits of these returns for each action.
        """
        self._own, self._cell, self._noise, self._atoms = own, cell, noise, atoms
        self._layers, self._head, self._obs_scale, self._trunk = layers, head, obs_scale, trunk
        self._activate, self._layer_norm, self._mask_dim = _ACTIVATE[activation], layer_norm, mask_dim
        self.obs_dim = layers[0][0].shape[0] if cell is None else cell.inputs
        self._rows = -1
        self._buffers: list[np.ndarray] = []
        self._busy = False  # a lock would take twelve times as long
        self._drawing = head if isinstance(head, DrawingHead) else None
        if self._drawing is not None:
            self._tile = _Tile(self.obs_dim, layers, self._drawing.noise_dim, cell, row_by_row=own is not None)

    @classmethod
    def from_weights(cls, arrays: Arrays, meta: dict[str, Any]) -> Policy:
        """Builds the policy that ``policy_arrays`` and ``policy_meta`` of an algorithm describe.

        ``obs_mean`` and ``obs_std`` [O] among the arrays enable observation normalization; ``activation`` in the
        metadata is one of ``ACTIVATIONS`` and defaults to ReLU; with ``layer_norm`` the sums of each hidden layer are
        normalised before their bias is added. With ``action_mask`` the last K values of an
        observation are its mask (see ``types.EnvSpec``), and no action is taken that it forbids.

        Raises:
            WeightsError: a layer is missing, shapes do not fit each other, or the metadata are those of no policy.
        """
        try:
            return cls._built(arrays, meta)
        except _ODD as error:
            raise WeightsError(
                f"the weights describe no valid policy: {type(error).__name__}: {str(error)[:200]}"
            ) from None

    @classmethod
    def _built(cls, arrays: Arrays, meta: dict[str, Any]) -> Policy:
        head, activation = head_of(meta, arrays), meta.get("activation", ACTIVATIONS[0])
        if activation not in ACTIVATIONS:
            raise WeightsError(f"weights need the activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        mask_dim = head.options if meta.get("action_mask") else 0
        if "network" in meta:
            own, shape = OwnNetwork(arrays, meta, head.outputs), (int(meta["obs_dim"]), head.outputs)
            return cls(
                [(np.zeros(shape, np.float32), np.zeros(head.outputs, np.float32))],
                head,
                obs_scale(arrays, shape[0]),
                mask_dim=mask_dim,
                own=own,
            )
        names = [(f"w{index}", f"b{index}") for index in range(len(meta.get("hidden_sizes", ())))]
        layers = [_layer(arrays, *pair) for pair in [*names, ("head_w", "head_b")]]
        trunk = Trunk(arrays, meta) if "cnn" in meta else TeamRows(arrays, meta) if "team_actions" in meta else None
        cell = Cell(arrays, meta) if "recurrent" in meta else None
        inputs = trunk.features if trunk else int(meta["obs_dim"])
        if cell is not None and cell.inputs != inputs:
            raise WeightsError(f"weights do not fit each other: the cell takes {cell.inputs}, gets {inputs}")
        fan_ins = [inputs if cell is None else cell.size, *(weight.shape[1] for weight, _ in layers)]
        for (weight, _), fan_in in zip(layers, fan_ins, strict=False):
            if weight.shape[0] != fan_in:
                raise WeightsError(
                    f"the weights are inconsistent: a layer has {weight.shape[0]} inputs, expected {fan_in}"
                )
        atoms = np.ascontiguousarray(arrays["atoms"], np.float32) if "atoms" in arrays else None
        outputs = head.outputs * (1 if atoms is None else len(atoms))
        if layers[-1][0].shape[1] != outputs:
            raise WeightsError(f"weights give {layers[-1][0].shape[1]} outputs; {outputs} are needed")
        scale = obs_scale(arrays, inputs) if trunk is None else None
        noise = NoisyLayers(arrays, meta, layers) if "noisy" in meta else None
        normed = bool(meta.get("layer_norm"))
        return cls(layers, head, scale, trunk, activation, normed, mask_dim, cell=cell, noise=noise, atoms=atoms)

    def act(self, obs: np.ndarray, state: State, rng: np.random.Generator | None = None) -> tuple[np.ndarray, State]:
        """Actions [N, A] float32, a new array, and the state for the next step.

        Args:
            obs: [N, O] float32, or images uint8 [N, k, *frame].
            state: as the previous step of these episodes returned it; empty at their first.
            rng: draws actions that explore: sampled, with noise, or sometimes random; None: the best ones.
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
        """The cell's state [N, S]: zeros where episodes begin."""
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
        """K: options of all choices; of policies without choices, values of the last layer."""
        return self._head.options

    @property
    def noise_dim(self) -> int:
        """Z: noise values of ``draw`` per action; standard normal for numbers, uniform in [0, 1) for choices."""
        return self._drawing_head().noise_dim

    def draw(self, obs: np.ndarray, noise: np.ndarray, state: State = ()) -> tuple[np.ndarray, np.ndarray, State]:
        """Exploring actions by given noise [N, Z]; bit by bit, each row's result depends on that row alone.

        Returns:
            Actions [N, A] float32, continuous ones not clipped to [-1, 1], their log-probabilities [N] float32 in nat,
            and the state for the next step, as of ``act``; new arrays.

        Raises:
            WeightsError: the policy draws its own noise.
        """
        rows = len(obs)
        if self._busy:
            raise _shared()
        self._busy = True
        try:
            if self._cell is not None:
                state = (self._state(state, rows),)
            if rows <= TILE:
                return self._draw_tile(obs, noise, state)
            tiles = []
            for begin in range(0, rows, TILE):
                part = slice(begin, begin + TILE)
                tiles.append(self._draw_tile(obs[part], noise[part], tuple(array[part] for array in state)))
        finally:
            self._busy = False
        action, log_prob, states = zip(*tiles, strict=True)
        joined = tuple(np.concatenate(parts) for parts in zip(*states, strict=True))
        return np.concatenate(action), np.concatenate(log_prob), joined

    def _draw_tile(self, obs: np.ndarray, noise: np.ndarray, state: State) -> tuple[np.ndarray, np.ndarray, State]:
        head, tile, rows = self._drawing_head(), self._tile, len(obs)
        given = obs if self._trunk is None else self._trunk(obs)
        tile.fill(given, noise)
        x = scaled(tile.features, self._obs_scale)
        if self._cell is not None:
            tile.state[:rows], tile.state[rows:] = state[0], 0.0
            following = self._cell(x, tile.state, row_by_row=tile.row_by_row)
            x, state = following[:, : self._cell.size], (following[:rows],)
        out = self._run(x, tile.buffers, tile.row_by_row)
        if self._mask_dim:
            self._apply_mask(given, out[:rows])  # unused rows allow nothing, which has no softmax
        action, log_prob = head.draw(out, tile.noise)
        return action[:rows], log_prob[:rows], state

    def _drawing_head(self) -> DrawingHead:
        if self._drawing is None:
            raise WeightsError(
                f"a policy of kind {type(self._head).__name__} draws its own noise; only on-policy "
                "algorithms collect with noise from outside"
            )
        return self._drawing

    def _forward(
        self, obs: np.ndarray, state: State, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, State]:
        """Output [N, K] of the network, in a buffer that the next call overwrites, and the next state.

        ``rng`` draws the noise of a network that has some; None: without.
        """
        x = given = obs if self._trunk is None else self._trunk(obs)
        if len(x) != self._rows:
            self._rows = len(x)
            self._buffers = [np.empty((self._rows, weight.shape[1]), np.float32) for weight, _ in self._layers]
        x = scaled(x, self._obs_scale)
        if self._cell is not None:
            following = self._cell(x, self._state(state, self._rows))
            x, state = following[:, : self._cell.size], (following,)
        out = self._run(x, self._buffers, rng=rng if self._noise is not None else None)
        if self._atoms is not None:
            out = expected_returns(out, self._atoms)
        if self._mask_dim:
            self._apply_mask(given, out)
        return out, state

    def _apply_mask(self, inputs: np.ndarray, out: np.ndarray) -> None:
        """Sets the last K outputs [N, K] to minus infinity where the last K of the network's inputs are 0."""
        out[:, -self._mask_dim :][inputs[:, -self._mask_dim :] == 0.0] = FORBIDDEN

    def _run(
        self, x: np.ndarray, buffers: list[np.ndarray], row_by_row: bool = False, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Passes x [N, I] through all layers, in ``buffers``; returns the last one. ``rng`` draws their noise."""
        if self._own is not None:
            return self._own(x, buffers[-1], row_by_row=row_by_row)
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
    """Mean returns [N, K] by logits [N, K * Z] of the returns ``atoms`` [Z], by the softmax of each action's."""
    logits = out.reshape(len(out), -1, len(atoms))
    shares = np.exp(logits - logits.max(2, keepdims=True))
    means: np.ndarray = np.dot(shares, atoms)
    means /= shares.sum(2)
    return means


class TeamRows:
    """A team's observations as the inputs of the network that its n agents share: one row an agent."""

    def __init__(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        self._agents, self._obs_dim = len(meta["team_actions"]), int(meta["team_obs_dim"])
        self.features = self._obs_dim + self._agents
        self._scale = obs_scale(arrays, int(meta["obs_dim"]))

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Observations [N, O] to [N * n, o + n], a new array: an agent's own, then its number as one-hot."""
        rows = np.zeros((len(obs), self._agents, self.features), np.float32)
        own = scaled(obs, self._scale)[:, : self._agents * self._obs_dim]
        rows[:, :, : self._obs_dim] = own.reshape(len(obs), self._agents, self._obs_dim)
        rows[:, range(self._agents), range(self._obs_dim, self.features)] = 1.0
        return rows.reshape(-1, self.features)


def _relu(x: np.ndarray) -> None:
    np.maximum(x, _ZERO, out=x)


def _tanh(x: np.ndarray) -> None:
    np.tanh(x, out=x)


def _silu(x: np.ndarray) -> None:
    # x sigmoid(x); by tanh it cannot overflow.
    x *= _HALF * np.tanh(_HALF * x) + _HALF


def _gelu(x: np.ndarray) -> None:
    x *= _HALF * np.tanh(_GELU * (x + _CUBE * x * x * x)) + _HALF


def _elu(x: np.ndarray) -> None:
    np.copyto(x, np.expm1(np.minimum(x, _ZERO)), where=x < _ZERO)


_ACTIVATE: dict[str, Callable[[np.ndarray], None]] = dict(
    zip(ACTIVATIONS, (_relu, _tanh, _silu, _gelu, _elu), strict=True)
)


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
        self.row_by_row = row_by_row or not all(places_agree(*weight.shape) for weight in weights)
        self._used = 0

    def fill(self, features: np.ndarray, noise: np.ndarray) -> None:
        rows = len(features)
        self.features[:rows], self.noise[:rows] = features, noise
        if rows < self._used:
            self.features[rows : self._used], self.noise[rows : self._used] = 0.0, 0.0
        self._used = rows


@cache
def places_agree(inputs: int, outputs: int) -> bool:
    """True if a row's result of this machine's matmul of ``TILE`` rows does not depend on its place and the other rows.

    The order in which a kernel sums depends on place and shape, not on values, so one test with full mantissas shows
    it. If it fails, ``draw`` multiplies row by row, at two to four times the cost.
    """
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((inputs, outputs)).astype(np.float32)
    row = rng.standard_normal(inputs).astype(np.float32)
    results = set()
    for place in range(TILE):
        x = rng.standard_normal((TILE, inputs)).astype(np.float32)
        x[place] = row
        results.add(np.dot(x, weight)[place].tobytes())
    return len(results) == 1


def _layer(arrays: Arrays, weight_name: str, bias_name: str) -> tuple[np.ndarray, np.ndarray]:
    for name in (weight_name, bias_name):
        if name not in arrays:
            raise WeightsError(f"weights have no '{name}'; publish them again with this version")
    weight = np.ascontiguousarray(arrays[weight_name], np.float32)
    bias = np.ascontiguousarray(arrays[bias_name], np.float32)
    if weight.ndim != 2 or bias.shape != weight.shape[1:]:
        raise WeightsError(f"weights '{weight_name}' {weight.shape} and '{bias_name}' {bias.shape} do not fit")
    return weight, bias


SPIKE, SPIKES = 1000.0, 0.1
"""Standard deviations, and units, from which a value is a spike; the share of a batch up to which it is left out."""


def without_spikes(values: np.ndarray, centre: np.ndarray, std: np.ndarray | None) -> np.ndarray:
    """Values [B, O], their spikes replaced by ``centre`` [O], so that running statistics forget none of the others.

    A spike lies ``SPIKE`` of ``std`` [O] (at least 1) from the centre; None: of the largest distance of nine tenths of
    the values. Where more than one and ``SPIKES`` of a column are spikes, that is how its values are.
    """
    distance = np.abs(values - centre)
    if std is None:
        std = np.quantile(distance, 1.0 - SPIKES, axis=0)
    spikes = distance > SPIKE * np.maximum(std, 1.0)
    spikes &= spikes.sum(axis=0) <= max(1.0, SPIKES * len(values))
    return np.where(spikes, centre, values)


class Normalizer:
    """Running mean and standard deviation of observations in the learner (Welford's method in batches)."""

    def __init__(self, obs_dim: int, mask_dim: int = 0) -> None:
        """The last ``mask_dim`` values, an action mask, stay as they are."""
        self._mask = slice(obs_dim - mask_dim, obs_dim)
        self.count = 0.0
        self.mean = np.zeros(obs_dim, np.float64)
        self._m2 = np.zeros(obs_dim, np.float64)

    def update(self, obs: np.ndarray) -> None:
        """Adds observations [B, O] (Chan et al. 1979, parallel variance)."""
        batch = obs.astype(np.float64)
        batch[:, self._mask] = 0.0
        count = float(len(batch))
        mean = batch.mean(axis=0)
        squares = ((batch - mean) ** 2).sum(axis=0)
        std = self.std if self.count else None
        if (squares > (0.5 * SPIKE * np.maximum(1.0 if std is None else std, 1.0)) ** 2).any():  # hardly ever
            batch = without_spikes(batch, np.median(batch, axis=0) if std is None else self.mean, std)
            mean = batch.mean(axis=0)
            squares = ((batch - mean) ** 2).sum(axis=0)
        delta = mean - self.mean
        total = self.count + count
        self.mean = self.mean + delta * (count / total)
        self._m2 = self._m2 + squares + delta**2 * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """Standard deviation [O]; 1 before the second observation, never below 1e-4."""
        if self.count < 2:
            return np.ones_like(self.mean)
        std = np.maximum(np.sqrt(self._m2 / self.count), 1e-4)
        std[self._mask] = 1.0
        return std

    def apply(self, obs: np.ndarray) -> None:
        """Normalizes observations [B, O] in place; of frames uint8 [B, k, F] the newest numbers."""
        if obs.dtype == np.uint8:
            newest = obs[:, -1, obs.shape[2] - 4 * len(self.mean) :]
            numbers = np.ascontiguousarray(newest).view(np.float32)
            self.apply(numbers)
            newest[...] = numbers.view(np.uint8)
            return
        obs -= self.mean.astype(np.float32)
        obs /= self.std.astype(np.float32)
        np.clip(obs, -OBS_CLIP, OBS_CLIP, out=obs)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of a policy: float32 ``obs_mean`` and ``obs_std`` [O]."""
        return {"obs_mean": self.mean.astype(np.float32), "obs_std": self.std.astype(np.float32)}

    def averaged(self) -> np.ndarray:
        """Count, means and deviations [1 + 2 O]: what is averaged with the parameters of other learners."""
        return np.concatenate(([self.count], self.mean, np.sqrt(self._m2 / max(self.count, 1.0))))

    def set_averaged(self, values: np.ndarray) -> None:
        """Continues from averages of what ``averaged`` gives."""
        self.count = float(values[0])
        self.mean, deviation = np.split(values[1:].copy(), 2)
        self._m2 = deviation**2 * self.count

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean.tolist(), "m2": self._m2.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.count = float(state["count"])
        self.mean = np.asarray(state["mean"], np.float64)
        self._m2 = np.asarray(state["m2"], np.float64)
