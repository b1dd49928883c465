"""Why a child process ended: its exit code or signal, and what it wrote to standard error last."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

from spreeze.errors import importable_path, is_users
from spreeze.formatting import clean, size
from spreeze.machine.hardware import memory_limits

_TAIL_BYTES = 16_384
_LINES, _LONGEST_LINE = 3, 160
_BY_SIGNAL = re.compile(
    r"Fatal Python error: (Aborted|Segmentation fault|Bus error|Illegal instruction|Floating)|"
    r"Timeout \(|(Current thread|Thread) 0x"
)
"""Line that Python writes about a signal that ends it, as the exit code does; a stack of each thread follows."""
_CURRENT, _OTHER = "Current thread 0x", "Thread 0x"
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_OF_PYTHON = ("Extension modules: ", "  ...", "Stack (", "  <")


def ending(code: int, oom_kills_before: int | None = None) -> str:
    """End of a process in words: ``exit code 3``, ``signal SIGSEGV``; real-time signals have no name.

    ``oom_kills_before`` is ``oom_kills`` from before: of a SIGKILL since which it has risen, the kernel is the author.
    """
    if code >= 0:
        return f"exit code {code}"
    known = -code in set(signal.Signals)
    text = f"signal {signal.Signals(-code).name if known else -code}"
    if -code != signal.SIGKILL or oom_kills_before is None or (oom_kills() or 0) <= oom_kills_before:
        return text
    memory = memory_limits()
    return f"{text} by the system, out of memory ({size(memory.cgroup_limit_bytes or memory.total_bytes)})"


def oom_kills(root: str | Path = "/") -> int | None:
    """Number of processes that the kernel has killed because memory ran out; None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in (Path(root) / "proc/vmstat").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def last_words(path: Path | str, since: int = 0) -> str:
    """The last lines of a file of standard error in one line, `` | `` between them; empty if there are none.

    What was in the file before the position ``since`` is left out. Of a stack that Python writes when it is ended by a
    signal, the line in the environment's code stays.
    """
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = since if since <= end else 0  # begun again in the meantime
            file.seek(max(start, end - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return words_of(text)


def words_of(text: str) -> str:
    """``last_words`` of a text."""
    said: list[str] = []
    stack: list[tuple[str, str]] = []
    in_stack = in_other = False
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if _BY_SIGNAL.match(line):
            in_stack, in_other = True, line.startswith(_OTHER)
            if line.startswith(_CURRENT):
                stack.clear()
        elif in_stack and frame is not None:
            stack += [] if in_other else [(frame["file"], f":{frame['line']}")]
        elif line.strip() and not (in_stack and line.startswith(_OF_PYTHON)):
            said.append(clean(line, _LONGEST_LINE))
    place = next((importable_path(name) + line for name, line in stack if is_users(name)), None)
    lines = said[-_LINES:]
    return " | ".join([*lines, *([f"at {place}"] if place else [])])


class Log(NamedTuple):
    """A file to which a process writes, and where in it this process started."""

    path: Path
    since: int

    @classmethod
    def now(cls, path: Path) -> Log:
        """Log of what is written to the file from now on."""
        try:
            return cls(path, path.stat().st_size)
        except OSError:
            return cls(path, 0)

    @property
    def last_words(self) -> str:
        return last_words(self.path, self.since)
