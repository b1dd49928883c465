"""``python -m spreeze.dashboard.detached LOG COMMAND...``: starts a detached process.

Runs must outlive the dashboard, so they are not its children: this process starts the command in a new session, writes
its pid to standard output and exits, so that init adopts the command.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main(argv: list[str]) -> int:
    """Starts ``argv[1:]`` with its output appended to ``argv[0]``."""
    fd = os.open(argv[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    process = subprocess.Popen(
        argv[1:], stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, start_new_session=True, close_fds=True
    )
    sys.stdout.write(f"{process.pid}\n")
    process.returncode = 0  # init adopts it: nothing here waits for it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
