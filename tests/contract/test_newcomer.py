"""What the table in ``spreeze/__init__.py`` promises: each addition touches the files that it names, and no other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PATIENCE_S, REPO

import spreeze

ADDITIONS = {
    "an algorithm": {
        "config/algorithms.py": ("OFF_POLICY = {", '"made_up": "made_up", '),
        "algorithms/made_up.py": """
from dataclasses import dataclass

from spreeze.algorithms.sac import SAC, SACConfig
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import setting


@dataclass(frozen=True, kw_only=True)
class MadeUpConfig(SACConfig):
    bonus: float = setting(0.0, "added to every reward", low=-9.0, high=9.0, fixed=True)


class MadeUp(SAC):
    name = "made_up"


ALGORITHMS = (AlgorithmRow(name="made_up", config=MadeUpConfig, continuous=MadeUp),)
""",
    },
    "a mode": {
        "config/modes.py": (
            "DECLARED = (",
            """
    Mode(name="made-up", module="spreeze.modes.made_up", doc="made up",
         replay=DataFlow(stages=REPLAY_STAGES)),
    """,
        ),
        "modes/made_up.py": "def assemble(run):\n    run.append('made up')\n",
    },
    "a knob of the tuner": {
        "tuner/knobs.py": (
            "\nKNOBS = (",
            """
    Knob(name="learner.publish_interval_s", label="publish", text_format="weights every {} s",
         candidates=lambda problem, here: (0.1, 2.0)),""",
        )
    },
    "a metric or chart": {
        "metrics/table.py": (
            "METRICS: tuple[Metric, ...] = (",
            """
    Metric("made_up_norm", "norm", "norm of what is made up", ALGORITHM, in_terminal=True,
           chart=Chart("made_up", "Made up", "Learning")),""",
        )
    },
    "a setting or a flag": {
        "config/schema.py": (
            "class VisualizerConfig(Section):",
            """
    made_up: int = setting(3, "made up for a test", low=0, flag="--made-up", machine=True, shared=True)
""",
        )
    },
    "a kind of worker": {
        "workers/roles.py": (
            "_ALL = (",
            """
    Role(name="madeup", several=True, on_loss=FailurePolicy.NEVER, limit=_OBSERVER),""",
        ),
        "workers/madeup.py": """
from spreeze.workers.jobs import Job


class MadeUpJob(Job):
    entry_point = "spreeze.workers.madeup:run_made_up"


def run_made_up(context, job):
    pass
""",
    },
    "a family of tasks": {
        "envs/families.py": (
            "FAMILIES = {",
            """
    "madeup": Family("madeup", lambda name, num_envs, seed, args: {}[f"asked for {num_envs} of {name} with {args}"]),
} | {""",
        )
    },
}
"""Row of the table -> file -> (text, what to put behind it), or the text of a new file."""
CHECKS = """
import spreeze
from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithms import find_row, rows
from spreeze.config.layers import USER, Layer, from_toml, resolve, to_toml
from spreeze.config.modes import DECLARED, find_mode
from spreeze.config.schema import SECTIONS, active_settings, marked

asked = ["--algo", "made_up", "--set", "made_up.bonus=2.5", "--mode", "made-up", "--made-up", "7"]
settings = resolve([Layer(USER, user_values(build_parser().parse_args(asked)))])
config = settings.config

# an algorithm
assert config.algo_settings.bonus == 2.5
assert "made_up" in rows()
assert find_row("made_up").continuous.name == "made_up"
assert from_toml(to_toml(settings), "file").config == config
assert "made_up.bonus" in active_settings(config)
from spreeze.cli.planning import fixed_settings
assert "made_up.bonus" in fixed_settings(config)

# a mode
from types import SimpleNamespace
from spreeze.modes import assemble
assert find_mode("made-up") in DECLARED
class Run(list):
    plan = SimpleNamespace(config=config)
run = Run()
assemble(run)
assert run == ["made up"]

# a knob
from spreeze.tuner.knobs import knobs_of, tunable_settings
assert "learner.publish_interval_s" in [knob.name for knob in knobs_of(config)]
assert "learner.publish_interval_s" in tunable_settings(config)

# a metric
from spreeze.metrics.snapshot import snapshot_of
from spreeze.metrics.table import SLOTS, by_name
shown = snapshot_of({}, {}, {"made_up_norm": 1.5}, None, state="running")
assert dict(shown.more) == {"made_up_norm": 1.5}
assert by_name("made_up_norm").is_sent and "made_up_norm" not in SLOTS["learner"]
from spreeze.dashboard.live_api import chart_specs
assert "made_up" in [chart["key"] for chart in chart_specs("updates")]

# a flag
assert config.visualizer.made_up == 7
assert "visualizer.made_up" in marked("machine") and "visualizer.made_up" in marked("shared")
from spreeze.dashboard import control
request = control.Request(env_id="madeup:Thing-v0", algo="made_up", mode="made-up", auto=False,
                          settings={"visualizer.made_up": 7, "made_up.bonus": 2.5})
assert {"--made-up=7", "--set=made_up.bonus=2.5"} <= {*control.arguments(request)}

# a kind of worker
from spreeze.transport.status_table import StatusTable
from spreeze.workers.context import WorkerContext
from spreeze.workers.madeup import MadeUpJob
from spreeze.workers.main import load_named
from spreeze.workers.roles import Address, role_of
address = Address("madeup", index=3)
assert address.name == "madeup-3" and role_of(address.name).name == "madeup"
WorkerContext(address, StatusTable.create(1), 0, None).close()
assert load_named(MadeUpJob.entry_point)(None, None) is None

# a family of tasks: the page's request above has taken its id
from spreeze.envs.make import make_env
try:
    make_env("madeup:Thing-v0", None).reset(seed=1)
except Exception as error:
    assert "asked for 1 of Thing-v0" in str(error), error
else:
    raise AssertionError("it was not asked")
import sys
assert "torch" not in sys.modules
print("all of it is known")
"""


def told():
    """What is added -> the files of its row, as the package says."""
    rows = re.findall(r"^(an? [\w ]+?)  +(\S+\.py)(?:, (\S+\.py))?  ", spreeze.__doc__, re.MULTILINE)
    return {what: {*files} - {""} for what, *files in rows}


@pytest.fixture
def copied(tmp_path):
    """A copy of the package."""
    shutil.copytree(REPO / "spreeze", tmp_path / "spreeze", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "spreeze"


def add(package: Path, name: str, change: str | tuple[str, str]) -> None:
    if isinstance(change, str):
        (package / name).write_text(change)
        return
    text, (anchor, more) = (package / name).read_text(), change
    assert text.count(anchor) == 1, f"{anchor!r} in {name}"
    (package / name).write_text(text.replace(anchor, anchor + more))


@pytest.mark.parametrize("what", ADDITIONS)
def test_the_table_names_the_files_that_an_addition_touches(what):
    named = {file.replace("NAME", "made_up") for file in told()[what]}
    assert {file.replace("madeup", "made_up") for file in ADDITIONS[what]} == named
    assert all((REPO / "spreeze" / file).is_file() for file in named if "made_up" not in file)


def test_one_of_each_is_known_everywhere_by_the_files_that_the_table_names(copied, tmp_path):
    pytest.importorskip("streamlit")
    for files in ADDITIONS.values():
        for name, change in files.items():
            add(copied, name, change)
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == ["all of it is known"]
