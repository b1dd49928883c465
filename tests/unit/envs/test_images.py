"""Image tasks: frames, Atari's preprocessing, networks, and the way from an environment to a batch."""

import numpy as np
import pytest
import torch
from torch import nn

from spreeze.algorithms.dqn import DQN, DQNConfig
from spreeze.config.algorithms import check_algorithm, default_algorithm
from spreeze.config.modes import find_mode
from spreeze.config.schema import ImageConfig, LearnerConfig
from spreeze.envs.images import AreaResize
from spreeze.envs.task import ObsBuffer, make_task, open_task
from spreeze.errors import ConfigError, WeightsError
from spreeze.inference.convolution import CNNS, Trunk, conv_layers
from spreeze.inference.policy import Policy
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.types import Choices, FrameSpec, RowLayout, TransitionBatch
from spreeze.workers.collectors.transition_collector import TransitionCollector
from spreeze.workers.replay_trainer import ReplayTrainer

SHORT = {"sticky_actions": 0.0, "noop_max": 0, "max_episode_frames": 400}


def counter(name="Counter", **image):
    return make_task(f"test/{name}-v0", "image_env", image={"size": 36, "stack": 3, **image})


def pong(**image):
    return make_task("ALE/Pong-v5", image={**SHORT, **image})


def test_a_shrunk_pixel_is_the_mean_of_the_area_that_it_covers():
    picture = np.random.default_rng(0).integers(0, 256, (6, 5), dtype=np.uint8)
    out = np.empty((4, 4), np.uint8)
    AreaResize(6, 5, 4)(picture, out)
    fine = np.kron(picture.astype(float), np.ones((4, 4)))  # 24 x 20: each output covers 6 x 5 of it
    expected = fine.reshape(4, 6, 4, 5).mean((1, 3))
    assert np.abs(out - expected).max() <= 0.5 + 1e-4


def test_a_picture_of_the_right_size_stays_as_it_is():
    picture = np.random.default_rng(0).integers(0, 256, (84, 84), dtype=np.uint8)
    out = np.empty_like(picture)
    AreaResize(84, 84, 84)(picture, out)
    assert np.array_equal(out, picture)


@pytest.mark.parametrize(("name", "grey", "channels"), [("Counter", True, 1), ("Counter", False, 3), ("Flat", True, 1)])
def test_any_uint8_image_becomes_frames(name, grey, channels):
    task = counter(name, grey=grey)
    try:
        assert task.spec.frames.shape == (channels, 36, 36)
        assert task.spec.obs_dim == 3 * channels * 36 * 36
        task.reset(seed=0)
        frame, reward, _, _ = task.step(np.array([2.0], np.float32))
        assert frame.shape == (channels, 36, 36)
        assert np.all(frame == 10)
        assert reward == 2.0
    finally:
        task.close()


def test_images_may_be_treated_as_numbers():
    task = make_task("test/Steering-v0", "image_env", picture=False)
    assert (task.spec.frames, task.spec.obs_dim) == (None, 40 * 48 * 3)
    task.close()


def test_images_have_a_default_algorithm_for_either_kind_of_actions():
    for name, expected in (("Counter", "dqn"), ("Steering", "sac")):
        task = counter(name)
        task.close()
        assert default_algorithm(task.spec, find_mode("spreeze")).value == expected
    with pytest.raises(ConfigError, match="images and one continuous action; sac, td3 and ddpg fit"):
        check_algorithm("dqn", task.spec, find_mode("spreeze"))


def test_stacks_repeat_the_first_frame_and_move_on():
    task = counter()
    task.close()
    rows = ObsBuffer(2, task.spec)
    rows.start(1, np.full((1, 36, 36), 7, np.uint8))
    rows.put(1, np.full((1, 36, 36), 8, np.uint8))
    assert rows.array.shape == (2, 3, 1, 36, 36)
    assert rows.array[1, :, 0, 0, 0].tolist() == [7, 7, 8]


