"""The dashboard: ``streamlit run app.py``, or ``spreeze dashboard``; runs are in ``$SPREEZE_RUNS_DIR``, else ``runs``.

Its address carries a token that works once. On a machine of your own, ``SPREEZE_DASHBOARD_TOKEN=off`` needs none.
``streamlit run app.py -- --import MODULE`` also offers the modes and algorithms of your module.
"""

import streamlit as st

from spreeze.dashboard import server

app = st.App(server.SCRIPT, **server.app_parts())
