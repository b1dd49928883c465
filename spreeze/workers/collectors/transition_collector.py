"""Steps environments and stores the transitions as replay rows, of vectors or of images; each image is stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from spreeze.envs.task import ActionScaling, ObsBuffer, Task
from spreeze.envs.vector_task import VectorTask
from spreeze.inference.normalizer import DiscountedReturns
from spreeze.inference.policy import State, begin_episode
from spreeze.machine.processes import close_in_time
from spreeze.transport.replay_ring import ShardWriter
from spreeze.transport.transitions import FrameLog, NStepBatch
from spreeze.types import EnvSpec
from spreeze.workers.collectors.collector import SLOW_S, Collector, OnError, OnProgress, ignored
from spreeze.workers.roles import Phase


class StepBatch(NamedTuple):
    actions: np.ndarray  # [N, A], as the policy gave them
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    ended: dict[int, bool]  # environment -> truncated, of those whose episode ended
    failed: list[int]  # environments that raised; they get no row
    version: int  # of the policy
    kept: bool = True  # False: rows of vectors are dropped


class FlatObsRowWriter:
    """Writes rows of vector observations; ``obs`` [N, O] is current, and two buffers alternate."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float) -> None:
        self.obs = np.zeros((num_envs, spec.obs_dim), np.float32)
        self._next_obs = np.zeros_like(self.obs)
        self._writer = writer
        self._windows = NStepBatch(n_step, gamma, num_envs, spec.obs_dim, spec.action_dim) if n_step > 1 else None

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        self.obs[index] = obs

    def set_next_obs(self, index: int | slice, obs: np.ndarray) -> None:
        self._next_obs[index] = obs

    def store(self, batch: StepBatch) -> None:
        columns = [self.obs, batch.actions, batch.reward, batch.terminated, self._next_obs]
        num_steps = None
        if self._windows is not None:
            *columns, num_steps = self._windows.push(
                *columns, ended=self._among(batch.ended), lost=self._among(batch.failed)
            )
        elif batch.failed:
            kept = ~self._among(batch.failed)
            columns = [column[kept] for column in columns]
        obs, actions, reward, terminated, next_obs = columns
        if len(obs) and batch.kept:
            self._writer.write(obs, actions, reward, terminated, next_obs, num_steps, batch.version)
        self.obs, self._next_obs = self._next_obs, self.obs

    def _among(self, indices: Iterable[int]) -> np.ndarray:
        """Bool [N]: True for these environments."""
        mask = np.zeros(len(self.obs), bool)
        mask[list(indices)] = True
        return mask


