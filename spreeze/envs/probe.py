"""Tries and times an environment in a child process before a run starts.

The child (``python -m spreeze.envs.probe``) writes one JSON file; an environment that hangs, prints from C or crashes
its process cannot harm the caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from spreeze.config import python_path
from spreeze.config.schema import Config, SamplingConfig
from spreeze.envs.action_spaces import uniform_actions
from spreeze.envs.families import engine_of, is_team
from spreeze.envs.make import EnvOptions, import_user_module, is_known_to_repeat, make_env
from spreeze.envs.obs_flattening import text_left_out
from spreeze.envs.pictures import images_as_numbers
from spreeze.envs.task import MAX_EVALUATION_STEPS, Task, make_task
from spreeze.errors import EnvError, described
from spreeze.files import replace_bytes, tail_text
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import memory_limits
from spreeze.machine.logs import ending, last_words_of, oom_kills
from spreeze.machine.processes import (
    CLOSING_S,
    MARK,
    PROBE,
    close_in_time,
    end_orphans,
    exit_process,
    ignore_ending_signals,
    kill_and_wait,
    mark,
    signals_blocked,
    take_name,
    waited_for_core_s,
)
from spreeze.machine.utilisation import private_memory_bytes, tree_memory_bytes
from spreeze.types import EnvSpec, rebuild

START_S: float = SamplingConfig().start_deadline_s  # default time limit to construct and reset an environment
TIMED_STEPS = 2000  # number of timed steps; fewer if they take more than 1.5 s
_TIMING_S = 1.5
_MIN_RUNNING = 0.01  # minimum fraction of a step's time in which it runs
_SIMULATORS = ("mujoco", "envpool", "ale_py", "pybullet", "Box2D", "dm_control")
"""Modules that step environments of other packages."""
_MAX_IDS = 200
_GRACE_S = 5.0
_POLL_S = 0.1
_STACK_S = 0.3  # time for a late child to write its stack before it is killed [s]
_FIRST_NOTICE_S, _NOTICE_S = 5.0, 20.0  # time of the first notice about a slow start, and the interval of the next ones
_SECOND_S, _SLOWEST_TWICE_S = 10.0, 30.0
"""Minimum time limit for a second environment to start; none is tried if the first took longer than the other value."""
_DRAWN_NOTE = "it cannot be reset without a render_mode, so render_mode=rgb_array is used everywhere"
_ENDLESS_NOTE = (
    "it has no registered time limit (--env-arg max_episode_steps=N sets one): evaluations cut an episode after "
    f"{MAX_EVALUATION_STEPS:,} env steps, training only where the environment truncates it"
)
_RESULT, _SECOND, _ENOUGH = "result.json", "second.json", "enough"
"""Files with which child and parent signal each other."""
_CHECKUP_TIMING_S = 2.0
_DRAWN = 4096
_RESETS = 5
_PLAIN_TEXTS: tuple[tuple[str, str | None], ...] = (
    (r"symmetric and normalized|alternative render modes|action space.*infinity|[Bb]ox .*(infinity|precision)", None),
    (r"render_modes|render mode|render_fps", None),
    (
        r"observation.*not (contained|within)|not within the observation space",
        "an observation lies outside the observation space",
    ),
    (r"[Dd]eterministic", "two resets with the same seed differ: evaluations are not reproducible"),
    (r"np_random.*not|seed.*(not|does)", "reset ignores its seed: evaluations are not reproducible"),
    (r"obs.*dtype|dtype.*obs", "observations have another dtype than their space and are converted at each step"),
)
"""Pattern of a message of Gymnasium's checker, and the doctor's text for it; None: irrelevant here."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    spec: EnvSpec
    step_us_median: float | None
    """Median time of one env step with random actions, without its waiting time for a core; None if not timed."""
    step_cv: float | None  # standard deviation of the step time over its mean; None if not timed
    memory_bytes: int  # resident memory that the first environment of a process adds, with the processes that it starts
    notes: tuple[str, ...] = ()  # remarks for the user on how it is made and observed
    step_cpu_share: float = 1.0
    """CPU time over time of a step, including the simulator's other processes; 1 if it does not wait by itself."""
    start_s: float = 0.0  # time that making and resetting the environment took, without the import of its module
    further_env_bytes: int | None = None
    """Resident memory that one more environment of the process adds; None if none was made."""
    alone: str | None = None
    """Why no second environment can exist beside the first; None: it can, or that was not tried."""
    alone_in_process: bool = False
    """True if that holds only within one process: another process can have an environment, too."""
    packages: dict[str, str] = field(default_factory=dict)
    """Distribution -> version, of the environment and its simulators, as far as they come from distributions."""


