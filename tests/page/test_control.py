"""Starting, stopping and deleting runs from a page: one at a time, and nothing that the command line would refuse."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from harness import PATIENCE_S, poll

pytest.importorskip("streamlit")

from spreeze.dashboard import control, run_data, server
from spreeze.envs.families import FAMILIES
from spreeze.errors import ConfigError, RunError
from spreeze.process_identity import process_identity, same_process
from spreeze.run_directory import launch_log

SLEEPER = """import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
print("up", flush=True)
time.sleep(10_000)
"""


@pytest.fixture
def sleepers(tmp_path, monkeypatch):
    """Makes every start a harmless process; ends what is left."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    monkeypatch.setattr(control, "COMMAND", (sys.executable, str(script)))
    yield tmp_path / "runs"
    for record in (tmp_path / "runs" / ".launches").glob("*.json"):
        pid = json.loads(record.read_text())["pid"]
        if pid is not None and psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def until(condition):
    poll(condition, what="what the test waits for")


START_AND_DIE = """import os, signal, sys
from pathlib import Path
from spreeze.dashboard import control
folder, *command = sys.argv[1:]
control.COMMAND = tuple(command)
control.start(control.Request(env_id="Pendulum-v1"), Path(folder))
os.killpg(0, signal.SIGKILL)
"""


def test_a_started_run_outlives_the_page_that_is_killed(sleepers):
    page = subprocess.run(
        [sys.executable, "-c", START_AND_DIE, str(sleepers), *control.COMMAND],
        check=False,
        timeout=PATIENCE_S,
        start_new_session=True,
    )
    assert page.returncode == -signal.SIGKILL
    launch = control.launching(sleepers)
    assert os.getsid(launch.pid) == launch.pid
    until(lambda: "up" in run_data.tail_text(launch.log))
    control.stop(launch.name, sleepers)
    until(lambda: control.launching(sleepers) is None)


def test_many_clicks_at_once_start_one_run(sleepers):
    told = []

    def click():
        try:
            told.append(control.start(control.Request(env_id="Pendulum-v1"), sleepers))
        except RunError as error:
            told.append(error)

    threads = [threading.Thread(target=click) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(entry, str) for entry in told) == 1
    assert len(list((sleepers / ".launches").glob("*.json"))) == 1


def test_stop_interrupts_a_launch_that_has_no_run_directory_yet(sleepers):
    name = control.start(control.Request(env_id="Pendulum-v1"), sleepers)
    until(lambda: "up" in run_data.tail_text(launch_log(name, sleepers)))
    control.stop(name, sleepers)
    until(lambda: control.launching(sleepers) is None)
    assert "KeyboardInterrupt" in run_data.tail_text(launch_log(name, sleepers))


def test_an_old_run_that_goes_on_is_a_launch_though_many_newer_ones_were_launched_since(sleepers):
    path = sleepers / "20260101-000000_Pendulum-v1_sac_s1"
    path.mkdir(parents=True)
    (path / "run.json").write_text('{"state": "finished"}')
    (sleepers / ".launches").mkdir()
    for day in range(2, 10):
        record = sleepers / ".launches" / f"2026010{day}-000000_Pendulum-v1_sac_s1.json"
        record.write_text('{"pid": null}')
        os.utime(record, (day, day))
    control.resume(path, sleepers)
    assert control.launching(sleepers).name == path.name
    with pytest.raises(RunError, match="is running: stop it first"):
        control.start(control.Request(env_id="Pendulum-v1"), sleepers)
    until(lambda: "up" in run_data.tail_text(launch_log(path.name, sleepers)))
    control.stop(path.name, sleepers)
    until(lambda: control.launching(sleepers) is None)


@pytest.mark.parametrize("env_id", ["os:Pendulum-v1", "../x", "-v1", "", "a b", "x" * 101])
def test_an_environment_that_the_command_line_would_not_trust_is_refused(env_id):
    with pytest.raises(ConfigError):
        control.Request(env_id=env_id)


@pytest.mark.parametrize("env_id", ["envpool:Hopper-v5", "vector:CartPole-v1", "mpe2:simple_spread_v3", "ALE/Pong-v5"])
def test_a_prefix_of_the_package_s_own_imports_nothing(env_id):
    assert control.Request(env_id=env_id).env_id == env_id


@pytest.mark.parametrize("prefix", FAMILIES)
def test_a_page_takes_every_prefix_that_the_command_line_takes(prefix):
    assert control.Request(env_id=f"{prefix}:made_up.task-v0", auto=False).env_id == f"{prefix}:made_up.task-v0"


def test_a_page_takes_a_team_or_a_class_of_the_module_that_is_named():
    module = "two_step_game"
    team = control.Request(env_id=f"parallel:{module}", algo="qmix", import_module=module, auto=False)
    assert control.arguments(team)[:4] == ["--env", f"parallel:{module}", "--import", module]
    assert control.Request(env_id="my_robots:Walker", import_module="my_robots", auto=False)
    with pytest.raises(ConfigError, match="put its module in the field"):
        control.Request(env_id="my_robots:Walker", import_module="my_other_robots", auto=False)


