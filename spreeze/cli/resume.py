"""Settings, task and counters of a run that is resumed, checked before anything is written."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spreeze.cli.evaluate import find_weights, recorded_spec
from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.layers import RESUMED, Settings, from_toml, iterate, to_toml
from spreeze.config.schema import Config, field_of
from spreeze.envs.task import check_fits, spec_from
from spreeze.errors import CheckpointError, EnvError, RunError, SpreezeError
from spreeze.files import read_bytes, read_json, replace_bytes
from spreeze.formatting import clean, duration, number
from spreeze.metrics.comparison import sources_in
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import checked, finite_number, group_folder, read_run, session_starts
from spreeze.runtime.plan import EarlierSessions
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.weights import read_weights
from spreeze.types import EnvSpec

_END = re.compile(r"^# end of settings: (\d+)$")
_UNSET = re.compile(r"^# \w+ is not set\b")
_LAST = ("stop", "target_evaluations")
"""The last setting in files of versions that wrote no end mark, unless the algorithm is none of Spreeze's own."""
_MAX_BYTES = 1_000_000
_COUNTERS = ("env_steps", "updates", "episodes", "wall_s")


def write_settings(run: Path, settings: Settings) -> None:
    """Writes ``config.toml`` atomically and durably: without it no checkpoint can be resumed.

    Its last line counts the settings, because a file cut at the end of a line is valid TOML. Values that a resumed run
    keeps also keep their sources. After an OSError the earlier settings are untouched.
    """
    before = sources_in(run)
    kept = {key: before.get(key, source) if source == RESUMED else source for key, source in settings.sources.items()}
    settings = dataclasses.replace(settings, sources=kept)
    text = f"{to_toml(settings)}# end of settings: {len(iterate(settings.config))}\n"
    replace_bytes(run / "config.toml", text.encode("utf-8"), durable=True)


def settings_of(run: Path, import_module: str | None = None) -> Settings:
    """Settings of an earlier session, with what was to be left free at its end; ``import_module``: the command line's.

    A RunError if they were never written, cannot be read, are incomplete, or are those of another task than
    ``run.json`` or the newest checkpoint tells.
    """
    if source := read_run(run).get("pulled_from"):
        raise _refused(run, f"it was pulled from {source}, which has a policy but no checkpoint; start a new run")
    try:
        text = read_bytes(run / "config.toml", _MAX_BYTES).decode("utf-8")
        _check_complete(text)
        settings = from_toml(text, RESUMED, import_module)
    except FileNotFoundError:
        raise RunError(f"{run.name} ended before training began: there is nothing to resume; start a new run") from None
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _refused(run, f"config.toml: {error}") from None
    except RecursionError:
        raise _refused(run, "config.toml: nested too deeply") from None
    _check_agrees(run, settings.config)
    config = settings.config
    most = field_of("tuning.leave_free").metadata["high"]
    share = finite_number(read_run(run).get("leave_free"), most, 0.0)  # it can be changed while a run goes on
    if share is not None:
        config = dataclasses.replace(config, tuning=dataclasses.replace(config.tuning, leave_free=share))
    return dataclasses.replace(settings, config=config)


def _refused(run: Path, why: str) -> RunError:
    return RunError(f"{run.name} cannot be resumed: {clean(why)}")


def _check_complete(text: str) -> None:
    """A ValueError if settings are missing."""
    values = tomllib.loads(text)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    remedy = "restore it from a backup, or start a new run with --name"
    if not lines:
        raise ValueError(f"the file is empty; {remedy}")
    if end := _END.match(lines[-1]):
        count = sum(len(fields) for fields in values.values() if isinstance(fields, dict))
        count += sum(bool(_UNSET.match(line)) for line in lines)
        if count != int(end[1]):
            raise ValueError(f"the file has {count} of {end[1]} settings; {remedy} (to change a setting use --set)")
        return
    algo = _value_at(values, "run", "algo")
    needed = (_LAST, ("run", "algo"), ("run", "mode"), ("env", "id"))
    complete = all(_value_at(values, *key) is not None for key in needed)
    if not complete or (isinstance(algo, str) and algo not in ALGORITHMS and list(values)[-1] != algo):
        raise ValueError(f"the file ends with {clean(lines[-1], 60)!r}: settings are missing; {remedy}")


