"""The lasting benches in short: a storm of seconds, a stop of each kind, a killed supervisor."""

import sys

import pytest
from harness import BATCH_SIZE, HIDDEN_SIZES, PATIENCE_S

from spreeze.bench import endings, live_run, recovery, storm
from spreeze.bench.endings import orphans_rows, stops_rows
from spreeze.bench.faults import Goal, faults_rows
from spreeze.bench.recovery import SamplerPace
from spreeze.bench.soak import soak_rows
from spreeze.bench.storm import SAMPLERS, storm_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into the run's memory through /proc")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The benches judge machines, their tests do not."""
    for module, names in ((recovery, ["LIMIT_S"]), (storm, ["LIMIT_S"]), (endings, ["_LIMIT_S", "_LEFT_S"]),
                          (live_run, ["_START_S", "_END_S", "_ORPHAN_S"])):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, PATIENCE_S)


def test_f02_a_short_storm_over_all_roles_keeps_every_promise(tmp_path):
    rows = {row["metric"]: row for row in storm_rows(0.15, 60.0, 2, str(tmp_path / "runs"), seed=3)}
    assert rows["kills"]["value"] >= 3, "one at least in the storm, and two after it"
    assert rows["rows_torn"]["value"] == 0
    assert rows["rows_torn"]["rows_checked"] > 0
    assert rows["rows_torn"]["rows_written"] >= 500
    unaccounted, allowed = rows["rows_unaccounted"]["value"], int(rows["rows_unaccounted"]["target"].split()[-1])
    assert 0 <= unaccounted <= allowed
    for name in ("hangs", "replay_rows_lost", "versions_going_back", "exit_code", "orphans_after_5_s",
                 "shared_memory_left"):  # fmt: skip
        assert rows[name]["value"] == 0, name
    assert sum(rows["kills"][f"sampler-{index}"] for index in range(SAMPLERS)) >= 1
    assert rows["sampler_recovery_s_p95"]["value"] > 0
    assert rows["learner_recovery_s_p95"]["value"] > 0
    assert rows["learner_updates_lost_p100"]["value"] >= 0


def test_a_sampler_s_usual_rate_is_the_median_of_the_windows_before_it_was_killed():
    pace = SamplerPace()
    steps = [0.0, 100.0, 200.0, 260.0]
    assert [pace.look(0.25 * i, count, recovering=False) for i, count in enumerate(steps)] == [False, True, True, True]
    assert (pace.usual, pace.rate) == (400.0, 240.0)
    pace.restart()
    assert pace.rate == 0.0
    assert not pace.look(2.0, 260.0, recovering=True), "a window begins"
    assert not pace.look(2.1, 260.0, recovering=True), "it is too short"
    assert pace.look(2.25, 349.0, recovering=True)
    assert (pace.usual, pace.rate) == (400.0, 356.0), "what it does on its way back is not usual"


def test_runs_stopped_once_and_twice_end_in_order(tmp_path):
    said = []
    rows = {row["metric"]: row for row in stops_rows(2, 1, 2, str(tmp_path / "runs"), 1, said.append)}
    assert said == []
    assert rows["stops_in_order"]["value"] == 2
    assert rows["stops_in_order"]["after_learning_began"] >= 1
    assert rows["hurried_stops_in_order"]["value"] == 1
    assert rows["stop_s_p99"]["repeats"] != rows["second_interrupt_s_p99"]["repeats"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_killed_supervisor_leaves_nobody(tmp_path):
    rows = {row["metric"]: row for row in orphans_rows(1, 1, str(tmp_path / "runs"), 1, print)}
    assert rows["all_gone_s_p100"]["value"] < PATIENCE_S
    assert rows["shared_memory_left"]["value"] == 0


def test_time_to_a_return_is_taken_clean_and_with_faults_in_turn(tmp_path):
    goal, said = Goal("Pendulum-v1", "pendulum", -1900.0), []
    rows = {row["metric"]: row for row in faults_rows((goal,), 1, PATIENCE_S, str(tmp_path / "runs"), said.append)}
    assert ["clean" in said[0], "faults" in said[1], len(said)] == [True, True, 2]
    clean, faulty = rows["time_to_target_s_clean"], rows["time_to_target_s_faults"]
    assert (clean["reached"], faulty["reached"]) == (1, 1)
    assert rows["faults_over_clean"]["value"] == faulty["value"] / clean["value"]


def test_a_short_soak_gives_slopes_and_drifts(tmp_path):
    extra = ["--samplers", "1", "--batch-size", str(BATCH_SIZE), "--replay-capacity", "20000", "--no-visualizer",
             "--set", f"sac.hidden_sizes={HIDDEN_SIZES}"]  # fmt: skip
    rows = {row["metric"]: row for row in soak_rows(5 / 3600, "Pendulum-v1", str(tmp_path / "runs"), extra, 0.5)}
    assert rows["memory_bytes_slope"]["first"] > 20e6
    roles = ("supervisor", "learner", "sampler", "evaluator")
    assert sum(rows[f"memory_bytes_of_{role}_slope"]["first"] for role in roles) == rows["memory_bytes_slope"]["first"]
    assert 60.0 * rows["measured_minutes"]["value"] >= 1.5, "four looks, two a second"
    assert rows["redrawn_per_million"]["value"] >= 0
    assert rows["descriptors_slope"]["first"] > 10
    assert rows["updates_per_s_drift"]["first"] >= 0
    assert rows["core_speed_drift"]["first"] > 0
    assert (rows["exit_code"]["value"], rows["orphans_after_5_s"]["value"]) == (0, 0)
