"""Networks over images beside numbers: random shifts, gradients, and the sampler's policy."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from spreeze.algorithms import create, create_on_policy
from spreeze.algorithms.networks.conv_networks import ConvParameters, shifted
from spreeze.config.schema import SECTIONS
from spreeze.inference.convolution import TrunkInputs, conv_layers
from spreeze.inference.policy import Policy
from spreeze.types import Box, Choices, EnvSpec, FrameSpec, PictureSpec, TransitionBatch

FRAMES = FrameSpec(
    channels=1, height=36, width=36, stack=2, sign_rewards=False, options={"grey": True},
    more=(PictureSpec(path=("b",), shape=(40, 40, 4), order=(2, 0, 1)),), vector_dim=3,
)  # fmt: skip
SPEC = EnvSpec(
    env_id="x", import_module=None, obs_dim=2 * FRAMES.frame_bytes, action=Box((-1.0,) * 2, (1.0,) * 2),
    max_episode_steps=None, reward_threshold=None, frames=FRAMES,
)  # fmt: skip
CHOOSING = dataclasses.replace(SPEC, action=Choices((3,)))
ROWS = 7


def observations(rng, rows=ROWS):
    frames = rng.integers(0, 256, (rows, 2, FRAMES.frame_bytes), dtype=np.uint8)
    frames[:, :, -12:] = rng.standard_normal((rows, 2, 3)).astype(np.float32).view(np.uint8)
    return torch.from_numpy(frames)


def batch_of(rng, spec=SPEC):
    action = rng.uniform(-1, 1, (ROWS, 2)) if spec is SPEC else rng.integers(0, 3, (ROWS, 1))
    return TransitionBatch(
        obs=observations(rng), action=torch.from_numpy(action.astype(np.float32)), obs_action=None,
        reward=torch.from_numpy(rng.standard_normal(ROWS).astype(np.float32)), terminated=torch.zeros(ROWS),
        discount=0.9, next_obs=observations(rng),
    )  # fmt: skip


def made(name, spec=SPEC, seed=0, **settings):
    settings = {"hidden_sizes": (16, 12), "cnn": "impala_small", **settings}
    if name in ("ppo", "a2c", "impact"):
        config = dataclasses.replace(SECTIONS[name](), **settings)
        return create_on_policy(name, spec, config, seed, correction="on-policy")
    config = dataclasses.replace(SECTIONS[name](), **settings)
    count = None if spec.choices is None else 3
    return create(name, spec.obs_dim, spec.action_dim, config, seed, num_actions=count, frames=spec.frames)


def by_torch(inputs, tensors, obs):
    """Features written with torch's layers."""
    given, found, end = iter(tensors), [], 0
    frames = obs.reshape(len(obs), 2, -1)
    for channels, height, width in inputs.images:
        begin, end = end, end + channels // 2 * height * width
        x = frames[:, :, begin:end].reshape(len(obs), channels, height, width).to(tensors[0][0].dtype) / 255
        for part in conv_layers("impala_small", channels, height, width):
            weight, bias = next(given)
            x = nn.functional.relu(nn.functional.conv2d(x, weight, bias, stride=part.layer.stride))
        found.append(x.permute(0, 2, 3, 1).flatten(1))
    numbers = torch.from_numpy(FRAMES.numbers(obs.numpy())).to(x.dtype)
    return torch.cat([*found, numbers], 1)


def test_a_shift_is_a_crop_of_the_image_padded_by_its_edge():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 2, 9, 11), dtype=np.uint8))
    found = shifted(images, 4, torch.Generator().manual_seed(3))
    moves = torch.randint(-4, 5, (2, 50, 1), generator=torch.Generator().manual_seed(3))[:, :, 0]
    assert moves.min() == -4
    assert moves.max() == 4
    for image, one, (down, right) in zip(images.numpy(), found.numpy(), moves.T.tolist(), strict=True):
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="edge")
        np.testing.assert_array_equal(one, padded[:, 4 + down : 13 + down, 4 + right : 15 + right])


def test_two_encoders_have_the_gradient_of_autograd_in_float64():
    inputs, rng = TrunkInputs.of(FRAMES), np.random.default_rng(0)
    assert inputs.images == ((2, 36, 36), (8, 36, 36))
    sizes = (inputs.features("impala_small"), 5, 4)
    networks = ConvParameters.zeros(inputs, "impala_small", sizes, torch.device("cpu"))
    networks = ConvParameters(networks.flat.double(), inputs, "impala_small", sizes)
    networks.initialize(torch.Generator().manual_seed(0))
    obs, weights = observations(rng), torch.from_numpy(rng.standard_normal((ROWS, 4)))
    leaves = networks.leaves()
    found = torch.autograd.grad((networks.forward(obs, leaves) * weights).sum(), [t for pair in leaves for t in pair])

    plain = [tensor.clone().requires_grad_() for pair in networks.tensors() for tensor in pair]
    pairs = list(zip(plain[::2], plain[1::2], strict=True))
    x = by_torch(inputs, pairs[:-2], obs)
    hidden = nn.functional.relu(x @ pairs[-2][0] + pairs[-2][1])
    expected = torch.autograd.grad(((hidden @ pairs[-1][0].t() + pairs[-1][1]) * weights).sum(), plain)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"critics": "quantile"}, {"critics": "categorical"}])
