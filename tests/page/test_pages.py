"""Every page in every state that a run can be in: no run, live, finished, damaged, truncated, many."""

import fcntl
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import long_run
import pytest
from harness import PATIENCE_S

from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter
from spreeze.run_directory import describe, list_runs, read_about, state_of

pytest.importorskip("streamlit")
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from spreeze.dashboard import compare, control, live

PAGES = ("live", "autotune", "runs", "compare", "watch", "logs", "about")
STATES = ("no run", "live", "finished", "damaged", "truncated", "no metrics", "many", "ten million points")
USUAL_STATES = ("no run", "live", "damaged")
# A server looks once for components among all installed packages; AppTest does so for each page that it opens.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)


def script(name):
    import streamlit

    from spreeze.dashboard import navigation

    navigation.sidebar()
    navigation.load(streamlit.session_state.get("page", name))()


@functools.cache
def recorded(seconds: int) -> bytes:
    """A file of metrics of so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.db"
        writer = MetricsWriter(path)
        for second in range(seconds):
            writer.write(
                second + 0.5,
                100 * second,
                {
                    "env_steps": 100.0 * second,
                    "env_steps_per_s": 100.0 + second % 7,
                    "updates": 10.0 * second,
                    "updates_per_s": 10.0,
                    "sampler_wait_share": 0.4,
                    "cpu_core_use/0": 0.5,
                    "cpu_use": 0.5,
                    "gpu_use/0": 0.9,
                    "critic_loss": 1.0 / (1 + second),
                    "learner_wait_share": 0.0,
                },
            )
            if second % 4 == 0:
                writer.evaluation(
                    EvaluationRow(
                        second + 0.6, 100 * second, 10 * second, 1, 10 * second, 10, -1000.0 + 20 * second, 50.0, 200.0
                    )
                )
        writer.event(1.0, "info", "learner", "learning began")
        writer.close()
        return path.read_bytes()


def make_run(folder: Path, name: str, state: str = "finished", seconds: int = 40) -> Path:
    path = folder / name
    for sub in ("logs", "videos", "errors", "control"):
        (path / sub).mkdir(parents=True)
    (path / "run.json").write_text(
        json.dumps(
            {
                "state": state,
                "env_id": "Pendulum-v1",
                "algo": "sac",
                "seed": 1,
                "nonce": name,
                "sessions": 1,
                "started": f"2026-11-21T{name}",
                "wall_s": float(seconds),
                "env_steps": 100 * seconds,
                "updates": 10 * seconds,
                "eval_best": -200.0,
                "heartbeat": time.time(),
                "machine": "2 cores",
                "versions": {"numpy": "2"},
                "pid": 1,
            }
        )
    )
    (path / "config.toml").write_text(
        '[learner]\nbatch_size = 256\ndevice = "cpu"\n[sampling]\nsamplers = 1\n'
        "[replay]\nlearning_starts = 500\nsamples_per_insert_min = 8.0\n"
        "samples_per_insert_max = 512.0\n"
    )
    (path / "logs" / "learner.log").write_text("hello\x1b[31m\n")
    (path / "metrics.db").write_bytes(recorded(seconds))
    return path


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Makes a runs directory in the wanted state; holds the lock of a live run as its supervisor would."""
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path))
    held = []

    def build(state: str) -> Path:
        if state == "no run":
            return tmp_path
        if state == "ten million points":
            assert long_run.make(tmp_path / "day") > 10_000_000
            return tmp_path
        path = make_run(tmp_path, "a1", "running" if state == "live" else "finished")
        if state == "live":
            fd = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(fd, fcntl.LOCK_EX)
            held.append(fd)
        if state == "damaged":
            (path / "metrics.db").write_bytes(b"no database " * 500)
            (path / "run.json").write_text('{"state": "finished", "env_id": 3, "wall_s": "x"}')
        if state == "truncated":
            data = (path / "metrics.db").read_bytes()
            (path / "metrics.db").write_bytes(data[: len(data) // 2 + 100])
        if state == "no metrics":
            (path / "metrics.db").unlink()
        if state == "many":
            for i in range(50):
                make_run(tmp_path, f"b{i:02d}", seconds=1)
        return tmp_path

    yield build
    for fd in held:
        os.close(fd)


def open_page(name: str) -> AppTest:
    return AppTest.from_function(script, kwargs={"name": name}, default_timeout=PATIENCE_S).run()


def components(page, name):
    """What the components of that name were told."""
    found = [part.proto for part in page.get("bidi_component")]
    return [json.loads(proto.json) for proto in found if proto.component_name.endswith(name)]


def commands(page):
    return [line for told in components(page, "spreeze_commands") for line in told["lines"]]


@pytest.mark.parametrize("state", [
    state if state in USUAL_STATES else pytest.param(state, marks=pytest.mark.slow) for state in STATES
])  # fmt: skip
def test_every_page_opens_in_every_state(world, state):
    world(state)
    for name in PAGES:
        page = open_page(name)
        assert not page.exception, (name, [e.message for e in page.exception])
        if state == "no run":  # no page is empty, because the sample is there
            assert page.sidebar.selectbox[0].value == "sample run"
            assert name in ("live", "runs") or not page.info, name


@pytest.mark.parametrize(("state", "told"), [("live", True), ("finished", False)])
def test_the_page_says_that_training_continues_only_while_a_run_is_alive(world, state, told):
    world(state)
    page = open_page("live")
    assert any("the running training continues" in one.value for one in page.sidebar.caption) is told


def test_a_damaged_store_is_told_in_one_line(world):
    world("damaged")
    for name in ("logs", "compare"):
        page = open_page(name)
        told = [e.value for e in page.error] + [w.value for w in page.warning]
        assert any("metrics" in text for text in told), name


def test_compare_shows_the_three_metrics_of_the_protocol(world):
    world("finished")
    page = open_page("compare")
    page.multiselect(key="compare_runs").set_value(page.multiselect(key="compare_runs").value[:1]).run()
    (groups,), runs = group_rows(page), page.dataframe[0].value.iloc[0]
    # Ten evaluations of -1000, -920 .. -280, the last at 36.6 s.
    assert (groups["final return"], groups["return at equal time"], groups["runs"]) == ("-640", "-640", "1")
    times = "first at target", "held", "mean of 10 or end at target"
    assert [groups[title] for title in times] == ["0:21", "0:29", "0:37"]
    assert [runs[title.removesuffix(" at target")] for title in times] == ["0:21", "0:29", "0:37"]
    assert (runs["final"], runs["best"], runs["worst of 20"]) == ("-640", "-280", "-1,000")


def compared(world, **batches):
    """The Compare page of finished runs of these batch sizes, by name."""
    folder = world("no run")
    for name, batch in batches.items():
        config = make_run(folder, name) / "config.toml"
        config.write_text(config.read_text().replace("batch_size = 256", f"batch_size = {batch}"))
    page = open_page("compare")
    page.multiselect(key="compare_runs").set_value(list(batches)).run()
    assert not page.exception
    return folder, page


def group_rows(page):
    """The rows of the table of groups: title -> cell."""
    (text,) = [part.value for part in page.markdown if part.value.startswith("| ") and "final return" in part.value]
    heads, _, *rows = ([cell.replace("\\", "").strip() for cell in row.split(" | ")] for row in text.splitlines())
    titles = [head.strip("| ") for head in heads]
    return [dict(zip(titles, [cell.strip("| ") for cell in row], strict=True)) for row in rows]


def groups_of(page):
    return [[row["group"], int(row["runs"])] for row in group_rows(page)]


def test_compare_begins_without_runs_that_lost_a_comparison_of_algorithms(world):
    folder = world("no run")
    for name in ("a-sac", "a-ppo", "b"):
        make_run(folder, name)
    for name in ("a-sac", "a-ppo"):
        (folder / name / "algorithms.json").write_text(json.dumps({"algo": "sac", "run": "a-sac"}))
    told = json.loads((folder / "a-ppo" / "run.json").read_text())
    (folder / "a-ppo" / "run.json").write_text(json.dumps(told | {"algo": "ppo"}))
    names = ["b", "a-ppo", "a-sac"]
    assert compare._of_task(names, folder / "b") == ["b", "a-sac"]
    assert compare._of_task(names, folder / "a-ppo") == ["a-ppo", "b", "a-sac"]


def test_runs_of_other_settings_are_no_seeds_of_one_curve(world):
    _, page = compared(world, a=256, b=32, c=32)
    assert sorted(groups_of(page)) == [["sac - learner.batch_size=256", 1], ["sac - learner.batch_size=32", 2]]
    assert [text.value.replace("\\", "") for text in page.markdown if "were level at" in text.value] == [
        "**Pendulum-v1: sac - learner.batch_size=256 and sac - learner.batch_size=32 were level at -640 by its mean of "
        "10 evaluations, after 36.6 s. With fewer than 3 seeds each this may be chance.**"
    ]
    (line,) = page.dataframe[1].value.to_dict("records")
    assert line == {"what": "learner.batch_size", "a": "256", "b": "32", "c": "32"}


def test_compare_says_which_setting_matters_and_all_that_differs(world):
    folder, page = compared(world, a=256, b=32, c=32)
    for name, gamma in (("a", 0.9), ("b", 0.9), ("c", 0.8)):
        with (folder / name / "config.toml").open("a") as config:
            config.write(f"[sac]\ngamma = {gamma}\n")
    (folder / "c" / "run.json").write_text(
        json.dumps(json.loads((folder / "c" / "run.json").read_text()) | {"machine": "other"})
    )
    page.run()
    assert not page.exception
    effects, differences = (frame.value for frame in page.dataframe[1:])
    assert effects["setting"].tolist() == ["learner.batch_size", "sac.gamma"]
    assert effects["explains"].tolist() == ["0 %", "0 %"], "all of them have the same returns"
    assert effects["value: return (runs)"][1].startswith("0.8: ")
    assert differences["what"].tolist() == ["learner.batch_size", "sac.gamma", "machine"]
    coordinates = json.loads(page.get("plotly_chart")[1].proto.spec)["data"][0]["dimensions"]
    assert [axis["label"] for axis in coordinates] == ["learner.batch_size", "sac.gamma", "return at equal time"]
    assert coordinates[0]["ticktext"] == ["32", "256"], "by size, not by letter"


def test_tuned_runs_are_compared_with_fixed_ones_and_each_run_by_itself(world):
    folder, page = compared(world, a=256, b=32, c=32)
    (folder / "a" / "tune.json").write_text('{"choice": {"learner.batch_size": 256}}')
    page.session_state["compare_group"] = "tuned or fixed"
    page.run()
    assert sorted(groups_of(page)) == [["sac - fixed", 2], ["sac - tuned", 1]]
    page.session_state["compare_group"] = "run"
    page.run()
    assert sorted(groups_of(page)) == [["sac - a", 1], ["sac - b", 1], ["sac - c", 1]]


def test_a_run_whose_tuner_chose_nothing_is_neither_tuned_nor_fixed(world):
    folder, page = compared(world, a=256, b=256, c=256)
    told = json.loads((folder / "a" / "run.json").read_text())
    (folder / "a" / "run.json").write_text(json.dumps(told | {"command": ["spreeze.train", "--auto"]}))
    (folder / "b" / "tune.json").write_text('{"choice": {"learner.batch_size": 256}, "fell_back": true}')
    page.session_state["compare_group"] = "tuned or fixed"
    page.run()
    assert sorted(groups_of(page)) == [["sac - fixed", 1], ["sac - tuner without a choice", 2]]


def test_the_recording_gives_way_on_compare_to_the_first_own_run(world):
    folder = world("no run")
    page = open_page("compare")
    assert page.multiselect(key="compare_runs").value == ["sample run"]
    make_run(folder, "a1")
    page.run()
    assert page.multiselect(key="compare_runs").value == ["a1"]
    page.multiselect(key="compare_runs").set_value(["sample run"]).run()
    assert page.multiselect(key="compare_runs").value == ["sample run"], "unless it is chosen"


def swept(folder):
    """Two runs of a sweep over the discount, and its file."""
    runs = []
    for i, gamma in enumerate((0.9, 0.98), 1):
        with (make_run(folder, f"s-c{i}-s1") / "config.toml").open("a") as config:
            config.write(f"[sac]\ngamma = {gamma}\n")
        runs.append({"setting": f"sac.gamma={gamma}", "stem": f"s-c{i}-s1", "attempts": 1, "seed": 1})
    (folder / "s.sweep.json").write_text(json.dumps({"finished": [run["stem"] for run in runs], "runs": runs}))


def test_runs_of_a_sweep_are_known_by_what_it_varied(world):
    folder = world("no run")
    swept(folder)
    page = open_page("runs")
    assert page.dataframe[0].value["run"].tolist() == ["\u25b8 gamma=0.98", "gamma=0.9"]
    labels = page.sidebar.selectbox[0].options[:2]
    assert labels == [f"Pendulum-v1 sac gamma={gamma} s1, 11-21 s-c{i}-" for i, gamma in ((2, 0.98), (1, 0.9))]
    page = open_page("compare")
    table = page.dataframe[0].value
    assert table["run"].tolist() == ["gamma=0.9 s1", "gamma=0.98 s1"]
    assert table["group"].tolist() == ["sac.gamma=0.9", "sac.gamma=0.98"]
    (line,) = page.dataframe[1].value.to_dict("records")
    assert line == {"what": "sac.gamma", "gamma=0.9 s1": "0.9", "gamma=0.98 s1": "0.98"}


def test_any_metric_is_compared_over_any_axis(world):
    _, page = compared(world, a=256, b=32)
    metrics = next(box for box in page.selectbox if box.label == "Metric")
    assert {"greedy return", "updates_per_s", "critic_loss"} <= set(metrics.options)
    for axis in ("wall time [s]", "env steps", "updates"):
        metrics.select("critic_loss")
        next(box for box in page.selectbox if box.label == "Horizontal axis").select(axis).run()
        assert not page.exception
        (chart,) = page.get("plotly_chart")
        lines = [trace for trace in json.loads(chart.proto.spec)["data"] if trace.get("name")]
        assert len(lines) == 2
        assert all(len(line["x"]) for line in lines)
    metrics.select("all metrics").run()
    assert not page.exception
    (chart,) = page.get("plotly_chart")
    drawn = json.loads(chart.proto.spec)
    assert len(drawn["layout"]["annotations"]) == len(metrics.options) - 1, "a chart for each metric"
    shown = [trace["name"] for trace in drawn["data"] if trace.get("name") and trace.get("showlegend")]
    assert len(shown) == 2, "each group once in the legend"


def test_a_run_with_a_title_is_still_found_by_its_task(world):
    folder = world("no run")
    for name in "ab":
        make_run(folder, name)
    describe(folder / "a", title="walks best", tags=[], note="")
    page = open_page("compare")
    assert page.sidebar.selectbox[0].options[1].startswith("walks best, ")
    assert " sac s" in page.sidebar.selectbox[0].options[1]
    assert "walks best (a)" in page.multiselect(key="compare_runs").options
    page.multiselect(key="compare_runs").set_value(["walks best (a)", "b"]).run()
    assert any("walks best" in list(table.value.get("run", [])) for table in page.dataframe)


def test_a_sweep_is_one_choice_and_stands_for_its_finished_runs(world):
    folder, page = compared(world, a=256, b=32, c=32)
    (folder / "batches.sweep.json").write_text(json.dumps({"finished": ["a", "b", "gone"], "runs": []}))
    page.run()
    box = page.multiselect(key="compare_runs")
    assert box.options[:2] == ["sweep batches", "c"]
    box.set_value(["sweep batches"]).run()
    assert not page.exception
    assert sorted(groups_of(page)) == [["sac - learner.batch_size=256", 1], ["sac - learner.batch_size=32", 1]]
    assert not page.warning
    assert any(one.value == r"Left out, because they were deleted\: gone" for one in page.caption)
    (folder / "batches.sweep.json").write_text("damaged")
    page.run()
    assert not page.exception


def test_the_runs_of_a_sweep_are_parted_by_what_it_varies_and_compared_by_its_own_centre(world):
    folder, page = compared(world, a=256, b=256)
    for name, seconds in (("a", 300), ("b", 600)):
        with (folder / name / "config.toml").open("a") as config:
            config.write(f"[stop]\nseconds = {seconds}\n")
    names = {"finished": ["a", "b"], "runs": [{"setting": f"stop.seconds={seconds}"} for seconds in (300, 600)]}
    (folder / "s.sweep.json").write_text(json.dumps(names))
    page.run()
    assert groups_of(page) == [["sac -", 2]], "how long it goes on makes no other experiment of a run"
    assert not [one for one in page.caption if "--by" in one.value]
    page.multiselect(key="compare_runs").set_value(["sweep s"]).run()
    assert page.selectbox(key="compare_centre").value == "mean", "a choice of runs does not change it"
    assert any("Each curve is the mean over the runs" in one.value for one in page.caption)
    page = open_page("compare")
    assert page.multiselect(key="compare_runs").value == ["sweep s"]
    assert groups_of(page) == [["sac - stop.seconds=300", 1], ["sac - stop.seconds=600", 1]]
    assert page.selectbox(key="compare_centre").value == "interquartile mean"
    assert any("Each curve is the interquartile mean over the runs" in one.value for one in page.caption)
    command = "evaluate --protocol hts RUN ... --centre iqm --by stop.seconds`"
    assert [one for one in page.caption if command in one.value]
    page.selectbox(key="compare_centre").set_value("mean").run()
    page.segmented_control(key="compare_group").set_value("run").run()
    assert page.selectbox(key="compare_centre").value == "mean", "the user's own choice stays"


def test_a_sweep_of_more_runs_than_a_report_takes_says_so_instead_of_failing(world, monkeypatch):
    monkeypatch.setattr("spreeze.dashboard.compare.MAX_RUNS", 2)
    folder, page = compared(world, a=256, b=32, c=32)
    (folder / "batches.sweep.json").write_text(json.dumps({"finished": ["a", "b", "c"], "runs": []}))
    page.run()
    for chosen, crowded in (["sweep batches"], True), (["c"], False):
        page.multiselect(key="compare_runs").set_value(chosen).run()
        assert not page.exception
        (button,) = page.get("download_button")
        assert button.proto.disabled is crowded
        assert ("not 3: remove some" in button.proto.help) is crowded


def test_a_click_on_report_says_where_it_goes(world, monkeypatch):
    import streamlit as st

    asked, told = {}, []
    monkeypatch.setattr(st, "download_button", lambda *names, **more: asked.update(more))
    monkeypatch.setattr(st, "toast", told.append)
    _, page = compared(world, a=256, b=32)
    page.run()
    assert not page.exception
    asked["on_click"]()
    assert "downloads of your browser" in told[0]


def test_a_report_that_cannot_be_made_holds_the_reason(world):
    from spreeze.dashboard import control

    path = world("damaged") / "a1"
    assert "cannot be read" in control.report_html([path])
    assert "from 1 to 60 fit" in control.report_html([path] * 61)


def test_each_task_has_a_target_of_its_own(world):
    folder, page = compared(world, a=256, b=256)
    run = json.loads((folder / "b" / "run.json").read_text()) | {"env_id": "CartPole-v1"}
    (folder / "b" / "run.json").write_text(json.dumps(run))
    page.run()
    assert [box.label for box in page.number_input] == ["Target return of Pendulum-v1", "Target return of CartPole-v1"]
    page.number_input[0].set_value(-300.0)
    page.number_input[1].set_value(0.0).run()
    times = {row["task"]: row["held"] for row in group_rows(page)}
    assert times == {"Pendulum-v1": "- (0 of 1)", "CartPole-v1": "- (0 of 1)"}


def test_a_run_that_is_not_there_is_said_and_no_other_is_shown_in_its_place(world):
    world("finished")
    page = AppTest.from_function(script, kwargs={"name": "live"}, default_timeout=PATIENCE_S)
    page.query_params["run"] = "gone"
    page.run()
    assert not page.exception
    assert "no run gone here" in page.sidebar.warning[0].value
    assert not components(page, "spreeze_live")
    page.session_state["page"] = "autotune"
    page.run()
    assert [info.value for info in page.info] == ["Choose a run in the sidebar."]


def test_the_sidebar_tells_the_state_again_once_the_page_is_drawn(world):
    folder = world("live")

    def drawn_while_a_run_is_paused():
        import json

        from spreeze.dashboard import navigation, run_data

        tell_again = navigation.sidebar()
        state = run_data.runs_dir() / "a1" / "run.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"state": "paused"}))
        tell_again()

    page = AppTest.from_function(drawn_while_a_run_is_paused, default_timeout=PATIENCE_S).run()
    assert not page.exception
    (told,) = page.sidebar.markdown
    assert "paused" in told.value
    assert state_of(folder / "a1") == "paused"


def test_an_empty_machine_is_offered_a_first_run_and_another_is_not(world, monkeypatch):
    from spreeze.dashboard import control

    folder, started = world("no run"), []
    monkeypatch.setattr(control, "start", lambda request, folder: started.append(request))
    page = open_page("live")
    assert "tunes itself" in page.markdown[0].value
    page.button(key="first").click().run()
    assert [request.env_id for request in started] == ["Pendulum-v1"]
    make_run(folder, "a1")
    assert "first" not in [button.key for button in open_page("live").button]


def test_the_form_is_shown_beside_an_ended_run_only_once_it_is_asked_for(world):
    world("finished")
    page = open_page("live")
    assert "start" not in [button.key for button in page.button]
    page.button(key="new_run").click().run()
    assert "start" in [button.key for button in page.button]
    page.button(key="new_run").click().run()
    assert "start" not in [button.key for button in page.button]


def test_start_gives_way_to_stop_while_a_run_is_alive(world):
    world("live")
    keys = [button.key for button in open_page("live").button]
    assert "stop" in keys
    assert "start" not in keys
    world("no run")


def test_a_run_that_is_tuned_shows_what_is_measured_on_both_pages_and_no_empty_chart(world):
    folder = world("live")
    run = json.loads((folder / "a1" / "run.json").read_text())
    (folder / "a1" / "run.json").write_text(
        json.dumps(run | {"state": "tuning", "tuning_began": time.time() - 20.0, "machine": "2 usable cores of a test"})
    )
    measured = {"stage": "learner", "setting": {"learner.batch_size": 64, "learner.threads": 1},
                "updates_per_s": [90.0, 100.0, 120.0]}  # fmt: skip
    (folder / "a1" / "tune-progress.jsonl").write_text(json.dumps(measured) + "\n")
    for name in ("live", "autotune"):
        page = open_page(name)
        assert not page.exception
        assert page.title[0].value == "Starting a1"
        assert any("2 usable cores of a test" in caption.value for caption in page.caption)
        assert any(caption.value.startswith("Training waits for it") for caption in page.caption)
        assert page.dataframe[0].value["updates/s"].tolist() == ["100"]
        assert not components(page, "spreeze_live")
    assert [button.key for button in open_page("live").button][:1] == ["stop"]
    (folder / "a1" / "run.json").write_text(json.dumps(run))
    assert components(open_page("live"), "spreeze_live")


def test_stop_asks_the_run_by_its_control_file(world):
    folder = world("live")
    page = open_page("live")
    page.button(key="stop").click().run()
    assert (folder / "a1" / "control" / "stop").exists()
    assert page.button(key="stop").disabled
    assert page.button(key="stop").label == "Stopping"


def test_a_live_run_is_paused_evaluated_saved_and_told_what_to_leave_free(world):
    folder = world("live")
    control, state = folder / "a1" / "control", json.loads((folder / "a1" / "run.json").read_text())
    (folder / "a1" / "run.json").write_text(json.dumps(state | {"leave_free": 0.25}))
    page = open_page("live")
    for what in ("evaluate", "checkpoint", "pause"):
        page.button(key=f"steer_{what}").click().run()
        assert (control / what).exists()
    assert not page.toast, "the button itself tells"
    page.button(key="steer_evaluate").click().run()
    assert page.toast[0].value == "Evaluate now is requested, soon the return gets a point."
    assert page.slider[0].value == 25
    page.slider[0].set_value(50).run()
    assert (control / "leave-free").read_text() == "0.5"
    assert page.slider[0].value == 50
    assert any("leave-free a1 0.5" in line for line in commands(page))
    (folder / "a1" / "run.json").write_text(json.dumps(state | {"state": "paused", "leave_free": 0.5}))
    page = open_page("live")
    assert page.button(key="steer_evaluate").disabled
    assert page.button(key="steer_continue").help.startswith("Lets all processes go on")
    page.button(key="steer_continue").click().run()
    assert not (control / "pause").exists()
    for name in ("evaluate", "checkpoint", "leave-free"):
        (control / name).unlink()
    (folder / "a1" / "run.json").write_text(json.dumps(state))


def test_buttons_act_on_the_live_run_that_is_shown_and_name_it_where_another_run_is_shown(world):
    folder = world("live")
    for name in ("a0", "b1"):
        make_run(folder, name, "running")
    with (folder / "b1" / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = open_page("live")
        page.session_state["run"] = "a1"  # alive too, but begun before
        page.run()
        assert not any("For the running" in text.value for text in page.markdown)
        page.button(key="steer_evaluate").click().run()
        assert (folder / "a1" / "control" / "evaluate").exists()
        page.session_state["run"] = "a0"  # nobody holds its lock
        page.run()
        assert any("For the running **b1**" in text.value for text in page.markdown)
        page.button(key="stop").click().run()
    assert (folder / "b1" / "control" / "stop").exists()
    assert not (folder / "a1" / "control" / "stop").exists()


def test_a_run_that_is_shown_while_it_starts_is_drawn_though_a_newer_one_runs(world):
    folder = world("live")
    state = json.loads((folder / "a1" / "run.json").read_text())
    (folder / "a1" / "run.json").write_text(json.dumps(state | {"state": "tuning"}))
    make_run(folder, "b1", "running")
    with (folder / "b1" / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = open_page("live")
        page.session_state["run"] = "a1"
        page.run()
        assert not page.exception
        assert any("Starting" in text.value for text in page.title)


def test_a_run_that_is_chosen_stays_shown_while_another_one_starts(world):
    folder = world("live")
    state = json.loads((folder / "a1" / "run.json").read_text())
    (folder / "a1" / "run.json").write_text(json.dumps(state | {"state": "tuning"}))
    make_run(folder, "a0")
    for name, title in (("autotune", "Autotune of "), ("live", "Pendulum-v1")):
        page = open_page(name)
        assert page.title[0].value == "Starting a1", "the newest live run is shown where none was chosen"
        page.session_state["run"] = "a0"
        page.run()
        assert not page.exception
        assert page.title[0].value.startswith(title)
    assert any("For the starting **a1**" in text.value for text in page.markdown)
    page.session_state["follow"] = True  # as Start leaves it
    page.run()
    assert page.title[0].value == "Starting a1"
    assert "follow" not in page.session_state


@pytest.mark.parametrize("picked", [True, False])
def test_the_page_goes_on_to_the_next_run_of_a_sweep_unless_the_user_picked_the_run_that_ended(
    world, monkeypatch, picked
):
    folder = world("live")
    state = json.loads((folder / "a1" / "run.json").read_text())
    monkeypatch.setattr(control, "launching", lambda folder: control.Launch("a2", os.getpid(), folder / "a2.log"))
    page = AppTest.from_function(script, kwargs={"name": "live"}, default_timeout=PATIENCE_S)
    if picked:
        page.query_params["run"] = "a1"
    page.run()
    (folder / "a1" / "run.json").write_text(json.dumps(state | {"state": "finished"}))
    monkeypatch.setattr(live, "LIVE_STATES", ())
    page.run()
    assert not page.exception
    assert ("follow" in page.session_state) is not picked


def test_a_folder_whose_name_no_run_may_have_troubles_no_page(world):
    folder = world("finished")
    (folder / "a1").rename(folder / "a1 (copy)")
    make_run(folder, "a2")
    for name in ("live", "compare"):
        page = open_page(name)
        assert not page.exception, name
    assert open_page("runs").dataframe[0].value["run"].tolist() == ["\u25b8 a2"]


def test_what_is_left_free_is_shown_as_another_program_has_set_it(world):
    folder = world("live")
    state = json.loads((folder / "a1" / "run.json").read_text())
    (folder / "a1" / "run.json").write_text(json.dumps(state | {"leave_free": 0.25}))
    page = open_page("live")
    page.slider[0].set_value(50).run()
    for share, shown in ((0.5, 50), (0.1, 10)):
        (folder / "a1" / "run.json").write_text(json.dumps(state | {"leave_free": share}))
        page.run()
        assert page.slider[0].value == shown


def test_a_run_is_given_a_title_tags_and_a_note_that_lists_show(world):
    folder = world("ended")
    page = open_page("runs")
    for label, text in (("Title", "the *first*"), ("Tags", "walker, long")):
        next(box for box in page.text_input if box.label == label).set_value(text)
    page.text_area[0].set_value("two\nlines")
    next(button for button in page.button if button.label == "Save").click().run()
    assert not page.exception
    assert "\u25b8 the *first*" in page.dataframe[0].value["run"].tolist()
    assert ["walker", "long"] in [list(tags) for tags in page.dataframe[0].value["tags"]]
    assert any(text.value == "two\nlines" for text in page.text)
    (about,) = folder.glob("*/about.json")
    about.unlink()


def test_several_runs_are_tagged_compared_and_deleted_at_once(world):
    folder = world("finished")
    for name in ("a2", "a3"):
        make_run(folder, name)
    make_run(folder, "b", "running")
    with (folder / "b" / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = open_page("runs")
        page.multiselect(key="runs_picked").set_value(["a2", "b"]).run()
        assert not [button for button in page.button if button.key == "runs_delete" and not button.disabled]
    page.multiselect(key="runs_picked").set_value(["a2", "a3"]).run()
    page.text_input(key="runs_tags").set_value("good, fast").run()
    page.button(key="runs_tag").click().run()
    assert not page.exception
    assert [read_about(folder / name).tags for name in ("a1", "a2", "a3")] == [(), ("good", "fast"), ("good", "fast")]
    page.text_input(key="runs_sure").set_value("delete 2").run()
    page.button(key="runs_delete").click().run()
    assert not page.exception
    assert [path.name for path in list_runs(folder)] == ["a1", "b"]
    assert page.multiselect(key="runs_picked").value == []


def test_the_list_of_runs_has_curves_reasons_and_marks_the_one_that_is_shown(world):
    folder = world("finished")
    make_run(folder, "a2")
    for name, reason in (("a1", "target_return"), ("a2", "stop request")):
        state = folder / name / "run.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"exit_reason": reason}))
    page = open_page("runs")
    page.session_state["run"] = "a1"
    page.run()
    table = page.dataframe[0].value
    assert table["run"].tolist() == ["a2", "\u25b8 a1"]
    assert [len(returns) > 1 for returns in table["returns"]] == [True, True]
    assert table["ended by"].tolist() == ["stop", "target"]
    assert "end mean" in table.columns, "the last ten evaluations, or fewer: its name promises no ten"
    before = page.dataframe[0].proto.id
    assert page.run().dataframe[0].proto.id == before
    make_run(folder, "a3")
    assert page.run().dataframe[0].proto.id != before, "its ticks would be on other runs"


def test_a_policy_can_be_downloaded_where_there_is_one_and_the_reason_is_shown_where_not(world):
    folder = world("finished")
    page = open_page("runs")
    assert any("This run has no weights" in text.value for text in page.caption)
    (folder / "a1" / "weights").mkdir()
    (folder / "a1" / "weights" / "w-000001-000000000005.safetensors").touch()
    page = open_page("runs")
    assert not any("This run has no weights" in text.value for text in page.caption)
    page.selectbox(key="export_format_a1").select("numpy").run()
    assert not page.exception
    assert any(f"spreeze export a1 --runs-dir {folder} --format numpy" in line for line in commands(page))


def test_the_command_line_of_the_start_button_follows_the_choices(world):
    world("no run")
    page = open_page("live")
    page.selectbox(key="start_env").select("Pendulum-v1")
    page.selectbox(key="start_algo").select("td3")
    page.run()
    shown = "python -m spreeze.train --env Pendulum-v1 --algo td3 --seed 1 --auto"
    assert any(line.startswith(shown) for line in commands(page))


def test_the_live_component_gets_no_number_that_changes_each_second(world):
    world("finished")
    (told,) = components(open_page("live"), "spreeze_live")
    assert told["run"] == "a1"
    assert not {"since", "text", "now"} & set(told)


def test_a_run_without_clips_names_its_recorded_episodes_and_the_list_leaves_the_date_out_of_its_name(world):
    folder = world("no run")
    run = make_run(folder, "20261121-120000_Pendulum-v1_sac_s1")
    assert "recorded episodes" not in open_page("watch").info[0].value
    (run / "episodes").mkdir()
    (run / "episodes" / "e20000-2000-200-0.npz").touch()
    assert "The button above shows recorded episodes" in open_page("watch").info[0].value
    assert open_page("runs").dataframe[0].value["run"].tolist() == ["\u25b8 Pendulum-v1_sac_s1"]


def test_delete_needs_the_name_typed(world):
    folder = world("finished")
    page = open_page("runs")
    delete = next(b for b in page.button if b.label == "Delete permanently")
    assert delete.disabled
    page.text_input(key="sure_a1").input("a1").run()
    next(b for b in page.button if b.label == "Delete permanently").click().run()
    assert not (folder / "a1").exists()
    assert page.toast[0].value == "a1 was deleted."
    assert not page.sidebar.warning, "the user knows"


@pytest.mark.parametrize("name", ["live", "runs", "compare"])
def test_a_run_of_a_newer_version_is_left_out_and_breaks_no_page(world, name):
    newer = make_run(world("finished"), "newer", seconds=1)
    (newer / "run.json").write_text(json.dumps(json.loads((newer / "run.json").read_text()) | {"format": 99}))
    page = open_page(name)
    assert not page.exception
    assert "a1" in str(page.sidebar.selectbox[0].options)
    assert "newer" not in str(page.sidebar.selectbox[0].options)


def test_pages_import_no_torch_and_no_environment_library():
    import subprocess

    names = "('torch', 'gymnasium', 'pybullet')"
    code = f"import spreeze.dashboard.navigation, sys; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_what_is_pinned_on_the_autotune_page_is_what_the_next_start_uses(world):
    world("no run")
    page = open_page("live")  # the form has been drawn before, with an empty field
    page.session_state["page"] = "autotune"
    page.run()
    page.number_input(key="pin_learner.batch_size").set_value(512).run()
    page.button(key="pin").click().run()
    page.session_state["page"] = "live"
    page.run()
    assert page.number_input(key="start_learner.batch_size").value == 512
    assert any("--batch-size=512" in line for line in commands(page))
    page.session_state["page"] = "autotune"
    page.run()
    assert page.number_input(key="pin_learner.batch_size").value == 512


TUNED = {
    "labels": {"sampling.samplers": "samplers", "replay.samples_per_insert_min": "samples/insert"},
    "objective": "return",
    "formula": "U * B",
    "measured_at": "2026-11-21 12:00",
    "seconds": 30.0,
    "choice": {
        "learner.batch_size": 256,
        "learner.threads": 1,
        "sampling.samplers": 2,
        "replay.samples_per_insert_min": 8.0,
        "learner.device": "cpu",
    },
    "reasons": {"learner.batch_size": "best ![x](http://evil/y) of | all"},
    "notes": ["checked"],
    "limits": [],
    "cost_a_s": 0.002,
    "cost_b_s_per_row": 1e-12,
    "paper_batch_size": 2**34,
    "update_rates": [
        {
            "stage": "learner",
            "setting": {"learner.batch_size": b, "learner.threads": 1},
            "updates_per_s": [r],
            "failure": None,
        }
        for b, r in ((128, 90.0), (256, 80.0))
    ],
    "joint_rates": [
        {
            "stage": "joint",
            "setting": {
                "learner.batch_size": 256,
                "learner.threads": 1,
                "sampling.samplers": n,
                "sampling.envs_per_sampler": 8,
                "replay.samples_per_insert_min": m,
            },
            "env_steps_per_s": r,
            "updates_per_s": r,
            "failure": f,
        }
        for n, m, r, f in ((1, 8.0, [10.0], None), (2, 8.0, [20.0], None), (2, 0.0, [], "took no step"))
    ],
}


def test_the_autotune_page_shows_rows_the_choice_and_its_reasons(world):
    folder = world("finished")
    (folder / "a1" / "tune.json").write_text(json.dumps(TUNED))
    page = open_page("autotune")
    assert not page.exception
    assert [metric.value for metric in page.metric] == ["256", "1", "2"]
    updates, joint = (table.value for table in page.dataframe[:2])
    assert updates["note"].tolist() == ["", "chosen"]
    assert joint["note"].tolist() == ["", "chosen", "took no step"]
    assert joint["env steps/s"].tolist() == ["10", "20", "-"]
    assert len(page.get("plotly_chart")) == 2
    told = "\n".join(block.value for block in page.markdown)
    assert "best" in told
    assert "![x]" not in told
    assert "far beyond what was measured" in page.caption[0].value


def test_settings_are_drawn_by_their_score_and_by_that_of_another_objective():
    from spreeze.dashboard import autotune
    from spreeze.metrics.tuning_record import of_record

    tuning = of_record(TUNED)
    bars = autotune.score_figure(tuning, tuning.of("joint"), "return").data[0]
    ticks = autotune.score_figure(tuning, tuning.of("joint"), "return").layout.yaxis.ticktext
    assert list(bars.x) == pytest.approx([u * 256 / 352 * u / (u + u / 2) for u in (10.0, 20.0)])
    assert ticks == ("1 sampler", "<b>2 samplers</b>")
    assert bars.marker.color == ("#0072B2", "#D55E00")
    assert list(autotune.score_figure(tuning, tuning.of("joint"), "sampling").data[0].x) == [10.0, 20.0]


def test_an_algorithm_is_called_the_best_only_where_candidates_were_evaluated(world):
    folder, candidates = world("finished"), [{"algo": "sac", "return_mean": None}, {"algo": "ppo", "return_mean": 1.0}]
    for found, words in ((candidates, "the best of those"), (candidates[:1], "none was evaluated")):
        (folder / "a1" / "algorithms.json").write_text(json.dumps({"algo": "sac", "candidates": found}))
        assert any(words in text.value for text in open_page("autotune").markdown)


def test_a_provisional_result_says_so_before_all_else_and_one_without_rows_is_shown_with_its_reason(world):
    folder = world("finished")
    why = "other programs used 1.9 of 2 cores meanwhile"
    note = "provisional: used now"
    told = {"provisional": {"load": why, "rows": "nothing <b>could</b> be measured"}, "notes": [why, note]}
    (folder / "a1" / "tune.json").write_text(json.dumps(TUNED | told))
    page = open_page("autotune")
    assert why in page.warning[0].value.replace("\\", "")
    assert "<b>" not in page.warning[0].value.replace("\\<", "")
    assert note in "\n".join(block.value for block in page.markdown).replace("\\", "")
    bare = {**TUNED, **told, "update_rates": [], "joint_rates": []}
    (folder / "a1" / "tune.json").write_text(json.dumps(bare))
    page = open_page("autotune")
    assert not page.exception
    assert why in page.warning[0].value.replace("\\", "")
    assert [metric.value for metric in page.metric] == ["256", "1", "2"]
    assert not any("was not tuned" in info.value for info in page.info)


@pytest.mark.parametrize("odd", [None, 3, "load", ["load"], {"load": 3}, {"load": None}], ids=str)
def test_an_odd_word_on_how_far_a_result_holds_takes_no_page_down(world, odd):
    folder = world("finished")
    (folder / "a1" / "tune.json").write_text(json.dumps(TUNED | {"provisional": odd}))
    page = open_page("autotune")
    assert not page.exception
    assert not page.warning


def test_what_comes_from_the_cache_is_measured_again_after_a_click(world):
    folder = world("finished")
    (folder / "a1" / "tune.json").write_text(json.dumps(TUNED | {"reused": True}))
    page = open_page("autotune")
    assert "From the cache; measured at 2026-11-21 12:00" in page.info[0].value.replace("\\", "")
    told = "\n".join(caption.value for caption in open_page("live").caption).replace("\\", "")
    assert "settings from Autotune's cache, measured 2026-11-21 12:00" in told
    page.button(key="measure_again").click().run()
    page.session_state["page"] = "live"
    page.run()
    page.button(key="new_run").click().run()
    assert not page.exception
    assert any("--auto --fresh" in line for line in commands(page))


def test_autotune_shows_samplers_and_inference_workers_of_an_on_policy_run(world):
    folder = world("finished")
    setting = {
        "rollout.samplers": 2,
        "rollout.envs_per_sampler": 8,
        "rollout.inference_workers": 1,
        "rollout.sync_interval": 64,
    }
    rate = {
        "stage": "rollout",
        "setting": {**setting, "ppo.minibatches": 4},
        "env_steps_per_s": [900.0, 1000.0],
        "cpu_share": [0.5],
        "failure": None,
    }
    run = json.loads((folder / "a1" / "run.json").read_text()) | {"algo": "ppo", "mode": "hts"}
    (folder / "a1" / "run.json").write_text(json.dumps(run))
    (folder / "a1" / "tune.json").write_text(
        json.dumps(
            {
                "rollout_rates": [rate],
                "update_rates": [],
                "joint_rates": [],
                "objective": "rollout",
                "formula": "a rate",
                "choice": setting,
                "reasons": {"rollout.samplers": "best"},
            }
        )
    )
    page = open_page("autotune")
    assert not page.exception
    shown = page.dataframe[0].value.iloc[0]
    assert (shown["samplers"], shown["env steps/s"], shown["note"]) == ("2", "950", "chosen")
    assert [metric.value for metric in page.metric] == ["2", "8", "1", "64"]
    assert "pin" in [button.key for button in page.button]
    assert page.number_input(key="pin_rollout.sync_interval").placeholder == "automatic: 64"


def test_a_run_that_leads_out_of_its_directory_is_not_resumed_by_a_click(world):
    folder = world("finished")
    outside = folder / "outside"
    (folder / "a1" / "logs").rename(outside)
    (folder / "a1" / "logs").symlink_to(outside)
    page = open_page("runs")
    next(button for button in page.button if button.label == "Resume").click()
    page.run()
    assert "logs is a symbolic link" in page.error[0].value
    assert [entry.name for entry in outside.iterdir()] == ["learner.log"]
    assert not list((folder / ".launches").glob("*.log"))


def test_a_run_that_has_ended_is_resumed_from_the_live_page(world, monkeypatch):
    folder = world("finished")
    resumed = []
    monkeypatch.setattr(control, "resume", lambda path, runs_dir: resumed.append((path.name, runs_dir)))
    page = open_page("live")
    page.button(key="live_resume").click()
    page.run()
    assert not page.exception
    assert resumed == [("a1", folder)]
