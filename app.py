"""The dashboard: ``streamlit run app.py``; runs are looked for in ``$SPREEZE_RUNS_DIR``, else in ``runs``."""

import streamlit as st

from spreeze.dashboard import routes, startup
from spreeze.siblings import PAGE, take_name

take_name(PAGE)  # by which a run knows that this is no stranger to give way to

app = st.App(
    routes.SCRIPT, routes=routes.routes(), middleware=routes.middleware(), lifespan=startup.startup
)
