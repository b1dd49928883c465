"""IMPACT, APPO and IMPALA: equal to PPO and A2C where nothing lags, and to their formulas where something does."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy_reference import central_difference
from rollouts import FRAMES, learner, rollout, task

from spreeze.algorithms import losses
from spreeze.errors import CheckpointError
from spreeze.inference.policy import Policy

NAMES = ("impact", "appo", "impala")
SAME = {"gamma": 0.9, "gae_lambda": 0.8, "lr": 0.01, "entropy_coef": 0.02, "value_coef": 0.7, "max_grad_norm": 0.5}


def lagging(batch, shift):
    """The rollout as a policy with other probabilities would have drawn it."""
    return batch._replace(log_prob=(batch.log_prob + shift).astype(np.float32))


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize(("uses", "minibatches"), [(1, 1), (3, 4)])
@pytest.mark.parametrize("name", ["impact", "appo"])
def test_with_one_slot_and_no_lag_it_is_ppo_with_as_many_epochs(name, uses, minibatches, discrete):
    spec, rng = task(discrete=discrete), np.random.default_rng(0)
    settings = {"dtype": torch.float64, "clip": 0.2, **SAME}
    ours = learner(name, spec, "none", slots=1, uses=uses, least_uses=0, minibatches=minibatches, **settings)
    ppo = learner("ppo", spec, epochs=uses, minibatch_size=32 // minibatches, **settings)
    ours.net.flat.copy_(ppo.net.flat)
    if name == "impact":
        ours.target.copy_(ppo.net.flat)
        assert ours.target_interval == uses * minibatches
    for _ in range(3):
        batch = rollout(ppo, spec, rng)
        ours.learn(batch, None)
        ppo.learn(batch, None)
        np.testing.assert_allclose(ours.net.flat, ppo.net.flat, rtol=1e-4, atol=1e-6)


def test_impala_without_lag_takes_the_gradient_of_a2c():
    spec = task(discrete=True)
    ours = learner("impala", spec, "none", dtype=torch.float64, normalize_advantage=False, **SAME)
    a2c = learner("a2c", spec, dtype=torch.float64, normalize_advantage=False, **SAME)
    batch = rollout(a2c, spec, np.random.default_rng(0))
    # with lambda 1 V-trace's r + gamma v' - V is GAE; else it adds lambda's share of the trace once less
    ours._config = dataclasses.replace(ours._config, gae_lambda=1.0)
    a2c._config = dataclasses.replace(a2c._config, gae_lambda=1.0)
    ours.learn(batch, None)
    a2c.learn(batch, None)
    np.testing.assert_allclose(ours.net.gradient / ours.net.gradient.norm(), a2c.net.gradient / a2c.net.gradient.norm(),
                               rtol=1e-4, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("kind", ["R1", "R2", "R3"])
@pytest.mark.parametrize("discrete", [True, False])
def test_the_gradient_is_that_of_the_printed_objective(discrete, kind):
    """With a target and a worker that both differ from theta, and the KL term, by central differences."""
    spec, rng = task(discrete=discrete), np.random.default_rng(1)
    options = {"ratio": kind, "rho": 1.2, "clip": 0.3, "kl_coef": 0.5, "kl_target": 1.0, "value_coef": 1.0}
    made = learner("impact", spec, "none", dtype=torch.float64, normalize_advantage=False, **options)
    made.target.add_(0.05 * torch.from_numpy(rng.standard_normal(len(made.target))))
    made.net.flat.add_(0.05 * torch.from_numpy(rng.standard_normal(len(made.target))))
    batch = lagging(rollout(made, spec, rng), rng.uniform(-0.5, 0.5, (8, 4)))
    evaluated = made.evaluate(batch)
    samples = evaluated.samples
    with torch.no_grad():
        made._evaluated = evaluated
        made._gradient(samples)
    found = made.net.gradient.numpy().copy()
    worker = torch.from_numpy(batch.log_prob.reshape(-1)).double()
    log_target = (
        losses.categorical(evaluated.out, samples.action.t().long())[1]
        if discrete
        else losses.gaussian(evaluated.out, evaluated.log_std[:, 0], samples.action.t())[1]
    )

    def loss():
        out, value = made.net.forward(samples.obs)
        now = made._kind.log_prob(out, samples.action)
        ratio = {"R1": now - log_target, "R2": now - worker,
                 "R3": (worker - log_target).clamp(max=np.log(1.2)) + now - worker}[kind].exp()  # fmt: skip
        surrogate = torch.minimum(ratio * samples.advantage, ratio.clamp(0.7, 1.3) * samples.advantage)
        if discrete:
            divergence, _ = losses.categorical_kl(torch.log_softmax(evaluated.out, 0), torch.log_softmax(out, 0))
        else:
            divergence, *_ = losses.gaussian_kl(evaluated.out, evaluated.log_std, out, made.net.log_std)
        return (-surrogate + 0.5 * divergence + 0.5 * (value - samples.target).square()).mean().item()

    indices = np.flatnonzero(np.abs(found) > 1e-5)[::50]
    expected = central_difference(loss, made.net.flat.numpy(), indices)
    np.testing.assert_allclose(found[indices], expected, rtol=2e-3, atol=1e-5)


def test_advantages_are_those_of_the_target_network_and_are_computed_once():
    spec, rng = task(discrete=True), np.random.default_rng(2)
    made = learner("impact", spec, "none", slots=2, uses=3, least_uses=0)
    batch = rollout(made, spec, rng)
    first = made.evaluate(batch)
    for _ in range(3):
        made.update_minibatch(first, None)
    assert made.target_updates == 0
    again = made.evaluate(batch)
    for before, after in zip(first.samples, again.samples, strict=True):
        torch.testing.assert_close(before, after)
    for _ in range(3):
        made.update_minibatch(again, None)
    assert (made.updates, made.target_updates) == (6, 1), "every N x K updates"
    torch.testing.assert_close(made.target, made.net.flat)


def test_a_rollout_of_an_old_policy_counts_less_and_its_last_step_too():
    """The last step's advantage is rho times its temporal difference (ray #36013)."""
    spec = task(discrete=True)
    made = learner("impact", spec, "none", normalize_advantage=False, gae_lambda=0.0)
    batch = rollout(made, spec, np.random.default_rng(3))
    now = made.evaluate(batch).samples.advantage.reshape(8, 4)
    old = made.evaluate(lagging(batch, np.log(4.0))).samples.advantage.reshape(8, 4)
    torch.testing.assert_close(old, now / 4.0, rtol=1e-4, atol=1e-6)
    assert now[-1].abs().min() > 0.0


