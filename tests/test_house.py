"""The shape of the package: what a newcomer finds by name, and what would make it hard to find."""

import ast
import collections
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "spreeze"
FILES = sorted(ROOT.rglob("*.py"))
MOST_TOP_ENTRIES = 20
MOST_FILES_A_FOLDER = 16
LONG_FILE_LINES, LONG_FUNCTION_LINES = 700, 100
SAME_FILE_NAMES = {"runs.py", "tune.py", "train.py", "registry.py", "hts.py", "learner.py", "main.py"}
"""A verb, page or bench of the same thing, a registry for each table, what begins a program."""


def _classes():
    """name -> files that define a class of that name."""
    found = collections.defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


def _functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                yield f"{where} {node.name}", node.end_lineno - node.lineno + 1


def test_the_top_of_the_package_fits_on_a_screen():
    entries = [path.name for path in ROOT.iterdir() if not path.name.startswith("__")]
    assert len(entries) <= MOST_TOP_ENTRIES, sorted(entries)


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_a_folder_holds_siblings_that_can_be_overlooked(folder):
    if folder == ROOT:
        pytest.skip("the top has a bound of its own")
    names = sorted(path.name for path in folder.glob("*.py") if not path.name.startswith("__"))
    assert len(names) <= MOST_FILES_A_FOLDER, names


def test_no_two_files_have_the_same_name_without_cause():
    counted = collections.Counter(path.name for path in FILES if not path.name.startswith("__"))
    assert {name for name, count in counted.items() if count > 1} <= SAME_FILE_NAMES


def test_no_two_public_classes_have_the_same_name():
    assert {name: paths for name, paths in _classes().items() if len(paths) > 1} == {}


@pytest.mark.filterwarnings("default")
def test_outliers_are_named_for_whoever_reads_the_summary():
    for path in FILES:
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > LONG_FILE_LINES:
            name = path.relative_to(ROOT).as_posix()
            warnings.warn(f"{name} has {count} lines: does it hold one thing?", stacklevel=1)
    for name, count in _functions():
        if count > LONG_FUNCTION_LINES:
            warnings.warn(f"{name} has {count} lines: can it be told in steps?", stacklevel=1)
