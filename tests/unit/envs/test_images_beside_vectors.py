"""Observations with images beside numbers: from the environment to a batch, a policy and its action."""

import dataclasses
from contextlib import ExitStack, closing

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from spreeze.algorithms.dqn import DQNConfig
from spreeze.config.schema import LearnerConfig
from spreeze.envs.action_spaces import uniform_actions
from spreeze.envs.pictures import images_as_numbers, observation_note
from spreeze.envs.small_tasks import Docking
from spreeze.envs.task import ObsBuffer, make_task, open_task, spec_from
from spreeze.errors import BadTransition
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.types import RowLayout
from spreeze.workers.collectors.transition_collector import TransitionCollector
from spreeze.workers.replay_trainer import ReplayTrainer


def made(*args, **image):
    return make_task("test/Parts-v0", "image_env", args=args, image={"size": 36, "stack": 2, **image})


@pytest.fixture(scope="module")
def spec():
    task = made()
    task.close()
    return task.spec


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_a_frame_is_the_images_one_after_the_other_and_then_the_numbers_by_name(spec):
    frames = spec.frames
    assert (frames.images, frames.vector_dim) == (((1, 36, 36), (1, 36, 36)), 4)
    assert frames.shape == (2 * 36 * 36 + 4 * 4,)
    assert spec.obs_layout[:2] == ("eyes[0] (image, (40, 48, 3))", "eyes[1] (image, (3, 50, 37))")
    assert observation_note(spec) == (
        "observation: treated as 2 images (eyes[0] (40, 48, 3) as 1 x 36 x 36, eyes[1] (3, 50, 37) as 1 x 36 x 36; "
        "the last 2 frames) and 4 numbers; otherwise use --set env.image=false"
    )
    task = open_task(spec)
    task.reset(seed=0)
    frame = task.step(np.array([1.0], np.float32))[0]
    task.close()
    assert (frame[: 36 * 36] == 10).all()
    assert (frame[36 * 36 : 2 * 36 * 36] == 1).all()
    assert frames.numbers(frame[None, None]).tolist() == [[1.0, -0.5, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("camera", "said"),
    [
        (spaces.Box(0.0, 1.0, (3, 48, 48)), "observation: camera (3, 48, 48) taken as numbers; for an image use --set"),
        (spaces.Box(-np.inf, np.inf, (3, 48, 48)), None),
        (spaces.Box(0.0, 1.0, (8, 8)), None),
    ],
)
def test_an_image_of_floats_beside_numbers_is_told_with_the_setting_that_takes_it(camera, said):
    line = images_as_numbers(spaces.Dict({"camera": camera, "speed": spaces.Box(-1.0, 1.0, (2,))}))
    assert line is None if said is None else line.startswith(said)
    assert images_as_numbers(camera) is None, "observation_note says it"


def test_its_description_survives_a_file(spec):
    assert spec_from(dataclasses.asdict(spec)) == spec


def test_colours_stay_where_asked_and_without_images_all_is_one_vector():
    task = made(grey=False)
    task.close()
    assert task.spec.frames.images == ((3, 36, 36), (3, 36, 36))
    task = make_task("test/Parts-v0", "image_env", picture=False)
    task.close()
    assert (task.spec.frames, task.spec.obs_dim) == (None, 40 * 48 * 3 + 3 * 50 * 37 + 4)


def test_a_number_that_is_not_finite_is_refused_by_its_place(spec):
    task = open_task(spec)
    task.env.unwrapped._obs = lambda: Docking().observation_space  # no observation at all
    with pytest.raises(BadTransition, match=r"picture observed \(eyes\[0\]\)"):
        task.reset(seed=0)
    whole = open_task(spec)
    good = whole.env.unwrapped._obs
    whole.env.unwrapped._obs = lambda: good() | {"place": np.array([0.0, np.nan], np.float32)}
    with pytest.raises(BadTransition, match="number 1 of the observation = nan"):
        whole.reset(seed=0)
    task.close()
    whole.close()


@pytest.mark.parametrize("n_step", [1, 3])
def test_what_a_sampler_stores_is_what_the_learner_draws_normalized_but_for_the_images(spec, n_step, stack):
    layout = RowLayout.of(spec, n_step)
    ring = stack.enter_context(closing(ReplayRing.create(RingSpec(layout, 1, 300))))
    sampling = TransitionCollector(
        lambda: open_task(spec), 2, spec, ShardWriter(ring, 0), n_step=n_step, gamma=0.9, seeds=[0, 1]
    )
    stack.enter_context(closing(sampling))
    for _ in range(60):
        sampling.step(np.ones((2, 1), np.float32), 0)
    config = DQNConfig(hidden_sizes=(8,), cnn="impala_small", n_step=n_step, gamma=0.9)
    learner = LearnerConfig(batch_size=200, device="cpu")
    learning = ReplayTrainer(spec, "dqn", config, layout, ReplayReader(ring), learner, seed=0, normalize_obs=True)
    learning.update()
    batch = learning.batches.batch()
    normalizer = learning.statistics.normalizer
    assert normalizer.count > 120  # each step's newest numbers, and those of resets
    for obs in (batch.obs.numpy(), batch.next_obs.numpy()):
        step = obs[:, -1, 36 * 36].astype(np.float32)  # of the second image
        expected = np.stack([step, -0.5 * step, step % 2 == 0, step % 2 == 1], 1)
        normalizer.apply(expected)
        np.testing.assert_allclose(spec.frames.numbers(obs), expected, rtol=1e-5, atol=1e-6)
        assert (obs[:, -1, 0] == 10 * step).all()
        older = obs[:, 0, 36 * 36]
        assert (older == np.maximum(step - 1, 0)).all()
    assert learning.algorithm.updates_skipped() == 0


def test_measurements_have_finite_numbers(spec):
    layout = RowLayout.of(spec)
    with closing(ReplayRing.create(RingSpec(layout, 1, 64))) as ring:
        fill_with_synthetic_rows(ring, spec)
        assert (np.ascontiguousarray(ring.frames[:32, layout.normalized_columns]).view(np.float32) == 1.0).all()


def test_masks_go_with_the_numbers_and_forbidden_actions_are_never_drawn():
    task = made("masked=True")
    spec = task.spec
    assert (spec.frames.vector_dim, spec.mask_dim) == (4 + 3, 3)
    rows, rng = ObsBuffer(1, spec), np.random.default_rng(0)
    rows.start(0, task.reset(seed=0))
    for step in range(4):
        assert spec.masks(rows.array).tolist() == [[float(option == step % 3) for option in range(3)]]
        action = uniform_actions(spec, 1, rng, rows.array)
        rows.put(0, task.step(action[0])[0])  # the environment refuses others
    task.close()


def test_the_docking_task_keeps_its_promise():
    env = Docking()
    returns = {}
    for name in ("both", "middle"):
        total = 0.0
        for seed in range(50):
            obs, _ = env.reset(seed=seed)
            over = False
            while not over:
                goal = obs["camera"][20, 20, 0] / 127.5 - 1.0 if name == "both" else 0.0
                obs, reward, _, over, _ = env.step(np.clip((goal - obs["place"]) / 0.5, -1, 1))
                total += reward / 50
        returns[name] = total
    assert returns["both"] > -0.8
    assert returns["middle"] < -4.0
    picture = gymnasium.make("PendulumImage-v0")
    first, _ = picture.reset(seed=0, options={})
    assert (first.shape, first.max()) == ((64, 64), 255)
