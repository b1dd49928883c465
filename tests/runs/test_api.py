"""``from spreeze import train, load_policy, Run``: a run and its policy from Python."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading

import gymnasium
import numpy as np
import psutil
import pytest
from harness import BATCH_SIZE, HIDDEN_SIZES, PATIENCE_S, REPO, poll, race

import spreeze
from spreeze import Run, load_policy
from spreeze.algorithms import create
from spreeze.algorithms.qmix import QMIXConfig
from spreeze.envs.make import describe
from spreeze.envs.task import make_task
from spreeze.errors import ConfigError, EnvError, RunError, UsageError
from spreeze.inference.convolution import CNNS, TrunkInputs, conv_layers
from spreeze.inference.policy import Policy
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import is_alive, read_run
from spreeze.transport.weights import encode, read_weights
from spreeze.types import Box, Choices, EnvSpec, TeamSpec

TINY = {
    "sampling.samplers": 1, "sampling.envs_per_sampler": 4, "learner.batch_size": BATCH_SIZE,
    "replay.capacity": 20_000, "sac.hidden_sizes": (2, 2) if HIDDEN_SIZES == "[2]" else (32, 32),
    "replay.learning_starts": 200, "evaluation.episodes": np.int64(2), "visualizer.enabled": False,
    "tuning.govern": False,
}  # fmt: skip
SPEC = EnvSpec(env_id="T-v0", import_module=None, obs_dim=2, obs_shape=(2,), action=Box((-2.0, 0.0), (2.0, 1.0), (2,)),
               max_episode_steps=None,
               reward_threshold=None)  # fmt: skip
EYE = {"head_w": np.eye(2, dtype=np.float32), "head_b": np.zeros(2, np.float32)}


def _weights(tmp_path, spec, arrays=EYE, **meta):
    path = tmp_path / "w.safetensors"
    meta = {"policy": "deterministic", "hidden_sizes": [], "obs_dim": spec.obs_dim, "action_dim": spec.action_dim,
            "num_actions": spec.choices and spec.choices.options, "epsilon_start": 0.0, "epsilon_end": 0.0,
            "epsilon_env_steps": 1, "env": dataclasses.asdict(spec), **meta}  # fmt: skip
    path.write_bytes(encode(arrays, meta, 1, 1))
    return path


# --- the names ---


@pytest.mark.cold  # what it imports is the question
@pytest.mark.parametrize("orders", [
    "from spreeze import train, load_policy; import spreeze.train; assert callable(spreeze.train)",
    "import spreeze.train; from spreeze import train; assert train is spreeze.train",
    "import spreeze; spreeze.train; import spreeze.train; from spreeze import train",
    "import spreeze.cli.train; from spreeze import train",
])  # fmt: skip
def test_train_can_be_called_in_whatever_order_it_is_imported(orders, tmp_path):
    call = """
import sys
assert not {"torch", "gymnasium"} & set(sys.modules)
for function in (train, spreeze.train):
    try:
        function(mode="hts")
    except TypeError as error:
        print(error)
"""
    text = f"import spreeze\n{orders.replace('; ', chr(10))}\n{call}"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=tmp_path, env=environment,
                          timeout=PATIENCE_S, check=False)  # fmt: skip
    line = "train() missing 1 required positional argument: 'env'"
    assert (done.stdout.splitlines(), done.stderr) == ([line, line], "")


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="tarin"):
        _ = spreeze.tarin


# --- a real run ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 20 updates."""
    return spreeze.train("Pendulum-v1", updates=20, settings=TINY, runs_dir=tmp_path_factory.mktemp("api"), name="one",
                         seed=3, quiet=True)  # fmt: skip


