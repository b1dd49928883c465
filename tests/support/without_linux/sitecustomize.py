"""Takes Linux's own calls away from each Python process that has this folder on its path, and calls the rest macOS.

Functions and constants that macOS lacks are removed. The code of Spreeze, but no library, finds ``sys.platform``,
``platform.machine``, ``/proc``, ``/sys`` and the C library as on a Mac with an ARM processor, and in psutil what it has
there. Libraries and kernel stay those of Linux: what ARM does with stores, or macOS with descriptors, is not seen.
"""

import builtins
import ctypes
import fcntl
import os
import platform
import resource
import select
import signal
import socket
import sys
import time

PREFIXES = ("/proc", "/sys", "/dev/shm")
GONE = {
    os: ("memfd_create", "eventfd", "eventfd_read", "eventfd_write", "sched_getaffinity", "sched_setaffinity",
         "posix_fallocate", "posix_fadvise", "pidfd_open", "waitid", "pipe2", "copy_file_range", "splice", "fdatasync",
         "getrandom", "sched_yield", "process_cpu_count", "getxattr", "setxattr", "O_TMPFILE", "O_PATH", "O_DIRECT",
         "O_NOATIME", "EFD_CLOEXEC", "EFD_NONBLOCK", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL", "F_SETPIPE_SZ", "F_NOTIFY",
            "F_OFD_SETLK", "F_OFD_SETLKW", "F_OFD_GETLK"),
    resource: ("prlimit", "RUSAGE_THREAD", "RLIMIT_NICE", "RLIMIT_RTPRIO"),
    select: ("epoll",),
    signal: ("sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT"),
    socket: ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PEERCRED", "MSG_CMSG_CLOEXEC", "MSG_NOSIGNAL"),
    time: ("CLOCK_BOOTTIME",),
}  # fmt: skip
OF_PSUTIL = ("cpu_affinity", "io_counters", "rlimit", "ionice", "cpu_num")
OF_LIBC = ("prctl", "malloc_trim", "malloc_info", "mallinfo2", "gettid", "pthread_setaffinity_np")
_HIGHEST_LIMIT = 8
PIPE_BUF = 512


def _module_of(variables):
    """Name of the module with these global variables, also where it runs as a program."""
    spec = variables.get("__spec__") if variables.get("__name__") == "__main__" else None
    return variables.get("__name__", "") if spec is None else spec.name


def _asks_spreeze():
    """True if the nearest code on the stack that is not of the standard library is Spreeze's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = _module_of(frame.f_globals)
        if name.partition(".")[0] not in sys.stdlib_module_names and name != __name__:
            return name.startswith("spreeze")
        frame = frame.f_back
    return False


def _without_paths(call):
    def found(path=".", *args, **kwargs):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(PREFIXES) and _asks_spreeze():
            raise FileNotFoundError(2, "no such file on macOS", os.fspath(path))
        return call(path, *args, **kwargs)

    return found


class _OfMac:
    """A module as on macOS; all but a few names are those of the module itself."""

    def __init__(self, module, **names):
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name):
        return self._names[name] if name in self._names else getattr(self._module, name)

    def __setattr__(self, name, value):
        setattr(self._module, name, value)


def _restrict_psutil(psutil):
    """What psutil does not have on macOS, or only for root."""
    of_linux = psutil._psplatform.Process
    whole = of_linux.memory_info

    def memory_info(process):
        found = whole(process)
        return OfMac(found.rss, found.vms, 0, 0)

    def denied(process, *args, **kwargs):
        raise psutil.AccessDenied(process.pid)

    OfMac = __import__("collections").namedtuple("pmem", "rss vms pfaults pageins")
    for name in OF_PSUTIL:
        if hasattr(psutil.Process, name):
            delattr(psutil.Process, name)
    of_linux.memory_info, psutil.Process.memory_full_info = memory_info, denied
    psutil.net_connections = denied


def _take_away():
    for module, names in GONE.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    getrlimit, lookup, given = resource.getrlimit, ctypes.CDLL.__getattr__, builtins.__import__

    def limit_of(number):
        if number > _HIGHEST_LIMIT:
            raise ValueError("invalid resource specified")
        return getrlimit(number)

    def symbol(library, name):
        if library._name is None and name in OF_LIBC:
            raise AttributeError(name)
        return lookup(library, name)

    mac = {
        "sys": _OfMac(sys, platform="darwin"),
        "platform": _OfMac(platform, machine=lambda: "arm64", system=lambda: "Darwin", processor=lambda: "arm"),
        "select": _OfMac(select, PIPE_BUF=PIPE_BUF),
    }
    restricted = []

    def import_(name, globals=None, locals=None, fromlist=(), level=0):
        found = given(name, globals, locals, fromlist, level)
        if name.partition(".")[0] == "psutil" and not restricted and hasattr(found, "Process"):
            restricted.append(name)
            _restrict_psutil(found)
        of_spreeze = name in mac and not fromlist and _module_of(globals or {}).startswith("spreeze")
        return mac[name] if of_spreeze else found

    resource.getrlimit, ctypes.CDLL.__getattr__, builtins.__import__ = limit_of, symbol, import_
    for module, names in ((builtins, ("open",)), (os, ("open", "stat", "lstat", "listdir", "scandir", "statvfs"))):
        for name in names:
            setattr(module, name, _without_paths(getattr(module, name)))
    sys.modules["io"].open = builtins.open


_take_away()
