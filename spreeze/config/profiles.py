"""Profiles: settings in TOML files, which other machines can load, too; the tuner exports its choices as one."""

from __future__ import annotations

import copy
import dataclasses
import tomllib
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from spreeze.config import SHIPPED
from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.layers import DEFAULT, Layer, Settings, Values, default_of, iterate, toml_value
from spreeze.config.schema import check_name, field_of, marked
from spreeze.errors import ConfigError, did_you_mean, refuse_newer
from spreeze.formatting import clean

FORMAT = 1
"""Format number of a profile, in its ``[about]``."""
PROFILE_DIR = SHIPPED / "profiles"
MAX_PROFILE_BYTES = 1_000_000
NO_PROFILE = "none"
"""The name that means no profile, not even that of the environment."""


def read_profile(name_or_path: str, env_id: str | None = None) -> Layer:
    """Reads a profile by name (from ``profiles/``) or path. A profile can name neither code nor paths.

    A table ``[only."ENV".section]`` applies if ``env_id`` is ENV, and overrides the others; ``[only.ALGO.section]``
    applies if that algorithm learns, which ``with_algorithm`` decides. Raises a ConfigError: not found, too large, not
    TOML, a newer format, or a key that only the command line may set.
    """
    path = _path(name_or_path)
    if not path.is_file():
        known = profile_names()
        raise ConfigError(f"no profile '{name_or_path}'{did_you_mean(name_or_path, known)} (known: {', '.join(known)})")
    if path.stat().st_size > MAX_PROFILE_BYTES:
        raise ConfigError(f"profile {path} has {path.stat().st_size} bytes; at most {MAX_PROFILE_BYTES}")
    try:
        values = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"profile {path} is not valid TOML: {error}") from None
    about = values.pop("about", {})
    if not isinstance(about, dict):
        raise ConfigError(f"profile {path}: about = {about!r}: expected a table")
    refuse_newer(about.get("format"), FORMAT, f"profile {path}", ConfigError)
    only = _popped_only(path, values)
    for section, fields in only.get(env_id or "", {}).items():
        values[section] = {**values.get(section, {}), **fields}
    of_algorithm = {name: sections for name, sections in only.items() if name in ALGORITHMS}
    for table in (values, *of_algorithm.values()):
        for key in marked("command_line_only"):
            section, name = key.split(".")
            if name in table.get(section, ()):
                raise ConfigError(f"profile {path}: {key} may only be set on the command line")
    keep = about.get("keep", [])
    keys = [f"{section}.{name}" for section, fields in values.items() for name in fields]
    if not isinstance(keep, list) or any(key not in keys for key in keep):
        raise ConfigError(
            f"profile {path}: about.keep = {clean(repr(keep), 200)}: expected a list of settings in this profile"
        )
    choice = None
    if {"algo", "mode"} <= (run := values.get("run", {})).keys():
        choice = {name: run.pop(name) for name in ("algo", "mode", "learners") if name in run}
    return Layer(f"profile {path.stem}", values, about, of_algorithm, choice)


def _popped_only(path: Path, values: Values) -> dict[str, Values]:
    """Removes and returns ``[only.NAME.section]``; a ConfigError unless each section is a table of fields."""
    only = values.pop("only", {})
    if not isinstance(only, dict) or not all(isinstance(sections, dict) for sections in only.values()):
        raise ConfigError(
            f'profile {path}: only = {clean(only, 100)}: expected tables such as [only."ENV".sac] or [only.a2c.rollout]'
        )
    for table in (values, *only.values()):
        for section, fields in table.items():
            if not isinstance(fields, dict):
                raise ConfigError(f"profile {path}: {section} = {clean(repr(fields), 100)}: expected a table of fields")
    return only


def or_in_runs_dir(name_or_path: str | None, runs_dir: str | Path) -> str | None:
    """The path of ``runs_dir/NAME.toml``, as a search writes it, unless a profile NAME comes with Spreeze."""
    if name_or_path in (None, NO_PROFILE) or _path(name_or_path).is_file():
        return name_or_path
    own = Path(runs_dir) / f"{name_or_path}.toml"
    return str(own) if own.is_file() else name_or_path


def chosen_profile(name_or_path: str | None, env_id: str) -> Layer | None:
    """The profile of ``--profile``: the task's without the flag, none with ``none``; errors as ``read_profile``."""
    if name_or_path == NO_PROFILE:
        return None
    return read_profile(name_or_path, env_id) if name_or_path else task_profile(env_id)


def task_profile(env_id: str) -> Layer | None:
    """The profile whose ``about.envs`` has this environment (``ALE/*``: all ids with that prefix), if any."""
    for name in profile_names():
        if any(fnmatchcase(env_id, pattern) for pattern in _tasks(PROFILE_DIR / f"{name}.toml")):
            return read_profile(name, env_id)
    return None


@lru_cache(64)
def _parsed(text: str) -> dict[str, Any]:
    """The TOML document; the form reads all profiles at each of its changes, and parsing takes 10 ms each."""
    return tomllib.loads(text)


