"""Sections of a configuration: frozen dataclasses whose fields have a meaning, unit and range, checked when built.

Also parses values that a user writes as text: ``--env-arg``, ``--set``, and the arguments of ``spreeze.train``.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spreeze.errors import ConfigError, did_you_mean
from spreeze.types import type_hints

NO_LIMIT = 10**9
"""Upper bound of settings that have none of their own: counts, norms, samples per insert."""

Condition = Callable[[Any], bool]
"""True if a run reads a setting, given the data flow of its mode and algorithm (``modes.DataFlow``)."""


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    flag: str = "",
    inverse: str = "",
    default_text: str = "",
    when: Condition | None = None,
    fixed: bool = False,
    machine: bool = False,
    shared: bool = False,
    command_line_only: bool = False,
    tuner: bool = False,
) -> Any:
    """A dataclass field with the metadata of a setting, for checks, the command line and the page.

    The ``doc`` of a switch describes its effect when on. ``low`` and ``high`` are inclusive. The ``flag`` of a switch
    inverts its default (``--no-...`` if the default is on); ``inverse`` describes that, where "do not DOC" would not.
    ``default_text`` describes on the command line a default that other settings decide.

    ``when`` is the condition for a run to use the setting, where it differs from that of its section. A ``fixed``
    setting cannot change on resume, because the stored state depends on it; that holds in derived sections, too. The
    value of a ``machine`` setting applies only to the machine that it was chosen on. A ``shared`` setting is part of
    exported profiles although its section is ``personal``. No profile may set a ``command_line_only`` setting, which
    names code, a host or a path. Only the tuner reads a ``tuner`` setting.
    """
    known = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata=known)


def always(data_flow: Any) -> bool:
    """The condition of settings that every run reads."""
    return True


def not_offered(data_flow: Any) -> bool:
    """The condition of settings that neither the tuner nor the page offers: they name the run, its task or its end."""
    return False


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all sections: checks type and range of every field when built."""

    when: ClassVar[Condition] = always
    """The runs in which its settings make a difference."""
    personal: ClassVar[bool] = False
    """Its settings are the user's own: an exported profile has only the ``shared`` ones."""

    @classmethod
    def marked(cls, mark: str) -> list[str]:
        """The fields that ``setting(MARK=True)`` marks here or in a section that this one is derived from."""
        bases = [base.__dataclass_fields__ for base in cls.__mro__ if dataclasses.is_dataclass(base)]
        names = [item.name for item in dataclasses.fields(cls)]
        return [name for name in names if any(name in known and known[name].metadata.get(mark) for known in bases)]

    @classmethod
    def condition_of(cls, name: str) -> Condition:
        """The runs in which one of its settings makes a difference."""
        return cls.__dataclass_fields__[name].metadata.get("when") or cls.when

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for item in dataclasses.fields(self):
            value = _coerced(getattr(self, item.name), hints[item.name], item)
            object.__setattr__(self, item.name, value)


def _coerced(value: Any, hint: Any, item: dataclasses.Field[Any]) -> Any:
    """``value`` as the field's type, or a ConfigError that names the field and what is allowed."""
    wanted = non_none_type(hint)
    if value is None and wanted is not hint:
        return None
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple) or not (value or item.default == ()):
            raise ConfigError(f"{item.name} = {value!r}: expected a list of {typing.get_args(wanted)[0].__name__}")
        return tuple(_scalar(entry, typing.get_args(wanted)[0], item) for entry in value)
    return _scalar(value, wanted, item)


def non_none_type(hint: Any) -> Any:
    """The type of a setting that is set: T of ``T | None``."""
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
        allowed = (
            f"at most {high:g}" if low is None else f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
        )
        raise ConfigError(f"{item.name} = {value!r}: must be {allowed}")
    if choices and value not in choices:
        near = did_you_mean(str(value), choices)
        raise ConfigError(f"{item.name} = {value!r}: must be one of: {', '.join(choices)}{near}")
    if isinstance(value, str) and len(value) > 4096:
        raise ConfigError(f"{item.name}: text of {len(value)} characters; at most 4096")
    return value


_INF, _NAN = float("inf"), float("nan")
_NAMES = {"true": True, "false": False, "null": None, "inf": _INF, "Infinity": _INF, "nan": _NAN, "NaN": _NAN}
"""Names of values that are not Python literals."""
_MEANT = {"True": ("true", "yes", "on"), "False": ("false", "no", "off"), "None": ("none", "null", "nil")}
_WORDS = {word: meant for meant, words in _MEANT.items() for word in words}
"""Lower-case words that would be strings and so count as true, and the value that is probably meant."""
_BRACKETS = {"[": "list", "{": "dictionary", "(": "tuple", '"': "string", "'": "string"}


def literal(text: str) -> Any:
    """The value of a text in JSON or Python, also ``inf`` and ``nan``; a ValueError for others, such as a bare word."""
    raw = text.strip()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(_Named().visit(ast.parse(raw, mode="eval")))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"{text[:80]!r} is not a JSON or Python literal") from None
    if value is Ellipsis:
        raise ValueError("... is not a JSON or Python literal")
    return value


class _Named(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def literal_or_text(text: str) -> Any:
    """Like ``literal``, but returns a bare word as it is.

    Raises a ConfigError for a broken list, dictionary, tuple or quoted text, and for a word such as ``off`` that as a
    text would count as true; the message says how to write it.
    """
    raw = text.strip()
    try:
        return literal(raw)
    except ValueError:
        pass
    if raw.lower() in _WORDS:
        raise ConfigError(f"{raw} is a string, thus true: write {_WORDS[raw.lower()]}, or '\"{raw}\"' for the string")
    if raw[:1] in _BRACKETS and raw:
        how = "close its quote" if raw[0] in "\"'" else "quote the strings in it"
        raise ConfigError(
            f"not a valid {_BRACKETS[raw[0]]}: {how}; for the shell, quote the whole argument, such as "
            '\'tasks=["a", "b"]\''
        )
    return raw


def value_text(value: Any) -> str:
    """The text that ``literal`` reads as an equal value of the same type; arrays become lists, paths texts.

    Raises a ConfigError for a value not made of None, bool, int, float, str, bytes, list, tuple and dict.
    """
    try:
        return repr(_plain(value))
    except (TypeError, ValueError, RecursionError) as error:
        try:
            shown = " ".join(str(value).split())[:80]
        except (ValueError, RecursionError):
            shown = type(value).__name__
        raise ConfigError(
            f"{shown!r}: expected a number, True, False, None, a text, or a list, tuple or dictionary of "
            f"those; {str(error)[:120]}"
        ) from None


def _plain(value: Any) -> Any:
    """Value in Python's own types, whose ``repr`` can be read back."""
    if value is None or isinstance(value, bool | bytes):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return str.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(_plain(entry) for entry in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "tolist", None)):  # of NumPy or Torch
        return _plain(value.tolist())
    raise TypeError(f"{type(value).__name__} objects cannot be sent to another process")


def split_values(text: str) -> list[str]:
    """Splits at commas outside of brackets and quotes: ``[64,64],[128]`` has two values."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        depth += 0 if quote else (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]
