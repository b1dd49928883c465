"""``quiet_run.py ARGUMENT...``: ``python -m spreeze.train``, for which the machine is only what its parent has started.

What neighbours of a test do is neither busy time nor a sibling; all else is as it is.
"""

import os
import runpy

import psutil

from spreeze.machine import utilisation
from spreeze.machine.utilisation import ContentionReader, ExemptProcesses
from spreeze.workers.roles import role_of


def family():
    """Processes that the test has started, and theirs."""
    return {child.pid for child in psutil.Process(os.getppid()).children(recursive=True)}


class Busy:
    """Stands in for the sums in ``/proc/stat``, which never fall when a process ends."""

    def __init__(self):
        self.total_s, self.before, self.reader = 0.0, {}, ContentionReader(role_of)

    def __call__(self, core_ids, proc=None):
        """Seconds that the family has run since it was first asked."""
        now = {tid: ran_s for pid in family() for tid, (ran_s, _) in self.reader._process(pid)[0].items()}
        self.total_s += sum(max(0.0, ran_s - self.before.get(tid, 0.0)) for tid, ran_s in now.items())
        self.before = now
        return self.total_s


def main():
    find, utilisation.busy_s = ExemptProcesses.find, Busy()
    ExemptProcesses.find = lambda exempt, ours: tuple(pids & family() for pids in find(exempt, ours))
    runpy.run_module("spreeze.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
