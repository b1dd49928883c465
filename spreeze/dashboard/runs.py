"""Runs, Watch, Logs and About: the list of runs, actions on one, its clips, its logs, and its machine."""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import streamlit as st

from spreeze.dashboard import components, control, navigation
from spreeze.dashboard.run_data import (
    SAMPLE,
    SAMPLE_NAME,
    Clip,
    RunRow,
    as_cli_argument,
    clips,
    log_files,
    readable_runs,
    row,
    rows,
    runs_dir,
    short,
    tail_lines,
    varied_settings,
)
from spreeze.errors import RunError
from spreeze.formatting import DASH, clean, duration, number, size, whole
from spreeze.metrics.recorded_episodes import kept_evaluations
from spreeze.metrics.stop_conditions import StopReason, stop_reason
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.table import by_name
from spreeze.run_directory import LIVE_STATES, About, describe, read_about, read_run, state_of
from spreeze.types import POLICY_FORMATS

_MAX_PACKED_BYTES = 100_000_000
_MAX_CLIP_BYTES = 50_000_000
_POLICY = ("checkpoints/best.safetensors", "checkpoints/best.json")
_METRICS = "metrics.db"
_PACKED = (
    "run.json", "config.toml", "tune.json", "summary.json", "eval.csv", _METRICS, f"{_METRICS}-wal", *_POLICY
)  # fmt: skip
_DOWNLOAD: dict[str, Any] = {"width": "stretch", "on_click": "ignore"}
"""Options of download buttons: a rerun would drop the downloads of the buttons beside it."""


def page() -> None:
    folder = runs_dir()
    st.title("Runs", anchor=False)
    components.show_errors(folder)
    path = navigation.current()
    st.session_state[_DRAWN] = None if path is None else state_of(path)
    show_table(folder)
    several(folder)
    if path is not None:
        _selected_run(path, folder)
    components.show_command("list", control.runs_command(folder, "list"))


def _selected_run(path: Path, folder: Path) -> None:
    run, name = row(path), path.name
    alive = run.state in LIVE_STATES
    recorded = path == SAMPLE
    st.header(components.plain(run.title), anchor=False)
    reason = stop_reason(run.exit_reason)
    ended = f": {run.exit_reason if reason is None else reason.sentence}" if run.exit_reason else ""
    updates = "" if alive else f" \u00b7 {number(run.updates)} updates"  # this part of the page is not renewed
    st.caption(components.plain(f"{run.state}{ended}{updates} \u00b7 {short(path)}"))
    if run.about.note:
        st.text(run.about.note)
    cells = st.columns(4)
    module = None
    with contextlib.suppress(RunError):  # a click on Resume then tells why
        module = None if recorded else control.module_of_run(path)
    text = "The run imports this module: its code will run on this machine."
    trusted = module in (None, control.imported()) or cells[0].checkbox(
        f"Trust {components.plain(module)}", key=f"trust_{name}", help=text
    )
    more: dict[str, Any] = {"width": "stretch", "disabled": alive or recorded or not trusted}
    more["help"] = "It is running." if alive else components.RESUME
    more["note"] = f"{name} resumed; see the Live page."
    components.act_button(cells[0], "Resume", control.resume, path, folder, module, **more)
    more = {"key": "runs_stop", "width": "stretch", "disabled": not alive, "help": "Stops like Ctrl-C."}
    more["note"] = f"Stop requested for {name}."
    components.act_button(cells[1], "Stop", control.stop, name, folder, **more)
    help_text = "It is running: stop it first." if alive else None
    with cells[2].popover("Delete", key=f"delete_{name}", disabled=alive or recorded, width="stretch", help=help_text):
        st.write(f"Delete **{run.name}** with its checkpoints and clips? This cannot be undone.")
        confirmation = st.text_input("Type its name to confirm", key=f"sure_{name}")
        more = {"note": f"{name} was deleted.", "disabled": confirmation != name}
        components.act_button(st, "Delete permanently", _delete, [path], folder, **more)
    text = "Settings, metrics and the best policy in one file."
    cells[3].download_button(
        "Run as ZIP", lambda: pack(path), f"{name}.zip", "application/zip", key="runs_zip", help=text, **_DOWNLOAD
    )
    export_command = _downloads(path, folder)
    commands = [
        control.command_line("spreeze", "report", as_cli_argument(path)),
        shlex.join(("python", "-m", "zipfile", "-c", f"{name}.zip", *map(as_cli_argument, files_to_pack(path)))),
    ]
    if not recorded:
        _about(path, run.about)
        flags = [*control.runs_dir_flags(folder), *(() if module is None else ("--import", module))]
        resume_command = control.command_line("spreeze.train", "--resume", name, *flags)
        commands = [resume_command, control.runs_command(folder, "stop", name), *commands, export_command]
    with st.expander("Command line"):
        components.show_command("one", *commands)


