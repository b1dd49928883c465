"""The forms of an environment's id: Gymnasium's own, ``ENGINE:ID``, ``TEAM:NAME``, ``MODULE:ID``, ``MODULE:CLASS``."""

from __future__ import annotations

import re

ENGINES = ("envpool", "vector")
"""Beginnings, before a colon, of the ids of vector environments (see ``envs.vector_engines``)."""
TEAM_PREFIXES = ("mpe2", "lbf", "parallel")
"""Beginnings, before a colon, of the ids of tasks of several agents (see ``envs.team_env``)."""
_PLAIN = re.compile(rf"^(({'|'.join((*ENGINES, *TEAM_PREFIXES))}):)?[A-Za-z0-9][A-Za-z0-9_./-]{{0,99}}$")


def engine_of(env_id: str) -> str | None:
    """``envpool`` or ``vector`` for an id with that prefix; None for a plain one."""
    engine, colon, _ = env_id.partition(":")
    return engine if colon and engine in ENGINES else None


def is_team(env_id: str) -> bool:
    """Whether an id is that of a task of several agents."""
    prefix, colon, _ = env_id.partition(":")
    return bool(colon) and prefix in TEAM_PREFIXES


def imports_only(env_id: object, module: object) -> bool:
    """Whether it is an id whose environment is made without the import of a module other than ``module``.

    ``parallel:MODULE`` always is: ``envs.team_env`` refuses it where ``--import`` does not name that module, too.
    """
    if not isinstance(env_id, str) or ".." in env_id:
        return False
    named, colon, name = env_id.rpartition(":")
    return _PLAIN.match(name if colon and named == module else env_id) is not None
