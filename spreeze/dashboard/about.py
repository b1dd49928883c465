"""About this machine: what the doctor finds, and what a run used."""

from __future__ import annotations

from typing import Any

import streamlit as st

from spreeze.dashboard import components, control, navigation
from spreeze.dashboard.run_data import runs_dir
from spreeze.errors import RunError
from spreeze.formatting import DASH, clean
from spreeze.run_directory import read_run

_SIGNS = {"ok": "\u2713", "warn": "!", "fail": "\u2717"}


def page() -> None:
    st.subheader("About this machine", anchor=False)
    st.caption(
        "The doctor checks PyTorch, the default environment and the video encoder in separate processes (a "
        "few seconds)."
    )
    components.show_command("doctor", control.command_line("spreeze", "doctor", *control.runs_dir_flags(runs_dir())))
    if st.button("Check this machine", type="primary", key="doctor"):
        with st.spinner("Examining ..."):
            st.session_state["doctor_report"] = _examine()
    found = st.session_state.get("doctor_report")
    if found is not None:
        show(found)
    path = navigation.current()
    if path is not None:
        run = read_run(path)
        st.subheader("Machine of the selected run", anchor=False)
        st.write(components.plain(run.get("machine")))
        versions = run.get("versions")
        if isinstance(versions, dict):
            st.dataframe(
                [{"part": clean(name), "version": clean(value or DASH)} for name, value in versions.items()],
                hide_index=True,
            )


def _examine() -> dict[str, Any]:
    try:
        return control.doctor(*control.runs_dir_flags(runs_dir()))
    except RunError as error:
        return {"ok": False, "checks": [], "error": components.plain(error)}


def show(document: dict[str, Any]) -> None:
    if document.get("ok"):
        st.success("Ready: the default command works.")
    else:
        st.error(document.get("error") or "Not ready: see the failed checks (\u2717).")
    rows = [
        (_SIGNS.get(check.get("status"), "?"), check.get("name"), check.get("text"), check.get("remedy"))
        for check in document.get("checks", [])
    ]
    st.markdown(components.table(("", "what", "finding", "remedy"), rows))
