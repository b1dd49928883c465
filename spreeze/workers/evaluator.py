"""The evaluator: greedy episodes of the newest weights on a fixed seed list, return curve, best weights.

It runs beside training at low priority and feeds nothing back. ``python -m spreeze.workers.evaluator``
is the last evaluation of a run: newest weights, a time budget, one JSON record on standard output.

An environment that raises or gives a bad transition costs its episode: the score is that of the others, and says how
many were lost. Nothing that fails here is for good: the next weights are another try.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.envs.stdout import stdout_to_stderr
from spreeze.envs.task import Task, open_task
from spreeze.errors import SpreezeError
from spreeze.inference.policy import Policy
from spreeze.machine.processes import leave_to_supervisor
from spreeze.metrics.table import Phase
from spreeze.run_directory import group_folder
from spreeze.transport import status_table as words
from spreeze.transport.files import remove_unfinished, replace_bytes, replace_json
from spreeze.transport.weights import Weights, WeightsStore
from spreeze.types import EnvSpec, Jsonable
from spreeze.workers.collect.greedy_episodes import add_task, lanes_for, run_episodes, score, seed_list
from spreeze.workers.context import WorkerContext
from spreeze.workers.main import end_with_parent
from spreeze.workers.sampler_stats import Tell, event_text, untold, worth_telling, write_error

COLUMNS = (
    "wall_s", "env_steps", "updates", "epoch", "version", "episodes", "return_mean", "return_std", "length_mean",
)  # fmt: skip
"""Columns of ``eval.csv``; wall_s, env_steps and updates are those of the weights when published."""

Record = dict[str, Any]
_POLL_S = 0.05
_LOOK_S = 1.0
_LONGEST_PAUSE_S = 60.0
"""Between two tries where evaluations fail as a whole, because no environment can be made, say."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorJob(Jsonable):
    """What the evaluator is told."""

    run_dir: str
    spec: EnvSpec
    episodes: int
    first_seed: int
    cpu_share: float
    """Share of one core it may use when none is free."""
    has_free_core: bool
    groups: int = 1
    """Learners, whose weights take turns."""


def run_evaluator(context: WorkerContext, job: EvaluatorJob) -> None:
    """Evaluates whenever there are new weights, until the supervisor stops everybody."""
    context.beat(Phase.INIT)
    watches = [_watch(group_folder(Path(job.run_dir), group)) for group in range(job.groups)]
    failures = turn = 0
    with Evaluation(job, tell=context.env_error) as evaluation:
        with contextlib.suppress(Exception):
            evaluation.prepare()  # while the first weights are still to come, which will tell of an error again
        while not context.stopping:
            turn += 1
            group = turn % job.groups
            found = watches[group].newer(int(context.status.group(group)[words.WEIGHTS_HINT]))
            if found is None:
                context.sleep(_POLL_S / job.groups)
                continue
            begin_s, cpu_s = time.monotonic(), time.process_time()
            try:
                record = evaluation.evaluate(*found, should_stop=lambda: _beat(context), group=group)
                failures = 0
            except Exception as error:
                failures += 1
                if worth_telling(failures):
                    context.send("event", level="warning", text=failure_text(error, failures))
                evaluation.drop_environments()
                context.sleep(min(_LONGEST_PAUSE_S, 2.0 ** (failures - 1)))
                continue
            if record is not None:
                _report(context, record, evaluation.evaluations)
            if not job.has_free_core:
                rest_s = (time.process_time() - cpu_s) / job.cpu_share - (time.monotonic() - begin_s)
                context.sleep(max(0.0, rest_s))


def _watch(folder: Path) -> WeightsWatch:
    """Finds weights of a group that are newer than those that have a score already."""
    rows = read_rows(folder / "eval.csv")
    return WeightsWatch(folder / "weights", (rows[-1]["epoch"], rows[-1]["version"]) if rows else None)


def failure_text(error: Exception, failures: int) -> str:
    """What there is to say of an evaluation that failed as a whole, so many times in a row."""
    times = "" if failures == 1 else f" {failures} times in a row"
    return f"evaluation failed{times}: {type(error).__name__}: {error}"[:500]


