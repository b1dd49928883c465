"""``train --auto`` on a machine where nothing is known: the run trains at once, and is tuned meanwhile."""

import json
import os
import signal

import pytest
from harness import HIDDEN_SIZES, PENDULUM, NoView, Run, poll
from hts_runs import SYNTHETIC

from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import probe_env
from spreeze.files import read_json
from spreeze.metrics.store import MetricsReader
from spreeze.modes import run_mode
from spreeze.run_directory import RunDir, read_config
from spreeze.runtime import supervisor
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan, TunerChoice

TUNED = (
    "--auto", "--envs-per-sampler", "4", "--replay-capacity", "20000", "--set", f"sac.hidden_sizes={HIDDEN_SIZES}",
    "--set", "evaluation.episodes=2", "--set", "tuning.budget_s=5", "--no-visualizer",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("nothing_known")


def _rows(run):
    progress = run.path / "tune-progress.jsonl"
    return progress.is_file() and '"stage"' in progress.read_text()


def _batch_size(run):
    """Rows of each update in the last seconds."""
    numbers = run.numbers()
    return round((numbers.get("update_frames_per_s") or 0.0) / (numbers.get("updates_per_s") or 1.0))


def _records(tmp_path):
    return list((tmp_path / "spreeze").glob("tune-*.json"))


def test_a_run_trains_before_it_is_tuned_and_goes_on_with_the_choice_which_the_next_start_knows(tmp_path):
    with Run(tmp_path, *PENDULUM, tiny=TUNED) as run:
        run.wait_for(lambda: run.numbers().get("updates", 0) > 100, what="updates")
        assert not (run.path / "tune.json").exists(), "it trains before anything is chosen"
        learner = run.children()["learner"]
        run.wait_for(lambda: (run.path / "tune.json").exists(), what="the choice")
        assert run.children()["learner"] == learner, "the same process learns on"
        record, before = read_json(run.path / "tune.json"), run.numbers()["updates"]
        choice = record["choice"]
        run.wait_for(lambda: run.numbers()["updates"] > before + 50, what="further updates")
        run.wait_for(lambda: _batch_size(run) == choice["learner.batch_size"], what="its batch size")
        run.wait_for(lambda: run.numbers()["samplers_active"] <= choice["sampling.samplers"], what="its samplers")
        code, document = run.stop()
    assert (code, document["restarts"]) == (0, 0)
    assert (document["batch_size"], document["samplers"]) == (
        choice["learner.batch_size"], choice["sampling.samplers"])  # fmt: skip
    config = read_config(run.path)
    assert config["learner"]["threads"] == choice["learner.threads"]
    assert config["sampling"]["samplers"] == choice["sampling.samplers"]
    assert set(record["reasons"]) == set(choice)
    assert any("tuned in" in event for event in run.events())
    assert len(_records(tmp_path)) == 1
    with Run(tmp_path, *PENDULUM, tiny=TUNED, name="again") as again:
        again.wait_for(lambda: again.numbers().get("updates", 0) > 0, what="updates")
        if "reused" in again.stderr:  # else other programs have come or gone since
            assert read_json(again.path / "tune.json")["choice"] == json.loads(json.dumps(choice))
            assert len([name for name in again.children() if name.startswith("sampler")]) == choice["sampling.samplers"]
        else:
            assert "measuring again because" in again.stderr
        again.stop()


def test_a_learner_killed_while_it_is_measured_comes_back_and_the_tuner_ends_with_a_choice(tmp_path):
    with Run(tmp_path, *PENDULUM, tiny=TUNED) as run:
        run.wait_for(lambda: _rows(run), what="a measured row")
        os.kill(run.children()["learner"].pid, signal.SIGKILL)
        run.wait_for(lambda: any("tuned" in event for event in run.events()), what="the end of the tuner")
        before = run.numbers()["updates"]
        run.wait_for(lambda: run.numbers()["updates"] > before + 50, what="further updates")
        code, document = run.stop()
    assert (code, document["restarts"]) == (0, 1)


ROLLOUTS = (
    "--auto", "--algo", "ppo", "--envs-per-sampler", "2", "--set", "rollout.size=256",
    "--set", "ppo.hidden_sizes=[8,8]", "--set", "ppo.minibatch_size=64", "--set", "evaluation.episodes=2",
    "--set", "tuning.budget_s=6", "--no-visualizer",
)  # fmt: skip
SLEEPS = (*SYNTHETIC, "--env-arg", "law=constant", "--env-arg", "mean_s=0.005")
"""Environments that wait, so that more samplers are better than a core each."""


@pytest.mark.parametrize("mode", ["hts", pytest.param("impact", marks=pytest.mark.slow)])
def test_an_on_policy_run_trains_while_it_is_tuned_and_goes_on_with_other_samplers(tmp_path, mode):
    own = ("--algo", "impact") if mode == "impact" else ("--inference-workers", "0")
    with Run(tmp_path, *SLEEPS, "--mode", mode, *own, tiny=ROLLOUTS) as run:
        run.wait_for(lambda: run.numbers().get("updates", 0) > 0, what="updates")
        assert not (run.path / "tune.json").exists(), "it trains before anything is chosen"
        run.wait_for(lambda: (run.path / "tune.json").exists(), what="the choice")
        choice = read_json(run.path / "tune.json")["choice"]
        run.wait_for(lambda: any("tuned in" in event for event in run.events()), what="the end of the tuner")
        run.wait_for(lambda: len(_samplers(run)) == choice["rollout.samplers"], what="its samplers")
        before = run.numbers()
        run.wait_for(lambda: run.numbers()["updates"] > before["updates"], what="further updates")
        assert run.numbers()["env_steps"] >= before["env_steps"]
        code, document = run.stop()
    assert (code, document["restarts"]) == (0, 0)
    assert (document["samplers"], document["envs_per_sampler"]) == (
        choice["rollout.samplers"], choice["rollout.envs_per_sampler"])  # fmt: skip
    assert read_config(run.path)["rollout"]["samplers"] == choice["rollout.samplers"]
    assert read_json(run.path / "run.json")["sessions"] == 1, "the run went on in the same session"
    assert run.nonce_processes() == []


def _samplers(run):
    return [name for name in run.children() if name.startswith("sampler")]


@pytest.mark.parametrize(("task", "tiny"), [
    pytest.param(PENDULUM, TUNED, marks=pytest.mark.slow, id="in-run"),
    pytest.param((*SLEEPS, "--mode", "hts"), ROLLOUTS, id="beside-run"),
])  # fmt: skip
def test_a_stop_while_it_is_tuned_ends_the_run_in_order_and_leaves_no_process_and_no_result(tmp_path, task, tiny):
    with Run(tmp_path, *task, tiny=tiny) as run:
        # Not for a row: rows are told together, and the last ones end the tuner.
        run.wait_for(lambda: any("the tuner measures" in event for event in run.events()), what="the tuner")
        run.interrupt()
        poll(lambda: run.process.poll() is not None, what="the end")
        assert run.process.returncode == 0, run.stderr
        assert "Traceback" not in run.stderr
    assert not (run.path / "tune.json").exists()
    assert _records(tmp_path) == []
    assert run.nonce_processes() == []


class ChoosesAtOnce:
    """A tuner whose choice is known as soon as it may begin."""

    def __init__(self, plan):
        self.plan, self.told = plan, False

    def begin(self, run, workers):
        assert workers.pids()

    def notes(self):
        return []

    def choice(self):
        found, self.told = None if self.told else TunerChoice(self.plan.samplers, self.plan), True
        return found

    def end(self):
        pass


@pytest.mark.parametrize(("algo", "mode"), [
    ("ppo", "hts"), pytest.param("impact", "impact", marks=pytest.mark.slow),
])  # fmt: skip
def test_other_sizes_take_effect_in_new_workers_with_all_that_was_learned(tmp_path, monkeypatch, algo, mode):
    monkeypatch.setattr(supervisor, "_TUNER_AFTER_S", 0.0)
    stop = {"env_steps": 6000}

    def plan(samplers, tuner=None):
        values = {"env": {"id": "CartPole-v1"}, "run": {"algo": algo, "mode": mode}, algo: {"hidden_sizes": [8]},
                  "rollout": {"sync_interval": 16, "envs_per_sampler": 2}, "visualizer": {"enabled": False},
                  "evaluation": {"episodes": 1}, "stop": stop}  # fmt: skip
        spec = probe_env("CartPole-v1", steps=0).spec
        return RunPlan(
            settings=resolve([Layer("test", values)]), spec=spec, samplers=samplers, free_core=False, tuner=tuner
        )

    run_dir, view = RunDir.create(tmp_path, "run"), NoView()
    try:
        with Interrupts() as interrupts:
            outcome = run_mode(plan(1, ChoosesAtOnce(plan(2))), run_dir, view, interrupts)
    finally:
        run_dir.close()
    assert (outcome.error, outcome.stopped_by, outcome.restarts) == (None, "env_steps", 0)
    assert outcome.env_steps >= stop["env_steps"]
    reader = MetricsReader(run_dir.path / "metrics.db")
    events = [event.text for event in reader.events(100)]
    assert any("learner continues from update" in text or "resumed at update" in text for text in events), events
    curve = [(row.t, row.env_steps, row.version) for row in reader.evaluations()]
    assert curve == sorted(curve), "one session, whose clock and counters go on"
    assert curve[-1][2] == outcome.updates
