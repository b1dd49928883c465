"""Converts rewards, flags and arrays of environments, which may be plain values, tensors, or lists of one element."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)  # largest value that can be stored


def element_of(value: Any) -> Any:
    """The element of an array, tensor or list of one (else a ValueError); any other value is returned unchanged."""
    if isinstance(value, list | tuple):
        value = np.asarray(value)
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    shape = tuple(getattr(value, "shape", ()))
    if any(length != 1 for length in shape):
        raise ValueError(f"shape {shape}; expected one number")
    return item()


def array_like(value: Any) -> Any:
    """A torch tensor as an array, from any device and without its gradient; other values are returned unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") and hasattr(value, "cpu") else value


def number_of(value: Any) -> float:
    """A reward as a number, which may be infinite; a ValueError if it is none, or several."""
    try:
        return float(element_of(value))
    except OverflowError:
        return float("inf")
    except (TypeError, RuntimeError):
        raise ValueError(f"{str(value)[:60]} ({type(value).__name__})") from None


def flag_of(value: Any) -> bool:
    """A flag: True, False, None, or a number; a ValueError if it is none of these, or several."""
    element = element_of(value)
    if element is None or isinstance(element, bool | int | float | np.bool_ | np.number):
        return bool(element)
    raise ValueError(f"{str(value)[:60]} ({type(value).__name__})")
