"""Sizes of files and functions: what grows beyond them has to be split."""

import ast
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1] / "spreeze"


def _lines():
    return {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}


def _functions():
    """file:function -> lines, decorators and docstring included."""
    found = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{path.relative_to(ROOT).as_posix()}:{node.name}:{node.lineno}"] = (
                    (node.end_lineno or 0) - node.lineno + 1
                )
    return found


def test_no_file_is_too_long():
    assert {name: count for name, count in _lines().items() if count > 500} == {}


def test_nine_files_of_ten_are_below_350_lines():
    assert np.quantile(list(_lines().values()), 0.9) < 350


def test_no_function_is_too_long():
    assert {name: count for name, count in _functions().items() if count > 80} == {}


def test_nine_functions_of_ten_are_below_40_lines():
    assert np.quantile(list(_functions().values()), 0.9) < 40
