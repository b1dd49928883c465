"""Losses and returns as small pure functions, each with its source.

Constants are ``alpha`` and ``value`` arguments: ``x * 2.0`` would create a tensor first, which costs more than the
multiplication. Tensors of actions are component-first, [A, B]: contiguous halves of a policy head are faster on a CPU.
Advantages are computed in NumPy over T env steps of N environments; all arrays are [T, N]. Only ``terminated`` cuts the
bootstrap; both flags cut the sum over later steps: after a truncated step another episode starts, but the value of the
next state still counts.
"""

from __future__ import annotations

import math

import numpy as np

from spreeze.inference.heads import HALF_LOG_2PI
from spreeze.inference.lazy_torch import Tensor, functional, torch

_LOG_2 = math.log(2.0)
_PAIRS = 2**17
"""Pairs of a quantile and a target computed at once on a CPU, so that they stay in the core's cache between passes."""
_FORBIDDEN = -1e9
"""Value or logit of an invalid action: so low that its probability is exactly 0, but finite, so that probability times
log-probability is 0 and not NaN."""


def td_target(reward: Tensor, terminated: Tensor, discount: Tensor | float, next_value: Tensor) -> Tensor:
    """One-step or n-step target ``R + discount (1 - terminated) V(s')`` (Sutton and Barto 2018, eq. 7.1).

    Only ``terminated`` cuts the bootstrap, ``truncated`` does not. All are [B]. For n steps ``reward`` is the
    discounted sum. ``discount`` is gamma^k, tensor or number; k is the number of env steps that the transition spans.
    """
    bootstrap = torch.addcmul(next_value, terminated, next_value, value=-1.0)
    if isinstance(discount, torch.Tensor):
        return torch.addcmul(reward, discount, bootstrap)
    return torch.add(reward, bootstrap, alpha=discount)


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draws ``a = tanh(u)``, ``u = mean + exp(log_std) noise``, with its log-density (arXiv 1812.05905, app. C).

    All arguments are [A, B], ``log_std`` already in its range, ``noise`` standard normal. Returns action [A, B],
    log-density [B] in nat, and ``exp(log_std) noise`` [A, B] for the gradient. The correction ``log(1 - tanh(u)^2)`` is
    ``2 (log 2 - u - softplus(-2 u))``, which neither overflows nor loses digits for large ``u``.
    """
    scaled_noise = log_std.exp().mul_(noise)
    u = mean + scaled_noise
    # Half of each component's log-density without constants; softplus(-2 u) = -2 softplus(u, beta=-2).
    half = torch.sub(u, functional.softplus(u, -2.0), alpha=2.0)
    half.sub_(log_std, alpha=0.5).addcmul_(noise, noise, value=-0.25)
    constant = u.new_full((), -mean.shape[0] * (HALF_LOG_2PI + 2.0 * _LOG_2))
    log_prob = torch.add(constant, half.sum(0), alpha=2.0)
    return u.tanh_(), log_prob, scaled_noise


def squashed_gaussian_backward(
    action: Tensor, scaled_noise: Tensor, grad_action: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of ``sum(grad_action a) + weight sum(log-density)`` with respect to mean and log_std, for fixed noise.

    With ``da/du = 1 - a^2``, ``d log-density / du = 2 a`` and ``du / d log_std = scaled_noise``; the density's own
    ``-log_std`` adds ``-weight``. ``grad_action`` [A, B] comes from the critic; ``weight``, the factor of each
    log-density, is alpha / B in SAC. Both gradients are [A, B].
    """
    inner = torch.sub(weight + weight, action * grad_action)
    grad_mean = torch.addcmul(grad_action, action, inner)
    return grad_mean, torch.mul(grad_mean, scaled_noise).sub_(weight)


def tanh_backward(action: Tensor, grad_action: Tensor) -> Tensor:
    """Gradient through ``a = tanh(u)``: ``grad (1 - a^2)``, all [A, B]."""
    return torch.addcmul(grad_action, action * grad_action, action, value=-1.0)


