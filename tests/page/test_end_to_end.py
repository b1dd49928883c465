"""The dashboard in a real browser: start a run from the page, see it learn, reload, zoom, stop it."""

import json
import os
import signal
import urllib.error
import urllib.request
import zipfile
from urllib.parse import urlsplit

import dashboard_browser as web
import long_run
import psutil
import pytest
from harness import PATIENCE_S
from test_pages import make_run

from spreeze.run_directory import is_alive, list_runs, read_run, state_of

pytest.importorskip("streamlit")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(web.missing() is not None, reason=str(web.missing())),
]

DRAWN = "return [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart?.points).length"
MARK = (
    "window.__marked = [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart)"
    ".map(d => [d, d.querySelector('canvas'), d.__chart]); return window.__marked.length"
)
SAME = (
    "return window.__marked.filter(([d, c, k]) => d.isConnected && d.querySelector('canvas') === c "
    "&& d.__chart === k).length"
)
ZOOM = "return document.querySelector('[data-chart=env]').__chart.zoom"
COUNTS = "return window.__spreeze"
FITS = "const grid = document.querySelector('.dvn-scroller'); return grid.scrollWidth <= grid.clientWidth"
RERUNS = (
    "window.__reruns = 0; new MutationObserver(() => window.__reruns++).observe("
    "document.querySelector('[data-test-script-state]'), {attributeFilter: ['data-test-script-state']})"
)


@pytest.fixture
def world(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with web.server(runs, tmp_path / "server.log") as (address, server), web.browser() as driver:
        web.enter(driver, address, runs)
        yield address, server, driver, runs
    for record in (runs / ".launches").glob("*.json"):
        pid = json.loads(record.read_text())["pid"]
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGINT)
        web.wait(lambda pid=pid: not psutil.pid_exists(pid))


def click(driver, label):
    """Clicks the button of that name once it can be clicked (a rerun may replace it meanwhile)."""
    script = (
        "const b = [...document.querySelectorAll('button')].find(b => !b.disabled && "
        "b.innerText.trim().split('\\n')[0] === arguments[0]); if (b) b.click(); return !!b"
    )
    web.wait(lambda: driver.execute_script(script, label), lambda: label)


def text(driver):
    return driver.execute_script("return document.body.innerText")


def choose_task(driver, name):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    box = web.wait(lambda: driver.find_elements(By.CSS_SELECTOR, ".st-key-start_env input"))[0]
    box.click()
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(name)
    box.send_keys(Keys.ENTER)
    web.wait(lambda: f"--env {name} " in text(driver))


def chart(driver):
    """The canvas of env steps, in sight and drawn."""
    from selenium.webdriver.common.by import By

    area = driver.find_element(By.CSS_SELECTOR, "[data-chart=env] canvas")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    web.wait(lambda: driver.execute_script("return document.querySelector('[data-chart=env]').__chart.draws > 0"))
    return area


def drag(driver):
    """Zooms the chart of env steps with the mouse; returns the new range."""
    from selenium.webdriver.common.action_chains import ActionChains

    def dragged():
        ActionChains(driver).move_to_element_with_offset(chart(driver), -60, 0).click_and_hold().move_by_offset(
            60, 2
        ).move_by_offset(40, 0).release().perform()
        return driver.execute_script(ZOOM)

    return web.wait(dragged)


def hovered(driver):
    """What is told beside the mouse."""
    from selenium.webdriver.common.action_chains import ActionChains

    box = (
        "const b = document.querySelector('[data-chart=env] .sz-hover'); "
        "return b.style.display === 'none' ? '' : b.textContent"
    )

    def moved():  # again and again: what is above may have changed its height meanwhile
        ActionChains(driver).move_to_element_with_offset(chart(driver), 10, 5).move_by_offset(3, 0).perform()
        return driver.execute_script(box)

    return web.wait(moved)


