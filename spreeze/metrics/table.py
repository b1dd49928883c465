"""THE table of metrics: every number that Spreeze reports, its unit, its meaning and who writes it.

Workers put raw numbers into their slots of shared memory (``SLOTS``), a store each and no lock.
The supervisor turns them into the metrics below and is the only writer of ``metrics.db``.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple


class Metric(NamedTuple):
    """One reported number."""

    name: str
    unit: str
    meaning: str
    writer: str


class Phase(IntEnum):
    """What a worker is doing; the supervisor's deadline depends on it."""

    START = 0
    INIT = 1
    RESET = 2
    STEP = 3
    WAIT = 4
    UPDATE = 5
    PUBLISH = 6
    CHECKPOINT = 7
    EVALUATE = 8
    RENDER = 9
    DONE = 10


DEADLINE_S: dict[Phase, float] = {
    Phase.START: 120.0, Phase.INIT: 120.0, Phase.RESET: 60.0, Phase.STEP: 30.0, Phase.WAIT: 30.0,
    Phase.UPDATE: 60.0, Phase.PUBLISH: 60.0, Phase.CHECKPOINT: 120.0, Phase.EVALUATE: 60.0,
    Phase.RENDER: 60.0, Phase.DONE: 30.0,
}
"""Seconds without a heartbeat after which a worker in that phase counts as hung."""

_STEPPING = (
    "env_steps", "episodes", "episode_return", "episode_length", "rows_refused", "env_errors",
    "policy_version", "policy_s", "env_s", "write_s", "wait_s",
)

SLOTS: dict[str, tuple[str, ...]] = {
    "sampler": _STEPPING,
    "executor": _STEPPING,
    "learner": (
        "updates", "policy_version", "wait_s", "gather_s", "critic_s", "actor_s", "publish_s",
        "critic_loss", "actor_loss", "q_mean", "alpha", "entropy", "critic_grad_norm", "actor_grad_norm",
        "policy_lag", "transition_age", "replay_fill", "rows_redrawn", "updates_skipped", "checkpoint_updates",
        "batch_size", "learn_s", "policy_loss", "value_loss", "approx_kl", "clip_share", "explained_variance",
        "learning_rate", "grad_norm", "checkpoint_left_bytes",
    ),
    "actor": ("rows", "batches", "policy_version", "policy_s", "wait_s"),
    "evaluator": ("evaluations", "policy_version", "eval_return", "eval_length", "env_steps"),
    "visualizer": ("frames", "clips", "policy_version", "paused"),
}
"""role -> names of its float64 slots, in order. Times are cumulative seconds, counts cumulative."""

_LEARNED = (
    "critic_loss", "actor_loss", "q_mean", "alpha", "entropy", "critic_grad_norm", "actor_grad_norm",
    "policy_loss", "value_loss", "approx_kl", "clip_share", "explained_variance", "learning_rate", "grad_norm",
)


def blank_learner() -> dict[str, float]:
    """A learner's slots before it has measured anything.

    Counts and times are 0. What an algorithm tells of its learning is NaN, which says unknown: no algorithm has all
    of these, and one leaves out what is not finite.
    """
    return dict.fromkeys(SLOTS["learner"], 0.0) | dict.fromkeys(_LEARNED, math.nan)


