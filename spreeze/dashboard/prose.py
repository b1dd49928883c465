"""Text of a run as Markdown that says nothing else: no link, picture or formula comes out of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from spreeze.formats import DASH, clean

_MARKS = re.compile(r"([\\`*_\[\]<>$|~:#!])")
_MOST = 500


def plain(text: object) -> str:
    """One line in which every mark stands for itself; a dash for nothing."""
    return _MARKS.sub(r"\\\1", clean(text or DASH, _MOST))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose cells wrap, unlike those of ``st.dataframe``."""
    lines = [head, ["---"] * len(head), *([plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(texts: Iterable[object]) -> str:
    """A list."""
    return "\n".join(f"- {plain(text)}" for text in texts)
