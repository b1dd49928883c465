"""Stage 1: real updates of each kind of learner over the batch size, and what may be chosen of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spreeze.errors import ConfigError, WorkerError
from spreeze.tuner.knobs import HEADROOM, batch_sizes, learner_kinds
from spreeze.tuner.model import (
    TIE,
    CostCurve,
    Kind,
    fit_curve,
    kind_of,
    learner_score,
    learner_setting,
    noise,
    paper_batch,
)
from spreeze.tuner.problem import (
    BATCH,
    DEVICE,
    PRECISION,
    THREADS,
    Measure,
    Room,
    Setting,
    TrialResult,
    TuningProblem,
)

MAX_UPDATE_S = 1.0
"""A batch whose update takes longer is never chosen."""
THREAD_GAIN = 0.03
"""More threads are only tried while each doubling adds this share to the score."""
_KIND_GAIN = 0.10
"""``paper``: share of update frames/s that a less plain learner has to add."""
_NEAR = (0, 1, 2)
"""Batch sizes tried on further kinds of learner, as steps of the ladder from the best one so far."""
_LEAST_S = 4.0
_CLIMB_S = 2.0
"""Less time than this is not worth another call."""
_FIRST_SIZES, _FURTHER_SIZES, _BESIDE_SIZES = 6, 2, 3
"""Steps of the ladder measured at once; of a pair of threads, beside one thread."""


@dataclass(frozen=True, kw_only=True)
class Learners:
    """What is known after stage 1."""

    rates: tuple[TrialResult, ...]
    curves: Mapping[Kind, CostCurve]
    sizes: Mapping[Kind, Sequence[int]]
    """Batch sizes that may be chosen, by kind; kinds without any are left out."""
    first: Setting
    """The best of them while the samplers are not known."""
    error: float
    """Relative standard error of a median."""
    limits: tuple[str, ...]


def measure_learners(
    problem: TuningProblem, room: Room, measure: Measure, on_result: Callable[[TrialResult], None], until_s: float
) -> Learners:
    """Measures kind after kind and fits their curves; ``until_s`` of the budget have to be left afterwards.

    Raises:
        ConfigError: a pinned value cannot run.
        WorkerError: nothing could.
    """
    ladder, kinds = batch_sizes(problem), learner_kinds(problem)
    trial = _Trial(problem, measure, on_result, until_s, ladder, list(room.limits))
    plain = {kind[0]: kind for kind in reversed(kinds)}
    for position, kind in enumerate(plain.values()):
        pair = (*kind[:2], 2)
        beside = pair if pair in kinds and len(kinds) == 2 else None
        trial.climb(kind, share=1.0 / (len(plain) - position + (len(kinds) > len(plain))), beside=beside)
    for kind in kinds:
        if kind not in plain.values() and kind[1] == plain[kind[0]][1] and _threads_pay(problem, trial.rates, kind):
            trial.near(kind)
    for kind in kinds:
        # Another precision is only tried with the best number of threads.
        if kind[1] != plain[kind[0]][1] and kind[2] == _best_threads(problem, trial.rates, kind[0]):
            trial.near(kind)
    return _learners(problem, ladder, trial.rates, trial.limits)


class _Trial:
    """Learners measured so far, and the time that they may take."""

    def __init__(
        self, problem: TuningProblem, measure: Measure, on_result: Callable[[TrialResult], None], until_s: float,
        ladder: Sequence[int], limits: list[str],
    ) -> None:
        self.problem, self.measure, self.on_result, self.until_s = problem, measure, on_result, until_s
        self.ladder, self.limits = ladder, limits
        self.rates: list[TrialResult] = []

    def climb(self, kind: Kind, share: float, beside: Kind | None = None) -> None:
        """Measures every second batch until larger ones no longer pay, then those beside the best.

        Args:
            kind: of learner.
            share: of the time that is left.
            beside: a kind to compare it with, measured in the same turns: a machine whose speed changes from second
                to second tells nothing of two learners that were measured one after the other.
        """
        end_s = self.measure.seconds_left() - max(self._left_s() * share, _LEAST_S)
        end_s -= self.measure.device_start_s(kind[0])  # else a device that starts slowly is measured with one batch
        # A line needs few points; more of them take off noise where there is time for them.
        stride = 1 if share == 1.0 or len(self.problem.devices) == 1 else 2
        coarse = sorted({*self.ladder[::stride], self.ladder[-1]})
        position, step = 0, _FIRST_SIZES // stride
        while position < len(coarse) and (position == 0 or self.measure.seconds_left() - end_s > _CLIMB_S):
            wanted = _settings(kind, coarse[position : position + step])
            if beside is not None and position == 0:
                wanted += _settings(beside, coarse[:_BESIDE_SIZES])
            found = self._measured(wanted, self.measure.seconds_left() - end_s)
            position, step = position + step, _FURTHER_SIZES
            if len(found) < len(wanted) or any(rate.failure for rate in found) or not self._rising(kind):
                break
        best = _best(self.problem, self.rates, kind)
        if best is not None and self.measure.seconds_left() - end_s > _CLIMB_S:
            at = self.ladder.index(best[1])
            seen = {rate.setting[BATCH] for rate in self.rates if kind_of(rate.setting) == kind}
            between = [one for one in self.ladder[max(0, at - 1) : at + 2] if one not in seen]
            if between:
                self._measured(_settings(kind, between), self.measure.seconds_left() - end_s)

    def near(self, kind: Kind) -> None:
        """Measures a further kind of learner round the best batch of its device."""
        if self._left_s() < _CLIMB_S:
            self.limits.append(f"time was up before {_kind_text(kind)} could be tried")
            return
        known = {rate.setting for rate in self.rates}
        wanted = _settings(kind, _sizes_to_try(self.problem, self.rates, kind, self.ladder))
        if new := [setting for setting in wanted if setting not in known]:
            self._measured(new, self._left_s())

    def _left_s(self) -> float:
        return self.measure.seconds_left() - self.until_s

    def _measured(self, settings: Sequence[Setting], within_s: float) -> list[TrialResult]:
        found = self.measure.learner(settings, within_s=within_s, on_result=self.on_result)
        self.rates += found
        return found

    def _rising(self, kind: Kind) -> bool:
        """True while a larger batch may still be better."""
        own = [rate for rate in self.rates if kind_of(rate.setting) == kind and rate.updates > 0]
        if self.problem.targets.objective == "paper":
            curve = fit_curve(own, 0.03)
            top = own[-1].setting[BATCH] if own else 0
            knee = paper_batch(curve.a, curve.b, self.problem.targets.gpu_target) if curve and curve.fitted else 2 * top
            return knee * 2 > top
        best = _best(self.problem, self.rates, kind)
        return best is not None and best[1] >= own[-1].setting[BATCH] / 4


def _best_threads(problem: TuningProblem, rates: Sequence[TrialResult], device: str) -> int:
    """Threads of the best learner so far on a device; more only where they pay."""
    found = [(best[0] / (1.0 + THREAD_GAIN) ** position, kind[2])
             for position, kind in enumerate(sorted({kind_of(rate.setting) for rate in rates if
                                                     rate.setting[DEVICE] == device}))
             if (best := _best(problem, rates, kind)) is not None]
    return max(found, default=(0.0, 1))[1]


def _settings(kind: Kind, sizes: Sequence[int]) -> list[Setting]:
    return [learner_setting(kind, batch) for batch in sizes]


def _learners(
    problem: TuningProblem, ladder: Sequence[int], rates: Sequence[TrialResult], limits: list[str]
) -> Learners:
    error = noise(rate.updates_per_s for rate in rates)
    by_kind: dict[Kind, list[TrialResult]] = {}
    for rate in rates:
        by_kind.setdefault(kind_of(rate.setting), []).append(rate)
    fitted = {kind: fit_curve(found, error) for kind, found in by_kind.items()}
    curves = {kind: curve for kind, curve in fitted.items() if curve is not None}
    sizes: dict[Kind, Sequence[int]] = {}
    for kind, curve in curves.items():
        if ran := _allowed(problem, curve, by_kind[kind], limits):
            sizes[kind] = [batch for batch in ladder if ran[0] <= batch <= ran[-1]]
    if not sizes:
        raise _nothing_ran(problem, rates)
    quick = {kind: [b for b in found if curves[kind].update_s(b) <= MAX_UPDATE_S] for kind, found in sizes.items()}
    if any(quick.values()):
        sizes = {kind: found for kind, found in quick.items() if found}
    else:
        limits.append(f"every batch that could be tried takes longer than {MAX_UPDATE_S:g} s an update")
        sizes = {kind: found[:1] for kind, found in sizes.items()}
    if problem.targets.objective == "paper":
        sizes = _paper_sizes(problem, curves, sizes, limits)
    return Learners(rates=tuple(rates), curves=curves, sizes=sizes, first=_first(problem, curves, sizes), error=error,
                    limits=tuple(dict.fromkeys(limits)))


def _kind_text(kind: Kind) -> str:
    device, precision, threads = kind
    return f"{threads} learner threads on {device} in {precision}"


def _threads_pay(problem: TuningProblem, rates: Sequence[TrialResult], kind: Kind) -> bool:
    """False if half of these threads were no better than a quarter of them."""
    device, precision, threads = kind
    half, quarter = (_best(problem, rates, (device, precision, count)) for count in (threads // 2, threads // 4))
    return half is None or quarter is None or half[0] >= quarter[0] * (1.0 + THREAD_GAIN)


def _best(problem: TuningProblem, rates: Sequence[TrialResult], kind: Kind) -> tuple[float, int] | None:
    """(score, batch) of the best rate of a kind."""
    found = [(learner_score(problem.targets.objective, rate.setting[BATCH], rate.updates), rate.setting[BATCH])
             for rate in rates if kind_of(rate.setting) == kind and rate.updates > 0]
    return max(found, default=None)


def _sizes_to_try(problem: TuningProblem, rates: Sequence[TrialResult], kind: Kind, ladder: Sequence[int]) -> list[int]:
    """The whole ladder on a device not seen yet, else what lies near its best batch."""
    device = kind[0]
    seen = [found for other in {kind_of(rate.setting) for rate in rates} if other[0] == device
            if (found := _best(problem, rates, other)) is not None]
    if not seen:
        return list(ladder)
    if problem.targets.objective == "paper":
        own = [rate for rate in rates if rate.setting[DEVICE] == kind[0] and rate.updates > 0]
        top = ladder.index(max(rate.setting[BATCH] for rate in own))
        return [ladder[at] for at in sorted({max(0, top - 3), max(0, top - 1), min(top + 1, len(ladder) - 1)})]
    centre = ladder.index(max(seen)[1])
    return [ladder[min(centre + step, len(ladder) - 1)] for step in _NEAR][: len(ladder) - centre]


def _allowed(problem: TuningProblem, curve: CostCurve, rates: Sequence[TrialResult], limits: list[str]) -> list[int]:
    """Batch sizes that ran, below the first that failed and within the device's memory."""
    room = next((device.memory_bytes for device in problem.devices if device.name == curve.kind[0]), None)
    failed = [rate for rate in rates if rate.failure or rate.updates <= 0]
    bound = min((rate.setting[BATCH] for rate in failed), default=None)
    limits += [f"batch {rate.setting[BATCH]} with {_kind_text(curve.kind)}: {rate.failure or 'no updates'}"
               for rate in failed]
    found = []
    for rate in sorted(rates, key=lambda one: one.setting[BATCH]):
        batch = rate.setting[BATCH]
        if rate.updates <= 0 or (bound is not None and batch >= bound):
            continue
        if room is not None and rate.memory_bytes is not None and rate.memory_bytes > room * HEADROOM:
            limits.append(f"batch {batch} leaves no headroom in the memory of {curve.kind[0]}")
            break
        found.append(batch)
    return found


