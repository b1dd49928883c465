"""The shape of the package: what a newcomer finds by name, and what would make it hard to find."""

import ast
import collections
import re
import warnings

import pytest
from sources import FILES, nodes, relative, tree
from sources import PACKAGE as ROOT

from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.modes import modes

MAX_TOP_ENTRIES = 22
MAX_FILES_A_FOLDER = 20
LONG_FILE_LINES, LONG_FUNCTION_LINES = 700, 100
SAME_FILE_NAMES = {"runs.py", "train.py"}
"""A verb and a page of the same thing; a verb and its module of Python."""


def _classes():
    """name -> files that define a class of that name."""
    found = collections.defaultdict(list)
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(relative(path))
    return found


def _functions():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{relative(path)}:{node.lineno}"
                yield f"{where} {node.name}", node.end_lineno - node.lineno + 1


def test_the_top_of_the_package_fits_on_a_screen():
    entries = [path.name for path in ROOT.iterdir() if not path.name.startswith("__")]
    assert len(entries) <= MAX_TOP_ENTRIES, sorted(entries)


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_a_folder_holds_siblings_that_can_be_overlooked(folder):
    if folder == ROOT:
        pytest.skip("the top has a bound of its own")
    names = sorted(path.name for path in folder.glob("*.py") if not path.name.startswith("__"))
    assert len(names) <= MAX_FILES_A_FOLDER, names


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
            name = relative(path)
            warnings.warn(f"{name} has {count} lines: does it hold one thing?", stacklevel=1)
    for name, count in _functions():
        if count > LONG_FUNCTION_LINES:
            warnings.warn(f"{name} has {count} lines: can it be told in steps?", stacklevel=1)


KNOWS_NAMES = ("modes/", "algorithms/", "config/modes.py", "config/algorithms.py")
"""Where a mode or an algorithm may be told by its name: its own folder and the tables."""
_NAMES = frozenset(("mode", "algo"))


def _named(node):
    """Whether an expression reads the name of a mode or an algorithm: ``x.mode``, ``algo``, ``run["mode"]``, ..."""
    if isinstance(node, ast.Call) and node.args:  # run.get("mode"), str(mode)
        key = node.args[0]
        return _named(key) or (isinstance(key, ast.Constant) and key.value in _NAMES)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in _NAMES
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) in _NAMES


def _tests_of_names(found, names):
    """Lines that compare with, match, or look up the name of a mode or an algorithm."""
    for node in found:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(case.pattern for case in node.cases)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            sides = [*node.args[:1], node.func.value]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            sides = [node.slice, node.value]
        else:
            continue
        constants = {leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)
                     and isinstance(leaf.value, str)}  # fmt: skip
        if constants & names and any(_named(side) for side in sides):
            yield node.lineno


def test_no_mode_and_no_algorithm_is_told_by_its_name_outside_of_its_own_folder():
    names = {*modes(), *ALGORITHMS}
    found = []
    for path in FILES:
        name = relative(path)
        if not name.startswith(KNOWS_NAMES):
            found += [f"{name}:{line}" for line in _tests_of_names(nodes(path), names)]
    assert found == [], "declare what differs in config/modes.py, or in the algorithm"


@pytest.mark.parametrize("text", [
    'config.run.mode == "hts"', '"serial" != run.mode', 'algo in ("ppo", "a2c")', 'run["algo"] == "sac"',
    'str(run.get("mode")) == "hts"', '{"hts": 1, "serial": 0}.get(str(run.get("mode")))', '{"ppo": 1}[config.run.algo]',
    'match run.mode:\n    case "hts": pass',
])  # fmt: skip
def test_every_way_to_tell_them_by_name_is_seen(text):
    assert list(_tests_of_names(ast.walk(ast.parse(text)), {*modes(), *ALGORITHMS})) == [1]


@pytest.mark.parametrize("text", ['space.mode == "NextStep"', "mode == other", 'x == "hts"', "algo in ON_POLICY"])
def test_other_comparisons_are_let_be(text):
    assert list(_tests_of_names(ast.walk(ast.parse(text)), {*modes(), *ALGORITHMS})) == []


DANGLING = re.compile(r"(?:Of|What|Whether|The same|Those|By which|Hears|Likewise|Whose|All of it)\b")
"""First words of a docstring that leave its subject to the reader."""


def _docstrings(path):
    """Line and text of each string that stands by itself: docstrings, of attributes and constants too."""
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_every_docstring_begins_with_its_subject():
    found = [f"{relative(path)}:{line} {text[:40]}" for path in FILES for line, text in _docstrings(path)
             if DANGLING.match(text)]  # fmt: skip
    assert found == [], "say first what it is: 'Rows of ...', 'True if ...'"
