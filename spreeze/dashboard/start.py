"""The form for new runs: algorithms and modes that fit the task, all settings, the user's environments, and sweeps."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import re
import textwrap
import tomllib
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st

from spreeze.config.algorithms import AlgorithmRow, fitting_algorithms, implied_mode, rows, task_text
from spreeze.config.layers import OTHER_NAMES, Layer, toml_value, unknown_setting
from spreeze.config.modes import Mode, modes
from spreeze.config.profiles import PROFILE_DIR, profile_names, task_profile
from spreeze.config.schema import Config, RunConfig, StopConfig, active_settings, field_of
from spreeze.config.section import split_values
from spreeze.dashboard import components, control
from spreeze.dashboard.run_data import sweep_runs
from spreeze.envs.families import imports_only, refusal_on_device
from spreeze.envs.make import default_env_id
from spreeze.errors import ConfigError, SpreezeError
from spreeze.formatting import duration
from spreeze.metrics.stop_conditions import ending_of
from spreeze.run_directory import list_runs
from spreeze.tuner.knobs import tunable_settings
from spreeze.types import EnvSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamlit.delta_generator import DeltaGenerator


_STOPS = tuple(f"stop.{name}" for name in StopConfig.CONDITIONS)
_MACHINE = ("tuning.objective", "tuning.leave_free")
_TUNER_HELP = (
    "Benchmarks this machine for up to a minute and chooses batch size, threads and processes; the "
    "result is cached. Disabled in modes that have nothing to tune."
)
_KEPT: dict[str, Any] = {"persist_state": "session"}  # options of a field whose value outlives a visit to another page
_OPEN = "start_open"
COMPARE = "compare"  # choice in place of an algorithm: the command compares those that fit
FRESH = "start_fresh"  # key of the field that lets the tuner measure again


def field(key: str) -> str:
    """The key of the form's field for a setting."""
    return f"start_{key}"


def fill(values: dict[str, Any]) -> None:
    """Fills in fields of the form, from a page that does not draw it; None empties one."""
    for key, value in values.items():
        if value is None:
            st.session_state.pop(field(key), None)
        else:
            st.session_state[field(key)] = value


_OTHER_TASKS = ("Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")  # of every installation of Gymnasium
_BOX2D = ("LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3")


@cache
def tasks() -> list[str]:
    """Tasks to offer: Pendulum and the default, those with a profile, then other well-known ones that are installed."""
    first, others = list(dict.fromkeys(("Pendulum-v1", str(default_env_id().value)))), list[str]()
    for profile in sorted(PROFILE_DIR.glob("*.toml")):
        about = tomllib.loads(profile.read_text(encoding="utf-8")).get("about", {})
        others += [name for name in about.get("envs", []) if "*" not in name and name not in first]
    others += [*_OTHER_TASKS, *(_BOX2D if importlib.util.find_spec("Box2D") else ())]
    return [*first, *dict.fromkeys(others)]


def known_task(text: str) -> str:
    """The offered task for a text in lower case, without a version, or with which no other begins; else the text."""
    typed, offered = text.lower(), {task.lower(): task for task in tasks()}
    begin = [task for lower, task in offered.items() if lower.startswith(typed)]
    exact = (task for lower, task in offered.items() if typed in (lower, lower.rpartition("-v")[0]))
    return next(exact, begin[0] if len(begin) == 1 else text)


class _CustomEnv(NamedTuple):
    """An environment of the user's, and arguments for its constructor."""

    module: str | None = None
    args: tuple[str, ...] = ()
    blocked: str | None = None  # reason why it must not be probed yet


@lru_cache(50)
def _probed_spec(env_id: str, module: str | None, args: tuple[str, ...]) -> EnvSpec:
    """Spaces of the task, probed in a separate process; an ``EnvError`` if it cannot be used."""
    from spreeze.envs.probe import probe_env  # Gymnasium takes 0.3 s

    return probe_env(env_id, module, steps=0, args=args).spec


@lru_cache(20)
def _ids(module: str) -> tuple[str, ...]:
    """The ids of a trusted module; none if it cannot be imported, which is reported beside the task."""
    from spreeze.envs.probe import ids_of

    with contextlib.suppress(SpreezeError):
        return tuple(ids_of(module))
    return ()


