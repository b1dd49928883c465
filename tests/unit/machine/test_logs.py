"""Logs of workers: every print arrives, none fails or waits, and a log stays small."""

import os
import re
import subprocess
import sys

import pytest
from harness import PATIENCE_S, fill, poll, small_disk

from spreeze.machine import logs
from spreeze.machine.logs import MAX_BYTES, LogKeeper

_PRINTS = """
import ctypes, os, subprocess, sys
library = ctypes.CDLL(None)
for number in range(int(sys.argv[1])):
    print(f"python {number}", flush=True)
    os.write(1, f"descriptor {number}\\n".encode())
    assert library.puts(f"C {number}".encode()) >= 0 and library.fflush(None) == 0
    print(f"error {number}", file=sys.stderr, flush=True)
subprocess.run(["sh", "-c", "echo of a child"], check=True)
"""
_CRASHES = """
import ctypes, faulthandler
faulthandler.enable()
print("before the end", flush=True)
ctypes.string_at(0)
"""


@pytest.fixture
def keeper():
    made = LogKeeper()
    yield made
    made.close()


def run(log, script, *args):
    log.begin()
    with log.open() as output:
        return subprocess.Popen([sys.executable, "-c", script, *args], stdout=output, stderr=output)


def ended(process):
    return process.wait(PATIENCE_S)


def write(log, data):
    with log.open() as output:
        output.write(data)


def test_all_that_a_process_prints_is_in_its_log_in_order(tmp_path, keeper):
    keeper.__enter__()
    path = tmp_path / "worker.log"
    path.write_text("of an earlier session\n")
    assert ended(run(keeper.log(path), _PRINTS, "500")) == 0
    assert ended(run(keeper.log(path), _PRINTS, "1")) == 0, "started again"
    keeper.close()
    lines = [f"{kind} {number}" for number in range(500) for kind in ("python", "descriptor", "C", "error")]
    assert path.read_text().splitlines() == ["of an earlier session", *lines, "of a child", *lines[:4], "of a child"]


def test_what_a_process_has_printed_appears_while_it_runs(tmp_path, keeper):
    keeper.__enter__()
    process = run(keeper.log(tmp_path / "log"), "print('here', flush=True); import sys; sys.stdin.read()")
    try:
        poll(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "here\n", what="its line")
    finally:
        process.kill()
        process.wait()


def test_the_stack_of_a_crash_is_in_the_log_and_told_at_once_whatever_was_printed_before(tmp_path, keeper):
    log = keeper.log(tmp_path / "log")  # no thread moves anything
    write(log, b"x" * (2 * MAX_BYTES))
    assert ended(run(log, _CRASHES)) < 0
    assert "before the end" in log.last_words
    assert "Segmentation fault" not in log.last_words, "the exit code says so"
    assert ended(run(log, "")) == 0
    assert log.last_words == "", "of the latest process alone"
    keeper.close()
    text = (tmp_path / "log").read_text()
    assert "before the end\nFatal Python error: Segmentation fault" in text
    assert "bytes of output are missing here" in text


def test_a_log_keeps_the_newest_and_neither_disk_nor_memory_hold_much_more(tmp_path, keeper):
    log, path = keeper.log(tmp_path / "log"), tmp_path / "log"
    line, number = b"%09d" + b"." * 190 + b"\n", 0
    while number * 200 < 5 * MAX_BYTES:
        write(log, b"".join(line % at for at in range(number, number + 2000)))
        number += 2000
        log.read()
        log.write()
        assert path.stat().st_size <= MAX_BYTES
        assert os.fstat(log._fd).st_size < 2 * logs._IN_MEMORY_BYTES
    first, *lines = path.read_bytes().splitlines(keepends=True)
    assert first.startswith(b"[older output was dropped")
    assert lines == [line % at for at in range(number - len(lines), number)], "whole lines, none missing among them"
    assert len(lines) * 200 > 0.4 * MAX_BYTES


def test_a_full_disk_costs_output_and_nothing_else(tmp_path, keeper):
    with small_disk(tmp_path / "disk", 2**20) as disk:
        log, path = keeper.log(disk / "log"), disk / "log"
        write(log, b"first\n")
        log.read()
        log.write()
        filler = fill(disk)
        for _ in range(3):
            assert ended(run(log, _PRINTS, "200")) == 0, "no print has failed"
            log.read()
            log.write()
            log.write()  # without output, as the keeper calls it all the time
        assert log._waiting == []
        filler.unlink()
        write(log, b"last\n")
        log.read()
        log.write()
        text = path.read_text()
        assert text.startswith("first\n")
        marker = re.search(r"\[(\d+) bytes of output are missing here\]\n", text)
        words = ("python", "descriptor", "C", "error")
        printed = sum(len(f"{word} {number}\n") for number in range(200) for word in words) + len("of a child\n")
        kept = len(text) - len(marker[0]) - len("first\nlast\n")
        assert kept + int(marker[1]) == 3 * printed, "each byte is kept or counted as missing"
        assert text.endswith("last\n")


@pytest.mark.parametrize("place", ["missing/log", "folder"])
def test_a_place_that_cannot_be_written_is_no_error(tmp_path, keeper, place):
    (tmp_path / "folder").mkdir()
    log = keeper.log(tmp_path / place)
    write(log, b"nowhere\n")
    assert log.last_words == "nowhere"
    keeper.close()


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path, keeper):
    (tmp_path / "log").symlink_to(tmp_path / "other")
    write(keeper.log(tmp_path / "log"), b"text")
    keeper.close()
    assert not (tmp_path / "other").exists()


def test_a_process_that_empties_its_output_goes_on(tmp_path, keeper):
    log = keeper.log(tmp_path / "log")
    write(log, b"a long first line\n")
    log.read()
    assert ended(run(log, "open('/dev/stdout', 'w').write('second\\n')")) == 0
    assert log.last_words == "second"
    keeper.close()
    assert (tmp_path / "log").read_text() == "a long first line\nsecond\n"


def test_an_end_closes_all_descriptors(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with LogKeeper() as made:
        for name in "abc":
            write(made.log(tmp_path / name), b"text")
    assert len(os.listdir("/proc/self/fd")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
