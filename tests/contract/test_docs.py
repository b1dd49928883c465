"""The README, the figures and the code say the same: verbs, flags, commands, paths, profiles, pictures."""

import ast
import contextlib
import dataclasses
import io
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from printed import PAGES
from sources import FILES, nodes

import spreeze
from spreeze.__main__ import COMMANDS, main_of
from spreeze.cli.arguments import build_parser
from spreeze.cli.tune import tune_parser
from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.layers import resolve
from spreeze.config.profiles import profile_names, read_profile
from spreeze.config.schema import SECTIONS, Config
from spreeze.metrics.table import METRICS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = PAGES["assets/docs/architecture.md"]
USAGE = PAGES["assets/docs/usage.md"]
DEVELOPING = PAGES["assets/docs/developing.md"]
BENCHMARKS = ROOT / "tests" / "benchmarks"
MAX_WORDS = 1500
MAIN_FLAGS = (
    "--env", "--import", "--env-arg", "--algo", "--mode", "--seed", "--auto", "--fresh", "--profile", "--batch-size",
    "--samplers", "--device", "--objective", "--leave-free", "--seconds", "--env-steps", "--updates", "--target-return",
    "--resume", "--save-replay", "--json", "--set", "--export", "--no-governor",
)  # fmt: skip
"""What the README and its page on usage explain; ``--help`` has them all."""
OF_OTHERS = {
    "--head", "--address", "--port", "--generate", "--pdb", "--no-deps", "--cpus-per-task", "--mem", "--time",
    "--signal", "--track", "--env-kwargs", "--gym-packages", "--n-trials", "--save-freq", "--eval-episodes",
    "--load-best", "--strict",
}  # fmt: skip
"""Flags of Ray, pip, pytest, Slurm, MkDocs and Stable-Baselines3's zoo."""


