"""IMPACT and APPO learn in seconds, by counts: samplers and learner take turns, and every kind of space is learned."""

import math

import pytest
from counted_impact import counted_curve


@pytest.mark.parametrize("algo", ["impact", pytest.param("appo", marks=pytest.mark.slow)])
def test_a_pole_stands_after_some_ten_thousand_steps_of_samplers_that_lag(algo):
    flags = ["--env", "CartPole-v1", "--algo", algo, "--sync-interval", "16", "--set", "evaluation.episodes=5"]
    curve = counted_curve(flags, 36_000, 4_000, until=300.0)
    assert max(curve.returns) > 300.0
    assert curve.lag > 10.0


@pytest.mark.parametrize("algo", ["impact", "appo", "impala"])
def test_continuous_actions_are_learned_from(algo):
    flags = ["--env", "Pendulum-v1", "--algo", algo, "--sync-interval", "8", "--set", "evaluation.episodes=1", "--set",
             f"{algo}.uses=2"]  # fmt: skip
    curve = counted_curve(flags, 1_024, 512)
    assert all(math.isfinite(value) for value in curve.returns)
    assert curve.updates[-1] >= 1_024 // 64
