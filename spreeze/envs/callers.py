"""Names with which the processes of a run find the environments of a program that calls ``spreeze.train``.

These are new processes: they import a module by its name, or the program's own script by its path, and do not see the
program's objects. An anonymous function, such as ``lambda: MyEnv(size=5)``, is replaced by the class that it calls,
with those arguments.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from spreeze.config.section import value_text
from spreeze.envs.families import engine_of, is_team
from spreeze.envs.make import PLUGINS, attribute_at, needs_no_import
from spreeze.errors import ConfigError, UsageError
from spreeze.inference.user_modules import is_script

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    Task = str | EnvSpec | type[gymnasium.Env[Any, Any]] | Callable[..., gymnasium.Env[Any, Any]]

_MAIN = "__main__"
_LAMBDA = "<lambda>"
_AT_TOP = "write def make_env(): return ... at the top of the script or of a module, and give env=make_env"
_FIT = re.compile(r"^[\w.-]+$")  # names of scripts that can be part of an environment's id


def unwrap_call(task: Task) -> tuple[Task, dict[str, Any]]:
    """The class, function or id from which a partial or lambda makes the environment, and the arguments.

    Any other task is unchanged, without arguments; so is a lambda that does more, if defined at the top of its module:
    ``make = lambda: ...``. A UsageError if it does more than one call with plain values.
    """
    if isinstance(task, functools.partial):
        call = _Call(task.func, task.args, task.keywords)
    elif isinstance(task, FunctionType) and task.__name__ == _LAMBDA:
        try:
            call = _call_in(task)
        except UsageError:
            if _name_at_top(task) is None:
                raise
            return task, {}
    else:
        return task, {}
    try:
        arguments = call.arguments()
        for value in arguments.values():
            value_text(value)
    except (TypeError, ValueError, ConfigError) as error:
        raise UsageError(f"env = {_short(task)}: {error}; {_AT_TOP}") from None
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and call.function is gymnasium.make:
        return arguments.pop("id"), arguments
    return call.function, arguments


@dataclass
class _Call:
    """The call that a lambda makes."""

    function: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """All arguments by name; a TypeError or ValueError if they do not fit, or one has no name."""
        bound = inspect.signature(self.function).bind(*self.args, **self.keywords)
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= value
            elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise TypeError(f"argument {name} has no name")
            else:
                arguments[name] = value
        return arguments


class _Recorder:
    """Stands for a callable or module inside such a function: records a call instead of making it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return _recorder(getattr(self._value, name))

    def __call__(self, *args: Any, **keywords: Any) -> _Call:
        return _Call(self._value, args, keywords)


def _recorder(value: Any) -> Any:
    return _Recorder(value) if callable(value) or isinstance(value, ModuleType) else value


def _call_in(make: FunctionType) -> _Call:
    """The call whose result a lambda returns; found without calling any of the caller's code."""
    code = make.__code__
    names = {name: _recorder(make.__globals__[name]) for name in code.co_names if name in make.__globals__}
    cells = tuple(CellType(_recorder(cell.cell_contents)) for cell in make.__closure__ or ())
    try:
        call = FunctionType(code, names, make.__name__, make.__defaults__, cells)()
    except Exception:
        call = None
    if not isinstance(call, _Call):
        raise UsageError(f"env = {_short(make)}: it must only call one class or function with plain values; {_AT_TOP}")
    return call


def _name_at_top(make: Any) -> str | None:
    """The name of a class or function at the top of its module."""
    module = sys.modules.get(getattr(make, "__module__", None) or "")
    return next((name for name, value in vars(module).items() if value is make), None) if module is not None else None


