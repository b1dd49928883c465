"""Environments as people write them: what an observation is taken for, pictures, masks, values out of range."""

import dataclasses

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FilterObservation
from n_step import NStep
from PIL import Image

from spreeze.cli.doctor import _spaces, _values
from spreeze.cli.export import example
from spreeze.envs.make import make_env
from spreeze.envs.pictures import DrawnPictures, observation_note, pictures_in, refuse_pictures
from spreeze.envs.probe import check_up, measure, probe_env
from spreeze.envs.task import make_task, open_env, open_task, options_of
from spreeze.envs.vector_task import VectorTask
from spreeze.errors import BadTransition, EnvError
from spreeze.inference.normalizer import REWARD_CLIP, DiscountedReturns, Normalizer, scaled_rewards
from spreeze.transport.transitions import NStepBatch
from spreeze.types import POLICY_FORMATS

S = gymnasium.spaces
ID, MODULE = "habits/Habits-v0", "habits_env"
SMALL = {"size": 36, "stack": 2}


def habits(*args, **options):
    return make_task(ID, MODULE, args=args, **{"image": SMALL, **options})


def measured(task, steps):
    with task.env:
        task.reset(seed=0)
        return measure(task, steps, 0, 0.0)


def played(task, steps=4):
    with task.env:
        return np.stack([task.reset(seed=0), *(task.step(np.zeros(1, np.float32))[0] for _ in range(steps))])


# --- what an observation is taken for ---


def box(*shape, high=255, kind=np.uint8, low=0):
    return S.Box(low, high, shape, kind)


@pytest.mark.parametrize(
    ("space", "order"),
    [
        (box(84, 84), (0, 1)), (box(36, 36), (0, 1)), (box(210, 160, 3), (2, 0, 1)), (box(64, 200, 4), (2, 0, 1)),
        (box(84, 84, 1), (2, 0, 1)), (box(3, 96, 96), (0, 1, 2)), (box(1, 40, 90), (0, 1, 2)),
        (box(4, 84, 84), (0, 1, 2)), (box(4, 84, 84, 3), (0, 3, 1, 2)), (box(4, 3, 84, 84), (0, 1, 2, 3)),
        (S.Dict({"eye": box(48, 48, 3)}), (2, 0, 1)), (S.Tuple([S.Dict({"a": box(48, 50)})]), (0, 1)),
    ],
)  # fmt: skip
def test_bytes_to_255_of_36_pixels_a_side_are_pictures_with_channels_first_or_last(space, order):
    assert [found.order for found in pictures_in(space)] == [order]
    assert pictures_in(space, wanted=False) == ()


@pytest.mark.parametrize(
    "space",
    [box(3, 3, high=2), box(7, 7, 3), box(35, 84), box(10, 10), box(128), box(84, 84, high=1), box(84, 84, high=254),
     box(84, 84, 3, kind=np.int64), box(84, 84, 3, high=1.0, kind=np.float32), box(40, 40, 40), box(2, 2, 2, 40, 40),
     S.Discrete(3), S.MultiBinary([84, 84]), S.Dict({})],
)  # fmt: skip
def test_anything_else_is_numbers(space):
    assert pictures_in(space) == ()


@pytest.mark.parametrize(
    ("space", "order", "bounds"),
    [(box(10, 10, 4), (2, 0, 1), (0, 255)), (box(3, 7, 7), (0, 1, 2), (0, 255)), (box(8, 8, 119), (2, 0, 1), (0, 255)),
     (box(3, 3, high=2), (0, 1), (0, 255)), (box(84, 84, 3, low=-1, high=1, kind=np.float32), (2, 0, 1), (-1, 1)),
     (box(5, 6, high=9, kind=np.int64), (0, 1), (0, 9)), (box(9, 11, 3), (2, 0, 1), (0, 255))],
)  # fmt: skip
def test_what_the_user_calls_a_picture_is_one_scaled_from_its_bounds_unless_of_bytes(space, order, bounds):
    (found,) = pictures_in(space, wanted=True)
    assert (found.order, found.bounds) == (order, bounds)


