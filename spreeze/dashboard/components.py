"""Streamlit components (the Live page, commands to copy) and helpers for Markdown and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import streamlit as st

from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.schema import Config, field_of, kind_of
from spreeze.dashboard import control, episode_api, live_api
from spreeze.dashboard.run_data import SAMPLE, SAMPLE_NAME, data_flow, row, tail_lines
from spreeze.errors import SpreezeError
from spreeze.formatting import DASH, clean
from spreeze.metrics.published_returns import SOURCE, published
from spreeze.metrics.table import by_name
from spreeze.run_directory import read_run

PERIOD_MS = 1000
RESUME = (
    "Continues from the latest checkpoint, without the stop condition that ended it: it ends at the task's published "
    "return, unless it has had that, once returns no longer rise, or after its time budget, 30 minutes by default. "
    "Replay is filled again unless it was saved (--save-replay)."
)
_RETURN_HELP = (
    "The band is its 95 % confidence interval. Dotted lines mark resumes, warnings, errors and the best evaluation."
)


def show_live(path: Path, page_key: str) -> None:
    """Mounts the Live component for a run, drawn for the ``Activity.key`` ``page_key``; it reruns when that changes."""
    run = row(path)
    parts = data_flow(read_run(path))
    reference = published(run.env_id)
    # Tuples, because Streamlit loads pandas to find out whether a list is a table.
    _component("live", "live.css", "chart.js", "board.js", "film.js", "player.js", "agent.js", "live.js")(
        key=f"live-{run.name}",
        data={
            "base": prefix(),
            "run": run.name,
            "period_ms": PERIOD_MS,
            "page": page_key,
            "charts": (*live_api.chart_specs(live_api.lag_unit(parts)), *episode_api.HISTOGRAMS),
            "colours": live_api.COLOURS,
            "tiles": live_api.tiles(),
            "pipeline": live_api.pipeline(parts),
            "references": reference and ({"value": reference.value, "label": reference.label, "source": SOURCE},),
            "return_help": f"{by_name('eval_return').sentence} {_RETURN_HELP}",
        },
        on_changed_change=lambda: None,  # only the rerun is wanted
    )


def show_episodes(path: Path) -> None:
    """Mounts the button that opens the recorded episodes of a run."""
    name = SAMPLE_NAME if path == SAMPLE else path.name
    data = {"base": prefix(), "run": name, "colours": live_api.COLOURS}
    _component("watch", "live.css", "chart.js", "film.js", "player.js", "watch.js")(key=f"watch-{name}", data=data)


def prefix() -> str:
    """The server's base path, without a trailing slash."""
    base = str(st.get_option("server.baseUrlPath") or "").strip("/")
    return f"/{base}" if base else ""


@cache
def _component(name: str, style: str, *scripts: str) -> Any:
    """The registered component; its style is not isolated, so that it sees the theme's variables."""
    files = resources.files("spreeze.dashboard")
    css, *parts = (files.joinpath(file).read_text(encoding="utf-8") for file in (style, *scripts))
    return st.components.v2.component(
        f"spreeze_{name}", html=f'<div class="sz-{name}"></div>', css=css, js="\n".join(parts), isolate_styles=False
    )


def show_command(name: str, *lines: str) -> None:
    """Draws commands, one a line, each with its own copy button; the same ``name`` again updates them."""
    _component("commands", "command.css", "command.js")(key=f"command_{name}", data={"lines": lines})


def run_action(action: Callable[..., object], *args: object, note: str = "") -> None:
    """Runs the action of a click; its error, or else the note, is shown with the next page.

    The action comes first: another click may interrupt this callback wherever it uses the session's state.
    """
    failure = None
    try:
        action(*args)
    except SpreezeError as error:
        failure = str(error)
    st.session_state.pop("control_error", None)
    if failure is not None:
        st.session_state["control_error"] = failure
    elif note:
        st.session_state["control_note"] = note