def name_of(task: Task, import_module: str | None = None) -> tuple[str, str | None]:
    """The environment's id, and the module to import for it; None if there is nothing to import.

    ``task``: an id, an ``EnvSpec`` as it was registered, or a class or function that makes the environment, as from
    ``unwrap_call``. ``import_module``: the caller's module; None: it is searched for. A UsageError, which names an
    alternative, if no other process can make it.
    """
    if import_module == _MAIN:
        import_module = None if callable(task) else _own_program("the environment")
    if isinstance(task, str):
        return task, import_module or _named_module(task) or _registered_by(task)
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is not None and isinstance(task, registration.EnvSpec):
        return task.id, import_module or _registered_by(_check_registered(task, registration.registry).id)
    if hasattr(task, "step") and not isinstance(task, type):
        spec = getattr(task, "spec", None)
        alternative = f"its id, {spec.id!r}, or" if spec is not None else "its id or"
        raise UsageError(
            f"env = {_short(task)}: expected a class, not an instance: each process constructs its own "
            f"environments; pass {alternative} its class"
        )
    if not callable(task):
        raise UsageError(
            f"env = {_short(task)}: expected the Gymnasium id of a task, such as 'Pendulum-v1', or a class or "
            "function that constructs it"
        )
    return _importable(task, import_module)


def _named_module(env_id: str) -> str | None:
    """The module of ``MODULE:ID`` and ``parallel:MODULE``, which the caller trusts by naming it."""
    prefix, _, name = env_id.rpartition(":")
    if prefix == "parallel":
        return name
    return prefix or None if engine_of(env_id) is None and not is_team(env_id) else None


def _importable(make: Callable[..., Any], import_module: str | None) -> tuple[str, str]:
    """``MODULE:NAME`` of a class or function, and the module; a script has the name of its file."""
    module, name = import_module or getattr(make, "__module__", None), getattr(make, "__qualname__", None)
    if name == _LAMBDA:
        name = _name_at_top(make) or name
    if not isinstance(module, str) or not isinstance(name, str):
        raise UsageError(f"env = {_short(make)}: it has no importable name; pass a class or function")
    if "<" in name:
        raise UsageError(
            f"env = {name}: it is defined inside a function, so other processes cannot import it; define it at "
            "module level"
        )
    if attribute_at(_MAIN if is_script(module) else module, name) is not make:
        raise UsageError(
            f"env = {name}: module {module!r} does not define it at module level; set import_module= to its module"
        )
    if module == _MAIN:
        module = _own_program(name)
    return f"{Path(module).name if is_script(module) else module}:{name}", module


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
        return _own_program(env_id)
    # Every process knows Gymnasium's own environments and those of plugins.
    plugins = (plugin.value.partition(":")[0] for plugin in metadata.entry_points(group=PLUGINS))
    return None if module.partition(".")[0] in {"gymnasium", *(name.partition(".")[0] for name in plugins)} else module


def _check_registered(spec: EnvSpec, registry: dict[str, Any]) -> EnvSpec:
    known = registry.get(spec.id)
    names = ("entry_point", "max_episode_steps", "kwargs", "additional_wrappers")
    if known is None:
        raise UsageError(
            f"env = EnvSpec({spec.id!r}): it is not registered; register it in a module and set import_module=, "
            "or pass its class"
        )
    if any(getattr(spec, name) != getattr(known, name) for name in names):
        raise UsageError(
            f"env = EnvSpec({spec.id!r}): it differs from the registered one; pass the id, and constructor arguments "
            "as env_args={...}"
        )
    return spec


def _own_program(what: str) -> str:
    """The module or path of the calling program's script; a UsageError in a notebook or console, which has none."""
    main = sys.modules[_MAIN]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m
        return str(spec.name)
    if file is None or not is_script(file) or not Path(file).is_file():
        raise UsageError(
            f"{what} is defined in this notebook or console, which other processes cannot import: write it, "
            "with its gymnasium.register, to a file such as my_envs.py (in a notebook: %%writefile my_envs.py as "
            "the first line of its cell), import it from there, and pass that"
        )
    path = Path(file).resolve()
    if not _FIT.match(path.name):
        raise UsageError(
            f"{path.name}: rename this script: Gymnasium takes letters, digits, '_', '-' and '.' in the name of a task"
        )
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _short(value: object) -> str:
    return " ".join(repr(value).split())[:80]
