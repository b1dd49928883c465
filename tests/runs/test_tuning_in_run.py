"""``train --auto`` on a machine where nothing is known: the run trains at once, and is tuned meanwhile."""

import json
import os
import signal

import pytest
from harness import HIDDEN_SIZES, PENDULUM, Run, poll

from spreeze.files import read_json
from spreeze.run_directory import read_config

TUNED = (
    "--auto", "--envs-per-sampler", "4", "--replay-capacity", "20000", "--set", f"sac.hidden_sizes={HIDDEN_SIZES}",
    "--set", "evaluation.episodes=2", "--set", "tuning.budget_s=8", "--no-visualizer",
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


def test_a_stop_while_it_is_tuned_ends_the_run_in_order_and_keeps_no_result(tmp_path):
    with Run(tmp_path, *PENDULUM, tiny=TUNED) as run:
        run.wait_for(lambda: _rows(run), what="a measured row")
        run.interrupt()
        poll(lambda: run.process.poll() is not None, what="the end")
        assert run.process.returncode == 0, run.stderr
        assert "Traceback" not in run.stderr
    assert not (run.path / "tune.json").exists()
    assert _records(tmp_path) == []
