"""The script that Streamlit runs (``app.py`` serves it): the pages, and the chosen run, which the address keeps."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from spreeze.dashboard import start
from spreeze.dashboard.run_data import run_names, run_path, runs_dir
from spreeze.errors import RunError

PAGES: dict[str, tuple[str, str]] = {
    "live": ("Live", "live.page"),
    "autotune": ("Autotune", "autotune.page"),
    "runs": ("Runs", "runs.page"),
    "compare": ("Compare", "compare.page"),
    "watch": ("Watch", "runs.watch"),
    "logs": ("Logs", "runs.logs"),
    "about": ("About this machine", "about.page"),
}
"""Last part of the address -> title, and module and function; the first page is the default.

There is no folder ``pages``: Streamlit would treat it as its own, and a first visit to a page would be empty."""
_KEY = "run"


def load(name: str) -> Callable[[], None]:
    module, _, function = PAGES[name][1].partition(".")
    found: Callable[[], None] = getattr(importlib.import_module(f"spreeze.dashboard.{module}"), function)
    return found


def sidebar() -> None:
    """The list of runs; without a choice the newest is shown."""
    names = run_names(runs_dir())
    if not names:
        st.sidebar.info("No run yet.")
        return
    asked = st.session_state.get(_KEY) or st.query_params.get(_KEY)
    if asked not in names:
        asked = names[0]
    chosen = st.sidebar.selectbox(
        "Run", names, index=names.index(asked), help="Newest first; the address of this page keeps the choice."
    )
    st.session_state[_KEY] = chosen
    st.query_params[_KEY] = chosen
    st.sidebar.caption("Safe to close: training goes on without this page.")


def choose(name: str) -> None:
    """Shows another run from the next rerun on."""
    st.session_state[_KEY] = name


def current() -> Path | None:
    """The directory of the chosen run; None if there is no run."""
    name = st.session_state.get(_KEY)
    try:
        return None if name is None else run_path(name, runs_dir())
    except RunError:
        return None


def need_run() -> Path:
    """The directory of the chosen run; without one the page says how to start one and stops."""
    path = current()
    if path is None:
        st.info("No run yet. Start one on the Live page, or type: `python -m spreeze.train --auto`")
        st.stop()
    return path


def main() -> None:
    st.set_page_config(page_title="Spreeze", layout="wide")
    pages = [st.Page(load(name), title=title, url_path=name, default=not place)
             for place, (name, (title, _)) in enumerate(PAGES.items())]
    current_page = st.navigation(pages)
    st.html("<style>.stMainBlockContainer { padding: 3.5rem 2rem 3rem; }</style>")
    sidebar()
    if current_page.title != PAGES["live"][0]:
        start.keep_fields()
    current_page.run()


if __name__ == "__main__":
    main()