def test_the_command_line_states_the_whole_request():
    settings = {
        "stop.seconds": 60.0,
        "stop.target_return": -200.0,
        "learner.batch_size": 512,
        "sampling.samplers": 2,
        "tuning.govern": False,
        "visualizer.enabled": True,
        "td3.hidden_sizes": (8, 8),
        "td3.tau": 0.01,
    }
    request = control.Request(env_id="Pendulum-v1", mode="serial", algo="td3", seed=7, auto=False, settings=settings)
    from spreeze.cli.arguments import build_parser, user_values

    values = user_values(build_parser().parse_args(control.arguments(request)))
    assert values == {
        "env": {"id": "Pendulum-v1"},
        "run": {"mode": "serial", "algo": "td3", "seed": 7},
        "learner": {"batch_size": 512},
        "sampling": {"samplers": 2},
        "rollout": {"samplers": 2},
        "stop": {"seconds": 60.0, "target_return": -200.0},
        "tuning": {"govern": False},
        "visualizer": {"enabled": True},
        "td3": {"hidden_sizes": [8, 8], "tau": 0.01},
    }


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_a_start_that_has_begun_is_known_as_such_whatever_the_clock_was_set_to(sleepers, shift_s):
    name = control.start(control.Request(env_id="Pendulum-v1", auto=False), sleepers)
    launch = control.launching(sleepers)
    assert launch.name == name
    (sleepers / name).mkdir()
    state = {**process_identity(launch.pid), "state": "running", "heartbeat": time.time() + shift_s}
    (sleepers / name / "run.json").write_text(json.dumps(state))
    assert control.launching(sleepers) is None
    os.kill(launch.pid, signal.SIGKILL)
    until(lambda: not same_process(state))
    assert control.failed_start(sleepers) is None


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_a_viewer_s_mark_is_renewed_whatever_the_clock_was_set_to(tmp_path, shift_s):
    path = tmp_path / "r1"
    (path / "control").mkdir(parents=True)
    mark = path / "control" / "viewer"
    mark.touch()
    os.utime(mark, (time.time() + shift_s, time.time() + shift_s))
    fd = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        server.mark_watched(path)
    finally:
        os.close(fd)
    assert abs(mark.stat().st_mtime - time.time()) < PATIENCE_S


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "latest"])
def test_a_name_cannot_leave_the_runs_directory(tmp_path, name):
    with pytest.raises(RunError):
        run_data.run_path(name, tmp_path / "runs")


def test_a_live_run_is_not_deleted_and_not_resumed(tmp_path):
    path = tmp_path / "r1"
    path.mkdir()
    (path / "run.json").write_text('{"state": "running"}')
    fd = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="running"):
            control.delete(path, tmp_path)
        with pytest.raises(RunError, match="stop it first"):
            control.resume(path, tmp_path)
    finally:
        os.close(fd)
    control.delete(path, tmp_path)
    assert not path.exists()


@pytest.mark.parametrize("settings", ['id = "E-v0"\nimport_module = "evil"', 'id = "os:E-v0"', 'id = "../x"'])
def test_a_run_that_imports_code_is_not_resumed_from_a_page(sleepers, settings):
    path = sleepers / "r1"
    path.mkdir(parents=True)
    (path / "run.json").write_text('{"state": "finished"}')
    (path / "config.toml").write_text(f"[env]\n{settings}\n")
    with pytest.raises(RunError, match="imports code"):
        control.resume(path, sleepers)
    assert control.launching(sleepers) is None


def test_nothing_outside_the_runs_directory_is_deleted(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run.json").write_text("{}")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "link").symlink_to(outside)
    for path in (outside, runs / "link"):
        with pytest.raises(RunError):
            control.delete(path, runs)
    assert (outside / "run.json").is_file()


def test_a_run_that_imports_code_is_resumed_once_that_module_was_allowed(sleepers):
    path = sleepers / "r1"
    path.mkdir(parents=True)
    (path / "run.json").write_text('{"state": "finished"}')
    (path / "config.toml").write_text('[env]\nid = "E-v0"\nimport_module = "mine"\n')
    assert control.module_of_run(path) == "mine"
    with pytest.raises(RunError, match="imports code"):
        control.resume(path, sleepers, trusted="other")
    control.resume(path, sleepers, trusted="mine")
    argv = json.loads((sleepers / ".launches" / "r1.json").read_text())["argv"]
    assert argv[-2:] == ["--import", "mine"]


def test_a_module_that_the_page_was_started_with_needs_no_word_more(sleepers, monkeypatch):
    path = sleepers / "r1"
    path.mkdir(parents=True)
    (path / "run.json").write_text('{"state": "finished"}')
    (path / "config.toml").write_text('[env]\nid = "E-v0"\nimport_module = "mine"\n')
    monkeypatch.setenv(control.IMPORT, "mine")
    assert control.module_to_trust(path) is None
    control.resume(path, sleepers)
    argv = json.loads((sleepers / ".launches" / "r1.json").read_text())["argv"]
    assert argv[-2:] == ["--import", "mine"]


def test_a_doctor_that_fails_says_why():
    with pytest.raises(RunError, match="the doctor failed: error: unrecognized arguments: --nonsense"):
        control.doctor("--nonsense")
