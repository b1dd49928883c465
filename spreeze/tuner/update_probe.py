"""A child process that times real updates on synthetic rows: ``python -m spreeze.tuner.update_probe JOB``.

It imports a learner's modules once, and forks. On a CPU it forks for every measurement, so that each starts
without gradient steps and threads; on a GPU once, since context, libraries and kernels take seconds, and again only
after a failure. On other systems than Linux it starts fresh processes instead. Each measurement is one JSON line in and
one out. A measurement that raises, crashes, hangs or takes too much memory is answered with the failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from spreeze.config.schema import algorithm_section
from spreeze.machine.processes import end_with_parent, ignore_ending_signals
from spreeze.machine.utilisation import private_memory_bytes
from spreeze.transport.prioritised_replay import open_reader
from spreeze.transport.replay_ring import ReplayRing, RingHandle, RingSpec
from spreeze.transport.shared_memory import readable
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.tuner.problem import too_much_memory
from spreeze.workers.jobs import UpdateProbeJob, UpdateTurn
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.torch_devices import forget_memory, gpus_of, open_device, peak_bytes, resolve_device, synchronize

_ANSWER = "--answer"
_CHECK_S = 0.02  # Time between two checks of the memory of a measurement.
_MIN_WARM_UPDATES, _WARM_UPDATES, _WARM_S = 2, 3, 0.5
"""Updates that are not timed: at least the first, which allocates, and the second; a third if there is time."""
_MEMORY_WORDS = ("can't allocate memory", "out of memory", "MemoryError", "std::bad_alloc")


def main(argv: list[str]) -> int:
    """Answers measurements until standard input ends; with ``_ANSWER``, those of a pipe."""
    end_with_parent()
    ignore_ending_signals()
    if argv[0] == _ANSWER:
        ring = RingHandle.from_json(json.loads(argv[2])).attach()
        _in_child(UpdateProbeJob.from_json(json.loads(argv[1])), ring, int(argv[3]), int(argv[4]), os.getppid())
    job = UpdateProbeJob.from_json(json.loads(argv[0]))
    layout = algorithm_section(job.algo, job.spec.import_module)(**job.algorithm).row_layout(job.spec)
    ring = ReplayRing.create(RingSpec(layout, 1, job.rows))
    kept: dict[str, _Fork] = {}
    try:
        fill_with_synthetic_rows(ring, job.spec)
        _write_line({"ready": True})
        for line in sys.stdin:
            turn = UpdateTurn.from_json(json.loads(line))
            fork = kept.pop(turn.learner.device, None) or _Fork(job, ring)
            result = fork.measure(turn)
            if turn.kept and "failure" not in result:
                kept[turn.learner.device] = fork
            else:
                fork.close()
            _write_line(result)
    finally:
        for fork in kept.values():
            fork.close()
        ring.close()
    return 0


def _write_line(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


class _Fork:
    """A forked, or fresh, process that takes measurements until one fails."""

    def __init__(self, job: UpdateProbeJob, ring: ReplayRing) -> None:
        parent = os.getpid()
        turns, self._turns = os.pipe()
        self._results, results = os.pipe()
        self._cap_bytes = job.memory_cap_bytes
        self.pid = os.fork() if sys.platform == "linux" else _fresh(job, ring, turns, results)
        if self.pid == 0:
            os.close(self._turns)
            os.close(self._results)
            _in_child(job, ring, turns, results, parent)
        os.close(turns)
        os.close(results)

    def measure(self, turn: UpdateTurn) -> dict[str, Any]:
        """The result or the failure, after which the caller must close the process."""
        with contextlib.suppress(BrokenPipeError):  # it has died, as the missing result shows
            os.write(self._turns, json.dumps(turn.to_json()).encode() + b"\n")
        line, end = b"", time.monotonic() + turn.deadline_s
        while not line.endswith(b"\n"):
            if readable([self._results], _CHECK_S):
                data = os.read(self._results, 65536)
                if not data:
                    _, status = os.waitpid(self.pid, 0)
                    self.pid, code = 0, os.waitstatus_to_exitcode(status)
                    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                    # By SIGKILL where the system has no memory left.
                    return {"failure": f"ended {how}", "starved": -code == signal.SIGKILL}
                line += data
            elif time.monotonic() > end:
                return {"failure": f"not done within {turn.deadline_s:.0f} s", "starved": True}
            elif (private_memory_bytes(self.pid) or 0) > self._cap_bytes:
                return {"failure": too_much_memory(self._cap_bytes), "starved": True}
        return dict(json.loads(line))

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._turns)
        os.close(self._results)


def _fresh(job: UpdateProbeJob, ring: ReplayRing, turns: int, results: int) -> int:
    """Starts a process that answers turns; its id. macOS's libraries may fail in a fork, once they are loaded."""
    for fd in (turns, results, *ring.handle.fds):
        os.set_inheritable(fd, True)
    arguments = (json.dumps(job.to_json()), json.dumps(ring.handle.to_json()), str(turns), str(results))
    command = [sys.executable, "-m", "spreeze.tuner.update_probe", _ANSWER, *arguments]
    return os.posix_spawn(sys.executable, command, os.environ)


