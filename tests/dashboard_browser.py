"""A dashboard's server and a real browser, for the end-to-end test and the screenshots."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def missing() -> str | None:
    """Why no browser can be driven here, or None."""
    if CHROMIUM is None or DRIVER is None:
        return "no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium (pip install selenium)"
    return None


@contextlib.contextmanager
def server(runs: Path, log: Path, cwd: Path = ROOT):
    """A dashboard on a free port, started in ``cwd``; yields its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "SPREEZE_RUNS_DIR": str(runs), "PYTHONPATH": str(ROOT)}
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
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(address):
    try:
        with urllib.request.urlopen(address + "/_stcore/health", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def browser(width=1280, height=1000):
    """Chromium without a window and with a profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="spreeze-browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", "--disable-sync",
                     "--disable-dev-shm-usage", f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def wait(condition, seconds, told=lambda: ""):
    """The first true value of ``condition``; fails after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {told()}")
        time.sleep(0.1)


def shown_as(driver, theme, width, height, scale=1):
    """Light or dark, and the size of the window; a phone is 390 px wide."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def screenshots(address, driver, folder: Path) -> None:
    """A picture of each page, with its charts drawn, as ``dashboard-PAGE.png``; Live in dark and on a phone too."""
    drawn = "return [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart?.draws).length " \
            "+ document.querySelectorAll('.main-svg').length"
    press = "const b = [...document.querySelectorAll('button')].find(b => b.innerText.includes('Examine')); " \
            "if (b) b.click(); return !!b"
    least = {"live": 4, "live-dark": 4, "live-phone": 1, "autotune": 2, "compare": 1}
    pictures = [(page, "light", 1280, 1000) for page in ("autotune", "runs", "compare", "watch", "logs", "about")]
    pictures += [("live", "light", 1280, 1450), ("live-dark", "dark", 1280, 1450), ("live-phone", "light", 390, 1700)]
    for name, theme, width, height in pictures:
        shown_as(driver, theme, width, height)
        driver.get(f"{address}/{'' if name.startswith('live') else name}")
        wait(lambda name=name: driver.execute_script(drawn) >= least.get(name, 0), 60)
        if name == "about":
            wait(lambda: driver.execute_script(press), 20)
            wait(lambda: "Ready" in driver.execute_script("return document.body.innerText"), 90)
        time.sleep(3)  # pictures, clips and tables come by requests of their own
        wait(lambda: not driver.find_elements("css selector", "[data-testid=stSkeleton]"), 30)
        time.sleep(1)
        driver.save_screenshot(str(folder / f"dashboard-{name}.png"))
