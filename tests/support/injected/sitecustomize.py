"""A clock that is set, a slow disk, and a journal of what was synced, in each Python process of a run under faults.

Only what goes through Python is reached: the clock of ``time.time``; ``os.fsync``, ``os.replace`` and ``os.rename``.
SQLite syncs its files by itself, as fast as ever.
"""

import os
import time

from fault_page import CLOCK_S, SLOW_S, VARIABLE, open_page


def _inject(path):
    page = open_page(path)
    now, sync, replace, rename = time.time, os.fsync, os.replace, os.rename

    def slowly():
        if page[SLOW_S]:
            time.sleep(page[SLOW_S])

    def fsync(fd):
        slowly()
        sync(fd)
        found = os.fstat(fd if isinstance(fd, int) else fd.fileno())
        line = f"\n{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}\n".encode()  # others may be cut
        journal = os.open(f"{path}.synced", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(journal, line)
        finally:
            os.close(journal)

    def after(change):
        def slow(*args, **kwargs):
            slowly()
            return change(*args, **kwargs)

        return slow

    time.time = lambda: now() + page[CLOCK_S]
    os.fsync, os.replace, os.rename = fsync, after(replace), after(rename)


if os.environ.get(VARIABLE):
    _inject(os.environ[VARIABLE])
