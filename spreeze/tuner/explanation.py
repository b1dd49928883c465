"""The explanation of a search's result: each choice with its reason, and notes on its effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spreeze.tuner import model
from spreeze.tuner.problem import (
    BATCH,
    CAPACITY,
    ENVS,
    FACTS,
    JOINT,
    LEARNER,
    RATIO,
    RATIO_MAX,
    Choice,
    Knob,
    Setting,
    spread_of,
)

if TYPE_CHECKING:
    from spreeze.tuner.search import Search

_MAX_RUNNERS = 3
_HEADROOM = 2.0  # The upper bound is this many times the measured value, so that chance does not slow the learner.


def choices_of(search: Search) -> dict[str, Choice]:
    """Every knob's choice, in display order; limits and notes on them are added to those of the search."""
    problem, chosen = search.problem, search.chosen.setting
    knobs = {knob.name: knob for knob in problem.knobs}
    if search.fell_back:
        return {name: _unmeasured(search, knobs[name]) for name in problem.configured}
    choices = {name: _choice(search, knobs[name]) for name in problem.configured if name in chosen}
    if (plan := problem.memory_plan) is None:
        return choices
    high = _upper_bound(search)
    _note_ratios(search, high)
    choices |= {ENVS: plan.envs_per_sampler, CAPACITY: plan.capacity, RATIO_MAX: high}
    return {name: choices[name] for name in problem.configured if name in choices}


def _unmeasured(search: Search, knob: Knob) -> Choice:
    problem, value = search.problem, search.chosen.setting[knob.name]
    if knob.name in problem.pins:
        return Choice(value, f"{knob.text(value)}: {problem.pinned_by(knob.name)}", pinned=True)
    if knob.name == CAPACITY and problem.memory_plan is not None:
        return problem.memory_plan.capacity
    origin = "as configured" if value == problem.configured[knob.name] else "as without the tuner"
    return Choice(value, f"{knob.text(value)}: {origin}, because too little could be measured")


class _Runner(NamedTuple):
    """Another value of a knob."""

    value: Any
    score: float  # as a share of the choice's: by the newest rows of both, which the page draws, or else a forecast
    spread: float  # of both rows; infinite for a forecast


def _choice(search: Search, knob: Knob) -> Choice:
    problem, chosen = search.problem, search.chosen
    value = chosen.setting[knob.name]
    runners = _runners(search, knob)
    known = tuple((runner.value, runner.score) for runner in runners)
    text, remark = knob.text(value), knob.remark(problem, chosen.setting)
    if knob.figures:
        text += ": " + knob.figures.format(
            updates_per_s=chosen.updates_per_s * chosen.in_a_run,
            env_steps_per_s=chosen.env_steps_per_s * chosen.in_a_run,
        )
    if knob.name in problem.pins:
        return Choice(value, text + (", " if knob.figures else ": ") + problem.pinned_by(knob.name), True, known)
    parts = [] if knob.trial == FACTS else [_why(search, knob, runners)]
    if knob.name == RATIO and value != problem.configured[RATIO]:
        parts = [_gain(search)]
    if knob.name == BATCH and problem.objective != "return":
        parts = []
    parts += [remark] if remark else []
    reason = f"{text}{'; ' if knob.figures else ': '}{'; '.join(parts)}" if parts else text
    return Choice(value, reason, runners_up=known)


def _why(search: Search, knob: Knob, runners: Sequence[_Runner]) -> str:
    problem, value = search.problem, search.chosen.setting[knob.name]
    as_configured = value == problem.configured[knob.name]
    if not runners and knob.trial == LEARNER and len(set(knob.candidates(problem, search.chosen.setting))) > 1:
        return "no single change was better"
    if not runners:
        if as_configured:
            return "as configured"
        varied = any(result.setting.get(knob.name, value) != value for result in search.results)
        return "other values were measured with other settings only" if varied else "nothing else is possible"
    others = f"score relative to this: {', '.join(map(_runner_text, runners))}"
    best = runners[0]
    if best.score > 1.0 + model.TIE:
        return f"{'as configured: ' if as_configured else ''}{_why_not(search, best, as_configured)} ({others})"
    if as_configured:
        return f"as configured; none is clearly better ({others})"
    if best.score < 1.0 - model.TIE:
        return f"best score ({others})"
    simpler = knob.tie(problem, knob.name, value) <= knob.tie(problem, knob.name, best.value)
    return f"none is clearly better{'; ties prefer the simpler setting' if simpler else ''} ({others})"


def _why_not(search: Search, best: _Runner, as_configured: bool) -> str:
    """The reason why a value with a higher score is not the choice."""
    if as_configured and search.busy():
        return "other programs were active"
    if math.isinf(best.spread):
        if as_configured:
            return "others are forecast to be better, but not measured"
        return "best measured" if search.measured else "others could not be measured"
    if best.score - 1.0 <= best.spread:
        return "the gain of others is within the measured spread"
    return "others vary too much, or gain nothing in the same turns"


def _runner_text(runner: _Runner) -> str:
    value = f"{runner.value:g}" if isinstance(runner.value, float) else runner.value
    how = "as forecast" if math.isinf(runner.spread) else f"with a spread of {100 * runner.spread:.0f} %"
    return f"{100 * runner.score:.0f} % at {value} {how}"


