"""The Live page open in a real browser beside a run: what it costs the run, and whether anything grows (Linux)."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from spreeze.bench import browser as web
from spreeze.bench.live_run import LiveRun
from spreeze.bench.soak import slope_row
from spreeze.errors import SpreezeError
from spreeze.hardware import read_machine
from spreeze.rundir import read_run, state_of
from spreeze.store_reader import MetricsReader

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

Row = dict[str, Any]
DRAWN = "return [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart?.draws && d.__chart.points).length"
HIDE = "Object.defineProperty(document, 'hidden', {configurable: true, value: arguments[0]}); " \
       "document.dispatchEvent(new Event('visibilitychange'))"
_OPEN_S = 60.0
_SETTLE_S = 6.0
"""After a page was opened or closed: the visualizer goes on for some seconds when nobody looks any more."""
_LEFT_OUT = 0.2
"""Share of the time for which slopes do not count: caches fill, replay fills."""
_BUSY_S = 6.0
_AGES_S = 3.0
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


@dataclass(frozen=True)
class Visit:
    """A dashboard, a browser and the run that they show."""

    run: Path
    address: str
    server: psutil.Process
    driver: Chrome

    def open(self) -> float:
        """Opens the Live page of the run; seconds until its first chart is drawn."""
        begun = time.monotonic()
        self.driver.get(f"{self.address}/?run={self.run.name}")
        web.wait(lambda: self.driver.execute_script(DRAWN) > 0, _OPEN_S, lambda: "no chart was drawn")
        return time.monotonic() - begun

    def close(self) -> None:
        """Leaves the page."""
        self.driver.get("about:blank")

    def reload(self) -> None:
        """Loads the page again and waits until it is there."""
        self.driver.execute_script("window.__before = true")
        self.driver.execute_cdp_cmd("Page.reload", {})
        ready = "return !window.__before && document.readyState === 'complete' && !!window.__spreeze"
        web.wait(lambda: self.driver.execute_script(ready), _OPEN_S, lambda: "the page did not come again")

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
        return {row["name"]: row["value"] for row in rows}

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
            t_s=time.monotonic(), browser_bytes=self.browser_bytes(), js_heap_bytes=counters["JSHeapUsedSize"],
            dom_nodes=counters["Nodes"], listeners=counters["JSEventListeners"],
            server_bytes=float(self.server.memory_full_info().uss), connections=float(self.connections()),
            tasks_ms_per_s=tasks, processor_ms_per_s=processor, age_s=age,
        )


@contextlib.contextmanager
def visit(run: Path) -> Iterator[Visit]:
    """A fresh server and a fresh browser for that run; the page is not yet open."""
    with tempfile.TemporaryDirectory(prefix="spreeze-page-") as folder, \
            web.server(run.parent.absolute(), Path(folder) / "server.log") as (address, process), \
            web.browser() as driver:
        driver.execute_cdp_cmd("Performance.enable", {})
        web.enter(driver, address, run.parent.absolute())
        yield Visit(run, address, psutil.Process(process.pid), driver)


def page_rows(
    minutes: float, pairs: int, window_s: float, run: Path | None, env_id: str, runs_dir: str,
    extra: Sequence[str] = (),
) -> list[Row]:
    """Cost of an open page to its run, then its behaviour over ``minutes``.

    Args:
        minutes: how long the page is watched.
        pairs: windows with the page open and with it closed, in turn, whose rates are compared.
        window_s: length of one of these windows.
        run: a run that is alive; None starts one and ends it.
        env_id: task of the run that is started.
        runs_dir: where it goes.
        extra: further arguments of ``train``.

    Raises:
        SpreezeError: the run ended, or the page did not come.
        ResourceError: no browser can be driven here.
    """
    with contextlib.ExitStack() as stack:
        if run is None:
            name = f"page-{os.getpid()}-{int(time.time())}"
            own = stack.enter_context(LiveRun(["--env", env_id, *extra], runs_dir, name, {}))
            own.wait(lambda: _counts(own.path)[2] > 0, 120.0, "the first update")
            stack.callback(own.stop)
            run = own.path
        seen = stack.enter_context(visit(run))
        rows = [_row("first_chart", "s", [seen.open()], "<= 2")]
        rows += effect_rows(seen, pairs, window_s)
        return rows + watched_rows(seen, 60.0 * minutes)


def effect_rows(seen: Visit, pairs: int, window_s: float, settle_s: float = _SETTLE_S) -> list[Row]:
    """Rates of the run with the page open over those with it closed; windows in turn, open and closed first in turn."""
    ratios: dict[str, list[float]] = {"env_steps": [], "updates": []}
    for pair in range(pairs):
        rates = {}
        for state in (("open", "closed"), ("closed", "open"))[pair % 2]:
            if state == "open":
                seen.open()
            else:
                seen.close()
            time.sleep(settle_s)
            rates[state] = _rates(seen.run, window_s)
        for index, name in enumerate(ratios):
            if rates["closed"][index] > 0.0:
                ratios[name].append(rates["open"][index] / rates["closed"][index])
    cores = read_machine().cores.usable
    return [
        {**_row(f"{name}_kept_beside_open_page", "ratio", found, ">= 0.98 on a machine with a free core"),
         "usable_cores": cores}
        for name, found in ratios.items() if found
    ]


def watched_rows(seen: Visit, seconds: float, busy_s: float = _BUSY_S, ages_s: float = _AGES_S) -> list[Row]:
    """Looks at an open page for that long, or until the run ends, then at a hidden one.

    Raises:
        SpreezeError: too short for a slope.
    """
    seen.open()
    looks, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        look = seen.look(busy_s, ages_s)
        if state_of(seen.run) != "running":
            break
        looks.append(look)
    kept = looks[int(_LEFT_OUT * len(looks)) :]
    if len(kept) < 4:
        raise SpreezeError(f"{len(kept)} looks give no slope: take at least {7 * (busy_s + ages_s) / 60:.1f} min")
    seen.hide(True)
    time.sleep(2.0)
    hidden = seen.requests(10.0)
    times = [look.t_s for look in kept]
    names = ("browser_bytes", "js_heap_bytes", "dom_nodes", "listeners", "server_bytes")
    return [
        _row("watched", "min", [(kept[-1].t_s - looks[0].t_s) / 60.0], "60"),
        _row("main_thread_tasks", "ms/s", [look.tasks_ms_per_s for look in kept], "<= 150"),
        _row("main_thread_processor_time", "ms/s", [look.processor_ms_per_s for look in kept], "<= 150"),
        _row("data_age_worst", "s", [look.age_s for look in kept], "<= 2"),
        _row("connections", "count", [look.connections for look in kept], "<= 3"),
        _row("requests_hidden_in_10_s", "count", [float(hidden)], "0"),
        *(slope_row(name, times, [getattr(look, name) for look in kept], "flat") for name in names),
    ]


def _row(name: str, unit: str, values: list[float], target: str) -> Row:
    return {"metric": name, "unit": unit, "value": statistics.median(values), "repeats": values, "target": target}


def _rates(run: Path, seconds: float) -> tuple[float, float]:
    """(env steps/s, updates/s) of the run over that time, by its own clock."""
    first = _alive(run)
    time.sleep(seconds)
    last = _alive(run)
    return (last[1] - first[1]) / (last[0] - first[0]), (last[2] - first[2]) / (last[0] - first[0])


def _alive(run: Path) -> tuple[float, float, float]:
    if state_of(run) != "running":
        raise SpreezeError(f"{run.name} is {state_of(run)}: a run that goes on is needed")
    return _counts(run)


def _counts(run: Path) -> tuple[float, float, float]:
    """(wall time, env steps, updates) as the run wrote them last; zeros before that."""
    latest = MetricsReader(run / "metrics.db").latest()
    steps, updates = latest.get("env_steps"), latest.get("updates")
    return (0.0, 0.0, 0.0) if steps is None or updates is None else (updates.t, steps.value, updates.value)
