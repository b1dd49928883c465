"""What a new algorithm costs: one file with its class, settings and row. Nothing of Spreeze is changed for it."""

import json
import sys

import numpy as np
import pytest
import torch
from harness import PENDULUM, refused, run_command, train

from spreeze.algorithms import create, create_on_policy
from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithms import ALGORITHMS, check_algorithm, rows
from spreeze.config.layers import Layer, from_toml, resolve, to_toml, with_algorithm
from spreeze.config.modes import find_mode
from spreeze.errors import ConfigError
from spreeze.metrics.store import MetricsReader
from spreeze.types import Box, EnvSpec, TransitionBatch

pytestmark = pytest.mark.warm

NAME, MODULE = "eager_sac", "made_up_algorithm"
SOURCE = f'''
from dataclasses import dataclass

from spreeze.algorithms.sac import SAC, SACConfig
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import setting


@dataclass(frozen=True, kw_only=True)
class EagerConfig(SACConfig):
    bonus: float = setting(0.0, "added to every reward that the critics learn from", low=-100.0, high=100.0)


class EagerSAC(SAC):
    name = "{NAME}"

    def __init__(self, obs_dim, action_dim, config, *args, **options):
        super().__init__(obs_dim, action_dim, config, *args, **options)
        self.bonus = config.bonus

    def critic_step(self, batch, next_action, next_log_prob):
        super().critic_step(batch._replace(reward=batch.reward + self.bonus), next_action, next_log_prob)

    def metrics(self):
        return super().metrics() | {{"alpha": self.bonus}}


ALGORITHMS = (AlgorithmRow(name="{NAME}", config=EagerConfig, continuous=EagerSAC),)
'''
SPEC = EnvSpec(env_id="T-v0", import_module=MODULE, obs_dim=4, action=Box((-1.0,), (1.0,)),
               max_episode_steps=500, reward_threshold=None)  # fmt: skip
TINY = (
    "--samplers", "1", "--envs-per-sampler", "4", "--batch-size", "32", "--set", f"{NAME}.hidden_sizes=[16,16]",
    "--set", "evaluation.episodes=2", "--no-visualizer", "--no-governor",
)  # fmt: skip


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield MODULE
    sys.modules.pop(MODULE, None)


def asked(*argv):
    return resolve([Layer("user", user_values(build_parser().parse_args(argv)))])


def test_an_algorithm_of_an_imported_module_brings_its_own_settings(module):
    settings = asked("--algo", NAME, "--import", module, "--set", f"{NAME}.bonus=2")
    assert settings.config.algorithm.bonus == 2.0
    assert settings.config.on_policy is None
    assert f"[{NAME}]" in to_toml(settings)
    assert "bonus = 2.0  # user" in to_toml(settings)
    assert settings.with_layer(Layer("late", {NAME: {"gamma": 0.5}})).config.algorithm.gamma == 0.5
    check_algorithm(NAME, SPEC, find_mode("spreeze"))
    with pytest.raises(ConfigError, match="it learns from replay, which mode hts does not provide"):
        check_algorithm(NAME, SPEC, find_mode("hts"))
    with pytest.raises(ConfigError, match=f"user: {NAME}.bonus = 1000.0: must be -100 to 100"):
        asked("--algo", NAME, "--import", module, "--set", f"{NAME}.bonus=1000")
    with pytest.raises(ConfigError, match=r"unknown setting 'eager_sac.bonnus'; did you mean 'eager_sac.bonus'"):
        asked("--algo", NAME, "--import", module, "--set", f"{NAME}.bonnus=1")


def test_the_critics_learn_by_its_own_rule(module):
    rng = np.random.default_rng(0)
    obs, next_obs = (torch.from_numpy(rng.normal(size=(8, SPEC.obs_dim)).astype(np.float32)) for _ in range(2))
    action, ones = torch.zeros(8, 1), torch.ones(8)
    batch = TransitionBatch(
        obs=obs, action=action, obs_action=torch.cat((obs, action), 1), reward=ones, terminated=0.0 * ones,
        discount=0.99 * ones, next_obs=next_obs,
    )  # fmt: skip
    weights = []
    for bonus in (0, 3):
        settings = asked("--algo", NAME, "--import", module, "--set", f"{NAME}.bonus={bonus}")
        algorithm = create(NAME, SPEC.obs_dim, 1, settings.config.algorithm, 1, import_module=module)
        algorithm.update(batch)
        weights.append(np.concatenate([array.ravel() for array in algorithm.state_arrays().values()]))
    assert not np.array_equal(*weights)


