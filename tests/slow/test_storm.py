"""Eleven kinds of fault at one real run, and eight invariants that a checker outside of it looks at all the time.

The long form, whose result goes into ``assets/docs/quality.md``: ``python tests/benchmarks/quality.py faults``.
"""

import sys

import pytest
from fault_storm import KINDS, Storm, history

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into the run's memory through /proc"),
]


def test_f02_a_short_storm_of_every_kind_of_fault_keeps_eight_invariants(tmp_path):
    report = Storm(tmp_path).play(history(seed=1, faults=len(KINDS)))
    assert report.violations == []
    assert set(report.thrown) == set(KINDS)
    assert report.rows_checked > 500
    assert report.checkpoints_checked > 0
