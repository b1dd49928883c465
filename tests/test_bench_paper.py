"""The bench of the Spreeze paper: what it starts, and what it makes of known figures; no test judges a speed."""

import os

import pytest

from spreeze.bench import paper, runs
from spreeze.bench.__main__ import build_parser
from spreeze.errors import ConfigError
from spreeze.metrics.store import MetricsWriter


def document(**fields):
    known = {"run_dir": "r", "env": "Pendulum-v1", "env_steps_per_s": 500.0, "updates_per_s": 50.0, "samplers": 2,
             "batch_size": 128, "update_frames_per_s": 6400.0, "env_steps": 1000, "rows_stored": 990, "wall_s": 2.0,
             "updates": 100, "time_to_target_s": 4.0, "process_s": 9.0, "eval_return_best": -150.0,
             "eval_return_final": -160.0, "target_return": None}  # fmt: skip
    return {**known, **fields}


def rows_of(arguments, monkeypatch, answer=lambda told: document()):
    """The rows of ``bench paper``, what was run with how many cores each time, and what was said."""
    told, said = [], []

    def train(flags, timeout_s):
        told.append((flags, len(os.sched_getaffinity(0))))
        return answer(flags)

    monkeypatch.setattr(paper, "train", train)
    args = build_parser().parse_args(["paper", "--env", "Pendulum-v1", "--repeats", "1", *arguments])
    return paper.paper_rows(args, said.append), told, said


def test_the_columns_are_those_of_table_1(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path / "metrics.db")
    for t, use in enumerate([0.1, 0.1, 0.2, 0.5, 0.6, 0.7]):
        writer.write(float(t), t, {"cpu_use": use})
    writer.close()
    rows, told, _ = rows_of(["--parts", "table", "--batch-size", "128"], monkeypatch,
                            lambda flags: document(run_dir=str(tmp_path)))
    assert [flags.count("--batch-size") for flags, _ in told] == [0, 1]
    found = {row["metric"]: row["value"] for row in rows if row["case"] == "batch 128"}
    assert found == {
        "cpu_use": pytest.approx(0.5), "sampling_per_s": 500.0, "gpu_use": None, "update_frames_per_s": 6400.0,
        "updates_per_s": 50.0, "transfer_cycle_hz": 50.0, "transmitted_rows_per_s": 495.0,
        "rows_lost_share": pytest.approx(0.01)}  # fmt: skip


def test_runs_have_all_half_and_a_quarter_of_the_cores_where_these_are_whole(monkeypatch):
    own = os.sched_getaffinity(0)
    usable = len(own)
    monkeypatch.setattr(paper, "read_machine", lambda: type("M", (), {"cores": type("C", (), {"usable": usable})}))
    rows, told, said = rows_of(["--parts", "cpu"], monkeypatch)
    wanted = [int(usable * share) for share in (1.0, 0.5, 0.25) if (usable * share).is_integer()]
    assert [cores for _, cores in told] == wanted
    assert len(said) >= 3 - len(wanted)
    assert os.sched_getaffinity(0) == own, "the cores come back"
    assert {row["cores"] for row in rows} == set(wanted)


def test_algorithms_are_compared_after_as_many_updates_where_counts_are_asked_for(monkeypatch):
    answer = document(target_return=-200.0)
    rows, told, _ = rows_of(["--parts", "algorithms", "--updates", "100"], monkeypatch, lambda flags: answer)
    assert [flags[flags.index("--algo") + 1] for flags, _ in told] == ["sac", "td3"]
    assert all("serial" in flags and "--auto" not in flags for flags, _ in told)
    assert all(float(flags[flags.index("--seconds") + 1]) > 3600.0 for flags, _ in told), "updates end them, not time"
    assert {(row["algo"], row["value"]) for row in rows if row["metric"] == "time_to_target_s"} == {("sac", 4.0),
                                                                                                    ("td3", 4.0)}


def test_more_cores_than_there_are_cannot_be_used():
    with pytest.raises(ConfigError, match="100000 cores: this process may use"), runs.on_cores(100_000):
        pytest.fail("it was let through")


def test_the_tuner_is_compared_with_its_grid_on_several_numbers_of_cores():
    assert build_parser().parse_args(["tune", "--cores", "1", "2"]).cores == [1, 2]
    assert build_parser().parse_args(["tune"]).cores == [None]
