"""Tables that the module of ``--import`` extends with rows of its own: algorithms, modes, networks and knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from spreeze.errors import ConfigError, described, did_you_mean
from spreeze.formatting import clean
from spreeze.inference.user_modules import import_named

_Row = TypeVar("_Row")


def find(name: str, import_module: str | None, table: Callable[[str | None], dict[str, _Row]], key: str) -> _Row:
    """A row of a table; imports the module only if no declared row has that name. A ConfigError if there is none."""
    known = table(None)
    if name not in known and import_module is not None:
        known = table(import_module)
    if name not in known:
        more = "" if import_module else " (and those of the --import module)"
        raise ConfigError(f"{key} = {name!r}: must be one of: {', '.join(known)}{more}{did_you_mean(name, known)}")
    return known[name]


def extended(known: dict[str, Any], module: str | None, name: str, kind: type) -> dict[str, Any]:
    """A table extended by the rows that the module of ``--import`` declares; its name never comes from a file.

    A ConfigError if the module cannot be imported, or declares something other than new rows.
    """
    for row in _declared_by(module, name) if module is not None else ():
        if not isinstance(row, kind) or row.name in known:  # type: ignore[attr-defined]
            raise ConfigError(
                f"--import {module}: {name} holds {clean(repr(row), 200)}; expected a "
                f"{kind.__module__}.{kind.__name__} with a new name, other than {', '.join(known)}"
            )
        known[row.name] = row  # type: ignore[attr-defined]
    return known


def _declared_by(module: str, name: str) -> Iterable[Any]:
    """Imports the module of ``--import``; returns its declarations of that name. A ConfigError if that fails."""
    try:
        return tuple(getattr(import_named(module), name, ()))
    except Exception as error:
        raise ConfigError(f"--import {module}: {described(error)}") from error
