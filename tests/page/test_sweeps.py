"""Several seeds or settings from the page: the command that it shows and starts, and how far the sweep is."""

import fcntl
import json
import sys

import pytest
from harness import poll
from test_control import SLEEPER
from test_pages import commands, open_page

pytest.importorskip("streamlit")

from spreeze.cli.sweep_runs import Sweep, SweepRun
from spreeze.config.layers import Layer, resolve, to_toml
from spreeze.dashboard import control, run_data
from spreeze.dashboard.start import SweepPlan, expected_runs, sweep_options
from spreeze.errors import ConfigError
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter
from spreeze.run_directory import launch_log

ENDED = control.Request(env_id="Pendulum-v1", auto=False, seed=4, settings={"stop.updates": 100})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A runs directory in which each sweep that a page starts is a harmless process."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    for command in ("COMMAND", "SWEEP_COMMAND"):
        monkeypatch.setattr(control, command, (sys.executable, str(script)))
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path / "runs"))
    yield tmp_path / "runs"

    def ended() -> bool:  # a signal that comes before Python hears it is lost
        launch = control.launching(tmp_path / "runs")
        if launch is not None:
            control.stop(launch.name, tmp_path / "runs")
        return launch is None

    poll(ended, what="the end of the sweep")


def test_a_sweep_has_the_settings_of_the_form_and_begins_with_its_seed():
    request = control.Request(
        env_id="Pendulum-v1", args=("g=9.0",), seed=4, settings={"stop.seconds": 60.0, "sac.hidden_sizes": (64, 64)}
    )
    plan = SweepPlan(3, ("learner.batch_size=64,256",))
    assert sweep_options(request, plan) == [
        "--env", "Pendulum-v1", "--algo", "sac", "--auto", '--set=env.args=["g=9.0"]',
        "--set=stop.seconds=60.0", "--set=sac.hidden_sizes=[64, 64]", "--set=learner.batch_size=64,256",
        "--seeds", "3", "--first-seed", "4",
    ]  # fmt: skip
    assert expected_runs(request, plan) == (
        "6 runs, one after the other, 6:00 (h:min:s) of training. Compare lists them as one sweep."
    )
    assert expected_runs(request, SweepPlan(1, ("dqn.hidden_sizes=[64,64],[128,128]",))).startswith("2 runs")
    assert not SweepPlan().several


@pytest.mark.parametrize(
    ("request_", "lines", "words"),
    [
        (control.Request(env_id="Pendulum-v1"), (), "several runs need a stop condition"),
        (ENDED, ("gamma 0.9",), "expected SECTION.FIELD=VALUE,VALUE"),
        (ENDED, ("--import=os",), "expected SECTION.FIELD=VALUE,VALUE"),
        (ENDED, ("lr=1e-3,1e-4",), "such as sac.actor_lr=1e-3,1e-4 or sac.critic_lr=1e-3,1e-4 or"),
        (ENDED, ("gamma = 0.9",), "such as sac.gamma=0.9"),
        (ENDED, ("batch_size",), "such as learner.batch_size=VALUE,VALUE"),
        (ENDED, ("dqn.gamma=0.9,0.98",), "sac does not read dqn.gamma in mode spreeze: remove its line"),
        (ENDED, ("rollout.size=64,128",), "sac does not read rollout.size"),
    ],
)
def test_a_plan_that_the_command_would_refuse_is_refused_in_words_of_the_form(request_, lines, words):
    with pytest.raises(ConfigError, match=words):
        sweep_options(request_, SweepPlan(2, lines))


def test_values_of_every_run_and_of_other_algorithms_that_are_varied_are_taken():
    assert "--set=stop.seconds=5,6" in sweep_options(ENDED, SweepPlan(1, ("stop.seconds=5,6",)))
    assert sweep_options(ENDED, SweepPlan(1, ("run.algo=sac,td3", "td3.gamma=0.9,0.98")))


def test_a_sweep_goes_with_the_task_that_it_was_meant_for(folder):
    page = open_page("live")
    page.number_input(key="start_stop.seconds").set_value(30.0).run()
    page.number_input(key="start_seeds").set_value(3).run()
    page.text_area(key="start_grid").set_value("sac.gamma=0.9,0.98").run()
    page.selectbox(key="start_env").select("CartPole-v1").run()
    assert not page.exception
    assert (page.number_input(key="start_seeds").value, page.text_area(key="start_grid").value) == (1, "")
    assert page.number_input(key="start_stop.seconds").value is None
    assert not page.button(key="start").disabled


def test_a_sweep_is_one_start_that_the_page_follows_and_ends(folder):
    name = control.start_sweep(sweep_options(ENDED, SweepPlan(2)), folder)
    poll(lambda: "up" in run_data.tail_text(launch_log(name, folder)), what="the sweep")
    runs = [SweepRun("", seed, [], f"{name}-c1-s{seed}") for seed in (4, 5)]
    runs[0].state = "failed"
    Sweep(name, None, None, 1, runs).write(folder)
    page = open_page("live")
    assert not page.exception
    (told,) = [text.value for text in page.info if "Sweep" in text.value]
    assert told.endswith("1 of 2 runs have ended, 1 of them failed.")
    page.button(key="sweep_stop").click().run()
    poll(lambda: control.launching(folder) is None, what="the end of the sweep")
    assert control.failed_start(folder) is None, "it had begun"


