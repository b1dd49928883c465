"""A host that works for a run elsewhere: it has only samplers, or a whole run whose learner joins the others.

Samplers have their memory, supervisor and weights here. A run (``HostRun``) inherits the memory for messages
(``transport.gossip``), and leaves nothing behind: its learning is in the other learners. ``GatewayActor`` is the Ray
actor on every other host: it answers pulls with chunks, takes weights, reports the clock. Nothing here calls Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze import __version__
from spreeze.config.schema import MAX_HOST_SAMPLERS
from spreeze.envs.probe import probe_env
from spreeze.errors import SpreezeError, TransportError, WeightsError, WorkerError, described
from spreeze.files import tail_text
from spreeze.formatting import clean
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import core_facts, memory_limits
from spreeze.machine.logs import LogKeeper
from spreeze.machine.processes import kill_and_wait, mark
from spreeze.machine.watcher import OrphanWatch
from spreeze.metrics.table import SLOTS, TABLE
from spreeze.run_directory import scratch_folder, versions
from spreeze.runtime.assembly import limit_of_each
from spreeze.runtime.launcher import RunContext, WorkerSpec, child_environment, start_process
from spreeze.runtime.worker_pool import WorkerPool
from spreeze.transport import status_table
from spreeze.transport.chunks import (
    RowReader,
    Taken,
    outlet_limiter,
    outlet_spec,
    sign_chunk,
    sign_json,
    verify,
    verify_json,
)
from spreeze.transport.gossip import GossipMemory, sign_messages, verify_messages
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.shared_memory import inherited_fds
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import DAMAGE, ParameterStore, decode
from spreeze.types import Jsonable
from spreeze.workers.context import open_weights
from spreeze.workers.jobs import HostJob, ReplaySamplerJob
from spreeze.workers.roles import Address

_LOOK_S = 0.05
_MAX_EVENTS = 20
_TUNER = ("-m", "spreeze", "tune", "--json", "--no-learner")
_TUNE_S = 180.0
"""Longest time of a host's tuner, whose budget is a minute; another tuner on the host may have to end before it."""
_CHECK_STEPS = 300
_UNREQUESTED_S = 8.0
"""Samplers end if their rows have not been requested for this long, a run if its status has not: the driver is gone, or
its run is paused. They start again at the next request."""

_TURN_S, _AGAIN_S = 0.2, 3.0
_END_RUN_S = 1.0
"""Time for the run to end by itself before it is killed: nothing of it is kept, and Ray does not wait for long."""
_MAX_FAILURES, _WINDOW_S = 4, 120.0


class HostThread(threading.Thread):
    """A thread of the gateway that keeps a host's processes, until ``end`` or until nothing is requested."""

    def __init__(self) -> None:
        super().__init__(name="host", daemon=True)
        self._ending = threading.Event()
        self.failure: str | None = None
        self.requested_s = time.monotonic()
        self._events: deque[str] = deque(maxlen=_MAX_EVENTS)

    def end(self, within_s: float) -> None:
        """Ends everything that it started."""
        self._ending.set()
        self.join(within_s)

    @property
    def _unrequested(self) -> bool:
        return time.monotonic() - self.requested_s > _UNREQUESTED_S

    def _new_events(self) -> list[str]:
        """Events, each once."""
        return [self._events.popleft() for _ in range(len(self._events))]


