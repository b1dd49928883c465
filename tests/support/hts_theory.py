"""Claims 1 and 2 of HTS-RL (arXiv 2012.09849): what waiting for each other costs, and how old queued data gets.

Claim 1 (Eq. 7 there): n environments collect K states and wait for each other every alpha steps. One step takes a
Gamma distributed time of shape k and rate beta, so alpha of them take Gamma(k alpha, beta); the actors take c for
each step. A round lasts as long as the slowest environment, and there are K / (n alpha) rounds:

    E[T] = K / (n alpha) E[max of n Gamma(k alpha, beta)] + K c / n

Appendix A takes the maximum from extreme value theory. ``expected_largest`` has the form printed there and one that
fits better; ``simulated_rounds`` simulates. Time is in seconds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

EULER_MASCHERONI = 0.5772156649015329

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Generator and shape -> that many independent step times [s]."""


def gamma_shape_rate(mean_s: float, cv: float) -> tuple[float, float]:
    """Shape and rate [1/s] of the Gamma law with this mean and coefficient of variation (deviation / mean)."""
    shape = 1.0 / cv**2
    return shape, shape / mean_s


def step_times(law: str, mean_s: float, cv: float = 1.0) -> Draw:
    """The laws of ``spreeze/Synthetic-v0``: constant, exponential or gamma.

    Raises:
        ValueError: another law.
    """
    if law == "constant":
        return lambda rng, shape: np.full(shape, mean_s)
    if law == "exponential":
        return lambda rng, shape: rng.exponential(mean_s, shape)
    if law != "gamma":
        raise ValueError(f"law = {law!r}: must be one of: constant, exponential, gamma")
    k, rate = gamma_shape_rate(mean_s, cv)
    return lambda rng, shape: rng.gamma(k, 1.0 / rate, shape)


def gamma_cdf(x: float, shape: float) -> float:
    """P(X <= x) of Gamma(shape, 1): the regularised lower incomplete gamma function.

    The power series (Abramowitz and Stegun 6.5.29): all terms are positive, so it is exact to rounding for every
    x, in about x + 10 sqrt(x) terms.
    """
    if x <= 0.0:
        return 0.0
    if x > shape + 60.0 + 40.0 * math.sqrt(shape):
        return 1.0
    total = term = 1.0 / shape
    n = 1
    while term > 1e-16 * total:
        term *= x / (shape + n)
        total += term
        n += 1
    return min(1.0, total * math.exp(shape * math.log(x) - x - math.lgamma(shape)))


