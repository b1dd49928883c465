"""The answer: every choice with its reason, what came next, and what is worth a note."""

from __future__ import annotations

from collections.abc import Callable

from spreeze.tuner.knobs import rollout_rows
from spreeze.tuner.model import (
    FORMULAS,
    ROLLOUT_FORMULA,
    UPDATES_PER_STEP_BOUND,
    kind_of,
    paper_batch,
    ratio_bound,
)
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
    Measure,
    TrialResult,
    Tuning,
    TuningProblem,
)
from spreeze.tuner.search import Runners, Search, search

_MOST_RUNNERS = 3
_ROOM = 2.0
"""The upper bound is this many times what was measured, so that the learner is not held back by chance."""


def tune(problem: TuningProblem, measure: Measure, say: Callable[[TrialResult], None]) -> Tuning:
    """Measures and chooses within the budget; ``say`` hears each result as it is measured.

    Raises:
        ConfigError: a pinned value cannot work, or memory has no room; the message names the limit.
        WorkerError: nothing could be measured.
    """
    found = search(problem, measure, say)
    problem, chosen, limits, notes = found.problem, found.chosen.setting, list(found.limits), []
    choices = {knob.name: _choice(found, knob) for knob in problem.knobs if knob.name in chosen}
    choices = {name: choices[name] for name in problem.configured if name in choices}
    labels = {knob.name: knob.label or knob.name.split(".")[1] for knob in problem.knobs if knob.name in chosen}
    cost = rule = None
    if found.learners is not None and problem.room is not None:
        high = _upper_bound(found, limits)
        choices |= {ENVS: problem.room.envs_per_sampler, CAPACITY: problem.room.capacity, RATIO_MAX: high}
        notes += _ratio_notes(found, high)
        curve = found.learners.curves[kind_of(chosen)]
        cost = (curve.a, curve.b) if curve.fitted else None
        rule = _paper_batch(found)
    elif rollout_rows(chosen) != rollout_rows(problem.configured):
        notes.append(f"a rollout has {rollout_rows(chosen)} rows in place of {rollout_rows(problem.configured)}: "
                     "learning differs a little")
    notes += [f"checked with its neighbours: {one}" for one in found.moved]
    if not found.measured:
        notes.append("the chosen setting itself was not measured: its rates are the model's")
    objective = problem.targets.objective
    return Tuning(
        choices={name: choices[name] for name in problem.configured if name in choices},
        labels={name: labels[name] for name in problem.configured if name in labels}, objective=objective,
        formula=FORMULAS.get(objective, ROLLOUT_FORMULA), results=tuple(found.results), cost=cost, paper_batch=rule,
        limits=tuple(dict.fromkeys(limits)), notes=tuple(notes),
    )


def _choice(found: Search, knob: Knob) -> Choice:
    """The value of a knob, its reason, and what came next."""
    problem, chosen = found.problem, found.chosen
    value, pinned = chosen.setting[knob.name], knob.name in problem.pins
    runners = found.own_runners.get(knob.name, ()) if knob.own else _runners(found, knob)
    what, remark = knob.text(value), knob.remark(problem, chosen.setting)
    if knob.figures:
        what += ": " + knob.figures.format(updates_per_s=chosen.updates_per_s, env_steps_per_s=chosen.env_steps_per_s)
    if pinned:
        return Choice(value, f"{what}, set by you" if knob.figures else f"{what}: set by you", pinned=True,
                      runners_up=runners)
    parts = [] if knob.trial == FACTS else [_why(found, knob, runners)]
    if knob.name == RATIO and value != problem.configured[RATIO]:
        parts = [_gain(found)]
    if knob.name == BATCH and problem.targets.objective != "return":
        parts = []
    parts += [remark] if remark else []
    reason = f"{what}{'; ' if knob.figures else ': '}{'; '.join(parts)}" if parts else what
    return Choice(value, reason, runners_up=runners)


def _why(found: Search, knob: Knob, runners: Runners) -> str:
    others = ", ".join(f"{value}: {100 * share:.0f} %" for value, share in runners)
    problem, value = found.problem, found.chosen.setting[knob.name]
    as_configured = value == problem.configured[knob.name]
    if not runners and knob.trial == LEARNER and len(set(knob.candidates(problem, found.chosen.setting))) > 1:
        return "no other was better alone"
    if not runners:
        return "as configured" if as_configured else "no other is possible here"
    if as_configured:
        return f"as configured, and none is clearly better ({others})"
    return f"best score, where ties go to the plainer one ({others})"


