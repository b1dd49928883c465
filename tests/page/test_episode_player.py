"""The episode player: its answers, who may have pictures drawn, and a click on a curve in a real browser."""

import dataclasses
import json
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import dashboard_browser as web
import numpy as np
import pytest

pytest.importorskip("streamlit")
from harness import PATIENCE_S, poll
from kept_frames import frame_records
from starlette.requests import Request
from test_pages import make_run

from spreeze.config.schema import EvaluationConfig
from spreeze.dashboard import control, episode_api
from spreeze.envs.task import make_task
from spreeze.files import write_json
from spreeze.machine.processes import LOW_PRIORITY
from spreeze.metrics.recorded_episodes import frames_path, kept_evaluations
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter
from spreeze.transport.weights import Weights
from spreeze.workers.episodes import episode_redraw
from spreeze.workers.episodes.episode_recorder import EpisodeRecorder
from spreeze.workers.episodes.episode_redraw import draw
from spreeze.workers.episodes.lockstep import run_episodes, score


def recorded_run(runs, name="r1", module=None):
    """A run directory whose second evaluation, at 20 s, has recorded episodes of a still policy in Pendulum."""
    path, task = make_run(runs, name), make_task("Pendulum-v1")
    spec = task.spec
    task.close()
    write_json(path / "env.json", dataclasses.asdict(spec))
    lines = ["[sac]", "gamma = 0.9", "[evaluation]", "keep_episodes = 60", "[env]", 'id = "Pendulum-v1"']
    with open(path / "config.toml", "a", encoding="utf-8") as file:
        file.write("\n".join([*lines, *([f'import_module = "{module}"'] if module else [])]) + "\n")
    recorder, seeds = EpisodeRecorder(path, spec, EvaluationConfig()), [1, 2, 3]
    recorder.begin(Weights({}, {}, 1, 1))
    still = lambda obs, state=(): (np.ones((len(obs), 1), np.float32), state)  # noqa: E731
    episodes = run_episodes(recorder.make_task, still, seeds, recorder.on_step)
    record = {"wall_s": 20.0, "env_steps": 2000, "updates": 200, "group": 0, "version": 200}
    recorder.keep(episodes, seeds, record | score(episodes))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPREEZE_RUNS_DIR", str(tmp_path_factory.getbasetemp() / "player"))
        yield recorded_run(tmp_path_factory.getbasetemp() / "player")


def ask(route, **query):
    text = "&".join(f"{name}={value}" for name, value in query.items())
    reply = route(Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": text.encode()}))
    return reply if reply.media_type != "application/json" else json.loads(reply.body)


EVALUATIONS, EPISODE, FRAMES, HISTOGRAMS, DRAW, WARM = (route.endpoint for route in episode_api.routes(""))


def test_the_numbers_of_an_episode_come_in_strips_with_sentences(run):
    listed = ask(EVALUATIONS, run="r1")
    assert [listed[name] for name in ("t", "s", "u", "group", "why")] == [[20.0], [2000], [200], [0], ""]
    found = ask(EPISODE, run="r1", evaluation=listed["id"][0], kind="worst")
    assert (found["length"], found["drawable"], found["drawn"], found["frames"]) == (200, True, False, "worst")
    returns = [each["return"] for each in found["kinds"]]
    assert returns == sorted(returns, reverse=True)
    strips = {strip["title"]: strip for strip in found["strips"]}
    assert list(strips) == ["Reward", "Value and return", "Action", "Observation"]
    reward, came = strips["Reward"]["lines"][0]["y"], strips["Value and return"]["lines"][0]["y"]
    assert came[-2] == pytest.approx(reward[-2] + 0.9 * reward[-1], rel=1e-4)
    assert "no values" in strips["Value and return"]["note"], "nobody published any"
    assert [len(line["y"]) for line in strips["Observation"]["lines"]] == [201] * 3
    texts = [mark["text"] for mark in found["marks"]]
    assert texts[:2] == ["ran to the time limit of 200 steps", "action 0 at its bound 100 % of the time"]


def test_a_recorded_evaluation_is_compared_with_the_one_before_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path))
    path = recorded_run(tmp_path)
    query = {"run": "r1", "evaluation": kept_evaluations(path)[0].id, "kind": "worst"}
    assert ask(EPISODE, **query)["change"] is None, "the metrics do not have this evaluation"
    (path / "metrics.db").unlink()
    with closing(MetricsWriter(path / "metrics.db")) as store:
        store.evaluation(EvaluationRow(10.0, 1000, 100, 1, 100, 3, -900.0, 10.0, 200.0))
        store.evaluation(EvaluationRow(20.0, 2000, 200, 1, 200, 3, -1200.0, 10.0, 200.0))
    found = ask(EPISODE, **query)["change"]
    assert found["title"] == "Return -1,200, and -900 at the evaluation before, at 0:10"
    assert found["sentences"][1] == "Episodes are as long as before; the reward a step went from -4.50 to -6."


