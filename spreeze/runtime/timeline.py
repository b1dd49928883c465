"""Trace of worker phases over a quarter of a second: which of them work at the same time, and which wait for which."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from spreeze.files import write_json
from spreeze.run_directory import TIMELINE
from spreeze.transport import status_table
from spreeze.transport.status_table import StatusTable
from spreeze.workers.roles import Phase

LENGTH_S = 0.25
FIRST_S = 10.0  # learning time [s] after which the first one is recorded without a request
_MAX_PARTS = 400  # Parts of one worker that are kept: the latest.


class Timeline:
    """Switches the workers' recording on and off (``StatusTable.events``) and writes what they noted to a file."""

    def __init__(self, status: StatusTable, rows: dict[str, int], run_dir: Path, wall_s: Callable[[], float]) -> None:
        """``rows`` has each worker's row of the status table by its name."""
        self._status, self._rows, self._file, self._wall_s = status, rows, run_dir / TIMELINE, wall_s
        self._began_ns = 0
        self._before: dict[str, int] = {}
        self.recorded = False

    def begin(self) -> None:
        self.recorded = True
        self._before = {name: int(self._status.control(row)[status_table.PHASE]) for name, row in self._rows.items()}
        self._began_ns = time.monotonic_ns()
        self._status.header[status_table.RECORDING] = 1

    @property
    def is_due(self) -> bool:
        """True if a trace is being recorded and is long enough."""
        return self._began_ns > 0 and time.monotonic_ns() - self._began_ns >= LENGTH_S * 1e9

    def finish(self) -> None:
        """Writes the file; an OSError if that fails."""
        self._status.header[status_table.RECORDING] = 0
        began_ns, self._began_ns = self._began_ns, 0
        end_ns = time.monotonic_ns()
        workers = {
            name: parts(self._status.events(row), began_ns, end_ns, Phase(self._before[name]))
            for name, row in self._rows.items()
            if int(self._status.control(row)[status_table.PID])  # it has been started
        }
        write_json(
            self._file,
            {
                "wall_s": round(self._wall_s(), 3),
                "length_ms": round((end_ns - began_ns) / 1e6, 3),
                "workers": [{"name": name, "parts": rows} for name, rows in workers.items() if rows],
            },
        )


def parts(events: Any, began_ns: int, end_ns: int, before: Phase) -> list[list[Any]]:
    """[start, end, phase] in ms since ``began_ns`` from a worker's events; a phase lasts until the next event.

    Phases that follow themselves are one part. ``before`` lasts until the first event: a long update may have none.
    """
    noted = sorted(
        (value >> status_table.PHASE_BITS, value & (2**status_table.PHASE_BITS - 1)) for value in events[1:].tolist()
    )
    known = [(t_ns, Phase(phase).name.lower()) for t_ns, phase in noted if began_ns <= t_ns < end_ns]
    if noted[0][0] < began_ns:  # else the ring has lost the first ones
        known.insert(0, (began_ns, before.name.lower()))
    rows: list[list[Any]] = []
    for (t_ns, phase), (next_ns, _) in pairwise([*known, (end_ns, "")]):
        start, end = round((t_ns - began_ns) / 1e6, 3), round((next_ns - began_ns) / 1e6, 3)
        if rows and rows[-1][2] == phase:
            rows[-1][1] = end
        else:
            rows.append([start, end, phase])
    return rows[-_MAX_PARTS:]
