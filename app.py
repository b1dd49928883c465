"""The dashboard: ``streamlit run app.py``; runs are looked for in ``$SPREEZE_RUNS_DIR``, else in ``runs``."""

import streamlit as st

from spreeze.dashboard import routes, startup

app = st.App(
    routes.SCRIPT, routes=routes.routes(), middleware=routes.middleware(), lifespan=startup.startup
)