@pytest.mark.parametrize(
    ("space", "words"),
    [(box(5), "is not an image"), (S.Discrete(3), "is not an image"),
     (S.Dict({"a": box(30, 30), "b": box(3)}), "has no image"), (S.Box(-np.inf, np.inf, (84, 84)), "unbounded")],
)  # fmt: skip
def test_what_can_be_no_picture_is_refused_where_the_user_wants_one(space, words):
    with pytest.raises(EnvError, match=rf"env\.image = true: .*{words}"):
        pictures_in(space, wanted=True)


def test_a_board_of_bytes_is_observed_as_one_of_integers_and_the_doctor_says_so():
    found = {kind: make_task("habits/Board-v0", MODULE, args=(f"kind={kind}",)) for kind in ("uint8", "int64")}
    boards = {kind: played(task) for kind, task in found.items()}
    assert found["uint8"].spec.frames is None
    assert boards["uint8"].shape == (5, 9)
    np.testing.assert_array_equal(boards["uint8"], boards["int64"])
    said = [check.text for check in _spaces(measured(make_task("habits/Board-v0", MODULE), 5))]
    assert said[-1:] == ["observation (3, 3): taken as 9 numbers; for an image use --set env.image=true"]


@pytest.mark.parametrize("sees", ["first", "eye", "tuple"])
def test_wherever_a_picture_lies_and_whatever_its_axes_its_frames_are_the_same(sees):
    for grey in (True, False):
        image = {**SMALL, "grey": grey}
        task = habits(f"sees={sees}", image=image)
        np.testing.assert_array_equal(played(habits("sees=plain", image=image)), played(task))
        assert task.spec.frames.channels == (1 if grey else 3)
        again = open_task(task.spec)
        np.testing.assert_array_equal(played(again), played(habits("sees=plain", image=image)))
        assert open_env(task.spec).reset(seed=0)[0].shape == (2, *task.spec.frames.shape)


def test_frames_of_several_are_planes_of_their_own_and_stacked_colour_becomes_grey_each(monkeypatch):
    class Stacked(gymnasium.Env):
        def __init__(self, space, render_mode=None):
            self.observation_space, self.action_space = space, S.Discrete(2)

        def reset(self, *, seed=None, options=None):
            shape = self.observation_space.shape
            return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) // 255 + np.uint8(10), {}

    for space, channels in ((box(4, 40, 40), 4), (box(40, 40, 4), 4), (box(4, 40, 40, 3), 4), (box(2, 40, 40, 1), 2)):
        monkeypatch.setitem(
            gymnasium.registry,
            "habits/Stacked-v0",
            gymnasium.envs.registration.EnvSpec(
                "habits/Stacked-v0", lambda render_mode=None, space=space: Stacked(space)
            ),
        )
        task = make_task("habits/Stacked-v0", image=SMALL)
        assert task.spec.frames.channels == channels
        assert task.reset(seed=0).shape == (channels, 36, 36)


def test_pictures_of_floats_are_numbers_until_the_user_says_otherwise():
    task = habits("sees=floats")
    task.env.close()
    assert task.spec.obs_dim == 40 * 52 * 3
    assert "(40, 52, 3): taken as 6240 numbers; for an image use --set env.image=true" in observation_note(task.spec)
    task = habits("sees=floats", picture=True)
    assert observation_note(task.spec).endswith("frames of 36 x 36 pixels, grey, the last 2 at a time; otherwise use "
                                       "--set env.image=false")  # fmt: skip
    exact, found = played(habits("sees=plain")).astype(int), played(task).astype(int)
    assert abs(exact - found).max() <= 1


@pytest.mark.parametrize("bad", [np.full((40, 52, 3), np.nan), np.zeros((40, 52)), None, "text"])
def test_a_picture_that_is_none_is_refused_with_what_was_found(bad):
    task = habits("sees=floats", picture=True)
    task.env.unwrapped._obs = lambda: bad
    with pytest.raises(BadTransition, match="picture observed"):
        task.reset(seed=0)