def _offered_tasks() -> list[str]:
    """Ids of the trusted module, or of the one that the page was started with, before the usual tasks."""
    module: str | None = st.session_state.get("start_module", "").strip()
    if not (module and st.session_state.get(f"start_trust_{module}") and control.is_module(module)):
        module = control.imported()
    ids = _ids(module) if module else ()
    return [*ids, *(task for task in tasks() if task not in ids)]


def _select_first_id(module: str) -> None:
    """Puts the first id of a module that was just trusted into the form, unless one of them is there."""
    ids = _ids(module) if st.session_state[f"start_trust_{module}"] and control.is_module(module) else ()
    if ids and st.session_state.get("start_env") not in ids:
        st.session_state["start_env"] = ids[0]


def is_open() -> bool:
    """True if the user wants the form beside a run that has ended, whose charts it pushes down."""
    return bool(st.session_state.get(_OPEN))


def opener(cell: DeltaGenerator) -> None:
    """The button that shows and hides the form."""
    label, kind = ("Hide the form", "secondary") if is_open() else ("New run", "primary")
    more: dict[str, Any] = {"type": kind, "key": "new_run", "on_click": st.session_state.__setitem__}
    cell.button(label, args=(_OPEN, not is_open()), **more)


def form(folder: Path) -> None:
    """Offers only combinations of task, algorithm, mode and settings that the command line would accept."""
    if not list_runs(folder):
        _welcome(folder)
    with st.container(border=True):
        first = st.columns([2.4, 1, 1.1, 0.9, 1], vertical_alignment="bottom")
        text = "Any Gymnasium id. Pendulum-v1 takes seconds to learn."
        any_id: dict[str, Any] = {"accept_new_options": True, "key": "start_env", "help": text}
        offered, usual = _offered_tasks(), str(default_env_id().value)
        # Streamlit warns of a default where a callback has set the value.
        default = 0 if "start_env" in st.session_state or usual not in offered else offered.index(usual)
        env_id = known_task(str(first[0].selectbox("Task", offered, default, **any_id, **_KEPT)))
        last = st.columns([1, 1.2, 1.6, 1.6, 2.4], vertical_alignment="center")
        with last[2].popover("Your environment", width="stretch"):
            custom = _custom_environment(env_id)
        if custom.module is not None:
            _ask_for_trust(custom.module)
        if custom.blocked is not None:
            st.info(custom.blocked)
            return
        request, problem = _request(first, env_id, custom)
        if request is None:
            return
        try:
            with last[1].popover("Settings", width="stretch"):
                request = dataclasses.replace(request, profile=_profile(env_id))
                settings = _settings(request)
                request = dataclasses.replace(request, settings=settings, fresh=bool(st.session_state.get(FRESH)))
        except SpreezeError as error:
            st.error(components.plain(error))
            return
        plan, flags = sweep_inputs(last[3], request.algo), []
        line = control.train_command(request, folder)
        if plan.several and problem is None:
            try:
                flags = sweep_options(request, plan)
            except SpreezeError as error:
                problem = str(error)
            line = control.sweep_command(flags, folder)
        more: dict[str, Any] = {"type": "primary", "key": "start", "width": "stretch", "disabled": problem is not None}
        last[0].button("Start", on_click=_start, args=(request, folder, flags), **more)
        if problem is not None:
            st.warning(components.plain(problem))
            return
        if plan.several:
            st.caption(expected_runs(request, plan))
        elif (ending := ending_of(request.config, env_id)) is not None:
            st.caption(
                components.plain(
                    f"The run {ending.sentence} (to train until you press Stop, set seconds to 0 under Settings)."
                )
            )
        elif ends := [
            f"{name} {value:g}" for name in StopConfig.CONDITIONS if (value := getattr(request.config.stop, name))
        ]:
            what = components.plain(", ".join(ends).replace("_", " "))
            st.caption(f"The run ends at the first of its stop conditions ({what}).")
        components.show_command("start", line)


def _welcome(folder: Path) -> None:
    st.markdown(
        "# A reinforcement-learning trainer that tunes itself to your desktop\n"
        "Choose an environment and press Start: Spreeze benchmarks this machine, chooses batch size, threads "
        "and samplers, explains the choice, and trains on all cores. Shown below is a recording."
    )
    first = control.Request(env_id="Pendulum-v1", settings={"stop.target_return": -200.0})
    cells = st.columns([1.6, 4], vertical_alignment="center")
    more: dict[str, Any] = {"key": "first", "type": "primary", "width": "stretch"}
    cells[0].button("Start a first run", on_click=_start, args=(first, folder), **more)
    cells[1].caption("SAC learns to swing up a pendulum, within seconds on an idle machine. The run stops by itself.")


