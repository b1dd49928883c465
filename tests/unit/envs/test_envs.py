import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import types
from importlib import metadata

import gymnasium
import numpy as np
import pytest
import torch
from fault_envs import FAULT_ID as FAULT
from harness import PATIENCE_S
from linear_policy import SPEC

import spreeze
from spreeze.envs import probe
from spreeze.envs.make import BULLET_IDS, bullet_missing, default_env_id, describe, make_env
from spreeze.envs.probe import probe_env
from spreeze.envs.task import ActionScaling, BadTransition, Task, make_task
from spreeze.errors import EnvError
from spreeze.machine.logs import ending
from spreeze.machine.output import stdout_to_stderr
from spreeze.types import Box, Choices

needs_bullet = pytest.mark.skipif(bullet_missing() is not None, reason="pybullet has no wheel here")
FAULT_MODULE = "fault_envs"
BOX1 = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)


class Scripted(gymnasium.Env):
    """Returns what it is given."""

    def __init__(self, observation_space=BOX1, action_space=BOX1, result=None, first=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.result, self.first, self.actions = result, first, []

    def reset(self, *, seed=None, options=None):
        return self.first

    def step(self, action):
        self.actions.append(action)
        return self.result


def scripted_task(result, obs_space=BOX1, act_space=BOX1, first=None):
    env = Scripted(obs_space, act_space, result, first)
    return Task(env, describe(env))


# --- ids ---


def test_an_unknown_id_is_answered_with_the_closest_known_one():
    with pytest.raises(EnvError, match="did you mean 'Pendulum-v1'"):
        make_env("Pendulun-v1")


@pytest.mark.parametrize(("env_id", "words"), [
    ("NestedGoal-v7", "module 'nested_env' was imported, but has no such id; did you mean 'NestedGoal-v0'"),
    ("nested_env:NestedGoal-v7", "has no such id, class or function; did you mean 'NestedGoal-v0'"),
    ("nested_env:NestedGaol", "has no such id, class or function; did you mean 'NestedGoal"),
    ("NestedGoal", "has no such id; its class NestedGoal is --env nested_env:NestedGoal"),
    ("Something", "has no such id; it has NestedGoal-v0"),
    ("Pendulum-v9", "has no such id; did you mean 'Pendulum-v1'"),
    ("nested_env:S", "has no such id, class or function"),
    ("nested_env:__doc__", "has no such id, class or function"),
])  # fmt: skip
def test_an_id_that_is_not_in_an_imported_module_is_told_as_such(env_id, words):
    with pytest.raises(EnvError, match=re.escape(words)):
        make_env(env_id, "nested_env")


def test_an_id_that_a_known_package_lacks_is_no_reason_to_import_it_once_more(tmp_path, monkeypatch):
    source = "import gymnasium\ngymnasium.register('MiniGrid-Made-5x5-v0', 'minigrid:Grid')\n"
    (tmp_path / "minigrid.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gymnasium, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry)
    try:
        with pytest.raises(EnvError, match=r"has no such id; did you mean 'MiniGrid-Made-5x5-v0'"):
            make_env("MiniGrid-Made-5x5-v9", "minigrid")
        with pytest.raises(EnvError, match=r"comes from module 'minigrid': add --import minigrid"):
            make_env("MiniGrid-Made-5x5-v9")
    finally:
        sys.modules.pop("minigrid", None)


def test_environments_of_an_installed_plugin_need_no_import_and_one_that_fails_is_named(tmp_path, monkeypatch):
    source = """import gymnasium
def register_envs():
    gymnasium.register('Games/Pole-v0', 'gymnasium.envs.classic_control:CartPoleEnv')
def fail():
    raise OSError('no games here')
"""
    (tmp_path / "games_plugin.py").write_text(source)
    points = "[gymnasium.envs]\nGames = games_plugin:register_envs\nBroken = games_plugin:fail\n"
    (tmp_path / "games-1.dist-info").mkdir()
    (tmp_path / "games-1.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "games-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: games\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gymnasium, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry)
    try:
        with contextlib.closing(make_env("Games/Pole-v0")) as env:
            assert env.reset(seed=0)[0].shape == (4,)
        with pytest.raises(EnvError, match="unknown environment 'Games/Pole-v1'; did you mean 'Games/Pole-v0'"):
            make_env("Games/Pole-v1")
        with pytest.raises(EnvError, match=r"environments Broken/: games_plugin:fail: .*no games here"):
            make_env("Broken/Pole-v0")
    finally:
        sys.modules.pop("games_plugin", None)


def test_a_class_or_function_of_the_imported_module_is_an_environment_without_an_id():
    with contextlib.closing(make_env("nested_env:NestedGoal", "nested_env", args=("max_episode_steps=3",))) as env:
        spec = describe(env, "nested_env")
        assert (spec.env_id, spec.max_episode_steps) == ("nested_env:NestedGoal", 3)
        assert type(env.unwrapped).__name__ == "NestedGoal"
        env.reset(seed=0)
        assert [env.step(np.zeros(1, np.float32))[3] for _ in range(3)] == [False, False, True]
    with contextlib.closing(make_env("nested_env:made", "nested_env", args=("wide=true",))) as env:
        assert describe(env, "nested_env").env_id == "nested_env:made"
        assert env.unwrapped.place == 0.0
    with pytest.raises(EnvError, match="would import module 'nested_env': add --import nested_env"):
        make_env("nested_env:NestedGoal")
    with pytest.raises(EnvError, match="could not be constructed: TypeError"):
        make_env("nested_env:NestedGoal", "nested_env", args=("wrong=1",))


def test_a_script_in_place_of_an_id_is_answered_with_how_its_class_is_named():
    with pytest.raises(EnvError, match=r"'robot\.py'; your own: .* --import robot\.py --env robot\.py:CLASS"):
        make_env("robot.py")
    with pytest.raises(EnvError, match=r"'Zzz'; your own: --import MODULE that registers it, or --import my_robot"):
        make_env("Zzz")


def test_a_misspelt_bullet_id_is_answered_even_before_its_module_was_imported():
    code = (
        "from spreeze.envs.make import make_env\n"
        "from spreeze.errors import EnvError\n"
        "try: make_env('Walker2dBulletEnv-v0')\n"
        "except EnvError as error: import sys; sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "did you mean 'Walker2DBulletEnv-v0'" in done.stderr


def test_a_prefix_names_a_module_only_together_with_import():
    with pytest.raises(EnvError, match="add --import antigravity"):
        make_env("antigravity:Pendulum-v1")
    assert "antigravity" not in sys.modules
    env = make_env(f"{FAULT_MODULE}:{FAULT}", FAULT_MODULE)
    assert describe(env, FAULT_MODULE).env_id == FAULT
    env.close()


@pytest.mark.parametrize("module", ["no_such_module_here", "../x", "os;x"])
def test_a_module_that_cannot_be_imported_is_an_error_of_one_line(module):
    with pytest.raises(EnvError) as caught:
        make_env("Pendulum-v1", module)
    assert "\n" not in str(caught.value)
    assert "--import" in str(caught.value)


@pytest.mark.parametrize(("mujoco", "env_id"), [(None, "Pendulum-v1"), ("found", "Walker2d-v5")])
def test_a_bullet_id_without_pybullet_names_the_remedy_and_the_fallback(monkeypatch, mujoco, env_id):
    monkeypatch.setattr("spreeze.envs.make.importlib.util.find_spec", lambda name: mujoco if name == "mujoco" else None)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", {})
    monkeypatch.setattr(gymnasium, "registry", {})
    with pytest.raises(EnvError, match=rf"needs pybullet.*{env_id}"):
        make_env("Walker2DBulletEnv-v0")
    choice = default_env_id()
    assert choice.value == env_id
    assert choice.reason.startswith(f"{env_id} instead of Walker2DBulletEnv-v0: pybullet ")


@needs_bullet
def test_the_default_task_is_walker_where_pybullet_is_installed():
    assert default_env_id().value == "Walker2DBulletEnv-v0"


def test_a_constructor_that_raises_is_named(monkeypatch):
    monkeypatch.setenv("SPREEZE_FAULT_INIT_S", "soon")
    with pytest.raises(EnvError, match=r"could not be constructed: ValueError"):
        make_env(FAULT, FAULT_MODULE)


def test_a_window_is_refused_without_a_display(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(EnvError, match="no display"):
        make_env("Pendulum-v1", render_mode="human")


# --- Bullet ---


@needs_bullet
def test_bullet_never_joins_a_foreign_shared_memory_server():
    import pybullet

    env = make_env("InvertedPendulumBulletEnv-v0", plain=True)
    env.reset(seed=0)
    client = env.unwrapped._p
    assert client.getConnectionInfo()["connectionMethod"] == pybullet.DIRECT
    assert type(client).__name__ == "DirectClient"
    env.close()
    env = make_env("InvertedPendulumBulletEnv-v0")
    env.reset(seed=0)
    client = env.unwrapped.client.id
    assert pybullet.getConnectionInfo(client)["connectionMethod"] == pybullet.DIRECT
    env.close()


@needs_bullet
def test_walker_is_described_and_repeats_with_its_seed():
    traces = []
    for _ in range(2):
        task = make_task("Walker2DBulletEnv-v0")
        rows = [task.reset(seed=7)]
        rows += [task.step(np.full(6, 0.3, np.float32))[0] for _ in range(20)]
        traces.append(np.array(rows))
        task.close()
    assert task.spec.obs_dim == 22
    assert task.spec.action_dim == 6
    assert task.spec.max_episode_steps == 1000
    assert task.spec.reward_threshold == 2500.0
    np.testing.assert_array_equal(*traces)


@needs_bullet
def test_the_list_of_bullet_ids_is_the_module_s_own():
    make_env("ReacherBulletEnv-v0").close()
    assert set(BULLET_IDS) == {name for name in gymnasium.registry if "BulletEnv" in name}


# --- spaces ---


def test_pendulum_is_described_with_its_bounds():
    task = make_task("Pendulum-v1")
    assert (task.spec.obs_dim, task.spec.action_dim) == (3, 1)
    assert task.spec.action == Box((-2.0,), (2.0,), (1,))
    assert task.spec.max_episode_steps == 200
    task.close()


S = gymnasium.spaces


@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        (BOX1, S.Discrete(1), "1 actions"),
        (BOX1, S.MultiDiscrete([1, 1]), "1 actions"),
        (BOX1, S.Sequence(S.Discrete(2)), "MultiDiscrete"),
        (BOX1, S.Dict({"a": S.Text(2)}), "not supported"),
        (BOX1, S.Box(-np.inf, np.inf, (2,), np.float32), "unbounded"),
        (BOX1, S.Box(0.0, np.inf, (2,), np.float64), "unbounded"),
        (BOX1, S.Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (2,), np.float32), "unbounded"),
        (BOX1, S.Box(0, 3, (2,), np.int64), "integer dtype"),
        (BOX1, S.Box(-1.0, 1.0, (0,), np.float32), "is empty"),
        (S.Dict({}), BOX1, "is empty"),
        (S.Text(5), BOX1, "no fixed length"),
        (S.Box(-1.0, 1.0, (3, 0), np.float32), BOX1, "is empty"),
    ],
)
def test_a_space_that_cannot_be_handled_is_named_with_what_would_fit(observation, action, words):
    with pytest.raises(EnvError, match=words) as caught:
        describe(Scripted(observation, action))
    assert "space" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_float_observation_of_higher_rank_is_flattened_and_an_action_is_shaped_back():
    obs = np.arange(6, dtype=np.float64).reshape(2, 3)
    action_space = S.Box(-1.0, 1.0, (2, 2), np.float64)
    task = scripted_task((obs, 1, False, True, {}), S.Box(-9.0, 9.0, (2, 3), np.float64), action_space)
    got, reward, terminated, truncated = task.step(np.array([1, 2, 3, 4], np.float32))
    np.testing.assert_array_equal(got, np.arange(6, dtype=np.float32))
    assert got.dtype == np.float32
    assert (reward, terminated, truncated) == (1.0, False, True)
    assert task.env.actions[0].shape == (2, 2)
    assert task.env.actions[0].dtype == np.float64


def test_no_action_leaves_bounds_in_float64_that_no_float32_has():
    space = S.Box(-0.4, np.array([0.4, 0.7]), (2,), np.float64)
    spec = describe(Scripted(S.Box(-1.0, 1.0, (1,), np.float32), space))
    for actions in ([[9.0, 9.0]], [[-9.0, -9.0]], [[1.0, -1.0]]):
        for native in ActionScaling(spec)(np.array(actions, np.float32)):
            assert space.contains(native.astype(np.float64))


# --- stepping ---


@pytest.mark.parametrize(
    ("result", "field"),
    [
        ((np.array([np.nan], np.float32), 0.0, False, False, {}), r"observation\[0\] = nan"),
        ((np.array([np.inf], np.float32), 0.0, False, False, {}), r"observation\[0\] = inf"),
        ((np.array([1e300]), 0.0, False, False, {}), r"observation\[0\] = inf"),
        (([10**400], 0.0, False, False, {}), "observation"),
        ((np.zeros(1), 1e39, False, False, {}), r"reward = 1e\+39"),
        ((np.zeros(1), -(10**400), False, False, {}), "reward = "),
        ((np.zeros(1), np.array([1e39]), False, False, {}), r"reward = 1e\+39"),
        ((np.zeros(1), np.zeros(2), False, False, {}), r"reward = shape \(2,\); expected one number"),
        ((np.zeros(1), [], False, False, {}), r"reward = shape \(0,\)"),
        ((np.zeros(1), 0.0, [False, True], False, {}), r"terminated = shape \(2,\)"),
        ((np.zeros(1), 0.0, False, "False", {}), r"truncated = False \(str\)"),
        ((np.zeros(2, np.float32), 0.0, False, False, {}), r"observation = shape \(2,\)"),
        ((None, 0.0, False, False, {}), "observation"),
        (("text", 0.0, False, False, {}), "observation"),
        ((np.zeros(1, np.float32), float("nan"), False, False, {}), "reward = nan"),
        ((np.zeros(1, np.float32), None, False, False, {}), "reward = None"),
        ((np.zeros(1, np.float32), 0.0, False, {}), "step"),
        (None, "step"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_field_and_value(result, field):
    task = scripted_task(result)
    with pytest.raises(BadTransition, match=field):
        task.step(np.zeros(1, np.float32))


@pytest.mark.parametrize(
    "one",
    [
        np.array,
        lambda value: np.array([value]),
        lambda value: np.array([[value]]),
        lambda value: [value],
        lambda value: (value,),
        lambda value: torch.tensor([value]),
    ],
)
def test_an_array_of_one_element_is_its_element(one):
    task = scripted_task(([0.5], one(2.5), one(False), one(True), None))
    obs, *others = task.step(np.zeros(1, np.float32))
    assert (obs.tolist(), others) == ([0.5], [2.5, False, True])
    assert [type(value) for value in others] == [float, bool, bool]


@pytest.mark.parametrize("flag", [0, np.bool_(False), np.int8(0), 0.0, None])
def test_flags_may_be_numbers(flag):
    _, _, terminated, truncated = scripted_task(([0.5], 1, flag, not flag, None)).step(np.zeros(1, np.float32))
    assert (terminated, truncated) == (False, True)


def test_a_tensor_with_a_gradient_is_its_values():
    task = scripted_task((torch.tensor([0.5], requires_grad=True), 1.0, False, False, {}))
    assert task.step(np.zeros(1, np.float32))[0].tolist() == [0.5]


def test_large_finite_observations_pass_although_their_square_overflows():
    task = scripted_task((np.array([3e38], np.float32), 1e38, True, False, {}))
    obs, reward, terminated, _ = task.step(np.zeros(1, np.float32))
    assert (obs[0], reward, terminated) == (np.float32(3e38), 1e38, True)


def test_an_environment_that_reuses_its_array_cannot_change_an_observation_already_given():
    shared = np.zeros(1, np.float32)
    task = scripted_task((shared, 0.0, False, False, {}))
    first = task.step(np.zeros(1, np.float32))[0]
    shared[0] = 1.0
    assert first[0] == 0.0


def test_a_reset_of_the_old_api_is_refused():
    with pytest.raises(BadTransition, match="reset"):
        scripted_task(None, first=np.zeros(1, np.float32)).reset()


def natives(low, high, **options):
    low, high = (tuple(map(float, bound)) for bound in (low, high))
    spec = dataclasses.replace(SPEC, action=Box(low, high))
    return ActionScaling(spec, **options)


@pytest.mark.parametrize("in_place", [False, True])
def test_actions_are_mapped_and_clipped_into_another_array(in_place):
    actions = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [3.0, -3.0]], np.float32)
    given, out = actions.copy(), np.empty_like(actions) if in_place else None
    native = natives([-2.0, 0.0], [2.0, 10.0])(actions, out)
    assert native.dtype == np.float32
    assert native is out or not in_place
    np.testing.assert_allclose(native, [[-2, 0], [0, 5], [2, 10], [2, 0]])
    unit = natives([-1.0, -1.0], [1.0, 1.0])(actions, out)
    np.testing.assert_array_equal(unit, [[-1, -1], [0, 0], [1, 1], [1, -1]])
    np.testing.assert_array_equal(actions, given)


def test_actions_within_unit_bounds_are_copied_as_they_are():
    actions, out = np.array([[-1.0, 0.5], [1.0, -0.0]], np.float32), np.empty((2, 2), np.float32)
    assert natives([-1.0, -1.0], [1.0, 1.0], bounded=True)(actions, out) is out
    assert out.tobytes() == actions.tobytes()
    assert not np.shares_memory(natives([-1.0, -1.0], [1.0, 1.0], bounded=True)(actions), actions)


def test_mapped_actions_never_leave_the_bounds_by_rounding():
    rng = np.random.default_rng(0)
    low = rng.uniform(-3.0, 0.0, 50).astype(np.float32)
    high = rng.uniform(0.1, 3.0, 50).astype(np.float32)
    for edge in (-1.0, 1.0):
        actions = natives(low, high)(np.full((4, 50), edge, np.float32))
        assert (actions >= low).all()
        assert (actions <= high).all()


# --- faults ---


def test_the_fault_environment_without_faults_is_an_ordinary_one():
    task = make_task(FAULT, FAULT_MODULE, render_mode="rgb_array")
    obs = task.reset(seed=3)
    assert obs.shape == (3,)
    steps = 0
    truncated = False
    while not truncated:
        _, reward, terminated, truncated = task.step(np.zeros(1, np.float32))
        assert reward <= 0.0
        assert not terminated
        steps += 1
    assert steps == 50
    assert task.render().shape == (48, 65, 3)
    task.close()


@pytest.mark.parametrize(
    ("name", "error"), [("P_CRASH", "injected fault"), ("P_NAN", "nan"), ("P_SHAPE", r"shape \(4,\)")]
)
def test_a_fault_is_switched_on_by_an_environment_variable(monkeypatch, name, error):
    monkeypatch.setenv(f"SPREEZE_FAULT_{name}", "1.0")
    task = make_task(FAULT, FAULT_MODULE)
    task.reset(seed=0)
    with pytest.raises((RuntimeError, BadTransition), match=error):
        task.step(np.zeros(1, np.float32))
    task.close()


def test_a_fault_at_reset(monkeypatch):
    monkeypatch.setenv("SPREEZE_FAULT_P_CRASH_RESET", "1.0")
    task = make_task(FAULT, FAULT_MODULE)
    with pytest.raises(RuntimeError, match="reset raises"):
        task.reset(seed=0)
    task.close()


# --- probe ---


@pytest.mark.warm
def test_a_probe_reports_spaces_and_step_time():
    probe = probe_env("Pendulum-v1", steps=500)
    assert (probe.spec.obs_dim, probe.spec.action.low) == (3, (-2.0,))
    assert probe.step_us_median > 0.0
    assert probe.step_cv >= 0.0


@pytest.mark.warm
def test_a_probe_that_was_stopped_meanwhile_is_tried_again(tmp_path, monkeypatch):
    """As by Ctrl-Z: the first child would never end."""
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("SPREEZE_FAULT_HANG_AT", "1")
    monkeypatch.setenv("SPREEZE_FAULT_ONCE", str(hangs))

    class Clock:
        slept_s = late_s = 0.0

        def __call__(self):
            if hangs.exists() and not self.slept_s:
                self.slept_s, self.late_s = 60.0, 2 * PATIENCE_S  # the deadline is over
            return time.monotonic() + self.late_s

    monkeypatch.setattr(probe, "AWAKE", Clock())
    assert probe_env(FAULT, FAULT_MODULE, steps=0, deadline_s=PATIENCE_S).spec.obs_dim == 3
    assert hangs.exists()


@pytest.mark.warm
def test_a_quick_probe_describes_without_timing():
    probe = probe_env("Pendulum-v1", steps=0)
    assert probe.step_us_median is None


@pytest.mark.warm
def test_a_probe_hands_on_the_error_of_the_environment():
    with pytest.raises(EnvError, match="unknown environment"):
        probe_env("CartPol-v1", steps=0)


def test_a_probe_describes_and_times_discrete_actions():
    probe = probe_env("CartPole-v1", steps=50)
    assert (probe.spec.obs_dim, probe.spec.action) == (4, Choices((2,)))
    assert probe.step_us_median > 0
    assert probe.packages == {"gymnasium": gymnasium.__version__}


def test_a_probe_names_the_packages_of_an_environment_and_of_what_steps_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "task_of_a_test.py").write_text(
        "import gymnasium, sys, types\nfrom gymnasium.envs.classic_control import PendulumEnv\n"
        "sys.modules['ale_py'] = types.ModuleType('ale_py')\n"  # as if it had been imported
        "class Mine(PendulumEnv): pass\ngymnasium.register('Mine-v0', entry_point=Mine)\n"
    )
    found = probe_env("Mine-v0", "task_of_a_test", steps=5).packages
    assert set(found) == {"ale_py"} & set(metadata.packages_distributions())
    assert probe_env("spreeze/Synthetic-v0", args=("mean_s=0.0",), steps=5).packages == {"spreeze": spreeze.__version__}


@pytest.mark.parametrize(("step_us", "waited", "told_us"), [
    ([100.0] * 40, 0.0, 100.0),
    ([100.0] * 38 + [20_000.0] * 2, 0.9, 100.0),  # short steps: a few of them wait, for long
    ([50_000.0] * 40, 0.9, 5_000.0),  # long ones all wait in their midst
    ([100.0] * 38 + [9_000.0] * 2, 0.0, 100.0),
])  # fmt: skip
def test_the_time_of_a_step_leaves_out_what_it_waited_for_a_core(monkeypatch, step_us, waited, told_us):
    clock, left = [0.0], list(step_us)
    task = make_task("CartPole-v1")
    step = task.step

    def slow_step(action):
        clock[0] += (left.pop(0) if left else step_us[0]) / 1e6
        return step(action)

    monkeypatch.setattr(probe, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(probe, "waited_for_core_s", lambda: waited * clock[0])
    monkeypatch.setattr(probe, "_TIMING_S", 1e9)
    task.step = slow_step
    task.reset(seed=0)
    assert probe.measure(task, len(step_us), 0, 0.0).step_us_median == pytest.approx(told_us, rel=0.05)


@pytest.mark.warm
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("EXIT_AT", "1", "exit code 0 before the first step"),
        ("SEGFAULT_AT", "1", "SIGSEGV"),
        ("P_NAN", "1.0", "failed in the probe: BadTransition"),
        ("INIT_S", "60", "no environment step within 1 s"),
    ],
)
def test_a_probe_survives_an_environment_that_does_not(monkeypatch, name, value, words):
    monkeypatch.setenv(f"SPREEZE_FAULT_{name}", value)
    deadline_s = 1.0 if name == "INIT_S" else 60.0
    with pytest.raises(EnvError, match=words):
        probe_env(FAULT, FAULT_MODULE, steps=0, deadline_s=deadline_s)