METRICS: tuple[Metric, ...] = (
    Metric("env_steps", "env steps", "env steps collected since the start of the run, all samplers", "supervisor"),
    Metric("env_steps_per_s", "1/s", "env steps collected a second, all samplers", "supervisor"),
    Metric("sampler_env_steps_per_s", "1/s", "env steps a second of one sampler (one series for each)", "supervisor"),
    Metric("updates", "updates", "gradient steps of the critics since the start of the run", "learner"),
    Metric("updates_per_s", "1/s", "gradient steps of the critics a second", "supervisor"),
    Metric("update_frames_per_s", "1/s", "updates a second times batch size (headline of the Spreeze paper)", "supervisor"),
    Metric("samples_per_insert", "ratio", "transitions drawn / transitions inserted since learning began", "supervisor"),
    Metric("policy_lag", "updates", "mean updates (PPO, A2C: intervals) between the policy that collected and the learner's", "learner"),
    Metric("transition_age", "env steps", "mean env steps since a drawn row was written", "learner"),
    Metric("replay_fill", "share", "rows that may be drawn / capacity", "learner"),
    Metric("rows_redrawn", "rows", "drawn rows that were overwritten during the copy and drawn again", "learner"),
    Metric("rows_refused", "rows", "transitions with a non-finite or ill-shaped value, not stored", "sampler"),
    Metric("env_errors", "errors", "exceptions raised by environments", "sampler"),
    Metric("episodes", "episodes", "episodes finished by the samplers", "sampler"),
    Metric("episode_return", "return", "undiscounted return of the samplers' latest episodes (noisy policy)", "sampler"),
    Metric("episode_length", "env steps", "length of the samplers' latest episodes", "sampler"),
    Metric("eval_return", "return", "mean undiscounted return of greedy episodes on the fixed seed list", "evaluator"),
    Metric("eval_length", "env steps", "mean length of these episodes", "evaluator"),
    Metric("policy_version", "updates", "updates taken when the newest weights were published", "learner"),
    Metric("samplers_active", "samplers", "samplers that the governor lets work; of a fraction, one works part of its time", "supervisor"),
    Metric("foreign_cores", "cores", "usable cores that other programs keep busy", "supervisor"),
    Metric("sampler_policy_share", "share", "sampler time spent in policy inference", "supervisor"),
    Metric("sampler_env_share", "share", "sampler time spent in the environments", "supervisor"),
    Metric("sampler_write_share", "share", "sampler time spent writing rows", "supervisor"),
    Metric("sampler_wait_share", "share", "sampler time spent waiting for the limiter", "supervisor"),
    Metric("actor_rows_per_batch", "rows", "mean rows that an actor process infers at once (hts)", "supervisor"),
    Metric("actor_policy_share", "share", "time of the actor processes spent in inference (hts)", "supervisor"),
    Metric("actor_wait_share", "share", "time of the actor processes spent waiting to be asked (hts)", "supervisor"),
    Metric("learner_wait_share", "share", "learner time spent waiting for rows or the limiter", "supervisor"),
    Metric("learner_gather_share", "share", "learner time spent gathering batches", "supervisor"),
    Metric("learner_critic_share", "share", "learner time spent in critic steps", "supervisor"),
    Metric("learner_actor_share", "share", "learner time spent in actor steps", "supervisor"),
    Metric("learner_learn_share", "share", "learner time spent learning intervals (PPO, A2C)", "supervisor"),
    Metric("learner_publish_share", "share", "learner time spent publishing weights and checkpoints", "supervisor"),
    Metric("critic_loss", "loss", "mean squared temporal-difference error, both critics", "learner"),
    Metric("actor_loss", "loss", "objective of the actor", "learner"),
    Metric("q_mean", "return", "mean of the critics' values on the batch", "learner"),
    Metric("alpha", "ratio", "temperature of the entropy term (SAC)", "learner"),
    Metric("entropy", "nat", "mean negative log-probability of the fresh actions (SAC); entropy of the policy (PPO, A2C)", "learner"),
    Metric("critic_grad_norm", "norm", "Euclidean norm of the critics' gradient", "learner"),
    Metric("actor_grad_norm", "norm", "Euclidean norm of the actor's gradient", "learner"),
    Metric("policy_loss", "loss", "objective of the policy on the latest minibatch (PPO, A2C)", "learner"),
    Metric("value_loss", "loss", "half the mean squared error of the values on the latest minibatch (PPO, A2C)", "learner"),
    Metric("approx_kl", "nat", "estimated divergence of the policy from the one that collected, latest minibatch", "learner"),
    Metric("clip_share", "share", "probability ratios outside of PPO's range on the latest minibatch", "learner"),
    Metric("explained_variance", "share", "1 - variance of the values' errors / variance of the returns, latest interval", "learner"),
    Metric("learning_rate", "ratio", "step size of the latest update (PPO, A2C)", "learner"),
    Metric("grad_norm", "norm", "Euclidean norm of the latest gradient before it is scaled down (PPO, A2C)", "learner"),
    Metric("updates_skipped", "updates", "updates not applied because loss or gradient was not finite", "learner"),
    Metric("cpu_core_use", "share", "use of one processor core (one series for each)", "supervisor"),
    Metric("cpu_use", "share", "mean use of the usable cores", "supervisor"),
    Metric("memory_used_bytes", "B", "memory in use on the machine", "supervisor"),
    Metric("process_cpu_use", "cores", "processor time a second of one process (one series for each)", "supervisor"),
    Metric("process_memory_bytes", "B", "resident memory of one process (one series for each)", "supervisor"),
    Metric("gpu_use", "share", "time in which any kernel ran (one series for each GPU)", "supervisor"),
    Metric("gpu_memory_used_bytes", "B", "memory in use on one GPU", "supervisor"),
    Metric("gpu_power_w", "W", "power drawn by one GPU", "supervisor"),
    Metric("gpu_clock_hz", "Hz", "clock of one GPU's multiprocessors", "supervisor"),
    Metric("disk_write_bytes_per_s", "B/s", "bytes written to disk a second by this run's processes", "supervisor"),
    Metric("restarts", "restarts", "worker processes started again", "supervisor"),
)


def by_name(name: str) -> Metric:
    """The metric of that name; a series of one part is called ``name/part``.

    Raises:
        KeyError: no such metric.
    """
    return _BY_NAME[name.split("/", 1)[0]]


_BY_NAME = {metric.name: metric for metric in METRICS}
