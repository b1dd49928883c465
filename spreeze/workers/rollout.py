"""Stepping the environments of one executor: ask, step what is answered, store; and replay after a death."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from time import perf_counter

import numpy as np

from spreeze.envs.task import ObsRows, Task
from spreeze.errors import WorkerError
from spreeze.transport.exchange import Exchange
from spreeze.transport.rollouts import Rollouts, StepRows
from spreeze.types import EnvSpec
from spreeze.workers.counts import Counts
from spreeze.workers.randomness import ActionNoise, reset_seed


class RolloutEnvs:
    """M environments, ``first`` to ``first + M - 1`` of all, each at its own pace within an interval."""

    def __init__(
        self, make_task: Callable[[], Task], spec: EnvSpec, rollouts: Rollouts, exchange: Exchange, *, first: int,
        num_envs: int, seed: int, step_synchronous: bool = False, on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the environments and brings each to where the storages say it is.

        Raises:
            WorkerError: an environment does not repeat, or its episode is too long to be replayed.
        """
        self._spec, self._rollouts, self._exchange, self._seed = spec, rollouts, exchange, seed
        self._step_synchronous, self._on_progress = step_synchronous, on_progress
        self.envs = np.arange(first, first + num_envs)
        self.mine = slice(first, first + num_envs)
        self._rows = ObsRows(num_envs, spec)
        self._sign = spec.frames is not None and spec.frames.sign_rewards
        noise_dim, uniform = rollouts.spec.noise_dim, spec.num_actions is not None
        self._noise = [ActionNoise(seed, int(env), noise_dim, uniform=uniform) for env in self.envs]
        self._returns, self._lengths, self._episodes = [0.0] * num_envs, [0] * num_envs, [0] * num_envs
        self._recent: deque[tuple[float, int]] = deque(maxlen=10)
        self.counts = Counts()
        self._tasks: list[Task] = []
        try:
            for index in range(num_envs):
                on_progress()
                self._tasks.append(make_task())
                self._go_back(index)
        except BaseException:
            self.close()
            raise

    def _go_back(self, index: int) -> None:
        """Begins the current episode of an environment and applies its actions again."""
        env = int(self.envs[index])
        self._episodes[index] = int(self._rollouts.episode_of(self.envs[index : index + 1])[1][0])
        actions = self._rollouts.played(env)
        if actions is None:
            raise WorkerError(
                f"environment {env} of {self._spec.env_id} cannot be brought back: its episode is longer than the "
                f"{self._rollouts.spec.log_steps} actions that are kept; give the task a step limit"
            )
        self._reset(index)
        native = self._tasks[index].to_native(actions) if len(actions) else actions
        for number, action in enumerate(native):
            self._on_progress()
            obs, reward, terminated, truncated = self._tasks[index].step(action)
            self._take(index, obs, reward)
            if terminated or truncated:
                raise self._unlike(env, f"its episode ended after {number + 1} of {len(actions)} steps")
        stored = self._rollouts.last_obs(env)
        if len(actions) and stored is not None and not np.array_equal(stored, self._rows.array[index]):
            raise self._unlike(env, f"after {len(actions)} steps it observed something else")

    def _unlike(self, env: int, what: str) -> WorkerError:
        return WorkerError(
            f"environment {env} is not repeatable: with the same seed and the same actions {what}; "
            f"{self._spec.env_id} cannot be replayed, so a restarted or resumed run would not be the same"
        )

    def _reset(self, index: int) -> None:
        seed = reset_seed(self._seed, int(self.envs[index]), self._episodes[index])
        self._rows.start(index, self._tasks[index].reset(seed))
        self._returns[index], self._lengths[index] = 0.0, 0

    def _take(self, index: int, obs: np.ndarray, reward: float) -> None:
        self._rows.put(index, obs)
        self._returns[index] += reward
        self._lengths[index] += 1

    def ask(self) -> np.ndarray:
        """Asks for the actions that may be taken now; returns the environments asked about."""
        steps = self._rollouts.steps[self.mine]
        indices = np.flatnonzero(self._open(steps) & (self._exchange.asked[self.mine] != steps + 1))
        if indices.size:
            noise = np.stack([self._noise[i].at(self._episodes[i], self._lengths[i]) for i in indices])
            self._exchange.ask(self.envs[indices], self._rows.array[indices], noise, steps[indices] + 1)
        return self.envs[indices]

    def _open(self, steps: np.ndarray) -> np.ndarray:
        """Which environments may take a step: those that have not filled their column of the storage."""
        rollouts = self._rollouts
        open_ = steps < rollouts.spec.sync_interval * (rollouts.interval + 1)
        if self._step_synchronous:
            open_ &= steps <= rollouts.steps.min()
        return open_

    def step(self) -> np.ndarray:
        """Steps the environments whose question is answered and commits their rows; returns them."""
        steps = self._rollouts.steps[self.mine]
        indices = np.flatnonzero(self._open(steps) & (self._exchange.answered[self.mine] == steps + 1))
        if not indices.size:
            return indices
        start = perf_counter()
        envs = self.envs[indices]
        answers = self._exchange.answers(envs)
        native = self._tasks[0].to_native(answers.action)
        obs = self._rows.array[indices]
        reward = np.zeros(len(indices), np.float32)
        ends = np.zeros((2, len(indices)), np.bool_)
        for row, index in enumerate(indices.tolist()):
            step_obs, reward[row], ends[0, row], ends[1, row] = self._stepped(index, native[row])
            self._take(index, step_obs, float(reward[row]))
        stepped = perf_counter()
        if self._sign:
            reward = np.sign(reward)
        self._rollouts.write(envs, StepRows(obs, answers.action, answers.log_prob, answers.version, reward,
                                            ends[0], ends[1], self._rows.array[indices]))
        written = perf_counter()
        self.counts.env_steps += len(indices)
        for index in indices[ends.any(axis=0)].tolist():
            self._finish(index)
        self.counts.env_s += stepped - start + perf_counter() - written
        self.counts.write_s += written - stepped
        return envs

    def _stepped(self, index: int, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        try:
            return self._tasks[index].step(action)
        except Exception as error:
            raise WorkerError(
                f"environment {self.envs[index]}, episode {self._episodes[index]}, step {self._lengths[index] + 1}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _finish(self, index: int) -> None:
        self._recent.append((self._returns[index], self._lengths[index]))
        counts = self.counts
        counts.episodes += 1
        counts.episode_return = sum(entry[0] for entry in self._recent) / len(self._recent)
        counts.episode_length = sum(entry[1] for entry in self._recent) / len(self._recent)
        self._episodes[index] += 1
        self._on_progress()
        self._reset(index)

    @property
    def last_of_step(self) -> bool:
        """True where all environments have come as far as these: who was ahead may go on."""
        steps = self._rollouts.steps
        return int(steps.min()) >= int(steps[self.mine].max())

    @property
    def filled(self) -> bool:
        """True while there is nothing left to step in this interval."""
        return int(self._rollouts.steps[self.mine].min()) >= self._rollouts.spec.sync_interval * (
            self._rollouts.interval + 1
        )

    def close(self) -> None:
        """Closes the environments; one that raises hides no earlier error."""
        for task in self._tasks:
            with contextlib.suppress(Exception):
                task.close()
