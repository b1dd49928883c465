"""Scores, the cost of an update ``t(B) = a + b B``, shared cores, and how much of a measurement is noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spreeze.tuner.problem import (
    BATCH,
    DEVICE,
    LEARNER,
    PRECISION,
    RATIO,
    RATIO_MAX,
    ROLLOUT,
    SAMPLERS,
    THREADS,
    Setting,
    TrialResult,
    TuningProblem,
)

BATCH_HALF_WORTH = 16.0
"""B0 (transitions): the batch at which an update has half of its greatest worth; fitted (``tests/stress``)."""
UPDATES_PER_STEP = 2.0
"""R (updates per env step): the ratio at which an update has half of the worth it has on fresh data; fitted too."""

FORMULAS = {
    "return": f"U * B / (B + {BATCH_HALF_WORTH:g}) * E / (E + U / {UPDATES_PER_STEP:g})",
    "paper": "the smallest power of two B with b B / (a + b B) >= gpu_target, where an update takes a + b B; "
             "then E while the run keeps at most cpu_target of the cores busy",
    "sampling": "E, with the configured batch",
    "updates": "U, with the configured batch",
}  # fmt: skip
"""Objective -> its formula in one line; U updates/s, E env steps/s, B batch size, learner and samplers together."""
ROLLOUT_FORMULA = "env steps/s with everything running; rows and minibatches of a rollout as configured"
UPDATES_PER_STEP_BOUND = 8.0
"""Samples per insert are never allowed above this many updates per env step (times the batch)."""


def batch_worth(batch_size: int) -> float:
    """Worth of one update, from 0 to 1: ``B / (B + B0)``."""
    return batch_size / (batch_size + BATCH_HALF_WORTH)


def fresh_worth(updates_per_s: float, env_steps_per_s: float) -> float:
    """Worth of an update by how fresh its data is, from 0 to 1: ``E / (E + U / R)``."""
    if env_steps_per_s <= 0.0:
        return 0.0
    return env_steps_per_s / (env_steps_per_s + updates_per_s / UPDATES_PER_STEP)


def learner_score(objective: str, batch_size: int, updates_per_s: float) -> float:
    """Worth of a learner before the samplers are known; all that run are equal where only env steps count."""
    if objective == "sampling":
        return float(updates_per_s > 0.0)
    return updates_per_s * (batch_worth(batch_size) if objective == "return" else 1.0)


def joint_score(objective: str, batch_size: int, updates_per_s: float, env_steps_per_s: float) -> float:
    """Worth of learner and samplers together; ``paper`` takes the batch by its rule and scores E."""
    if objective == "return":
        return updates_per_s * batch_worth(batch_size) * fresh_worth(updates_per_s, env_steps_per_s)
    return updates_per_s if objective == "updates" else env_steps_per_s


def paper_batch(a_s: float, b_s: float, gpu_target: float) -> int:
    """Smallest power of two whose frame rate reaches ``gpu_target`` of the asymptotic one, 1/b (papers: 3.3)."""
    needed = gpu_target / (1.0 - gpu_target) * a_s / b_s
    return 1 << max(0, math.ceil(math.log2(max(needed, 1.0)) - 1e-9))

@dataclass(frozen=True, kw_only=True)
class Scored:
    """A setting with its score; higher is better."""

    setting: Setting
    score: float
    updates_per_s: float
    env_steps_per_s: float


TIE = 0.03
"""Scores this near to the best one count as equal to it."""
_CPU_ERROR = 1e-6
_OVER_TARGET = 1e-3
"""What a setting over the processor target keeps of its score: it is taken only where nothing else is."""


def ratio_bound(problem: TuningProblem, batch_size: int) -> float:
    """Samples per insert above which the learner has to wait, at most."""
    if problem.pin(RATIO_MAX) is not None:
        return float(problem.pin(RATIO_MAX))
    least = problem.configured[RATIO_MAX], UPDATES_PER_STEP_BOUND * batch_size, problem.pin(RATIO) or 0.0
    return float(max(least))


def worth(
    problem: TuningProblem, setting: Setting, updates_per_s: float, env_steps_per_s: float, cpu_share: float | None
) -> Scored:
    """Score of a setting from its rates, the learner held to the upper bound of samples per insert."""
    objective = problem.targets.objective
    if objective == ROLLOUT:
        return Scored(setting=setting, score=env_steps_per_s, updates_per_s=updates_per_s,
                      env_steps_per_s=env_steps_per_s)
    batch = setting[BATCH]
    updates = min(updates_per_s, ratio_bound(problem, batch) * env_steps_per_s / batch)
    score = joint_score(objective, batch, updates, env_steps_per_s)
    if objective == "paper" and setting[SAMPLERS] > 1:
        share = (setting[SAMPLERS] + setting[THREADS]) / problem.cores if cpu_share is None else cpu_share
        if share > problem.targets.cpu_target + _CPU_ERROR:
            score *= _OVER_TARGET
    return Scored(setting=setting, score=score, updates_per_s=updates, env_steps_per_s=env_steps_per_s)


def measured_worth(problem: TuningProblem, result: TrialResult) -> Scored:
    """Score of what was measured; 0 for a failed candidate."""
    return worth(problem, result.setting, result.updates, result.env_steps, result.cpu)


def pick(problem: TuningProblem, scored: Iterable[Scored]) -> Scored:
    """The best setting; among those within ``TIE`` of it the one that the knobs prefer, in their order."""
    found = list(scored)
    best = max(one.score for one in found)
    knobs = [knob for knob in problem.knobs if knob.name in found[0].setting]
    return min((one for one in found if one.score >= best * (1.0 - TIE)),
               key=lambda one: tuple(knob.tie(problem, knob.name, one.setting[knob.name]) for knob in knobs))


_LEAST_NOISE, _MOST_NOISE = 0.01, 0.15
_RANGE_TO_SIGMA = {2: 1.13, 3: 1.69, 4: 2.06, 5: 2.33}
"""Expected range of n normal values in standard deviations."""
BELIEF = 2.0
"""A difference from the model below this many standard errors is taken for noise."""

Kind = tuple[str, str, int]
"""(device, precision, threads) of a learner."""


def kind_of(setting: Setting) -> Kind:
    """What the settings of one curve share."""
    return setting[DEVICE], setting[PRECISION], setting[THREADS]


def learner_setting(kind: Kind, batch_size: int) -> Setting:
    device, precision, threads = kind
    return Setting({DEVICE: device, BATCH: batch_size, THREADS: threads, PRECISION: precision})


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Time of an update over the batch size, for one kind of learner."""

    kind: Kind
    a: float
    """Seconds of an update whatever its batch."""
    b: float
    """Seconds that each row adds."""
    excess: Mapping[int, float]
    """Batch size -> log of measured over fitted time, as far as it is beyond noise."""
    fitted: bool
    """False with only one batch size: ``a`` then is its time and ``b`` zero."""

    def update_s(self, batch_size: int) -> float:
        return (self.a + self.b * batch_size) * math.exp(self.excess.get(batch_size, 0.0))

    def updates_per_s(self, batch_size: int) -> float:
        return 1.0 / self.update_s(batch_size)