def test_actions_of_kept_episodes_are_histograms_over_time(run):
    found = ask(HISTOGRAMS, run="r1")
    assert list(found) == ["steps_action"], "nobody published values"
    chart = found["steps_action"]
    assert chart["t"] == [20.0]
    assert chart["y"] == chart["lo"] == chart["hi"] == [1.0], "always the largest torque"
    assert chart["shares"] == [[1.0]]
    spread = episode_api._histogram([(1.0, np.linspace(-1.0, 1.0, 1000)), (2.0, np.array([5.0, 0.25]))])
    assert (len(spread["shares"][0]), spread["low"]) == (30, pytest.approx(-0.99, abs=0.01))
    assert [round(sum(shares), 2) for shares in spread["shares"]] == [1.0, 1.0], "what lies beyond is in the last bin"
    options = episode_api._histogram([(1.0, np.array([0.0, 2.0, 2.0, 1.0]))])
    assert (options["low"], options["step"], options["shares"]) == (-0.5, 1.0, [[0.25, 0.25, 0.5]])


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"run": "../r1"}, "name"),
        ({"evaluation": "../../run"}, "names no recorded evaluation"),
        ({"evaluation": "e1-2-3-4"}, "is not kept"),
        ({"kind": "../best"}, "expected best, median, worst"),
    ],
)
def test_no_request_reads_another_file_than_a_recording(run, query, words):
    known = {"run": "r1", "evaluation": kept_evaluations(run)[0].id, "kind": "best"}
    for route in (EPISODE, DRAW):
        assert words in ask(route, **{**known, **query})["error"]
    if "evaluation" not in query or "/" in query["evaluation"]:
        assert ask(FRAMES, **{**known, **query}).status_code == 404


def test_pictures_are_drawn_by_a_post_alone_and_never_by_a_foreign_run_s_module(run, tmp_path, monkeypatch):
    assert [route.methods for route in episode_api.routes("")][-2:] == [{"POST"}, {"POST"}]
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path))
    path = recorded_run(tmp_path, module="hostile")
    started = []
    monkeypatch.setattr(episode_api, "_process", started.append)
    query = {"run": "r1", "evaluation": kept_evaluations(path)[0].id, "kind": "best"}
    assert ask(DRAW, **query) == {"state": "untrusted", "module": "hostile"}
    assert ask(DRAW, **query, trust="other")["state"] == "untrusted"
    assert started == []
    for allowed in ({"trust": "hostile"}, {}):
        monkeypatch.setattr(episode_api, "_drawing", {})
        assert ask(DRAW, **query, **allowed) == {"state": "drawing"}
        assert started.pop() == [str(path), query["evaluation"], "best"]
        monkeypatch.setenv(control.IMPORT, "hostile")  # what the page was started with is allowed