def _request(cells: list[DeltaGenerator], env_id: str, custom: _CustomEnv) -> tuple[control.Request | None, str | None]:
    """The request for algorithm, mode, seed and tuner, None if it cannot be made; and why the task cannot start."""
    spec, problem, module = None, None, custom.module or control.imported()
    if imports_only(env_id, module):
        try:
            with st.spinner("Checking the environment"):
                spec = _probed_spec(env_id, module, custom.args)
        except SpreezeError as error:
            problem = str(error)
            if "--import" in problem and custom.module is None:
                problem += " (on this page: Your environment, Module that has it)"
    known, algorithms = _tables()
    fitting = [name for name, row in algorithms.items() if spec is None or row.fits(spec)]
    if spec is not None:
        fitting.sort(key=lambda name: [*fitting_algorithms(spec), name].index(name))  # its default first
    runnable = [name for name in fitting if any(algorithms[name].runs_in(mode) for mode in known.values())]
    _follow_task(env_id, runnable, algorithms)
    profile = task_profile(env_id)
    algo = _one_of(
        cells[1],
        "Algorithm",
        [*runnable, *([COMPARE] if profile is None and spec is not None and len(runnable) > 1 else [])],
        "start_algo",
        "Compare: several algorithms train in turn for some minutes, and the best one goes on. "
        "Algorithms that fit the action space. DQN: discrete. SAC: discrete, continuous or one of each. CrossQ, TD3, "
        "DDPG: continuous. QMIX: teams. Others: all, including MultiDiscrete and MultiBinary.",
    )
    compares = algo == COMPARE
    algo = runnable[0] if compares else algo
    row = algorithms[algo]
    learning = {name: mode for name, mode in known.items() if row.runs_in(mode)}
    off_device = refusal_on_device(env_id, spec)
    unfit_modes = [name for name, mode in learning.items() if off_device is not None and mode.on_device]
    taking = {name: mode for name, mode in learning.items() if name not in unfit_modes}
    if (usual := implied_mode(row)) in taking:
        taking = {usual: taking[usual], **({} if compares else taking)}
    lines = "\n".join(f"- **{name}**: {components.plain(mode.doc)}" for name, mode in taking.items())
    text = f"How samplers and learners work together:\n{lines}"
    mode = taking[_one_of(cells[2], "Mode", list(taking), "start_mode", text)]
    text = "Random seed of networks, exploration and environments."
    seed = cells[3].number_input("Seed", 0, 2**31 - 1, RunConfig.seed, key="start_seed", help=text, **_KEPT)
    data_flow = mode.data_flow(on_policy=bool(row.on_policy))
    tunable = data_flow is not None and data_flow.tunable
    fixed: dict[str, Any] = {"disabled": compares or not tunable, "help": _TUNER_HELP}
    auto = cells[4].toggle("Autotune", value=True, key="start_auto", **_KEPT, **fixed) or compares
    unfit, idle = [name for name in algorithms if name not in fitting], [name for name in known if name not in learning]
    if compares:
        st.caption("Algorithms that fit learn the task in turn, each as a run of its own; the best goes on.")
    else:
        more = [f"Mode {name} is not for this environment: {off_device}." for name in unfit_modes]
        st.caption(" ".join([_reasons(spec, mode, unfit, idle, row, profile), *more]))
    try:
        request = control.Request(
            env_id=env_id,
            mode=mode.name,
            algo=algo,
            compares=compares,
            seed=int(seed),
            auto=auto and tunable,
            import_module=custom.module,
            args=custom.args,
        )
    except SpreezeError as error:
        st.error(components.plain(error))
        return None, problem
    return request, problem


