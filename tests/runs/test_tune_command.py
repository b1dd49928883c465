"""``python -m spreeze tune`` as a process: ended at any point, it leaves nothing."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from harness import PATIENCE_S, REPO, poll

from spreeze.cli import tune
from spreeze.workers.roles import ROLES, role_of

PINNED = (
    "--env", "Pendulum-v1", "--samplers", "1", "--envs-per-sampler", "2", "--batch-size", "32",
    "--learner-threads", "1", "--samples-per-insert", "0:1000", "--replay-capacity", "20000",
    "--set", "sac.hidden_sizes=[32,32]",
)  # fmt: skip


@contextlib.contextmanager
def _tuner(folder, *more):
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
    with open(folder / "out.txt", "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "spreeze", "tune", *PINNED, *more], cwd=REPO, env=environment, stdout=out,
            stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _family(process):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def _is_learner(process):
    return role_of(process.name()) is ROLES["learner"]


def _is_probe(process):
    return "spreeze.tuner.update_probe" in process.cmdline()


def _at_work(process, is_one, folder):
    """The family of the tuner, once there is such a one."""

    def look():
        assert process.poll() is None, (folder / "out.txt").read_text()
        family = _family(process)
        with contextlib.suppress(psutil.Error):
            return family if any(map(is_one, family)) else None
        return None

    return poll(look, what=is_one.__name__)


def test_a_run_cannot_be_tuned_for(capsys):
    assert tune.main(["--resume", "latest"]) == 2
    assert "name it with --env" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "stage"), [
    (signal.SIGINT, _is_learner), (signal.SIGKILL, _is_learner),
    pytest.param(signal.SIGKILL, _is_probe, marks=pytest.mark.cold),
    pytest.param(signal.SIGINT, _is_probe, marks=[pytest.mark.cold, pytest.mark.slow]),
], ids=["ctrl-c-learner", "killed-learner", "killed-probe", "ctrl-c-probe"])  # fmt: skip
def test_a_tuner_that_is_ended_leaves_no_process_and_keeps_no_answer(tmp_path, number, stage):
    with _tuner(tmp_path) as process:
        family = _at_work(process, stage, tmp_path)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
            assert process.wait(PATIENCE_S) == 130
            assert "interrupted" in (tmp_path / "out.txt").read_text()
            assert [path.name for path in tmp_path.glob("spreeze-tune-*")] == []
        else:
            process.kill()
            process.wait()
        poll(lambda: not any(one.is_running() and one.status() != "zombie" for one in family), what=family)
    assert list((tmp_path / "cache" / "spreeze").glob("tune-*.json")) == []
