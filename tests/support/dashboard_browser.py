"""A dashboard's server and a real browser for tests, what an open page costs its run, and pictures of the pages."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import psutil
from figures import Row, row
from harness import PATIENCE_S
from watched_run import Counters, LiveRun, counters, rates

from spreeze.errors import ResourceError, SpreezeError
from spreeze.machine.hardware import read_machine
from spreeze.run_directory import state_of

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
DRAWN = "return [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart?.draws && d.__chart.points).length"
OPEN_S = 60.0
"""A page that is not there by then is an error."""
_END_S = 15.0
_SETTLE_S = 6.0
"""After a page was opened or closed: the visualizer goes on for some seconds when nobody looks any more."""


# --- server and browser ---


def missing() -> str | None:
    """Why no browser can be driven here, or None."""
    if _chromium() is None or shutil.which("chromedriver") is None:
        return "no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium (pip install selenium)"
    return None


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((place for place in map(shutil.which, names) if place is not None), None)


@contextlib.contextmanager
def server(
    runs: Path, log: Path, cwd: Path = ROOT, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A dashboard on a free port, if none is named, started in ``cwd``; yields its address and its process.

    A browser gets in by ``enter``.

    Raises:
        ResourceError: there is no ``app.py`` beside the package.
        SpreezeError: it did not come up.
    """
    if not (ROOT / "app.py").is_file():
        raise ResourceError(f"no app.py in {ROOT}: run this from a checkout")
    port = free_port() if port is None else port
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "SPREEZE_RUNS_DIR": str(runs),
        "PYTHONPATH": os.pathsep.join(paths),
        "SPREEZE_DASHBOARD_TOKEN": "on",
    }
    command = [sys.executable, "-m", "streamlit", "run", str(ROOT / "app.py"), "--server.port", str(port)]
    with open(log, "wb") as out:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    address = f"http://localhost:{port}"
    try:
        wait(lambda: _answers(address), lambda: f"server: {log.read_text()[-2000:]}")
        yield address, process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address + "/_stcore/health", timeout=PATIENCE_S) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def enter(driver: Chrome, address: str, runs: Path) -> None:
    """Makes the browser known to that server, by the token in its private file; no page is loaded yet."""
    place = runs / ".launches" / f"dashboard-{urlsplit(address).port}.html"
    token = re.search(r"\?token=([\w-]+)", place.read_text(encoding="utf-8"))
    if token is None:
        raise SpreezeError(f"{place} holds no address with a token")
    driver.get(f"{address}/_stcore/health?token={token[1]}")


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 1000) -> Iterator[Chrome]:
    """Chromium without a window and with a profile of its own.

    Raises:
        ResourceError: none can be driven here.
    """
    if (reason := missing()) is not None:
        raise ResourceError(f"a real browser is needed: {reason}")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="spreeze-browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = _chromium() or ""
        for flag in (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def wait(condition: Callable[[], T], told: Callable[[], object] = str, seconds: float = PATIENCE_S) -> T:
    """The first true value of ``condition``; an error with what was ``told`` when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise SpreezeError(f"not within {seconds:g} s: {told()}")
        time.sleep(0.1)


# --- the page and its run ---


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
        wait(lambda: self.driver.execute_script(DRAWN) > 0, lambda: "no chart was drawn", OPEN_S)
        return time.monotonic() - begun

    def close(self) -> None:
        """Leaves the page."""
        self.driver.get("about:blank")


@contextlib.contextmanager
def visit(run: Path) -> Iterator[Visit]:
    """A fresh server and a fresh browser for that run; the page is not yet open."""
    with (
        tempfile.TemporaryDirectory(prefix="spreeze-page-") as folder,
        server(run.parent.absolute(), Path(folder) / "server.log") as (address, process),
        browser() as driver,
    ):
        driver.execute_cdp_cmd("Performance.enable", {})
        enter(driver, address, run.parent.absolute())
        yield Visit(run, address, psutil.Process(process.pid), driver)


@contextlib.contextmanager
def living_run(run: Path | None, env_id: str, runs_dir: str, extra: Sequence[str] = ()) -> Iterator[Path]:
    """That run, or one that is started, learns, and is ended afterwards."""
    if run is not None:
        yield run
        return
    with LiveRun(["--env", env_id, *extra], runs_dir, f"page-{os.getpid()}-{int(time.time())}", {}) as own:
        own.await_learning(120.0)
        yield own.path
        own.stop()


def effect_rows(seen: Visit, pairs: int, window_s: float, settle_s: float = _SETTLE_S) -> list[Row]:
    """Rates of the run with the page open over those with it closed; windows in turn, open and closed first in turn."""
    ratios: dict[str, list[float]] = {"updates": [], "env_steps": []}  # in the order of ``rates``
    for pair in range(pairs):
        found = {}
        for state in (("open", "closed"), ("closed", "open"))[pair % 2]:
            if state == "open":
                seen.open()
            else:
                seen.close()
            time.sleep(settle_s)
            first = _alive(seen.run)
            time.sleep(window_s)
            found[state] = rates(first, _alive(seen.run))
        for kept, is_open, is_closed in zip(ratios.values(), found["open"], found["closed"], strict=True):
            if is_closed > 0.0:
                kept.append(is_open / is_closed)
    return [
        row(
            f"{name}_kept_beside_open_page",
            "ratio",
            found,
            usable_cores=read_machine().cores.usable,
            target=">= 0.98 on a machine with a free core",
        )
        for name, found in ratios.items()
        if found
    ]


def _alive(run: Path) -> Counters:
    if state_of(run) != "running" or (now := counters(run)) is None:
        raise SpreezeError(f"{run.name} is {state_of(run)}: a run that goes on is needed")
    return now


# --- pictures ---


def shown_as(driver, theme, width, height, scale=1):
    """Light or dark, and the size of the window; a phone is 390 px wide."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def screenshots(address, driver, folder: Path) -> None:
    """A picture of each page, with its charts drawn, as ``dashboard-PAGE.png``; Live in dark and on a phone too."""
    drawn = (
        "return [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart?.draws).length "
        "+ document.querySelectorAll('.main-svg').length"
    )
    press = (
        "const b = [...document.querySelectorAll('button')].find(b => b.innerText.includes('Examine')); "
        "if (b) b.click(); return !!b"
    )
    least = {"live": 3, "live-dark": 3, "live-phone": 1, "autotune": 2, "compare": 1}
    pictures = [(page, "light", 1280, 1000) for page in ("autotune", "runs", "compare", "watch", "logs", "about")]
    pictures += [("live", "light", 1280, 1450), ("live-dark", "dark", 1280, 1450), ("live-phone", "light", 390, 1700)]
    for name, theme, width, height in pictures:
        shown_as(driver, theme, width, height)
        driver.get(f"{address}/{'' if name.startswith('live') else name}")
        wait(lambda name=name: driver.execute_script(drawn) >= least.get(name, 0))
        if name == "about":
            wait(lambda: driver.execute_script(press))
            wait(lambda: "Ready" in driver.execute_script("return document.body.innerText"))
        time.sleep(3)  # pictures, clips and tables come by requests of their own
        wait(lambda: not driver.find_elements("css selector", "[data-testid=stSkeleton]"))
        time.sleep(1)
        driver.save_screenshot(str(folder / f"dashboard-{name}.png"))
