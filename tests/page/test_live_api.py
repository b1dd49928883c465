"""The live answer: bounded, every peak kept, only news, dashes for what is unknown; routes that only read."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from harness import PATIENCE_S

from spreeze.metrics.store import EvaluationRow, Event
from spreeze.metrics.writer import MetricsWriter

pytest.importorskip("streamlit")
from starlette.requests import Request

from spreeze.config.algorithms import ON_POLICY
from spreeze.config.modes import data_flow_of
from spreeze.dashboard import live_api, server
from spreeze.dashboard.run_data import data_flow
from spreeze.errors import RunError
from spreeze.metrics.bottleneck import bottleneck
from spreeze.metrics.snapshot import snapshot_of
from spreeze.metrics.table import ALGORITHM, METRICS, RETURN, by_name


def snapshot(run, config, values):
    return snapshot_of(run, config, values, data_flow(run), state="running")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path))
    path = tmp_path / "r1"
    path.mkdir()
    (path / "run.json").write_text(
        json.dumps({"state": "finished", "nonce": "n", "sessions": 1, "env_id": "E-v0", "algo": "sac"})
    )
    return path


def fill(path, count, step_s=0.5, first=0):
    writer = MetricsWriter(path / "metrics.db")
    for i in range(first, first + count):
        peak = 999.0 if i == 700 else 5.0 + i % 3
        writer.write(i * step_s, i, {"env_steps_per_s": peak, "cpu_use": 0.5})
    writer.close()


def run_live_page(steps):
    """What a script prints after those of the Live page, as JSON, in Node.js."""
    script = "\n".join((Path(live_api.__file__).parent / name).read_text() for name in ("chart.js", "live.js"))
    script = "globalThis.window = {};\n" + script.replace("export default function", "function mount") + steps
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return json.loads(found.stdout)


def ask(path, query):
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": query.encode()}
    return Request(scope)


def picture(query):
    """The route's answer to a client that stays."""

    async def receive():
        await asyncio.sleep(10_000)

    request = ask(None, query)
    request._receive = receive
    return asyncio.run(server.picture(request))


def test_a_first_answer_is_bounded_and_keeps_the_peak(run):
    fill(run, 3000)
    points = live_api.live_response(run, 0.0, 0, "")["series"]["env_steps_per_s"]
    assert len(points["t"]) <= 1000
    assert max(points["hi"]) == 999.0
    assert min(points["lo"]) == 5.0
    assert points["t"] == sorted(points["t"])
    assert {len(column) for column in points.values()} == {len(points["t"])}


def test_the_last_value_of_a_thinned_series_is_the_newest_one(run):
    fill(run, 3000)
    writer = MetricsWriter(run / "metrics.db")
    writer.write(1500.0, 3000, {"env_steps_per_s": 123.0})
    writer.close()
    points = live_api.live_response(run, 0.0, 0, "")["series"]["env_steps_per_s"]
    assert (points["t"][-1], points["s"][-1], points["y"][-1]) == (1500.0, 3000, 123.0)
    assert points["lo"][-2] <= points["y"][-2] <= points["hi"][-2]


def test_the_next_answer_holds_only_news(run):
    fill(run, 20)
    first = live_api.live_response(run, 0.0, 0, "")
    assert live_api.live_response(run, first["next"], first["evals_next"], first["epoch"])["series"] == {}
    fill(run, 4, first=20)
    news = live_api.live_response(run, first["next"], first["evals_next"], first["epoch"])
    assert news["series"]["env_steps_per_s"]["t"] == [10.0, 10.5, 11.0, 11.5]


def test_returns_of_each_learner_arrive_though_they_carry_the_earlier_time_of_their_weights(run):
    fill(run, 20)
    writer = MetricsWriter(run / "metrics.db")
    writer.write(2.0, 4, {"eval_return/0": 1.0, "eval_return/1": 2.0})
    first = live_api.live_response(run, 0.0, 0, "")
    assert (first["next"], first["series"]["eval_return/1"]["y"]) == (9.5, [2.0])

    def news(scores):
        return live_api.live_response(run, first["next"], first["evals_next"], first["epoch"], scores=scores)

    assert (news(first["scores"])["series"], news(first["scores"])["whole"]) == ({}, [])
    writer.write(4.0, 8, {"eval_return/1": 3.0})
    writer.close()
    later = news(first["scores"])
    assert later["whole"] == ["eval_return/0", "eval_return/1"]
    assert [later["series"][name]["t"] for name in later["whole"]] == [[2.0], [2.0, 4.0]]
    assert later["series"]["eval_return/1"]["y"] == [2.0, 3.0]
    assert news(later["scores"])["series"] == {}
    assert (
        json.loads(live_api.live(ask(run, f"run=r1&since=9.5&epoch=n:1&scores={later['scores']}")).body)["whole"] == []
    )


def test_numbers_of_evaluations_arrive_though_they_carry_the_earlier_time_of_their_weights(run):
    fill(run, 20)
    first = live_api.live_response(run, 0.0, 0, "")
    writer = MetricsWriter(run / "metrics.db")
    names = {metric.name for metric in METRICS if metric.name.startswith("eval_")}
    assert names == {metric.name for metric in METRICS if metric.is_evaluated}
    writer.write(4.0, 8, dict.fromkeys(names, 0.5))
    writer.close()
    later = live_api.live_response(run, first["next"], 0, first["epoch"], scores=first["scores"])
    drawn = names - {"eval_return"}  # the script draws it from the evaluations
    assert {name: later["series"][name]["y"] for name in later["whole"]} == {name: [0.5] for name in drawn}


def test_judgements_on_the_learning_are_told_by_the_newest_numbers_with_their_chart(run):
    writer = MetricsWriter(run / "metrics.db")
    writer.write(1.0, 1, {"dead_units": 0.95, "update_size": 2e-3, "eval_start_value": 7.0})
    writer.close()
    found = {label: rest for label, *rest in live_api.live_response(run, 0.0, 0, "")["health"]}
    assert found["Dead units"][:2] == ["95 %", "amber"]
    assert found["Update size"] == ["2.0e-03", "good", "An update changes the parameters by 2.0e-03 of their norm.",
                                    "update_size"]  # fmt: skip
    assert found["Value bias"][:2] == ["-", "unknown"]
    charts = {chart["key"] for chart in live_api.chart_specs("updates")}
    assert {rest[-1] for rest in found.values()} <= charts


