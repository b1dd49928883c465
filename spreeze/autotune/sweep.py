"""The autotuner: what to measure, how to choose, and why. Measuring itself is handed in.

Stages: facts -> batch size and learner threads from real updates -> samplers raised with that learner
running. Each choice is a value with its reason; every candidate's figures are kept.

The default score of a batch size B is ``updates_per_s(B) * B / (B + B0)``: an update's worth grows with
the batch only until B is about B0. Its rate follows ``t(B) = a + b B`` (seconds), fitted here, which
also gives the Spreeze paper's rule: the smallest batch that reaches 0.85 of the asymptotic frame rate
1/b, ``b B / (a + b B) >= 0.85`` (papers: section 3.3). On processors that rule picks batches that learn
slowly, so it is printed beside the choice and not followed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spreeze.types import Reasoned

BATCH_HALF_WORTH = 256
"""B0: batch size at which an update has half of its greatest worth (the batch most published settings use)."""
PAPER_SHARE = 0.85
KEEP_BATCH = 0.10
"""A batch other than the configured one has to score this much better: settings were made for that batch."""
SAMPLER_GAIN, LEARNER_LOSS = 0.05, 0.05
"""A further sampler has to add this share of env steps/s and may cost the learner at most this share."""
THREAD_GAIN = 0.10
"""More threads are only tried while each doubling adds this share to the score."""
MAX_UPDATE_S = 1.0
"""A batch whose update takes longer is never chosen."""


@dataclass(frozen=True, kw_only=True)
class UpdateRate:
    """Measured updates of one candidate."""

    batch_size: int
    threads: int
    updates_per_s: tuple[float, ...]
    """Every repeat; empty when the candidate failed."""
    failure: str | None = None

    @property
    def median(self) -> float:
        """Median of the repeats; 0 for a failed candidate."""
        return statistics.median(self.updates_per_s) if self.updates_per_s else 0.0


@dataclass(frozen=True, kw_only=True)
class JointRate:
    """Sampling and learning measured at the same time."""

    samplers: int
    env_steps_per_s: tuple[float, ...]
    updates_per_s: tuple[float, ...]

    @property
    def env_median(self) -> float:
        """Median env steps a second."""
        return statistics.median(self.env_steps_per_s)

    @property
    def update_median(self) -> float:
        """Median updates a second."""
        return statistics.median(self.updates_per_s)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What may be tried, and what the user has pinned."""

    usable_cores: float
    configured_batch: int
    largest_batch: int
    """Bound from replay capacity."""
    step_us: float | None
    memory_for_samplers: int
    """Samplers that memory allows."""
    batch_size: int | None = None
    threads: int | None = None
    samplers: int | None = None
    envs_per_sampler: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choice, its reasons, and everything that was measured."""

    batch_size: Reasoned
    threads: Reasoned
    envs_per_sampler: Reasoned
    samplers: Reasoned
    update_rates: tuple[UpdateRate, ...]
    joint_rates: tuple[JointRate, ...]
    cost: tuple[float, float] | None
    """a (s) and b (s per row) of ``t(B) = a + b B``; None if fewer than two candidates ran."""
    paper_batch: int | None
    notes: tuple[str, ...] = field(default=())


MeasureUpdates = Callable[[Sequence[int], int], list[UpdateRate]]
"""(batch sizes, threads) -> rates."""
MeasureSamplers = Callable[[Sequence[int], int, int, int], list[JointRate]]
"""(numbers of samplers, envs per sampler, batch size, threads) -> rates, learner running."""


def tune(knobs: Knobs, measure_updates: MeasureUpdates, measure_samplers: MeasureSamplers,
         say: Callable[[str], None]) -> Tuning:
    """Measures and chooses; ``say`` is told each row as it is measured."""
    thread_options = thread_candidates(knobs)
    rates: list[UpdateRate] = []
    for threads in thread_options:
        best = max((batch_score(rate.batch_size, rate.median) for rate in rates), default=0.0)
        found = measure_updates(batch_candidates(knobs), threads)
        for rate in found:
            say(_rate_line(rate))
        rates += found
        if max(batch_score(rate.batch_size, rate.median) for rate in found) < best * (1.0 + THREAD_GAIN):
            break
    batch, threads_choice = choose_batch(knobs, rates, thread_options)
    cost = fit_cost([rate for rate in rates if rate.threads == threads_choice.value])
    envs = choose_envs_per_sampler(knobs)
    joint = measure_samplers(sampler_candidates(knobs, threads_choice.value), envs.value, batch.value,
                             threads_choice.value)
    for entry in joint:
        say(f"  {entry.samplers} samplers: {entry.env_median:8.0f} env steps/s, {entry.update_median:8.1f} updates/s")
    return Tuning(
        batch_size=batch, threads=threads_choice, envs_per_sampler=envs, samplers=choose_samplers(knobs, joint),
        update_rates=tuple(rates), joint_rates=tuple(joint), cost=cost,
        paper_batch=paper_batch(cost) if cost else None,
    )


def _rate_line(rate: UpdateRate) -> str:
    if rate.failure:
        return f"  batch {rate.batch_size:6d}, {rate.threads} threads: {rate.failure}"
    return (f"  batch {rate.batch_size:6d}, {rate.threads} threads: {rate.median:8.1f} updates/s, "
            f"{rate.median * rate.batch_size:10.0f} update frames/s")


def batch_candidates(knobs: Knobs) -> list[int]:
    """Powers of two from 64, or the pinned batch; the measuring side stops early when updates get slow."""
    if knobs.batch_size is not None:
        return [knobs.batch_size]
    sizes = {2**power for power in range(6, 15)} | {knobs.configured_batch}
    return sorted(size for size in sizes if size <= knobs.largest_batch)


def thread_candidates(knobs: Knobs) -> list[int]:
    """Learner threads worth trying: each must leave a core for sampling.

    A matrix product whose threads wait for a busy core stalls altogether (1.3 instead of 81 updates/s
    were seen on two cores), so threads are never tried that would have to share.
    """
    if knobs.threads is not None:
        return [knobs.threads]
    return [threads for threads in (1, 2, 4, 8) if threads == 1 or threads <= knobs.usable_cores / 2]


def sampler_candidates(knobs: Knobs, threads: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, ... up to one more than the cores that the learner leaves."""
    if knobs.samplers is not None:
        return [knobs.samplers]
    most = max(1, min(math.floor(knobs.usable_cores) - threads + 1, knobs.memory_for_samplers))
    steps = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    return [count for count in steps if count <= most]