def _follow_task(env_id: str, runnable: list[str], algorithms: Mapping[str, AlgorithmRow]) -> None:
    """Puts the task's algorithm and mode into the form when the task, or what fits it, has changed.

    They are those of its profile, else the defaults. An algorithm that the user has chosen stays if it fits. A new task
    clears the target return, a sweep with the limits of its runs, and the stop conditions of a run that was started.
    """
    seen = (env_id, *runnable)  # the algorithms that fit are known only once its module is trusted
    before = st.session_state.get("start_seen", ())
    if before == seen:
        return
    if before and before[0] != env_id:
        started = before[0] == st.session_state.pop("start_ran", None)
        fill(dict.fromkeys(_STOPS if started else ("stop.target_return",)))
        if st.session_state.get("start_seeds", 1) > 1 or st.session_state.get("start_grid"):
            st.session_state["start_seeds"], st.session_state["start_grid"] = 1, ""
            fill(dict.fromkeys(_ENDS))
    st.session_state["start_seen"] = seen
    profile = task_profile(env_id)
    choice = None if profile is None else profile.choice
    if choice is not None and choice["algo"] in runnable:
        usual = (str(choice["algo"]), str(choice["mode"]))
    else:
        usual = (runnable[0], implied_mode(algorithms[runnable[0]]))
    before = st.session_state.get("start_usual")
    now = (st.session_state.get("start_algo"), st.session_state.get("start_mode"))
    if before is None or now == before or now[0] not in runnable:
        st.session_state["start_algo"], st.session_state["start_mode"] = usual
    st.session_state["start_usual"] = usual


def _reasons(
    spec: EnvSpec | None, mode: Mode, unfit: list[str], idle: list[str], row: AlgorithmRow, profile: Layer | None
) -> str:
    """Description of the mode, who chose it, and the modes that do not fit and why."""
    lines = [f"Mode {mode.name}: {components.plain(mode.doc)}."]
    choice = None if profile is None else profile.choice
    if profile is not None and choice is not None and (choice["algo"], choice["mode"]) == (row.name, mode.name):
        lines.append(f"Algorithm and mode are what {components.plain(profile.source)} sets for this environment.")
    if unfit and spec is not None:
        lines.append(f"Not for {components.plain(task_text(spec))}: {', '.join(unfit)}.")
    if idle:
        data = "fresh rollouts" if row.on_policy else "replay"
        lines.append(f"{row.name} learns from {data}, which these modes do not have: {', '.join(idle)}.")
    return " ".join(lines)


def _tables() -> tuple[dict[str, Mode], dict[str, AlgorithmRow]]:
    try:
        return modes(control.imported()), rows(control.imported())
    except SpreezeError as error:
        st.error(components.plain(error))
        return modes(), rows()


def _one_of(cell: DeltaGenerator, label: str, options: list[str], key: str, text: str) -> str:
    """A select box whose options depend on other choices."""
    if st.session_state.get(key, options[0]) not in options:
        st.session_state[key] = options[0]  # not deleted: the browser would keep showing the old one
    return str(cell.selectbox(label, options, key=key, **_KEPT, help=text))


def _custom_environment(env_id: str) -> _CustomEnv:
    """Arguments for the task's constructor, and a module that registers it, which is imported only once allowed."""
    more: dict[str, Any] = {"key": "start_args", "placeholder": "push=2.0", **_KEPT}
    args = _lines(st.text_area("Constructor arguments", help="One KEY=VALUE per line, as for --env-arg.", **more))
    text = (
        "An installed Python module, or one in the folder from which the page was started, such as my_robot; its ids "
        "are offered under Task once you trust it."
    )
    more = {"key": "start_module", "placeholder": "my_robot", "help": text, **_KEPT}
    module = st.text_input("Module that has it", **more).strip()
    if not module:
        return _CustomEnv(None, args)
    if not st.session_state.get(f"start_trust_{module}"):
        return _CustomEnv(module, args, "Algorithms, settings and Start follow once you trust it.")
    try:
        command = control.command_line("spreeze", "doctor", *control.env_flags(env_id, module, args))
        text = "Checks spaces, speed and memory, and runs the Gymnasium checker."
        if st.button("Examine it", key="examine", help=text):
            _probed_spec.cache_clear()  # its author may have changed it
            _ids.cache_clear()
            with st.spinner("Checking the environment"):
                checks = control.examine(env_id, module, args)
            st.markdown(components.table(("what", "result", "finding"), checks))
    except SpreezeError as error:
        return _CustomEnv(module, args, components.plain(error))
    components.show_command("examine", command)
    return _CustomEnv(module, args)