def noise(repeats: Iterable[Sequence[float]]) -> float:
    """Relative standard error of a median of repeats, pooled over candidates."""
    sigmas = []
    count = 3
    for values in repeats:
        if len(values) > 1 and min(values) > 0:
            factor = _RANGE_TO_SIGMA.get(len(values), math.sqrt(2.0 * math.log(len(values))) + 0.5)
            sigmas.append(math.log(max(values) / min(values)) / factor)
            count = len(values)
    sigma = statistics.fmean(sorted(sigmas)[: max(1, math.ceil(0.8 * len(sigmas)))]) if sigmas else 0.03
    return min(max(sigma, _LEAST_NOISE), _MOST_NOISE) * 1.25 / math.sqrt(count)


def beyond_noise(log_ratio: float, error: float) -> float:
    """What is left of a difference when the part that noise explains is taken off (soft threshold)."""
    return math.copysign(max(0.0, abs(log_ratio) - BELIEF * error), log_ratio)


def fit_cost(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """(a, b) of ``t(B) = a + b B`` by least squares with weights 1/t^2 (relative errors), neither negative.

    Points are (batch size, seconds of an update); None with fewer than two batch sizes.
    """
    if len({batch for batch, _ in points}) < 2:
        return None
    s_w = sum(1 / t**2 for _, t in points)
    s_x = sum(batch / t**2 for batch, t in points)
    s_xx = sum(batch**2 / t**2 for batch, t in points)
    s_y = sum(1 / t for _, t in points)
    s_xy = sum(batch / t for batch, t in points)
    b = (s_w * s_xy - s_x * s_y) / (s_w * s_xx - s_x**2)
    a = (s_y - b * s_x) / s_w
    if a <= 0.0:
        a, b = 0.0, s_xy / s_xx
    if b <= 0.0:
        a, b = s_y / s_w, 0.0
    return a, max(b, 1e-12)


def fit_curve(rates: Sequence[TrialResult], error: float) -> CostCurve | None:
    """Curve of one kind of learner; None if not one of its candidates ran."""
    points = [(rate.setting[BATCH], 1.0 / rate.updates) for rate in rates if rate.updates > 0]
    if not points:
        return None
    kind = kind_of(rates[0].setting)
    found = fit_cost(points)
    if found is None:
        return CostCurve(kind=kind, a=points[0][1], b=0.0, excess={}, fitted=False)
    a, b = found
    # Two points lie on any line: only a third can show a difference.
    over = {batch: math.log(t / (a + b * batch)) for batch, t in points} if len(points) > 2 else {}
    excess = {batch: beyond_noise(log_ratio, error) for batch, log_ratio in over.items()}
    return CostCurve(kind=kind, a=a, b=b, excess=excess, fitted=True)


_SMT = 0.3
_PER_THREAD, _CROWDED = 0.01, 0.2
"""Sizes of the trends that are expected: log rate lost to each busy thread, and where threads outnumber cores."""
_SHARE_ERROR = 0.05
"""A measured share of the cores this near to the model's is not told from it."""


def speed(busy: float, cores: float, physical: float) -> float:
    """Speed of each of ``busy`` threads, 1 for a thread alone on a core."""
    if busy <= 0.0:
        return 1.0
    fast = min(busy, physical, cores)
    return min(1.0, (fast + _SMT * max(0.0, min(busy, cores) - fast)) / busy)


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Log of a measured rate over the model's: ``level + per_thread k + crowded max(0, k / physical - 1)``.

    ``rest`` is what single measurements leave beyond noise, (k, log) by k.
    """

    level: float = 0.0
    per_thread: float = 0.0
    crowded: float = 0.0
    rest: tuple[tuple[float, float], ...] = ()

    def factor(self, busy: float, physical: float) -> float:
        crowd = max(0.0, busy / physical - 1.0)
        return math.exp(self.level + self.per_thread * busy + self.crowded * crowd + _between(self.rest, busy))


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The model with its measured constants."""

    cores: float
    physical: float
    curves: Mapping[Kind, CostCurve]
    learner: Trend
    """Updates/s against those of the learner alone."""
    sampler: Trend
    """Env steps/s of one sampler."""
    cpu_excess: tuple[tuple[float, float], ...] = ()
    """(busy threads, measured share of the cores less the model's), by busy threads."""

    def forecast(self, setting: Setting) -> tuple[float, float, float]:
        """(updates/s, env steps/s, share of the cores) of a setting whose learner was measured alone."""
        batch, samplers, ratio = setting[BATCH], setting[SAMPLERS], setting[RATIO]
        alone = self.curves[kind_of(setting)].updates_per_s(batch)
        quiet = float(setting[THREADS])
        full = samplers * self.sampler.factor(quiet + 1.0, self.physical)
        duty = 1.0
        if ratio > 0.0 and full > 0.0:
            duty = min(1.0, alone * self.learner.factor(quiet, self.physical) * batch / (ratio * full))
        busy = samplers * duty + quiet
        share = speed(busy, self.cores, self.physical)
        updates = alone * share * self.learner.factor(busy, self.physical)
        steps = samplers * duty * share * self.sampler.factor(busy, self.physical)
        if ratio > 0.0:
            steps = min(steps, updates * batch / ratio)
        cpu = busy / self.cores + _between(self.cpu_excess, busy)
        return updates, steps, min(1.0, max(0.0, cpu))


def _between(table: Sequence[tuple[float, float]], at: float) -> float:
    """Linear interpolation, held outside of the table; 0 for an empty one."""
    if not table:
        return 0.0
    if at <= table[0][0]:
        return table[0][1]
    for (low, first), (high, second) in pairwise(table):
        if at <= high:
            return first + (second - first) * (at - low) / (high - low)
    return table[-1][1]


def fit_sharing(
    problem: TuningProblem, curves: Mapping[Kind, CostCurve], rates: Sequence[TrialResult], error: float
) -> Sharing:
    """Constants of the model from samplers that ran unthrottled beside one learner; guessed if none did.

    ``error`` is the relative standard error of a median.
    """
    cores = problem.cores
    physical = min(cores, problem.physical_cores or cores)
    good = sorted(rates, key=lambda rate: rate.setting[SAMPLERS])
    if not good:
        guess = Trend(level=math.log(1e6 / problem.step_us if problem.step_us else 1000.0))
        return Sharing(cores=cores, physical=physical, curves=curves, learner=Trend(), sampler=guess)
    learner, sampler, cpu = [], [], []
    for rate in good:
        busy = float(rate.setting[SAMPLERS] + rate.setting[THREADS])
        share = speed(busy, cores, physical)
        alone = curves[kind_of(rate.setting)].updates_per_s(rate.setting[BATCH])
        learner.append((busy, math.log(rate.updates / (alone * share))))
        sampler.append((busy, math.log(rate.env_steps / (rate.setting[SAMPLERS] * share))))
        if rate.cpu is not None:
            off = rate.cpu - min(1.0, busy / cores)
            cpu.append((busy, math.copysign(max(0.0, abs(off) - _SHARE_ERROR), off)))
    return Sharing(cores=cores, physical=physical, curves=curves, learner=fit_trend(learner, physical, error),
                   sampler=fit_trend(sampler, physical, error), cpu_excess=tuple(cpu))


def fit_trend(points: Sequence[tuple[float, float]], physical: float, error: float) -> Trend:
    """Ridge regression over (busy threads, log of measured over modelled rate), each with that standard error.

    The trend stays zero where few or noisy points do not ask for one.
    """
    level = math.fsum(value for _, value in points) / len(points)
    rows = [((1.0, busy, max(0.0, busy / physical - 1.0)), value - level) for busy, value in points]
    ridge = [0.0, *((error / scale) ** 2 for scale in (_PER_THREAD, _CROWDED))]
    matrix = [[math.fsum(x[i] * x[j] for x, _ in rows) + (ridge[i] if i == j else 0.0) for j in range(3)]
              + [math.fsum(x[i] * y for x, y in rows)] for i in range(3)]
    shift, per_thread, crowded = _solved(matrix)
    found = Trend(level=level + shift, per_thread=per_thread, crowded=crowded)
    rest = [(busy, beyond_noise(value - math.log(found.factor(busy, physical)), error)) for busy, value in points]
    return dataclasses.replace(found, rest=tuple(rest) if any(value for _, value in rest) else ())


def _solved(matrix: list[list[float]]) -> list[float]:
    """Solution of three linear equations, positive definite, the right side as last column (Gauss)."""
    for i in range(3):
        matrix[i] = [value / matrix[i][i] for value in matrix[i]]
        for j in range(3):
            if j != i:
                matrix[j] = [x - matrix[j][i] * y for x, y in zip(matrix[j], matrix[i], strict=True)]
    return [row[3] for row in matrix]


_MODEL_ERROR = 0.06
"""Relative error of a ratio of two expected scores, at least; twice the measurements' error where that is more."""
_LEAST_ERROR = 0.01
_MEDIAN_OVER_MEAN = 1.25
"""Standard error of a median over that of a mean, of normal values."""


def bayes_update(
    problem: TuningProblem,
    rates: Sequence[TrialResult],
    here: TrialResult,
    expected: Mapping[Setting, Scored],
    error: float,
) -> dict[Setting, float]:
    """Log of each setting's score over that of ``here``, as it is to be believed.

    All were measured in the same turns, so what slowed one turn slowed all: the ratio of two scores is taken turn by
    turn, and scatters less than either. Prior (``expected``) and measurement are weighed by the inverse squares of
    their errors; ``error`` is the standard error of a median that the model was fitted to.
    """
    logs = {rate.setting: _log_ratios(problem, rate, here) for rate in rates if rate.setting != here.setting}
    scatter = [statistics.pstdev(values) for values in logs.values() if len(values) > 1]
    sigma = statistics.median(scatter) if scatter else error
    model_error = max(_MODEL_ERROR, 2.0 * error)
    found: dict[Setting, float] = {}
    for setting, values in logs.items():
        if not values:
            continue
        own = max(_LEAST_ERROR, _MEDIAN_OVER_MEAN * sigma / math.sqrt(len(values)))
        trust = model_error**2 / (model_error**2 + own**2)
        prior = _log(expected[setting].score, expected[here.setting].score)
        found[setting] = trust * statistics.median(values) + (1.0 - trust) * prior
    return found


def _log_ratios(problem: TuningProblem, rate: TrialResult, here: TrialResult) -> list[float]:
    """Of the turns in which both made updates and env steps."""
    own, other = _turn_scores(problem, rate), _turn_scores(problem, here)
    return [_log(a, b) for a, b in zip(own, other, strict=False) if a > 0.0 and b > 0.0]


def _turn_scores(problem: TuningProblem, rate: TrialResult) -> list[float]:
    if rate.stage == LEARNER:
        objective, batch = problem.targets.objective, rate.setting[BATCH]
        return [learner_score(objective, batch, updates) for updates in rate.updates_per_s]
    shares = rate.cpu_share or (None,) * len(rate.updates_per_s)
    return [worth(problem, rate.setting, updates, steps, share).score
            for updates, steps, share in zip(rate.updates_per_s, rate.env_steps_per_s, shares, strict=False)]


def _log(score: float, other: float) -> float:
    return math.log(score / other) if score > 0.0 and other > 0.0 else 0.0
