"""The way into the dashboard: told on the terminal or in a private file, and nowhere else."""

import contextlib
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import dashboard_browser as web
import pytest
from harness import PATIENCE_S, REPO

pytest.importorskip("streamlit")
from spreeze.dashboard import access as entrances
from spreeze.dashboard.access import SETTING, LoginTokens, is_token_required, page_token, write_private

ADDRESS = "http://localhost:8501"
TOKEN = re.compile(r"\?token=([\w-]{43})")
NO_BROWSER = pytest.mark.skipif(web.missing() is not None, reason=str(web.missing()))


class Output:
    """Standard output, a terminal or not, as the entrance sees it."""

    def __init__(self, monkeypatch, *, is_terminal):
        self.text = ""
        stdout = SimpleNamespace(isatty=lambda: is_terminal)
        monkeypatch.setattr(entrances, "sys", SimpleNamespace(stdout=stdout, platform="linux"))
        monkeypatch.setattr(entrances, "say", self.say)

    def say(self, text, **_):
        self.text += text + "\n"


@pytest.fixture
def shown(monkeypatch):
    """Files that were opened in a browser; no real one opens."""
    found = []
    monkeypatch.setattr(entrances, "show", found.append)
    for name in ("SSH_CONNECTION", "WAYLAND_DISPLAY", SETTING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    return found


@pytest.fixture
def terminal(monkeypatch, shown):
    return Output(monkeypatch, is_terminal=True)


@pytest.fixture
def log(monkeypatch, shown):
    return Output(monkeypatch, is_terminal=False)


def private(place):
    return stat.S_IMODE(place.stat().st_mode) == 0o600


def test_a_terminal_shows_the_address_with_its_token_and_a_browser_opens(tmp_path, terminal, shown):
    door = LoginTokens(tmp_path)
    door.open(ADDRESS)
    (token,) = TOKEN.findall(terminal.text)
    file = tmp_path / ".launches" / "dashboard-8501.html"
    assert shown == [file]
    assert private(file)
    assert set(TOKEN.findall(file.read_text())) == {token}
    assert "referrer" in file.read_text()
    assert door.redeem(token)
    again = TOKEN.findall(terminal.text)[-1]
    assert again != token, "the next browser finds an address too"
    assert set(TOKEN.findall(file.read_text())) == {again}
    assert not door.redeem(token)
    assert door.redeem(again)
    assert shown == [file], "no second window"
    last = TOKEN.findall(terminal.text)[-1]
    door.close()
    assert not file.exists()
    assert not door.redeem(last)


def test_a_log_holds_no_token_and_names_the_private_file(tmp_path, log, shown):
    door = LoginTokens(tmp_path)
    door.open(ADDRESS)
    file = tmp_path / ".launches" / "dashboard-8501.html"
    assert str(file) in log.text
    token = TOKEN.findall(file.read_text())[0]
    assert door.redeem(token)
    for secret in (token, TOKEN.findall(file.read_text())[0], door.cookie_token):
        assert secret not in log.text
    assert TOKEN.findall(log.text) == shown == []


@pytest.mark.parametrize(("name", "value"), [("SSH_CONNECTION", "1 2 3 4"), ("DISPLAY", "")])
def test_no_browser_opens_where_nobody_would_see_it(tmp_path, terminal, shown, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    LoginTokens(tmp_path).open(ADDRESS)
    assert TOKEN.findall(terminal.text)
    assert shown == []


def test_where_the_folder_cannot_be_written_a_terminal_still_lets_in(tmp_path, terminal, shown):
    (tmp_path / "file").touch()
    door = LoginTokens(tmp_path / "file")
    door.open(ADDRESS)
    assert len(door.cookie_token) >= 43
    assert door.redeem(TOKEN.findall(terminal.text)[0])
    assert shown == []


def test_where_neither_is_there_it_is_said(tmp_path, log):
    (tmp_path / "file").touch()
    LoginTokens(tmp_path / "file").open(ADDRESS)
    assert "is not writable" in log.text
    assert TOKEN.findall(log.text) == []


def test_before_it_is_open_nothing_gets_in(tmp_path):
    door = LoginTokens(tmp_path)
    assert not door.redeem("")
    assert not door.redeem("None")


@pytest.mark.parametrize(
    ("value", "asked", "told"),
    [
        (None, True, ""),
        ("on", True, ""),
        ("off", False, ""),
        (" OFF ", False, ""),
        ("no", True, "SPREEZE_DASHBOARD_TOKEN = no: must be on or off"),
        ("0", True, "on or off"),
        ("", True, "on or off"),
    ],
)
def test_the_setting_is_on_or_off_and_anything_else_leaves_the_token(monkeypatch, capsys, value, asked, told):
    monkeypatch.delenv(SETTING, raising=False)
    if value is not None:
        monkeypatch.setenv(SETTING, value)
    assert is_token_required() == asked
    assert (told in capsys.readouterr().err) if told else capsys.readouterr().err == ""


def test_switched_off_the_plain_address_is_told(tmp_path, terminal, shown, monkeypatch):
    monkeypatch.setenv(SETTING, "off")
    LoginTokens(tmp_path).open(ADDRESS)
    assert ADDRESS in terminal.text
    assert "open to all accounts" in terminal.text
    assert not (tmp_path / ".launches" / "dashboard-8501.html").exists()


def test_the_token_of_a_folder_is_private_and_stays(tmp_path):
    token = page_token(tmp_path / "runs")
    place = tmp_path / "runs" / ".launches" / "browser-token"
    assert len(token) >= 43
    assert private(place)
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert page_token(tmp_path / "runs") == token


def test_servers_that_start_at_once_agree_on_the_token(tmp_path):
    source = (
        "import sys; from pathlib import Path; from spreeze.dashboard.access import page_token; "
        "sys.stdin.readline(); [print(page_token(Path(sys.argv[1]) / str(i))) for i in range(50)]"
    )
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
        )
        for _ in range(3)
    ]
    for one in servers:
        one.stdin.write("go\n")
        one.stdin.flush()
    said = [one.communicate(timeout=PATIENCE_S)[0].split() for one in servers]
    assert len(said[0]) == 50
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("change", ["short", "readable", "link", "folder link", "pipe"])
def test_a_token_that_others_may_know_is_not_taken(tmp_path, change):
    token, place = page_token(tmp_path), tmp_path / ".launches" / "browser-token"
    other = tmp_path / "other"
    other.mkdir()
    if change == "short":
        place.write_text("short")
    elif change == "readable":
        place.chmod(0o644)
    elif change == "link":
        place.rename(other / "token")
        place.symlink_to(other / "token")
    elif change == "pipe":
        place.unlink()
        os.mkfifo(place, 0o600)
    else:
        place.parent.rename(other / "launches")
        place.parent.symlink_to(other / "launches")
    new = page_token(tmp_path)
    assert new != token
    assert len(new) >= 43
    if change != "folder link":
        assert private(place)
        assert page_token(tmp_path) == new
    assert place.exists()


