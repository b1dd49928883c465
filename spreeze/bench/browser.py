"""The dashboard's server and a real browser without a window, for measurements of open pages."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from spreeze.errors import ResourceError, SpreezeError

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
_END_S = 15.0


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
    env = {**os.environ, "SPREEZE_RUNS_DIR": str(runs), "PYTHONPATH": os.pathsep.join(paths),
           "SPREEZE_DASHBOARD_TOKEN": "on"}
    command = [sys.executable, "-m", "streamlit", "run", str(ROOT / "app.py"), "--server.port", str(port)]
    with open(log, "wb") as out:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    address = f"http://localhost:{port}"
    try:
        wait(lambda: _answers(address), 60, lambda: f"server: {log.read_text()[-2000:]}")
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
        with urllib.request.urlopen(address + "/_stcore/health", timeout=2) as reply:
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
        for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", "--disable-sync",
                     "--disable-dev-shm-usage", f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def wait(condition: Callable[[], T], seconds: float, told: Callable[[], object] = str) -> T:
    """The first true value of ``condition``.

    Raises:
        SpreezeError: the time is over; ``told`` says what was seen last.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise SpreezeError(f"not within {seconds:g} s: {told()}")
        time.sleep(0.1)