def test_the_lines_of_the_readme_do_what_they_say(tmp_path):
    code = (REPO / "README.md").read_text(encoding="utf-8").partition("## From Python")[2].split("```")[1]
    assert code.startswith("python\nfrom spreeze import ")
    told = code.removeprefix("python\n").partition("arrays: ")[2].splitlines()[0]
    begun, count = re.subn(r"target_return=-\d+", "target_return=-1900", code.removeprefix("python"))
    assert count == 1, "what any policy reaches: test_train.py learns the task"
    script = f"{begun}\nvalues = {told}\nprint(run.summary['stopped_by'], len(values) > 0, values.ndim, action.shape)"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment,
                          timeout=PATIENCE_S, check=False)  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["target_return True 1 (1,)"], done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_run_gives_its_record_as_arrays(trained):
    assert (trained.state, trained.name, trained.summary["stopped_by"]) == ("finished", "one", "updates")
    assert (trained.config["run"]["seed"], trained.config["evaluation"]["episodes"]) == (3, 2)
    stored = MetricsReader(trained.path / "metrics.db").tail(["env_steps"], 0.0)["env_steps"]
    history = trained.metric("env_steps")
    assert history.unit
    assert history.value.tolist() == [point.value for point in stored]
    assert history.t.tolist() == [point.t for point in stored]
    assert "env_steps" in trained.metrics
    evaluations = trained.evaluations
    assert evaluations.return_mean.max() == trained.summary["eval_return_best"]
    assert len(evaluations) == len(evaluations.updates) == len(evaluations.t) >= 1
    assert evaluations.episodes.tolist() == [2] * len(evaluations)


def test_a_metric_without_values_is_empty_and_an_unknown_one_an_error(trained):
    assert len(trained.metric("gpu_use")) == 0
    with pytest.raises(ConfigError, match="did you mean 'env_steps'"):
        trained.metric("env_step")


def test_a_run_is_found_by_latest_name_and_path(trained):
    folder = trained.path.parent
    assert Run("latest", folder).path == Run("one", folder).path == Run(trained.path).path == trained.path
    with pytest.raises(RunError, match="no run 'two'"):
        Run("two", folder)


def test_the_policy_acts_as_the_evaluator_does(trained):
    policy = load_policy(trained)
    weights = read_weights(trained.path / "checkpoints" / "best.safetensors")
    plain, task = Policy.from_weights(weights.arrays, weights.meta), make_task("Pendulum-v1")
    env, obs = policy.make_env(), task.reset(seed=5)
    seen, _ = env.reset(seed=5)
    for _ in range(20):
        expected = task.to_env_units(plain.act(obs[None], ())[0])[0]
        action = policy.predict(seen)
        assert action.tolist() == expected.tolist()
        assert env.action_space.contains(action)
        obs, reward, _, _ = task.step(expected)
        seen, given, _, _, _ = env.step(action)
        assert given == reward
    env.close()
    task.close()


def test_a_run_goes_on_where_it_stopped(trained):
    assert trained.resume(updates=40, quiet=True).path == trained.path
    assert trained.summary["updates"] >= 40
    assert read_run(trained.path)["sessions"] == 2


def test_a_rejected_start_raises_its_own_class_with_one_line(tmp_path, capsys):
    with pytest.raises(EnvError, match=r"^unknown environment 'Pendulun-v1'; did you mean 'Pendulum-v1'\?"):
        spreeze.train("Pendulun-v1", runs_dir=tmp_path)
    with pytest.raises(UsageError, match="argument --seed"):
        spreeze.train("Pendulum-v1", seed="x", runs_dir=tmp_path)
    for wrong, words in [({"env": 3}, "env = 3"), ({"settings": ["a"]}, r"settings = \['a'\]"),
                         ({"env_args": "g=5"}, "env_args = 'g=5'"),
                         ({"env_args": {"g": {1, 2}}}, "'{1, 2}'"),
                         ({"settings": {"run.name": print}}, "'<built-in function print>'")]:  # fmt: skip
        with pytest.raises(UsageError, match=f"^{words}: expected "):
            spreeze.train(**{"env": "Pendulum-v1", "runs_dir": tmp_path, **wrong})
    with pytest.raises(UsageError, match=r"^run = 3: expected "):
        load_policy(3)
    assert "error:" not in capsys.readouterr().out, "it is raised, not printed too"
    assert list(tmp_path.iterdir()) == []


