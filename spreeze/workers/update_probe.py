"""A child process that times real updates on synthetic rows: ``python -m spreeze.workers.update_probe JOB``.

It loads what a learner loads, once, and forks for every measurement: each begins in a fresh process
that has taken no gradient step and started no thread. One JSON line comes in for each measurement, one
goes out. A measurement that raises, crashes, hangs or takes too much memory is an answer, not an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from spreeze.config import PARTS
from spreeze.transport.frames import open_reader
from spreeze.transport.ring import Ring, RingSpec
from spreeze.types import RowLayout
from spreeze.workers.child import end_with_parent
from spreeze.workers.devices import gpus_of, learner_threads, peak_bytes, products_in, resolve_device, synchronise
from spreeze.workers.filling import fill
from spreeze.workers.jobs import UpdateProbeJob, UpdateTurn
from spreeze.workers.learning import Learning

_LOOK_S = 0.02
"""Time between two looks at the memory of a measurement."""
_WARM_UPDATES, _WARM_S = 3, 0.5
_WARM_UPDATES_GPU = 8
"""Until a graph of updates is recorded."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMORY_WORDS = ("can't allocate memory", "out of memory", "MemoryError", "std::bad_alloc")


def main(argv: list[str]) -> int:
    """Answers measurements until standard input ends."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = UpdateProbeJob.from_json(json.loads(argv[0]))
    layout = RowLayout.of(job.spec, int(job.algorithm["n_step"]))
    ring = Ring.create(RingSpec(layout, 1, job.rows))
    try:
        fill(ring, job.spec)
        _answer({"ready": True})
        for line in sys.stdin:
            _answer(_measured(job, ring, UpdateTurn.from_json(json.loads(line))))
    finally:
        ring.close()
    return 0


def _answer(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _measured(job: UpdateProbeJob, ring: Ring, turn: UpdateTurn) -> dict[str, Any]:
    """What a fresh process found, or why it did not."""
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _in_child(job, ring, turn, writing, parent)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        answer, failure = _awaited(pid, pipe.fileno(), turn.deadline_s, job.memory_cap_bytes)
    _, status = os.waitpid(pid, 0)
    if failure is not None:
        return {"failure": failure}
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        return {"failure": f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"}
    found: dict[str, Any] = json.loads(answer)
    return found


def _awaited(pid: int, fd: int, deadline_s: float, cap_bytes: int) -> tuple[bytes, str | None]:
    """What the child wrote until it closed its end, or why it was killed."""
    answer, end = b"", time.monotonic() + deadline_s
    while True:
        ready, _, _ = select.select([fd], [], [], _LOOK_S)
        if ready:
            data = os.read(fd, 65536)
            if not data:
                return answer, None
            answer += data
        failure = None
        if time.monotonic() > end:
            failure = f"not done within {deadline_s:.0f} s"
        elif _private_bytes(pid) > cap_bytes:
            failure = _too_much(cap_bytes)
        if failure is not None:
            os.kill(pid, signal.SIGKILL)
            return answer, failure


def _too_much(cap_bytes: int) -> str:
    return f"out of memory: more than the {cap_bytes / 1e9:.1f} GB that a candidate may take"


def _private_bytes(pid: int) -> int:
    """Resident memory that is not of a file and not shared; 0 once the process has ended."""
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _in_child(job: UpdateProbeJob, ring: Ring, turn: UpdateTurn, writing: int, parent: int) -> NoReturn:
    """The forked process: measures, writes one JSON object, ends without clean-up."""
    code = 1
    try:
        end_with_parent()
        if os.getppid() == parent:
            os.dup2(2, 1)  # standard output belongs to the answers
            found = _updates(job, ring, turn)
            code = 0
        else:
            found = {}
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        found = {"failure": _too_much(job.memory_cap_bytes) if any(w in text for w in _MEMORY_WORDS) else text[:300]}
    with contextlib.suppress(OSError):
        os.write(writing, json.dumps(found).encode())
    os._exit(code)


def _updates(job: UpdateProbeJob, ring: Ring, turn: UpdateTurn) -> dict[str, Any]:
    """Updates a second, each repeat; the first updates (allocation, caches) are left out."""
    device = resolve_device(turn.device)
    if not gpus_of(device):
        _limit_data(job.memory_cap_bytes)
    config: Any = PARTS[job.algo](**job.algorithm)
    with products_in(turn.precision, device), learner_threads(job.spec, turn.threads, device) as pair:
        learning = Learning(job.spec, job.algo, config, ring.spec.layout, open_reader(ring), batch_size=turn.batch_size,
                            device=device, seed=0, normalize_obs=job.normalize_obs, pair=pair,
                            mirror=True, updates_per_launch=1)
        rates = _rates(learning, turn, device)
    return {"updates_per_s": rates, "memory_bytes": peak_bytes(device)}


def _rates(learning: Learning, turn: UpdateTurn, device: str) -> list[float]:
    start, warm = time.perf_counter(), 0
    enough = _WARM_UPDATES_GPU if gpus_of(device) else _WARM_UPDATES
    while warm < enough and time.perf_counter() - start < _WARM_S:
        warm += learning.update()
    rates = []
    for _ in range(turn.repeats):
        synchronise(device)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < turn.repeat_s:
            count += learning.update()
        synchronise(device)
        rates.append(count / (time.perf_counter() - start))
    return rates


def _limit_data(cap_bytes: int) -> None:
    """Makes an allocation beyond the cap fail at once. Not beside CUDA, which reserves far more than it takes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    now = next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:")), None)
    if now is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = now + cap_bytes if hard == resource.RLIM_INFINITY else min(now + cap_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
