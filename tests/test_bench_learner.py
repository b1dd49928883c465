"""The learner bench: its count of operations by hand, and the shape of its rows; a crew beside; a picture."""

import pytest

from spreeze.bench.beside import beside_rows
from spreeze.bench.learner import ProductRound, learner_rows, products
from spreeze.bench.learner_plot import draw_learner
from spreeze.envs.probe import probe_env
from spreeze.settings import Layer, resolve
from spreeze.workers.plan import RunPlan


def test_operations_of_one_sac_update_counted_by_hand():
    # O 2, A 1, one hidden layer of 3, batch 5; multiplications of one row:
    actor, critic = 2 * 3 + 3 * 2, 3 * 3 + 3 * 1
    critics = 2 * (critic + critic + critic + critic)  # target, online, its weight gradients, at the fresh action
    to_action = 2 * 3 * 1
    actor_step = actor + 3 * 2  # weight gradients, and from the head's two outputs down to the hidden layer
    expected = 2 * 5 * (2 * actor + critics + to_action + actor_step)
    assert ProductRound(products("sac", 5, 2, 1, (3,))).flop == expected


def test_sac_at_2x256_costs_about_2_3_mflop_a_row():
    flop = ProductRound(products("sac", 256, 22, 6, (256, 256))).flop
    assert flop / 256 == pytest.approx(2.3e6, rel=0.02)


def test_delayed_actor_costs_td3_half_of_its_products():
    every, second = (ProductRound(products("td3", 8, 4, 2, (16,), delay)).flop for delay in (1, 2))
    never = ProductRound(products("td3", 8, 4, 2, (16,), 10**9)).flop
    assert every - second == pytest.approx(second - never, rel=1e-6)


@pytest.mark.parametrize("algo", ["sac", "td3", "ddpg"])
def test_rows_hold_every_repeat_and_consistent_figures(algo):
    (row,) = learner_rows([16], repeats=2, obs_dim=3, action_dim=1, hidden=(16, 16), algo=algo)
    assert row["batch_size"] == 16
    assert {len(values) for values in row["repeats"].values()} == {2}
    assert row["update_frames_per_s"] == pytest.approx(16 * row["updates_per_s"])
    assert row["product_floor_share"] > 0
    assert row["learner_critic_share"] + row["learner_actor_share"] == pytest.approx(1.0)


def test_a_picture_is_drawn_of_all_batch_sizes_and_threads(tmp_path):
    cases = learner_rows([8, 16], repeats=2, obs_dim=3, action_dim=1, hidden=(16,), threads=(1, 2))
    draw_learner(cases, "a machine", tmp_path / "learner.png")
    assert (tmp_path / "learner.png").read_bytes().startswith(b"\x89PNG")


def test_beside_a_sampler_that_is_held_back_both_kinds_of_learner_are_measured():
    settings = resolve([Layer("user", {"env": {"id": "Pendulum-v1"}, "sac": {"hidden_sizes": [16, 16]}})])
    plan = RunPlan(settings=settings, spec=probe_env("Pendulum-v1", steps=0).spec, samplers=1, free_core=False)
    rows = beside_rows(plan, 32, repeats=2, window_s=1.0)
    assert [row["learner_threads"] for row in rows if row["metric"] == "updates_per_s"] == [1, 2]
    assert all(rate > 0 for row in rows for rate in row["repeats"] if row["metric"] == "updates_per_s")
    assert len(rows[-1]["repeats"]) == 2
