"""Tries an environment in a child process before anything is started, and times it.

The child (``python -m spreeze.envs.probe``) writes one JSON file; an environment that hangs,
prints from C or takes the process down cannot harm the caller.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import faulthandler
import functools
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.config.schema import Config
from spreeze.envs.make import make_env, one_line
from spreeze.envs.obs_flattening import MASK
from spreeze.envs.task import Task, make_task, uniform_actions
from spreeze.errors import EnvironmentError_
from spreeze.machine.awake import AWAKE
from spreeze.machine.processes import MARK, PROBE, end_orphans, held_back, kill_and_wait, leave_to_supervisor, take_name
from spreeze.types import EnvSpec, rebuild

_TIMING_S = 1.5
_GRACE_S = 5.0
_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Probe:
    spec: EnvSpec
    step_us_median: float | None
    """Median time of one env step with random actions; None if not timed."""
    step_cv: float | None
    """Standard deviation of the step time over its mean; None if not timed."""
    memory_bytes: int
    """Resident memory that the first environment of a process adds."""
    step_cpu_share: float = 1.0
    """Processor time over time of a step, of the simulator's other processes too; 1 if it does not wait by itself."""


def probe_env(
    env_id: str, import_module: str | None = None, *, deadline_s: float = 60.0, steps: int = 2000,
    plain: bool = False, args: tuple[str, ...] = (), image: dict[str, Any] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Probe:
    """Describes and times an environment in a child process.

    Args:
        env_id: Gymnasium id.
        import_module: module to import first.
        deadline_s: the child is killed after that time.
        steps: env steps to time (at most 1.5 s); 0 only makes, resets and steps once.
        plain: tries a Bullet task as its package has it.
        args: ``key=value`` texts for the environment's constructor.
        image: values of the image part of the configuration; its defaults if None.
        interrupted: asked ten times a second whether to give up.

    Raises:
        EnvironmentError_: it cannot be used, hangs, or took its process down.
        KeyboardInterrupt: ``interrupted`` said so; the child is gone.
    """
    found = in_child("time", env_id, import_module, deadline_s=deadline_s, steps=steps, plain=plain, args=args,
                     image=image, interrupted=interrupted)
    return Probe(**{**found, "spec": rebuild(EnvSpec, found["spec"])})


def probe_of(config: Config, *, steps: int = 0, interrupted: Callable[[], bool] = lambda: False) -> Probe:
    """``probe_env`` of the task that is configured."""
    env = config.env
    return probe_env(env.id, env.import_module, steps=steps, plain=env.plain, args=env.args,
                     image=dataclasses.asdict(config.image), interrupted=interrupted)


def in_child(
    what: str, env_id: str, import_module: str | None = None, *, deadline_s: float = 60.0, steps: int = 0,
    plain: bool = False, args: tuple[str, ...] = (), image: dict[str, Any] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """What the child found out: ``what`` is ``time`` (a probe), ``check`` (a ``Checkup``) or ``draw`` (a picture).

    Raises:
        EnvironmentError_: it cannot be used, hangs, or took its process down.
        KeyboardInterrupt: ``interrupted`` said so; the child is gone.
    """
    task = {"env_id": env_id, "import_module": import_module, "plain": plain, "args": args, "image": image}
    with tempfile.TemporaryDirectory(prefix="spreeze-probe-") as folder:
        out = Path(folder) / "probe.json"
        job = {"what": what, "task": task, "steps": steps, "out": str(out), "end_s": deadline_s + _GRACE_S}
        command = [sys.executable, "-m", "spreeze.envs.probe", json.dumps(job)]
        code = _run(command, deadline_s, interrupted)
        if code is None:
            raise EnvironmentError_(f"{env_id}: no environment step within {deadline_s:g} s; the probe was ended")
        if not out.exists():
            if interrupted():
                raise KeyboardInterrupt
            raise EnvironmentError_(f"{env_id}: its process ended with {_ending(code)} before the first step")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if "error" in found:
        raise EnvironmentError_(found["error"])
    return found


def _run(command: list[str], deadline_s: float, interrupted: Callable[[], bool]) -> int | None:
    """Exit code of the child, or None if it had to be killed (with all that it started).

    A child that was stopped meanwhile (Ctrl-Z), or slept with the machine, is replaced by another one.
    """
    while True:
        slept_s = AWAKE.slept_s
        code = _run_once(command, deadline_s, slept_s, interrupted)
        if AWAKE.slept_s == slept_s:
            return code


def _run_once(
    command: list[str], deadline_s: float, slept_s: float, interrupted: Callable[[], bool]
) -> int | None:
    """As ``_run``; None as well once more was slept than ``slept_s``."""
    nonce = secrets.token_hex(8)
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", MARK: nonce}
    with held_back():
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        end_s = AWAKE() + deadline_s
        while True:
            if interrupted():
                raise KeyboardInterrupt
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(_LOOK_S)
            if AWAKE() > end_s or AWAKE.slept_s > slept_s:
                return None
    finally:
        if child.poll() is None:
            kill_and_wait(child)
        end_orphans(nonce)


def _ending(code: int) -> str:
    """How a child ended; real-time signals have no name."""
    known = -code in set(signal.Signals)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name if known else -code}"


def measure(make: Callable[[], Task], steps: int) -> Probe:
    import psutil

    process = psutil.Process()
    memory = process.memory_info().rss
    task = make()
    try:
        task.reset(seed=0)
        actions = _Actions(task, max(1, steps))
        times = []
        began, used_s, slept = time.perf_counter(), _processor_s(process), process.num_ctx_switches().voluntary
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
        slept = process.num_ctx_switches().voluntary - slept
        memory = max(0, process.memory_info().rss - memory)
    finally:
        task.close()
    timed = np.array(times[1:]) if steps > 1 and len(times) > 1 else None
    return Probe(
        spec=task.spec, memory_bytes=memory,
        step_us_median=None if timed is None else float(np.median(timed)),
        step_cv=None if timed is None else float(timed.std() / timed.mean()),
        # A step that only waits for a core gives none up of its own accord.
        step_cpu_share=min(used_s / took_s, 1.0) if timed is not None and slept >= len(times) / 2 else 1.0,
    )


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
        self._drawn = task.to_native(uniform_actions(task.spec, count, self._rng))

    def at(self, index: int) -> np.ndarray:
        mask = self._task.mask
        action: np.ndarray = self._drawn[index] if mask is None else (
            uniform_actions(self._task.spec, 1, self._rng, mask[None])[0]
        )
        return action


def main(argv: list[str]) -> int:
    """The child: one JSON object says what to do, one JSON file what was found."""
    job: dict[str, Any] = json.loads(argv[0])
    task = {**job["task"], "args": tuple(job["task"]["args"])}
    leave_to_supervisor()
    faulthandler.dump_traceback_later(job["end_s"], exit=True)  # also when the caller was killed
    try:
        if job["what"] == "time":
            found = dataclasses.asdict(measure(lambda: make_task(**task), job["steps"]))
        elif job["what"] == "draw":
            found = draw(make_task(**task, render_mode="rgb_array"))
        else:
            found = dataclasses.asdict(check_up(task))
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, EnvironmentError_):
            text = f"{task['env_id']} failed when tried: {type(error).__name__}: {text}"
        found = {"error": text[:1000], "kind": type(error).__name__}
    finally:
        faulthandler.cancel_dump_traceback_later()
    out = Path(job["out"])
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    os.replace(temporary, out)
    return 2 if "error" in found else 0


