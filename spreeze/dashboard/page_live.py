"""Live: start a run, see it learn, see what holds it back, stop it."""

from __future__ import annotations

import time
import tomllib
from functools import cache
from pathlib import Path

import streamlit as st

from spreeze.config import EnvConfig, RunConfig
from spreeze.dashboard import choice, control, live
from spreeze.dashboard.data import SAMPLE, live_run, row, runs_dir, tail_lines
from spreeze.errors import SpreezeError
from spreeze.formats import DASH, clean
from spreeze.settings import PROFILE_DIR
from spreeze.store_reader import MetricsReader

_FORCE_AFTER_S = 30.0
_ALGORITHMS = ("sac", "td3", "ddpg")


def page() -> None:
    """The page."""
    folder = runs_dir()
    busy = _busy(folder)
    arrived = st.session_state.pop("launched", None)
    if arrived is not None and (folder / arrived / "run.json").is_file():
        choice.choose(arrived)
        st.rerun()
    if arrived is not None and busy is not None:
        st.session_state["launched"] = arrived
    if error := st.session_state.pop("control_error", None):
        st.error(error)
    if busy is None:
        _start_box(folder)
    else:
        _status(busy)
    path = choice.current()
    if path is None:
        st.info("No run to show yet: press Start, or type `python -m spreeze.train --auto`.")
        return
    facts = row(path)
    note = " \u00b7 a recording, to look around" if path == SAMPLE else ""
    st.subheader(f"{facts.env_id or DASH} \u00b7 {(facts.algo or DASH).upper()} \u00b7 seed {facts.seed}", anchor=False)
    st.caption(f"{facts.name}{note}")
    live.show(path)


@cache
def tasks() -> list[str]:
    """Tasks to offer: the small one first, then those that have a profile."""
    found = ["Pendulum-v1", EnvConfig().id]
    for profile in sorted(PROFILE_DIR.glob("*.toml")):
        about = tomllib.loads(profile.read_text(encoding="utf-8")).get("about", {})
        found += [name for name in about.get("envs", []) if name not in found]
    return found


def _busy(folder: Path) -> str | None:
    waiting = control.launching(folder)
    return live_run(folder) or (waiting.name if waiting else None)


def _start_box(folder: Path) -> None:
    with st.container(border=True):
        first = st.columns([2.6, 1, 1, 1], vertical_alignment="bottom")
        env_id = first[0].selectbox("Task", tasks(), index=1, accept_new_options=True, key="start_env",
                                    help="Any Gymnasium id with Box spaces. Pendulum-v1 learns in a few minutes.")
        algo = first[1].selectbox("Algorithm", _ALGORITHMS, key="start_algo", help="SAC is the default of the paper.")
        seed = first[2].number_input("Seed", 0, 2**31 - 1, RunConfig().seed, key="start_seed",
                                     help="Seed of networks, exploration and environments.")
        auto = first[3].toggle("Autotune", value=True, key="start_auto",
                               help="Measures this machine for up to a minute and chooses batch size, learner "
                                    "threads and samplers; the result is kept for the next run.")
        with st.expander("My own numbers"):
            cells = st.columns(4)
            batch = cells[0].number_input("Batch size [transitions]", 1, 2**24, None, key="start_batch",
                                          placeholder="chosen", help="Transitions in one update.")
            samplers = cells[1].number_input("Samplers [processes]", 1, 512, None, key="start_samplers",
                                             placeholder="chosen", help="Processes that step environments.")
            minutes = cells[2].number_input("Stop after [min]", 0.1, 1e5, None, key="start_minutes",
                                            placeholder="never", help="Wall time of training.")
            target = cells[3].number_input("Stop at return", value=None, key="start_target", placeholder="never",
                                           help="Mean greedy return of one evaluation that ends the run.")
        try:
            request = control.Request(
                env_id=str(env_id), algo=str(algo), seed=int(seed), auto=auto, batch_size=batch, samplers=samplers,
                seconds=None if minutes is None else 60.0 * minutes, target_return=target,
            )
        except SpreezeError as error:
            st.error(str(error))
            return
        last = st.columns([1, 5], vertical_alignment="center")
        last[0].button("Start", type="primary", on_click=_start, args=(request, folder), key="start", width="stretch")
        command = control.shown("spreeze.train", *control.arguments(request), *control.place(folder))
        last[1].code(command, language=None, wrap_lines=True)


def _start(request: control.Request, folder: Path) -> None:
    try:
        st.session_state["launched"] = control.start(request, folder)
    except SpreezeError as error:
        st.session_state["control_error"] = str(error)


@st.fragment(run_every=1.0)
def _status(busy: str) -> None:
    """What the run that is alive does, each second; the whole page again when that changes."""
    folder = runs_dir()
    waiting = control.launching(folder)
    if _busy(folder) != busy or (st.session_state.get("launched") == busy and waiting is None):
        st.rerun()
    with st.container(border=True):
        cells = st.columns([1, 5], vertical_alignment="center")
        asked = st.session_state.get(f"stop_asked_{busy}")
        cells[0].button("Stop", on_click=_stop, args=(busy, folder), disabled=asked is not None, key="stop",
                        width="stretch", help="Ends as Ctrl-C would: writes a checkpoint and evaluates once more.")
        command = control.shown("spreeze.runs", *control.place(folder), "stop", busy)
        cells[1].code(command, language=None, wrap_lines=True)
        if asked is not None:
            _stages(folder / busy, busy, time.monotonic() - asked[0], asked[1])
        elif waiting is not None:
            st.markdown("**Starting:** the environment is tried and the machine measured (up to a minute).")
            lines = tail_lines(control.launch_log(busy, folder), 8)
            st.code("\n".join(lines) or "the process has been started", language=None)


def _stages(path: Path, name: str, waited_s: float, since_t: float) -> None:
    """How far stopping is: what was asked, what the run reported since, and force if it does not end."""
    lines = [f"\u2713 asked to stop, {waited_s:.0f} s ago"]
    try:
        events = MetricsReader(path / "metrics.db").events(20)
        lines += [f"\u2713 {event.text}" for event in events if event.t > since_t]
    except SpreezeError as error:
        lines.append(str(error))
    lines.append("\u2026 last checkpoint and last evaluation, then the processes end")
    st.code("\n".join(lines), language=None)
    if waited_s > _FORCE_AFTER_S and st.button(
        "End it at once", key="kill", help="Kills its supervisor; the newest checkpoint stays."
    ):
        st.caption(control.kill(name, runs_dir()))


def _stop(name: str, folder: Path) -> None:
    wall_s = row(folder / name).wall_s or 0.0
    try:
        control.stop(name, folder)
        st.session_state[f"stop_asked_{name}"] = (time.monotonic(), wall_s)
    except SpreezeError as error:
        st.session_state["control_error"] = clean(error)
