"""Steps one sampler's environments, stores the rows, and replays episodes after a death of the sampler.

An environment that raises or gives a bad transition loses only its own episode. The failed step is not stored: the
episode ends, truncated, at the last good observation, whose value is still learned from. A new environment, reset with
the seed of the next episode, collects the row. So a rollout keeps its T rows of every environment, and the others are
not affected: their actions and noise depend only on their own number, episode and step. If the error depends only on
an episode's seed and actions, the run repeats bit for bit, with any number of inference workers and any deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from spreeze.envs.task import ObsRows, Task
from spreeze.errors import WorkerError
from spreeze.transport.protocols import RolloutSink, StepRows
from spreeze.transport.rollouts import Answers, Rollouts, RolloutWriter
from spreeze.types import EnvSpec
from spreeze.workers.inference_worker import RolloutPolicy
from spreeze.workers.sampler_stats import Collector, Tell, untold


class RolloutCollector(Collector):
    """M environments, ``first`` to ``first + M - 1`` of all, each at its own pace within a rollout."""

    columns: RolloutSink

    def __init__(
        self, make_task: Callable[[], Task], spec: EnvSpec, rollouts: Rollouts, *, first: int, num_envs: int,
        seed: int, step_synchronous: bool = False, on_progress: Callable[[], None] = lambda: None,
        nan_policy: str = "drop", tell: Tell = untold,
    ) -> None:
        """Makes the environments and brings each to its state in the rollout storages.

        Raises:
            WorkerError: an environment is not repeatable, its episode is too long for a replay, or too many errors.
        """
        super().__init__(make_task, num_envs, nan_policy=nan_policy, tell=tell, on_progress=on_progress)
        self._spec, self._rollouts, self._seed, self._first = spec, rollouts, seed, first
        self._step_synchronous = step_synchronous
        self.columns = RolloutWriter(rollouts, first, num_envs)
        self._rows = ObsRows(num_envs, spec)
        self._sign = spec.frames is not None and spec.frames.sign_rewards
        noise_dim, uniform = rollouts.spec.noise_dim, spec.num_actions is not None
        envs = range(first, first + num_envs)
        self._noise = [ActionNoise(seed, env, noise_dim, uniform=uniform) for env in envs]
        self._noise_rows = np.zeros((num_envs, noise_dim), np.float32)
        try:
            for index in range(num_envs):
                on_progress()
                self._tasks.append(make_task())
                self._go_back(index)
        except BaseException:
            self.close()
            raise

    def _go_back(self, index: int) -> None:
        """Restores an environment: begins its current episode and repeats the episode's actions."""
        env = self._first + index
        actions = self._rollouts.played(env)
        if actions is None:
            raise WorkerError(
                f"environment {env} of {self._spec.env_id} cannot be brought back: its episode is longer than the "
                f"{self._rollouts.spec.log_steps} actions that are kept; give the task a step limit"
            )
        if not len(actions):
            self._reset(index)
            return
        # These steps succeeded before, so an error does not belong to the episode, which is tried again.
        while (ended := self._replayed(index, actions)) is None:
            self._replace(index)
        stored = self._rollouts.last_obs(env)
        if ended:
            raise self._unlike(env, f"its episode ended after {self._lengths[index]} of {len(actions)} steps")
        if stored is not None and not np.array_equal(stored, self._rows.array[index]):
            raise self._unlike(env, f"after {len(actions)} steps it observed something else")

    def _replayed(self, index: int, actions: np.ndarray) -> bool | None:
        """Repeats the current episode with actions; whether it ended, or None if the environment raised."""
        try:
            self._begin(index)
            for action in self._tasks[index].to_native(actions):
                self._on_progress()
                obs, reward, terminated, truncated = self._tasks[index].step(action)
                self._take(index, obs, reward)
                if terminated or truncated:
                    return True
        except Exception as error:
            self._errors.note(self._where(index, f"step {self._lengths[index] + 1}, repeated"), error)
            return None
        return False

    def _unlike(self, env: int, what: str) -> WorkerError:
        return WorkerError(
            f"environment {env} is not repeatable: with the same seed and the same actions {what}; "
            f"{self._spec.env_id} cannot be replayed, so a restarted or resumed run would not be the same"
        )

    def _reset(self, index: int) -> None:
        """Begins the current episode, or the next one whose reset does not raise."""
        while True:
            self._on_progress()
            try:
                self._begin(index)
                return
            except Exception as error:
                self._lose(index, "reset", error)

    def _lose(self, index: int, what: str, error: Exception) -> None:
        """Gives up the current episode and replaces its environment; does not begin the next episode."""
        self._errors.note(self._where(index, what), error)
        self.columns.abandon(index)
        self._replace(index)

    def _where(self, index: int, what: str) -> str:
        return f"environment {self._first + index}, episode {self.columns.episode[index]}, {what}"

    def _begin(self, index: int) -> None:
        self._returns[index], self._lengths[index] = 0.0, 0
        seed = reset_seed(self._seed, self._first + index, self.columns.episode[index])
        self._rows.start(index, self._tasks[index].reset(seed))

    def _take(self, index: int, obs: np.ndarray, reward: float) -> None:
        self._rows.put(index, obs)
        self._returns[index] += reward
        self._lengths[index] += 1

    def open(self) -> list[int]:
        return self.columns.open(step_synchronous=self._step_synchronous)

    def questions(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Observations [n, O] and noise [n, Z] for the next actions; valid until the next step."""
        episode, lengths = self.columns.episode, self._lengths
        for index in indices:
            self._noise_rows[index] = self._noise[index].at(episode[index], lengths[index])
        rows = self.columns.rows(indices)
        return self._rows.array[rows], self._noise_rows[rows]

    def advance(self, policies: RolloutPolicy) -> bool:
        """Steps all open environments with actions drawn here; False if there are none, or no policy yet."""
        start = perf_counter()
        indices = self.open()
        policy = policies.current() if indices else None
        if policy is not None:
            action, log_prob = policy.draw(*self.questions(indices))
        self.counts.policy_s += perf_counter() - start
        if policy is not None:
            self.step(indices, Answers(action, log_prob, policies.interval))
        return policy is not None

    def step(self, indices: Sequence[int], answers: Answers) -> None:
        """Steps environments and commits their rows.

        Raises:
            WorkerError: too many environments raised lately.
        """
        start = perf_counter()
        obs = self._rows.array[self.columns.rows(indices)].copy()
        native = self._tasks[0].to_native(answers.action)
        rewards, terminated, truncated = [], [], []
        failed: dict[int, Exception] = {}
        for row, index in enumerate(indices):
            try:
                step_obs, reward, is_terminated, is_truncated = self._tasks[index].step(native[row])
            except Exception as error:
                failed[index] = error
                continue
            self._take(index, step_obs, reward)
            rewards.append(reward)
            terminated.append(is_terminated)
            truncated.append(is_truncated)
        stepped = perf_counter()
        if failed:
            kept = [row for row, index in enumerate(indices) if index not in failed]
            indices, obs, answers = [indices[row] for row in kept], obs[kept], answers.of(kept)
        if self._sign:
            rewards = np.sign(rewards).tolist()
        if indices:
            next_obs = self._rows.array[self.columns.rows(indices)]
            self.columns.commit(indices, StepRows(obs, *answers, rewards, terminated, truncated, next_obs))
        written = perf_counter()
        self.counts.env_steps += len(indices)
        for row, index in enumerate(indices):
            if terminated[row] or truncated[row]:
                self._count_episode(index)
                self._reset(index)
        for index, reason in failed.items():
            self._lose(index, f"step {self._lengths[index] + 1}", reason)
            self._reset(index)
        self.counts.env_s += stepped - start + perf_counter() - written
        self.counts.write_s += written - stepped

    def close(self) -> None:
        self.columns.close()
        super().close()


_BLOCK_STEPS = 32
"""Steps whose noise is drawn at once: setting up a generator takes some ten microseconds."""
_SEED_BITS = 31


def reset_seed(seed: int, env: int, episode: int) -> int:
    return int(np.random.SeedSequence((seed, env, episode)).generate_state(1)[0]) >> (32 - _SEED_BITS)


class ActionNoise:
    def __init__(self, seed: int, env: int, noise_dim: int, *, uniform: bool) -> None:
        """Draws noise uniformly from [0, 1) if ``uniform`` (discrete actions), else from a standard normal."""
        self._key = (seed, env)
        self._noise_dim, self._uniform = noise_dim, uniform
        self._held: tuple[int, int] | None = None
        self._block = np.zeros((0, noise_dim), np.float32)

    def at(self, episode: int, step: int) -> np.ndarray:
        """Noise float32 [Z] of a step; valid until the next call."""
        number, row = divmod(step, _BLOCK_STEPS)
        if self._held != (episode, number):
            self._held = (episode, number)
            # The generator increments the first word; the other two identify the block.
            rng = np.random.Generator(np.random.Philox(key=self._key, counter=(0, number, episode, 0)))
            draw = rng.random if self._uniform else rng.standard_normal
            self._block = draw((_BLOCK_STEPS, self._noise_dim), np.float32)
        noise: np.ndarray = self._block[row]
        return noise
