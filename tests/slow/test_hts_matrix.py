"""The whole determinism matrix with real processes: inference workers x schedules x seeds x resume points; an hour."""

import os

import pytest
from harness import PATIENCE_S
from hts_runs import ROWS, fingerprints, played, slow, train

pytestmark = pytest.mark.skipif("SPREEZE_LONG_TESTS" not in os.environ, reason="an hour; set SPREEZE_LONG_TESTS=1")
INTERVALS = 12
ROLLOUT_SAMPLERS = ("--samplers", "8", "--envs-per-sampler", "1")
"""Eight of one environment each, so that there may be eight inference workers; a rollout is 8 rows a step."""


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda seed: f"seed {seed}")
def reference(request, tmp_path_factory):
    """Fingerprints of a run without inference workers that never stops, and the seed."""
    folder = tmp_path_factory.mktemp("reference")
    run, document = played(
        folder,
        "run",
        *ROLLOUT_SAMPLERS,
        "--seed",
        str(request.param),
        intervals=INTERVALS,
        rows=2 * ROWS,
        timeout_s=PATIENCE_S,
    )
    return fingerprints(run), document["parameters_sha256"], str(request.param)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", [2, 5, 9])
@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("inference_workers", [1, 2, 3, 4, 8])
def test_no_bit_differs(reference, tmp_path, inference_workers, schedule, point):
    lines, sha256, seed = reference
    run, _ = played(tmp_path, "run", *ROLLOUT_SAMPLERS, "--seed", seed, "--inference-workers",
                    str(inference_workers), *slow(schedule),
                    intervals=point, rows=2 * ROWS, timeout_s=PATIENCE_S)  # fmt: skip
    _, code, document = train(tmp_path, "--resume", "run", "--env-steps", str(2 * ROWS * INTERVALS), tiny=(),
                              timeout_s=PATIENCE_S)  # fmt: skip
    assert code == 0
    assert (fingerprints(run), document["parameters_sha256"]) == (lines, sha256)