_TAKE_WHOLE = """
const page = Object.create(LivePage.prototype), drawn = [];
page.store = new Map(); page.unit = { by: 1 }; page.axis = "t"; page.data = { colours: ["a", "b", "c", "d"] };
page.charts = new Map(); page.text = new Map(); page.epoch = "e"; page.dot = {};
page.evals = { t: [], s: [], u: [], y: [], lo: [], hi: [] }; page.legend = () => {};
page.note = { classList: { toggle() {} } }; page.logTail = () => {}; page.agent = { news() {} };
for (const name of ["bars", "coreStrip", "gpuRows", "tableRows", "processRows", "eventList", "tabTitle",
                    "healthChips", "say", "histograms", "warn"])
  page[name] = () => {};
page.chartOf = () => ({ show: (traces) => drawn.push(traces.slice(0, 2).map((trace) => [trace.colour, trace.x])) });
const news = { epoch: "e", evals: page.evals, text: {}, hosts: [], log: [], next: 9 };
const points = (...t) => ({ t, s: t, y: t });
page.apply({ ...news, series: { "eval_return/0": points(1), "eval_return/1": points(1) }, whole: [], scores: "1" });
page.apply({ ...news, series: { "eval_return/0": points(1, 2) }, whole: ["eval_return/0"], scores: "2" });
console.log(JSON.stringify([drawn, page.scores]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_what_is_sent_whole_takes_the_place_of_what_a_page_had():
    found = run_live_page(_TAKE_WHOLE)
    assert found == [[[["c", [1]], ["d", [1]]], [["c", [1, 2]], ["d", [1]]]], "2"]


_GO_BACK = """
const page = Object.create(LivePage.prototype), drawn = [];
page.store = new Map([["episode_return", { s: [1, 3, 2], x: [1, 2, 3], y: [1, 9, 2], low: [0, 8, 1], high: [2, 10, 3],
                                           banded: true }]]);
page.unit = { by: 1 }; page.data = { colours: ["a", "b"], references: [{ value: 0, label: "c" }] };
page.evals = { t: [1, 2, 3, 4], s: [10, 20, 10, 30], u: [5, 9, 9, 7],
               y: [1, 2, 3, 4], lo: [0, 1, 2, 3], hi: [2, 3, 4, 5] };
page.legend = () => {};
page.chartOf = () => ({ show: (traces) => drawn.push(traces.map(({ x, y, low }) => [x, y, low])) });
for (const axis of ["t", "s", "u"]) { page.axis = axis; page.showReturn(); }
console.log(JSON.stringify(drawn));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_where_the_counters_of_a_resumed_run_go_back_the_page_draws_its_later_session():
    over_time, over_steps, over_updates = run_live_page(_GO_BACK)
    assert over_time[:2] == [[[1, 2, 3], [1, 9, 2], [0, 8, 1]], [[1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3]]]
    assert over_steps[:2] == [[[1, 2], [1, 2], [0, 1]], [[10, 30], [3, 4], [2, 3]]]
    assert over_updates[0] == [[5, 7], [1, 4], [0, 3]]
    assert [drawn[-1][0] for drawn in (over_time, over_steps, over_updates)] == [[1, 4], [1, 30], [5, 7]]