def _runners(search: Search, knob: Knob) -> tuple[_Runner, ...]:
    """The best other values of a knob, best first.

    Varied knobs have the settings of their turns. Others have, measured or forecast, the choice with only that value
    changed, those measured on the learner alone the best setting with that value.
    """
    alone = knob.trial == LEARNER and knob.varied_last
    rows = {result.setting: result for result in search.results if result.ran and (result.trial == LEARNER) == alone}
    forecast: dict[Setting, float] = {}
    if knob.varied_last or not search.expected:
        chosen, others = search.runners.get(knob.name, (None, ()))
    else:
        chosen, name = search.centre, knob.name
        kept = [other.name for other in search.problem.knobs if other.name in chosen and other.trial != FACTS]
        kept = [] if knob.trial == LEARNER else [other for other in kept if other != name]
        others = [
            setting
            for setting in search.expected
            if setting[name] != chosen[name] and all(setting[other] == chosen[other] for other in kept)
        ]
        score = search.forecast(chosen).score
        forecast = {
            setting: search.expected[setting].score / score
            for setting in others
            if score > 0.0 and search.gain_over(search.checked, chosen, setting)[0] == -math.inf
        }
    runners: dict[Any, _Runner] = {}
    for setting in others:
        runner = _Runner(setting[knob.name], forecast.get(setting, 0.0), math.inf)
        pair = [rows[one] for one in (setting, chosen) if setting not in forecast and one in rows]
        if len(pair) == 2 and pair[1].score:
            runner = runner._replace(score=(pair[0].score or 0.0) / pair[1].score, spread=spread_of(pair))
        before = runners.get(runner.value)
        if before is None or (-runner.spread, runner.score) > (-before.spread, before.score):
            runners[runner.value] = runner
    return tuple(sorted(runners.values(), key=lambda runner: -runner.score)[:_MAX_RUNNERS])


def _gain(search: Search) -> str:
    """Effect of the chosen lower bound of samples per insert; as measured, if both values were."""
    configured = search.problem.configured[RATIO]
    settings = (search.centre, search.centre.replace(RATIO, configured))
    rates = {
        result.setting: (result.updates, result.env_steps)
        for result in search.results
        if result.trial == JOINT and result.ran
    }
    known = all(setting in rates for setting in settings)
    if not known:
        rates = {setting: search.forecast(setting)[2:4] for setting in settings}
    (updates, env_steps), (updates_before, env_steps_before) = (rates[setting] for setting in settings)
    return (
        f"{'' if known else 'estimated: '}updates {_percent(updates, updates_before)}, env steps "
        f"{_percent(env_steps, env_steps_before)} against {configured:g}"
    )


def _upper_bound(search: Search) -> Choice:
    """Samples per insert above which the learner waits; raised if it would wait at the measured rates."""
    problem, setting = search.problem, search.chosen.setting
    batch, configured = setting[BATCH], max(problem.configured[RATIO_MAX], setting[RATIO])
    text = "the learner waits above {:.6g} samples per insert: "
    if RATIO_MAX in problem.pins:
        high = problem.pin(RATIO_MAX)
        return Choice(high, text.format(high) + problem.pinned_by(RATIO_MAX), pinned=True)
    if problem.balanced:
        return Choice(setting[RATIO], text.format(setting[RATIO]) + "this mode keeps this ratio, like mode serial")
    rates = search.chosen if search.measured else search.forecast(search.centre)
    ratio = rates.updates_per_s * batch / rates.env_steps_per_s if rates.env_steps_per_s > 0 else 0.0
    measured = [
        result for result in search.results if result.trial == JOINT and result.setting == setting and result.ran
    ][-1:]
    if search.busy() and _HEADROOM * ratio > configured:
        return Choice(configured, text.format(configured) + "as configured, because other programs were active")
    if _HEADROOM * ratio <= configured * (1.0 + spread_of(measured or search.swept)):
        return Choice(configured, f"{text.format(configured)}as configured, {ratio:.3g} were measured")
    bound = model.ratio_bound(problem, batch)
    high = float(round(max(configured, min(_HEADROOM * ratio, bound))))
    if high >= bound > configured:
        search.limits.append(
            f"the learner may draw {bound:g} samples per insert, {model.UPDATES_PER_STEP_BOUND:g} "
            "updates per env step, and waits above"
        )
    return Choice(high, f"{text.format(high)}{ratio:.3g} were measured, {configured:g} would limit it")


def _note_ratios(search: Search, high: Choice) -> None:
    low, configured = search.chosen.setting[RATIO], search.problem.configured
    if search.problem.balanced:
        return  # the mode keeps the ratio, and reports that
    if RATIO not in search.problem.pins and low != configured[RATIO]:
        search.notes.append(
            f"samples per insert at least {low:g} instead of {configured[RATIO]:g} ({_gain(search)}): "
            f"each transition is drawn at least {low:g} times on average"
        )
    if not high.pinned and high.value > configured[RATIO_MAX]:
        search.notes.append(
            f"samples per insert up to {high.value:g} instead of {configured[RATIO_MAX]:g}: up to "
            f"{high.value / search.chosen.setting[BATCH]:.1f} updates per env step"
        )


def _percent(after: float, before: float) -> str:
    return f"{100.0 * (after / before - 1.0):+.0f} %" if before > 0 else "new"
