"""A history of faults, made from a seed, thrown at one real run; and how a history that fails is made short.

Twelve kinds are known (``KINDS``), of which ``partition`` needs another host: a Ray node in a network namespace of its
own (root, ``/dev/net/tun``). ``Storm(folder).play(history(seed, 100))`` throws a hundred faults and returns what the
checker has seen; with that host, ``Storm(folder, hosts=True).play(history(seed, 100, hosts=True))``.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fault_checker import ENDED, ENVS, HEARTBEAT, TOLD, Checker, lose_unsynced
from fault_envs import STRUCK_ID
from fault_page import CLOCK_S, HANG_PID, LEAK_PID, NAN_PID, SLOW_S, VARIABLE, open_page, synced_files
from harness import SUPPORT, fill, mounted
from linked_cluster import LinkedCluster, cluster_over
from live_run import AttachedRun, marked
from long_form import LIMIT_S
from lossy_link import lossy_link
from watched_run import FORGIVING

from spreeze.errors import CheckpointError, ResourceError, SpreezeError
from spreeze.transport import status_table
from spreeze.transport.checkpoint import CheckpointStore, load
from spreeze.workers.roles import Phase

KINDS = {
    "kill": 6, "stop": 3, "disk_full": 2, "clock": 2, "memory": 2, "slow_disk": 2, "power": 1, "nan": 2, "hang": 2,
    "corrupt": 3, "two": 2, "partition": 3,
}  # fmt: skip
"""Kind of fault -> how often it comes, of 30."""
LEFT_OUT = "partition"
"""Where there is no other host."""
SAMPLERS = 2
_ROUND = 50
"""Faults after which a session is stopped in order, its summary checked, and the run resumed."""
_DISK_BYTES = 350_000_000
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000", "RAY_health_check_failure_threshold": "4",
}  # fmt: skip
"""A node that does not answer for some fifteen seconds is dead to Ray."""
_MARK = "SPREEZE_STRESS_RUN"
_SAMPLERS = tuple(f"sampler-{index}" for index in range(SAMPLERS))
_VICTIMS = {
    "kill": (*_SAMPLERS, "learner", "evaluator", "visualizer"),
    "stop": (*_SAMPLERS, "learner", "evaluator", "supervisor"),
    "memory": (*_SAMPLERS, "learner", "evaluator"), "nan": _SAMPLERS, "hang": _SAMPLERS,
}  # fmt: skip
_CORRUPTED = ("checkpoint", "weights", "LATEST.json", "metrics.db", "eval.csv", "run.json")
_COMMAND = [
    "--env", STRUCK_ID, "--import", "fault_envs", "--samplers", str(SAMPLERS), "--envs-per-sampler", str(ENVS),
    "--samples-per-insert", ":4", "--batch-size", "32", "--replay-capacity", "50000", "--no-governor", "--seconds", "0",
    "--set", "replay.learning_starts=500", "--set", "sac.hidden_sizes=[16,16]", "--set", "evaluation.episodes=2",
    "--set", "learner.checkpoint_interval_s=1", "--set", "learner.publish_interval_s=0.2",
    "--set", "sampling.step_deadline_s=3", "--set", "sampling.memory_limit_bytes=350000000",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault of a history."""

    kind: str
    victim: str = ""
    """Name of a worker, or of what is corrupted."""
    size: float = 0.5
    """How much of it, from 0 to 1."""
    wait_s: float = 0.0
    settles: bool = True
    """The run has to be whole again before the next fault."""
    both: tuple[Fault, ...] = ()
    """Faults of kind ``two``."""


def history(seed: int, faults: int, *, hosts: bool = False) -> list[Fault]:
    """So many faults, the same for the same seed; the first ones are one of each kind."""
    dice = random.Random(seed)
    kinds = [kind for kind in KINDS if hosts or kind != LEFT_OUT]
    bridge = ("bridge",) if hosts else ()
    single = [kind for kind in kinds if kind not in ("two", "power")]

    def fault(kind: str) -> Fault:
        both: tuple[Fault, ...] = ()
        if kind == "two":
            both = tuple(fault(one) for one in dice.sample(single, 2))
        victims = _VICTIMS.get(kind, ("",)) + (bridge if kind in ("kill", "stop") else ())
        victim = dice.choice(_CORRUPTED if kind == "corrupt" else victims)
        settles = dice.random() < 0.2
        return Fault(kind, victim, dice.random(), dice.uniform(0.0, 0.6), settles, both)

    drawn = dice.sample(kinds, len(kinds))
    while len(drawn) < faults:
        waits = {kind for kind in drawn[-4:] if _place(Fault(kind)) == kind}  # a second one would wait for the first
        allowed = [kind for kind in kinds if kind not in waits] or kinds
        drawn += dice.choices(allowed, [KINDS[kind] for kind in allowed])
    return [fault(kind) for kind in drawn[:faults]]


