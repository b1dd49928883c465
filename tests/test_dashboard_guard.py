"""No action without the page's own token: the websocket, and whatever writes, ask for it."""

import asyncio

import pytest

pytest.importorskip("streamlit")
from spreeze.dashboard.guard import Guard, page_token
from spreeze.dashboard.page_compare import CONFIG

TOKEN = "t" * 43


async def inner(scope, receive, send):
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    kind = b"text/html; charset=utf-8" if scope["path"] == "/" else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": b""})


def first_answer(kind, path="/", method="GET", **headers):
    sent = []
    scope = {"type": kind, "path": path, "method": method, "server": ("127.0.0.1", 8501),
             "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}

    async def receive():
        return {"type": f"{kind}.connect"}

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(inner, TOKEN)(scope, receive, send))
    return sent[0]


def test_a_page_hands_the_token_out_and_data_do_not():
    headers = dict(first_answer("http")["headers"])
    assert headers[b"set-cookie"] == f"spreeze_8501={TOKEN}; Path=/; HttpOnly; SameSite=Strict".encode()
    assert b"set-cookie" not in dict(first_answer("http", "/api/live")["headers"])


def test_the_websocket_opens_with_the_token_and_the_whole_origin():
    good = {"host": "localhost:8501", "cookie": f"a=b; spreeze_8501={TOKEN}"}
    assert first_answer("websocket", origin="http://localhost:8501", **good)["type"] == "websocket.accept"
    assert first_answer("websocket", **good)["type"] == "websocket.accept"


@pytest.mark.parametrize("headers", [
    {}, {"cookie": "spreeze_8501=wrong"}, {"cookie": f"spreeze_8502={TOKEN}"}, {"cookie": "=;;\x00"},
    {"cookie": f"spreeze_8501={TOKEN}", "origin": "http://localhost:9999"},
    {"cookie": f"spreeze_8501={TOKEN}", "origin": "null"},
    {"cookie": f"spreeze_8501={TOKEN}", "origin": "https://evil.example"},
])
def test_anybody_else_is_refused(headers):
    assert first_answer("websocket", host="localhost:8501", **headers)["type"] == "websocket.close"
    assert first_answer("http", method="POST", host="localhost:8501", **headers)["status"] == 403


def test_reading_needs_no_token():
    assert first_answer("http", "/api/live", host="localhost:8501")["status"] == 200


def test_the_token_of_a_folder_is_private_and_stays(tmp_path):
    token = page_token(tmp_path / "runs")
    assert len(token) >= 43
    assert page_token(tmp_path / "runs") == token
    place = tmp_path / "runs" / ".launches" / "token"
    assert place.stat().st_mode & 0o077 == 0
    place.write_text("short")
    assert len(page_token(tmp_path / "runs")) >= 43


def test_no_chart_offers_to_send_itself_away():
    assert CONFIG["showSendToCloud"] is False
    assert CONFIG["plotlyServerURL"] == ""


def test_a_folder_that_cannot_be_written_gives_a_token_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    assert len(page_token(tmp_path / "file")) >= 43