def act_button(
    cell: Any, label: str, action: Callable[..., object], *args: object, note: str = "", **more: Any
) -> None:
    """A button of a page or cell for an action; errors and ``note`` as ``run_action``, the rest as Streamlit's."""
    cell.button(label, on_click=run_action, args=(action, *args), kwargs={"note": note}, **more)


def show_errors(folder: Path) -> None:
    """Shows a note on a click, and a rejected action or a failed start until it is dismissed."""
    if note := st.session_state.pop("control_note", None):
        st.toast(plain(note))
    if error := st.session_state.get("control_error"):
        _error(plain(error), "dismiss_error", st.session_state.__delitem__, "control_error")
    failed = control.failed_start(folder)
    if failed is not None:
        lines = tail_lines(failed.log) or ["it wrote nothing"]
        text = f"**{plain(failed.name)} did not start.** {plain(lines[-1])}"
        _error(text, "dismiss_start", control.dismiss, failed.name, folder)
        with st.expander("Its log"):
            st.code("\n".join(lines), language=None)


def _error(text: str, key: str, dismiss: Callable[..., None], *args: object) -> None:
    cells = st.columns([7, 1], vertical_alignment="center")
    cells[0].error(text)
    cells[1].button("Dismiss", key=key, on_click=dismiss, args=args, width="stretch")


_MARKS = re.compile(r"([\\`*_\[\]<>$|~:#!])")
_MAX = 500


def plain(text: object, limit: int = _MAX) -> str:
    """One line with all Markdown escaped; a dash for empty text."""
    return _MARKS.sub(r"\\\1", clean(text or DASH, limit))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, whose cells wrap, unlike those of ``st.dataframe``."""
    lines = [head, ["---"] * len(head), *([plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(texts: Iterable[object]) -> str:
    return "\n".join(f"- {plain(text)}" for text in texts)


def title(key: str, config: Config | None = None) -> str:
    """The title of a setting: ``learner.batch_size`` becomes "Learner: batch size [transitions]"."""
    part, _, name = key.partition(".")
    text = f"{part.upper() if part in ALGORITHMS else part.capitalize()}: {name.replace('_', ' ')}"
    try:
        unit = field_of(key, config).metadata["unit"]
    except (KeyError, StopIteration):
        return text  # a setting of another version
    return f"{text} [{unit}]" if unit and not text.endswith(f" {unit}") else text


def setting_input(config: Config, key: str, form: str, known: Any = None, blank: str = "", keep: bool = False) -> Any:
    """An input for a setting, with help, bounds and default from the schema; None while it is empty.

    Args:
        config: what has been chosen so far.
        key: ``section.field``.
        form: distinguishes several inputs for one setting.
        known: initial value.
        blank: text shown while it is empty; by default the setting's default.
        keep: its value outlives a visit to another page.
    """
    item, kind = field_of(key, config), kind_of(key, config)
    doc, low, high, choices = (item.metadata[name] for name in ("doc", "low", "high", "choices"))
    part, _, name = key.partition(".")
    default: Any = getattr(config.sections()[part], name)
    common: dict[str, Any] = {
        "key": f"{form}_{key}",
        "help": f"{plain(doc[0].upper() + doc[1:])}.",
        "persist_state": "session" if keep else None,
        "placeholder": blank or ("not set" if default in (None, ()) else _value_text(default)),
    }
    if kind is bool or (choices and kind is not tuple):
        options = list(choices or (True, False))
        index = options.index(known) if known in options else None
        return st.selectbox(title(key, config), options, index, format_func=_value_text, **common)
    if kind is int:
        return st.number_input(title(key, config), low, high, known, step=1, **common)
    if kind is float:
        low, high = (None if bound is None else float(bound) for bound in (low, high))
        step = (abs(default or 0.0) or 1.0) / 10.0
        return st.number_input(title(key, config), low, high, known, step=step, format="%g", **common)
    if choices and kind is tuple:
        return tuple(st.multiselect(title(key, config), choices, known or (), **common)) or None
    text = st.text_input(title(key, config), known or "", **common).strip()
    return text or None if kind is str else tuple(int(part) for part in re.findall(r"\d+", text)) or None


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
