"""The tuner's record of a run: measurements, choice and reasons, as text for the page and the report."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spreeze.files import read_json, tail_text
from spreeze.formatting import DASH, clean, number, percent
from spreeze.metrics import spread
from spreeze.run_directory import finite_number, read_run

PROGRESS = "tune-progress.jsonl"  # rows of a running tuner; ``tune.json`` has them all at the end
ALGORITHMS = "algorithms.json"  # algorithms that were compared on the task, in the runs of all of them
BATCH, THREADS, SAMPLERS = "learner.batch_size", "learner.threads", "sampling.samplers"
_MAX = 1e18  # larger numbers are not plausible and count as unknown
_STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "learner": ("The learner alone", (BATCH, THREADS)),
    "joint": ("Samplers beside the learner", (SAMPLERS,)),
    "rollout": ("Samplers and inference workers beside the learner", ()),
}
"""Stage of a row -> title of its table, and numbers that it needs to be drawn."""
_OFTEN_ALIKE = ("learner.device", "learner.precision")
"""Settings whose column is left out if all rows have the same value, so that a table fits a terminal of 100 columns."""


@dataclass(frozen=True)
class MeasuredRow:
    """One measured setting; None is unknown."""

    stage: str  # one of ``_STAGES``
    setting: dict[str, Any]  # ``section.field`` -> value
    updates_per_s: float | None = None
    env_steps_per_s: float | None = None
    spread: float | None = None  # range of the repeats as a share of their median, the larger one of the two rates
    cpu_share: float | None = None  # share of the usable cores that the run kept busy
    score: float | None = None
    failure: str | None = None

    @property
    def frames_per_s(self) -> float | None:
        batch = self.setting.get(BATCH)
        return None if self.updates_per_s is None or batch is None else self.updates_per_s * batch

    def is_choice(self, choice: dict[str, Any]) -> bool:
        """True if all its settings that the tuner chose have the chosen values."""
        tuned = {key: value for key, value in self.setting.items() if key in choice}
        return bool(tuned) and all(choice[key] == value for key, value in tuned.items())

    def figures(self, choice: dict[str, Any]) -> dict[str, str]:
        """Measured figures, by column of a table."""
        return {
            "env steps/s": number(self.env_steps_per_s),
            "updates/s": number(self.updates_per_s),
            **({"update frames/s": number(self.frames_per_s)} if self.stage == "learner" else {}),
            "spread": percent(self.spread),
            "cpu": percent(self.cpu_share),
            "score": number(self.score),
            "note": clean(self.failure or ("chosen" if self.is_choice(choice) else ""), 120),
        }


@dataclass(frozen=True)
class TuningView:
    """The tuner's result; ``choice`` is empty while it is still measuring."""

    rows: list[MeasuredRow] = field(default_factory=list)
    labels: dict[str, Any] = field(default_factory=dict)
    """``section.field`` -> head of its column, from an untrusted file."""
    choice: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def doubts(self) -> list[str]:
        """Reasons why the result is provisional, one sentence each; empty if it is final."""
        causes = _dict(self.record.get("provisional"))
        return [clean(text, 400) for text in causes.values() if isinstance(text, str)]

    def of(self, stage: str) -> list[MeasuredRow]:
        """Rows of ``learner`` (alone), ``joint`` (with samplers) or ``rollout`` (with on-policy collection)."""
        return [row for row in self.rows if row.stage == stage]

    @property
    def stages(self) -> list[tuple[str, list[MeasuredRow]]]:
        """Title and rows of each table that has any."""
        return [(title, rows) for stage, (title, _) in _STAGES.items() if (rows := self.of(stage))]

    def label(self, key: str) -> str:
        """Name of a setting in a table or chart."""
        return clean(self.labels.get(key) or key.partition(".")[2], 40).replace("_", " ")

    def table(self, rows: list[MeasuredRow]) -> list[dict[str, str]]:
        """The cells of each row by column, without empty columns."""
        keys = dict.fromkeys([*self.labels, *(key for row in rows for key in row.setting)])
        for key in _OFTEN_ALIKE:
            if len({row.setting[key] for row in self.rows if key in row.setting}) < 2:
                keys.pop(key, None)
        heads = {key: self.label(key) for key in keys}
        figures = [row.figures(self.choice) for row in rows]
        for index, row in enumerate(rows):
            if row.setting in [earlier.setting for earlier in rows[:index]]:
                figures[index]["note"] = ", ".join(filter(None, (figures[index]["note"], "measured again")))
        taken = Counter([*heads.values(), *{name for line in figures for name in line}])
        heads = {key: head if taken[head] == 1 else clean(key, 40) for key, head in heads.items()}
        lines = [
            {heads[key]: setting_text(row.setting.get(key)) for key in keys} | figure
            for row, figure in zip(rows, figures, strict=True)
        ]
        names = dict.fromkeys(name for line in lines for name in line)
        kept = [name for name in names if name == "note" or any(line[name] != DASH for line in lines)]
        return [{name: line[name] for name in kept} for line in lines]


