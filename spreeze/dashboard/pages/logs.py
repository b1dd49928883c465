"""Logs: what the processes of a run wrote, its events and its errors."""

from __future__ import annotations

import shlex
from pathlib import Path

import streamlit as st

from spreeze.dashboard import components, run_picker
from spreeze.dashboard.run_data import log_files, row, short, tail_lines
from spreeze.errors import RunError
from spreeze.formatting import duration
from spreeze.metrics.store_reader import MetricsReader


def page() -> None:
    """The page."""
    path = run_picker.need_run()
    st.subheader(f"Logs of {row(path).name}", anchor=False)
    _events(path)
    files = log_files(path)
    if not files:
        st.info("No log yet: the processes have written nothing.")
        return
    labels = sorted(files)
    first = next((i for i, label in enumerate(labels) if files[label].stat().st_size > 0), 0)
    chosen = st.selectbox("File", labels, index=first, help="The last 200 lines are shown.")
    st.code("\n".join(tail_lines(files[chosen])) or "(empty)", language=None, height=420)
    components.show_command("tail", shlex.join(("tail", "-n", "200", "-f", short(files[chosen]))))


def _events(path: Path) -> None:
    try:
        events = MetricsReader(path / "metrics.db").events(200)
    except RunError as error:
        st.error(str(error))
        return
    if events:
        st.dataframe(
            [{"wall time": duration(e.t), "level": e.level, "from": e.source, "what": e.text} for e in events[::-1]],
            hide_index=True, height=240 if len(events) > 6 else "content",
            column_config={"wall time": st.column_config.TextColumn(help="Since the run began [h:min:s].")},
        )
    else:
        st.caption("No events yet.")