class Waiting(TypedDict, total=False):
    """Options for waiting for a child, and for trying a second environment."""

    interrupted: Callable[[], bool]  # called ten times a second; True ends the wait
    on_wait: Callable[[str], object]  # called with a line of text now and then during a slow start
    second: bool
    """Also tries whether two environments can exist at a time, and measures the memory of the second; skipped where
    that is known, or where time or memory do not suffice."""


class ProbeOptions(EnvOptions, Waiting, total=False):
    deadline_s: float  # time after which the child is killed; default ``START_S``


Tries = Literal["time", "check", "draw", "ids"]
"""Tasks of a child: a probe, a check-up, a picture, or the ids that a module registers."""


@dataclass(frozen=True, kw_only=True)
class ProbeJob:
    """Job of a child, which its parent sends as JSON."""

    what: Tries
    task: dict[str, Any]  # arguments of ``make_task``
    steps: int = 0
    second: bool = False  # see ``Waiting``
    limit_s: float = START_S + _GRACE_S  # time after which the child ends itself
    folder: str = ""  # the folder to which it writes its results


def probe_env(
    env_id: str, import_module: str | None = None, *, steps: int = TIMED_STEPS, **options: Unpack[ProbeOptions]
) -> Probe:
    """Describes and times an environment in a child process; options as ``EnvOptions`` and ``ProbeOptions``.

    ``steps``: env steps to time (at most 1.5 s); 0 only makes, resets and steps once. An EnvError if it cannot
    be used, hangs, or crashed its process; a KeyboardInterrupt if ``interrupted`` returned True, once the child has
    ended.
    """
    result = in_child("time", env_id, import_module, steps=steps, **options)
    return Probe(**{**result, "spec": rebuild(EnvSpec, result["spec"]), "notes": tuple(result["notes"])})


def probe_of(config: Config, *, steps: int = 0, **waiting: Unpack[Waiting]) -> Probe:
    """``probe_env`` of the configured task, within ``sampling.start_deadline_s``."""
    env, deadline_s = config.env, config.sampling.start_deadline_s
    made = EnvOptions(plain=env.plain, args=env.args, image=dataclasses.asdict(config.image), picture=env.image)
    return probe_env(env.id, env.import_module, steps=steps, deadline_s=deadline_s, **made, **waiting)


def ids_of(import_module: str, **waiting: Unpack[Waiting]) -> list[str]:
    """The ids that a module registers with Gymnasium, or else its environment classes as ``MODULE:CLASS``.

    A child process imports it. At most 200 ids, its own before those of modules that it imports. An EnvError
    if it cannot be imported.
    """
    return [str(name) for name in in_child("ids", import_module, import_module, **waiting)["ids"]]


def _registered_by(name: str) -> list[str]:
    import gymnasium

    before = set(gymnasium.registry)
    import_user_module(name)
    module = sys.modules[name]
    specs = [spec for known, spec in gymnasium.registry.items() if known not in before]
    if specs:
        top = module.__name__.partition(".")[0]
        specs.sort(key=lambda spec: (not str(spec.entry_point).startswith((f"{top}.", f"{top}:")), spec.id))
        return [spec.id for spec in specs[:_MAX_IDS]]
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, gymnasium.Env)]
    return [f"{name}:{kind.__name__}" for kind in kinds if kind.__module__ == module.__name__][:_MAX_IDS]


def in_child(
    what: Tries, env_id: str, import_module: str | None = None, *, steps: int = 0, **options: Unpack[ProbeOptions]
) -> dict[str, Any]:
    """Result of a child: ``what`` is ``time`` (a probe), ``check`` (``check_up``), ``draw`` (a picture) or ``ids``.

    A failed child that was stopped meanwhile (Ctrl-Z), or slept with the machine, is replaced. Errors as ``probe_env``.
    """
    deadline_s, second = options.get("deadline_s", START_S), options.get("second", False)
    of_env = {name: value for name, value in options.items() if name in EnvOptions.__annotations__}
    task = {"env_id": env_id, "import_module": import_module, **of_env}
    job = ProbeJob(what=what, task=task, steps=steps, second=second, limit_s=deadline_s + _GRACE_S)
    interrupted, on_wait = options.get("interrupted", lambda: False), options.get("on_wait", lambda text: None)
    while True:
        slept_s = AWAKE.slept_s
        try:
            with _Child(job, interrupted, on_wait) as child:
                result = child.result(deadline_s)
                if second and "error" not in result:
                    result |= child.second(result["start_s"])
            if "error" in result:
                raise EnvError(result["error"])
        except EnvError:
            if AWAKE.slept_s == slept_s:
                raise
        else:
            if AWAKE.slept_s == slept_s:
                return result


