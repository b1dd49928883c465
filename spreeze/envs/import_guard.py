"""What a file may cause to be imported. A run's directory and a weights file may come from anywhere."""

from __future__ import annotations

from spreeze.envs.vector_engines import engine_of
from spreeze.errors import EnvironmentError_

_OWN = __name__.partition(".")[0]


def foreign_module(env_id: str, import_module: str | None) -> str | None:
    """The module outside of this package that an environment, as a file describes it, needs; None if none."""
    prefix = env_id.rpartition(":")[0] if engine_of(env_id) is None else ""
    named = (module for module in (import_module, prefix) if module)
    return next((module for module in named if module.partition(".")[0] != _OWN), None)


def refuse_foreign(env_id: str, import_module: str | None, allowed: str | None) -> None:
    """Lets a file's environment import only what the command names too.

    Args:
        env_id: as the file has it.
        import_module: as the file has it.
        allowed: of the command's ``--import``.

    Raises:
        EnvironmentError_: it needs another module.
    """
    module = foreign_module(env_id, import_module)
    if module is not None and module != allowed:
        raise EnvironmentError_(f"{env_id} comes from module '{module}': if you trust it, add --import {module}")
