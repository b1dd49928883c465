"""Live: start a run, see it learn, see what holds it back, stop it."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

from spreeze.config.compatibility import OFF_POLICY
from spreeze.config.layers import PROFILE_DIR
from spreeze.config.schema import EnvConfig, RunConfig
from spreeze.dashboard import components, control, run_picker
from spreeze.dashboard.run_data import SAMPLE, row, runs_dir
from spreeze.errors import SpreezeError
from spreeze.formatting import DASH, clean, number


def page() -> None:
    """The page."""
    folder = runs_dir()
    now = control.activity(folder)
    if st.session_state.get("follow") and now.name is not None and (folder / now.name / "run.json").is_file():
        del st.session_state["follow"]
        run_picker.choose(now.name)
        st.rerun()
    if error := st.session_state.pop("control_error", None):
        st.error(components.plain(error))
    box = st.container()
    _shown(now)
    with box:  # sent after the charts: a browser loads the parts of a page in that order
        if now.name is None:
            _start_box(folder)
        else:
            _stop_box(now, folder)


def _shown(now: control.Activity) -> None:
    """The chosen run."""
    path = run_picker.current()
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
    """Tasks to offer: the small one first, then those that have a profile."""
    found = ["Pendulum-v1", EnvConfig().id]
    for profile in sorted(PROFILE_DIR.glob("*.toml")):
        about = tomllib.loads(profile.read_text(encoding="utf-8")).get("about", {})
        found += [name for name in about.get("envs", []) if name not in found and "*" not in name]
    return found


def _start_box(folder: Path) -> None:
    with st.container(border=True):
        first = st.columns([2.6, 1, 1, 1], vertical_alignment="bottom")
        env_id = first[0].selectbox("Task", tasks(), index=1, accept_new_options=True, key="start_env",
                                    help="Any installed Gymnasium id. Pendulum-v1 learns in about a minute.")
        algo = first[1].selectbox("Algorithm", OFF_POLICY, key="start_algo",
                                  help="SAC is the paper's; DQN is for discrete actions.")
        seed = first[2].number_input("Seed", 0, 2**31 - 1, RunConfig().seed, key="start_seed",
                                     help="Seed of networks, exploration and environments.")
        auto = first[3].toggle("Autotune", value=True, key="start_auto",
                               help="Measures this machine for up to a minute and chooses batch size, learner "
                                    "threads and samplers; the result is kept for the next run.")
        last = st.columns([1, 1.4, 5], vertical_alignment="center")
        with last[1].popover("My own numbers", width="stretch"):
            wanted = _own_numbers()
        try:
            request = control.Request(
                env_id=str(env_id), algo=str(algo), seed=int(seed), auto=auto, **wanted
            )
        except SpreezeError as error:
            st.error(components.plain(error))
            return
        last[0].button("Start", type="primary", on_click=_start, args=(request, folder), key="start", width="stretch")
        with last[2]:
            components.show_command(
                "start", control.shown("spreeze.train", *control.arguments(request), *control.place(folder))
            )


def _own_numbers() -> dict[str, Any]:
    """Fields of a request that take the place of the tuner's choice, and when to stop."""
    pins = st.session_state.get("pins", {})
    values: dict[str, Any] = {
        field: st.number_input(label, 1, top, pins.get(field), key=f"start_{field}", placeholder="chosen", help=text)
        for field, label, top, text in control.PINS
    }
    minutes = st.number_input("Stop after [min]", 0.1, 1e5, None, key="start_minutes", placeholder="never",
                              help="Wall time of training.")
    values["seconds"] = None if minutes is None else 60.0 * minutes
    values["target_return"] = st.number_input("Stop at return", value=None, key="start_target", placeholder="never",
                                              help="Mean greedy return of one evaluation that ends the run.")
    return values


def _start(request: control.Request, folder: Path) -> None:
    # Noted first, because another click may cut this short: the page then shows the run that goes on.
    st.session_state["follow"] = True
    try:
        control.start(request, folder)
    except SpreezeError as error:
        st.session_state["control_error"] = str(error)


def _stop_box(now: control.Activity, folder: Path) -> None:
    """Stop, and force where that takes too long; the stages themselves are drawn by the component."""
    name = now.name or ""
    with st.container(border=True):
        cells = st.columns([1, 5], vertical_alignment="center")
        asked = now.phase in ("stopping", "late")
        cells[0].button("Stopping" if asked else "Stop", on_click=_stop, args=(name, folder), disabled=asked,
                        key="stop", width="stretch",
                        help="Ends as Ctrl-C would: writes a checkpoint and evaluates once more.")
        with cells[1]:
            components.show_command("stop", control.stop_command(name, folder))
        if now.phase == "late":
            if cells[0].button("End it at once", key="kill", width="stretch",
                               help="Kills its supervisor; the newest checkpoint stays."):
                st.caption(control.kill(name, folder))
            with cells[1]:
                components.show_command(
                    "kill", control.shown("spreeze", "runs", *control.place(folder), "stop", "--force", name)
                )


def _stop(name: str, folder: Path) -> None:
    try:
        control.stop(name, folder)
    except SpreezeError as error:
        st.session_state["control_error"] = clean(error)
