"""Heads of policies in NumPy: actions from the outputs of a network, for each kind of action and algorithm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from spreeze.errors import WeightsError
from spreeze.inference.convolution import array_of
from spreeze.types import Arrays, Choices

FORBIDDEN = -math.inf  # output for an action that the mask forbids: never the largest, with probability 0
LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
"""Range of SAC's log standard deviation, as in the authors' code for arXiv 1801.01290."""


# As float32 arrays, since a ufunc takes a microsecond to find the type of a Python number.
_ONE, _MINUS_ONE, _MINUS_HALF = np.array(1.0, np.float32), np.array(-1.0, np.float32), np.array(-0.5, np.float32)
_LOG_STD_MIN, _LOG_STD_MAX = np.array(LOG_STD_MIN, np.float32), np.array(LOG_STD_MAX, np.float32)
_TINY = np.array(np.finfo(np.float32).tiny, np.float32)
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Head(ABC):
    """Computes actions from the outputs of a network."""

    outputs: int

    @property
    def options(self) -> int:
        """K: outputs at the end that a mask may forbid."""
        return self.outputs

    @abstractmethod
    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Actions [N, A] to collect experience with; ``out`` [N, K] may be overwritten."""

    @abstractmethod
    def greedy(self, out: np.ndarray) -> np.ndarray:
        """Actions [N, A] without noise."""