def _runners(found: Search, knob: Knob) -> Runners:
    """Other values of one knob with their expected scores over that of the choice, best first.

    Of what the learner alone tells it is the best setting with the other value; else all other knobs are as chosen.
    """
    centre = found.centre
    own = found.forecast(centre).score if centre in found.expected or found.sharing is not None else 0.0
    if own <= 0.0 or knob.trial == FACTS:
        return ()
    kept = [one.name for one in found.problem.knobs
            if one.name in centre and one.name != knob.name and one.trial in (LEARNER, JOINT)]
    best: dict[object, float] = {}
    for setting, score in found.expected.items():
        value = setting[knob.name]
        if value != centre[knob.name] and (
                knob.trial == LEARNER or all(setting[name] == centre[name] for name in kept)):
            best[value] = max(best.get(value, 0.0), score.score / own)
    return tuple(sorted(best.items(), key=lambda one: -one[1])[:_MOST_RUNNERS])


def _paper_batch(found: Search) -> int | None:
    """The paper's rule, or None where the cost of a row is lost in the noise: the rule divides by it."""
    learners, kind = found.learners, kind_of(found.chosen.setting)
    assert learners is not None
    curve = learners.curves[kind]
    largest = max(one.setting[BATCH] for one in learners.rates[kind])
    if not curve.fitted or curve.b * largest < learners.error * curve.a:
        return None
    return paper_batch(curve.a, curve.b, found.problem.targets.gpu_target)


def _gain(found: Search) -> str:
    """What the chosen lower bound of samples per insert changes against the configured one."""
    configured = found.problem.configured[RATIO]
    after, before = found.forecast(found.centre), found.forecast(found.centre.but(RATIO, configured))
    return (f"updates {_percent(after.updates_per_s, before.updates_per_s)}, env steps "
            f"{_percent(after.env_steps_per_s, before.env_steps_per_s)} against {configured:g}")


def _percent(after: float, before: float) -> str:
    return f"{100.0 * (after / before - 1.0):+.0f} %" if before > 0 else "new"


def _upper_bound(found: Search, limits: list[str]) -> Choice:
    """Samples per insert above which the learner waits; raised where it would wait at the measured rates."""
    problem, setting = found.problem, found.chosen.setting
    batch, configured = setting[BATCH], max(problem.configured[RATIO_MAX], setting[RATIO])
    if RATIO_MAX in problem.pins:
        high = problem.pin(RATIO_MAX)
        return Choice(high, f"the learner waits above {high:g} samples per insert: set by you", pinned=True)
    rates = found.chosen if found.measured else found.forecast(found.centre)
    ratio = rates.updates_per_s * batch / rates.env_steps_per_s if rates.env_steps_per_s > 0 else 0.0
    if _ROOM * ratio <= configured:
        return Choice(configured, f"the learner waits above {configured:g} samples per insert: as configured, "
                                  f"{ratio:.3g} were measured")
    bound = ratio_bound(problem, batch)
    high = max(configured, min(_ROOM * ratio, bound))
    if high >= bound > configured:
        limits.append(f"the learner may draw {bound:g} samples per insert, {UPDATES_PER_STEP_BOUND:g} updates per env "
                      "step, and waits above")
    return Choice(float(round(high)), f"the learner waits above {high:.0f} samples per insert: {ratio:.3g} were "
                                      f"measured, {configured:g} would hold it back")


def _ratio_notes(found: Search, high: Choice) -> list[str]:
    """What changes in the algorithm."""
    problem, setting, notes = found.problem, found.chosen.setting, []
    low, configured = setting[RATIO], problem.configured
    if RATIO not in problem.pins and low != configured[RATIO]:
        notes.append(f"samples per insert at least {low:g} instead of {configured[RATIO]:g} ({_gain(found)}): each "
                     f"transition is drawn at least {low:g} times on average")
    if not high.pinned and high.value > configured[RATIO_MAX]:
        notes.append(f"samples per insert up to {high.value:g} instead of {configured[RATIO_MAX]:g}: up to "
                     f"{high.value / setting[BATCH]:.1f} updates per env step")
    return notes
