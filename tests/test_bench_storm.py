"""A storm of a few seconds; the long one is ``python -m spreeze.bench storm``."""

import sys

import pytest

from spreeze.bench.soak import soak_rows
from spreeze.bench.storm import SAMPLERS, storm_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into the run's memory through /proc")


@pytest.mark.timeout(110)
def test_f02_a_short_storm_over_all_roles_keeps_every_promise(tmp_path):
    rows = {row["metric"]: row for row in storm_rows(0.25, 60.0, str(tmp_path / "runs"), seed=3)}
    assert rows["kills"]["value"] >= 2
    assert rows["rows_torn"]["value"] == 0
    assert rows["rows_torn"]["rows_checked"] > 50_000
    unaccounted, allowed = rows["rows_unaccounted"]["value"], int(rows["rows_unaccounted"]["target"].split()[-1])
    assert 0 <= unaccounted <= allowed
    for name in ("versions_going_back", "exit_code", "orphans_after_5_s", "shared_memory_left"):
        assert rows[name]["value"] == 0, name
    assert sum(rows["kills"][f"sampler-{index}"] for index in range(SAMPLERS)) >= 1


@pytest.mark.timeout(60)
def test_a_short_soak_gives_slopes_and_drifts(tmp_path):
    extra = ["--samplers", "1", "--batch-size", "32", "--replay-capacity", "20000", "--no-visualizer", "--set",
             "sac.hidden_sizes=[32,32]"]  # fmt: skip
    rows = {row["metric"]: row for row in soak_rows(5 / 3600, "Pendulum-v1", str(tmp_path / "runs"), extra, 0.5)}
    assert rows["memory_bytes_slope"]["first"] > 20e6
    assert rows["descriptors_slope"]["first"] > 10
    assert rows["updates_per_s_drift"]["first"] > 0
    assert (rows["exit_code"]["value"], rows["orphans_after_5_s"]["value"]) == (0, 0)
