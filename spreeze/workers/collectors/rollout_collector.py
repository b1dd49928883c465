"""Steps environments and stores the transitions as rollouts, bit for bit the same even if processes die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from spreeze.envs.task import ObsBuffer, Task
from spreeze.errors import WorkerError
from spreeze.inference.policy import Policy, State, begin_episode, exploring_arrays
from spreeze.transport.rollouts import Responses, Rollouts, RolloutWriter, StepRows
from spreeze.transport.weights import VersionedParameters
from spreeze.types import EnvSpec
from spreeze.workers.collectors.collector import SLOW_S, Heartbeat, OnError, TaskCollector, do_nothing
from spreeze.workers.roles import Phase

if TYPE_CHECKING:
    from spreeze.workers.samplers import NewestPolicy

_BLOCK_STEPS = 32  # steps whose noise is drawn at once: setting up a generator takes some ten microseconds


class RolloutPolicy:
    """The policy of the current rollout, read again when a new rollout starts."""

    def __init__(self, rollouts: Rollouts, weights: VersionedParameters) -> None:
        self._rollouts, self._weights = rollouts, weights
        self._policy: Policy | None = None
        self.version = -1
        """Rollout of the policy that was returned last."""

    def current(self) -> Policy | None:
        """The policy, or None while it is not published. A rollout lasts until no worker needs its policy any more."""
        current = self._rollouts.current
        if current != self.version:
            newest = self._weights.read(current)
            if newest is None:
                return None
            self._policy = Policy.from_weights(exploring_arrays(newest.arrays), newest.meta)
            self.version = current
        return self._policy


class RolloutCollector(TaskCollector):
    """M environments, ``first`` to ``first + M - 1`` of all, each at its own pace within a rollout."""

    def __init__(
        self,
        make_task: Callable[[], Task],
        spec: EnvSpec,
        rollouts: Rollouts,
        *,
        first: int,
        num_envs: int,
        seed: int,
        step_synchronous: bool = False,
        replays: bool = True,
        nan_policy: str = "drop",
        heartbeat: Heartbeat = do_nothing,
        on_error: OnError = do_nothing,
    ) -> None:
        """Makes the environments and brings each to its state in the rollout slots.

        Without ``replays`` each starts a new episode instead; the one before is truncated. So does an environment that
        the same seed and actions do not reproduce, or whose episode is longer than the log.
        """
        super().__init__(make_task, num_envs, nan_policy=nan_policy, on_error=on_error, heartbeat=heartbeat)
        self._spec, self._rollouts, self._seed, self._first = spec, rollouts, seed, first
        # If the arguments have changed, the current episode may have begun with the old ones.
        self._step_synchronous, self._replays = step_synchronous, replays and not self._version
        self._restart_reported = False
        self.columns = RolloutWriter(rollouts, first, num_envs)
        self._rows = ObsBuffer(num_envs, spec)
        self._sign = spec.frames is not None and spec.frames.sign_rewards
        noise_dim, numbers = rollouts.spec.action_dim, 0 if spec.box is None else spec.box.dim
        envs = range(first, first + num_envs)
        self._noise = [ActionNoise(seed, env, noise_dim, numbers) for env in envs]
        self._noise_rows = np.zeros((num_envs, noise_dim), np.float32)
        state_dim = rollouts.spec.state_dim
        self._state: State = (np.zeros((num_envs, state_dim), np.float32),) if state_dim else ()
        """The policy's state before the next step of each environment."""
        try:
            for index in range(num_envs):
                self._add_task()
                self._restore(index)
        except BaseException:
            self.close()
            raise

    def _restore(self, index: int) -> None:
        """Restores an environment, or starts a new episode and reports that, once per process."""
        if self._replays:
            if (why := self._repeated(index)) is None:
                return
            if not self._restart_reported:
                self._restart_reported = True
                text = f"{why}; a new episode begins in its place, so this run does not repeat exactly"
                self._on_error(f"environment {self._first + index} of {self._spec.env_id}", WorkerError(text), 1)
        self.columns.abandon(index)
        self._reset(index)

    def _repeated(self, index: int) -> str | None:
        """Replays an environment's current episode from its actions; returns why it cannot continue, or None."""
        env = self._first + index
        actions = self._rollouts.played(env)
        if actions is None:
            return f"its episode is longer than the {self._rollouts.spec.log_steps} logged actions"
        if not len(actions):
            self._reset(index)
            return None
        # These steps succeeded before, so an error does not belong to the episode, which is tried again.
        while (ended := self._replayed(index, actions)) is None:
            self._replace(index)
        stored = self._rollouts.last_obs(env)
        if ended:
            return (
                f"with the same seed and actions its episode ended after {self._lengths[index]} of {len(actions)} steps"
            )
        if stored is not None and not np.array_equal(stored, self._rows.array[index]):
            return f"with the same seed and actions its observation after {len(actions)} steps differs"
        for part in self._state:
            part[index] = self._rollouts.memory_of(np.array([env]))[0]
        return None

    def _replayed(self, index: int, actions: np.ndarray) -> bool | None:
        """Replays the current episode; returns True if it ended, None if the environment raised."""
        try:
            self._begin(index)
            for action in self._tasks[index].to_env_units(actions):
                self._heartbeat(Phase.RESET)
                obs, reward, terminated, truncated = self._tasks[index].step(action)
                self._take(index, obs, reward)
                if terminated or truncated:
                    return True
        except Exception as error:
            self._count_error(self._where(index, f"step {self._lengths[index] + 1}, repeated"), error)
            return None
        return False

    def _reset(self, index: int) -> None:
        while True:
            self._heartbeat(Phase.RESET)
            try:
                self._begin(index)
                return
            except Exception as error:
                self._drop_episode(index, "reset", error)

    def _drop_episode(self, index: int, what: str, error: Exception) -> None:
        """Gives up the current episode and replaces its environment; does not start the next episode."""
        self._count_error(self._where(index, what), error)
        self.columns.abandon(index)
        self._replace(index)

    def _where(self, index: int, what: str) -> str:
        return f"environment {self._first + index}, episode {self.columns.episode[index]}, {what}"

    def _begin(self, index: int) -> None:
        self._returns[index], self._lengths[index] = 0.0, 0
        begin_episode(self._state, index)
        seed = reset_seed(self._seed, self._first + index, self.columns.episode[index])
        self._rows.start(index, self._tasks[index].reset(seed))

    def _take(self, index: int, obs: np.ndarray, reward: float) -> None:
        self._rows.put(index, obs)
        self._returns[index] += reward
        self._lengths[index] += 1

    def may_step(self) -> list[int]:
        return self.columns.may_step(step_synchronous=self._step_synchronous)

    def requests(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray, State]:
        """Observations [n, O], noise [n, Z] and states [n, S] for the next actions; valid until the next step."""
        episode, lengths = self.columns.episode, self._lengths
        for index in indices:
            self._noise_rows[index] = self._noise[index].at(episode[index], lengths[index])
        rows = self.columns.rows(indices)
        return self._rows.array[rows], self._noise_rows[rows], tuple(part[rows] for part in self._state)

    def advance(self, policies: RolloutPolicy | NewestPolicy) -> bool:
        """Steps all open environments with actions drawn here; False if there are none, or no policy yet."""
        start = perf_counter()
        indices = self.may_step()
        policy = policies.current() if indices else None
        if policy is not None:
            action, log_prob, state = policy.sample(*self.requests(indices))
        self.counts.policy_s += perf_counter() - start
        if policy is not None:
            self.step(indices, Responses(action, log_prob, policies.version, state))
        return policy is not None

    def step(self, indices: Sequence[int], responses: Responses) -> None:
        """Steps environments and commits their rows."""
        start = perf_counter()
        obs = self._rows.array[self.columns.rows(indices)].copy()
        env_actions = self._tasks[0].to_env_units(responses.action)
        rewards, terminated, truncated = [], [], []
        failed: dict[int, Exception] = {}
        for row, index in enumerate(indices):
            if self._is_slow:
                self._heartbeat(Phase.STEP)
            try:
                step_obs, reward, is_terminated, is_truncated = self._tasks[index].step(env_actions[row])
            except Exception as error:
                failed[index] = error
                continue
            self._take(index, step_obs, reward)
            rewards.append(reward)
            terminated.append(is_terminated)
            truncated.append(is_truncated)
        stepped = perf_counter()
        self._is_slow = stepped - start > SLOW_S
        if self.inline_evaluation is not None and truncated and self.inline_evaluation.overdue:
            truncated[0] = not terminated[0]
        if failed:
            kept = [row for row, index in enumerate(indices) if index not in failed]
            indices, obs, responses = [indices[row] for row in kept], obs[kept], responses.of(kept)
        if self._sign:
            rewards = np.sign(rewards).tolist()
        if indices:
            at = self.columns.rows(indices)
            next_obs, states = self._rows.array[at], (*(part[at] for part in self._state), *responses.state)
            self.columns.commit(
                indices, StepRows(obs, *responses[:3], rewards, terminated, truncated, next_obs, *states)
            )
            for part, following in zip(self._state, responses.state, strict=True):
                part[at] = following
        written = perf_counter()
        self.counts.env_steps += len(indices)
        for row, index in enumerate(indices):
            if terminated[row] or truncated[row]:
                self._end_episode(index)
                self._reset(index)
        for index, reason in failed.items():
            self._drop_episode(index, f"step {self._lengths[index] + 1}", reason)
            self._reset(index)
        self.counts.env_s += stepped - start + perf_counter() - written
        self.counts.write_s += written - stepped

    def close(self) -> None:
        self.columns.close()
        super().close()