def _ask_for_trust(module: str) -> None:
    """The tick that lets a module be imported, in the form itself: the popover with its name may be closed."""
    label = f"I trust {components.plain(module)}: its code will run on this machine with my permissions"
    st.checkbox(label, key=f"start_trust_{module}", on_change=_select_first_id, args=(module,), **_KEPT)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _profile(env_id: str) -> str | None:
    known = task_profile(env_id)
    usual = f"the task's own ({known.source.removeprefix('profile ')})" if known is not None else "none"
    text = "Settings from profiles/. Values below take precedence."
    more: dict[str, Any] = {"key": "start_profile", "format_func": lambda name: name or usual, "help": text, **_KEPT}
    # Not None: the box would then show that nothing is chosen.
    return st.selectbox("Profile", ["", *profile_names()], **more) or None


def _settings(request: control.Request) -> dict[str, Any]:
    """Inputs for settings, which replace the tuner's choice or the default, and for stop conditions."""
    config = request.config
    knobs = tunable_settings(config)
    others = [key for key in active_settings(config) if key not in (*knobs, *_MACHINE)]
    values: dict[str, Any] = {}

    def add_inputs(keys: list[str], **more: Any) -> None:
        cells = st.columns(2)
        for index, key in enumerate(keys):
            with cells[index % 2]:
                values[key] = components.setting_input(config, key, "start", keep=True, **more)

    st.caption(
        "The run stops at the first of these conditions, or with Stop. Without one it ends by itself (see Start)."
    )
    add_inputs(list(_STOPS), blank="none")
    st.caption("The machine.")
    add_inputs(list(_MACHINE))
    if request.auto:
        st.checkbox("Measure again", key=FRESH, **_KEPT, help="Ignore cached results of the tuner.")
    if knobs:
        by_tuner = "Settings that the tuner chooses, unless you set them."
        by_user = "Settings that Autotune would choose; it is off, so these values are used."
        st.caption(by_tuner if request.auto else by_user)
        add_inputs(list(knobs), blank="automatic" if request.auto else "")
    text = "All settings that this mode and algorithm use."
    options: dict[str, Any] = {"placeholder": "choose by name or words", "help": text}
    options["format_func"] = partial(_with_meaning, config=request.config)
    more = st.multiselect("More settings", others, key="start_more", **options, **_KEPT)
    add_inputs(more)
    return {key: value for key, value in values.items() if value is not None}


def _with_meaning(key: str, config: Config) -> str:
    """The setting with the beginning of its help text, by which it is found, too."""
    text = field_of(key, config).metadata["doc"]
    return f"{key}: {textwrap.shorten(text, 60, placeholder='...')}"


def _start(request: control.Request, folder: Path, sweep: Sequence[str] = ()) -> None:
    st.session_state["follow"] = True  # first, because another click may interrupt this callback
    st.session_state[_OPEN], st.session_state["start_ran"] = False, request.env_id
    if sweep:
        components.run_action(control.start_sweep, sweep, folder)
    else:
        components.run_action(control.start, request, folder)


_LINE = re.compile(r"^[a-z]\w*\.[a-z]\w*=.+$", re.ASCII)
_MAX_SEEDS = 20
_ENDS = ("stop.seconds", "stop.env_steps", "stop.updates")
_OF_ANY_RUN = ("run.", "env.", "callback.", "cluster.", "stop.")
"""Sections that every algorithm reads, though the form offers none of their settings for a choice by name."""


class SweepPlan(NamedTuple):
    """The runs that the form requests."""

    seeds: int = 1
    lines: tuple[str, ...] = ()  # ``section.field=value,value`` of each setting that is varied

    @property
    def several(self) -> bool:
        return self.seeds > 1 or bool(self.lines)


def sweep_inputs(cell: DeltaGenerator, algo: str) -> SweepPlan:
    """Inputs for the number of seeds and for values of settings; one run of the settings above by default."""
    with cell.popover("Seeds and values", width="stretch"):
        text = "One run each, in turn, beginning with the seed above. Three are the fewest that can be compared."
        seeds = st.number_input("Seeds", 1, _MAX_SEEDS, 1, key="start_seeds", **_KEPT, help=text)
        text = "One SECTION.FIELD=VALUE,VALUE per line, as for sweep --set: every combination is trained."
        more: dict[str, Any] = {"placeholder": f"{algo}.gamma=0.98,0.99", "help": text, **_KEPT}
        lines = st.text_area("Settings by values", key="start_grid", **more)
    return SweepPlan(int(seeds), _lines(lines))


