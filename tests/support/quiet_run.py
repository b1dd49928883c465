"""``quiet_run.py ARGUMENT...``: ``python -m spreeze.train``, for which the machine is only what its parent has started.

What neighbours of a test do is neither busy time nor a sibling; all else is as it is.
"""

import os
import runpy

import psutil

from spreeze.machine.contention import ContentionReader, Found, Siblings


def family():
    """Processes that the test has started, and theirs."""
    return {child.pid for child in psutil.Process(os.getppid()).children(recursive=True)}


class Busy:
    """Stands in for the sums in ``/proc/stat``, which never fall when a process ends."""

    def __init__(self):
        self.total_s, self.before = 0.0, {}

    def __call__(self, reader):
        """Seconds that the family has run since it was first asked."""
        now = {tid: ran_s for pid in family() for tid, (ran_s, _) in reader._process(pid)[0].items()}
        self.total_s += sum(max(0.0, ran_s - self.before.get(tid, 0.0)) for tid, ran_s in now.items())
        self.before = now
        return self.total_s


def main():
    busy, find = Busy(), Siblings.find
    ContentionReader._busy_s = lambda reader: busy(reader)
    Siblings.find = lambda siblings, ours: Found(*(pids & family() for pids in find(siblings, ours)))
    runpy.run_module("spreeze.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