class FrameRowWriter:
    """Writes rows of images: frame stacks for the policy are kept here, each frame is stored once in replay."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float) -> None:
        assert spec.frames is not None
        self._rows = ObsBuffer(num_envs, spec)
        self._sign = spec.frames.sign_rewards
        self._log = FrameLog(writer, num_envs, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        """[N, k, *frame] uint8."""
        return self._rows.array

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.start(index, obs)
        self._log.start(index, obs.reshape(-1))

    def set_next_obs(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.put(index, obs)

    def store(self, batch: StepBatch) -> None:
        newest = self._rows.array[:, -1]
        reward = np.sign(batch.reward) if self._sign else batch.reward
        for index in range(len(newest)):
            if index not in batch.failed:
                self._log.add(
                    index,
                    batch.actions[index],
                    float(reward[index]),
                    bool(batch.terminated[index]),
                    batch.ended.get(index, False),
                    newest[index].reshape(-1),
                )
        self._log.flush(batch.version)


_REWARD_STEPS, _FIRST_REWARDS = 128, 4096
"""Steps whose rewards are added up together (0.1 ms); a fourth of them until this many rewards are counted."""
_ALL = slice(None)


class TransitionCollector(Collector):
    """N environments stepped together; with ``make_vector`` as one, where an error ends all episodes."""

    rows_per_step = 1  # most rows that one env step writes

    def __init__(
        self,
        make_task: Callable[[], Task],
        num_envs: int,
        spec: EnvSpec,
        writer: ShardWriter,
        *,
        n_step: int,
        gamma: float,
        seeds: list[int],
        nan_policy: str = "drop",
        on_progress: OnProgress = ignored,
        on_error: OnError = ignored,
        make_vector: Callable[[int, int], VectorTask] | None = None,
    ) -> None:
        super().__init__(make_task, num_envs, nan_policy=nan_policy, on_error=on_error, on_progress=on_progress)
        self._to_env_units = ActionScaling(spec, bounded=True)
        self._rows = self._new_row_writer(spec, num_envs, writer, n_step, gamma)
        self.state = State()
        self._reward = np.zeros(num_envs, np.float32)
        self._terminated = np.zeros(num_envs, np.float32)
        self._discounted, self._in_block = DiscountedReturns(gamma), 0
        self._rewards = np.zeros((_REWARD_STEPS, num_envs), np.float32)
        self._ends = np.zeros((_REWARD_STEPS, num_envs), bool)
        self._block_steps = _REWARD_STEPS // 4
        self._make_vector, self._seed = make_vector, seeds[0]
        self.keeps_rows = True
        """False: the rows of the next step are dropped, except of images, sequences and goals: these need all rows."""
        self._later_seeds = np.random.default_rng(seeds)
        self._vector: VectorTask | None = None
        if make_vector is not None:
            self._renew_vector()
        for index in range(num_envs if make_vector is None else 0):
            on_progress(Phase.INIT)
            self._versions.append(self._version)
            self._tasks.append(self._make_task())
            self._reset(index, seeds[index])

    def _new_row_writer(
        self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float
    ) -> FlatObsRowWriter | FrameRowWriter:
        return (FlatObsRowWriter if spec.frames is None else FrameRowWriter)(spec, num_envs, writer, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        return self._rows.obs

    def step(self, actions: np.ndarray, version: int) -> None:
        """Steps every environment once with a policy's ``actions`` [N, A] and stores the rows."""
        start = perf_counter()
        native = self._to_env_units(actions, np.empty_like(actions))  # new: environments may keep their action
        ended, failed = self._step_tasks(native) if self._make_vector is None else self._step_vector(native)
        stepped = perf_counter()
        self._is_slow = stepped - start > SLOW_S
        if self.inline_evaluation is not None and not ended and not failed and self.inline_evaluation.overdue:
            ended = [(0, True)]
        kept = self.keeps_rows
        self._rows.store(StepBatch(actions, self._reward, self._terminated, dict(ended), failed, version, kept))
        self._count_rewards(ended, failed)
        written = perf_counter()
        self.counts.env_steps += self.num_envs - len(failed)
        for index in failed:
            begin_episode(self.state, index)
        for index, _ in ended:
            begin_episode(self.state, index)
            self._count_episode(index)
            self._between_episodes(index)
            self._reset(index, None)
        if self._make_vector is None:
            for index in failed:
                self._reset(index, self._rebuild(index))
        elif self._vector is None:
            self._renew_vector()
        else:
            self._rows.start(_ALL, self._vector.obs)
        self.counts.env_s += stepped - start + perf_counter() - written
        self.counts.write_s += written - stepped

    def _count_rewards(self, ended: list[tuple[int, bool]], failed: list[int]) -> None:
        at = self._in_block
        self._rewards[at] = self._reward
        if ended or failed:
            self._ends[at, [index for index, _ in ended] + failed] = True
            self._rewards[at, failed] = 0.0
        self._in_block = steps = at + 1
        if steps == self._block_steps:
            self._discounted.add(self._rewards[:steps], self._ends[:steps])
            self.counts.returns = self._discounted.sums()
            self._ends[...], self._in_block = False, 0
            if self._discounted.count >= _FIRST_REWARDS:
                self._block_steps = _REWARD_STEPS

    def _step_tasks(self, native: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Steps one by one; returns (index, truncated) of ended episodes, and the environments without a row."""
        ended: list[tuple[int, bool]] = []
        failed: list[int] = []
        set_next_obs, reward, terminated = self._rows.set_next_obs, self._reward, self._terminated
        for index, task in enumerate(self._tasks):
            if self._is_slow:
                self._on_progress(Phase.STEP)
            try:
                step_obs, step_reward, step_terminated, step_truncated = task.step(native[index])
            except Exception as error:
                self._count_error(f"environment {index}", error)
                failed.append(index)
                continue
            set_next_obs(index, step_obs)
            reward[index] = step_reward
            terminated[index] = step_terminated
            self._returns[index] += step_reward
            self._lengths[index] += 1
            if step_terminated or step_truncated:
                ended.append((index, step_truncated))
        return ended, failed

    def _step_vector(self, native: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Like ``_step_tasks`` for a vector environment, whose steps that start an episode may give no row."""
        assert self._vector is not None
        try:
            done = self._vector.step(native)
        except Exception as error:
            self._count_error("environment 0", error)
            self._vector.close()
            self._vector = None
            return [], list(range(self.num_envs))
        self._rows.set_next_obs(_ALL, done.next_obs)
        self._reward[...], self._terminated[...] = done.reward, done.terminated
        np.add(self._running[0], done.reward, out=self._running[0], where=done.valid)
        self._running[1] += done.valid
        over = np.flatnonzero(done.terminated | done.truncated).tolist()
        for index in over:
            self._end_running(index)
        return [(index, bool(done.truncated[index])) for index in over], np.flatnonzero(~done.valid).tolist()

    def _renew_vector(self) -> None:
        assert self._make_vector is not None
        while True:
            self._on_progress(Phase.INIT)
            try:
                self._vector = self._make_vector(self.num_envs, self._seed)
                self._rows.start(_ALL, self._vector.reset(self._seed))
                break
            except Exception as error:
                self._count_error("environment 0", error)
        self._seed += self.num_envs  # other episodes after an error
        self._running[...] = 0.0

    def _reset(self, index: int, seed: int | None) -> None:
        """Resets one environment, replacing it as long as its reset raises; a vector one resets itself."""
        while self._make_vector is None:
            self._on_progress(Phase.RESET)
            try:
                self._rows.start(index, self._tasks[index].reset(seed))
                break
            except Exception as error:
                self._count_error(f"environment {index}", error)
                seed = self._rebuild(index)
        self._returns[index], self._lengths[index] = 0.0, 0

    def _rebuild(self, index: int) -> int:
        """Replaces an environment; returns the seed of its first reset, so that runs are repeatable."""
        self._replace(index)
        return int(self._later_seeds.integers(2**31))

    def close(self) -> None:
        super().close()
        if self._vector is not None:
            close_in_time(self._vector.close)
