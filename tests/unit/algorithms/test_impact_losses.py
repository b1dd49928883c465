"""What IMPACT, IMPALA and APPO add to the losses, against numbers worked by hand and central differences."""

import math

import numpy as np
import pytest
import torch
from numpy_reference import central_difference

from spreeze.algorithms import losses

REWARD, VALUE, NEXT = ([1.0, 0.0, 2.0], [1.0, 2.0, 4.0], [2.0, 4.0, 6.0])


def column(values):
    return np.array(values, np.float64).reshape(-1, 1)


def vtrace(lam=0.5, rho=(1.0, 1.0, 1.0), c=(1.0, 1.0, 1.0), terminated=(0, 0, 0), truncated=(0, 0, 0)):
    found = losses.vtrace(*map(column, (REWARD, VALUE, NEXT)), column(terminated), column(truncated), 0.5, lam,
                          column(rho), column(c))  # fmt: skip
    return [array[:, 0].tolist() for array in found]


def test_vtrace_is_that_of_numbers_worked_by_hand():
    # delta = 1 + .5*2 - 1, 0 + .5*4 - 2, 2 + .5*6 - 4 = 1, 0, 1, by gamma; the trace by lambda gamma = 1/4:
    # excess = 1/2 + 1/4*1*(1/32), 0 + 1/4*1/2*(1/4), 1/4*1; the other is delta + 1/2 excess of the next step.
    excess, ahead = vtrace(rho=(0.5, 1, 0.25), c=(1, 0.5, 1))
    assert excess == pytest.approx([0.5 + 1 / 128, 1 / 32, 1 / 4])
    assert ahead == pytest.approx([1 + 1 / 64, 1 / 8, 1])


def test_delta_is_discounted_by_gamma_alone_and_the_last_step_counts():
    """RLlib passes gamma lambda as the discount of both, and left out the last step (ray #36013)."""
    excess, _ = vtrace(lam=0.0)
    assert excess == [1, 0, 1], "with lambda 0 the plain temporal differences remain, of all three steps"


def test_where_all_ratios_are_1_it_is_gae():
    rng = np.random.default_rng(0)
    reward, value, following = rng.standard_normal((3, 7, 4))
    ended = rng.random((7, 4))
    data = reward, value, following, ended < 0.2, ended > 0.8, 0.9, 0.8
    np.testing.assert_allclose(losses.vtrace(*data, 1.0, 1.0)[0], losses.advantages(*data)[1], rtol=1e-6)


def test_an_end_cuts_the_trace_and_only_a_terminated_one_the_value():
    assert vtrace(terminated=(0, 1, 0))[0] == pytest.approx([1 - 2 / 4, -2, 1])
    assert vtrace(truncated=(0, 1, 0))[0] == pytest.approx([1, 0, 1])


def test_the_ratios_are_those_of_the_paper():
    theta, target, worker = (torch.tensor(values).log() for values in ([0.6, 0.3], [0.1, 0.4], [0.8, 0.2]))
    found = {kind: (theta - losses.ratio_denominator(target, worker, 2.0, kind)).exp() for kind in ("R1", "R2", "R3")}
    torch.testing.assert_close(found["R1"], torch.tensor([6.0, 0.75]))
    torch.testing.assert_close(found["R2"], torch.tensor([0.75, 1.5]))
    # min(.8/.1, 2) * .6/.8 = 1.5: without the bound rho it would be 6; min(.2/.4, 2) * .3/.2 = .75
    torch.testing.assert_close(found["R3"], torch.tensor([1.5, 0.75]))


def test_the_clipped_objective_has_no_gradient_outside_of_its_range():
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    objective, derivative = losses.clipped_surrogate(log_ratio.exp(), advantage, 0.2)
    torch.testing.assert_close(objective, torch.tensor([1.2, -1.5, 0.5, -0.8, 2.2]))
    torch.testing.assert_close(derivative, torch.tensor([0.0, -1.5, 0.5, 0.0, 2.2]))


def test_the_divergence_of_softmax_policies_is_that_of_numbers_worked_by_hand():
    log_p, log_q = torch.tensor([[0.5], [0.5]]).log(), torch.tensor([[0.25], [0.75]]).log()
    divergence, gradient = losses.categorical_kl(log_p, log_q)
    assert divergence.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    torch.testing.assert_close(gradient, torch.tensor([[-0.25], [0.25]]))


def test_the_divergence_of_gaussians_is_that_of_numbers_worked_by_hand_and_its_gradient_that_of_differences():
    # log 2 + (1 + 1^2) / (2 * 2^2) - 1/2 between N(0, 1) and N(1, 2^2)
    zero, one, log_2 = torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([math.log(2.0)])
    assert losses.gaussian_kl(zero, zero, one, log_2)[0].item() == pytest.approx(math.log(2) + 0.25 - 0.5)
    rng = np.random.default_rng(0)
    mean_p, log_std_p = torch.from_numpy(rng.standard_normal((2, 2, 3)))
    vector = rng.standard_normal(8)

    def found():
        return losses.gaussian_kl(mean_p, log_std_p, torch.tensor(vector[:6].reshape(2, 3)), torch.tensor(vector[6:]))

    expected = central_difference(lambda: found()[0].sum().item(), vector, range(8))
    _, by_mean, by_log_std = found()
    np.testing.assert_allclose([*by_mean.flatten(), *by_log_std.sum(1)], expected, rtol=1e-6)


def test_the_coefficient_grows_above_twice_the_target_and_halves_below_half_of_it():
    found = [losses.adapted_coefficient(1.0, divergence, 0.01) for divergence in (0.021, 0.02, 0.005, 0.004, math.nan)]
    assert found == [1.5, 1.0, 1.0, 0.5, 1.5]
    found = [losses.adapted_coefficient(coefficient, 0.0, 0.01) for coefficient in (1.5e-3, 1e-3, 1e-4)]
    assert found == [1e-3, 1e-3, 1e-4], "from 0 it would never come back"
