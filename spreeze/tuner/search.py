"""The whole choice: learners alone, everything running, the neighbours, other modules' knobs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spreeze.errors import ConfigError, WorkerError
from spreeze.tuner import knobs as table
from spreeze.tuner.model import (
    TIE,
    CostCurve,
    Kind,
    Scored,
    Sharing,
    bayes_update,
    fit_curve,
    fit_sharing,
    kind_of,
    learner_score,
    learner_setting,
    measured_worth,
    noise,
    paper_batch,
    pick,
    worth,
)
from spreeze.tuner.problem import (
    BATCH,
    DEVICE,
    ENVS,
    INFERENCE_WORKERS,
    JOINT,
    LEARNER,
    PRECISION,
    RATIO,
    ROLLOUT,
    ROLLOUT_ENVS,
    ROLLOUT_SAMPLERS,
    SAMPLERS,
    THREADS,
    Knob,
    Measure,
    Room,
    Setting,
    TrialResult,
    TuningProblem,
    setting_text,
)

LEARNER_SHARE, SWEEP_SHARE = 0.45, 0.5
"""Share of the budget for learners alone, and share of what is left then for the number of samplers."""
_MOST_NEIGHBOURS = 4
_LEAST_GAIN = 0.05
_PROMISING, _PROMISING_RIVAL = 0.85, 0.6
"""Neighbours expected below this share of the choice are not measured; other kinds of learner, below the second."""
_SAME = 0.002
"""Settings whose expected rates differ by less are one and the same: a bound that does not bind."""
_ROUNDS = 3
_LEAST_S = 4.0
"""A round with everything running is not begun with less time than this."""
_KIND = (DEVICE, PRECISION, THREADS)
_STEPPED = (BATCH, SAMPLERS, RATIO, ROLLOUT_SAMPLERS, INFERENCE_WORKERS, ROLLOUT_ENVS)
"""Knobs whose next smaller and next larger values are neighbours."""

MAX_UPDATE_S = 1.0
"""A batch whose update takes longer is never chosen."""
THREAD_GAIN = 0.03
"""More threads are only tried while each doubling adds this share to the score."""
_KIND_GAIN = 0.10
"""``paper``: share of update frames/s that a less plain learner has to add."""
_NEAR = (0, 1, 2)
"""Batch sizes tried on further kinds of learner, as steps of the ladder from the best one so far."""
_CLIMB_S = 2.0
"""Less time than this is not worth another call."""
_FIRST_SIZES, _FURTHER_SIZES, _BESIDE_SIZES = 6, 2, 3
"""Steps of the ladder measured at once; of a pair of threads, beside one thread."""

Runners = tuple[tuple[Any, float], ...]


def search(problem: TuningProblem, measure: Measure, say: Callable[[TrialResult], None]) -> Search:
    """Measures and chooses within the budget; ``say`` hears each result as it is measured.

    Raises:
        ConfigError: a pinned value cannot work, or memory has no room; the message names the limit.
        WorkerError: nothing could be measured.
    """
    if problem.targets.objective == ROLLOUT:
        state = Search(problem, measure, say)
        state.sweep_rollouts()
    else:
        table.check_pins(problem)
        room = table.find_room(problem)
        state = Search(dataclasses.replace(problem, room=room), measure, say)
        keep_s = measure.seconds_left() * (1.0 - LEARNER_SHARE)
        learners = measure_learners(state.problem, measure, state.record, keep_s)
        state.limits += [*room.limits, *learners.limits]
        state.vary_learner(learners.first)
        state.sweep_samplers(learners, room, measure.seconds_left() * SWEEP_SHARE)
    state.check()
    state.vary_own()
    return state


# --- stage 1: learners alone ---


def measure_learners(
    problem: TuningProblem, measure: Measure, on_result: Callable[[TrialResult], None], until_s: float
) -> Learners:
    """Measures kind after kind and fits their curves; ``until_s`` of the budget have to be left afterwards.

    Raises:
        ConfigError: a pinned value cannot run.
        WorkerError: nothing could.
    """
    stage, kinds = Learners(problem, measure, on_result, until_s), table.learner_kinds(problem)
    plain = {kind[0]: kind for kind in reversed(kinds)}
    for position, kind in enumerate(plain.values()):
        pair = (*kind[:2], 2)
        beside = pair if pair in kinds and len(kinds) == 2 else None
        stage.climb(kind, share=1.0 / (len(plain) - position + (len(kinds) > len(plain))), beside=beside)
    for kind in kinds:
        if kind not in plain.values() and kind[1] == plain[kind[0]][1] and stage.threads_pay(kind):
            stage.near(kind)
    for kind in kinds:
        # Another precision is only tried with the best number of threads.
        if kind[1] != plain[kind[0]][1] and kind[2] == stage.best_threads(kind[0]):
            stage.near(kind)
    stage.conclude()
    return stage


class Learners:
    """Learners measured so far, the time that they may take, and what is known of them in the end."""

    curves: Mapping[Kind, CostCurve]
    sizes: Mapping[Kind, Sequence[int]]
    """Batch sizes that may be chosen, by kind; kinds without any are left out."""
    first: Setting
    """The best of them while the samplers are not known."""
    error: float
    """Relative standard error of a median."""

    def __init__(
        self, problem: TuningProblem, measure: Measure, on_result: Callable[[TrialResult], None], until_s: float
    ) -> None:
        self.problem, self.measure, self.on_result, self.until_s = problem, measure, on_result, until_s
        self.ladder = table.batch_sizes(problem)
        self.paper = problem.targets.objective == "paper"
        self.rates: dict[Kind, list[TrialResult]] = {}
        self.limits: list[str] = []

    def climb(self, kind: Kind, share: float, beside: Kind | None = None) -> None:
        """Measures every second batch until larger ones no longer pay, then those beside the best.

        In a ``share`` of the time that is left. ``beside`` is a kind to compare it with in the same turns: a machine
        whose speed changes from second to second tells nothing of two learners measured one after the other.
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
        best = self._best(kind)
        if best is not None and self.measure.seconds_left() - end_s > _CLIMB_S:
            at = self.ladder.index(best[1])
            seen = {rate.setting[BATCH] for rate in self.rates[kind]}
            between = [one for one in self.ladder[max(0, at - 1) : at + 2] if one not in seen]
            if between:
                self._measured(_settings(kind, between), self.measure.seconds_left() - end_s)

    def near(self, kind: Kind) -> None:
        """Measures a further kind of learner round the best batch of its device."""
        if self._left_s() < _CLIMB_S:
            self.limits.append(f"time was up before {_kind_text(kind)} could be tried")
            return
        known = {rate.setting for rate in self.rates.get(kind, ())}
        if new := [one for one in _settings(kind, self._sizes_to_try(kind)) if one not in known]:
            self._measured(new, self._left_s())

    def _left_s(self) -> float:
        return self.measure.seconds_left() - self.until_s

    def _measured(self, settings: Sequence[Setting], within_s: float) -> list[TrialResult]:
        found = self.measure.learner(settings, within_s=within_s, on_result=self.on_result)
        for rate in found:
            self.rates.setdefault(kind_of(rate.setting), []).append(rate)
        return found

    def _rising(self, kind: Kind) -> bool:
        """True while a larger batch may still be better."""
        own = [rate for rate in self.rates[kind] if rate.updates > 0]
        top = own[-1].setting[BATCH] if own else 0
        if self.paper:
            curve = fit_curve(own, 0.03)
            knee = paper_batch(curve.a, curve.b, self.problem.targets.gpu_target) if curve and curve.fitted else 2 * top
            return bool(knee * 2 > top)
        best = self._best(kind)
        return best is not None and best[1] >= top / 4

    def _best(self, kind: Kind) -> tuple[float, int] | None:
        """(score, batch) of the best rate of a kind."""
        objective = self.problem.targets.objective
        found = [(learner_score(objective, rate.setting[BATCH], rate.updates), rate.setting[BATCH])
                 for rate in self.rates.get(kind, ()) if rate.updates > 0]
        return max(found, default=None)

    def best_threads(self, device: str) -> int:
        """Threads of the best learner so far on a device; more only where they pay."""
        kinds = sorted(kind for kind in self.rates if kind[0] == device)
        found = [(best[0] / (1.0 + THREAD_GAIN) ** position, kind[2]) for position, kind in enumerate(kinds)
                 if (best := self._best(kind)) is not None]
        return max(found, default=(0.0, 1))[1]

    def threads_pay(self, kind: Kind) -> bool:
        """Whether half of these threads were better than a quarter of them; half that was skipped was not."""
        device, precision, threads = kind
        half, quarter = (self._best((device, precision, count)) for count in (threads // 2, threads // 4))
        return quarter is None or (half is not None and half[0] >= quarter[0] * (1.0 + THREAD_GAIN))

    def _sizes_to_try(self, kind: Kind) -> list[int]:
        """The whole ladder on a device not seen yet, else what lies near its best batch."""
        ladder, others = self.ladder, [other for other in self.rates if other[0] == kind[0]]
        seen = [found for other in others if (found := self._best(other)) is not None]
        if not seen:
            return list(ladder)
        if self.paper:
            top = ladder.index(max(rate.setting[BATCH] for other in others for rate in self.rates[other]
                                   if rate.updates > 0))
            return [ladder[at] for at in sorted({max(0, top - 3), max(0, top - 1), min(top + 1, len(ladder) - 1)})]
        centre = ladder.index(max(seen)[1])
        return [ladder[min(centre + step, len(ladder) - 1)] for step in _NEAR][: len(ladder) - centre]

    def conclude(self) -> None:
        """Fits curves to what was measured, and finds what may be chosen of it."""
        rates = [rate for found in self.rates.values() for rate in found]
        self.error = noise(rate.updates_per_s for rate in rates)
        fitted = {kind: fit_curve(found, self.error) for kind, found in self.rates.items()}
        curves = {kind: curve for kind, curve in fitted.items() if curve is not None}
        allowed = {kind: self._allowed(kind) for kind in curves}
        sizes: dict[Kind, Sequence[int]] = {
            kind: [batch for batch in self.ladder if ran[0] <= batch <= ran[-1]] for kind, ran in allowed.items() if ran
        }
        if not sizes:
            raise self._nothing_ran(rates)
        quick = {kind: [b for b in found if curves[kind].update_s(b) <= MAX_UPDATE_S] for kind, found in sizes.items()}
        if any(quick.values()):
            sizes = {kind: found for kind, found in quick.items() if found}
        else:
            self.limits.append(f"every batch that could be tried takes longer than {MAX_UPDATE_S:g} s an update")
            sizes = {kind: found[:1] for kind, found in sizes.items()}
        if self.paper:
            sizes = self._paper_sizes(curves, sizes)
        self.curves, self.sizes, self.first = curves, sizes, self._first(curves, sizes)

    def _allowed(self, kind: Kind) -> list[int]:
        """Batch sizes that ran, below the first that failed and within the device's memory."""
        room = next((device.memory_bytes for device in self.problem.devices if device.name == kind[0]), None)
        found: list[int] = []
        for rate in sorted(self.rates[kind], key=lambda one: one.setting[BATCH]):
            batch = rate.setting[BATCH]
            if rate.updates <= 0:
                self.limits.append(f"batch {batch} with {_kind_text(kind)}: {rate.failure or 'no updates'}")
                break
            if room is not None and rate.memory_bytes is not None and rate.memory_bytes > room * table.HEADROOM:
                self.limits.append(f"batch {batch} leaves no headroom in the memory of {kind[0]}")
                break
            found.append(batch)
        return found

    def _nothing_ran(self, rates: Sequence[TrialResult]) -> Exception:
        reasons = "; ".join(sorted({rate.failure or "no updates" for rate in rates})) or "no time to measure"
        pins = [f"{name} = {self.problem.pin(name)}" for name in (BATCH, *_KIND) if name in self.problem.pins]
        if pins and rates:
            return ConfigError(f"{', '.join(pins)} cannot work here: {reasons}; leave it to the tuner or set another")
        return WorkerError(f"tuning failed: no batch size could be measured: {reasons}")

    def _paper_sizes(
        self, curves: Mapping[Kind, CostCurve], sizes: Mapping[Kind, Sequence[int]]
    ) -> dict[Kind, Sequence[int]]:
        """The knee of the fastest kind of learner alone; the plainer one unless another is clearly faster."""
        best = 0.0
        chosen: dict[Kind, Sequence[int]] = {}
        cut = ""
        for kind, allowed in sizes.items():
            curve, batch, text = curves[kind], allowed[-1], ""
            if self.problem.pin(BATCH) is None and curve.fitted:
                knee = paper_batch(curve.a, curve.b, self.problem.targets.gpu_target)
                batch = min((one for one in allowed if one >= knee and one & (one - 1) == 0), default=allowed[-1])
                if knee > allowed[-1]:
                    text = f"the paper's rule asks for batch {knee}, {batch} is the largest that may be taken"
            frames = batch * curve.updates_per_s(batch)
            if not chosen or frames > best * (1.0 + _KIND_GAIN):
                best, chosen, cut = frames, {kind: [batch]}, text
        self.limits += [cut] if cut else []
        return chosen

    def _first(self, curves: Mapping[Kind, CostCurve], sizes: Mapping[Kind, Sequence[int]]) -> Setting:
        """The best learner on its own score, ties to the configured batch, then to the smaller and plainer."""
        objective, configured = self.problem.targets.objective, self.problem.configured[BATCH]
        scored = [(learner_score(objective, batch, curves[kind].updates_per_s(batch)), position, kind, batch)
                  for position, (kind, found) in enumerate(sizes.items()) for batch in found]
        near = [one for one in scored if one[0] >= max(scored)[0] * (1.0 - TIE)]
        _, _, kind, batch = min(near, key=lambda one: (one[3] != configured, one[3], one[1]))
        return learner_setting(kind, batch)


def _settings(kind: Kind, sizes: Sequence[int]) -> list[Setting]:
    return [learner_setting(kind, batch) for batch in sizes]


def _kind_text(kind: Kind) -> str:
    device, precision, threads = kind
    return f"{threads} learner threads on {device} in {precision}"


# --- stages 2 and 3: everything running ---


@dataclass
class Search:
    """What is known so far, and the steps that find out more."""

    problem: TuningProblem
    measure: Measure
    say: Callable[[TrialResult], None]
    results: list[TrialResult] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    """How the check of the neighbours changed the choice."""
    learners: Learners | None = None
    sharing: Sharing | None = None
    """The model, where learners were measured alone."""
    error: float = 0.03
    """Relative standard error of a median."""
    expected: dict[Setting, Scored] = field(default_factory=dict)
    """Everything that could be chosen, as the model forecasts it or, without a model, as the sweeps measured it."""
    own: dict[str, Any] = field(default_factory=dict)
    """Values of other modules' knobs."""
    own_runners: dict[str, Runners] = field(default_factory=dict)
    centre: Setting = field(init=False)
    """The choice before other modules' knobs were varied."""
    chosen: Scored = field(init=False)
    measured: bool = True
    """False if the chosen setting itself was not measured."""

    def __post_init__(self) -> None:
        self.own = {knob.name: self.problem.configured[knob.name] for knob in self._own_knobs()}

    def record(self, result: TrialResult) -> None:
        """Scores a result, keeps it and reports it."""
        if result.failure is None:
            score = (learner_score(self.problem.targets.objective, result.setting[BATCH], result.updates)
                     if result.stage == LEARNER else measured_worth(self.problem, result).score)
            result = dataclasses.replace(result, score=score)
        self.results.append(result)
        self.say(result)

    def _joint(self, settings: Sequence[Setting], within_s: float) -> list[TrialResult]:
        return self.measure.joint(settings, within_s=within_s, on_result=self.record)

    def sweep_rollouts(self) -> None:
        """Stage 2 without a model: varies one knob after the other around the best so far, then the first once more.

        Raises:
            ConfigError: the configured setting itself has no room, or its numbers do not go together.
            WorkerError: nothing could be measured.
        """
        problem = self.problem
        here = table.fit_rollout(problem, problem.configured)
        if here is None:
            raise ConfigError(f"{setting_text(problem, problem.configured)}: they do not go together, or memory has no "
                              "room; set fewer of them")
        knobs = [knob for knob in problem.knobs if knob.trial == JOINT and not knob.own]
        knobs += knobs[:1]
        for number, knob in enumerate(knobs):
            left_s, seen = self.measure.seconds_left(), {result.setting for result in self.results}
            wanted = [one for one in (here, *knob.moves(problem, here)) if one not in seen]
            if wanted and left_s > 0.0:
                found = self._joint(wanted, left_s / (len(knobs) - number))
                self.expected |= {one.setting: measured_worth(problem, one) for one in found if one.ran}
            here = pick(problem, self.expected.values()).setting if self.expected else here
        if not self.expected:
            failures = [result.failure for result in self.results if result.failure]
            raise WorkerError(f"no setting of the mode could be measured: {(failures or ['no time was left'])[0]}")

    def sweep_samplers(self, learners: Learners, room: Room, within_s: float) -> None:
        """Stage 2 with a model: samplers beside the best learner, unthrottled; all else is forecast.

        Raises:
            ConfigError: what the user pinned cannot run.
            WorkerError: nothing could.
        """
        problem, first = self.problem, learners.first
        base = Setting({**first, **self.own, ENVS: room.envs_per_sampler.value, RATIO: 0.0})
        sweep = self._joint([base.but(SAMPLERS, count) for count in table.sampler_ladder(problem, first)],
                            max(within_s, 1.0))
        good = [result for result in sweep if result.ran]
        if sweep and not good:
            raise _nothing_ran(problem, sweep)
        self.learners = learners
        self.error = max(learners.error, noise(values for one in good
                                               for values in (one.updates_per_s, one.env_steps_per_s)))
        self.sharing = fit_sharing(problem, learners.curves, good, self.error)
        # Never more busy threads than ran together.
        busy = max((one.setting[SAMPLERS] for one in good), default=1) + first[THREADS]
        settings = [one for one in self._all_settings(base, learners)
                    if one[SAMPLERS] + one[THREADS] <= busy or one[SAMPLERS] in (1, problem.pin(SAMPLERS))]
        failed = min((one.setting[SAMPLERS] for one in sweep if one.failure), default=math.inf)
        settings = [one for one in settings if one[SAMPLERS] < failed] or settings
        self.limits += [f"{one.setting[SAMPLERS]} samplers: {one.failure}" for one in sweep if one.failure]
        if not sweep:
            self.limits.append("time was up before samplers could be measured: chosen from the facts")
        self.expected = {one: self.forecast(one) for one in settings}

    def _all_settings(self, base: Setting, learners: Learners) -> list[Setting]:
        """Every kind of learner with its batch sizes, samplers and ratios."""
        found = []
        for kind in learners.curves:
            for batch in learners.sizes.get(kind, ()):
                here = Setting({**base, **learner_setting(kind, batch)})
                counts, low = table.sampler_counts(self.problem, here), table.ratios(self.problem, here)
                found += [Setting({**here, SAMPLERS: count, RATIO: ratio}) for count in counts for ratio in low]
        return found

    def forecast(self, setting: Setting) -> Scored:
        """What is expected of a setting: by the model, or as it was measured."""
        if self.sharing is None:
            return self.expected[setting]
        return worth(self.problem, setting, *self.sharing.forecast(setting))

    def check(self) -> None:
        """Stage 3: hill-climbing from the expected best, by gains as expectation and measurement together tell them."""
        self.chosen = pick(self.problem, self.expected.values())
        known: dict[Setting, Scored] = {}
        own = sum(knob.trial == JOINT for knob in self._own_knobs())
        keep_s = self.measure.seconds_left() * own / (own + 1)
        cost_s = _LEAST_S
        for _ in range(_ROUNDS):
            left_s = self.measure.seconds_left() - keep_s
            wanted = [self.chosen.setting, *self._neighbours(known)]
            if len(wanted) == 1 and (self.chosen.setting in known or self.sharing is None):
                break
            if left_s < cost_s:
                if not known and self.sharing is not None:
                    self.limits.append("time was up before the neighbours of the choice were measured")
                break
            found = self._joint(wanted, left_s - 1.0)
            cost_s = max(_LEAST_S, left_s + keep_s - self.measure.seconds_left())
            before = self.chosen
            known |= self._move(found)
            if self.chosen.setting == before.setting:
                break
            self.moved.append(_move_text(self.problem, before, self.chosen))
        self.chosen = known.get(self.chosen.setting, self.chosen)
        self.centre = self.chosen.setting
        self.measured = self.centre in known or self.sharing is None

    def _move(self, found: Sequence[TrialResult]) -> dict[Setting, Scored]:
        """Moves the choice after a round; returns the scores that were measured."""
        problem, here = self.problem, self.chosen.setting
        failed = {one.setting for one in found if one.failure or (one.updates <= 0 and one.stage == JOINT)}
        self.expected = {one: score for one, score in self.expected.items() if one not in failed} or self.expected
        self.limits += [f"{setting_text(problem, one.setting)}: {one.failure or 'no updates'}"
                        for one in found if one.setting in failed]
        now = {one.setting: measured_worth(problem, one) for one in found if one.setting not in failed}
        if here in failed:
            left = [score for one, score in self.expected.items() if self._smaller(one, here)]
            self.chosen = (max(now.values(), key=lambda one: one.score, default=None)
                           or pick(problem, left or self.expected.values()))
        elif here in now:
            gains = self._gains([one for one in found if one.setting in now], here, self.expected)
            self.chosen = now[_clearly_best(gains, here)]
        return now

    def _gains(
        self, good: Sequence[TrialResult], here: Setting, expected: Mapping[Setting, Scored]
    ) -> dict[Setting, float]:
        own = next(result for result in good if result.setting == here)
        return bayes_update(self.problem, good, own, expected, self.error)

    def _smaller(self, one: Setting, other: Setting) -> bool:
        """Whether a setting asks for no more than another one that failed, and for no more than what ran."""
        if one == other or BATCH not in one:
            return one != other
        ran = max((result.setting[SAMPLERS] for result in self.results
                   if result.stage == JOINT and not result.failure), default=1)
        return bool(one[BATCH] <= other[BATCH] and one[SAMPLERS] <= min(other[SAMPLERS], ran))

    def _neighbours(self, known: Mapping[Setting, Scored]) -> list[Setting]:
        """The most promising settings that differ in one knob by one step and were not measured yet.

        Of each other kind of learner it is the one expected to be the best: the model knows kinds apart least well.
        """
        centre = self.chosen.setting
        here = self.expected.get(centre)
        around = dict.fromkeys(self._steps(centre), _PROMISING)
        around |= dict.fromkeys(_rivals(self.expected.values(), centre), _PROMISING_RIVAL)
        promising = [self.expected[one] for one, share in around.items() if one in self.expected and one not in known
                     and (here is None or _differs(self.expected[one], here, share))]
        promising.sort(key=lambda one: -one.score)
        return [one.setting for one in promising[:_MOST_NEIGHBOURS]]

    def _steps(self, centre: Setting) -> list[Setting]:
        """The next smaller and the next larger value of each knob, the kind of learner as it is."""
        found: list[Setting | None] = []
        same = [one for one in self.expected if all(one.get(name) == centre.get(name) for name in _KIND)]
        for knob in self.problem.knobs:
            if knob.name in _STEPPED and knob.name in centre:
                value = centre[knob.name]
                values = {one[knob.name] for one in same}
                beside = [max((one for one in values if one < value), default=None),
                          min((one for one in values if one > value), default=None)]
                found += [knob.fit(self.problem, centre.but(knob.name, one)) for one in beside if one is not None]
        return [one for one in found if one is not None]

    # --- knobs of other modules ---

    def _own_knobs(self) -> list[Knob]:
        return [knob for knob in self.problem.knobs if knob.own]

    def vary_learner(self, first: Setting) -> None:
        """Those that the learner alone tells, around the best learner."""
        for knob in self._own_knobs():
            if knob.trial == LEARNER:
                here = Setting({**first, knob.name: self.own[knob.name]})
                found = self._vary(knob, here, self.measure.seconds_left() / 4)
                self.own[knob.name] = here[knob.name] if found is None else found.setting[knob.name]

    def vary_own(self) -> None:
        """Those for which everything has to run, one after the other around the choice."""
        knobs = [knob for knob in self._own_knobs() if knob.trial == JOINT]
        for number, knob in enumerate(knobs):
            found = self._vary(knob, self.chosen.setting, self.measure.seconds_left() / (len(knobs) - number))
            if found is not None:
                self.chosen, self.measured = measured_worth(self.problem, found), True

    def _vary(self, knob: Knob, here: Setting, within_s: float) -> TrialResult | None:
        """Measures a knob's candidates together with what is there, and returns the best; None where nothing ran."""
        wanted = knob.moves(self.problem, here)
        if wanted and within_s < _LEAST_S:
            self.limits.append(f"time was up before {knob.name} could be varied")
        if not wanted or within_s < _LEAST_S:
            return None
        ask = self.measure.learner if knob.trial == LEARNER else self.measure.joint
        found = ask([here, *wanted], within_s=within_s, on_result=self.record)
        self.limits += [f"{knob.text(one.setting[knob.name])}: {one.failure}" for one in found if one.failure]
        good = {one.setting: one for one in found if one.ran}
        if here not in good:
            return max(good.values(), key=lambda one: (one.env_steps, one.updates), default=None)
        even = Scored(setting=here, score=1.0, updates_per_s=0.0, env_steps_per_s=0.0)
        gains = self._gains(list(good.values()), here, dict.fromkeys(good, even))
        shares = [(one[knob.name], math.exp(gain)) for one, gain in gains.items()]
        best = _clearly_best(gains, here)
        own = math.exp(gains.get(best, 0.0))
        self.own_runners[knob.name] = tuple(sorted(
            ((value, share / own) for value, share in [*shares, (here[knob.name], 1.0)] if value != best[knob.name]),
            key=lambda one: -one[1]))
        return good[best]


def _clearly_best(gains: Mapping[Setting, float], here: Setting) -> Setting:
    """The setting to go on with: another one only for a clear gain."""
    best = max(gains, key=lambda one: gains[one], default=here)
    return best if gains.get(best, 0.0) > math.log1p(_LEAST_GAIN) else here


def _nothing_ran(problem: TuningProblem, results: Sequence[TrialResult]) -> Exception:
    reasons = "; ".join(sorted({one.failure or "no env step or no update" for one in results}))
    if problem.pin(SAMPLERS) is not None:
        return ConfigError(f"{SAMPLERS} = {problem.pin(SAMPLERS)} cannot work here: {reasons}; set another")
    return WorkerError(f"tuning failed: samplers could not be measured beside the learner: {reasons}")


def _differs(one: Scored, here: Scored, share: float) -> bool:
    """Whether a setting is promising and not the same as the choice in all but name."""
    rates = (one.updates_per_s, here.updates_per_s), (one.env_steps_per_s, here.env_steps_per_s)
    same = all(abs(a - b) <= _SAME * b for a, b in rates)
    same = same and all(one.setting.get(name) == here.setting.get(name) for name in (*_KIND, BATCH))
    return one.score >= share * here.score and not same


def _rivals(expected: Iterable[Scored], centre: Setting) -> list[Setting]:
    """The best expected setting of each other kind of learner."""
    best: dict[Kind, Scored] = {}
    for score in expected if BATCH in centre else ():
        kind = kind_of(score.setting)
        if kind != kind_of(centre) and (kind not in best or score.score > best[kind].score):
            best[kind] = score
    return [score.setting for score in best.values()]


def _move_text(problem: TuningProblem, before: Scored, after: Scored) -> str:
    one, other = setting_text(problem, after.setting), setting_text(problem, before.setting)
    return f"{one} in place of {other}" if before.score <= 0 else f"{one} measured better than {other}"
