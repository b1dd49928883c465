"""The evaluator runs greedy episodes of the newest weights; it writes scores and keeps the best weights.

If a second environment is not possible, the sampler plays the evaluations in its own, between episodes
(``TurnEvaluation``). ``python -m spreeze.workers.evaluator`` is the last evaluation of a run. An environment that
raises or gives a bad transition loses its episode; the score is that of the others, with the number lost.

Every evaluation plays fresh starts, drawn from ``evaluation.seed`` and the version of the weights. A target return
counts as reached when the 99 % lower bound of the mean of ten or more episodes is at or above it, or when the same
weights reach it again in a second evaluation of 20 episodes, continued up to 100 while its mean is above the target and
its 90 % lower bound is not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from spreeze.envs.task import Task
from spreeze.errors import SpreezeError, described
from spreeze.files import remove_unfinished
from spreeze.formatting import duration, in_a_row, is_power_of_ten, number
from spreeze.inference.policy import Policy
from spreeze.machine.output import stdout_to_stderr
from spreeze.machine.processes import (
    close_in_time,
    end_with_parent,
    exit_process,
    ignore_ending_signals,
    lower_priority,
)
from spreeze.run_directory import group_folder
from spreeze.transport import status_table
from spreeze.transport.weights import Weights, decode
from spreeze.workers.best_policy import Z_99, BestPolicy, Candidate, ReturnStats
from spreeze.workers.context import WorkerContext, event_text, open_weights, pause_s, write_error
from spreeze.workers.episodes.episode_recorder import EpisodeRecorder
from spreeze.workers.episodes.lockstep import Episode, OnStep, fresh_seeds, new_task, run_episodes, score, success_rate
from spreeze.workers.jobs import EvaluatorJob
from spreeze.workers.roles import Phase

COLUMNS = (
    "wall_s", "env_steps", "updates", "epoch", "version", "episodes", "return_mean", "return_std", "length_mean",
)  # fmt: skip
"""Columns of ``eval.csv``; wall_s, env_steps and updates are those of the weights when published."""

Record = dict[str, Any]
"""An evaluation as it is stored, sent and printed: the columns of ``eval.csv``, ``group``, ``success_rate`` if the
environment reports success, ``metrics`` by their names in the table, and:

- ``episodes_cut`` by the stop, ``episodes_lost`` to errors; ``whole``: no episode was cut and no more were lost than
  finished, so that scores are comparable;
