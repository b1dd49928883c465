"""Tries an environment in a child process before anything is started, and times it.

The child (``python -m spreeze.envs.probe``) writes one JSON file; an environment that hangs,
prints from C or takes the process down cannot harm the caller.
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
from spreeze.envs.make import EnvOptions, import_user_module, is_known_to_repeat, make_env, one_line
from spreeze.envs.obs_flattening import text_left_out
from spreeze.envs.task import Task, make_task, uniform_actions
from spreeze.errors import EnvironmentError_, described
from spreeze.files import replace_bytes
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import memory_limits
from spreeze.machine.logs import Log, ending, oom_kills
from spreeze.machine.processes import (
    CLOSING_S,
    MARK,
    PROBE,
    close_in_time,
    end_orphans,
    kill_and_wait,
    leave,
    leave_to_supervisor,
    mark,
    signals_blocked,
    take_name,
    waited_for_core_s,
)
from spreeze.machine.utilisation import private_memory_bytes, tree_memory_bytes
from spreeze.types import EnvSpec, rebuild

START_S: float = SamplingConfig().start_deadline_s
"""Default time limit to construct and reset an environment."""
TIMED_STEPS = 2000
"""Steps after which the time of a step is known well enough; fewer where they take more than 1.5 s."""
_TIMING_S = 1.5
_LEAST_RUNNING = 0.01
"""Share of the time in which a step runs, at least."""
_SIMULATORS = ("mujoco", "envpool", "ale_py", "pybullet", "Box2D", "dm_control")
"""Modules that step environments of other packages."""
_MOST_IDS = 200
_GRACE_S = 5.0
_LOOK_S = 0.1
_STACK_S = 0.3
"""Time for a late child to write its stack before it is killed [s]."""
_FIRST_WORD_S, _WORD_S = 5.0, 20.0
"""When a slow start is told of first, and how often after that."""
_SECOND_S, _SLOWEST_TWICE_S = 10.0, 30.0
"""Least time for a second environment to come up; where the first took longer than the other, none is tried."""
_DRAWN_NOTE = "it cannot be reset without a render_mode, so render_mode=rgb_array is used everywhere"


@dataclass(frozen=True, kw_only=True)
class Probe:
    spec: EnvSpec
    step_us_median: float | None
    """Median time of one env step with random actions, without what it waited for a core; None if not timed."""
    step_cv: float | None
    """Standard deviation of the step time over its mean; None if not timed."""
    memory_bytes: int
    """Resident memory that the first environment of a process adds, with the processes that it starts."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on how it is made and observed."""
    step_cpu_share: float = 1.0
    """Processor time over time of a step, of the simulator's other processes too; 1 if it does not wait by itself."""
    start_s: float = 0.0
    """Time that making and resetting the environment took, without the import of its module."""
    further_env_bytes: int | None = None
    """Resident memory that one more environment of the process adds; None if none was made."""
    alone: str | None = None
    """Why no second environment can be there beside the first; None: it can, or that was not tried."""
    alone_in_process: bool = False
    """True if that holds within one process only: another process can have one as well."""
    packages: dict[str, str] = field(default_factory=dict)
    """Version by distribution of the environment and of its simulators, as far as they come from distributions."""


class Waiting(TypedDict, total=False):
    """How a child is waited for, and what it tries besides."""

    interrupted: Callable[[], bool]
    """Asked ten times a second whether to give up."""
    on_wait: Callable[[str], object]
    """Told in a line now and then that a slow start is waited for."""
    second: bool
    """Also tries whether there can be two at a time, and what a further one takes of memory; not where that is known,
    nor where it would take more time or memory than there is."""


class ProbeOptions(EnvOptions, Waiting, total=False):
    deadline_s: float
    """The child is killed after that time; default ``START_S``."""


Tries = Literal["time", "check", "draw", "ids"]
"""Things that a child can try: a probe, a ``Checkup``, a picture, or which ids a module registers."""


