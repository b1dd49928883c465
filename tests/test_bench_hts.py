"""The bench of HTS-RL: what it starts, and what it makes of rates that are known; no test judges a speed."""

import json

import numpy as np
import pytest
from hts_theory import simulated_run_time, step_times

from spreeze.bench import hts, line
from spreeze.bench.__main__ import build_parser as bench_parser
from spreeze.bench.hts import hts_rows
from spreeze.errors import ConfigError, SpreezeError
from spreeze.metrics.store import EvaluationRow, MetricsWriter


def flags(arguments):
    """``--name value`` of a command line; ``--set`` and ``--env-arg`` by their keys."""
    found, rest = {}, list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--env-arg="):
            key, value = word.removeprefix("--env-arg=").split("=")
        elif word == "--set":
            key, value = rest.pop(0).split("=")
        else:
            key, value = word, rest.pop(0) if rest and not rest[0].startswith("--") else ""
        found[key] = value
    return found


class Ideal:
    """Runs that take what simulation says, and ``step_s`` and ``swap_s`` more."""

    def __init__(self, step_s=0.0, swap_s=0.0, epoch_s=0.0):
        self.step_s, self.swap_s, self.epoch_s, self.commands = step_s, swap_s, epoch_s, []

    def __call__(self, arguments, timeout_s):
        self.commands.append(told := flags(arguments))
        n, interval = int(told["--samplers"]), int(told["--sync-interval"])
        draw = step_times(told["law"], float(told["mean_s"]), float(told["cv"]))
        rng, states = np.random.default_rng(int(told["--seed"])), n * interval * max(1, 100_000 // (n * interval))
        hidden = told["--mode"] == "hts"
        learn_s = self.epoch_s * int(told.get("ppo.epochs", 0))
        wait = 1 if told.get("--synchrony") == "step" else interval
        took_s = simulated_run_time(rng, draw, states, n, wait) + states / n * self.step_s
        round_s = took_s * n * interval / states + self.swap_s
        whole_s = max(round_s, learn_s) if hidden else round_s + learn_s
        return {"run_dir": "r", "env_steps_per_s": n * interval / whole_s, "rates_measured_s": 5.0,
                "policy_lag_mean": 1.0, "time_split": {"learner_learn_share": learn_s / whole_s}}


def bench(run, **fields):
    told = []
    return hts.HtsBench(runs_dir="r", seconds=5.0, repeats=2, say=told.append, run=run, **fields)


def by_metric(rows, metric):
    return [row for row in rows if row["metric"] == metric]


def test_steps_compare_modes_in_turn():
    run = Ideal()
    rows = hts.steps_rows(bench(run, laws=("constant", "gamma 3"), inference_workers=0))
    constant, gamma = by_metric(rows, "hts_over_step")
    assert constant["value"] == pytest.approx(1.0)
    assert gamma["value"] == pytest.approx(3.5, abs=0.2)
    assert len(gamma["repeats"]) == 2
    assert [lag["repeats"] for lag in by_metric(rows, "policy_lag")] == [[1.0, 1.0]] * 2
    assert [command["--mode"] for command in run.commands[:3]] == ["hts", "serial", "serial"]
    assert [command.get("--synchrony") for command in run.commands[:3]] == [None, "step", "batch"]
    assert [command.get("--inference-workers") for command in run.commands[:3]] == ["0", None, None]
    names = ("--samplers", "--envs-per-sampler", "--sync-interval", "--algo")
    assert {tuple(command[name] for name in names) for command in run.commands} == {("8", "1", "64", "a2c")}


def test_a_run_whose_start_took_too_long_is_repeated_longer_and_then_refused():
    lengths = []

    def slow(arguments, timeout_s):
        lengths.append(float(flags(arguments)["--seconds"]))
        known = len(lengths) == 2
        return {"run_dir": "r", "env_steps_per_s": 100.0 if known else None, "rates_measured_s": 2.5 if known else None}

    assert bench(slow).synthetic("hts", "constant", 1)["env_steps_per_s"] == 100.0
    assert lengths == [11.0, 22.0]
    with pytest.raises(SpreezeError, match="take more --seconds"):
        bench(slow).synthetic("hts", "constant", 1)


# --- tasks ---


class Trained:
    """Runs with evaluations of their own: HTS-RL twice as fast, the data's age costing ``none`` some return."""

    def __init__(self, folder):
        self.folder, self.commands = folder, []

    def __call__(self, arguments, timeout_s):
        self.commands.append(told := flags(arguments))
        seed, mode, correction = int(told["--seed"]), told["--mode"], told.get("--correction", "delayed")
        path = self.folder / f"run-{len(self.commands)}"
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps({
            "env_id": told["--env"], "algo": told["--algo"], "mode": mode, "seed": seed, "wall_s": 10.0}))
        (path / "config.toml").write_text(f'[rollout]\ncorrection = "{correction}"\n')
        score = 10.0 * seed + (5.0 if mode == "hts" else 0.0) - (2.0 if correction == "none" else 0.0)
        writer = MetricsWriter(path / "metrics.db")
        writer.evaluation(EvaluationRow(1.0, 10, 1, 1, 1, 10, score, 0.0, 5.0))
        writer.close()
        reached = seed == 1 or mode == "hts"
        return {"run_dir": str(path), "env_steps": 1000, "updates": 100, "updates_per_s": 1.0,
                "eval_return_best": score, "process_s": 60.0, "env_steps_per_s": 300.0 if mode == "hts" else 200.0,
                "time_to_target_s": (10.0 if mode == "hts" else 20.0) if reached else None}