def _value_at(values: Mapping[str, Any], section: str, name: str) -> Any:
    fields = values.get(section)
    return fields.get(name) if isinstance(fields, dict) else None


def _check_agrees(run: Path, config: Config) -> None:
    """A RunError if the settings are those of another task, algorithm or mode than the rest of the run tells."""
    record = read_run(run)
    modes = {record[name] for name in ("mode", "mode_before") if record.get(name) is not None}
    env_id, algo = config.env.id, config.run.algo
    checks = [
        ("env.id", env_id, {record["env_id"]} if record.get("env_id") else set(), "run.json"),
        ("run.algo", algo, {record["algo"]} if record.get("algo") else set(), "run.json"),
        ("run.mode", config.run.mode, modes, "run.json"),
    ]
    for _, state in _checkpoints(run, config):
        checks += [
            (key, value, {state[name]} if isinstance(state.get(name), str) else set(), "its checkpoint")
            for key, value, name in (("env.id", env_id, "env_id"), ("run.algo", algo, "algo"))
        ]
    for key, value, others, source in checks:
        # Only the settings name the module of an id.
        plain, *known = (text.rpartition(":")[2] if key == "env.id" else text for text in (value, *others))
        if others and plain not in known:
            raise _refused(
                run,
                f"config.toml has {key} = {value}, but {source} tells {' or '.join(sorted(others))}: "
                "one of the two is not this run's; restore it from a backup, or start a new run with --name",
            )


def _checkpoints(run: Path, config: Config) -> Iterator[tuple[int, dict[str, Any]]]:
    """(updates, state) of the newest checkpoint of each learner that has one."""
    for group in range(config.run.learners):
        store, newest = CheckpointStore(group_folder(run, group) / "checkpoints"), None
        with contextlib.suppress(CheckpointError):  # the learner says so
            newest = store.load_latest(large=False)
        if newest is not None:
            yield newest.updates, newest.state


def check_environment(run: Path, made: EnvSpec) -> None:
    """Compares the environment with that of ``env.json``, else of the run's weights, bounds included.

    Raises an EnvError if they differ.
    """
    try:
        recorded = spec_from(read_json(run / "env.json"))
    except ValueError:
        try:
            recorded = recorded_spec(read_weights(find_weights(str(run.absolute()), run.parent)))
        except SpreezeError:
            return
    try:
        check_fits(recorded, made, run.name)
    except EnvError as error:
        raise EnvError(
            f"{error}; nothing was changed; resume it with its original environment, or start a new run"
        ) from None


def earlier_sessions(run: Path, config: Config) -> tuple[EarlierSessions, str | None]:
    """Totals of the earlier sessions, and a note where ``run.json`` does not tell all of them.

    Each counter is the larger one of ``run.json`` and the checkpoint, which is durable. Others, as after a power loss,
    may come from the metrics.
    """
    record = read_run(run)
    missing = [name for name in _COUNTERS if record.get(name) is None]
    known: dict[str, list[float]] = {name: [] if name in missing else [record[name]] for name in _COUNTERS}
    states = list(_checkpoints(run, config))
    if states:
        known["updates"].append(sum(updates for updates, _ in states))
    for name in ("env_steps", "wall_s", "episodes"):
        known[name] += [value for _, state in states if (value := checked(name, state.get(name))) is not None]
    if missing and any(known.values()):
        _add_measured(run, missing, known)
    total = {name: max(values, default=0) for name, values in known.items()}
    sessions = record.get("sessions") or len(session_starts(record)) or 1
    note = None
    if missing and any(total[name] for name in missing):
        texts = (f"{name} {duration(total[name]) if name == 'wall_s' else number(total[name])}" for name in missing)
        note = f"run.json is damaged; from the checkpoint and the metrics: {', '.join(texts)}"
    return EarlierSessions(
        env_steps=int(total["env_steps"]),
        updates=int(total["updates"]),
        episodes=int(total["episodes"]),
        wall_s=float(total["wall_s"]),
        sessions=sessions,
        best_return=record.get("eval_best"),
    ), note


def _add_measured(run: Path, missing: list[str], known: dict[str, list[float]]) -> None:
    """Adds what the metrics tell of the counters that are missing."""
    try:
        latest = MetricsReader(run / "metrics.db").latest()
    except RunError:
        return
    for name in missing:
        if name == "wall_s":
            known[name] += [point.t for point in latest.values()]
        elif name in latest:
            known[name].append(latest[name].value)
