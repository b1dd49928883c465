"""From a policy network's raw output to actions, in NumPy; one small class for each kind of policy.

Each has ``explore(out, rng)`` and ``greedy(out)``: [N, outputs] to a new array [N, A], ``out`` may be
overwritten. Actions of the continuous kinds lie in [-1, 1]; a discrete action is its index.

The kinds that on-policy algorithms train have ``draw(out, noise)`` too: the action and its log-probability
as a pure function of one row of each. Its continuous actions are not bounded: the log-probability is that of the
action as drawn, and whoever steps the environment clips it to [-1, 1].
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np

from spreeze.errors import WeightsError

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
"""Range of the log deviation: the same as in ``spreeze.ops`` (a test compares)."""

# As float32 arrays: a ufunc spends a microsecond on finding the type of a Python number.
_ONE, _MINUS_ONE = np.array(1.0, np.float32), np.array(-1.0, np.float32)
_LOG_STD_MIN, _LOG_STD_MAX = np.array(LOG_STD_MIN, np.float32), np.array(LOG_STD_MAX, np.float32)
_MINUS_HALF = np.array(-0.5, np.float32)
_TINY = np.array(np.finfo(np.float32).tiny, np.float32)


Arrays = dict[str, np.ndarray]
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Head(Protocol):
    """What the rest of a policy needs of it."""

    outputs: int

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Actions to collect experience with."""
        ...

    def greedy(self, out: np.ndarray) -> np.ndarray:
        """Actions without noise."""
        ...


