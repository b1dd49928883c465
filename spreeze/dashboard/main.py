"""The script that Streamlit runs: navigation, the chosen run, one page. ``app.py`` at the top serves it."""

from __future__ import annotations

import streamlit as st

from spreeze.dashboard import (
    choice,
    page_about,
    page_autotune,
    page_compare,
    page_live,
    page_logs,
    page_runs,
    page_watch,
)

st.set_page_config(page_title="Spreeze", layout="wide")
pages = [
    st.Page(page_live.page, title="Live", url_path="live", default=True),
    st.Page(page_autotune.page, title="Autotune", url_path="autotune"),
    st.Page(page_runs.page, title="Runs", url_path="runs"),
    st.Page(page_compare.page, title="Compare", url_path="compare"),
    st.Page(page_watch.page, title="Watch", url_path="watch"),
    st.Page(page_logs.page, title="Logs", url_path="logs"),
    st.Page(page_about.page, title="About this machine", url_path="about"),
]
current = st.navigation(pages)
st.html("<style>.stMainBlockContainer { padding: 3.5rem 2rem 3rem; }</style>")
choice.sidebar()
current.run()
