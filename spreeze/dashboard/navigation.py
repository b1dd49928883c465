"""The script that Streamlit runs (``app.py`` serves it): the pages, and the chosen run, which the address keeps."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from spreeze.dashboard.components import plain
from spreeze.dashboard.run_data import SAMPLE_NAME, RunRow, row, run_names, run_path, runs_dir, varied_settings
from spreeze.errors import RunError
from spreeze.formatting import DASH, whole
from spreeze.run_directory import LIVE_STATES

PAGES: dict[str, tuple[str, str]] = {
    "live": ("Live", "live.page"),
    "autotune": ("Autotune", "autotune.page"),
    "runs": ("Runs", "runs.page"),
    "compare": ("Compare", "compare.page"),
    "watch": ("Watch", "runs.watch"),
    "logs": ("Logs", "runs.logs"),
    "about": ("About this machine", "runs.machine"),
}
"""Last part of the address -> title, and module and function; the first page is the default.

There is no folder ``pages``: Streamlit would treat it as its own, and a first visit to a page would be empty."""
COLOURS = {
    "running": "green",
    **dict.fromkeys(("starting", "tuning"), "blue"),
    **dict.fromkeys(("paused", "stopping"), "orange"),
    **dict.fromkeys(("finished", "stopped"), "gray"),
    **dict.fromkeys(("failed", "crashed", "damaged"), "red"),
}
"""State -> colour of its dot."""
_MAX_ROWS = 200
_KEY, _PICKED = "run", "picked_run"
COMPARED = "compare_runs"  # key of the names of the runs that the Compare page shows
_STYLE = """<style>
.stMainBlockContainer { padding: 3.5rem 2rem 3rem; }
/* Streamlit's own message about a lost server would cover ours, which says more: a run goes on without its page. */
[data-testid="stDialog"] { display: none; }
.stHeading h1 { font-size: 1.5rem; }
.stHeading h1, .stHeading h2, .stMarkdown h1 { padding: 0.5rem 0 0.25rem; }
/* Text needs a contrast of 4.5 (WCAG 2.2, 1.4.3), which Streamlit's captions and its white on a light blue lack. */
[data-testid="stCaptionContainer"] { opacity: 0.8; }
[data-testid="stBaseButton-primary"]:enabled *, [data-testid="stBaseButton-primaryFormSubmit"]:enabled *,
.stMultiSelect [data-tag] * { color: light-dark(#FFFFFF, #000000); }
</style>"""


def load(name: str) -> Callable[[], None]:
    module, _, function = PAGES[name][1].partition(".")
    page: Callable[[], None] = getattr(importlib.import_module(f"spreeze.dashboard.{module}"), function)
    return page


def sidebar() -> Callable[[], None]:
    """The list of runs, at first the newest that trains; returns a function that draws the run's state again."""
    names = run_names(runs_dir())
    if not names:
        st.sidebar.info("No run yet.")
        return lambda: None
    rows: dict[str, RunRow] = {}
    for name in names[:_MAX_ROWS]:
        with contextlib.suppress(RunError):  # deleted since it was listed
            rows[name] = row(run_path(name, runs_dir()))
    varied = varied_settings(runs_dir())
    alive = [name for name, run in rows.items() if run.state in LIVE_STATES]
    newest = alive[0] if alive else names[0]
    known, address = st.session_state.get(_KEY), st.query_params.get(_KEY)
    requested = known or address or newest
    missing = st.sidebar.empty()
    chosen = st.sidebar.selectbox(
        "Run",
        names,
        index=names.index(requested) if requested in names else None,
        placeholder="choose a run",
        format_func=lambda name: _short(rows[name], varied.get(name)) if name in rows else name,
        help="Newest first. The address of this page includes the selection.",
    )
    if chosen is None:
        missing.warning(f"There is no run {plain(requested)} here: it may have been deleted. Choose another run.")
    if chosen != requested or (known is None and address is not None):
        st.session_state[_PICKED] = chosen
    st.session_state[_KEY] = chosen or requested
    st.query_params[_KEY] = chosen or requested
    box = st.sidebar.empty()
    if chosen is not None:
        _show_state(box, chosen)
    if any(rows[name].state not in ("paused", "stopping") for name in alive):
        st.sidebar.caption("You can close this page: the running training continues.")
    return lambda: None if chosen is None else _show_state(box, chosen)


def is_picked(name: str) -> bool:
    """True if the user picked this run, in the list or by the page's address: the page stays with it."""
    return bool(st.session_state.get(_PICKED) == name)


def deselect(name: str) -> None:
    """Shows the newest run again where ``name`` is shown, which is about to be gone."""
    if st.session_state.get(_KEY) == name:
        del st.session_state[_KEY]
        st.query_params.pop(_KEY, None)


def _show_state(box: DeltaGenerator, name: str) -> None:
    with contextlib.suppress(RunError):  # it may have been deleted
        run = row(run_path(name, runs_dir()))
        box.markdown(
            f":{COLOURS.get(run.state, 'gray')}[\u25cf] {plain(run.state)}  \n**{plain(run.env_id)}**  \n"
            f"{plain((run.algo or DASH).upper())}, mode {plain(run.mode)}, seed {whole(run.seed)}  \n"
            f":gray[{plain(run.title)}]"
        )


def _short(run: RunRow, varied: str | None = None) -> str:
    """A run in the narrow list of the sidebar: what distinguishes it, such as settings that its sweep varied, first."""
    if run.name == SAMPLE_NAME:
        return run.title
    task, seed = f"{run.env_id or run.name} {run.algo or ''}", f"s{whole(run.seed)}"
    if run.about.title:
        return f"{run.about.title}, {task} {seed}"
    return f"{task} {varied} {seed}, {run.began}" if varied else f"{run.began} {task} {seed}"


def choose(name: str) -> None:
    """Shows another run from the next rerun on."""
    st.session_state[_KEY] = name


def compare(names: list[str]) -> NoReturn:
    """Opens the Compare page with these runs."""
    st.session_state[COMPARED] = names
    st.switch_page(_page("compare"))


def _page(name: str) -> Any:
    return st.Page(load(name), title=PAGES[name][0], url_path=name, default=name == next(iter(PAGES)))


def current() -> Path | None:
    """The directory of the chosen run; None if there is no run."""
    name = st.session_state.get(_KEY)
    try:
        return None if name is None else run_path(name, runs_dir())
    except RunError:
        return None


def need_run() -> Path:
    """The directory of the chosen run; without one, the page shows how to choose or start one, and stops."""
    path = current()
    if path is None:
        none_yet = "No run yet. Start one on the Live page, or run `python -m spreeze.train --auto`"
        st.info("Choose a run in the sidebar." if run_names(runs_dir()) else none_yet)
        st.stop()
    return path


def main() -> None:
    st.set_page_config(page_title="Spreeze", layout="wide")
    current_page = st.navigation([_page(name) for name in PAGES])
    st.html(_STYLE)
    st.logo(resources.files("spreeze.dashboard").joinpath("logo.svg").read_text(encoding="utf-8"), size="large")
    redraw_state = sidebar()
    current_page.run()
    redraw_state()


if __name__ == "__main__":
    main()
