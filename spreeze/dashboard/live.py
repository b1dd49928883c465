"""Live: start a run, watch it learn, see its bottleneck, stop it."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from spreeze.config.algorithms import AlgorithmRow, rows
from spreeze.config.modes import Mode, modes
from spreeze.config.profiles import PROFILE_DIR
from spreeze.config.schema import EnvConfig, RunConfig, offered
from spreeze.dashboard import autotune, components, control, navigation
from spreeze.dashboard.run_data import SAMPLE, row, runs_dir
from spreeze.errors import SpreezeError
from spreeze.formatting import DASH, clean, number
from spreeze.run_directory import read_run

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator


_STOPS = ("stop.seconds", "stop.env_steps", "stop.updates", "stop.target_return")
_TUNER_HELP = ("Measures this machine for up to a minute and chooses what the mode leaves to the tuner, such as batch "
               "size, threads and processes; the result is kept for the next run. Off where a mode leaves it nothing.")


def page() -> None:
    folder = runs_dir()
    now = control.activity(folder)
    if st.session_state.get("follow") and now.name is not None and (folder / now.name / "run.json").is_file():
        del st.session_state["follow"]
        navigation.choose(now.name)
        st.rerun()
    components.show_errors(folder)
    box = st.container()
    if now.name is not None and now.phase == "starting":
        autotune.show_start(now.name, folder)
    else:
        _shown(now)
    with box:  # sent after the charts, because a browser loads the parts of a page in that order
        if now.name is None:
            _start_box(folder)
        else:
            _stop_box(now, folder)


def _shown(now: control.Activity) -> None:
    path = navigation.current()
    if path is None:
        st.info("No run to show yet: press Start, or type `python -m spreeze.train --auto`.")
        return
    facts = row(path)
    note = " \u00b7 a recording, to look around" if path == SAMPLE else ""
    title = (facts.env_id or DASH, (facts.algo or DASH).upper(), f"seed {number(facts.seed)}")
    st.subheader(components.plain(" \u00b7 ".join(title)), anchor=False)
    st.caption(f"{facts.name}{note}")
    components.show_live(path, now.key)


@cache
def tasks() -> list[str]:
    """Tasks to offer: Pendulum and the default, then those with a profile."""
    found = ["Pendulum-v1", EnvConfig().id]
    for profile in sorted(PROFILE_DIR.glob("*.toml")):
        about = tomllib.loads(profile.read_text(encoding="utf-8")).get("about", {})
        found += [name for name in about.get("envs", []) if name not in found and "*" not in name]
    return found


def _start_box(folder: Path) -> None:
    """The form of a new run; offers only valid combinations of mode, algorithm and settings."""
    with st.container(border=True):
        first = st.columns([2.4, 1.1, 1, 0.9, 1], vertical_alignment="bottom")
        env_id = first[0].selectbox("Task", tasks(), index=1, accept_new_options=True, key="start_env",
                                    help="Any installed Gymnasium id. Pendulum-v1 learns in about a minute.")
        known, algorithms = _tables()
        lines = "\n".join(f"- **{mode.name}**: {components.plain(mode.doc)}" for mode in known.values())
        mode = known[_one_of(first[1], "Mode", list(known), "start_mode", lines)]
        fitting = [row.name for row in algorithms.values() if row.runs_in(mode)]
        algo = _one_of(first[2], "Algorithm", fitting, "start_algo",
                       "Those that this mode runs. DQN and SAC learn discrete actions, PPO and A2C any, the others "
                       "continuous ones.")
        seed = first[3].number_input("Seed", 0, 2**31 - 1, RunConfig.seed, key="start_seed",
                                     help="Seed of networks, exploration and environments.")
        wiring = mode.wiring(on_policy=bool(algorithms[algo].on_policy))
        tunable = bool(wiring and wiring.knobs)
        auto = first[4].toggle("Autotune", value=True, key="start_auto", disabled=not tunable, help=_TUNER_HELP)
        st.caption(f"Mode {mode.name}: {components.plain(mode.doc)}.")
        last = st.columns([1, 1.2, 5], vertical_alignment="center")
        try:
            request = control.Request(env_id=str(env_id), mode=mode.name, algo=algo, seed=int(seed),
                                      auto=auto and tunable)
            with last[1].popover("Settings", width="stretch"):
                request = dataclasses.replace(request, settings=_own_settings(request))
        except SpreezeError as error:
            st.error(components.plain(error))
            return
        last[0].button("Start", type="primary", on_click=_start, args=(request, folder), key="start", width="stretch")
        with last[2]:
            components.show_command(
                "start", control.shown("spreeze.train", *control.arguments(request), *control.place(folder))
            )


def _tables() -> tuple[dict[str, Mode], dict[str, AlgorithmRow]]:
    """Modes and algorithms, including those of the ``--import`` module."""
    try:
        return modes(control.imported()), rows(control.imported())
    except SpreezeError as error:
        st.error(components.plain(error))
        return modes(), rows()


def _one_of(cell: DeltaGenerator, label: str, options: list[str], key: str, text: str) -> str:
    """A select box whose options depend on other choices."""
    if st.session_state.get(key, options[0]) not in options:
        st.session_state[key] = options[0]  # not deleted: the browser would keep showing the old one
    return str(cell.selectbox(label, options, key=key, help=text))


def _own_settings(request: control.Request) -> dict[str, Any]:
    """Inputs for settings, which replace the tuner's choice or the default, and for stop conditions."""
    config, pins = request.config, st.session_state.get("pins", {})
    knobs, others = offered(config)
    values: dict[str, Any] = {}
    if knobs:
        st.caption("What the tuner chooses; it keeps what you fill in." if request.auto
                   else "What Autotune would choose; while it is off the defaults hold.")
        cells = st.columns(2)
        for place, key in enumerate(knobs):
            with cells[place % 2]:
                values[key] = components.ask(config, key, "start", pins.get(key), "tuner" if request.auto else "")
    st.caption("When to stop: at the first of these, or when you press Stop.")
    cells = st.columns(2)
    for place, key in enumerate(_STOPS):
        with cells[place % 2]:
            values[key] = components.ask(config, key, "start", blank="never")
    chosen = st.multiselect("More settings", others, key="start_more", placeholder="choose by name",
                            help="Every setting that makes a difference to this mode and algorithm.")
    cells = st.columns(2)
    for place, key in enumerate(chosen):
        with cells[place % 2]:
            values[key] = components.ask(config, key, "start")
    return {key: value for key, value in values.items() if value is not None}


