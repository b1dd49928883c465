"""Files that outlive a version say their format: a newer one is refused in one line, none counts as the first."""

import json
import re
import sqlite3

import numpy as np
import pytest

from spreeze.config import profiles
from spreeze.dashboard.run_data import run_path
from spreeze.errors import ConfigError, RunError, WeightsError
from spreeze.files import read_json, write_json
from spreeze.metrics import store
from spreeze.metrics.writer import MetricsWriter
from spreeze.run_directory import FORMAT, RunDir, find_run
from spreeze.transport import weights

REFUSAL = r"has format 2; this version of Spreeze reads 1 at most: update Spreeze"


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(tmp_path, "run")
    made.write_state(state="finished")
    made.close()
    return made.path


def _renumbered(path, number):
    told = read_json(path)
    if number is None:
        del told["format"]
    else:
        told["format"] = number
    write_json(path, told)


@pytest.mark.parametrize("opened", [
    RunDir.open, lambda path: find_run(path.name, path.parent), lambda path: find_run("latest", path.parent),
    lambda path: run_path(path.name, path.parent),
], ids=["resume", "a verb", "latest", "the page"])  # fmt: skip
def test_a_run_of_a_newer_version_is_refused(run, opened):
    assert read_json(run / "run.json")["format"] == FORMAT
    _renumbered(run / "run.json", 2)
    with pytest.raises(RunError, match=rf"^{re.escape(str(run / 'run.json'))} {REFUSAL}$"):
        opened(run)


def test_a_run_without_a_number_is_opened_and_numbered(run):
    _renumbered(run / "run.json", None)
    again = RunDir.open(find_run("run", run.parent))
    again.write_state(updates=3)
    again.close()
    assert read_json(run / "run.json")["format"] == 1


def _stored(path, number=None):
    writer = MetricsWriter(path)
    writer.write(0.0, 0, {"updates": 1.0})
    writer.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (store.FORMAT,)
    if number is not None:
        connection.execute(f"PRAGMA user_version = {number}")
    connection.close()


def test_metrics_of_a_newer_version_are_neither_read_nor_changed(tmp_path):
    path = tmp_path / "metrics.db"
    _stored(path, 2)
    before = path.read_bytes()
    with pytest.raises(RunError, match=REFUSAL):
        store.MetricsReader(path).names()
    writer = MetricsWriter(path)
    writer.write(1.0, 1, {"updates": 2.0})
    assert any("it has format 2" in text for _, text in writer.reports())
    writer.close()
    assert path.read_bytes() == before


def test_metrics_without_a_number_are_read_and_continued(tmp_path):
    path = tmp_path / "metrics.db"
    _stored(path, 0)
    writer = MetricsWriter(path)
    writer.write(1.0, 1, {"updates": 2.0})
    writer.close()
    assert store.MetricsReader(path).latest()["updates"].value == 2.0


@pytest.mark.parametrize("number", [None, 1, 2])
def test_weights_of_a_newer_version_are_refused(tmp_path, monkeypatch, number):
    monkeypatch.setattr(weights, "FORMAT", number)
    (tmp_path / "w").write_bytes(weights.encode({"a": np.zeros(2, np.float32)}, {"policy": "x"}, 0, 1))
    monkeypatch.undo()
    if number == 2:
        with pytest.raises(WeightsError, match=REFUSAL):
            weights.read_weights(tmp_path / "w")
    else:
        assert weights.read_weights(tmp_path / "w").meta == {"policy": "x"}


@pytest.mark.parametrize(("number", "refusal"), [
    ("1", None), ("2", REFUSAL), ('"2"', r"has format of type str; this version of Spreeze reads 1"),
])  # fmt: skip
def test_profiles_of_a_newer_version_are_refused(tmp_path, number, refusal):
    path = tmp_path / "p.toml"
    path.write_text(f"[about]\nformat = {number}\n[learner]\nbatch_size = 64\n")
    if refusal is None:
        assert profiles.read_profile(str(path)).values == {"learner": {"batch_size": 64}}
    else:
        with pytest.raises(ConfigError, match=refusal):
            profiles.read_profile(str(path))


def test_a_number_of_another_type_counts_as_absent(run):
    (run / "run.json").write_text(json.dumps({"state": "finished", "format": "2"}))
    assert find_run("run", run.parent) == run