def _beat(context: WorkerContext) -> bool:
    context.beat(Phase.EVALUATE)
    return context.stopping


def _report(context: WorkerContext, record: Record, evaluations: int) -> None:
    context.post(
        evaluations=evaluations, policy_version=record["version"], eval_return=record["return_mean"],
        eval_length=record["length_mean"], env_steps=record["env_steps"],
    )  # fmt: skip
    context.send("evaluation", **record)


class WeightsWatch:
    """Finds weights newer than the last ones seen, together with the bytes they were read from."""

    def __init__(self, directory: Path, seen: tuple[int, int] | None = None) -> None:
        self._store = WeightsStore(directory)
        self._seen = seen
        self._hint = -1
        self._look_at_s = 0.0

    def newer(self, hint: int) -> tuple[Weights, bytes] | None:
        """The newest weights, or None; looks at the file when the hint changed, and every second."""
        now_s = time.monotonic()
        if hint == self._hint and now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + _LOOK_S
        weights = self._store.read_latest(self._seen)
        if weights is None:
            return None
        try:
            data = Path(weights.path).read_bytes()
        except OSError:
            return None  # already replaced by newer ones: the next look finds them
        self._seen, self._hint = (weights.epoch, weights.version), hint
        return weights, data


class Evaluation:
    """The evaluator's environments and files; a context manager that closes the environments."""

    def __init__(self, job: EvaluatorJob, tell: Tell = untold) -> None:
        """Args: ``tell`` of errors of its environments, now and then."""
        self._job, self._tell = job, tell
        self._errors = 0
        self._run_dir = Path(job.run_dir)
        self._tasks: list[Task] = []
        remove_unfinished(self._run_dir / "checkpoints")  # of an evaluator that was killed at its best weights
        self._best = _best_so_far(self._run_dir)
        self.evaluations = 0

    def _make_task(self) -> Task:
        return open_task(self._job.spec, whole_games=True)

    def prepare(self) -> None:
        """Makes the first environment."""
        if not self._tasks:
            add_task(self._tasks, self._make_task)

    def evaluate(
        self, weights: Weights, data: bytes, should_stop: Callable[[], bool], *, partial: bool = False,
        group: int = 0,
    ) -> Record | None:
        """Runs the episodes of one version and writes them down.

        Args:
            weights: what to evaluate.
            data: the bytes of their file, kept when they are the best so far.
            should_stop: True abandons the evaluation.
            partial: what was finished by then counts, in whole rounds (see ``run_episodes``).
            group: whose they are. Each has its ``eval.csv``; the best weights of all are kept.

        Returns:
            The record, or None when it was abandoned or no episode was finished. Besides the columns of ``eval.csv``
            it has ``episodes_cut`` by the stop, ``episodes_lost`` to errors, and ``whole``: none was cut, and no
            more were lost than finished, so that it compares with others.
        """
        self.prepare()
        lost: set[int] = set()

        def on_error(place: int, length: int, error: Exception) -> None:
            lost.add(place)
            self._note_error(f"evaluation, seed {seeds[place]}, step {length + 1}", error)
            should_stop()  # the heartbeat: a new environment may take a while

        policy = Policy.from_weights(weights.arrays, weights.meta)
        seeds = seed_list(self._job.first_seed, self._job.episodes)
        lanes = lanes_for(self._tasks[0].spec)
        episodes = run_episodes(
            self._make_task, policy.act_greedy, seeds, should_stop=should_stop, max_envs=lanes, tasks=self._tasks,
            on_error=on_error, whole_rounds=partial,
        )  # fmt: skip
        cut = len(seeds) - len(episodes) - len(lost)
        if not episodes or (cut and not partial):
            return None
        found = score(episodes)
        record: Record = {
            "wall_s": float(weights.meta.get("wall_s", 0.0)),
            "env_steps": int(weights.meta.get("env_steps", 0)),
            "updates": int(weights.meta.get("updates", 0)),
            "epoch": weights.epoch,
            "version": weights.version,
            "group": group,
            **found._asdict(),
            "episodes_cut": cut, "episodes_lost": len(lost), "whole": not cut and len(lost) <= len(episodes),
        }  # fmt: skip
        self.evaluations += 1
        append_row(group_folder(self._run_dir, group) / "eval.csv", record)
        if record["whole"]:
            self._keep_best(record, data)
        return record

    def _note_error(self, where: str, error: Exception) -> None:
        self._errors += 1
        if worth_telling(self._errors):
            self._tell(where, error, self._errors)

    def _keep_best(self, record: Record, data: bytes) -> None:
        if math.isnan(record["return_mean"]) or record["return_mean"] <= self._best:
            return
        folder = self._run_dir / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        replace_bytes(folder / "best.safetensors", data)
        replace_json(folder / "best.json", {"return": record["return_mean"], **record})
        self._best = record["return_mean"]

    def drop_environments(self) -> None:
        """Closes all environments; the next evaluation makes new ones."""
        for task in self._tasks:
            with contextlib.suppress(Exception):
                task.close()
        self._tasks.clear()

    def __enter__(self) -> Evaluation:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_environments()


