"""The learner bench: its count of operations by hand, and the shape of its rows."""

import pytest
from matmul_floor import MatmulRound, case_rows, learner_cases, matmuls


def test_operations_of_one_sac_update_counted_by_hand():
    # O 2, A 1, one hidden layer of 3, batch 5; multiplications of one row:
    actor, critic = 2 * 3 + 3 * 2, 3 * 3 + 3 * 1
    critics = 2 * (critic + critic + critic + critic)  # target, online, its weight gradients, at the fresh action
    to_action = 2 * 3 * 1
    actor_step = actor + 3 * 2  # weight gradients, and from the head's two outputs down to the hidden layer
    expected = 2 * 5 * (2 * actor + critics + to_action + actor_step)
    assert MatmulRound(matmuls("sac", 5, 2, 1, (3,))).flop == expected


def test_sac_at_2x256_costs_about_2_3_mflop_a_row():
    flop = MatmulRound(matmuls("sac", 256, 22, 6, (256, 256))).flop
    assert flop / 256 == pytest.approx(2.3e6, rel=0.02)


def test_delayed_actor_costs_td3_half_of_its_matmuls():
    every, second = (MatmulRound(matmuls("td3", 8, 4, 2, (16,), delay)).flop for delay in (1, 2))
    never = MatmulRound(matmuls("td3", 8, 4, 2, (16,), 10**9)).flop
    assert every - second == pytest.approx(second - never, rel=1e-6)


@pytest.mark.parametrize("algo", ["sac", "td3", "ddpg"])
def test_cases_hold_every_repeat_and_consistent_figures(algo):
    (case,) = learner_cases([16], repeats=2, obs_dim=3, action_dim=1, hidden=(16, 16), algo=algo)
    assert case["batch_size"] == 16
    assert {len(values) for values in case["repeats"].values()} == {2}
    assert case["update_frames_per_s"] == pytest.approx(16 * case["updates_per_s"])
    assert case["matmul_floor_share"] > 0
    assert case["learner_critic_share"] + case["learner_actor_share"] == pytest.approx(1.0)


def test_rows_tell_threads_apart_and_compare_them():
    cases = learner_cases([16], repeats=2, obs_dim=3, action_dim=1, hidden=(16,), threads=(1, 2))
    rows = case_rows(cases)
    assert [row["learner_threads"] for row in rows if row["metric"] == "updates_per_s"] == [1, 2]
    (ratio,) = (row for row in rows if row["metric"] == "over_one_thread")
    assert (ratio["learner_threads"], ratio["value"] > 0) == (2, True)
