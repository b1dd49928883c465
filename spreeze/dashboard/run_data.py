"""Data that the pages show of a run: files of its directory, read in bounded amounts. Imports no Torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.config import SHIPPED
from spreeze.config.algorithms import ON_POLICY
from spreeze.config.modes import DataFlow, data_flow_of
from spreeze.config.schema import check_name
from spreeze.errors import ConfigError, ResourceError, RunError
from spreeze.files import read_json, tail_text
from spreeze.formatting import DASH, clean, duration
from spreeze.run_directory import (
    LAUNCHES,
    LIVE_STATES,
    TIMELINE,
    About,
    check_format,
    finite_number,
    is_alive,
    launch_log,
    list_runs,
    read_about,
    read_run,
    started_s,
    state_of,
    take_lock,
)

SAMPLE = SHIPPED / "assets" / "sample_run"
SAMPLE_NAME = "sample run"
_SECTION = re.compile(r"\b\w+\.(?=\w+=)")


@dataclass(frozen=True)
class RunRow:
    """One row of the list of runs; None is unknown."""

    name: str
    state: str
    env_id: str | None
    algo: str | None
    mode: str | None
    seed: int | None
    started: str | None
    wall_s: float | None
    env_steps: int | None
    updates: int | None
    eval_best: float | None
    eval_final: float | None
    exit_reason: str | None
    about: About

    @property
    def title(self) -> str:
        """Title that the user gave, or the run's name."""
        return self.about.title or self.name

    @property
    def began(self) -> str:
        """Month, day and time of its start."""
        return DASH if self.started is None else self.started[5:16].replace("T", " ")


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Serializes starts and the choice of a token among all tabs and servers; a ResourceError if it cannot."""
    try:
        (folder / LAUNCHES).mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(folder / LAUNCHES / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ResourceError(f"cannot write below {folder}: {error}") from None
    try:
        take_lock(fd, fcntl.LOCK_EX)  # without locks, the user has to use one page at a time
        yield
    finally:
        os.close(fd)


def runs_dir() -> Path:
    """The directory of the runs: ``$SPREEZE_RUNS_DIR``, else ``runs`` in the working directory."""
    return Path(os.environ.get("SPREEZE_RUNS_DIR") or "runs").absolute()


def run_names(folder: Path) -> list[str]:
    """Returns all runs, newest first, and the recorded sample run last."""
    names = [path.name for path in readable_runs(folder)]
    return names + ([SAMPLE_NAME] if (SAMPLE / "run.json").is_file() else [])


def readable_runs(folder: Path) -> list[Path]:
    """All runs, newest first, without those that a newer version of Spreeze has written."""
    runs = []
    for path in reversed(list_runs(folder)):
        with contextlib.suppress(RunError):
            check_format(path)
            runs.append(path)
    return runs


def run_path(name: str, folder: Path) -> Path:
    """The directory of a run named by a page or a request; a RunError if there is none, or it must not be shown."""
    if name == SAMPLE_NAME:
        return SAMPLE
    try:
        path = folder / check_name(name)
    except ConfigError as error:
        raise RunError(str(error)) from None
    if path.is_symlink() or not (path / "run.json").is_file():
        raise RunError(f"no run '{clean(name, 80)}' in {folder}")
    check_format(path)
    return path


def as_cli_argument(path: Path) -> str:
    """A path as a command takes it, from the folder that the server was started in."""
    return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else str(path)


def short(path: Path) -> str:
    """A path for display: relative to the working directory, the checkout or the home directory."""
    for base, prefix in ((Path.cwd(), ""), (SHIPPED, ""), (Path.home(), "~/")):
        if path.is_relative_to(base) and path != base:
            return prefix + path.relative_to(base).as_posix()
    return str(path)


def row(path: Path) -> RunRow:
    """A row with the facts in ``run.json``."""
    run, values = read_run(path), dict[str, Any]()
    for name in RunRow.__dataclass_fields__:
        values[name] = clean(run[name], 200) if isinstance(run.get(name), str) else run.get(name)
    name = SAMPLE_NAME if path == SAMPLE else path.name
    return RunRow(**values | {"name": name, "state": clean(state_of(path), 20), "about": read_about(path)})


def varied_settings(folder: Path) -> dict[str, str]:
    """Name of a sweep's run -> the settings that the sweep varied, without their sections, such as ``gamma=0.98``."""
    varied = dict[str, str]()
    for run in (run for path in folder.glob("*.sweep.json") for run in sweep_runs(path)):
        if "=" in (setting := str(run.get("setting"))):
            text = _SECTION.sub("", clean(setting, 80))
            varied |= {str(run.get("stem")): text, f"{run.get('stem')}-again{run.get('attempts')}": text}
    return varied


