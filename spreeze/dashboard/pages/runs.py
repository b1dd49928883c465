"""Runs: all of them, and what can be done with one."""

from __future__ import annotations

import io
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from spreeze.dashboard import components, control, run_picker
from spreeze.dashboard.run_data import LIVE_STATES, SAMPLE, meaning, row, rows, runs_dir, short
from spreeze.errors import SpreezeError
from spreeze.formatting import DASH, duration, number

_MAX_EXPORT_BYTES = 100_000_000
_EXPORTED = (
    "run.json", "config.toml", "tune.json", "summary.json", "eval.csv", "metrics.db",
    "checkpoints/best.safetensors", "checkpoints/best.json",
)


def page() -> None:
    """The page."""
    folder = runs_dir()
    st.subheader("Runs", anchor=False)
    if error := st.session_state.pop("control_error", None):
        st.error(components.plain(error))
    if told := st.session_state.pop("control_note", None):
        st.success(components.plain(told))
    found = rows(folder)
    if not found:
        st.info(f"No run in {short(folder)} yet: start one on the Live page. What you see here is a recording.")
        found = [row(SAMPLE)] if (SAMPLE / "run.json").is_file() else []
    if found:
        st.dataframe(
            [
                {
                    "run": item.name, "state": item.state, "task": item.env_id or DASH, "algorithm": item.algo or DASH,
                    "seed": number(item.seed), "started": item.started or DASH, "wall time": duration(item.wall_s),
                    "env steps": number(item.env_steps), "updates": number(item.updates),
                    "best return": number(item.eval_best), "ended by": item.exit_reason or DASH,
                }
                for item in found
            ],
            hide_index=True,
            column_config={
                "wall time": st.column_config.TextColumn(help="Time trained, all sessions [h:min:s]."),
                "env steps": st.column_config.TextColumn(help=meaning("env_steps")),
                "updates": st.column_config.TextColumn(help=meaning("updates")),
                "best return": st.column_config.TextColumn(help=meaning("eval_return")),
                "state": st.column_config.TextColumn(help="crashed: it says running, but nobody holds its lock."),
            },
        )
    components.show_command("list", control.shown("spreeze", "runs", *control.place(folder), "list"))
    path = run_picker.current()
    if path is not None:
        _one(path, folder)


def _one(path: Path, folder: Path) -> None:
    facts = row(path)
    alive = facts.state in LIVE_STATES
    recorded = path == SAMPLE
    st.subheader(facts.name, anchor=False)
    st.caption(components.plain(f"{facts.state} \u00b7 {short(path)}"))
    cells = st.columns(4)
    cells[0].button("Resume", on_click=_resume, args=(path, folder), disabled=alive or recorded, width="stretch",
                    help="Continues with the networks, counters and replay of the newest checkpoint.")
    cells[1].button("Stop", key="runs_stop", on_click=_stop, args=(path.name, folder), disabled=not alive,
                    width="stretch", help="Ends as Ctrl-C would.")
    with cells[2].popover("Delete", disabled=alive or recorded, width="stretch"):
        st.write(f"Delete **{facts.name}** with its checkpoints and clips? This cannot be undone.")
        sure = st.text_input("Type its name to confirm", key=f"sure_{path.name}")
        st.button("Delete for good", disabled=sure != path.name, on_click=_delete, args=(path, folder))
    if cells[3].button("Prepare export", width="stretch", help="Settings, metrics and the best networks as one file."):
        st.download_button("Download", export(path), f"{path.name}.zip", "application/zip")
    name = path.name
    packed = shlex.join(("python", "-m", "zipfile", "-c", f"{name}.zip", *(short(part) for part in exported(path))))
    acts = () if recorded else (
        control.shown("spreeze.train", "--resume", name, *control.place(folder)),
        control.shown("spreeze", "runs", *control.place(folder), "stop", name),
        shlex.join(("rm", "-r", short(path))),
    )
    components.show_command("one", *acts, packed)


def exported(path: Path) -> list[Path]:
    """The files that are needed to understand and to use a run, as long as they are not too large together."""
    found, total = [], 0
    for name in _EXPORTED:
        part = path / name
        if part.is_file() and not part.is_symlink() and total + part.stat().st_size < _MAX_EXPORT_BYTES:
            total += part.stat().st_size
            found.append(part)
    return found


def export(path: Path) -> bytes:
    """A ZIP file of these, below the run's name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in exported(path):
            archive.write(part, f"{path.name}/{part.relative_to(path)}")
    return buffer.getvalue()


def _resume(path: Path, folder: Path) -> None:
    _tried(lambda: control.resume(path, folder), f"{path.name} goes on; see the Live page.")


def _stop(name: str, folder: Path) -> None:
    _tried(lambda: control.stop(name, folder), f"{name} was asked to stop.")


def _delete(path: Path, folder: Path) -> None:
    _tried(lambda: control.delete(path, folder), f"{path.name} was deleted.")


def _tried(action: Callable[[], None], note: str) -> None:
    try:
        action()
        st.session_state["control_note"] = note
    except SpreezeError as error:
        st.session_state["control_error"] = str(error)
