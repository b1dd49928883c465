"""Vector environments: whatever their autoreset mode, the rows are those of plain environments."""

import ctypes.util
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from harness import PATIENCE_S, run_command, train
from row_sinks import Rows

from spreeze.envs.families import engine_of
from spreeze.envs.make import make_env
from spreeze.envs.single_env import SingleEnv
from spreeze.envs.task import make_task, vector_maker
from spreeze.envs.vector_task import VectorTask
from spreeze.errors import BadTransition, EnvError, WorkerError
from spreeze.types import Box, Choices, EnvSpec
from spreeze.workers.collectors.transition_collector import VectorCollector

needs_envpool = pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="envpool is not installed")
needs_mujoco = pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
SPEC = EnvSpec(
    env_id="Counter-v0", import_module=None, obs_dim=2, action=Box((-1.0,), (1.0,)),
    max_episode_steps=5, reward_threshold=None,
)  # fmt: skip


class Counter(gymnasium.Env):
    """obs = (number of the episode, step), reward = step; may terminate, raise or return NaN at a step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, terminate_at=None, fault=None):
        self.terminate_at, self.fault, self.episode, self.steps = terminate_at, fault, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.fault is not None:
            self.fault(self)
        reward = float("nan") if self.fault == "nan" else float(self.steps)
        return np.array([self.episode, self.steps], np.float32), reward, self.steps == self.terminate_at, False, {}


class Nested(Counter):
    """The same, observed as a Dict whose keys come in another order."""

    observation_space = gymnasium.spaces.Dict(
        {
            "step": gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32),
            "at": gymnasium.spaces.Dict({"episode": gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)}),
        }
    )

    def _nested(self, obs):
        return {"step": obs[1:], "at": {"episode": obs[:1]}}

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self._nested(obs), info

    def step(self, action):
        obs, *others = super().step(action)
        return self._nested(obs), *others


def _vector(mode, num_envs=2, limit=5, kind=Counter, **kwargs):
    def one():
        return gymnasium.wrappers.TimeLimit(kind(**kwargs), limit)

    return SyncVectorEnv([one] * num_envs, autoreset_mode=mode)


def _run(make, steps, num_envs=2, n_step=1, spec=SPEC, action=0.0):
    rows = Rows()
    sampling = VectorCollector(
        lambda: pytest.fail("a plain environment was made"), num_envs, spec, rows, n_step=n_step, gamma=0.5,
        seeds=list(range(num_envs)), make_vector=lambda count, seed: make(),
    )  # fmt: skip
    for _ in range(steps):
        sampling.step(np.full((num_envs, spec.action_dim), action, np.float32), 0)
    sampling.close()
    return rows, sampling


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
@pytest.mark.parametrize(("terminate_at", "length", "flag"), [(None, 5, 0.0), (3, 3, 1.0), (5, 5, 1.0)])
def test_every_row_is_a_transition_with_its_true_next_observation(mode, terminate_at, length, flag):
    rows, sampling = _run(lambda: VectorTask(_vector(mode, terminate_at=terminate_at), SPEC), 26)
    per_env = 26 // (length + 1) * length + min(26 % (length + 1), length) if mode is AutoresetMode.NEXT_STEP else 26
    assert len(rows.rows) == 2 * per_env == sampling.counts.env_steps
    for index, row in enumerate(rows.rows[::2]):
        episode, step = divmod(index, length)
        assert row == [episode, step, 0.0, step + 1.0, flag * (step + 1 == length), episode, step + 1]
    episodes = per_env // length
    assert sampling.counts.episodes == 2 * episodes
    assert sampling.counts.episode_length == length
    assert sampling.counts.episode_return == length * (length + 1) / 2


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
def test_nested_observations_are_one_vector_in_the_order_of_their_keys(mode):
    from spreeze.envs.single_env import SingleEnv

    plain, _ = _run(lambda: VectorTask(_vector(mode), SPEC), 26)
    nested, _ = _run(lambda: VectorTask(_vector(mode, kind=Nested), SPEC), 26)
    assert nested.rows == plain.rows
    env = SingleEnv("vector:Nested-v0", lambda seed: _vector(mode, num_envs=1, kind=Nested))
    assert env.observation_space.shape == (2,)
    for episode in range(2):
        assert env.reset()[0].tolist() == [episode, 0]
        seen = [env.step(np.zeros(1, np.float32))[0].tolist() for _ in range(5)]
        assert seen == [[episode, step] for step in range(1, 6)]
    env.close()


@needs_envpool
def test_envpool_tasks_with_nested_observations_run():
    task = make_task("envpool:CheetahRun-v1")
    assert (task.spec.obs_dim, task.spec.action_dim) == (17, 6)
    assert task.reset(seed=1).shape == (17,)
    task.close()
    rows, sampling = _run(lambda: vector_maker(task.spec)(8, 0), 4, num_envs=8, spec=task.spec)
    assert len(rows.rows) == sampling.counts.env_steps == 32


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
def test_n_step_rows_never_reach_over_an_episode(mode):
    # gamma 0.5, n = 2: step k (from 0) of an episode of 5 gives k + 1 + (k + 2) / 2, its last step 5 alone.
    rows, _ = _run(lambda: VectorTask(_vector(mode, num_envs=1), SPEC), 11, num_envs=1, n_step=2)
    assert [row[3] for row in rows.rows[:5]] == [2.0, 3.5, 5.0, 6.5, 5.0]
    assert rows.spans[:5] == [2, 2, 2, 2, 1]
    assert {row[0] for row in rows.rows[:5]} == {0.0}
    assert rows.rows[5][:2] == [1.0, 0.0]


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
def test_one_lane_is_stepped_and_reset_like_a_plain_environment(mode):
    from spreeze.envs.single_env import SingleEnv

    env = SingleEnv("vector:Counter-v0", lambda seed: _vector(mode, num_envs=1))
    for episode in range(3):
        obs, _ = env.reset()
        assert obs.tolist() == [episode, 0]
        for step in range(5):
            obs, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
            assert (obs.tolist(), reward) == ([episode, step + 1], step + 1)
            assert (terminated, truncated) == (False, step == 4)
    env.close()


def test_a_mode_that_is_not_stated_is_refused():
    vector = _vector(AutoresetMode.NEXT_STEP)
    vector.metadata = {}
    with pytest.raises(EnvError, match="autoreset_mode"):
        VectorTask(vector, SPEC)
    vector.close()


def test_an_error_costs_the_episodes_of_all_and_goes_on_with_a_new_one():
    made = []

    def fault(env):
        if len(made) == 1 and env.steps == 3:
            raise RuntimeError("bad luck")

    def closing():
        raise RuntimeError("closing fails, too")

    def make():
        made.append(VectorTask(_vector(AutoresetMode.SAME_STEP, fault=fault), SPEC))
        made[-1].close = closing
        return made[-1]

    rows, sampling = _run(make, 6)
    assert len(made) == 2
    assert (sampling.counts.env_errors, sampling.counts.env_steps) == (1, 10)
    assert [row[1] for row in rows.rows[::2]] == [0, 1, 0, 1, 2], "the failed step gave no row"


def test_a_vector_environment_that_always_fails_ends_the_sampler():
    def fault(env):
        raise RuntimeError("bad luck")

    with pytest.raises(WorkerError, match="20 environment errors"):
        _run(lambda: VectorTask(_vector(AutoresetMode.SAME_STEP, fault=fault), SPEC), 30)


def test_what_is_not_finite_or_of_another_shape_is_refused_by_name():
    task = VectorTask(_vector(AutoresetMode.DISABLED), SPEC)
    task.reset(0)
    task.env.step = lambda actions: (np.zeros((2, 2)), np.array([0.0, np.nan]), np.zeros(2), np.zeros(2), {})
    with pytest.raises(BadTransition, match="Counter-v0 returned reward"):
        task.step(np.zeros((2, 1), np.float32))
    task.env.step = lambda actions: (np.zeros((2, 3)), np.zeros(2), np.zeros(2), np.zeros(2), {})
    with pytest.raises(BadTransition, match=r"shape \(2, 3\) for 2 environments; expected 2 values each"):
        task.step(np.zeros((2, 1), np.float32))
    task.close()


# --- ids ---


def test_a_prefix_names_an_engine():
    assert engine_of("envpool:Pendulum-v1") == "envpool"
    assert engine_of("vector:CartPole-v1") == "vector"
    assert engine_of("my_module:Pendulum-v1") is None
    assert engine_of("Pendulum-v1") is None


def test_an_engine_that_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.setattr("spreeze.envs.families.importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"pip install 'spreeze\[envpool\]'"):
        make_env("envpool:Pendulum-v1")


def test_an_engine_s_discrete_observation_is_refused_before_anything_is_stepped():
    env = SimpleNamespace(
        observation_space=gymnasium.spaces.Discrete(4), action_space=gymnasium.spaces.Discrete(2), close=lambda: None
    )
    with pytest.raises(EnvError, match="observation space is a Discrete"):
        SingleEnv("envpool:FrozenLake-v1", lambda seed: env)


def test_an_id_without_vector_environment_says_what_to_use():
    with pytest.raises(EnvError, match="no vector environment of its own; use --env Pendulum-v1"):
        make_env("vector:Pendulum-v1")


def test_gymnasiums_own_vector_cart_pole_gives_the_rows_of_its_mode():
    task = make_task("vector:CartPole-v1")
    assert (task.spec.obs_dim, task.spec.action, task.spec.max_episode_steps) == (4, Choices((2,)), 500)
    assert task.reset(seed=1).shape == (4,)
    task.close()
    rows, sampling = _run(lambda: vector_maker(task.spec)(4, 0), 60, num_envs=4, spec=task.spec, action=1.0)
    assert sampling.counts.episodes >= 16
    ends = [row for row in rows.rows if row[6]]
    assert len(ends) == sampling.counts.episodes
    assert all(abs(row[9]) > 0.2095 or abs(row[7]) > 2.4 for row in ends), "the true last observation"
    assert all(abs(row[2]) <= 0.2095 for row in rows.rows), "no row begins behind an end"


@needs_envpool
@pytest.mark.parametrize("num_envs", [1, 3])
def test_envpool_pendulum_of_five_steps_gives_only_true_transitions(num_envs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = make_task("envpool:Pendulum-v1", args=("max_episode_steps=5",))
        first = [task.reset(seed=4), task.reset(seed=4)]
        np.testing.assert_array_equal(*first)
        rows, sampling = _run(
            lambda: vector_maker(task.spec)(num_envs, 0), 25, num_envs=num_envs, spec=task.spec, action=0.5
        )
    assert task.spec.max_episode_steps == 5
    task.close()
    assert sampling.counts.episodes == 4 * num_envs, "five steps and one that only resets, four times"
    assert len(rows.rows) == (4 * 5 + 1) * num_envs
    table = np.array(rows.rows)
    obs, action, reward, terminated, next_obs = table[:, :3], table[:, 3], table[:, 4], table[:, 5], table[:, 6:]
    assert not terminated.any(), "a time limit ends no MDP"
    # Pendulum-v1's own equations: speed' = speed + (15 sin(th) + 3 u) dt, u = 2 a, dt = 0.05; th' = th + speed' dt.
    angle = np.arctan2(obs[:, 1], obs[:, 0])
    speed = np.clip(obs[:, 2] + (15.0 * np.sin(angle) + 6.0 * action) * 0.05, -8.0, 8.0)
    np.testing.assert_allclose(next_obs[:, 2], speed, atol=1e-4)
    np.testing.assert_allclose(next_obs[:, 0], np.cos(angle + speed * 0.05), atol=1e-4)
    np.testing.assert_allclose(reward, -(angle**2 + 0.1 * obs[:, 2] ** 2 + 0.001 * (2 * action) ** 2), atol=1e-3)


@needs_envpool
@needs_mujoco
def test_rows_of_envpools_robots_are_steps_of_gymnasiums_own_whatever_ended_them():
    num_envs, steps = 64, 60
    args = ("max_episode_steps=20", "num_threads=2")
    spec = make_task("envpool:InvertedPendulum-v5", args=args).spec
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1.0, 1.0, (steps, num_envs, 1)).astype(np.float32)
    found = {}
    for n_step in (1, 3):
        rows = Rows()
        sampling = VectorCollector(
            lambda: pytest.fail("a plain environment was made"), num_envs, spec, rows, n_step=n_step, gamma=0.5,
            seeds=list(range(num_envs)), make_vector=vector_maker(spec),
        )  # fmt: skip
        for action in actions:
            sampling.step(action, 0)
        sampling.close()
        found[n_step] = np.array(rows.rows, np.float32), rows.spans, sampling.counts
    table, _, counts = found[1]
    obs, action, reward, terminated, next_obs = np.split(table, [4, 5, 6, 7], axis=1)
    assert len(table) == counts.env_steps
    assert counts.episodes > terminated.sum() > num_envs, "some are terminated, some truncated"
    assert len(table) + counts.episodes >= steps * num_envs >= len(table) + counts.episodes - num_envs
    env = gymnasium.make("InvertedPendulum-v5").unwrapped
    env.reset(seed=0)
    for row in rng.choice(len(table), 300, replace=False):
        env.set_state(obs[row, :2].astype(float), obs[row, 2:].astype(float))
        expected, expected_reward, ended, _, _ = env.step(3.0 * action[row])
        np.testing.assert_allclose(next_obs[row], expected, atol=2e-4)
        assert (reward[row, 0], bool(terminated[row, 0])) == (expected_reward, ended)
    env.close()
    # The same steps with windows of three: as many rows, each from a step that there was to one that there was.
    longer, spans, _ = found[3]
    unfinished = 2 * num_envs
    assert len(table) - unfinished <= len(longer) <= len(table)
    starts = {one.tobytes(): index for index, one in enumerate(table[:, :5])}
    ends = {one.tobytes(): index for index, one in enumerate(table[:, 7:])}
    for row, span in zip(longer, spans, strict=True):
        begin, end = starts[row[:5].tobytes()], ends[row[7:].tobytes()]
        assert row[6] == terminated[end]
        assert row[5] == sum(0.5**step for step in range(int(span)) if not (row[6] and step == span - 1))
        assert begin <= end


@needs_mujoco
def test_a_mujoco_task_is_an_ordinary_one():
    task = make_task("InvertedPendulum-v5")
    assert (task.spec.obs_dim, task.spec.action.low) == (4, (-3.0,))
    rng = np.random.default_rng(0)
    for _ in range(3):
        task.reset(seed=1)
        while not any(task.step(rng.uniform(-3, 3, 1).astype(np.float32))[2:]):
            pass
    task.close()


def test_a_task_that_pygame_draws_needs_no_display_and_prints_no_error():
    code = (
        "from spreeze.envs.make import make_env\n"
        "env = make_env('CartPole-v1', render_mode='rgb_array')\n"
        "env.reset(seed=0)\n"
        "print(env.render().shape)\n"
        "env.close()\n"
    )
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout.splitlines()[-1], "error" in done.stderr) == ("(400, 600, 3)", False), done.stderr


@needs_mujoco
@pytest.mark.skipif(ctypes.util.find_library("EGL") is None, reason="no library that draws without a display")
def test_a_mujoco_task_draws_without_a_display():
    code = (
        "from spreeze.envs.task import make_task\n"
        "task = make_task('InvertedPendulum-v5', render_mode='rgb_array')\n"
        "task.reset(seed=0)\n"
        "print(task.render().shape)\n"
        "task.close()\n"
    )
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "(480, 480, 3)\n", done.stderr


@pytest.mark.warm
@needs_envpool
@pytest.mark.slow
def test_a_run_steps_envpool_and_is_evaluated_in_it(tmp_path):
    run, code, document = train(tmp_path, "--env", "envpool:Pendulum-v1", "--updates", "40")
    assert (code, document["updates"]) == (0, 40), run.stderr
    done = run_command("evaluate", run.path, "--checkpoint", "latest", "--episodes", 2, "--json")
    assert json.loads(done.stdout)["length_mean"] == 200.0, done.stderr