@dataclass(frozen=True, kw_only=True)
class ProbeJob:
    """Job of a child, as JSON between it and its parent."""

    what: Tries
    task: dict[str, Any]
    """Arguments of ``make_task``."""
    steps: int = 0
    second: bool = False
    """See ``Waiting``."""
    limit_s: float = START_S + _GRACE_S
    """Time after which the child ends itself."""
    folder: str = ""
    """The folder to which it writes what it found."""


def probe_env(
    env_id: str, import_module: str | None = None, *, steps: int = TIMED_STEPS, **options: Unpack[ProbeOptions]
) -> Probe:
    """Describes and times an environment in a child process.

    Args:
        env_id: Gymnasium id.
        import_module: module to import first.
        steps: env steps to time (at most 1.5 s); 0 only makes, resets and steps once.
        options: as ``EnvOptions`` and ``ProbeOptions``.

    Raises:
        EnvironmentError_: it cannot be used, hangs, or took its process down.
        KeyboardInterrupt: ``interrupted`` said so; the child is gone.
    """
    found = in_child("time", env_id, import_module, steps=steps, **options)
    return Probe(**{**found, "spec": rebuild(EnvSpec, found["spec"]), "notes": tuple(found["notes"])})


def probe_of(config: Config, *, steps: int = 0, **waiting: Unpack[Waiting]) -> Probe:
    """``probe_env`` of the task that is configured, within ``sampling.start_deadline_s``."""
    env = config.env
    own = EnvOptions(plain=env.plain, args=env.args, image=dataclasses.asdict(config.image), picture=env.image)
    deadline_s = config.sampling.start_deadline_s
    return probe_env(env.id, env.import_module, steps=steps, deadline_s=deadline_s, **own, **waiting)


def ids_of(import_module: str, **waiting: Unpack[Waiting]) -> list[str]:
    """The ids that a module registers with Gymnasium, or else its environment classes as ``MODULE:CLASS``.

    It is imported in a child process. At most 200, its own before those of modules that it imports.

    Raises:
        EnvironmentError_: it cannot be imported.
    """
    return [str(name) for name in in_child("ids", import_module, import_module, **waiting)["ids"]]


def _registered_by(name: str) -> list[str]:
    import gymnasium

    before = set(gymnasium.registry)
    import_user_module(name)
    module = sys.modules[name]
    found = [spec for known, spec in gymnasium.registry.items() if known not in before]
    if found:
        top = module.__name__.partition(".")[0]
        found.sort(key=lambda spec: (not str(spec.entry_point).startswith((f"{top}.", f"{top}:")), spec.id))
        return [spec.id for spec in found[:_MOST_IDS]]
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, gymnasium.Env)]
    return [f"{name}:{kind.__name__}" for kind in kinds if kind.__module__ == module.__name__][:_MOST_IDS]


def in_child(
    what: Tries, env_id: str, import_module: str | None = None, *, steps: int = 0, **options: Unpack[ProbeOptions]
) -> dict[str, Any]:
    """Result of a child: ``what`` is ``time`` (a probe), ``check`` (a ``Checkup``), ``draw`` (a picture) or ``ids``.

    A child that was stopped in the meantime (Ctrl-Z), or slept with the machine, is replaced by another one.

    Raises:
        EnvironmentError_: it cannot be used, hangs, or took its process down.
        KeyboardInterrupt: ``interrupted`` said so; the child is gone.
    """
    deadline_s, second = options.get("deadline_s", START_S), options.get("second", False)
    own = {name: value for name, value in options.items() if name in EnvOptions.__annotations__}
    task = {"env_id": env_id, "import_module": import_module, **own}
    job = ProbeJob(what=what, task=task, steps=steps, second=second, limit_s=deadline_s + _GRACE_S)
    interrupted, on_wait = options.get("interrupted", lambda: False), options.get("on_wait", lambda text: None)
    while True:
        slept_s = AWAKE.slept_s
        try:
            found = _tried(job, deadline_s, interrupted, on_wait)
        except EnvironmentError_:
            if AWAKE.slept_s == slept_s:
                raise
        else:
            if AWAKE.slept_s == slept_s:
                return found


