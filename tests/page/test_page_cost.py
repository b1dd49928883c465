"""What an open Live page costs, in a real browser; the figures are printed (pytest -s)."""

import time

import dashboard_browser as web
import long_run
import pytest
from harness import PATIENCE_S
from watched_page import visit, watched_rows

pytest.importorskip("streamlit")
from spreeze.dashboard.live_api import MAX_BUCKETS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(web.missing() is not None, reason=str(web.missing())),
]

MAX_POINTS = "return Math.max(...[...document.querySelectorAll('.sz-plot')].map(d => d.__chart?.points ?? 0))"
SHOWN_S = "return window.__spreeze.shown_s"


def test_the_first_chart_of_a_day_s_run_comes_soon(tmp_path):
    day = tmp_path / "day"
    assert long_run.make(day) > 10_000_000
    with visit(day) as seen:
        told = {"fresh server, empty browser cache": seen.open(), "again": min(seen.open() for _ in range(3))}
        seen.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
        told["running server, empty browser cache"] = seen.open()
        points = seen.driver.execute_script(MAX_POINTS)
    print("\n" + "\n".join(f"first chart, {name}: {value:.2f} s" for name, value in told.items()))
    assert 100 < points <= 2 * MAX_BUCKETS + 1, "of a day's run only what a chart can show is sent"


def test_an_open_page_costs_little_and_a_hidden_one_nothing(tmp_path):
    told = {}
    with long_run.alive(tmp_path / "now"), visit(tmp_path / "now") as seen:
        seen.open()
        time.sleep(1)
        busy = {"top in sight": seen.busy_ms_per_s(3)}
        told["age of the data on the screen, worst [s]"] = max(seen.ages(3))
        before_s = seen.driver.execute_script(SHOWN_S)
        web.wait(lambda: seen.driver.execute_script(SHOWN_S) > before_s, lambda: "no newer number came")
        seen.driver.execute_script("document.querySelector('[data-chart=cpu]').scrollIntoView({block: 'center'})")
        time.sleep(1)
        busy["six charts in sight"] = seen.busy_ms_per_s(3)
        seen.hide(True)
        time.sleep(1.5)
        told["requests of a hidden page in 3 s"] = seen.requests(3)
        seen.hide(False)
        assert seen.requests(3) >= 2, "it goes on when seen again"
        for _ in range(8):
            seen.reload()
        web.wait(lambda: seen.connections() <= 3, seen.connections)  # idle ones end in five seconds
        told["connections after 8 reloads"] = seen.connections()
        for _ in range(4):
            seen.driver.switch_to.new_window("tab")
            seen.open()
        begun = time.monotonic()
        seen.server.terminate()
        seen.server.wait(PATIENCE_S)
        told["stop with five tabs [s]"] = time.monotonic() - begun
    print("\n" + "\n".join(f"{name}: {value:.2f}" for name, value in told.items()))
    print("main thread, tasks and processor time [ms/s]:", busy)
    assert max(processor for _, processor in busy.values()) < 500, "of a page that always draws it is 1000"
    assert told["age of the data on the screen, worst [s]"] < PATIENCE_S
    assert told["requests of a hidden page in 3 s"] == 0
    assert told["connections after 8 reloads"] <= 3
    assert told["stop with five tabs [s]"] < PATIENCE_S


def test_a_watched_page_and_its_cost_to_the_run_are_rows(tmp_path):
    with long_run.alive(tmp_path / "now"), visit(tmp_path / "now") as seen:
        begun = time.monotonic()
        rows = {row["metric"]: row for row in watched_rows(seen, 10.0, busy_s=1.0, ages_s=1.0, hidden_s=3.0)}
        took_min = (time.monotonic() - begun) / 60
        rows |= {row["metric"]: row for row in web.effect_rows(seen, 2, 2.0, settle_s=1.0)}
    assert rows["requests_hidden_in_3_s"]["value"] == 0
    assert 0 < rows["watched"]["value"] < took_min
    assert 0 < rows["data_age_worst"]["value"] < PATIENCE_S
    assert rows["browser_bytes_slope"]["first"] > 50e6
    grown = rows["browser_bytes_slope"]["last"] - rows["browser_bytes_slope"]["first"]
    assert grown < 15e6, "a hundred pictures that are kept are 30 MB"
    assert rows["server_bytes_slope"]["first"] > 20e6
    assert rows["js_heap_bytes_slope"]["last"] < 60e6
    assert 1 <= rows["connections"]["value"] <= 4
    for name in ("env_steps", "updates"):
        assert len(rows[f"{name}_kept_beside_open_page"]["repeats"]) == 2
