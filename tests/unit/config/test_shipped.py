"""Files that come with the package: a wheel has each of them, and they are found however it was installed."""

import site
import sysconfig
import tomllib
from pathlib import Path

import pytest
from harness import REPO

from spreeze import config

SETUPTOOLS = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_a_wheel_holds_the_tree_of_the_checkout_that_programs_read():
    packed = {}
    for folder, patterns in SETUPTOOLS["data-files"].items():
        files = {path for pattern in patterns for path in REPO.glob(pattern)}
        packed |= {f"{folder}/{path.name}": path for path in files}
    assert all(f"share/spreeze/{path.relative_to(REPO)}" == place for place, path in packed.items())
    for folder in ("profiles", "assets/policies", "assets/sample_run", "assets/docs"):
        wanted = {path for path in (REPO / folder).rglob("*") if path.is_file()}
        assert 0 < len(wanted & {*packed.values()}) == len(wanted), folder
    assert {REPO / "app.py", REPO / ".streamlit" / "config.toml"} <= {*packed.values()}


def test_a_wheel_holds_every_file_of_the_package_that_is_no_code():
    data = SETUPTOOLS["package-data"]
    for path in (REPO / "spreeze").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(REPO).parts)
            assert any(path.match(pattern) for pattern in data[package]), path


def test_a_checkout_has_them_beside_the_package():
    assert config.SHIPPED == REPO


@pytest.mark.parametrize("place", ["data", "target", "user"])
def test_an_installation_has_them_below_share_wherever_pip_has_put_it(tmp_path, monkeypatch, place):
    (tmp_path / place / "share" / "spreeze").mkdir(parents=True)
    (tmp_path / "target" / "profiles").mkdir(parents=True)  # another package's folder beside ours
    monkeypatch.setattr(config, "PACKAGE_PARENT", tmp_path / "target")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(site, "getuserbase", lambda: str(tmp_path / "user"))
    assert config._root() == Path(tmp_path, place, "share", "spreeze")