class _Child:
    """A child process that tries an environment; a result counts as soon as its file exists.

    The end of the context kills the child and all processes that it started, and removes its files.
    """

    def __init__(self, job: ProbeJob, interrupted: Callable[[], bool], on_wait: Callable[[str], object]) -> None:
        self._job, self._env_id = job, job.task["env_id"]
        self._interrupted, self._on_wait, self._nonce = interrupted, on_wait, secrets.token_hex(8)
        self._kills = oom_kills()

    def __enter__(self) -> _Child:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="spreeze-probe-"))
            self._folder, self._job = Path(folder), dataclasses.replace(self._job, folder=folder)
            self._start()
            self._files = stack.pop_all()
        return self

    def _start(self) -> None:
        paths = python_path(*filter(None, sys.path))  # so that it finds the same modules as this process
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", MARK: self._nonce}
        command = [sys.executable, "-m", "spreeze.envs.probe", json.dumps(dataclasses.asdict(self._job))]
        with open(self._folder / "stderr", "wb") as errors, signals_blocked():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        mark(self._process.pid, self._nonce)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._files:
            try:
                if kind is None:  # it closes its environments
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(CLOSING_S)
            finally:
                if self._process.poll() is None:
                    kill_and_wait(self._process)
                end_orphans(self._nonce)

    def result(self, deadline_s: float) -> dict[str, Any]:
        """Result of the child; an EnvError if it ends, or the deadline passes, before there is one."""
        if self._wait(_RESULT, deadline_s, notify=True):
            return self._read(_RESULT)
        code = self._process.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_S)
            raise EnvError(
                f"{self._env_id}: no environment step within {deadline_s:g} s; the probe was ended"
                f"{self._stderr_text()}; if it needs longer to start, set --start-deadline-s "
                f"{2 * deadline_s:g}"
            )
        if self._interrupted():
            raise KeyboardInterrupt
        raise EnvError(
            f"{self._env_id}: its process ended with {ending(code, self._kills)} before the first step"
            f"{self._stderr_text()}"
        )

    def second(self, start_s: float) -> dict[str, Any]:
        """Result of a second environment beside the first."""
        within_s = max(_SECOND_S, 2.0 * start_s)
        if not self._wait(_SECOND, within_s, notify=start_s > _FIRST_NOTICE_S):
            code = self._process.poll()
            late = f"it did not start within {within_s:.0f} s"
            why = late if code is None else f"the process ended with {ending(code, self._kills)}"
            return {"alone": f"{why}{self._stderr_text()}"}
        result = self._read(_SECOND)
        if result["alone"] is not None and not self._interrupted():
            result["alone_in_process"] = self._repeats_elsewhere(within_s)
        (self._folder / _ENOUGH).touch()
        return result

    def _repeats_elsewhere(self, within_s: float) -> bool:
        """True if another process can have an environment while this one keeps its own."""
        job = dataclasses.replace(self._job, steps=0, second=False, limit_s=within_s + _GRACE_S)
        with _Child(job, self._interrupted, self._on_wait) as child:
            try:
                return "error" not in child.result(within_s)
            except EnvError:
                return False

    def _wait(self, name: str, within_s: float, *, notify: bool) -> bool:
        """Waits for a file of the child; True if it exists in time. The child may have ended before."""
        started_s, path = AWAKE(), self._folder / name
        next_notice_s = _FIRST_NOTICE_S if notify else within_s
        while (waited_s := AWAKE() - started_s) < within_s:
            if self._interrupted():
                raise KeyboardInterrupt
            ended = self._process.poll() is not None
            if path.exists():
                return True
            if ended:
                return False
            if waited_s >= next_notice_s:
                next_notice_s += _NOTICE_S
                self._on_wait(
                    f"waiting for {self._env_id} to start: {waited_s:.0f} s so far, at most {within_s:g} s "
                    "(--start-deadline-s)"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S if waited_s > 1.0 else 0.2 * _POLL_S)
        return path.exists()

    def _read(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self._folder / name).read_text(encoding="utf-8"))
        return result

    def _stderr_text(self) -> str:
        text = last_words_of(tail_text(self._folder / "stderr"))
        return f": {text}" if text else ""


