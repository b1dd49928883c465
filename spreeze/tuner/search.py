"""The whole choice: learners alone, everything running, the neighbours, other modules' knobs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spreeze.errors import ConfigError, WorkerError
from spreeze.tuner import knobs as table
from spreeze.tuner.learner_search import Learners, measure_learners
from spreeze.tuner.model import (
    Kind,
    Scored,
    Sharing,
    bayes_update,
    fit_sharing,
    kind_of,
    learner_score,
    learner_setting,
    measured_worth,
    noise,
    pick,
    worth,
)
from spreeze.tuner.problem import (
    ACTORS,
    BATCH,
    DEVICE,
    ENVS,
    EXECUTOR_ENVS,
    EXECUTORS,
    JOINT,
    LEARNER,
    PRECISION,
    RATIO,
    ROLLOUT,
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
_STEPPED = (BATCH, SAMPLERS, RATIO, EXECUTORS, ACTORS, EXECUTOR_ENVS)
"""Knobs whose next smaller and next larger values are neighbours."""

Runners = tuple[tuple[Any, float], ...]


def search(problem: TuningProblem, measure: Measure, say: Callable[[TrialResult], None]) -> Search:
    """Measures and chooses within the budget; ``say`` is told each result as it is measured.

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
        learners = measure_learners(state.problem, room, measure, state.told, keep_s)
        state.limits += learners.limits
        state.vary_learner(learners.first)
        state.sweep_samplers(learners, room, measure.seconds_left() * SWEEP_SHARE)
    state.check()
    state.vary_own()
    return state


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

    def told(self, result: TrialResult) -> None:
        """Keeps a result with its score and tells it."""
        if result.failure is None:
            score = (learner_score(self.problem.targets.objective, result.setting[BATCH], result.updates)
                     if result.stage == LEARNER else measured_worth(self.problem, result).score)
            result = dataclasses.replace(result, score=score)
        self.results.append(result)
        self.say(result)

    def _joint(self, settings: Sequence[Setting], within_s: float) -> list[TrialResult]:
        return self.measure.joint(settings, within_s=within_s, on_result=self.told)

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
        """Stage 2 with a model: samplers beside the best learner, unthrottled, tell what all other settings would do.

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
        found = self.sharing.forecast(setting)
        return worth(self.problem, setting, found.updates_per_s, found.env_steps_per_s, found.cpu_share)

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
        found = ask([here, *wanted], within_s=within_s, on_result=self.told)
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