def _tried(
    job: ProbeJob, deadline_s: float, interrupted: Callable[[], bool], on_wait: Callable[[str], object]
) -> dict[str, Any]:
    """Result of one child; errors as ``in_child``."""
    with (
        tempfile.TemporaryDirectory(prefix="spreeze-probe-") as folder,
        _Child(dataclasses.replace(job, folder=folder), interrupted, on_wait) as child,
    ):
        found = child.result(deadline_s)
        if job.second and "error" not in found:
            found |= child.second(found["start_s"])
    if "error" in found:
        raise EnvironmentError_(found["error"])
    return found


class _Child:
    """A child process that tries an environment; what it found counts as soon as it is there.

    Once left, it and all that it started are gone.
    """

    def __init__(self, job: ProbeJob, interrupted: Callable[[], bool], on_wait: Callable[[str], object]) -> None:
        self._job, self._env_id, self._folder = job, job.task["env_id"], Path(job.folder)
        self._interrupted, self._on_wait, self._nonce = interrupted, on_wait, secrets.token_hex(8)
        self._kills = oom_kills()

    def __enter__(self) -> _Child:
        paths = python_path(*filter(None, sys.path))  # it finds the modules that this process finds
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
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # it closes its environments
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSING_S)
        if self._process.poll() is None:
            kill_and_wait(self._process)
        end_orphans(self._nonce)

    def result(self, deadline_s: float) -> dict[str, Any]:
        """Result of the child; an EnvironmentError_ if it ends, or the deadline comes, before there is one."""
        if self._wait(_RESULT, deadline_s, tell=True):
            return self._read(_RESULT)
        code = self._process.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_S)
            raise EnvironmentError_(
                f"{self._env_id}: no environment step within {deadline_s:g} s; the probe was ended"
                f"{self._said()}; if it needs longer to start, set --start-deadline-s "
                f"{2 * deadline_s:g}"
            )
        if self._interrupted():
            raise KeyboardInterrupt
        raise EnvironmentError_(
            f"{self._env_id}: its process ended with {ending(code, self._kills)} before the first step{self._said()}"
        )

    def second(self, start_s: float) -> dict[str, Any]:
        """Result of a second environment beside the first."""
        within_s = max(_SECOND_S, 2.0 * start_s)
        if not self._wait(_SECOND, within_s, tell=start_s > _FIRST_WORD_S):
            code = self._process.poll()
            how = (
                f"it did not start within {within_s:.0f} s"
                if code is None
                else (f"the process ended with {ending(code, self._kills)}")
            )
            return {"alone": f"{how}{self._said()}"}
        found = self._read(_SECOND)
        if found["alone"] is not None and not self._interrupted():
            found["alone_in_process"] = self._repeats_elsewhere(within_s)
        (self._folder / _ENOUGH).touch()
        return found

    def _repeats_elsewhere(self, within_s: float) -> bool:
        """True if another process can have an environment while this one keeps its own."""
        with tempfile.TemporaryDirectory(prefix="spreeze-probe-") as folder:
            limit_s = within_s + _GRACE_S
            job = dataclasses.replace(self._job, folder=folder, steps=0, second=False, limit_s=limit_s)
            with _Child(job, self._interrupted, self._on_wait) as child:
                try:
                    return "error" not in child.result(within_s)
                except EnvironmentError_:
                    return False

    def _wait(self, name: str, within_s: float, *, tell: bool) -> bool:
        """True if a file is there in time; the child may have ended before."""
        began_s, path = AWAKE(), self._folder / name
        next_word_s = _FIRST_WORD_S if tell else within_s
        while (waited_s := AWAKE() - began_s) < within_s:
            if self._interrupted():
                raise KeyboardInterrupt
            ended = self._process.poll() is not None
            if path.exists():
                return True
            if ended:
                return False
            if waited_s >= next_word_s:
                next_word_s += _WORD_S
                self._on_wait(
                    f"waiting for {self._env_id} to start: {waited_s:.0f} s so far, at most {within_s:g} s "
                    "(--start-deadline-s)"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S if waited_s > 1.0 else 0.2 * _LOOK_S)
        return path.exists()

    def _read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / name).read_text(encoding="utf-8"))
        return found

    def _said(self) -> str:
        words = Log(self._folder / "stderr", 0).last_words
        return f": {words}" if words else ""