def _make_and_reset(make: Callable[[], Task]) -> Task:
    task = make()
    try:
        task.reset(seed=0)
    except BaseException:
        close_in_time(task.close)
        raise
    return task


def _make_or_draw(make: Callable[[], Task], drawing: Callable[[], Task] | None) -> tuple[Task, bool]:
    """Makes and resets a task, with ``drawing`` if it observes its own pictures; returns it, and True if so."""
    try:
        return _make_and_reset(make), False
    except Exception as error:
        if drawing is None:
            raise
        try:
            task = _make_and_reset(drawing)
        except Exception:
            raise error from None
    with contextlib.suppress(Exception):  # an intermittent error has another reason
        undrawn = _make_and_reset(make)
        close_in_time(task.close)
        return undrawn, False
    return task, True


def measure(task: Task, steps: int, before_bytes: int, start_s: float, *, drawn: bool = False) -> Probe:
    """Times a task's steps after a reset. ``before_bytes``: memory before it was made; ``drawn``: by a render_mode."""
    import psutil

    from spreeze.envs.images import ImageFrames
    from spreeze.envs.masks import mask_note

    process = psutil.Process()
    packages = packages_of(task) if steps > 1 else {}
    actions = _Actions(task, max(1, steps))
    times = []
    started, used_s, voluntary = time.perf_counter(), _processor_s(process), process.num_ctx_switches().voluntary
    waited_s = waited_for_core_s()
    end = started + _TIMING_S
    for index in range(max(1, steps)):
        action = actions.at(index)
        before = time.perf_counter()
        _, _, terminated, truncated = task.step(action)
        now = time.perf_counter()
        times.append(1e6 * (now - before))
        if terminated or truncated:
            task.reset()
        if now > end:
            break
    used_s, elapsed_s = _processor_s(process) - used_s, time.perf_counter() - started
    waited_s = waited_for_core_s() - waited_s
    voluntary = process.num_ctx_switches().voluntary - voluntary
    timed = np.array(times[1:]) if steps > 1 and len(times) > 1 else None
    observed = task.env.env if isinstance(task.env, ImageFrames) else task.env
    env_id, limit = task.spec.env_id, task.spec.max_episode_steps
    notes = [
        _DRAWN_NOTE if drawn else None,
        mask_note(task.env, task.spec),
        text_left_out(observed.observation_space),
        images_as_numbers(observed.observation_space) if task.spec.frames is None else None,
        _ENDLESS_NOTE if limit is None and engine_of(env_id) is None and not is_team(env_id) else None,
    ]
    return Probe(
        spec=task.spec,
        memory_bytes=max(0, _memory_bytes() - before_bytes),
        start_s=start_s,
        notes=tuple(filter(None, notes)),
        # Most long steps are interrupted by a wait for a core; short ones wait between them.
        step_us_median=None
        if timed is None
        else float(min(np.median(timed), timed.mean() * max(1.0 - waited_s / elapsed_s, _MIN_RUNNING))),
        step_cv=None if timed is None else float(timed.std() / timed.mean()),
        # A step that only waits for a core has no voluntary context switch.
        step_cpu_share=min(used_s / elapsed_s, 1.0) if timed is not None and voluntary >= len(times) / 2 else 1.0,
        packages=packages,
    )


def _memory_bytes() -> int:
    """Resident memory of this process, and unshared memory of the processes that it started."""
    import psutil

    pid = os.getpid()
    return int(psutil.Process().memory_info().rss) + tree_memory_bytes(pid) - (private_memory_bytes(pid) or 0)


def packages_of(task: Task) -> dict[str, str]:
    """Distribution -> version, of the packages of a task, as far as they come from distributions."""
    modules = [*task.spec.env_id.split(":"), task.spec.import_module or "", type(task.env.unwrapped).__module__]
    versions: dict[str, str] = {}
    for name in sorted({*(module.partition(".")[0] for module in modules), *_SIMULATORS} & sys.modules.keys()):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
            continue
        if "-packages" in (getattr(sys.modules[name], "__file__", None) or ""):
            distributions = metadata.packages_distributions().get(name, [])  # slow
            versions |= {distribution: metadata.version(distribution) for distribution in distributions}
    return versions