def read(path: Path) -> TuningView:
    """Reads the tuner's result of a run, or what it has measured so far."""
    if record := read_json(path / "tune.json"):
        return of_record(record)
    entries = []
    for line in tail_text(path / PROGRESS).splitlines():
        with contextlib.suppress(ValueError):  # the last line may still be written
            entries.append(json.loads(line))
    labels = next((_dict(entry["labels"]) for entry in entries if isinstance(entry, dict) and "labels" in entry), {})
    return TuningView(_rows(entries), labels)


def better_run(run: Path) -> str | None:
    """The run that won, for the run of an algorithm that was compared on its task and stopped early; else None."""
    record = read_json(run / ALGORITHMS)
    return None if record.get("algo") in (None, read_run(run).get("algo")) else clean(record.get("run"), 80)


def of_record(record: dict[str, Any]) -> TuningView:
    lists = (record.get(name) for name in ("update_rates", "joint_rates", "rollout_rates"))
    entries = [entry for entries in lists if isinstance(entries, list) for entry in entries]
    labels, choice, reasons = (_dict(record.get(name)) for name in ("labels", "choice", "reasons"))
    return TuningView(_rows(entries), labels, choice, reasons, record)


def _rows(entries: list[Any]) -> list[MeasuredRow]:
    return [row for entry in entries if isinstance(entry, dict) and (row := _row(entry)) is not None]


def _row(entry: dict[str, Any]) -> MeasuredRow | None:
    """Parses an untrusted entry; None if its stage or a needed number is missing."""
    stage, values = str(entry.get("stage")), _dict(entry.get("setting"))
    setting = {key: value for key, value in values.items() if isinstance(value, str | int | float)}
    if stage not in _STAGES or any(finite_number(setting.get(key), _MAX) is None for key in _STAGES[stage][1]):
        return None
    rates = {name: _rates(entry.get(name)) for name in ("updates_per_s", "env_steps_per_s", "cpu_share")}
    spreads = [spread(rates[name]) for name in ("updates_per_s", "env_steps_per_s")]
    medians = {name: statistics.median(values) if values else None for name, values in rates.items()}
    largest = max((value for value in spreads if value is not None), default=None)
    score, failure = finite_number(entry.get("score"), _MAX), entry.get("failure")
    failure = failure if isinstance(failure, str) else None
    return MeasuredRow(stage, setting, spread=largest, score=score, failure=failure, **medians)


def _rates(value: Any) -> list[float]:
    return [float(x) for x in value if finite_number(x, _MAX) is not None] if isinstance(value, list | tuple) else []


def setting_text(value: Any) -> str:
    """A setting as it is written on a command line."""
    return DASH if value is None else clean(f"{value:g}" if isinstance(value, float) else value, 40)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def paper_batch(tuning: TuningView) -> int | None:
    """The batch size of the paper's rule; None if it lies far beyond what was measured."""
    paper = tuning.record.get("paper_batch_size")
    largest = max((row.setting[BATCH] for row in tuning.of("learner")), default=0)
    return paper if isinstance(paper, int) and paper <= 4 * largest else None
