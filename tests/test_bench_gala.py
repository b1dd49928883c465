"""The bench of GALA: what it starts, and what it makes of known figures; no test judges a speed."""

import contextlib
import signal
import subprocess
import sys

import pytest
from harness import PATIENCE_S

from spreeze.bench import gala
from spreeze.bench.__main__ import build_parser
from spreeze.metrics.store import MetricsWriter


def document(env_steps_per_s=500.0, time_s=4.0):
    return {"run_dir": "r", "env_steps_per_s": env_steps_per_s, "time_to_target_s": time_s, "process_s": 9.0,
            "env_steps": 100, "updates": 3, "eval_return_best": 480.0}  # fmt: skip


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
    def run(arguments, timeout_s, environment):
        learners = int(arguments[arguments.index("--learners") + 1])
        return document(env_steps_per_s=500.0 * learners * (0.8 if learners == 4 else 1.0))

    rows = gala.steps_rows(bench(run, learners=(1, 2, 4)))
    found = {row["learners"]: row["value"] for row in rows if row["metric"] == "share_of_linear"}
    assert found == {1: 1.0, 2: 1.0, 4: 0.8}


def test_environments_are_shared_out_and_a_run_that_never_got_there_does_not_count_as_converged():
    told = []

    def run(arguments, timeout_s, environment):
        told.append(arguments)
        return document(time_s=None if "gala.mixing=hogwild" in arguments else 2.0)

    rows = gala.converge_rows(bench(run, envs=(16,)))
    shares = {row["case"]: row["value"] for row in rows if row["metric"] == "converged"}
    assert shares == {"gala": 1.0, "hogwild": 0.0, "a2c": 1.0}
    each = [arguments[arguments.index("--envs-per-sampler") + 1] for arguments in told]
    assert each == ["4", "4", "16"] * 2


def test_the_radius_is_held_against_the_bound_of_the_same_moment(tmp_path):
    def run(arguments, timeout_s, environment):
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
    assert found == {("within_bound", 1): 2 / 3, ("largest_radius_over_bound", 1): 1.5,
                     ("within_bound", 2): 1.0, ("largest_radius_over_bound", 2): 0.1}  # fmt: skip


def test_only_learners_among_the_processes_of_the_bench_are_killed():
    code = "import sys; sys.stdin.read()"
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen([sys.executable, "-c", code, f'{{"role": "{role}"}}'],
                                                        stdin=subprocess.PIPE)) for role in ("learner", "sampler")]
        killed = []
        with gala.learners_killed(0.01, killed):
            assert started[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert started[1].poll() is None
        assert set(killed) == {started[0].pid}


def test_the_flags_of_every_part_are_read():
    args = build_parser().parse_args(["gala", "--parts", "converge", "--envs", "8", "--learners", "2"])
    assert (args.parts, args.envs, args.learners) == (["converge"], [8], [2])
