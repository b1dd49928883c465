"""Nothing without the cookie, the cookie only for a token that works once; and no action from another origin."""

import asyncio
import json

import pytest

pytest.importorskip("streamlit")
from spreeze.dashboard.access import SETTING, Guard, LoginTokens
from spreeze.dashboard.compare import CONFIG

ONCE = "o" * 43


async def inner(scope, receive, send):
    if scope["type"] == "lifespan":
        await send({"type": "lifespan.startup.complete"})
        return
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    kind = b"text/html; charset=utf-8" if scope["path"] == "/" else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    made = LoginTokens(tmp_path / "runs")
    made.open("http://localhost:8501")
    made._one_time_token = ONCE
    return made


@pytest.fixture
def ask(tokens):
    """Sends one request through the guard; returns all that it answers."""

    def asked(kind, path="/", method="GET", query="", scheme="http", **headers):
        sent = []
        scope = {
            "type": kind,
            "path": path,
            "method": method,
            "server": ("127.0.0.1", 8501),
            "scheme": scheme,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        }

        async def receive():
            return {"type": f"{kind}.connect"}

        async def send(message):
            sent.append(message)

        asyncio.run(Guard(inner, tokens)(scope, receive, send))
        return sent

    return asked


@pytest.fixture
def cookie(tokens):
    return f"a=b; spreeze_8501={tokens.cookie_token}"


def test_the_token_becomes_a_cookie_and_leaves_the_address(ask, tokens):
    answer = ask("http", "/runs", query=f"run=a%20b&token={ONCE}&x=1")[0]
    headers = dict(answer["headers"])
    assert answer["status"] == 303
    assert headers[b"location"] == b"/runs?run=a+b&x=1"
    assert (
        headers[b"set-cookie"]
        == (f"spreeze_8501={tokens.cookie_token}; Path=/; Max-Age=2592000; HttpOnly; SameSite=Lax").encode()
    )
    assert headers[b"referrer-policy"] == b"no-referrer"
    assert headers[b"cache-control"] == b"no-store"
    assert ONCE.encode() not in headers[b"location"] + headers[b"set-cookie"]


def test_the_token_works_once(ask):
    assert ask("http", query=f"token={ONCE}")[0]["status"] == 303
    again = ask("http", query=f"token={ONCE}")[0]
    assert again["status"] == 403
    assert b"set-cookie" not in dict(again["headers"])


def test_a_known_browser_needs_no_token_and_uses_none_up(ask, cookie):
    assert ask("http", query="token=used-long-ago", cookie=cookie)[0]["status"] == 303
    assert ask("http", query=f"token={ONCE}", cookie=cookie)[0]["status"] == 303
    assert ask("http", query=f"token={ONCE}")[0]["status"] == 303


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("//evil.example/x", b"/evil.example/x"),
        ("/\\evil.example", b"/%5Cevil.example"),
        ("", b"/"),
        ("/a\r\nset-cookie: x", b"/a%0D%0Aset-cookie%3A%20x"),
        ("/base/runs", b"/base/runs"),
    ],
)
def test_the_way_on_stays_on_this_server(ask, path, place):
    assert dict(ask("http", path, query=f"token={ONCE}")[0]["headers"])[b"location"] == place


@pytest.mark.parametrize(
    "query",
    [
        "",
        "token=",
        "token=wrong",
        "token=%00",
        "token=%C3%A9",
        "token",
        "Token=" + ONCE,
        "token=" + ONCE[:-1],
        "xtoken=" + ONCE,
    ],
)
def test_without_the_right_token_nothing_is_shown(ask, query):
    for path in ("/", "/runs", "/api/live", "/live.jpg", "/media/x.mp4", "/static/js/x.js", "/_stcore/host-config"):
        answer = ask("http", path, query=query)[0]
        assert answer["status"] == 403
        assert b"set-cookie" not in dict(answer["headers"])


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "OPTIONS"])
def test_a_token_is_brought_by_opening_a_page_only(ask, method):
    assert ask("http", method=method, query=f"token={ONCE}")[0]["status"] == 403
    assert ask("http", query=f"token={ONCE}")[0]["status"] == 303, "it was not used up"


def test_a_person_is_told_what_to_do_and_a_script_too(ask):
    start, body = ask("http", accept="text/html,*/*")
    assert dict(start["headers"])[b"content-type"].startswith(b"text/html")
    for words in (b"ends in a token", b".launches/dashboard-8501.html", b"SPREEZE_DASHBOARD_TOKEN=off"):
        assert words in body["body"]
    start, body = ask("http", "/api/live", accept="*/*")
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert "dashboard-8501.html" in json.loads(body["body"])["error"]


