"""A command line beside its button, with a key that copies it.

``st.code`` would do, but it loads 1.5 MB of syntax colours into a browser that waits for its first chart.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import streamlit as st

_HTML = '<div class="sz-command"><code></code><button type="button">copy</button></div>'


def show(place: str, *lines: str) -> None:
    """Draws the command.

    Args:
        place: what tells it from other commands of the page; the same place is changed, not made anew.
        lines: one command a line.
    """
    component()(key=f"command_{place}", data={"text": "\n".join(lines)})


@cache
def component() -> Any:
    """The registered component; its style belongs to the page, where the theme's variables are."""
    script, style = (
        resources.files("spreeze.dashboard").joinpath(name).read_text(encoding="utf-8")
        for name in ("command.js", "command.css")
    )
    return st.components.v2.component("spreeze_command", html=_HTML, css=style, js=script, isolate_styles=False)