def _downloads(path: Path, folder: Path) -> str:
    """A report, metrics, and the policy as a file that runs without Spreeze; returns the command for the latter."""
    report, metrics, left, right = st.columns(4, vertical_alignment="bottom")
    report.download_button(
        "Report",
        lambda: control.report_html([path]),
        f"{path.name}.html",
        "text/html",
        key="runs_report",
        help="A self-contained HTML file: curves, rates, settings with their sources, the "
        "tuner's table, machine, versions, events.",
        **_DOWNLOAD,
    )
    metrics.download_button(
        "Metrics as CSV",
        lambda: control.export_zip(path, folder, "csv", ".csv"),
        f"{path.name}_csv.zip",
        "application/zip",
        key="runs_csv",
        help="All metrics and evaluations as tables.",
        **_DOWNLOAD,
    )
    kinds = {row.name: row for row in POLICY_FORMATS}
    chosen = left.selectbox(
        "Policy as",
        list(kinds),
        key=f"export_format_{path.name}",
        help="The best policy, including normalization and action scaling, checked against Spreeze, with a "
        "program that runs it without Spreeze.",
    )
    kind = kinds[chosen]
    reason = control.why_no_export(path, kind)
    right.download_button(
        "Download best policy",
        lambda: control.export_zip(path, folder, kind.name, kind.suffix),
        f"{path.name}_{kind.name}.zip",
        "application/zip",
        key=f"export_{path.name}",
        disabled=reason is not None,
        help=reason or "Created on click, takes some seconds.",
        **_DOWNLOAD,
    )
    if reason is not None:
        st.caption(components.plain(reason))
    return control.command_line("spreeze", "export", path.name, *control.runs_dir_flags(folder), "--format", kind.name)


def _about(path: Path, about: About) -> None:
    with st.expander("Title, tags and note"), st.form(f"about_{path.name}", border=False):
        title = st.text_input("Title", about.title, max_chars=100, placeholder=path.name)
        tags = st.text_input("Tags", ", ".join(about.tags), placeholder="comma-separated")
        note = st.text_area("Note", about.note, max_chars=20_000)
        if st.form_submit_button("Save"):
            save = partial(describe, path, title=title, tags=tags.split(","), note=note)
            components.run_action(save, note=f"Saved for {path.name}.")
            st.rerun()


def files_to_pack(path: Path) -> list[Path]:
    """Files of ``_PACKED`` that exist, up to ``_MAX_PACKED_BYTES`` in all."""
    files, total = [], 0
    for part in (path / name for name in _PACKED):
        if part.is_file() and not part.is_symlink() and total + part.stat().st_size < _MAX_PACKED_BYTES:
            total += part.stat().st_size
            files.append(part)
    return files


def pack(path: Path) -> bytes:
    """A ZIP file of ``files_to_pack``, in a folder with the run's name; the metrics without their log of changes."""
    with tempfile.TemporaryDirectory() as temporary:
        files = {str(part.relative_to(path)): part for part in files_to_pack(path)}
        if _METRICS not in files:
            files.pop(f"{_METRICS}-wal", None)
        else:
            copy = Path(temporary) / _METRICS
            with contextlib.suppress(RunError):  # a damaged file is packed as it is
                MetricsReader(path / _METRICS).copy_to(copy)
                files[_METRICS] = copy
                files.pop(f"{_METRICS}-wal", None)
        return control.zipped({f"{path.name}/{name}": part for name, part in files.items()})


def watch() -> None:
    path = navigation.need_run()
    st.title(f"Clips of {row(path).name}", anchor=False)
    if path != SAMPLE:  # its networks are not included
        components.show_command("play", control.command_line("spreeze", "play", as_cli_argument(path)))
    components.show_episodes(path)
    recorded = clips(path)
    if not recorded:
        known = "The button above shows recorded episodes. " if kept_evaluations(path) else ""
        st.info(
            f"No clip yet: where other work keeps the cores busy, the first one takes minutes. {known}"
            if row(path).state in LIVE_STATES
            else f"No clip: none was complete when the run ended. {known}The command above shows its best policy."
        )
        return
    index = 0
    if len(recorded) > 1:
        text = "Ordered by time; the number is the updates of the policy."
        indices, last = range(len(recorded)), len(recorded) - 1
        index = st.select_slider("Clip", indices, last, format_func=lambda i: label(recorded[i]), help=text)
    clip = recorded[index]
    left, right = st.columns([3, 2])
    if clip.path.stat().st_size > _MAX_CLIP_BYTES:
        left.info(f"This clip has {size(clip.path.stat().st_size)}: too large to show here; open {short(clip.path)}")
        return
    data = clip.path.read_bytes()
    left.video(data, autoplay=True, loop=True, muted=True)
    values = clip.values
    shown = ", ".join(number(value) for value in clip.episode_returns) or DASH
    right.markdown(
        f"**Policy version** {number(values.get('version'))} updates\n\n"
        f"**Recorded at** {duration(values.get('wall_s'))} (h:min:s of training), "
        f"{number(values.get('env_steps'))} env steps\n\n"
        f"**Returns of whole episodes in it** {shown}\n\n"
        f"**Return so far of the unfinished episode** {number(values.get('return_so_far'))}"
    )
    right.caption("A return is the undiscounted sum of an episode's rewards, here of the greedy policy.")
    right.download_button("Download MP4", data, clip.path.name, "video/mp4", help=f"File: {short(clip.path)}")


