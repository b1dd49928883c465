"""From what a person types to a weights file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spreeze.config.compatibility import actions_text
from spreeze.envs.make import one_line, refuse_foreign
from spreeze.envs.probe import spec_from_json
from spreeze.errors import EnvironmentError_, RunError, SpreezeError
from spreeze.run_directory import find_run
from spreeze.transport.weights import LATEST, Weights
from spreeze.types import EnvSpec

CHECKPOINTS = ("best", "latest")


def find_weights(run_or_path: str, runs_dir: Path, which: str = "best") -> Path:
    """The weights file of a run, or the file itself.

    Args:
        run_or_path: name of a run, its path, ``latest``, or the path of a ``.safetensors`` file.
        runs_dir: directory of the runs.
        which: ``best`` (falls back to the newest until an evaluation has ended) or ``latest``.

    Raises:
        RunError: no such run or file, or the run has no weights yet.
        ConfigError: the name could not be that of a run.
    """
    if run_or_path.endswith(".safetensors"):
        path = Path(run_or_path)
        if not path.is_file():
            raise RunError(f"no weights file {path}")
        return path
    run = find_run(run_or_path, runs_dir)
    best = run / "checkpoints" / "best.safetensors"
    if which == "best" and best.is_file():
        return best
    return _newest(run)


def _newest(run: Path) -> Path:
    """The file that ``LATEST.json`` names, or the one with the highest version."""
    folder = run / "weights"
    try:
        pointed = folder / Path(str(json.loads((folder / LATEST).read_bytes())["file"])).name
    except (OSError, ValueError, KeyError, TypeError):
        pointed = folder / ""
    files = [pointed] if pointed.is_file() else sorted(folder.glob("w-*.safetensors"))
    if not files:
        raise RunError(f"run {run.name} has no weights yet: it ended, or is still, before its first update")
    return files[-1]


def check_output(path: str | None) -> None:
    """Refuses a file to write whose folder is not there, before any work is done.

    Raises:
        RunError: no such folder, or the path is a folder.
    """
    if path is None:
        return
    if not Path(path).resolve().parent.is_dir():
        raise RunError(f"cannot write {path}: there is no folder {Path(path).resolve().parent}")
    if Path(path).is_dir():
        raise RunError(f"cannot write {path}: it is a folder; name a file in it")


def spec_of(weights: Weights, import_module: str | None) -> EnvSpec:
    """The environment that weights were trained on.

    Raises:
        EnvironmentError_: the file names no environment, or one of a module that was not allowed.
    """
    fields: Any = weights.meta.get("env")
    try:
        spec = spec_from_json(fields)
    except (TypeError, AttributeError):
        raise EnvironmentError_(f"{weights.path} does not say which environment it was trained on") from None
    refuse_foreign(spec.env_id, spec.import_module, import_module)
    return spec


@contextlib.contextmanager
def environment_errors(env_id: str) -> Iterator[None]:
    """Turns what an environment raises into one line.

    Raises:
        EnvironmentError_: the block raised anything that is not already such an error.
    """
    try:
        yield
    except SpreezeError:
        raise
    except Exception as error:
        raise EnvironmentError_(f"{env_id} failed: {type(error).__name__}: {one_line(error)}") from error


def check_fits(spec: EnvSpec, made: EnvSpec, path: Path) -> None:
    """Refuses an environment whose sizes differ from those that the weights were trained for.

    Raises:
        EnvironmentError_: sizes differ.
    """
    if (made.obs_dim, made.action_dim, made.num_actions) != (spec.obs_dim, spec.action_dim, spec.num_actions):
        raise EnvironmentError_(
            f"{path}: trained for {spec.obs_dim} observations and {actions_text(spec)}, "
            f"but {made.env_id} has {made.obs_dim} and {actions_text(made)}"
        )
    if made.obs_layout != spec.obs_layout:
        raise EnvironmentError_(
            f"{path}: trained on an observation laid out as {'; '.join(spec.obs_layout) or 'one Box'}, "
            f"but {made.env_id} has {'; '.join(made.obs_layout) or 'one Box'}"
        )