@runtime_checkable
class DrawingHead(Protocol):
    """A head whose noise comes from outside."""

    noise_dim: int
    """Z: values of noise for one action."""

    def draw(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Actions [N, A] and their log-probabilities [N] in nat, of noise [N, Z]; ``out`` may be overwritten."""
        ...


class SquashedGaussian:
    """``tanh(mean + exp(log_std) noise)``; outputs are means, then log deviations."""

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._actions = int(meta["action_dim"])
        self.outputs = 2 * self._actions

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A sample."""
        action = rng.standard_normal((len(out), self._actions), np.float32)
        # np.clip takes longer than the two ufuncs that it stands for.
        log_std = out[:, self._actions :]
        np.maximum(log_std, _LOG_STD_MIN, out=log_std)
        np.minimum(log_std, _LOG_STD_MAX, out=log_std)
        action *= np.exp(log_std, out=log_std)
        action += out[:, : self._actions]
        np.tanh(action, out=action)
        return action

    def greedy(self, out: np.ndarray) -> np.ndarray:
        """The mean, squashed."""
        action: np.ndarray = np.tanh(out[:, : self._actions])
        return action


class Deterministic:
    """``tanh(out)``; explores with clipped Gaussian noise."""

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.outputs = int(meta["action_dim"])
        self._noise = np.array(float(meta.get("exploration_noise", 0.0)), np.float32)

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The action and noise, in [-1, 1]."""
        action = rng.standard_normal(out.shape, np.float32)
        action *= self._noise
        action += np.tanh(out, out=out)
        np.maximum(action, _MINUS_ONE, out=action)
        np.minimum(action, _ONE, out=action)
        return action

    def greedy(self, out: np.ndarray) -> np.ndarray:
        """The action."""
        action: np.ndarray = np.tanh(out)
        return action


class EpsilonGreedy:
    """The action of the highest value; explores with a share of random ones that falls with the env steps.

    The share goes in a straight line from ``epsilon_start`` to ``epsilon_end`` over ``epsilon_env_steps``.
    Env steps are those of the whole run when the weights were published, and those taken here since.
    """

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.outputs = int(meta["num_actions"])
        self._start, self._end = float(meta["epsilon_start"]), float(meta["epsilon_end"])
        self._span = int(meta["epsilon_env_steps"])
        self._env_steps = int(meta.get("env_steps", 0))

    @property
    def epsilon(self) -> float:
        """Share of random actions now."""
        if self._env_steps >= self._span:
            return self._end
        return self._start + (self._end - self._start) * self._env_steps / self._span

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The best action, or with probability epsilon any."""
        rows, epsilon = len(out), self.epsilon
        self._env_steps += rows
        action = out.argmax(1)
        # One draw decides both: below epsilon, draw / epsilon is uniform again.
        draw = rng.random(rows)
        for row in np.flatnonzero(draw < epsilon).tolist():
            action[row] = min(int(draw[row] / epsilon * self.outputs), self.outputs - 1)
        return _column(action)

    def greedy(self, out: np.ndarray) -> np.ndarray:
        """The best action."""
        return _column(out.argmax(1))


class Gaussian:
    """``mean + exp(log_std) noise``; outputs are means, the log deviations [A] are parameters of their own."""

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.outputs = self.noise_dim = int(meta["action_dim"])
        log_std = np.ascontiguousarray(arrays["log_std"], np.float32)
        if log_std.shape != (self.outputs,):
            raise WeightsError(f"weights 'log_std' have shape {log_std.shape}; ({self.outputs},) is needed")
        self._std = np.exp(log_std)
        self._constant = np.float32(-np.sum(log_std, dtype=np.float64) - self.outputs * _HALF_LOG_2PI)

    def draw(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples by standard normal noise [N, A], not bounded."""
        action = noise * self._std
        action += out
        log_prob: np.ndarray = np.add.reduce(np.square(noise), 1)
        log_prob *= _MINUS_HALF
        log_prob += self._constant
        return action, log_prob

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A sample, clipped to [-1, 1]."""
        return self.greedy(self.draw(out, rng.standard_normal(out.shape, np.float32))[0])

    def greedy(self, out: np.ndarray) -> np.ndarray:
        """The mean, clipped to [-1, 1]."""
        action: np.ndarray = np.minimum(np.maximum(out, _MINUS_ONE), _ONE)
        return action


class Categorical:
    """Samples from ``softmax(out)``."""

    noise_dim = 1

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.outputs = int(meta["num_actions"])

    def draw(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples by uniform noise [N, 1] in [0, 1): the first action whose cumulative probability is above it."""
        out -= out.max(1, keepdims=True)
        cumulative = np.cumsum(np.exp(out), axis=1)
        total = cumulative[:, -1:]
        # Rounding can make noise * total the total itself, so the last action is the bound.
        index = (cumulative[:, :-1] <= noise * total).sum(1, keepdims=True)
        log_prob: np.ndarray = (np.take_along_axis(out, index, 1) - np.log(total))[:, 0]
        return index.astype(np.float32), log_prob

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A sample: the greatest of ``out - log E``, E standard exponential (Gumbel 1954)."""
        noise = rng.standard_exponential(out.shape, np.float32)
        np.maximum(noise, _TINY, out=noise)
        out -= np.log(noise, out=noise)
        return self.greedy(out)

    def greedy(self, out: np.ndarray) -> np.ndarray:
        """The most likely action."""
        return _column(out.argmax(1))


def _column(index: np.ndarray) -> np.ndarray:
    """Indices [N] as actions float32 [N, 1]."""
    action: np.ndarray = index.astype(np.float32)
    return action.reshape(-1, 1)


_HEADS: dict[str, type[SquashedGaussian | Gaussian | Deterministic | EpsilonGreedy | Categorical]] = {
    "squashed_gaussian": SquashedGaussian,
    "gaussian": Gaussian,
    "deterministic": Deterministic,
    "q_values": EpsilonGreedy,
    "categorical": Categorical,
}


def head_of(meta: dict[str, Any], arrays: Arrays) -> Head:
    """The head that an algorithm's ``policy_meta`` describes; ``arrays`` hold its own parameters, if it has any.

    Raises:
        WeightsError: a kind that is not known here, or a value is missing.
    """
    kind = meta.get("policy")
    if kind not in _HEADS:
        raise WeightsError(f"weights hold a policy of kind {kind!r}; known are {', '.join(_HEADS)}")
    try:
        return _HEADS[kind](meta, arrays)
    except KeyError as error:
        raise WeightsError(f"weights of a {kind} policy have no {error}; publish them again") from None
