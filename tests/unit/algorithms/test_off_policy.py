"""The contract of off-policy algorithms, checked for every entry of the registry."""

import contextlib
import dataclasses
import gc
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import ACT, NAMES, OBS, batches, made, same

from spreeze.algorithms import create
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.algorithms.sac import DiscreteSAC
from spreeze.config.schema import SECTIONS, StopConfig
from spreeze.errors import CheckpointError, ConfigError
from spreeze.metrics.table import by_name
from spreeze.types import Choices, EnvSpec
from spreeze.workers.learner import run_progress
from spreeze.workers.replay_learner import TargetPace, slow_target_advice
from spreeze.workers.rollout_learner import progress_of


def trained(name, count, seed=1, **changes):
    algorithm = made(name, seed, **changes)
    for batch in batches(count):
        algorithm.update(batch)
    return algorithm


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dropped_buffers_are_free_and_the_next_update_is_what_it_would_have_been(name, threads):
    def large():
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what else lives in this process
            return {id(thing) for thing in gc.get_objects()
                    if type(thing) is torch.Tensor and {1999, 3998} & set(thing.shape)}  # fmt: skip

    gc.collect()
    gc.freeze()  # what was there before is no object to look at, here and later
    before, config = large(), dataclasses.replace(SECTIONS[name](), hidden_sizes=(16, 16))
    with contextlib.ExitStack() as stack:
        found = []
        for drops in (False, True):
            algorithm = create(name, OBS, ACT, config, 1)
            algorithm.set_parallel(stack.enter_context(contextlib.closing(TwoThreads())) if threads == 2 else None)
            for index, batch in enumerate(batches(4, size=1999)):
                algorithm.update(batch)
                if drops and index % 2:
                    algorithm.drop_buffers()
            del batch
            assert drops or large() != before
            algorithm.drop_buffers()
            assert large() == before
            assert algorithm.updates_skipped() == 0
            algorithm.metrics()
            found.append(algorithm.state_arrays())
        assert same(*found)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_the_same_weights_and_another_seed_does_not(name):
    first, second, other = (trained(name, 5, seed).policy_arrays() for seed in (1, 1, 2))
    assert same(first, second)
    assert not same(first, other)


@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bit_exact(name):
    whole, resumed = made(name), made(name, seed=99)
    all_batches = list(batches(41))
    for batch in all_batches[:21]:
        whole.update(batch)
    arrays, state = whole.state_arrays(), json.loads(json.dumps(whole.state_json()))
    for batch in all_batches[21:]:
        whole.update(batch)
    resumed.load_state_arrays(arrays)
    resumed.load_state_json(state)
    for batch in all_batches[21:]:
        resumed.update(batch)
    assert same(whole.state_arrays(), resumed.state_arrays())
    assert whole.state_json() == resumed.state_json()


@pytest.mark.parametrize("name", NAMES)
def test_update_is_its_four_functions_in_order(name):
    whole, parts = made(name), made(name)
    for batch in batches(6):
        whole.update(batch)
        outputs = parts.actor_forward(batch)
        parts.critic_step(batch, outputs.next_action, outputs.next_log_prob)
        if outputs.action is not None:
            parts.actor_step(parts.action_gradient(batch, outputs.action))
        parts.update_targets()
        parts.updates += 1
    assert same(whole.state_arrays(), parts.state_arrays())


@pytest.mark.parametrize("name", NAMES)
def test_snapshots_are_copies(name):
    algorithm = trained(name, 2)
    policy, state = algorithm.policy_arrays(), algorithm.state_arrays()
    before = {key: array.copy() for key, array in (policy | state).items()}
    for batch in batches(2):
        algorithm.update(batch)
    assert same(before, policy | state)
    assert not same(policy, algorithm.policy_arrays())


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_finite_and_in_the_table(name):
    metrics = trained(name, 4).metrics()
    assert {"critic_loss", "q_mean", "critic_grad_norm", "actor_loss", "actor_grad_norm"} <= metrics.keys()
    assert all(np.isfinite(value) and by_name(key) for key, value in metrics.items())


