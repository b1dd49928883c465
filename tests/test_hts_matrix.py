"""The whole determinism matrix with real processes: actors x schedules x seeds x resume points; an hour."""

import os

import pytest
from harness import PATIENCE_S, train
from hts_runs import ROWS, fingerprints, played, slow

pytestmark = pytest.mark.skipif("SPREEZE_LONG_TESTS" not in os.environ, reason="an hour; set SPREEZE_LONG_TESTS=1")
INTERVALS = 12
EXECUTORS = ("--executors", "8", "--envs-per-executor", "1")
"""Eight of one environment each, so that there may be eight actors; N, and so an interval, is 8 rows a step."""


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda seed: f"seed {seed}")
def reference(request, tmp_path_factory):
    """Fingerprints of a run without actors that never stops, and the seed."""
    folder = tmp_path_factory.mktemp("reference")
    run, document = played(folder, "run", *EXECUTORS, "--seed", str(request.param), intervals=INTERVALS, rows=2 * ROWS,
                           timeout_s=PATIENCE_S)
    return fingerprints(run), document["parameters_sha256"], str(request.param)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", [2, 5, 9])
@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("actors", [1, 2, 3, 4, 8])
def test_no_bit_differs(reference, tmp_path, actors, schedule, point):
    lines, sha256, seed = reference
    run, _ = played(tmp_path, "run", *EXECUTORS, "--seed", seed, "--actors", str(actors), *slow(schedule),
                    intervals=point, rows=2 * ROWS, timeout_s=PATIENCE_S)  # fmt: skip
    _, code, document = train(tmp_path, "--resume", "run", "--env-steps", str(2 * ROWS * INTERVALS), tiny=(),
                              timeout_s=PATIENCE_S)  # fmt: skip
    assert code == 0
    assert (fingerprints(run), document["parameters_sha256"]) == (lines, sha256)
