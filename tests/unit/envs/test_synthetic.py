"""The synthetic environment keeps its laws, repeats with its seed, and every process gets the same arguments."""

import json
import time

import gymnasium
import numpy as np
import pytest
from harness import run_command, train_until

from spreeze.envs.make import make_env, parse_args
from spreeze.envs.small_tasks import SYNTHETIC_ID as ENV_ID
from spreeze.envs.small_tasks import SyntheticEnv, TMaze, spin
from spreeze.errors import EnvError


def _times(count, **args):
    env = SyntheticEnv(cost="sleep", **args)
    env._spend = lambda seconds: None  # the times themselves are asked for, not their passing
    env.reset(seed=3)
    action = 0 if args.get("action_kind") == "discrete" else np.zeros(2, np.float32)
    return np.array([env.step(action)[4]["step_s"] for _ in range(count)])


def _trace(seed, steps=50, **args):
    env = SyntheticEnv(**args)
    rows = [env.reset(seed=seed)[0]]
    for step in range(steps):
        obs, reward, terminated, truncated, info = env.step(np.full(2, 0.1, np.float32))
        rows.append(np.append(obs, [reward, terminated, truncated, info["step_s"], step]))
    return np.concatenate(rows)


def test_laws_have_the_mean_and_the_deviation_asked_for():
    # 20,000 draws: the mean of a law with deviation 1 is off by 0.7 % (one sigma).
    assert set(_times(100, law="constant", mean_s=0.5)) == {0.5}
    exponential = _times(20_000, law="exponential", mean_s=0.002)
    assert exponential.mean() == pytest.approx(0.002, rel=0.04)
    assert exponential.std() / exponential.mean() == pytest.approx(1.0, rel=0.05)
    gamma = _times(20_000, law="gamma", mean_s=0.002, cv=0.5)
    assert gamma.mean() == pytest.approx(0.002, rel=0.03)
    assert gamma.std() / gamma.mean() == pytest.approx(0.5, rel=0.05)
    assert (gamma > 0).all()


def test_a_maze_is_drawn_with_the_agent_and_its_goal():
    maze = TMaze(length=4, render_mode="rgb_array")
    maze.reset(seed=1)
    first = maze.render()
    assert (first.shape, first.dtype) == ((24, 40, 3), np.uint8)
    assert first[12, 4].tolist() == [0, 114, 178]
    goal = 1 + maze._side
    assert first[8 * goal + 4, 36].tolist() == [0, 158, 115]
    for _ in range(4):
        maze.step(0)
    assert maze.render()[12, 36].tolist() == [0, 114, 178]


def test_everything_repeats_with_the_seed_and_differs_with_another():
    law = {"law": "gamma", "mean_s": 1e-6, "p_terminated": 0.05}
    np.testing.assert_array_equal(_trace(5, **law), _trace(5, **law))
    assert not np.array_equal(_trace(5, **law), _trace(6, **law))


def test_the_law_of_the_step_time_changes_no_observation():
    one, other = _trace(5, law="constant"), _trace(5, law="exponential", mean_s=1e-6)
    keep = np.ones(len(one), bool)
    keep[8 + 11 :: 13] = False  # the column that holds the step time
    np.testing.assert_array_equal(one[keep], other[keep])


def test_the_best_box_action_earns_one_a_step_and_the_best_discrete_one_too():
    env = SyntheticEnv(obs_dim=5, action_dim=3, episode_steps=4)
    obs, _ = env.reset(seed=0)
    for step in range(4):
        obs, reward, terminated, truncated, _ = env.step(np.tanh(env._weights @ obs))
        assert reward == pytest.approx(1.0)
        assert (terminated, truncated) == (False, step == 3)
    env = SyntheticEnv(obs_dim=5, action_dim=3, action_kind="discrete")
    obs, _ = env.reset(seed=0)
    best = int((env._weights @ obs).argmax())
    assert env.step(best)[1] == 1.0
    assert env.step((int((env._weights @ env._obs).argmax()) + 1) % 3)[1] == 0.0