def gamma_quantile(p: float, shape: float, rate: float = 1.0) -> float:
    """The x with P(X <= x) = p of Gamma(shape, rate), by bisection.

    Raises:
        ValueError: p is not inside of [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p = {p!r}: must be 0 to below 1")
    if p == 0.0:
        return 0.0
    low, high = 0.0, shape + 1.0
    while gamma_cdf(high, shape) < p:
        low, high = high, 2.0 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        low, high = (middle, high) if gamma_cdf(middle, shape) < p else (low, middle)
    return (low + high) / 2.0 / rate


def gamma_density(x: float, shape: float, rate: float = 1.0) -> float:
    """Density of Gamma(shape, rate) at x > 0."""
    return rate * math.exp((shape - 1.0) * math.log(rate * x) - rate * x - math.lgamma(shape))


def expected_largest(n: int, shape: float, rate: float, *, printed: bool = False) -> float:
    """Approximate mean of the largest of n independent Gamma(shape, rate) times (extreme value theory).

    The largest is about b + a G, with b = F^-1(1 - 1/n) and G of the Gumbel law, whose mean is 0.5772. Appendix A
    prints a = 1 / rate, the limit for endlessly many environments; ``a = 1 / (n f(b))``, with f the density, is
    the scale of the same theory before that limit. With n = 1 there is nothing to wait for, and the mean is exact.
    Against simulation with 2 to 16 environments: from shape 4 on within 2 %, the printed form 1 to 17 % low; at
    shape 1 and n = 2 both 15 % low; far below shape 1 neither is of use, take the simulation.

    Args:
        n: environments.
        shape: of the time of all steps between two synchronizations.
        rate: of the same [1/s].
        printed: the form of the paper.
    """
    if n == 1:
        return shape / rate
    b = gamma_quantile(1.0 - 1.0 / n, shape, rate)
    scale = 1.0 / rate if printed else 1.0 / (n * gamma_density(b, shape, rate))
    return b + EULER_MASCHERONI * scale


def expected_run_time(
    states: int, n: int, interval: int, shape: float, rate: float, actor_s: float = 0.0, *, printed: bool = False
) -> float:
    """Claim 1: expected time to collect ``states`` states, by the formula.

    Args:
        states: K, over all environments.
        n: environments.
        interval: alpha, env steps of each between two synchronizations.
        shape: k of one step's time.
        rate: beta of one step's time [1/s].
        actor_s: c, computation of the actors for one step of all environments.
        printed: the form of the paper, see ``expected_largest``.
    """
    largest = expected_largest(n, shape * interval, rate, printed=printed)
    return states / (n * interval) * largest + states * actor_s / n


def simulated_rounds(
    rng: np.random.Generator, draw: Draw, rounds: int, n: int, interval: int, actor_s: float = 0.0
) -> np.ndarray:
    """Length of each round [rounds]: the slowest of n environments through ``interval`` steps, and the actors."""
    lengths = np.empty(rounds)
    chunk = max(1, 2_000_000 // (n * interval))
    for start in range(0, rounds, chunk):
        count = min(chunk, rounds - start)
        lengths[start : start + count] = draw(rng, (count, n, interval)).sum(axis=2).max(axis=1)
    return lengths + interval * actor_s


def simulated_run_time(
    rng: np.random.Generator,
    draw: Draw,
    states: int,
    n: int,
    interval: int,
    actor_s: float = 0.0,
    learner_s: float = 0.0,
    *,
    concurrent: bool = True,
) -> float:
    """Time of collecting and learning, simulated round by round.

    Args:
        rng: of the step times.
        draw: their law.
        states: K, over all environments; rounded up to whole rounds.
        n: environments.
        interval: alpha.
        actor_s: c, as in ``expected_run_time``.
        learner_s: time to learn from the data of one round.
        concurrent: learn from a round's data during the next round, as HTS-RL does, and not before it.
    """
    rounds = -(-states // (n * interval))
    lengths = simulated_rounds(rng, draw, rounds, n, interval, actor_s)
    if not concurrent:
        return float(lengths.sum() + rounds * learner_s)
    return float(lengths[0] + np.maximum(lengths[1:], learner_s).sum() + learner_s)


def simulated_speedup(
    rng: np.random.Generator, draw: Draw, n: int, interval: int, against: int = 1, states: int = 200_000
) -> float:
    """Run time with ``against`` steps between synchronizations over that with ``interval`` of them."""
    return simulated_run_time(rng, draw, states, n, against) / simulated_run_time(rng, draw, states, n, interval)


def expected_lag(actors: int, actor_rate: float, learner_rate: float) -> float:
    """Claim 2: expected updates between the policy that collected and the learner's, with a queue between them.

    The length of an M/M/1 queue: n actors each send data as a Poisson process, the learner takes an
    exponentially distributed time for each: n rho / (1 - n rho), rho = actor_rate / learner_rate.

    Args:
        actors: n.
        actor_rate: data of one actor [1/s].
        learner_rate: data that the learner can consume [1/s].

    Raises:
        ValueError: the learner is too slow, so the queue grows without end.
    """
    load = actors * actor_rate / learner_rate
    if load >= 1.0:
        raise ValueError(f"{actors} actors send {load:.3g} times what the learner can consume: must be below 1")
    return load / (1.0 - load)


def simulated_lag(
    rng: np.random.Generator, actors: int, actor_rate: float, learner_rate: float, data: int = 200_000
) -> float:
    """Mean number of data in queue and learner that a new one finds, over the second half of ``data`` arrivals."""
    arrivals = np.sort(rng.exponential(1.0 / actor_rate, (actors, data // actors)).cumsum(axis=1), axis=None)
    # Nobody sends beyond the time at which the first actor has run out of data.
    arrivals = arrivals[: int(0.95 * len(arrivals))]
    served = rng.exponential(1.0 / learner_rate, len(arrivals))
    # A datum is done at max(its arrival, the end before it) + its service, unrolled into a running maximum.
    ends = served.cumsum()
    ends += np.maximum.accumulate(arrivals - (ends - served))
    found = np.arange(len(arrivals)) - np.searchsorted(ends, arrivals, side="right")
    return float(found[len(found) // 2 :].mean())
