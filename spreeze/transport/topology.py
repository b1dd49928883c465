"""Mixing matrices and bounds of GALA (arXiv 1906.04585, section 3).

n learners hold parameters X [n, d]. One gossip step is ``X <- P (X + G)`` with a row-stochastic P [n, n], where row i
gives one weight to learner i and to each of its in-neighbours, and G [n, d] are the optimizers' updates. The radius of
the ball around their mean is ``||X - mean X||``, the Frobenius norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def _distances(topology: str, count: int) -> list[int]:
    """Offsets of the in-neighbours in a ring of ``count`` learners."""
    if topology == "full":
        return list(range(1, count))
    if topology == "exponential":
        return [2**power for power in range(count.bit_length()) if 2**power < count]
    return [1] if count > 1 else []


def in_neighbours(topology: str, learner: int, living: Sequence[int]) -> tuple[int, ...]:
    """In-neighbours of a learner among the ``living``; the others are skipped.

    ring: the one before it; exponential: those 1, 2, 4, ... before it; full: all.
    """
    ring = sorted({*living, learner})
    place = ring.index(learner)
    return tuple(ring[(place - distance) % len(ring)] for distance in _distances(topology, len(ring)))


def mixing_matrix(topology: str, count: int) -> np.ndarray:
    """P [n, n]; its columns sum to 1 as well."""
    matrix = np.eye(count)
    for learner in range(count):
        matrix[learner, list(in_neighbours(topology, learner, range(count)))] = 1.0
    return np.asarray(matrix / matrix.sum(1, keepdims=True))


def contraction(matrix: np.ndarray) -> float:
    """beta: the factor by which P shrinks a deviation from the mean, its second largest singular value.

    cos(pi / n) of the ring, so that two learners agree at once; 0 of the full graph.
    """
    count = len(matrix)
    largest = float(np.linalg.norm((np.eye(count) - 1.0 / count) @ matrix, 2))
    return largest if largest > 1e-12 else 0.0


def hops(topology: str, count: int) -> int:
    """Gossip steps until every learner has heard of every other."""
    reached, matrix, steps = np.eye(count), mixing_matrix(topology, count), 0
    while not (reached > 0.0).all():
        reached, steps = reached @ matrix, steps + 1
    return steps


def radius(parameters: np.ndarray) -> float:
    """``||X - mean X||`` of parameters [n, d]."""
    return float(np.linalg.norm(parameters - parameters.mean(0, dtype=np.float64)))


def synchronous_bound(norms: np.ndarray, beta: float) -> float:
    """Proposition 1: the largest radius where all learners mix at every step, and start with the same parameters.

    ``norms`` [n, k] are those of each learner's latest k updates, the newest last; older ones are left out.
    """
    stacked = np.linalg.norm(norms, axis=0)
    return float((stacked * beta ** np.arange(len(stacked), 0, -1.0)).sum())


def asynchronous_bound(largest_update: float, topology: str, count: int, staleness: float) -> float:
    """Proposition 2: the largest radius whatever the delays, ``L beta~ / (1 - beta)``.

    ``largest_update`` is the largest norm of one learner's update, ``staleness`` the most updates that a learner took
    between two messages of an in-neighbour. Its constants are the worst case. In a window of T = 2 hops (staleness + 2)
    updates, every learner has heard of every other, with a weight of at least (1 / (1 + in-neighbours))^T. So a window
    shrinks the largest distance by 1 minus that, which is beta^T, and beta~ = beta^(1 - T). From the distances to the
    radius it is a factor of 2 sqrt(n).
    """
    if count < 2 or largest_update <= 0.0:
        return 0.0
    window = 2.0 * hops(topology, count) * (staleness + 2.0)
    log_weight = -window * math.log(1 + len(_distances(topology, count)))
    log_beta = math.log1p(-math.exp(log_weight)) / window
    if log_beta == 0.0:
        return math.inf
    return 2.0 * math.sqrt(count) * largest_update * math.exp((1.0 - window) * log_beta) / -math.expm1(log_beta)
