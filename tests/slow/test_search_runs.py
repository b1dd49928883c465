"""A search with real runs: two commands share its trials, a killed one's are done again, and its profile trains."""

import json
import os
import signal
import subprocess
import sys

from harness import PATIENCE_S, poll

from spreeze.cli.sweep_runs import read_sweep

COMMON = (
    "--env", "Pendulum-v1", "--algo", "sac", "--mode", "serial", "--profile", "none",
    "--set", "replay.learning_starts=200", "--set", "sac.hidden_sizes=[16]", "--set", "evaluation.episodes=1",
    "--set", "learner.batch_size=16", "--set", "stop.updates=60", "--set", "sac.actor_lr", "--set", "sac.gamma",
)  # fmt: skip


def _sweep(tmp_path, *flags):
    command = [sys.executable, "-m", "spreeze", "sweep", *flags, "--runs-dir", str(tmp_path / "runs"), "--json"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_commands_share_a_search_and_what_a_killed_one_began_is_done_again(tmp_path):
    first = _sweep(tmp_path, "--search", "--trials", "4", "--name", "x", *COMMON)
    runs = tmp_path / "runs"
    poll(lambda: (runs / "x-t1-s1" / "run.json").is_file() or first.poll() is not None, what="its first run")
    second = _sweep(tmp_path, "--resume", "x")
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=PATIENCE_S)
    out, err = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, err.decode()
    found = json.loads(out)["search"]
    assert found["trials"] + found["pruned"] == 4
    ended = [run for run in read_sweep(runs, "x").runs if run.state in ("finished", "pruned")]
    assert len(ended) == 4
    assert len({run.setting for run in ended}) == 4
    settings = (runs / "x.toml").read_text()
    for text in found["best"]["setting"].split():
        name, _, value = text.partition(".")[2].partition("=")
        assert f"{name} = {float(value)!r}" in settings
    train = ("-m", "spreeze.train", "--env", "Pendulum-v1", "--profile", str(runs / "x.toml"), "--mode", "serial")
    command = [sys.executable, *train, "--updates", "5", "--runs-dir", str(tmp_path / "again"), "--json"]
    again = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
    assert again.returncode == 0, again.stderr.decode()