def _in_child(job: UpdateProbeJob, ring: ReplayRing, turns: int, results: int, parent: int) -> NoReturn:
    """Body of the forked process: answers turns until a failure; exits without clean-up."""
    code = 1
    with contextlib.suppress(OSError):
        end_with_parent()
        ignore_ending_signals()
        os.dup2(2, 1)  # standard output belongs to the results
        with os.fdopen(turns, "rb", buffering=0) as lines:
            code = 0
            while code == 0 and os.getppid() == parent and (line := lines.readline()):
                result, code = _result_of(job, ring, UpdateTurn.from_json(json.loads(line)))
                os.write(results, json.dumps(result).encode() + b"\n")
    os._exit(code)


def _result_of(job: UpdateProbeJob, ring: ReplayRing, turn: UpdateTurn) -> tuple[dict[str, Any], int]:
    try:
        return _updates(job, ring, turn), 0
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        too_much = any(word in text for word in _MEMORY_WORDS)
        return {"failure": too_much_memory(job.memory_cap_bytes) if too_much else text[:300], "starved": too_much}, 1


def _updates(job: UpdateProbeJob, ring: ReplayRing, turn: UpdateTurn) -> dict[str, Any]:
    """Updates/s of each repeat, and the start-up time: allocation, caches, recording of a graph."""
    start = time.perf_counter()
    learner = turn.learner
    device = resolve_device(learner.device)
    if gpus_of(device):
        forget_memory(device)
    else:
        _limit_data(job.memory_cap_bytes)
    config: Any = algorithm_section(job.algo, job.spec.import_module)(**turn.algorithm)
    with open_device(learner, job.spec, config.hidden_sizes, learner.batch_size) as (_, parallel):
        learning = ReplayTrainer(
            job.spec,
            job.algo,
            config,
            ring.spec.layout,
            open_reader(ring, config.priority_exponent),
            learner,
            seed=0,
            normalize_obs=job.normalize_obs,
            parallel=parallel,
        )
        # The recording of a graph is never timed, however long it takes.
        warm_s, first = time.perf_counter(), max(_MIN_WARM_UPDATES, learning.updates_before_replay)
        while learning.updates < first or (learning.updates < _WARM_UPDATES and time.perf_counter() - warm_s < _WARM_S):
            learning.update()
        synchronize(device)
        start_s = time.perf_counter() - start
        rates = [updates_per_s(learning, turn.repeat_s, device) for _ in range(turn.repeats)]
    return {"updates_per_s": rates, "memory_bytes": peak_bytes(device), "start_s": start_s}


def updates_per_s(trainer: ReplayTrainer, seconds: float, device: str) -> float:
    """Rate of the updates that start within ``seconds``."""
    synchronize(device)
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < seconds:
        count += trainer.update()
    synchronize(device)
    return count / (time.perf_counter() - start_s)


def _limit_data(cap_bytes: int) -> None:
    """Makes an allocation beyond the cap fail at once. Not for CUDA, which reserves far more than it uses."""
    status = ""
    with contextlib.suppress(OSError):  # elsewhere than on Linux there is no such limit
        status = Path("/proc/self/status").read_text(encoding="ascii")
    now = next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:")), None)
    if now is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = now + cap_bytes if hard == resource.RLIM_INFINITY else min(now + cap_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
