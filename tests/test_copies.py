"""Actor and critics beside copies of each other: what each trains against, when copies are renewed, and resuming."""

import dataclasses
import json

import pytest
import torch
from harness import verb
from test_algorithms import ACT, NAMES, OBS, batches, same

from spreeze.algorithms.nn.two_thread_update import ThreadPair
from spreeze.algorithms.registry import create
from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import PARTS
from spreeze.errors import ConfigError
from spreeze.runtime.plan import RunPlan
from spreeze.types import EnvSpec

ROWS = 32


def made(name, device="cpu", **options):
    config = dataclasses.replace(PARTS[name](), hidden_sizes=(16, 16))
    return create(name, OBS, ACT, config, 1, device, **options)


def trained(name, count, **options):
    algorithm = made(name, **options)
    for batch in batches(count, ROWS):
        algorithm.update(batch)
    return algorithm


def by_hand(name, count, interval):
    """Two plain algorithms: of one only the actor is trained, of the other only the critics."""
    first, second = made(name), made(name)
    for number, batch in enumerate(batches(count, ROWS), start=1):
        with torch.inference_mode():
            action = first.propose(batch).action
            if action is not None:
                first.actor_step(first.action_gradient(batch, action))
            first.updates += 1
            proposal = second.propose(batch)
            second.critic_step(batch, proposal.next_action, proposal.next_log_prob)
            second.update_targets()
            if number % interval == 0:
                first.critics.online.flat.copy_(second.critics.online.flat)
                second.actor.online.flat.copy_(first.actor.online.flat)
                if name == "sac":
                    second.actor.temperature.log_alpha.copy_(first.actor.temperature.log_alpha)
                    second.actor.temperature.derive()
    return {f"actor_side.{key}": value for key, value in first.state_arrays().items()} | {
        f"critic_side.{key}": value for key, value in second.state_arrays().items()
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("interval", [1, 4])
def test_each_side_trains_against_the_copy_of_the_other(name, interval):
    assert same(trained(name, 10, device="cpu+cpu", copy_interval=interval).state_arrays(), by_hand(name, 10, interval))


@pytest.mark.parametrize("name", NAMES)
def test_two_threads_give_the_bits_of_one(name):
    with ThreadPair() as pair:
        paired = trained(name, 50, copy_interval=3, pair=pair)
    assert same(paired.state_arrays(), trained(name, 50, copy_interval=3).state_arrays())


def test_copies_are_renewed_at_each_interval_and_stay_meanwhile():
    algorithm, equal = made("sac", copy_interval=3), []
    for batch in batches(7, ROWS):
        algorithm.update(batch)
        state = algorithm.state_arrays()
        equal.append([(state[f"actor_side.{key}"] == state[f"critic_side.{key}"]).all()
                      for key in ("actor.online", "actor.log_alpha", "critics.online")])  # fmt: skip
    assert equal == [[number % 3 == 0] * 3 for number in range(1, 8)]
    crossing = "actor_side.actor.online", "actor_side.actor.log_alpha", "critic_side.critics.online"
    assert algorithm.crossed_bytes == 2 * sum(state[key].nbytes for key in crossing)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_one_goes_on_bit_for_bit(name):
    whole, first, resumed = (made(name, copy_interval=4) for _ in range(3))
    drawn = list(batches(20, ROWS))
    for batch in drawn:
        whole.update(batch)
    for batch in drawn[:9]:
        first.update(batch)
    resumed.load_state_arrays(first.state_arrays())
    resumed.load_state_json(json.loads(json.dumps(first.state_json())))
    for batch in drawn[9:]:
        resumed.update(batch)
    assert resumed.updates == 20
    assert same(resumed.state_arrays(), whole.state_arrays())


def test_what_is_published_and_shown_is_of_the_sides_that_are_trained():
    algorithm = trained("sac", 5, copy_interval=100)
    state = algorithm.state_arrays()
    assert (algorithm.policy_arrays()["b1"] != made("sac").policy_arrays()["b1"]).any()
    assert state["critic_side.actor.adam.steps"] == 0
    assert {"critic_loss", "q_mean", "actor_loss", "entropy", "alpha"} <= algorithm.metrics().keys()
    assert algorithm.metrics()["critic_grad_norm"] > 0 < algorithm.metrics()["actor_grad_norm"]
    assert algorithm.all_finite()
    assert algorithm.updates_skipped() == 0


def test_a_run_with_copies_learns_in_two_threads(tmp_path):
    done = verb("train", "--env", "Pendulum-v1", "--mode", "serial", "--updates", "60", "--learner-threads", "2",
                "--runs-dir", str(tmp_path), "--set", "learner.copy_interval=4", "--set", "sac.hidden_sizes=[16,16]",
                "--json")  # fmt: skip
    assert json.loads(done.stdout)["updates"] == 60


@pytest.mark.parametrize(
    ("changes", "reason"), [({"overlap": True}, "choose one"), ({"num_actions": 2}, "continuous actions")]
)
def test_what_does_not_go_together_is_refused(changes, reason):
    spec = EnvSpec(env_id="x", import_module=None, obs_dim=OBS, action_dim=1, action_low=(-1.0,), action_high=(1.0,),
                   max_episode_steps=None, reward_threshold=None, num_actions=changes.get("num_actions"))  # fmt: skip
    learner = {"copy_interval": 2, "overlap": changes.get("overlap", False)}
    with pytest.raises(ConfigError, match=reason):
        RunPlan(settings=resolve([Layer("user", {"learner": learner})]), spec=spec, samplers=1, free_core=False)