@pytest.mark.parametrize("name", NAMES)
def test_metrics_before_any_update_are_finite_too(name):
    assert all(np.isfinite(value) for value in made(name).metrics().values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["obs", "reward", "next_obs"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_non_finite_batch_is_refused_and_counted(name, field, poison):
    algorithm = trained(name, 4)
    bad = next(iter(batches(1, seed=7)))
    getattr(bad, field)[3] = poison
    algorithm.update(bad)
    algorithm.update(bad)
    skipped = algorithm.updates_skipped()
    assert skipped >= 1
    assert all(np.isfinite(array).all() for array in algorithm.state_arrays().values())
    assert all(np.isfinite(value) for value in algorithm.metrics().values())
    for batch in batches(2):
        algorithm.update(batch)
    assert algorithm.updates_skipped() == skipped


@pytest.mark.parametrize("name", NAMES)
def test_batch_size_may_change_between_updates(name):
    algorithm = made(name)
    for size in (32, 64, 7, 32):
        for batch in batches(2, size):
            algorithm.update(batch)
    assert algorithm.updates_skipped() == 0


@pytest.mark.parametrize("name", NAMES)
def test_n_step_batches_are_taken(name):
    algorithm = made(name)
    for batch in batches(3, n_step=3):
        algorithm.update(batch)
    assert algorithm.updates_skipped() == 0


@pytest.mark.parametrize("name", NAMES)
def test_batch_is_left_as_it_was(name):
    algorithm, batch = made(name), next(batches(1))
    before = [tensor.clone() if isinstance(tensor, torch.Tensor) else tensor for tensor in batch]
    for _ in range(2):
        algorithm.update(batch)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, batch, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_update_times_are_positive_and_split(name):
    critic_s, actor_s = made(name).update(next(batches(1)))
    assert critic_s > 0
    assert actor_s > 0


@pytest.mark.parametrize("name", NAMES)
def test_state_of_another_network_is_refused_and_nothing_is_changed(name):
    algorithm, wider = made(name), made(name, hidden=(16, 32))
    before = algorithm.state_arrays()
    with pytest.raises(CheckpointError, match=r"actor\.online.*shape"):
        algorithm.load_state_arrays(wider.state_arrays())
    with pytest.raises(CheckpointError, match="no 'critics"):
        algorithm.load_state_arrays({key: value for key, value in before.items() if key != "critics.online"})
    with pytest.raises(CheckpointError, match="made by 'other'"):
        algorithm.load_state_json({"algo": "other", "updates": 3})
    assert same(before, algorithm.state_arrays())


def test_unknown_algorithm_is_named_with_the_nearest_known():
    with pytest.raises(ConfigError, match="did you mean 'sac'"):
        create("sacc", OBS, ACT, SECTIONS["sac"](), 0)


def test_td3_moves_actor_and_targets_only_at_every_delayed_update():
    algorithm = made("td3", policy_delay=3)
    moved = []
    for batch in batches(6):
        before = algorithm.actor.online.flat.clone(), algorithm.critics.target.flat.clone()
        algorithm.update(batch)
        after = algorithm.actor.online.flat, algorithm.critics.target.flat
        moved.append(tuple(not torch.equal(old, new) for old, new in zip(before, after, strict=True)))
    assert moved == [(False, False), (False, False), (True, True)] * 2


@pytest.mark.parametrize("discrete", [False, True])
def test_sac_moves_actor_and_temperature_only_at_every_delayed_update(discrete):
    config = dataclasses.replace(SECTIONS["sac"](), hidden_sizes=(16, 16), policy_delay=3)
    algorithm = DiscreteSAC(OBS, 3, config, 1) if discrete else create("sac", OBS, ACT, config, 1)
    moved = []
    for batch in batches(6):
        if discrete:
            batch.action[:] = 1.0
        before = algorithm.actor.online.flat.clone(), algorithm.log_alpha.clone(), algorithm.critics.target.flat.clone()
        algorithm.update(batch)
        after = algorithm.actor.online.flat, algorithm.log_alpha, algorithm.critics.target.flat
        moved.append(tuple(not torch.equal(old, new) for old, new in zip(before, after, strict=True)))
    assert moved == [(False, False, True), (False, False, True), (True, True, True)] * 2


def test_td3_without_delay_noise_or_second_critic_is_ddpg():
    td3 = made("td3", policy_delay=1, target_noise=0.0)
    ddpg = made("ddpg")
    one = ddpg.critics.online.one(0)
    for (mine, _), (theirs, _) in zip(td3.critics.online.blocks(), one.blocks(), strict=True):
        mine.copy_(theirs.expand_as(mine))
    td3.critics.target.flat.copy_(td3.critics.online.flat)
    for batch in batches(5):
        td3.update(batch)
        ddpg.update(batch)
    for key, array in td3.policy_arrays().items():
        np.testing.assert_allclose(array, ddpg.policy_arrays()[key], rtol=1e-4, atol=1e-6)


def test_sac_temperature_stays_where_tuning_is_off():
    algorithm = trained("sac", 4, tune_alpha=False, initial_alpha=0.25)
    assert algorithm.metrics()["alpha"] == pytest.approx(0.25)


def test_sac_temperature_falls_while_entropy_is_above_its_target():
    for target, bounds in ((-50.0, (0.0, 0.95)), (50.0, (1.05, 2.0))):
        made = trained("sac", 10, target_entropy_per_action=target, alpha_lr=0.01, initial_alpha=1.0)
        assert bounds[0] < made.metrics()["alpha"] < bounds[1]


@pytest.mark.parametrize("share", [None, 0.25])
def test_weight_decay_is_that_of_torch_adamw_with_the_step_size_of_then(share):
    parameters, gradient = torch.linspace(-1, 1, 9), torch.zeros(9)
    twin = parameters.clone().requires_grad_()
    adam = FlatAdam(parameters, gradient, 1e-2)
    adam.weight_decay, adam.beta1 = 0.3, 0.5
    reference = torch.optim.AdamW([twin], lr=1e-2 * (share or 1.0), betas=(0.5, 0.999), weight_decay=0.3)
    if share is not None:
        adam.scale_lr(1.0)
        adam.scale_lr(share)
    for step in range(5):
        gradient.copy_(torch.cos(step + torch.arange(9.0)))
        twin.grad = gradient.clone()
        adam.step()
        reference.step()
    torch.testing.assert_close(parameters, twin.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("schedule", "shares"), [
    ("constant", [1.0, 1.0, 1.0]), ("linear", [1.0, 0.75, 0.0]), ("cosine", [1.0, 0.853553, 0.0]),
])  # fmt: skip
def test_step_sizes_fall_to_a_tenth_at_the_end_of_a_run_or_to_nothing_where_it_is_said(schedule, shares):
    tenth = made("sac", lr_schedule=schedule, critic_lr=0.1)
    tenth.anneal(1.0)
    adam = tenth.critics.adam
    assert (adam.lr if adam._scaled_lr is None else adam._scaled_lr.item()) == pytest.approx(
        0.1 if schedule == "constant" else 0.01
    )
    algorithm = made(
        "sac", lr_schedule=schedule, lr_end=0.0, weight_decay=0.1, actor_lr=0.2, critic_lr=0.1, alpha_lr=0.4
    )
    assert [adam.weight_decay for adam in algorithm._optimizers] == [0.1, 0.1, 0.0], "the temperature is no weight"
    for progress, share in zip((0.0, 0.25, 1.0), shares, strict=True):
        algorithm.anneal(progress)
        sizes = [adam.lr if adam._scaled_lr is None else adam._scaled_lr.item() for adam in algorithm._optimizers]
        assert sizes == pytest.approx([0.1 * share, 0.2 * share, 0.4 * share])
    before = algorithm.policy_arrays()["w0"]
    algorithm.update(next(batches(1)))
    assert np.array_equal(algorithm.policy_arrays()["w0"], before) == (schedule != "constant")


def test_a_run_is_over_by_the_stop_condition_that_comes_first():
    stop = SECTIONS["stop"](seconds=100.0, env_steps=1000, updates=None, target_return=1.0)
    assert run_progress(stop, 0.0, 50.0, 100, 10**9) == 0.5
    assert run_progress(stop, 0.0, 50.0, 900, 0) == 0.9
    assert run_progress(stop, 300.0, 50.0, 0, 0) == 0.875, "a resumed run does not begin anew"
    assert run_progress(SECTIONS["stop"](target_return=1.0), 0.0, 50.0, 900, 5) == 0.0
    assert run_progress(SECTIONS["stop"](seconds=0.0), 0.0, 50.0, 900, 5) == 0.0, "it trains until Ctrl-C"
    assert run_progress(SECTIONS["stop"](budget_s=200.0), 0.0, 50.0, 900, 5) == 0.25, "it ends by itself"


def test_flat_adam_equals_torch_adam():
    generator = torch.Generator().manual_seed(0)
    parameters, gradient = torch.randn(50, generator=generator), torch.zeros(50)
    twin = parameters.clone().requires_grad_()
    adam, reference = FlatAdam(parameters, gradient, 1e-2), torch.optim.Adam([twin], lr=1e-2)
    for _ in range(20):
        gradient.copy_(torch.randn(50, generator=generator))
        twin.grad = gradient.clone()
        adam.step()
        reference.step()
    torch.testing.assert_close(parameters, twin.detach(), rtol=1e-5, atol=1e-6)
    assert adam.gradient_norm == pytest.approx(gradient.norm().item(), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_of_the_policy_is_that_of_when_it_was_taken(name):
    algorithm = made(name)
    before, snapshot = algorithm.policy_arrays(), algorithm.policy_snapshot()
    for batch in batches(4):
        algorithm.update(batch)
    assert same(snapshot(), before)
    assert not same(algorithm.policy_arrays(), before)


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_the_penalty_on_actions_adds_the_gradient_of_the_mean_square_of_what_is_squashed(name):
    gradients = []
    for weight in (0.0, 0.5):
        algorithm = made(name, action_penalty=weight, **({"policy_delay": 1} if name == "td3" else {}))
        algorithm.actor.adam.step = lambda: None  # the gradient alone
        batch = next(batches(1))
        algorithm.update(batch)
        gradients.append(algorithm.actor.gradient.flat.clone())
    actor = algorithm.actor.online
    leaves = [*actor.weights, *actor.biases, actor.head_weight, actor.head_bias]
    for leaf in leaves:
        leaf.requires_grad_()
    x = batch.obs.unsqueeze(0)
    for weight, bias in zip(actor.weights, actor.biases, strict=True):
        x = torch.relu(x @ weight + bias)
    out = actor.head_weight @ x.transpose(1, 2) + actor.head_bias
    found = torch.autograd.grad(0.5 * out[:, :ACT].square().mean(), leaves)
    for leaf, expected in zip(leaves, found, strict=True):
        offset = (leaf.data_ptr() - actor.flat.data_ptr()) // 4
        added = (gradients[1] - gradients[0])[offset : offset + leaf.numel()]
        torch.testing.assert_close(added, expected.flatten(), rtol=1e-4, atol=1e-6)


def test_discrete_actions_have_no_penalty():
    spec = EnvSpec(
        env_id="T-v0", import_module=None, obs_dim=4, action=Choices((3,)), max_episode_steps=10, reward_threshold=None
    )
    with pytest.raises(ConfigError, match=r"action_penalty = 0.1: discrete actions have no tanh"):
        SECTIONS["sac"](action_penalty=0.1).check_task(spec)


def test_an_on_policy_step_size_follows_env_steps_where_a_run_ends_by_them_and_else_the_clock_if_alone():
    def progress(stop, earlier_s=0.0, mix=None):
        return progress_of(SimpleNamespace(stop=stop, previous_wall_s=earlier_s, mix=mix), lambda: 50.0)

    assert progress(StopConfig(seconds=200.0))(10**9) == 0.25
    assert progress(StopConfig(seconds=200.0), 200.0)(0) == 0.625, "a resumed run does not begin anew"
    assert progress(StopConfig(seconds=40.0))(0) == 1.0, "also while a run ends"
    assert progress(StopConfig(budget_s=200.0))(10**9) == 0.25, "it ends by itself"
    assert progress(StopConfig(seconds=0.0))(10**9) == 0.0, "it trains until Ctrl-C"
    assert progress(StopConfig(seconds=60.0, env_steps=1000))(100) == 0.1
    assert progress(StopConfig(seconds=60.0, env_steps=1000), mix=SimpleNamespace(learners=4))(100) == 0.4
    for other in ({"target_return": 1.0}, {"updates": 8}):
        assert progress(StopConfig(seconds=60.0, **other))(0) == 0.0, "the time is only a limit"
    told = StopConfig(seconds=200.0, target_return=1.0, target_evaluations=0)
    assert progress(told)(0) == 0.25, "this return ends nothing"
    assert (
        progress(StopConfig(seconds=60.0), mix=SimpleNamespace(learners=2, mixing="all_reduce", hosts=None))(0) == 0.0
    )


@pytest.mark.parametrize(("mixing", "hosts", "share"), [("gossip", None, 0.625), ("all_reduce", None, 0.0),
                                                       ("gossip", "another host", 0.0)])  # fmt: skip
def test_learners_whose_clocks_differ_keep_their_step_size(mixing, hosts, share):
    mix = SimpleNamespace(learners=2, mixing=mixing, hosts=hosts)
    job = SimpleNamespace(stop=StopConfig(seconds=200.0), previous_wall_s=200.0, mix=mix)
    assert progress_of(job, lambda: 50.0)(0) == share
    job.stop = StopConfig(seconds=200.0, env_steps=1000)
    assert progress_of(job, lambda: 50.0)(100) == 0.2, "env steps are counted alike by all"


def test_targets_that_follow_too_slowly_are_named_with_the_time_that_values_need():
    text = slow_target_advice(0.005, 230.0, 0.01)
    assert text.endswith("(1.2 backups/s: tau 0.005 an update, 230 updates/s over 20 s)")
    assert "Q-values need about 87 s to adapt" in text
    assert slow_target_advice(0.02, 230.0, 0.01) is None
    assert slow_target_advice(0.005, 0.0, 0.01) is slow_target_advice(0.005, 230.0, 0.0) is None, (
        "no updates, or gamma is 1"
    )
    pace = TargetPace(0.005, 0.99, 1)
    assert [pace.note(*at) for at in ((100.0, 50), (110.0, 60))] == [None, None]
    assert "10 updates/s" in pace.note(120.0, 250)
    assert pace.note(200.0, 300) is None, "told once"
    for name, share in (("dqn", 0.25), ("sac", 0.5), ("td3", 0.25)):
        period = {"target_interval" if name == "dqn" else "policy_delay": 2}
        settings = {"tau": 0.5, "hidden_sizes": (8,), **period}
        made = create(name, 3, 1, SECTIONS[name](**settings), 1, num_actions=2 if name == "dqn" else None)
        assert made.effective_tau == share
