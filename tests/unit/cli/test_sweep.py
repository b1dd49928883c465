"""``spreeze sweep``: the grid, the shares of the cores, the table, and a sweep that was interrupted."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import PATIENCE_S, REPO, poll

from spreeze.cli import sweep, sweep_runs
from spreeze.cli.arguments import build_parser
from spreeze.cli.planning import layers_of
from spreeze.config.layers import Layer, resolve, to_toml
from spreeze.config.profiles import or_in_runs_dir
from spreeze.config.section import split_values
from spreeze.errors import ConfigError, ResourceError, RunError
from spreeze.machine.hardware import read_machine
from spreeze.metrics.evidence import iqm
from spreeze.run_directory import LIVE_STATES, RunDir, launch_log, state_of
from spreeze.runtime.interrupts import Interrupts


def test_commas_within_brackets_and_quotes_split_no_value():
    assert split_values("(64, 64),[1,2],'a,b',{'c': 1, 'd': 2},x") == [
        "(64, 64)",
        "[1,2]",
        "'a,b'",
        "{'c': 1, 'd': 2}",
        "x",
    ]


def test_a_grid_is_every_combination_and_names_what_varies():
    found = sweep.grid(["sac.gamma=0.9,0.99", "sac.tau=0.01", "sac.hidden_sizes=[64, 64],[128]"])
    assert [setting for setting, _ in found] == [
        f"sac.gamma={gamma} sac.hidden_sizes={sizes}" for gamma in ("0.9", "0.99") for sizes in ("[64, 64]", "[128]")
    ]
    assert found[0][1] == ["sac.gamma=0.9", "sac.tau=0.01", "sac.hidden_sizes=[64, 64]"]
    assert sweep.grid([]) == [("", [])]


@pytest.mark.parametrize("text", ["sac.gamma", "gamma=1,2", "sac.gamma=1,,2", "sac.gamma=1,1"])
def test_a_malformed_axis_is_refused(text):
    with pytest.raises(ConfigError, match="--set"):
        sweep.grid([text])


@pytest.mark.parametrize(("texts", "words"), [
    (["sac.gamma=0.9", "sac.gamma =0.99"], "set twice; give all of its values in one --set"),
    (["run.seed=5"], "--seeds N"), (["run.name=a,b"], "--name"),
])  # fmt: skip
def test_settings_that_would_be_lost_or_are_the_sweep_s_own_are_refused(texts, words):
    with pytest.raises(ConfigError, match=words):
        sweep.grid(texts)


def test_a_runs_directory_that_is_a_file_is_said_in_one_line(tmp_path, capsys):
    place = tmp_path / "runs"
    place.write_text("")
    assert sweep.main(["--env", "Pendulum-v1", "--stop-seconds", "1", "--runs-dir", str(place)]) != 0
    assert f"cannot write below {place}" in capsys.readouterr().err
    with pytest.raises(ResourceError, match="cannot write below"):
        RunDir.create(place, "one")


def test_cores_are_dealt_without_overlap_and_one_at_least_to_each():
    assert sweep_runs.core_shares([0, 2, 3, 7, 9], 2) == [[0, 2], [3, 7]], "as many for each"
    with pytest.raises(ConfigError, match="--side-by-side 3"):
        sweep_runs.core_shares([0, 1], 3)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert iqm(np.array([100.0, 1.0, 2.0, -50.0])) == 1.5
    found = sweep._as_row([0.0, 1.0, 5.0])
    assert found == {"centre": 2.0, "low": 0.0, "high": 5.0, "seeds": 3}  # 3 // 4 = 0 are left out; 1/27 draw one value
    assert sweep._as_row([1.0, 2.0, 3.0, 100.0])["centre"] == 2.5
    assert sweep._as_row([1.0, 2.0])["low"] is None
    assert sweep._as_row([]) is None


@pytest.mark.parametrize("flags", [["--set", "sac.gama=0.9"], ["--set", "sac.gamma=0.9,often"], []])
def test_what_a_run_would_refuse_is_refused_before_the_first_run(tmp_path, capsys, flags):
    stop = ["--stop-seconds", "1"] if flags else []
    assert sweep.main(["--env", "Pendulum-v1", *stop, *flags, "--runs-dir", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.warm
def test_an_interrupted_run_begins_anew_beside_the_old_one_and_a_finished_one_is_skipped(tmp_path):
    arguments = ["--env", "Pendulum-v1", "--mode", "serial", "--set", "stop.env_steps=60"]
    states = ["finished", "running"]
    runs = [
        sweep_runs.SweepRun("", seed, [*arguments, "--seed", str(seed)], f"x-c1-s{seed}", 1, state)
        for seed, state in enumerate(states, 1)
    ]
    sweep_runs.Sweep("x", None, None, 1, runs).write(tmp_path)
    for name in ("x-c1-s1", "x-c1-s2"):
        (tmp_path / name).mkdir()
    assert sweep.main(["--resume", "x", "--runs-dir", str(tmp_path)]) == 0
    found = sweep_runs.read_sweep(tmp_path, "x")
    assert [(run.name, run.state) for run in found.runs] == [("x-c1-s1", "finished"), ("x-c1-s2-again2", "finished")]
    assert json.loads((tmp_path / "x.sweep.json").read_text())["finished"] == [run.name for run in found.runs]
    assert json.loads((tmp_path / "x-c1-s2-again2" / "summary.json").read_text())["env_steps"] >= 60
    assert [*(tmp_path / "x-c1-s1").iterdir()] == []


@pytest.mark.parametrize(
    ("reason", "state"),
    [("seconds", "finished"), ("stop request", "interrupted"), ("interrupt (SIGTERM)", "interrupted")],
)
def test_a_run_that_somebody_stopped_is_not_a_result_of_the_sweep(tmp_path, reason, state):
    run = sweep_runs.SweepRun("", 1, [], "x-c1-s1", 1, "running")
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "run.json").write_text(json.dumps({"exit_reason": reason}))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    sweep_runs.note_end(sweep_runs.RunProcess(run, process, io.BytesIO()), tmp_path, lambda line: None)
    assert run.state == state


def test_a_sweep_that_is_going_on_is_not_gone_on_with_at_the_same_time(tmp_path, capsys):
    sweep_runs.Sweep("x", None, None, 1, []).write(tmp_path)
    with sweep._locked(tmp_path, "x"):
        assert sweep.main(["--resume", "x", "--runs-dir", str(tmp_path)]) == 2
    assert "sweep x is running in another process" in capsys.readouterr().err
    assert sweep.main(["--resume", "x", "--runs-dir", str(tmp_path)]) == 0


def test_a_taken_name_and_an_unknown_one_are_refused(tmp_path):
    sweep_runs.Sweep("x", None, None, 1, []).write(tmp_path)
    assert sweep.main(["--name", "x", "--stop-seconds", "1", "--runs-dir", str(tmp_path)]) == 2
    with pytest.raises(RunError, match="sweeps: x"):
        sweep_runs.read_sweep(tmp_path, "y")


def test_automatic_names_of_sweeps_that_start_together_differ(tmp_path):
    sweep_runs.Sweep("x", None, None, 1, []).write(tmp_path)  # has ended
    (tmp_path / "x-3-c1-s1").mkdir()
    plan = sweep_runs.Sweep("x", None, None, 1, [sweep_runs.SweepRun("", 1, [], "x-c1-s1")])
    found = [sweep_runs.claimed(plan, tmp_path, named=False) for _ in range(2)]
    assert [(one.name, one.runs[0].stem) for one in found] == [("x-2", "x-2-c1-s1"), ("x-4", "x-4-c1-s1")]
    assert plan.runs[0].stem == "x-c1-s1"


@pytest.mark.parametrize("flags", [["--seeds", "5"], ["--set", "sac.gamma=0.9"], ["--import", "mine"], ["--auto"],
                                   ["--target", "0"]])  # fmt: skip
def test_flags_that_a_resumed_sweep_would_ignore_are_refused(tmp_path, capsys, flags):
    sweep_runs.Sweep("x", None, None, 1, []).write(tmp_path)
    assert sweep.main(["--resume", "x", *flags, "--runs-dir", str(tmp_path)]) == 2
    assert f"remove {flags[0]}" in capsys.readouterr().err


@pytest.mark.warm
def test_a_profile_in_the_runs_directory_is_found_by_its_name(tmp_path, capsys):
    (tmp_path / "find.toml").write_text("[sac]\ngamma = 0.5\n")
    (tmp_path / "pendulum.toml").write_text("")
    args = build_parser().parse_args(["--profile", "find", "--runs-dir", str(tmp_path)])
    assert layers_of(args, None, read_machine())[0][-2] == Layer("profile find", {"sac": {"gamma": 0.5}})
    assert or_in_runs_dir("pendulum", tmp_path) == "pendulum", "one that comes with Spreeze"
    asked = ["--env", "Pendulum-v1", "--seconds", "1", "--runs-dir", str(tmp_path), "--dry-run", "--json"]
    assert sweep.main([*asked, "--profile", "find"]) == 0
    arguments = json.loads(capsys.readouterr().out)["sweep"]["runs"][0]["arguments"]
    assert arguments[arguments.index("--profile") + 1] == str(tmp_path / "find.toml")


def test_a_profile_and_the_tuner_are_for_all_runs_of_a_sweep(tmp_path, capsys):
    asked = ["--env", "Pendulum-v1", "--stop-seconds", "1", "--dry-run", "--json", "--runs-dir", str(tmp_path)]
    assert sweep.main([*asked, "--profile", "none", "--auto", "--seeds", "2"]) == 0
    runs = json.loads(capsys.readouterr().out)["sweep"]["runs"]
    assert [run["arguments"] for run in runs] == [
        [
            "--env",
            "Pendulum-v1",
            "--profile",
            "none",
            "--seconds",
            "1.0",
            "--auto",
            "--set",
            "tuning.while_training=false",
            "--set",
            "tuning.algorithm_share=0",
            "--seed",
            seed,
        ]
        for seed in "12"
    ]
    assert sweep.main([*asked, "--profile", "absent"]) == 2
    assert sweep.main([*asked, "--auto", "--side-by-side", "2"]) == 2
    assert "with --auto one run at a time" in capsys.readouterr().err
    assert sweep.main([*asked, "--mode", "serial", "--auto"]) == 2, "there is nothing to tune"
    assert "serial" in capsys.readouterr().err.splitlines()[-1]
    assert sweep.main([*asked, "--algo", "ppo", "--mode", "hts", "--set", "learner.batch_size=64"]) == 0
    assert "no effect with --algo ppo in --mode hts: --batch-size\n" in capsys.readouterr().err


def test_a_plan_is_one_json_document_and_a_resumed_one_takes_another_number_side_by_side(tmp_path, capsys):
    sweep_runs.Sweep("x", None, None, 1000, [sweep_runs.SweepRun("", 1, ["--seconds", "1"], "x-c1-s1")]).write(tmp_path)
    asked = ["--resume", "x", "--dry-run", "--json", "--runs-dir", str(tmp_path)]
    assert sweep.main(asked) == 2  # 1,000 cores are not here
    capsys.readouterr()
    assert sweep.main([*asked, "--side-by-side", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["left"] == ["x-c1-s1"]
    assert told["sweep"]["side_by_side"] == 1


def test_more_seeds_of_a_run_have_its_settings_whatever_the_profile_says_today(tmp_path, capsys):
    for name, seed, batch, source in (("a", 3, 64, "user"), ("b", 5, 32, "tuner")):
        (tmp_path / name).mkdir()
        layers = [Layer("profile old", {"sac": {"gamma": 0.9}}), Layer(source, {"learner": {"batch_size": batch}})]
        layers.append(Layer("user", {"run": {"seed": seed}, "env": {"id": "Pendulum-v1"}, "stop": {"updates": 9}}))
        (tmp_path / name / "config.toml").write_text(to_toml(resolve(layers)))
        (tmp_path / name / "run.json").write_text(json.dumps({"seed": seed, "algo": "sac", "mode": "spreeze"}))
    asked = ["--runs-dir", str(tmp_path), "--dry-run", "--json", "--like", "a"]
    assert sweep.main([*asked, "--seeds", "1"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["sweep"]["runs"]
    assert (run["setting"], run["seed"]) == ("", 4)
    assert run["arguments"] == [
        "--env", "Pendulum-v1", "--algo", "sac", "--mode", "spreeze", "--profile", "none", "--set", "sac.gamma=0.9",
        "--set", "learner.batch_size=64", "--set", "stop.updates=9", "--seed", "4",
    ]  # fmt: skip
    assert sweep.main([*asked, "--seeds", "1", "--seconds", "60"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["sweep"]["runs"]
    assert run["arguments"][-4:] == ["--set", "stop.seconds=60", "--seed", "4"], "after the time of the run itself"
    assert sweep.main([*asked, "--like", "b", "--seeds", "1"]) == 0
    runs = json.loads(capsys.readouterr().out)["sweep"]["runs"]
    assert [(run["setting"], run["seed"]) for run in runs] == [
        ("sac spreeze learner.batch_size=64", 6),
        ("sac spreeze learner.batch_size=32", 6),
    ]
    assert sweep.main([*asked, "--first-seed", "1", "--algo", "ppo"]) == 2
    assert "--like takes them from the run" in capsys.readouterr().err
    (tmp_path / "a" / "config.toml").write_text("damaged")
    assert sweep.main(asked) == 2
    assert "config.toml is missing or damaged" in capsys.readouterr().err


ENDLESS = ["--env", "Pendulum-v1", "--mode", "serial", "--set", "stop.env_steps=1000000000"]


@contextlib.contextmanager
def endless_sweep(tmp_path):
    """A sweep of two runs that would not end, the first of which learns; (process, directory of that run)."""
    command = [
        sys.executable,
        "-m",
        "spreeze",
        "sweep",
        *ENDLESS,
        "--seeds",
        "2",
        "--name",
        "x",
        "--runs-dir",
        str(tmp_path),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=REPO,
        start_new_session=True,
    ) as process:
        run = tmp_path / "x-c1-s1"
        try:
            poll(lambda: list((run / "weights").glob("*")), what="weights of the first run")
            yield process, run
        finally:
            process.kill()
            poll(lambda: state_of(run) not in LIVE_STATES, what="the end of the first run")


@pytest.mark.slow
def test_a_closed_terminal_does_not_end_a_sweep_and_a_request_to_end_lets_its_run_save(tmp_path):
    with endless_sweep(tmp_path) as (process, run):
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 130, "SIGHUP would have been the end of it"
        assert [one.state for one in sweep_runs.read_sweep(tmp_path, "x").runs] == ["interrupted", "waiting"]
        assert json.loads((run / "run.json").read_text())["exit_reason"].startswith("interrupt")
        assert list((run / "checkpoints").iterdir())
        assert f"run directory {run}" in launch_log(run.name, tmp_path).read_text(), "where the page shows it"


@pytest.mark.slow
def test_the_run_of_a_killed_sweep_ends_in_order(tmp_path):
    with endless_sweep(tmp_path) as (process, run):
        process.kill()
        process.wait(PATIENCE_S)
        poll(lambda: state_of(run) not in LIVE_STATES, what="the end of the run")
        assert json.loads((run / "run.json").read_text())["exit_reason"].startswith("interrupt")


@pytest.mark.slow
def test_a_sweep_outlives_a_file_that_cannot_be_written_and_says_so_at_its_end(tmp_path, monkeypatch):
    told = []

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweep_runs, "write_json", full)
    plan = sweep_runs.Sweep(
        "x", None, None, 1, [sweep_runs.SweepRun("", 1, [*ENDLESS[:-1], "stop.env_steps=60"], "x-c1-s1")]
    )
    with Interrupts() as interrupts, pytest.raises(ResourceError, match="No space left"):
        sweep._run_all(plan, plan.runs, [[min(os.sched_getaffinity(0))]], tmp_path, interrupts, told.append)
    assert plan.runs[0].state == "finished"
    assert sum("cannot be written" in line for line in told) == 1


def test_a_run_whose_metrics_are_damaged_is_no_result_and_leaves_the_others_theirs(tmp_path):
    run = sweep_runs.SweepRun("", 1, [], "x-c1-s1", 1, "running")
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "metrics.db").write_bytes(b"no database" * 1000)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    sweep_runs.note_end(sweep_runs.RunProcess(run, process, io.BytesIO()), tmp_path, lambda line: None)
    assert (run.state, "metrics.db" in run.error) == ("failed", True)
    run.state = "finished"  # damaged later
    (row,) = sweep.table(sweep_runs.Sweep("x", None, 1.0, 1, [run]), tmp_path)
    assert (row["seeds"], row["final"], row["to_target_s"]) == (1, None, None)


def test_a_sweep_that_is_complete_prints_its_table_and_trains_nothing(tmp_path, capsys):
    run = sweep_runs.SweepRun("sac.gamma=0.9", 1, ["--env", "Pendulum-v1", "--updates", "1"], "x-c1-s1", 1, "finished")
    (tmp_path / run.name).mkdir()
    sweep_runs.Sweep("x", None, None, 1, [run]).write(tmp_path)
    assert sweep.main(["--resume", "x", "--runs-dir", str(tmp_path)]) == 0
    assert "sac.gamma=0.9  1" in capsys.readouterr().out


def test_a_finished_run_that_was_deleted_is_done_again(tmp_path):
    sweep_runs.Sweep("x", None, None, 1, [sweep_runs.SweepRun("", 1, [], "x-c1-s1", 1, "finished")]).write(tmp_path)
    args = sweep._parser().parse_args(["--resume", "x"])
    assert [run.state for run in sweep._continued(args, tmp_path).runs] == ["waiting"]
