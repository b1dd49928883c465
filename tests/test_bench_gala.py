"""The bench of GALA: what it starts, and what it makes of known figures; no test judges a speed."""

import contextlib
import json
import signal
import subprocess
import sys

import pytest
from harness import PATIENCE_S

from spreeze.bench import gala
from spreeze.bench.__main__ import build_parser
from spreeze.errors import ConfigError, RunError, UsageError
from spreeze.metrics.store import MetricsWriter


def document(env_steps_per_s=500.0, time_s=4.0):
    return {"run_dir": "r", "env_steps_per_s": env_steps_per_s, "time_to_target_s": time_s, "process_s": 9.0,
            "env_steps": 100, "updates": 3, "eval_return_best": 480.0}  # fmt: skip


def following(arguments, flag):
    return arguments[arguments.index(flag) + 1]


def bench(run, **fields):
    fields = {"env_ids": ("CartPole-v1",), "seeds": 2, **fields}
    return gala.GalaBench(seconds=5.0, step_seconds=5.0, target_return=475.0,
                          runs_dir="r", say=lambda text: None, run=run, **fields)  # fmt: skip


def test_one_of_four_learners_is_slowed_ten_times_in_both_ways_to_share():
    told = []

    def run(arguments, timeout_s, environment):
        told.append((arguments, environment))
        return document(env_steps_per_s=1000.0 if "gala.mixing=gossip" in arguments else 250.0)

    rows = gala.slow_rows(bench(run))
    assert [row["value"] for row in rows if row["metric"] == "rate_over_all_reduce"] == [4.0]
    assert len(told) == 4
    for arguments, environment in told:
        assert arguments[arguments.index("--learners") + 1] == "4"
        assert environment["SPREEZE_FAULT_WORKERS"] == "sampler-g3-0"
        step_s, stall_s = (float(environment[f"SPREEZE_FAULT_{name}_S"]) for name in ("STEP", "STALL"))
        assert step_s + stall_s == pytest.approx(10 * step_s)


def test_the_share_of_linear_is_that_of_one_learner():
    def run(arguments, timeout_s):
        learners = int(arguments[arguments.index("--learners") + 1])
        return document(env_steps_per_s=500.0 * learners * (0.8 if learners == 4 else 1.0))

    rows = gala.steps_rows(bench(run, learners=(1, 2, 4)))
    found = {row["learners"]: row["value"] for row in rows if row["metric"] == "share_of_linear"}
    assert found == {1: 1.0, 2: 1.0, 4: 0.8}


def test_environments_are_shared_out_and_a_run_whose_last_policy_is_below_the_return_did_not_converge():
    told = []

    def run(arguments, timeout_s):
        told.append(arguments)
        return document() | {"eval_return_mean": 470.0 if "gala.mixing=hogwild" in arguments else 475.0}

    rows = gala.converge_rows(bench(run, envs=(16,), env_steps=5000, first_seed=3))
    shares = {row["case"]: (row["value"], row["runs"]) for row in rows if row["metric"] == "converged"}
    assert shares == {"gala": (1.0, 2), "hogwild": (0.0, 2), "a2c": (1.0, 2)}
    assert [following(arguments, "--envs-per-sampler") for arguments in told] == ["4", "4", "16"] * 2
    assert [following(arguments, "--seed") for arguments in told] == ["3"] * 3 + ["4"] * 3
    assert {following(arguments, "--env-steps") for arguments in told} == {"5000"}


def test_the_radius_is_held_against_the_bound_of_the_same_moment(tmp_path):
    def run(arguments, timeout_s):
        path = tmp_path / "run"
        path.mkdir(exist_ok=True)
        writer = MetricsWriter(path / "metrics.db")
        for t, radius in enumerate((1.0, 2.0, 6.0)):
            writer.write(float(t), t, {"gossip_radius": radius, "gossip_bound_1": 4.0,
                                       "gossip_bound_2": None if t == 0 else 60.0})
        writer.close()
        return document() | {"run_dir": str(path)}

    rows = gala.radius_rows(bench(run, env_ids=("CartPole-v1",), seeds=1))
    found = {(row["metric"], row["proposition"]): row["value"] for row in rows if row["topology"] == "ring"}
    assert found == {("within_bound", 1): 2 / 3, ("largest_radius_over_bound", 1): 1.5, ("measured", 1): 3,
                     ("within_bound", 2): 1.0, ("largest_radius_over_bound", 2): 0.1, ("measured", 2): 2}  # fmt: skip


def test_a_picture_joins_the_rows_of_several_documents(tmp_path):
    pytest.importorskip("matplotlib")
    converged = {"metric": "converged", "case": "gala", "env": "CartPole-v1", "envs": 8, "value": 1.0, "runs": 1}
    radius = {"metric": "largest_radius_over_bound", "proposition": 1, "topology": "ring",
              "curve": [[0.5, 1.0, 2.0], [1.0, 1.5, 2.0]]}  # fmt: skip
    for name, rows in (("a", [converged, radius]), ("b", [converged | {"value": 0.0}])):
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    args = build_parser().parse_args(["gala", "--parts", "--rows", str(tmp_path / "a"), str(tmp_path / "b"), "--out",
                                      str(tmp_path / "gala.png")])
    assert [row["value"] for row in gala.gala_rows(args, print)] == [str(tmp_path / "gala.png")]
    assert (tmp_path / "gala.png").read_bytes().startswith(b"\x89PNG")
    args.rows = [str(tmp_path / "c")]
    with pytest.raises(UsageError, match="not a document of a bench"):
        gala.gala_rows(args, print)


def test_gala_and_hts_train_for_the_same_time_though_they_reach_the_return(monkeypatch):
    told = []

    def run(arguments, timeout_s):
        told.append(arguments)
        return document(time_s=2.0 if "gala" in arguments else None)

    monkeypatch.setattr(gala, "scores", lambda found, env_id: [])
    rows = gala.paired_rows(bench(run))
    times = {row["case"]: (row["value"], row["reached"]) for row in rows if row["metric"] == "time_to_target_s"}
    assert times == {"gala": (2.0, 2), "hts a2c": (None, 0)}
    assert all("stop.target_evaluations=0" in arguments for arguments in told)


def test_only_learners_among_the_processes_of_the_bench_are_killed():
    code = ("import pathlib, sys; pathlib.Path('/proc/self/comm').write_text(sys.argv[1]); print(flush=True); "
            "sys.stdin.read()")
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(
            [sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for name in ("learner-0", "sampler-0")]
        for process in started:
            assert process.stdout.readline() == b"\n"
        killed = []
        with gala.learners_killed(0.01, killed):
            assert started[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert started[1].poll() is None
        assert set(killed) == {started[0].pid}


def test_the_flags_of_every_part_are_read():
    args = build_parser().parse_args(["gala", "--parts", "converge", "--envs", "8", "--learners", "2"])
    assert (args.parts, args.envs, args.learners) == (["converge"], [8], [2])


def test_cases_of_unequal_numbers_of_environments_are_refused():
    args = build_parser().parse_args(["gala", "--parts", "converge", "--envs", "8", "--team", "3"])
    with pytest.raises(ConfigError, match="--envs 8: each has to be a multiple of --team 3"):
        gala.gala_rows(args, lambda text: None)


def test_a_picture_that_cannot_be_written_is_said_before_any_run(tmp_path):
    args = build_parser().parse_args(["gala", "--out", str(tmp_path / "none" / "gala.png")])
    with pytest.raises(RunError, match="there is no folder"):
        gala.gala_rows(args, lambda text: None)