class HostSamplers(HostThread):
    """Starts and watches a host's samplers in a thread; they end with it, by the kernel's death signal."""

    def __init__(self, job: HostJob, seed: int) -> None:
        """Starts nothing yet; ``seed`` differs at every start on any host, so that no episode repeats."""
        super().__init__()
        self.job, self._seed = job, seed
        self.orphaned = False
        """True once they ended because rows were not requested."""
        self.outlet: RowReader | None = None
        self.samplers, self.envs_per_sampler = 0, job.sampling.envs_per_sampler
        self._folder = Path()
        self._weights: ParameterStore | None = None
        self._status: StatusTable | None = None
        self._workers: WorkerPool | None = None
        self.weights_order = (-1, -1)

    def run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(AWAKE.watched())
                self._open(stack)
                self._watch()
        except (SpreezeError, OSError) as error:
            self.failure = clean(error, 500)
        except Exception as error:  # a thread's exception would be lost
            self.failure = clean(described(error), 500)
        finally:
            self.outlet = None

    def _open(self, stack: contextlib.ExitStack) -> None:
        job, nonce = self.job, secrets.token_hex(8)
        self._folder = stack.enter_context(scratch_folder("spreeze-host-"))
        self._weights = open_weights(self._folder)  # one store: it deletes the old ones of what it has published
        logs = stack.enter_context(LogKeeper())
        stack.enter_context(OrphanWatch(nonce, self._folder))
        self.samplers, self.envs_per_sampler = self._choose(nonce)
        rows = self.envs_per_sampler * job.rows_per_step
        spec = outlet_spec(job.layout, self.samplers, rows)
        ring = stack.enter_context(contextlib.closing(ReplayRing.create(spec)))
        self._status = stack.enter_context(contextlib.closing(StatusTable.create(self.samplers)))
        outlet = RowReader(ring)
        context = RunContext(run_dir=self._folder, status=self._status, nonce=nonce, gives_way=job.gives_way, logs=logs)
        self._workers = WorkerPool(context, on_event=self._note)
        stack.callback(self._workers.stop, hurry=lambda: True, on_messages=lambda messages: None)
        for index in range(self.samplers):
            sampler = ReplaySamplerJob(
                **job.row_facts,
                group_dir=str(self._folder),
                index=index,
                seed=self._seed,
                num_envs=self.envs_per_sampler,
                replay=ring.handle,
                limiter=outlet_limiter(self.samplers, rows),
            )
            self._workers.add(
                WorkerSpec(
                    address=Address("sampler", 0, index),
                    row=index,
                    job=sampler,
                    step_deadline_s=job.sampling.step_deadline_s,
                    start_deadline_s=job.sampling.start_deadline_s,
                    memory_limit_bytes=limit_of_each(job.sampling.memory_limit_bytes, self.samplers),
                )
            )
        self.outlet = outlet

    def _choose(self, nonce: str) -> tuple[int, int]:
        job = self.job
        if job.samplers is not None:
            return job.samplers, job.sampling.envs_per_sampler
        if job.tune:
            try:
                choice = self._tuned(nonce)
                return int(choice["sampling.samplers"]), int(choice["sampling.envs_per_sampler"])
            except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
                self._note("warning", f"not tuned here: {clean(error, 200)}")
        return max(1, min(int(core_facts().usable), MAX_HOST_SAMPLERS)), job.sampling.envs_per_sampler

    def _tuned(self, nonce: str) -> dict[str, Any]:
        process = start_process(
            (*_TUNER, *self.job.tune), nonce, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        try:
            output, _ = process.communicate(timeout=_TUNE_S)
        finally:
            kill_and_wait(process)
        record = json.loads(output.decode(errors="replace"))
        if "error" in record:
            raise ValueError(record["error"])
        return dict(record["choice"])

    def _watch(self) -> None:
        assert self._workers is not None
        self.requested_s = time.monotonic()
        while not self._ending.is_set():
            if self._unrequested:
                self.orphaned = True
                return
            self._handle(self._workers.wait(_LOOK_S))
            try:
                self._handle(self._workers.watch())
            except WorkerError as error:
                first = self._workers.first_error
                raise WorkerError(f"{error}" + (f" (first: {': '.join(first)})" if first else "")) from None

    def _handle(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message.get("kind") == "event":
                self._note(str(message.get("level", "info")), f"{message.get('from')}: {message.get('text')}")

    def _note(self, level: str, text: str) -> None:
        if level != "info":
            self._events.append(clean(text, 300))

    def take_weights(self, data: bytes) -> tuple[int, int]:
        """Gives samplers the weights; returns the newest (epoch, version) they have; TransportError if unreadable."""
        try:
            weights = decode(data, Path("weights from the driver"))
        except (*DAMAGE, WeightsError) as error:
            raise TransportError(f"weights of {len(data)} bytes cannot be read: {error}") from None
        if self.outlet is None or self._status is None or self._weights is None:
            return self.weights_order
        if weights.order > self.weights_order:
            self._weights.publish(weights.arrays, weights.meta, *weights.order)
            self._status.group(0)[status_table.WEIGHTS_COUNTER] += 1
            self.weights_order = weights.order
        return self.weights_order

    def facts(self) -> dict[str, Any]:
        """Status that the host sends with each chunk; each event is sent once."""
        events, status = self._new_events(), self._status
        if self.outlet is None or status is None:
            return {"events": events, "failure": self.failure}
        rows = [status.named_slots(row, "sampler") for row in range(self.samplers)]
        slots = sum_counters(rows) | {"policy_version": min(row["policy_version"] for row in rows)}
        return {"events": events, "slots": slots}


def sum_counters(rows: list[dict[str, float]]) -> dict[str, float]:
    """The slots of several samplers as those of one: sums of what is counted, means of the latest episodes."""
    counted = set(TABLE.cumulative("sampler"))
    finished = [row for row in rows if row["episodes"] > 0]
    sums = {name: sum(row[name] for row in rows) for name in SLOTS["sampler"]}
    means = {name: sum(row[name] for row in finished) / max(1, len(finished)) for name in sums}
    return {name: sums[name] if name in counted else means[name] for name in sums}


def host_checks(task: dict[str, Any]) -> dict[str, Any]:
    """Checks of this host: versions, memory, and whether ``task``'s environment can be made and stepped here."""
    checks: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions(),
        "cores": core_facts().usable,
        "memory_free_bytes": memory_limits().usable_bytes,
        "pid": os.getpid(),
        "env": None,
        "env_error": None,
    }
    if task.get("env_id"):
        try:
            env_id, plain, args = str(task["env_id"]), bool(task.get("plain")), tuple(task.get("args") or ())
            probe = probe_env(env_id, task.get("import_module"), steps=_CHECK_STEPS, plain=plain, args=args)
            spec = probe.spec
            checks["env"] = {"step_us": probe.step_us_median, "obs_dim": spec.obs_dim, "action_dim": spec.action_dim}
        except SpreezeError as error:
            checks["env_error"] = clean(error, 300)
    return checks


@dataclass(frozen=True, kw_only=True)
class HostRunJob(Jsonable):
    """Job of another host that has a run of its own."""

    arguments: tuple[str, ...]  # arguments of ``python -m spreeze.train``: the task, the algorithm, and the run to join
    number: int  # number of its learner among those of all hosts, of which there are ``learners``
    learners: int
    version: str


class HostRun(HostThread):
    """Keeps a run alive on this host, with all its processes."""

    def __init__(self, job: HostRunJob) -> None:
        """A TransportError if this host has another version of Spreeze than the run that it is to join."""
        super().__init__()
        if job.version != __version__:
            raise TransportError(
                f"this host has Spreeze {__version__}, the run that it is to join has {job.version}; install the same"
            )
        self._job = job
        self.number, self.memory = job.number, GossipMemory.create(job.learners, (job.number,))
        """Messages of all learners; they outlive the run here, which may begin anew."""
        self.start_name = secrets.token_hex(8)
        """Distinguishes this memory from those of earlier processes on this host."""
        self.starts = 0

    def run(self) -> None:
        nonce = secrets.token_hex(8)
        with scratch_folder("spreeze-host-") as folder, OrphanWatch(nonce, folder):
            try:
                self._keep(folder, nonce)
            except OSError as error:
                self.failure = clean(error, 300)

    def _keep(self, folder: Path, nonce: str) -> None:
        messages = self.memory.handle(joined=True)
        failed_s: deque[float] = deque(maxlen=_MAX_FAILURES)
        while not self._ending.is_set():
            if self._unrequested:
                self._ending.wait(_TURN_S)
                continue
            self.starts += 1
            output_path = folder / f"run-{self.starts}.txt"
            location = ("--runs-dir", str(folder / "runs"), "--name", f"host-{self.starts}")
            with open(output_path, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "spreeze.train", *self._job.arguments, *location],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                    env=child_environment(1, nonce) | messages.environment,
                    pass_fds=inherited_fds(messages),
                )
            mark(process.pid, nonce)
            if not self._watch(process):
                continue
            last_line = (tail_text(output_path).strip().splitlines() or ["no word"])[-1]
            self._events.append(f"its run ended with code {process.returncode}: {clean(last_line, 200)}")
            failed_s.append(time.monotonic())
            if len(failed_s) == _MAX_FAILURES and failed_s[-1] - failed_s[0] < _WINDOW_S:
                self.failure = clean(last_line, 300)
                return
            self._ending.wait(_AGAIN_S)

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the end of a run; False if this process ended it, on request or because requests stopped."""
        while process.poll() is None and not self._unrequested and not self._ending.wait(_TURN_S):
            pass
        if process.poll() is not None:
            return not self._ending.is_set()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_RUN_S)
        except subprocess.TimeoutExpired:
            kill_and_wait(process)
        return False

    def end(self, within_s: float) -> None:
        super().end(within_s)
        self.memory.close()

    def facts(self, living: Iterable[int] = ()) -> dict[str, Any]:
        """Status of this host. ``living``: learners known to be alive. Each event is sent once."""
        self.requested_s = time.monotonic()
        self.memory.note_alive(living)
        learns = self.number in self.memory.living()
        return {"events": self._new_events(), "failure": self.failure, "start": self.start_name, "learns": learns}


PULL, CONTROL = "pull", "control"  # groups of methods, each with a thread of its own
GROUPS = {PULL: 1, CONTROL: 1}
LINGER_S = 0.1
"""Default time that a pull waits for a chunk to reach its least size; also the longest wait for a first row."""
_MAX_LINGER_S = 1.0
_POLL_S = 0.004
_END_S = 3.0


class GatewayActor:
    """Has the samplers of its host, or its run. Ray makes it again, on the same host, if its process dies.

    Its methods take and return bytes, and raise nothing: the answer reports a failure, so that Ray has no exception to
    pickle. Ray runs ``pull`` and ``listen``, which wait, in one thread and the others in another one.
    """

    def __init__(self, secret: bytes, job: bytes) -> None:
        """Starts the samplers of a sealed ``HostJob``, or the run of a ``HostRunJob``; neither for a survey."""
        self._secret = secret
        self._failure: str | None = None
        self._samplers: HostSamplers | None = None
        self._run: HostRun | None = None
        try:
            facts = verify_json(secret, b"job", job)
            if "arguments" in facts:
                self._run = HostRun(HostRunJob.from_json(facts))
                self._run.start()
            elif facts:
                self._start(HostJob.from_json(facts))
        except (SpreezeError, OSError, TypeError, KeyError) as error:
            self._failure = clean(f"{type(error).__name__}: {error}", 500)

    def _start(self, job: HostJob) -> None:
        # The time tells this start from earlier ones with the same job.
        self._samplers = HostSamplers(job, (job.seed << 40) + time.time_ns() // 1000 % (1 << 40))
        self._samplers.start()

    def pull(self, request: bytes) -> bytes:
        """The next chunk, once it is large enough or has waited; the request says how far samplers may continue."""
        try:
            return self._chunk(verify_json(self._secret, b"pull", request))
        except (SpreezeError, KeyError, TypeError, ValueError, AttributeError) as error:
            return self._no_rows({"failure": clean(f"{type(error).__name__}: {error}", 300)})

    def _chunk(self, request: dict[str, Any]) -> bytes:
        if self._samplers is not None and self._samplers.orphaned and not self._samplers.is_alive():
            self._start(self._samplers.job)
        samplers = self._samplers
        if samplers is None:
            return self._no_rows({"failure": self._failure})
        samplers.requested_s = time.monotonic()
        outlet = samplers.outlet
        if outlet is None:
            return self._no_rows(samplers.facts())
        if request.get("ring_id") == outlet.ring_id:
            outlet.allow(int(request["allowed"]))
        end = time.monotonic() + min(_MAX_LINGER_S, max(0.0, float(request.get("linger_s", LINGER_S))))
        while not outlet.fills_a_chunk and time.monotonic() < end:
            if outlet.waiting and outlet.quota_used:
                break
            time.sleep(_POLL_S)
        first, taken = outlet.taken, outlet.take()
        return sign_chunk(self._secret, outlet.ring_id, first, taken, samplers.facts())

    def _no_rows(self, facts: dict[str, Any]) -> bytes:
        """A chunk of no rows, after a pause: the driver asks again at once."""
        time.sleep(LINGER_S)
        return sign_chunk(self._secret, 0, 0, Taken([], []), facts)

    def weights(self, data: bytes) -> bytes:
        """Takes one version of the weights, sealed; answers which one the samplers have now, and the time."""

        def taken() -> dict[str, Any]:
            samplers, sent = self._samplers, bytes(verify(self._secret, b"weights", data))
            order = (-1, -1) if samplers is None else samplers.take_weights(sent)
            return {"weights": list(order), "time_s": time.time()}

        return self._answer(taken)

    def listen(self, request: bytes) -> bytes:
        """The newest message of this host's learner, sealed for that start of its run, or none after a while."""
        try:
            fields = verify_json(self._secret, b"listen", request)
            start, (epoch, number) = str(fields["start"]), fields["after"]
            run = None if self._run is None or self._run.start_name != start else self._run
            message, end = None, time.monotonic() + LINGER_S
            while run is None or (message := run.memory.newest(run.number, (int(epoch), int(number)))) is None:
                if time.monotonic() >= end:
                    break
                time.sleep(_POLL_S)
            return sign_messages(self._secret, b"listen " + start.encode(), [] if message is None else [message])
        except (SpreezeError, OSError, KeyError, TypeError, ValueError):
            return b""

    def give(self, data: bytes) -> bytes:
        """Takes messages of other hosts' learners; they are sealed for this start of the host's run."""

        def taken() -> dict[str, Any]:
            run = self._run
            if run is None:
                raise TransportError(str(self._failure))
            for message in verify_messages(self._secret, b"give " + run.start_name.encode(), data):
                run.memory.put(message)
            return {}

        return self._answer(taken)

    def ping(self, request: bytes) -> bytes:
        """This host's clock when the request came and when the answer goes, and how its own run is."""
        came_s = time.time()

        def status() -> dict[str, Any]:
            fields = verify_json(self._secret, b"ping", request)
            of_run = {"failure": self._failure} if self._run is None else self._run.facts(fields.get("living", ()))
            return {**of_run, "came_s": came_s, "went_s": time.time()}

        return self._answer(status)

    def bandwidth(self, request: bytes) -> bytes:
        """Returns as many zeros as requested, to time the transfer."""
        try:
            return bytes(min(1 << 26, int(verify_json(self._secret, b"bandwidth", request)["bytes"])))
        except (SpreezeError, KeyError, TypeError, ValueError):
            return b""

    def check(self, request: bytes) -> bytes:
        """Checks of this host for a task (``host_checks``), as JSON."""
        return self._answer(lambda: host_checks(verify_json(self._secret, b"check", request)))

    def end(self, request: bytes) -> bytes:
        """Ends the samplers, or the run; the actor stays until Ray ends it."""

        def ended() -> dict[str, Any]:
            verify_json(self._secret, b"end", request)
            for started in (self._samplers, self._run):
                if started is not None:
                    started.end(_END_S)
            return {"ended": True}

        return self._answer(ended)

    def _answer(self, act: Callable[[], dict[str, Any]]) -> bytes:
        try:
            facts = act()
        except (SpreezeError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            facts = {"failure": clean(f"{type(error).__name__}: {error}", 300)}
        return sign_json(self._secret, b"answer", facts)
