"""Real runs of ``python -m spreeze.train`` for tests: start, watch from outside, kill by role, read the result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import warm

from spreeze.machine.processes import marked_processes
from spreeze.metrics.store import MetricsReader
from spreeze.runtime.rates import Rates
from spreeze.transport.shared_memory import inherited_fds
from spreeze.workers.roles import role_of

REPO = Path(__file__).resolve().parents[2]
SUPPORT = REPO / "tests" / "support"
"""Modules of tests that a process imports: environments, helpers."""
PATIENCE_S = 240.0
"""Timeout of every wait; only a hang reaches it."""
NOBODY = 2**22 + 1
"""A process id above all that Linux gives."""
QUICK = "SPREEZE_QUICK_TESTS" in os.environ
"""Runs learn with networks and batches of next to nothing, as if the machine were several times as fast."""
BATCH_SIZE = 2 if QUICK else 32
HIDDEN_SIZES = "[2]" if QUICK else "[32,32]"
_YOUNG_S = 0.1
"""Within this time of a write a file may be written to again without a change of its time, or be half written."""
TINY = (
    "--samplers", "1", "--envs-per-sampler", "4", "--batch-size", str(BATCH_SIZE), "--replay-capacity", "20000",
    "--set", f"sac.hidden_sizes={HIDDEN_SIZES}", "--set", "replay.learning_starts=200",
    "--set", "evaluation.episodes=2",
    "--no-visualizer",
    "--no-governor",  # what else the machine does is not part of a test
)  # fmt: skip
WARMUP_S = Rates.warmup_s
"""What a summary leaves out of its rates after the first update."""
TRAIN = ("-m", "spreeze.train")
FINGERPRINTED = (str(SUPPORT / "fingerprinted_train.py"),)
"""The same, whose learners of rollouts write ``fingerprints.jsonl``."""
FAULT = ("--env", "spreeze/Fault-v0", "--import", "fault_envs")
PENDULUM = ("--env", "Pendulum-v1")


def poll(condition, timeout_s=PATIENCE_S, what="it"):
    """The first true value of ``condition``; an AssertionError after the deadline."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what() if callable(what) else what}"
        time.sleep(0.02)
    return value


def shared_memory():
    """Names in shared memory, but for those of multiprocessing and of Ray: neighbours' ones, Spreeze makes none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "plasma"))}


def descendants():
    """psutil processes that this one has started, and theirs; the nursery is none of them."""
    nursery = warm.FIRST.process
    return [one for one in psutil.Process().children(recursive=True) if nursery is None or one.pid != nursery.pid]


_ENDS = ("--seconds", "--env-steps", "--updates", "--target-return", "stop.", "--help")


class Run:
    """One training process, with its output in files beside its runs directory."""

    def __init__(self, tmp_path, *args, name="run", tiny=TINY, faults=None, program=TRAIN, messages=None):
        """Starts the process; ``messages``: handle of the memory for gossip with learners of other hosts."""
        self.runs_dir = tmp_path / "runs"
        self.path = self.runs_dir / name
        self._out, self._err = tmp_path / f"{name}.out", tmp_path / f"{name}.err"
        command = [sys.executable, *program, *tiny, "--runs-dir", str(self.runs_dir), "--json", *args]
        if "--resume" in args and "--import" not in args and self._imports_ours():
            command += FAULT[2:]
        if not {"--resume", "--name"} & set(args):
            command += ["--name", name]
        if program in (TRAIN, FINGERPRINTED) and not any(str(word).startswith(_ENDS) for word in args):
            command += ["--seconds", "0"]  # it goes on until the test ends it, whatever it has learned
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SPREEZE_")}
        environment |= {f"SPREEZE_FAULT_{key.upper()}": str(value) for key, value in (faults or {}).items()}
        environment |= {} if messages is None else messages.environment
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=REPO, env=environment,
                start_new_session=True, pass_fds=inherited_fds(messages),
            )  # fmt: skip
        self._seen = {}
        self._numbers, self._numbers_of = {}, None

    def _imports_ours(self):
        """True if a run here was told to import our environments, which a resume has to be told again."""
        configs = self.runs_dir.glob("*/config.toml")
        return any('import_module = "fault_envs"' in config.read_text() for config in configs)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.children()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid, created in self._seen.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created:
                    process.kill()

    @property
    def stdout(self):
        return self._out.read_text()

    @property
    def stderr(self):
        return self._err.read_text()

    def children(self):
        """Name -> psutil process of the living workers, found by the name that they take with their job."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self._seen[child.pid] = child.create_time()
                    living = child.ppid() == self.process.pid and child.status() != psutil.STATUS_ZOMBIE
                    if living and role_of(child.name()):
                        found[child.name()] = child
        return found

    def wait_for(self, condition, timeout_s=PATIENCE_S, what=None):
        """Polls a condition while the run goes on."""

        def alive_and_true():
            value = condition()
            assert value or self.process.poll() is None, f"the run ended: {self.stdout[-2000:]} {self.stderr[-3000:]}"
            return value

        return poll(alive_and_true, timeout_s, lambda: f"{what}; {self.numbers()}; {self.stderr[-3000:]}")

    def numbers(self):
        """Newest value of every metric, from ``metrics.db``: read again only where it may have been written to."""
        written = self._written()  # before it is read: what is written meanwhile is read next time
        if written is None or written != self._numbers_of:
            latest = MetricsReader(self.path / "metrics.db").latest()
            self._numbers, self._numbers_of = {name: point.value for name, point in latest.items()}, written
        return dict(self._numbers)

    def _written(self):
        """Time and size of ``metrics.db`` and of its log; None where another write might leave them as they are."""
        if self.process.poll() is not None:
            return None
        found = []
        for name in ("metrics.db", "metrics.db-wal"):
            try:
                status = (self.path / name).stat()
            except FileNotFoundError:
                found.append(None)
                continue
            if time.time() - status.st_mtime < _YOUNG_S:
                return None
            found.append((status.st_mtime_ns, status.st_size))
        return found

    def events(self):
        """Texts of all events, from ``metrics.db``."""
        return [f"{event.source}: {event.text}" for event in MetricsReader(self.path / "metrics.db").events(1000)]

    def until_updates(self, count, timeout_s=PATIENCE_S):
        """Waits until at least so many updates were taken; returns all numbers."""

        def enough():
            numbers = self.numbers()
            return numbers if numbers.get("updates", 0) >= count else None

        return self.wait_for(enough, timeout_s, f"{count} updates")

    def until_progress(self, timeout_s=PATIENCE_S):
        """Waits until env steps and updates have risen from what they are now."""
        before = self.numbers()
        return self.wait_for(
            lambda: all(self.numbers().get(name, 0) > before.get(name, 0) for name in ("env_steps", "updates")),
            timeout_s, f"env steps and updates above {before}",
        )  # fmt: skip

    def until_rates(self):
        """Waits until the run has gone on long enough for its summary to know rates."""

        def known():
            series = MetricsReader(self.path / "metrics.db").series("updates")
            learning = [t for t, value in zip(series.t, series.mean, strict=True) if value > 0]
            # One sample ends the warm-up; the last one of a run is taken when it no longer counts.
            return sum(t > learning[0] + 1.5 * WARMUP_S for t in learning) >= 3

        self.wait_for(known, what="samples after the warm-up")

    def version(self):
        """(epoch, version) that the weights' pointer names."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            pointer = json.loads((self.path / "weights" / "LATEST.json").read_text())
            return pointer["epoch"], pointer["version"]
        return 0, 0

    def interrupt(self):
        """Ctrl-C: SIGINT to the whole foreground group, as a terminal sends it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def stop(self):
        """Ctrl-C, and the end that follows: the exit code and the one JSON document."""
        self.interrupt()
        return self.end()

    def end(self, timeout_s=PATIENCE_S):
        """Waits for the end; returns the exit code and the one JSON document."""
        poll(lambda: self.process.poll() is not None, timeout_s, lambda: f"the end of the run; {self.stderr[-3000:]}")
        return self.process.returncode, json.loads(self.stdout) if self.stdout.strip() else None

    def state(self):
        """``run.json``."""
        return json.loads((self.path / "run.json").read_text())

    def nonce_processes(self):
        """Living processes that carry this run's mark, grandchildren included."""
        return list(marked_processes(self.state()["nonce"]))