_REFERENCE = """
const page = Object.create(LivePage.prototype), drawn = [];
page.store = new Map(); page.unit = { by: 1 }; page.axis = "t"; page.legend = () => {};
page.evals = { t: [1, 2, 3], s: [1, 2, 3], u: [1, 2, 3], y: [10, 30, 20], lo: [0, 20, 10], hi: [20, 40, 30] };
page.chartOf = () => ({ show: (traces) => drawn.push([traces.at(-1).name, traces.at(-1).y]) });
for (const value of [50, 51, -10, -11]) {
  page.data = { colours: ["a", "b"], references: [{ value, label: "zoo" }] }; page.showReturn();
}
console.log(JSON.stringify(drawn));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_published_return_is_drawn_where_it_does_not_flatten_the_curve():
    found = run_live_page(_REFERENCE)
    outside = ["zoo (outside the chart)", []]
    assert found == [["zoo", [50, 50]], outside, ["zoo", [-10, -10]], outside]


def test_a_page_that_was_away_for_long_gets_the_time_between(run):
    with contextlib.closing(MetricsWriter(run / "metrics.db")) as writer:
        for k in range(2400):
            writer.write(0.5 * k, 100 * k, {"updates_per_s": float(k)})
    answer = live_api.live_response(run, 10.0, 0, live_api.live_response(run, 0.0, 0, "")["epoch"])
    assert "updates_per_s" in answer["whole"]
    times = answer["series"]["updates_per_s"]["t"]
    assert max(after - before for before, after in itertools.pairwise(times)) < 60.0
    later = live_api.live_response(run, 1190.0, 0, answer["epoch"])
    assert (later["whole"], len(later["series"]["updates_per_s"]["t"])) == ([], 19)


def test_another_session_of_the_run_is_sent_whole(run):
    fill(run, 20)
    first = live_api.live_response(run, 0.0, 0, "")
    whole = live_api.live_response(run, first["next"], first["evals_next"], "older:0")
    assert len(whole["series"]["env_steps_per_s"]["t"]) == 20


def test_what_is_unknown_is_a_dash_and_never_zero(run):
    text = live_api.live_response(run, 0.0, 0, "")["text"]
    unknown = (
        "env_steps_per_s",
        "updates_per_s",
        "eval_return",
        "interval",
        "samples_per_insert",
        "policy_lag",
        "replay_fill",
        "cpu_use",
        "memory_used_bytes",
    )
    assert {name: text[name] for name in unknown} == dict.fromkeys(unknown, "-")


def test_evaluations_carry_the_interval_of_their_mean(run):
    writer = MetricsWriter(run / "metrics.db")
    writer.write(1.0, 1, {"cpu_use": 0.5})
    writer.evaluation(EvaluationRow(1.0, 100, 10, 1, 10, 4, -100.0, 20.0, 200.0))
    writer.close()
    sent = live_api.live_response(run, 0.0, 0, "")["evals"]
    assert sent["y"] == [-100.0]
    assert sent["hi"][0] - sent["y"][0] == pytest.approx(3.182 * 20.0 / 3.0**0.5, rel=2e-3), "t of a table"
    assert live_api.live_response(run, 1.0, 1, "n:1")["evals"]["y"] == []


def test_one_episode_has_no_interval(run):
    writer = MetricsWriter(run / "metrics.db")
    writer.evaluation(EvaluationRow(1.0, 100, 10, 1, 10, 1, -100.0, 0.0, 200.0))
    writer.close()
    sent = live_api.live_response(run, 0.0, 0, "")["evals"]
    assert (sent["lo"], sent["y"], sent["hi"]) == ([None], [-100.0], [None])


def test_the_end_of_the_log_that_was_written_last_is_sent(run):
    assert live_api.live_response(run, 0.0, 0, "")["log"] == ("", [])
    for at, (name, text) in enumerate((("logs/learner.log", "old"), ("errors/sampler-0.txt", "a\nboom\x1b[31m"))):
        (run / name).parent.mkdir()
        (run / name).write_text(text)
        os.utime(run / name, (at, at))
    (run / "logs" / "empty.log").touch()
    label, lines = live_api.live_response(run, 0.0, 0, "")["log"]
    assert (label, lines[0]) == ("errors/sampler-0.txt", "a")
    assert "\x1b" not in lines[1]


@pytest.mark.parametrize("seen", [0, 100])
def test_many_evaluations_are_thinned_with_best_and_worst_kept(run, seen):
    writer = MetricsWriter(run / "metrics.db")
    writer.write(1.0, 1, {"cpu_use": 0.5})
    returns = [float(i % 101) for i in range(5000)]
    returns[3000], returns[3001], returns[4999] = 7777.0, -5.0, 55.0
    for i, value in enumerate(returns):
        writer.evaluation(EvaluationRow(float(i), i, 2 * i, 1, i, 10, value, 1.0, 1.0))
    writer.close()
    document = live_api.live_response(run, 0.0, seen, "n:1")
    sent = document["evals"]
    assert document["evals_next"] == 5000
    assert 600 < len(sent["y"]) <= 2 * live_api.MAX_BUCKETS
    at = sent["y"].index(7777.0)
    assert (sent["t"][at], sent["s"][at], sent["u"][at]) == (3000.0, 3000, 6000), "all of it is one evaluation's"
    assert min(sent["y"]) == -5.0
    assert sent["t"] == sorted(sent["t"])
    assert sent["t"][0] >= seen
    assert set(sent["y"]) <= set(returns)


def test_numbers_are_sent_with_six_digits():
    values = [0.0, -0.0, 1.0, 0.1234567, -1234567.8, 3.14159265e-9, 2.0**80, 99999.96, 5e-324, 1.5]
    sent = live_api._rounded(values)
    assert sent == pytest.approx(values, rel=5e-6, abs=1e-300)
    assert [repr(value) for value in sent[2:5]] == ["1.0", "0.123457", "-1234570.0"]
    assert live_api._rounded([]) == []


def test_warnings_and_errors_have_a_colour_of_their_own():
    style = Path(live_api.__file__).with_name("live.css").read_text()
    assert [level for level in ("warning", "error") if f".sz-{level} {{" not in style] == []


def test_a_damaged_store_is_an_answer_with_one_line(run):
    (run / "metrics.db").write_bytes(b"x" * 5000)
    with pytest.raises(RunError):
        live_api.live_response(run, 0.0, 0, "")
    document = json.loads(live_api.live(ask(run, "run=r1")).body)
    assert "metrics" in document["error"]
    assert "\n" not in document["error"]


@pytest.mark.parametrize("query", ["run=../r1", "run=r1&since=x", "run=", "run=r1%00", "run=nothing"])
def test_odd_requests_get_one_line(run, query):
    assert "error" in json.loads(live_api.live(ask(run, query)).body)


def test_the_picture_is_handed_out_and_none_yet_is_no_error(run):
    assert picture("run=r1").status_code == 204
    (run / "live.jpg").write_bytes(b"\xff\xd8x")
    reply = picture("run=r1")
    assert (reply.status_code, reply.body, reply.headers["cache-control"]) == (200, b"\xff\xd8x", "no-store")
    assert picture(f"run=r1&after={reply.headers['x-picture']}").status_code == 204, "the same one is not sent again"


def test_asking_for_the_picture_of_a_live_run_tells_its_visualizer(run):
    (run / "control").mkdir()
    picture("run=r1")
    assert not (run / "control" / "viewer").exists(), "nobody draws for a run that has ended"
    fd = os.open(run / "run.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        picture("run=r1")
    finally:
        os.close(fd)
    assert (run / "control" / "viewer").exists()


def test_the_series_of_several_learners_are_drawn_beside_the_whole(run):
    groups = [f"updates_per_s/{group}" for group in range(3)]
    assert live_api.series_to_plot(["updates_per_s", *groups, "rows_redrawn/1"]) == ["updates_per_s", *groups]
    many = [f"updates_per_s/{group}" for group in range(20)]
    assert live_api.series_to_plot(many) == many[:8]
    assert live_api.series_to_plot(["eval_return", "eval_return/0", "eval_return/1"]) == [
        "eval_return/0",
        "eval_return/1",
    ]
    (card,) = [chart for chart in live_api.chart_specs("updates") if chart["key"] == "updates"]
    assert (card["part"], card["series"]) == ("group", ("updates_per_s", "updates_per_s/*"))
    (card,) = [chart for chart in live_api.chart_specs("updates") if chart["key"] == "gpu"]
    assert (card["part"], card["series"]) == ("GPU", ("gpu_use/*",))
    writer = MetricsWriter(run / "metrics.db")
    writer.write(50.0, 5000, {"updates_per_s": 30.0, **dict(zip(groups, (10.0, 11.0, 9.0), strict=True))})
    writer.close()
    series = live_api.live_response(run, 0.0, 0, "")["series"]
    assert [series[name]["y"][-1] for name in ("updates_per_s", *groups)] == [30.0, 10.0, 11.0, 9.0]


def test_each_of_several_learners_is_a_line_and_one_alone_is_none(run):
    writer = MetricsWriter(run / "metrics.db")
    writer.write(50.0, 5000, {"updates_per_s": 30.0})
    assert live_api.live_response(run, 0.0, 0, "")["learners"] == []
    writer.write(50.5, 5000, {"eval_return/0": 7.0, "eval_return/1": 8.0})
    writer.write(60.0, 5000, {"updates_per_s/0": 10.0, "updates_per_s/1": 11.5, "gossip_staleness/0": 2.0})
    writer.close()
    assert live_api.live_response(run, 0.0, 0, "")["learners"] == [
        ["", "updates/s", "staleness [rollouts]", "greedy return"], ["learner 0", "10", "2", "7"],
        ["learner 1", "11.5", "-", "8"]]  # fmt: skip


_DRAW_TWO_GROUPS = """
const page = Object.create(LivePage.prototype), drawn = {}; page.live = true;
const show = (traces) => traces.map((trace) => trace.name);
page.store = new Map(); page.unit = { by: 1 }; page.axis = "t"; page.data = { colours: ["a", "b", "c", "d"] };
page.evals = { t: [], y: [], lo: [], hi: [] }; page.legend = () => {};
page.chartOf = (card) => ({ show: (traces) => { drawn[card.spec.key] = show(traces); } });
const card = (key, series, part) => ({ spec: { key, series, part, scale: 1 }, names: [], now: {} });
page.returnCard = card("return");
page.charts = new Map(["return", "updates", "gpu"].map((key) => [key, {
  return: page.returnCard, gpu: card("gpu", ["gpu_use/*"], "GPU"),
  updates: card("updates", ["updates_per_s", "updates_per_s/*"], "group") }[key]]));
