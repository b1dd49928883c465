"""The table of runs, and what can be done with several of them at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import streamlit as st

from spreeze.dashboard import components, control, navigation
from spreeze.dashboard.run_data import SAMPLE, RunRow, meaning, row, rows, run_path, short
from spreeze.errors import RunError
from spreeze.formatting import DASH, whole
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import LIVE_STATES, describe, list_runs, read_about

_DATE = re.compile(r"^\d{8}-\d{6}_(?=.)")
_TABLE, _PICKED = "runs_list", "runs_picked"
_CLICKED = "runs_clicked"
_CURVE_POINTS = 40


@st.fragment(run_every=2.0)
def show(folder: Path) -> None:
    """The table, read again every two seconds; a click on a row shows that run."""
    found = rows(folder)
    if not found:
        st.info(f"No run in {short(folder)} yet: start one on the Live page. Shown is a recording.")
        found = [row(SAMPLE)] if (SAMPLE / "run.json").is_file() else []
    if not found:
        return
    shown = navigation.current()
    table = [_cells(item, folder, is_shown=shown is not None and shown.name == item.name) for item in found]
    if not any(item.about.tags for item in found):
        for line in table:
            del line["tags"]
    st.dataframe(
        table,
        hide_index=True,
        key=_TABLE,
        placeholder=DASH,
        on_select=partial(_clicked, [item.name for item in found]),
        selection_mode="single-row",
        column_config={
            "state": st.column_config.MultiselectColumn(
                options=list(navigation.COLOURS),
                color=list(navigation.COLOURS.values()),
                width=72,
                help="crashed: its state is running, but its process is gone.",
            ),
            "run": st.column_config.TextColumn(
                width=95, help="Title, or name without date and time. The arrow: shown below."
            ),
            "tags": st.column_config.ListColumn(help="Tags, edited below."),
            "task": st.column_config.TextColumn(width=135),
            "algorithm": st.column_config.TextColumn(width=100, help="Algorithm, mode, seed."),
            "started": st.column_config.TextColumn(width=90),
            "minutes": st.column_config.NumberColumn(
                width=62, format="%.1f", help="Training time, all sessions [min]."
            ),
            "env steps": st.column_config.NumberColumn(width=72, format="compact", help=meaning("env_steps")),
            "best": st.column_config.NumberColumn(width=58, format="%.4g", help=meaning("eval_return")),
            "last ten": st.column_config.NumberColumn(
                width=62, format="%.4g", help="Mean return over the last ten evaluations."
            ),
            "returns": st.column_config.LineChartColumn(width=64, help="Greedy returns over its evaluations."),
            "ended by": st.column_config.TextColumn(width=70, help="Why it ended."),
        },
    )
    if st.session_state.pop(_CLICKED, False):
        st.rerun()


def _cells(item: RunRow, folder: Path, *, is_shown: bool) -> dict[str, object]:
    name = item.about.title or _DATE.sub("", item.name)  # a whole name would not fit
    return {
        "run": f"\u25b8 {name}" if is_shown else name,
        "state": [item.state],
        "task": item.env_id or DASH,
        "algorithm": f"{item.algo or DASH} {item.mode or DASH} s{whole(item.seed)}",
        "started": item.began,
        "minutes": None if item.wall_s is None else item.wall_s / 60.0,
        "env steps": item.env_steps,
        "best": item.eval_best,
        "last ten": item.eval_final,
        "returns": _returns(run_path(item.name, folder), item.wall_s),
        "ended by": item.exit_reason,
        "tags": list(item.about.tags),
    }


@lru_cache(500)
def _returns(path: Path, wall_s: float | None) -> tuple[float, ...]:
    """Mean returns of some evaluations, oldest first."""
    try:
        found = [record.return_mean for record in MetricsReader(path / "metrics.db").evaluations()]
    except RunError:
        return ()
    step = max(1, -(-len(found) // _CURVE_POINTS))
    return tuple(found[::-step][::-1])


def _clicked(names: list[str]) -> None:
    """Shows the run of the row that was clicked: not of the row in its place once another run has begun."""
    for place in st.session_state[_TABLE]["selection"]["rows"]:
        navigation.choose(names[place])
        st.session_state[_CLICKED] = True


def several(folder: Path) -> None:
    """Compares, tags or deletes several runs at once.

    They are chosen by name, because the table forgets which rows are ticked whenever a number in it changes.
    """
    known = [path.name for path in reversed(list_runs(folder))]
    if len(known) < 2:
        return
    picked = [name for name in st.session_state.get(_PICKED, ()) if name in known]
    st.session_state[_PICKED] = picked  # without those that were deleted
    text = "Type a part of a name, then Enter."
    st.multiselect("Several runs at once", known, key=_PICKED, placeholder="choose by name", help=text)
    paths = [folder / name for name in picked]
    if not paths:
        return
    cells = st.columns([1, 2, 1, 1], vertical_alignment="bottom")
    if cells[0].button("Compare", key="runs_compare", width="stretch", help="Opens them on the Compare page."):
        navigation.compare([path.name for path in paths])
    tags = cells[1].text_input("Add tags", key="runs_tags", placeholder="comma-separated")
    note = f"{len(paths)} runs have new tags."
    more = {"width": "stretch", "disabled": not tags.strip()}
    components.act_button(cells[2], "Tag", _tag, paths, tags.split(","), note=note, key="runs_tag", **more)
    alive = [path.name for path in paths if row(path).state in LIVE_STATES]
    help_text = f"{', '.join(alive)} is running: stop it first." if alive else None
    with cells[3].popover("Delete", disabled=bool(alive), width="stretch", help=help_text):
        st.write(f"Delete {len(paths)} runs with their checkpoints and clips? This cannot be undone.")
        st.text("\n".join(path.name for path in paths))
        words = f"delete {len(paths)}"
        sure = st.text_input(f"Type {words} to confirm", key="runs_sure")
        note = f"{len(paths)} runs were deleted."
        components.act_button(
            st, "Delete permanently", _delete, paths, folder, note=note, key="runs_delete", disabled=sure != words
        )


def _tag(paths: Sequence[Path], tags: Sequence[str]) -> None:
    for path in paths:
        describe(path, tags=[*read_about(path).tags, *tags])
    st.session_state["runs_tags"] = ""


def _delete(paths: Sequence[Path], folder: Path) -> None:
    for path in paths:
        control.delete(path, folder)
    st.session_state[_PICKED] = []
