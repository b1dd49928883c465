"""The environments of one sampler, its counters and its handling of errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spreeze.envs.info_numbers import InfoNumbers
from spreeze.envs.task import Task, TaskSource
from spreeze.errors import BadTransition, WorkerError, described
from spreeze.formatting import is_power_of_ten
from spreeze.machine.processes import close_in_time
from spreeze.metrics.table import SLOTS
from spreeze.workers.roles import Phase

if TYPE_CHECKING:
    from spreeze.workers.evaluator import TurnEvaluation

# Looked up once, since every round over the environments posts; rollout samplers have the same slots.
_SLOT = SLOTS["sampler"].index
_ENV_STEPS, _EPISODES, _EPISODE_RETURN, _EPISODE_LENGTH = map(
    _SLOT, ("env_steps", "episodes", "episode_return", "episode_length")
)
_TRANSITIONS_REJECTED, _ENV_ERRORS = map(_SLOT, ("transitions_rejected", "env_errors"))
_POLICY_S, _ENV_S, _WRITE_S, _WAIT_S = map(_SLOT, ("policy_s", "env_s", "write_s", "wait_s"))
_RETURNS = _SLOT("returns")  # slot of the number of returns; their sum and sum of squares follow it
_MAX_ERRORS, _WINDOW_STEPS = 20, 1000  # this many errors within this many env steps end the process
SLOW_S = 1.0  # time of a step of all environments [s] above which each environment has its own heartbeat

OnError = Callable[..., None]  # (where, error, count, effect=...): see context.env_error
"""Called to report an error: where it happened, the error, and the number of errors so far."""
Heartbeat = Callable[[Phase], None]  # called before something that may take long, as a heartbeat


def do_nothing(*_: object, **__: object) -> None:
    pass


@dataclass
class SamplerStats:
    """Counters of one sampler of either kind; times are cumulative seconds."""

    env_steps: int = 0
    episodes: int = 0
    episode_return: float | None = None
    episode_length: float | None = None
    transitions_rejected: int = 0
    env_errors: int = 0
    policy_s: float = 0.0
    env_s: float = 0.0
    write_s: float = 0.0
    wait_s: float = 0.0
    returns: tuple[float, float, float] = (0.0, 0.0, 0.0)  # count, sum and sum of squares of discounted returns
    _posted: tuple[float, float, float] | None = None

    def post(self, slots: np.ndarray, base: Sequence[float]) -> None:
        """Writes all but the policy's version into the slots; ``base`` holds the counters of earlier processes."""
        slots[_ENV_STEPS] = base[_ENV_STEPS] + self.env_steps
        slots[_EPISODES] = base[_EPISODES] + self.episodes
        if self.episode_return is not None and self.episode_length is not None:
            slots[_EPISODE_RETURN] = self.episode_return
            slots[_EPISODE_LENGTH] = self.episode_length
        slots[_TRANSITIONS_REJECTED] = base[_TRANSITIONS_REJECTED] + self.transitions_rejected
        slots[_ENV_ERRORS] = base[_ENV_ERRORS] + self.env_errors
        slots[_POLICY_S] = base[_POLICY_S] + self.policy_s
        slots[_ENV_S] = base[_ENV_S] + self.env_s
        slots[_WRITE_S] = base[_WRITE_S] + self.write_s
        slots[_WAIT_S] = base[_WAIT_S] + self.wait_s
        if self.returns is not self._posted:
            self._posted = self.returns
            for index, value in enumerate(self.returns, _RETURNS):
                slots[index] = base[index] + value


