"""A run writes only inside of its own directory: a link in it, which an archive can bring along, is refused by name."""

import fcntl
import json
import os
import shutil
import socket

import pytest
from harness import PENDULUM, TINY, train

from spreeze.cli.evaluate import find_weights
from spreeze.cli.play import main as play
from spreeze.cli.runs import main as runs
from spreeze.cli.train import main as trained
from spreeze.dashboard import control
from spreeze.errors import RunError
from spreeze.run_directory import SUBDIRECTORIES, RunDir, is_alive, refuse_links, send_request

pytestmark = pytest.mark.warm

KNOWN = (
    *SUBDIRECTORIES, "run.json", "run.lock", "config.toml", "env.json", "tune.json", "tune-progress.jsonl",
    "summary.json", "metrics.db", "metrics.db-wal", "metrics.db-shm", "eval.csv", "log.txt", "fingerprints.jsonl",
    "live.jpg", "logs/learner.log", "logs/sampler-0.log", "logs/evaluator.log", "logs/probe.log",
    "errors/learner.json", "control/stop", "control/viewer", "control/pause-visualizer", "weights/LATEST.json",
    "checkpoints/best.safetensors", "checkpoints/best.json", "videos/clip-0001-v1.mp4", "videos/clip-0001-v1.json",
    "videos/.later/made", f".run.json.{os.getpid()}.tmp", "anything-else",
)  # fmt: skip
"""What code is known to write, or could come to write."""
LEARNED = (
    "--updates",
    "300",
    "--save-replay",
    "--set",
    "visualizer.clip_interval_s=1",
    "--set",
    "visualizer.clip_length_s=0.5",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that has ended, with all that a run leaves: checkpoints, replay, clips, logs."""
    folder = tmp_path_factory.mktemp("finished")
    tiny = [flag for flag in TINY if flag != "--no-visualizer"]
    run, code, _ = train(folder, *PENDULUM, *LEARNED, tiny=tiny)
    assert code == 0, run.stderr
    return run.path


@pytest.fixture
def copy(finished, tmp_path):
    path = tmp_path / "runs" / "run"
    shutil.copytree(finished, path)
    return path


def snapshot(folder):
    """All names below a folder, with size and time: what changes when anything is written."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*"))}


def linked(path, name, outside):
    """Puts a link in the place of a file or folder of the run, or of one that is not there yet."""
    place, target = path / name, outside / name.replace("/", "-")
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        shutil.move(place, target)
    elif "." not in place.name:
        target.mkdir()
    else:
        target.write_text("mine\n")
    place.symlink_to(target)


