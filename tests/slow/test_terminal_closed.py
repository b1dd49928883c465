"""A window is closed while a run is in its shell's foreground: the run goes on, and ends in order when it is asked to.

By hand, 50 times: ``SPREEZE_LONG_TESTS=1 pytest tests/slow/test_terminal_closed.py``.
"""

import contextlib
import json
import os
import random
import shlex
import subprocess
import sys

import psutil
import pytest
from harness import PENDULUM, TINY, poll, run_command, shared_memory
from pseudo_terminal import Window

from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import is_alive, read_run
from spreeze.transport.checkpoint import CheckpointStore

REPEATS = 50 if "SPREEZE_LONG_TESTS" in os.environ else 2
_LAST_S = 4.0
"""Latest moment of the closing (see ``_wait_before_closing``)."""
_RISES = 4
"""Times that the updates must be seen to rise: a run that ends shows its last ones once or twice."""


def _newest(path, name):
    point = MetricsReader(path / "metrics.db").latest().get(name)
    return 0.0 if point is None else point.value


def _events(path):
    return [event.text for event in MetricsReader(path / "metrics.db").events(1000)]


def _goes_on(path, updates):
    """Whether there are more updates by now."""
    told = read_run(path)
    assert is_alive(path), f"the run ended: {told}, {_events(path)}"
    assert told["state"] in ("starting", "running"), f"the run ends: {told}, {_events(path)}"
    return _newest(path, "updates") > updates


def _kill_what_is_left(path):
    """A test that failed must not leave a run behind, which is nobody's child by now."""
    if not is_alive(path):
        return
    with contextlib.suppress(psutil.Error, TypeError, ValueError):
        supervisor = psutil.Process(int(read_run(path)["pid"]))
        for process in [*supervisor.children(recursive=True), supervisor]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _wait_before_closing(path, window, dice, *, early):
    """Until a random moment: early ones are counted from the run's first sign of life, others from its first update."""
    begun = (path / "run.json").exists if early else lambda: _newest(path, "updates") > 0
    poll(begun, what=lambda: f"the beginning of the run; {window.shown[-2000:]}")
    with contextlib.suppress(subprocess.TimeoutExpired):  # the shell does not end by itself: this only lets time pass
        window.process.wait(dice.uniform(0.0, _LAST_S))


@pytest.mark.parametrize("number", range(REPEATS))
def test_f37_a_closed_terminal_ends_no_run(tmp_path, number):
    shared, path = shared_memory(), tmp_path / "runs" / "run"
    command = [sys.executable, "-m", "spreeze.train", *PENDULUM, *TINY, "--runs-dir", str(path.parent), "--name", "run"]
    try:
        with Window() as window:
            window.type(shlex.join(command))
            _wait_before_closing(path, window, random.Random(number), early=number % 2 == 1)
            supervisor = psutil.Process(read_run(path)["pid"])
            assert supervisor.ppid() == window.process.pid
        for _ in range(_RISES):
            before = _newest(path, "updates")
            poll(lambda before=before: _goes_on(path, before), what=lambda: f"more updates; {_events(path)}")
        assert any("terminal was closed" in text for text in _events(path))
        stopped = run_command("runs", "--runs-dir", path.parent, "stop", "run")
        assert stopped.returncode == 0, stopped.stderr
    finally:
        _kill_what_is_left(path)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["stopped_by"] == "stop request"
    assert summary["error"] is None
    assert read_run(path)["state"] == "finished"
    assert CheckpointStore(path / "checkpoints").load_latest().updates == summary["updates"] > before
    assert shared_memory() == shared