def sweep_runs(path: Path) -> list[dict[str, Any]]:
    """The runs in the record of a sweep; none if it is missing or damaged."""
    runs = read_json(path).get("runs")
    return [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []


def rows(folder: Path) -> list[RunRow]:
    return [row(path) for path in readable_runs(folder)]


def live_run(folder: Path, first: str | None = None) -> str | None:
    """The newest live run; ``first`` where that is alive."""
    # Called each second; testing a lock takes microseconds, so many runs do no harm.
    alive = [lock.parent for lock in folder.glob("*/run.lock") if is_alive(lock.parent)]
    records = {path: read_run(path) for path in alive if not path.is_symlink()}
    live = [path for path, run in records.items() if run.get("state") in LIVE_STATES]
    newest = max(live, key=lambda path: (path.name == first, started_s(records[path]) or 0.0, path.name), default=None)
    return None if newest is None else newest.name


def tail_lines(path: Path, count: int = 200) -> list[str]:
    """The last lines of a log, without control characters."""
    return [clean(line, 1000) for line in tail_text(path).splitlines()[-count:]]


def log_files(path: Path) -> dict[str, Path]:
    """Label -> file: errors, logs of the processes, and the terminal output of a page's or sweep's run."""
    files = [file for folder in ("errors", "logs") for file in sorted((path / folder).glob("*"))]
    labeled = {f"{file.parent.name}/{file.name}": file for file in files if file.is_file() and not file.is_symlink()}
    terminal = launch_log(path.name, path.parent)
    return {**labeled, "terminal": terminal} if terminal.is_file() else labeled


def newest_log(path: Path, count: int) -> tuple[str, list[str]]:
    """Label and last lines of the most recently written log; empty if nothing was written."""
    written = []
    for label, file in log_files(path).items():
        with contextlib.suppress(OSError):
            status = file.stat()
            written += [(status.st_mtime, label, file)] if status.st_size > 0 else []
    if not written:
        return "", []
    _, label, file = max(written)
    return label, tail_lines(file, count)


def newest_timeline(path: Path) -> dict[str, Any] | None:
    """Newest trace of worker phases: length [ms], and per worker [start, end, phase]; None without any."""
    record, workers = read_json(path / TIMELINE), []
    with contextlib.suppress(ValueError, TypeError, KeyError):
        for worker in record["workers"]:
            parts = [[float(start), float(end), clean(phase, 12)] for start, end, phase in worker["parts"]]
            workers.append({"name": clean(worker["name"], 40), "parts": parts})
        return {"wall": duration(float(record["wall_s"])), "length_ms": float(record["length_ms"]), "workers": workers}
    return None


@dataclass(frozen=True)
class Clip:
    path: Path
    values: dict[str, float]
    episode_returns: list[float]


def clips(path: Path) -> list[Clip]:
    files = sorted((path / "videos").glob("clip-*.mp4"), key=lambda file: file.name)
    return [_clip(file, read_json(file.with_suffix(".json"))) for file in files if not file.is_symlink()]


def _clip(path: Path, record: dict[str, Any]) -> Clip:
    returns = record.get("episode_returns")
    values = {name: value for name, stored in record.items() if (value := finite_number(stored)) is not None}
    known = [finite_number(value) for value in returns] if isinstance(returns, list) else []
    return Clip(path, values, [value for value in known if value is not None])


def data_flow(run: Mapping[str, Any]) -> DataFlow | None:
    """Data flow of a run, from its ``run.json``; None if unknown."""
    on_policy = run["data_flow"].get("lag") is not None if run.get("data_flow") else run.get("algo") in ON_POLICY
    return data_flow_of(run, on_policy=on_policy)


def takes_turns(run: Mapping[str, Any], config: Mapping[str, Mapping[str, Any]]) -> bool:
    """True if the workers of a run with these settings take turns in one process."""
    flow = data_flow(run)
    return flow is not None and flow.takes_turns(config.get("rollout", {}).get("samplers") or 1)