@pytest.mark.warm
def test_a_fatal_fault_can_be_limited_to_one_process(monkeypatch, tmp_path):
    monkeypatch.setenv("SPREEZE_FAULT_EXIT_AT", "1")
    monkeypatch.setenv("SPREEZE_FAULT_ONCE", str(tmp_path / "happened"))
    with pytest.raises(EnvError, match="exit code 0"):
        probe_env(FAULT, FAULT_MODULE, steps=0)
    assert probe_env(FAULT, FAULT_MODULE, steps=0).spec.obs_dim == 3


@pytest.mark.parametrize(("interrupted", "error"), [(True, KeyboardInterrupt), (False, EnvError)])
def test_a_probe_that_a_ctrl_c_ended_is_an_interrupt_and_no_fault_of_the_environment(monkeypatch, interrupted, error):
    asked = []

    def run(*args, **more):
        asked.append(1)  # the signal has reached both
        return real(["sh", "-c", "kill -INT $$"], **more)

    real = subprocess.Popen
    monkeypatch.setattr(probe.subprocess, "Popen", run)
    with pytest.raises(error):
        probe_env("Pendulum-v1", steps=0, interrupted=lambda: interrupted and bool(asked))


# --- standard output ---


def test_what_c_code_prints_does_not_reach_standard_output():
    code = (
        "import ctypes, os\n"
        "from spreeze.machine.output import stdout_to_stderr\n"
        "with stdout_to_stderr():\n"
        "    ctypes.CDLL(None).printf(b'from c')\n"
        "    print('from python')\n"
        "    os.write(1, b'raw')\n"
        "print('{}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert json.loads(done.stdout) == {}
    assert all(word in done.stderr for word in ("from c", "from python", "raw"))


def test_standard_output_is_given_back_after_an_exception(capfd):
    with pytest.raises(ValueError, match="inside"), stdout_to_stderr():
        raise ValueError("inside")
    os.write(1, b"back")
    assert capfd.readouterr().out == "back"


def test_native_bounds_are_float32():
    task = make_task("Pendulum-v1")
    assert task.to_env_units.low.dtype == task.to_env_units.high.dtype == np.float32
    task.close()


def test_a_child_ended_by_a_signal_without_a_name_is_reported_by_its_number():
    assert [ending(code) for code in (3, -9, -40)] == ["exit code 3", "signal SIGKILL", "signal 40"]


@pytest.mark.warm
@pytest.mark.parametrize(("cost", "shares"), [("sleep", (0.0, 0.5)), ("spin", (1.0, 1.0))])
def test_a_probe_tells_environments_that_wait_from_those_that_compute(cost, shares):
    args = ("mean_s=0.002", f"cost={cost}")
    low, high = shares
    assert low <= probe_env("spreeze/Synthetic-v0", args=args, steps=50).step_cpu_share <= high


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Ant-v5", "Walker2d-v5", "Hopper-v5", "Humanoid-v5"])
def test_pictures_of_a_robot_that_runs_away_follow_it(name):
    with contextlib.closing(make_env(name, render_mode="rgb_array")) as env:
        renderer = env.unwrapped.mujoco_renderer
        assert renderer.model.camera(renderer.camera_id).name == "track"


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
@pytest.mark.parametrize("name", ["Walker2d-v5", "HalfCheetah-v5"])
def test_a_robot_that_is_far_away_is_drawn_with_its_floor_as_at_its_start(name):
    with contextlib.closing(make_env(name, render_mode="rgb_array")) as env:
        env.reset(seed=1)
        here = env.render()
        position = env.unwrapped.data.qpos.copy()
        position[0] += 120.0  # a whole number of the floor's squares, beyond the end of its 40 m
        env.unwrapped.set_state(position, env.unwrapped.data.qvel)
        assert np.mean(np.abs(env.render().astype(int) - here)) < 4.0


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
@pytest.mark.parametrize("name", ["Ant-v5", "Walker2d-v5"])
def test_an_environment_that_draws_moves_as_one_that_does_not(name):
    with (
        contextlib.closing(make_env(name, render_mode="rgb_array")) as drawn,
        contextlib.closing(make_env(name)) as env,
    ):
        assert np.array_equal(drawn.reset(seed=1)[0], env.reset(seed=1)[0])
        rng = np.random.default_rng(1)
        for _ in range(50):
            action = rng.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32)
            (obs, *rest), (expected, *others) = drawn.step(action), env.step(action)
            assert np.array_equal(obs, expected)
            assert rest[:3] == others[:3]


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
@pytest.mark.parametrize(("render_mode", "coarse"), [("rgb_array", True), (None, False)])
def test_only_pictures_to_look_at_are_drawn_with_coarser_shadows(render_mode, coarse):
    with contextlib.closing(make_env("HalfCheetah-v5", render_mode=render_mode)) as env:
        quality = env.unwrapped.model.vis.quality
        assert (quality.shadowsize == 1024, quality.offsamples == 0) == (coarse, coarse)


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
def test_pictures_that_a_policy_observes_are_drawn_as_their_author_wants_them():
    from gymnasium.envs.registration import WrapperSpec, register, registry

    pixels = WrapperSpec("pixels", "gymnasium.wrappers:AddRenderObservation", {"render_only": True})
    entry = "gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv"
    register("SeenCheetah-v0", entry, additional_wrappers=(pixels,), kwargs={"render_mode": "rgb_array"})
    try:
        with contextlib.closing(make_env("SeenCheetah-v0", render_mode="rgb_array")) as env:
            assert env.unwrapped.model.vis.quality.shadowsize > 1024
    finally:
        del registry["SeenCheetah-v0"]


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
def test_mujoco_writes_no_file_where_the_user_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(make_env("HalfCheetah-v5")) as env:
        env.reset(seed=1)
    assert list(tmp_path.iterdir()) == []
