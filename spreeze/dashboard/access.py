"""Access control: without this server's cookie nothing is shown and nothing is done.

A page's actions travel over Streamlit's websocket. Streamlit compares only the host name of an origin, not its port;
here the whole origin must be the server's own, and the cookie must come with it.
"""
from __future__ import annotations

import contextlib
import html
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spreeze.dashboard.run_data import LAUNCHES
from spreeze.envs.make import has_display
from spreeze.machine.output import say

SETTING = "SPREEZE_DASHBOARD_TOKEN"
"""Environment variable; with ``off`` whoever reaches the port gets in."""
_LEAST_CHARACTERS = 43
_FILE = """<!DOCTYPE html>
<!-- {address} -->
<meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>Spreeze</title>
<meta http-equiv="refresh" content="0; url={address}">
<p><a href="{address}">Open the dashboard</a> (this address works once)</p>
"""


def is_asked() -> bool:
    """Whether a visitor needs a token; only ``off`` says no. Prints a note about invalid values."""
    found = os.environ.get(SETTING, "on").strip().lower()
    if found not in ("on", "off"):
        say(f"{SETTING} = {found}: on or off are allowed; the dashboard asks for its token", as_json=True)
    return found != "off"


def page_token(folder: Path, *, asked: bool = True) -> str:
    """The cookie's value, kept in a private file so that open pages survive a restart of the server.

    One that is handed out without asking for a token lets nobody in once tokens are asked for.
    """
    place = folder / LAUNCHES / ("browser-token" if asked else "open-token")
    token = secrets.token_urlsafe(32)
    with contextlib.suppress(OSError):
        _make_place(place.parent)
        for name in ("token", "page-token"):  # of earlier versions, which gave them to any visitor
            (place.parent / name).unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            _write_new(place, token)
        known = _private_text(place)
        if known is not None and len(known) >= _LEAST_CHARACTERS:
            return known
        write_private(place, token)
    return token


def write_private(place: Path, text: str) -> None:
    """Atomically replaces a file that only its owner can read.

    Raises:
        OSError: disk full, no permission, or the folder is a symbolic link.
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
    """The start of a file that only this user could read or write; None for any other file."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        status = os.fstat(fd)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        return file.read(200).strip() if private else None


class Entrance:
    """Lets browsers in to one server, from ``open`` to ``close``."""

    def __init__(self, folder: Path) -> None:
        self.asked = is_asked()
        self.cookie_token = page_token(folder, asked=self.asked)
        self._folder = folder
        self._address = ""
        self._once: str | None = None
        self._file: Path | None = None

    def open(self, address: str) -> None:
        """Prints how to get in, and opens a browser on a desktop; ``address`` is the first page, without a token."""
        self._address = address
        if not self.asked:
            say(f"\n  Dashboard: {address}  ({SETTING} = off: open to every account of this machine)\n")
            return
        port = address.rpartition(":")[2].partition("/")[0]
        self._file = self._folder / LAUNCHES / f"dashboard-{port}.html"
        self._print_invitation(self._invite())

    def _print_invitation(self, invitation: str) -> None:
        """Shows the token itself on a terminal only."""
        where = f"\n  Dashboard: {invitation if sys.stdout.isatty() else self._address}"
        if sys.stdout.isatty():
            say(f"{where}\n  The token works once; the browser that brings it stays known for 30 days.\n"
                f"  On a machine of your own {SETTING}=off asks for none.\n")
            if self._file is not None and _has_desktop():
                show(self._file)
        elif self._file is not None:
            say(f"{where}, with a token. Open {self._file} in a browser, or take the address from it:\n"
                "  only you can read it.\n")
        else:
            say(f"{where}, with a token that cannot be shown: {self._folder} cannot be written, and this is no "
                f"terminal.\n  Start it in a terminal, or with {SETTING}=off on a machine of your own.\n")

    def redeem(self, token: str) -> bool:
        """Whether this is the current token; if so, it is replaced by a new one."""
        if self._once is None or not secrets.compare_digest(token.encode(), self._once.encode()):
            return False
        invitation = self._invite()
        if sys.stdout.isatty():
            say(f"  A browser was let in. For another one: {invitation}")
        return True

    def close(self) -> None:
        self._once = None
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _invite(self) -> str:
        """Makes a token that works once; returns the address with it, which is also written to the private file."""
        self._once = secrets.token_urlsafe(32)
        invitation = f"{self._address}/?token={self._once}"
        if self._file is not None:
            try:
                write_private(self._file, _FILE.format(address=html.escape(invitation)))
            except OSError:
                self._file = None
        return invitation


def _has_desktop() -> bool:
    """Whether a window would appear on the screen of whoever reads the terminal."""
    return "SSH_CONNECTION" not in os.environ and has_display()