def status(url, host):
    request = urllib.request.Request(url, headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def updates(driver):
    return driver.execute_script(COUNTS)["updates"]


def theme(driver, name):
    features = [{"name": "prefers-color-scheme", "value": name}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def started_from_the_page(driver, runs):
    choose_task(driver, "Walker2DBulletEnv-v0")  # which does not end by itself meanwhile
    click(driver, "Start")
    click_again = (
        "const b = [...document.querySelectorAll('button')].find(b => b.innerText.trim() === 'Start'); "
        "if (b) { b.click(); b.click(); }"
    )
    driver.execute_script(click_again)
    web.wait(lambda: "measured" in text(driver), lambda: text(driver))
    rows_of_the_tuner(driver)
    web.wait(lambda: list_runs(runs), lambda: text(driver), seconds=2 * web.PATIENCE_S)  # another test may tune
    web.wait(lambda: driver.execute_script(COUNTS)["run"] == list_runs(runs)[0].name, lambda: text(driver))
    points = (
        "const c = document.querySelector('[data-chart=return]')?.__chart; "
        "return c?.traces.find(t => t.name.startsWith('greedy'))?.x.length ?? 0"
    )
    web.wait(lambda: "running" in text(driver) and driver.execute_script(points) > 0, lambda: text(driver))
    assert len(list_runs(runs)) == 1, "a double click started two"


def rows_of_the_tuner(driver):
    """The Autotune page draws what was measured, while the tuner goes on."""
    visit = "document.querySelector(`[data-testid=stSidebarNavLink][href$='${arguments[0]}']`).click()"
    driver.execute_script(visit, "/autotune")
    points = "return document.querySelectorAll('.js-plotly-plot .points path').length"
    web.wait(lambda: driver.execute_script(points) > 0, lambda: text(driver))
    driver.execute_script(visit, "/")


def rerun(driver):
    """Streamlit's own key for "run the script again"."""
    from selenium.webdriver.common.by import By

    driver.execute_script(RERUNS)
    driver.find_element(By.TAG_NAME, "body").send_keys("r")
    web.wait(lambda: driver.execute_script("return window.__reruns") >= 2)


def charts_stay(driver):
    """The same nodes and the dragged zoom over twenty updates, a rerun and two themes; hover; a moving picture."""
    web.wait(lambda: driver.execute_script("return !!document.querySelector('[data-chart=env]').__chart"))
    count = driver.execute_script(MARK)
    assert count > 4
    zoom = drag(driver)
    assert "env steps per s" in hovered(driver)
    first = updates(driver)
    web.wait(lambda: updates(driver) >= first + 20, lambda: driver.execute_script(COUNTS))
    rerun(driver)
    theme(driver, "dark")
    first = updates(driver)
    web.wait(lambda: updates(driver) >= first + 3)
    theme(driver, "light")
    assert driver.execute_script(SAME) == count
    assert driver.execute_script(ZOOM) == zoom
    counts = driver.execute_script(COUNTS)
    assert (counts["made"] - counts["disposed"], counts["live"], counts["errors"]) == (1, 1, [])


def return_and_agent_in_the_first_fold(driver):
    """A screen of 1,280 by 900 shows both whole: below the buttons of a live run, and when it has ended."""
    low = "const b = [...document.querySelectorAll('[data-chart=return], .sz-picture canvas')]; " + (
        "return Math.max(...b.map(e => e.getBoundingClientRect().bottom))"
    )
    driver.execute_script("document.querySelector('[data-testid=stMain]').scrollTo(0, 0)")
    web.wait(lambda: driver.execute_script(low) < 900, lambda: str(driver.execute_script(low)))


def picture_moves(driver):
    """The agent's picture changes while it is in sight."""
    from selenium.webdriver.common.by import By

    driver.execute_script(
        "arguments[0].scrollIntoView({block: 'center'})", driver.find_element(By.CSS_SELECTOR, ".sz-picture canvas")
    )
    first = driver.execute_script(COUNTS)["frames"]
    web.wait(lambda: driver.execute_script(COUNTS)["frames"] >= first + 5, lambda: driver.execute_script(COUNTS))


def test_a_run_is_started_watched_and_stopped_from_the_page(world):
    address, server, driver, runs = world
    downloads = runs.parent / "downloads"
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    driver.get(address)
    web.wait(lambda: driver.execute_script(DRAWN) > 6)
    assert "sample run" in text(driver)
    started_from_the_page(driver, runs)
    charts_stay(driver)
    return_and_agent_in_the_first_fold(driver)
    picture_moves(driver)
    driver.refresh()
    web.wait(lambda: driver.execute_script(DRAWN) > 6 and "running" in text(driver))
    (run,) = list_runs(runs)
    click(driver, "Stop")
    web.wait(lambda: "stop requested" in text(driver))
    web.wait(lambda: state_of(run) == "finished")
    web.wait(lambda: "finished" in text(driver) and "New run" in text(driver), lambda: text(driver))
    return_and_agent_in_the_first_fold(driver)
    resumed_exported_and_deleted(driver, address, run, downloads)
    assert not complaints(driver)
    assert server.poll() is None
    for host, answer in (("evil.example", 400), ("localhost", 403)):
        assert status(address + "/api/live?run=x", host) == answer
    assert status(address + "/_stcore/health", "localhost") == 200


def test_the_list_of_runs_is_live_a_failed_start_stays_and_a_sweep_is_compared(tmp_path):
    runs = tmp_path / "runs"
    for name, batch in (("20261121-120000_Walker2DBulletEnv-v0_sac_s1", 256), ("b", 32)):
        path = make_run(runs, name)
        state = json.loads((path / "run.json").read_text()) | {"env_id": "Walker2DBulletEnv-v0", "mode": "spreeze"}
        (path / "run.json").write_text(json.dumps(state))
        config = path / "config.toml"
        config.write_text(config.read_text().replace("batch_size = 256", f"batch_size = {batch}"))
    (runs / "batches.sweep.json").write_text(json.dumps({"finished": sorted(run.name for run in list_runs(runs))}))
    with web.server(runs, tmp_path / "server.log") as (address, _), web.browser() as driver:
        web.enter(driver, address, runs)
        driver.get(f"{address}/runs")
        web.wait(lambda: "finished" in cells(driver), lambda: cells(driver))
        assert driver.execute_script(FITS), "a column is off the edge at 1,280 pixels"
        (path / "run.json").write_text(json.dumps(state | {"state": "failed"}))
        web.wait(lambda: "failed" in cells(driver), lambda: cells(driver))
        failed_start_stays(driver, address)
        sweep_is_compared(driver, address)
        assert not complaints(driver)


def test_the_form_shows_what_its_command_starts(tmp_path):
    runs = tmp_path / "runs"
    make_run(runs, "old")
    with web.server(runs, tmp_path / "server.log") as (address, _), web.browser() as driver:
        web.enter(driver, address, runs)
        driver.get(address)
        click(driver, "New run")
        choose_task(driver, "CartPole-v1")
        web.wait(lambda: shown(driver, "algo") == "dqn", lambda: text(driver))
        pick(driver, "algo", "ppo")
        web.wait(lambda: shown(driver, "mode") == "hts", lambda: text(driver))
        before = shown(driver, "env"), shown(driver, "algo"), shown(driver, "mode")
        assert before == ("CartPole-v1", "ppo", "hts")
        for page in ("Compare", "Live"):
            link(driver, page)
        web.wait(lambda: "--algo ppo" in text(driver), lambda: text(driver))
        assert (shown(driver, "env"), shown(driver, "algo"), shown(driver, "mode")) == before
        assert not complaints(driver)


def shown(driver, name):
    """The value that a select box of the form shows."""
    return driver.execute_script(f"return document.querySelector('.st-key-start_{name} input')?.value")


def pick(driver, name, value):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    box = driver.find_element(By.CSS_SELECTOR, f".st-key-start_{name} input")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(value, Keys.ENTER)
    web.wait(lambda: shown(driver, name) == value, lambda: text(driver))


def link(driver, page):
    """Opens a page by its link, which does not reload the browser's tab."""
    from selenium.webdriver.common.by import By

    driver.find_element(
        By.XPATH, f"//nav//a[contains(., '{page}')] | //*[@data-testid='stSidebarNav']//a[contains(., '{page}')]"
    ).click()
    web.wait(lambda: page in driver.title or page.lower() in driver.current_url or page == "Live", lambda: text(driver))


def cells(driver):
    """The texts of a table, which is drawn on a canvas."""
    return driver.execute_script("return [...document.querySelectorAll('[role=gridcell]')].map(c => c.textContent)")


def failed_start_stays(driver, address):
    """On every page of the runs and after a reload, until it is dismissed."""
    driver.get(address)
    click(driver, "New run")
    choose_task(driver, "NoSuchTask-v0")
    click(driver, "Start")
    for page in ("", "/runs", ""):
        web.wait(lambda: "did not start" in text(driver) and "NoSuchTask" in text(driver), lambda: text(driver))
        driver.get(f"{address}{page}")
    click(driver, "Dismiss")
    web.wait(lambda: "did not start" not in text(driver))


def sweep_is_compared(driver, address):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver.get(f"{address}/compare?run=sample%20run")
    curves = "return [...document.querySelectorAll('.legendtext')].map(entry => entry.textContent)"
    web.wait(lambda: driver.execute_script(curves) == ["Pendulum-v1 sac spreeze (1 run)"], lambda: text(driver))
    box = driver.find_elements(By.CSS_SELECTOR, ".st-key-compare_runs input")[0]
    box.send_keys("sweep batches", Keys.ENTER)
    web.wait(
        lambda: (
            sorted(name.rpartition("=")[2] for name in driver.execute_script(curves))
            == ["256 (1 run)", "32 (1 run)", "Pendulum-v1 sac spreeze (1 run)"]
        ),
        lambda: driver.execute_script(curves),
    )
    assert "In what these runs differ" in text(driver)


def test_charts_and_zoom_outlive_a_restart_of_the_server(tmp_path):
    runs = tmp_path / "runs"
    with long_run.alive(runs / "now"), web.browser() as driver:
        with web.server(runs, tmp_path / "server.log") as (address, _):
            web.enter(driver, address, runs)
            driver.get(f"{address}/?run=now")
            web.wait(lambda: driver.execute_script(DRAWN) > 6)
            count, zoom = driver.execute_script(MARK), drag(driver)
        web.wait(lambda: "No connection to the dashboard server" in text(driver))
        with web.server(runs, tmp_path / "again.log", port=urlsplit(address).port):
            seen = updates(driver)
            web.wait(lambda: updates(driver) >= seen + 5)
            assert driver.execute_script(SAME) == count
            assert driver.execute_script(ZOOM) == zoom


def resumed_exported_and_deleted(driver, address, run, downloads):
    """What the page of runs does with a run that has ended."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    steps = read_run(run)["env_steps"]
    driver.get(f"{address}/runs?run={run.name}")
    click(driver, "Resume")
    web.wait(lambda: state_of(run) == "running" and read_run(run)["env_steps"] > steps, lambda: text(driver))
    driver.refresh()
    click(driver, "Stop")
    web.wait(lambda: state_of(run) == "finished" and not is_alive(run))
    driver.refresh()
    click(driver, "Run as ZIP")
    (file,) = web.wait(lambda: list(downloads.glob("*.zip")))
    web.wait(lambda: zipfile.is_zipfile(file))
    with zipfile.ZipFile(file) as archive:
        assert f"{run.name}/checkpoints/best.safetensors" in archive.namelist()
    click(driver, "Delete")
    box = web.wait(lambda: driver.find_elements(By.CSS_SELECTOR, "[class*=st-key-sure] input"))[0]
    box.send_keys(run.name, Keys.ENTER)
    click(driver, "Delete permanently")
    web.wait(lambda: not run.exists() and "was deleted" in text(driver), lambda: text(driver))


def complaints(driver):
    """What the console holds against us."""
    return [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]