def _processor_s(process: Any) -> float:
    """CPU time of a process and its descendants."""
    import psutil

    total = 0.0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += sum(member.cpu_times()[:2])
    return total


class _Actions:
    """Random actions for the steps of a task, drawn ahead; with action masks each is drawn from the current one."""

    def __init__(self, task: Task, count: int) -> None:
        self._task, self._rng = task, np.random.default_rng(0)
        self._drawn = task.to_env_units(uniform_actions(task.spec, count, self._rng))

    def at(self, index: int) -> np.ndarray:
        mask = self._task.mask
        action: np.ndarray = self._drawn[index]
        if mask is not None:
            action = self._task.to_env_units(uniform_actions(self._task.spec, 1, self._rng, mask[None]))[0]
        return action


def main(argv: list[str]) -> int:
    """Entry point of the child: does a ``ProbeJob`` and writes its results as JSON files to the job's folder."""
    job = ProbeJob(**json.loads(argv[0]))
    task = {**job.task, "args": tuple(job.task.get("args", ()))}
    ignore_ending_signals()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(job.limit_s, exit=True)  # also when the caller was killed
    folder, tasks = Path(job.folder), list[Task]()
    try:
        if job.what == "time":
            result = _timed(task, job.steps, tasks)
        elif job.what == "ids":
            result = {"ids": _registered_by(task["import_module"])}
        elif job.what == "draw":
            result = draw(make_task(**task, render_mode="rgb_array"))
        else:
            result = check_up(task)
    except Exception as error:
        failed = "" if isinstance(error, EnvError) else f"{task['env_id']} failed in the probe: "
        result = {"error": f"{failed}{_text_of(error, 1000)}"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    replace_bytes(folder / _RESULT, json.dumps(result).encode())
    if job.second and "error" not in result:
        faulthandler.dump_traceback_later(2.0 * max(_SECOND_S, 2.0 * result["start_s"]), exit=True)
        second = _second_env(task, tasks) if _needs_second(task, result) else {"alone": None}
        replace_bytes(folder / _SECOND, json.dumps(second).encode())
        while second["alone"] is not None and not (folder / _ENOUGH).exists():
            time.sleep(_POLL_S)
    close_in_time(*(made.close for made in tasks))
    return 2 if "error" in result else 0


def _timed(arguments: dict[str, Any], steps: int, tasks: list[Task]) -> dict[str, Any]:
    """The probe of a task; appends the environment, still open, to ``tasks``."""
    import gymnasium  # noqa: F401 (the time of imports is not the environment's)

    if arguments["import_module"] is not None:
        import_user_module(arguments["import_module"])
    before_bytes, started = _memory_bytes(), time.perf_counter()
    drawn = {**arguments, "args": (*arguments["args"], "render_mode='rgb_array'")}
    wanted = not any(text.startswith("render_mode=") for text in arguments["args"])
    task, is_drawn = _make_or_draw(lambda: make_task(**arguments), (lambda: make_task(**drawn)) if wanted else None)
    tasks.append(task)
    start_s = time.perf_counter() - started
    return dataclasses.asdict(measure(task, steps, before_bytes, start_s, drawn=is_drawn))


def _needs_second(arguments: dict[str, Any], first: dict[str, Any]) -> bool:
    """False where several environments are known to work, or time or memory do not suffice to try."""
    is_quick, free_bytes = first["start_s"] <= _SLOWEST_TWICE_S, memory_limits().usable_bytes
    return is_quick and free_bytes >= 2 * first["memory_bytes"] and not is_known_to_repeat(arguments["env_id"])


def _second_env(arguments: dict[str, Any], tasks: list[Task]) -> dict[str, Any]:
    """Tries a second environment beside ``tasks[0]``, and appends it.

    ``alone`` is why only one can exist at a time, None if several can; ``further_env_bytes`` the resident memory that
    one more adds to a process.
    """
    before_bytes = _memory_bytes()
    try:
        tasks.append(make_task(**{**arguments, "args": tasks[0].spec.args}))
        tasks[1].reset(seed=1)
        tasks[1].step(_Actions(tasks[1], 1).at(0))
    except Exception as error:
        return {"alone": _text_of(error), "further_env_bytes": None}
    return {"alone": None, "further_env_bytes": max(0, _memory_bytes() - before_bytes)}


def _one_line(error: BaseException, limit: int = 300) -> str:
    return " ".join(str(error).split())[:limit]


def _text_of(error: Exception, limit: int = 300) -> str:
    return _one_line(error, limit) if isinstance(error, EnvError) else described(error, limit)


def check_up(arguments: dict[str, Any]) -> dict[str, Any]:
    """Times steps and resets, measures another environment's memory after a step, and runs Gymnasium's checker."""
    tasks = [make_task(**arguments)]
    try:
        steps_us, resets_us, mean_us, largest = _time(tasks[0])
        second = _second_env(arguments, tasks)
    finally:
        close_in_time(*(task.close for task in tasks))
    p50, p99 = np.quantile(steps_us, [0.5, 0.99]).tolist()
    return {
        "steps_per_s": 1e6 / mean_us,  # env steps/s of one core with random actions, resets included
        "step_us_p50": p50,
        "step_us_p99": p99,
        "step_us_max": float(max(steps_us)),
        "reset_us_median": float(np.median(resets_us)),
        **second,
        "largest_observation": largest,  # largest magnitude in the vectors observed; 0 with pictures
        "notes": _gymnasium_findings(make_env(**arguments), tasks[0].spec),
    }


def _time(task: Task) -> tuple[list[float], list[float], float, float]:
    """Times of steps and resets in us, mean time of a step with resets spread over steps, and the largest observation.

    Steps in which another program took the core are left out, if enough others remain.
    """
    steps_us: list[float] = []
    quiet_us: list[float] = []
    resets_us = [_reset_us(task) for _ in range(_RESETS)]
    actions = _Actions(task, _DRAWN)
    task.step(actions.at(0))  # the first step may include one-time costs
    end, largest = time.perf_counter() + _CHECKUP_TIMING_S, 0.0
    before_switches = _preemptions()
    while time.perf_counter() < end:
        action = actions.at(len(steps_us) % _DRAWN)
        before = time.perf_counter()
        obs, _, terminated, truncated = task.step(action)
        steps_us.append(1e6 * (time.perf_counter() - before))
        values = obs if task.spec.frames is None else task.spec.frames.numbers(obs[None, None])
        largest = max(largest, float(np.abs(values).max(initial=0.0)))
        switches = _preemptions()
        if switches == before_switches:
            quiet_us.append(steps_us[-1])
        if terminated or truncated:
            resets_us.append(_reset_us(task))
            switches = _preemptions()
        before_switches = switches
    kept = quiet_us if len(quiet_us) > 0.3 * len(steps_us) else steps_us
    episodes = len(resets_us) - _RESETS
    return kept, resets_us, float(np.mean(kept) + np.median(resets_us) * episodes / len(steps_us)), largest


def _preemptions() -> int:
    """Number of preemptions of this thread; 0 if unknown."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if who is None else resource.getrusage(who).ru_nivcsw


def _reset_us(task: Task) -> float:
    before = time.perf_counter()
    task.reset()
    return 1e6 * (time.perf_counter() - before)


def _gymnasium_findings(env: Any, spec: EnvSpec) -> tuple[str, ...]:
    """Findings of ``gymnasium.utils.env_checker`` on an environment, each message once."""
    from gymnasium.utils.env_checker import check_env

    from spreeze.envs.masks import sample_allowed

    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if spec.action_mask:
                sample_allowed(env.unwrapped, spec)
            check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            messages.append(_one_line(error) or described(error))
        finally:
            close_in_time(env.close)
    messages += [str(warning.message) for warning in caught if "gym" in str(warning.filename)]
    return tuple(dict.fromkeys(filter(None, map(plain_text, messages))))


def plain_text(text: str) -> str | None:
    """A message of the checker without colours and file names, or our text for it, if there is one."""
    text = " ".join(re.sub(r"\x1b\[\d+m|WARN: ", "", text).split())
    return next((ours for pattern, ours in _PLAIN_TEXTS if re.search(pattern, text)), text[:200])


def draw(task: Task) -> dict[str, Any]:
    """Draws one picture; returns its height and width."""
    try:
        task.reset(seed=0)
        height, width, _ = task.render().shape
    finally:
        close_in_time(task.close)
    return {"height": height, "width": width}


if __name__ == "__main__":
    take_name(PROBE)
    exit_process(main(sys.argv[1:]))
