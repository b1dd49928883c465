"""Values that a user writes as text: ``--env-arg``, ``--set``, and what ``spreeze.train`` hands to its process."""

from __future__ import annotations

import ast
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from spreeze.errors import ConfigError

_INF, _NAN = float("inf"), float("nan")
_NAMES = {"true": True, "false": False, "null": None, "inf": _INF, "Infinity": _INF, "nan": _NAN, "NaN": _NAN}
"""Names of values that are no Python literals."""
_MEANT = {"True": ("true", "yes", "on"), "False": ("false", "no", "off"), "None": ("none", "null", "nil")}
_WORDS = {word: meant for meant, words in _MEANT.items() for word in words}
"""Words, in small letters, that would be texts and so count as true, and what is probably meant."""
_BRACKETS = {"[": "a list", "{": "a dictionary", "(": "a tuple", '"': "a text", "'": "a text"}


def literal(text: str) -> Any:
    """The value that a text means in JSON or else in Python, where ``inf`` and ``nan`` are numbers too.

    Raises:
        ValueError: it means none, as bare words do.
    """
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

    Raises:
        ConfigError: a broken list, dictionary, tuple or quoted text, or a word such as ``off`` that as a text would
            count as true; the message says how to write it.
    """
    raw = text.strip()
    try:
        return literal(raw)
    except ValueError:
        pass
    if raw.lower() in _WORDS:
        raise ConfigError(
            f"{raw} is a string, and thus true: write {_WORDS[raw.lower()]}, or '\"{raw}\"' for the string"
        )
    if raw[:1] in _BRACKETS and raw:
        raise ConfigError(
            f"begins as {_BRACKETS[raw[0]]} and is none in Python or JSON: texts within need quotes, and "
            'the whole needs some for the shell, such as \'tasks=["a", "b"]\''
        )
    return raw


def value_text(value: Any) -> str:
    """The text that ``literal`` reads as an equal value of the same type; arrays become lists, paths texts.

    Raises:
        ConfigError: not made of None, bool, int, float, str, bytes, list, tuple and dict.
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
    raise TypeError(f"a {type(value).__name__} is none")


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
