"""Live: watch a run learn, see its bottleneck, steer and stop it; where none is alive, the form to start one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from spreeze.dashboard import autotune, components, control, navigation, start
from spreeze.dashboard.run_data import SAMPLE, row, runs_dir, takes_turns
from spreeze.files import read_json
from spreeze.formatting import DASH, clean, whole
from spreeze.run_directory import LIVE_STATES, read_config, read_run, steer

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator

_TAKEN_WITHIN_S = 5.0
"""A live run takes a request within a second; after this the control shows the value of the run again."""


def page() -> None:
    folder = runs_dir()
    path = navigation.current()
    if _ended_in_sweep(path, folder):
        st.session_state["follow"] = True
    now = autotune.followed_activity(path, folder)
    components.show_errors(folder)
    start.show_sweep(folder, now.name)
    box = st.container()
    if autotune.shows_start(path, now):
        autotune.show_start(now.name or "", folder)
    else:
        _show_run(path, now)
    with box:  # sent after the charts, because a browser loads the parts of a page in that order
        if now.name is None and (start.is_open() or path is None or path == SAMPLE):
            start.form(folder)
        elif now.name is not None:
            _stop_box(now, folder, named=path is None or path.name != now.name)


def _ended_in_sweep(path: Path | None, folder: Path) -> bool:
    """True once the run that was shown alive, and not picked, has ended and its sweep continues with the next one."""
    alive = path is not None and row(path).state in LIVE_STATES
    seen, st.session_state["seen_alive"] = st.session_state.get("seen_alive"), path.name if alive and path else None
    ended = path is not None and not alive and seen == path.name and not navigation.is_picked(path.name)
    return ended and control.launching(folder) is not None


def _show_run(path: Path | None, now: control.Activity) -> None:
    if path is None:
        st.info("No runs yet: press Start, or run `python -m spreeze.train --auto`.")
        return
    run, folder = row(path), runs_dir()
    tuned = read_json(path / "tune.json")
    note = " \u00b7 a recording" if path == SAMPLE else ""
    if tuned.get("reused"):  # else its rows came during this run
        note += f" \u00b7 settings from Autotune's cache, measured {clean(tuned.get('measured_at') or DASH, 40)}"
    title = (run.env_id or DASH, (run.algo or DASH).upper(), f"mode {run.mode or DASH}", f"seed {whole(run.seed)}")
    head = st.container(horizontal=True, vertical_alignment="bottom")
    head.title(components.plain(" \u00b7 ".join(title)), anchor=False, width="content")
    if now.name is None and path != SAMPLE:
        start.opener(head)
        components.act_button(head, "Resume", control.resume, path, folder, key="live_resume", help=components.RESUME)
    head.caption(components.plain(f"{run.name}{note}"), width="content")
    components.show_live(path, now.key)


def _stop_box(now: control.Activity, folder: Path, *, named: bool) -> None:
    """Stop and the other controls of a live run; with its name if the page shows another run."""
    name = now.name or ""
    with st.container():
        if named:
            doing = "starting" if now.phase == "starting" else "running"
            st.markdown(f"For the {doing} **{components.plain(name)}**:")
        line = st.container(horizontal=True)
        stopping = now.phase in ("stopping", "late")
        label = "Stopping" if stopping else "Stop"
        text = "Stops like Ctrl-C: writes a checkpoint and evaluates once more."
        components.act_button(line, label, control.stop, name, folder, disabled=stopping, key="stop", help=text)
        commands = [control.stop_command(name, folder)]
        if now.phase in ("running", "paused"):
            commands += _steer_buttons(line, now, folder)
        if now.phase == "late":
            text = "Kills the run; the latest checkpoint is kept."
            components.act_button(line, "Kill", control.kill, name, folder, key="kill", help=text)
            commands.append(control.runs_command(folder, "stop", "--force", name))
        with line.popover("Command line"):
            components.show_command("stop", *commands)


def _steer_buttons(line: DeltaGenerator, now: control.Activity, folder: Path) -> list[str]:
    """Buttons that leave the run alive; returns the commands that do the same."""
    name, paused = now.name or "", now.phase == "paused"
    run = read_run(folder / name)
    one_process = takes_turns(run, read_config(folder / name))
    text = "Suspends all processes and frees the cores; replay and networks stay in memory."
    pause = ("pause", "Pause", text, False, "")
    if paused:
        pause = ("continue", "Continue", "Lets all processes go on where they were suspended.", False, "")
    trace = "Records and shows the phases of all workers for 0.25 s."
    if one_process:
        trace = "Not available: this mode has a single process."
    buttons = (
        pause,
        ("evaluate", "Evaluate now", "Evaluates the newest policy now.", paused, "the return gets a point"),
        ("checkpoint", "Save now", "Writes a checkpoint now.", paused, "a checkpoint is written"),
        ("timeline", "Timeline", trace, paused or one_process, "the phases of the workers are shown"),
    )
    more: dict[str, Any]
    for request, label, text, disabled, then in buttons:
        more = {"key": f"steer_{request}", "help": text, "disabled": disabled}
        more["note"] = then and f"{label} is requested, soon {then}."
        components.act_button(line, label, steer, name, folder, request, **more)
    commands = [control.runs_command(folder, request, name) for request, *_ in buttons]
    share = run.get("leave_free")
    if share is not None:  # else no governor watches it
        key = f"leave_free_{name}"
        sent, sent_s = st.session_state.get(f"{key}_sent", (share, 0.0))
        if sent == share or time.monotonic() - sent_s > _TAKEN_WITHIN_S:
            st.session_state.pop(f"{key}_sent", None)
            st.session_state[key] = round(100 * share)
        more = {"step": 5, "key": key, "disabled": paused, "width": 260}
        more |= {"on_change": _leave_free, "args": (name, folder, key)}
        more["help"] = "Share of the usable cores; samplers are paused as needed."
        box = line.popover(f"Leave free: {st.session_state[key]} %")
        box.slider("Leave free for other programs [%]", 0, 90, **more)
        commands.append(control.runs_command(folder, "leave-free", name, f"{st.session_state[key] / 100:g}"))
    return commands


def _leave_free(name: str, folder: Path, key: str) -> None:
    share = st.session_state[key] / 100
    components.run_action(steer, name, folder, "leave-free", repr(share))
    st.session_state[f"{key}_sent"] = share, time.monotonic()