@pytest.mark.parametrize("ahead", ["r1", "other"])
def test_a_process_started_ahead_for_any_run_draws_the_episode_that_is_asked_for(run, ahead):
    if ahead != "r1":
        recorded_run(run.parent, ahead)
    key = kept_evaluations(run)[0]
    frames_path(run, key, "best").unlink(missing_ok=True)
    assert ask(WARM, run=ahead) == ask(WARM, run=ahead) == {"state": "warm"}
    (process,) = episode_api._spare
    try:
        assert ask(DRAW, run="r1", evaluation=key.id, kind="best") == {"state": "drawing"}
        assert list(episode_api._drawing.values()) == [process]
        assert process.wait(web.PATIENCE_S) == 0
    finally:
        episode_api.end_drawing()
    assert len(list(frame_records(frames_path(run, key, "best").read_bytes()))) == 101


def test_a_process_started_ahead_makes_no_task_of_a_module_that_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path))
    started = []
    monkeypatch.setattr(episode_api, "_process", lambda arguments: started.append(arguments))
    for name, module in (("own", None), ("foreign", "hostile")):
        monkeypatch.setattr(episode_api, "_spare", [])
        path = recorded_run(tmp_path, name, module)
        assert ask(WARM, run=name) == {"state": "warm"}
        assert started.pop() == ([] if module else [str(path)])
    assert "error" in ask(WARM, run="../own")


def test_a_process_that_has_drawn_is_no_zombie_before_the_next_one(run):
    key = kept_evaluations(run)[0]
    frames_path(run, key, "best").unlink(missing_ok=True)
    assert ask(DRAW, run="r1", evaluation=key.id, kind="best") == {"state": "drawing"}
    try:
        (process,) = episode_api._drawing.values()
        poll(lambda: not Path(f"/proc/{process.pid}").exists(), timeout_s=PATIENCE_S)
    finally:
        episode_api.end_drawing()


@pytest.mark.parametrize(("urgent_s", "times"), [(0.0, 1), (1e9, 0)])
def test_drawing_has_low_priority_after_its_first_seconds(run, monkeypatch, urgent_s, times):
    lowered = []
    monkeypatch.setattr(episode_redraw, "lower_priority", lowered.append)
    monkeypatch.setattr(episode_redraw, "_URGENT_S", urgent_s)
    key = kept_evaluations(run)[0]
    frames_path(run, key, "median").unlink(missing_ok=True)
    assert draw(run, key, "median") == ""
    assert lowered == [LOW_PRIORITY] * times


def test_pictures_come_in_bounded_pieces(run, monkeypatch):
    monkeypatch.setattr(episode_api, "_MAX_FRAME_BYTES", 5000)
    key = kept_evaluations(run)[0]
    assert draw(run, key, "median") == ""
    whole, got, done = frames_path(run, key, "median").read_bytes(), b"", False
    while not done:
        reply = ask(FRAMES, run="r1", evaluation=key.id, kind="median", **{"from": len(got)})
        assert 0 < len(reply.body) <= 5000
        got, done = got + reply.body, reply.headers["X-Done"] == "1"
    assert got == whole
    assert [step for step, _ in frame_records(got)] == list(range(0, 201, 2))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(web.missing() is not None, reason=str(web.missing()))
def test_the_newest_episode_of_a_run_without_pictures_moves_and_a_click_on_a_curve_shows_another(run, tmp_path):
    recorded_run(run.parent, "short")
    with web.server(run.parent, tmp_path / "server.log") as (address, _), web.browser() as driver:
        web.enter(driver, address, run.parent)
        driver.get(f"{address}/?run=short")
        the_newest_episode_moves(driver)
        driver.get(f"{address}/?run=r1")
        driver.execute_script("performance.setResourceTimingBufferSize(10000)")
        a_click_on_a_curve_shows_an_episode(driver, kept_evaluations(run)[0].id)