_SCRIPT = f"""
import signal, sys, spreeze
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in a shell's background inherits that it is ignored
run = spreeze.train("Pendulum-v1", settings={ {**TINY, "evaluation.episodes": 2}!r}, runs_dir=sys.argv[1], name="one")
print("returned", run.state, run.summary["stopped_by"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupt_or_the_end_of_the_caller_ends_the_run_in_order(number, tmp_path):
    run = tmp_path / "one"
    with subprocess.Popen([sys.executable, "-c", _SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=REPO,
                          stdin=subprocess.DEVNULL, start_new_session=True) as process:  # fmt: skip
        poll(lambda: [point for name, point in MetricsReader(run / "metrics.db").latest().items()
                      if name == "updates" and point.value], what="an update")  # fmt: skip
        supervisor = psutil.Process(read_run(run)["pid"])
        os.kill(process.pid, number)
        out, _ = process.communicate(timeout=PATIENCE_S)
    psutil.wait_procs([supervisor], timeout=PATIENCE_S)
    assert not is_alive(run)
    assert (read_run(run)["state"], read_run(run)["exit_reason"]) == ("finished", "interrupt (Ctrl-C)")
    assert list((run / "checkpoints").iterdir())
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert ("returned finished interrupt" in out) == (number == signal.SIGINT)


def test_a_thread_can_train_too(tmp_path):
    found = []

    def body():
        with pytest.raises(ConfigError, match="dqn") as caught:
            spreeze.train("Pendulum-v1", algo="dqn", runs_dir=tmp_path, quiet=True)
        found.append(caught)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(PATIENCE_S)
    assert found


# --- what a policy takes and gives ---


def test_actions_are_squashed_and_scaled_to_the_bounds(tmp_path):
    policy = load_policy(_weights(tmp_path, SPEC))
    # tanh(0.5) = 0.46212: -2..2 gives 0.92423; 0..1 gives 0.73106, the logistic of 1.
    np.testing.assert_allclose(policy.predict([0.5, 0.5]), [0.924234, 0.731059], atol=1e-6)
    np.testing.assert_allclose(policy.predict(np.array([[0.0, 0.0], [99.0, -99.0]])), [[0.0, 0.5], [2.0, 0.0]])
    assert policy.predict(np.zeros(2)).dtype == np.float32


def test_the_normalizer_is_inside(tmp_path):
    arrays = {**EYE, "obs_mean": np.array([10.0, 0.0], np.float32), "obs_std": np.array([4.0, 1.0], np.float32)}
    policy = load_policy(_weights(tmp_path, SPEC, arrays))
    np.testing.assert_allclose(policy.predict([12.0, 0.0])[0], 0.924234, atol=1e-6)


def test_shapes_of_observation_and_action_are_the_environment_s(tmp_path):
    spec = dataclasses.replace(SPEC, obs_shape=(2, 1), action=dataclasses.replace(SPEC.action, shape=(1, 2)))
    policy = load_policy(_weights(tmp_path, spec))
    assert policy.predict(np.zeros((2, 1))).shape == (1, 2)
    assert policy.predict(np.zeros((5, 2, 1))).shape == (5, 1, 2)
    with pytest.raises(UsageError, match=r"shape \(5, 2\): expected \(2, 1\), or \(N, 2, 1\)"):
        policy.predict(np.zeros((5, 2)))


def test_act_gives_the_state_for_the_next_step_too(tmp_path):
    policy = load_policy(_weights(tmp_path, SPEC))
    action, state = policy.act([0.5, -0.5])
    assert state == ()
    again, _ = policy.act([0.5, -0.5], state)
    assert action.tolist() == again.tolist() == policy.predict([0.5, -0.5]).tolist()


def test_discrete_actions_are_the_environment_s_numbers(tmp_path):
    spec = dataclasses.replace(SPEC, action=Choices((2,), (7,)))
    policy = load_policy(_weights(tmp_path, spec, policy="q_values"))
    assert policy.predict([3.0, 1.0]) == 7
    assert policy.predict([[3.0, 1.0], [1.0, 3.0]]).tolist() == [7, 8]
    assert gymnasium.spaces.Discrete(2, start=7).contains(policy.predict([1.0, 3.0]))


def test_no_action_is_taken_that_a_mask_forbids(tmp_path):
    spec = dataclasses.replace(
        SPEC,
        action=Choices((2,)),
        action_mask=True,
        obs_dim=4,
        obs_layout=("0:2 observation (Box)", "2:4 info['action_mask']"),
    )
    arrays = {"head_w": np.eye(4, 2, dtype=np.float32), "head_b": np.zeros(2, np.float32)}
    policy = load_policy(_weights(tmp_path, spec, arrays, policy="q_values", action_mask=True))
    assert policy.predict([3.0, 1.0], action_mask=[1, 1]) == 0
    assert policy.predict([3.0, 1.0], action_mask=np.array([False, True])) == 1
    assert policy.predict([[3.0, 1.0], [1.0, 3.0]], action_mask=[[0, 1], [1, 0]]).tolist() == [1, 0]
    for mask, told in (
        (None, "pass action_mask=info"),
        ([1], "shape"),
        ([], "shape"),
        ([[1, 0], [1]], "array of"),
        ("x", "array of"),
        ([0, 0], "at least one"),
        ([2, 1], "at least one"),
    ):
        with pytest.raises(UsageError, match=told):
            policy.predict([3.0, 1.0], action_mask=mask)
    with pytest.raises(UsageError, match="gives none"):
        load_policy(_weights(tmp_path, SPEC)).predict([0.0, 0.0], action_mask=[1, 1])


def test_a_team_gets_an_action_for_each_agent(tmp_path):
    team = TeamSpec(actions=(2, 3), obs_dim=2, state_dim=0)
    spec = dataclasses.replace(
        SPEC,
        obs_dim=4,
        obs_shape=(4,),
        action=Choices((2, 3), shape=(2,)),
        team=team,
        obs_layout=("0:2 one", "2:4 other"),
    )
    qmix = create("qmix", 4, 2, QMIXConfig(hidden_sizes=(4,)), 0, num_actions=3, team=team)
    meta = {"algo": "qmix", **qmix.policy_meta()}
    policy = load_policy(_weights(tmp_path, spec, qmix.policy_arrays(), **meta))
    rows = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    expected = Policy.from_weights(qmix.policy_arrays(), meta).act(rows, ())[0].astype(np.int64)
    assert policy.predict(rows).tolist() == expected.tolist()
    assert policy.predict(rows[0]).tolist() == expected[0].tolist()
    assert np.shape(expected) == (5, 2)


def test_exploring_actions_differ_and_repeat_with_a_seed(tmp_path):
    path = _weights(tmp_path, SPEC, exploration_noise=0.5)
    drawn = [load_policy(path, seed=1).predict([0.0, 0.0], deterministic=False) for _ in range(2)]
    assert drawn[0].tolist() == drawn[1].tolist() != load_policy(path).predict([0.0, 0.0]).tolist()


def test_exploring_actions_are_those_of_the_weights_that_samplers_have(tmp_path):
    newest = {f"explore.{name}": -array for name, array in EYE.items()}  # the others are an average
    policy = load_policy(_weights(tmp_path, SPEC, {**EYE, **newest}, exploration_noise=0.0))
    assert policy.predict([1.0, 1.0]).tolist() == pytest.approx([2.0 * np.tanh(1.0), 0.5 + 0.5 * np.tanh(1.0)])
    explored = policy.predict([1.0, 1.0], deterministic=False)
    assert explored.tolist() == pytest.approx([-2.0 * np.tanh(1.0), 0.5 - 0.5 * np.tanh(1.0)])


@pytest.mark.parametrize("deterministic", [True, False])
def test_threads_that_share_a_policy_get_the_answers_that_each_would_get_alone(tmp_path, deterministic):
    policy = load_policy(_weights(tmp_path, SPEC, exploration_noise=0.0))
    batches = [np.random.default_rng(seed).normal(size=(1 + seed % 3, 2)) for seed in range(30)]
    alone = [policy.predict(obs) for obs in batches]
    wrong, together = [], threading.Barrier(4)

    def work():
        together.wait()
        for _ in range(30):
            found = [policy.predict(obs, deterministic) for obs in batches]
            wrong.extend(one for one, own in zip(found, alone, strict=True) if not np.allclose(one, own))

    race(work)
    assert wrong == []


def test_a_file_with_a_network_of_ones_own_imports_only_what_is_allowed(tmp_path):
    spec = dataclasses.replace(SPEC, import_module="nested_env")
    with pytest.raises(EnvError, match="give import_module='nested_env'"):
        load_policy(_weights(tmp_path, spec, network="residual"))


@pytest.mark.parametrize("obs", [[np.nan, 0.0], [0.0, 1e300], [0.0], "x", {"a": 1}])
def test_an_observation_that_does_not_fit_is_refused(tmp_path, obs):
    with pytest.raises(UsageError, match="observation"):
        load_policy(_weights(tmp_path, SPEC)).predict(obs)


def test_the_shapes_of_observations_that_fit_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"shape \(1,\): expected \(2,\), or \(N, 2\) for several"):
        load_policy(_weights(tmp_path, SPEC)).predict([0.0])


def test_nested_observations_one_stacked_or_listed(tmp_path):
    env = gymnasium.make("nested_env:NestedGoal-v0")
    spec = dataclasses.replace(describe(env), env_id="NestedGoal-v0", import_module="nested_env")
    rows = np.arange(5, dtype=np.float32)[:, None] / 10  # phase one-hot (0, 1, 2), state.distance, state.speed
    path = _weights(tmp_path, spec, {"head_w": rows, "head_b": np.zeros(1, np.float32)})
    one = {"phase": 2, "state": {"distance": np.array([1.0], np.float32), "speed": np.array([-1.0], np.float32)}}
    with pytest.raises(EnvError, match="give import_module='nested_env'"):
        load_policy(path)
    policy = load_policy(path, import_module="nested_env")
    np.testing.assert_allclose(policy.predict(one), np.tanh([0.2 + 0.3 - 0.4]), atol=1e-6)
    stacked = {"phase": np.array([2, 0]), "state": {"distance": np.ones((2, 1)), "speed": -np.ones((2, 1))}}
    expected = np.tanh([[0.1], [-0.1]])
    np.testing.assert_allclose(policy.predict(stacked), expected, atol=1e-6)
    np.testing.assert_allclose(policy.predict([one, {**one, "phase": 0}]), expected, atol=1e-6)
    for wrong in ({"phase": 2}, {**one, "phase": 3}, []):
        with pytest.raises(UsageError, match="observation"):
            policy.predict(wrong)


def test_images_are_stacked_by_the_environment_that_the_policy_makes(tmp_path):
    task = make_task("test/Counter-v0", "image_env", image={"size": 36})
    spec, cnn = task.spec, next(iter(CNNS))
    conv = conv_layers(cnn, spec.frames.stack * spec.frames.channels, 36, 36)
    arrays, inputs = {}, TrunkInputs.of(spec.frames).features(cnn)
    for index, part in enumerate(conv):
        layer = part.layer
        arrays[f"conv{index}_w"] = np.full((layer.channels, part.inputs, layer.kernel, layer.kernel), 0.01, np.float32)
        arrays[f"conv{index}_b"] = np.zeros(layer.channels, np.float32)
    arrays |= {"head_w": np.zeros((inputs, 3), np.float32), "head_b": np.zeros(3, np.float32)}
    arrays["head_w"][:, 2] = 1.0  # the brighter, the more for the last action
    image = [spec.frames.stack * spec.frames.channels, 36, 36]
    policy = load_policy(_weights(tmp_path, spec, arrays, policy="q_values", cnn=cnn, image=image),
                         import_module="image_env")  # fmt: skip
    env = policy.make_env()
    obs, _ = env.reset(seed=0)
    assert obs.shape == (spec.frames.stack, *spec.frames.shape)
    assert policy.predict(obs) == 0
    obs, *_ = env.step(policy.predict(obs))
    assert obs[-1].mean() == 10
    assert obs[:-1].max() == 0
    assert policy.predict(np.stack([0 * obs, obs])).tolist() == [0, 2]
    with pytest.raises(UsageError, match="make_env"):
        policy.predict(obs[-1])
    env.close()
    task.close()
