"""The storm's own parts: histories, how they shrink, what the checker finds, what a power loss leaves."""

import contextlib
import random
import resource
import subprocess
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from fault_checker import (
    CHECKPOINTS,
    COUNTERS,
    HEARTBEAT,
    INVARIANTS,
    LEFT,
    TOLD,
    TORN,
    TWICE,
    VERSIONS,
    Checker,
    lose_unsynced,
    newest_rows,
)
from fault_envs import NUMBER_UNIT
from fault_page import CLOCK_S, open_page, synced_files
from fault_storm import KINDS, LEFT_OUT, Fault, Storm, history, shrunk
from long_form import LIMIT_S
from rings import ring_of

from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.replay_ring import ShardWriter
from spreeze.types import RowLayout

LAYOUT = RowLayout(obs_dim=3, action_dim=1, checksum=True)


def test_a_history_depends_on_its_seed_alone_and_has_every_kind_of_fault():
    assert history(3, 200) == history(3, 200) != history(4, 200)
    assert {fault.kind for fault in history(3, len(KINDS), hosts=True)} == set(KINDS)
    assert {fault.kind for fault in history(3, len(KINDS) - 1)} == set(KINDS) - {LEFT_OUT}
    assert len(KINDS) == 12
    assert len(INVARIANTS) == len(set(INVARIANTS)) == 8
    assert all(len({one.kind for one in fault.both}) == 2 for fault in history(3, 200) if fault.kind == "two")


@pytest.mark.parametrize("culprits", [{7}, {3, 41}, {0, 20, 49}])
def test_a_failing_history_shrinks_to_the_faults_that_make_it_fail(culprits):
    faults = [Fault("kill", str(number)) for number in range(50)]
    played = []

    def fails(some):
        played.append(some)
        return culprits <= {int(fault.victim) for fault in some}

    assert [int(fault.victim) for fault in shrunk(faults, fails)] == sorted(culprits)
    assert len(played) < 150


@pytest.fixture
def checker():
    return Checker(("SPREEZE_STRESS_RUN", "none has this"))


def _numbered(first, count):
    """Arguments of ``ShardWriter.write`` for rows as ``NumberedEnv`` gives them."""
    steps = np.arange(first, first + count)
    obs = np.float32(NUMBER_UNIT) * np.stack([np.full(count, 9), steps, 9 - steps], 1).astype(np.float32)
    after = np.float32(NUMBER_UNIT) * np.stack([np.full(count, 9), steps + 1, 8 - steps], 1).astype(np.float32)
    return obs, np.zeros((count, 1), np.float32), np.ones(count, np.float32), np.zeros(count, np.float32), after


def test_the_checker_finds_a_torn_row_and_one_that_is_there_twice(checker):
    with ring_of(LAYOUT, rows=64) as ring:
        writer = ShardWriter(ring, 0)
        for first in range(0, 100, 10):  # round the ring
            writer.write(*_numbered(first, 10))
        rows, logical = newest_rows(ring, 0)
        assert logical.tolist() == list(range(36, 100))
        checker.see_rows(rows, logical, LAYOUT)
        assert checker.violations == []
        torn = rows.copy()
        torn[:, 1] = rows[::-1, 1]
        checker.see_rows(torn, logical, LAYOUT)
        writer.write(*_numbered(95, 5))
        checker.see_rows(*newest_rows(ring, 0), LAYOUT)
    assert [name for name, _ in checker.violations] == [TORN, TWICE]
    assert checker.violations[1][1].startswith("5 of")


def test_the_checker_finds_versions_and_counters_that_fall(checker):
    for version in ((1, 5), (0, 0), (2, 0), (1, 9)):
        checker.see_version(version)
    for count in (3.0, 5.0, 4.0):
        checker.see_counters({"env_steps of sampler-0": count})
    assert checker.violations == [(VERSIONS, "(2, 0) -> (1, 9)"), (COUNTERS, "env_steps of sampler-0: 5 -> 4")]


def test_the_checker_finds_who_does_nothing_for_too_long(checker):
    for now_s in (0.0, LIMIT_S, 1.5 * LIMIT_S):
        checker.see_beats({"learner": 7.0, "evaluator": now_s}, now_s)
    assert checker.violations == [(HEARTBEAT, f"nothing of learner for {1.5 * LIMIT_S:.0f} s")]