_RESULT, _SECOND, _ENOUGH = "result.json", "second.json", "enough"
"""Files by which child and parent tell each other."""


def _begun(make: Callable[[], Task]) -> Task:
    task = make()
    try:
        task.reset(seed=0)
    except BaseException:
        close_in_time(task.close)
        raise
    return task


def _begun_or_drawn(make: Callable[[], Task], drawing: Callable[[], Task] | None) -> tuple[Task, bool]:
    """Makes and resets a task; returns it, and whether ``drawing`` had to make it (with a ``render_mode``).

    Some environments observe what they draw.
    """
    try:
        return _begun(make), False
    except Exception as error:
        if drawing is None:
            raise
        try:
            task = _begun(drawing)
        except Exception:
            raise error from None
    with contextlib.suppress(Exception):  # an error that comes only now and then has another reason
        found = _begun(make)
        close_in_time(task.close)
        return found, False
    return task, True


def measure(task: Task, steps: int, before_bytes: int, start_s: float, *, drawn: bool = False) -> Probe:
    """Times a task's steps; it has been reset. ``before_bytes`` is what ``_memory_bytes`` was before it was made.

    ``drawn`` says that it can be reset with a ``render_mode`` alone.
    """
    import psutil

    from spreeze.envs.images import ImageFrames
    from spreeze.envs.masks import used_or_not

    process = psutil.Process()
    packages = packages_of(task) if steps > 1 else {}
    actions = _Actions(task, max(1, steps))
    times = []
    began, used_s, slept = time.perf_counter(), _processor_s(process), process.num_ctx_switches().voluntary
    waited_s = waited_for_core_s()
    end = began + _TIMING_S
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
    used_s, took_s = _processor_s(process) - used_s, time.perf_counter() - began
    waited_s = waited_for_core_s() - waited_s
    slept = process.num_ctx_switches().voluntary - slept
    timed = np.array(times[1:]) if steps > 1 and len(times) > 1 else None
    observed = task.env.env if isinstance(task.env, ImageFrames) else task.env
    left_out = text_left_out(observed.observation_space)
    return Probe(
        spec=task.spec,
        memory_bytes=max(0, _memory_bytes() - before_bytes),
        start_s=start_s,
        notes=tuple(filter(None, [_DRAWN_NOTE if drawn else None, used_or_not(task.env, task.spec), left_out])),
        # Long steps wait for a core in the midst of many of them, short ones between.
        step_us_median=None
        if timed is None
        else float(min(np.median(timed), timed.mean() * max(1.0 - waited_s / took_s, _LEAST_RUNNING))),
        step_cv=None if timed is None else float(timed.std() / timed.mean()),
        # A step that only waits for a core gives none up of its own accord.
        step_cpu_share=min(used_s / took_s, 1.0) if timed is not None and slept >= len(times) / 2 else 1.0,
        packages=packages,
    )


def _memory_bytes() -> int:
    """Resident memory of this process, and what the processes that it started have for themselves."""
    import psutil

    own = os.getpid()
    return int(psutil.Process().memory_info().rss) + tree_memory_bytes(own) - (private_memory_bytes(own) or 0)


def packages_of(task: Task) -> dict[str, str]:
    """Version by distribution of what a task is made of, as far as it is imported from distributions."""
    words = [*task.spec.env_id.split(":"), task.spec.import_module or "", type(task.env.unwrapped).__module__]
    found: dict[str, str] = {}
    for name in sorted({*(word.partition(".")[0] for word in words), *_SIMULATORS} & sys.modules.keys()):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
            continue
        if "-packages" in (getattr(sys.modules[name], "__file__", None) or ""):
            found |= {one: metadata.version(one) for one in metadata.packages_distributions().get(name, [])}  # slow
    return found


def _processor_s(process: Any) -> float:
    """Processor time of a process and of what it started."""
    import psutil

    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += sum(one.cpu_times()[:2])
    return total


