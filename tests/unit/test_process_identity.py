"""Which numbers belong to a process."""

import os
import subprocess
import sys

from harness import PATIENCE_S

from spreeze.process_identity import pid_exists


def test_a_process_exists_from_its_start_until_its_parent_has_reaped_it():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert pid_exists(child.pid)
        child.communicate(b"\n", timeout=PATIENCE_S)
    assert not pid_exists(child.pid)


def test_groups_of_processes_and_impossible_numbers_are_no_process():
    assert pid_exists(os.getpid())
    for number in (0, -1, -os.getpgrp(), 2**31 - 1, 10**30):
        assert not pid_exists(number), number