def mask_logits(values: Tensor, obs: Tensor, num_continuous: int = 0) -> Tensor:
    """Values or logits [K, B] with invalid actions masked out, by the masks in obs [B, O].

    The masks are the last K columns (``types.EnvSpec``). Softmax is then over the allowed actions, and no gradient
    reaches the others (Huang and Ontanon 2022, arXiv 2006.14171, section 3). The first ``num_continuous`` outputs, of a
    continuous action, are not changed.
    """
    if num_continuous:
        return torch.cat((values[:num_continuous], mask_logits(values[num_continuous:], obs)))
    return values.masked_fill(obs[:, -len(values) :].t() == 0.0, _FORBIDDEN)


def huber_gradient(error: Tensor, threshold: float = 1.0) -> Tensor:
    """Gradient of Huber's loss (Huber 1964): the error, clamped to within the threshold; any shape."""
    return error.clamp(-threshold, threshold)


def drop_top_quantiles(values: Tensor, drop: int) -> Tensor:
    """Pooled values [B, N] without the ``drop`` highest of each row, in any order: [B, N - drop].

    Equation 10 of arXiv 2005.04269, before reward and discount, which preserve the order.
    """
    return values.topk(values.shape[1] - drop, 1, largest=False, sorted=False).values


def quantile_huber_gradient(quantiles: Tensor, target: Tensor, levels: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Derivative [Q, B] with respect to quantiles of ``mean_j |level - 1(u_j < 0)| huber(u_j)``, u_j = target_j - q.

    arXiv 1710.10044, eq. 10, threshold 1 in the unit of the values: the deviation of returns, unless rewards are raw.
    ``target`` is [M, B]; ``levels`` [Q] are the quantiles' probabilities; ``scratch`` (see ``pairs_for``) holds pairs.
    With c_j for u_j clamped to [-1, 1] it is ``mean_j ((1/2 - level) |c_j| - c_j / 2)``: each pair is clamped once.
    """
    count, num_targets = len(quantiles), len(target)
    scratch = pairs_for(quantiles, num_targets) if scratch is None else scratch
    sums, sizes = torch.empty_like(quantiles), torch.empty_like(quantiles)
    for start in range(0, count, step := scratch.shape[1]):
        part = slice(start, min(start + step, count))
        errors = scratch[:, : part.stop - start]
        torch.sub(target.unsqueeze(1), quantiles[part], out=errors).clamp_(-1.0, 1.0)
        torch.sum(errors, 0, out=sums[part])
        torch.sum(errors.abs_(), 0, out=sizes[part])
    return sizes.mul_(0.5 - levels.unsqueeze(1)).sub_(sums, alpha=0.5).div_(num_targets)


def pairs_for(quantiles: Tensor, num_targets: int) -> Tensor:
    """Memory [M, q, B] for the pairs of q of the quantiles [Q, B] with M = ``num_targets`` targets; on a GPU q is Q."""
    count, rows = quantiles.shape
    at_once = max(1, _PAIRS // (num_targets * rows)) if quantiles.device.type == "cpu" else count
    # In equal parts, so that there is no small remainder, which would be slower for its size.
    return quantiles.new_empty(num_targets, -(-count // -(-count // min(at_once, count))), rows)


def projected(prob: Tensor, target: Tensor, low: float, high: float) -> Tensor:
    """Projects returns ``target`` [M, B] to probabilities [K, B] of K equally spaced returns from ``low`` to ``high``.

    Each of their probabilities ``prob`` [M, B] is divided between its two neighbours (arXiv 1707.06887, alg. 1; here M
    = K).
    """
    atoms = len(prob)
    position = target.clamp(low, high).sub_(low).mul_((atoms - 1) / (high - low))
    lower = position.floor().clamp_(max=atoms - 2)
    upper_prob = (position - lower).mul_(prob)
    index = lower.nan_to_num(0.0).long()
    return torch.zeros_like(prob).scatter_add_(0, index, prob - upper_prob).scatter_add_(0, index + 1, upper_prob)


def soft_policy_gradient(prob: Tensor, log_prob: Tensor, values: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of each row's ``E_pi(alpha log pi - Q)`` to a softmax policy's logits (arXiv 1910.07207, eq. 12).

    With ``f = alpha log pi - Q`` it is ``pi (f - E_pi f)``: the derivative of alpha log pi itself sums to zero. Policy,
    its logarithm and Q are [K, B]. Returns the gradient [K, B] and the negative entropy [B] in nat.
    """
    f = torch.sub(log_prob * alpha, values)
    mean = (prob * f).sum(0)
    return f.sub_(mean).mul_(prob), (prob * log_prob).sum(0)


def smoothed_action(action: Tensor, noise: Tensor, std: float, clip: float) -> Tensor:
    """Target policy smoothing: ``clamp(a + clamp(std noise, -clip, clip), -1, 1)`` (arXiv 1802.09477, eq. 14).

    ``action`` [A, B] is in [-1, 1], ``noise`` [A, B] standard normal, ``clip`` the bound of the scaled noise.
    """
    return (noise * std).clamp_(-clip, clip).add_(action).clamp_(-1.0, 1.0)


def categorical(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities in nat of a softmax policy: [K, B] of all actions and [B] of ``index`` [1, B]."""
    log_pi = torch.log_softmax(logits, 0)
    return log_pi, log_pi.gather(0, index)[0]


def categorical_backward(log_pi: Tensor, index: Tensor, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
    """Gradient of ``sum(grad_log_prob log pi(a)) - entropy_weight sum H`` to the logits [K, B].

    With ``d log pi(a) / d logits = onehot(a) - pi`` and ``dH / d logits = -pi (log pi + H)``.
    """
    prob = log_pi.exp()
    if entropy_weight:
        negative_entropy = (prob * log_pi).sum(0)
        grad = torch.sub(log_pi, negative_entropy).mul_(entropy_weight).sub_(grad_log_prob).mul_(prob)
    else:
        grad = prob.mul_(grad_log_prob).neg_()
    return grad.scatter_add_(0, index, grad_log_prob.unsqueeze(0))


def gaussian(mean: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density [B] in nat of actions [A, B] under independent Gaussians, and ``(action - mean) / std`` [A, B].

    ``log_std`` [A] is the same for all rows.
    """
    z = torch.sub(action, mean).mul_(log_std.neg().exp_().unsqueeze(1))
    constant = log_std.sum().add_(len(mean) * HALF_LOG_2PI).neg_()
    return z, torch.add(constant, z.square().sum(0), alpha=-0.5)


def gaussian_backward(
    z: Tensor, log_std: Tensor, grad_log_prob: Tensor, entropy_weight: float
) -> tuple[Tensor, Tensor]:
    """Gradient of ``sum(grad_log_prob log pi(a)) - entropy_weight sum H`` to mean [A, B] and log_std [A].

    ``H = sum(log_std) + A (1 + log 2 pi) / 2`` does not depend on the row.
    """
    weighted = z * grad_log_prob
    grad_log_std = (z * weighted).sum(1).sub_(grad_log_prob.sum()).sub_(entropy_weight * z.shape[1])
    return weighted.mul_(log_std.neg().exp_().unsqueeze(1)), grad_log_std


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Entropy in nat of independent Gaussians with log standard deviations [A]."""
    return log_std.sum() + len(log_std) * (0.5 + HALF_LOG_2PI)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """PPO's objective ``min(r A, clamp(r, 1 - clip, 1 + clip) A)`` [B] (arXiv 1707.06347, eq. 7), and a derivative [B].

    The derivative is with respect to log pi: ``r A`` where the minimum is the first term, else 0.
    """
    plain = ratio * advantage
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip).mul_(advantage)
    return torch.minimum(plain, clipped), plain * (plain <= clipped)


def clipped_value_error(value: Tensor, target: Tensor, old_value: Tensor, clip: float) -> Tensor:
    """Derivative [B] to v of ``max((v - R)^2, (v_c - R)^2) / 2``, ``v_c`` clipped to within ``clip`` of the old value.

    An option of OpenAI's baselines, not of arXiv 1707.06347; where the second term is larger, it is constant.
    """
    error, moved = value - target, value - old_value
    near = moved.clamp(-clip, clip).add_(old_value).sub_(target)
    within = moved.abs() <= clip  # there near equals error up to rounding, which must not decide
    return error * (within | (error.square() >= near.square()))


def advantages(
    reward: np.ndarray,
    value: np.ndarray,
    next_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    lam: float,
    weight: np.ndarray | float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Value targets and generalized advantage estimates (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    ``A_t = delta_t + gamma lam A_(t+1)`` with ``delta_t = r_t + gamma V(s_(t+1)) - V(s_t)``; the target is ``A_t +
    V(s_t)``. ``value`` is V before a step and ``next_value`` V after it, of the true last state where the episode ends;
    ``lam`` 0 relies on the values, 1 on the rewards.

    With importance weights ``min(1, pi / mu)`` they are those of V-trace (Espeholt et al. 2018, arXiv 1802.01561, eq.
    1, remark 2), rho ``weight`` and c ``lam weight``: ``v_t - V_t = w_t A_t`` with ``A_t = delta_t + gamma lam (v_(t+1)
    - V_(t+1))``, without the advantage's own weight.
    """
    delta: np.ndarray = reward + gamma * np.where(terminated, 0.0, next_value).astype(value.dtype) - value
    carried = np.where(np.logical_or(terminated, truncated), 0.0, gamma * lam).astype(np.float32)
    excess, later = _backward_sums(weight * delta, weight * carried)
    return excess + value, delta + carried * later


def vtrace(
    reward: np.ndarray,
    value: np.ndarray,
    next_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    lam: float,
    rho: np.ndarray | float,
    c: np.ndarray | float,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace with separate weights: ``v_t - V_t`` and ``r_t + gamma v_(t+1) - V_t``, both [T, N].

    ``v_t - V_t = rho_t delta_t + gamma lam c_t (v_(t+1) - V_(t+1))`` with ``delta_t = r_t + gamma V(s_(t+1)) - V(s_t)``
    (Espeholt et al. 2018, arXiv 1802.01561, eq. 1, remarks 1 and 2): ``delta`` is discounted by gamma alone, the trace
    by lambda gamma. ``rho`` and ``c`` are the ratios of probabilities, clipped to rho-bar and c-bar. The first is the
    advantage of V-trace-GAE (IMPACT, arXiv 1912.00167, section 3.1), and GAE where all ratios are 1. The second, times
    rho, is the advantage of IMPALA (section 4.2). The rollout's last step counts.
    """
    delta: np.ndarray = reward + gamma * np.where(terminated, 0.0, next_value).astype(value.dtype) - value
    carried = np.where(np.logical_or(terminated, truncated), 0.0, gamma).astype(np.float32)
    excess, later = _backward_sums(rho * delta, lam * c * carried)
    return excess, delta + carried * later


def _backward_sums(terms: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``s_t = term_t + factor_t s_(t+1)`` and ``s_(t+1)``, both [T, N]; ``terms`` becomes the first."""
    later = np.zeros_like(terms)
    for t in range(len(terms) - 2, -1, -1):
        later[t] = terms[t + 1]
        terms[t] += factor[t] * later[t]
    return terms, later


def ratio_denominator(log_target: Tensor, log_worker: Tensor, rho: float, kind: str) -> Tensor:
    """Logarithm [B] of the denominator of IMPACT's ratio of pi_theta (arXiv 1912.00167, section 3.1 and figure 3).

    R3 is ``min(pi_worker / pi_target, rho) pi_theta / pi_worker``: ``pi_theta / max(pi_target, pi_worker / rho)``; the
    ablations are R1, ``pi_theta / pi_target``, and R2, ``pi_theta / pi_worker``.
    """
    if kind == "R1":
        return log_target
    return log_worker if kind == "R2" else torch.maximum(log_target, log_worker - math.log(rho))


def categorical_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """``KL(p, q)`` [B] in nat of softmax policies, and its gradient [K, B] to the logits of q; log_p, log_q [K, B]."""
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(0), log_q.exp().sub_(p)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``KL(p, q)`` [B] in nat of independent Gaussians, and its gradients to q's mean and log_std, [A, B] each.

    The means are [A, B], as is ``log_std_p``; ``log_std_q`` [A] is the same for all rows.
    """
    precision = log_std_q.mul(-2.0).exp_().unsqueeze(1)
    difference = mean_q - mean_p
    spread = difference.square().add_(log_std_p.mul(2.0).exp_()).mul_(precision)
    divergence = torch.add((log_std_q.unsqueeze(1) - log_std_p).sum(0), spread.sub(1.0).sum(0), alpha=0.5)
    return divergence, difference.mul_(precision), torch.sub(1.0, spread)


def adapted_coefficient(coefficient: float, divergence: float, target: float) -> float:
    """The KL term's coefficient for the next updates: 1.5 times above twice the target, half below half of it.

    As in RLlib's APPO, but from 0.001, from which it can recover, to a million. A non-finite ``divergence`` [nat] is
    too large.
    """
    if not divergence <= 2.0 * target:
        return min(coefficient * 1.5, 1e6)
    return min(coefficient, max(coefficient * 0.5, 1e-3)) if divergence < 0.5 * target else coefficient


def adaptive_lr_factor(factor: float, divergence: float, target: float) -> float:
    """The factor of the learning rate for the next updates, 0.01 to 1, from the one that led to ``divergence`` [nat].

    Rule and factors of Rudin et al. 2021 (arXiv 2109.11978), who aim at 0.01 and do not bound it by 1. It stays while
    the divergence is half to twice the ``target``; a non-finite one counts as too large.
    """
    if not divergence <= 2.0 * target:
        return max(0.01, factor / 1.5)
    return min(1.0, factor * 1.5) if divergence < 0.5 * target else factor


def explained_variance(value: np.ndarray, target: np.ndarray) -> float:
    """``1 - var(target - value) / var(target)``; NaN if all targets are equal."""
    variance = float(np.var(target))
    return 1.0 - float(np.var(target - value)) / variance if variance > 0.0 else float("nan")


class Imitation:
    """Behavior cloning: a gradient that replaces dQ/da, so that every actor with such an update can imitate.

    TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860) minimizes ``-lambda mean Q(s, pi(s)) + mean (pi(s) - a)^2``;
    ``lambda = alpha / mean |Q|`` makes the weight of imitation independent of the scale of values.
    """

    def __init__(self, updates: int, alpha: float, device: torch.device) -> None:
        """The first ``updates`` ignore the value; later ones use ``alpha`` as above, 0: only the value."""
        self._updates, self._alpha = updates, alpha
        # On the device, so that a recorded graph reads values set between its replays.
        self._value_weight, self._clone_weight = torch.zeros((), device=device), torch.ones((), device=device)
        self._clones: bool | None = None
        self.begin(0)

    def begin(self, updates: int) -> None:
        """Sets the weights for the next update, after ``updates`` of them."""
        clones = updates < self._updates
        if clones != self._clones:
            self._clones = clones
            self._value_weight.fill_(float(not clones))
            self._clone_weight.fill_(float(clones or self._alpha > 0.0))

    def gradient(self, dq_da: Tensor, value: Tensor | None, demonstrated: Tensor, action: Tensor) -> Tensor:
        """Gradient [A, B] of ``lambda Q - mean over actions of (a - demonstrated)^2`` to the action [A, B].

        ``value`` [B] is Q of the actions, ``demonstrated`` [B, A] the batch's own.
        """
        assert value is not None
        weight = self._value_weight * (self._alpha / value.abs().mean()) if self._alpha > 0.0 else self._value_weight
        toward = (demonstrated.t() - action) * (2.0 / len(action))
        return torch.addcmul(dq_da * weight, toward, self._clone_weight)
