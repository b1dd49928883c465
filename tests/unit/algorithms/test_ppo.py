"""PPO's gradient by NumPy against the one by PyTorch's kernels, and where each is used."""

import numpy as np
import pytest
import torch
from rollouts import learner, rollout, task

from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.algorithms.ppo import PPO
from spreeze.types import Choices, EnvSpec


def _gradients(spec, **settings):
    """The gradient, the latest numbers and the metrics of one algorithm on one minibatch, by NumPy and by PyTorch."""
    algorithm = learner("ppo", spec, dtype=torch.float64, **settings)
    algorithm.net.flat.add_(torch.randn(len(algorithm.net.flat), generator=torch.Generator().manual_seed(3)), alpha=0.3)
    samples, _ = algorithm._samples(rollout(algorithm, spec, np.random.default_rng(5), steps=16, envs=4))
    algorithm.net.flat.mul_(1.5)  # so that ratios differ from 1, some by more than the clip range
    found = []
    for compute in (PPO._gradient, OnPolicyAlgorithm._gradient):
        algorithm.net.gradient.fill_(np.nan)
        algorithm.net.gradients.views()[-2][1, 1:] = algorithm.net.gradients.views()[-1][1, 1:] = 0.0
        with torch.no_grad():
            compute(algorithm, samples)
        metrics = {name: value for name, value in algorithm.metrics().items() if name != "grad_norm"}
        numbers = (*algorithm.net.gradients.views(), algorithm.net.grad_log_std, *algorithm._latest)
        found.append((algorithm._small is not None, [part.clone() for part in numbers], metrics))
    return found


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("settings", [
    {},
    {"activation": "relu", "hidden_sizes": (5, 7, 6), "entropy_coef": 0.02},
    {"hidden_sizes": (9,), "value_coef": 0.9, "clip": 0.05},
])  # fmt: skip
def test_the_gradient_of_a_small_minibatch_is_that_of_the_kernels(discrete, settings):
    (small, by_numpy, metrics), (_, by_torch, expected) = _gradients(task(actions=3, discrete=discrete), **settings)
    assert small
    for ours, theirs in zip(by_numpy, by_torch, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert metrics == pytest.approx(expected)
    assert metrics["clip_share"] > 0.0


MASKED = EnvSpec(env_id="Task-v0", import_module=None, obs_dim=6, action=Choices((3,)), max_episode_steps=None,
                 reward_threshold=None, action_mask=True)  # fmt: skip


@pytest.mark.parametrize(("spec", "settings"), [
    (task(), {"layer_norm": True}),
    (task(), {"activation": "silu"}),
    (task(), {"hidden_sizes": (64, 512)}),
    (task(), {"clip_value": True}),
    (task(), {"recurrent": "gru"}),
    (MASKED, {}),
])  # fmt: skip
def test_other_networks_losses_and_masks_are_left_to_the_kernels(spec, settings):
    assert learner("ppo", spec, **settings)._small is None


def test_a_subclass_with_a_loss_of_its_own_and_a_large_minibatch_are_left_to_the_kernels(monkeypatch):
    class Own(PPO):
        def _value_error(self, value, samples):
            return super()._value_error(value, samples)

    class Penalised(PPO):
        def _penalise(self, out, grad_out):
            grad_out += out

    spec, plain = task(), learner("ppo", task())
    assert plain._small is not None
    for kind in (Own, Penalised):
        assert kind(spec, plain.settings, 1, "cpu", "on-policy")._small is None
    samples, _ = plain._samples(rollout(plain, spec, np.random.default_rng(5), steps=150, envs=4))
    monkeypatch.setattr(plain, "_small", lambda samples: pytest.fail("600 rows are many"))
    with torch.no_grad():
        plain._gradient(samples)
