"""Access control: without this server's cookie nothing is shown and nothing is done.

A page's actions travel over Streamlit's websocket. Streamlit compares only the host name of an origin, not its port;
here the whole origin must be the server's own, and the cookie must come with it.
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
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from spreeze.dashboard import control
from spreeze.dashboard.run_data import one_at_a_time
from spreeze.envs.make import has_display
from spreeze.errors import ResourceError
from spreeze.files import replace_bytes
from spreeze.machine.output import say
from spreeze.run_directory import LAUNCHES

SETTING = "SPREEZE_DASHBOARD_TOKEN"  # environment variable; ``off`` lets in everyone who reaches the port
_MIN_CHARACTERS = 43
_FILE = """<!DOCTYPE html>
<!-- {address} -->
<meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>Spreeze</title>
<meta http-equiv="refresh" content="0; url={address}">
<p><a href="{address}">Open the dashboard</a> (this address works once)</p>
"""


def is_token_required() -> bool:
    """True unless ``SETTING`` is ``off``: a visitor needs a token. Prints a note about invalid values."""
    value = os.environ.get(SETTING, "on").strip().lower()
    if value not in ("on", "off"):
        say(f"{SETTING} = {value}: must be on or off; access requires the token", as_json=True)
    return value != "off"


def page_token(folder: Path, *, token_required: bool = True) -> str:
    """The cookie's value, kept in a private file over restarts.

    A cookie handed out while no token was required is another: it lets nobody in once one is.
    """
    path = folder / LAUNCHES / ("browser-token" if token_required else "open-token")
    token = secrets.token_urlsafe(32)
    with contextlib.suppress(OSError, ResourceError):
        _make_private_folder(path.parent)
        with one_at_a_time(folder):  # two servers that start at once agree on a token
            known = _private_text(path)
            if known is not None and len(known) >= _MIN_CHARACTERS:
                return known
            write_private(path, token)
    return token


def write_private(path: Path, text: str) -> None:
    """Atomically replaces a file that only its owner can read; an OSError if it cannot, or the folder is a link."""
    _make_private_folder(path.parent)
    replace_bytes(path, text.encode(), mode=0o600)


def _make_private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a symbolic link")


def _private_text(path: Path) -> str | None:
    """The start of a file that only this user could read or write; None for any other file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        status = os.fstat(fd)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        return file.read(200).strip() if private else None


class LoginTokens:
    """Authorises browsers for one server, from ``open`` to ``close``."""

    def __init__(self, folder: Path) -> None:
        self.token_required = is_token_required()
        self.cookie_token = page_token(folder, token_required=self.token_required)
        self._folder = folder
        self._address = ""
        self._one_time_token: str | None = None
        self._file: Path | None = None

    def open(self, address: str) -> None:
        """Prints how to get in, and opens a browser on a desktop; ``address`` is the first page, without a token."""
        self._address = address
        if not self.token_required:
            say(f"\n  Dashboard: {address}  ({SETTING} = off: open to all accounts on this machine)\n")
            return
        port = address.rpartition(":")[2].partition("/")[0]
        self._file = self._folder / LAUNCHES / f"dashboard-{port}.html"
        self._print_invitation(self._invite())

    def _print_invitation(self, invitation: str) -> None:
        """Shows the token itself on a terminal only."""
        headline = f"\n  Dashboard: {invitation if sys.stdout.isatty() else self._address}"
        if sys.stdout.isatty():
            say(
                f"{headline}\n  The token works once; its browser stays authorised for 30 days.\n"
                f"  On your own machine, {SETTING}=off disables the token.\n"
            )
            if self._file is not None and "SSH_CONNECTION" not in os.environ and has_display():
                show(self._file)  # on the screen of whoever reads the terminal
        elif self._file is not None:
            say(
                f"{headline}, with a token. Open {self._file} in a browser, or copy the address from it:\n"
                "  only your account can read it.\n"
            )
        else:
            say(
                f"{headline}, with a token that cannot be stored: {self._folder} is not writable, and there is no "
                f"terminal.\n  Start it in a terminal, or with {SETTING}=off on a machine of your own.\n"
            )

    def redeem(self, token: str) -> bool:
        """True for the current token, which is then replaced by a new one."""
        if self._one_time_token is None or not secrets.compare_digest(token.encode(), self._one_time_token.encode()):
            return False
        invitation = self._invite()
        if sys.stdout.isatty():
            say(f"  New browser authorised. Address for another one: {invitation}")
        return True

    def close(self) -> None:
        self._one_time_token = None
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _invite(self) -> str:
        """Makes a token that works once; returns the address with it, which is also written to the private file."""
        self._one_time_token = secrets.token_urlsafe(32)
        invitation = f"{self._address}/?token={self._one_time_token}"
        if self._file is not None:
            try:
                write_private(self._file, _FILE.format(address=html.escape(invitation)))
            except OSError:
                self._file = None
        return invitation


def show(file: Path) -> None:
    """Opens a file in the user's browser, if there is one; its output is discarded."""
    command = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if command is None:
        return
    with contextlib.suppress(OSError):
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen([command, str(file)], start_new_session=True, **quiet)
        control.reap(process)  # a new browser process lasts as long as its window


