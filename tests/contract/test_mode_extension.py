"""A new mode is one file with its declaration. Nothing of Spreeze is changed for it."""

import dataclasses
import json
import sys

import pytest
from harness import PENDULUM, train

from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithms import check_algorithm
from spreeze.config.layers import Layer, resolve
from spreeze.config.modes import DECLARED, data_flow_of, find_mode, modes
from spreeze.config.schema import SECTIONS
from spreeze.errors import ConfigError
from spreeze.metrics.table import TABLE
from spreeze.modes import assemble
from spreeze.runtime.assembly import assembled
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.knobs import knob_names
from spreeze.tuner.run import check_tunable
from spreeze.types import Box, EnvSpec

NAME, MODULE = "made-up", "made_up_mode"
SOURCE = f'''
from spreeze.config.modes import Mode, PipelineBox, DataFlow
from spreeze.metrics.table import TABLE
from spreeze.modes import serial

STAGES = (PipelineBox(title="Made-up samplers", split="sampler", items=("samplers_active", "env_steps_per_s")),
          PipelineBox(title="Made-up learner", split="learner", items=("updates_per_s",)))
MODES = (Mode(name="{NAME}", doc="the serial mode under another name", module=__name__,
              replay=DataFlow(stages=STAGES, serial=True)),)


def run_mode(plan, run_dir, view, interrupts, start=None):
    view.note("the made-up mode runs")
    return serial.run_mode(plan, run_dir, view, interrupts)
'''
SPEC = EnvSpec(env_id="T-v0", import_module=None, obs_dim=4, action=Box((-1.0,), (1.0,)),
               max_episode_steps=500, reward_threshold=None)  # fmt: skip


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield MODULE
    sys.modules.pop(MODULE, None)


def asked(*argv):
    return resolve([Layer("user", user_values(build_parser().parse_args(argv)))]).config


def test_a_mode_of_an_imported_module_passes_every_check_of_the_command_line(module):
    config = asked("--mode", NAME, "--import", module)
    assert config.mode.module == module
    check_algorithm("sac", SPEC, config.mode)
    with pytest.raises(ConfigError, match=f"which mode {NAME} does not provide; use --mode serial, --mode hts"):
        check_algorithm("ppo", SPEC, config.mode)
    with pytest.raises(ConfigError, match="has nothing to tune; use --mode spreeze"):
        check_tunable(config)


@pytest.mark.warm
def test_it_runs_and_gives_the_bits_of_the_mode_that_it_wraps_and_the_page_shows_it(module, tmp_path):
    run, code, document = train(tmp_path, *PENDULUM, "--mode", NAME, "--import", module, "--updates", "20")
    assert (code, document["mode"]) == (0, NAME)
    assert any("the made-up mode runs" in line for line in run.stderr.splitlines())
    _, _, serial = train(tmp_path, *PENDULUM, "--mode", "serial", "--updates", "20", name="serial")
    assert document["parameters_sha256"] == serial["parameters_sha256"]
    live_api = pytest.importorskip("spreeze.dashboard.live_api", exc_type=ImportError)
    assert module not in sys.modules
    stages = live_api.pipeline(data_flow_of(run.state(), on_policy=False))
    assert [(stage["title"], [item["id"] for item in stage["items"]]) for stage in stages] == [
        ("Made-up samplers", ["samplers_active", "env_steps_per_s"]),
        ("Made-up learner", ["updates_per_s"])]  # fmt: skip
    assert module not in sys.modules, "the page imports nothing of a run's choice"


def test_the_list_of_modes_is_built_anew_and_keeps_nothing_of_a_module(module):
    assert list(modes(module)) == [*(mode.name for mode in DECLARED), NAME]
    assert NAME not in modes()


def test_an_unknown_mode_is_refused_with_the_ones_that_there_are(module):
    with pytest.raises(ConfigError, match=r"run.mode = 'htss': must be one of: spreeze, serial, hts, impact.*hts"):
        asked("--mode", "htss")
    with pytest.raises(
        ConfigError, match=f"must be one of: spreeze, serial, hts, impact, gala, tianji, device, {NAME}"
    ):
        find_mode("other", module)
    with pytest.raises(ConfigError, match="--import no_such_module_here: ModuleNotFoundError"):
        find_mode("other", "no_such_module_here")


def test_settings_out_of_a_file_import_nothing(module):
    resolve([Layer("resumed run", {"run": {"mode": NAME}, "env": {"import_module": module}})])
    assert module not in sys.modules


@pytest.mark.parametrize("declared", ["1", "(1,)", "(DECLARED[0],)"])
def test_a_declaration_that_is_none_or_takes_a_known_name_is_refused(module, tmp_path, declared):
    (tmp_path / f"{MODULE}.py").write_text(f"from spreeze.config.modes import DECLARED\nMODES = {declared}\n")
    with pytest.raises(ConfigError, match=f"--import {MODULE}: "):
        modes(module)


@pytest.mark.parametrize("told", [None, 3, {}, {"lag": "x", "stages": []}, {"lag": None, "stages": 3},
                                  {"lag": float("inf"), "stages": []}, {"lag": 0, "stages": [[1]]}])  # fmt: skip
def test_a_damaged_record_of_a_data_flow_is_unknown(told):
    assert data_flow_of({"mode": "gone", "data_flow": told}, on_policy=False) is None


@pytest.mark.parametrize("mode", DECLARED, ids=lambda mode: mode.name)
def test_a_record_holds_what_the_page_shows(mode):
    for data_flow in filter(None, (mode.replay, mode.on_policy)):
        told = json.loads(json.dumps({"mode": "another's", "data_flow": dataclasses.asdict(data_flow)}))
        assert data_flow_of(told, on_policy=False) == data_flow


@pytest.mark.parametrize("mode", DECLARED, ids=lambda mode: mode.name)
def test_every_declaration_names_settings_and_figures_that_exist(mode):
    for data_flow in filter(None, (mode.replay, mode.on_policy)):
        assert {item for stage in data_flow.stages for item in stage.items} <= {metric.name for metric in TABLE.metrics}
        for part, name in (knob.split(".") for knob in knob_names(data_flow)):
            kind = SECTIONS["impact" if data_flow.asynchronous else "ppo"] if part == "algorithm" else SECTIONS[part]
            assert name in kind.__dataclass_fields__
    assert mode.doc


PATH = """
from spreeze.config.modes import ROLLOUT_STAGES, Mode, DataFlow
from spreeze.modes import rollout_modes
from spreeze.workers.roles import Address

MODES = (Mode(name="other-path", doc="a data path of its own", module=__name__,
              on_policy=DataFlow(stages=ROLLOUT_STAGES, lag=1)),)


def assemble(run):
    rollout_modes.assemble(run)
    run.add(Address("inference", 0, 7), run.specs["sampler-0"].job)
"""


def test_a_mode_with_a_data_path_of_its_own_says_who_works_and_the_tuner_finds_the_same(module, tmp_path):
    (tmp_path / f"{MODULE}.py").write_text(PATH)
    settings = resolve([Layer("user", user_values(build_parser().parse_args(
        ["--mode", "other-path", "--import", module, "--algo", "ppo"])))])  # fmt: skip
    plan = RunPlan(settings=settings, spec=SPEC, samplers=1, free_core=False)
    with assembled(assemble, plan, tmp_path / "run", 0.0) as run:
        assert list(run.specs) == ["learner", "sampler-0", "inference-7", "evaluator", "visualizer"]
        assert [spec.row for spec in run.specs.values()] == [0, 1, 2, 3, 4]
        assert run.status.handle.rows == 5