def test_pictures_may_be_anywhere_among_other_values_and_floats_are_some_where_the_user_says_so():
    depth = box(64, 64, high=1.0, kind=np.float32)
    space = S.Dict({"eyes": S.Tuple([box(48, 48, 3), S.Discrete(2)]), "depth": depth, "map": box(7, 7)})
    assert [found.path for found in pictures_in(space)] == [("eyes", 0)]
    assert [found.path for found in pictures_in(space, wanted=True)] == [("depth",), ("eyes", 0)]


def test_a_picture_beside_other_values_may_be_seen_alone_or_as_numbers(monkeypatch):
    entry = lambda **given: FilterObservation(make_env(ID, MODULE, args=("sees=both",), picture=False), ["eye"])  # noqa: E731
    monkeypatch.setitem(
        gymnasium.registry, "habits/Filtered-v0", gymnasium.envs.registration.EnvSpec("habits/Filtered-v0", entry)
    )
    np.testing.assert_array_equal(played(make_task("habits/Filtered-v0", image=SMALL)), played(habits("sees=plain")))
    numbers = habits("sees=both", picture=False)
    assert numbers.spec.obs_layout == ("0:6240 eye (Box, (40, 52, 3))", "6240:6242 state (Box, (2,))")
    np.testing.assert_array_equal(played(open_task(numbers.spec)), played(numbers))


def test_pictures_of_engines_and_teams_are_refused():
    with pytest.raises(EnvError, match="engine or team"):
        refuse_pictures(box(84, 84), "observation space")


def test_a_known_description_stays_what_it_is_whatever_the_rule():
    spec = habits("sees=plain").spec
    old = dataclasses.replace(spec, frames=dataclasses.replace(spec.frames, source=None))
    assert old == spec
    assert options_of(old, whole_games=True)["image"] is not None
    assert played(open_task(old)).dtype == np.uint8


# --- drawn ---


@pytest.mark.warm
@pytest.mark.parametrize("drawn", ["init", "reset"])
def test_what_observes_what_it_draws_is_made_with_a_render_mode_and_says_so(drawn):
    probe = probe_env(ID, MODULE, steps=0, args=(f"drawn={drawn}", "sees=plain"))
    assert probe.spec.args == (f"drawn={drawn}", "sees=plain", "render_mode='rgb_array'")
    assert "so render_mode=rgb_array is used" in probe.notes[0]
    task = open_task(probe.spec)
    assert task.env.unwrapped.render_mode == "rgb_array"
    assert played(task).shape == (5, 1, 84, 84)
    assert probe_env(ID, MODULE, steps=0, args=probe.spec.args).notes == probe.notes[1:]


@pytest.mark.warm
def test_an_environment_that_fails_now_and_then_is_not_taken_for_one_that_draws():
    probe = probe_env("habits/Fails-v0", MODULE, steps=0, args=("sees=plain",), picture=False)
    assert probe.spec.args == ("sees=plain",)
    assert not any("render_mode" in note for note in probe.notes)


@pytest.mark.warm
def test_the_error_of_an_environment_that_drawing_does_not_help_is_its_own():
    with pytest.raises(EnvError, match="unexpected keyword argument 'no_such'"):
        probe_env(ID, MODULE, steps=0, args=("no_such=1",))


@pytest.mark.parametrize("env_id", ["tests/Parts-v0", "parts_env:Parts", "tests/Hybrid-v0", "parts_env:Hybrid"])
def test_a_constructor_without_a_render_mode_is_said_to_draw_nothing(env_id):
    make_env(env_id, "parts_env").close()
    with pytest.raises(
        EnvError, match=r"^(tests/)?\w+(-v0)? does not render: .*its constructor has no render_mode=None"
    ):
        make_env(env_id, "parts_env", render_mode="rgb_array")


@pytest.mark.parametrize("env_id", ["tests/Parts-v0", "parts_env:Parts"])
def test_another_argument_that_a_constructor_lacks_is_named(env_id):
    with pytest.raises(EnvError, match="unexpected keyword argument 'no_such'"):
        make_env(env_id, "parts_env", render_mode="rgb_array", args=("no_such=1",))


