"""Runs with samplers on other hosts, which Ray nodes on this machine stand for: killed, back again, left alone."""

import importlib.util
import json
import subprocess
import sys

import pytest
from fault_envs import count_numbered
from harness import PATIENCE_S, REPO, Run, poll, refused
from ray_hosts import gone, ray_hosts

from spreeze.dashboard import live_api
from spreeze.transport.checkpoint import CheckpointStore, load_replay
from spreeze.transport.replay_ring import ReplayRing, RingSpec
from spreeze.types import RowLayout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[cluster]'"
)
NUMBERED = ("--env", "spreeze/Numbered-v0", "--import", "fault_envs", "--host-samplers", "1",
            "--set", "replay.samples_per_insert_min=0.5", "--set", "learner.checkpoint_interval_s=600",
            "--replay-capacity", "100000", "--env-arg", "sleep_s=0.001")  # fmt: skip


def saved_rows(run):
    """The rows [n, W] of the run's last checkpoint."""
    layout = RowLayout(obs_dim=3, action_dim=1)
    ring = ReplayRing.create(RingSpec(layout, 1, 200_000))
    try:
        count = load_replay(CheckpointStore(run.path / "checkpoints").load_latest().replay_path, ring)
        return ring.rows[:count].copy(), layout
    finally:
        ring.close()


def told(run, *words):
    return [text for text in run.events() if all(word in text for word in words)]


@pytest.mark.slow
def test_hosts_die_and_come_back_and_no_row_is_there_twice(tmp_path, monkeypatch):
    with ray_hosts(2) as hosts:
        for key, value in hosts.environment.items():
            monkeypatch.setenv(key, value)
        with Run(tmp_path, *NUMBERED, "--cluster", hosts.address, "--save-replay") as run:

            def chunks(host):
                return run.numbers().get(f"host_chunks/{host}", 0)

            run.wait_for(lambda: chunks(0) > 3 and chunks(1) > 3, what="chunks of both hosts")
            assert told(run, "joined the Ray cluster")
            assert {address.removeprefix("::ffff:") for address in hosts.listening()} <= {"127.0.0.1", "::1"}
            hosts.kill(1)
            run.wait_for(lambda: told(run, "died", "lost"), what="the death to be named")
            dead = 0 if told(run, "host-0", "died") else 1
            run.wait_for(lambda: run.numbers()["hosts_alive"] <= 1, what="one host less")
            before = chunks(1 - dead)
            run.until_progress()
            run.wait_for(lambda: chunks(1 - dead) > before + 3, what="chunks of the other host")
            hosts.ask("remove 1")
            hosts.ask("add")
            run.wait_for(lambda: run.numbers().get("hosts_alive") == 2, what="the host to be back")
            before = chunks(dead)
            run.wait_for(lambda: chunks(dead) > before + 3, what="chunks of the host that is back")
            # A gateway's process dies alone: Ray starts it again, and its rows begin a new epoch.
            first = hosts.gateways()[0]
            first.kill()
            poll(lambda: len(hosts.samplers()) == 2, what="samplers of a new gateway")
            run.until_progress()
            numbers = run.numbers()
            assert sum(numbers[f"host_chunks_lost/{host}"] for host in (0, 1)) > 0
            assert sum(numbers[f"host_rows_again/{host}"] for host in (0, 1)) == 0
            shown = live_api.live_response(run.path, 0.0, 0, "")
            assert [row[0] for row in shown["hosts"]] == ["host 0", "host 1"]
            assert "host_env_steps_per_s/1" in shown["series"]
            code, document = run.stop()
        assert (code, document["error"]) == (0, None)
        rows, layout = saved_rows(run)
        assert len(rows) > 1000
        assert count_numbered(rows, layout) == (0, 0), "(rows there twice, rows that no environment gave)"
        assert document["env_steps"] > document["env_steps_per_s"] > 0
        gone(hosts.samplers())
        # The driver dies: every host is clean.
        with Run(tmp_path, *NUMBERED, "--cluster", hosts.address, name="killed") as run:
            poll(lambda: len(hosts.samplers()) == 2, what="samplers on both hosts")
            left = [*hosts.samplers(), *hosts.gateways()]
            run.children()
            run.process.kill()
            run.process.wait()
            gone(left)


def test_a_run_with_simulated_hosts_learns_and_its_resume_leaves_them_out(tmp_path):
    with Run(tmp_path, "--env", "Pendulum-v1", "--cluster", "local:1", "--host-samplers", "1") as run:
        run.wait_for(lambda: run.numbers().get("host_chunks/0", 0) > 2, what="chunks of the host")
        run.until_progress()
        run.wait_for(lambda: run.numbers().get("host_weights_delay_s/0", 0) > 0, what="weights on the host")
        code, document = run.stop()
    assert (code, document["error"], document["restarts"]) == (0, None, 0)
    assert "1 host simulated on this machine" in run.stderr
    steps = json.loads((run.path / "run.json").read_text())["env_steps"]
    with Run(tmp_path, "--resume", "run", "--env-steps", str(int(steps) + 500)) as again:
        code, document = again.end()
    assert (code, document["env_steps"] > steps) == (0, True)
    assert "it used other hosts (--cluster local:1): pass that again" in again.stderr
    assert "host" not in "".join(again.children())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--cluster", "nonsense"), "expected HOST:PORT of a Ray cluster's head, auto, local or local:N"),
        (("--cluster", "127.0.0.1:9"), "no answer"),
        (("--cluster", "local", "--learners", "2", "--samplers", "2"), "samplers on other hosts need a single learner"),
        (("--cluster", "local", "--mode", "serial"), "in mode serial other hosts cannot be used"),
        (("--host-samplers", "0"), "samplers = 0: must be 1 to 64"),
    ],
)
def test_what_cannot_work_is_refused_with_one_line(tmp_path, capsys, arguments, line):
    document, _ = refused(capsys, tmp_path, "--env", "Pendulum-v1", *arguments)
    assert line in document["error"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cold
def test_one_machine_never_loads_ray():
    code = "import spreeze.cli.train, spreeze.modes.replay_modes, sys; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, timeout=PATIENCE_S)
