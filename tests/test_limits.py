"""The band of samples per insert, kept in real runs: within 5 % on either side."""

import pytest
from harness import PENDULUM, train


@pytest.mark.timeout(90)
def test_minimum_throttles_fast_samplers(tmp_path):
    _, code, document = train(tmp_path, *PENDULUM, "--samples-per-insert", "64:100000", "--updates", "4000")
    assert code == 0
    assert 64 * 0.95 <= document["samples_per_insert"] <= 64 * 1.05
    assert document["time_split"]["sampler_wait_share"] > 0.3


@pytest.mark.timeout(90)
def test_maximum_throttles_a_fast_learner(tmp_path):
    # 2 ms a step, four environments: at most 500 env steps/s, 4 samples per insert at batch 32: 62 updates/s.
    _, code, document = train(
        tmp_path, "--env", "spreeze/Fault-v0", "--import", "spreeze.envs.faults", "--samples-per-insert", "0.5:4",
        "--updates", "250", faults={"step_s": 0.002},
    )  # fmt: skip
    assert code == 0
    assert 4 * 0.95 <= document["samples_per_insert"] <= 4 * 1.05
    assert document["time_split"]["learner_wait_share"] > 0.3
