"""The dashboard: ``streamlit run app.py``; runs are looked for in ``$SPREEZE_RUNS_DIR``, else in ``runs``.

Its address carries a token that works once. On a machine of your own, ``SPREEZE_DASHBOARD_TOKEN=off`` needs none.
``streamlit run app.py -- --import MODULE`` also offers the modes and algorithms of your module.
"""

import argparse
import os

import streamlit as st

from spreeze.dashboard import control, server
from spreeze.dashboard.access import LoginTokens
from spreeze.dashboard.run_data import runs_dir
from spreeze.machine.processes import PAGE, take_name

parser = argparse.ArgumentParser(prog="streamlit run app.py --", description="The dashboard of Spreeze.")
parser.add_argument(
    "--import",
    dest="module",
    metavar="MODULE",
    default=control.imported(),
    help="module whose modes and algorithms the Start form offers; it is imported by the runs, too",
)
if module := parser.parse_args().module:
    os.environ[control.IMPORT] = module
take_name(PAGE)  # so that running trainings do not count the dashboard as external load
tokens = LoginTokens(runs_dir())
app = st.App(
    server.SCRIPT, routes=server.routes(), middleware=server.middleware(tokens), lifespan=server.lifespan(tokens)
)
