"""Several seeds or settings from the page: what the form asks, the command that trains them, and how far it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st

from spreeze.config.layers import toml_value
from spreeze.dashboard import components, control
from spreeze.errors import ConfigError
from spreeze.formatting import duration
from spreeze.run_directory import read_json

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator

_LINE = re.compile(r"^[a-z]\w*\.[a-z]\w*=.+$", re.ASCII)
_MOST_SEEDS = 20
_ENDS = ("stop.seconds", "stop.env_steps", "stop.updates")
_KEPT: dict[str, Any] = {"persist_state": "session"}


class Plan(NamedTuple):
    """How many runs the form asks for."""

    seeds: int = 1
    lines: tuple[str, ...] = ()
    """``section.field=value,value`` of each setting that is varied."""

    @property
    def several(self) -> bool:
        return self.seeds > 1 or bool(self.lines)


def ask(cell: DeltaGenerator) -> Plan:
    """Asks for the number of seeds and for the values of settings; one run of the settings above by default."""
    with cell.popover("Seeds and values", width="stretch"):
        text = "One run each, in turn, beginning with the seed above. Three are the fewest that can be compared."
        seeds = st.number_input("Seeds", 1, _MOST_SEEDS, 1, key="start_seeds", **_KEPT, help=text)
        lines = st.text_area(
            "Settings by values",
            key="start_grid",
            **_KEPT,
            placeholder="learner.batch_size=64,256",
            help="One SECTION.FIELD=VALUE,VALUE per line, as for sweep --set: every combination is trained.",
        )
    return Plan(int(seeds), tuple(line.strip() for line in lines.splitlines() if line.strip()))


def options(request: control.Request, plan: Plan) -> list[str]:
    """The flags of ``spreeze sweep`` for a request and a plan.

    Raises:
        ConfigError: a line is malformed, or nothing ends the runs.
    """
    for line in plan.lines:
        if not _LINE.match(line):
            raise ConfigError(f"{line[:80]!r}: expected SECTION.FIELD=VALUE,VALUE such as sac.gamma=0.98,0.99")
    if not any(key in request.settings for key in _ENDS) and not any(line.startswith(_ENDS) for line in plan.lines):
        raise ConfigError("several runs need a stop condition: set seconds, env steps or updates under Settings")
    module = request.import_module or control.imported()
    found = ["--env", request.env_id, *(["--import", module] if module else [])]
    found += ["--profile", request.profile] if request.profile else []
    found += ["--mode", request.mode, "--algo", request.algo, *(["--auto"] if request.auto else [])]
    settings = {**({"env.args": request.args} if request.args else {}), **request.settings}
    found += [f"--set={key}={toml_value(value)}" for key, value in settings.items()]
    found += [f"--set={line}" for line in plan.lines]
    return [*found, "--seeds", str(plan.seeds), "--first-seed", str(request.seed)]


def expected(request: control.Request, plan: Plan) -> str:
    """How many runs that makes, and how long they train where that is known."""
    count = plan.seeds
    for line in plan.lines:
        count *= line.count(",") + 1
    seconds = request.settings.get("stop.seconds")
    time = f", {duration(count * float(seconds))} (h:min:s) of training" if isinstance(seconds, int | float) else ""
    return f"{count} runs, one after the other{time}. Compare lists them as one sweep."


def command(flags: Sequence[str], folder: Path) -> str:
    return control.command_line("spreeze", "sweep", *flags, *control.runs_dir_flags(folder))


def show_running(folder: Path) -> None:
    """Says how far the sweep is that a page has started, with a button that ends it."""
    launch = control.launching(folder)
    runs = read_json(folder / f"{launch.name}.sweep.json").get("runs") if launch is not None else None
    if launch is None or not isinstance(runs, list):
        return
    states = [run.get("state") for run in runs if isinstance(run, dict)]
    cells = st.columns([5, 1], vertical_alignment="center")
    ended = sum(state in ("finished", "failed", "interrupted") for state in states)
    failed = f", {states.count('failed')} of them failed" if "failed" in states else ""
    cells[0].info(f"Sweep {components.plain(launch.name)}: {ended} of {len(states)} runs have ended{failed}.")
    text = "Stops its run like Ctrl-C, and starts no further one."
    components.act_button(
        cells[1], "End the sweep", control.stop, launch.name, folder, key="sweep_stop", width="stretch", help=text
    )