def train(tmp_path, *args, timeout_s=PATIENCE_S, **kwargs):
    """Runs to the end; returns the run, its exit code and its document.

    Use ``train_until`` for a run that must continue until a condition holds.
    """
    with Run(tmp_path, *args, **kwargs) as run:
        code, document = run.end(timeout_s)
    return run, code, document


def train_until(tmp_path, seen, *args, **kwargs):
    """Trains until ``seen(run)`` is true, then Ctrl-C; returns the run, its exit code and its document."""
    with Run(tmp_path, *args, **kwargs) as run:
        run.wait_for(lambda: seen(run), what="what the test has to see")
        code, document = run.stop()
    return run, code, document


def refused(capsys, tmp_path, *args):
    """The document of a start that is refused, and what it says on standard error; all in this process."""
    from spreeze.__main__ import main

    code = main(["train", *map(str, args), "--runs-dir", str(tmp_path / "runs"), "--json"])
    told = capsys.readouterr()
    assert code == 2, told
    assert "Traceback" not in told.err
    document = json.loads(told.out)
    assert list(document) == ["error", "kind"]
    assert told.err.splitlines()[-1] == f"error: {document['error']}"
    return document, told.err


def run_command(name, *args, timeout_s=PATIENCE_S):
    """``python -m spreeze.<name>``: the completed process, output as text."""
    command = [sys.executable, "-m", "spreeze", name, *map(str, args)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=REPO, timeout=timeout_s, check=False
    )


def race(work, count=4):
    """Runs ``work`` in so many threads at once, which change places as often as possible, and waits for their end."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval_s)


def mounted(folder, size_bytes):
    """Mounts a disk of that size at a folder; False where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    return False


@contextlib.contextmanager
def small_disk(folder, size_bytes):
    """Mounts a disk of that size at a folder, or skips the test; it ends with all that uses it."""
    if not mounted(folder, size_bytes):
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        poll(
            lambda: subprocess.run(["umount", str(folder)], check=False, capture_output=True).returncode == 0,
            what="the disk to be free",
        )


def fill(folder):
    """Leaves no byte on a small disk, again if it is called again; returns the file that does."""
    path, piece = folder / "filler", 2**20
    with open(path, "ab", buffering=0) as file:
        while piece:
            try:
                file.write(bytes(piece))
            except OSError:
                piece //= 2
    return path


class NoView:
    """A run that nobody looks at."""

    def update(self, snapshot):
        """Nothing."""

    def note(self, text):
        """Nothing."""
