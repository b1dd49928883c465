import errno
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
from harness import PATIENCE_S, poll

import spreeze.process_identity
from spreeze import run_directory
from spreeze.cli.runs import main as runs_main
from spreeze.errors import ConfigError, ResourceError, RunError
from spreeze.files import write_json
from spreeze.process_identity import process_identity, same_process
from spreeze.run_directory import (
    RunDir,
    find_run,
    is_alive,
    kill_supervisor,
    list_runs,
    new_name,
    read_run,
    requested_s,
    send_request,
    state_of,
)

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(tmp_path / "runs", "one")
    made.write_state(state="running", started="2026-01-01")
    yield made
    made.close()


def test_a_new_run_is_private_and_has_its_places(run):
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert {entry.name for entry in run.path.iterdir() if entry.is_dir()} == set(run_directory.SUBDIRECTORIES)
    assert all((run.path / sub).stat().st_mode & 0o777 == 0o700 for sub in run_directory.SUBDIRECTORIES)


def test_a_name_is_given_away_once(run):
    with pytest.raises(RunError, match="exists; choose another --name, or --resume one"):
        RunDir.create(run.path.parent, "one")


def test_a_directory_that_is_no_run_is_not_said_to_be_one_that_can_be_resumed(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(RunError, match=r"exists, but it is not a run .* choose another --name, or delete it"):
        RunDir.create(tmp_path, "one")
    (tmp_path / "two").write_text("a file")
    with pytest.raises(RunError, match=r"two exists, but it is not a run"):
        RunDir.create(tmp_path, "two")


def test_automatic_names_of_runs_that_start_together_differ(tmp_path):
    (tmp_path / ".launches").mkdir()
    (tmp_path / ".launches" / "walk-3.json").write_text("{}")  # a page has started it; it has no directory yet
    together, made = threading.Barrier(8), []

    def start():
        together.wait()
        made.append(RunDir.create(tmp_path, "walk", numbered=True))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in made:
        one.close()
    assert sorted(one.path.name for one in made) == ["walk", "walk-2", *(f"walk-{number}" for number in range(4, 10))]
    with pytest.raises(RunError, match="exists"):
        RunDir.create(tmp_path, "walk")


@pytest.mark.parametrize("name", ["../x", "a/b", "CON", "n" * 300, "a\nb", ".."])
def test_no_name_leaves_the_runs_directory(tmp_path, name):
    with pytest.raises(ConfigError):
        RunDir.create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()
    with pytest.raises((ConfigError, RunError)):
        find_run(name, tmp_path / "runs")


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write below"):
        RunDir.create(tmp_path / "file" / "runs", "one")


def test_too_little_disk_is_refused_with_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "MIN_FREE_DISK_BYTES", 10**18)
    with pytest.raises(ResourceError, match=r"needs 1000000000000 MB of disk, \d+ MB are free"):
        RunDir.create(tmp_path / "runs", "one")
    assert not (tmp_path / "runs" / "one").exists()


def test_alive_is_who_holds_the_lock(run):
    assert is_alive(run.path)
    assert state_of(run.path) == "running"
    with pytest.raises(RunError, match=r"one is running \(process None\); stop it first: spreeze runs stop one"):
        RunDir.open(run.path)
    run.close()
    assert not is_alive(run.path)
    assert state_of(run.path) == "crashed"
    again = RunDir.open(run.path)
    assert is_alive(run.path)
    again.close()


def test_the_lock_ends_with_the_process_that_held_it(tmp_path):
    code = (
        "import sys, pathlib; from spreeze.run_directory import RunDir\n"
        "run = RunDir.create(pathlib.Path(sys.argv[1]), 'one'); run.write_state(state='running')\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO
    )
    assert process.stdout.readline() == b"ready\n"
    assert is_alive(tmp_path / "one")
    process.kill()
    process.communicate()
    assert not is_alive(tmp_path / "one")
    assert state_of(tmp_path / "one") == "crashed"


def test_state_is_merged(run):
    run.write_state(env_steps=5)
    run.write_state(updates=6)
    state = read_run(run.path)
    assert (state["state"], state["env_steps"], state["updates"]) == ("running", 5, 6)
    assert abs(state["heartbeat"] - time.time()) < 3600


@pytest.mark.parametrize("damage", [b"", b"{", b'{"env_id": 3, "env_steps": "many"}'])
def test_what_was_written_into_a_file_that_is_damaged_meanwhile_is_written_again(run, damage):
    run.write_state(env_id="Pendulum-v1", env_steps=5)
    (run.path / "run.json").write_bytes(damage)
    run.write_state(updates=6)
    told = read_run(run.path)
    assert (told["env_id"], told["env_steps"], told["updates"]) == ("Pendulum-v1", 5, 6)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, "\0"])
