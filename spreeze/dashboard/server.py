"""The server of the dashboard: its startup, and the routes that the Live page polls."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import streamlit as st
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spreeze.dashboard import control, episode_api, live_api, navigation
from spreeze.dashboard.access import Guard, LoginTokens, is_page
from spreeze.dashboard.components import prefix
from spreeze.dashboard.run_data import run_path, runs_dir
from spreeze.errors import RunError
from spreeze.files import read_bytes
from spreeze.machine.processes import PAGE, take_name
from spreeze.run_directory import is_alive, send_request


def app_parts() -> dict[str, Any]:
    """Routes, middleware and lifespan of the app, by the arguments behind ``streamlit run app.py --``."""
    parser = argparse.ArgumentParser(prog="streamlit run app.py --", description="The dashboard of Spreeze.")
    text = "module whose modes and algorithms the Start form offers; it is imported by the runs, too"
    parser.add_argument("--import", dest="module", metavar="MODULE", default=control.imported(), help=text)
    if module := parser.parse_args().module:
        os.environ[control.IMPORT] = module
    take_name(PAGE)  # so that running trainings do not count the dashboard as external load
    tokens = LoginTokens(runs_dir())
    return {"routes": routes(), "middleware": middleware(tokens), "lifespan": lifespan(tokens)}


def lifespan(tokens: LoginTokens) -> Callable[[st.App], AbstractAsyncContextManager[None]]:
    """Lifespan of the server: prints the address with its token and loads the pages' modules before the first visit."""

    @contextlib.asynccontextmanager
    async def running(app: st.App) -> AsyncIterator[None]:
        disable_nagle()
        threading.Thread(target=_load_pages, name="load pages", daemon=True).start()
        tokens.open(address())
        try:
            yield None
        finally:
            tokens.close()
            episode_api.end_drawing()

    return running


def disable_nagle() -> int:
    """Disables Nagle's algorithm on all listening sockets of this process, where found; returns how many.

    asyncio does so only for sockets made with TCP as protocol, which Streamlit's (1.67) were not: the second part of
    each response waits up to 40 ms, and a page is ninety responses. Connections inherit the option.
    """
    count = 0
    with contextlib.suppress(OSError, RuntimeError, psutil.Error):  # a /proc that hides them, or one closed just now
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            shared = socket.socket(fileno=connection.fd)
            try:
                shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            finally:
                shared.detach()  # the descriptor belongs to the server
            count += 1
    return count


def _load_pages() -> None:
    for name in navigation.PAGES:
        navigation.load(name)


SCRIPT = str(Path(__file__).with_name("navigation.py"))
_MAX_PICTURE_BYTES = 2_000_000
_PICTURE_WAIT_S = 1.0
_PICTURE_POLL_S = 0.04


def routes() -> list[Route]:
    base = prefix()
    return [Route(f"{base}/api/live", live_api.live), Route(f"{base}/live.jpg", picture), *episode_api.routes(base)]


def address() -> str:
    """The address of the first page, once the server has its port."""
    scheme = "https" if st.get_option("server.sslCertFile") else "http"
    return f"{scheme}://localhost:{st.get_option('server.port')}{prefix()}"


def middleware(tokens: LoginTokens) -> list[Middleware]:
    """Rejects other Host headers (against DNS rebinding) and browsers without a token."""
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"]),
        Middleware(Guard, tokens=tokens),
        Middleware(BaseAddress),
    ]


class BaseAddress:
    """ASGI middleware: gives Streamlit's script the server's address, for direct links without failing requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None
        body = b""

        async def with_address(message: Message) -> None:
            nonlocal start, body
            if is_page(message):
                start = message
                return
            if start is None or message["type"] != "http.response.body":
                await send(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            script = f"window.__streamlit={{BACKEND_BASE_URL:location.origin+{json.dumps(prefix() + '/')}}}"
            body = body.replace(b"<head>", f"<head><script>{script}</script>".encode(), 1)
            MutableHeaders(scope=start)["Content-Length"] = str(len(body))
            await send(start)
            await send({**message, "body": body})

        plain = scope["type"] != "http" or scope["method"] != "GET"
        if not plain and "text/html" in (headers := MutableHeaders(scope=scope)).get("accept", ""):
            del headers["accept-encoding"]  # a compressed page could not be changed
        await self._app(scope, receive, send if plain else with_address)


async def picture(request: Request) -> Response:
    """The agent's newest picture once it differs from ``after``, 204 after a second; makes the visualizer render."""
    try:
        path = run_path(request.query_params.get("run", ""), runs_dir())
    except RunError:
        return Response(status_code=204, headers=live_api.HEADERS)
    await asyncio.to_thread(mark_watched, path)
    deadline_s = time.monotonic() + _PICTURE_WAIT_S
    while True:
        tag, data = read_picture(path / "live.jpg", request.query_params.get("after", ""))
        if data is not None:
            return Response(data, media_type="image/jpeg", headers={**live_api.HEADERS, "X-Picture": tag})
        if time.monotonic() >= deadline_s or await request.is_disconnected():
            return Response(status_code=204, headers=live_api.HEADERS)
        await asyncio.sleep(_PICTURE_POLL_S)


def read_picture(path: Path, known: str) -> tuple[str, bytes | None]:
    """The picture's tag and bytes; no bytes if it is missing, a link, or already known."""
    try:
        tag = str(path.stat(follow_symlinks=False).st_mtime_ns)
        if tag == known or path.is_symlink():
            return tag, None
        return tag, read_bytes(path, _MAX_PICTURE_BYTES)
    except (OSError, ValueError):
        return "", None


def mark_watched(path: Path) -> None:
    """Touches ``control/viewer`` of a live run, at most once a second, so that its visualizer renders."""
    mark = path / "control" / "viewer"
    with contextlib.suppress(OSError):
        if abs(time.time() - mark.stat().st_mtime) < 1.0:  # the clock may have been set back since
            return
    if is_alive(path):
        with contextlib.suppress(RunError):
            send_request(path, "viewer")