def label(clip: Clip) -> str:
    return f"{duration(clip.values.get('wall_s'))} \u00b7 {number(clip.values.get('version'))} updates"


def logs() -> None:
    path = navigation.need_run()
    st.title(f"Logs of {row(path).name}", anchor=False)
    _events(path)
    files = log_files(path)
    if not files:
        st.info("No logs yet.")
        return
    labels = sorted(files)
    first = next((i for i, label in enumerate(labels) if files[label].stat().st_size > 0), 0)
    chosen = st.selectbox("File", labels, index=first, help="Shows the last 200 lines.")
    st.code("\n".join(tail_lines(files[chosen])) or "(empty)", language=None, height=420, wrap_lines=True)
    components.show_command("tail", shlex.join(("tail", "-n", "200", "-f", as_cli_argument(files[chosen]))))


def _events(path: Path) -> None:
    try:
        events = MetricsReader(path / "metrics.db").events(200)
    except RunError as error:
        st.error(str(error))
        return
    if not events:
        st.caption("No events.")
        return
    table = [{"wall time": duration(e.t), "level": e.level, "from": e.source, "what": e.text} for e in events[::-1]]
    config = {"wall time": st.column_config.TextColumn(help="Training time [h:min:s].")}
    st.dataframe(table, hide_index=True, height=240 if len(events) > 6 else "content", column_config=config)


# --- the machine ---

_SIGNS = {"ok": "\u2713", "warn": "!", "fail": "\u2717"}


def machine() -> None:
    """Findings of the doctor on this machine, and the machine of the selected run."""
    st.title("About this machine", anchor=False)
    st.caption(
        "The doctor checks PyTorch, the default environment and the video encoder in separate processes (a "
        "few seconds; longer beside other programs)."
    )
    flags = control.runs_dir_flags(runs_dir())
    components.show_command("doctor", control.command_line("spreeze", "doctor", *flags))
    if st.button("Check this machine", type="primary", key="doctor"):
        with st.spinner("Examining ..."):
            try:
                st.session_state["doctor_report"] = control.doctor(*flags)
            except RunError as error:
                st.session_state["doctor_report"] = {"error": components.plain(error)}
    if (report := st.session_state.get("doctor_report")) is not None:
        _show_findings(report)
    path = navigation.current()
    if path is not None:
        run = read_run(path)
        st.header("Machine of the selected run", anchor=False)
        st.write(components.plain(run.get("machine")))
        if versions := run.get("versions"):
            rows = [{"part": clean(name), "version": clean(value or DASH)} for name, value in versions.items()]
            st.dataframe(rows, hide_index=True)


def _show_findings(document: dict[str, Any]) -> None:
    if document.get("ok"):
        st.success("Ready: the default command works.")
    else:
        st.error(document.get("error") or "Not ready: see the failed checks (\u2717).")
    rows = [
        (_SIGNS.get(check.get("status"), "?"), check.get("name"), check.get("text"), check.get("remedy"))
        for check in document.get("checks", [])
    ]
    st.markdown(components.table(("", "what", "finding", "remedy"), rows))


_DATE = re.compile(r"^\d{8}-\d{6}_(?=.)")
_TABLE, _PICKED = "runs_list", "runs_picked"
_CLICKED = "runs_clicked"
_DRAWN = "runs_drawn"  # State of the shown run when the page was drawn.
_CURVE_POINTS = 40
_ENDED_BY: dict[str, str] = {StopReason.TARGET_RETURN: "target", StopReason.REQUEST: "stop"}
"""Reasons whose whole names would not fit."""


