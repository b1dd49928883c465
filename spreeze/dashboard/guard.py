"""The page's own token: who was not handed it by a page of this server can look, but not act.

A page's actions travel over Streamlit's websocket. Streamlit compares host names of origins but not their
ports; here the whole origin has to be the server's own, and the token has to come with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_READING = ("GET", "HEAD", "OPTIONS")
_FORBIDDEN = 403


def page_token(folder: Path) -> str:
    """The token of a runs directory, kept in a private file so that open pages survive a restart of the server."""
    place = folder / ".launches" / "token"
    token = secrets.token_urlsafe(32)
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(token)
        with open(place, encoding="ascii", errors="replace") as file:
            known = file.read(200).strip()
        token = known if len(known) >= len(token) else token
    return token


class Guard:
    """ASGI middleware: hands the token out with each page, asks for it on the websocket and on whatever writes."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        acts = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] not in _READING)
        if acts and not self._allowed(scope):
            await _refuse(scope, receive, send)
            return

        async def with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_page(message.get("headers", ())):
                cookie = f"{_name(scope)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                message["headers"] = [*message.get("headers", ()), (b"set-cookie", cookie.encode("ascii"))]
            await send(message)

        await self._app(scope, receive, with_cookie)

    def _allowed(self, scope: Scope) -> bool:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return False
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(_name(scope))
        except CookieError:
            return False
        return found is not None and secrets.compare_digest(found.value.encode(), self._token.encode())


def _name(scope: Scope) -> str:
    """Cookies know no ports: two dashboards on one machine need two names."""
    server = scope.get("server")
    return f"spreeze_{server[1] if server else 0}"


def _is_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/html") for name, value in headers)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "no token: reload the page"})
        return
    await send({"type": "http.response.start", "status": _FORBIDDEN, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"no token: reload the page\n"})