def fit_cost(rates: Sequence[UpdateRate]) -> tuple[float, float] | None:
    """Least squares of ``t(B) = a + b B`` with weights 1/t^2 (relative errors); a, b in seconds."""
    points = [(rate.batch_size, 1.0 / rate.median) for rate in rates if rate.median > 0]
    if len({size for size, _ in points}) < 2:
        return None
    s_w = sum(1 / t**2 for _, t in points)
    s_x = sum(size / t**2 for size, t in points)
    s_xx = sum(size**2 / t**2 for size, t in points)
    s_y = sum(1 / t for _, t in points)
    s_xy = sum(size / t for size, t in points)
    determinant = s_w * s_xx - s_x**2
    b = (s_w * s_xy - s_x * s_y) / determinant
    a = (s_y - b * s_x) / s_w
    return max(a, 0.0), max(b, 1e-12)


def paper_batch(cost: tuple[float, float], share: float = PAPER_SHARE) -> int:
    """Smallest power of two whose frame rate reaches ``share`` of the asymptotic one."""
    a, b = cost
    needed = share / (1.0 - share) * a / b
    return 1 << max(0, math.ceil(math.log2(max(needed, 1.0))))


def batch_score(batch_size: int, updates_per_s: float) -> float:
    """Worth of a second of learning at this batch: ``updates_per_s * B / (B + B0)``."""
    return updates_per_s * batch_size / (batch_size + BATCH_HALF_WORTH)


def choose_batch(knobs: Knobs, rates: Sequence[UpdateRate], threads: Sequence[int]) -> tuple[Reasoned, Reasoned]:
    """Batch size and learner threads with the best score, the configured batch where it is close.

    Raises:
        ValueError: not one candidate could be measured.
    """
    usable = [rate for rate in rates if rate.median > 0 and 1.0 / rate.median <= MAX_UPDATE_S]
    if not usable:
        usable = [rate for rate in rates if rate.median > 0]
    if not usable:
        reasons = "; ".join(sorted({rate.failure or "no rate" for rate in rates}))
        raise ValueError(f"no batch size could be measured: {reasons}")
    best = max(usable, key=lambda rate: batch_score(rate.batch_size, rate.median))
    top = batch_score(best.batch_size, best.median)
    chosen = best
    for rate in usable:
        if rate.batch_size == knobs.configured_batch and rate.threads == best.threads:
            score = batch_score(rate.batch_size, rate.median)
            chosen = rate if score >= top / (1.0 + KEEP_BATCH) else best
    return _batch_reason(knobs, chosen, best, usable), _thread_reason(knobs, chosen, usable, threads)


