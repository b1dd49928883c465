"""The README's pictures and the recorded run that the pages show first: made on request, by a variable each."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import dashboard_browser as web
import pytest

from spreeze.dashboard import run_data

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
KEPT = ("config.toml", "eval.csv", "live.jpg", "run.json", "summary.json", "tune.json")


@pytest.mark.skipif("SPREEZE_PICTURES" not in os.environ, reason="writes pictures: set SPREEZE_PICTURES")
@pytest.mark.skipif(web.missing() is not None, reason=str(web.missing()))
def test_each_page_has_its_picture(tmp_path):
    home = tmp_path / "home"
    shutil.copytree(web.ROOT / ".streamlit", home / ".streamlit")  # commands on the pages then name no other folder
    shutil.copytree(run_data.SAMPLE, home / "runs" / "pendulum")  # else the pages welcome a new user
    folder = Path(os.environ["SPREEZE_PICTURES"])
    with web.server(home / "runs", tmp_path / "server.log", cwd=home) as (address, _), web.browser() as driver:
        web.enter(driver, address, home / "runs")
        web.screenshots(address, driver, folder)
    assert len(list(folder.glob("dashboard-*.png"))) >= 9


@pytest.mark.skipif("SPREEZE_SAMPLE" not in os.environ, reason="trains for four minutes: set SPREEZE_SAMPLE")
def test_the_sample_run_is_recorded(tmp_path):
    command = [
        sys.executable,
        "-m",
        "spreeze.train",
        "--env",
        "Pendulum-v1",
        "--auto",
        "--fresh",
        "--seconds",
        "170",
        "--name",
        "pendulum",
        "--set",
        "visualizer.clip_interval_s=40",
        "--set",
        "visualizer.clip_length_s=3",
    ]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(web.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=550, check=True)
    run, folder = tmp_path / "runs" / "pendulum", Path(os.environ["SPREEZE_SAMPLE"])
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if " training | " not in line]
    (folder / "logs" / "terminal.log").write_text("\n".join(lines) + "\n")
    for name in KEPT:
        shutil.copy(run / name, folder / name)
    told = (run / "run.json").read_text().replace(f"{web.ROOT}/", "")  # no folder of the machine that recorded it
    (folder / "run.json").write_text(told)
    shutil.copytree(run / "videos", folder / "videos")
    thinned(run / "metrics.db", folder / "metrics.db")
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 500_000


def thinned(source, target):
    """A copy of the metrics with one of four samples."""
    with sqlite3.connect(source) as old, sqlite3.connect(target) as new:
        old.backup(new)
        new.execute("DELETE FROM samples WHERE us / 500000 % 4 != 0 AND us < (SELECT max(us) FROM samples) - 2000000")
    new.execute("PRAGMA journal_mode = DELETE")
    new.execute("VACUUM")
    for connection in (old, new):
        connection.close()
