"""The document that a finished run leaves: ``summary.json``, and the answer of ``--json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spreeze.machine.hardware import Machine
from spreeze.run_directory import versions
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import split_names
from spreeze.runtime.recorder import Outcome


def _rollout(plan: RunPlan) -> dict[str, Any]:
    """What an on-policy run has besides."""
    part = plan.config.rollout
    if plan.config.on_policy is None:
        return {}
    return {
        "executors": plan.samplers, "envs_per_executor": part.envs_per_executor, "actors": plan.actors,
        "sync_interval": part.sync_interval,
        "correction": part.correction if plan.lag else None,
        "synchrony": part.synchrony if plan.lag == 0 else None,
    }


def summary(plan: RunPlan, outcome: Outcome, run_dir: Path, machine: Machine) -> dict[str, Any]:
    """Everything that a script or a comparison needs to know of a run; None is unknown."""
    config, rates = plan.config, outcome.rates
    return {
        "run_dir": str(run_dir),
        "env": plan.spec.env_id,
        "algo": config.run.algo,
        "mode": config.run.mode,
        "seed": config.run.seed,
        "device": outcome.device,
        "samplers": plan.samplers,
        "envs_per_sampler": config.sampling.envs_per_sampler,
        "batch_size": plan.batch_size,
        **_rollout(plan),
        "learner_threads": config.learner.threads,
        "wall_s": outcome.wall_s,
        "process_s": outcome.wall_s - plan.earlier.wall_s + plan.process_age_s,
        "env_steps": outcome.env_steps,
        "updates": outcome.updates,
        "env_steps_per_s": rates.get("env_steps_per_s"),
        "updates_per_s": rates.get("updates_per_s"),
        "update_frames_per_s": rates.get("update_frames_per_s"),
        "rates_measured_s": rates.get("measured_s"),
        "rates_warmup_s": outcome.warmup_s,
        "time_split": {name: rates.get(name) for name in split_names(
            on_policy=config.on_policy is not None, actors=plan.actors > 0)},
        "samples_per_insert": outcome.samples_per_insert,
        "samples_per_insert_band": [config.replay.samples_per_insert_min, config.replay.samples_per_insert_max],
        "policy_lag_mean": outcome.policy_lag_mean,
        "episodes": outcome.episodes,
        "eval_return_mean": outcome.eval_return,
        "eval_return_best": outcome.eval_best,
        "eval_episodes": outcome.eval_episodes,
        "eval_episodes_cut": outcome.eval_episodes_cut,
        "eval_episodes_lost": outcome.eval_episodes_lost,
        "target_return": config.stop.target_return,
        "time_to_target_s": outcome.time_to_target_s,
        "restarts": outcome.restarts,
        "env_errors": outcome.env_errors,
        "rows_refused": outcome.rows_refused,
        "stopped_by": outcome.stopped_by,
        "error": outcome.error,
        "bottleneck": outcome.bottleneck,
        "parameters_sha256": outcome.parameters_sha256,
        "reasons": plan.reasons,
        "versions": versions(),
        "machine": machine.one_line(),
    }
