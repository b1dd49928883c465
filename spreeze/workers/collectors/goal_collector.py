"""Hindsight experience replay (Andrychowicz et al. 2017, arXiv 1707.01495): transitions with goals that were achieved.

When an episode is over, each of its transitions is stored again with goals that the episode achieved, and with the
rewards that the environment's ``compute_reward`` gives for these. So replay, reader and learner know nothing of goals.
These rows are written little by little, at most k for each env step, so that the rows of a step are 1 + k once the
first episode of each environment is over, and no burst of them delays samplers or overwrites new rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from spreeze.envs.goals import GoalRewards
from spreeze.envs.scalars import FLOAT32_MAX
from spreeze.envs.task import Task
from spreeze.transport.replay_ring import ShardWriter
from spreeze.types import EnvSpec, RowLayout
from spreeze.workers.collectors.transition_collector import (
    FlatObsRowWriter,
    FrameRowWriter,
    StepBatch,
    TransitionCollector,
)

_STREAM = 17  # separates the draws of goals from other draws with the same seeds


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
        rows = np.zeros((len(start), layout.width), np.float32)
        rows[:, layout.obs], rows[:, layout.next_obs] = obs[start], next_obs[start + length - 1]
        for columns in (layout.obs, layout.next_obs):
            rows[:, columns][:, self._desired] = goal
        rows[:, layout.action] = np.stack(episode.action)[start]
        rows[:, layout.reward], rows[:, layout.terminated] = np.clip(total, -FLOAT32_MAX, FLOAT32_MAX), ended
        if layout.num_steps is not None:
            rows[:, layout.num_steps] = length
        return rows


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
            self._count_error(f"environment {index}, rewards of other goals", error)
            return self._relabeling.none
