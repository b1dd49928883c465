"""The fast Bullet tasks against pybullet-envs-gymnasium: bit for bit, per task."""

import contextlib
import ctypes
import functools
import gc
import hashlib
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from harness import PATIENCE_S

from spreeze.envs import bullet
from spreeze.envs.make import BULLET_MODULE, bullet_engine, bullet_missing, describe, make_env
from spreeze.envs.task import make_task

pytestmark = pytest.mark.skipif(
    bullet_missing() is not None or bullet.unproven() is not None, reason="not the verified version of Bullet"
)
LOCOMOTION = ("Walker2D", "Hopper", "HalfCheetah", "Ant", "Humanoid")


@pytest.fixture(autouse=True, scope="module")
def everything_is_closed():
    yield
    gc.collect()


def pair(task):
    """The fast environment and the package's, as a user gets them."""
    plain = make_env(f"{task}BulletEnv-v0", plain=True)
    fast = make_env(f"{task}BulletEnv-v0")
    assert type(fast.unwrapped).__module__.startswith("spreeze.envs.bullet")
    assert type(plain.unwrapped).__module__.startswith(BULLET_MODULE)
    return fast, plain


def same(left, right):
    """Equal types, shapes and bits, the sign of zero included."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return type(left) is type(right) and repr(left) == repr(right)


def compare(task, steps, act, reseed_every=3):
    """Steps both with the same actions; returns how many episodes were (terminated, truncated)."""
    fast, plain = pair(task)
    ends = [0, 0]
    try:
        ours, theirs = fast.reset(seed=11), plain.reset(seed=11)
        for step in range(steps):
            assert same(ours[0], theirs[0]), (step, ours[0] - theirs[0])
            action = act(step, ours[0])
            ours, theirs = fast.step(action), plain.step(action)
            assert all(map(same, ours, theirs)), (step, ours, theirs)
            if ours[2] or ours[3]:
                ends[bool(ours[3])] += 1
                seed = None if sum(ends) % reseed_every else 1000 + sum(ends)
                ours, theirs = fast.reset(seed=seed), plain.reset(seed=seed)
    finally:
        fast.close()
        plain.close()
    return tuple(ends)


def random_actions(task, seed=0):
    """Uniform, sometimes beyond the bounds."""
    rng, size = np.random.default_rng(seed), make_size(task)
    return lambda step, obs: rng.uniform(-1.2, 1.2, size).astype(np.float32)


@functools.cache
def make_size(task):
    return bullet.make(task).action_space.shape[0]


def smooth_actions(task, seed=0):
    """Slow waves and slow noise, as a policy that has learned something gives."""
    rng, size = np.random.default_rng(seed), make_size(task)
    phase, rate, noise = rng.uniform(0, 6, size), rng.uniform(0.05, 0.4, size), np.zeros(size)

    def act(step, obs):
        noise[:] = 0.9 * noise + 0.1 * rng.standard_normal(size)
        return (0.6 * np.sin(rate * step + phase) + noise).astype(np.float32)

    return act


def climbed_policy(task, trials, seed=0):
    """A linear policy, the best that some random search finds."""
    env = make_env(f"{task}BulletEnv-v0")
    rng, (outputs,), (inputs,) = np.random.default_rng(seed), env.action_space.shape, env.observation_space.shape
    best, best_return = np.zeros((outputs, inputs), dtype=np.float32), -np.inf
    for trial in range(trials):
        weights = (best + rng.normal(0, 1.0 if trial % 2 else 0.2, best.shape)).astype(np.float32)
        obs, total, ended = env.reset(seed=trial % 3)[0], 0.0, False
        for _ in range(300):
            obs, reward, terminated, truncated, _ = env.step(np.tanh(weights @ obs))
            total, ended = total + reward, terminated or truncated
            if ended:
                break
        if total > best_return:
            best, best_return = weights, total
    env.close()
    return lambda step, obs: np.tanh(best @ obs)


@pytest.mark.parametrize(("actions", "task"), [
    *((smooth_actions, task) for task in bullet.TASKS),
    (random_actions, "Humanoid"),
    *(pytest.param(random_actions, task, marks=pytest.mark.slow) for task in bullet.TASKS if task != "Humanoid"),
])  # fmt: skip
def test_every_observation_reward_and_end_has_the_bits_of_the_package(task, actions):
    steps = 500 if task in LOCOMOTION else 1050
    ends = compare(task, steps, actions(task))
    assert sum(ends) > 0 or task in ("HalfCheetah", "Ant")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif("SPREEZE_LONG_TESTS" not in os.environ, reason="a minute per task; set SPREEZE_LONG_TESTS=1")
@pytest.mark.parametrize("task", bullet.TASKS)
def test_forty_thousand_steps_have_the_bits_of_the_package(task):
    compare(task, 20_000, random_actions(task, 1))
    compare(task, 10_000, smooth_actions(task, 2))
    compare(task, 10_000, climbed_policy(task, 150))


@pytest.mark.parametrize("task", ["Walker2D", pytest.param("Reacher", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "convert", [lambda a: a.astype(np.float64), lambda a: a.tolist(), lambda a: np.sign(a).astype(int)]
)
def test_actions_of_other_types_are_computed_as_the_package_computes_them(task, convert):
    act = random_actions(task)
    compare(task, 60, lambda step, obs: convert(act(step, obs)))


@pytest.mark.parametrize("task", ["Walker2D", "InvertedDoublePendulum", "Reacher"])
def test_resets_in_a_row_and_after_few_steps_are_those_of_the_package(task):
    fast, plain = pair(task)
    act = smooth_actions(task)
    for episode, (seed, steps) in enumerate([(5, 0), (None, 0), (5, 3), (5, 1), (None, 40), (7, 0), (None, 2)]):
        ours, theirs = fast.reset(seed=seed), plain.reset(seed=seed)
        assert same(ours[0], theirs[0]), episode
        for step in range(steps):
            action = act(step, None)
            assert all(map(same, fast.step(action), plain.step(action)))
    fast.close()
    plain.close()


def test_the_first_observation_after_creation_differs_from_that_seed_s_later_ones_as_in_the_package():
    fast, plain = pair("Walker2D")
    first = [env.reset(seed=5)[0] for env in (fast, plain)]
    second = [env.reset(seed=5)[0] for env in (fast, plain)]
    fast.close()
    plain.close()
    assert same(*first)
    assert same(*second)


def test_a_walker_that_falls_ends_the_episode_and_a_cheetah_never_does():
    assert compare("Walker2D", 60, random_actions("Walker2D"))[0] > 0
    assert compare("HalfCheetah", 1001, random_actions("HalfCheetah")) == (0, 1)


@pytest.mark.parametrize(("task", "limit"), [("InvertedPendulumSwingup", 1000), ("Reacher", 150)])
def test_the_time_limit_truncates(task, limit):
    env = make_env(f"{task}BulletEnv-v0")
    env.reset(seed=0)
    ends = [env.step(np.zeros(make_size(task), dtype=np.float32))[2:4] for _ in range(limit)]
    env.close()
    assert ends == [(False, False)] * (limit - 1) + [(False, True)]


@pytest.mark.parametrize("task", LOCOMOTION)
def test_two_environments_in_one_process_do_not_disturb_each_other(task):
    act = smooth_actions(task)
    actions = [act(step, None) for step in range(40)]

    def roll(env, other=None):
        seen = [env.reset(seed=3)[0].tobytes()]
        if other is not None:
            other.reset(seed=9)
        for step, action in enumerate(actions):
            seen.append(env.step(action)[0].tobytes())
            if other is not None and other.step(actions[-1 - step])[2]:
                other.reset()
        return seen

    alone, beside, other = (make_env(f"{task}BulletEnv-v0") for _ in range(3))
    assert roll(alone) == roll(beside, other)
    for env in (alone, beside, other):
        env.close()


@contextlib.contextmanager
def soiled_heap(seed, chunks=2500):
    """Within it every free chunk of the size of Bullet's links holds numbers like those of a simulation."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    rng = np.random.default_rng(seed)
    soiled, apart = zip(*[(libc.malloc(768), libc.malloc(24)) for _ in range(chunks)], strict=True)
    for chunk in soiled:
        ctypes.memmove(chunk, rng.uniform(-1e3, 1e3, 96).ctypes.data, 768)
    for chunk in soiled:
        libc.free(chunk)
    yield
    for chunk in apart:
        libc.free(chunk)