def test_atari_frames_are_small_grey_and_repeat_with_the_seed():
    frames = []
    for _ in range(2):
        task = pong(sticky_actions=0.25, noop_max=30)
        seen = [task.reset(seed=3)]
        seen += [task.step(np.array([float(step % 6)], np.float32))[0] for step in range(30)]
        frames.append(np.stack(seen))
        assert (task.spec.action, task.spec.frames.shape) == (Choices((6,)), (1, 84, 84))
        task.close()
    assert np.array_equal(*frames)
    assert len({frame.tobytes() for frame in frames[0]}) > 20


@pytest.mark.parametrize("game", ["Pong", "Qbert"])  # begun from a snapshot, and loaded anew each time
def test_a_game_of_a_seed_is_the_same_whatever_was_played_before(game):
    task = make_task(f"ALE/{game}-v5", image={"sticky_actions": 0.25, "noop_max": 30})

    def play(seed):
        seen = [task.reset(seed=seed)]
        seen += [task.step(np.array([float(step % 6)], np.float32))[0] for step in range(40)]
        return np.stack(seen)

    try:
        first, other, again = play(3), play(4), play(3)
    finally:
        task.close()
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_an_action_that_sticks_goes_on_for_a_frame_with_the_given_probability():
    task = pong(sticky_actions=0.25, max_episode_frames=20_000)
    env, taken = task.env, []
    task.reset(seed=0)

    class Ale:
        def act(self, action):
            taken.append(action)
            return 0

    env._ale = Ale()
    asked = [env._actions[frame % 2] for frame in range(20_000)]
    for action in asked:
        env._act(action)
    task.close()
    # Two actions in turn: a stuck one differs from the one asked for unless the one before was stuck, too.
    stuck = np.mean([a != b for a, b in zip(asked, taken, strict=True)])
    assert stuck == pytest.approx(0.25 / 1.25, abs=0.02)


def test_atari_takes_four_frames_a_step_and_truncates_at_the_frame_limit():
    task = pong()
    task.reset(seed=0)
    ale = task.env.unwrapped.ale
    steps, over = 0, False
    while not over:
        before = ale.getEpisodeFrameNumber()
        _, _, terminated, over = task.step(np.zeros(1, np.float32))
        steps += 1
        assert ale.getEpisodeFrameNumber() - before == 4
    assert (steps, terminated) == (100, False)
    assert task.spec.max_episode_steps == 100
    task.close()


def test_all_eighteen_actions_where_asked():
    task = pong(full_actions=True)
    task.close()
    assert task.spec.action == Choices((18,))


def test_a_lost_life_ends_the_episode_where_asked_and_never_in_evaluation():
    task = make_task("ALE/Breakout-v5", image={**SHORT, "episodic_life": True, "fire_reset": True,
                                               "max_episode_frames": 4000})  # fmt: skip
    ale, whole = task.env.unwrapped.ale, open_task(task.spec, whole_games=True)
    try:
        task.reset(seed=0)
        over = False
        while not over:
            _, _, over, _ = task.step(np.zeros(1, np.float32))
        assert (ale.lives(), ale.game_over()) == (4, False)
        frames = ale.getEpisodeFrameNumber()
        task.reset()
        assert ale.getEpisodeFrameNumber() > frames, "the game goes on"
        whole.reset(seed=0)
        over = False
        while whole.env.unwrapped.ale.lives() > 4 and not over:
            _, _, over, _ = whole.step(np.ones(1, np.float32))
        assert not over
    finally:
        task.close()
        whole.close()


