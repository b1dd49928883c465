"""The timeline: what a worker notes while it is recorded, the parts that follow, and what the page makes of them."""

import json

import numpy as np
import pytest

from spreeze.dashboard.run_data import newest_timeline
from spreeze.run_directory import TIMELINE
from spreeze.runtime import supervisor
from spreeze.runtime.supervisor import Timeline, phase_parts
from spreeze.transport import status_table
from spreeze.transport.status_table import StatusTable
from spreeze.workers.context import WorkerContext
from spreeze.workers.roles import Address, Phase

MS = 1_000_000


def events(*noted):
    """A worker's row of events from (ms, phase)."""
    row = np.zeros(1 + status_table.MAX_EVENTS, np.int64)
    row[0] = len(noted)
    for at, (ms, phase) in enumerate(noted):
        row[1 + at % status_table.MAX_EVENTS] = round(ms * MS) << status_table.PHASE_BITS | int(phase)
    return row


def test_a_phase_lasts_until_the_next_event_and_one_that_goes_on_is_one_part():
    row = events((90, Phase.WAIT), (101, Phase.STEP), (103, Phase.STEP), (104.5, Phase.WAIT), (120, Phase.STEP))
    assert phase_parts(row, 100 * MS, 110 * MS, Phase.WAIT) == [
        [0.0, 1.0, "wait"],
        [1.0, 4.5, "step"],
        [4.5, 10.0, "wait"],
    ]
    assert phase_parts(events(), 100 * MS, 110 * MS, Phase.UPDATE) == [[0.0, 10.0, "update"]], (
        "an update longer than that"
    )


def test_of_more_events_than_there_is_room_for_the_latest_are_kept():
    phases = (Phase.STEP, Phase.WAIT)
    row = events(*((1 + at, phases[at % 2]) for at in range(status_table.MAX_EVENTS + 7)))
    found = phase_parts(row, 0, (status_table.MAX_EVENTS + 8) * MS, Phase.WAIT)
    assert found[-1] == [status_table.MAX_EVENTS + 7, status_table.MAX_EVENTS + 8, "wait"]
    assert len(found) == supervisor._MAX_PARTS


@pytest.fixture
def status():
    made = StatusTable.create(2)
    yield made
    made.close()


def test_workers_note_phases_only_while_they_are_recorded(status, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_TIMELINE_S", 0.0)
    sampler, learner = (WorkerContext(Address(role), status, row, None)
                        for row, role in enumerate(("sampler", "learner")))  # fmt: skip
    recorder = Timeline(status, {"sampler-0": 0, "learner": 1}, tmp_path, lambda: 61.0)
    sampler.heartbeat(Phase.STEP)
    learner.heartbeat(Phase.UPDATE)
    assert not recorder.is_due
    recorder.begin()
    sampler.heartbeat(Phase.WAIT)
    sampler.heartbeat(Phase.STEP)
    assert recorder.is_due
    recorder.finish()
    learner.heartbeat(Phase.UPDATE)
    assert (recorder.is_due, recorder.recorded, int(status.events(0)[0]), int(status.events(1)[0])) == (
        False, True, 2, 0)  # fmt: skip
    workers = json.loads((tmp_path / TIMELINE).read_text())["workers"]
    assert [(worker["name"], [part[2] for part in worker["parts"]]) for worker in workers] == [
        ("sampler-0", ["step", "wait", "step"]),
        ("learner", ["update"]),  # whose one update lasts longer than the trace
    ]
    shown = newest_timeline(tmp_path)
    assert (shown["wall"], shown["workers"]) == ("1:01", workers)


def test_a_damaged_timeline_is_none(tmp_path):
    assert newest_timeline(tmp_path) is None
    (tmp_path / TIMELINE).write_text('{"wall_s": 1, "length_ms": 2, "workers": [{"name": "x", "parts": [[1, "y"]]}]}')
    assert newest_timeline(tmp_path) is None