def _best_so_far(run_dir: Path) -> float:
    """Return of the best weights kept so far, by this or an earlier session."""
    try:
        value = json.loads((run_dir / "checkpoints" / "best.json").read_bytes())["return"]
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf
    return float(value) if isinstance(value, int | float) else -math.inf


def append_row(path: Path, record: Record) -> None:
    """Appends one line to ``eval.csv``, header first, in a single write each."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        if os.fstat(fd).st_size == 0:
            os.write(fd, (",".join(COLUMNS) + "\n").encode())
        os.write(fd, (",".join(repr(record[name]) for name in COLUMNS) + "\n").encode())
    finally:
        os.close(fd)


def read_rows(path: Path) -> list[Record]:
    """The rows of ``eval.csv``; a damaged line is left out, a missing file is empty."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines[1:]:
        cells = line.split(",")
        if len(cells) == len(COLUMNS):
            with contextlib.suppress(ValueError):
                rows.append(dict(zip(COLUMNS, map(_number, cells), strict=True)))
    return rows


def _number(cell: str) -> int | float:
    return int(cell) if cell.lstrip("-").isdigit() else float(cell)


def final_evaluation(job: EvaluatorJob, budget_s: float) -> Record | None:
    """Evaluates the newest weights within a time budget, with as many rounds of the seeds as fit.

    Of several learners it is the one whose latest score is the highest.

    Returns:
        The record (``episodes`` says how many count), the one already written when this version
        was evaluated before, or None when there are no weights or no whole round ended in time.
    """
    end_s = time.monotonic() + budget_s
    run_dir = Path(job.run_dir)
    group = _leader(job)
    folder = group_folder(run_dir, group)
    found = WeightsWatch(folder / "weights").newer(0)
    if found is None:
        return None
    weights, data = found
    for row in reversed(read_rows(folder / "eval.csv")):
        if (row["epoch"], row["version"], row["episodes"]) == (weights.epoch, weights.version, job.episodes):
            return row | {"group": group, "episodes_cut": 0, "episodes_lost": 0, "whole": True}

    def tell(where: str, error: Exception, count: int) -> None:
        write_error(run_dir / "errors", "evaluator", error, f"environment-{count}")
        sys.stderr.write(event_text(where, error, count) + "\n")

    with Evaluation(job, tell) as evaluation:
        return evaluation.evaluate(weights, data, lambda: time.monotonic() >= end_s, partial=True, group=group)


def _leader(job: EvaluatorJob) -> int:
    """The group with the highest latest score; 0 without any."""
    latest = {
        group: rows[-1]["return_mean"] for group in range(job.groups)
        if (rows := read_rows(group_folder(Path(job.run_dir), group) / "eval.csv"))
    }
    return max(latest, key=lambda group: latest[group], default=0)


def main(argv: list[str]) -> int:
    """``JOB BUDGET_S``, the job as JSON: the last evaluation, as one JSON record."""
    end_with_parent()
    leave_to_supervisor()
    text, budget_s = argv
    job = EvaluatorJob.from_json(json.loads(text))
    try:
        with stdout_to_stderr():
            record = final_evaluation(job, float(budget_s))
    except SpreezeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
