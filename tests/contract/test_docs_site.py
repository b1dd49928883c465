"""The site of the documents has every page, in a navigation that leads somewhere, and what programs import."""

import importlib
import re
import subprocess
import sys

import pytest
from printed import PAGES, ROOT
from test_docs import _headings

import spreeze

CONFIG = (ROOT / ".docs" / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = re.findall(r"^ +- .*: (\S+\.md)(?:#(\S+))?$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
API = PAGES["assets/docs/api.md"]


def _page(name) -> str:
    return "README.md" if name == "index.md" else f"assets/{name}"


def test_the_navigation_has_every_page_once():
    assert sorted(_page(name) for name, heading in NAVIGATION if not heading) == sorted(PAGES)


@pytest.mark.parametrize(("name", "heading"), [entry for entry in NAVIGATION if entry[1]])
def test_an_entry_of_the_navigation_leads_to_a_heading(name, heading):
    assert heading in _headings(PAGES[_page(name)])


def test_the_page_of_the_api_names_what_programs_import():
    printed = re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)
    assert {name.rpartition(".")[2] for name in printed} >= set(spreeze.__all__)
    for name in printed:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_ci_builds_the_site_with_the_tools_of_the_extra():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "mkdocs build --strict" in script
    assert 'wait "$site"' in script
    printed = subprocess.run(
        [sys.executable, ROOT / ".docs" / "requirements"], capture_output=True, text=True, check=True
    ).stdout
    assert {re.match(r"[\w-]+", tool)[0] for tool in printed.split()} >= {"mkdocs", "mkdocs-material", "mkdocstrings"}
    assert (ROOT / ".readthedocs.yaml").read_text(encoding="utf-8").count(".docs/mkdocs.yml") == 1
