"""SIGTERM to every process of a run at once, as a logout, ``systemctl stop`` or a batch system sends it.

By hand, 50 times: ``SPREEZE_LONG_TESTS=1 pytest tests/slow/test_sigterm_all.py``.
"""

import contextlib
import os
import random
import signal
import subprocess

import psutil
import pytest
from harness import PENDULUM, Run, poll, shared_memory

from spreeze.transport.checkpoint import CheckpointStore

REPEATS = 50 if "SPREEZE_LONG_TESTS" in os.environ else 2
_LAST_S = 6.0
"""Latest moment of the signals after the first update; the visualizer starts at about 4 s."""
_LIVELY = ("--set", "visualizer.enabled=true", "--set", "learner.checkpoint_interval_s=1")


def _everybody(run):
    """Supervisor, workers, the watcher and whatever else they started."""
    supervisor = psutil.Process(run.process.pid)
    return [*supervisor.children(recursive=True), supervisor]


def _signal_all(processes):
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("number", range(REPEATS))
def test_f37_sigterm_to_every_process_at_once_leaves_the_last_checkpoint(tmp_path, number):
    dice, shared = random.Random(number), shared_memory()
    with Run(tmp_path, *PENDULUM, *_LIVELY) as run:
        before = run.until_updates(20)["updates"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(dice.uniform(0.0, _LAST_S))
        processes = _everybody(run)
        assert len(processes) >= 4
        # The supervisor may be the last to hear of it: until then its workers just have to go on.
        others = processes[:-1]
        dice.shuffle(others)
        _signal_all([*others, processes[-1]] if number % 2 else [processes[-1], *others])
        code, document = run.end()
        poll(lambda: run.nonce_processes() == [], what="nobody left")
    assert code == 0, run.stderr
    assert document["stopped_by"] == "interrupt (SIGTERM)"
    assert document["error"] is None
    assert document["restarts"] == 0
    assert run.state()["state"] == "finished"
    assert CheckpointStore(run.path / "checkpoints").load_latest().updates == document["updates"] >= before
    assert document["parameters_sha256"], "the learner said its last word"
    assert "Traceback" not in run.stderr
    assert not [line for line in run.events() if "ended by" in line]
    assert shared_memory() == shared
