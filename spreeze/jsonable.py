"""Frozen dataclasses to JSON and back, for jobs that travel to a child as text (never as pickle)."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


class Jsonable:
    """Mixin for dataclasses whose fields are scalars, tuples of scalars, or such dataclasses."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuilds what ``to_json`` gave; unknown keys are an error of the caller.

        Raises:
            TypeError: a key that the dataclass does not have, or a missing one.
        """
        return rebuild(cls, data)


def rebuild(cls: type[_T], data: dict[str, Any]) -> _T:
    """A dataclass from a dictionary, nested dataclasses and tuples included."""
    hints = typing.get_type_hints(cls)
    return cls(**{name: _value(hints.get(name), value) for name, value in data.items()})


def _value(hint: Any, value: Any) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next((option for option in typing.get_args(hint) if option is not type(None)), None)
    if value is None:
        return None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return rebuild(hint, value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_value(typing.get_args(hint)[0], entry) for entry in value)
    return value
