"""Twelve kinds of fault at real runs, and eight invariants that a checker outside of it looks at all the time.

The long form, whose result goes into ``assets/docs/quality.md``: ``python tests/benchmarks/quality.py faults``.
"""

import sys

import pytest
from fault_storm import KINDS, LEFT_OUT, Fault, Storm, history

from spreeze.errors import ResourceError

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into the run's memory through /proc"),
]


def test_f02_a_short_storm_of_every_kind_of_fault_keeps_eight_invariants(tmp_path):
    report = Storm(tmp_path).play(history(seed=1, faults=len(KINDS) - 1))
    assert report.violations == []
    assert set(report.thrown) == set(KINDS) - {LEFT_OUT}
    assert report.rows_checked > 500
    assert report.checkpoints_checked > 0


def test_a_short_storm_over_two_hosts_with_partitions_between_them_keeps_eight_invariants(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[cluster]'")
    faults = [Fault("kill", "bridge"), Fault("partition", size=0.1), Fault("kill", "learner", settles=False),
              Fault("partition", size=0.9), Fault("kill", "sampler-0")]  # fmt: skip
    try:
        report = Storm(tmp_path, hosts=True).play(faults)
    except ResourceError as error:
        pytest.skip(str(error))
    assert report.violations == []
    assert report.thrown == {"kill": 3, "partition": 2}
    assert report.rows_checked > 500