def digest(env, task, steps):
    """Of all observations from fixed seeds and actions, episodes as in ``compare``; closes the environment."""
    act, seen, ends = smooth_actions(task), hashlib.sha256(env.reset(seed=11)[0].tobytes()), 0
    for step in range(steps):
        obs, _, terminated, truncated, _ = env.step(act(step, None))
        seen.update(obs.tobytes())
        if terminated or truncated:
            ends += 1
            seen.update(env.reset(seed=None if ends % 3 else 1000 + ends)[0].tobytes())
    env.close()
    return seen.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_what_the_memory_held_before_changes_no_bit(plain):
    """Bullet reads a link's transform that it never sets; without zeros there some of these Humanoids differ."""
    digests = set()
    for seed in range(30):
        with soiled_heap(seed):
            digests.add(digest(make_env("HumanoidBulletEnv-v0", plain=plain), "Humanoid", 400))
    assert len(digests) == 1


def test_observations_are_fresh_arrays():
    env = make_env("HopperBulletEnv-v0")
    first = env.reset(seed=0)[0]
    kept = first.copy()
    second = env.step(np.ones(3, dtype=np.float32))[0]
    env.step(np.ones(3, dtype=np.float32))
    env.close()
    assert same(first, kept)
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("task", ["Walker2D", "InvertedPendulum", "Reacher"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_action_that_is_not_finite_is_refused_before_the_physics(task, bad):
    env = make_env(f"{task}BulletEnv-v0")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="every component must be finite"):
        env.step(np.full(make_size(task), bad, dtype=np.float32))
    env.close()


def test_many_resets_keep_the_memory_and_closing_ends_the_server():
    import pybullet

    env = make_env("InvertedPendulumBulletEnv-v0")
    walker = make_env("HopperBulletEnv-v0")
    for each in (env, walker):
        for _ in range(50):
            each.reset()
    before = psutil.Process().memory_info().rss
    for _ in range(400):
        env.reset()
        walker.reset()
    assert psutil.Process().memory_info().rss - before < 4 << 20
    client = walker.unwrapped.client.id
    assert pybullet.isConnected(client)
    walker.close()
    walker.close()
    env.close()
    assert not pybullet.isConnected(client)


def test_an_environment_that_is_dropped_ends_its_server():
    import pybullet

    env = bullet.make("Hopper")
    env.reset(seed=0)
    client = env.client.id
    del env
    gc.collect()
    assert not pybullet.isConnected(client)


def test_a_closed_environment_starts_again_as_a_new_one():
    env = bullet.make("Walker2D")
    first = env.reset(seed=4)[0]
    env.reset(seed=4)
    env.close()
    assert same(env.reset(seed=4)[0], first)
    env.close()


# --- which one is made ---


def test_the_usual_id_keeps_its_name_limit_and_threshold():
    env, plain = make_env("Walker2DBulletEnv-v0"), make_env("Walker2DBulletEnv-v0", plain=True)
    assert describe(env) == describe(plain)
    assert env.observation_space == plain.observation_space
    assert env.action_space == plain.action_space


def test_pictures_come_from_the_package_s_own_environment():
    task = make_task("HopperBulletEnv-v0", render_mode="rgb_array")
    task.reset(seed=0)
    assert task.render().shape == (240, 320, 3)
    assert type(task.env.unwrapped).__module__.startswith(BULLET_MODULE)
    task.close()


def test_another_version_of_bullet_falls_back_and_says_so(monkeypatch):
    monkeypatch.setattr(bullet, "unproven", lambda: "verified for pybullet 3.2.7, not 3.3.0")
    env = make_env("HopperBulletEnv-v0")
    assert type(env.unwrapped).__module__.startswith(BULLET_MODULE)
    env.close()
    value, reason = bullet_engine("HopperBulletEnv-v0")
    assert value == "plain"
    assert "not 3.3.0" in reason


def test_an_unknown_version_is_named(monkeypatch):
    versions = {"pybullet": "3.2.7", "pybullet-envs-gymnasium": "0.7.0"}
    monkeypatch.setattr(bullet.importlib.metadata, "version", versions.__getitem__)
    assert bullet.unproven.__wrapped__() == "verified for pybullet-envs-gymnasium 0.6.0, not 0.7.0"


def test_the_choice_is_told_with_its_reason():
    assert bullet_engine("AntBulletEnv-v0").value == "fast"
    assert bullet_engine("AntBulletEnv-v0", plain=True).value == "plain"
    assert "no faster equivalent" in bullet_engine("PusherBulletEnv-v0").reason
    assert bullet_engine("Pendulum-v1") is None


def test_nothing_of_bullet_is_imported_before_a_task_is_made():
    code = "import sys; from spreeze.envs import bullet; sys.exit('pybullet' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


@pytest.mark.parametrize("count", [8, 9, 10, 11, 16, 17, 22, 24, 31, 32, 127, 128])
def test_numbers_are_added_in_numpy_s_order(count):
    from spreeze.envs.bullet.locomotion import pairwise_sum

    for values in np.random.default_rng(count).normal(0, 1, (200, count)) * 1e3:
        assert pairwise_sum(values.tolist()) == values.sum()