def shrunk(failing: list[Fault], fails: Callable[[list[Fault]], bool]) -> list[Fault]:
    """A short history that still fails: parts are left out as long as it does (delta debugging)."""
    parts = 2
    while len(failing) > 1:
        size = -(-len(failing) // parts)
        for start in range(0, len(failing), size):
            rest = failing[:start] + failing[start + size :]
            if rest and fails(rest):
                failing, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(failing), 2 * parts)
    return failing


@dataclass
class Report:
    """What a storm has thrown and seen."""

    thrown: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    rows_checked: int = 0
    checkpoints_checked: int = 0
    sessions: int = 0
    minutes: float = 0.0
    history: list[Fault] = field(default_factory=list)
    """What was thrown, in order."""


@dataclass
class _Pending:
    """A fault that goes on."""

    what: str
    over: Callable[[], bool | None]
    """True once it was told, or once its time has passed."""
    end: Callable[[], None] = lambda: None
    since_s: float = field(default_factory=time.monotonic)


class Storm:
    """Throws faults at one run below a folder, and has the checker look at it all the time."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None, *, hosts: bool = False) -> None:
        """``hosts``: the run has samplers on another host, behind a link that can be cut (root, Linux, Ray)."""
        self._folder, self._say, self._hosts = folder.resolve(), say, hosts
        self._name = f"storm-{os.getpid()}-{time.monotonic_ns()}"

    def play(self, faults: list[Fault], minutes: float = 1e9) -> Report:
        """Throws the faults, at most for so many minutes; ends with the first violation.

        Raises:
            ResourceError: other hosts cannot be had here.
        """
        report, began_s = Report(), time.monotonic()
        with contextlib.ExitStack() as stack:
            self._prepare(stack)
            try:
                for number, fault in enumerate(faults):
                    if self._checker.violations or time.monotonic() - began_s > 60.0 * minutes:
                        break
                    if self._run is None:
                        self._begin()
                        report.sessions += 1
                    report.history.append(fault)
                    self._say(f"{number + 1}: {fault}")
                    self._calm(fault.wait_s)
                    self._throw(fault, report)
                    if fault.settles or fault is faults[-1]:
                        self._heal()
                    if (number + 1) % _ROUND == 0:
                        self._stop_run()
                self._stop_run()
            except ResourceError:
                raise
            except SpreezeError as error:
                self._checker.found(HEARTBEAT, str(error))
            finally:
                self._end_pending()
                self._leave()
        checker = self._checker
        report.violations, report.rows_checked = checker.violations, checker.rows_checked
        report.checkpoints_checked = checker.checkpoints_checked
        report.minutes = (time.monotonic() - began_s) / 60.0
        return report

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        folder = self._folder / self._name
        self._runs, self._scratch = folder / "runs", folder / "tmp"
        for path in (self._runs, self._scratch):
            path.mkdir(parents=True)
        self._page_path = folder / "page"
        self._page = open_page(self._page_path)
        self._disk = mounted(self._runs, _DISK_BYTES)
        if self._disk:
            stack.callback(subprocess.run, ["umount", "-l", str(self._runs)], check=False, capture_output=True)
        self._cluster: LinkedCluster | None = None
        if self._hosts:
            ends = stack.enter_context(lossy_link(0.0, 0.0))
            paths = os.pathsep.join(map(str, (SUPPORT.parents[1], SUPPORT)))
            self._cluster = stack.enter_context(cluster_over(ends, _HEALTH | {"PYTHONPATH": paths}))
        self._checker = Checker((_MARK, self._name), self._cluster.keep if self._cluster is not None else lambda: None)
        self._run: AttachedRun | None = None
        self._pending: dict[str, _Pending] = {}
        self._dead: set[int] = set()
        self._refused = 0

    def _begin(self) -> None:
        again = (self._runs / self._name).exists()
        arguments = ["--import", "fault_envs", "--seconds", "0", "--resume", self._name] if again else _COMMAND
        before: list[str] = []
        if self._cluster is not None:
            arguments = [*arguments, "--cluster", self._cluster.address, "--host-samplers", "1"]
            before = self._cluster.ends.command(0)
        paths = [str(SUPPORT / "injected"), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        saved = _newest_updates(self._runs / self._name) if again else 0
        self._run = AttachedRun(arguments, str(self._runs), self._name, self._ray() | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(self._scratch), _MARK: self._name,
            VARIABLE: str(self._page_path), "SPREEZE_TEST_CHECKSUM": "1",
        }, before=before, program=FORGIVING)  # fmt: skip
        self._run.attach()
        ring = self._run.ring
        self._run.wait(lambda: ring.rows_drawn > 0, LIMIT_S, "the first update")
        self._checker.begin(self._run)
        self._dead, self._refused = set(), 0
        self._checker.see_progress()
        updates = self._run.status.named_slots(self._run.rows["learner"], "learner")["updates"]
        if updates < saved:
            self._checker.found("counters never fall", f"updates {updates:.0f} after a checkpoint of {saved}")

    def _ray(self) -> dict[str, str]:
        """Variables with which a process joins the cluster."""
        joins = self._cluster.environment if self._cluster is not None else {}
        return {key: value for key, value in joins.items() if key.startswith("RAY_")}

    def _calm(self, seconds: float) -> None:
        """Looks for so long, and ends each fault that is over."""
        end_s = time.monotonic() + seconds
        while True:
            self._checker.look()
            self._end_what_is_over()
            if time.monotonic() >= end_s:
                return
            time.sleep(0.05)

    def _end_what_is_over(self) -> None:
        run, now_s = self._run, time.monotonic()
        assert run is not None
        for place, fault in list(self._pending.items()):
            over = fault.over()
            if not over and now_s - fault.since_s > LIMIT_S:
                self._checker.found(TOLD, f"nothing of {fault.what}: {run.output()[-1500:]}")
                over = True
            if over:
                self._pending.pop(place).end()

    def _throw(self, fault: Fault, report: Report) -> None:
        for one in fault.both or (fault,):
            self._settle("" if one.kind == "power" else _place(one))
        for one in fault.both or (fault,):
            getattr(self, f"_{one.kind}")(one)
            report.thrown[one.kind] += 1
        report.thrown["two"] += bool(fault.both)

    def _settle(self, place: str = "") -> None:
        """Until the fault at that place, or each one, is told and over."""
        run = self._run
        while run is not None and run.process.poll() is None and (place in self._pending if place else self._pending):
            self._calm(0.0)
            time.sleep(0.05)

    def _heal(self, *, written: bool = False) -> None:
        """Until all faults are told and over, and the run is whole again."""
        if self._run is not None:
            self._settle()
            self._end_pending()
            self._checker.see_progress(written=written)

    def _end_pending(self) -> None:
        for fault in self._pending.values():
            fault.end()
        self._pending.clear()

    def _stop_run(self) -> None:
        if self._run is None:
            return
        self._heal(written=True)
        self._checker.see_end(self._run.stop(), len(self._dead), self._refused)
        if left := list(self._scratch.iterdir()):
            self._checker.found("nothing is left over", f"scratch files {left}")
        self._leave()

    def _leave(self) -> None:
        if self._run is not None:
            self._run.__exit__()
            self._run = None
        for pid in marked(_MARK, self._name):
            _send(pid, signal.SIGKILL)

    def _pid(self, name: str) -> int:
        run = self._run
        assert run is not None
        if name == "supervisor":
            return run.process.pid
        end_s = time.monotonic() + LIMIT_S
        while (pid := run.workers().get(name)) is None:
            if time.monotonic() > end_s or run.process.poll() is not None:
                raise SpreezeError(f"waited in vain for {name} to be back: {run.last_output()}")
            self._calm(0.05)
        return pid

    def _aim(self, name: str) -> tuple[int, Callable[[], bool]]:
        """Id of a worker, and a condition: its end is told from now on."""
        while True:
            pid, told = self._pid(name), self._says(f"{name} {ENDED}")
            if self._pid(name) == pid:  # else it ended, and was told of, in between
                return pid, told

    def _says(self, pattern: str) -> Callable[[], bool]:
        """A condition: the run's output tells this, from now on."""
        run = self._run
        assert run is not None
        since = len(run.output())
        return lambda: re.search(pattern, run.output()[since:]) is not None

    # Each kind of fault.

    def _kill(self, fault: Fault) -> None:
        pid, told = self._aim(fault.victim)
        _send(pid, signal.SIGKILL)
        self._dead.add(pid)
        self._pending[_place(fault)] = _Pending(f"a kill of {fault.victim}", told)

    def _stop(self, fault: Fault) -> None:
        """Stopped beyond the deadline of a step a sampler is replaced; all others go on."""
        run, (pid, told) = self._run, self._aim(fault.victim)
        assert run is not None
        end_s = time.monotonic() + 0.2 + 2.0 * fault.size
        _send(pid, signal.SIGSTOP)
        with contextlib.suppress(psutil.Error):
            while psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING):
                time.sleep(0.001)  # its phase is the last one only then
        steps = (
            fault.victim in _SAMPLERS and run.status.control(run.rows[fault.victim])[status_table.PHASE] == Phase.STEP
        )
        long = steps and fault.size > 0.5
        if long:
            self._dead.add(pid)

        over = told if long else lambda: time.monotonic() > end_s
        what = f"a stop of {fault.victim}"
        self._pending[_place(fault)] = _Pending(what, over, lambda: _send(pid, signal.SIGCONT))

    def _disk_full(self, fault: Fault) -> None:
        told = self._says("publishing weights failed|writing the checkpoint failed")
        if self._disk and fault.size < 0.5:
            filler = fill(self._runs)
            self._pending["disk_full"] = _Pending(
                "a full disk",
                lambda: told() or fill(self._runs) is None,  # what was removed meanwhile has left room
                filler.unlink,
            )
            return
        most_bytes = int(500 * fault.size)
        self._pending["disk_full"] = _Pending(
            "files that cannot grow",
            lambda: told() or self._limit_files(most_bytes),  # workers that have begun meanwhile, too
            lambda: self._limit_files(resource.RLIM_INFINITY),
        )

    def _limit_files(self, size_bytes: int) -> None:
        """Longest file that a worker can write; not the supervisor, whose output is a file, too."""
        for pid in self._run.workers().values() if self._run else ():
            with contextlib.suppress(psutil.Error, OSError):
                psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def _clock(self, fault: Fault) -> None:
        """A step of a day at most, forwards or backwards."""
        self._page[CLOCK_S] = (2.0 * fault.size - 1.0) * 86_400.0

    def _memory(self, fault: Fault) -> None:
        pid, told = self._aim(fault.victim)
        if fault.victim in _SAMPLERS:
            self._page[LEAK_PID] = pid
            self._dead.add(pid)
            self._pending["memory"] = _Pending(f"{fault.victim} above its limit of memory", told, self._zero(LEAK_PID))
            return
        end_s = time.monotonic() + 0.5 + fault.size

        def limit(more_bytes: int | None) -> None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                most = resource.RLIM_INFINITY if more_bytes is None else process.memory_info().vms + more_bytes
                process.rlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

        limit(2**20)
        self._pending["memory"] = _Pending(
            f"no memory for {fault.victim}", lambda: time.monotonic() > end_s, lambda: limit(None)
        )

    def _slow_disk(self, fault: Fault) -> None:
        self._page[SLOW_S] = 0.5 * fault.size
        end_s = time.monotonic() + 1.0 + 2.0 * fault.size
        self._pending["slow_disk"] = _Pending("a slow disk", lambda: time.monotonic() > end_s, self._zero(SLOW_S))

    def _zero(self, place: int) -> Callable[[], None]:
        return lambda: self._page.__setitem__(place, 0.0)

    def _power(self, fault: Fault) -> None:
        """Every process is gone at once, and what was not synced; the next session goes on from what is left."""
        run = self._run
        assert run is not None
        for pid in (*marked(_MARK, self._name), run.process.pid):
            _send(pid, signal.SIGKILL)
        run.process.wait()
        self._checker.see_nothing_left()
        self._leave()
        lost = lose_unsynced(run.path, synced_files(self._page_path), random.Random(fault.size))
        self._say(f"   lost: {' '.join(lost)}")
        shutil.rmtree(self._scratch)
        self._scratch.mkdir()

    def _nan(self, fault: Fault) -> None:
        run, pid = self._run, self._pid(fault.victim)
        assert run is not None
        row = run.rows[fault.victim]

        def refused() -> float:
            return run.status.named_slots(row, "sampler")["transitions_rejected"]

        before = refused()
        self._page[NAN_PID] = pid

        def over() -> bool:
            return refused() > before or int(run.status.control(row)[status_table.PID]) != pid

        def end() -> None:
            self._page[NAN_PID] = 0
            self._refused += refused() > before

        self._pending["nan"] = _Pending(f"NaN in {fault.victim}", over, end)

    def _hang(self, fault: Fault) -> None:
        pid, told = self._aim(fault.victim)
        self._page[HANG_PID] = pid
        self._dead.add(pid)
        self._pending["hang"] = _Pending(f"a hang of {fault.victim}", told, self._zero(HANG_PID))

    def _partition(self, fault: Fault) -> None:
        """No packet passes until the host is missed, or until Ray counts it as dead and its node starts again."""
        cluster, dies = self._cluster, fault.size > 0.7
        assert cluster is not None
        missed, back = self._says(r"host-0 .*died" if dies else r"host-0 .*(silent|not available|died)"), None

        def over() -> bool:
            nonlocal back
            if back is None and missed():
                back, pending.since_s = self._says("host-0 .*(joins|is back)"), time.monotonic()
                cluster.cut(False)
                if dies:
                    cluster.start(1)
            return back is not None and back()

        cluster.cut()
        pending = self._pending["partition"] = _Pending("a partition of a host", over, lambda: cluster.cut(False))

    def _corrupt(self, fault: Fault) -> None:
        """Damages a file in place; with a damaged checkpoint the learner dies, whose successor has to see it."""
        run, dice = self._run, random.Random(fault.size)
        assert run is not None
        if fault.victim == "checkpoint":
            self._corrupt_checkpoint(dice)
            return
        if fault.victim == "weights":
            paths = sorted((run.path / "weights").glob("w-*.safetensors"))
            path = paths[-1] if paths else run.path / "weights" / "LATEST.json"
        else:
            path = run.path / ("weights" if fault.victim == "LATEST.json" else "") / fault.victim
        _damage(path, dice)

    def _corrupt_checkpoint(self, dice: random.Random) -> None:
        run, pid = self._run, self._pid("learner")
        assert run is not None
        _send(pid, signal.SIGSTOP)
        whole = [
            path for path in CheckpointStore(run.path / "checkpoints").paths() if path not in self._checker.spoiled
        ]
        if len(whole) >= 2:
            self._checker.look()
            self._checker.spoiled.add(whole[-1])
            _damage(dice.choice(sorted(whole[-1].iterdir())), dice, always=True)
            told = self._says("checkpoint ignored: " + re.escape(whole[-1].name))
            self._pending["corrupt checkpoint"] = _Pending(f"a damaged {whole[-1].name}", told)
            self._dead.add(pid)
            _send(pid, signal.SIGKILL)
        else:
            _send(pid, signal.SIGCONT)


def _place(fault: Fault) -> str:
    """What one fault at a time can have: a worker to kill or to stop, else its kind."""
    return f"{fault.kind} {fault.victim}" if fault.kind in ("kill", "stop", "corrupt", "clock") else fault.kind


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _damage(path: Path, dice: random.Random, *, always: bool = False) -> None:
    """Cuts a file short, or flips one bit of a random byte."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if dice.random() < 0.5 or size == 0:
            file.truncate(dice.randrange(size) if size else 0)
            return
        file.seek(dice.randrange(size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ (1 << dice.randrange(8))]))


def _newest_updates(run: Path) -> int:
    """Updates of the newest checkpoint that verifies, which a resume goes on from; 0 without one."""
    for path in reversed(CheckpointStore(run / "checkpoints").paths()):
        with contextlib.suppress(CheckpointError):
            return load(path).updates
    return 0
