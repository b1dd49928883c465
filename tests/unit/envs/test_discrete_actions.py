"""Discrete actions from the space to the row: description, stepping, exploring, choice of the algorithm."""

import dataclasses
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from spreeze.cli import planning
from spreeze.config.algorithms import check_algorithm, default_algorithm, fitting_algorithms
from spreeze.config.layers import Layer, resolve, with_algorithm
from spreeze.config.modes import modes
from spreeze.envs.action_spaces import RandomActions, uniform_actions
from spreeze.envs.make import describe
from spreeze.envs.probe import Probe
from spreeze.envs.task import Task
from spreeze.errors import ConfigError, WeightsError
from spreeze.inference.heads import head_of
from spreeze.types import Box, Choices, FrameSpec, RowLayout
from spreeze.workers.collectors.transition_collector import TransitionCollector

MODES = modes()
Q_META = {"policy": "q_values", "num_actions": 3, "epsilon_start": 1.0, "epsilon_end": 0.25, "epsilon_env_steps": 100}


class Steps(gymnasium.Env):
    """Remembers its actions; three of them, numbered from 5."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def __init__(self):
        self.actions = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.actions.append(action)
        return np.zeros(2, np.float32), float(action), False, False, {}


class Rows:
    """Takes what a ring would take."""

    layout = SimpleNamespace(sequence=None)

    def __init__(self):
        self.actions, self.rewards = [], []

    def write(self, obs, action, reward, terminated, next_obs, num_steps=None, version=0):
        self.actions.append(np.array(action))
        self.rewards.append(np.array(reward))


def probe_of(spec):
    return Probe(spec=spec, step_us_median=None, step_cv=None, memory_bytes=10**6)


def task():
    env = Steps()
    return Task(env, describe(env))


def test_a_discrete_space_is_described_by_count_and_first_number():
    spec = task().spec
    assert spec.action == Choices((3,), (5,))
    assert (spec.action.low, spec.action.high, spec.action_dim) == ((5,), (7,), 1)
    assert RowLayout(spec.obs_dim, spec.action_dim).width == 2 + 1 + 1 + 1 + 2


def test_a_step_hands_the_environment_its_own_number_of_the_space_s_type():
    one = task()
    actions = one.to_env_units(np.array([[0], [1], [2]], np.float32))
    rewards = [one.step(action)[1] for action in actions]
    assert one.env.actions == [5, 6, 7]
    assert all(type(action) is np.int64 and one.env.action_space.contains(action) for action in one.env.actions)
    assert rewards == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_hold_the_index_not_the_environment_s_number(n_step):
    rows = Rows()
    sampling = TransitionCollector(task, 2, task().spec, rows, n_step=n_step, gamma=0.5, seeds=[0, 1])
    actions = np.array([[0], [2]], np.float32)
    for _ in range(n_step):
        sampling.step(actions, 0)
    np.testing.assert_array_equal(rows.actions[0], actions)
    scale = sum(0.5**step for step in range(n_step))
    np.testing.assert_allclose(rows.rewards[0], [5 * scale, 7 * scale])
    sampling.close()


def test_uniform_actions_are_indices_each_as_likely():
    actions = uniform_actions(task().spec, 3000, np.random.default_rng(0))
    assert (actions.shape, actions.dtype) == ((3000, 1), np.float32)
    counts = np.unique(actions, return_counts=True)
    assert counts[0].tolist() == [0, 1, 2]
    assert (abs(counts[1] - 1000) < 120).all()


def test_random_actions_are_held_for_few_steps_or_many_each_as_likely_and_again_the_same():
    spec = task().spec
    drawn = [RandomActions(spec, np.random.default_rng(0)) for _ in range(2)]
    found = [np.array([one.draw(50) for _ in range(2000)])[:, :, 0] for one in drawn]
    assert np.array_equal(*found)
    changes = np.diff(found[0], axis=0) != 0
    assert 0.1 < changes.mean() < 0.3, "two thirds of new draws are another action"
    runs = np.diff(np.flatnonzero(np.r_[True, changes[:, 0], True]))
    assert runs.min() == 1
    assert runs.max() > 20
    assert (abs(np.unique(found[0], return_counts=True)[1] / found[0].size - 1 / 3) < 0.03).all()


@pytest.mark.parametrize(("numbers", "held"), [(1, True), (2, True), (3, False), (6, False)])
def test_random_numbers_are_held_where_there_are_few(numbers, held):
    spec = dataclasses.replace(task().spec, action=Box((-1.0,) * numbers, (1.0,) * numbers))
    drawn = RandomActions(spec, np.random.default_rng(0))
    found = np.array([drawn.draw(20) for _ in range(200)])
    assert (np.diff(found[:, :, 0], axis=0) == 0).any() == held


def test_epsilon_falls_in_a_straight_line_with_the_env_steps():
    def epsilon(steps):
        return head_of(Q_META | {"env_steps": steps}, {}).epsilon

    assert [epsilon(steps) for steps in (0, 50, 100, 10**9)] == [1.0, 0.625, 0.25, 0.25]
    head, rng = head_of(Q_META | {"env_steps": 20}, {}), np.random.default_rng(0)
    for _ in range(5):
        head.explore(np.zeros((6, 3), np.float32), rng)
    assert head.epsilon == 0.625  # 20 published and 30 taken since


def test_epsilon_greedy_takes_the_best_action_or_any():
    head = head_of(Q_META | {"env_steps": 100}, {})
    out = np.tile(np.array([1.0, 3.0, 2.0], np.float32), (12_000, 1))
    action = head.explore(out, np.random.default_rng(1))
    assert (action.shape, action.dtype) == ((12_000, 1), np.float32)
    # A quarter is random, a third of that the best one again.
    share = np.bincount(action[:, 0].astype(int), minlength=3) / len(action)
    np.testing.assert_allclose(share, [1 / 12, 10 / 12, 1 / 12], atol=0.01)
    assert head.greedy(out[:2]).tolist() == [[1.0], [1.0]]
    never = head_of(Q_META | {"epsilon_start": 0.0, "epsilon_end": 0.0}, {})
    np.testing.assert_array_equal(never.explore(out, np.random.default_rng(2)), never.greedy(out))


def test_a_categorical_policy_samples_its_softmax():
    head = head_of({"policy": "categorical", "num_actions": 3}, {})
    probabilities = np.array([0.2, 0.7, 0.1])
    out = np.tile(np.log(probabilities).astype(np.float32), (20_000, 1))
    assert head.greedy(out[:1]).tolist() == [[1.0]]
    action = head.explore(out, np.random.default_rng(0))[:, 0].astype(int)
    np.testing.assert_allclose(np.bincount(action) / 20_000, probabilities, atol=0.012)


def test_weights_without_their_schedule_are_refused_by_name():
    with pytest.raises(WeightsError, match="'epsilon_end'"):
        head_of({key: value for key, value in Q_META.items() if key != "epsilon_end"}, {})


def test_the_default_algorithm_follows_the_actions_and_what_does_not_fit_is_refused():
    spec = task().spec
    assert fitting_algorithms(spec) == ("dqn", "sac", "ppo", "a2c", "impact", "appo", "impala")
    choice = default_algorithm(spec, MODES["spreeze"])
    assert choice.value == "dqn"
    assert choice.reason == "algorithm dqn: the default for 3 discrete actions (sac fits too)"
    with pytest.raises(
        ConfigError, match=r"td3: it supports no discrete actions; Steps has 3 discrete actions; dqn and sac fit"
    ):
        check_algorithm("td3", spec, MODES["spreeze"])
    check_algorithm("sac", spec, MODES["spreeze"])


def test_a_mode_takes_only_the_algorithms_that_it_runs_and_has_a_default_among_them():
    spec = task().spec
    assert default_algorithm(spec, MODES["hts"]) == (
        "ppo", "algorithm ppo: the default for 3 discrete actions (a2c fits too)")  # fmt: skip
    assert default_algorithm(spec, MODES["serial"]).value == "dqn"
    with pytest.raises(
        ConfigError,
        match=r"--algo ppo: .* its own policy has just collected, which mode spreeze does "
        r"not provide; use --mode serial, .* or --mode tianji, or --algo dqn",
    ):
        check_algorithm("ppo", spec, MODES["spreeze"])
    with pytest.raises(ConfigError, match=r"--algo dqn: it learns from replay, which mode hts does not provide"):
        check_algorithm("dqn", spec, MODES["hts"])
    for mode in ("serial", "hts"):
        check_algorithm("a2c", spec, MODES[mode])


def test_a_named_algorithm_stays_and_an_unnamed_one_is_chosen_below_all_layers():
    spec = task().spec
    layers = [Layer("user", {"run": {"seed": 3}})]
    found, settings, reason = with_algorithm(layers, spec)
    assert (settings.config.run.algo, settings.sources["run.algo"]) == ("dqn", "action space")
    assert reason is not None
    assert [layer.source for layer in found] == ["default of dqn", "action space", "user"]
    assert [layer.source for layer in layers] == ["user"]
    named = [Layer("user", {"run": {"algo": "sac"}})]
    _, settings, reason = with_algorithm(named, spec)
    assert (settings.config.run.algo, reason) == ("sac", None)


@pytest.mark.parametrize(
    ("algo", "asked", "correction"), [("ppo", None, "none"), ("ppo", "delayed", "delayed"), ("a2c", None, "delayed")]
)
def test_each_on_policy_algorithm_has_its_own_correction_unless_one_is_set(algo, asked, correction):
    rollout = {"rollout": {"correction": asked}} if asked else {}
    layers = [Layer("user", {"run": {"algo": algo, "mode": "hts"}, **rollout})]
    found, settings, _ = with_algorithm(layers, task().spec)
    assert settings.config.rollout.correction == correction
    assert resolve(found).config == settings.config, "the layers that later ones are put on hold it too"


@pytest.mark.parametrize(("discrete", "asked", "steps"), [(True, None, 3), (True, 1, 1), (False, None, 1)])
def test_sac_looks_three_steps_ahead_where_actions_are_discrete_unless_a_number_is_set(discrete, asked, steps):
    own = {"sac": {"n_step": asked}} if asked else {}
    layers = [Layer("user", {"run": {"algo": "sac"}, **own})]
    spec = task().spec if discrete else dataclasses.replace(task().spec, action=Box((-1.0,), (1.0,)))
    _, settings, _ = with_algorithm(layers, spec)
    assert settings.config.algorithm.n_step == steps


def layers_with(algo, device, image=False):
    """Layers of a user who may name a device, above a profile that does; and the environment."""
    layers = [Layer("profile x", {"learner": {"device": "cuda:0", "threads": 2}} if device == "auto" else {}),
              Layer("user", {"run": {"algo": algo, "mode": "serial"},
                             **({"learner": {"device": device}} if device else {})})]  # fmt: skip
    spec = task().spec
    frames = FrameSpec(channels=1, height=84, width=84, stack=4, sign_rewards=True, options={}) if image else None
    return layers, dataclasses.replace(spec, frames=frames)


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
@pytest.mark.parametrize(("asked", "image", "device", "source"), [
    (None, False, "cpu", "default of {algo}"), ("auto", False, "cpu", "default of {algo}"),
    ("cuda:0", False, "cuda:0", "user"), ("cpu", False, "cpu", "user"), (None, True, "auto", None),
    ("auto", True, "auto", "user"),
])  # fmt: skip
def test_ppo_and_a2c_over_vectors_take_no_gpu_unasked(algo, asked, image, device, source):
    layers, spec = layers_with(algo, asked, image)
    found, settings, _ = with_algorithm(layers, spec)
    assert settings.config.learner.device == device
    assert settings.sources.get("learner.device") == (source and source.format(algo=algo))
    assert resolve(found).config == settings.config, "the layers that later ones are put on hold it too"
    assert settings.config.learner.threads == (2 if asked == "auto" else 1), "only the device is taken out"


@pytest.mark.parametrize("asked", [None, "auto"])
def test_algorithms_with_replay_leave_the_device_to_the_machine(asked):
    layers, spec = layers_with("dqn", asked)
    _, settings, _ = with_algorithm(layers, spec)
    assert settings.config.learner.device == "auto"


@pytest.mark.parametrize(("gpus", "asked", "says"), [((1,), None, True), ((), None, False), ((1,), "cuda:0", False)])
def test_a_gpu_that_is_left_alone_is_explained(gpus, asked, says):
    layers, spec = layers_with("ppo", asked)
    _, settings, _ = with_algorithm(layers, spec)
    machine = SimpleNamespace(gpus=gpus, cores=SimpleNamespace(usable=2.0))
    plan = planning.plan_of(settings, probe_of(spec), machine, None)
    reason = plan.reasons.get("learner.device", "")
    told = "cpu: networks over vectors are too small to keep a GPU busy; use --device cuda:0 to force it"
    assert (told in reason) == says


def test_what_a_mode_gives_for_a_session_is_not_what_was_asked_for():
    layers, spec = layers_with("dqn", None)
    user = Layer("user", {"run": {"mode": "tianji"}, "learner": {"batch_size": 256}})
    settings = with_algorithm([*layers, user], spec).settings
    machine = SimpleNamespace(gpus=(), cores=SimpleNamespace(usable=4.0))
    plan = planning.plan_of(settings, probe_of(spec), machine, None)
    asked, given = plan.requested_settings.config.replay, plan.config.replay
    assert given.samples_per_insert_min == given.samples_per_insert_max == asked.serial_ratio(256)
    assert asked.samples_per_insert_max > asked.samples_per_insert_min, "another batch has another ratio on resume"


@pytest.mark.parametrize(("n_step", "fixed"), [(1, False), (3, True)])
def test_the_discount_of_saved_sums_of_rewards_cannot_change(n_step, fixed):
    values = {"run": {"algo": "td3"}, "td3": {"n_step": n_step, "gamma": 0.9}, "replay": {"save": True}}
    config = resolve([Layer("user", values)]).config
    assert ("td3.gamma" in planning.fixed_settings(config)) == fixed


@pytest.mark.parametrize(("given", "scaled"), [({}, False), ({"learners": 3}, True)])
def test_gala_of_unknown_many_hosts_learns_with_the_step_size_as_it_is(given, scaled):
    layers, spec = layers_with("a2c", None)
    user = {"run": {"mode": "gala"}, "cluster": {"address": "127.0.0.1:6379"} | given}
    settings = with_algorithm([*layers, Layer("user", user)], spec).settings
    machine = SimpleNamespace(gpus=(), cores=SimpleNamespace(usable=2.0))
    plan = planning.plan_of(settings, probe_of(spec), machine, None)
    assert plan.config.gala.scale_lr == scaled
    assert ("how many learners will come is not known" in plan.reasons.get("gala.scale_lr", "")) != scaled


def test_a_share_that_is_to_stay_free_counts_where_no_governor_watches():
    layers, spec = layers_with("ppo", None)
    settings = resolve([*layers, Layer("user", {"tuning": {"leave_free": 0.5}, "run": {"mode": "hts"}})])
    machine = SimpleNamespace(gpus=(), cores=SimpleNamespace(usable=8.0))
    assert planning.plan_of(settings, probe_of(spec), machine, None).samplers == 4


def test_another_host_is_tuned_for_the_algorithm_and_mode_of_the_run():
    layers, _ = layers_with("sac", None)
    settings = resolve([*layers, Layer("user", {"env": {"id": "HalfCheetahBulletEnv-v0"}})])
    arguments = planning.tune_arguments(settings)
    assert arguments == ("--env", "HalfCheetahBulletEnv-v0", "--algo", "sac", "--mode", "serial")
