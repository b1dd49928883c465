"""Steps environments and stores the transitions as replay rows, of vectors or of images; each image is stored once.

*Sequences*, for policies with memory (R2D2: Kapturowski et al. 2019). The steps of an environment, one episode after
the other, are a stream of slots, cut into sequences of T. So each step is in one sequence, however short episodes
are, and a row of replay stands for T env steps. A truncated episode takes one more slot, for its last observation,
from which the step before it bootstraps. Each sequence is preceded by the b slots that lead to it, over which a
learner only computes the state. The policy's state before the first of them is stored.

*Hindsight* experience replay (Andrychowicz et al. 2017, arXiv 1707.01495). When an episode is over, each of its
transitions is stored again with goals that the episode achieved, and with the rewards that the environment's
``compute_reward`` gives for these. So replay, reader and learner know nothing of goals. These rows are written little
by little, at most k for each env step, so that the rows of a step are 1 + k once the first episode of each
environment is over, and no burst of them delays samplers or overwrites new rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from spreeze.envs.goals import GoalRewards
from spreeze.envs.scalars import FLOAT32_MAX
from spreeze.envs.task import ActionScaling, ObsBuffer, Task
from spreeze.envs.vector_task import VectorTask
from spreeze.inference.normalizer import DiscountedReturns
from spreeze.inference.policy import State, begin_episode
from spreeze.machine.processes import close_in_time
from spreeze.transport.replay_ring import ShardWriter
from spreeze.transport.transitions import FrameLog, NStepBatch
from spreeze.types import EnvSpec, RowLayout
from spreeze.workers.collectors.collector import SLOW_S, Heartbeat, OnError, TaskCollector, do_nothing
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
        self._obs_buffer = ObsBuffer(num_envs, spec)
        self._sign = spec.frames.sign_rewards
        self._log = FrameLog(writer, num_envs, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        """[N, k, *frame] uint8."""
        return self._obs_buffer.array

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._obs_buffer.start(index, obs)
        self._log.start(index, obs.reshape(-1))

    def set_next_obs(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._obs_buffer.put(index, obs)

    def store(self, batch: StepBatch) -> None:
        newest = self._obs_buffer.array[:, -1]
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
_STREAM = 17  # separates the draws of goals from other draws with the same seeds


class TransitionCollector(TaskCollector):
    """N environments stepped together."""

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
        heartbeat: Heartbeat = do_nothing,
        on_error: OnError = do_nothing,
    ) -> None:
        super().__init__(make_task, num_envs, nan_policy=nan_policy, on_error=on_error, heartbeat=heartbeat)
        self._to_env_units = ActionScaling(spec, bounded=True)
        self._row_writer = self._new_row_writer(spec, num_envs, writer, n_step, gamma)
        self.state = State()
        self._reward = np.zeros(num_envs, np.float32)
        self._terminated = np.zeros(num_envs, np.float32)
        self._discounted, self._in_block = DiscountedReturns(gamma), 0
        self._rewards = np.zeros((_REWARD_STEPS, num_envs), np.float32)
        self._ends = np.zeros((_REWARD_STEPS, num_envs), bool)
        self._block_steps = _REWARD_STEPS // 4
        self.keeps_rows = True
        """False: the rows of the next step are dropped, except of images, sequences and goals: these need all rows."""
        self._later_seeds = np.random.default_rng(seeds)
        self._open(seeds)

    def _open(self, seeds: list[int]) -> None:
        for index, seed in enumerate(seeds):
            self._add_task()
            self._reset(index, seed)

    def _new_row_writer(
        self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float
    ) -> FlatObsRowWriter | FrameRowWriter:
        if writer.layout.sequence is not None:
            return SequenceRowWriter(spec, num_envs, writer, gamma)
        return (FlatObsRowWriter if spec.frames is None else FrameRowWriter)(spec, num_envs, writer, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        return self._row_writer.obs

    def step(self, actions: np.ndarray, version: int) -> None:
        """Steps every environment once with a policy's ``actions`` [N, A] and stores the rows."""
        start = perf_counter()
        env_actions = self._to_env_units(actions, np.empty_like(actions))  # new: environments may keep their action
        ended, failed = self._step_envs(env_actions)
        stepped = perf_counter()
        self._is_slow = stepped - start > SLOW_S
        if self.inline_evaluation is not None and not ended and not failed and self.inline_evaluation.overdue:
            ended = [(0, True)]
        kept = self.keeps_rows
        self._row_writer.store(StepBatch(actions, self._reward, self._terminated, dict(ended), failed, version, kept))
        self._count_rewards(ended, failed)
        written = perf_counter()
        self.counts.env_steps += self.num_envs - len(failed)
        if ended or failed:
            for index in (*failed, *dict(ended)):
                begin_episode(self.state, index)
        self._begin_episodes(ended, failed)
        if self.state and isinstance(self._row_writer, SequenceRowWriter):
            self._row_writer.state = self.state[0].copy()
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

    def _step_envs(self, env_actions: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Steps one by one; returns (index, truncated) of ended episodes, and the environments without a row."""
        ended: list[tuple[int, bool]] = []
        failed: list[int] = []
        set_next_obs, reward, terminated = self._row_writer.set_next_obs, self._reward, self._terminated
        for index, task in enumerate(self._tasks):
            if self._is_slow:
                self._heartbeat(Phase.STEP)
            try:
                step_obs, step_reward, step_terminated, step_truncated = task.step(env_actions[index])
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

    def _begin_episodes(self, ended: list[tuple[int, bool]], failed: list[int]) -> None:
        for index, _ in ended:
            self._end_episode(index)
            self._reset(index, None)
        for index in failed:
            self._reset(index, self._rebuild(index))

    def _reset(self, index: int, seed: int | None) -> None:
        """Resets one environment, replacing it as long as its reset raises."""
        while True:
            self._heartbeat(Phase.RESET)
            try:
                self._row_writer.start(index, self._tasks[index].reset(seed))
                break
            except Exception as error:
                self._count_error(f"environment {index}", error)
                seed = self._rebuild(index)
        self._returns[index], self._lengths[index] = 0.0, 0

    def _rebuild(self, index: int) -> int:
        """Replaces an environment; returns the seed of its first reset, so that runs are repeatable."""
        self._replace(index)
        return int(self._later_seeds.integers(2**31))


class VectorCollector(TransitionCollector):
    """N environments that are stepped as one, which resets itself; an error ends all episodes."""

    def __init__(self, *args: Any, make_vector: Callable[[int, int], VectorTask], **options: Any) -> None:
        self._make_vector = make_vector
        self._vector: VectorTask | None = None
        super().__init__(*args, **options)

    def _open(self, seeds: list[int]) -> None:
        self._seed = seeds[0]
        self._renew_vector()

    def _step_envs(self, env_actions: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Steps all at once; a step that starts an episode may give no row."""
        assert self._vector is not None
        try:
            done = self._vector.step(env_actions)
        except Exception as error:
            self._count_error("the environments", error, effect="all their episodes are lost")
            close_in_time(self._vector.close)
            self._vector = None
            return [], list(range(self.num_envs))
        self._row_writer.set_next_obs(_ALL, done.next_obs)
        self._reward[...], self._terminated[...] = done.reward, done.terminated
        np.add(self._episode_totals[0], done.reward, out=self._episode_totals[0], where=done.valid)
        self._episode_totals[1] += done.valid
        over = np.flatnonzero(done.terminated | done.truncated).tolist()
        for index in over:
            self._end_episode_totals(index)
        return [(index, bool(done.truncated[index])) for index in over], np.flatnonzero(~done.valid).tolist()

    def _begin_episodes(self, ended: list[tuple[int, bool]], failed: list[int]) -> None:
        for index, _ in ended:
            self._count_episode(index)
        if self._vector is None:
            self._renew_vector()
        else:
            self._row_writer.start(_ALL, self._vector.obs)

    def _renew_vector(self) -> None:
        while True:
            self._heartbeat(Phase.INIT)
            made: VectorTask | None = None
            try:
                made = self._make_vector(self.num_envs, self._seed)
                self._row_writer.start(_ALL, made.reset(self._seed))
                self._vector = made
                break
            except Exception as error:
                close_in_time(*() if made is None else (made.close,))
                self._count_error("the environments", error, effect="they are made again")
        self._seed += self.num_envs  # other episodes after an error
        self._episode_totals[...] = 0.0

    def close(self) -> None:
        if self._vector is not None:
            close_in_time(self._vector.close)


# --- sequences ---


class SequenceRowWriter(FlatObsRowWriter):
    """Writes a row whenever T more slots of an environment are full."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: ShardWriter, gamma: float) -> None:
        super().__init__(spec, num_envs, writer, 1, gamma)
        shape = writer.layout.sequence
        assert shape is not None
        self._length, self._burn_in, self._slots = shape.length, shape.burn_in, shape.slots
        self.state = np.zeros((num_envs, shape.state_dim), np.float32)
        slots = self._slots
        self._seen = np.zeros((num_envs, slots + 1, spec.obs_dim), np.float32)
        self._action = np.zeros((num_envs, slots, spec.action_dim), np.float32)
        self._scalars = np.zeros((num_envs, 4, slots), np.float32)  # reward, terminated, valid, begins
        self._states = np.zeros((num_envs, slots, shape.state_dim), np.float32)
        self._filled = np.full(num_envs, self._burn_in)  # there is nothing before a stream's first slot
        self._begins = np.ones(num_envs, np.float32)
        self._all = np.arange(num_envs)

    def store(self, batch: StepBatch) -> None:
        lost, rows = self._among(batch.failed), list[np.ndarray]()
        valid = np.where(lost, np.float32(0.0), np.float32(1.0))
        self._put(self._all, self.obs, batch.actions * valid[:, None], batch.reward, batch.terminated, valid, rows)
        self._begins[...] = 0.0
        ended = [index for index, truncated in batch.ended.items() if truncated and not batch.terminated[index]]
        if ended:
            nothing, last = np.zeros(len(ended), np.float32), np.array(ended)
            actions = np.zeros((len(ended), self._action.shape[2]), np.float32)
            self._put(last, self._next_obs[last], actions, nothing, nothing, nothing, rows)
        self._begins[[*batch.ended, *batch.failed]] = 1.0
        if rows:
            self._writer.write_packed(np.stack(rows), batch.version)
        self.obs, self._next_obs = self._next_obs, self.obs

    def _put(
        self,
        envs: np.ndarray,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        valid: np.ndarray,
        rows: list[np.ndarray],
    ) -> None:
        """Fills a slot of each of these environments, and adds the rows of the sequences that it completes."""
        at = self._filled[envs]
        self._seen[envs, at], self._action[envs, at], self._states[envs, at] = obs, action, self.state[envs]
        self._seen[envs, at + 1] = self._next_obs[envs]
        for number, values in enumerate((reward * valid, terminated * valid, valid, self._begins[envs])):
            self._scalars[envs, number, at] = values
        self._filled[envs] = at + 1
        for index in envs[at + 1 == self._slots].tolist():
            rows.append(self._row(index))
            for slots in (self._seen, self._action, self._states):
                slots[index, : self._burn_in] = slots[index, self._length : self._slots].copy()
            self._scalars[index, :, : self._burn_in] = self._scalars[index, :, self._length :].copy()
            self._filled[index] = self._burn_in

    def _row(self, index: int) -> np.ndarray:
        parts = (self._seen[index], self._action[index], self._scalars[index], self._states[index, 0])
        return np.concatenate(
            [part.reshape(-1) for part in parts] + [np.zeros(int(self._writer.layout.checksum), np.float32)]
        )


# --- hindsight ---


class GoalEpisode:
    """Steps of one environment since its last reset."""

    def __init__(self) -> None:
        self.obs: list[np.ndarray] = []  # [O] each, as all below
        self.action: list[np.ndarray] = []
        self.next_obs: list[np.ndarray] = []
        self.terminated: list[bool] = []
        self.info: list[Any] = []

    def __len__(self) -> int:
        return len(self.info)


class Relabeling:
    """Makes replay rows from an episode's transitions, relabeled with other goals."""

    def __init__(self, spec: EnvSpec, layout: RowLayout, goals: int, gamma: float, *, future: bool) -> None:
        """``goals`` for each transition: drawn from those achieved after it (``future``), or the episode's last."""
        assert spec.goals is not None
        self.goals, self._future = goals, future
        self._layout, self._gamma = layout, gamma
        self.none = np.zeros((0, layout.width), np.float32)
        self._achieved, self._desired = slice(*spec.goals.achieved), slice(*spec.goals.desired)

    def rows(self, episode: GoalEpisode, rewards: GoalRewards, rng: np.random.Generator) -> np.ndarray:
        """Rows [T k, W] float32 of the n-step transitions of T steps, each with its k goals.

        A window ends with the episode, or where it terminates under the new goal. ``compute_truncated`` has
        no effect: the episode went on, and a last step that does not terminate bootstraps from the next observation.
        What the environment's functions raise is raised, and a BadTransition if a reward is not finite.
        """
        layout, goals = self._layout, self.goals
        obs, next_obs = np.stack(episode.obs), np.stack(episode.next_obs)
        steps = len(obs)
        start = np.repeat(np.arange(steps), goals)
        chosen = start + (rng.random(len(start)) * (steps - start)).astype(np.int64) if self._future else steps - 1
        goal = np.empty((len(start), self._achieved.stop - self._achieved.start), np.float32)
        goal[...] = next_obs[chosen, self._achieved]
        total, length = np.zeros(len(start)), np.zeros(len(start), np.int64)
        ended = np.zeros(len(start), bool)
        for age in range(layout.n_step):
            live = np.flatnonzero(~ended & (start + age < steps))
            if not len(live):
                break
            at = start[live] + age
            achieved, infos = next_obs[at, self._achieved], [episode.info[step] for step in at.tolist()]
            total[live] += self._gamma**age * rewards.rewards(achieved, goal[live], infos)
            over = rewards.terminated(achieved, goal[live], infos)
            ended[live] = np.array(episode.terminated)[at] if over is None else over
            length[live] = age + 1
        obs, next_obs = obs[start], next_obs[start + length - 1]
        obs[:, self._desired] = next_obs[:, self._desired] = goal
        sums = np.clip(total, -FLOAT32_MAX, FLOAT32_MAX)
        return layout.pack(obs, np.stack(episode.action)[start], sums, ended, next_obs, length)


class GoalRowWriter(FlatObsRowWriter):
    """Writes rows of vector observations, and after them the rows with other goals."""

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        writer: ShardWriter,
        n_step: int,
        gamma: float,
        relabeled: Callable[[int, GoalEpisode], np.ndarray],
        goals: int,
        info: Callable[[int], Any],
    ) -> None:
        """``relabeled`` gives the rows of an environment's episode, ``info`` that of its latest step."""
        super().__init__(spec, num_envs, writer, n_step, gamma)
        self._relabeled, self._info, self._max_rows = relabeled, info, goals * num_envs
        self._episodes = [GoalEpisode() for _ in range(num_envs)]
        self._waiting: deque[np.ndarray] = deque()

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        super().start(index, obs)
        self._episodes[index] = GoalEpisode()

    def store(self, batch: StepBatch) -> None:
        obs, next_obs = self.obs, self._next_obs
        super().store(batch._replace(kept=True))  # swaps the two buffers; hindsight needs whole episodes
        for index, episode in enumerate(self._episodes):
            if index not in batch.failed:
                episode.obs.append(obs[index].copy())
                episode.action.append(batch.actions[index].copy())
                episode.next_obs.append(next_obs[index].copy())
                episode.terminated.append(bool(batch.terminated[index]))
                episode.info.append(copy(self._info(index)))  # it may be one object at each step
        self._waiting += [self._relabeled(index, self._episodes[index]) for index in batch.ended]
        left = self._max_rows
        while self._waiting and left:
            rows = self._waiting.popleft()
            if len(rows) > left:
                self._waiting.appendleft(rows[left:])
            if len(rows):
                self._writer.write_packed(rows[:left], batch.version)
            left -= min(left, len(rows))


