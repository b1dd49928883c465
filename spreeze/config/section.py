"""Sections of a configuration: frozen dataclasses whose fields carry meaning, unit and range, checked when built."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spreeze.errors import ConfigError, did_you_mean

Condition = Callable[[Any], bool]
"""True if a run reads a setting, by how its mode runs its algorithm (``modes.DataFlow``)."""


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    flag: str = "",
    default_text: str = "",
    read: Condition | None = None,
    fixed: bool = False,
    machine: bool = False,
    shared: bool = False,
    command_line_only: bool = False,
    tuner: bool = False,
) -> Any:
    """A dataclass field: all that is known of a setting, for checks, the command line and the page.

    ``doc`` says of a switch what is done while it is on. ``low`` and ``high`` are themselves allowed. The ``flag`` of a
    switch inverts its default (``--no-...`` if the default is on). ``default_text`` is what the command line says of
    a default that other settings decide.

    ``read`` says which runs it makes a difference to, where they are not those of its section. A ``fixed`` one cannot
    change on resume, because the stored state depends on it; that holds in derived sections too. The value of a
    ``machine`` one holds only on the machine that it was chosen on. A ``shared`` one is in exported profiles though its
    section is ``personal``. No profile may set a ``command_line_only`` one: it names code, a host or a place for files.
    Only the tuner reads a ``tuner`` one.
    """
    known = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata=known)


def always(data_flow: Any) -> bool:
    """The condition of settings that every run reads."""
    return True


def unoffered(data_flow: Any) -> bool:
    """The condition of settings that neither the tuner nor the page offers: they name the run, its task or its end."""
    return False


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all sections: checks type and range of every field when built."""

    read: ClassVar[Condition] = always
    """The runs in which its settings make a difference."""
    personal: ClassVar[bool] = False
    """Its settings are the user's own: an exported profile has only those that are ``shared``."""

    @classmethod
    def marked(cls, mark: str) -> list[str]:
        """The fields that ``setting(MARK=True)`` marks here or in a section that this one is derived from."""
        bases = [base.__dataclass_fields__ for base in cls.__mro__ if dataclasses.is_dataclass(base)]
        names = [item.name for item in dataclasses.fields(cls)]
        return [name for name in names if any(name in known and known[name].metadata.get(mark) for known in bases)]

    @classmethod
    def condition_of(cls, name: str) -> Condition:
        """The runs in which one of its settings makes a difference."""
        return cls.__dataclass_fields__[name].metadata.get("read") or cls.read

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = _coerced(getattr(self, item.name), hints[item.name], item)
            object.__setattr__(self, item.name, value)


def _coerced(value: Any, hint: Any, item: dataclasses.Field[Any]) -> Any:
    """``value`` as the field's type, or a ConfigError that names the field and what is allowed."""
    wanted = set_type(hint)
    if value is None and wanted is not hint:
        return None
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple) or not (value or item.default == ()):
            raise ConfigError(f"{item.name} = {value!r}: expected a list of {typing.get_args(wanted)[0].__name__}")
        return tuple(_scalar(entry, typing.get_args(wanted)[0], item) for entry in value)
    return _scalar(value, wanted, item)


def set_type(hint: Any) -> Any:
    """The type of a setting where it is set: T of ``T | None``."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(option for option in options if option is not type(None))


def _scalar(value: Any, wanted: type, item: dataclasses.Field[Any]) -> Any:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        kind = "bool, True or False" if wanted is bool else wanted.__name__
        raise ConfigError(f"{item.name} = {value!r}: expected {kind}, got {type(value).__name__}")
    low, high, choices = (item.metadata.get(key) for key in ("low", "high", "choices"))
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{item.name} = nan: expected a number")
    if (low is not None and value < low) or (high is not None and value > high):
        least, most = "" if low is None else f"{low:g}", "" if high is None else f"{high:g}"
        allowed = f"{least} to {most}" if least and most else f"at least {least}" if least else f"at most {most}"
        raise ConfigError(f"{item.name} = {value!r}: allowed is {allowed}")
    if choices and value not in choices:
        near = did_you_mean(str(value), choices)
        raise ConfigError(f"{item.name} = {value!r}: allowed is {', '.join(choices)}{near}")
    if isinstance(value, str) and len(value) > 4096:
        raise ConfigError(f"{item.name}: text of {len(value)} characters; at most 4096")
    return value
