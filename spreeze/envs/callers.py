"""Names for the environments of a program that calls ``spreeze.train``, by which the processes of a run find them.

These processes are fresh ones: they import a module by its name and see nothing of what lives in the program. The
program's own script is never imported for it: a script without a main guard would do all its work again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spreeze.envs.families import engine_of, is_team
from spreeze.envs.make import needs_no_import
from spreeze.errors import UsageError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    Task = str | EnvSpec | type[gymnasium.Env[Any, Any]] | Callable[..., gymnasium.Env[Any, Any]]

_MAIN = "__main__"


def name_of(task: Task, import_module: str | None = None) -> tuple[str, str | None]:
    """The environment's id, and the module to import for it; None if there is nothing to import.

    Args:
        task: an id, an ``EnvSpec`` as it was registered, or a class or function that makes the environment.
        import_module: the module that the caller names; None: it is looked for.

    Raises:
        UsageError: no other process can make it; the message says what to give instead.
    """
    if import_module == _MAIN:
        raise UsageError(f"import_module={_MAIN!r}: {_own_program('the environment')}")
    if isinstance(task, str):
        return task, import_module or _named_module(task) or _registered_by(task)
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is not None and isinstance(task, registration.EnvSpec):
        return task.id, import_module or _registered_by(_unchanged(task, registration.registry).id)
    if isinstance(task, functools.partial):
        raise UsageError(
            f"env_id = {_short(task)}: a partial has no name; give the class or function itself, and its "
            "arguments as env_args={...}"
        )
    if hasattr(task, "step") and not isinstance(task, type):
        spec = getattr(task, "spec", None)
        instead = f"its id, {spec.id!r}, or" if spec is not None else "its id or"
        raise UsageError(
            f"env_id = {_short(task)}: an environment that was made cannot be handed to the processes of "
            f"a run, which make their own; give {instead} its class"
        )
    if not callable(task):
        raise UsageError(
            f"env_id = {_short(task)}: expected the Gymnasium id of a task, such as 'Pendulum-v1', or the "
            "class or function that makes it"
        )
    return _importable(task, import_module)


def _named_module(env_id: str) -> str | None:
    """The module of ``MODULE:ID`` and ``parallel:MODULE``, which the caller trusts, as it names it."""
    prefix, _, name = env_id.rpartition(":")
    if prefix == "parallel":
        return name
    return prefix or None if engine_of(env_id) is None and not is_team(env_id) else None


def _importable(make: Callable[..., Any], import_module: str | None) -> tuple[str, str]:
    """``MODULE:NAME`` of a class or function, and the module."""
    module, name = import_module or getattr(make, "__module__", None), getattr(make, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise UsageError(
            f"env_id = {_short(make)}: it has no name by which it can be imported; give a class or a function"
        )
    if module == _MAIN:
        raise UsageError(f"env_id = {name}: {_own_program(name)}")
    if "<" in name:
        raise UsageError(
            f"env_id = {name}: it is made inside of a function, where no other process can find it; put "
            "it at the top of a module"
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not make:
        raise UsageError(
            f"env_id = {name}: module {module!r} has no such class or function at its top; give "
            "import_module= of the module that has it"
        )
    return f"{module}:{name}", module


def _registered_by(env_id: str) -> str | None:
    """The module of an environment that this program has registered; None if every process knows its id."""
    registration: Any = sys.modules.get("gymnasium.envs.registration")
    spec = None if registration is None else registration.registry.get(env_id)
    if spec is None or spec.entry_point is None or needs_no_import(env_id):
        return None
    entry = spec.entry_point
    if isinstance(entry, str):
        module = entry.partition(":")[0]
    else:
        module = str(getattr(entry.func if isinstance(entry, functools.partial) else entry, "__module__", _MAIN))
    if module == _MAIN:
        raise UsageError(f"env_id = {env_id!r}: {_own_program(f'what {env_id} is made of')}")
    return None if module.partition(".")[0] in _known_packages() else module


def _known_packages() -> set[str]:
    """Packages whose environments Gymnasium knows in every process."""
    plugins = metadata.entry_points(group="gymnasium.envs")
    return {"gymnasium", *(plugin.value.partition(":")[0].partition(".")[0] for plugin in plugins)}


def _unchanged(spec: EnvSpec, registry: dict[str, Any]) -> EnvSpec:
    known = registry.get(spec.id)
    names = ("entry_point", "max_episode_steps", "kwargs", "additional_wrappers")
    if known is None:
        raise UsageError(
            f"env_id = EnvSpec({spec.id!r}): it is not registered; register it in a module of its own and "
            "give import_module=, or give the class that makes it"
        )
    if any(getattr(spec, name) != getattr(known, name) for name in names):
        raise UsageError(
            f"env_id = EnvSpec({spec.id!r}): it differs from what is registered under that id; give the "
            "id, and what the constructor takes as env_args={...}"
        )
    return spec


def _own_program(what: str) -> str:
    """Why what stands in the program's own script is found by nobody else, and what to do."""
    file = getattr(sys.modules.get(_MAIN), "__file__", None)
    script = None if file is None else Path(file)
    where = "this notebook or console" if script is None else script.name
    text = (
        f"{what} is defined in the calling program itself ({where}), which the processes of a run cannot import: "
        "put it, with its gymnasium.register, into a module of its own, such as my_envs.py, and give "
        "import_module='my_envs'"
    )
    if script is None or not script.stem.isidentifier():
        return text
    return (
        f"{text}; import_module={script.stem!r} works if all that {where} does stands under if __name__ == '__main__'"
    )


def _short(value: object) -> str:
    return " ".join(repr(value).split())[:80]
