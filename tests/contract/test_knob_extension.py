"""What a new knob of the tuner costs: one row in one file. Nothing of Spreeze is changed for it."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest
from harness import PATIENCE_S, REPO, poll, train
from machine_simulator import Bench, Machine

from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.layers import Layer, resolve
from spreeze.errors import ConfigError
from spreeze.tuner import knobs as knob_table
from spreeze.tuner.knobs import KNOBS, knobs_of
from spreeze.tuner.problem import JOINT, LEARNER, SAMPLERS, SCHEMA, Knob, Setting
from spreeze.tuner.run import cache_key
from spreeze.tuner.search import tune

pytestmark = pytest.mark.warm

MODULE, NAME = "made_up_knob", "learner.publish_interval_s"
SOURCE = f'''
from spreeze.tuner.problem import Knob

KNOBS = (Knob(name="{NAME}", label="publish", text_format="weights every {{}} s",
              candidates=lambda problem, here: (0.1, 2.0), remark=lambda problem, setting: "made up for a test"),)
'''
MODE = """
from spreeze.config.modes import REPLAY_STAGES, Mode, DataFlow

MODES = (Mode(name="made-up", doc="the mode spreeze under another name", replay=DataFlow(stages=REPLAY_STAGES)),)
"""
PINNED = (
    "--env", "Pendulum-v1", "--samplers", "1", "--envs-per-sampler", "2", "--batch-size", "32",
    "--learner-threads", "1", "--samples-per-insert", "0:1000", "--replay-capacity", "20000",
    "--set", "sac.hidden_sizes=[32,32]", "--import", MODULE,
)  # fmt: skip


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Writes the one file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield lambda source: (tmp_path / f"{MODULE}.py").write_text(source)
    sys.modules.pop(MODULE, None)


def tune_command(*more):
    return subprocess.run(
        [sys.executable, "-m", "spreeze", "tune", *PINNED, *more],
        cwd=REPO,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_knob_of_one_file_is_varied_measured_chosen_with_a_reason_shown_kept_exported_and_taken_by_a_run(
    declare, tmp_path
):
    declare(SOURCE + MODE)
    os.mkfifo(tmp_path / "spreeze-tune.lock")  # by anybody who may write there

    budgets_s = itertools.chain((12, 30, 60), itertools.repeat(120))

    def measured():
        """A tuning that other tests left quiet enough to be one, or else time enough."""
        (tmp_path / "mine.toml").unlink(missing_ok=True)
        run = tune_command(
            "--mode", "made-up", "--fresh", "--out", tmp_path / "record.json", "--export", tmp_path / "mine.toml",
            "--set", f"tuning.budget_s={next(budgets_s)}",
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        record = json.loads((tmp_path / "record.json").read_text())
        values = {rate["setting"][NAME] for rate in record["joint_rates"]}
        return None if record["fell_back"] or len(values) < 2 else (run, record)

    run, record = poll(measured, what="a tuning of which something was measured")
    _make_final(tmp_path / "cache" / "spreeze")
    assert {rate["setting"][NAME] for rate in record["joint_rates"]} == {0.1, 2.0}, "varied and measured"
    assert "learner.batch_size = 32" in run.stdout
    assert "it is not a regular file" in run.stdout + run.stderr
    assert (record["schema"], record["choice"]["sampling.samplers"]) == (SCHEMA, 1)
    assert "machine_id" in (tmp_path / "mine.toml").read_text()
    value, reason = record["choice"][NAME], record["reasons"][NAME]
    assert reason.startswith(f"weights every {value} s: ")
    assert "%" in reason, "what the other value reached"
    assert reason.endswith("made up for a test")
    assert f"{NAME} = {value}: {reason}" in run.stdout
    assert any("publish" in line and "env steps/s" in line for line in run.stdout.splitlines()), "a column of its own"

    again = tune_command("--mode", "made-up", "--json")
    assert json.loads(again.stdout)["settings"][NAME] == value, "kept"
    assert "tuned before on this machine" in again.stderr

    trained, code, document = train(tmp_path, *PINNED, "--mode", "made-up", "--auto", "--updates", "20", tiny=())
    assert (code, document["mode"]) == (0, "made-up"), trained.stderr
    assert f"publish_interval_s = {value}" in (trained.path / "config.toml").read_text()
    assert f"{NAME}: {reason}" in trained.stderr
    assert "tuned before on this machine" in trained.stderr


def _make_final(cache):
    """Lets results hold that were made beside other tests."""
    for path in cache.glob("tune-*.json"):
        record = json.loads(path.read_text()) | {"provisional": {}}
        del record["checksum"]
        path.write_text(json.dumps(record | {"checksum": cache_key(record)}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Helped(Machine):
    """A machine whose updates take half of the time with one value of a knob."""

    best: float = 2.0

    def update_s(self, setting):
        return super().update_s(setting) * (0.5 if setting.get(NAME) == self.best else 1.0)


def simulated(trial, *, best=2.0, pins=(), budget_s=60.0):
    machine = Helped(best=best)
    problem = machine.problem()
    knob = Knob(name=NAME, candidates=lambda problem, here: (0.1, 2.0), trial=trial, varied_last=True)
    problem = dataclasses.replace(
        problem, configured=Setting({**problem.configured, NAME: 0.1}), pins=frozenset(pins),
        knobs=(*problem.knobs, knob),
    )  # fmt: skip
    bench = Bench(machine, noise=0.02, budget_s=budget_s)
    return tune(problem, bench, lambda result: None), bench


@pytest.mark.parametrize("trial", [LEARNER, JOINT])
def test_a_value_that_helps_is_taken_and_the_reason_says_how_much_the_other_one_lacks(trial):
    tuning, bench = simulated(trial)
    choice = tuning.choices[NAME]
    assert (choice.value, choice.runners_up[0][0]) == (2.0, 0.1)
    assert 0.4 < choice.runners_up[0][1] < 0.95
    assert "best score" in choice.reason
    beside = {one[NAME] for one in bench.asked if SAMPLERS in one}
    assert beside == ({2.0} if trial == LEARNER else {0.1, 2.0}), "what the learner alone has told is settled"
    assert bench.left_s >= 0.0


@pytest.mark.parametrize("trial", [LEARNER, JOINT])
def test_a_value_that_does_not_help_is_not_taken_and_a_pinned_knob_is_not_varied(trial):
    tuning, _ = simulated(trial, best=9.0)
    assert tuning.choices[NAME].value == 0.1
    assert "as configured; none is clearly better" in tuning.choices[NAME].reason
    pinned, bench = simulated(trial, pins=(NAME,))
    assert (pinned.choices[NAME].value, pinned.choices[NAME].pinned) == (0.1, True)
    assert {one.get(NAME, 0.1) for one in bench.asked} == {0.1}


def test_time_that_is_up_before_a_knob_was_varied_is_told():
    tuning, _ = simulated(JOINT, budget_s=14.0)
    assert tuning.choices[NAME].value == 0.1
    assert f"out of time before {NAME} could be measured" in tuning.limits


def knobs_with(*argv):
    return knobs_of(resolve([Layer("user", user_values(build_parser().parse_args(argv)))]).config)


def test_own_knobs_come_last_and_only_where_the_mode_has_any(declare):
    declare(SOURCE)
    knobs = knobs_with("--import", MODULE)
    assert [knob.name for knob in knobs if knob.varied_last] == [NAME] == [knobs[-1].name]
    assert knobs_with("--import", MODULE, "--mode", "serial", "--algo", "ppo") == ()


@pytest.mark.parametrize(("source", "why"), [
    ("KNOBS = (1,)", "expected a spreeze.tuner.problem.Knob"),
    ("from spreeze.tuner.knobs import KNOBS", "with a new name"),
    (SOURCE.replace(NAME, "learner.no_such"), "knob 'learner.no_such' is not a setting"),
    ("raise OSError('gone')", "OSError: gone"),
])  # fmt: skip
def test_a_declaration_that_is_none_is_rejected_by_name(declare, source, why):
    declare(source)
    with pytest.raises(ConfigError, match=f"--import {MODULE}: .*{why}"):
        knobs_with("--import", MODULE)


def test_the_table_has_every_knob_once_and_no_setting_that_is_none():
    names = [knob.name for knob in KNOBS]
    assert len(set(names)) == len(names)


def test_a_knob_of_the_table_that_the_model_does_not_know_is_varied_after_the_others(monkeypatch):
    monkeypatch.setattr(knob_table, "KNOBS", (*KNOBS, Knob(name=NAME, candidates=lambda problem, here: (0.1, 2.0))))
    replayed = {knob.name for knob in knobs_with() if knob.varied_last}
    assert replayed == {NAME}
    assert not any(knob.varied_last for knob in knobs_with("--algo", "ppo"))
