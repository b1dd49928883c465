"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
CHILD_TIMEOUT_S = 30.0
"""What the doctor tries in a process of its own is given up after that."""


@dataclass(frozen=True)
class Check:
    """One finding: ``fail`` means that the command it is about would not work."""

    name: str
    status: Status
    text: str
    remedy: str | None = None
