"""The serial mode: the same seed gives the same bits."""

import gc
import signal

import pytest
from harness import FAULT, HIDDEN_SIZES, PATIENCE_S, PENDULUM, NoView, refused, train, train_until

from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import probe_env
from spreeze.modes import serial
from spreeze.run_directory import RunDir
from spreeze.runtime import supervisor, turns
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.turns import EnvironmentHung, HangWatch
from spreeze.workers import learner
from spreeze.workers.evaluator import Evaluation, read_rows
from spreeze.workers.roles import DEADLINE_S, Phase


def _sha(tmp_path, name, *args):
    _, code, document = train(
        tmp_path, *FAULT, "--mode", "serial", "--updates", "60", "--no-evaluator", *args, name=name
    )
    assert code == 0
    assert (document["mode"], document["updates"], document["samplers"]) == ("serial", 60, 1)
    assert document["restarts"] == 0
    return document["parameters_sha256"], document["env_steps"]


def test_same_seed_same_bits_other_seed_other_bits(tmp_path):
    first = _sha(tmp_path, "first")
    assert _sha(tmp_path, "again") == first
    assert _sha(tmp_path, "other", "--seed", "2")[0] != first[0]


@pytest.mark.slow
def test_schedules_and_averages_repeat_too(tmp_path):
    settings = ("--set", "sac.lr_schedule=cosine", "--set", "sac.weight_decay=0.01", "--set", "sac.critics=quantile",
                "--set", "sac.policy_average=0.99", "--set", "sac.explore_average=true")  # fmt: skip
    assert _sha(tmp_path, "first", *settings) == _sha(tmp_path, "again", *settings)


@pytest.mark.slow
def test_environments_that_err_alike_give_the_same_bits(tmp_path):
    faults = {"p_crash": 0.01, "p_nan": 0.01, "seed": 2}
    found = []
    for name in ("first", "again"):
        _, code, document = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "150", name=name, faults=faults)
        assert code == 0
        assert document["env_errors"] + document["transitions_rejected"] > 1
        found.append((document["parameters_sha256"], document["env_steps"], document["env_errors"]))
    assert found[0] == found[1]


def test_its_one_process_is_watched_as_workers_are(tmp_path):
    run, code, _ = train_until(
        tmp_path, lambda run: "process_cpu_use/run" in run.numbers(), *PENDULUM, "--mode", "serial"
    )
    assert code == 0
    assert run.numbers()["process_memory_bytes/run"] > 1e7


def test_one_update_an_env_step_as_serial_trainers_do_and_evaluations_after_updates_where_that_is_asked_for(tmp_path):
    found, code, document = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "150", "--algo", "td3",
                                  "--batch-size", "32", "--set", f"td3.hidden_sizes={HIDDEN_SIZES}",
                                  "--set", "evaluation.interval_updates=40")  # fmt: skip
    assert code == 0
    assert document["samples_per_insert"] == pytest.approx(32.0, rel=0.05)
    assert document["env_steps"] == pytest.approx(200 + 150, abs=12)
    updates = [row["updates"] for row in read_rows(found.path / "eval.csv")]
    assert updates[0] < 40
    assert [count // 40 for count in updates[1:-1]] == [1, 2, 3]
    assert all(count % 40 < 8 for count in updates[1:-1]), "each as soon as the env step's updates are done"
    assert updates[-1] == 150


def _in_process(folder, more=None):
    """A small run in this process: its outcome and its directory."""
    values = {"env": {"id": "Pendulum-v1"}, "run": {"mode": "serial"}, "sac": {"hidden_sizes": [8]},
              "learner": {"batch_size": 8}, "replay": {"capacity": 20_000, "learning_starts": 50},
              "visualizer": {"enabled": False}, "evaluation": {"episodes": 1}, **(more or {})}  # fmt: skip
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=probe_env("Pendulum-v1", steps=0).spec, samplers=1,
                   free_core=False)  # fmt: skip
    run_dir = RunDir.create(folder, "run")
    try:
        with Interrupts() as interrupts:
            return serial.run_mode(plan, run_dir, NoView(), interrupts), run_dir
    finally:
        run_dir.close()
        gc.collect()  # the loop and its data refer to each other; a run's own process ends with it


def test_an_interrupt_in_the_middle_of_an_evaluation_leaves_the_last_weights_a_score(tmp_path, monkeypatch):
    attempt, calls = Evaluation.attempt, []

    def interrupted_at_first(*args, **options):
        if not calls:
            signal.raise_signal(signal.SIGINT)
        calls.append("attempt")
        return attempt(*args, **options)

    monkeypatch.setattr(Evaluation, "attempt", interrupted_at_first)
    monkeypatch.setattr(supervisor, "_EVALUATION_S", PATIENCE_S)
    monkeypatch.setattr(supervisor, "_EXIT_S", PATIENCE_S)
    outcome, run_dir = _in_process(tmp_path)
    assert outcome.stopped_by == "interrupt (Ctrl-C)"
    assert [row["updates"] for row in read_rows(run_dir.path / "eval.csv")] == [outcome.updates]
    assert outcome.eval_return_mean is not None


def test_an_evaluator_that_works_beside_the_learner_cannot_count_updates(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, *FAULT, "--updates", "150", "--set", "evaluation.interval_updates=40")
    assert "evaluation.interval_updates = 40: in mode spreeze the evaluator runs in parallel" in document["error"]