def test_it_trains_is_evaluated_and_resumed(module, tmp_path, capsys):
    command = (*PENDULUM, "--mode", "serial", "--algo", NAME, "--import", module, "--updates", "20")
    run, code, document = train(tmp_path, *command, "--set", f"{NAME}.bonus=3", name="b3", tiny=TINY)
    assert (code, document["updates"]) == (0, 20)
    assert MetricsReader(run.path / "metrics.db").latest()["alpha"].value == 3.0
    done = run_command(
        "evaluate", "b3", "--runs-dir", str(run.path.parent), "--import", module, "--episodes", "1", "--json"
    )
    assert np.isfinite(json.loads(done.stdout)["return_mean"]), done.stderr
    resume = ("--resume", "b3", "--updates", "25")
    _, code, document = train(tmp_path, *resume, "--import", module, tiny=())
    assert (code, document["updates"]) == (0, 25)
    document, _ = refused(capsys, tmp_path, *resume)
    assert "resumed run" in document["error"]


def test_one_that_learns_on_policy_brings_its_own_settings_and_correction(module, tmp_path):
    (tmp_path / f"{MODULE}.py").write_text(
        "from spreeze.algorithms.a2c import A2C, A2CConfig\nfrom spreeze.config.algorithms import AlgorithmRow\n"
        "class MyConfig(A2CConfig):\n    pass\n"
        "ALGORITHMS = (AlgorithmRow(name='my_a2c', config=MyConfig, on_policy=A2C,"
        " defaults={'rollout.correction': 'truncated-is'}),)\n"
    )
    command = ["--algo", "my_a2c", "--mode", "hts", "--import", module]
    layers = [Layer("user", user_values(build_parser().parse_args(command)))]
    _, settings, _ = with_algorithm(layers, SPEC)
    assert settings.config.on_policy.rmsprop_alpha == 0.99
    assert settings.config.rollout.correction == "truncated-is"
    made = create_on_policy("my_a2c", SPEC, settings.config.on_policy, 1, correction="truncated-is")
    assert made.policy_meta()["policy"] == "gaussian"


@pytest.mark.slow
def test_it_trains_in_processes_of_their_own(module, tmp_path):
    command = (*PENDULUM, "--mode", "spreeze", "--algo", NAME, "--import", module, "--updates", "20")
    _, code, document = train(tmp_path, *command, tiny=TINY)
    assert (code, document["updates"] >= 20) == (0, True)


def test_the_table_is_built_anew_and_keeps_nothing_of_a_module(module):
    assert set(rows(module)) == {*ALGORITHMS, NAME}
    assert NAME not in rows()


def test_settings_out_of_a_file_import_nothing(module):
    for values in ({"run": {"algo": NAME}, "env": {"import_module": module}}, {"env": {"import_module": module}}):
        try:
            resolve([Layer("resumed run", values)])
        except ConfigError as error:
            assert f"resumed run: run.algo = '{NAME}': must be one of:" in str(error)  # noqa: PT017
    with pytest.raises(ConfigError, match="must be one of:"):
        from_toml(f'[run]\nalgo = "{NAME}"\n[env]\nimport_module = "{module}"\n[{NAME}]\nbonus = 1.0\n', "resumed run")
    assert module not in sys.modules


def test_a_module_that_only_has_the_environment_is_not_imported_for_the_settings(module):
    asked("--algo", "td3", "--import", module)
    assert module not in sys.modules


@pytest.mark.parametrize("declared", [
    "1", "(1,)", "(find_row('sac'),)", "(AlgorithmRow(name='no_settings', continuous='a:B'),)",
    "(AlgorithmRow(name='learner', continuous='a:B', config=SACConfig),)",
    "(AlgorithmRow(name='no part', continuous='a:B', config=SACConfig),)",
    "(AlgorithmRow(name='other', continuous='a:B', config=int),)",
    "(AlgorithmRow(name='other', on_policy='a:B', config=SACConfig),)",
])  # fmt: skip
def test_a_declaration_that_is_none_or_takes_a_known_name_is_rejected(module, tmp_path, declared):
    (tmp_path / f"{MODULE}.py").write_text(
        "from spreeze.algorithms.sac import SACConfig\n"
        "from spreeze.config.algorithms import AlgorithmRow, find_row\n"
        f"ALGORITHMS = {declared}\n"
    )
    found = {"no part", "learner", "other"} & set(declared.split("'"))
    with pytest.raises(ConfigError, match=f"--import {MODULE}: "):
        asked("--algo", *(found or {"x"}), "--import", module)
