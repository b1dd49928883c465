"""The newest metrics as one snapshot for views and the bottleneck sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spreeze.snapshot import GpuSnapshot, Snapshot
from spreeze.workers.plan import RunPlan

_SHARES = {
    "sampler": ("policy", "env", "write", "wait"),
    "learner": ("wait", "gather", "critic", "actor", "publish"),
    "rollout learner": ("wait", "learn", "publish"),
}
_PLAIN = (
    "env_steps_per_s", "updates_per_s", "update_frames_per_s", "samples_per_insert", "policy_lag", "transition_age",
    "replay_fill", "eval_return", "episode_return", "cpu_use", "memory_used_bytes", "samplers_active",
    "foreign_cores",
)


def take_snapshot(plan: RunPlan, metrics: Mapping[str, float | None], session_s: float, **known: Any) -> Snapshot:
    """Builds a snapshot; ``known`` are fields that the caller has at hand.

    Args:
        plan: the run.
        metrics: newest value of each series, None or absent where unknown.
        session_s: wall time of this session, for progress.
        known: further fields of ``Snapshot``.
    """
    replay = plan.config.replay
    progress, eta_s = _progress(plan, metrics, session_s)
    return Snapshot(
        env_id=plan.spec.env_id, algo=plan.config.run.algo, lag=plan.lag, env_steps=_integer(metrics.get("env_steps")),
        updates=_integer(metrics.get("updates")),
        learning_starts=replay.learning_starts if plan.lag is None else None,
        samples_per_insert_min=replay.samples_per_insert_min if plan.lag is None else None,
        samples_per_insert_max=replay.samples_per_insert_max if plan.lag is None else None,
        samplers_wanted=plan.samplers, restarts=_integer(metrics.get("restarts")) or 0,
        env_errors=_env_errors(metrics),
        sampler_shares=_shares(metrics, "sampler"),
        learner_shares=_shares(metrics, "learner" if plan.lag is None else "rollout learner"),
        core_uses=_parts(metrics, "cpu_core_use"), gpus=_gpus(metrics), progress=progress, eta_s=eta_s,
        **{name: metrics.get(name) for name in _PLAIN}, **known,  # type: ignore[arg-type]
    )


def _env_errors(metrics: Mapping[str, float | None]) -> int | None:
    known = [value for name in ("env_errors", "rows_refused") if (value := metrics.get(name)) is not None]
    return int(sum(known)) if known else None


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def _shares(metrics: Mapping[str, float | None], role: str) -> dict[str, float]:
    found = {name: metrics.get(f"{role.removeprefix('rollout ')}_{name}_share") for name in _SHARES[role]}
    return {name: value for name, value in found.items() if value is not None}


def _parts(metrics: Mapping[str, float | None], name: str) -> tuple[float, ...]:
    pattern = re.compile(name + r"/(\d+)")
    found = {int(m[1]): metrics[key] for key in metrics if (m := pattern.fullmatch(key))}
    return tuple(value for _, value in sorted(found.items()) if value is not None)


def _gpus(metrics: Mapping[str, float | None]) -> tuple[GpuSnapshot, ...]:
    indices = sorted({int(key.split("/")[1]) for key in metrics if key.startswith("gpu_")})
    return tuple(
        GpuSnapshot(
            index=i, use=metrics.get(f"gpu_use/{i}"), power_w=metrics.get(f"gpu_power_w/{i}"),
            memory_used_bytes=metrics.get(f"gpu_memory_used_bytes/{i}"),
        )
        for i in indices
    )


def _progress(
    plan: RunPlan, metrics: Mapping[str, float | None], session_s: float
) -> tuple[float | None, float | None]:
    """Share of the stop condition that will come first, and the seconds until then."""
    stop = plan.config.stop
    candidates: list[tuple[float, float | None]] = []
    if stop.seconds:
        candidates.append((session_s / stop.seconds, max(stop.seconds - session_s, 0.0)))
    for limit, done, rate in (
        (stop.env_steps, metrics.get("env_steps"), metrics.get("env_steps_per_s")),
        (stop.updates, metrics.get("updates"), metrics.get("updates_per_s")),
    ):
        if limit and done is not None:
            candidates.append((done / limit, max(limit - done, 0.0) / rate if rate else None))
    if not candidates:
        return None, None
    share, eta_s = max(candidates, key=lambda entry: entry[0])
    return min(share, 1.0), eta_s