def test_an_environment_that_hangs_costs_an_episode_and_its_run_ends_as_asked(tmp_path):
    faults = {"hang_at": 100, "once": tmp_path / "it-happened"}
    run, code, document = train(
        tmp_path, *FAULT, "--mode", "serial", "--updates", "400", "--set", "sampling.step_deadline_s=1",
        "--set", "evaluation.interval_updates=400",  # by the clock, an evaluation may be the one that hangs
        faults=faults,
    )  # fmt: skip
    assert (tmp_path / "it-happened").exists()
    assert (code, document["stopped_by"], document["updates"]) == (0, "updates", 400)
    (event,) = [event for event in run.events() if "EnvironmentHung" in event]
    assert (
        "it has not returned within 1 s in phase STEP (sampling.step_deadline_s = 1); its stack is in logs/run.log"
        in event
    )
    assert "fault_envs.py" in (run.path / "logs" / "run.log").read_text(), "the stack names the culprit"


class Ending(Exception):
    """In place of the process's end by force."""


class Watched:
    """A watch over an environment, with a time and requests to stop as the test sets them."""

    def __init__(self, folder, monkeypatch):
        (folder / "logs").mkdir()
        self.now_s, self.stop_requested, self.urgent, self.pokes, self.on_tick = 0.0, False, False, 0, []
        monkeypatch.setattr(turns, "AWAKE", lambda: self.now_s)
        self.log = folder / "logs" / "run.log"
        self.watch = HangWatch(self, folder, 5.0, lambda: self.stop_requested)

    def poke(self):
        self.pokes += 1

    def end_by_force(self, reason, code):
        raise Ending(reason, code)

    def pass_time(self, seconds):
        for _ in range(round(4 * seconds)):
            self.now_s += 0.25
            self.watch.check()


@pytest.fixture
def watched(tmp_path, monkeypatch):
    return Watched(tmp_path, monkeypatch)


def test_an_environment_that_returns_in_time_is_left_alone(watched):
    for _ in range(10):
        watched.watch.note(Phase.STEP)
        watched.pass_time(4.5)
    watched.watch.done()
    watched.pass_time(1000)
    watched.watch.on_signal()
    assert watched.pokes == 0
    assert not watched.log.exists()


@pytest.mark.parametrize(
    ("phase", "deadline_s", "setting"),
    [
        (Phase.STEP, 5.0, " (sampling.step_deadline_s = 5)"),
        (Phase.RESET, DEADLINE_S[Phase.INIT], " (sampling.start_deadline_s = 120)"),
    ],
)
def test_an_error_is_raised_in_code_that_does_not_return_in_time_and_where_it_is_caught_the_process_ends(
    watched, phase, deadline_s, setting
):
    watched.watch.note(phase)
    watched.pass_time(deadline_s)
    assert watched.pokes == 0
    watched.pass_time(0.5)
    assert watched.pokes == 1
    told = f"it has not returned within {deadline_s:g} s in phase {phase.name}{setting}; its stack is in logs/run.log"
    with pytest.raises(EnvironmentHung) as caught:
        watched.watch.on_signal()
    assert str(caught.value) == told
    assert "test_serial.py" in watched.log.read_text()
    with pytest.raises(Ending) as ended:
        watched.pass_time(3.0)
    assert ended.value.args[0].startswith(f"the environment hangs: {told.partition(';')[0]}")
    assert ended.value.args[1] == 1


def test_an_environment_that_returned_meanwhile_gets_no_error(watched):
    watched.watch.note(Phase.STEP)
    watched.pass_time(5.5)
    watched.watch.note(Phase.STEP)
    watched.watch.on_signal()
    watched.pass_time(2.0)
    assert watched.pokes == 1


def test_the_start_of_an_environment_has_its_own_deadline(watched):
    watched.watch = HangWatch(watched, watched.log.parents[1], 5.0, lambda: watched.stop_requested, 300.0)
    watched.watch.note(Phase.INIT)
    watched.pass_time(299.0)
    assert watched.pokes == 0
    watched.pass_time(2.0)
    with pytest.raises(EnvironmentHung, match=r"within 300 s in phase INIT \(sampling.start_deadline_s = 300\)"):
        watched.watch.on_signal()


def test_a_request_to_stop_waits_for_an_environment_as_for_a_worker(watched):
    watched.watch = HangWatch(watched, watched.log.parents[1], 600.0, lambda: watched.stop_requested)
    watched.watch.note(Phase.STEP)
    watched.pass_time(20.0)
    watched.stop_requested = True
    watched.pass_time(6.0)
    assert watched.pokes == 0
    watched.pass_time(0.5)
    assert watched.pokes == 1
    with pytest.raises(EnvironmentHung, match="it has not returned in phase STEP within 6 s after the request to stop"):
        watched.watch.on_signal()


def test_a_second_ctrl_c_leaves_an_environment_at_once(tmp_path):
    with Interrupts() as interrupts:
        watch = HangWatch(interrupts, tmp_path, PATIENCE_S, lambda: False)
        signal.raise_signal(signal.SIGINT)
        watch.note(Phase.STEP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        watch.done()
        signal.raise_signal(signal.SIGINT)  # raises nothing in code of our own
        watch.close()


def test_the_first_checkpoint_comes_early(tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "FIRST_CHECKPOINT_S", 0.0)
    outcome, run_dir = _in_process(tmp_path, {"stop": {"updates": 20}})
    assert outcome.stopped_by == "updates"
    saved = sorted(path.name for path in (run_dir.path / "checkpoints").glob("ckpt-*"))
    assert len(saved) == 2
    assert int(saved[0].rpartition("-")[2]) < int(saved[1].rpartition("-")[2]) == outcome.updates
