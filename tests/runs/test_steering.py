"""A live run is steered from outside: paused, evaluated and saved on request, told how much to leave to others."""

import time

import psutil
import pytest
from harness import PENDULUM, TINY, Run, run_command

from spreeze.run_directory import About, RunDir, read_about, read_run, send_request, state_of
from spreeze.workers.evaluator import read_rows

GOVERNED = tuple(flag for flag in TINY if flag != "--no-governor")
ROLLOUTS = ("--env", "CartPole-v1", "--no-visualizer", "--no-governor")
CARTPOLE = (*ROLLOUTS, "--algo", "ppo", "--mode", "hts")


def cpu_seconds(run):
    """Processor time of the run's workers so far."""
    return sum(sum(child.cpu_times()[:2]) for child in run.children().values())


def test_a_paused_run_uses_no_core_goes_on_without_counting_the_pause_and_can_be_stopped_in_the_next(tmp_path):
    began_s = time.monotonic()
    with Run(tmp_path, *PENDULUM) as run:
        run.until_updates(5)
        pids = {name: child.pid for name, child in run.children().items()}
        send_request(run.path, "pause")
        run.wait_for(lambda: state_of(run.path) == "paused", what="the pause")
        for child in run.children().values():
            run.wait_for(lambda child=child: child.status() == psutil.STATUS_STOPPED, what=f"{child.name()} to stop")
        used_s, updates = cpu_seconds(run), run.numbers()["updates"]
        first = read_run(run.path)["heartbeat"]
        run.wait_for(lambda: read_run(run.path)["heartbeat"] > first, what="a heartbeat during the pause")
        assert cpu_seconds(run) == used_s
        assert run.numbers()["updates"] == updates
        (run.path / "control" / "pause").unlink()
        run.until_updates(updates + 5)
        assert {name: child.pid for name, child in run.children().items()} == pids
        assert state_of(run.path) == "running"
        send_request(run.path, "pause")
        run.wait_for(lambda: state_of(run.path) == "paused", what="another pause")
        send_request(run.path, "stop")
        code, summary = run.end()
        assert (code, summary["stopped_by"], summary["restarts"]) == (0, "stop request", 0)
        assert list((run.path / "checkpoints").glob("*.safetensors"))
        assert not (run.path / "control" / "pause").exists()
        (text, *_) = (event for event in run.events() if "resumed after a pause" in event)
        assert summary["wall_s"] <= time.monotonic() - began_s - float(text.split()[-2])


def test_a_worker_killed_during_a_pause_is_replaced_after_it(tmp_path):
    with Run(tmp_path, *PENDULUM, "--no-evaluator") as run:
        run.until_updates(5)
        send_request(run.path, "pause")
        run.wait_for(lambda: state_of(run.path) == "paused", what="the pause")
        run.children()["sampler-0"].kill()
        (run.path / "control" / "pause").unlink()
        run.wait_for(lambda: run.numbers().get("restarts") == 1, what="a new sampler")
        run.until_updates(run.numbers()["updates"] + 5)


@pytest.mark.parametrize("task", [
    CARTPOLE, *(pytest.param(task, marks=pytest.mark.slow) for task in (
        (*PENDULUM, *TINY), (*ROLLOUTS, "--algo", "impact"), (*PENDULUM, *TINY, "--mode", "serial"),
        (*CARTPOLE, "--mode", "serial"), (*CARTPOLE, "--mode", "tianji"),
        (*ROLLOUTS, "--algo", "a2c", "--mode", "gala"), (*PENDULUM, *TINY, "--mode", "tianji"))),
])  # fmt: skip
def test_every_mode_pauses_evaluates_and_saves_on_request(tmp_path, task):
    never = ("--set", "learner.checkpoint_interval_s=10000", "--set", "evaluation.cpu_share=0.01")
    with Run(tmp_path, *task, *never, tiny=()) as run:
        run.until_updates(5)
        send_request(run.path, "pause")
        run.wait_for(lambda: state_of(run.path) == "paused", what="the pause")
        (run.path / "control" / "pause").unlink()
        before = len(read_rows(run.path / "eval.csv"))
        send_request(run.path, "evaluate")
        send_request(run.path, "checkpoint")
        run.wait_for(
            lambda: any("checkpoint written on request" in event for event in run.events()), what="a checkpoint"
        )
        run.wait_for(lambda: len(read_rows(run.path / "eval.csv")) > before, what="an evaluation")
        run.interrupt()
        assert run.end()[0] == 0


def test_leave_free_changes_while_a_run_goes_on_and_what_is_no_share_is_ignored_with_a_warning(tmp_path):
    with Run(tmp_path, *PENDULUM, "--no-evaluator", tiny=GOVERNED) as run:
        run.until_updates(5)
        assert read_run(run.path)["leave_free"] == 0.0
        send_request(run.path, "leave-free", "0.5")
        run.wait_for(lambda: read_run(run.path)["leave_free"] == 0.5, what="the share")
        send_request(run.path, "leave-free", "7")
        run.wait_for(lambda: any("leave-free = '7' was ignored" in event for event in run.events()), what="a warning")
        assert read_run(run.path)["leave_free"] == 0.5


def test_requests_of_an_earlier_session_are_forgotten_on_resume(tmp_path):
    with_requests = RunDir.create(tmp_path, "run")
    with_requests.write_state(state="finished")
    for name in ("pause", "stop", "checkpoint"):
        send_request(with_requests.path, name)
    with_requests.close()
    again = RunDir.open(with_requests.path)
    assert not list((again.path / "control").iterdir())
    again.close()


def test_the_command_line_pauses_continues_and_describes_a_run_and_says_what_cannot_be_done(tmp_path):
    def runs(*words):
        done = run_command("runs", "--runs-dir", tmp_path / "runs", *words)
        return done.returncode, done.stdout + done.stderr

    with Run(tmp_path, *PENDULUM, "--set", "evaluation.cpu_share=0.01") as run:
        run.until_updates(5)
        assert runs("pause", "latest") == (0, "run: paused\n")
        assert runs("continue", "run") == (0, "run: running\n")
        run.wait_for(lambda: read_rows(run.path / "eval.csv"), what="the first evaluation")
        assert (runs("evaluate", "run")[0], runs("checkpoint", "run")[0]) == (0, 0)
        run.wait_for(lambda: len(read_rows(run.path / "eval.csv")) > 1, what="another evaluation")
        run.wait_for(
            lambda: any("checkpoint written on request" in event for event in run.events()), what="a checkpoint"
        )
        code, text = runs("leave-free", "run", "0.5")
        assert code
        assert "this run has no CPU governor" in text
        assert "must be 0 to 0.9" in runs("leave-free", "run", "2")[1]
        run.stop()
    assert "not running" in runs("pause", "run")[1]
    assert runs("describe", "run", "--title", "first\x1b[31m try", "--tags", "walker, two cores,walker")[0] == 0
    assert runs("describe", "run", "--note", "line one\nline two")[0] == 0
    about = About(title="first [31m try", note="line one\nline two", tags=("walker", "two cores"))
    assert read_about(run.path) == about
    assert "first [31m try" in runs("describe", "run")[1]
    (run.path / "about.json").write_text('{"title": 3, "note": [], "tags": "no"}')
    assert read_about(run.path) == About(title="3")