def reset_seed(seed: int, env: int, episode: int) -> int:
    return int(np.random.SeedSequence((seed, env, episode)).generate_state(1)[0]) >> 1  # 31 bits


class ActionNoise:
    def __init__(self, seed: int, env: int, noise_dim: int, continuous: int) -> None:
        """Draws the first ``continuous`` values of a step from a standard normal, the others uniformly from [0, 1)."""
        self._key = (seed, env)
        self._noise_dim, self._continuous = noise_dim, continuous
        self._block_key: tuple[int, int] | None = None
        self._block = np.zeros((0, noise_dim), np.float32)

    def at(self, episode: int, step: int) -> np.ndarray:
        """Noise float32 [Z] of a step; valid until the next call."""
        number, row = divmod(step, _BLOCK_STEPS)
        if self._block_key != (episode, number):
            self._block_key = (episode, number)
            # The generator increments the first word; the other two identify the block.
            rng = np.random.Generator(np.random.Philox(key=self._key, counter=(0, number, episode, 0)))
            normal = rng.standard_normal((_BLOCK_STEPS, self._continuous), np.float32)
            uniform = rng.random((_BLOCK_STEPS, self._noise_dim - self._continuous), np.float32)
            self._block = np.hstack((normal, uniform))
        noise: np.ndarray = self._block[row]
        return noise
