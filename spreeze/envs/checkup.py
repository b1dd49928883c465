"""A closer look at one environment, for the doctor; run in a child by ``spreeze.envs.probe``."""

from __future__ import annotations

import re
import resource
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from spreeze.envs.registry import make_env, one_line
from spreeze.envs.task import Task, make_task, uniform_actions

_TIMING_S = 2.0
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
    """What a closer look found."""

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


def check_up(env_id: str, import_module: str | None, plain: bool, args: tuple[str, ...]) -> Checkup:
    """Times steps and resets, weighs a second environment, asks Gymnasium's checker."""
    import psutil

    task = make_task(env_id, import_module, plain=plain, args=args)
    try:
        steps_us, resets_us, mean_us = _time(task)
        process = psutil.Process()
        before = process.memory_info().rss
        second = make_task(env_id, import_module, plain=plain, args=args)
        try:
            second.reset(seed=1)
            added = max(0, process.memory_info().rss - before)
        finally:
            second.close()
    finally:
        task.close()
    p50, p99 = np.quantile(steps_us, [0.5, 0.99])
    return Checkup(
        steps_per_s=1e6 / mean_us, step_us_p50=float(p50), step_us_p99=float(p99),
        step_us_max=float(max(steps_us)), reset_us_median=float(np.median(resets_us)), further_env_bytes=added,
        notes=_ask_gymnasium(make_env(env_id, import_module, plain=plain, args=args)),
    )


def _time(task: Task) -> tuple[list[float], list[float], float]:
    """Times of steps and resets in us, and the mean time of a step, its share of resets included.

    Steps in which another program took the core are left out: they would say more of the machine than of
    the environment, unless hardly any other is left.
    """
    steps_us: list[float] = []
    quiet_us: list[float] = []
    resets_us = [_reset_us(task) for _ in range(_RESETS)]
    actions = task.to_native(uniform_actions(task.spec, 4096, np.random.default_rng(0)))
    task.step(actions[0])  # what only the first step costs is not the environment's speed
    end = time.perf_counter() + _TIMING_S
    before_switches = _preemptions()
    while time.perf_counter() < end:
        before = time.perf_counter()
        _, _, terminated, truncated = task.step(actions[len(steps_us) % len(actions)])
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
    """How often this thread has lost its core against its will; 0 where the system does not say."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if who is None else resource.getrusage(who).ru_nivcsw


def _reset_us(task: Task) -> float:
    before = time.perf_counter()
    task.reset()
    return 1e6 * (time.perf_counter() - before)


def _ask_gymnasium(env: Any) -> tuple[str, ...]:
    """What ``gymnasium.utils.env_checker`` says of an environment, each sentence once."""
    from gymnasium.utils.env_checker import check_env

    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            said.append(f"{one_line(error)}")
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


def draw(env_id: str, import_module: str | None, plain: bool, args: tuple[str, ...]) -> dict[str, Any]:
    """Draws one picture; its height and width."""
    task = make_task(env_id, import_module, "rgb_array", plain=plain, args=args)
    try:
        task.reset(seed=0)
        height, width, _ = task.render().shape
    finally:
        task.close()
    return {"height": height, "width": width}
