"""Size of an update and dead units: by hand, against what an update changes, and for every algorithm."""

import math

import numpy as np
import pytest
import torch
from batches import NAMES, OBS, batches, made, same
from rollouts import FRAMES, learner, rollout, task

from spreeze.algorithms import create
from spreeze.algorithms.networks.fused_mlp import HiddenLayers, dead_units, new_parameters
from spreeze.algorithms.optimizers import FlatAdam, FlatRMSProp
from spreeze.config.schema import SECTIONS
from spreeze.types import TransitionBatch


@pytest.mark.parametrize("kind", ["adam", "decaying adam", "scheduled adam", "rmsprop"])
def test_the_size_of_an_update_is_that_of_what_it_changed(kind):
    rng = np.random.default_rng(1)
    parameters, gradient = (torch.from_numpy(rng.normal(size=50).astype(np.float32)) for _ in range(2))
    if kind == "rmsprop":
        optimizer = FlatRMSProp(parameters, gradient, 1e-3, 0.9, 1e-5, 0.5)
    else:
        optimizer = FlatAdam(parameters, gradient, 1e-3)
        optimizer.weight_decay = 0.1 if kind == "decaying adam" else 0.0
    if kind == "scheduled adam":
        optimizer.scale_lr(0.25)
    for _ in range(3):
        before = parameters.clone()
        gradient.copy_(torch.from_numpy(rng.normal(size=50).astype(np.float32)))
        optimizer.step()
        expected = float((parameters - before).norm() / before.norm())
        assert optimizer.update_size == pytest.approx(expected, rel=1e-2)


def test_a_first_step_of_adam_is_the_learning_rate_in_each_component():
    parameters, gradient = torch.full((4,), 2.0), torch.tensor([1.0, -3.0, 0.5, 9.0])
    adam = FlatAdam(parameters, gradient, 0.01)
    assert math.isnan(adam.update_size)
    adam.step()
    assert adam.update_size == pytest.approx(0.02 / (2.0 * 2.0), rel=1e-2)  # sqrt(4) 0.01 over sqrt(4) 2


def network(activation="relu"):
    """Two networks of one hidden layer of three units, whose input is one number."""
    found = new_parameters((1, 3, 1), 2, torch.device("cpu"), layers=HiddenLayers(activation))
    found.weights[0][:] = torch.tensor([[1.0, -1.0, 0.0]])
    found.biases[0][:] = torch.tensor([[0.0, 0.0, -1.0]])
    return found


def test_units_that_are_zero_in_all_rows_are_dead():
    both, positive = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [2.0]])
    assert dead_units([(network(), both)]) == pytest.approx(1 / 3)
    assert dead_units([(network(), positive)]) == pytest.approx(2 / 3)
    assert dead_units([(network(), both), (network(), positive)]) == pytest.approx(1 / 2)
    assert math.isnan(dead_units([(network("tanh"), both)]))
    assert math.isnan(dead_units([]))


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in NAMES), ("sac", {"critic_layer_norm": True})])
def test_actor_and_critics_are_looked_at_and_stay_as_they_are(name, changes):
    algorithm = made(name, **changes)
    (batch,) = batches(1)
    algorithm.update(batch)
    before = algorithm.state_arrays()
    found = algorithm.health(batch)
    assert same(before, algorithm.state_arrays())
    assert found.keys() == {"update_size", "dead_units"}
    assert 0.0 < found["update_size"] < 0.1
    assert found["dead_units"] < 0.5
    for view in [*algorithm.actor.online.biases, *algorithm.critics.online.biases]:
        view.fill_(-1e6)
    assert algorithm.health(batch)["dead_units"] == 1.0


def test_the_entropy_coefficient_whose_logarithm_begins_at_0_is_no_network():
    algorithm = made("sac", initial_alpha=1.0)
    for batch in batches(2):
        algorithm.update(batch)
    assert 0.0 < algorithm.health(batch)["update_size"] < 0.1


def test_networks_that_are_none_of_vectors_tell_the_size_of_their_updates_alone():
    algorithm = made("sac", activation="tanh")
    (batch,) = batches(1)
    algorithm.update(batch)
    assert algorithm.health(batch).keys() == {"update_size"}
    assert made("sac", recurrent="gru").health(batch._replace(obs=batch.obs[None], obs_action=None)) == {}


def test_values_of_discrete_actions_are_looked_at_from_vectors_and_from_images():
    rng = np.random.default_rng(1)
    algorithm = create("dqn", OBS, 1, SECTIONS["dqn"](hidden_sizes=(16,)), 1, num_actions=3)
    (batch,) = batches(1)
    action = torch.zeros(len(batch.obs), 1)
    algorithm.update(batch._replace(action=action))
    assert algorithm.health(batch)["dead_units"] < 0.5
    algorithm = create("dqn", 0, 1, SECTIONS["dqn"](hidden_sizes=(16,), cnn="nature"), 1, num_actions=3, frames=FRAMES)
    obs = torch.from_numpy(rng.integers(0, 256, (8, FRAMES.stack, *FRAMES.shape)).astype(np.uint8))
    zeros = torch.zeros(8)
    algorithm.update(TransitionBatch(obs, torch.zeros(8, 1), None, zeros, zeros, 0.99, obs))
    assert algorithm.health(batch._replace(obs=obs))["dead_units"] < 0.9


@pytest.mark.parametrize("name", ["ppo", "a2c", "impact"])
def test_algorithms_of_rollouts_look_at_their_latest_minibatch(name):
    assert learner(name, task(), activation="relu").health() == {}
    algorithm = learner(name, task(), activation="relu")
    algorithm.learn(rollout(algorithm, task(), np.random.default_rng(2)), None)
    found = algorithm.health()
    assert 0.0 < found["update_size"] < 0.1
    assert found["dead_units"] < 0.5
    algorithm = learner(name, task())  # with tanh
    algorithm.learn(rollout(algorithm, task(), np.random.default_rng(2)), None)
    assert algorithm.health().keys() == {"update_size"}