@pytest.mark.parametrize("cnn", CNNS)
@pytest.mark.parametrize("shape", [(4, 84, 84), (3, 50, 37), (12, 36, 36)])
def test_the_sampler_s_trunk_is_torch_s(cnn, shape):
    torch.manual_seed(0)
    layers, arrays = [], {}
    for index, part in enumerate(conv_layers(cnn, *shape)):
        layer = nn.Conv2d(part.inputs, part.layer.channels, part.layer.kernel, part.layer.stride)
        arrays |= {f"conv{index}_w": layer.weight.detach().numpy(), f"conv{index}_b": layer.bias.detach().numpy()}
        layers += [layer, nn.ReLU()]
    obs = np.random.default_rng(1).integers(0, 256, (3, *shape), dtype=np.uint8)
    expected = nn.Sequential(*layers)(torch.from_numpy(obs) / 255).permute(0, 2, 3, 1).flatten(1).detach().numpy()
    found = Trunk(arrays, {"cnn": cnn, "image": list(shape)})(obs[:, :, None])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_weights_of_another_image_are_refused():
    with pytest.raises(WeightsError, match="conv0_w"):
        Trunk({"conv0_w": np.zeros((32, 4, 8, 8)), "conv0_b": np.zeros(32)}, {"cnn": "nature", "image": [3, 84, 84]})
    with pytest.raises(WeightsError, match="nature, impala_small"):
        Trunk({}, {"cnn": "resnet", "image": [4, 84, 84]})


def frame_spec(stack=2):
    return FrameSpec(channels=1, height=36, width=36, stack=stack, sign_rewards=False, options={})


def image_batch(rng, rows=6):
    window = torch.from_numpy(rng.integers(0, 256, (rows, 3, 1, 36, 36), dtype=np.uint8))
    return TransitionBatch(
        obs=window[:, :2], action=torch.from_numpy(rng.integers(0, 3, (rows, 1)).astype(np.float32)), obs_action=None,
        reward=torch.from_numpy(rng.standard_normal(rows, np.float32)), terminated=torch.zeros(rows), discount=0.9,
        next_obs=window[:, 1:],
    )  # fmt: skip


def by_torch(values, obs, dueling):
    """The same network written with torch's layers."""
    given = iter(values.online.tensors())
    x = obs.flatten(1, 2).float() / 255
    for part in conv_layers("impala_small", 2, 36, 36):
        x = nn.functional.relu(nn.functional.conv2d(x, *next(given), stride=part.layer.stride))
    weight, bias = next(given)
    x = nn.functional.relu(x.permute(0, 2, 3, 1).flatten(1) @ weight + bias)
    weight, bias = next(given)
    out = x @ weight.t() + bias
    return out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True) if dueling else out


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_dqn_on_images_steps_down_the_gradient_that_autograd_finds(dueling, double):
    config = DQNConfig(hidden_sizes=(16,), cnn="impala_small", dueling=dueling, double=double, lr=1e-3, huber=1.0)
    dqn = DQN(0, 3, config, seed=0, frames=frame_spec())
    batch, values = image_batch(np.random.default_rng(0)), dqn.critics
    with torch.no_grad():
        values.target.flat.mul_(1.1)
        online, target = by_torch(values, batch.next_obs, dueling), None
        saved = values.online.flat.clone()
        values.online.flat.copy_(values.target.flat)
        target = by_torch(values, batch.next_obs, dueling)
        values.online.flat.copy_(saved)
        best = (online if double else target).argmax(1, keepdim=True)
        goal = batch.reward + 0.9 * target.gather(1, best)[:, 0]
    leaves = [tensor.requires_grad_() for pair in values.online.tensors() for tensor in pair]
    values.online.tensors, original = lambda: list(zip(leaves[::2], leaves[1::2], strict=True)), values.online.tensors
    chosen = by_torch(values, batch.obs, dueling).gather(1, batch.action.long())[:, 0]
    expected = torch.autograd.grad(nn.functional.huber_loss(chosen, goal), leaves)
    values.online.tensors = original
    dqn.update(batch)
    found = [tensor for pair in values.gradient.tensors() for tensor in pair]
    for ours, theirs in zip(found, expected, strict=True):
        if dueling and ours.shape == values.gradient.mlp.head_weight[0].shape:
            theirs = theirs * values._dueling.mask[0]  # the streams' empty blocks stay empty
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-6)
    assert not torch.equal(values.online.flat, saved)


