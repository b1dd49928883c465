"""Output that nobody reads, that somebody reads late, and that leads nowhere: it holds up no command and ends none."""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import subprocess
import sys
import termios
import threading

import pytest
from harness import FAULT, PATIENCE_S, REPO, TINY, poll

from spreeze.machine import output
from spreeze.machine.output import BackgroundWriter, background_output, emit, say, write

PIPE_BYTES = 4096


@contextlib.contextmanager
def small_pipe():
    """Both ends of a pipe that holds a page."""
    read, written = os.pipe()
    fcntl.fcntl(written, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with open(read, "rb", buffering=0) as reader, open(written, "w", encoding="utf-8") as writer:
        yield reader, writer


@contextlib.contextmanager
def writer_to(stream):
    writer = BackgroundWriter(stream, stream.fileno())
    try:
        yield writer
    finally:
        writer.end()


def _unread_bytes(reader):
    return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)


def read_until(reader, end):
    text = b""
    while not text.endswith(end):
        text += reader.read(65536)
    return text.decode()


def test_lines_that_nobody_reads_are_dropped_and_counted_once_somebody_does():
    with small_pipe() as (reader, stream), writer_to(stream) as writer:
        line = "x" * 1023 + "\n"
        for _ in range(10):
            writer.write(line)
        poll(lambda: _unread_bytes(reader) == PIPE_BYTES, what="a full pipe: nothing more is taken from the queue")
        for _ in range(990):
            writer.write(line)  # far more than waits: this would block
        assert writer.behind
        assert not writer.drain(within_s=0.0)
        writer.write("the end\n", keep=True)
        shown = read_until(reader, b"nobody read the output]\n").splitlines()
        kept = shown.count(line.rstrip())
        assert 256 <= kept < 300
        assert shown[-2:] == ["the end", f"[{1000 - kept} lines were dropped: nobody read the output]"]
        poll(lambda: not writer.behind, what="all written")
        writer.write("")
        writer.write("again\n")
        assert read_until(reader, b"again\n") == "again\n"


def test_what_a_command_found_out_arrives_whole_however_late_it_is_read(monkeypatch):
    document = {"values": list(range(50_000))}
    with small_pipe() as (reader, stream):
        monkeypatch.setattr(sys, "stdout", stream)
        with background_output():
            for number in range(5):
                say(f"line {number}")
            emit(document)
            shown = read_until(reader, b"\n}\n")
        assert sys.stdout is stream
    lines, _, rest = shown.partition("{")
    assert lines.splitlines() == [f"line {number}" for number in range(5)]
    assert json.loads("{" + rest) == document


def test_the_end_waits_for_no_reader_who_reads_nothing(monkeypatch):
    monkeypatch.setattr(output, "_PIPE_S", 0.1)
    with small_pipe() as (reader, stream):
        monkeypatch.setattr(sys, "stdout", stream)
        with background_output():
            say("x" * 10 * PIPE_BYTES, keep=True)
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == os.devnull, "what is printed later blocks nobody"
        assert reader.read(100) == 100 * b"x"
        reader.close()  # only now the thread that writes ends: it silences a descriptor, whose number others get later
        poll(lambda: all(one.name != "output" for one in threading.enumerate()), what="the end of the thread")


def test_a_terminal_with_stopped_output_is_behind_and_shows_the_rest_when_it_goes_on():
    master, slave = pty.openpty()
    with open(master, "rb", buffering=0) as screen, open(slave, "w", encoding="utf-8") as stream:
        termios.tcflow(slave, termios.TCOOFF)  # Ctrl-S
        with writer_to(stream) as writer:
            writer.write("one\n")
            assert not writer.drain(within_s=0.0)
            termios.tcflow(slave, termios.TCOON)
            assert writer.drain()
            assert read_until(screen, b"\n") == "one\r\n"


_BACKGROUND = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
settings = termios.tcgetattr(1)
settings[3] |= termios.TOSTOP
termios.tcsetattr(1, termios.TCSANOW, settings)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    from spreeze.machine.output import BackgroundWriter
    writer = BackgroundWriter(sys.stdout, 1)
    writer.write("from the background\\n")
    writer.drain(within_s=0.5)
    os.write(2, b"waits\\n" if writer.behind else b"wrote\\n")
    while not writer.drain(within_s=10.0):
        pass
    os._exit(0)
os.read(0, 1)  # the test has seen that it waits
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.tcsetpgrp(1, child)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_in_the_background_of_a_terminal_that_asks_for_silence_lines_wait_and_stop_nothing():
    master, slave = pty.openpty()
    with (
        open(master, "rb", buffering=0) as screen,
        subprocess.Popen(
            [sys.executable, "-c", _BACKGROUND], stdin=subprocess.PIPE, stdout=slave, stderr=subprocess.PIPE, cwd=REPO
        ) as process,
    ):
        os.close(slave)
        try:
            assert process.stderr.readline() == b"waits\n"
            process.stdin.write(b"x")
            process.stdin.flush()
            assert read_until(screen, b"background\r\n") == "from the background\r\n"
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_text_for_a_reader_who_is_gone_is_dropped():
    read, written = os.pipe()
    os.close(read)
    with open(written, "w", encoding="utf-8") as stream, writer_to(stream) as writer:
        writer.write("x\n")
        poll(lambda: not writer.behind, what="it to be dropped")
        writer.write("y\n")
        assert writer.drain()
        assert not writer.behind


def test_no_stream_at_all_is_no_error():
    write(None, "text")


STREAMS = [streams for count in (1, 2, 3) for streams in itertools.combinations((0, 1, 2), count)]


def run_closed(streams, *command, **options):
    """Runs a command with these standard streams closed, as by ``>&-``."""
    closing = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in streams)
    return subprocess.run(["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, *command], capture_output=True,
                          text=True, cwd=REPO, timeout=PATIENCE_S, check=False, **options)  # fmt: skip


@pytest.mark.parametrize("streams", [
    streams if len(streams) != 2 else pytest.param(streams, marks=pytest.mark.slow) for streams in STREAMS
], ids=str)  # fmt: skip
def test_f23_closed_standard_streams_end_no_verb(streams, tmp_path):
    listed = run_closed(streams, "-m", "spreeze", "runs", "--runs-dir", str(tmp_path))
    assert listed.returncode == 0
    assert listed.stderr == ""
    assert ("no run in" in listed.stdout) == (1 not in streams)
    refused = run_closed(streams, "-m", "spreeze", "evaluate", "nothing", "--runs-dir", str(tmp_path))
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no run 'nothing'") == (2 not in streams)
    assert len(refused.stderr.splitlines()) == (2 not in streams)


def test_f23_a_run_without_standard_streams_trains_and_none_of_its_files_takes_their_place(tmp_path):
    done = run_closed((0, 1, 2), "-m", "spreeze.train", *FAULT, *TINY, "--updates", "50", "--runs-dir", str(tmp_path),
                      "--name", "run")  # fmt: skip
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 50
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or b"because its limit of updates was reached" not in file.read_bytes()


@pytest.mark.warm
@pytest.mark.parametrize("verb", [("--help",), ("runs",), ("train", "--help"), ("doctor", "--json")])
def test_a_reader_who_is_gone_ends_no_verb_with_a_traceback(verb):
    read, written = os.pipe()
    os.close(read)
    with open(written, "wb") as out:
        done = subprocess.run([sys.executable, "-m", "spreeze", *verb], stdout=out, stderr=subprocess.PIPE, text=True,
                              cwd=REPO, timeout=PATIENCE_S, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
