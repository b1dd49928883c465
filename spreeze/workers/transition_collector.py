"""Steps environments and turns transitions into replay rows; used by samplers and serial mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from spreeze.envs.task import ActionScaling, ObsRows, Task, uniform_actions
from spreeze.envs.vector_engines import VectorTask
from spreeze.transport.protocols import TransitionSink
from spreeze.transport.replay_ring import ReplayRing, ShardWriter
from spreeze.transport.transitions import FrameLog, NStep
from spreeze.types import EnvSpec
from spreeze.workers.sampler_stats import Collector, Tell, untold

_ALL = slice(None)


class TransitionCollector(Collector):
    """N environments stepped together.

    An environment that raises loses its episode and is replaced; a non-finite or ill-shaped transition is rejected
    before the ring. Too many such errors within a window end the process (``WorkerError``). With ``make_vector`` all N
    are one vector environment, and an error costs all its episodes.
    """

    def __init__(
        self, make_task: Callable[[], Task], num_envs: int, spec: EnvSpec, sink: TransitionSink, *,
        n_step: int, gamma: float, seeds: list[int], nan_policy: str = "drop",
        on_wait: Callable[[], None] = lambda: None, on_reset: Callable[[], None] = lambda: None,
        make_vector: Callable[[int, int], VectorTask] | None = None, tell: Tell = untold,
    ) -> None:
        super().__init__(make_task, num_envs, nan_policy=nan_policy, tell=tell, on_progress=on_wait)
        self._on_reset = on_reset
        self._to_native = ActionScaling(spec, bounded=True)
        self._native = np.zeros((num_envs, spec.action_dim), np.float32)
        self._rows = row_writer_for(spec, num_envs, sink, n_step, gamma)
        self._reward = np.zeros(num_envs, np.float32)
        self._terminated = np.zeros(num_envs, np.float32)
        self._make_vector, self._seed = make_vector, seeds[0]
        self._later_seeds = np.random.default_rng(seeds)
        self._vector: VectorTask | None = None
        if make_vector is not None:
            self._renew_vector()
        for index in range(num_envs if make_vector is None else 0):
            on_wait()
            self._tasks.append(make_task())
            self._reset(index, seeds[index])

    @property
    def obs(self) -> np.ndarray:
        return self._rows.obs

    def step(self, actions: np.ndarray, version: int) -> None:
        """Steps every environment once with a policy's ``actions`` [N, A] and stores the rows.

        Raises:
            WorkerError: too many errors in the window, or a bad transition with ``nan_policy`` "fail".
        """
        start = perf_counter()
        native = self._to_native(actions, self._native)
        ended, broken = self._step_tasks(native) if self._make_vector is None else self._step_vector(native)
        stepped = perf_counter()
        self._rows.store(StepBatch(actions, self._reward, self._terminated, dict(ended), broken, version))
        written = perf_counter()
        self.counts.env_steps += self.num_envs - len(broken)
        for index, _ in ended:
            self._count_episode(index)
            self._reset(index, None)
        self._go_on(broken)
        self.counts.env_s += stepped - start + perf_counter() - written
        self.counts.write_s += written - stepped

    def _step_tasks(self, native: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Steps one by one; returns (index, truncated) of ended episodes, and the environments without a row."""
        ended: list[tuple[int, bool]] = []
        broken: list[int] = []
        take, reward, terminated = self._rows.take, self._reward, self._terminated
        for index, task in enumerate(self._tasks):
            try:
                step_obs, step_reward, step_terminated, step_truncated = task.step(native[index])
            except Exception as error:
                self._note_error(index, error)
                broken.append(index)
                continue
            take(index, step_obs)
            reward[index] = step_reward
            terminated[index] = step_terminated
            self._returns[index] += step_reward
            self._lengths[index] += 1
            if step_terminated or step_truncated:
                ended.append((index, step_truncated))
        return ended, broken

    def _step_vector(self, native: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Like ``_step_tasks`` for a vector environment, whose steps that begin an episode may give no row."""
        assert self._vector is not None
        try:
            done = self._vector.step(native)
        except Exception as error:
            self._note_error(0, error)
            self._vector.close()
            self._vector = None
            return [], list(range(self.num_envs))
        self._rows.take(_ALL, done.next_obs)
        self._reward[...], self._terminated[...] = done.reward, done.terminated
        for index in np.flatnonzero(done.valid).tolist():
            self._returns[index] += float(done.reward[index])
            self._lengths[index] += 1
        over = np.flatnonzero(done.terminated | done.truncated).tolist()
        return [(index, bool(done.truncated[index])) for index in over], np.flatnonzero(~done.valid).tolist()

    def _go_on(self, broken: list[int]) -> None:
        """Replaces broken environments after the rows are stored; takes over the observations of a vector one."""
        if self._make_vector is None:
            for index in broken:
                self._reset(index, self._rebuild(index))
        elif self._vector is None:
            self._renew_vector()
        else:
            self._rows.start(_ALL, self._vector.obs)

    def _renew_vector(self) -> None:
        """Makes and resets the vector environment, and tries again as long as that raises."""
        assert self._make_vector is not None
        while True:
            self._on_progress()
            try:
                self._vector = self._make_vector(self.num_envs, self._seed)
                self._rows.start(_ALL, self._vector.reset(self._seed))
                break
            except Exception as error:
                self._note_error(0, error)
        self._seed += self.num_envs  # other episodes after an error
        self._returns, self._lengths = [0.0] * self.num_envs, [0] * self.num_envs

    def _reset(self, index: int, seed: int | None) -> None:
        """Resets one environment, replacing it as long as its reset raises; a vector one resets itself."""
        while self._make_vector is None:
            self._on_reset()
            try:
                self._rows.start(index, self._tasks[index].reset(seed))
                break
            except Exception as error:
                self._note_error(index, error)
                seed = self._rebuild(index)
        self._returns[index] = 0.0
        self._lengths[index] = 0

    def _rebuild(self, index: int) -> int:
        """Replaces an environment; returns the seed of its first reset, so that runs are repeatable."""
        self._replace(index)
        return int(self._later_seeds.integers(2**31))

    def _note_error(self, index: int, error: Exception) -> None:
        self._errors.note(f"environment {index}", error)

    def close(self) -> None:
        super().close()
        if self._vector is not None:
            with contextlib.suppress(Exception):
                self._vector.close()


class StepBatch(NamedTuple):
    actions: np.ndarray  # [N, A], as the policy gave them
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    ended: dict[int, bool]  # environment -> truncated, of those whose episode ended
    broken: list[int]  # environments that raised; they get no row
    version: int  # of the policy


def row_writer_for(
    spec: EnvSpec, num_envs: int, sink: TransitionSink, n_step: int, gamma: float
) -> VectorRowWriter | FrameRowWriter:
    if spec.frames is None:
        return VectorRowWriter(spec, num_envs, sink, n_step, gamma)
    return FrameRowWriter(spec, num_envs, sink, n_step, gamma)


class VectorRowWriter:
    """Writes rows of vector observations; ``obs`` [N, O] is current, and two buffers alternate."""

    def __init__(self, spec: EnvSpec, num_envs: int, sink: TransitionSink, n_step: int, gamma: float) -> None:
        self.obs = np.zeros((num_envs, spec.obs_dim), np.float32)
        self._next_obs = np.zeros_like(self.obs)
        self._sink = sink
        self._n_steps = [NStep(n_step, gamma) for _ in range(num_envs)] if n_step > 1 else None

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        self.obs[index] = obs

    def take(self, index: int | slice, obs: np.ndarray) -> None:
        self._next_obs[index] = obs

    def store(self, batch: StepBatch) -> None:
        if self._n_steps is not None:
            self._store_n_step(batch)
        elif not batch.broken:
            self._sink.write(self.obs, batch.actions, batch.reward, batch.terminated, self._next_obs,
                             version=batch.version)
        else:
            keep = np.setdiff1d(np.arange(len(self.obs)), batch.broken)
            if keep.size:
                self._sink.write(self.obs[keep], batch.actions[keep], batch.reward[keep], batch.terminated[keep],
                                 self._next_obs[keep], version=batch.version)
        self.obs, self._next_obs = self._next_obs, self.obs

    def _store_n_step(self, batch: StepBatch) -> None:
        assert self._n_steps is not None
        rows = []
        for index, window in enumerate(self._n_steps):
            if index in batch.broken:
                window.clear()
                continue
            rows += window.push(self.obs[index], batch.actions[index], float(batch.reward[index]),
                                bool(batch.terminated[index]), batch.ended.get(index, False), self._next_obs[index])
        if not rows:
            return
        obs, action, returns, terminated, next_obs, spans = zip(*rows, strict=True)
        self._sink.write(np.stack(obs), np.stack(action), np.asarray(returns, np.float32),
                         np.asarray(terminated, np.float32), np.stack(next_obs),
                         num_steps=np.asarray(spans, np.float32), version=batch.version)


class FrameRowWriter:
    """Writes rows of images: frame stacks for the policy are kept here, each frame is stored once in replay."""

    def __init__(self, spec: EnvSpec, num_envs: int, sink: TransitionSink, n_step: int, gamma: float) -> None:
        assert spec.frames is not None
        self._rows = ObsRows(num_envs, spec)
        self._sign = spec.frames.sign_rewards
        self._log = FrameLog(sink, num_envs, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        """[N, k, C, H, W] uint8."""
        return self._rows.array

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.start(index, obs)
        self._log.start(index, obs.reshape(-1))

    def take(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.put(index, obs)

    def store(self, batch: StepBatch) -> None:
        newest = self._rows.array[:, -1]
        reward = np.sign(batch.reward) if self._sign else batch.reward
        for index in range(len(newest)):
            if index not in batch.broken:
                self._log.add(index, batch.actions[index], float(reward[index]), bool(batch.terminated[index]),
                              batch.ended.get(index, False), newest[index].reshape(-1))
        self._log.flush(batch.version)


_DRAWN_ROWS = 4096
_IMAGES = 2000


def fill_with_synthetic_rows(ring: ReplayRing, spec: EnvSpec) -> None:
    """Fills every shard with normal observations and uniform actions for measurements; call before any other write."""
    layout, rng = ring.spec.layout, np.random.default_rng(0)
    if spec.frames is not None:
        for shard in range(ring.spec.num_shards):
            _fill_frames(ring, shard, spec, rng)
        return
    count = min(_DRAWN_ROWS, ring.spec.rows_per_shard)
    obs, next_obs = (rng.standard_normal((count, layout.obs_dim), np.float32) for _ in range(2))
    action, reward = uniform_actions(spec, count, rng), rng.standard_normal(count, np.float32)
    steps, terminated = None if layout.num_steps is None else np.ones(count), np.zeros(count)
    for shard in range(ring.spec.num_shards):
        writer, left = ShardWriter(ring, shard), ring.spec.rows_per_shard
        while left > 0:
            part = slice(0, min(count, left))
            writer.write(obs[part], action[part], reward[part], terminated[part], next_obs[part],
                         None if steps is None else steps[part])
            left -= count


def _fill_frames(ring: ReplayRing, shard: int, spec: EnvSpec, rng: np.random.Generator) -> None:
    log = FrameLog(ShardWriter(ring, shard), 1, ring.spec.layout.n_step, 0.99)
    frames = rng.integers(256, size=(16, ring.spec.layout.frame_bytes), dtype=np.uint8)
    log.start(0, frames[0])
    for step, action in enumerate(uniform_actions(spec, min(_IMAGES, ring.spec.rows_per_shard) - 1, rng)):
        log.add(0, action, 0.0, False, False, frames[step % len(frames)])
        log.flush(0)