@pytest.mark.parametrize("dueling", [False, True])
def test_a_published_image_policy_acts_as_the_learner_s_network(dueling):
    dqn = DQN(0, 3, DQNConfig(hidden_sizes=(16,), dueling=dueling), seed=0, frames=frame_spec())
    policy = Policy.from_weights(dqn.policy_arrays(), dqn.policy_meta())
    obs = image_batch(np.random.default_rng(2), rows=32).obs
    expected = dqn.critics.values(obs)[0].argmax(0)
    assert policy.act(obs.numpy(), ())[0][:, 0].tolist() == expected.tolist()


def test_image_dqn_resumes_bit_for_bit():
    config = DQNConfig(hidden_sizes=(16,), cnn="impala_small")
    first, second = (DQN(0, 3, config, seed=seed, frames=frame_spec()) for seed in (0, 1))
    batch = image_batch(np.random.default_rng(0))
    first.update(batch)
    second.load_state_arrays(first.state_arrays())
    second.load_state_json(first.state_json())
    for algorithm in (first, second):
        algorithm.update(batch)
    assert torch.equal(first.critics.online.flat, second.critics.online.flat)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("name", ["Counter", "Truncated"])
def test_what_a_sampler_stores_is_what_the_learner_draws(name, n_step):
    # A frame shows its step's number, so every stack and every bootstrap can be checked by its brightness.
    task = counter(name)
    task.close()
    spec = task.spec
    layout = RowLayout.of(spec, n_step)
    ring = ReplayRing.create(RingSpec(layout, 1, 300))
    writer = ShardWriter(ring, 0)
    sampling = TransitionCollector(lambda: open_task(spec), 3, spec, writer, n_step=n_step, gamma=0.9, seeds=[0, 1, 2])
    try:
        for _ in range(40):
            sampling.step(np.ones((3, 1), np.float32), 0)
        config = DQNConfig(hidden_sizes=(8,), cnn="impala_small", n_step=n_step, gamma=0.9)
        learning = ReplayTrainer(spec, "dqn", config, layout, ReplayReader(ring),
                                 LearnerConfig(batch_size=500, device="cpu"), seed=0, normalize_obs=False)  # fmt: skip
        learning.update()
        batch = learning.batches.batch()
        seen = set()
        for row in range(500):
            first, last = (
                [value // 10 for value in stack[row, :, 0, 0, 0].tolist()] for stack in (batch.obs, batch.next_obs)
            )
            step, span = first[-1], last[-1] - first[-1]
            assert first == [max(0, step - 2), max(0, step - 1), step]
            assert last == [max(0, step + span - 2), max(0, step + span - 1), step + span]
            assert span == min(n_step, 5 - step)
            assert float(batch.reward[row]) == pytest.approx(sum(0.9**i for i in range(span)), rel=1e-5)
            assert bool(batch.terminated[row]) == (step + span == 5 and name == "Counter")
            seen.add(step)
        assert seen == {0, 1, 2, 3, 4}
        assert all(np.isfinite(value) for value in learning.algorithm.metrics().values())
    finally:
        sampling.close()
        ring.close()


def test_stored_atari_rewards_are_signs_and_returns_are_counted_in_full():
    task = make_task("ALE/MsPacman-v5", image={**SHORT, "max_episode_frames": 1200})
    task.close()
    spec = task.spec
    ring = ReplayRing.create(RingSpec(RowLayout.of(spec), 1, 1000))
    sampling = TransitionCollector(
        lambda: open_task(spec), 1, spec, ShardWriter(ring, 0), n_step=1, gamma=0.99, seeds=[0]
    )
    try:
        rng = np.random.default_rng(0)
        while sampling.counts.episodes == 0:
            sampling.step(rng.integers(0, 9, (1, 1)).astype(np.float32), 0)
        rewards = ring.rows[: ring.total_committed(), ring.spec.layout.reward]
        assert set(np.unique(rewards).tolist()) <= {-1.0, 0.0, 1.0}
        assert sampling.counts.episode_return >= 10 * rewards.sum() > 0
    finally:
        sampling.close()
        ring.close()


def test_defaults_of_the_image_part_are_the_usual_ones():
    part = ImageConfig()
    assert (part.stack, part.size, part.frame_skip, part.sticky_actions, part.episodic_life) == (4, 84, 4, 0.25, False)