class GoalCollector(TransitionCollector):
    """N environments with goals; an error in ``compute_reward`` costs only the episode's rows with other goals."""

    def __init__(self, *args: Any, her: str, goals: int, seeds: list[int], **options: Any) -> None:
        """Args: ``her``: future or final; ``goals``: number added to each transition."""
        self._her, self._goals = her, goals
        self._goal_rng = np.random.default_rng([*seeds, _STREAM])
        self._goal_rewards: WeakKeyDictionary[Task, GoalRewards] = WeakKeyDictionary()
        super().__init__(*args, seeds=seeds, **options)
        self.rows_per_step = 1 + goals

    def _new_row_writer(
        self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float
    ) -> FlatObsRowWriter | FrameRowWriter:
        self._relabeling = Relabeling(spec, writer.layout, self._goals, gamma, future=self._her == "future")
        return GoalRowWriter(
            spec, num_envs, writer, n_step, gamma, self._relabeled, self._goals, lambda index: self._tasks[index].info
        )

    def _relabeled(self, index: int, episode: GoalEpisode) -> np.ndarray:
        task = self._tasks[index]
        try:
            if task not in self._goal_rewards:
                self._goal_rewards[task] = GoalRewards(task)
            return self._relabeling.rows(episode, self._goal_rewards[task], self._goal_rng)
        except Exception as error:
            where = f"environment {index}, rewards of other goals"
            self._count_error(where, error, effect="no rows with other goals are added")
            return self._relabeling.none