for (const name of NAMES) page.add(name, { t: [1], s: [1], y: [name.length] }, new Set());
for (const one of page.charts.values()) if (one !== page.returnCard) page.showSeries(one);
page.showReturn();
const now = (key) => page.charts.get(key).now.textContent;
console.log(JSON.stringify([drawn, now("updates"), now("gpu")]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_lines_of_several_learners_are_named_after_their_groups():
    script = "\n".join((Path(live_api.__file__).parent / name).read_text() for name in ("chart.js", "live.js"))
    names = [f"{name}{part}" for name in ("updates_per_s", "episode_return") for part in ("", "/0", "/1")]
    names += ["eval_return/0", "eval_return/1"]
    script = (
        f"globalThis.window = {{}}; const NAMES = {json.dumps([*names, 'gpu_use/0', 'gpu_use/1'])};\n"
        + script.replace("export default function", "function mount")
        + _DRAW_TWO_GROUPS
    )
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    drawn, updates_now, gpu_now = json.loads(found.stdout)
    assert drawn["updates"] == ["whole run", "group 0", "group 1"]
    assert drawn["gpu"] == ["GPU 0", "GPU 1"]
    assert drawn["return"][:2] == [f"group {i}: greedy episodes" for i in (0, 1)]
    assert drawn["return"][2:5] == ["samplers' episodes (noisy)", *(f"group {i}: episodes (noisy)" for i in (0, 1))]
    assert (updates_now, gpu_now) == ("13", "9 / 9")


_END = """
const told = [], page = Object.create(LivePage.prototype);
globalThis.Notification = class { constructor(title, { body }) { told.push([title, body]); } };
Object.assign(page, { data: { run: "r1" }, view: { notify: false }, live: true });
const news = (live) => page.announce({ live, state: live ? "running" : "failed", note: "out of memory" });
const asked = (permission, notify, live = true) => {
  Notification.permission = permission; page.view.notify = notify; page.live = live; news(false);
};
asked("granted", false); asked("denied", true); asked("granted", true, false);
page.live = true; news(true);
asked("granted", true);
console.log(JSON.stringify(told));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_end_of_a_watched_run_is_announced_where_the_user_wants_it_and_the_browser_may():
    found = run_live_page(_END)
    assert found == [["r1: failed", "out of memory"]]


_HIDDEN = """
const page = Object.create(LivePage.prototype), rests = [];
for (const [hidden, live, notify] of [[0, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 1]]) {
  globalThis.document = { hidden: !!hidden };
  Object.assign(page, { live: !!live, view: { notify: !!notify } });
  rests.push(page.rests());
}
console.log(JSON.stringify(rests));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_page_that_nobody_sees_asks_for_news_only_where_it_is_to_notify_of_the_end():
    assert run_live_page(_HIDDEN) == [False, True, False, True]


_DRAW = """
const told = [], pen = new Proxy({}, { get: (_, name) => (...args) => told.push([name, ...args]), set: () => true });
const node = () => ({ style: {}, appendChild: (child) => child, addEventListener() {}, getContext: () => pen,
                      setAttribute(name, value) { this[name] = value; },
                      clientWidth: 400, clientHeight: 200, set textContent(text) { this.said = text; } });
globalThis.document = { createElement: node };
globalThis.ResizeObserver = globalThis.IntersectionObserver = class { observe() {} };
const view = { smooth: 0, log: false, robust: false };
const look = { text: "", line: "", font: "", paint: (colour) => colour };
const options = { height: 200, xTitle: () => "s", colours: () => look, view: () => view, marks: () => [] };
const chart = new Chart(node(), options);
const x = [...Array(100).keys()], y = x.map((i) => (i === 3 ? -1500 : -100 - (i % 7)));
chart.traces = [{ name: "a", colour: "", x, y }];
const whole = chart.yRange(0, 99);
view.robust = true; const robust = chart.yRange(0, 99);
const lengths = x.map((i) => (i === 98 ? 933 : i === 99 ? null : i % 7));
chart.traces = [{ name: "a", colour: "", x, y: lengths }]; const newest = chart.yRange(0, 99);
chart.traces = [{ name: "a", colour: "", x, y }];
chart.traces.push({ name: "best", colour: "", x: [50], y: [-900], whole: true });
const kept = chart.yRange(0, 99); chart.traces.pop();
chart.traces = [{ name: "a", colour: "", x, y: x.map((i) => 10 ** (i / 33)) }];
view.robust = false; view.log = true; const log = chart.yRange(0, 99);
chart.zoomY = [1, 2]; const zoomed = chart.yRange(0, 99); chart.dblclick();
view.log = false;
chart.traces = [{ name: "b", colour: "", x: [0, 1, 2], y: [5, 5, 5], low: [5, 4, 5], high: [5, 6, 5] }];
const hovered = [0, 2].map((at) => { chart.axis.at = at; chart.draw(); return chart.box.said; });
chart.traces.push({ name: "late", colour: "", x: [0], y: [7] });
chart.axis.at = 2; chart.draw(); const apart = chart.box.said;
const smooth = smoothed([1, 3, null, 3], 0.5);
console.log(JSON.stringify({ whole, robust, newest, kept, log, zoomed, after: chart.zoomY, hovered, apart, smooth }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_charts_leave_out_outliers_take_logarithms_zoom_upwards_and_smooth():
    script = (Path(live_api.__file__).parent / "chart.js").read_text() + "globalThis.window = {};\n" + _DRAW
    found = json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=PATIENCE_S,
                                      check=True).stdout)  # fmt: skip
    assert found["whole"][0] < -1500
    assert -120 < found["robust"][0] < found["robust"][1] < -90
    assert found["newest"][1] > 933, "what has just come is no outlier"
    assert -1500 < found["kept"][0] < -900, "evaluations and references are no outliers"
    assert found["log"] == pytest.approx([0.0, 3.0])
    assert (found["zoomed"], found["after"]) == ([1, 2], None)
    assert "b: 5" in found["hovered"][0]
    assert "(5 .. 5)" not in "".join(found["hovered"])
    assert found["apart"].splitlines() == ["2 s", "b: 5", "late: 7, at 0"], "a value of another time says so"
    assert found["smooth"] == pytest.approx([1.0, 7 / 3, None, 19 / 7], nan_ok=True)


_LINKED = """
const pen = new Proxy({}, { get: () => () => {}, set: () => true });
const node = () => ({ style: {}, appendChild: (child) => child, addEventListener() {}, getContext: () => pen,
                      setAttribute(name, value) { this[name] = value; },
                      getBoundingClientRect: () => ({ left: 0, top: 0 }), setPointerCapture() {},
                      clientWidth: 462, clientHeight: 200, set textContent(text) { this.said = text; } });
globalThis.document = { createElement: node };
globalThis.ResizeObserver = globalThis.IntersectionObserver = class { observe() {} };
const look = { text: "", line: "", font: "", paint: (colour) => colour }, time = new Axis(), picked = [];
const marks = () => [{ x: 5, level: "error", text: "learner: ended by SIGKILL" }];
const [a, b] = ["a", "b"].map((name) => {
  const options = { height: 200, xTitle: () => "s", colours: () => look, axis: time, marks,
                    onPick: (x) => picked.push(x) };
  const chart = new Chart(node(), options);
  chart.traces = [{ name, colour: "", x: [...Array(11).keys()], y: [...Array(11).keys()] }];
  chart.draw();
  return chart;
});
const at = (x) => ({ button: 0, pointerId: 1, clientX: 52 + 40 * x, clientY: 50 });
a.pointermove(at(5)); a.draw(); b.draw();
const told = [a.box.said, b.box.said];
a.pointerdown(at(5)); a.pointerup(); a.pointerdown(at(2)); a.pointermove(at(8)); a.pointerup();
const zooms = [a.zoom, b.zoom]; b.dblclick();
a.pointerleave(); b.draw();
console.log(JSON.stringify({ told, picked, zooms, after: [a.zoom, time.at, b.box.style.display] }));
"""


_KEYS = (
    _LINKED.partition("const at =")[0]
    + """
const press = (key, more = {}) => a.keydown({ key, preventDefault() {}, ...more });
const read = (...keys) => keys.map((key) => { press(key); a.draw(); return time.at; });
a.div.onfocus();
const moved = read("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft");
press("ArrowRight", { shiftKey: true }); a.draw();
const jumped = [time.at, a.div["aria-valuenow"], a.div["aria-valuemax"], a.div["aria-valuetext"]];
time.read(4); press("Enter");
press("+"); const zoom = b.zoom; const within = read("Home", "End"); press("-");
const after = a.zoom; a.div.onblur(); press("ArrowLeft"); const last = time.at; a.div.onblur();
a.traces = []; a.draw(); const empty = read("ArrowRight", "End");
console.log(JSON.stringify({ moved, jumped, picked, zoom, within, after, last, empty, left: time.at }));
"""
)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_chart_is_read_picked_and_zoomed_by_keys():
    script = (Path(live_api.__file__).parent / "chart.js").read_text() + "globalThis.window = {};\n" + _KEYS
    found = json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=PATIENCE_S,
                                      check=True).stdout)  # fmt: skip
    assert found["moved"] == [0, 1, 0, 10, 10, 0, 0]
    assert found["jumped"] == [10, 10, 10, "10 s, a: 10"]
    assert (found["picked"], found["zoom"], found["within"]) == ([4], [1.5, 6.5], [2, 6])
    assert (found["after"], found["last"]) == (None, 10)
    assert (found["empty"], found["left"]) == ([None, None], None)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_charts_of_one_axis_are_read_and_zoomed_together_and_tell_what_happened():
    script = (Path(live_api.__file__).parent / "chart.js").read_text() + "globalThis.window = {};\n" + _LINKED
    found = json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=PATIENCE_S,
                                      check=True).stdout)  # fmt: skip
    assert found["told"] == ["5 s\na: 5\nlearner: ended by SIGKILL", "5 s\nb: 5"]
    assert (found["picked"], found["zooms"]) == ([5], [[2, 8], [2, 8]])
    assert found["after"] == [None, None, "none"]


@pytest.mark.parametrize(
    ("values", "text"),
    [({"samplers_active": 0.125}, "12 % of 1"), ({"samplers_active": 1.0}, "1 of 1"), ({}, "1 of 1")],
)
def test_a_resting_sampler_is_said_in_words(values, text):
    config = {"sampling": {"samplers": 1}, "replay": {}, "learner": {}}
    shown = snapshot({"algo": "sac", "mode": "spreeze"}, config, values | {"sampler_env_steps_per_s/0": 5.0})
    assert live_api._samplers(shown) == text
    unknown = snapshot({"algo": "sac", "mode": "spreeze"}, {}, {"sampler_env_steps_per_s/0": 5.0})
    assert live_api._samplers(unknown) == "1 of 1", "where none are set, as many as there are"


def test_a_card_s_line_says_what_it_does_and_how_busy_the_learner_on_it_is():
    values = {"gpu_use/0": 0.95, "gpu_power_w/0": 130.0, "gpu_power_limit_w/0": 700.0, "gpu_clock_hz/0": 1.5e9,
              "gpu_clock_max_hz/0": 1.98e9, "gpu_memory_used_bytes/0": 2.0**31, "gpu_memory_bytes/0": 80 * 2.0**30,
              "gpu_use/1": 0.0, "learner_wait_share": 0.03}  # fmt: skip
    shown = snapshot({"algo": "sac", "mode": "spreeze"}, {"learner": {"device": "cuda:0"}}, values)
    assert [live_api._gpu(gpu, shown) for gpu in shown.gpus] == [
        "GPU 0: kernels run 95 % of the time, learner busy 97 %, 130 of 700 W, 1.50 of 1.98 GHz, 2.0 GiB of 80.0 GiB",
        "GPU 1: kernels run 0 % of the time, - W, - GHz, -",
    ]


def test_the_answer_marks_sessions_lists_processes_and_tells_a_problem_from_news(run):
    state = json.loads((run / "run.json").read_text()) | {"session_starts": [0.0, 40.5], "state": "failed"}
    (run / "run.json").write_text(json.dumps(state))
    writer = MetricsWriter(run / "metrics.db")
    writer.write(50.0, 5000, {"process_cpu_use/learner": 0.91, "process_memory_bytes/learner": 2.0**30})
    writer.close()
    writer = MetricsWriter(run / "metrics.db")
    writer.event(44.0, "warning", "supervisor", "learner ended by SIGKILL")
    writer.evaluation(EvaluationRow(45.0, 100, 10, 1, 10, 4, 7.0, 1.0, 20.0))
    writer.close()
    answer = live_api.live_response(run, 0.0, 0, "")
    assert answer["marks"] == [
        [40.5, "session", "session 2 begins"],
        [44.0, "warning", "supervisor: learner ended by SIGKILL"],
        [45.0, "best", "best evaluation: 7"],
    ]
    assert live_api.live_response(run, answer["next"] + 9.0, 1, answer["epoch"])["marks"] is None
    assert answer["processes"] == [["learner", 0.91, "1.0 GiB"]]
    assert answer["problem"]
    (run / "run.json").write_text(json.dumps(state | {"state": "finished"}))
    assert not live_api.live_response(run, 0.0, 0, "")["problem"]


_KILLED = Event(9.0, "warning", "supervisor", "sampler-1 ended by SIGKILL in phase STEP; restarting now")


@pytest.mark.parametrize(
    ("events", "live", "t"),
    [
        ([_KILLED], True, 9.0),
        ([_KILLED], False, None),
        ([_KILLED, Event(9.5, "info", "supervisor", "sampler-10 is back after 1.6 s")], True, 9.0),
        ([_KILLED, Event(9.5, "info", "supervisor", "sampler-1 is back after 1.6 s")], True, None),
        ([_KILLED, Event(9.5, "info", "supervisor", "sampler-1 is back after 1.6 s"), _KILLED], True, 9.0),
        ([Event(8.0, "error", "learner", "ended"), Event(9.0, "info", "learner", "learning resumed")], False, 8.0),
        ([Event(4.0, "error", "learner", "ended in the session before")], True, None),
    ],
)
def test_only_what_still_holds_stands_above_the_charts(events, live, t):
    found = live_api._alert({"session_starts": [0.0, 5.0]}, events, live=live)
    assert found == (None if t is None else [f"0:{t:02.0f}", *next(e for e in events if e.t == t)[1:]])


def test_a_run_that_ended_without_numbers_says_so_and_only_a_failure_is_a_problem(run):
    for state, problem in (("stopped", False), ("failed", True)):
        (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"state": state}))
        answer = live_api.live_response(run, 0.0, 0, "")
        assert answer["note"].startswith("The run ended before there were numbers")
        assert answer["problem"] is problem


@pytest.mark.parametrize(
    ("state", "text"),
    [("running", "No picture now: the newest policy is drawn while somebody looks, after some seconds on busy cores."),
     ("finished", "No picture: the run ended before the first one.")],
)  # fmt: skip
def test_why_there_is_no_picture_follows_the_state(run, monkeypatch, state, text):
    monkeypatch.setattr(live_api, "state_of", lambda path: state)
    assert live_api.live_response(run, 0.0, 0, "")["text"]["no_picture"] == text
    monkeypatch.setattr(live_api, "kept_evaluations", lambda path: ["an evaluation"])
    told = live_api.live_response(run, 0.0, 0, "")["text"]["no_picture"]
    assert told == f"{text} A click on the return shows recorded episodes."


@pytest.mark.parametrize(("samplers", "rendered"), [("", False), ("[rollout]\nsamplers = 2\n", True)])
def test_a_serial_run_has_a_picture_where_it_has_several_processes(run, samplers, rendered):
    state = json.loads((run / "run.json").read_text()) | {"mode": "serial", "algo": "ppo"}
    (run / "run.json").write_text(json.dumps(state))
    (run / "config.toml").write_text(samplers)
    told = live_api.live_response(run, 0.0, 0, "")["text"]["no_picture"]
    assert ("draws no picture" not in told) is rendered


def test_an_ended_run_shows_its_summary_and_not_that_of_an_earlier_session(run):
    fill(run, 20)
    state = json.loads((run / "run.json").read_text()) | {"wall_s": 10.0}
    (run / "run.json").write_text(json.dumps(state))
    (run / "summary.json").write_text(json.dumps({"wall_s": 10.0, "env_steps_per_s": 777.0}))
    assert live_api.live_response(run, 0.0, 0, "")["text"]["env_steps_per_s"] == "777"
    (run / "run.json").write_text(json.dumps(state | {"sessions": 2, "state": "running", "wall_s": 12.0}))
    answer = live_api.live_response(run, 0.0, 0, "")
    assert (answer["state"], answer["text"]["env_steps_per_s"]) == ("crashed", "6")


def test_a_paused_run_shows_its_counts_and_no_rate_or_use_of_before(run):
    state = json.loads((run / "run.json").read_text()) | {"state": "paused"}
    (run / "run.json").write_text(json.dumps(state))
    writer = MetricsWriter(run / "metrics.db")
    writer.write(
        50.0,
        5000,
        {
            "env_steps": 5000.0,
            "env_steps_per_s": 100.0,
            "cpu_use": 0.9,
            "cpu_core_use/0": 0.9,
            "process_cpu_use/learner": 0.91,
        },
    )
    writer.close()
    with open(run / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = live_api.live_response(run, 0.0, 0, "")
    assert answer["state"] == "paused"
    assert (answer["cores"], answer["processes"], answer["problem"]) == ([], [], False)
    text = answer["text"]
    assert (text["env_steps"], text["env_steps_per_s"], text["cpu_use"]) == ("5,000", "-", "-")
    assert answer["note"].startswith("Paused: ")


def test_a_live_run_says_how_much_is_done_and_how_long_ago_its_best_evaluation_was(run):
    state = json.loads((run / "run.json").read_text())
    state |= {
        "state": "running",
        "wall_s": 100.0,
        "progress": 0.41,
        "eta_s": 125.0,
        "eval_final": 5.0,
        "heartbeat": time.time(),
    }
    (run / "run.json").write_text(json.dumps(state))
    writer = MetricsWriter(run / "metrics.db")
    for t, value in ((10.0, 1.0), (40.0, 9.0), (90.0, 5.0)):
        writer.evaluation(EvaluationRow(t, 1, 1, 1, 0, 10, value, 1.0, 9.0))
    writer.close()
    with open(run / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = live_api.live_response(run, 0.0, 0, "")["text"]
        assert (text["progress"], text["since_best"]) == ("41 %, at most 2:05 left", "1:00")
        assert text["final"] == "5 (n=3)"
        (run / "config.toml").write_text("[stop]\nseconds = 300.0\n")
        assert live_api.live_response(run, 0.0, 0, "")["text"]["progress"] == "41 %, 2:05 left"
        (run / "config.toml").write_text("[stop]\nseconds = 300.0\ntarget_return = 5.0\n")
        assert live_api.live_response(run, 0.0, 0, "")["text"]["progress"] == "41 %, at most 2:05 left"
        (run / "run.json").write_text(json.dumps(state | {"state": "stopping"}))
        assert live_api.live_response(run, 0.0, 0, "")["text"]["progress"] == "-"
    (run / "run.json").write_text(json.dumps(state | {"state": "finished"}))
    assert live_api.live_response(run, 0.0, 0, "")["text"]["progress"] == "-"


@pytest.mark.parametrize(
    ("reason", "error", "told"),
    [
        ("target_return", None, "Ended: the target return was reached. Next: see its episodes (a click on the return)"),
        ("interrupt (Ctrl-C)", None, "Ended: it was interrupted. Next"),
        ("a new reason", None, "Ended: a new reason. Next"),
        ("failure", "learner died twice", "Ended by a failure: learner died twice Next: read its errors (Logs)."),
        (None, None, "No reason was recorded for its end."),
    ],
)
def test_an_ended_run_says_first_why_and_what_to_do_next(run, reason, error, told):
    fill(run, 20)
    state = json.loads((run / "run.json").read_text()) | {"exit_reason": reason}
    (run / "run.json").write_text(json.dumps(state))
    (run / "summary.json").write_text(json.dumps({"error": error}))
    assert live_api.live_response(run, 0.0, 0, "")["note"].startswith(told)


def test_an_ended_run_names_the_policy_that_it_keeps(run):
    fill(run, 20)
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"exit_reason": "seconds"}))
    (run / "checkpoints").mkdir(exist_ok=True)
    best = {"updates": 2661, "return": 34.2, "played": 40}
    (run / "checkpoints" / "best.json").write_text(json.dumps(best))
    kept = " Kept: the policy of update 2,661, return 34.2 over 40 episodes. Next: "
    assert kept in live_api.live_response(run, 0.0, 0, "")["note"]


def test_the_load_of_other_programs_is_a_mean_and_one_peak_is_no_advice(run, monkeypatch):
    monkeypatch.setattr(live_api, "state_of", lambda path: "running")
    writer = MetricsWriter(run / "metrics.db")
    for k in range(80):
        writer.write(0.5 * k, 100 * k, {"external_cpu_cores": 0.2 if k < 79 else 1.0, "sibling_cpu_cores": 0.01})
    writer.close()
    seen = []
    monkeypatch.setattr(live_api, "bottleneck", lambda shown: seen.append(shown) or bottleneck(shown))
    live_api.live_response(run, 0.0, 0, "")
    assert seen[0].external_cpu_cores == pytest.approx(0.2 + 0.8 / 40, abs=1e-3)


def test_time_splits_are_means_of_some_seconds_so_that_the_advice_stays(run, monkeypatch):
    monkeypatch.setattr(live_api, "state_of", lambda path: "running")
    writer = MetricsWriter(run / "metrics.db")
    for k in range(80):
        writer.write(0.5 * k, 100 * k, {"learner_wait_share": 0.4 * (k % 2), "cpu_use": 0.8 + 0.1 * (k % 2)})
    writer.close()
    seen = []
    monkeypatch.setattr(live_api, "bottleneck", lambda shown: seen.append(shown) or bottleneck(shown))
    live_api.live_response(run, 0.0, 0, "")
    assert seen[0].learner_shares["wait"] == pytest.approx(0.2, abs=0.02)
    assert seen[0].cpu_use == pytest.approx(0.85, abs=0.01)


def test_waiting_for_replay_to_fill_is_no_part_of_the_first_advice(run, monkeypatch):
    monkeypatch.setattr(live_api, "state_of", lambda path: "running")
    writer = MetricsWriter(run / "metrics.db")
    for k in range(48):  # learning begins after 22 s
        learns = k >= 44
        writer.write(0.5 * k, 1, {"updates_per_s": 60.0 * learns, "learner_wait_share": 0.05 if learns else 1.0})
    writer.close()
    seen = []
    monkeypatch.setattr(live_api, "bottleneck", lambda shown: seen.append(shown) or bottleneck(shown))
    live_api.live_response(run, 0.0, 0, "")
    assert seen[0].learner_shares["wait"] == pytest.approx(0.05)


def test_samplers_of_an_ended_run_are_the_mean_of_its_last_session(run):
    writer = MetricsWriter(run / "metrics.db")
    for k in range(80):
        active = 1.0 if k < 40 else 0.25 if k < 60 else 0.75
        writer.write(
            0.5 * k, 100 * k, {"samplers_active": active, "learner_wait_share": 0.4, "sampler_wait_share": 0.0}
        )
    writer.close()
    state = json.loads((run / "run.json").read_text()) | {"sessions": 2, "session_starts": [0.0, 20.0]}
    (run / "run.json").write_text(json.dumps(state))
    (run / "config.toml").write_text("[sampling]\nsamplers = 1\n")
    assert live_api.live_response(run, 0.0, 0, "")["text"]["samplers_active"] == "50 % of 1"


def test_an_ended_run_is_judged_by_the_load_over_all_of_it_although_its_last_samples_lack_it(run, monkeypatch):
    writer = MetricsWriter(run / "metrics.db")
    for k in range(80):
        writer.write(0.5 * k, 100 * k, {"cpu_use": 0.9 + 0.1 * (k % 2), "external_cpu_cores": 1.4})
    writer.write(70.0, 8000, {"env_steps": 8000.0})
    writer.close()
    seen = []
    monkeypatch.setattr(live_api, "bottleneck", lambda shown: seen.append(shown) or bottleneck(shown))
    assert "In its last seconds: " in live_api.live_response(run, 0.0, 0, "")["note"], "it was killed"
    (run / "summary.json").write_text(json.dumps({"wall_s": json.loads((run / "run.json").read_text()).get("wall_s")}))
    assert "Over the whole run: " in live_api.live_response(run, 0.0, 0, "")["note"]
    assert (seen[0].cpu_use, seen[0].external_cpu_cores) == (pytest.approx(0.95, abs=0.01), pytest.approx(1.4))


def test_before_the_first_state_is_written_the_best_evaluation_is_that_of_the_metrics(run):
    writer = MetricsWriter(run / "metrics.db")
    for t, value in ((6.6, 42.8), (7.5, 9.3)):
        writer.evaluation(EvaluationRow(t, 1, 1, 1, 0, 10, value, 1.0, 9.0))
    writer.close()
    assert live_api.live_response(run, 0.0, 0, "")["text"]["best"] == "42.8"


@pytest.mark.parametrize(("worker", "sentence"), [
    ("learner", "The learner restarts: "), ("sampler-1", "sampler-1 restarts: fewer env steps")
])  # fmt: skip
def test_a_worker_that_is_not_back_yet_is_said_and_not_the_rates_of_before(run, monkeypatch, worker, sentence):
    fill(run, 20)
    monkeypatch.setattr(live_api, "state_of", lambda path: "running")
    writer = MetricsWriter(run / "metrics.db")
    writer.event(9.0, "warning", "supervisor", f"{worker} ended by SIGKILL in phase UPDATE; restarting now")
    writer.close()
    assert live_api.live_response(run, 0.0, 0, "")["note"].startswith(sentence)
    writer = MetricsWriter(run / "metrics.db")
    writer.event(9.6, "info", "supervisor", f"{worker} is back after 4.5 s")
    writer.close()
    assert "restarts" not in live_api.live_response(run, 0.0, 0, "")["note"]


def test_an_ended_run_says_that_its_tuner_had_not_chosen_and_not_that_it_measures(run):
    fill(run, 20)
    state = json.loads((run / "run.json").read_text()) | {"exit_reason": "seconds", "tuner_measures": True}
    (run / "run.json").write_text(json.dumps(state))
    note = live_api.live_response(run, 0.0, 0, "")["note"]
    assert note.endswith(" It ended before the tuner had chosen.")


def test_the_run_of_an_algorithm_that_lost_a_comparison_says_which_run_goes_on(run):
    fill(run, 20)
    (run / "algorithms.json").write_text(json.dumps({"algo": "better", "run": "task-better"}))
    assert live_api.live_response(run, 0.0, 0, "")["note"].startswith(
        "Run task-better won the comparison of algorithms on this task and went on. "
    )


def test_the_trend_of_a_live_run_names_its_target_and_that_of_an_ended_one_does_not(run):
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"state": "running"}))
    (run / "config.toml").write_text("[stop]\ntarget_return = 400.0\n")
    writer = MetricsWriter(run / "metrics.db")
    for k in range(30):
        writer.evaluation(EvaluationRow(10.0 * k, 1, 1, 1, 0, 10, 10.0 * k + k % 2, 1.0, 9.0))
    writer.close()
    with open(run / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = live_api.live_response(run, 0.0, 0, "")["text"]["trend"]
    assert text.startswith("Over the last 1:30: +60")
    assert "400 in 1:" in text
    (run / "run.json").write_text(json.dumps(state))
    assert "400" not in live_api.live_response(run, 0.0, 0, "")["text"]["trend"]


@pytest.mark.parametrize(("gain", "stuck"), [(0.0, True), (5.0, False)])
def test_returns_that_have_never_risen_are_said_and_do_not_fall(run, gain, stuck):
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"env_id": "MountainCarContinuous-v0", "algo": "ppo"}))
    writer = MetricsWriter(run / "metrics.db")
    writer.write(1.0, 1, {"env_steps": 1.0})
    for k in range(30):
        value = -0.01 * (k % 3) + (gain if k == 20 else 0.0)
        writer.evaluation(EvaluationRow(10.0 * k, 1, 1, 1, 0, 10, value, 0.01, 9.0))
    writer.close()
    found = live_api.live_response(run, 0.0, 0, "")
    assert ("has not risen since the run began" in found["text"]["trend"]) is stuck
    assert ("is below the best" in found["note"]) is not stuck


def test_a_run_that_is_stopping_says_so_and_nothing_of_its_tuner(run):
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"state": "stopping"}))
    with open(run / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert live_api.live_response(run, 0.0, 0, "")["note"].startswith("Stopping: the last evaluation")


def test_the_picture_of_an_ended_run_has_no_age(run):
    (run / "live.jpg").write_bytes(b"x")
    assert live_api.live_response(run, 0.0, 0, "")["text"]["picture"] == "last picture of the run"


def test_every_series_of_the_charts_is_in_the_table_of_metrics():
    series = [name for chart in live_api.chart_specs("updates") for name in chart["series"]]
    drawn = [metric for metric in live_api.charted_metrics() if metric.chart.group != RETURN]
    assert [name for metric in drawn for name in metric.series] == series
    assert all(by_name(name.removesuffix("/*")) for name in series)


def test_what_ppo_and_a2c_tell_of_their_learning_is_drawn():
    names = [metric.name for metric in METRICS if metric.writer == ALGORITHM]
    assert {"approx_kl", "learning_rate", "grad_norm"} < set(names)
    assert set(live_api.series_to_plot(list(names))) == set(names)


def test_the_policy_s_lag_is_counted_in_what_its_algorithm_waits_for():
    for unit in ("updates", "rollouts"):
        assert [chart["unit"] for chart in live_api.chart_specs(unit) if chart["key"] == "lag"] == [unit]


def test_the_first_answer_of_a_long_run_takes_no_more_than_its_share_of_time(run):
    """Up to all raw points that are kept, an hour at 2 Hz: no more than proportional to them."""

    def cpu_s():
        times = []
        for _ in range(5):
            start = time.thread_time()
            live_api.live_response(run, 0.0, 0, "")
            times.append(time.thread_time() - start)
        return statistics.median(times)

    fill(run, 700)
    short = cpu_s()
    fill(run, 6300, first=700)
    assert cpu_s() < 30 * short


@pytest.mark.parametrize(("mode", "algo", "buffer", "unit"), [
    ("spreeze", "sac", "Replay", "updates"), ("serial", "sac", "Replay", "updates"),
    ("serial", "ppo", "Storages", "rollouts"), ("hts", "ppo", "Storages", "rollouts"),
    ("impact", "impact", "Circular buffer", "updates"),
])  # fmt: skip
def test_the_way_to_the_learner_is_named_as_the_algorithm_s_mode_has_it(tmp_path, mode, algo, buffer, unit):
    parts = data_flow_of({"mode": mode}, on_policy=algo in ON_POLICY)
    stages = live_api.pipeline(parts)
    assert [stage["title"] for stage in stages] == ["Samplers", buffer, "Learner"]
    assert live_api.lag_unit(parts) == unit
    known = live_api.texts(snapshot({}, {}, {}), {}, {"mode": mode, "algo": algo}, None, tmp_path, 10)
    assert {item["id"] for stage in stages for item in stage["items"]} <= set(known)


def test_an_evaluation_that_was_cut_short_tells_how_many_episodes_it_has(tmp_path):
    row = EvaluationRow(10.0, 100, 5, 1, 5, 6, 133.0, 12.0, 200.0)
    cut, whole = (live_api.texts(snapshot({}, {}, {}), {}, {}, row, tmp_path, count)["interval"] for count in (10, 6))
    assert cut.endswith("; 6 of 10 episodes")
    assert cut.startswith(whole)
    assert "episodes" not in whole


@pytest.mark.parametrize(("best", "now", "std", "told"), [
    (500.0, 90.0, 10.0, True), (500.0, 400.0, 10.0, False), (500.0, 90.0, 1000.0, False), (-150.0, -400.0, 50.0, True),
    (-150.0, -170.0, 5.0, False), (None, 90.0, 10.0, False),
])  # fmt: skip
def test_a_policy_that_fell_from_the_best_is_told_with_what_is_kept(best, now, std, told):
    last = EvaluationRow(10.0, 100, 5, 1, 5, 10, now, std, 200.0)
    row = None if best is None else last._replace(return_mean=best, return_std=10.0)
    assert ("The better policy is kept for play" in live_api._fallen(row, last)) is told
    assert live_api._fallen(row, None) == ""


def test_a_best_evaluation_that_was_luck_makes_no_later_one_a_fall():
    last = EvaluationRow(10.0, 100, 5, 1, 5, 10, 97.6, 5.0, 200.0)
    lucky = last._replace(return_mean=167.0, return_std=180.0)
    assert live_api._fallen(lucky, last) == ""
    assert "97.6, is below the best" in live_api._fallen(lucky._replace(return_std=5.0), last)


@pytest.mark.parametrize(("told", "band"), [
    ([64.0, 64.0], (64.0, 64.0)), (None, (8.0, 512.0)),
])  # fmt: skip
def test_the_bounds_are_those_of_the_session_where_it_says_them(told, band):
    config = {"replay": {"samples_per_insert_min": 8.0, "samples_per_insert_max": 512.0}}
    found = snapshot({"samples_per_insert_band": told}, config, {})
    assert (found.samples_per_insert_min, found.samples_per_insert_max) == band


_DRAW_NUMBERS = """
const page = Object.create(LivePage.prototype), made = [];
page.store = new Map(); page.unit = { by: 1 };
const spec = { key: "info", series: ["info/*"], scale: 1, split: true };
const template = { spec, names: [], box: { parentElement: "grid" } };
page.charts = new Map([["info", template]]);
page.card = (parent, spec) => {
  made.push([parent, spec.key, spec.title]); page.charts.set(spec.key, { spec, names: [], box: {} });
};
const changed = new Set();
for (const name of ["info/a", "info/reward/b", "info/a"]) page.add(name, { t: [1], s: [1], y: [2] }, changed);
console.log(JSON.stringify([made, [...changed].map((card) => card.names), page.store.get("info/a").y]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_each_number_of_the_environment_has_a_chart_of_its_own():
    made, names, values = run_live_page(_DRAW_NUMBERS)
    assert made == [["grid", "info/a", "a"], ["grid", "info/reward/b", "reward/b"]]
    assert names == [["info/a"], ["info/reward/b"]]
    assert values == [2, 2]


def test_all_numbers_of_the_environment_are_drawn():
    names = [f"info/{index}" for index in range(32)]
    assert live_api.series_to_plot(["success_rate", *names]) == ["success_rate", *names]
    charts = {chart["key"]: chart for chart in live_api.chart_specs("updates")}
    assert [key for key, chart in charts.items() if chart["split"]] == ["info", "callback"]
    assert charts["success"]["series"] == ("success_rate", "success_rate/*", "eval_success_rate", "eval_success_rate/*")
