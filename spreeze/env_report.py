"""The doctor's report on one environment: spaces, algorithm, speed, spread, memory, checker, pictures."""

from __future__ import annotations

import dataclasses
from typing import Any

from spreeze.check import CHILD_TIMEOUT_S, Check
from spreeze.envs.probe import Probe, in_child, probe_env
from spreeze.errors import SpreezeError
from spreeze.fitting import actions_text, fitting_algorithms
from spreeze.formats import clean, size

_UNEVEN = 10.0
"""p99 over median of the step time from which a lockstep of environments waits for its slowest."""
_SLOW_RESET = 50.0
"""Median reset over median step from which resets are worth a word."""


def check_env(
    env_id: str, import_module: str | None, args: tuple[str, ...] = (), timeout_s: float = CHILD_TIMEOUT_S
) -> tuple[list[Check], dict[str, Any] | None]:
    """All that can be said of an environment, and the figures; one line if it cannot be used."""
    try:
        probe = probe_env(env_id, import_module, deadline_s=timeout_s, steps=300, args=args)
    except SpreezeError as error:
        return [Check("environment", "fail", clean(error), "name another --env, or fix what the line says")], None
    checks, found = _closer(probe, env_id, import_module, args, timeout_s)
    # A picture may take the process down, so it gets one of its own, after the timing.
    checks = [*_spaces(probe), *checks, _pictures(env_id, import_module, args, timeout_s)]
    return checks, {**dataclasses.asdict(probe), "checkup": found}


def speed(probe: Probe) -> str:
    """Median step time and its deviation."""
    if probe.step_us_median is None:
        return "speed unknown"
    spread = "" if probe.step_cv is None else f" +- {100 * probe.step_cv:.0f} %"
    return f"{probe.step_us_median:.0f} us a step{spread}"


def _spaces(probe: Probe) -> list[Check]:
    spec = probe.spec
    limit = "no time limit" if spec.max_episode_steps is None else f"at most {spec.max_episode_steps} env steps"
    fit = ", ".join(fitting_algorithms(spec))
    found = [Check(
        "environment", "ok",
        f"{spec.env_id}: observation {spec.obs_dim}, {actions_text(spec)}, {limit}; algorithms that fit: {fit}",
    )]  # fmt: skip
    if spec.obs_layout:
        found.append(Check("env layout", "ok", "; ".join(spec.obs_layout)))
    return found


def _closer(
    probe: Probe, env_id: str, import_module: str | None, args: tuple[str, ...], timeout_s: float
) -> tuple[list[Check], dict[str, Any] | None]:
    try:
        found = in_child("check", env_id, import_module, deadline_s=timeout_s, args=args)
    except SpreezeError as error:
        remedy = "it steps once but not for long: run it in a loop of your own to see where"
        return [Check("env speed", "fail", clean(error), remedy)], None
    memory = (
        f"{size(probe.memory_bytes)} for the first environment of a process, {size(found['further_env_bytes'])} for "
        "each further one"
    )
    return [*_speeds(found), Check("env memory", "ok", memory), _notes(found["notes"])], found


def _speeds(found: dict[str, Any]) -> list[Check]:
    p50, p99, worst, reset = (found[name] for name in ("step_us_p50", "step_us_p99", "step_us_max",
                                                            "reset_us_median"))
    text = (
        f"{found['steps_per_s']:,.0f} env steps/s on one core with random actions, resets included; "
        f"a step {p50:.0f} us (median), {p99:.0f} us (p99), longest {worst / p50:.0f} times the median; "
        f"a reset {reset:.0f} us"
    )
    if p99 > _UNEVEN * p50:
        return [Check("env speed", "warn", text, "steps are uneven: environments of one sampler wait for the slowest; "
                      "try --envs-per-sampler 1 and more --samplers")]
    if reset > _SLOW_RESET * p50 and reset > 10_000:
        return [Check("env speed", "warn", text, "resets are slow: each costs as much as many steps; longer episodes, "
                      "or a reset that reuses what was built, would help")]
    return [Check("env speed", "ok", text)]


def _notes(notes: list[str]) -> Check:
    if not notes:
        return Check("env checker", "ok", "Gymnasium's checker has nothing to say that matters here")
    return Check("env checker", "warn", clean("; ".join(notes), 600), "it can be trained on; better fix this first")


def _pictures(env_id: str, import_module: str | None, args: tuple[str, ...], timeout_s: float) -> Check:
    try:
        found = in_child("draw", env_id, import_module, deadline_s=timeout_s, args=args)
    except SpreezeError as error:
        return Check("env pictures", "warn", clean(error), "training works without; --no-visualizer says nothing of it")
    return Check("env pictures", "ok", f"draws {found['width']} x {found['height']} without a window")
