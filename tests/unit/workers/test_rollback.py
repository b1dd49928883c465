"""A learner that goes back: what it had learned then, half the learning rates, and the same replay and counts."""

import dataclasses

import numpy as np
import pytest
from rings import ring_of

from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.transport.prioritised_replay import open_reader
from spreeze.transport.replay_ring import ShardWriter
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.types import Box, EnvSpec, RowLayout
from spreeze.workers.replay_trainer import ReplayTrainer

SPEC = EnvSpec(env_id="x", import_module=None, obs_dim=3, max_episode_steps=None, reward_threshold=None,
               action=Box((-1.0,), (1.0,)))  # fmt: skip


@pytest.fixture
def ring():
    with ring_of(RowLayout(3, 1), rows=512) as ring:
        fill_with_synthetic_rows(ring, SPEC)
        yield ring


def trainer_of(ring, **changes):
    config = dataclasses.replace(SECTIONS["sac"](), hidden_sizes=(8, 8), n_step=1, **changes)
    return ReplayTrainer(SPEC, "sac", config, ring.spec.layout, open_reader(ring, 0.0),
                         LearnerConfig(batch_size=32, device="cpu"), seed=1, normalize_obs=True)  # fmt: skip


def learn(trainer, updates):
    for _ in range(updates):
        trainer.update()


def arrays_of(trainer):
    return trainer.policy()[0]


@pytest.mark.parametrize(("changes", "scheduled"), [
    ({"lr_schedule": "constant"}, 1.0), ({"lr_schedule": "linear", "lr_end": 0.2}, 0.6),
    ({"policy_average": 0.9}, 1.0),
])  # fmt: skip
def test_it_has_the_networks_of_the_checkpoint_and_half_of_the_scheduled_rate(ring, changes, scheduled):
    trainer = trainer_of(ring, **changes)
    learn(trainer, 20)
    kept, then = trainer.state(), arrays_of(trainer)
    learn(trainer, 30)
    trainer.update_learning_rates(0.5)
    trainer.roll_back(*kept)
    for name, array in arrays_of(trainer).items():
        np.testing.assert_array_equal(array, then[name], err_msg=name)
    assert trainer.updates == trainer.algorithm.updates == 50, "versions and stop conditions count on"
    adam = trainer.algorithm.actor.adam
    assert adam._scaled_lr.item() == pytest.approx(0.5 * scheduled * adam.lr)
    assert trainer.metrics(wait_s=0.0, publish_s=0.0)["rollbacks"] == 1
    learn(trainer, 8)
    assert trainer.updates == 58
    changed = arrays_of(trainer)
    assert any((array != changed[name]).any() for name, array in then.items())


def test_a_restarted_learner_keeps_the_halved_rates_and_a_second_return_halves_them_again(ring):
    trainer = trainer_of(ring)
    learn(trainer, 8)
    kept = trainer.state()
    assert "rollbacks" not in trainer.metrics(wait_s=0.0, publish_s=0.0)
    trainer.roll_back(*kept)
    successor = trainer_of(ring)
    tensors, state = trainer.state()
    state["times_back"] = state.pop("rollbacks")  # its name in checkpoints of earlier versions
    successor.load_state(tensors, state)
    assert successor.algorithm.lr_multiplier == 0.5
    successor.roll_back(*kept)
    assert successor.algorithm.lr_multiplier == 0.25
    learn(successor, 3)
    assert successor.updates == 11


def test_what_fallen_policies_have_seen_does_not_change_how_the_restored_policy_acts(ring):
    trainer = trainer_of(ring)
    learn(trainer, 8)
    trainer.refresh()
    kept, then = trainer.state(), arrays_of(trainer)
    far, zeros = np.full((300, 3), 5.0, np.float32), np.zeros(300, np.float32)
    ShardWriter(ring, 0).write(far, zeros[:, None], zeros, zeros, far)
    learn(trainer, 8)
    trainer.refresh()
    assert (arrays_of(trainer)["obs_mean"] != then["obs_mean"]).any(), "its statistics went on"
    trainer.roll_back(*kept)
    trainer.refresh()
    np.testing.assert_array_equal(arrays_of(trainer)["obs_mean"], then["obs_mean"])
