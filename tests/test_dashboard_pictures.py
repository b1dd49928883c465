"""The README's pictures of the pages: taken from a real browser, on request (SPREEZE_PICTURES=FOLDER)."""

import os
import shutil
from pathlib import Path

import dashboard_browser as web
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::ResourceWarning"),
              pytest.mark.skipif("SPREEZE_PICTURES" not in os.environ, reason="writes pictures: set SPREEZE_PICTURES"),
              pytest.mark.skipif(web.missing() is not None, reason=str(web.missing()))]


def test_each_page_has_its_picture(tmp_path):
    home = tmp_path / "home"
    shutil.copytree(web.ROOT / ".streamlit", home / ".streamlit")  # commands on the pages then name no other folder
    folder = Path(os.environ["SPREEZE_PICTURES"])
    with web.server(home / "runs", tmp_path / "server.log", cwd=home) as (address, _), web.browser() as driver:
        web.screenshots(address, driver, folder)
    assert len(list(folder.glob("dashboard-*.png"))) >= 9
