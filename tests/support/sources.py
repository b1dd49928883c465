"""Sources of the package and of its tests. The package is parsed once by a process of pytest."""

import ast
import functools
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


def parsed(path):
    """Syntax tree of any file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def tree(path):
    """Syntax tree of a file of the package, shared by all who ask for it."""
    return parsed(path)


@functools.cache
def nodes(path):
    """Every node of a file of the package."""
    return tuple(ast.walk(tree(path)))
