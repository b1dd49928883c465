"""The script that Streamlit runs: navigation, the chosen run, one page. ``app.py`` at the top serves it."""

from __future__ import annotations

import streamlit as st

from spreeze.dashboard import run_picker
from spreeze.dashboard.navigation import TITLES, load

st.set_page_config(page_title="Spreeze", layout="wide")
pages = [
    st.Page(load(name).page, title=title, url_path=name, default=not place)
    for place, (name, title) in enumerate(TITLES.items())
]
current = st.navigation(pages)
st.html("<style>.stMainBlockContainer { padding: 3.5rem 2rem 3rem; }</style>")
run_picker.sidebar()
current.run()
