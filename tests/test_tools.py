"""The linter and the type checker find nothing."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def _run(tool, *args):
    return subprocess.run(
        [sys.executable, "-m", tool, *args], cwd=REPO, capture_output=True, text=True, check=False, timeout=550
    )


def test_ruff_finds_nothing(tmp_path):
    done = _run("ruff", "check", "--no-cache", "spreeze", "tests")
    assert done.returncode == 0, done.stdout[-3000:]


def test_mypy_finds_nothing():
    done = _run("mypy")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