_CHECKUP_TIMING_S = 2.0
_DRAWN = 4096
_RESETS = 5
_PLAIN_WORDS: tuple[tuple[str, str | None], ...] = (
    (r"symmetric and normalized|alternative render modes|action space.*infinity|[Bb]ox .*(infinity|precision)", None),
    (r"render_modes|render mode|render_fps", None),
    (r"observation.*not (contained|within)|not within the observation space", "an observation lies outside of the "
     "observation space that the environment states"),
    (r"[Dd]eterministic", "two resets with the same seed and the same action differ: evaluations will not repeat"),
    (r"np_random.*not|seed.*(not|does)", "reset ignores its seed: evaluations will not repeat"),
    (r"obs.*dtype|dtype.*obs", "observations have another type than the space says; they are converted at each step"),
)
"""What Gymnasium's checker says, and how the doctor says it; None: no matter here."""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    steps_per_s: float
    """Env steps a second of one core with random actions, resets included."""
    step_us_p50: float
    step_us_p99: float
    step_us_max: float
    reset_us_median: float
    further_env_bytes: int
    """Resident memory that one more environment of a process adds."""
    notes: tuple[str, ...]
    """What Gymnasium's checker has to say, in plain words."""


def check_up(given: dict[str, Any]) -> Checkup:
    """Times steps and resets, measures a second environment's memory, asks Gymnasium's checker."""
    import psutil

    task = make_task(**given)
    with contextlib.closing(task):
        steps_us, resets_us, mean_us = _time(task)
        process = psutil.Process()
        before = process.memory_info().rss
        with contextlib.closing(make_task(**given)) as second:
            second.reset(seed=1)
            added = max(0, process.memory_info().rss - before)
    p50, p99 = np.quantile(steps_us, [0.5, 0.99])
    return Checkup(
        steps_per_s=1e6 / mean_us, step_us_p50=float(p50), step_us_p99=float(p99),
        step_us_max=float(max(steps_us)), reset_us_median=float(np.median(resets_us)), further_env_bytes=added,
        notes=_ask_gymnasium(make_env(**given), masked=task.spec.action_mask),
    )


