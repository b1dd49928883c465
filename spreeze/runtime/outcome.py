"""The results of a run, and ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spreeze.machine.hardware import Machine
from spreeze.run_directory import versions
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import split_names


@dataclass
class Outcome:
    """The results of a run; None is unknown."""

    device: str | None = None
    wall_s: float = 0.0
    env_steps: int = 0
    updates: int = 0
    samples_per_insert: float | None = None
    policy_lag_mean: float | None = None
    episodes: int = 0
    eval_episodes: int | None = None  # in eval_return; others may have been cut by the time limit or lost to errors
    eval_episodes_cut: int | None = None
    eval_episodes_lost: int | None = None
    eval_success_rate: float | None = None  # if the environment reports is_success
    time_to_target_s: float | None = None  # when fresh starts confirmed it
    time_to_target_held_s: float | None = None  # of the first time that the mean of HELD in a row did
    restarts: int = 0
    env_errors: int | None = None  # exceptions that environments raised
    transitions_rejected: int | None = None  # bad transitions that environments gave
    rows_stored: int | None = None  # transitions that reached replay in this session
    energy_per_million_steps_kj: float | None = None
    metrics_rows_lost: int = 0  # samples, events and others that could not be stored
    metrics_trouble: str | None = None  # the latest trouble with the metrics file
    stopped_by: str = "unknown"
    error: str | None = None
    bottleneck: str | None = None
    parameters_sha256: str | None = None  # of group 0's networks
    rates_warmup_s: float | None = None
    eval_return_mean: float | None = None
    eval_return_best: float | None = None
    eval_return_final: float | None = None  # the final metric: over all episodes of the last FINAL_EVALUATIONS
    eval_return_final_evaluations: int = 0
    eval_return_worst_of_20: float | None = None  # of the last WORST_OF evaluations
    # Up to here, the keys of summary.json.
    rates: dict[str, float | None] = field(default_factory=dict)
    learners: dict[int, dict[str, Any]] = field(default_factory=dict)  # group -> its learner's results

    @property
    def totals(self) -> dict[str, Any]:
        """Totals and scores as ``run.json`` has them."""
        counts = {name: getattr(self, name) for name in ("env_steps", "updates", "episodes")}
        return counts | {"eval_best": self.eval_return_best, "eval_final": self.eval_return_final}

    def take_learner_result(self, group: int, message: Mapping[str, Any]) -> None:
        """Takes a learner's last message."""
        sha256 = message.get("parameters_sha256")
        self.learners.setdefault(group, {}).update(updates=int(message.get("updates", 0)), parameters_sha256=sha256)
        self.updates = sum(learner.get("updates", 0) for learner in self.learners.values())
        if group == 0:
            self.parameters_sha256 = sha256


def summary(plan: RunPlan, outcome: Outcome, run_dir: Path, machine: Machine) -> dict[str, Any]:
    """``summary.json``: all that scripts and comparisons need of a finished run; None is unknown."""
    config, rates, on_policy = plan.config, outcome.rates, plan.config.on_policy is not None
    part = config.rollout if on_policy else config.sampling
    fields = {name: value for name, value in vars(outcome).items() if name not in ("rates", "learners")}
    shares = split_names(on_policy=on_policy, inference_workers=plan.inference_workers > 0)
    document = {
        "run_dir": str(run_dir),
        "env": plan.spec.env_id,
        "algo": config.run.algo,
        "mode": config.run.mode,
        "seed": config.run.seed,
        "samplers": plan.samplers,
        "envs_per_sampler": part.envs_per_sampler,
        "batch_size": plan.batch_size,
        "learner_threads": config.learner.threads,
        **fields,
        "process_s": outcome.wall_s - plan.earlier.wall_s + plan.process_age_s,
        **{name: rates.get(name) for name in ("env_steps_per_s", "updates_per_s", "update_frames_per_s")},
        "rates_measured_s": rates.get("measured_s"),
        "time_split": {name: rates.get(name) for name in shares},
        "samples_per_insert_band": config.replay.samples_per_insert_band,
        "target_return": plan.target_return,
        "reasons": plan.reasons,
        "versions": versions(),
        "machine": machine.one_line(),
    }
    if plan.learners > 1:
        document["learners"] = [{"group": group, **outcome.learners.get(group, {})} for group in range(plan.learners)]
    if on_policy:
        document |= {
            "inference_workers": plan.inference_workers,
            "sync_interval": plan.sync_interval,
            "correction": config.rollout.correction if plan.lag else None,
            "synchrony": config.rollout.synchrony if plan.lag == 0 else None,
        }
    return document
