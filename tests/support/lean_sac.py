"""SAC as lean as autograd makes it: what the hand-derived update is held against, in its numbers and in its speed.

Stacked critics (``baddbmm``), fused Adam, gradients only of what a step moves, no pass of which a half is thrown away.
It keeps no metrics and does not look for gradients that are not finite. ``taskset -c 1 python
tests/support/lean_sac.py [compiled]`` measures both in turn on one thread.
"""

import math
import statistics
import sys
from itertools import pairwise
from time import perf_counter

import torch
from matmul_floor import ACTION_DIM, OBS_DIM, synthetic_batch

from spreeze.algorithms import create
from spreeze.algorithms.sac import SACConfig
from spreeze.types import RowLayout

CONFIG = SACConfig(actor_lr=3e-4, critic_lr=3e-4, alpha_lr=3e-4, initial_alpha=1.0, tau=0.005)
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def network(stack, sizes, dtype):
    return [torch.randn(stack, rows, columns, dtype=dtype).div_(math.sqrt(columns)).requires_grad_()
            for inputs, columns in pairwise(sizes) for rows in (inputs, 1)]  # fmt: skip


def run(layers, x):
    """Outputs [S, B, K] of stacked perceptrons at x [B, I]."""
    x = x.expand(layers[0].shape[0], -1, -1)
    for index in range(0, len(layers), 2):
        x = torch.baddbmm(layers[index + 1], x, layers[index])
        x = torch.relu(x) if index + 2 < len(layers) else x
    return x


def least_q(critics, obs, action):
    return run(critics, torch.cat((obs, action), 1))[..., 0].amin(0)


def draw(actor, obs, noise):
    """Actions and log-densities (arXiv 1812.05905, appendix C)."""
    mean, log_std = run(actor, obs)[0].chunk(2, 1)
    log_std = log_std.clamp(-20.0, 2.0)
    u = mean + log_std.exp() * noise
    correction = 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
    return torch.tanh(u), (-0.5 * noise.square() - log_std - HALF_LOG_2PI - correction).sum(1)


def goal(actor, targets, batch, noise, alpha):
    action, log_prob = draw(actor, batch.next_obs, noise)
    soft = least_q(targets, batch.next_obs, action) - alpha * log_prob
    return batch.reward + batch.discount * (1.0 - batch.terminated) * soft


def critic_loss(critics, obs_action, wanted):
    return 0.5 * (run(critics, obs_action)[..., 0] - wanted).square().mean(1).sum()


def actor_loss(actor, critics, obs, noise, alpha):
    action, log_prob = draw(actor, obs, noise)
    return (alpha * log_prob - least_q(critics, obs, action)).mean(), log_prob.detach()


class LeanSAC:
    def __init__(self, dtype=torch.float32, compiled=False):
        self.actor = network(1, (OBS_DIM, 256, 256, 2 * ACTION_DIM), dtype)
        self.critics = network(2, (OBS_DIM + ACTION_DIM, 256, 256, 1), dtype)
        self.targets = [layer.detach().clone() for layer in self.critics]
        self.log_alpha = torch.zeros(1, dtype=dtype, requires_grad=True)
        sides = (self.critics, self.actor, [self.log_alpha])
        self.adams = [torch.optim.Adam(side, lr=3e-4, fused=True) for side in sides]
        made = torch.compile if compiled else lambda function: function
        self.goal, self.critic_loss, self.actor_loss = made(goal), made(critic_loss), made(actor_loss)

    def update(self, batch, noise=None):
        rows = len(batch.reward)
        noise = torch.randn(2 * rows, ACTION_DIM) if noise is None else noise
        with torch.no_grad():
            alpha = self.log_alpha.exp()
            wanted = self.goal(self.actor, self.targets, batch, noise[:rows], alpha)
        self._step(0, self.critics, self.critic_loss(self.critics, batch.obs_action, wanted))
        loss, log_prob = self.actor_loss(self.actor, self.critics, batch.obs, noise[rows:], alpha)
        self._step(1, self.actor, loss)
        self.log_alpha.grad = (ACTION_DIM - log_prob.mean()).reshape(1)
        self.adams[2].step()
        with torch.no_grad():
            torch._foreach_lerp_(self.targets, self.critics, 0.005)

    def _step(self, index, layers, loss):
        for layer, gradient in zip(layers, torch.autograd.grad(loss, layers), strict=True):
            layer.grad = gradient
        self.adams[index].step()

    def take(self, algorithm):
        """Copies the networks of Spreeze's SAC."""
        networks = ((self.actor, algorithm.actor.online), (self.critics, algorithm.critics.online),
                    (self.targets, algorithm.critics.target))  # fmt: skip
        with torch.no_grad():
            for layers, theirs in networks:
                for layer, value in zip(layers, tensors_of(theirs), strict=True):
                    layer.copy_(value)


def tensors_of(parameters):
    """Weights [S, in, out] and biases [S, 1, out] in turn, the head last."""
    hidden = [one for pair in zip(parameters.weights, parameters.biases, strict=True) for one in pair]
    return [*hidden, parameters.head_weight.transpose(1, 2), parameters.head_bias.transpose(1, 2)]


def main(sizes=(64, 256, 1024), pairs=25, block_s=0.08):
    torch.set_num_threads(1)
    for size in sizes:
        batch = synthetic_batch(RowLayout(OBS_DIM, ACTION_DIM), size, 0.99)
        both = create("sac", OBS_DIM, ACTION_DIM, CONFIG, 0), LeanSAC(compiled="compiled" in sys.argv)
        for _ in range(10):
            for one in both:
                one.update(batch)
        counts = [max(2, round(block_s / timed(one, batch, 10))) for one in both]
        took = [[timed(one, batch, count) for one, count in zip(both, counts, strict=True)] for _ in range(pairs)]
        ours, theirs = (statistics.median(column) for column in zip(*took, strict=True))
        ratios = statistics.quantiles([lean / fused for fused, lean in took], n=4)
        print(f"batch {size}: {1e6 * ours:.0f} us, lean autograd {1e6 * theirs:.0f} us, "
              f"ratio {ratios[1]:.2f} [quartiles {ratios[0]:.2f} .. {ratios[2]:.2f}], n={pairs}")  # fmt: skip


def timed(algorithm, batch, count):
    """Seconds of one update."""
    start = perf_counter()
    for _ in range(count):
        algorithm.update(batch)
    return (perf_counter() - start) / count


if __name__ == "__main__":
    main()