def test_a_comparison_of_algorithms_is_started_followed_and_ended_as_a_whole(folder, monkeypatch):
    monkeypatch.setattr("spreeze.dashboard.start.tasks", lambda: ["Pendulum-v1", "MountainCarContinuous-v0"])
    page = open_page("live")
    page.selectbox(key="start_env").select("Pendulum-v1").run()
    assert "compare" not in page.selectbox(key="start_algo").options, "its profile says the algorithm"
    page.selectbox(key="start_env").select("MountainCarContinuous-v0").run()
    page.selectbox(key="start_algo").select("compare").run()
    assert not page.exception
    assert page.selectbox(key="start_mode").options == ["spreeze"]
    assert page.toggle(key="start_auto").disabled
    (line,) = [line for line in commands(page) if "spreeze.train" in line]
    assert line.startswith("python -m spreeze.train --env MountainCarContinuous-v0 --seed 1 --auto")
    page.number_input(key="start_seeds").set_value(3).run()
    assert any("several runs need an algorithm" in text.value for text in page.warning)
    page.number_input(key="start_seeds").set_value(1).run()
    page.button(key="start").click().run()
    name = control.launching(folder).name
    assert "_compare_" in name
    poll(lambda: "up" in run_data.tail_text(launch_log(name, folder)), what="the comparison")
    candidate = folder / f"{name}-sac"
    candidate.mkdir()
    (candidate / "run.json").write_text(json.dumps({"state": "running", "pid": 1}))
    with open(candidate / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = open_page("live")
        (told,) = [text.value for text in page.info if "Comparing" in text.value]
        assert told.endswith("learns now; the best one goes on.")
        (candidate / "run.json").write_text(json.dumps({"state": "running", "pid": control.launching(folder).pid}))
        assert control.comparing(folder, candidate.name) is None, "the best one goes on"
        page.button(key="sweep_stop").click().run()
    poll(lambda: control.launching(folder) is None, what="the end of the comparison")
    assert control.failed_start(folder) is None, "it had begun"
    (candidate / "run.json").write_text(json.dumps({"state": "failed"}))
    assert control.failed_start(folder).name == name
    control.delete(candidate, folder)
    assert control.failed_start(folder) is None, "nothing is left of it"


@pytest.mark.parametrize("more", [{"profile": "pendulum"}, {"auto": False}, {"settings": {"stop.updates": 5}}])
def test_a_comparison_that_the_command_would_not_make_is_refused(more):
    with pytest.raises(ConfigError, match="compared by time"):
        control.Request(env_id="Pendulum-v1", compares=True, **more)


def test_the_form_shows_the_command_of_a_sweep(folder):
    page = open_page("live")
    page.number_input(key="start_seeds").set_value(3).run()
    assert any("need a stop condition" in text.value for text in page.warning)
    assert page.button(key="start").disabled
    page.number_input(key="start_stop.updates").set_value(1000).run()
    page.text_area(key="start_grid").set_value("sac.gamma=0.9,0.98").run()
    assert not page.exception
    (line,) = [line for line in commands(page) if "spreeze sweep" in line]
    assert "--set=stop.updates=1000 --set=sac.gamma=0.9,0.98 --seeds 3 --first-seed 1" in line
    assert any("6 runs, one after the other" in text.value for text in page.caption)


def test_compare_offers_the_seeds_that_would_tell_two_groups_apart_and_says_that_they_started(folder, monkeypatch):
    for name, batch, seed in (("a", 64, 1), ("b", 256, 2)):
        path = folder / name
        path.mkdir(parents=True)
        values = {"run": {"algo": "sac", "mode": "spreeze", "seed": seed}, "env": {"id": "Pendulum-v1"}}
        values |= {"learner": {"batch_size": batch}, "stop": {"updates": 100}}
        (path / "config.toml").write_text(to_toml(resolve([Layer("user", values)])))
        run = {"state": "finished", "env_id": "Pendulum-v1", "algo": "sac", "mode": "spreeze", "seed": seed}
        (path / "run.json").write_text(json.dumps(run))
        writer = MetricsWriter(path / "metrics.db")
        writer.evaluation(EvaluationRow(1.0, 10, 10, 1, 0, 5, -float(batch), 1.0, 10.0))
        writer.close()
    started = []
    monkeypatch.setattr(control, "start_sweep", lambda flags, folder: started.append(flags) or "more")
    page = open_page("compare")
    page.multiselect(key="compare_runs").set_value(["a", "b"]).run()
    assert not page.exception
    (line,) = [line for line in commands(page) if "--like" in line]
    assert "sweep --like a --like b --seeds 2 --first-seed 3" in line
    button = page.button(key="compare_seeds_Pendulum-v1")
    assert button.label == "Train 2 more seeds of both"
    button.click().run()
    assert [" ".join(flags) for flags in started] == ["--like a --like b --seeds 2 --first-seed 3"]
    assert [toast.value for toast in page.toast] == ["Started\\: see the Live page."]
