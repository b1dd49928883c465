"""Sources of the package and of its tests. The package is parsed once by a process of pytest.

Half a million nodes are left out of collections of garbage: each would take a third of a second longer.
"""

import ast
import contextlib
import functools
import gc
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "spreeze"
FILES = sorted(PACKAGE.rglob("*.py"))
UNMARKED = ("test_a_sampler_s_usual_rate_is_the_median_of_the_windows_before_it_was_killed",)
"""Tests of ``slow/`` that run each time; all others are marked slow."""
TEST_FILES = sorted(TESTS.rglob("*.py"))


def relative(path):
    """Path of a file of the package, from the package's folder."""
    return path.relative_to(PACKAGE).as_posix()


@contextlib.contextmanager
def _nothing_collected():
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parsed(path):
    """Syntax tree of any file."""
    with _nothing_collected():
        return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _trees():
    """Path -> syntax tree and all its nodes, of every file of the package."""
    gc.collect()
    with _nothing_collected():
        trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
        found = {path: (one, tuple(ast.walk(one))) for path, one in trees.items()}
        gc.freeze()
    return found


def tree(path):
    """Syntax tree of a file of the package, shared by all who ask for it."""
    return _trees()[path][0]


def nodes(path):
    """Every node of a file of the package."""
    return _trees()[path][1]
