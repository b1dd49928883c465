"""Terminals that a test reads, types into and closes: one alone, and a window with a shell in it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading

from harness import PATIENCE_S, REPO, poll

_PROMPT = "ready> "
_SHELL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal is this session's: the kernel tells it when it is gone
os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
"""
_LOOK_S = 0.02
_ROWS, _COLUMNS = 40, 120


class PseudoTerminal:
    """A pseudo-terminal with one process in it; what it shows is read all the time, as a terminal does."""

    def __init__(self, command, **options):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        own = {key: value for key, value in os.environ.items() if not key.startswith("SPREEZE_")}
        own |= {"TERM": "xterm", "PS1": _PROMPT, "HISTFILE": ""}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=REPO, env=own, **options)
        os.close(slave)
        self._shown = bytearray()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def shown(self):
        """All that came so far, without the codes that move and colour."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", bytes(self._shown).decode(errors="replace"))

    def type(self, line):
        """A command and the return key."""
        os.write(self._master, line.encode() + b"\n")

    def press(self, key):
        """One key, such as ``b"\\x13"``: Ctrl-S."""
        os.write(self._master, key)

    def close(self):
        """Nobody holds the terminal any more: what is written to it fails from now on."""
        if self._master >= 0:
            self._closing.set()
            self._reader.join()  # a read under way would keep it open
            os.close(self._master)
            self._master = -1

    def _read(self):
        while not self._closing.is_set():
            with contextlib.suppress(OSError):  # nobody has the other end open
                if select.select([self._master], [], [], _LOOK_S)[0]:
                    self._shown += os.read(self._master, 65536)
                    continue
            self._closing.wait(_LOOK_S)


class Window(PseudoTerminal):
    """Bash in a window: closing it ends the shell, which tells its jobs, and the kernel tells the one in front."""

    def __init__(self):
        super().__init__([sys.executable, "-c", _SHELL])

    def __enter__(self):
        poll(lambda: _PROMPT in self.shown, what=lambda: f"the prompt; {self.shown}")
        return self

    def close(self):
        """The window is closed."""
        super().close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
