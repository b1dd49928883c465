"""Every test is followed by a leak check: shared memory, processes, file descriptors."""

import contextlib
import gc
import glob
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Where a machine switches this off, each of some thousand processes compiles what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
import warm  # noqa: E402 - it keeps the variables that it finds

_SUPPORT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "support")
# Runs that tests start import environments of that folder, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SUPPORT, os.environ.get("PYTHONPATH"))))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
# Its own deadline of 0.2 s an example would judge the machine.
_EXAMPLES = 400 if "SPREEZE_LONG_TESTS" in os.environ else 40
settings.register_profile(
    "any machine", deadline=None, max_examples=_EXAMPLES, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
_PATIENCE_S = 60.0
"""For what is just about to end, on any machine."""
_HAS_SHM = os.path.isdir("/dev/shm")
if sys.platform == "linux" and "SPREEZE_COLD_TESTS" not in os.environ and not os.path.exists("/dev/nvidiactl"):
    warm.install(warm.FIRST)


def pytest_xdist_auto_num_workers(config):
    """One more than cores, because tests of processes wait a fifth of their time; at most four."""
    return max(2, min(4, len(os.sched_getaffinity(0)) + 1))


def pytest_configure(config):
    """Slow tests are run, too, where all tests are named one by one or long forms are asked for."""
    wanted = "SPREEZE_LONG_TESTS" in os.environ or all("::" in argument for argument in config.args)
    if wanted and config.option.markexpr == "not slow":
        config.option.markexpr = ""


def _is_warm(node) -> bool:
    """True for tests whose processes start warm: those in ``tests/runs`` and those marked so, unless marked cold."""
    marks = {mark.name for mark in node.iter_markers()}
    return "cold" not in marks and ("warm" in marks or node.path.parent.name == "runs")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leaves modules and collected tests, some million objects, out of every collection of garbage."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Tests with warm starts come first: the nursery begins once, and the longest tests are not the last ones."""
    items.sort(key=lambda item: not _is_warm(item))


def pytest_unconfigure():
    """Ends the nursery where the last test had warm starts."""
    warm.FIRST.close()


def pytest_runtest_setup(item):
    """Decides how processes start, also for fixtures of the module; skips what needs more CUDA devices than there are.

    Processes of Spreeze start warm in ``tests/runs`` and in tests marked ``warm``, but in those marked ``cold``. A mark
    ``gpu`` needs one CUDA device, ``gpu(2)`` two.
    """
    warm.FIRST.wanted = _is_warm(item)
    if not (warm.FIRST.wanted or item.path.parent.name == "runs"):
        warm.FIRST.close()  # to tests of processes it is one too many
    marks = [mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")]
    if marks:
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < max(marks):
            pytest.skip(f"needs {max(marks)} CUDA device(s); torch finds {found} here")


def _shared_memory() -> set[str]:
    """Names in shared memory, but for multiprocessing's semaphores: a neighbour's, Spreeze makes none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} if _HAS_SHM else set()


def _children() -> set[int]:
    """Processes that this one has started, and all that those have: psutil reads the whole machine's for that."""
    found: set[int] = set()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return found  # no child, told by one call
    nursery = set() if warm.FIRST.process is None else {warm.FIRST.process.pid}
    left = [os.getpid()]
    while left:
        if _is_browser(pid := left.pop()):
            continue  # it has processes of its own, which come and go
        for path in glob.iglob(f"/proc/{pid}/task/*/children"):
            with contextlib.suppress(OSError), open(path) as file:
                left += {int(pid) for pid in file.read().split()} - found - nursery
        found.update(left)
    return found


def _is_browser(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "chromedriver"
    except OSError:
        return False


def _described(pid: int) -> str:
    """The process with its state, parent and command."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} ({state}, child of {parent}) {command}"


def _descriptors() -> set[str]:
    """Open descriptors that could leak: memory files, pipes and files of a run."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(("/memfd:spreeze", "pipe:", "anon_inode:[pidfd]")) or "/runs/" in target:
            found.add(f"{fd} -> {target}")
    return found


@pytest.fixture
def warm_starts():
    """The nursery of this session of tests."""
    return warm.FIRST


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fails a test that leaves shared memory, processes or descriptors behind."""
    before = _shared_memory(), _children(), _descriptors()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        left = (_shared_memory() - before[0], _children() - before[1], _descriptors() - before[2])
        if not any(left):
            return
        if time.monotonic() > deadline:
            processes = [_described(pid) for pid in left[1]]
            pytest.fail(f"left behind: shared memory {left[0]}, processes {processes}, descriptors {left[2]}")
        time.sleep(0.005)  # what ends has the core


@pytest.fixture
def nothing_known(tmp_path, monkeypatch):
    """No earlier results of the tuner, and no other tuner to wait for."""
    for name in ("TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
