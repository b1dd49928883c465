"""No test judges how fast a machine is: none waits for less than the patience that all share."""

import ast
import tomllib

import pytest
from harness import PATIENCE_S, REPO
from sources import TEST_FILES, TESTS, parsed

DEFAULT_S = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["timeout"]
WAITS = {"poll": 1, "wait_for": 1, "until_updates": 1, "end": 0, "wait": 0, "join": 0}
"""Functions that wait -> place of their time limit."""
MIN_S = 2.0
"""Shorter literals are meant to run out: of what must not come, or of what a test holds back."""


def too_short(source):
    """Lines in which somebody waits for less than the patience, or a mark shortens the default."""
    found = []
    for call in (node for node in ast.walk(source) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        limits = [keyword.value for keyword in call.keywords if keyword.arg in ("timeout", "timeout_s")]
        limits += call.args[WAITS[name] : WAITS[name] + 1] if name in WAITS else []
        seconds = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
        if any(isinstance(s, int | float) and MIN_S <= s < PATIENCE_S for s in seconds):
            found.append(call.lineno)
        marked = name == "timeout" and call.args and isinstance(call.args[0], ast.Constant)
        if marked and call.args[0].value < DEFAULT_S:
            found.append(call.lineno)
    return found


def test_one_wait_is_shorter_than_a_test():
    assert PATIENCE_S < DEFAULT_S


def test_nobody_waits_for_less():
    found = {
        str(path.relative_to(TESTS)): too_short(parsed(path)) for path in TEST_FILES if "benchmarks" not in path.parts
    }  # scripts that measure for so long
    assert {name: lines for name, lines in found.items() if lines} == {}, "use harness.PATIENCE_S, or no limit"


@pytest.mark.parametrize("line", [
    "poll(done, 5.0, 'it')", "run.end(15.0)", "run.wait_for(done, timeout_s=40.0)", "process.wait(30)",
    "subprocess.run(command, timeout=60)", "pytest.mark.timeout(90)",
])  # fmt: skip
def test_what_is_too_short_is_found(line):
    assert too_short(ast.parse(line)) == [1]


@pytest.mark.parametrize("line", [
    "poll(done, what='it')", "run.end()", "process.wait(PATIENCE_S)", "wakeup.wait(0.0)", "subprocess.run(command)",
    "pytest.mark.timeout(1200)",
])  # fmt: skip
def test_what_is_long_enough_or_meant_to_run_out_is_not(line):
    assert too_short(ast.parse(line)) == []
