"""The README and the code say the same: verbs, flags, commands, profiles, pictures."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from spreeze.__main__ import VERBS
from spreeze.bench.command import _parser as bench_parser
from spreeze.cli.arguments import build_parser
from spreeze.cli.evaluate import build_parser as evaluate_parser
from spreeze.cli.tune import tune_parser
from spreeze.config.layers import profile_names, read_profile, resolve
from spreeze.config.schema import PARTS, Config
from spreeze.metrics.table import METRICS, SLOTS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _flags(parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_is_in_the_readme_and_has_an_entry_point(verb):
    assert f"`{verb}" in README
    assert callable(importlib.import_module("spreeze.bench" if verb == "bench" else f"spreeze.cli.{verb}").main)


@pytest.mark.parametrize("flag", sorted(_flags(tune_parser()) - {"--help"}))
def test_every_flag_of_train_is_in_the_readme(flag):
    assert flag in README


def test_every_flag_in_the_readme_exists():
    known = _flags(tune_parser()) | _flags(evaluate_parser()) | {"--help"}
    for action in bench_parser()._actions:
        for parser in (getattr(action, "choices", None) or {}).values():
            known |= _flags(parser)
    printed = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert printed - known == set()


def test_every_bench_is_in_the_readme():
    choices = next(action.choices for action in bench_parser()._actions if action.dest == "bench")
    assert all(f"`{name}`" in README for name in choices)


def test_help_states_a_default_for_every_flag():
    for action in build_parser()._actions:
        if action.dest != "help":
            assert "default" in (action.help or ""), action.option_strings


def test_the_test_extra_installs_every_other_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    others = ",".join(sorted(set(extras) - {"test"}))
    assert f"spreeze[{others}]" in extras["test"], "no test is skipped for want of what can be installed"


def test_ci_runs_the_readme_s_test_command_as_printed():
    command = next(line for line in README.splitlines() if line.endswith("-m pytest"))
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_pictures_of_the_readme_exist():
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / name).is_file(), name


def test_top_level_holds_nothing_but_what_was_agreed():
    allowed = {"app.py", "spreeze", "profiles", "README.md", "tests", "pyproject.toml", "assets", "LICENSE"}
    tracked = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert tracked - allowed - {"runs", "build", "spreeze.egg-info"} == set()


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_and_states_unit_and_source_of_each_value(name):
    resolve([read_profile(name)])
    lines = (ROOT / "profiles" / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if "=" in line and not line.startswith(("#", "envs", "about"))]
    assert values
    assert all("#" in line for line in values), [line for line in values if "#" not in line]


def test_every_setting_has_a_meaning():
    for name, part in PARTS.items():
        for item in part.__dataclass_fields__.values():
            assert item.metadata["doc"], f"{name}.{item.name}"
    assert set(PARTS) == set(Config.__dataclass_fields__)


def test_metrics_have_unique_names_units_and_meanings():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.meaning for metric in METRICS)
    assert all(len(slots) <= 48 for slots in SLOTS.values())
