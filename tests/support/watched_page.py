"""An open Live page, watched over a long time: what it costs itself, and whether anything grows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import dashboard_browser as page
import psutil
from figures import Row, row, slope_row

from spreeze.errors import SpreezeError
from spreeze.run_directory import read_run, state_of

HIDE = (
    "Object.defineProperty(document, 'hidden', {configurable: true, value: arguments[0]}); "
    "document.dispatchEvent(new Event('visibilitychange'))"
)
_LEFT_OUT = 0.2
"""Share of the time for which slopes do not count: caches fill, replay fills."""
_BUSY_S = 6.0
_AGES_S = 3.0
_HIDDEN_S = 10.0
_MIN_LOOKS = 5
"""Of which those that count give a slope."""
_AGE_PERIOD_S = 0.2


class Look(NamedTuple):
    """One look at an open page; bytes are private memory."""

    t_s: float
    browser_bytes: float
    """All processes of the browser, after a forced collection."""
    js_heap_bytes: float
    dom_nodes: float
    listeners: float
    server_bytes: float
    connections: float
    tasks_ms_per_s: float
    """Length of the tasks of the page's main thread."""
    processor_ms_per_s: float
    """Processor time of that thread."""
    age_s: float
    """Oldest that the newest number on the screen was."""


class WatchedVisit(page.Visit):
    """A visit that looks closely."""

    def reload(self) -> None:
        """Loads the page again and waits until it is there."""
        self.driver.execute_script("window.__before = true")
        self.driver.execute_cdp_cmd("Page.reload", {})
        ready = "return !window.__before && document.readyState === 'complete' && !!window.__spreeze"
        page.wait(lambda: self.driver.execute_script(ready), lambda: "the page did not come again", page.OPEN_S)

    def hide(self, hidden: bool) -> None:
        """Makes the page believe that its tab is behind others, or in front again."""
        self.driver.execute_script(HIDE, hidden)

    def requests(self, seconds: float) -> int:
        """How many requests the page makes in that time."""
        first = self.driver.execute_script("return window.__spreeze.requests")
        time.sleep(seconds)
        return int(self.driver.execute_script("return window.__spreeze.requests") - first)

    def counters(self) -> dict[str, float]:
        """Counters of the page's renderer."""
        rows = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return {one["name"]: one["value"] for one in rows}

    def busy_ms_per_s(self, seconds: float) -> tuple[float, float]:
        """(length of its tasks, processor time) of the page's main thread a second of wall time.

        On a busy machine tasks are longer than the processor time that they take.
        """
        first = self.counters()
        time.sleep(seconds)
        last = self.counters()
        wall_s = last["Timestamp"] - first["Timestamp"]
        tasks, processor = (1e3 * (last[name] - first[name]) / wall_s for name in ("TaskDuration", "ThreadTime"))
        return tasks, processor

    def ages(self, seconds: float) -> list[float]:
        """Age [s] of the newest number on the screen, five times a second; the run tells when its clock began."""
        found, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            shown_s, now = self.driver.execute_script("return [window.__spreeze.shown_s, Date.now() / 1000]")
            run = read_run(self.run)
            found.append(now - (run["heartbeat"] - run["wall_s"]) - shown_s)
            time.sleep(_AGE_PERIOD_S)
        return found

    def connections(self) -> int:
        """Open connections of the server."""
        return sum(entry.status == psutil.CONN_ESTABLISHED for entry in self.server.net_connections("tcp"))

    def browser_bytes(self) -> float:
        """Private memory of all processes of the browser."""
        total = 0
        for process in psutil.Process(self.driver.service.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return float(total)

    def look(self, busy_s: float, ages_s: float) -> Look:
        """Time and ages over these seconds, then a collection and what is left after it."""
        (tasks, processor), age = self.busy_ms_per_s(busy_s), max(self.ages(ages_s))
        self.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        counters = self.counters()
        return Look(
            t_s=time.monotonic(),
            browser_bytes=self.browser_bytes(),
            js_heap_bytes=counters["JSHeapUsedSize"],
            dom_nodes=counters["Nodes"],
            listeners=counters["JSEventListeners"],
            server_bytes=float(self.server.memory_full_info().uss),
            connections=float(self.connections()),
            tasks_ms_per_s=tasks,
            processor_ms_per_s=processor,
            age_s=age,
        )


@contextlib.contextmanager
def visit(run: Path) -> Iterator[WatchedVisit]:
    """A fresh server and a fresh browser for that run; the page is not yet open."""
    with page.visit(run) as seen:
        yield WatchedVisit(**vars(seen))


def watched_rows(
    seen: WatchedVisit, seconds: float, busy_s: float = _BUSY_S, ages_s: float = _AGES_S, hidden_s: float = _HIDDEN_S
) -> list[Row]:
    """Looks at an open page for that long and often enough, or until the run ends, then at a hidden one.

    Raises:
        SpreezeError: the run ended too soon for a slope.
    """
    seen.open()
    looks: list[Look] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(looks) < _MIN_LOOKS:
        look = seen.look(busy_s, ages_s)
        if state_of(seen.run) != "running":
            break
        looks.append(look)
    kept = looks[int(_LEFT_OUT * len(looks)) :]
    if len(looks) < _MIN_LOOKS:
        raise SpreezeError(f"the run ended after {len(looks)} looks: {_MIN_LOOKS} are needed for a slope")
    seen.hide(True)
    time.sleep(2.0)
    hidden = seen.requests(hidden_s)
    times = [look.t_s for look in kept]
    names = ("browser_bytes", "js_heap_bytes", "dom_nodes", "listeners", "server_bytes")
    return [
        row("watched", "min", [(kept[-1].t_s - looks[0].t_s) / 60.0], target="60"),
        row("main_thread_tasks", "ms/s", [look.tasks_ms_per_s for look in kept], target="<= 150"),
        row("main_thread_processor_time", "ms/s", [look.processor_ms_per_s for look in kept], target="<= 150"),
        row("data_age_worst", "s", [look.age_s for look in kept], target="<= 2"),
        row("connections", "count", [look.connections for look in kept], target="<= 3"),
        row(f"requests_hidden_in_{hidden_s:g}_s", "count", [float(hidden)], target="0"),
        *(slope_row(name, times, [getattr(look, name) for look in kept], "flat") for name in names),
    ]
