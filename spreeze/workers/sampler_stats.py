"""Counters and errors of a process that steps environments, and how they reach the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.envs.task import Task
from spreeze.errors import BadTransition, WorkerError
from spreeze.metrics.table import SLOTS

# Looked up once, since every round over the environments posts; rollout samplers have the same slots.
_ENV_STEPS, _EPISODES, _EPISODE_RETURN, _EPISODE_LENGTH, _ROWS_REFUSED, _ENV_ERRORS = (
    SLOTS["sampler"].index(name)
    for name in ("env_steps", "episodes", "episode_return", "episode_length", "rows_refused", "env_errors")
)
_POLICY_S, _ENV_S, _WRITE_S, _WAIT_S = (
    SLOTS["sampler"].index(name) for name in ("policy_s", "env_s", "write_s", "wait_s")
)


@dataclass
class SamplerStats:
    """Counters of one sampler of either kind; times are cumulative seconds."""

    env_steps: int = 0
    episodes: int = 0
    episode_return: float | None = None
    episode_length: float | None = None
    rows_refused: int = 0
    env_errors: int = 0
    policy_s: float = 0.0
    env_s: float = 0.0
    write_s: float = 0.0

    def post(self, slots: np.ndarray, base: Sequence[float] | np.ndarray, wait_s: float) -> None:
        """Writes all but the policy's version into the slots; ``base`` holds the counters of earlier processes."""
        slots[_ENV_STEPS] = base[_ENV_STEPS] + self.env_steps
        slots[_EPISODES] = base[_EPISODES] + self.episodes
        if self.episode_return is not None and self.episode_length is not None:
            slots[_EPISODE_RETURN] = self.episode_return
            slots[_EPISODE_LENGTH] = self.episode_length
        slots[_ROWS_REFUSED] = base[_ROWS_REFUSED] + self.rows_refused
        slots[_ENV_ERRORS] = base[_ENV_ERRORS] + self.env_errors
        slots[_POLICY_S] = base[_POLICY_S] + self.policy_s
        slots[_ENV_S] = base[_ENV_S] + self.env_s
        slots[_WRITE_S] = base[_WRITE_S] + self.write_s
        slots[_WAIT_S] = base[_WAIT_S] + wait_s


Tell = Callable[[str, Exception, int], None]
"""Called to report an error: where it happened, the error, and the number of errors so far."""


def untold(where: str, error: Exception, count: int) -> None:
    """Reports nothing."""


class EnvErrors:
    """The errors of one process's environments, each of which costs an episode.

    Only the 1st, 10th, 100th and so on are reported, so that frequent errors over weeks do not fill the disk.
    """

    MOST_IN_WINDOW = 20
    WINDOW_STEPS = 1000

    def __init__(self, counts: SamplerStats, *, nan_policy: str = "drop", tell: Tell = untold) -> None:
        """Counts errors in ``counts``; with ``nan_policy`` "fail" the first bad transition ends the run."""
        self._counts, self._nan_policy, self._tell = counts, nan_policy, tell
        self._steps: deque[int] = deque(maxlen=self.MOST_IN_WINDOW)
        self._total = 0

    def note(self, where: str, error: Exception) -> None:
        """Counts an error.

        Raises:
            WorkerError: too many errors in the window, or a bad transition with ``nan_policy`` "fail".
        """
        counts = self._counts
        if isinstance(error, BadTransition):
            counts.rows_refused += 1
            if self._nan_policy == "fail":
                raise WorkerError(f"{where} gave a bad transition: {error}") from error
        else:
            counts.env_errors += 1
        self._total += 1
        if worth_telling(self._total):
            self._tell(where, error, self._total)
        self._steps.append(counts.env_steps)
        within = counts.env_steps - self._steps[0]
        if len(self._steps) == self.MOST_IN_WINDOW and within < self.WINDOW_STEPS:
            raise WorkerError(
                f"{self.MOST_IN_WINDOW} environment errors within {within} env steps; the last: {told(where, error)}"
            ) from error


class Collector:
    """The environments of one process; counts their episodes and errors, and replaces broken ones."""

    def __init__(
        self, make_task: Callable[[], Task], num_envs: int, *, nan_policy: str, tell: Tell,
        on_progress: Callable[[], None],
    ) -> None:
        self.num_envs = num_envs
        self.counts = SamplerStats()
        self._make_task, self._on_progress = make_task, on_progress
        self._errors = EnvErrors(self.counts, nan_policy=nan_policy, tell=tell)
        self._tasks: list[Task] = []
        self._returns, self._lengths = [0.0] * num_envs, [0] * num_envs
        self._recent: deque[tuple[float, int]] = deque(maxlen=10)

    def _count_episode(self, index: int) -> None:
        self._recent.append((self._returns[index], self._lengths[index]))
        self.counts.episodes += 1
        self.counts.episode_return = sum(entry[0] for entry in self._recent) / len(self._recent)
        self.counts.episode_length = sum(entry[1] for entry in self._recent) / len(self._recent)

    def _replace(self, index: int) -> None:
        self._on_progress()
        try:
            self._tasks[index].close()
        except Exception:
            self.counts.env_errors += 1
        self._tasks[index] = self._make_task()

    def close(self) -> None:
        """Closes the environments; an error in closing does not hide an earlier one."""
        for task in self._tasks:
            with contextlib.suppress(Exception):
                task.close()


def worth_telling(count: int) -> bool:
    return str(count).rstrip("0") == "1"


def told(where: str, error: BaseException) -> str:
    return f"{where}: {type(error).__name__}: {error}"


def event_text(where: str, error: BaseException, count: int) -> str:
    """The message for an error that cost an episode."""
    so_far = "" if count == 1 else f"; {count} such errors so far"
    return f"{told(where, error)}; its episode is lost{so_far}"


def write_error(folder: Path, process: str, error: BaseException, kind: str = "") -> dict[str, Any]:
    """Writes an error and its traceback into a run's ``errors`` folder; ignores a full disk.

    ``process`` is the worker's name; ``kind`` distinguishes errors of one process.
    """
    text = "".join(traceback.format_exception(error))
    record = {"process": process, "error": f"{type(error).__name__}: {error}"[:1000], "traceback": text[-8000:]}
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        name = "-".join(part for part in (process, str(os.getpid()), kind) if part)
        (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    return record
