"""Routes beside the pages: live numbers, the agent's picture, Plotly's script. They only read."""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata, resources
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spreeze.dashboard import feed
from spreeze.dashboard.data import run_path, runs_dir
from spreeze.errors import RunError
from spreeze.formats import clean

SCRIPT = str(Path(__file__).with_name("main.py"))
_MAX_PICTURE_BYTES = 2_000_000


def prefix() -> str:
    """The base path that the server was given, without the last slash."""
    base = str(st.get_option("server.baseUrlPath") or "").strip("/")
    return f"/{base}" if base else ""


def plotly_url() -> str:
    """Where the page loads Plotly from; a new version has a new address, so it may be kept for ever."""
    return f"{prefix()}/x/plotly.js?v={metadata.version('plotly')}"


def routes() -> list[Route]:
    """All routes, below the base path."""
    base = prefix()
    return [
        Route(f"{base}/x/plotly.js", plotly),
        Route(f"{base}/api/live", live),
        Route(f"{base}/live.jpg", picture),
    ]


def middleware() -> list[Middleware]:
    """Only requests that name this machine: a foreign page cannot rebind its name to us."""
    return [Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"])]


def plotly(request: Request) -> Response:
    """The script of the installed Plotly package: nothing is loaded from elsewhere."""
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(_plotly_script(), media_type="text/javascript", headers=headers)


@cache
def _plotly_script() -> bytes:
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()


def live(request: Request) -> Response:
    """News of the run in ``run`` since ``since``; see ``feed.answer``."""
    query = request.query_params
    try:
        path = run_path(query.get("run", ""), runs_dir())
        since, seen = float(query.get("since", 0)), int(query.get("evals", 0))
        document = feed.answer(path, max(0.0, since), max(0, seen), query.get("epoch", ""))
    except (RunError, ValueError) as error:
        document = {"error": clean(error)}
    return Response(
        json.dumps(document, separators=(",", ":"), allow_nan=False),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def picture(request: Request) -> Response:
    """The newest picture of the agent."""
    try:
        path = run_path(request.query_params.get("run", ""), runs_dir()) / "live.jpg"
        with open(path, "rb") as file:
            data = file.read(_MAX_PICTURE_BYTES)
    except (RunError, OSError):
        return Response(status_code=204, headers={"Cache-Control": "no-store"})  # none yet is no error
    return Response(data, media_type="image/jpeg", headers={"Cache-Control": "no-store"})