def _nothing_ran(problem: TuningProblem, rates: Sequence[TrialResult]) -> Exception:
    reasons = "; ".join(sorted({rate.failure or "no updates" for rate in rates})) or "no time to measure"
    pins = [f"{name} = {problem.pin(name)}" for name in (BATCH, THREADS, DEVICE, PRECISION) if name in problem.pins]
    if pins and rates:
        return ConfigError(f"{', '.join(pins)} cannot work here: {reasons}; leave it to the tuner or set another")
    return WorkerError(f"tuning failed: no batch size could be measured: {reasons}")


def _paper_sizes(
    problem: TuningProblem, curves: Mapping[Kind, CostCurve], sizes: Mapping[Kind, Sequence[int]], limits: list[str]
) -> dict[Kind, Sequence[int]]:
    """The knee of the fastest kind of learner alone; the plainer one unless another is clearly faster."""
    chosen: tuple[float, Kind, int] | None = None
    cut: dict[Kind, str] = {}
    for kind, allowed in sizes.items():
        curve = curves[kind]
        batch = allowed[-1]
        if problem.pin(BATCH) is None and curve.fitted:
            knee = paper_batch(curve.a, curve.b, problem.targets.gpu_target)
            batch = min((one for one in allowed if one >= knee and one & (one - 1) == 0), default=allowed[-1])
            if knee > allowed[-1]:
                cut[kind] = f"the paper's rule asks for batch {knee}, {batch} is the largest that may be taken"
        frames = batch * curve.updates_per_s(batch)
        if chosen is None or frames > chosen[0] * (1.0 + _KIND_GAIN):
            chosen = frames, kind, batch
    assert chosen is not None
    limits += [cut[kind] for kind in cut if kind == chosen[1]]
    return {chosen[1]: [chosen[2]]}


def _first(
    problem: TuningProblem, curves: Mapping[Kind, CostCurve], sizes: Mapping[Kind, Sequence[int]]
) -> Setting:
    """The best learner on its own score, ties to the configured batch, then to the smaller and plainer."""
    scored = [
        (learner_score(problem.targets.objective, batch, curves[kind].updates_per_s(batch)), position,
         learner_setting(kind, batch))
        for position, (kind, found) in enumerate(sizes.items()) for batch in found
    ]
    best = max(score for score, _, _ in scored)
    near = [entry for entry in scored if entry[0] >= best * (1.0 - TIE)]
    return min(near, key=lambda one: (one[2][BATCH] != problem.configured[BATCH], one[2][BATCH], one[1]))[2]