def the_newest_episode_moves(driver):
    card = "return document.querySelector('.sz-picture')?.innerText ?? ''"
    web.wait(lambda: "recorded at 0:20: median episode" in driver.execute_script(card))
    moving = "return window.__spreeze.frames"
    web.wait(lambda: driver.execute_script(moving) > 5, lambda: driver.execute_script(card))
    assert "No picture" not in driver.execute_script(card)
    pause = driver.find_element("css selector", ".sz-picture .sz-button")
    pause.click()
    assert pause.text == "Play"
    assert driver.execute_script("return window.__spreeze.errors") == []


def a_click_on_a_curve_shows_an_episode(driver, evaluation):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    player = "return window.__episode"
    drawn = "return document.querySelector('[data-chart=return]')?.__chart?.draws > 0"
    web.wait(lambda: driver.execute_script(drawn))

    def opened():  # again and again: what is above may have changed its height meanwhile
        curve = driver.find_element("css selector", "[data-chart=return] canvas")
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", curve)
        ActionChains(driver).move_to_element(curve).click().perform()
        return driver.execute_script("return document.querySelector('.sz-player')?.open")

    web.wait(opened)
    caption = "return document.querySelector('.sz-player')?.innerText"
    moving = lambda: (driver.execute_script(player) or {}).get("pictures", 0) > 3  # noqa: E731
    web.wait(moving, lambda: driver.execute_script(caption))
    shown = driver.execute_script(player)
    assert (shown["id"], shown["kind"]) == (evaluation, "worst")
    warmed = "return performance.getEntriesByType('resource').filter((one) => one.name.includes('episode/warm')).length"
    web.wait(lambda: driver.execute_script(warmed) >= 2)  # the pointer was on the curve; and for the next click
    step = "return document.querySelector('.sz-player .sz-player-left > .sz-strong').textContent"
    focus = driver.find_element("css selector", ".sz-player input[type=range]")
    focus.send_keys(Keys.HOME)
    focus.send_keys(Keys.ARROW_RIGHT)
    assert driver.execute_script(step) == "step 1 of 200", "an arrow key pauses and goes one step"
    reading = "return document.querySelector('.sz-player-strip .sz-keys .sz-strong').textContent"
    web.wait(lambda: driver.execute_script(reading) not in ("", "-"))
    press = "[...document.querySelectorAll('.sz-player button')].find(b => b.innerText.startsWith('best')).click()"
    driver.execute_script(press)
    web.wait(lambda: driver.execute_script(player)["kind"] == "best")
    assert driver.execute_script("return window.__spreeze.errors") == []


_AGENT = """
const asked = [];
const node = () => ({ style: {}, setAttribute() {}, appendChild: (one) => one, closest: () => null });
globalThis.document = { hidden: false, createElement: node };
globalThis.matchMedia = () => ({ matches: false });
globalThis.IntersectionObserver = class { observe() {} disconnect() {} };
const opened = () => {
  const card = new AgentCard(node(), { base: "", run: "r", remember() {} });
  const replay = () => { asked.push(card.live); card.replayAfter = Infinity; };
  Object.assign(card, { seen: true, asked: true, replay });
  return card;
};
const calls = (act) => { asked.length = 0; act(opened()); return [...asked]; };
console.log(JSON.stringify([
  calls((card) => { card.news(true, 0); card.news(true, 0); }),
  calls((card) => { card.news(true, 1); card.news(true, 2); }),
  calls((card) => { card.show("live"); card.news(true, 1); }),
  calls((card) => { card.show("live"); card.news(true, 1); card.news(false, 1); card.news(false, 1); }),
  calls((card) => { card.seen = false; card.news(false, 1); }),
]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_recorded_episode_is_shown_without_a_live_picture_and_once_more_when_the_run_has_ended():
    folder = Path(episode_api.__file__).parent
    script = "\n".join((folder / name).read_text() for name in ("chart.js", "film.js", "agent.js"))
    script = f"globalThis.window = {{}};\n{script}{_AGENT}"
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    nothing_yet, no_picture, live, ended, unseen = json.loads(found.stdout)
    assert (nothing_yet, no_picture, live, ended, unseen) == ([], [True], [], [False], [])
