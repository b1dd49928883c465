"""Command lines beside their buttons, with a key that copies them.

``st.code`` would do, but it loads 1.5 MB of syntax colours into a browser that waits for its first chart.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import streamlit as st

_HTML = '<div class="sz-commands"></div>'


def show(place: str, *lines: str) -> None:
    """Draws the commands, each with its own key: who copies one has not copied the one that deletes.

    Args:
        place: what tells it from other commands of the page; the same place is changed, not made anew.
        lines: one command a line.
    """
    component()(key=f"command_{place}", data={"lines": lines})


@cache
def component() -> Any:
    """The registered component; its style belongs to the page, where the theme's variables are."""
    script, style = (
        resources.files("spreeze.dashboard").joinpath(name).read_text(encoding="utf-8")
        for name in ("command.js", "command.css")
    )
    return st.components.v2.component("spreeze_command", html=_HTML, css=style, js=script, isolate_styles=False)