@pytest.mark.warm
def test_a_class_without_a_time_limit_is_named_with_the_argument_that_sets_one():
    name = f"{MODULE}:Habits"
    endless = probe_env(name, MODULE, steps=0, args=("sees=plain",))
    assert any("no registered time limit (--env-arg max_episode_steps=N sets one)" in note for note in endless.notes)
    limited = probe_env(name, MODULE, steps=0, args=("sees=plain", "max_episode_steps=12"))
    assert limited.spec.max_episode_steps == 12
    assert not any("time limit" in note for note in limited.notes)


# --- masks ---


@pytest.mark.parametrize(
    ("mask", "source"), [("method", "action_masks()"), ("observation", "observation['action_mask']")]
)
def test_masks_of_a_method_or_of_the_observation_are_used(mask, source):
    task = habits(f"mask={mask}")
    assert (task.spec.action_mask, task.spec.obs_layout[-1]) == (True, f"3:6 {source}")
    obs = task.reset(seed=1)
    for _ in range(20):
        np.testing.assert_array_equal(obs[3:], task.env.unwrapped.action_masks())
        obs, *_ = task.step(np.float32(obs[3:].argmax()).reshape(1))
    task.env.close()
    probe = measured(habits(f"mask={mask}"), 50)  # a forbidden action would raise
    assert probe.notes == (f"{source}: invalid actions are masked",)
    assert check_up({"env_id": ID, "import_module": MODULE, "args": (f"mask={mask}",)})["notes"] == ()
    for row in POLICY_FORMATS[:3]:  # programs in Python
        text = example(task.spec, row, "x")
        assert ('get_wrapper_attr("action_masks")' if mask == "method" else 'obs["action_mask"]') in text


def test_masks_that_cannot_be_used_are_said_to_be_unused():
    probe = measured(habits(), 20)  # the method raises
    assert probe.notes == ("action_masks() is not used because it does not have one flag for each of 3 actions",)


# --- values out of range ---


def test_observations_beyond_a_million_are_warned_of():
    found = check_up({"env_id": ID, "import_module": MODULE, "args": ("sees=clock",)})
    assert found["largest_observation"] == pytest.approx(1.7e9)
    (check,) = _values(found["largest_observation"], 3)
    assert (check.status, "1.7e+09" in check.text, "normalize_obs" in check.remedy) == ("warn", True, True)
    assert _values(1e6, 3) == []


@pytest.mark.parametrize("size", ["1e39", "-1e39", "1e400", "nan"])
def test_a_reward_that_leaves_float32_is_refused(size):
    task = habits(f"spike={size}")
    task.reset(seed=0)
    with task.env:
        for _ in range(9):
            task.step(np.zeros(1, np.float32))
        with pytest.raises(BadTransition, match="reward"):
            task.step(np.zeros(1, np.float32))


def test_vector_environments_refuse_it_too_and_may_give_arrays_of_one():
    spec = dataclasses.replace(habits().spec, action_mask=False, obs_dim=3, obs_layout=())
    for size, refused in (("1e39", True), ("5.0", False)):
        envs = gymnasium.vector.SyncVectorEnv([lambda size=size: make_env(ID, MODULE, args=(f"spike={size}",))] * 2)
        plain = envs.step

        def step(actions, plain=plain):
            obs, reward, terminated, truncated, infos = plain(actions)
            return obs, reward[:, None], terminated[:, None], truncated, infos

        envs.step = step
        task = VectorTask(envs, spec)
        task.reset(0)
        for _ in range(9):
            assert task.step(np.zeros((2, 1), np.float32)).reward.shape == (2,)
        if refused:
            with pytest.raises(BadTransition, match="reward"):
                task.step(np.zeros((2, 1), np.float32))
        else:
            assert task.step(np.zeros((2, 1), np.float32)).reward.tolist() == [5.0, 5.0]
        task.close()


def test_sums_of_rewards_stay_within_float32():
    big = np.full(1, 3e38, np.float32)
    one, many = NStep(3, 1.0), NStepBatch(3, 1.0, 1, 1, 1)
    none = np.zeros((1, 1), np.float32)
    for sign in (1.0, 1.0, 1.0, -1.0, -1.0, -1.0):
        rows = one.push(none, none, sign * 3e38, False, False, none)
        batch = many.push(none, none, sign * big, np.zeros(1), none, ended=np.zeros(1, bool), lost=np.zeros(1, bool))
        assert [np.float32(row.reward) for row in rows] == batch[2].tolist()
        assert np.isfinite(batch[2]).all()


