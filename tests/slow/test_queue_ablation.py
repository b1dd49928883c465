"""The paper's ablation: writer and reader joined by the replay ring, or by a queue.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_REPEATS=3 pytest tests/slow/test_queue_ablation.py``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from long_form import PATIENCE_S, asked, by_hand

REPEATS = asked("REPEATS", 3)
_LONG_S = 300.0 * REPEATS
pytestmark = pytest.mark.timeout(600)


def _ablation(timeout_s=PATIENCE_S, **arguments):
    program = Path(__file__).with_name("queue_ablation.py")
    done = subprocess.run([sys.executable, program, json.dumps(arguments)], capture_output=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def _by_transport(rows, metric):
    return {row["transport"]: row["value"] for row in rows if row["metric"] == metric}


def test_a_ring_loses_no_row_beside_a_queue():
    rows = _ablation(repeats=1, seconds=0.5, rows_per_s=2000.0, update_s=0.002, queue_sizes=[100])
    assert _by_transport(rows, "rows_lost_share")["ring"] == 0.0
    for metric in ("transfer_cycle_hz", "rows_received_per_s", "updates_per_s"):
        assert all(value > 0 for value in _by_transport(rows, metric).values()), metric


@by_hand
@pytest.mark.timeout(_LONG_S + 60.0)
def test_a_ring_takes_less_of_the_reader_s_time_than_queues_of_the_paper_s_sizes(report):
    rows = _ablation(_LONG_S, repeats=REPEATS)
    report(rows)
    share = _by_transport(rows, "learner_receive_share")
    assert share.pop("ring") < min(share.values())
