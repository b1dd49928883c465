"""Every algorithm and mode that the page offers, in a real browser: started, watched, resumed, compared, kept, deleted.

By hand: ``SPREEZE_LONG_TESTS=1 pytest tests/slow/test_page_offers.py``; each combination takes about a minute. The
short form is ``tests/page/test_end_to_end.py``.
"""

import os
import zipfile
from pathlib import Path

import dashboard_browser as web
import pytest
from long_form import by_hand
from test_end_to_end import complaints

from spreeze.config.algorithms import ALGORITHMS, find_row
from spreeze.config.modes import DECLARED, find_mode
from spreeze.config.schema import RunConfig
from spreeze.dashboard.control import IMPORT
from spreeze.run_directory import is_alive, list_runs, read_config, read_run, state_of

pytest.importorskip("streamlit")
pytestmark = [
    by_hand,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(web.missing() is not None, reason=str(web.missing())),
]
SUPPORT = Path(__file__).parents[1] / "support"


def offers():
    """Names of each algorithm and mode that go together; an engine's tasks on a device have no choices."""
    for name in ALGORITHMS:
        row = find_row(name)
        for mode in DECLARED:
            if row.runs_in(mode) and (not mode.on_device or row.on_policy or row.continuous):
                yield name, mode.name


def task_of(algo, mode):
    row = find_row(algo)
    if find_mode(mode).on_device:
        return "vector:DevicePendulum-v0"
    if row.team:
        return "mpe2:simple_spread_v3"
    return "CartPole-v1" if row.discrete else "Pendulum-v1"


POINTS = "return [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart?.points).length"
EVALUATED = (
    "const c = document.querySelector('[data-chart=return]')?.__chart; "
    "return c?.traces.find(t => t.name.startsWith('greedy'))?.x.length ?? 0"
)
IDLE = "return document.querySelector('.stApp')?.dataset.testScriptState === 'notRunning'"
CURVES = "return [...document.querySelectorAll('.legendtext')].map(entry => entry.textContent)"
PRESS = (
    "const b = [...document.querySelectorAll('button')].find(b => !b.disabled && "
    "b.innerText.trim().split('\\n')[0] === arguments[0]); if (b) b.click(); return !!b"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv(IMPORT, "device_envs")
        with web.server(folder / "runs", folder / "server.log") as (address, _), web.browser() as driver:
            web.enter(driver, address, folder / "runs")
            driver.execute_cdp_cmd(
                "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder / "downloads")}
            )
            yield address, driver, folder


def press(driver, label):
    web.wait(lambda: driver.execute_script(PRESS, label), lambda: f"{label}: {text(driver)}")


def text(driver):
    return driver.execute_script("return document.body.innerText")


def choose(driver, key, value):
    """Types into the select box of that key and takes the choice."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.common.keys import Keys

    def chosen():
        box = driver.find_elements("css selector", f".st-key-{key} input")
        return bool(box) and box[0].get_attribute("value") == value and driver.execute_script(IDLE)

    def tried():
        try:
            box = driver.find_elements("css selector", f".st-key-{key} input")[0]
            box.click()
            box.send_keys(Keys.CONTROL, "a")
            box.send_keys(value, Keys.ENTER)
        except (IndexError, WebDriverException):  # a rerun replaced it meanwhile
            return False
        return True

    web.wait(lambda: chosen() or (tried() and chosen()), lambda: f"{key}={value}: {text(driver)}")


@pytest.mark.parametrize(("algo", "mode"), list(offers()))
def test_it_is_started_watched_stopped_resumed_compared_kept_and_deleted(page, algo, mode):
    address, driver, folder = page
    runs, downloads = folder / "runs", folder / "downloads"
    driver.get(address)
    if list_runs(runs):  # of a failure before
        press(driver, "New run")
    before = set(list_runs(runs))
    choose(driver, "start_env", task_of(algo, mode))
    choose(driver, "start_algo", algo)
    choose(driver, "start_mode", mode)
    told = (f"--algo {algo}", f"--mode {mode}" if mode != RunConfig.mode else "")
    web.wait(
        lambda: all(part in text(driver) for part in told) or choose(driver, "start_mode", mode), lambda: text(driver)
    )
    press(driver, "Start")
    (run,) = web.wait(lambda: set(list_runs(runs)) - before, lambda: text(driver))
    web.wait(lambda: driver.execute_script(EVALUATED) > 0 and driver.execute_script(POINTS) > 6, lambda: text(driver))
    config = read_config(run)
    assert (config["run"]["algo"], config["run"]["mode"]) == (algo, mode)
    press(driver, "Stop")
    web.wait(lambda: state_of(run) == "finished" and not is_alive(run), lambda: text(driver))

    steps = read_run(run)["env_steps"]
    driver.get(f"{address}/runs?run={run.name}")
    press(driver, "Resume")
    web.wait(lambda: state_of(run) == "running" and read_run(run)["env_steps"] > steps, lambda: text(driver))
    driver.refresh()
    press(driver, "Stop")
    web.wait(lambda: state_of(run) == "finished" and not is_alive(run), lambda: text(driver))

    driver.get(f"{address}/compare?run={run.name}")
    web.wait(lambda: f"{algo} {mode} (1 run)" in " ".join(driver.execute_script(CURVES)), lambda: text(driver))
    driver.get(f"{address}/watch?run={run.name}")
    press(driver, "Episodes of evaluations")
    web.wait(lambda: (driver.execute_script("return window.__episode") or {}).get("id"), lambda: text(driver))
    driver.get(f"{address}/runs?run={run.name}")
    press(driver, "Report")
    web.wait(lambda: [file for file in downloads.glob("*.html") if run.name in file.read_text(encoding="utf-8")])
    policies_leave(driver, downloads)
    press(driver, "Delete")
    from selenium.webdriver.common.keys import Keys

    box = web.wait(lambda: driver.find_elements("css selector", "[class*=st-key-sure] input"))[0]
    box.send_keys(run.name, Keys.ENTER)
    press(driver, "Delete permanently")
    web.wait(lambda: not run.exists() and "was deleted" in text(driver), lambda: text(driver))
    assert not complaints(driver)


def policies_leave(driver, downloads):
    """The trained policy comes as a file that runs without Spreeze."""
    press(driver, "Download best policy")
    (file,) = web.wait(lambda: [found for found in downloads.glob("*.zip") if zipfile.is_zipfile(found)])
    with zipfile.ZipFile(file) as archive:
        assert any(name.endswith("_example.py") for name in archive.namelist())
    file.unlink()