def refused_everywhere(path, name, capsys):
    """Command line and page refuse to resume, in one line with the file's name."""
    assert trained(["--resume", "run", "--runs-dir", str(path.parent)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert f" {name} is a symbolic link" in err
    with pytest.raises(RunError, match=" is a symbolic link") as caught:
        RunDir.open(path)
    assert f" {name} is" in str(caught.value)
    with pytest.raises(RunError, match=" is a symbolic link"):
        control.resume(path, path.parent)
    assert control.launching(path.parent) is None
    assert list((path.parent / ".launches").glob("*.json")) == []


def test_every_path_of_a_finished_run_is_refused_as_a_link(finished, tmp_path, capsys):
    names = sorted(path.relative_to(finished).as_posix() for path in finished.rglob("*"))
    wanted = {
        "run.json",
        "run.lock",
        "config.toml",
        "env.json",
        "metrics.db",
        "eval.csv",
        "summary.json",
        "logs",
        "checkpoints",
        "weights",
        "videos",
        "errors",
        "control",
        "weights/LATEST.json",
    }
    assert wanted <= set(names)
    assert any(name.startswith("checkpoints/") and "replay" in name for name in names)
    path = shutil.copytree(finished, tmp_path / "runs" / "run")
    for number, name in enumerate(sorted({*names} - {*KNOWN})):  # those are each a test below
        outside = tmp_path / str(number)
        outside.mkdir()
        linked(path, name, outside)
        before = snapshot(outside)
        refused_everywhere(path, name, capsys)
        assert snapshot(outside) == before, name
        (path / name).unlink()
        shutil.move(outside / name.replace("/", "-"), path / name)


@pytest.mark.parametrize("name", KNOWN, ids=lambda name: name.replace(str(os.getpid()), "PID"))
def test_every_path_that_code_may_write_is_refused_as_a_link(copy, tmp_path, capsys, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    linked(copy, name, outside)
    before = snapshot(outside)
    refused_everywhere(copy, name, capsys)
    assert snapshot(outside) == before
    if name == "run.json":
        return  # without it there is no run to resume
    (copy / name).unlink()
    (copy / name).symlink_to(outside / "nothing-yet")
    before = snapshot(outside)
    refused_everywhere(copy, name, capsys)
    assert snapshot(outside) == before, "a link to nothing would be filled"


def test_a_run_s_directory_that_is_a_link_is_refused(copy, capsys):
    link = copy.with_name("link")
    link.symlink_to(copy)
    assert trained(["--resume", "link", "--runs-dir", str(copy.parent)]) == 2
    assert f"is a symbolic link; use its target: {copy.resolve()}" in capsys.readouterr().err


def contents(folder):
    """All files below a folder, with what they hold and when they were written."""
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_run_with_a_backup_of_hard_links_is_resumed_and_the_backup_stays_as_it_is(copy, tmp_path, capsys):
    backup = shutil.copytree(copy, tmp_path / "backup", copy_function=os.link)
    before = contents(backup)
    folder = ["--runs-dir", str(copy.parent)]
    assert trained(["--resume", "run", "--updates", "1", *folder]) == 0, capsys.readouterr().err
    assert contents(backup) == before
    assert json.loads((copy / "run.json").read_text())["sessions"] == 2
    # And the backup itself, under the runs: the run that it was made of stays as it is.
    shutil.copytree(backup, copy.with_name("again"), copy_function=os.link)
    assert trained(["--resume", "again", "--updates", "1", *folder]) == 0, capsys.readouterr().err
    assert contents(backup) == before


@pytest.mark.parametrize(
    "name",
    [name for name in KNOWN if "." in name.rpartition("/")[2]],
    ids=lambda name: name.replace(str(os.getpid()), "PID"),
)
def test_no_file_with_a_second_name_is_written_through(copy, tmp_path, name):
    mine, place = tmp_path / "mine", copy / name
    mine.write_bytes(place.read_bytes() if place.is_file() else b"mine\n")
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    os.link(mine, place)
    before = (mine.read_bytes(), mine.stat().st_mtime_ns)
    RunDir.open(copy).close()
    assert place.read_bytes() == before[0]
    kept = name.partition("/")[0] in ("weights", "checkpoints")  # replaced, never written to
    assert place.samefile(mine) is kept
    assert (mine.read_bytes(), mine.stat().st_mtime_ns) == before


def test_runs_that_share_a_lock_by_hard_links_are_never_resumed_beside_each_other(copy):
    other = shutil.copytree(copy, copy.with_name("other"), copy_function=os.link)
    first = os.open(other / "run.lock", os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_EX)
    before = contents(copy)
    with pytest.raises(RunError, match=r"is running .*, or another run with the same hard-linked files; stop it"):
        RunDir.open(copy)
    assert contents(copy) == before
    os.close(first)
    run = RunDir.open(copy)
    assert (is_alive(copy), is_alive(other)) == (True, False)
    with pytest.raises(RunError, match="is running"):
        RunDir.open(copy)
    RunDir.open(other).close()
    assert is_alive(copy)
    run.close()
    assert not is_alive(copy)


def test_a_request_is_not_written_through_a_second_name(copy, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    os.link(mine, copy / "control" / "pause-visualizer")
    send_request(copy, "pause-visualizer", "x")
    assert mine.read_text() == "mine\n"
    assert (copy / "control" / "pause-visualizer").read_text() == "x"


def test_a_pipe_is_refused_too(copy):
    os.mkfifo(copy / "logs" / "pipe.log")
    with pytest.raises(RunError, match=r"logs/pipe.log is neither a file nor a directory"):
        refuse_links(copy)
    (copy / "logs" / "pipe.log").unlink()
    refuse_links(copy)


def test_a_socket_is_refused_and_a_deep_tree_is_no_trouble(copy, monkeypatch):
    monkeypatch.chdir(copy)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
        with pytest.raises(RunError, match=r"s is neither a file nor a directory"):
            refuse_links(copy)
    os.unlink("s")
    folders = ["/".join(["d"] * depth) for depth in range(1, 1201)]  # deeper than Python recurses
    for folder in folders:
        os.mkdir(folder)
    try:
        refuse_links(copy)
        os.symlink("/etc", f"{folders[-1]}/out")
        with pytest.raises(RunError, match="is a symbolic link"):
            refuse_links(copy)
        os.unlink(f"{folders[-1]}/out")
    finally:
        for folder in reversed(folders):
            os.rmdir(folder)


def test_a_name_with_escapes_is_told_as_plain_text(copy, capsys):
    (copy / "x\x1b]0;owned\x07y").symlink_to("/etc/passwd")
    assert trained(["--resume", "run", "--runs-dir", str(copy.parent)]) == 2
    err = capsys.readouterr().err
    assert "x ]0;owned y is a symbolic link" in err
    assert "\x1b" not in err


@pytest.mark.parametrize("name", ["control", "control/pause-visualizer"])
def test_a_request_to_a_run_follows_no_link(copy, tmp_path, capsys, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    place = copy / name
    if place.is_dir():
        shutil.rmtree(place)
    place.symlink_to(outside if name == "control" else outside / "made")
    code = runs(["--runs-dir", str(copy.parent), "visualizer", "run", "pause"])
    assert list(outside.iterdir()) == []
    if name == "control":
        assert code == 2
        assert "control/pause-visualizer cannot be written" in capsys.readouterr().err
    else:  # the request stands where the link was
        assert code == 0
        assert place.is_file()
        assert not place.is_symlink()


def test_a_request_twice_is_as_good_as_once(copy):
    send_request(copy, "viewer")
    os.utime(copy / "control" / "viewer", (1, 1))
    send_request(copy, "viewer")
    assert (copy / "control" / "viewer").stat().st_mtime > 1
    os.mkfifo(copy / "control" / "stop")
    send_request(copy, "stop")  # and does not wait for somebody who reads
    assert (copy / "control" / "stop").is_file()
    (copy / "control" / "pause").mkdir()
    with pytest.raises(RunError, match="control/pause cannot be written"):
        send_request(copy, "pause")


def test_a_clip_of_a_foreign_run_stays_inside(copy, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    outside = tmp_path / "outside"
    shutil.move(copy / "videos", outside)
    (copy / "videos").symlink_to(outside)
    before = snapshot(outside)
    assert play(["run", "--runs-dir", str(copy.parent)]) == 2
    assert "videos is a symbolic link" in capsys.readouterr().err
    assert snapshot(outside) == before
    assert find_weights("run", copy.parent).is_file()


def test_a_plain_copy_of_a_run_is_resumed(copy, tmp_path):
    updates = json.loads((copy / "run.json").read_text())["updates"]
    _, code, document = train(tmp_path, "--resume", "run", "--updates", str(updates + 50), tiny=())
    assert code == 0
    assert document["updates"] == updates + 50
    assert not is_alive(copy)