class _Actions:
    """Random actions for the steps of a task, drawn ahead; with action masks each is drawn from the current one."""

    def __init__(self, task: Task, count: int) -> None:
        self._task, self._rng = task, np.random.default_rng(0)
        self._drawn = task.unscale_action(uniform_actions(task.spec, count, self._rng))

    def at(self, index: int) -> np.ndarray:
        mask = self._task.mask
        if mask is None:
            drawn: np.ndarray = self._drawn[index]
            return drawn
        action: np.ndarray = self._task.unscale_action(uniform_actions(self._task.spec, 1, self._rng, mask[None]))[0]
        return action


def main(argv: list[str]) -> int:
    """The child: a ``ProbeJob`` says what to do, JSON files in its folder what was found."""
    job = ProbeJob(**json.loads(argv[0]))
    task = {**job.task, "args": tuple(job.task.get("args", ()))}
    leave_to_supervisor()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(job.limit_s, exit=True)  # also when the caller was killed
    folder, tasks = Path(job.folder), list[Task]()
    try:
        if job.what == "time":
            found = _timed(task, job.steps, tasks)
        elif job.what == "ids":
            found = {"ids": _registered_by(task["import_module"])}
        elif job.what == "draw":
            found = draw(make_task(**task, render_mode="rgb_array"))
        else:
            found = dataclasses.asdict(check_up(task))
    except Exception as error:
        failed = "" if isinstance(error, EnvironmentError_) else f"{task['env_id']} failed in the probe: "
        found = {"error": f"{failed}{_text_of(error, 1000)}"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    replace_bytes(folder / _RESULT, json.dumps(found).encode())
    if job.second and "error" not in found:
        faulthandler.dump_traceback_later(2.0 * max(_SECOND_S, 2.0 * found["start_s"]), exit=True)
        second = _another(task, found, tasks)
        replace_bytes(folder / _SECOND, json.dumps(second).encode())
        while second["alone"] is not None and not (folder / _ENOUGH).exists():
            time.sleep(_LOOK_S)
    close_in_time(*(made.close for made in tasks))
    return 2 if "error" in found else 0


def _timed(given: dict[str, Any], steps: int, tasks: list[Task]) -> dict[str, Any]:
    """The probe of a task; the environment, still open, goes to ``tasks``."""
    import gymnasium  # noqa: F401 (imports are paid once a process)

    if given["import_module"] is not None:
        import_user_module(given["import_module"])
    before_bytes, began = _memory_bytes(), time.perf_counter()
    drawn = {**given, "args": (*given["args"], "render_mode='rgb_array'")}
    wanted = not any(text.startswith("render_mode=") for text in given["args"])
    task, is_drawn = _begun_or_drawn(lambda: make_task(**given), (lambda: make_task(**drawn)) if wanted else None)
    tasks.append(task)
    start_s = time.perf_counter() - began
    return dataclasses.asdict(measure(task, steps, before_bytes, start_s, drawn=is_drawn))


def _another(given: dict[str, Any], first: dict[str, Any], tasks: list[Task]) -> dict[str, Any]:
    """Tries a second environment beside the first one, unless it is known that there can be several."""
    if (
        is_known_to_repeat(given["env_id"])
        or first["start_s"] > _SLOWEST_TWICE_S
        or memory_limits().usable_bytes < 2 * first["memory_bytes"]
    ):
        return {"alone": None}
    before_bytes = _memory_bytes()
    try:
        tasks.append(make_task(**{**given, "args": tasks[0].spec.args}))
        tasks[1].reset(seed=1)
        tasks[1].step(_Actions(tasks[1], 1).at(0))
    except Exception as error:
        return {"alone": _text_of(error)}
    return {"alone": None, "further_env_bytes": max(0, _memory_bytes() - before_bytes)}


def _text_of(error: Exception, limit: int = 300) -> str:
    return one_line(error, limit) if isinstance(error, EnvironmentError_) else described(error, limit)


_CHECKUP_TIMING_S = 2.0
_DRAWN = 4096
_RESETS = 5
_PLAIN_WORDS: tuple[tuple[str, str | None], ...] = (
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
"""Message of Gymnasium's checker, and the doctor's words for it; None: no matter here."""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    steps_per_s: float
    """Env steps/s of one core with random actions, resets included."""
    step_us_p50: float
    step_us_p99: float
    step_us_max: float
    reset_us_median: float
    further_env_bytes: int | None
    """Resident memory that one more environment of a process adds; None if there can be only one."""
    alone: str | None
    """Why there can be only one at a time; None: there can be several."""
    largest_observation: float
    """Largest magnitude in the vectors observed; 0 with pictures."""
    notes: tuple[str, ...]
    """Findings of Gymnasium's checker, in plain words."""


def check_up(given: dict[str, Any]) -> Checkup:
    """Times steps and resets, measures a second environment's memory, asks Gymnasium's checker."""
    tasks, added, alone = [make_task(**given)], None, None
    try:
        steps_us, resets_us, mean_us, largest = _time(tasks[0])
        before = _memory_bytes()
        try:
            tasks.append(make_task(**given))
            tasks[1].reset(seed=1)
            added = max(0, _memory_bytes() - before)
        except Exception as error:
            alone = _text_of(error)
    finally:
        close_in_time(*(task.close for task in tasks))
    p50, p99 = np.quantile(steps_us, [0.5, 0.99])
    return Checkup(
        steps_per_s=1e6 / mean_us,
        step_us_p50=float(p50),
        step_us_p99=float(p99),
        step_us_max=float(max(steps_us)),
        reset_us_median=float(np.median(resets_us)),
        further_env_bytes=added,
        alone=alone,
        largest_observation=largest,
        notes=_ask_gymnasium(make_env(**given), tasks[0].spec),
    )


def _time(task: Task) -> tuple[list[float], list[float], float, float]:
    """Times of steps and resets in us, the mean time of a step with its share of resets, and the largest observation.

    Steps in which another program took the core say more of the machine than of the environment: they are left out,
    unless hardly any other is left.
    """
    steps_us: list[float] = []
    quiet_us: list[float] = []
    resets_us = [_reset_us(task) for _ in range(_RESETS)]
    actions = _Actions(task, _DRAWN)
    task.step(actions.at(0))  # what only the first step costs is not the environment's speed
    end, largest = time.perf_counter() + _CHECKUP_TIMING_S, 0.0
    before_switches = _preemptions()
    while time.perf_counter() < end:
        action = actions.at(len(steps_us) % _DRAWN)
        before = time.perf_counter()
        obs, _, terminated, truncated = task.step(action)
        steps_us.append(1e6 * (time.perf_counter() - before))
        numbers = obs if task.spec.frames is None else task.spec.frames.numbers(obs[None, None])
        largest = max(largest, float(np.abs(numbers).max(initial=0.0)))
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


def _ask_gymnasium(env: Any, spec: EnvSpec) -> tuple[str, ...]:
    """Findings of ``gymnasium.utils.env_checker`` on an environment, each sentence once."""
    from gymnasium.utils.env_checker import check_env

    from spreeze.envs.masks import sample_allowed

    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if spec.action_mask:
                sample_allowed(env.unwrapped, spec)
            check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            said.append(one_line(error) or described(error))
        finally:
            close_in_time(env.close)
    said += [str(warning.message) for warning in caught if "gym" in str(warning.filename)]
    return tuple(dict.fromkeys(filter(None, map(plain_words, said))))


def plain_words(text: str) -> str | None:
    """A sentence of the checker without colours and file names, in our words where there are some."""
    text = " ".join(re.sub(r"\x1b\[\d+m|WARN: ", "", text).split())
    for pattern, words in _PLAIN_WORDS:
        if re.search(pattern, text):
            return words
    return text[:200]


def draw(task: Task) -> dict[str, Any]:
    """Draws one picture; its height and width."""
    try:
        task.reset(seed=0)
        height, width, _ = task.render().shape
    finally:
        close_in_time(task.close)
    return {"height": height, "width": width}


if __name__ == "__main__":
    take_name(PROBE)
    leave(main(sys.argv[1:]))
