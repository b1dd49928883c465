"""What the dashboard's server does before its first visitor comes."""

import asyncio
import socket
import sys
import threading
from pathlib import Path

import pytest
from harness import PATIENCE_S

pytest.importorskip("streamlit")

from spreeze.dashboard import navigation, server
from spreeze.dashboard.access import LoginTokens

NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture
def listener():
    """A socket as Streamlit makes it: its protocol is not named."""
    with socket.socket(socket.AF_INET) as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


def test_answers_of_a_listening_socket_are_sent_at_once(listener):
    assert server.disable_nagle() >= 1
    assert listener.getsockopt(*NO_DELAY) == 1
    caller = socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
    with caller, listener.accept()[0] as answering:
        assert answering.getsockopt(*NO_DELAY) == 1, "connections inherit it"
        answering.sendall(b"x")
        assert caller.recv(1) == b"x", "the descriptor is still open and its owner's"


def test_a_server_that_cannot_list_its_sockets_starts_all_the_same(monkeypatch):
    def hidden(*args):
        raise FileNotFoundError("/proc/net/tcp")

    monkeypatch.setattr("psutil.Process.net_connections", hidden)
    assert server.disable_nagle() == 0


def test_other_sockets_stay_as_they_are(listener):
    with (
        socket.socket(socket.AF_INET) as plain,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        server.disable_nagle()
        assert plain.getsockopt(*NO_DELAY) == 0
        assert all(one.fileno() >= 0 for one in (plain, local, datagrams))


def test_the_first_visitor_finds_the_pages_loaded_and_the_entrance_open(listener, tmp_path):
    tokens = LoginTokens(tmp_path)

    async def live():
        async with server.lifespan(tokens)(None) as state:
            assert state is None
            (file,) = (tmp_path / ".launches").glob("dashboard-*.html")
            assert "http://localhost:" in file.read_text()
        assert not file.exists()

    asyncio.run(live())
    for thread in threading.enumerate():
        if thread.name == "load pages":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert listener.getsockopt(*NO_DELAY) == 1
    modules = {of.partition(".")[0] for _, of in navigation.PAGES.values()}
    assert {f"spreeze.dashboard.{name}" for name in modules} <= set(sys.modules)


def test_every_page_of_the_navigation_is_there_and_streamlit_finds_none_of_its_own():
    assert all(callable(navigation.load(name)) for name in navigation.PAGES)
    assert not (Path(server.SCRIPT).parent / "pages").exists(), "the first visitor of /autotune would see nothing"