class Collector:
    """Counts the episodes and errors of a process with environments."""

    def __init__(self, num_envs: int, *, nan_policy: str, on_error: OnError, heartbeat: Heartbeat) -> None:
        """With ``nan_policy`` "fail" the first bad transition ends the process."""
        self.num_envs = num_envs
        self.counts = SamplerStats()
        self._nan_policy, self._on_error, self._heartbeat = nan_policy, on_error, heartbeat
        self._error_steps: deque[int] = deque(maxlen=_MAX_ERRORS)
        self._errors = 0
        self.on_episode: Callable[[float, int, bool | None], None] = do_nothing
        self._returns, self._lengths = [0.0] * num_envs, [0] * num_envs
        self._episode_totals = np.zeros((2, num_envs))
        """Return and length of each current episode, where environments step together."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=10)

    def _end_episode_totals(self, index: int) -> None:
        self._returns[index], self._lengths[index] = (
            float(self._episode_totals[0, index]),
            int(self._episode_totals[1, index]),
        )
        self._episode_totals[:, index] = 0.0

    def _count_episode(self, index: int, *, success: bool | None = None) -> None:
        self._recent.append((self._returns[index], self._lengths[index]))
        self.counts.episodes += 1
        returns, lengths = zip(*self._recent, strict=True)
        self.counts.episode_return = sum(returns) / len(returns)
        self.counts.episode_length = sum(lengths) / len(lengths)
        self.on_episode(self._returns[index], self._lengths[index], success)

    def _count_error(self, where: str, error: Exception, **effect: str) -> None:
        """Counts an error; reports the 1st, 10th, 100th and so on, and raises a WorkerError if there are too many.

        ``effect``: as for ``context.event_text``.
        """
        counts = self.counts
        if isinstance(error, BadTransition):
            counts.transitions_rejected += 1
            if self._nan_policy == "fail":
                raise WorkerError(f"{where} returned an invalid transition: {error}") from error
        else:
            counts.env_errors += 1
        self._errors += 1
        if is_power_of_ten(self._errors):
            self._on_error(where, error, self._errors, **effect)
        self._error_steps.append(counts.env_steps)
        within = counts.env_steps - self._error_steps[0]
        if len(self._error_steps) == _MAX_ERRORS and within < _WINDOW_STEPS:
            raise WorkerError(
                f"{_MAX_ERRORS} environment errors within {within} env steps; the last: {where}: {described(error)}"
            ) from error


class TaskCollector(Collector):
    """The environments of one process; renews them when their arguments change, and replaces broken ones."""

    def __init__(
        self, make_task: Callable[[], Task], num_envs: int, *, nan_policy: str, on_error: OnError, heartbeat: Heartbeat
    ) -> None:
        super().__init__(num_envs, nan_policy=nan_policy, on_error=on_error, heartbeat=heartbeat)
        self._new_task = make_task
        self.info = InfoNumbers()
        """Sums of the numbers in ``info``; engines that step several environments at once give none."""
        self._tasks: list[Task] = []
        self._versions: list[int] = []
        self.inline_evaluation: TurnEvaluation | None = None
        self._is_slow = True
        """True if the latest step of all environments took long: then each of them has a heartbeat of its own."""

    @property
    def _version(self) -> int:
        return self._new_task.version if isinstance(self._new_task, TaskSource) else 0

    def _make_task(self) -> Task:
        task = self._new_task()
        task.info_numbers = self.info
        return task

    def _add_task(self) -> None:
        self._heartbeat(Phase.INIT)
        self._versions.append(self._version)
        self._tasks.append(self._make_task())

    def _end_episode(self, index: int) -> None:
        """Counts an episode that is over, evaluates if that is due, and renews the environment if it has to be."""
        self._count_episode(index, success=self._tasks[index].success)
        if self.inline_evaluation is not None:
            self._tasks[index].info_numbers = None
            self._tasks[index] = self.inline_evaluation.play(self._tasks[index]) or self._make_task()
            self._tasks[index].info_numbers = self.info
        if self._version != self._versions[index]:
            self._renew(index)

    def _renew(self, index: int) -> None:
        """Replaces an environment by one with the new arguments; keeps it if the new one cannot be made."""
        self._heartbeat(Phase.INIT)
        self._versions[index], task = self._version, None
        try:
            task = self._make_task()
            task.reset()
        except Exception as error:
            close_in_time(*() if task is None else (task.close,))
            if self._versions.count(self._version) == 1:  # the first one of this process
                where = f"environment {index}, made with other arguments"
                self._on_error(where, error, 0, effect="the one before is kept")
            return
        close_in_time(self._tasks[index].close)
        self._tasks[index] = task

    def _replace(self, index: int) -> None:
        self._heartbeat(Phase.INIT)
        try:
            self._tasks[index].close()
        except Exception:
            self.counts.env_errors += 1
        self._versions[index] = self._version
        self._tasks[index] = self._make_task()

    def close(self) -> None:
        """Closes the environments; an error in closing does not hide an earlier one."""
        close_in_time(*(task.close for task in self._tasks))