- ``target`` of a whole evaluation: the result for the target return (see ``Evaluation._check_target``).
"""

T = TypeVar("T")
_POLL_S = 0.05
_LOOK_S = 1.0
MIN_EPISODES = 10  # fewest episodes whose lower bound alone can reach a target return
CONFIRMING_EPISODES, MAX_CONFIRMING = 20, 100
"""Episodes of a round of the evaluation that confirms a target return, and of all rounds together."""
_FIRST, _RETEST, _CONFIRM = range(3)  # purposes of an evaluation: each plays seeds of its own


def run_evaluator(context: WorkerContext, job: EvaluatorJob) -> Iterator[None]:
    """Evaluates whenever there are new weights, until the supervisor asks to stop."""
    context.heartbeat(Phase.INIT)
    watches = [WeightsWatch.after_evaluations(group_folder(Path(job.run_dir), group)) for group in range(job.groups)]
    turn, requests = 0, context.header_word(status_table.EVALUATION_REQUESTS)  # without requests to an earlier process
    with contextlib.closing(_evaluation_of(context, job)) as evaluation:
        with contextlib.suppress(Exception):
            evaluation.prepare()  # ahead of the first weights, whose evaluation would report the error
        yield
        while not context.stopping:
            turn += 1
            group = turn % job.groups
            header = context.status.group(group)
            counter = int(header[status_table.WEIGHTS_COUNTER])
            weights = watches[group].newer(counter)
            if weights is None:
                yield from context.pauses(_POLL_S / job.groups, until=partial(_has_changed, header, counter))
                continue
            begin_s, cpu_s = time.monotonic(), time.process_time()
            seen, requests = requests, context.header_word(status_table.EVALUATION_REQUESTS)
            record = evaluation.attempt(weights, group)
            if record is not None:
                context.post(
                    evaluations=evaluation.evaluations,
                    policy_version=record["version"],
                    eval_return=record["return_mean"],
                    eval_length=record["length_mean"],
                    env_steps=record["env_steps"],
                )
                context.send("evaluation", **record)
                if requests > seen:
                    context.event(
                        "info",
                        f"requested evaluation of the policy at {duration(record['wall_s'])}, after "
                        f"{record['updates']} updates: mean return {number(record['return_mean'])} of "
                        f"{record['episodes']} episodes",
                    )
                evaluation.test_best()
            if evaluation.failures:
                yield from context.pauses(pause_s(evaluation.failures))
            elif not job.has_free_core and job.config.interval_updates is None:
                rest_s = (time.process_time() - cpu_s) / job.config.cpu_share - (time.monotonic() - begin_s)
                yield from context.pauses(max(0.0, rest_s), until=partial(_is_requested, context, requests))


def _is_requested(context: WorkerContext, seen: int) -> bool:
    return context.header_word(status_table.EVALUATION_REQUESTS) > seen


def _has_changed(header: np.ndarray, counter: int) -> bool:
    return int(header[status_table.WEIGHTS_COUNTER]) != counter


def _evaluation_of(context: WorkerContext, job: EvaluatorJob) -> Evaluation:
    def should_stop() -> bool:
        context.heartbeat(Phase.EVALUATE)
        return context.stopping

    return Evaluation(job, context.env_error, should_stop, partial(context.event, "warning"))


class WeightsWatch:
    """Finds weights newer than the last ones seen."""

    def __init__(self, folder: Path, seen: tuple[int, int] | None = None) -> None:
        self._store, self._seen = open_weights(folder), seen
        self._counter, self._look_at_s = 0, 0.0

    def counts_news(self, counter: int) -> bool:
        """True if weights have been published since those that ``newer`` returned last."""
        return counter != self._counter

    @classmethod
    def after_evaluations(cls, folder: Path) -> Self:
        """Finds weights of a group newer than those of its last evaluation."""
        rows = read_rows(folder / "eval.csv")
        return cls(folder, (rows[-1]["epoch"], rows[-1]["version"]) if rows else None)

    def newer(self, counter: int) -> Weights | None:
        """The newest weights, or None; checks the file when the counter changed, and every second."""
        now_s = time.monotonic()
        if counter == self._counter and now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + _LOOK_S
        weights = self._store.read_latest(self._seen)
        if weights is not None:
            self._seen, self._counter = weights.order, counter
        return weights


class Evaluation:
    """The evaluator's environments and files."""

    def __init__(
        self,
        job: EvaluatorJob,
        on_error: Callable[[str, Exception, int], None],
        should_stop: Callable[[], bool] = lambda: False,
        on_failure: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``on_error`` gets where an environment raised, the error, and the number of errors so far.

        ``should_stop`` is called before each env step; ``on_failure`` gets attempts that failed as a whole.
        """
        self._job, self._on_error, self._errors = job, on_error, 0
        self._should_stop, self._on_failure = should_stop, on_failure
        self._run_dir = Path(job.run_dir)
        self._tasks: list[Task] = []
        remove_unfinished(self._run_dir / "checkpoints")  # from an evaluator killed while writing
        self._best = BestPolicy(self._run_dir)
        self._recorder = EpisodeRecorder(self._run_dir, job.spec, job.config, max_envs=job.max_envs)
        self.evaluations = self._unrecorded = 0
        self._target_reached = job.target_return is None
        self.failures = 0
        """Attempts that failed as a whole, in a row."""

    def lend(self, task: Task) -> None:
        """Plays in the caller's environment until ``give_back``."""
        self._tasks[:] = [task]

    def give_back(self) -> Task | None:
        """The environment that was lent, or its replacement; None if a failure has closed it."""
        return self._tasks.pop() if self._tasks else None

    def prepare(self) -> None:
        if not self._tasks:
            self._tasks.append(new_task(self._recorder.make_task))

    def evaluate(self, weights: Weights, group: int = 0, *, keep_partial: bool = False) -> Record | None:
        """Runs the episodes of one version and records them in the group's ``eval.csv``.

        ``keep_partial`` counts the rounds finished before a stop. The weights are kept if they are the best of all
        groups so far (``best_policy``). None if stopped or if no episode finished.
        """
        self.prepare()
        seeds = self._seeds(weights, self._job.config.episodes, _FIRST, group)
        recorder = self._recorder
        on_step = recorder.on_step if recorder.begin(weights, group) else None
        episodes, lost = self._play(weights, seeds, whole_rounds=keep_partial, on_step=on_step)
        cut = len(seeds) - len(episodes) - lost
        if not episodes or (cut and not keep_partial):
            return None
        meta = weights.meta
        record: Record = {
            "wall_s": float(meta.get("wall_s", 0.0)),
            "env_steps": int(meta.get("env_steps", 0)),
            "updates": int(meta.get("updates", 0)),
            "epoch": weights.epoch,
            "version": weights.version,
            "group": group,
            **score(episodes),
            "episodes_cut": cut,
            "episodes_lost": lost,
            "whole": not cut and lost <= len(episodes),
        }
        if (success := success_rate(episodes)) is not None:
            record["success_rate"] = success
        terminated = float(np.mean([episode.terminated for episode in episodes]))
        record["metrics"] = {"eval_terminated": terminated, **recorder.health(episodes, seeds)}
        self.evaluations += 1
        append_row(group_folder(self._run_dir, group) / "eval.csv", record)
        if record["whole"]:
            stats, record["target"] = self._check_target(_return_stats(episodes), weights, group)
            self._best.offer(Candidate(stats, weights.to_bytes(), dict(record)))
        self._keep_episodes(episodes, seeds, record, last=keep_partial)
        return record

    def _keep_episodes(self, episodes: list[Episode], seeds: list[int], record: Record, *, last: bool) -> None:
        """Writes the episodes for the page's player; a failure costs only these files."""
        try:
            if self._recorder.keep(episodes, seeds, record, check_repeats=not last):
                self.close()  # the next ones draw
            self._unrecorded = 0
        except Exception as error:
            self._unrecorded += 1
            if is_power_of_ten(self._unrecorded):
                self._on_failure(f"episodes were not kept{in_a_row(self._unrecorded)}: {described(error)}"[:500])

    def _seeds(self, weights: Weights, count: int, purpose: int, *more: int) -> list[int]:
        return fresh_seeds(count, self._job.config.seed, *weights.order, purpose, *more)

    def _check_target(
        self, stats: ReturnStats, weights: Weights, group: int
    ) -> tuple[ReturnStats, dict[str, Any] | None]:
        """Plays a second evaluation where the mean reaches the target return and its lower bound does not.

        Returns the returns of all episodes, and the deciding evaluation's result: None where the mean is below the
        target, or the second evaluation was stopped or lost most of its episodes.
        """
        target = self._job.target_return
        if target is None or self._target_reached or stats.mean < target:
            return stats, None
        decides = stats
        if stats.episodes < MIN_EPISODES or stats.lower_bound(Z_99) < target:
            confirming = self._confirm(target, weights, group)
            if confirming is None:
                return stats, None
            decides, stats = confirming, stats.with_more(confirming)
        self._target_reached = decides.mean >= target
        return stats, {"reached": self._target_reached, "episodes": decides.episodes, "return_mean": decides.mean}

    def _confirm(self, target: float, weights: Weights, group: int) -> ReturnStats | None:
        """The returns of a second evaluation, continued while its result is undecided; None if it was cut."""
        played: list[Episode] = []
        for again in range(MAX_CONFIRMING // CONFIRMING_EPISODES):
            seeds = self._seeds(weights, CONFIRMING_EPISODES, _CONFIRM, group, again)
            episodes, lost = self._play(weights, seeds)
            if len(episodes) + lost < len(seeds) or lost > len(episodes):
                return None
            played += episodes
            stats = _return_stats(played)
            if stats.mean < target or stats.bound >= target:
                break
        return stats

    def _play(
        self, weights: Weights, seeds: Sequence[int], *, whole_rounds: bool = False, on_step: OnStep | None = None
    ) -> tuple[list[Episode], int]:
        """The finished episodes of these seeds, and the number lost to errors."""
        lost = 0

        def on_error(position: int, length: int, error: Exception) -> None:
            nonlocal lost
            lost += 1
            self._errors += 1
            if is_power_of_ten(self._errors):
                self._on_error(f"evaluation, seed {seeds[position]}, step {length + 1}", error, self._errors)
            self._should_stop()  # the heartbeat: a new environment may take a while

        policy = Policy.from_weights(weights.arrays, weights.meta)
        episodes = run_episodes(
            self._recorder.make_task, policy.act, seeds, on_step, self._should_stop, heartbeat=self._should_stop,
            tasks=self._tasks, on_error=on_error, whole_rounds=whole_rounds, max_tasks=self._job.max_envs,
        )  # fmt: skip
        return episodes, lost

    def test_best(self, *, last: bool = False) -> None:
        """Plays the best policy or its challenger on fresh seeds if that is due; ``last``: in any case."""
        candidate = self._best.due(last=last)
        if candidate is None:
            return
        count = self._job.config.episodes

        def test() -> bool:
            self.prepare()
            weights = decode(candidate.data, self._run_dir)
            episodes, lost = self._play(weights, self._seeds(weights, count, _RETEST, candidate.stats.episodes))
            if len(episodes) + lost == count:  # not stopped
                self._best.record_retest(candidate, _return_stats(episodes) if lost <= len(episodes) else None)
            return True

        if self._attempt(test) is None:
            self._best.record_retest(candidate, None)

    def attempt(self, weights: Weights, group: int = 0) -> Record | None:
        """Like ``evaluate``, but reports a failure instead of raising it; the next attempt makes new environments."""
        return self._attempt(partial(self.evaluate, weights, group))

    def _attempt(self, work: Callable[[], T]) -> T | None:
        try:
            result = work()
        except Exception as error:
            self.failures += 1
            if is_power_of_ten(self.failures):
                self._on_failure(f"evaluation failed{in_a_row(self.failures)}: {described(error)}"[:500])
            self.close()
            return None
        self.failures = 0
        return result

    def close(self) -> None:
        """Closes all environments; the next evaluation makes new ones."""
        close_in_time(*(task.close for task in self._tasks))
        self._tasks.clear()


_LONGEST_EPISODE_S = 15.0
"""A sampler's episode that does not end is truncated for an evaluation that has been due for this long."""


class TurnEvaluation:
    """Plays the newest weights as the evaluator would, for at most ``evaluation.cpu_share`` of the time."""

    def __init__(self, context: WorkerContext, job: EvaluatorJob) -> None:
        self._context, self._cpu_fraction = context, job.config.cpu_share
        self._evaluation = _evaluation_of(context, job)
        self._watch = WeightsWatch.after_evaluations(Path(job.run_dir))
        self._due_s, self._requests = time.monotonic(), context.header_word(status_table.EVALUATION_REQUESTS)

    @property
    def overdue(self) -> bool:
        """True if an evaluation of new weights, or one on request, has waited too long for the end of an episode."""
        if time.monotonic() <= self._due_s + _LONGEST_EPISODE_S:
            return False
        return self._watch.counts_news(self._context.weights_counter) or _is_requested(self._context, self._requests)

    def close(self) -> None:
        self._evaluation.close()

    def play(self, task: Task) -> Task | None:
        """Evaluates if that is due, with ``task`` between two episodes; returns it, or None if it was lost."""
        context = self._context
        requested = _is_requested(context, self._requests)
        if time.monotonic() < self._due_s and not requested:
            return task
        weights = self._watch.newer(context.weights_counter)
        if weights is None:
            self._due_s = time.monotonic()
            return task
        self._requests, began_s = context.header_word(status_table.EVALUATION_REQUESTS), time.monotonic()
        self._evaluation.lend(task)
        record = self._evaluation.attempt(weights)
        if record is not None:
            context.send("evaluation", **record)
            self._evaluation.test_best()
        self._due_s = time.monotonic() + (time.monotonic() - began_s) / self._cpu_fraction
        return self._evaluation.give_back()


def turn_evaluation(
    context: WorkerContext, job: EvaluatorJob | None
) -> contextlib.AbstractContextManager[TurnEvaluation | None]:
    """Opens the evaluation of a sampler whose job has one; otherwise None."""
    return contextlib.nullcontext() if job is None else contextlib.closing(TurnEvaluation(context, job))


def append_row(path: Path, record: Record) -> None:
    """Appends a row to ``eval.csv`` in a single write, after the header if the file is new."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if os.fstat(fd).st_size == 0:
            os.write(fd, (",".join(COLUMNS) + "\n").encode())
        os.write(fd, (",".join(repr(record[name]) for name in COLUMNS) + "\n").encode())
    finally:
        os.close(fd)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of ``eval.csv``; damaged lines are skipped, and a missing file has no rows."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines[1:]:
        cells = line.split(",")
        if len(cells) == len(COLUMNS):
            with contextlib.suppress(ValueError):
                values = (int(cell) if cell.lstrip("-").isdigit() else float(cell) for cell in cells)
                rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def record_of(row: dict[str, Any], group: int, wanted: int) -> Record:
    """The record of a row of ``eval.csv``, an evaluation for which ``wanted`` episodes were begun."""
    cut = max(0, wanted - row["episodes"])
    return row | {"group": group, "episodes_cut": cut, "episodes_lost": 0, "whole": not cut, "target": None}


def _return_stats(episodes: Sequence[Episode]) -> ReturnStats:
    scores = score(episodes)
    return ReturnStats(scores["episodes"], scores["return_mean"], scores["return_std"])


def final_evaluation(
    job: EvaluatorJob, budget_s: float, on_record: Callable[[Record | None], object] = lambda record: None
) -> Record | None:
    """Evaluates the newest weights of the learner with the highest latest score, with as many rounds as fit.

    ``on_record`` gets the record, which is also returned, before the environments are closed, which may take long: the
    existing one if this version was evaluated before, or None without weights or a whole round in time.
    """
    end_s = time.monotonic() + budget_s
    run_dir = Path(job.run_dir)
    rows = [read_rows(group_folder(run_dir, group) / "eval.csv") for group in range(job.groups)]
    scores = [group_rows[-1]["return_mean"] if group_rows else -math.inf for group_rows in rows]
    group = scores.index(max(scores))
    folder = group_folder(run_dir, group)
    weights = WeightsWatch(folder).newer(0)
    if weights is None:
        on_record(None)
        return None
    count, known = job.config.episodes, None
    for row in rows[group]:
        if (row["epoch"], row["version"], row["episodes"]) == (*weights.order, count):
            known = record_of(row, group, count)

    def on_error(where: str, error: Exception, count: int) -> None:
        write_error(run_dir / "errors", "evaluator", error, f"environment-{count}")
        sys.stderr.write(event_text(where, error, count) + "\n")

    def late() -> bool:
        return time.monotonic() >= end_s

    with contextlib.closing(Evaluation(job, on_error, late)) as evaluation:
        record = known or evaluation.evaluate(weights, group, keep_partial=True)
        if not late():  # resetting its environments alone may take longer than what is left
            evaluation.test_best(last=True)
        on_record(record)
        return record


def main(argv: list[str]) -> int:
    """``argv``: job as JSON, budget in seconds, increase of the nice value; prints the last evaluation as JSON."""
    end_with_parent()
    ignore_ending_signals()
    text, budget_s, nice = argv
    lower_priority(int(nice))
    job = EvaluatorJob.from_json(json.loads(text))
    result_fd = os.dup(1)

    def send(record: Record | None) -> None:
        os.write(result_fd, json.dumps(record).encode() + b"\n")

    try:
        with stdout_to_stderr():
            final_evaluation(job, float(budget_s), send)
    except SpreezeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        os.close(result_fd)
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
