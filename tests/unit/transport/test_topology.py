"""Gossip graphs, mixing matrices, and the bounds of GALA's propositions, by hand-worked numbers."""

import numpy as np
import pytest

from spreeze.transport.gossip import (
    asynchronous_bound,
    contraction,
    hops,
    in_neighbours,
    mixing_matrix,
    radius,
    synchronous_bound,
)


@pytest.mark.parametrize(("topology", "expected"), [
    ("ring", [(4,), (0,)]), ("exponential", [(4, 3, 1), (0, 4, 2)]), ("full", [(4, 3, 2, 1), (0, 4, 3, 2)]),
])  # fmt: skip
def test_each_topology_has_the_in_neighbours_of_its_definition(topology, expected):
    assert [in_neighbours(topology, learner, range(5)) for learner in (0, 1)] == expected


@pytest.mark.parametrize("topology", ["ring", "exponential", "full"])
@pytest.mark.parametrize("living", [(0, 1, 2, 3), (0, 2, 3), (1, 3), (2,)])
def test_everybody_hears_somebody_and_nobody_hears_the_dead(topology, living):
    for learner in living:
        heard = in_neighbours(topology, learner, living)
        assert set(heard) <= set(living) - {learner}
        assert (len(heard) > 0) == (len(living) > 1)


def test_a_ring_of_four_halves_and_its_contraction_is_a_cosine():
    matrix = mixing_matrix("ring", 4)
    half = 0.5
    assert matrix.tolist() == [[half, 0, 0, half], [half, half, 0, 0], [0, half, half, 0], [0, 0, half, half]]
    assert contraction(matrix) == pytest.approx(np.cos(np.pi / 4))
    assert [contraction(mixing_matrix("ring", 2)), contraction(mixing_matrix("full", 5))] == [0.0, 0.0]
    assert [hops(name, 8) for name in ("ring", "exponential", "full")] == [7, 3, 1]
    assert hops("ring", 1) == 0


def test_the_radius_is_the_norm_of_all_deviations_from_the_mean():
    assert radius(np.array([[0.0, 3.0], [4.0, 3.0]], np.float32)) == pytest.approx(np.sqrt(4 + 4))


def test_proposition_1_by_hand():
    norms = np.array([[3.0, 0.0], [4.0, 2.0]])
    assert synchronous_bound(norms, 0.5) == pytest.approx(5.0 * 0.25 + 2.0 * 0.5)


@pytest.mark.parametrize("topology", ["ring", "exponential"])
def test_synchronous_gossip_stays_within_the_bound_of_proposition_1(topology):
    rng, learners = np.random.default_rng(0), 6
    matrix = mixing_matrix(topology, learners)
    beta, x, norms = contraction(matrix), np.zeros((learners, 5)), np.zeros((learners, 0))
    for _ in range(60):
        update = rng.standard_normal((learners, 5))
        norms = np.hstack([norms, np.linalg.norm(update, axis=1, keepdims=True)])
        x = matrix @ (x + update)
        assert radius(x) <= synchronous_bound(norms, beta) * (1 + 1e-9)


@pytest.mark.parametrize("slow", [1, 7])
def test_asynchronous_gossip_stays_within_the_bound_of_proposition_2(slow):
    """Learner 0 takes a step only every ``slow`` rounds; updates drive the learners apart as far as they can."""
    learners, x, sent, stale, most = 3, np.zeros((3, 4)), {}, np.zeros(3), 0.0
    directions = np.eye(4)[:3]
    for step in range(200):
        for i in [i for i in range(learners) if i or step % slow == 0]:
            x[i] += directions[i]
            sent[i] = x[i].copy()
            stale[i] += 1
            message = sent.pop((i - 1) % learners, None)
            if message is not None:
                x[i], stale[i] = (x[i] + message) / 2, 0
            most = max(most, stale[i])
        assert radius(x) <= asynchronous_bound(1.0, "ring", learners, most)
    assert asynchronous_bound(1.0, "ring", 1, 5) == 0.0
    assert asynchronous_bound(1.0, "ring", 2, 1) < asynchronous_bound(1.0, "ring", 2, 2)
    assert asynchronous_bound(1.0, "ring", 16, 1e6) == np.inf