def _flags(parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_every_verb_is_in_the_readme_and_has_an_entry_point(verb):
    assert f"`{verb}" in README
    assert callable(main_of(verb))


def _printed_flags(text) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+\d?", text))


def test_the_readme_can_be_read_in_one_sitting():
    told = "figures go to assets/figures.md, details to assets/docs, design to the docstring of the package"
    assert len(README.split()) <= MAX_WORDS, told


@pytest.mark.parametrize("flag", MAIN_FLAGS)
def test_every_main_flag_is_explained_in_a_table(flag):
    tables = "\n".join(line for line in (README + USAGE).splitlines() if line.startswith("|"))
    assert flag in _printed_flags(tables if flag != "--no-governor" else USAGE)


def test_help_tells_every_flag():
    assert _flags(tune_parser()) - _printed_flags(tune_parser().format_help()) == set()


@pytest.fixture(scope="module")
def known_flags():
    """Flags of every verb and benchmark."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        for verb in COMMANDS:
            with contextlib.suppress(SystemExit):
                main_of(verb)(["--help"])
        patch.syspath_prepend(str(BENCHMARKS))
        for path in sorted(BENCHMARKS.glob("*.py")):
            patch.setattr(sys, "argv", [str(path), "--help"])
            with contextlib.suppress(SystemExit):
                runpy.run_path(str(path), run_name="__main__")
    return {"--help"}.union(OF_OTHERS, _printed_flags(said.getvalue()), _flags(tune_parser()))


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_every_flag_that_is_printed_exists(text, known_flags):
    assert _printed_flags(text) - known_flags == set()


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_every_path_that_is_printed_exists(text):
    printed = re.findall(r"(?<![\w/.])(?:spreeze|tests|profiles|assets)/[\w/]+\.(?:py|jsonl|toml|md)\b", text)
    assert [path for path in printed if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_imports_common_before_what_only_common_makes_importable(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = [item.module for item in body if isinstance(item, ast.ImportFrom)]
    before = names[: names.index("common")] if "common" in names else []  # others find their modules by themselves
    assert {file.stem for file in (ROOT / "tests" / "support").glob("*.py")}.intersection(before) == set()


def test_every_class_on_the_page_of_the_architecture_exists():
    printed = set(re.findall(r"(?:`|-> )([A-Z][a-z]\w+)\b", ARCHITECTURE))
    assert len(printed) > 10
    assert printed - {node.name for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef)} == set()


def test_every_method_on_the_page_of_the_architecture_exists():
    printed = set(re.findall(r"(?:`|^)(_?[A-Z]\w+\.\w+)(?:`| +)", ARCHITECTURE, re.MULTILINE)) - {"LATEST.json"}
    assert len(printed) > 20
    classes = [node for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef)]
    methods = {
        f"{kind.name}.{item.name}" for kind in classes for item in kind.body if isinstance(item, ast.FunctionDef)
    }
    for script in (ROOT / "spreeze" / "dashboard").glob("*.js"):
        for kind, body in re.findall(r"^class (\w+) {(.*?)^}", script.read_text(), re.MULTILINE | re.DOTALL):
            methods |= {f"{kind}.{name}" for name in re.findall(r"^  (?:async )?(\w+)\(", body, re.MULTILINE)}
    assert printed - methods == set()


def test_every_private_function_of_torch_is_listed_with_tests_that_watch_it():
    private = re.compile(r"\btorch\.(?:_C\.)?_(?!_)\w+|\btorch\.ops\.aten\.\w+")
    used = {name for path in FILES for name in private.findall(path.read_text(encoding="utf-8"))} - {"torch._C"}
    table = DEVELOPING.partition("## Private functions of PyTorch")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `torch")]
    assert {name for row in rows for name in private.findall(row)} == used
    assert all("`tests/unit/" in row for row in rows)


def test_the_changelog_begins_with_the_version_of_today():
    assert re.search(r"^## (\S+)", PAGES["assets/docs/changelog.md"], re.MULTILINE)[1] == spreeze.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == spreeze.__version__


def test_the_table_of_folders_has_every_folder_of_the_package_and_no_other():
    table = ARCHITECTURE[ARCHITECTURE.index("| folder of `spreeze/` |") :].partition("\n\n")[0].splitlines()[2:]
    printed = re.findall(r"`(\w+)/`", "\n".join(table))
    assert sorted(printed) == sorted(path.parent.name for path in (ROOT / "spreeze").glob("*/__init__.py"))


def test_help_states_a_default_for_every_flag():
    for action in build_parser()._actions:
        if action.dest not in ("help", "help_all"):
            assert "default" in (action.help or ""), action.option_strings


def test_the_test_extra_installs_every_other_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    others = ",".join(
        sorted(set(extras) - {"test", "wandb", "mlflow", "trackio", "hub", "docs"})
    )  # services, for which stand-ins are tested, and the site's tools, which .ci/run installs alone
    assert f"spreeze[{others}]" in extras["test"], "no test is skipped for want of what can be installed"


@pytest.mark.parametrize(("page", "text"), PAGES.items(), ids=PAGES)
def test_an_extra_that_is_printed_exists(page, text):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    printed = {name for names in re.findall(r"(?:\.|spreeze)\[([a-z,]+)\]", text) for name in names.split(",")}
    assert printed - set(project["optional-dependencies"]) == set(), page


def test_ci_lints_checks_types_and_runs_the_readme_s_test_command_as_printed():
    command = next(line for line in README.splitlines() if line.endswith("-m pytest"))
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    places = [lines.index(line) for line in (".venv/bin/ruff check spreeze tests app.py", ".venv/bin/mypy", command)]
    assert places == sorted(places)
    assert "set -euo pipefail" in lines, "each of them fails the run"


@pytest.mark.parametrize(("page", "text"), PAGES.items(), ids=PAGES)
def test_links_and_pictures_lead_somewhere(page, text):
    for link in re.findall(r"\]\(([^)]+)\)", text):
        name, _, heading = link.partition("#")
        if not name.startswith("https://"):
            target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
            assert target.is_file(), link
            assert not heading or heading in _headings(target.read_text(encoding="utf-8")), link


def _headings(text) -> set[str]:
    titles = [line.lstrip("# ") for line in text.splitlines() if line.startswith("##")]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_top_level_holds_nothing_but_what_was_agreed():
    allowed = {"app.py", "spreeze", "profiles", "README.md", "tests", "pyproject.toml", "assets", "LICENSE"}
    tracked = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert tracked - allowed - {"runs", "build", "spreeze.egg-info", "__pycache__"} == set()


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_and_states_unit_and_source_of_each_value(name):
    resolve([read_profile(name)])
    lines = (ROOT / "profiles" / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if "=" in line and not line.startswith(("#", "envs", "about", "reached."))]
    assert values
    assert all("#" in line for line in values), [line for line in values if "#" not in line]


def test_every_setting_has_a_meaning():
    for name, part in SECTIONS.items():
        for item in dataclasses.fields(part):
            assert item.metadata["doc"], f"{name}.{item.name}"
    assert set(SECTIONS) == (set(Config.__dataclass_fields__) - {"algo_settings"}) | set(ALGORITHMS)


def test_metrics_have_unique_names_units_and_meanings():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.meaning for metric in METRICS)
