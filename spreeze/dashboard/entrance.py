"""Who gets in: a token that works once, in the address that the terminal shows; then a cookie of the browser's.

Every account of a machine reaches a port of its. So the address is told on the terminal alone, or where there is none
in a file that only its owner reads; a browser is opened at such a file too, for a command line is seen by everybody.
"""

from __future__ import annotations

import contextlib
import html
import os
import secrets
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

from spreeze.cli import say

SETTING = "SPREEZE_DASHBOARD_TOKEN"
"""Environment variable; ``off`` on a machine of one's own: whoever reaches the port gets in."""
_LEAST_CHARACTERS = 43
_PLACE = ".launches"
_FILE = """<!DOCTYPE html>
<!-- {address} -->
<meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>Spreeze</title>
<meta http-equiv="refresh" content="0; url={address}">
<p><a href="{address}">Open the dashboard</a> (this address works once)</p>
"""


def is_asked() -> bool:
    """Whether a visitor needs a token; anything but ``off`` leaves it so, and what is neither is told."""
    found = os.environ.get(SETTING, "on").strip().lower()
    if found not in ("on", "off"):
        say(f"{SETTING} = {found}: on or off are allowed; the dashboard asks for its token", as_json=True)
    return found != "off"


def page_token(folder: Path) -> str:
    """What the cookie holds, kept in a private file so that open pages survive a restart of the server."""
    place = folder / _PLACE / "page-token"
    token = secrets.token_urlsafe(32)
    with contextlib.suppress(OSError):
        _make_place(place.parent)
        (place.parent / "token").unlink(missing_ok=True)  # of an earlier version, which gave it to any visitor
        with contextlib.suppress(FileExistsError):
            _write_new(place, token)
        known = _private_text(place)
        if known is not None and len(known) >= _LEAST_CHARACTERS:
            return known
        write_private(place, token)
    return token


def write_private(place: Path, text: str) -> None:
    """Replaces a file that only its owner reads; whoever looks sees the old text or the new.

    Raises:
        OSError: no room, no permission, or the folder is not its own.
    """
    _make_place(place.parent)
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    try:
        _write_new(temporary, text)
        os.replace(temporary, place)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _make_place(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a symbolic link")


def _write_new(place: Path, text: str) -> None:
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)


def _private_text(place: Path) -> str | None:
    """The start of a file that nobody else can have written or read; None of another."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        status = os.fstat(fd)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        return file.read(200).strip() if private else None


class Entrance:
    """The way in of one server, from ``open`` to ``close``."""

    def __init__(self, folder: Path) -> None:
        self.asked = is_asked()
        self.cookie_token = page_token(folder)
        self._folder = folder
        self._address = ""
        self._once: str | None = None
        self._file: Path | None = None

    def open(self, address: str) -> None:
        """Tells how to get in, and opens a browser where somebody sits in front of the machine.

        Args:
            address: of the first page, without a token.
        """
        self._address = address
        if not self.asked:
            say(f"\n  Dashboard: {address}  ({SETTING} = off: open to every account of this machine)\n")
            return
        port = address.rpartition(":")[2].partition("/")[0]
        self._file = self._folder / _PLACE / f"dashboard-{port}.html"
        self._tell(self._invite())

    def _tell(self, invitation: str) -> None:
        """Where to go: the token itself is shown on a terminal only."""
        where = f"\n  Dashboard: {invitation if sys.stdout.isatty() else self._address}"
        if sys.stdout.isatty():
            say(f"{where}\n  The token works once; the browser that brings it stays known for 30 days.\n"
                f"  On a machine of your own {SETTING}=off asks for none.\n")
            if self._file is not None and _in_front():
                show(self._file)
        elif self._file is not None:
            say(f"{where}, with a token. Open {self._file} in a browser, or take the address from it:\n"
                "  only you can read it.\n")
        else:
            say(f"{where}, with a token that cannot be told: {self._folder} cannot be written, and this is no terminal."
                f"\n  Start it in a terminal, or with {SETTING}=off on a machine of your own.\n")

    def redeem(self, token: str) -> bool:
        """Whether this is the token that was told; from then on there is another one."""
        if self._once is None or not secrets.compare_digest(token.encode(), self._once.encode()):
            return False
        invitation = self._invite()
        if sys.stdout.isatty():
            say(f"  A browser was let in. For another one: {invitation}")
        return True

    def close(self) -> None:
        """From now on no token gets in."""
        self._once = None
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _invite(self) -> str:
        """A new token that works once; the address with it, which is also written to the private file."""
        self._once = secrets.token_urlsafe(32)
        invitation = f"{self._address}/?token={self._once}"
        if self._file is not None:
            try:
                write_private(self._file, _FILE.format(address=html.escape(invitation)))
            except OSError:
                self._file = None
        return invitation


def _in_front() -> bool:
    """True where a window would appear before who reads the terminal."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def show(file: Path) -> None:
    """Opens a file in the user's browser, whose words go nowhere; nothing happens where there is none."""
    command = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if command is None:
        return
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [command, str(file)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # A browser that was not open yet lasts as long as its window; somebody has to note its end.
        threading.Thread(target=process.wait, name="browser", daemon=True).start()
