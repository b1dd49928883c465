"""Formats numbers and untrusted text for display; an unknown value is a dash, never 0."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

DASH = "-"
_UNSEEN = (
    r"\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f"
)
"""8-bit control codes, direction marks, zero-width characters, surrogates."""
_CONTROL = re.compile(f"[\\x00-\\x1f{_UNSEEN}]+")
_CONTROL_BUT_LINES = re.compile(f"[\\x00-\\x08\\x0b-\\x1f{_UNSEEN}]")


def clean(text: object, limit: int = 500) -> str:
    """One line of printable text: control, escape and direction characters become spaces."""
    line = _CONTROL.sub(" ", str(text)[: 4 * limit]).strip()
    return line if len(line) <= limit else line[: limit - 3] + "..."


def printable(text: str) -> str:
    """Like ``clean``, but keeps newlines and tabs and truncates nothing."""
    return _CONTROL_BUT_LINES.sub(" ", text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, two spaces between the columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def number(value: float | None) -> str:
    """About three significant figures with k, M or G: ``14900`` becomes ``14.9 k``."""
    if value is None or not math.isfinite(value):
        return DASH
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if suffix == " k" else limit)
            return f"{scaled:.{_decimals(scaled)}f}{suffix}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.{_decimals(value)}f}"


def signed(value: float) -> str:
    """``number`` with a plus sign where it is not negative."""
    return f"{'+' if value >= 0.0 else ''}{number(value)}"


def whole(value: float | None) -> str:
    """Formats all digits, for numbers such as a seed."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.0f}"


def _decimals(value: float) -> int:
    magnitude = abs(value)
    return 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 0.1 else 4


def percent(value: float | None) -> str:
    """A fraction as a percentage."""
    return DASH if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def size(value_bytes: float | None) -> str:
    """Bytes in binary units: ``23.4 GiB``."""
    if value_bytes is None or not math.isfinite(value_bytes):
        return DASH
    scaled = float(value_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(scaled) < 1024:
            return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.1f} {unit}"
        scaled /= 1024
    return f"{scaled:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Seconds as ``0:42``, ``1:02:03`` or ``2 d 03:04``."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    rounded = max(0, round(seconds))
    hours, minutes, rest = rounded // 3600, rounded // 60 % 60, rounded % 60
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def in_a_row(failures: int) -> str:
    """`` N times in a row`` for a message; empty for the first failure."""
    return "" if failures == 1 else f" {failures} times in a row"


def is_power_of_ten(count: int) -> bool:
    """True for 1, 10, 100 ..: repeated events are reported at these counts only."""
    return str(count).rstrip("0") == "1"