@st.fragment(run_every=2.0)
def show_table(folder: Path) -> None:
    """The table, read again every two seconds; a click shows a run, its changed state draws the page again."""
    runs = rows(folder)
    if not runs:
        st.info(f"No run in {short(folder)} yet: start one on the Live page. Shown is a recording.")
        runs = [row(SAMPLE)] if (SAMPLE / "run.json").is_file() else []
    if not runs:
        return
    shown = navigation.current()
    varied = varied_settings(folder)
    table = [_cells(run, folder, varied.get(run.name), is_shown=bool(shown and shown.name == run.name)) for run in runs]
    if not any(run.about.tags for run in runs):
        for line in table:
            del line["tags"]
    names = [run.name for run in runs]
    key = f"{_TABLE}_{zlib.crc32(repr(names).encode())}"  # a tick stays at its place in the table, not with its run
    st.dataframe(
        table,
        hide_index=True,
        key=key,
        placeholder=DASH,
        on_select=partial(_clicked, key, names),
        selection_mode="single-row",
        column_config={
            "state": st.column_config.MultiselectColumn(
                options=list(navigation.COLOURS),
                color=list(navigation.COLOURS.values()),
                width=72,
                help="crashed: its state is running, but its process is gone.",
            ),
            "run": st.column_config.TextColumn(
                width=104,
                help="Title, else what its sweep varied, else name without date and time. The arrow: shown below.",
            ),
            "tags": st.column_config.ListColumn(width=80, help="Tags, edited below."),
            "task": st.column_config.TextColumn(width=130),
            "algorithm": st.column_config.TextColumn(width=100, help="Algorithm, mode, seed."),
            "started": st.column_config.TextColumn(width=84),
            "minutes": st.column_config.NumberColumn(
                width=62, format="%.1f", help="Time of all sessions without pauses, with closing [min]."
            ),
            "env steps": st.column_config.NumberColumn(width=72, format="compact", help=by_name("env_steps").sentence),
            "best": st.column_config.NumberColumn(width=58, format="%.4g", help=by_name("eval_return").sentence),
            "end mean": st.column_config.NumberColumn(
                width=66, format="%.4g", help="Mean return over its last ten evaluations, or fewer if it has fewer."
            ),
            "returns": st.column_config.LineChartColumn(
                width=58, help="Greedy returns over its evaluations, the highest of neighbours and the newest."
            ),
            "ended by": st.column_config.TextColumn(width=78, help="Why it ended: target is its target return."),
        },
    )
    has_changed = shown is not None and st.session_state.get(_DRAWN) != state_of(shown)
    if st.session_state.pop(_CLICKED, False) or has_changed:
        st.rerun()


def _cells(item: RunRow, folder: Path, varied: str | None, *, is_shown: bool) -> dict[str, object]:
    name = item.about.title or varied or _DATE.sub("", item.name)  # a whole name would not fit
    return {
        "run": f"\u25b8 {name}" if is_shown else name,
        "state": [item.state],
        "task": item.env_id or DASH,
        "tags": list(item.about.tags),
        "algorithm": f"{item.algo or DASH} {item.mode or DASH} s{whole(item.seed)}",
        "started": item.began,
        "minutes": None if item.wall_s is None else item.wall_s / 60.0,
        "env steps": item.env_steps,
        "best": item.eval_best,
        "end mean": item.eval_final,
        "returns": _curve_of(SAMPLE if item.name == SAMPLE_NAME else folder / item.name, item.wall_s),
        "ended by": None if item.exit_reason is None else _ENDED_BY.get(item.exit_reason, item.exit_reason),
    }


@lru_cache(500)
def _curve_of(path: Path, wall_s: float | None) -> tuple[float, ...]:
    try:
        returns = [record.return_mean for record in MetricsReader(path / "metrics.db").evaluations()]
    except RunError:
        return ()
    step = max(1, -(-len(returns) // _CURVE_POINTS))
    return (*(max(returns[at : at + step]) for at in range(0, len(returns) - 1, step)), *returns[-1:])


def _clicked(key: str, names: list[str]) -> None:
    """Shows the run of the clicked row by its name, since a new run shifts the rows."""
    for index in st.session_state[key]["selection"]["rows"]:
        navigation.choose(names[index])
        st.session_state[_CLICKED] = True


def several(folder: Path) -> None:
    """Compares, tags or deletes several runs at once, chosen by name: the table forgets ticks when it changes."""
    known = [path.name for path in readable_runs(folder)]
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
        phrase = f"delete {len(paths)}"
        confirmation = st.text_input(f"Type {phrase} to confirm", key="runs_sure")
        more = {"key": "runs_delete", "disabled": confirmation != phrase}
        note = f"{len(paths)} runs were deleted."
        components.act_button(st, "Delete permanently", _delete, paths, folder, note=note, **more)


def _tag(paths: Sequence[Path], tags: Sequence[str]) -> None:
    for path in paths:
        describe(path, tags=[*read_about(path).tags, *tags])
    st.session_state["runs_tags"] = ""


def _delete(paths: Sequence[Path], folder: Path) -> None:
    for path in paths:
        control.delete(path, folder)
        navigation.deselect(path.name)
    st.session_state[_PICKED] = []
