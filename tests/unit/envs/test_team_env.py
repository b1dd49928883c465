"""Tasks of several agents: the parallel environment as one, the choice of the algorithm, and a run by command."""

import contextlib
import csv
import json
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from harness import PATIENCE_S, REPO
from two_step_game import TwoStepGame

from spreeze.config.algorithms import check_algorithm, default_algorithm
from spreeze.config.modes import modes
from spreeze.envs.action_spaces import uniform_actions
from spreeze.envs.make import make_env, refuse_foreign
from spreeze.envs.probe import probe_env
from spreeze.envs.task import make_task
from spreeze.envs.team_env import TeamEnv
from spreeze.errors import BadTransition, ConfigError, EnvError
from spreeze.types import Choices, EnvSpec, TeamSpec, rebuild

MODULE = "two_step_game"
GAME = {"env_id": f"parallel:{MODULE}", "import_module": MODULE}
MODES = modes()


class Uneven(TwoStepGame):
    """Three agents with 2, 3 and 2 actions, the second numbered from 4; the first leaves after a step."""

    possible_agents = ("a", "b", "c")
    ends = "truncated"

    def __init__(self):
        self.taken = []

    def observation_space(self, agent):
        return gymnasium.spaces.Box(-9.0, 9.0, (2 if agent == "b" else 1,), np.float32)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(3, start=4) if agent == "b" else gymnasium.spaces.Discrete(2)

    def state(self):
        raise NotImplementedError

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def _observations(self, agents):
        return {agent: np.full(2 if agent == "b" else 1, self.steps + 1.0, np.float32) for agent in agents}

    def step(self, actions):
        self.taken.append(actions)
        self.steps += 1
        given = self.agents
        self.agents = ["b", "c"] if self.steps == 1 else []
        over = {agent: agent not in self.agents for agent in given}
        none = dict.fromkeys(given, False)
        cut = over if self.ends == "truncated" and self.steps == 2 else none
        return (
            self._observations(given if self.steps > 1 else self.agents),
            dict.fromkeys(given, 1.5),
            none if cut is over else over,
            cut,
            {agent: {} for agent in given},
        )


@pytest.fixture
def uneven():
    return TeamEnv("parallel:uneven", Uneven())


def test_agents_without_infos_and_without_a_reward_are_no_crash(uneven):
    class Silent(Uneven):
        def reset(self, seed=None, options=None):
            return super().reset(seed, options)[0], {}

        def step(self, actions):
            obs, rewards, *rest = super().step(actions)
            return obs, {agent: reward for agent, reward in rewards.items() if agent != "c"}, *rest

    silent = TeamEnv("parallel:silent", Silent())
    silent.reset()
    with pytest.raises(BadTransition, match="reward of c = missing"):
        silent.step(np.zeros(3, np.int64))


def test_a_parallel_environment_is_described_by_its_agents_and_its_state():
    spec = make_task(**GAME).spec
    assert spec.team == TeamSpec(actions=(2, 2), obs_dim=1, state_dim=3)
    assert (spec.obs_dim, spec.action, spec.action_mask) == (5, Choices((2, 2), shape=(2,)), False)
    assert spec.obs_layout == ("0:1 first", "1:2 second", "2:5 state")
    as_text = json.loads(json.dumps({"team": {"actions": [2, 2], "obs_dim": 1, "state_dim": 3}}))
    assert rebuild(TeamSpec, as_text["team"]) == spec.team


def test_a_step_joins_observations_and_state_and_sums_rewards():
    task = make_task(**GAME)
    np.testing.assert_array_equal(task.reset(0), [0, 0, 1, 0, 0])
    obs, reward, terminated, truncated = task.step(np.array([1.0, 0.0], np.float32))
    np.testing.assert_array_equal(obs, [2, 2, 0, 0, 1])
    assert (reward, terminated, truncated) == (0.0, False, False)
    _, reward, terminated, truncated = task.step(np.array([1.0, 1.0], np.float32))
    assert (reward, terminated, truncated) == (8.0, True, False)


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_agents_of_unequal_sizes_are_padded_and_one_that_left_observes_zeros(uneven, ends):
    uneven._env.ends = ends
    assert uneven.team == TeamSpec(actions=(2, 3, 2), obs_dim=2, state_dim=0)
    np.testing.assert_array_equal(uneven.reset()[0], [1, 0, 1, 1, 1, 0])
    obs, reward, *over = uneven.step(np.array([1, 2, 0]))[:4]
    np.testing.assert_array_equal(obs, [0, 0, 2, 2, 2, 0])
    assert (reward, over) == (4.5, [False, False])
    _, reward, *over = uneven.step(np.array([1, 0, 1]))[:4]
    assert uneven._env.taken == [{"a": 1, "b": 6, "c": 0}, {"b": 4, "c": 1}]
    assert (reward, over) == (3.0, [ends == "terminated", ends == "truncated"])


def test_a_state_that_only_repeats_the_observations_is_left_out():
    class Repeating(TwoStepGame):
        def state(self):
            return np.array([self._now, self._now], np.float32)

    assert TeamEnv("parallel:repeating", Repeating()).team.state_dim == 0


@pytest.mark.parametrize(("changed", "message"), [
    ({"action_space": lambda self, agent: gymnasium.spaces.Box(-1, 1, (2,))}, "action space of first .* Discrete"),
    ({"reset": lambda self, seed, options=None: (TwoStepGame.reset(self)[0], {
        agent: {"action_mask": [1, 0]} for agent in self.possible_agents})}, "gives its agents an 'action_mask'"),
])  # fmt: skip
def test_what_a_team_cannot_learn_is_refused(changed, message):
    with pytest.raises(EnvError, match=message):
        TeamEnv("parallel:game", type("Changed", (TwoStepGame,), changed)())