def sweep_options(request: control.Request, plan: SweepPlan) -> list[str]:
    """The flags of ``spreeze sweep``; a ConfigError for a malformed or unread line, or if nothing ends the runs."""
    for line in plan.lines:
        if not _LINE.match(line):
            raise ConfigError(f"{line[:80]!r}: expected SECTION.FIELD=VALUE,VALUE such as {_example(request, line)}")
    if request.compares:
        raise ConfigError("several runs need an algorithm: choose one, or start a single run")
    _check_read(request, plan)
    if not any(key in request.settings for key in _ENDS) and not any(line.startswith(_ENDS) for line in plan.lines):
        raise ConfigError("several runs need a stop condition: set seconds, env steps or updates under Settings")
    settings = {**({"env.args": request.args} if request.args else {}), **request.settings}
    flags = [*control.task_flags(request), *(["--auto"] if request.auto else [])]
    flags += [f"--set={key}={toml_value(value)}" for key, value in settings.items()]
    flags += [f"--set={line}" for line in plan.lines]
    return [*flags, "--seeds", str(plan.seeds), "--first-seed", str(request.seed)]


def _example(request: control.Request, line: str) -> str:
    """The line with the section that it lacks, for each setting that it may mean, as ``lr=1e-3``; else a valid line."""
    name, _, values = (part.strip() for part in line.partition("="))
    wanted = OTHER_NAMES.get(name, name)
    keys = [key for key in active_settings(request.config) if f"_{key.partition('.')[2]}".endswith(f"_{wanted}")]
    return " or ".join(f"{key}={values[:60] or 'VALUE,VALUE'}" for key in keys) or f"{request.algo}.gamma=0.98,0.99"


def _check_read(request: control.Request, plan: SweepPlan) -> None:
    """Rejects values that would give equal runs, because the algorithm does not read them."""
    keys = [line.partition("=")[0] for line in plan.lines]
    if any(key.startswith("run.") for key in keys):
        return  # other algorithms may be among them
    for section, _, name in (key.partition(".") for key in keys):
        known = request.config.sections().get(section)
        fields = [field.name for field in dataclasses.fields(known)] if known is not None else []
        if fields and name not in fields:
            raise ConfigError(unknown_setting(section, name, fields))
        if known is None and request.import_module is None and section not in rows():
            raise ConfigError(f"unknown section '{section}': settings of the algorithm are {request.algo}.NAME")
    for key in keys:
        if not key.startswith(_OF_ANY_RUN) and key not in active_settings(request.config):
            raise ConfigError(
                f"{request.algo} does not read {key} in mode {request.mode}: remove its line under Seeds and values"
            )


def expected_runs(request: control.Request, plan: SweepPlan) -> str:
    """A sentence on the number of runs, and their training time if it is known."""
    count = plan.seeds * math.prod(len(split_values(line.partition("=")[2])) for line in plan.lines)
    seconds = request.settings.get("stop.seconds")
    time = f", {duration(count * float(seconds))} (h:min:s) of training" if isinstance(seconds, int | float) else ""
    return f"{count} runs, one after the other{time}. Compare lists them as one sweep."


def show_sweep(folder: Path, live: str | None) -> None:
    """Shows the progress of a sweep or comparison that a page has started, with a button that ends it."""
    launch = control.launching(folder)
    runs = sweep_runs(folder / f"{launch.name}.sweep.json") if launch is not None else []
    if launch is None or not runs:
        if (comparison := control.comparing(folder, live)) is not None:
            text = f"Comparing algorithms: {components.plain(live)} learns now; the best one goes on."
            _running(text, "End the comparison", comparison.name, folder)
        return
    states = [run.get("state") for run in runs]
    ended = sum(state in ("finished", "failed", "interrupted") for state in states)
    failed = f", {states.count('failed')} of them failed" if "failed" in states else ""
    text = f"Sweep {components.plain(launch.name)}: {ended} of {len(states)} runs have ended{failed}."
    _running(text, "End the sweep", launch.name, folder)


def _running(text: str, label: str, name: str, folder: Path) -> None:
    cells = st.columns([5, 1], vertical_alignment="center")
    cells[0].info(text)
    text = "Stops its run like Ctrl-C, and starts no further one."
    components.act_button(cells[1], label, control.stop, name, folder, key="sweep_stop", width="stretch", help=text)