_READING = ("GET", "HEAD", "OPTIONS")
_HEALTH = "/_stcore/health"  # open to everybody; says only whether the server is up
_PARAMETER = "token"
_COOKIE_S = 30 * 86_400
_FORBIDDEN, _SEE_OTHER = 403, 303
_PRIVATE = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
"""Headers: an address with a token is neither cached nor sent as Referer."""
_NO_FRAME = {"X-Frame-Options": "DENY"}
"""For browsers that do not send Sec-Fetch headers; no page of the dashboard frames another."""
_REJECTED = "this browser has no valid token for this dashboard"
_REMEDY = (
    "Open the latest address in the dashboard's terminal: it ends in a token that works once.",
    "Without that terminal, open the file .launches/dashboard-{port}.html in the directory of the runs.",
    f"On your own machine, start the dashboard with {SETTING}=off to disable the token.",
)
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Spreeze</title>
<style>:root {{ color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }} body {{ max-width: 42rem; \
margin: 4rem auto; padding: 0 1rem }}</style></head>
<body><h1>The dashboard does not know this browser</h1><p>It has no token, or an old one.</p>{remedy}</body></html>
"""


class Guard:
    """ASGI middleware: exchanges a one-time token for a cookie; all other requests need the cookie."""

    def __init__(self, app: ASGIApp, tokens: LoginTokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        cookie = request.cookies.get(_name(request), "")
        known = secrets.compare_digest(cookie.encode(), self._tokens.cookie_token.encode())
        visit = scope["type"] == "http" and scope["method"] == "GET"
        token = request.query_params.get(_PARAMETER) if visit and self._tokens.token_required else None
        if token is not None and (known or self._tokens.redeem(token)):
            await self._redirection(request)(scope, receive, send)
        elif not self._is_allowed(request, known=known):
            await _refusal(request)(scope, receive, send)
        else:
            await self._app(scope, receive, self._with_headers(request, send))

    def _is_allowed(self, request: HTTPConnection, *, known: bool) -> bool:
        headers = request.headers
        origin = headers.get("origin")
        same_origin = origin is None or urlsplit(origin).netloc == headers.get("host")
        if request.scope["type"] != "http" or request.scope["method"] not in _READING:
            return known and same_origin
        # A page of another site must not read anything, nor fetch a picture, which makes a run draw. Following a link
        # to this page is allowed; embedding it in an <iframe>, <object>, <embed> or <frame> is not.
        visit = (
            headers.get("sec-fetch-mode", "navigate") == "navigate"
            and headers.get("sec-fetch-dest", "document") == "document"
        )
        foreign = not same_origin or (headers.get("sec-fetch-site") in ("cross-site", "same-site") and not visit)
        return not foreign and (known or not self._tokens.token_required or request.scope["path"].endswith(_HEALTH))

    def _cookie(self, request: HTTPConnection) -> str:
        # Lax, not Strict: the browser is opened on a file, and a Strict cookie would not survive its redirect.
        # Other sites are covered: Lax keeps the cookie from their frames, and actions need the server's own origin.
        secure = "; Secure" if request.scope.get("scheme") in ("https", "wss") else ""
        name, token = _name(request), self._tokens.cookie_token
        return f"{name}={token}; Path=/; Max-Age={_COOKIE_S}; HttpOnly; SameSite=Lax{secure}"

    def _redirection(self, request: HTTPConnection) -> Response:
        """Redirects to the same page without the token, which keeps it out of history and Referer."""
        rest = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != _PARAMETER])
        # "//" would name another server.
        target = "/" + quote(request.scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
        return RedirectResponse(target, _SEE_OTHER, {"Set-Cookie": self._cookie(request), **_PRIVATE})

    def _with_headers(self, request: HTTPConnection, send: Send) -> Send:
        """Forbids frames of each page, and sets the cookie where no token is needed; other sites still cannot act."""

        async def with_headers(message: Message) -> None:
            if is_page(message):
                headers = MutableHeaders(scope=message)
                headers.update(_NO_FRAME)
                if not self._tokens.token_required:
                    headers.append("Set-Cookie", self._cookie(request))
            await send(message)

        return with_headers


def is_page(message: Message) -> bool:
    """True if a response that starts is a page for people."""
    if message["type"] != "http.response.start":
        return False
    return Headers(raw=[*message.get("headers", ())]).get("content-type", "").startswith("text/html")


def _name(request: HTTPConnection) -> str:
    """Cookies are shared by all ports, so two dashboards on one machine need two names."""
    return f"spreeze_{_port(request)}"


def _port(request: HTTPConnection) -> int:
    server = request.scope.get("server")
    return server[1] if server else 0


def _refusal(request: HTTPConnection) -> ASGIApp:
    """A page for people, JSON for scripts, or the end of a websocket."""
    if request.scope["type"] == "websocket":
        return WebSocketClose(code=1008, reason="no token")
    remedy = [line.format(port=_port(request)) for line in _REMEDY]
    if "text/html" in request.headers.get("accept", ""):
        page = _PAGE.format(remedy="".join(f"<p>{html.escape(line)}</p>" for line in remedy))
        return HTMLResponse(page, _FORBIDDEN, _NO_FRAME | _PRIVATE)
    return JSONResponse({"error": f"{_REJECTED}. {' '.join(remedy)}"}, _FORBIDDEN, _NO_FRAME | _PRIVATE)
