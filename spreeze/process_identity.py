"""Identity and age of a process: pids are reused, clocks are set."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STATE_FIELD, _START_FIELD = 0, 19
"""Indices in ``/proc/PID/stat`` after the name: state, and start time in ticks since boot."""
_SAME_START_S = 1.0  # difference of two readings of one start, between which the clock may have been corrected


def process_identity(pid: int) -> dict[str, Any]:
    """Record by which ``same_process`` recognizes a living process.

    Its start in ticks since boot, and the boot id, do not depend on the clock. Without ``/proc`` it is the time of its
    start.
    """
    record: dict[str, Any] = {"pid": pid}
    with contextlib.suppress(OSError, ValueError, IndexError):
        return record | {"start_ticks": int(_stat_fields(pid)[_START_FIELD]), "boot_id": _boot_id()}
    started_s = _started_s(pid)
    return record if started_s is None else record | {"process_started_s": started_s}


def same_process(record: Mapping[str, Any]) -> bool:
    """True if the process of a ``process_identity`` is alive: pids are reused."""
    pid, known_s = record.get("pid"), record.get("process_started_s")
    if isinstance(pid, int) and isinstance(known_s, float):
        started_s = _started_s(pid)
        return started_s is not None and abs(started_s - known_s) < _SAME_START_S
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _stat_fields(pid) if isinstance(pid, int) else []
        started = (int(fields[_START_FIELD]), _boot_id())
        return started == (record.get("start_ticks"), record.get("boot_id")) and fields[_STATE_FIELD] not in "ZX"
    return False


def pid_exists(pid: int) -> bool:
    """True if some process has this number, maybe a zombie or one that reuses it."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # of another user
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return pid > 0  # 0 and below are process groups


def process_age_s() -> float:
    """Seconds since this process was started, imports included.

    Linux gives the start as ticks since boot. Converted to wall-clock time it would be off by up to a second, because
    the boot time is rounded.
    """
    try:
        ticks = int(_stat_fields("self")[_START_FIELD])
    except OSError:
        return max(0.0, time.time() - (_started_s(os.getpid()) or time.time()))
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _started_s(pid: int) -> float | None:
    """When a living process started, by the clock; None if there is none, for a system without ``/proc``."""
    import psutil  # not at the top: the base of the package loads nothing

    with contextlib.suppress(psutil.Error, OSError, ValueError, OverflowError):  # the last two: no such number
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(process.create_time())
    return None


def _stat_fields(pid: int | str) -> list[str]:
    """``/proc/PID/stat`` after the name, which may contain anything."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(")")[2].split()


def _boot_id() -> str:
    """Identifies the current boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