def tasks(folder, **fields):
    fields = {"env_ids": ("T-v0",), "algo": "ppo", "seeds": 2, "seconds": 9.0, "target_return": 475.0, **fields}
    return hts.TasksBench(runs_dir="r", say=lambda text: None, run=Trained(folder), **fields)


def test_modes_get_the_same_number_of_environments_seed_by_seed(tmp_path):
    found = tasks(tmp_path, extra=("--set", "ppo.epochs=4"))
    rows = hts.task_target_rows(found)
    hts_row, serial_row = by_metric(rows, "time_to_target_s")
    assert (hts_row["repeats"], hts_row["reached"]) == ([10.0, 10.0], 2)
    assert (serial_row["repeats"], serial_row["reached"]) == ([20.0, None], 1)
    assert by_metric(rows, "time_over_serial")[0]["repeats"] == [0.5, 10.0 / 60.0], "at most: all of its time"
    told = [(c["--mode"], c["--seed"], c["--samplers"], c["--envs-per-sampler"]) for c in found.run.commands]
    assert told[:2] == [("hts", "1", "2", "8"), ("serial", "1", "1", "16")]
    assert [seed for _, seed, *_ in told] == ["1", "1", "2", "2"]
    assert {c["ppo.epochs"] for c in found.run.commands} == {"4"}


def test_pairs_are_scored_by_the_protocol(tmp_path):
    rows = hts.paired_rows(tasks(tmp_path))
    scores = by_metric(rows, "final_metric")
    assert [(row["group"], row["value"], row["repeats"]) for row in scores] == [
        ("ppo hts", 20.0, [15.0, 25.0]), ("ppo serial", 15.0, [10.0, 20.0])]
    (difference,) = by_metric(rows, "final_metric_difference")
    assert (difference["value"], difference["low"], difference["high"]) == (5.0, None, None)
    assert by_metric(rows, "rate_over_serial")[0]["value"] == 1.5
    (difference,) = by_metric(hts.paired_rows(tasks(tmp_path / "more", seeds=3)), "final_metric_difference")
    assert (difference["low"], difference["high"]) == (5.0, 5.0)
    assert "low 5" in line(difference)


def test_corrections_are_told_apart(tmp_path):
    rows = hts.correction_rows(tasks(tmp_path))
    scores = {row["group"].split("=")[1]: row["value"] for row in by_metric(rows, "final_metric")}
    assert scores == {"delayed": 20.0, "none": 18.0, "truncated-is": 20.0}
    assert [row["value"] for row in by_metric(rows, "final_metric_difference")] == [2.0, 0.0, -2.0]


# --- the command ---


def parsed(*arguments):
    return bench_parser().parse_args(["hts", *arguments])


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="not divisible by --samplers 3"):
        hts_rows(parsed("--samplers", "3"), print)