def test_termination_comes_with_its_probability():
    env = SyntheticEnv(p_terminated=0.1, episode_steps=10**6)
    env.reset(seed=0)
    ends = sum(env.step(np.zeros(2, np.float32))[2] for _ in range(5000))
    assert 400 < ends < 600


def test_spin_takes_cpu_time_and_sleep_does_not():
    cpu_s = time.thread_time()
    spin(0.02)
    assert time.thread_time() - cpu_s >= 0.02
    env = SyntheticEnv(cost="sleep", mean_s=0.2)
    env.reset(seed=0)
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    env.step(np.zeros(2, np.float32))
    assert time.perf_counter() - wall_s >= 0.2
    assert time.thread_time() - cpu_s < 0.2


@pytest.mark.parametrize(
    ("arg", "words"), [("law=normal", "constant, exponential, gamma"), ("mean_s=-1", "at least 0"),
                       ("no_such=1", "no_such"), ("obs_dim=0", "at least 1")]
)  # fmt: skip
def test_an_impossible_argument_is_named(arg, words):
    with pytest.raises(EnvError, match=words):
        make_env(ENV_ID, args=(arg,))


# --- arguments ---


def test_arguments_are_numbers_booleans_and_texts():
    assert parse_args(("a=1", "b=0.5", "c=true", "d=medium", 'e="7"', "f=a=b", "g = -3 ", "h=")) == {
        "a": 1, "b": 0.5, "c": True, "d": "medium", "e": "7", "f": "a=b", "g": -3, "h": "",
    }  # fmt: skip


def test_arguments_mean_what_they_mean_in_python_and_json():
    assert parse_args(("a=False", "b=None", "c=[1, 'x', (2, None)]", 'd={"a": [true, null]}', "e=1,2")) == {
        "a": False, "b": None, "c": [1, "x", (2, None)], "d": {"a": [True, None]}, "e": (1, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=1",
        "a b=1",
        "a=[x, y]",
        "a=[1, 2",
        "a={x = 1}",
        "a=FALSE",
        "a=off",
        "a=NONE",
        "a='b",
        "id=X-v0",
        "render_mode=human",
    ],
)
def test_other_arguments_are_refused_in_one_line(text):
    with pytest.raises(EnvError, match="--env-arg") as caught:
        parse_args((text,))
    assert "\n" not in str(caught.value)


def test_an_argument_given_twice_is_refused():
    with pytest.raises(EnvError, match="twice"):
        parse_args(("a=1", "a=2"))


def test_any_id_takes_arguments():
    env = make_env("Pendulum-v1", args=("g=9.0", "max_episode_steps=7"))
    assert env.unwrapped.g == 9.0
    assert env.spec.max_episode_steps == 7
    env.close()
    assert gymnasium.make("Pendulum-v1").unwrapped.g == 10.0


@pytest.mark.warm
def test_arguments_of_a_run_reach_every_process_and_are_written_down(tmp_path):
    def seen(run):
        return run.numbers().get("updates", 0) > 0 and "eval_return" in run.numbers()

    arguments = ("--env", ENV_ID, "--env-arg", "obs_dim=5", "--env-arg", "episode_steps=20")
    run, code, _ = train_until(tmp_path, seen, *arguments, "--set", "replay.learning_starts=100")
    assert code == 0, run.stderr
    assert 'args = ["obs_dim=5", "episode_steps=20"]  # user' in (run.path / "config.toml").read_text()
    rows = (run.path / "eval.csv").read_text().splitlines()
    assert rows[-1].endswith(",20.0")
    done = run_command("evaluate", run.path, "--episodes", 2, "--json")
    assert json.loads(done.stdout)["length_mean"] == 20.0, done.stderr
    refused = run_command("train", "--resume", run.path, "--env-arg", "obs_dim=6")
    assert refused.returncode == 2
    assert "env.args" in refused.stderr
