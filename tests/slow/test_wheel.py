"""The wheel is the product: built as ``python -m build`` does, installed away from the checkout, both commands work.

Nothing is downloaded: the environment sees the packages of this one, but its own Spreeze first.
"""

import http.cookiejar
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
from pathlib import Path

import dashboard_browser as web
import pytest
from harness import PATIENCE_S, REPO, poll

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
NOT_OURS = {"PYTHONPATH", "SPREEZE_RUNS_DIR", "XDG_CACHE_HOME", "DISPLAY"}


def _built(kind, source, out):
    """The one archive that setuptools makes of a tree."""
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=source, check=True, stdout=subprocess.DEVNULL)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The ``bin`` folder of a virtual environment into which the wheel of the source archive was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("spreeze", "profiles", "assets", ".streamlit"):
        shutil.copytree(REPO / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("app.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, folder / "checkout")
    with tarfile.open(_built("build_sdist", folder / "checkout", folder / "sdist")) as archive:
        archive.extractall(folder / "source", filter="data")
    wheel = _built("build_wheel", next((folder / "source").iterdir()), folder / "dist")
    venv.create(folder / "venv", symlinks=True)
    packages = next((folder / "venv").glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--quiet", str(wheel)], check=True, timeout=PATIENCE_S)
    return folder / "venv" / "bin"


@pytest.fixture
def user(tmp_path, installed):
    """A user's home and working directory, and a function that runs a command there and returns its output."""
    work = tmp_path / "work"
    work.mkdir()
    environment = {key: value for key, value in os.environ.items() if key not in NOT_OURS}
    environment |= {"HOME": str(tmp_path / "home"), "PATH": f"{installed}:{os.environ['PATH']}"}
    (tmp_path / "home").mkdir()

    def run(*command):
        done = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    run.work, run.home, run.environment = work, tmp_path / "home", environment
    return run


def test_a_robot_learns_and_plays_from_the_wheel_and_nothing_is_written_elsewhere(user, installed):
    stop = ("--updates", "20", "--set", "replay.learning_starts=200", "--set", "evaluation.episodes=1")
    code, out, err = user("spreeze", "train", "--auto", "--env", "Pendulum-v1", *stop, "--json")
    assert code == 0, err
    run = Path(json.loads(out)["run_dir"])
    assert json.loads(out)["updates"] >= 20
    assert "profile pendulum" in (user.work / run / "config.toml").read_text()
    assert user("spreeze", "evaluate", "latest", "--episodes", "1")[0] == 0
    code, _, err = user("spreeze", "train", "--profile", "nowhere")
    assert code == 2
    for profile in (REPO / "profiles").glob("*.toml"):
        assert profile.stem in err
    code, _, err = user("spreeze", "play", "swingup", "--clip", "runs/clip.mp4")
    if sys.version_info < (3, 12):  # Bullet has no wheel beyond
        assert code == 0, err
        assert (user.work / "runs" / "clip.mp4").stat().st_size > 1000
    assert [path.name for path in user.work.iterdir()] == ["runs"]
    assert {path.name for path in user.home.iterdir()} <= {".cache"}
    code, where, _ = user("python", "-c", "import spreeze; print(spreeze.__file__)")
    assert Path(where).is_relative_to(installed.parent), "the wheel was tried, not the checkout"


def test_the_dashboard_of_the_wheel_shows_the_recorded_run(user):
    port = web.free_port()
    log = user.home.parent / "log"
    with open(log, "wb") as out:
        server = subprocess.Popen(
            ["spreeze", "dashboard", "--port", str(port)], cwd=user.work, env=user.environment,
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        place = user.work / "runs" / ".launches" / f"dashboard-{port}.html"
        poll(lambda: place.exists() or server.poll() is not None, what=log.read_text)
        assert server.poll() is None, log.read_text()
        token = re.search(r"\?token=([\w-]+)", place.read_text())[1]
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        with visitor.open(f"http://localhost:{port}/?token={token}", timeout=PATIENCE_S) as page:
            assert b"streamlit" in page.read().lower()
        with visitor.open(f"http://localhost:{port}/api/live?run=sample+run", timeout=PATIENCE_S) as answer:
            assert json.load(answer)["series"]
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
    assert [path.name for path in user.work.iterdir()] == ["runs"]
    assert [path.name for path in user.home.iterdir()] == []
