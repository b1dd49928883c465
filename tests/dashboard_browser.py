"""Pictures of the dashboard's pages in a real browser; server and browser are those of the bench."""

import time
from pathlib import Path

from harness import PATIENCE_S

from spreeze.bench import page as driven
from spreeze.bench.page import ROOT, browser, enter, free_port, missing, server

__all__ = ["ROOT", "browser", "enter", "free_port", "missing", "screenshots", "server", "shown_as", "wait"]


def wait(condition, told=str):
    """The first true value of ``condition``; an error with what was ``told`` after the tests' patience."""
    return driven.wait(condition, PATIENCE_S, told)


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
        wait(lambda name=name: driver.execute_script(drawn) >= least.get(name, 0))
        if name == "about":
            wait(lambda: driver.execute_script(press))
            wait(lambda: "Ready" in driver.execute_script("return document.body.innerText"))
        time.sleep(3)  # pictures, clips and tables come by requests of their own
        wait(lambda: not driver.find_elements("css selector", "[data-testid=stSkeleton]"))
        time.sleep(1)
        driver.save_screenshot(str(folder / f"dashboard-{name}.png"))