def test_a_damaged_run_file_is_read_as_empty(run, text):
    (run.path / "run.json").write_text(text)
    assert read_run(run.path) == {}
    assert state_of(run.path) == "damaged"


def test_trouble_with_the_disk_is_not_fatal(run, monkeypatch):
    def refuse(path, data, *, durable):
        raise OSError("no space left on device")

    monkeypatch.setattr(run_directory, "write_json", refuse)
    run.write_state(env_steps=5)


def test_json_is_replaced_whole_and_leaves_no_other_file(tmp_path):
    for value in ({"a": 1}, {"b": 2}):
        write_json(tmp_path / "x.json", value)
        assert json.loads((tmp_path / "x.json").read_text()) == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_runs_are_found_by_name_path_and_age(tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(RunError, match="no run in"):
        find_run("latest", runs)
    for name, started in (("b-old", "2026-01-01"), ("a-new", "2026-01-02")):
        made = RunDir.create(runs, name)
        made.write_state(started=started, state="finished")
        made.close()
    (runs / "stray").mkdir()
    os.symlink(runs / "a-new", runs / "link")
    assert [path.name for path in list_runs(runs)] == ["b-old", "a-new"]
    assert find_run("latest", runs) == runs / "a-new"
    assert find_run("b-old", runs) == find_run(str(runs / "b-old"), tmp_path) == runs / "b-old"
    with pytest.raises(RunError, match=r"no run 'a-nwe' in .*; did you mean 'a-new'"):
        find_run("a-nwe", runs)
    with pytest.raises(RunError, match=r"no run.json"):
        RunDir.open(runs / "stray")


def test_names_made_from_tasks_are_names():
    assert new_name("ns/My Env:v0", "sac", 3).endswith("_ns-My-Env-v0_sac_s3")
    for env_id in ("a" * 500, "../../x", "Pendulum-v1"):
        assert run_directory.check_name(new_name(env_id, "sac", 1))


def test_a_supervisor_is_recognized_by_the_start_of_its_process(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        record = process_identity(process.pid)
        assert same_process(record)
        assert not same_process({**record, "start_ticks": record["start_ticks"] - 1}), "another process of that number"
        assert not same_process({**record, "boot_id": "x"}), "from before the machine was started again"
        assert not same_process({"pid": process.pid}), "nothing is known of its start"
        write_json(tmp_path / "run.json", record)
        kill_supervisor(tmp_path)
        poll(lambda: not same_process(record), what="its end; a zombie has ended")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("shift_s", [-3600, 3600])
def test_the_age_of_a_request_does_not_depend_on_the_clock(run, shift_s):
    assert requested_s(run.path, "stop") is None
    send_request(run.path, "stop")
    moved = time.time() + shift_s
    os.utime(run.path / "control" / "stop", (moved, moved))
    assert 0.0 <= requested_s(run.path, "stop") < PATIENCE_S
    (run.path / "control" / "stop").write_text("made by hand")
    os.utime(run.path / "control" / "stop", (moved, moved))
    assert requested_s(run.path, "stop") == pytest.approx(max(0.0, -shift_s), abs=PATIENCE_S)


def test_a_request_is_taken_whole_or_not_yet(run):
    done = threading.Event()

    def send():
        for _ in range(300):
            send_request(run.path, "leave-free", "0.35")
        done.set()

    sender = threading.Thread(target=send)
    sender.start()
    taken = set()
    while not done.is_set():
        taken.add(run.take_request("leave-free"))
    sender.join(PATIENCE_S)
    assert taken | {run.take_request("leave-free")} <= {None, "0.35"}
    assert run.take_request("leave-free") is None
    assert not os.listdir(run.path / "control")


def test_no_stranger_is_killed_in_place_of_a_supervisor(run, capsys):
    stranger = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        run.write_state(**process_identity(stranger.pid) | {"start_ticks": 1})
        code = runs_main(["--runs-dir", str(run.path.parent), "stop", "one", "--force"])
        assert code == 2
        assert "nothing was killed" in capsys.readouterr().err
        assert stranger.poll() is None
    finally:
        stranger.communicate()


def test_a_visualizer_is_paused_and_resumed_and_that_is_said(run, capsys):
    mark = run.path / "control" / "pause-visualizer"
    for word, lies, told in (
        ("pause", True, "one: visualizer paused\n"),
        ("resume", False, "one: visualizer resumed\n"),
    ):
        assert runs_main(["--runs-dir", str(run.path.parent), "visualizer", "one", word]) == 0
        assert (mark.exists(), capsys.readouterr().out) == (lies, told)


def test_stopping_what_does_not_run_is_refused(run, capsys):
    run.close()
    assert runs_main(["--runs-dir", str(run.path.parent), "stop", "one"]) == 2
    assert "one is not running (state: crashed)" in capsys.readouterr().err


def test_stop_gives_up_in_time_when_the_run_does_not_obey(run, capsys):
    code = runs_main(["--runs-dir", str(run.path.parent), "stop", "one", "--timeout", "0.2"])
    assert code == 2
    assert "still runs after 0.2 s" in capsys.readouterr().err
    assert (run.path / "control" / "stop").exists()


def test_list_shows_state_and_is_one_json_document(run, capsys):
    runs = ["--runs-dir", str(run.path.parent)]
    assert runs_main(runs) == 0
    assert "running" in capsys.readouterr().out
    assert runs_main(["list", "--json", *runs]) == 0
    behind = capsys.readouterr().out
    assert runs_main([*runs, "--json", "list"]) == 0
    before = capsys.readouterr().out
    assert before == behind
    rows = json.loads(before)["runs"]
    assert [(row["name"], row["state"]) for row in rows] == [("one", "running")]
    assert runs_main(["--runs-dir", str(run.path / "none")]) == 0


def test_the_visualizer_is_told_by_a_file(run):
    flag = run.path / "control" / "pause-visualizer"
    for what, there in (("pause", True), ("resume", False), ("resume", False)):
        assert runs_main(["--runs-dir", str(run.path.parent), "visualizer", "one", what]) == 0
        assert flag.exists() == there


def test_a_process_is_never_older_than_it_can_be():
    code = "from spreeze.process_identity import process_age_s; print(process_age_s())"
    before_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    most_s = time.monotonic() - before_s
    assert 0.0 < float(done.stdout) <= most_s + 0.01, "the kernel counts in hundredths"


def test_without_proc_a_process_is_known_by_the_time_of_its_start(monkeypatch):
    def none(pid):
        raise FileNotFoundError

    monkeypatch.setattr(spreeze.process_identity, "_stat_fields", none)
    known = process_identity(os.getpid())
    assert same_process(known)
    assert not same_process(known | {"process_started_s": known["process_started_s"] - 2.0})
    for pid in (-1, 10**30, "x", None):
        assert not same_process(known | {"pid": pid})
    assert process_identity(2**22 + 1) == {"pid": 2**22 + 1}
    assert 0.0 < spreeze.process_identity.process_age_s() < 10**6


def test_a_process_is_killed_only_if_it_is_the_supervisor_that_was_recorded(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    known = process_identity(process.pid)
    ticks = known["start_ticks"]
    try:
        for pid, at in (
            (process.pid, ticks + 500),
            (process.pid, None),
            (None, ticks),
            ("x", ticks),
            (-1, ticks),
            (10**30, ticks),
        ):
            write_json(tmp_path / "run.json", known | {"pid": pid, "start_ticks": at})
            with pytest.raises(RunError, match="nothing was killed"):
                kill_supervisor(tmp_path)
        assert process.poll() is None
        write_json(tmp_path / "run.json", known)
        kill_supervisor(tmp_path)
        record = read_run(tmp_path)
        poll(lambda: not same_process(record), what="its end; a zombie has ended")
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def without_locks(monkeypatch):
    def flock(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_directory.fcntl, "flock", flock)


def test_without_file_locks_a_run_is_alive_while_the_process_that_it_names_is(tmp_path, without_locks):
    made = RunDir.create(tmp_path / "runs", "one")
    assert not made.guarded
    assert not is_alive(made.path), "it has not said yet who it is"
    process = psutil.Process()
    made.write_state(state="running", **process_identity(process.pid))
    assert is_alive(made.path)
    with pytest.raises(RunError, match=f"one is running \\(process {process.pid}\\)"):
        RunDir.open(made.path)
    made.write_state(state="finished")
    assert not is_alive(made.path)
    assert state_of(made.path) == "finished"
    made.write_state(state="running", start_ticks=1)
    assert state_of(made.path) == "crashed"
    RunDir.open(made.path).close()
    made.close()


def test_without_file_locks_a_run_of_another_host_is_alive_while_its_heartbeat_is_fresh(tmp_path, without_locks):
    made = RunDir.create(tmp_path / "runs", "one")
    made.write_state(state="running", pid=1, host="elsewhere.example")
    assert is_alive(made.path)
    write_json(made.path / "run.json", {**read_run(made.path), "heartbeat": time.time() - 1000.0})
    assert not is_alive(made.path)
    made.close()


def test_a_lock_that_is_held_is_no_missing_one(run, monkeypatch):
    assert run.guarded

    def flock(fd, how):
        raise BlockingIOError(errno.EWOULDBLOCK, "held")

    monkeypatch.setattr(run_directory.fcntl, "flock", flock)
    assert is_alive(run.path)
    with pytest.raises(RunError, match="is running"):
        RunDir.open(run.path)