def test_a_cookie_given_out_while_no_token_is_asked_for_lets_nobody_in_later(tmp_path, monkeypatch):
    known = LoginTokens(tmp_path).cookie_token
    monkeypatch.setenv(SETTING, "off")
    given = LoginTokens(tmp_path).cookie_token
    assert given not in (known, "")
    assert LoginTokens(tmp_path).cookie_token == given  # open pages survive a restart of the server
    monkeypatch.setenv(SETTING, "on")
    assert LoginTokens(tmp_path).cookie_token == known


def test_a_private_file_follows_no_link_and_leaves_nothing_behind(tmp_path):
    outside, place = tmp_path / "outside", tmp_path / "p" / "file"
    outside.write_text("mine")
    place.parent.mkdir()
    place.symlink_to(outside)
    write_private(place, "secret")
    assert outside.read_text() == "mine"
    assert not place.is_symlink()
    assert private(place)
    place.unlink()
    place.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_private(place, "secret")
    assert [entry.name for entry in place.parent.iterdir()] == ["file"]


def status(address, cookie=None):
    """(status, Location, Set-Cookie) of one request that follows nothing."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args):
            return None

    request = urllib.request.Request(address, headers={"Cookie": cookie} if cookie else {})
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=PATIENCE_S) as reply:
            return reply.status, None, reply.headers["Set-Cookie"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Location"], error.headers["Set-Cookie"]


@contextlib.contextmanager
def served(tmp_path, **environment):
    """``streamlit run app.py`` in a pseudo-terminal; yields a function that waits for words of its output."""
    controller, user = pty.openpty()
    env = {**os.environ, "SPREEZE_RUNS_DIR": str(tmp_path / "runs"), "PYTHONPATH": str(web.ROOT), **environment}
    env.pop("SSH_CONNECTION", None)  # who tests from afar has no browser open here
    app, port = str(web.ROOT / "app.py"), str(web.free_port())
    command = [sys.executable, "-m", "streamlit", "run", app, "--server.port", port]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdin=user, stdout=user, stderr=user, start_new_session=True
    )
    os.close(user)
    seen = bytearray()

    def until(pattern):
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, seen.decode("utf-8", "replace"))) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern} in: {seen.decode('utf-8', 'replace')}"
            if select.select([controller], [], [], left)[0]:
                seen.extend(os.read(controller, 4096))
        return found

    try:
        yield until
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            os.close(controller)


def test_the_command_of_the_readme_lets_in_by_its_terminal_only(tmp_path):
    tools, told = tmp_path / "tools", tmp_path / "told"
    tools.mkdir()
    opener = tools / "xdg-open"
    opener.write_text(f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" > {told}.part\nmv {told}.part {told}\n')
    opener.chmod(0o700)
    paths = os.pathsep.join([str(tools), os.environ["PATH"]])
    environment = {"PATH": paths, "DISPLAY": ":77", SETTING: "on"}
    with served(tmp_path, **environment) as until:
        found = until(r"(http://localhost:\d+)/\?token=([\w-]{43})")
        address, token = found.groups()
        for path in ("/", "/api/live", "/_stcore/host-config", "/?token=wrong"):
            assert status(address + path)[::2] == (403, None)
        assert status(address + "/_stcore/health")[0] == 200
        web.wait(told.exists)
        arguments = told.read_text().splitlines()[1:]
        assert arguments == [str(tmp_path / "runs" / ".launches" / f"dashboard-{address.rpartition(':')[2]}.html")]
        assert token in Path(arguments[0]).read_text()
        code, place, cookie = status(f"{address}/runs?token={token}&run=x")
        assert (code, place) == (303, "/runs?run=x")
        cookie = cookie.partition(";")[0]
        assert status(f"{address}/", cookie)[0] == 200
        assert status(f"{address}/api/live?run=x", cookie)[0] == 200
        assert status(f"{address}/?token={token}")[0] == 403, "it works once"
        again = until(r"Address for another one: \S+token=([\w-]{43})")[1]
        assert again != token
        assert status(f"{address}/?token={again}")[0] == 303


def test_on_a_machine_of_one_s_own_no_token_is_asked(tmp_path):
    with served(tmp_path, **{SETTING: "off"}) as until:
        address = until(r"Dashboard: (http://localhost:\d+) ")[1]
        code, _, cookie = status(address + "/")
        assert code == 200
        assert cookie.startswith("spreeze_")
        assert status(address + "/api/live?run=x")[0] == 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@NO_BROWSER
def test_a_browser_gets_in_by_the_private_file_and_another_one_does_not(tmp_path):
    runs = tmp_path / "runs"
    text = "return document.body.innerText"
    drawn = "return [...document.querySelectorAll('.sz-plot')].filter(d => d.__chart?.points).length"
    with web.server(runs, tmp_path / "server.log") as (address, _):
        (file,) = (runs / ".launches").glob("dashboard-*.html")
        token = TOKEN.findall(file.read_text())[0]
        with web.browser() as driver:
            driver.get(file.as_uri())
            web.wait(lambda: driver.execute_script(drawn) > 3, lambda: driver.execute_script(text))
            assert "token" not in driver.current_url
            assert token not in driver.execute_script("return document.referrer + document.URL + document.cookie")
            visited = driver.execute_cdp_cmd("Page.getNavigationHistory", {})["entries"]
            assert [entry["url"] for entry in visited if token in entry["url"]] == []
            driver.get(f"{address}/runs")
            web.wait(lambda: "sample run" in driver.execute_script(text))
        with web.browser() as driver:
            for place in (address, f"{address}/runs", f"{address}/?token={token}"):
                driver.get(place)
                assert "does not know this browser" in driver.execute_script(text)
                assert "ends in a token" in driver.execute_script(text)
                assert driver.get_cookies() == []
    log = (tmp_path / "server.log").read_text()
    assert TOKEN.findall(log) == []
    assert token not in log
