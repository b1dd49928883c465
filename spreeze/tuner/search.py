"""Chooses the settings: measures learners alone, then samplers with a learner, then neighbours of the best."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from spreeze.errors import ConfigError, WorkerError
from spreeze.tuner import knobs, model
from spreeze.tuner.explanation import choices_of
from spreeze.tuner.measure import Measurer
from spreeze.tuner.model import Cost, Scored, Sharing, kind_of, paper_batch
from spreeze.tuner.problem import (
    BATCH,
    DEVICE,
    ENVS,
    INFERENCE_WORKERS,
    JOINT,
    LEARNER,
    PRECISION,
    RATIO,
    RATIO_MAX,
    ROLLOUT,
    SAMPLERS,
    SCHEMA,
    THREADS,
    Choice,
    Knob,
    OnResult,
    Setting,
    TrialResult,
    TuningProblem,
    setting_text,
    spread_of,
)

_LEARNER_FRACTION, _SWEEP_FRACTION = 0.45, 0.5
"""Fraction of the budget for learners alone, and fraction of what is left then for the number of samplers."""
MAX_UPDATE_S = 1.0  # a batch whose update takes longer is never chosen
_MAX_NEIGHBOURS, _FEW_NEIGHBOURS = 4, 2
_PROMISING, _PROMISING_RIVAL = 0.85, 0.6
"""Neighbours expected below this share of the choice are not measured; other kinds of learner, below the second."""
_MIN_GAIN = 0.05  # Only a setting that measures this much better replaces the choice.
_ROLLOUT_GAIN = 0.10  # Least gain of a setting that changes the rollouts, for which the profile was made.
_DISTURBED = 0.8  # A setting below this share of its earlier rate is measured again: other programs were active.
_MAX_SPREAD = 0.75
"""A result whose repeats scatter by a larger share of their median is measured again, and not used if it still does."""
_KIND_GAIN = 0.10  # ``paper``: share of update frames/s that a less plain learner has to add.
_MIN_S = 4.0  # Least time for a round with everything running.
_CLIMB_S = 1.0  # Least time for a measurement of learners alone.
_AGAIN_S = 8.0  # Least time for another round of scattered results.
_STRIDE = 2  # A line needs few points: only every second batch of the ladder is measured.
_THREADS_HELP = 0.3  # More threads are tried on a device that reaches this share of the best one's score with one.
_SIZES = 3  # Batches of each kind of learner measured at once.
_COST_ERROR = 0.02  # A row's cost is unknown if it adds less than this share to the time of the largest batch.
_CORES_BUSY = 0.8  # Share of the cores in use from which more processes do not help.
_AS_MEASURED = 0.99  # Share of measured rates that a run keeps, above which no note is needed.


def tune(
    problem: TuningProblem, measure: Measurer, on_result: OnResult, busy: Callable[[], bool] = lambda: False
) -> Search:
    """Measures and chooses within the budget; ``on_result`` gets each result as it is measured.

    ``busy`` returns whether other programs have disturbed the measurements so far. Without a usable measurement the
    configured values are the choice, and ``Search.doubts`` gives the reason. A ConfigError names the limit of a pin or
    of memory; a WorkerError says that every candidate failed by an error of its own.
    """
    search = Search(problem, measure, on_result, busy)
    try:
        if problem.objective == ROLLOUT:
            search.start_varying()
        else:
            search.measure_learners()
            search.sweep_samplers()
            search.check()
        search.vary()
    except NothingMeasured as error:
        search.fall_back(str(error))
    search.conclude()
    return search


class NothingMeasured(Exception):
    """Too little could be measured for a choice, for lack of time or because of other load; the text has the reason."""


class Rounds:
    """Settings that were measured in the same turns, some of them again in a later round."""

    def __init__(self) -> None:
        self._rounds: list[dict[Setting, TrialResult]] = []

    def add(self, results: Iterable[TrialResult]) -> None:
        self._rounds.append({result.setting: result for result in results})

    def newest(self) -> dict[Setting, TrialResult]:
        """The newest result of each setting, one that ran before one that failed."""
        results: dict[Setting, TrialResult] = {}
        for latest in self._rounds:
            results |= {setting: result for setting, result in latest.items() if result.ran or setting not in results}
        return results

    def pair(self, current: Setting, other: Setting) -> tuple[TrialResult, TrialResult] | None:
        """Results of both settings out of the newest round in which both ran; None without one."""
        pairs = [
            (results[current], results[other]) for results in self._rounds if current in results and other in results
        ]
        return next((pair for pair in reversed(pairs) if pair[0].ran and pair[1].ran), None)


def is_steady(result: TrialResult) -> bool:
    """True if a result can be used: it ran, and its repeats agree."""
    return result.ran and (result.spread or 0.0) <= _MAX_SPREAD


class Search:
    """Search: results so far, the steps that measure more, and in the end the choice with its reasons."""

    choices: dict[str, Choice]  # choices by name of the knob, in display order
    chosen: Scored
    centre: Setting  # the choice before other modules' knobs were varied
    sharing: Sharing  # the model of modes with replay
    measured = False  # True if the chosen setting itself was measured
    cost: Cost | None = None  # cost of an update of the chosen learner; None if fewer than two batches ran
    paper_batch: int | None = None
    """Batch size by the Spreeze paper's rule; None if the cost of a row is lost in the noise."""
    fell_back = False  # True if the choice is the configured setting, because too little could be measured

    def __init__(
        self, problem: TuningProblem, measure: Measurer, on_result: OnResult, busy: Callable[[], bool] = lambda: False
    ) -> None:
        """Measures nothing yet; a ConfigError as ``tune``."""
        if problem.objective != ROLLOUT:
            knobs.check_pins(problem)
            problem = dataclasses.replace(problem, memory_plan=knobs.find_memory_plan(problem))
        self.problem, self.measure, self.on_result, self.busy = problem, measure, on_result, busy
        self.results: list[TrialResult] = []
        self.doubts: list[str] = []  # Why another measurement may find another choice, each in a sentence.
        without_effect = {SAMPLERS, ENVS, INFERENCE_WORKERS, RATIO_MAX, *((RATIO,) if problem.balanced else ())}
        always = {BATCH, RATIO} if problem.objective != ROLLOUT else {*problem.configured}
        always = {*always, *(knob.name for knob in problem.knobs if knob.varied_last)} - without_effect
        self.learning_values = {name: value for name, value in problem.configured.items() if name in always}
        """Values on which learning depends, as configured or as close to that as this machine allows."""
        self.limits: list[str] = list(problem.memory_plan.limits) if problem.memory_plan else []
        """Bounds that cut the choice short, each in a sentence."""
        self.notes: list[str] = []  # Notes on changes in the algorithm, on gains, and on missing measurements.
        self.rates: dict[Setting, list[TrialResult]] = {}  # Learners measured alone.
        self.sizes: dict[Setting, list[int]] = {}  # Batch sizes that may be chosen.
        self.expected: dict[Setting, Scored] = {}
        """Everything that could be chosen in a mode with replay, as the model forecasts it."""
        self.varied_last = {knob.name: problem.configured[knob.name] for knob in problem.knobs if knob.varied_last}
        """Values of the knobs that the model does not know."""
        self.checked = Rounds()  # The expected best and its neighbours, measured in the same turns.
        self.runners: dict[str, tuple[Setting, list[Setting]]] = {}
        """Varied knob -> the best setting of its turns, and those with other values of the knob."""

    def _record(self, result: TrialResult) -> None:
        if result.failure is None:
            result = dataclasses.replace(result, score=self._score(result))
        self.results.append(result)
        self.on_result(result)

    def _score(self, result: TrialResult) -> float:
        if result.trial == LEARNER:
            return model.learner_score(self.problem.objective, result.setting[BATCH], result.updates)
        return model.measured_worth(self.problem, result).score

    def _joint(self, settings: Sequence[Setting], within_s: float) -> list[TrialResult]:
        return self.measure.joint(settings, within_s=within_s, on_result=self._record)

    # --- scores of results ---

    def _repeat_scattered(
        self,
        measure: Callable[[Sequence[Setting], float], list[TrialResult]],
        results: list[TrialResult],
        within_s: float,
    ) -> list[TrialResult]:
        """The results; scattered ones are measured once more as far as time allows."""
        scattered = [result.setting for result in results if result.ran and not is_steady(result)]
        if not scattered or within_s < _CLIMB_S:
            return results
        repeats = {result.setting: result for result in measure(scattered, within_s) if result.ran}
        pairs = [(result, repeats.get(result.setting, result)) for result in results]
        return [new if spread_of([new]) <= spread_of([old]) else old for old, new in pairs]

    def _changes_learning(self, current: Setting, other: Setting) -> bool:
        """True if the other setting moves a value, on which learning depends, away from the configured one."""
        return any(
            other[name] not in (current[name], value) for name, value in self.learning_values.items() if name in other
        )

    def _is_clearly_better(self, rounds: Rounds, current: Setting, other: Setting, min_gain: float) -> bool:
        """True if the gain is clear in the same turns; if it affects learning, above the spread, without other load."""
        gain, spread = self.gain_over(rounds, current, other)
        if self._changes_learning(current, other):
            return gain > max(min_gain, spread) and not self.busy()
        return gain > min_gain and spread <= _MAX_SPREAD

    def gain_over(self, rounds: Rounds, current: Setting, other: Setting) -> tuple[float, float]:
        """(gain, spread of the results) of another setting, both as shares; infinitely bad if not measured together."""
        pair = rounds.pair(current, other)
        if pair is None:
            return -math.inf, math.inf
        return model.gain(self.problem, pair[1], pair[0]) - 1.0, spread_of(pair)

    def _doubtful(self, rounds: Rounds, current: Setting, min_gain: float) -> list[Setting]:
        """Settings to measure again: they scatter too much, or gain less than the scatter though learning changes."""
        doubtful = []
        for other in rounds.newest():
            gain, spread = self.gain_over(rounds, current, other)
            changes, reverts = self._changes_learning(current, other), self._changes_learning(other, current)
            if reverts and gain > -1.0:
                gain = 1.0 / (1.0 + gain) - 1.0  # of what is there
            unclear = min_gain < gain <= spread and (changes or reverts)
            if other != current and rounds.pair(current, other) and (spread > _MAX_SPREAD or unclear):
                doubtful.append(other)
        return doubtful

    def _best_of(self, rounds: Rounds, current: Setting, min_gain: float, expected: Setting | None = None) -> Setting:
        """The setting to continue with: another one only for a clear gain; the knobs decide ties."""
        better = [
            Scored(other, 1.0 + self.gain_over(rounds, current, other)[0])
            for other in rounds.newest()
            if other != current
            and self._is_clearly_better(rounds, current, other, 0.0 if other == expected else min_gain)
        ]
        return model.pick(self.problem, better).setting if better else current

    # --- learners alone ---

    def measure_learners(self) -> None:
        """Measures kind after kind, fits costs and finds the batch sizes that may be chosen; raises as ``tune``."""
        until_s = self.measure.seconds_left() * (1.0 - _LEARNER_FRACTION)
        self.ladder, kinds = knobs.batch_sizes(self.problem), knobs.learner_kinds(self.problem)
        plain = [kind for kind in kinds if kind[THREADS] == 1] if len({kind[DEVICE] for kind in kinds}) > 1 else kinds
        self._climb(plain, until_s)
        scores = [(self._score(result), result.setting[DEVICE]) for result in self._learner_results()]
        best, _ = max(scores)  # there are some: the first setting is measured in any case
        near = {device for score, device in scores if score >= _THREADS_HELP * best}
        self._climb([kind for kind in kinds if kind not in plain and kind[DEVICE] in near], until_s)
        untried = [kind for kind in kinds if kind not in self.rates]
        self.limits += [f"out of time before {_kind_text(kind)} could be tried" for kind in untried]
        self._settle_learners(until_s)
        self.costs: dict[Setting, Cost] = {}
        for kind, results in self.rates.items():
            steady = [result for result in results if is_steady(result)]
            ran = [(result.setting[BATCH], 1.0 / result.updates) for result in steady or results if result.updates > 0]
            if ran:
                self.costs[kind] = model.fit_cost(ran)
                self.sizes[kind] = self._sizes_that_ran(kind)
        self._bound_sizes()
        self.first = self._first()
        for knob in self.problem.knobs:
            if knob.varied_last and knob.trial == LEARNER:
                current = Setting({**self.first, knob.name: self.varied_last[knob.name]})
                varied = self._vary(knob, current, self.measure.seconds_left() / 4)
                self.varied_last[knob.name] = (varied.setting if varied else current)[knob.name]

    def _climb(self, kinds: Sequence[Setting], until_s: float) -> None:
        """Measures kinds in the same turns; larger batches while they may be better and time is left."""
        sizes = sorted({*self.ladder[::_STRIDE], self.ladder[-1]})
        for at in range(0, len(sizes), _SIZES):
            rising = [kind for kind in kinds if at == 0 or self._larger_may_be_better(kind, sizes[at - 1])]
            wanted = [kind.replace(BATCH, batch) for kind in rising for batch in sizes[at : at + _SIZES]]
            left_s = self.measure.seconds_left() - until_s
            if wanted and (at == 0 or left_s > _CLIMB_S):
                for rate in self._measure_alone(wanted, left_s):
                    self.rates.setdefault(kind_of(rate.setting), []).append(rate)

    def _learner_results(self) -> list[TrialResult]:
        return [result for rates in self.rates.values() for result in rates]

    def _measure_alone(self, settings: Sequence[Setting], within_s: float) -> list[TrialResult]:
        return self.measure.learner(settings, within_s=within_s, on_result=self._record)

    def _settle_learners(self, until_s: float) -> None:
        """Measures scattered results once more; NothingMeasured if most of them still scatter."""
        results = self._repeat_scattered(
            self._measure_alone, self._learner_results(), self.measure.seconds_left() - until_s
        )
        self.rates = {kind: [result for result in results if kind_of(result.setting) == kind] for kind in self.rates}
        ran = [result for result in results if result.ran]
        if ran and sum(map(is_steady, ran)) < len(ran) / 2:
            raise NothingMeasured(f"update rates of the learner vary by {_typical(ran)}")

    def _larger_may_be_better(self, kind: Setting, largest: int) -> bool:
        """True while batches above ``largest`` may be better; of the kinds on one device only for the fastest."""
        results = self.rates.get(kind, [])
        if not results or results[-1].setting[BATCH] < largest or any(result.updates <= 0 for result in results):
            return False
        fastest = results[-1].updates
        others = [result for other, rates in self.rates.items() if other[DEVICE] == kind[DEVICE] for result in rates]
        if any(result.setting[BATCH] == largest and result.updates > fastest for result in others):
            return False
        if self.problem.objective == "paper":
            cost = model.fit_cost([(result.setting[BATCH], 1.0 / result.updates) for result in results])
            return not cost.b or 2 * paper_batch(*cost, self.problem.targets.gpu_target) > largest
        return bool(max(results, key=self._score).setting[BATCH] >= largest / 4)

    def _sizes_that_ran(self, kind: Setting) -> list[int]:
        """Batch sizes below the first that failed and within the device's memory."""
        free = next((device.memory_bytes for device in self.problem.devices if device.name == kind[DEVICE]), None)
        ran: list[int] = []
        for rate in sorted(self.rates[kind], key=lambda result: result.setting[BATCH]):
            batch = rate.setting[BATCH]
            if rate.updates <= 0:
                self.limits.append(f"batch {batch} with {_kind_text(kind)}: {rate.failure or 'no updates'}")
                break
            if free is not None and (rate.memory_bytes or 0) > free * knobs.HEADROOM:
                self.limits.append(f"batch {batch} leaves no headroom in the memory of {kind[DEVICE]}")
                break
            ran.append(batch)
        return [batch for batch in self.ladder if ran and ran[0] <= batch <= ran[-1]]

    def _bound_sizes(self) -> None:
        """Leaves out slow updates; for ``paper`` all but the batch of its rule on the fastest kind."""
        sizes = {kind: batches for kind, batches in self.sizes.items() if batches}
        if not sizes:
            names = (BATCH, DEVICE, PRECISION, THREADS)
            self._raise_nothing_ran(self._learner_results(), names, "no batch size could be measured")
        quick = {
            kind: [batch for batch in batches if self.costs[kind].update_s(batch) <= MAX_UPDATE_S]
            for kind, batches in sizes.items()
        }
        if not any(quick.values()):
            self.limits.append(f"every measured batch size takes longer than {MAX_UPDATE_S:g} s per update")
            quick = {kind: batches[:1] for kind, batches in sizes.items()}
        self.sizes = {kind: batches for kind, batches in quick.items() if batches}
        if self.problem.objective == "paper":
            self._keep_paper_batch()

    def _keep_paper_batch(self) -> None:
        best, limit = 0.0, ""
        for kind, allowed in list(self.sizes.items()):
            cost, batch, text = self.costs[kind], allowed[-1], ""
            if self.problem.pin(BATCH) is None and cost.b > 0.0:
                by_rule = paper_batch(*cost, self.problem.targets.gpu_target)
                batch = min((size for size in allowed if size >= by_rule and size & (size - 1) == 0), default=batch)
                if self.busy() and self.problem.configured[BATCH] in allowed:
                    batch = self.problem.configured[BATCH]
                    text = "the batch size is kept, because other programs were active"
                elif by_rule > allowed[-1]:
                    text = f"the paper's rule selects batch {by_rule}, {batch} is the largest possible"
            frames = batch / cost.update_s(batch)
            if frames > best * (1.0 + _KIND_GAIN):
                best, limit, self.sizes = frames, text, {kind: [batch]}
        self.limits += [limit] if limit else []

    def _first(self) -> Setting:
        """The best learner on its own score, ties to the configured batch, then to the smaller and plainer."""
        objective, configured = self.problem.objective, self.problem.configured[BATCH]
        scored = [
            (model.learner_score(objective, batch, 1.0 / self.costs[kind].update_s(batch)), position, kind, batch)
            for position, (kind, batches) in enumerate(self.sizes.items())
            for batch in batches
        ]
        near = [entry for entry in scored if entry[0] >= max(scored)[0] * (1.0 - model.TIE)]
        _, _, kind, batch = min(near, key=lambda entry: (entry[3] != configured, entry[3], entry[1]))
        return kind.replace(BATCH, batch)

    def _raise_nothing_ran(self, results: Sequence[TrialResult], names: Sequence[str], what: str) -> NoReturn:
        """Raises the error for ``results`` of which none ran; the user's values of knobs ``names`` may be the cause."""
        reasons = "; ".join(sorted({result.failure or "no env step or no update" for result in results}))
        if all(result.starved or result.failure is None for result in results):
            raise NothingMeasured(f"{what}: {reasons or 'no time to measure'}")
        pins = [f"{name} = {self.problem.pin(name)}" for name in names if name in self.problem.pins]
        if pins and results:
            raise ConfigError(f"{', '.join(pins)} does not work here: {reasons}; change it, or let the tuner choose")
        raise WorkerError(f"tuning failed: {what}: {reasons}")

    # --- everything running, with a model ---

    def sweep_samplers(self) -> None:
        """Measures samplers beside the best learner without a rate limit, and forecasts all that may be chosen."""
        problem, first = self.problem, self.first
        envs = problem.known_memory_plan.envs_per_sampler.value
        base = Setting({**first, **self.varied_last, ENVS: envs, RATIO: 0.0})
        sweep = self._joint(
            [base.replace(SAMPLERS, count) for count in knobs.sampler_counts_to_measure(problem, first)],
            max(self.measure.seconds_left() * _SWEEP_FRACTION, 1.0),
        )
        if any(result.ran and not is_steady(result) for result in sweep) and self.measure.seconds_left() >= _AGAIN_S:
            sweep = self._repeat_scattered(self._joint, sweep, self.measure.seconds_left() * _SWEEP_FRACTION)
        good = [result for result in sweep if is_steady(result)]
        scattered = [result for result in sweep if result.ran and not is_steady(result)]
        if scattered and not good:
            raise NothingMeasured(f"rates of samplers with the learner vary by {_typical(scattered)}")
        if not sweep and self.busy():
            raise NothingMeasured("out of time before samplers could be measured with the learner")
        if sweep and not good:
            self._raise_nothing_ran(sweep, (SAMPLERS,), "samplers could not be measured with the learner")
        self.swept = good
        self.sharing = model.fit_sharing(problem, self.costs, good)
        settings = []
        for kind, sizes in self.sizes.items():
            for batch in sizes:
                setting = Setting({**base, **kind, BATCH: batch})
                pairs = itertools.product(knobs.sampler_counts(problem, setting), knobs.ratios(problem, setting))
                settings += [Setting({**setting, SAMPLERS: count, RATIO: ratio}) for count, ratio in pairs]
        # Never more busy threads than ran together.
        busy = max((result.setting[SAMPLERS] for result in good), default=1) + first[THREADS]
        failed = min((result.setting[SAMPLERS] for result in sweep if result.failure), default=math.inf)
        always = (1, problem.pin(SAMPLERS))
        settings = [one for one in settings if one[SAMPLERS] + one[THREADS] <= busy or one[SAMPLERS] in always]
        settings = [setting for setting in settings if setting[SAMPLERS] < failed] or settings
        self.limits += [f"{result.setting[SAMPLERS]} samplers: {result.failure}" for result in sweep if result.failure]
        if not sweep:
            self.limits.append("out of time before samplers could be measured: chosen by estimate")
        self.expected = {setting: self.forecast(setting) for setting in settings}
        for name, value in self.learning_values.items():
            if name in (BATCH, RATIO):
                values = {setting[name] for setting in settings}
                self.learning_values[name] = min(values, key=lambda one: (_distance(one, value), one))

    def _pick(self, expected: Sequence[Scored]) -> Scored:
        """The best forecast; batch size and ratio each change only for a gain above the noise of the measurements."""
        results = [result for result in self._learner_results() if result.ran]
        needed = math.inf if self.busy() else max(_middle_spread(results), _middle_spread(self.swept))
        best: dict[tuple[Any, ...], float] = {}
        for scored in expected:
            values = self._learning_values_of(scored.setting)
            best[values] = max(best.get(values, 0.0), scored.score)
        configured = self._learning_values_of(self.learning_values)

        def pays(scored: Scored) -> bool:
            values = self._learning_values_of(scored.setting)
            points = itertools.product(*({*pair} for pair in zip(values, configured, strict=True)))
            return all(scored.score > best.get(point, 0.0) * (1.0 + needed) for point in points if point != values)

        return model.pick(self.problem, [scored for scored in expected if pays(scored)] or expected)

    def _learning_values_of(self, setting: Mapping[str, Any]) -> tuple[Any, ...]:
        """Batch size and ratio of a setting, as far as learning depends on them."""
        return tuple(setting[name] for name in (BATCH, RATIO) if name in self.learning_values)

    def forecast(self, setting: Setting) -> Scored:
        return model.worth(self.problem, setting, *self.sharing.forecast(setting))

    def check(self) -> None:
        """Measures the expected best, which may affect learning, the best that does not, and promising neighbours.

        The second stays unless another is clearly better. NothingMeasured if all failed, perhaps by other load.
        """
        problem, expected = self.problem, list(self.expected.values())
        phases = 1 + sum(knob.varied_last and knob.trial == JOINT for knob in problem.knobs)
        within_s = self.measure.seconds_left() / phases
        max_samplers = max(
            (result.setting[SAMPLERS] for result in self.results if result.trial == JOINT and result.ran), default=1
        )
        if within_s < _MIN_S:
            self.limits.append("out of time before the neighbours of the choice were measured")
            expected = [scored for scored in expected if scored.setting[SAMPLERS] <= max_samplers] or expected
            self.chosen = self._pick(expected)
            self.centre = self.chosen.setting
            return
        before, configured = self._pick(expected), self._learning_values_of(self.learning_values)
        unmoved = [scored for scored in expected if self._learning_values_of(scored.setting) == configured]
        plain = model.pick(problem, unmoved) if unmoved else before
        # Such a change needs proof: for it, time is left for a second round.
        neighbours = self._neighbours(before)[: _MAX_NEIGHBOURS if plain == before else _FEW_NEIGHBOURS]
        wanted = list(dict.fromkeys([plain.setting, before.setting, *neighbours]))
        rounds, best = self._compare("choice", self._joint, wanted, within_s - 1.0, _MIN_GAIN, before.setting)
        results, self.checked = rounds.newest(), rounds
        if best is not None:
            self.chosen, self.measured = model.measured_worth(problem, best), True
        elif results and self.busy():
            raise NothingMeasured("neither the expected best nor its neighbours could be measured")
        else:
            # Settings that do not affect learning, with no more samplers than those that failed and those that ran.
            self._choose_unmeasured(unmoved or expected, results, min(plain.setting[SAMPLERS], max_samplers))
        self.centre = self.chosen.setting
        if self.centre != before.setting:
            self._note_check(results, before.setting, plain.setting)

    def _choose_unmeasured(
        self, candidates: Sequence[Scored], tried: Mapping[Setting, TrialResult], max_samplers: int
    ) -> None:
        """Chooses a candidate that was not tried and has at most ``max_samplers``, as far as there is one."""
        untried = [scored for scored in candidates if scored.setting not in tried] or candidates
        fewer = [scored for scored in untried if scored.setting[SAMPLERS] <= max_samplers]
        self.chosen = model.pick(self.problem, fewer or untried)
        why = next((f": {result.failure}" for result in tried.values() if result.failure), "")
        self.doubts.append(f"the expected best could not be measured{why}")

    def _note_check(self, results: Mapping[Setting, TrialResult], expected: Setting, plain: Setting) -> None:
        """Notes that the choice is not the expected best; ``plain`` is the best that does not affect learning."""
        new, old = setting_text(self.problem, self.centre), setting_text(self.problem, expected)
        result, text = results.get(expected), f"{new} in place of {old}"
        if result is not None and result.ran:
            why = "because other programs were active" if self.busy() else "with a gain within the measured spread"
            text = f"{text}, {why}" if self.centre == plain else f"{new} measured better than {old}"
        self.notes.append(f"checked with its neighbours: {text}")

    def _compare(
        self,
        what: str,
        measure_settings: Callable[[Sequence[Setting], float], list[TrialResult]],
        settings: Sequence[Setting],
        within_s: float,
        min_gain: float,
        expected: Setting | None = None,
    ) -> tuple[Rounds, TrialResult | None]:
        """Measures settings in the same turns; returns the rounds and the best result, None if no result is usable.

        The first setting stays unless another is clearly better; for one that is ``expected`` to be, any gain above the
        spread suffices. Doubtful results are measured once more, all results if the machine was busy.
        """
        rounds, current = Rounds(), settings[0]
        before = max(
            (result.env_steps for result in self.results if result.setting == current and result.ran), default=0.0
        )
        end_s = self.measure.seconds_left() - within_s
        rounds.add(measure_settings(settings, within_s))
        doubtful, left_s = self._doubtful(rounds, current, min_gain), self.measure.seconds_left() - end_s
        if doubtful and left_s >= _AGAIN_S:
            again = f"{len(doubtful)} of the {len(settings)} settings that were compared last"
            self.notes.append(f"{again} were measured again, beside the first of them, because rates varied")
            rounds.add(measure_settings([current, *doubtful], left_s))
        result = rounds.newest().get(current)
        if result is not None and result.ran and result.env_steps < _DISTURBED * before:
            left_s = self.measure.seconds_left() - end_s
            if left_s >= within_s / 2:
                self.notes.append(f"{what} measured again: the machine was busy")
                rounds.add(measure_settings(settings, left_s))
            else:
                self.limits.append(f"{what} was measured while the machine was busy, with no time to repeat it")
        results = rounds.newest()
        failed = [result for result in results.values() if not result.ran]
        self.limits += [
            f"{setting_text(self.problem, result.setting)}: {result.failure or 'no updates'}" for result in failed
        ]
        good = {setting: result for setting, result in results.items() if result.ran}
        best: TrialResult | None = None
        if current in good:
            best = good[self._best_of(rounds, current, min_gain, expected)]
        # A setting that got no processor time may be the best.
        elif self.problem.objective != ROLLOUT or current not in results or not results[current].starved:
            left = [result for result in good.values() if not self._changes_learning(current, result.setting)]
            left = left or [result for result in good.values() if is_steady(result) and not self.busy()]
            best = max(left, key=self._score, default=None)
        if best is not None and not is_steady(best):
            self.doubts.append(f"rates of the choice vary by {_typical([best])}")
        return rounds, best

    def _neighbours(self, current: Scored) -> list[Setting]:
        """The most promising settings one step away in one knob, and the best of each other kind of learner."""
        kind, candidates = kind_of(current.setting), []
        for name in (BATCH, SAMPLERS, RATIO):
            values = sorted({setting[name] for setting in self.expected if kind_of(setting) == kind})
            at = values.index(current.setting[name])
            for value in (*values[max(at - 1, 0) : at], *values[at + 1 : at + 2]):
                setting = current.setting.replace(name, value)
                if name == BATCH and self.problem.balanced:
                    setting = setting.replace(RATIO, model.ratio_bound(self.problem, value))
                candidates.append((setting, _PROMISING))
        ascending = sorted(self.expected.values(), key=lambda scored: scored.score)
        best = {kind_of(scored.setting): scored.setting for scored in ascending}
        candidates += [(setting, _PROMISING_RIVAL) for other, setting in best.items() if other != kind]
        same = current.setting.without(RATIO)
        promising = [
            scored
            for setting, fraction in candidates
            if (scored := self.expected.get(setting)) is not None
            and scored.score >= fraction * current.score
            and (setting.without(RATIO) != same or scored[2:] != current[2:])  # a bound that does not bind is no change
        ]
        return [scored.setting for scored in sorted(promising, key=lambda scored: -scored.score)[:_MAX_NEIGHBOURS]]

    # --- everything running, one knob after the other ---

    def start_varying(self) -> None:
        """Starts with the configured setting; a ConfigError if that does not fit into memory or is inconsistent."""
        problem = self.problem
        fit = knobs.fit_host if SAMPLERS in problem.configured else knobs.fit_rollout
        current = fit(problem, problem.configured)
        if current is None:
            raise ConfigError(
                f"{setting_text(problem, problem.configured)}: these settings conflict, or do not fit into "
                f"memory; set fewer of them"
            )
        self.chosen = Scored(current, 0.0)

    def vary(self) -> None:
        """Varies the mode's rollout knobs, the first of them twice, then those of other modules, around the choice.

        One step by each rollout knob comes first; without a better one the search ends there if the cores are busy.
        Raises as ``tune``, or NothingMeasured for want of time or quiet.
        """
        joint = [knob for knob in self.problem.knobs if knob.trial == JOINT]
        last = [knob for knob in joint if knob.varied_last]
        rollout = [knob for knob in joint if not knob.varied_last] if self.problem.trial == ROLLOUT else []
        rollout += rollout[:1]
        varied = [*(rollout if self._first_steps(rollout) else ()), *last]
        for number, knob in enumerate(varied):
            best = self._vary(knob, self.chosen.setting, self.measure.seconds_left() / (len(varied) - number))
            if best is not None:
                self.chosen, self.measured = model.measured_worth(self.problem, best), True
        if not any(result.ran for result in self.results):
            failed = [result for result in self.results if result.failure]
            what = f"no setting of the mode could be measured: {failed[0].failure if failed else 'no time was left'}"
            raise NothingMeasured(what) if all(result.starved for result in failed) else WorkerError(what)
        if self.problem.objective == ROLLOUT and not self.measured:
            failures = [
                result.failure for result in self.results if result.setting == self.chosen.setting and result.failure
            ]
            why = failures[0] if failures else "no time was left"
            raise NothingMeasured(f"the configured setting could not be measured: {why}")

    def _first_steps(self, rollout: Sequence[Knob]) -> bool:
        """Measures one step by each of these knobs in the same turns; False if none helps and the cores are busy."""
        current = self.chosen.setting
        steps = {knob: knob.neighbours(self.problem, current)[:1] for knob in rollout}
        wanted, within_s = [current, *itertools.chain(*steps.values())], self.measure.seconds_left() / 3
        if len(wanted) < 3 or within_s < _MIN_S:
            return True
        rounds, best = self._compare("the choice", self._joint, wanted, within_s, _ROLLOUT_GAIN)
        if best is None:
            return True
        self.chosen, self.measured = model.measured_worth(self.problem, best), True
        for knob, others in steps.items():
            self._note_runners(knob, current, others, rounds, best)
        return best.setting != current or ((best.cpu or 0.0) < _CORES_BUSY and not self.busy())

    def _vary(self, knob: Knob, current: Setting, within_s: float) -> TrialResult | None:
        """Measures a knob's candidates together with ``current``, and returns the best; None if nothing ran."""
        wanted = knob.neighbours(self.problem, current)
        if not wanted and self.results:
            return None
        if within_s < _MIN_S:
            known = {result.setting[knob.name] for result in self.results if result.ran and knob.name in result.setting}
            more = "more values of " if known - {current.get(knob.name)} else ""
            self.limits.append(f"out of time before {more}{knob.name} could be measured")
            return None
        measure = self._measure_alone if knob.trial == LEARNER else self._joint
        same_rollouts = knob.varied_last or knob.name in (SAMPLERS, ENVS, INFERENCE_WORKERS)
        min_gain = _MIN_GAIN if same_rollouts else _ROLLOUT_GAIN
        rounds, best = self._compare(knob.column, measure, [current, *wanted], within_s, min_gain)
        if best is not None:
            self._note_runners(knob, current, wanted, rounds, best)
        return best

    def _note_runners(
        self, knob: Knob, current: Setting, others: Sequence[Setting], rounds: Rounds, best: TrialResult
    ) -> None:
        results, chosen = rounds.newest(), best.setting[knob.name]
        if current in results and results[current].ran:
            ran = [one for one in others if self.gain_over(rounds, current, one)[0] > -1.0]
            self.runners[knob.name] = best.setting, [one for one in (current, *ran) if one[knob.name] != chosen]

    # --- the result ---

    def fall_back(self, why: str) -> None:
        """Chooses the setting of a run without the tuner, as far as memory allows, and records the reason."""
        self.fell_back, self.measured = True, False
        self.chosen, self.expected, self.runners = Scored(knobs.as_configured(self.problem), 0.0), {}, {}
        self.doubts.append(f"{why}; using profile and defaults")

    def conclude(self) -> None:
        """Gives every choice its reason, and adds notes."""
        problem, chosen = self.problem, self.chosen.setting
        self.choices = choices_of(self)
        if self.fell_back:
            return
        if problem.memory_plan is not None:
            cost = self.costs[kind_of(chosen)]
            self.cost = cost if cost.b > 0.0 else None
            if cost.b * max(result.setting[BATCH] for result in self.rates[kind_of(chosen)]) > _COST_ERROR * cost.a:
                self.paper_batch = paper_batch(*cost, problem.targets.gpu_target)
        elif SAMPLERS not in chosen and knobs.rollout_rows(chosen) != knobs.rollout_rows(problem.configured):
            self.notes.append(
                f"a rollout has {knobs.rollout_rows(chosen)} rows in place of "
                f"{knobs.rollout_rows(problem.configured)}, which affects learning slightly"
            )
        if self.chosen.in_a_run < _AS_MEASURED:
            self.notes.append(
                f"in a run, evaluator, visualizer and supervisor share these cores: rates are "
                f"{100.0 * (1.0 - self.chosen.in_a_run):.0f} % lower than measured, as the reasons say"
            )
        if not self.measured:
            self.notes.append("the chosen setting was not measured: its rates are estimates")

    def as_json(self) -> dict[str, Any]:
        """Everything measured and chosen, for ``tune.json``."""
        problem, choices, (a, b) = self.problem, self.choices, self.cost or (None, None)
        labels = {knob.name: knob.column for knob in problem.knobs}
        names = {"update_rates": LEARNER, "joint_rates": JOINT, "rollout_rates": ROLLOUT}
        rates = {
            name: [result.as_json() for result in self.results if result.trial == trial]
            for name, trial in names.items()
        }
        return {
            "schema": SCHEMA,
            "objective": problem.objective,
            "formula": model.formula(problem),
            "choice": {name: choice.value for name, choice in choices.items()},
            "reasons": {name: choice.reason for name, choice in choices.items()},
            "pinned": sorted(name for name, choice in choices.items() if choice.pinned),
            "runners_up": {name: [list(runner) for runner in choice.runners_up] for name, choice in choices.items()},
            "labels": {name: labels[name] for name in problem.configured if name in self.chosen.setting},
            "cost_a_s": a,
            "cost_b_s_per_row": b,
            "paper_batch_size": self.paper_batch,
            "limits": list(dict.fromkeys(self.limits)),
            "notes": self.notes,
            **rates,
        }


def _kind_text(kind: Setting) -> str:
    return f"{kind[THREADS]} learner threads on {kind[DEVICE]} in {kind[PRECISION]}"


def _distance(value: float, other: float) -> float:
    return abs(math.log(value / other)) if value > 0 and other > 0 else abs(value - other)


def _middle_spread(results: Sequence[TrialResult]) -> float:
    """The spread of a typical result; infinite if none is known."""
    known = [result.spread for result in results if result.spread is not None]
    return statistics.median(known) if known else math.inf


def _typical(results: Sequence[TrialResult]) -> str:
    return f"{100 * _middle_spread(results):.0f} % of their median"