@pytest.mark.parametrize("name", ["impact", "appo"])
def test_without_vtrace_advantages_are_gae_however_old_the_rollout_is(name):
    spec = task(discrete=False)
    made = learner(name, spec, "none", vtrace=False, normalize_advantage=False)
    batch = rollout(made, spec, np.random.default_rng(3))
    value = made.evaluate(batch).samples.value.numpy().reshape(8, 4)
    following = made._next_values(batch, value, None)
    excess = losses.advantages(
        batch.reward, value, following, batch.terminated, batch.truncated, made._config.gamma, made._config.gae_lambda
    )[1]
    for rollouts in (batch, lagging(batch, np.log(4.0))):
        found = made.evaluate(rollouts).samples
        np.testing.assert_allclose(found.advantage.reshape(8, 4), excess, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.target.reshape(8, 4), excess + value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_from_images_and_tells_its_metrics(name):
    spec = task(discrete=True, frames=FRAMES)
    made = learner(name, spec, "none", hidden_sizes=(16,), lr_schedule="linear")
    before = made.net.flat.clone()
    made.learn(rollout(made, spec, np.random.default_rng(0)), 0.5)
    assert not torch.equal(before, made.net.flat)
    found = made.metrics()
    assert found["learning_rate"] == pytest.approx(0.55 * made._config.lr)
    assert ("clip_share" in found) == (name != "impala")
    assert ("target_divergence" in found) == (name == "impact")


@pytest.mark.parametrize("name", NAMES)
def test_forbidden_actions_have_no_part_in_ratios_and_divergence(name):
    """Worker, target and theta are one policy here, so all ratios are 1 whatever the masks."""
    spec = dataclasses.replace(task(obs_dim=3 + 4, actions=4, discrete=True), action_mask=True)
    options = {"kl_coef": 1.0} if name == "impact" else {}
    made, rng = learner(name, spec, "none", normalize_obs=True, entropy_coef=0.1, **options), np.random.default_rng(2)
    batch = rollout(made, spec, rng)
    batch.obs[..., 3:] = rng.random((*batch.obs.shape[:2], 4)) < 0.4
    batch.obs[..., 4] = 1.0
    policy, flat = Policy.from_weights(made.policy_arrays(), made.policy_meta()), batch.obs.reshape(-1, 7)
    action, log_prob, _ = policy.sample(flat, rng.random((len(flat), 1)).astype(np.float32))
    batch = batch._replace(action=action.reshape(batch.action.shape), log_prob=log_prob.reshape(batch.log_prob.shape))
    evaluated = made.evaluate(batch)
    reference = made._kind.log_prob(evaluated.out, evaluated.samples.action)
    np.testing.assert_allclose(reference, batch.log_prob.reshape(-1), atol=1e-5)
    assert (evaluated.out.t()[torch.from_numpy(flat[:, 3:] == 0.0)] < -1e8).all()
    made._config = dataclasses.replace(made._config, lr=0.0)
    made.update_minibatch(evaluated, None)
    found = made.metrics()
    assert found["approx_kl"] == pytest.approx(0.0, abs=1e-8)
    assert found.get("target_divergence", 0.0) == 0.0
    assert made.updates_skipped() == 0


def test_a_target_for_the_divergence_lowers_the_step_size_after_all_uses_of_all_slots():
    spec, rng = task(), np.random.default_rng(0)
    settings = {"lr": 0.03, "lr_schedule": "constant", "slots": 2, "uses": 5, "least_uses": 0}
    for name in ("appo", "impact"):
        made = learner(name, spec, "none", target_kl=0.01, **settings)
        rates = []
        for _ in range(3):
            made.learn(rollout(made, spec, rng), None)
            rates.append(made.metrics()["learning_rate"])
        assert rates == pytest.approx([0.03, 0.03, 0.02])
        other = learner(name, spec, "none", target_kl=None, **settings)
        other.load_state_json(made.state_json())
        other.learn(rollout(other, spec, rng), None)
        assert other.metrics()["learning_rate"] == 0.03


@pytest.mark.parametrize("name", NAMES)
def test_its_state_comes_back_bit_by_bit(name):
    spec, rng = task(), np.random.default_rng(0)
    options = {"impact": {"kl_coef": 1.0, "target_kl": 0.01}, "appo": {"target_kl": 0.01}}.get(name, {})
    made, other = (learner(name, spec, "none", seed, normalize_obs=True, **options) for seed in (1, 2))
    batch = rollout(made, spec, rng)
    made.learn(batch, None)
    assert other.load_state_arrays(made.state_arrays())
    other.load_state_json(made.state_json())
    for one in (made, other):
        one.learn(batch, None)
    assert torch.equal(made.net.flat, other.net.flat)
    assert made.state_json() == other.state_json()
    with pytest.raises(CheckpointError, match="was made by"):
        other.load_state_json(made.state_json() | {"algo": "ppo"})


def test_the_weight_of_the_divergence_adapts_after_all_uses_of_all_slots():
    """Not after each update: next to none after a new target, the divergence would halve it to nothing."""
    spec, rng = task(), np.random.default_rng(0)
    for target, following in ((1e-6, 1.5), (10.0, 0.5)):
        made = learner("impact", spec, "none", kl_coef=1.0, kl_target=target, lr=0.05, slots=2, uses=4, least_uses=0)
        found = []
        for _ in range(3):
            made.learn(rollout(made, spec, rng), None)
            found.append(made.state_json()["kl_coef"])
        assert found == [1.0, following, following]