def test_the_checker_finds_a_checkpoint_that_does_not_verify_unless_a_fault_has_spoiled_it(checker, tmp_path):
    store = CheckpointStore(tmp_path)
    for updates in (1, 2, 3):
        store.save({"w": np.ones(3, np.float32)}, {}, epoch=1, updates=updates)
    good, bad, spoiled = store.paths()
    for path in (bad, spoiled):
        (path / "tensors.safetensors").write_bytes(b"")
    checker.spoiled.add(spoiled)
    checker.see_checkpoints([good, bad, spoiled])
    ((name, text),) = checker.violations
    assert name == CHECKPOINTS
    assert bad.name in text


def test_the_checker_finds_a_process_that_is_left(checker, monkeypatch):
    monkeypatch.setattr("fault_checker.LEFT_S", 0.0)
    monkeypatch.setattr("fault_checker.marked", lambda name, value: [1])
    monkeypatch.setattr("fault_checker.shared_memory", lambda: checker._shared | {"left"})
    checker.see_nothing_left()
    assert checker.violations == [(LEFT, "1 processes"), (LEFT, "shared memory ['left']")]


def test_a_power_loss_spoils_what_was_not_synced_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    names = [f"{number}.json" for number in range(20)]
    for name in (*names, "synced.json", "run.json", "eval.csv", "metrics.db"):
        (run / name).write_bytes(bytes(10_000))
    found = (run / "synced.json").stat()
    page = tmp_path / "page"
    (tmp_path / "page.synced").write_text(f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}\n")
    lost = lose_unsynced(run, synced_files(page), random.Random(1))
    assert sorted(lost) == sorted([*names, "eval.csv", "run.json"])
    sizes = {path.name: path.stat().st_size for path in run.iterdir()}
    assert sizes["synced.json"] == sizes["metrics.db"] == 10_000
    assert "run.json" in sizes, "a replaced file is cut at worst"
    assert 10_000 - 4096 <= sizes["eval.csv"] <= 10_000
    assert 0 < sum(name in sizes for name in names) < 20


def test_processes_see_faults_of_the_page_at_once(tmp_path):
    mine, theirs = open_page(tmp_path / "page"), open_page(tmp_path / "page")
    mine[CLOCK_S] = -3600.0
    assert theirs[CLOCK_S] == -3600.0
    assert open_page()[CLOCK_S] == 0.0, "without a file there is no fault"


@pytest.fixture
def storm(tmp_path):
    """A storm over no run, whose output and workers are ``said`` and ``started``."""
    storm = Storm(tmp_path)
    storm.said, storm.started = [], {}
    storm._run = SimpleNamespace(output=lambda: "".join(storm.said), workers=lambda: storm.started)
    storm._checker, storm._pending, storm._disk = Checker(("SPREEZE_STRESS_RUN", "none has this")), {}, False
    return storm


def _longest_file(process):
    return psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE)[0]


def test_a_limit_of_files_meets_workers_that_begin_while_it_lasts_and_is_lifted_once_it_was_told(storm):
    with contextlib.ExitStack() as stack:
        for name in ("learner", "evaluator"):
            storm.started[name] = worker = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
            stack.callback(worker.kill)
        learner, evaluator = storm.started.values()
        storm.started = {"learner": learner.pid}
        storm._disk_full(Fault("disk_full", size=0.9))
        storm._end_what_is_over()
        assert _longest_file(learner) == 450
        storm.started = {"evaluator": evaluator.pid}
        storm._end_what_is_over()
        assert _longest_file(evaluator) == 450
        storm.said.append("warning: learner: publishing weights failed; no space")
        storm._end_what_is_over()
        assert _longest_file(evaluator) == resource.RLIM_INFINITY
    assert storm._pending == {}
    assert storm._checker.violations == []


def test_a_fault_that_nobody_tells_is_found_and_ended(storm):
    storm._disk_full(Fault("disk_full", size=0.9))
    storm._pending["disk_full"].since_s -= 1.1 * LIMIT_S
    storm._end_what_is_over()
    ((name, text),) = storm._checker.violations
    assert (name, text) == (TOLD, "nothing of files that cannot grow: ")
    assert storm._pending == {}
