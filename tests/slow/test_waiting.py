"""What waiting costs in the HTS-RL mode: processor time of workers with nothing to do, and the time of a wake-up.

One sampler hangs in its first env step, so everybody else of a real run has to wait for it. The wake-up is half of a
round trip between this process and a child (this file as a program) that rings back.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_SECONDS=10 SPREEZE_STRESS_REPEATS=5 pytest
tests/slow/test_waiting.py``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from figures import Row, row
from long_form import PATIENCE_S, asked, by_hand
from watched_run import LiveRun

from spreeze.errors import SpreezeError
from spreeze.metrics.store import MetricsReader
from spreeze.transport.shared_memory import Wakeup

pytestmark = pytest.mark.timeout(600)
_TASK = (
    "--env", "spreeze/Fault-v0", "--import", "fault_envs", "--mode", "hts", "--algo", "a2c",
    "--samplers", "2", "--inference-workers", "1", "--envs-per-sampler", "8", "--sync-interval", "64",
    "--no-visualizer",
    "--set", "sampling.step_deadline_s=100000",
)  # fmt: skip
_ROWS = 8 * 64
"""Of a sampler in one interval."""
_HANGS = {"SPREEZE_FAULT_HANG_AT": "1", "SPREEZE_FAULT_WORKERS": "sampler-0"}
_WAITING = ("sampler-1", "inference-0", "learner")
_SETTLE_S, _SHORT_SETTLE_S = 3.0, 1.0
"""After all wait, before their time counts; short where no figure is judged."""
_ROUND_TRIPS = 2_000


def waiting_rows(
    runs_dir: str, seconds: float, repeats: int, say: Callable[[str], None], settle_s: float = _SETTLE_S
) -> list[Row]:
    """Shares of a core that waiting workers take over ``seconds``, and wake-ups.

    Raises:
        SpreezeError: the run did not come to where all wait.
    """
    shares: dict[str, list[float]] = {name: [] for name in _WAITING}
    for repeat in range(repeats):
        for name, share in _idle_shares(runs_dir, f"waiting-{repeat}", seconds, settle_s).items():
            shares[name].append(share)
    say("  " + ", ".join(f"{name} {max(found):.2%}" for name, found in shares.items()))
    rows: list[Row] = [
        {
            "metric": f"idle_cpu_share_of_{name}",
            "unit": "share of a core",
            "value": max(found),
            "repeats": found,
            "target": "<= 0.03",
        }
        for name, found in shares.items()
    ]
    medians, tails = zip(*(_wake_ups_us() for _ in range(repeats)), strict=True)
    say(f"  wake-up {np.median(medians):.0f} us, 99 of 100 within {np.median(tails):.0f} us")
    return [*rows, row("wake_up_us_median", "us", list(medians)), row("wake_up_us_p99", "us", list(tails))]


def _idle_shares(runs_dir: str, name: str, seconds: float, settle_s: float) -> dict[str, float]:
    """Processor time of each waiting worker over wall time. The run is killed: its hung sampler ends no sooner."""
    with LiveRun(list(_TASK), runs_dir, name, _HANGS) as run:

        def all_wait() -> bool:
            """The sampler that does not hang has filled its half, with the learner's first policy."""
            with contextlib.suppress(SpreezeError, OSError):
                found = MetricsReader(run.path / "metrics.db").latest().get("env_steps")
                return found is not None and found.value >= _ROWS
            return False

        run.wait(all_wait, PATIENCE_S, "half an interval")
        time.sleep(settle_s)
        processes = {name: run.children()[name] for name in _WAITING}
        start_s, before = time.monotonic(), {name: _cpu_s(process) for name, process in processes.items()}
        time.sleep(seconds)
        took_s = time.monotonic() - start_s
        return {name: (_cpu_s(process) - before[name]) / took_s for name, process in processes.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _wake_ups_us() -> tuple[float, float]:
    """Half of a round trip between two processes: median and 99th percentile, in microseconds."""
    here, there = Wakeup.create(), Wakeup.create()
    fds = (*here.fds, *there.fds)
    command = [sys.executable, __file__, *map(str, fds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # this file imports its siblings
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)
    try:
        if not here.wait(PATIENCE_S):
            raise SpreezeError("the child that rings back did not start")
        times = []
        for _ in range(_ROUND_TRIPS):
            start_s = time.perf_counter()
            there.notify()
            if not here.wait(PATIENCE_S):
                raise SpreezeError(f"no answer within {PATIENCE_S:g} s")
            times.append(1e6 * (time.perf_counter() - start_s) / 2)
            time.sleep(0.0005)  # both sleep again, as they would between two steps
        return float(np.median(times)), float(np.quantile(times, 0.99))
    finally:
        child.kill()
        child.wait()
        here.close()
        there.close()


def _ring_back(fds: list[int]) -> None:
    """The child: rings as often as it is rung; ends with its parent."""
    there, here = Wakeup(*fds[:2]), Wakeup(*fds[2:])
    there.notify()
    parent = os.getppid()
    while os.getppid() == parent:
        if here.wait(1.0):
            there.notify()


SECONDS, REPEATS = asked("SECONDS", 10.0), asked("REPEATS", 5)


@pytest.mark.skipif(sys.platform != "linux", reason="hangs a sampler")
def test_waiting_workers_and_wake_ups_are_measured(tmp_path):
    rows = {row["metric"]: row for row in waiting_rows(str(tmp_path / "runs"), 1.0, 1, print, _SHORT_SETTLE_S)}
    for name in _WAITING:
        assert 0.0 <= rows[f"idle_cpu_share_of_{name}"]["value"] < 0.5, "of a busy loop it is 1"
    assert 0.0 < rows["wake_up_us_median"]["value"] <= rows["wake_up_us_p99"]["value"]


@by_hand
@pytest.mark.timeout(REPEATS * (SECONDS + PATIENCE_S))
def test_waiting_costs_next_to_nothing(tmp_path, report, say):
    rows = report(waiting_rows(str(tmp_path / "runs"), SECONDS, REPEATS, say))
    assert all(rows[f"idle_cpu_share_of_{name}"]["value"] <= 0.03 for name in _WAITING)


if __name__ == "__main__":
    _ring_back([int(text) for text in sys.argv[1:]])
