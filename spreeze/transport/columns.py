"""An executor's own side of the storages: the columns of its environments, which nobody else writes.

Its counters are Python's numbers, equal to what shared memory holds: reading those back takes longer than an env step
of a small task. A dead executor's successor makes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spreeze.transport.rollouts import SIDE, Rollouts, StepRows

_TO_COME = 2**62
"""An env step that no environment ever takes."""


class Columns:
    """Environments ``first`` to ``first + count - 1`` of all, here by their index from 0."""

    def __init__(self, rollouts: Rollouts, first: int, count: int) -> None:
        """Finds out where each of them is."""
        self._rollouts, self._first, self._count = rollouts, first, count
        self._mine = slice(first, first + count)
        self._steps, self._log = rollouts.steps, rollouts.fields["log"]
        self._sides = [rollouts.fields[name] for name in SIDE]
        self._interval_steps, self._log_steps = rollouts.spec.sync_interval, rollouts.spec.log_steps
        start, episode = rollouts.episode_of(np.arange(first, first + count))
        self.steps: list[int] = rollouts.steps[self._mine].tolist()
        """Env steps of each since the run began."""
        self.episode: list[int] = episode.tolist()
        """Number of each one's current episode."""
        self._start: list[int] = start.tolist()

    def open(self, *, step_synchronous: bool = False) -> list[int]:
        """Indices of those that may take a step: the interval is not full for them, and none of all is behind.

        Args: ``step_synchronous`` where those behind are waited for.
        """
        rollouts = self._rollouts
        end = self._interval_steps * (rollouts.interval + 1)
        if step_synchronous:
            end = min(end, int(self._steps.min()) + 1)
        return [index for index, steps in enumerate(self.steps) if steps < end]

    def question(self, index: int) -> int:
        """Number of the question about its next action: a new one after each step and each abandoned episode."""
        return self.steps[index] + self.episode[index] + 1

    def rows(self, indices: Sequence[int]) -> slice | np.ndarray:
        """Picks ``indices`` of an array over these environments; all of them as a slice, which takes less time."""
        return slice(0, self._count) if len(indices) == self._count else np.array(indices)

    def commit(self, indices: Sequence[int], rows: StepRows) -> None:
        """Stores one env step of each of ``indices`` [n], ascending."""
        steps, start, action = self.steps, self._start, rows.action
        envs, place = self._place(indices)
        for array, values in zip(self._sides, rows, strict=True):
            array[place] = values
        ended = []
        for row, index in enumerate(indices):
            played = steps[index] - start[index]
            if played < self._log_steps:
                self._log[self._first + index, played] = action[row]
            if rows.terminated[row] or rows.truncated[row]:
                ended.append(index)
                self._announce(index)
        self._rollouts.fields.in_order()
        self._steps[envs] += 1
        for index in indices:
            steps[index] += 1
        for index in ended:
            start[index] = steps[index]
            self.episode[index] += 1

    def _place(self, indices: Sequence[int]) -> tuple[slice | np.ndarray, tuple[Any, ...]]:
        """The environments' numbers, and where their next rows go."""
        first_step = self.steps[indices[0]]
        if len(indices) == self._count == self.steps.count(first_step):
            interval, at = divmod(first_step, self._interval_steps)
            return self._mine, (interval % 2, at, self._mine)
        envs = np.array(indices) + self._first
        intervals, ats = np.divmod(self._steps[envs], self._interval_steps)
        return envs, (intervals % 2, ats, envs)

    def _announce(self, index: int) -> None:
        """An episode will begin after the step at hand: in force as soon as ``steps`` has come to it."""
        fields, env = self._rollouts.fields, self._first + index
        fields["start"][env], fields["episode"][env] = self._start[index], self.episode[index]
        fields.in_order()
        fields["next_start"][env] = self.steps[index] + 1
        fields["next_episode"][env] = self.episode[index] + 1

    def abandon(self, index: int) -> None:
        """Gives the current episode up after its last row, which becomes its truncated end; the next one begins.

        A row of an earlier interval stays as it is: nothing is summed over an interval's end, and it may be in use.
        """
        fields, env, steps, start = self._rollouts.fields, self._first + index, self.steps[index], self._start[index]
        interval, at = divmod(steps, self._interval_steps)
        if start < steps and at > 0:
            # First: whoever is killed after it comes to the same error, or goes on with a row cut without need.
            fields["truncated"][interval % 2, at - 1, env] = True
        # All the time either pair of start and number is in force and whole: ``start`` while ``next_start`` is to come.
        fields["start"][env], fields["episode"][env] = start, self.episode[index]
        fields.in_order()
        fields["next_start"][env] = _TO_COME
        fields.in_order()
        fields["next_episode"][env] = self.episode[index] + 1
        fields.in_order()
        fields["next_start"][env] = steps
        self._start[index] = steps
        self.episode[index] += 1

    @property
    def filled(self) -> bool:
        """True while there is nothing left to step in this interval."""
        return min(self.steps) >= self._interval_steps * (self._rollouts.interval + 1)

    @property
    def last_of_step(self) -> bool:
        """True where all environments have come as far as these: who was ahead may go on."""
        return int(self._steps.min()) >= max(self.steps)

    def close(self) -> None:
        """Drops the views."""
        del self._steps, self._log, self._sides