def test_whether_the_server_is_up_is_no_secret(ask):
    assert ask("http", "/_stcore/health")[0]["status"] == 200
    assert ask("http", "/_stcore/health", method="POST")[0]["status"] == 403


def test_a_known_browser_reads_everything_and_gets_no_other_cookie(ask, cookie):
    for path in ("/", "/api/live", "/media/x.mp4"):
        answer = ask("http", path, cookie=cookie)[0]
        assert answer["status"] == 200
        assert b"set-cookie" not in dict(answer["headers"])


@pytest.mark.parametrize("other", ['session={"user": 1}', "a[0]=b", "x=\xe4", "name with space=1", "alone", ""])
def test_cookies_of_other_programs_of_this_machine_lock_nobody_out(ask, cookie, other):
    assert ask("http", cookie=f"{other}; {cookie}")[0]["status"] == 200


def test_the_websocket_opens_with_the_token_and_the_whole_origin(ask, cookie):
    good = {"host": "localhost:8501", "cookie": cookie}
    assert ask("websocket", origin="http://localhost:8501", **good)[0]["type"] == "websocket.accept"
    assert ask("websocket", **good)[0]["type"] == "websocket.accept"
    assert ask("websocket", query=f"token={ONCE}", host="localhost:8501")[0]["type"] == "websocket.close"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"cookie": "spreeze_8501=wrong"},
        {"cookie": "spreeze_8502=TOKEN"},
        {"cookie": "=;;\x00"},
        {"cookie": f"spreeze_8501={ONCE}"},
        {"cookie": "spreeze_8501="},
        {"cookie": "spreeze_8501=TOKEN", "origin": "http://localhost:9999"},
        {"cookie": "spreeze_8501=TOKEN", "origin": "null"},
        {"cookie": "spreeze_8501=TOKEN", "origin": "https://evil.example"},
    ],
)
@pytest.mark.parametrize("asked", [True, False])
def test_anybody_else_is_refused(ask, tokens, headers, asked):
    tokens.token_required = asked
    headers = {name: value.replace("TOKEN", tokens.cookie_token) for name, value in headers.items()}
    assert ask("websocket", host="localhost:8501", **headers)[0]["type"] == "websocket.close"
    assert ask("http", method="POST", host="localhost:8501", **headers)[0]["status"] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
        *(
            {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": dest}
            for dest in ("iframe", "frame", "object", "embed", "empty")
        ),
    ],
)
@pytest.mark.parametrize("asked", [True, False])
def test_other_sites_cannot_even_read_or_ask_for_a_picture(ask, tokens, cookie, headers, asked):
    tokens.token_required = asked
    for path in ("/api/live", "/live.jpg", "/"):
        assert ask("http", path, host="localhost:8501", cookie=cookie, **headers)[0]["status"] == 403


def test_the_page_itself_and_a_link_to_it_may_be_read(ask, cookie):
    own = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "origin": "http://localhost:8501"}
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for headers in (own, link, {}):
        assert ask("http", host="localhost:8501", cookie=cookie, **headers)[0]["status"] == 200


@pytest.mark.parametrize("asked", [True, False])
def test_no_page_may_be_framed(ask, tokens, cookie, asked):
    tokens.token_required = asked
    for headers in ({"cookie": cookie}, {"accept": "text/html", "origin": "null"}):
        assert dict(ask("http", **headers)[0]["headers"])[b"x-frame-options"] == b"DENY"
    assert b"x-frame-options" not in dict(ask("http", "/api/live", cookie=cookie)[0]["headers"])


def test_switched_off_each_page_lets_in_and_other_origins_still_cannot_act(ask, tokens, cookie):
    tokens.token_required = False
    page = dict(ask("http")[0]["headers"])
    assert page[b"set-cookie"].startswith(f"spreeze_8501={tokens.cookie_token};".encode())
    answer = ask("http", "/api/live")[0]
    assert answer["status"] == 200
    assert b"set-cookie" not in dict(answer["headers"])
    assert ask("websocket", host="localhost:8501", cookie=cookie)[0]["type"] == "websocket.accept"


def test_over_tls_the_cookie_stays_there(ask):
    assert dict(ask("http", query=f"token={ONCE}", scheme="https")[0]["headers"])[b"set-cookie"].endswith(b"; Secure")


def test_the_server_s_own_messages_pass(tokens):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(inner, tokens)({"type": "lifespan"}, None, send))
    assert sent == [{"type": "lifespan.startup.complete"}]


def test_no_chart_offers_to_send_itself_away():
    assert CONFIG["showSendToCloud"] is False
    assert CONFIG["plotlyServerURL"] == ""
