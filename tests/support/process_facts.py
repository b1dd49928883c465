"""``python -m process_facts [END]``: prints as JSON what a process finds when it starts, and ends as it is told."""

import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGTTOU)
OF_STATUS = ("SigBlk", "SigIgn", "SigCgt", "Threads")


def facts():
    """What must not depend on how the process was started."""
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors[fd] = [os.readlink(f"/proc/self/fd/{fd}"), os.get_inheritable(int(fd))]
        except OSError:
            continue
    streams = {
        name: [
            stream.encoding,
            stream.errors,
            stream.mode,
            stream.line_buffering,
            stream.write_through,
            stream.fileno(),
        ]
        for name, stream in zip(("in", "out", "err"), (sys.stdin, sys.stdout, sys.stderr), strict=True)
    }
    return {
        "arguments": sys.argv,
        "original arguments": sys.orig_argv,
        "module": [__name__, __file__, sys.modules["__main__"].__dict__ is globals(), __spec__.name],
        "folder": os.getcwd(),
        "modules' folders": [path for path in sys.path if "site-packages" not in path],
        "variables": dict(os.environ),
        "umask": os.umask(0),
        "leads": [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)],
        "group": None if os.getpid() == os.getpgid(0) else os.getpgid(0),
        "parent": os.getppid(),
        "descriptors": descriptors,
        "streams": streams,
        "limits": [resource.getrlimit(number) for number in range(resource.RLIMIT_RTPRIO + 1)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "name": Path("/proc/self/comm").read_text(),
        "status": {name: status[name] for name in OF_STATUS},
        "handlers": {number.name: str(signal.getsignal(number)) for number in HANDLED},
        "main thread": threading.current_thread() is threading.main_thread(),
        "faults": faulthandler.is_enabled(),
        "collects": gc.isenabled(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
    print("to the other", file=sys.stderr)
    if sys.argv[1:] == ["raise"]:
        raise ValueError("raised")
    if sys.argv[1:] == ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1:] == ["wait"]:
        sys.stdin.read()
    if sys.argv[1:] == ["exit"]:
        sys.exit(3)
    sys.stderr.flush()
    os._exit(int(sys.argv[1]) if sys.argv[1:] == ["7"] else 0)  # a warm process takes long to take its modules down