@pytest.mark.parametrize("first", [True, False])
def test_a_spike_does_not_poison_running_statistics(first):
    rng = np.random.default_rng(0)
    normalizer, returns = Normalizer(3), DiscountedReturns(0.9)
    ends = np.zeros((64, 4))
    for turn in range(60):
        obs = (rng.standard_normal((64, 3)) * [1.0, 100.0, 1e-3]).astype(np.float32)
        reward = rng.standard_normal((64, 4)).astype(np.float32)
        if turn % 2 != first:
            obs[5, 0], obs[9, 1], reward[3, 1], reward[4, 2] = 1e30, -3e38, 1e30, -3e38
        normalizer.update(obs)
        returns.add(reward, ends)
        assert abs(scaled_rewards(reward, returns.scale)).max() <= REWARD_CLIP
    np.testing.assert_allclose(normalizer.std, [1.0, 100.0, 1e-3], rtol=0.1)
    assert returns.scale == pytest.approx(1.0 / np.sqrt(1.0 - 0.9**2), rel=0.1)


def test_statistics_follow_values_that_have_really_changed():
    normalizer = Normalizer(1)
    for value in [0.0] * 5 + [1e7] * 5:
        normalizer.update(np.full((64, 1), value, np.float32))
    assert (normalizer.mean[0], normalizer.std[0]) == (5e6, 5e6)


# --- what is drawn ---

PICTURE = np.random.default_rng(0).integers(2, 256, (6, 8, 3)).astype(np.uint8)


@pytest.mark.parametrize(
    "drawn",
    [PICTURE, PICTURE / 255.0, (PICTURE / 255.0).astype(np.float16), PICTURE.astype(float), PICTURE.astype(np.int64),
     PICTURE.astype(np.uint16) * 257, np.dstack([PICTURE, PICTURE[:, :, :1]]), PICTURE.transpose(2, 0, 1),
     PICTURE[None], [0 * PICTURE, PICTURE], PICTURE.tolist(), torch.from_numpy(PICTURE), Image.fromarray(PICTURE)],
)  # fmt: skip
def test_pictures_of_any_kind_are_shown_as_they_are(drawn):
    found = DrawnPictures()(drawn)
    assert (found.dtype, found.flags.c_contiguous) == (np.uint8, True)
    assert abs(found.astype(int) - PICTURE).max() <= 1 if getattr(drawn, "dtype", 0) == np.float16 else True
    if getattr(drawn, "dtype", 0) != np.float16:
        np.testing.assert_array_equal(found, PICTURE)


@pytest.mark.parametrize("drawn", [PICTURE[:, :, 0], PICTURE[:, :, :1], PICTURE[None, :, :, 0].repeat(1, 0)])
def test_grey_pictures_have_three_equal_channels(drawn):
    np.testing.assert_array_equal(DrawnPictures()(drawn), PICTURE[:, :, :1].repeat(3, 2))


def test_a_dark_picture_does_not_change_how_floats_are_scaled():
    show = DrawnPictures()
    assert show(np.full((4, 4, 3), 200.0)).max() == 200
    assert show(np.full((4, 4, 3), 1.0)).max() == 1
    assert show(np.full((4, 4, 3), np.nan)).max() == 0
    assert DrawnPictures()(np.ones((4, 4), bool)).min() == 255


@pytest.mark.parametrize("drawn", [None, "text", 3, [], np.zeros((0, 4, 3)), np.zeros((5, 5, 2)), np.zeros(3, object)])
def test_what_is_no_picture_is_refused(drawn):
    with pytest.raises(ValueError, match="expected uint8"):
        DrawnPictures()(drawn)


def test_a_task_draws_floats_as_bytes():
    task = habits("paints=floats", render_mode="rgb_array")
    with task.env:
        task.reset(seed=0)
        assert task.render()[0, 0].tolist() == [0, 200, 0]
