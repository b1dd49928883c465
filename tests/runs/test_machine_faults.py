"""Faults of the machine in real runs: stopped processes, leaks, full disks, limits, closed pipes."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import FAULT, PATIENCE_S, REPO, TINY, Run, fill, poll, small_disk, train

from spreeze.files import tail_text
from spreeze.machine.processes import marked_processes
from spreeze.run_directory import read_run
from spreeze.transport.checkpoint import CheckpointStore


def _gone(process):
    with contextlib.suppress(psutil.Error):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def test_f03_a_stopped_sampler_is_killed_before_its_shard_is_given_away(tmp_path):
    with Run(tmp_path, *FAULT, "--no-evaluator", "--set", "sampling.step_deadline_s=3", faults={"step_s": 0.01}) as run:
        run.until_updates(20)
        old = run.children()["sampler-0"]
        old.send_signal(signal.SIGSTOP)
        run.wait_for(lambda: run.numbers().get("restarts", 0) >= 1, what="a restart")
        assert _gone(old), "the old writer can never write again"
        assert any("silent for" in event and "in phase STEP" in event for event in run.events())
        run.until_progress()
        run.process.kill()


def test_f10_a_worker_that_leaks_is_started_anew_and_a_sampler_is_offered_to_the_oom_killer_first(tmp_path):
    limit = ("--set", "sampling.memory_limit_bytes=150000000")
    with Run(tmp_path, *FAULT, *limit, faults={"leak_bytes": 500_000, "workers": "sampler-0,evaluator"}) as run:
        run.wait_for(lambda: "learner" in run.children() and "sampler-0" in run.children(), what="workers")

        def score(name):
            with contextlib.suppress(OSError, KeyError):
                return int(Path(f"/proc/{run.children()[name].pid}/oom_score_adj").read_text())
            return None

        run.wait_for(lambda: score("sampler-0") == 500 and score("learner") == 0, what="the scores")
        for name in ("sampler-0", "evaluator"):
            run.wait_for(
                lambda name=name: any(
                    f"{name} terminated: it used" in event and "limit of 143.1 MiB" in event for event in run.events()
                ),
                what=f"an end of {name}",
            )
        run.process.kill()


@pytest.mark.parametrize("mode", ["spreeze", pytest.param("serial", marks=pytest.mark.slow)])
def test_f11_f38_what_an_environment_started_ends_with_a_killed_supervisor(tmp_path, mode):
    with Run(tmp_path, *FAULT, "--mode", mode, faults={"grandchildren": 3}) as run:

        def helpers():
            return [
                process
                for process in marked_processes(str(read_run(run.path).get("nonce")))
                if process.name() == "sleep"
            ]

        run.wait_for(lambda: len(helpers()) >= 9, what="grandchildren")
        run.wait_for(lambda: mode == "serial" or len(run.children()) == 3, what="three workers")
        found = helpers()
        assert any(not process.environ() for process in found), "some have no variable left that could mark them"
        run.process.kill()
        run.process.wait()
        poll(lambda: run.nonce_processes() == [] and all(_gone(process) for process in found), what=run.nonce_processes)


def test_f28_a_full_disk_keeps_the_old_checkpoint_and_the_run_goes_on(tmp_path):
    with Run(tmp_path, *FAULT, "--no-evaluator", "--set", "learner.checkpoint_interval_s=0.5") as run:
        store = CheckpointStore(run.path / "checkpoints")
        run.wait_for(store.paths, what="a first checkpoint")
        learner = psutil.Process(run.children()["learner"].pid)
        learner.rlimit(resource.RLIMIT_FSIZE, (500, -1))  # from here on no longer file can be written
        run.wait_for(
            lambda: any("writing the checkpoint failed; the previous one is kept" in e for e in run.events()),
            what="alarm",
        )
        kept = store.load_latest()
        assert kept is not None
        run.until_progress()
        learner.rlimit(resource.RLIMIT_FSIZE, (-1, -1))
        run.wait_for(lambda: store.load_latest().updates > kept.updates, what="another checkpoint")
        assert run.numbers()["restarts"] == 0
        run.process.kill()


@pytest.mark.slow
def test_f28_a_full_disk_at_the_start_of_a_session_leaves_the_settings_of_the_one_before(tmp_path):
    def resumed(*args, room_bytes=resource.RLIM_INFINITY):
        command = [sys.executable, "-m", "spreeze.train", "--resume", "run", "--runs-dir", str(tmp_path / "runs"),
                   *args]  # fmt: skip
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=REPO, check=False,
            timeout=PATIENCE_S,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY)),
        )  # fmt: skip

    run, code, _ = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "20")
    assert code == 0
    settings = (run.path / "config.toml").read_bytes()
    room_bytes = max((run.path / name).stat().st_size for name in ("run.json", "env.json")) + 200
    assert room_bytes < len(settings), "all that is written before fits"
    refused = resumed("--updates", "25", room_bytes=room_bytes)
    assert refused.returncode == 2, refused.stderr[-2000:]
    assert "cannot be written" in refused.stderr
    assert (run.path / "config.toml").read_bytes() == settings
    assert not [path.name for path in run.path.iterdir() if "tmp" in path.name]
    assert resumed("--updates", "30").returncode == 0
    assert read_run(run.path)["updates"] == 30


@pytest.mark.usefixtures("nothing_known")  # the lock of a tuner beside this test would hold it up
def test_f36_ctrl_c_while_tuning_ends_all_children_without_a_traceback(tmp_path):
    with Run(tmp_path, *FAULT, "--algo", "sac", "--auto", "--fresh", "--tune-first", tiny=("--no-visualizer",)) as run:
        run.wait_for(lambda: read_run(run.path).get("state") == "tuning" and psutil.Process(
            run.process.pid).children(recursive=True), what="the tuner's children")  # fmt: skip
        children = psutil.Process(run.process.pid).children(recursive=True)
        run.interrupt()
        poll(lambda: run.process.poll() is not None, what="the end")
        assert run.process.returncode == 130, run.stderr
        poll(lambda: all(_gone(child) for child in children), what="no child")
        assert "Traceback" not in run.stderr


def test_f45_too_few_open_files_are_a_clear_error_and_nothing_is_left(tmp_path):
    command = [sys.executable, "-m", "spreeze.train", *TINY, *FAULT, "--samplers", "12", "--name", "run",
               "--runs-dir", str(tmp_path / "runs")]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=REPO, timeout=PATIENCE_S, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (22, 22)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    assert "could not be started" in done.stderr
    assert "ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_run(tmp_path / "runs" / "run")["state"] == "failed"


def test_f47_a_reader_that_goes_away_and_a_full_log_disk_end_no_run(tmp_path):
    command = [sys.executable, "-m", "spreeze.train", *TINY, *FAULT, "--updates", "60", "--name", "run",
               "--runs-dir", str(tmp_path / "runs")]  # fmt: skip
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=write_fd, stderr=full, cwd=REPO,
                              timeout=PATIENCE_S, check=False)  # fmt: skip
    os.close(write_fd)
    assert done.returncode == 0
    run = read_run(tmp_path / "runs" / "run")
    assert (run["state"], run["updates"]) == ("finished", 60)


@pytest.mark.slow
def test_f47_an_environment_that_prints_trains_on_a_full_disk(tmp_path):
    """Its logs are on that disk; what is reported meanwhile goes to standard error, which is on another."""
    with small_disk(tmp_path / "runs", 300_000_000) as disk, Run(
        tmp_path, *FAULT, faults={"chatter_bytes": 200},
    ) as run:  # fmt: skip
        run.until_updates(20)
        log = run.path / "logs" / "sampler-0.log"
        run.wait_for(lambda: re.search(r"^\.+step \d+$", tail_text(log), re.M), what="prints in the log")
        filler = fill(disk)
        run.wait_for(
            lambda: "publishing weights failed 10 times in a row" in run.stderr, what="a full disk for a while"
        )
        assert run.stderr.count("publishing weights failed") == 2, "the first and the tenth time"
        filler.unlink()
        run.until_progress()
        run.wait_for(lambda: "bytes of output are missing here" in tail_text(log) or log.stat().st_size > 200_000,
                     what="prints in the log")  # fmt: skip
        assert run.numbers()["restarts"] == 0
        assert run.numbers()["env_errors"] == 0
        run.process.kill()
        run.process.wait()
        poll(lambda: [*marked_processes(read_run(run.path)["nonce"])] == [], what="the end of all that has files there")


def test_f51_there_is_no_remote_sampler_and_nothing_listens(tmp_path):
    with Run(tmp_path, *FAULT) as run:
        run.wait_for(lambda: len(run.children()) == 3, what="three workers")
        for process in [psutil.Process(run.process.pid), *run.children().values()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                assert process.net_connections() == []
        run.process.kill()


@pytest.mark.slow
def test_f53_stalls_change_no_bit_of_the_serial_mode(tmp_path):
    hashes = set()
    for name, faults in (("smooth", {}), ("stalling", {"p_stall": 0.05, "stall_s": 0.02, "seed": 3})):
        _, code, document = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "60", name=name, faults=faults)
        assert code == 0
        hashes.add(document["parameters_sha256"])
    assert len(hashes) == 1
