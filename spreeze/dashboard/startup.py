"""What the server does once, before anybody visits: the first page shall not wait for it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import streamlit as st

from spreeze.dashboard import pages, routes
from spreeze.dashboard.entrance import Entrance

_TCP = (socket.AF_INET, socket.AF_INET6)


def life(entrance: Entrance) -> Callable[[st.App], AbstractAsyncContextManager[None]]:
    """The server's life: the entrance is open, and pages' modules load while the first browser is still on its way."""

    @contextlib.asynccontextmanager
    async def lived(app: st.App) -> AsyncIterator[None]:
        send_at_once()
        threading.Thread(target=_load_pages, name="load pages", daemon=True).start()
        entrance.open(routes.address())
        try:
            yield None
        finally:
            entrance.close()

    return lived


def send_at_once() -> int:
    """Takes Nagle's delay off every socket that this process listens on; returns how many there were.

    asyncio does so only for sockets that name TCP as their protocol, and Streamlit's (1.67) does not: the second part
    of each answer then waits until the browser acknowledges the first, which takes it 40 ms. A page is ninety answers.
    Connections inherit the option.
    """
    changed = 0
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                changed += _without_delay(socket.socket(fileno=int(name)))
    return changed


def _without_delay(shared: socket.socket) -> bool:
    """Whether it listens for TCP; the descriptor stays its owner's."""
    try:
        listens = bool(shared.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and shared.family in _TCP
        if listens:
            shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listens
    finally:
        shared.detach()


def _load_pages() -> None:
    for name in pages.TITLES:
        pages.load(name)