def _start(request: control.Request, folder: Path) -> None:
    # Set first, because another click may interrupt this callback.
    st.session_state["follow"] = True
    st.session_state.pop("control_error", None)
    try:
        control.start(request, folder)
    except SpreezeError as error:
        st.session_state["control_error"] = str(error)


def _stop_box(now: control.Activity, folder: Path) -> None:
    """Stop, and what else can be asked of a live run."""
    name = now.name or ""
    with st.container(border=True):
        cells = st.columns([1, 1, 1.3, 1.3, 2.4], vertical_alignment="bottom")
        asked = now.phase in ("stopping", "late")
        cells[0].button("Stopping" if asked else "Stop", on_click=_stop, args=(name, folder), disabled=asked,
                        key="stop", width="stretch",
                        help="Ends as Ctrl-C would: writes a checkpoint and evaluates once more.")
        commands = [control.stop_command(name, folder)]
        if now.phase in ("running", "paused"):
            commands += _steer_buttons(cells[1:], now, folder)
        if now.phase == "late":
            if cells[1].button("End it at once", key="kill", width="stretch",
                               help="Kills its supervisor; the newest checkpoint stays."):
                st.caption(control.kill(name, folder))
            commands.append(control.shown("spreeze", "runs", *control.place(folder), "stop", "--force", name))
        with st.expander("The same from a terminal"):
            components.show_command("stop", *commands)


def _steer_buttons(cells: list[DeltaGenerator], now: control.Activity, folder: Path) -> list[str]:
    """Buttons that leave the run alive; returns the commands that do the same."""
    name, paused = now.name or "", now.phase == "paused"
    pause = "continue" if paused else "pause"
    buttons = (
        (pause, "Go on" if paused else "Pause", "Stops its processes where they are, which frees the cores at once; "
         "replay and networks stay in memory.", False),
        ("evaluate", "Evaluate now", "Evaluates the newest policy without waiting for its turn.", paused),
        ("checkpoint", "Save now", "Writes a checkpoint at once.", paused),
    )
    for cell, (what, label, text, disabled) in zip(cells, buttons, strict=False):
        cell.button(label, key=f"steer_{what}", on_click=_steer, args=(name, folder, what), help=text,
                    disabled=disabled, width="stretch")
    commands = [control.shown("spreeze", "runs", *control.place(folder), what, name) for what, *_ in buttons]
    share = read_run(folder / name).get("leave_free")
    if isinstance(share, int | float):  # else no governor watches it
        key = f"leave_free_{name}"
        if st.session_state.get("leave_free_sent") in (None, share):  # else the run has not taken it yet
            st.session_state[key] = round(100 * share)
        cells[-1].slider("Leave free for other programs [%]", 0, 90, step=5, key=key, disabled=paused,
                         on_change=_leave_free, args=(name, folder, key),
                         help="Share of the usable cores; samplers rest where it is needed.")
        commands.append(control.shown("spreeze", "runs", *control.place(folder), "leave-free", name,
                                      f"{st.session_state[key] / 100:g}"))
    return commands


def _steer(name: str, folder: Path, what: str, text: str = "") -> None:
    try:
        control.steer(name, folder, what, text)
    except SpreezeError as error:
        st.session_state["control_error"] = clean(error)


def _leave_free(name: str, folder: Path, key: str) -> None:
    share = st.session_state[key] / 100
    st.session_state["leave_free_sent"] = share
    _steer(name, folder, "leave-free", repr(share))


def _stop(name: str, folder: Path) -> None:
    try:
        control.stop(name, folder)
    except SpreezeError as error:
        st.session_state["control_error"] = clean(error)
