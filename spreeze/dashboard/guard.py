"""The guard before everything that the server answers: who holds no cookie of it sees nothing and does nothing.

A page's actions travel over Streamlit's websocket. Streamlit compares host names of origins but not their
ports; here the whole origin has to be the server's own, and the cookie has to come with it.
"""

from __future__ import annotations

import html
import json
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spreeze.dashboard.entrance import SETTING, Entrance

_READING = ("GET", "HEAD", "OPTIONS")
_HEALTH = "/_stcore/health"
"""Tells anybody whether the server is up, and no more."""
_PARAMETER = "token"
_COOKIE_S = 30 * 86_400
_FORBIDDEN, _SEE_OTHER = 403, 303
_PRIVATE = [(b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer")]
"""Neither an address with a token nor an answer to it is kept or handed on."""
_TOLD = "this browser has no token of this dashboard, or an old one"
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
    """ASGI middleware: a token that works once becomes a cookie; everything else asks for the cookie."""

    def __init__(self, app: ASGIApp, entrance: Entrance) -> None:
        self._app = app
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reads = scope["type"] == "http" and scope["method"] in _READING
        known = self._knows(headers, scope)
        brought = _brought(scope) if self._entrance.asked else None
        if brought is not None and (known or self._entrance.redeem(brought)):
            await _redirect(scope, send, self._cookie(scope))
        elif not self._lets_in(scope, headers, reads=reads, known=known):
            await _refuse(scope, headers, receive, send)
        elif self._entrance.asked:
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, self._handing_out(scope, send))

    def _lets_in(self, scope: Scope, headers: dict[str, str], *, reads: bool, known: bool) -> bool:
        if reads:
            return known or not self._entrance.asked or scope["path"].endswith(_HEALTH)
        origin = headers.get("origin")
        return known and (origin is None or urlsplit(origin).netloc == headers.get("host"))

    def _knows(self, headers: dict[str, str], scope: Scope) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(_name(scope))
        except CookieError:
            return False
        return found is not None and secrets.compare_digest(found.value.encode(), self._entrance.cookie_token.encode())

    def _cookie(self, scope: Scope) -> tuple[bytes, bytes]:
        # Lax, not Strict: the browser that is opened comes from a file, and its way on would go without the cookie.
        # Requests of other sites are covered: Lax keeps it from their frames, and acting asks for the whole origin.
        secure = "; Secure" if scope.get("scheme") in ("https", "wss") else ""
        text = (f"{_name(scope)}={self._entrance.cookie_token}; Path=/; Max-Age={_COOKIE_S}; HttpOnly; "
                f"SameSite=Lax{secure}")
        return b"set-cookie", text.encode("ascii")

    def _handing_out(self, scope: Scope, send: Send) -> Send:
        """Without a token each page hands the cookie out: other sites' pages still cannot act."""

        async def with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_page(message.get("headers", ())):
                message["headers"] = [*message.get("headers", ()), self._cookie(scope)]
            await send(message)

        return with_cookie


def _name(scope: Scope) -> str:
    """Cookies know no ports: two dashboards on one machine need two names."""
    return f"spreeze_{_port(scope)}"


def _port(scope: Scope) -> int:
    server = scope.get("server")
    return server[1] if server else 0


def _brought(scope: Scope) -> str | None:
    """The token in the address of a page that is opened."""
    if scope["type"] != "http" or scope["method"] != "GET":
        return None
    return dict(_query(scope)).get(_PARAMETER)


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)


def _is_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/html") for name, value in headers)


async def _redirect(scope: Scope, send: Send, cookie: tuple[bytes, bytes]) -> None:
    """To the same page without the token, so that neither history nor a link's Referer has it."""
    rest = urlencode([pair for pair in _query(scope) if pair[0] != _PARAMETER])
    place = "/" + quote(scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")  # two slashes would be another server
    headers = [(b"location", place.encode("ascii")), cookie, *_PRIVATE]
    await send({"type": "http.response.start", "status": _SEE_OTHER, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(scope: Scope, headers: dict[str, str], receive: Receive, send: Send) -> None:
    """A page for a person, a document for a page's script, a closed websocket."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "no token"})
        return
    remedy = [line.format(port=_port(scope)) for line in _REMEDY]
    if "text/html" in headers.get("accept", ""):
        kind = b"text/html; charset=utf-8"
        body = _PAGE.format(remedy="".join(f"<p>{html.escape(line)}</p>" for line in remedy))
    else:
        kind, body = b"application/json", json.dumps({"error": f"{_TOLD}. {' '.join(remedy)}"})
    told = [(b"content-type", kind), *_PRIVATE]
    await send({"type": "http.response.start", "status": _FORBIDDEN, "headers": told})
    await send({"type": "http.response.body", "body": body.encode()})