def show(file: Path) -> None:
    """Opens a file in the user's browser, if there is one; its output is discarded."""
    command = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if command is None:
        return
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [command, str(file)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # A new browser process lasts as long as its window; without a wait it would end as a zombie.
        threading.Thread(target=process.wait, name="browser", daemon=True).start()


_READING = ("GET", "HEAD", "OPTIONS")
_HEALTH = "/_stcore/health"
"""Open to everybody; says only whether the server is up."""
_PARAMETER = "token"
_COOKIE_S = 30 * 86_400
_FORBIDDEN, _SEE_OTHER = 403, 303
_PRIVATE = [(b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer")]
"""So that an address with a token is neither cached nor sent as a Referer."""
_NO_FRAME = (b"x-frame-options", b"DENY")
"""For browsers that do not say what they load a page for; no page of ours frames another."""
_REJECTED = "this browser has no token of this dashboard, or an old one"
_REMEDY = (
    "Open the address that the dashboard's terminal shows last: it ends in a token, which works once.",
    "Without that terminal: open the file .launches/dashboard-{port}.html in the directory of the runs.",
    f"On a machine of your own {SETTING}=off, set before the dashboard is started, asks for no token.",
)
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Spreeze</title>
<style>:root {{ color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }} body {{ max-width: 42rem; \
margin: 4rem auto; padding: 0 1rem }}</style></head>
<body><h1>The dashboard does not know this browser</h1><p>It has no token, or an old one.</p>{remedy}</body></html>
"""


class Guard:
    """ASGI middleware: exchanges a one-time token for a cookie; all other requests need the cookie."""

    def __init__(self, app: ASGIApp, entrance: Entrance) -> None:
        self._app = app
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reads = scope["type"] == "http" and scope["method"] in _READING
        known = self._knows(headers, scope)
        token = _token_of(scope) if self._entrance.asked else None
        if token is not None and (known or self._entrance.redeem(token)):
            await _redirect(scope, send, self._cookie(scope))
        elif not self._lets_in(scope, headers, reads=reads, known=known):
            await _reject(scope, headers, receive, send)
        else:
            await self._app(scope, receive, self._with_headers(scope, send))

    def _lets_in(self, scope: Scope, headers: dict[str, str], *, reads: bool, known: bool) -> bool:
        origin = headers.get("origin")
        own = origin is None or urlsplit(origin).netloc == headers.get("host")
        if not reads:
            return known and own
        # A page of another site must not even read, or fetch a picture, which asks a run to draw. Following a link to
        # this page is no reading by that site; its <iframe>, <object>, <embed> or <frame> is.
        visit = (headers.get("sec-fetch-mode", "navigate") == "navigate"
                 and headers.get("sec-fetch-dest", "document") == "document")
        foreign = not own or (headers.get("sec-fetch-site") in ("cross-site", "same-site") and not visit)
        return not foreign and (known or not self._entrance.asked or scope["path"].endswith(_HEALTH))

    def _knows(self, headers: dict[str, str], scope: Scope) -> bool:
        # Not SimpleCookie, which drops all that follows a cookie that it cannot read: other programs of localhost set
        # some of these.
        found = cookie_parser(headers.get("cookie", "")).get(_name(scope))
        return found is not None and secrets.compare_digest(found.encode(), self._entrance.cookie_token.encode())

    def _cookie(self, scope: Scope) -> tuple[bytes, bytes]:
        # Lax, not Strict: the browser is opened on a file, and a Strict cookie would not survive its redirect.
        # Other sites are covered: Lax keeps the cookie from their frames, and actions need the server's own origin.
        secure = "; Secure" if scope.get("scheme") in ("https", "wss") else ""
        text = (f"{_name(scope)}={self._entrance.cookie_token}; Path=/; Max-Age={_COOKIE_S}; HttpOnly; "
                f"SameSite=Lax{secure}")
        return b"set-cookie", text.encode("ascii")

    def _with_headers(self, scope: Scope, send: Send) -> Send:
        """Forbids frames of each page, and sets the cookie where no token is needed; other sites still cannot act."""
        more = [_NO_FRAME] if self._entrance.asked else [_NO_FRAME, self._cookie(scope)]

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_page(message.get("headers", ())):
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        return with_headers


def _name(scope: Scope) -> str:
    """Cookies are shared by all ports, so two dashboards on one machine need two names."""
    return f"spreeze_{_port(scope)}"


def _port(scope: Scope) -> int:
    server = scope.get("server")
    return server[1] if server else 0


def _token_of(scope: Scope) -> str | None:
    """The token in the address of a requested page."""
    if scope["type"] != "http" or scope["method"] != "GET":
        return None
    return dict(_query(scope)).get(_PARAMETER)


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)


def _is_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/html") for name, value in headers)


async def _redirect(scope: Scope, send: Send, cookie: tuple[bytes, bytes]) -> None:
    """Redirects to the same page without the token, so that neither history nor Referer has it."""
    rest = urlencode([pair for pair in _query(scope) if pair[0] != _PARAMETER])
    place = "/" + quote(scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")  # "//" would name another server
    headers = [(b"location", place.encode("ascii")), cookie, *_PRIVATE]
    await send({"type": "http.response.start", "status": _SEE_OTHER, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _reject(scope: Scope, headers: dict[str, str], receive: Receive, send: Send) -> None:
    """Answers with a page for people, JSON for scripts, or closes the websocket."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "no token"})
        return
    remedy = [line.format(port=_port(scope)) for line in _REMEDY]
    if "text/html" in headers.get("accept", ""):
        kind = b"text/html; charset=utf-8"
        body = _PAGE.format(remedy="".join(f"<p>{html.escape(line)}</p>" for line in remedy))
    else:
        kind, body = b"application/json", json.dumps({"error": f"{_REJECTED}. {' '.join(remedy)}"})
    answer_headers = [(b"content-type", kind), _NO_FRAME, *_PRIVATE]
    await send({"type": "http.response.start", "status": _FORBIDDEN, "headers": answer_headers})
    await send({"type": "http.response.body", "body": body.encode()})
