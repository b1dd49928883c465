"""The dashboard: ``streamlit run app.py``; runs are looked for in ``$SPREEZE_RUNS_DIR``, else in ``runs``.

Its address bears a token that works once; ``SPREEZE_DASHBOARD_TOKEN=off`` asks for none, on a machine of one's own.
"""

import streamlit as st

from spreeze.dashboard import routes, startup
from spreeze.dashboard.data import runs_dir
from spreeze.dashboard.entrance import Entrance
from spreeze.siblings import PAGE, take_name

take_name(PAGE)  # by which a run knows that this is no stranger to give way to
entrance = Entrance(runs_dir())
app = st.App(
    routes.SCRIPT, routes=routes.routes(), middleware=routes.middleware(entrance), lifespan=startup.life(entrance)
)
