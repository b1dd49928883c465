"""The forms of an environment's id: Gymnasium's own, ``ENGINE:ID``, ``TEAM:NAME``, ``MODULE:ID``, ``MODULE:CLASS``."""

from __future__ import annotations

import re
from typing import NamedTuple


class Family(NamedTuple):
    """Environments whose ids begin with one prefix and a colon."""

    prefix: str
    make: str
    """``MODULE:FUNCTION`` that makes one: for ``envs.vector_engines.open_vector`` or ``envs.team_env.make_team``."""
    team: bool = False
    """Its tasks have several agents; else each environment is a vector of N that its own engine steps."""
    package: str = ""
    """Package that a program without Spreeze has to install for its tasks."""


FAMILIES = {
    family.prefix: family
    for family in (
        Family("envpool", "spreeze.envs.vector_engines:envpool"),
        Family("vector", "spreeze.envs.vector_engines:gymnasium_vector"),
        Family("mpe2", "spreeze.envs.team_env:mpe2", team=True, package="mpe2"),
        Family("lbf", "spreeze.envs.team_env:foraging", team=True, package="lbforaging"),
        Family("parallel", "spreeze.envs.team_env:own_module", team=True),
    )
}
_PLAIN = re.compile(rf"^(({'|'.join(FAMILIES)}):)?[A-Za-z0-9][A-Za-z0-9_./-]{{0,99}}$")


def family_of(env_id: str) -> Family | None:
    """The family whose prefix an id has; None for a plain one."""
    prefix, colon, _ = env_id.partition(":")
    return FAMILIES.get(prefix) if colon else None


def engine_of(env_id: str) -> str | None:
    """``envpool`` or ``vector`` for an id with that prefix; None for others."""
    family = family_of(env_id)
    return None if family is None or family.team else family.prefix


def is_team(env_id: str) -> bool:
    """True if an id is that of a task of several agents."""
    family = family_of(env_id)
    return family is not None and family.team


def imports_only(env_id: object, module: object) -> bool:
    """True if it is an id whose environment is made without the import of a module other than ``module``.

    ``parallel:MODULE`` always is: ``envs.team_env`` refuses it where ``--import`` does not name that module, too.
    """
    if not isinstance(env_id, str) or ".." in env_id:
        return False
    named, colon, name = env_id.rpartition(":")
    return _PLAIN.match(name if colon and named == module else env_id) is not None