def test_ids_import_only_what_the_command_allows():
    with pytest.raises(EnvError, match=f"would import module '{MODULE}': add --import {MODULE}"):
        make_env(GAME["env_id"])
    refuse_foreign("mpe2:simple_spread_v3", None, None)
    with pytest.raises(EnvError, match="comes from module 'games'"):
        refuse_foreign("parallel:games", "games", None)
    with pytest.raises(EnvError, match=r"module 'math' has no parallel_env\(\)"):
        make_env("parallel:math", "math")


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"mpe2:simple_spread_v3 needs mpe2: pip install .*\[multiagent\]"):
        make_env("mpe2:simple_spread_v3")


def test_mpe2_is_described_and_rivals_are_refused():
    pytest.importorskip("mpe2")
    spec = probe_env("mpe2:simple_spread_v3", steps=30).spec
    assert spec.team == TeamSpec(actions=(5, 5, 5), obs_dim=18, state_dim=0)
    assert (spec.obs_dim, spec.max_episode_steps) == (54, 25)
    with pytest.raises(EnvError, match="its agents compete"):
        make_env("mpe2:simple_tag_v3")
    with pytest.raises(EnvError, match="did you mean 'simple_spread_v3'"):
        make_env("mpe2:simple_sprad_v3")


def test_a_team_gets_qmix_alone_and_one_agent_never_does(uneven):
    spec = make_task(**GAME).spec
    assert default_algorithm(spec, MODES["spreeze"]) == (
        "qmix", "algorithm qmix: the default for 2 agents with 2 discrete actions each")  # fmt: skip
    for other in ("dqn", "ppo"):
        with pytest.raises(ConfigError, match=f"--algo {other}: .* 2 agents with 2 discrete actions each; qmix fits"):
            check_algorithm(other, spec, MODES["serial"])
    with pytest.raises(ConfigError, match=r"mode hts does not provide; use --mode spreeze, .* or --mode tianji$"):
        default_algorithm(spec, MODES["hts"])
    alone = make_task("CartPole-v1").spec
    with pytest.raises(
        ConfigError, match=r"it supports several agents .* CartPole-v1 has 2 discrete actions; dqn and sac"
    ):
        check_algorithm("qmix", alone, MODES["spreeze"])


def test_uniform_actions_are_each_agents_own():
    team = TeamSpec(actions=(2, 4), obs_dim=1, state_dim=0)
    spec = EnvSpec(
        env_id="x",
        import_module=None,
        obs_dim=2,
        action=Choices((2, 4), shape=(2,)),
        max_episode_steps=None,
        reward_threshold=None,
        team=team,
    )
    drawn = uniform_actions(spec, 200, np.random.default_rng(0))
    assert [sorted(set(drawn[:, agent].tolist())) for agent in (0, 1)] == [[0, 1], [0, 1, 2, 3]]


def spreeze(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "spreeze", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=REPO,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.warm
def test_a_run_in_processes_learns_the_two_step_game_and_is_evaluated(tmp_path):
    game = ("--env", GAME["env_id"], "--import", GAME["import_module"])
    values = (
        "qmix.epsilon_end=1.0",
        "qmix.hidden_sizes=[32]",
        "qmix.lr=0.005",
        "qmix.tau=0.05",
        "replay.learning_starts=200",
        "replay.samples_per_insert_min=0",
        "learner.publish_interval_s=0.05",
    )
    done = spreeze("train", *game, "--runs-dir", str(tmp_path), "--name", "game", "--samplers", "1", "--no-visualizer",
                   "--target-return", "8", "--seconds", "30", "--json", *(part for value in values
                                                                        for part in ("--set", value)))  # fmt: skip
    assert (done["algo"], done["mode"]) == ("qmix", "spreeze")
    found = spreeze(
        "evaluate", "game", "--runs-dir", str(tmp_path), "--import", GAME["import_module"], "--episodes", "3", "--json"
    )
    assert found["return_mean"] == pytest.approx(8.0)
    with (tmp_path / "game" / "eval.csv").open() as file:
        assert float(list(csv.DictReader(file))[-1]["return_mean"]) == pytest.approx(8.0)


def test_foraging_players_are_a_team_whose_last_step_is_a_truncation(monkeypatch):
    pytest.importorskip("lbforaging")
    with contextlib.closing(make_env("lbf:Foraging-5x5-2p-1f-v3")) as env:
        assert env.team == TeamSpec(actions=(6, 6), obs_dim=9, state_dim=0)
        obs, _ = env.reset(seed=3)
        assert obs.shape == (18,)
        ends = [env.step(np.zeros(2, int))[1:4] for _ in range(50)]
        assert ends == [*[(0.0, False, False)] * 49, (0.0, False, True)]
    with contextlib.closing(make_env("lbf:Foraging-5x5-2p-1f-v3")) as env:
        assert (env.reset(seed=3)[0] == obs).all()
    with contextlib.closing(make_env("lbf:Foraging-5x5-2p-1f-v3", args=("max_episode_steps=7",))) as env:
        env.reset(seed=3)
        assert [env.step(np.zeros(2, int))[3] for _ in range(7)] == [False] * 6 + [True]
    with pytest.raises(EnvError, match="does not render: no clips"):
        make_env("lbf:Foraging-5x5-2p-1f-v3", render_mode="rgb_array")
    monkeypatch.setenv("DISPLAY", ":0")
    with pytest.raises(EnvError, match="does not support render_mode"):
        make_env("lbf:Foraging-5x5-2p-1f-v3", render_mode="human")
    with pytest.raises(EnvError, match="did you mean 'Foraging-8x8-2p-3f-v3'"):
        make_env("lbf:Foraging-8x8-2p-3f-v2")