class SamplingHead(Head):
    """A head that also takes noise from the caller."""

    noise_dim: int  # Z: noise values per action

    @abstractmethod
    def sample(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Actions [N, A] by noise [N, Z], and their log-probabilities [N] in nat; ``out`` may be overwritten."""


class SquashedGaussian(Head):
    """``tanh(mean + exp(log_std) noise)``; outputs are means, then log standard deviations."""

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._actions = int(meta["action_dim"])
        self.outputs = 2 * self._actions

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        action = rng.standard_normal((len(out), self._actions), np.float32)
        # np.clip takes longer than its two ufuncs.
        log_std = out[:, self._actions :]
        np.maximum(log_std, _LOG_STD_MIN, out=log_std)
        np.minimum(log_std, _LOG_STD_MAX, out=log_std)
        action *= np.exp(log_std, out=log_std)
        action += out[:, : self._actions]
        np.tanh(action, out=action)
        return action

    def greedy(self, out: np.ndarray) -> np.ndarray:
        action: np.ndarray = np.tanh(out[:, : self._actions])
        return action


class Deterministic(Head):
    """``tanh(out)``; explores with clipped Gaussian noise, of one scale or one that grows by row (arXiv 2307.12983)."""

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.outputs = int(meta["action_dim"])
        lowest = _finite(meta.get("exploration_noise", 0.0))
        self._range = lowest, _finite(meta.get("exploration_noise_max", lowest))
        self._noise = np.full((1, 1), lowest, np.float32)

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if len(out) != len(self._noise):
            self._noise = np.linspace(*self._range, len(out), dtype=np.float32)[:, None]
        action = rng.standard_normal(out.shape, np.float32)
        action *= self._noise
        action += np.tanh(out, out=out)
        np.maximum(action, _MINUS_ONE, out=action)
        np.minimum(action, _ONE, out=action)
        return action

    def greedy(self, out: np.ndarray) -> np.ndarray:
        action: np.ndarray = np.tanh(out)
        return action


def _finite(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{number} is neither a probability nor a noise scale")
    return number


class EpsilonGreedy(Head):
    """The action of the highest value; explores with a linearly decreasing fraction of random actions.

    It goes from ``epsilon_start`` to ``epsilon_end`` over ``epsilon_env_steps``: env steps of the whole run when the
    weights were published, plus those taken here since.
    """

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.outputs = int(meta["num_actions"])
        self._start, self._end = _finite(meta["epsilon_start"]), _finite(meta["epsilon_end"])
        self._span = int(meta["epsilon_env_steps"])
        self._env_steps = int(meta.get("env_steps", 0))
        self._masked = bool(meta.get("action_mask"))
        self._team: tuple[int, ...] = tuple(map(int, meta.get("team_actions", ())))
        """Numbers of actions of the agents, whose outputs are consecutive rows; empty for a single agent."""

    @property
    def epsilon(self) -> float:
        if self._env_steps >= self._span:
            return self._end
        return self._start + (self._end - self._start) * self._env_steps / self._span

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        rows, epsilon = len(out), self.epsilon
        self._env_steps += rows // (len(self._team) or 1)
        action = self._best(out)
        # One draw decides about exploring and the action: below epsilon, draw / epsilon is uniform again.
        draw = rng.random(rows)
        for row in np.flatnonzero(draw < epsilon).tolist():
            if self._masked:
                allowed = np.flatnonzero(out[row] != FORBIDDEN)
                action[row] = allowed[min(int(draw[row] / epsilon * len(allowed)), len(allowed) - 1)]
            else:
                count = self._team[row % len(self._team)] if self._team else self.outputs
                action[row] = min(int(draw[row] / epsilon * count), count - 1)
        return _column(action, len(self._team) or 1)

    def greedy(self, out: np.ndarray) -> np.ndarray:
        return _column(self._best(out), len(self._team) or 1)

    def _best(self, out: np.ndarray) -> np.ndarray:
        """Index [N] of the highest value; for an agent of a team, among its own actions."""
        for agent, count in enumerate(self._team):
            out[agent :: len(self._team), count:] = FORBIDDEN
        best: np.ndarray = out.argmax(1)
        return best


class GaussianHead(SamplingHead):
    """``mean + exp(log_std) noise``; outputs are means, the log standard deviations [A] are separate parameters."""

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.outputs = self.noise_dim = int(meta["action_dim"])
        log_std = array_of(arrays, "log_std", (self.outputs,))
        self._std = np.exp(log_std)
        self._constant = np.float32(-np.sum(log_std, dtype=np.float64) - self.outputs * HALF_LOG_2PI)

    def sample(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples with standard normal noise [N, A], not bounded."""
        action = noise * self._std
        action += out
        log_prob: np.ndarray = np.add.reduce(np.square(noise), 1)
        log_prob *= _MINUS_HALF
        log_prob += self._constant
        return action, log_prob

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return self.greedy(self.sample(out, rng.standard_normal(out.shape, np.float32))[0])

    def greedy(self, out: np.ndarray) -> np.ndarray:
        action: np.ndarray = np.minimum(np.maximum(out, _MINUS_ONE), _ONE)
        return action


class CategoricalHead(SamplingHead):
    """Samples each of A choices from the softmax of its own outputs, which are concatenated."""

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        # Version 0.1.0 wrote the options of its one choice as num_actions.
        choice = Choices(tuple(map(int, meta["nvec"] if "nvec" in meta else (meta["num_actions"],))))
        self.outputs, self.noise_dim, self._slices = choice.options, choice.dim, choice.slices
        self._masked = bool(meta.get("action_mask"))

    def sample(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples with uniform noise [N, A] in [0, 1); log-probabilities are summed."""
        if self.noise_dim == 1:
            return self._sample_one(out, noise)
        samples = [self._sample_one(out[:, part], noise[:, number, None]) for number, part in enumerate(self._slices)]
        return np.concatenate([index for index, _ in samples], 1), np.add.reduce([log_prob for _, log_prob in samples])

    def _sample_one(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first option [N, 1] whose cumulative probability is above the noise [N, 1], and its logarithm [N]."""
        out -= out.max(1, keepdims=True)
        cumulative = np.cumsum(np.exp(out), axis=1)
        total = cumulative[:, -1:]
        # Rounding can make noise * total equal to the total, so the last action is not compared.
        index = (cumulative[:, :-1] <= noise * total).sum(1, keepdims=True)
        if self._masked:  # the last action may be forbidden
            allowed = out[:, ::-1] != FORBIDDEN
            np.minimum(index, out.shape[1] - 1 - allowed.argmax(1)[:, None], out=index)
        log_prob: np.ndarray = (np.take_along_axis(out, index, 1) - np.log(total))[:, 0]
        return index.astype(np.float32), log_prob

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Samples as the argmax of ``out - log E``, E standard exponential (Gumbel 1954)."""
        noise = rng.standard_exponential(out.shape, np.float32)
        np.maximum(noise, _TINY, out=noise)
        out -= np.log(noise, out=noise)
        return self.greedy(out)

    def greedy(self, out: np.ndarray) -> np.ndarray:
        if self.noise_dim == 1:
            return _column(out.argmax(1))
        return np.stack([out[:, part].argmax(1) for part in self._slices], 1).astype(np.float32)


class MixedHead(Head):
    """Numbers and choices: the outputs of one head are followed by those of ``CategoricalHead``."""

    continuous: Callable[[dict[str, Any], Arrays], Head] = SquashedGaussian

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._continuous, self._choices = type(self).continuous(meta, arrays), CategoricalHead(meta, arrays)
        self._split = self._continuous.outputs
        self.outputs = self._split + self._choices.outputs

    @property
    def options(self) -> int:
        return self._choices.outputs

    def explore(self, out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        continuous, choices = out[:, : self._split], out[:, self._split :]
        return np.concatenate((self._continuous.explore(continuous, rng), self._choices.explore(choices, rng)), 1)

    def greedy(self, out: np.ndarray) -> np.ndarray:
        continuous, choices = out[:, : self._split], out[:, self._split :]
        return np.concatenate((self._continuous.greedy(continuous), self._choices.greedy(choices)), 1)


class SamplingMixedHead(MixedHead, SamplingHead):
    """Gaussian numbers and choices; log-probabilities are summed."""

    continuous = GaussianHead
    _continuous: GaussianHead

    def __init__(self, meta: dict[str, Any], arrays: Arrays) -> None:
        super().__init__(meta, arrays)
        self.noise_dim = self._split + self._choices.noise_dim

    def sample(self, out: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples with noise that is standard normal for numbers, then uniform in [0, 1) for choices."""
        continuous, log_prob = self._continuous.sample(out[:, : self._split], noise[:, : self._split])
        choices, choices_log_prob = self._choices.sample(out[:, self._split :], noise[:, self._split :])
        return np.concatenate((continuous, choices), 1), log_prob + choices_log_prob


def _column(index: np.ndarray, agents: int = 1) -> np.ndarray:
    """Indices [N * agents] as actions float32 [N, agents]."""
    action: np.ndarray = index.astype(np.float32)
    return action.reshape(-1, agents)


_HEADS: dict[str, Callable[[dict[str, Any], Arrays], Head]] = {
    "squashed_gaussian": SquashedGaussian,
    "gaussian": GaussianHead,
    "deterministic": Deterministic,
    "q_values": EpsilonGreedy,
    "categorical": CategoricalHead,
    "mixed": SamplingMixedHead,
    "squashed_mixed": MixedHead,
}


def head_of(meta: dict[str, Any], arrays: Arrays) -> Head:
    """The head that an algorithm's ``policy_meta`` describes; ``arrays`` hold its own parameters, if any.

    A WeightsError for an unknown kind or a missing value.
    """
    kind = meta.get("policy")
    if kind not in _HEADS:
        raise WeightsError(f"weights hold a policy of kind {kind!r}; known are {', '.join(_HEADS)}")
    try:
        return _HEADS[kind](meta, arrays)
    except KeyError as error:
        raise WeightsError(f"weights of a {kind} policy have no {error}; publish them again") from None