def _time(task: Task) -> tuple[list[float], list[float], float]:
    """Times of steps and resets in us, and the mean time of a step, its share of resets included.

    Steps in which another program took the core say more of the machine than of the environment: they are left out,
    unless hardly any other is left.
    """
    steps_us: list[float] = []
    quiet_us: list[float] = []
    resets_us = [_reset_us(task) for _ in range(_RESETS)]
    actions = _Actions(task, _DRAWN)
    task.step(actions.at(0))  # what only the first step costs is not the environment's speed
    end = time.perf_counter() + _CHECKUP_TIMING_S
    before_switches = _preemptions()
    while time.perf_counter() < end:
        action = actions.at(len(steps_us) % _DRAWN)
        before = time.perf_counter()
        _, _, terminated, truncated = task.step(action)
        steps_us.append(1e6 * (time.perf_counter() - before))
        switches = _preemptions()
        if switches == before_switches:
            quiet_us.append(steps_us[-1])
        if terminated or truncated:
            resets_us.append(_reset_us(task))
            switches = _preemptions()
        before_switches = switches
    kept = quiet_us if len(quiet_us) > 0.3 * len(steps_us) else steps_us
    episodes = len(resets_us) - _RESETS
    return kept, resets_us, float(np.mean(kept) + np.median(resets_us) * episodes / len(steps_us))


def _preemptions() -> int:
    """How often this thread was preempted; 0 where the system does not say."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if who is None else resource.getrusage(who).ru_nivcsw


def _reset_us(task: Task) -> float:
    before = time.perf_counter()
    task.reset()
    return 1e6 * (time.perf_counter() - before)


def _sample_allowed(env: Any) -> None:
    """Makes an environment's action space draw only what its latest mask allows: the checker knows no masks."""
    latest: dict[str, Any] = {}

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)  # the checker looks at the parameters
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            latest[MASK] = np.asarray(result[-1][MASK], np.int8)
            return result

        return call

    env.reset, env.step, env.action_space = noting(env.reset), noting(env.step), copy.deepcopy(env.action_space)
    sample = env.action_space.sample
    env.action_space.sample = lambda: sample(latest.get(MASK))


def _ask_gymnasium(env: Any, *, masked: bool = False) -> tuple[str, ...]:
    """What ``gymnasium.utils.env_checker`` says of an environment, each sentence once."""
    from gymnasium.utils.env_checker import check_env

    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if masked:
                _sample_allowed(env.unwrapped)
            check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            said.append(one_line(error))
        finally:
            env.close()
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
    with contextlib.closing(task):
        task.reset(seed=0)
        height, width, _ = task.render().shape
    return {"height": height, "width": width}


if __name__ == "__main__":
    take_name(PROBE)
    sys.exit(main(sys.argv[1:]))