@pytest.mark.parametrize("name", ["sac", "td3"])
def test_the_encoder_steps_down_the_critics_loss_alone(name, settings):
    algorithm = made(name, random_shift=0, critic_layer_norm=True, actor_layer_norm=True, **settings)
    encoder, critics, batch = algorithm.encoder, algorithm.critics, batch_of(np.random.default_rng(0))
    encoded = encoder.encode(batch, algorithm.generator)
    torch.testing.assert_close(encoded.obs, by_torch(encoder.online.inputs, encoder.online.tensors(), batch.obs))
    target = {"quantile": torch.randn(5, ROWS), "categorical": torch.randn(101, ROWS)}.get(
        settings.get("critics"), torch.randn(ROWS)
    )
    if settings.get("critics") == "categorical":
        critics._next_prob = torch.randn(101, ROWS).softmax(0)
    with torch.inference_mode():
        critics.step(encoded.obs_action, target)
    assert critics.obs_gradient.shape == encoded.obs.shape
    assert critics.obs_gradient[:, -3:].abs().sum() > 0.0
    before = encoder.online.flat.clone()
    encoder.step(critics.obs_gradient)
    after = encoder.online.flat.clone()
    assert not torch.equal(before, after)
    with torch.inference_mode():
        algorithm.updates = 1  # TD3 moves its actor in every second update
        outputs = algorithm.actor_forward(encoded)
        algorithm.actor_step(algorithm.action_gradient(encoded, outputs.action))
    assert torch.equal(encoder.online.flat, after)


def test_the_critics_derivative_by_features_is_that_of_autograd():
    algorithm = made("sac", random_shift=0, activation="tanh")
    critics, batch = algorithm.critics, batch_of(np.random.default_rng(0))
    encoded, target = algorithm.encoder.encode(batch, algorithm.generator), torch.randn(ROWS)
    features = encoded.obs.clone().requires_grad_()
    online, loss = critics.online, torch.zeros(())
    for index in range(2):
        x = torch.cat((features, batch.action), 1)
        for weight, bias in zip(online.weights, online.biases, strict=True):
            x = torch.tanh(x @ weight[index] + bias[index])
        value = x @ online.head_weight[index, 0] + online.head_bias[index, 0, 0]
        loss = loss + 0.5 * (value - target).square().mean()
    (expected,) = torch.autograd.grad(loss, features)
    with torch.inference_mode():
        critics.step(encoded.obs_action, target)
    torch.testing.assert_close(critics.obs_gradient, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("spec", [SPEC, CHOOSING], ids=["continuous", "discrete"])
@pytest.mark.parametrize("name", ["sac", "td3", "ddpg", "dqn", "ppo", "a2c", "impact"])
def test_the_sampler_s_policy_is_the_learner_s(name, spec):
    if (spec is SPEC) == (name == "dqn") or (spec is CHOOSING and name in ("td3", "ddpg")):
        return
    algorithm, rng = made(name, spec), np.random.default_rng(0)
    obs = observations(rng, 20)
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    found = policy._forward(obs.numpy(), ())[0]
    with torch.no_grad():
        if name == "dqn":
            expected = algorithm.critics.values(obs)[0].t()
        elif name in ("sac", "td3", "ddpg"):
            encoder, actor = algorithm.encoder, algorithm.actor.online
            x = encoder.online.features(obs, encoder.online.tensors())
            for weight, bias in zip(actor.weights, actor.biases, strict=True):
                x = torch.relu(x @ weight[0] + bias[0])
            expected = x @ actor.head_weight[0].t() + actor.head_bias[0, :, 0]
        else:
            expected = algorithm.net.forward(obs)[0].t()
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [SPEC, CHOOSING], ids=["continuous", "discrete"])
def test_an_encoder_resumes_bit_for_bit_with_its_shifts(spec):
    first, second = (made("sac", spec, seed) for seed in (0, 1))
    batch = batch_of(np.random.default_rng(0), spec)
    first.update(batch)
    second.load_state_arrays(first.state_arrays())
    second.load_state_json(first.state_json())
    for algorithm in (first, second):
        algorithm.update(batch)
    for ours, theirs in zip(first.state_arrays().values(), second.state_arrays().values(), strict=True):
        assert np.array_equal(ours, theirs)
    assert first.updates_skipped() == 0


def test_images_over_two_devices_learn_as_over_one():
    results = []
    for device in ("cpu", "cpu+cpu"):
        config = dataclasses.replace(SECTIONS["sac"](), hidden_sizes=(16,), cnn="impala_small")
        algorithm = create("sac", SPEC.obs_dim, 2, config, 0, device, frames=FRAMES)
        algorithm.update(batch_of(np.random.default_rng(0)))
        results.append(algorithm.policy_arrays())
    for name, array in results[0].items():
        assert np.array_equal(array, results[1][name])