def _batch_reason(knobs: Knobs, chosen: UpdateRate, best: UpdateRate, usable: Sequence[UpdateRate]) -> Reasoned:
    if knobs.batch_size is not None:
        return Reasoned(chosen.batch_size, f"batch {chosen.batch_size}: set by you ({chosen.median:.0f} updates/s)")
    top = batch_score(best.batch_size, best.median)
    score = batch_score(chosen.batch_size, chosen.median)
    runners = sorted((rate for rate in usable if rate.threads == chosen.threads and rate is not chosen),
                     key=lambda rate: -batch_score(rate.batch_size, rate.median))[:2]
    others = ", ".join(
        f"{rate.batch_size}: {100 * batch_score(rate.batch_size, rate.median) / top:.0f} %" for rate in runners
    )
    why = "best score" if chosen is best else f"{100 * score / top:.0f} % of the best score and the settings' own batch"
    return Reasoned(chosen.batch_size, f"batch {chosen.batch_size}: {why} at {chosen.median:.0f} updates/s"
                                       + (f" ({others})" if others else ""))


def _thread_reason(knobs: Knobs, chosen: UpdateRate, usable: Sequence[UpdateRate], threads: Sequence[int]) -> Reasoned:
    if knobs.threads is not None:
        return Reasoned(chosen.threads, f"{chosen.threads} learner threads: set by you")
    if len(threads) == 1:
        return Reasoned(1, f"1 learner thread: {knobs.usable_cores:g} usable cores leave none to share")
    same = {rate.threads: rate.median for rate in usable if rate.batch_size == chosen.batch_size}
    text = ", ".join(f"{count}: {rate:.0f}/s" for count, rate in sorted(same.items()))
    return Reasoned(chosen.threads, f"{chosen.threads} learner threads: fastest at this batch ({text})")


def choose_envs_per_sampler(knobs: Knobs) -> Reasoned:
    """Enough environments that one batched inference costs little beside their steps."""
    if knobs.envs_per_sampler is not None:
        return Reasoned(knobs.envs_per_sampler, f"{knobs.envs_per_sampler} environments a sampler: set by you")
    if knobs.step_us is None:
        return Reasoned(8, "8 environments a sampler: step time not known")
    count = 4 if knobs.step_us > 5000.0 else 8
    return Reasoned(count, f"{count} environments a sampler: a step takes {knobs.step_us:.0f} us, inference is shared")


def choose_samplers(knobs: Knobs, joint: Sequence[JointRate]) -> Reasoned:
    """Raises the number while it pays and the learner does not suffer."""
    if knobs.samplers is not None:
        return Reasoned(knobs.samplers, f"{knobs.samplers} samplers: set by you")
    chosen, why = joint[0], "no other number was possible"
    for entry in joint[1:]:
        gain = entry.env_median / chosen.env_median - 1.0 if chosen.env_median > 0 else math.inf
        loss = 1.0 - entry.update_median / chosen.update_median if chosen.update_median > 0 else 0.0
        if gain < SAMPLER_GAIN or loss > LEARNER_LOSS:
            why = f"{entry.samplers} samplers: env steps {100 * gain:+.0f} %, updates {-100 * loss:+.0f} %"
            break
        chosen, why = entry, f"env steps {100 * gain:+.0f} %, updates {-100 * loss:+.0f} % against one step fewer"
    noun = "sampler" if chosen.samplers == 1 else "samplers"
    rates = f"{chosen.env_median:.0f} env steps/s beside {chosen.update_median:.0f} updates/s"
    return Reasoned(chosen.samplers, f"{chosen.samplers} {noun}: {rates}; {why}")


def as_json(tuning: Tuning) -> dict[str, Any]:
    """Everything measured and chosen, for ``tune.json``."""
    return {
        "choice": {
            "learner.batch_size": tuning.batch_size.value, "learner.threads": tuning.threads.value,
            "sampling.samplers": tuning.samplers.value, "sampling.envs_per_sampler": tuning.envs_per_sampler.value,
        },
        "reasons": {
            "learner.batch_size": tuning.batch_size.reason, "learner.threads": tuning.threads.reason,
            "sampling.samplers": tuning.samplers.reason,
            "sampling.envs_per_sampler": tuning.envs_per_sampler.reason,
        },
        "score": "updates_per_s * batch_size / (batch_size + 256)",
        "cost_a_s": tuning.cost[0] if tuning.cost else None,
        "cost_b_s_per_row": tuning.cost[1] if tuning.cost else None,
        "paper_batch_size": tuning.paper_batch,
        "update_rates": [
            {"batch_size": r.batch_size, "threads": r.threads, "updates_per_s": list(r.updates_per_s),
             "failure": r.failure} for r in tuning.update_rates
        ],
        "joint_rates": [
            {"samplers": r.samplers, "env_steps_per_s": list(r.env_steps_per_s),
             "updates_per_s": list(r.updates_per_s)} for r in tuning.joint_rates
        ],
    }
