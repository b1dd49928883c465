"""The scripts of ``tests/benchmarks``: what they start is what ``spreeze.train`` takes; no test judges a speed."""

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import counted_impact
import fault_storm
import pytest

from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.layers import Layer, resolve
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Stands in for runs: their flags, which were checked as ``spreeze.train`` checks them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import common

    with_metrics = tmp_path / "run"
    with_metrics.mkdir()
    writer = MetricsWriter(with_metrics / "metrics.db")
    for t in range(30):
        names = ("gossip_radius", "gossip_bound_1", "gossip_bound_2", "cpu_use", "samples_per_insert_now")
        writer.write(float(t), t, dict.fromkeys(names, 1.0))
    writer.evaluation(EvaluationRow(1.0, 100, 1, 1, 1, 10, 500.0, 0.0, 1.0))
    writer.close()
    known = {
        "run_dir": str(with_metrics),
        "env_steps_per_s": 500.0,
        "updates_per_s": 50.0,
        "env_steps": 1000,
        "rows_stored": 990,
        "updates": 100,
        "time_to_target_s": 4.0,
        "process_s": 9.0,
        "eval_return_best": 480.0,
        "samples_per_insert_band": [8.0, 16.0],
    }
    commands = []

    def train(arguments, timeout_s, environment=None, program=None):
        resolve([Layer("user", user_values(build_parser().parse_args(arguments)))])
        commands.append(arguments)
        return known

    monkeypatch.setattr(common.whole_runs, "train", train)
    monkeypatch.setattr(common, "report", lambda arguments: commands.append(["report", *arguments]))
    yield commands
    sys.modules.pop("common")


def run(monkeypatch, script, *arguments):
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    return runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_says_what_it_measures(script, started, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, script, "--help")
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(("script", "parts", "runs"), [
    ("hts", ("steps", "target", "paired", "correction"), 2 * (5 * 3 + 2 + 2 + 3)),
    ("gala", ("slow", "steps", "radius", "kills", "converge", "paired"), 2 * (2 + 4 + 3 * 2 + 2 + 3 * 3 + 2)),
    ("impact", ("steps", "target", "paired"), 2 * (4 + 5 + 5)),
    ("tianji", ("curve", "sleeping", "balance", "serial", "modes", "groups", "collect", "game", "qmix"),
     2 * (5 + 7 + 1 + 2 + 5 + 3 + 3 * 4 + 2 + 2)),
    ("paper", ("table", "algorithms"), 2 * (3 + 2)),
    ("memory", ("returns",), 2 * 3),
])  # fmt: skip
def test_all_parts_start_runs_whose_flags_are_valid_and_print_rows(script, parts, runs, started, monkeypatch, capsys):
    run(monkeypatch, script, "--repeats", "2", "--parts", *parts)
    taken = [arguments for arguments in started if arguments[0] != "report"]
    assert len(taken) == runs
    assert {arguments[arguments.index("--seed") + 1] for arguments in taken} == {"1", "2"}
    shown = capsys.readouterr().out
    assert shown.count("\n") > len(parts)


def test_fewer_cores_are_given_back(started, monkeypatch, capsys):
    own = os.sched_getaffinity(0)
    run(monkeypatch, "paper", "--repeats", "1", "--parts", "cpu")
    assert os.sched_getaffinity(0) == own
    assert "time_to_target_s" in capsys.readouterr().out


def test_ablations_change_one_setting_at_a_time(started, monkeypatch, capsys):
    told = []
    curve = counted_impact.CountedCurve([10, 20], [1, 2], [100.0, 480.0], 3.0)
    monkeypatch.setattr(counted_impact, "counted_curve", lambda flags, env_steps, every: told.append(flags) or curve)
    run(monkeypatch, "impact", "--repeats", "1", "--parts", "ablation", "--ablations", "ratio", "slots")
    settings = [resolve([Layer("user", user_values(build_parser().parse_args(flags)))]).config for flags in told]
    assert [(one.on_policy.ratio, one.on_policy.slots) for one in settings] == [
        ("R1", 4), ("R2", 4), ("R3", 4), ("R3", 2), ("R3", 4), ("R3", 8), ("R3", 16)]  # fmt: skip
    assert {one.on_policy.broadcast_updates for one in settings} == {256}
    assert "env_steps_to_target" in capsys.readouterr().out


def test_the_figures_of_a_gpu_fit_into_45_minutes_each_into_ten_and_what_does_not_is_left_out(capfd, tmp_path):
    script = runpy.run_path(str(FOLDER / "gpu.py"))
    wanted = script["steps"]("cuda:0", "Walker2d-v5")
    assert sum(step.needs_s for step in wanted) <= 45 * 60.0
    assert max(step.needs_s for step in wanted) <= 600.0
    fits, fails, long = (
        script["Step"](name, needs_s, [sys.executable, "-c", code])
        for name, needs_s, code in (
            ("fits", 1.0, "print('a figure')"),
            ("fails", 1.0, "raise SystemExit(3)"),
            ("long", 1e9, ""),
        )
    )
    assert script["take"]([fits, long, fails], 600.0, tmp_path) == 1
    shown = capfd.readouterr().out
    assert "a figure" in shown
    assert ", exit code 3\n" in shown
    assert "== long: left out, takes about 1000000000 s and" in shown


def test_repeated_tests_are_recorded_and_the_page_of_quality_tells_who_failed_how_often(started, monkeypatch, tmp_path):
    outcomes = iter([{"a::good": "passed", "a::bad": "failed"}, {"a::good": "passed", "a::bad": "passed"}])
    names = runpy.run_path(str(FOLDER / "quality.py"))["main"].__globals__
    monkeypatch.setitem(names, "_pytest", lambda *arguments: (next(outcomes), 1.0))
    for name in ("RECORDS", "PAGE"):
        monkeypatch.setitem(names, name, tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["quality.py", "flaky", "tests/a.py", "--repeats", "2"])
    names["main"]()
    assert (tmp_path / "RECORDS").read_text().count("\n") == 1
    page = (tmp_path / "PAGE").read_text()
    assert "1 of 4 (25.00%) | `a::bad` 1 |" in page
    assert "## Faults" not in page, "what was not measured is not there"


def test_a_history_of_faults_goes_on_with_its_next_seed_over_several_calls(started, monkeypatch, tmp_path):
    names, played = runpy.run_path(str(FOLDER / "quality.py"))["main"].__globals__, []

    class Storm(fault_storm.Storm):
        def play(self, faults, minutes=1e9):
            played.append(len(faults))
            if len(played) == 3:
                raise KeyboardInterrupt
            seen = [("a rule", "broken")] * (len(played) == 4)
            return fault_storm.Report(Counter(kill=len(faults)), rows_checked=7, violations=seen)

    monkeypatch.setenv("SPREEZE_LONG_TESTS", "")  # what the script sets is undone
    monkeypatch.setattr(fault_storm, "Storm", Storm)
    for name in ("RECORDS", "PAGE"):
        monkeypatch.setitem(names, name, tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["quality.py", "faults", "--count", "250", "--seed", "5"])
    with pytest.raises(KeyboardInterrupt):
        names["main"]()
    names["main"]()
    (record,) = map(json.loads, (tmp_path / "RECORDS").read_text().splitlines())
    assert (played, record["thrown"], record["rows"]) == ([100, 100, 50, 50], {"kill": 250}, 21)
    assert record["violations"] == ["seed 7: a rule: broken"], "seeds 5 and 6 were recorded before the interrupt"
    assert "| 250 of 250 |" in (tmp_path / "PAGE").read_text()
