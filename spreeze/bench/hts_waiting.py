"""What waiting costs in the HTS-RL mode: processor time of workers with nothing to do, and the time of a wake-up.

One executor hangs in its first env step, so everybody else of a real run has to wait for it. The wake-up is half of a
round trip between this process and a child (``python -m spreeze.bench.hts_waiting``) that rings back.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import psutil

from spreeze.bench.live_run import LiveRun
from spreeze.bench.runs import Row
from spreeze.errors import SpreezeError
from spreeze.store_reader import MetricsReader
from spreeze.transport.wake import Bell

_TASK = (
    "--env", "spreeze/Fault-v0", "--import", "spreeze.envs.faults", "--mode", "hts", "--algo", "a2c",
    "--executors", "2", "--actors", "1", "--envs-per-executor", "8", "--sync-interval", "64", "--no-visualizer",
    "--set", "sampling.step_deadline_s=100000",
)  # fmt: skip
_ROWS = 8 * 64
"""Of an executor in one interval."""
_HANGS = {"SPREEZE_FAULT_HANG_AT": "1", "SPREEZE_FAULT_WORKERS": "executor-0"}
_WAITING = ("executor-1", "actor-0", "learner")
_START_S, _SETTLE_S = 120.0, 3.0
_ROUND_TRIPS = 2_000
_LIMIT_S = 5.0


def waiting_rows(seconds: float, repeats: int, say: Callable[[str], None]) -> list[Row]:
    """Shares of a core that waiting workers take over ``seconds``, and wake-ups.

    Raises:
        SpreezeError: the run did not come to where all wait.
    """
    shares = {name: [] for name in _WAITING}  # type: dict[str, list[float]]
    for _ in range(repeats):
        for name, share in _idle_shares(seconds).items():
            shares[name].append(share)
    say("  " + ", ".join(f"{name} {max(found):.2%}" for name, found in shares.items()))
    rows: list[Row] = [
        {"metric": "idle_cpu_share", "worker": name, "unit": "share of a core", "value": max(found), "repeats": found,
         "target": "<= 0.03"}
        for name, found in shares.items()
    ]
    medians, tails = zip(*(_wake_ups_us() for _ in range(repeats)), strict=True)
    say(f"  wake-up {np.median(medians):.0f} us, 99 of 100 within {np.median(tails):.0f} us")
    for metric, found in (("wake_up_us_median", medians), ("wake_up_us_p99", tails)):
        rows.append({"metric": metric, "unit": "us", "value": float(np.median(found)), "repeats": list(found)})
    return rows


def _idle_shares(seconds: float) -> dict[str, float]:
    """Processor time of each waiting worker over wall time."""
    with (
        tempfile.TemporaryDirectory(prefix="spreeze-bench-", ignore_cleanup_errors=True) as folder,
        LiveRun(list(_TASK), folder, "waiting", _HANGS) as run,
    ):
        def all_wait() -> bool:
            """The executor that does not hang has filled its half, with the learner's first policy."""
            with contextlib.suppress(SpreezeError, OSError):
                found = MetricsReader(run.path / "metrics.db").latest().get("env_steps")
                return found is not None and found.value >= _ROWS
            return False

        run.wait(all_wait, _START_S, "half an interval")
        time.sleep(_SETTLE_S)
        processes = {name: psutil.Process(run.workers()[name]) for name in _WAITING}
        start_s, before = time.monotonic(), {name: _cpu_s(process) for name, process in processes.items()}
        time.sleep(seconds)
        took_s = time.monotonic() - start_s
        shares = {name: (_cpu_s(process) - before[name]) / took_s for name, process in processes.items()}
        run.stop()
    return shares


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _wake_ups_us() -> tuple[float, float]:
    """Half of a round trip between two processes: median and 99th percentile, in microseconds."""
    here, there = Bell.create(), Bell.create()
    fds = (*here.fds, *there.fds)
    command = [sys.executable, "-m", "spreeze.bench.hts_waiting", *map(str, fds)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
    try:
        if not here.wait(60.0):
            raise SpreezeError("the child that rings back did not start")
        times = []
        for _ in range(_ROUND_TRIPS):
            start_s = time.perf_counter()
            there.ring()
            if not here.wait(_LIMIT_S):
                raise SpreezeError(f"no answer within {_LIMIT_S:g} s")
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
    there, here = Bell(*fds[:2]), Bell(*fds[2:])
    there.ring()
    parent = os.getppid()
    while os.getppid() == parent:
        if here.wait(1.0):
            there.ring()


if __name__ == "__main__":
    _ring_back([int(text) for text in sys.argv[1:]])