def _tasks(path: Path) -> list[str]:
    """``about.envs`` of a profile; empty if it is damaged, which is an error only where the profile is requested."""
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            return []
        about = _parsed(path.read_text(encoding="utf-8")).get("about")
    except (OSError, ValueError, RecursionError):
        return []
    envs = about.get("envs") if isinstance(about, dict) else None
    return [pattern for pattern in envs if isinstance(pattern, str)] if isinstance(envs, list) else []


def profile_names() -> list[str]:
    """Names of the profiles that come with Spreeze."""
    return sorted(path.stem for path in PROFILE_DIR.glob("*.toml"))


def reached_with(layer: Layer, env_id: str) -> str | None:
    """Returns that runs with a profile reached on a task, with their time and number of seeds: its ``about.reached``.

    As in ``about.envs``, a name may be a pattern; the first match counts.
    """
    reached = layer.about.get("reached")
    fitting = [text for name, text in reached.items() if fnmatchcase(env_id, name)] if isinstance(reached, dict) else []
    return clean(fitting[0], 300) if fitting else None


def applicable(layer: Layer, machine_id: str) -> tuple[Layer, list[str]]:
    """The part of a profile that applies to this machine (all of it if it names none), and lines about the rest."""
    made_on = layer.about.get("machine_id")
    if made_on is None or made_on == machine_id:
        return layer, []
    dropped: list[str] = []
    values = _portable(layer.values, dropped)
    of_algorithm = {algo: _portable(table, dropped) for algo, table in layer.of_algorithm.items()}
    choice = None if layer.choice is None else _portable({"run": layer.choice}, dropped)["run"]
    notes = [f"{layer.source} was made on another machine ({layer.about.get('machine', 'not described')})"]
    if dropped:
        notes.append(f"  ignored on this machine: {', '.join(dropped)}")
    if batch := values.get("learner", {}).get("batch_size"):
        notes.append(f"  its batch of {batch} is kept; --auto finds the best one for this machine")
    return dataclasses.replace(layer, values=values, of_algorithm=of_algorithm, choice=choice), notes


def _portable(values: Values, dropped: list[str]) -> Values:
    """The values that apply to other machines, too; adds the rest to ``dropped``."""
    portable: Values = {}
    of_machine = marked("machine")
    for section, fields in values.items():
        for name, value in fields.items():
            if f"{section}.{name}" in of_machine:
                dropped.append(f"{section}.{name} = {value}")
            else:
                portable.setdefault(section, {})[name] = value
    return portable


def export_path(name_or_path: str) -> Path:
    """The path to write a profile to; a ConfigError if it exists or cannot be written."""
    path = _path(name_or_path)
    if name_or_path == NO_PROFILE:
        raise ConfigError(f"--export {NO_PROFILE}: --profile {NO_PROFILE} is reserved for no profile; use another name")
    if not path.parent.is_dir():
        raise ConfigError(f"--export {name_or_path}: no such directory {path.parent}")
    if path.exists():
        raise ConfigError(f"--export {name_or_path}: {path} exists; choose another name, or delete it first")
    return path


def _path(name_or_path: str) -> Path:
    """``profiles/NAME.toml``, or the path itself if it ends with ``.toml``."""
    path = Path(name_or_path)
    return path if path.suffix == ".toml" else PROFILE_DIR / f"{check_name(name_or_path)}.toml"


def profile_text(
    settings: Settings, record: dict[str, Any], machine: str, written_by: str = "spreeze tune --export"
) -> str:
    """The settings that are not at their default, as the text of a profile for ``--profile``.

    ``record`` is the result of the tuner or of a search, ``machine`` this machine in one line.
    """
    about = {
        "format": (FORMAT, "of profiles"),
        "machine": (machine, "where it was measured"),
        "machine_id": (record["machine_id"], "fields of the machine apply only where this is the same"),
        "tuned_for": (record["env"], "environment"),
        "measured": (record["measured_at"], "local time"),
        "objective": (record["objective"], record["formula"]),
    }
    lines = [f"# Measured and written by {written_by}; load it with --profile."]
    lines += [f"# Provisional: {' '.join(text.split())}" for text in (record.get("provisional") or {}).values()]
    lines.append("[about]")
    lines += [f"{name} = {toml_value(value)}  # {' '.join(text.split())}" for name, (value, text) in about.items()]
    section_now, sections, shared = None, settings.config.sections(), marked("shared")
    for section, name, value in iterate(settings.config):
        key = f"{section}.{name}"
        source = settings.source_of(key)
        is_default = source in (DEFAULT, default_of(settings))  # the algorithm sets these again by itself
        if is_default or value is None or (type(sections[section]).personal and key not in shared):
            continue
        if key in marked("command_line_only"):
            continue  # no profile may set it
        if key == "run.mode" and settings.config.on_policy is None:
            continue  # with an off-policy algorithm the user may choose any mode with replay
        if section != section_now:
            lines += ["", f"[{section}]"]
            section_now = section
        unit = field_of(key, settings.config).metadata["unit"]
        why = record["reasons"].get(key, source) if source == "tuner" else source
        lines.append(f"{name} = {toml_value(value)}  # [{unit or '1'}]; {' '.join(why.split())}")
    return "\n".join(lines) + "\n"
