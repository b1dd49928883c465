"""The pages for whoever has no mouse or sees them badly: axe-core in a real browser, and charts by keyboard.

axe-core (MPL-2.0) is no part of this repository: ``pip install axe-core-python`` brings one, and ``SPREEZE_AXE`` may
name a newer ``axe.min.js``.
"""

import importlib.util
import itertools
import json
import os
import shutil
from pathlib import Path

import dashboard_browser as web
import pytest
from test_episode_player import recorded_run

from spreeze.dashboard.navigation import PAGES
from spreeze.metrics.writer import MetricsWriter

pytestmark = [pytest.mark.slow, pytest.mark.skipif(web.missing() is not None, reason=str(web.missing()))]
# Streamlit's tables are left out: two on a page have cells of the same id, which an older axe-core calls serious.
_RUN = """
const done = arguments[arguments.length - 1];
axe.run({ exclude: [["[data-testid=stDataFrame]"]] }, { resultTypes: ["violations"] }).then(
  (found) => done(found.violations.map(({ id, impact, nodes }) =>
    [impact, id, nodes.map((node) => [node.html.slice(0, 200), node.failureSummary])])),
  (error) => done([["critical", String(error), []]]));
"""
_LEVELS = """
return [...document.querySelectorAll("h1, h2, h3, h4, [role=heading]")].filter((node) => node.offsetParent).map(
  (node) => Number(node.getAttribute("aria-level") ?? node.tagName[1]));
"""
_IDLE = "return document.querySelectorAll('[data-testid=stSkeleton], [data-stale=true]').length === 0"
_SHOWN = "return document.querySelector('.stHeading, .stMarkdown h1') !== null"


def axe():
    """The text of ``axe.min.js``, or None."""
    if "SPREEZE_AXE" in os.environ:
        return Path(os.environ["SPREEZE_AXE"]).read_text(encoding="utf-8")
    found = importlib.util.find_spec("axe_core_python")
    places = found.submodule_search_locations if found else ()
    return next(((Path(place) / "axe.min.js").read_text(encoding="utf-8") for place in places or ()), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with recorded episodes, events of all levels and numbers of its health, and a recorded run."""
    folder = tmp_path_factory.mktemp("accessible")
    path = recorded_run(folder)
    writer = MetricsWriter(path / "metrics.db")
    writer.write(30.0, 3000, {"dead_units": 0.95, "update_size": 0.1, "eval_terminated": 0.5})
    for level in ("info", "warning", "error"):
        writer.event(25.0, level, "learner", f"something of level {level}")
    writer.close()
    shutil.copytree(web.ROOT / "assets" / "sample_run", folder / "pendulum")
    return folder


@pytest.fixture
def page(runs, tmp_path):
    """An address and a browser that is let in."""
    with web.server(runs, tmp_path / "server.log") as (address, _), web.browser() as driver:
        web.enter(driver, address, runs)
        driver.set_script_timeout(web.PATIENCE_S)
        yield address, driver


def opened(page, name, theme="light", run="r1"):
    address, driver = page
    web.shown_as(driver, theme, 1280, 1400)
    driver.get(f"{address}/{'' if name == 'live' else name}?run={run}")
    web.wait(lambda: driver.execute_script(_SHOWN) and driver.execute_script(_IDLE))
    if name == "live":
        web.wait(lambda: driver.execute_script(web.DRAWN) > 1)
        web.wait(lambda: driver.find_elements("css selector", ".sz-chip"))
    return driver


def serious(driver):
    driver.execute_script(axe())
    return [found for found in driver.execute_async_script(_RUN) if found[0] in ("serious", "critical")]


@pytest.mark.skipif(axe() is None, reason="no axe-core: pip install axe-core-python, or set SPREEZE_AXE")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_page_nor_in_the_episode_player(page, theme):
    found = {name: serious(opened(page, name, theme)) for name in reversed(PAGES)}  # Live at last
    driver, keys = page[1], web_keys()
    driver.find_element("css selector", ".sz-plot[data-chart=return]").send_keys(keys.END, keys.ENTER)
    web.wait(lambda: driver.find_elements("css selector", "dialog[open] .sz-player-strip"))
    found["player"] = serious(driver)
    assert not any(found.values()), json.dumps(found, indent=1)


def test_headings_begin_with_the_page_s_and_skip_no_level(page):
    for name in PAGES:
        levels = opened(page, name).execute_script(_LEVELS)
        assert (levels[0], levels.count(1)) == (1, 1), name
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), (name, levels)


def web_keys():
    from selenium.webdriver.common.keys import Keys

    return Keys


def test_a_chip_shows_its_chart_which_is_read_by_keys_and_the_state_is_announced(page):
    driver, keys = opened(page, "live"), web_keys()
    chip = next(found for found in driver.find_elements("css selector", ".sz-chip") if "Dead units" in found.text)
    assert "".join(chip.accessible_name.split()) == "Deadunits95%,amber"
    assert "sz-amber" in chip.get_attribute("class")
    more = driver.find_element("css selector", ".sz-reasons")
    one = more.text
    assert "more)" in one
    assert "\n" not in one  # the others would push the charts off the screen
    more.find_element("css selector", "summary").click()
    assert one in more.text
    assert "layer norm" in more.text
    chip.send_keys(keys.ENTER)
    focused = driver.switch_to.active_element
    assert (focused.get_attribute("data-chart"), focused.aria_role) == ("dead_units", "slider")
    focused.send_keys(keys.HOME)
    web.wait(lambda: "dead units: 95" in (focused.get_attribute("aria-valuetext") or ""))
    assert driver.find_element("css selector", ".sz-live [role=status]").get_attribute("textContent") == "finished"
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
