"""The dashboard: ``streamlit run app.py``; runs are looked for in ``$SPREEZE_RUNS_DIR``, else in ``runs``.

Its address bears a token that works once; ``SPREEZE_DASHBOARD_TOKEN=off`` asks for none, on a machine of one's own.
"""

import streamlit as st

from spreeze.dashboard import server
from spreeze.dashboard.access import Entrance
from spreeze.dashboard.run_data import runs_dir
from spreeze.machine.processes import PAGE, take_name

take_name(PAGE)  # by which a run knows that this is no stranger to give way to
entrance = Entrance(runs_dir())
app = st.App(
    server.SCRIPT, routes=server.routes(), middleware=server.middleware(entrance), lifespan=server.life(entrance)
)
