"""Soft actor-critic with twin critics, for continuous actions, for discrete ones, and for both at once.

Haarnoja et al. 2018 (arXiv 1812.05905), with automatic entropy coefficient; Christodoulou 2019 (arXiv 1910.07207);
Delalleau et al. 2019 (arXiv 1912.11077). Departures from the authors' code: an update steps in the order critics,
actor, entropy coefficient, targets; the coefficient's step is on log alpha; both action draws of an update (at
``next_obs`` for the target, at ``obs`` for the actor) are one pass of the actor over 2 B rows. With discrete actions,
expectations are computed exactly from the policy's probabilities. ``OffPolicyAlgorithm.update`` (off_policy.py) calls
the steps below; ``architecture.md`` lists the functions from an observation to the published weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.algorithm import finite
from spreeze.algorithms.distributional import create_critics
from spreeze.algorithms.networks.conv_networks import over_images
from spreeze.algorithms.networks.fused_mlp import HiddenLayers, MlpBuffers, MlpPasses, Parameters, new_parameters
from spreeze.algorithms.off_policy import ActorCritic, ActorOutputs, CriticNetworks, Critics, DiscreteCritics
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.algorithms.parallel_work import Parallel, TwoStreams
from spreeze.config.algorithm_bases import DistributionalConfig, RecurrentReplayConfig
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import NO_LIMIT, setting
from spreeze.inference.heads import LOG_STD_MAX, LOG_STD_MIN
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import TransitionBatch


@dataclass(frozen=True, kw_only=True)
class SoftActorCriticConfig(DistributionalConfig):
    """Settings of SAC and of the algorithms derived from it."""

    alpha_lr: float = setting(1e-3, "learning rate of the entropy coefficient (Adam)", low=0.0, high=1.0)
    policy_delay: int = setting(1, "critic steps per step of actor and entropy coefficient", low=1, high=100)
    initial_alpha: float = setting(
        0.01,
        "initial entropy coefficient; with normalize_returns in standard deviations of the return",
        low=1e-8,
        high=1e3,
    )
    max_alpha: float = setting(
        0.05,
        "upper bound of the entropy coefficient with discrete actions, in the same unit: without it, alpha "
        "grows without bound where ending an episode is a loss",
        low=1e-8,
        high=NO_LIMIT,
    )
    tune_alpha: bool = setting(True, "learn the entropy coefficient")
    target_entropy_per_action: float = setting(
        -1.0, "target entropy per action dimension", unit="nat", low=-100, high=100
    )
    target_entropy_ratio: float = setting(
        0.5,
        "target entropy of discrete actions, as a share of the maximum; 0.5 gives the best of 2 to 6 actions "
        "a probability of 0.9 to 0.8",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class SACConfig(RecurrentReplayConfig, SoftActorCriticConfig):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905); discrete: arXiv 1910.07207; hybrid: 1912.11077."""


class _SACBuffers:
    """All buffers of the actor that depend on the batch size: rows 0..B-1 are next_obs, B..2B-1 obs."""

    def __init__(self, parameters: Parameters, rows: int) -> None:
        like, obs_dim = parameters.flat, parameters.sizes[0]
        self.rows = rows
        self.mlp = MlpBuffers.allocate(parameters, 2 * rows)
        self.mlp_by_rows = {count: self.mlp.part(0, count) for count in (rows, 2 * rows)}
        self.current = self.mlp.part(rows, 2 * rows)
        self.x = like.new_zeros(1, 2 * rows, obs_dim)
        self.x_next, self.x_obs = self.x[0, :rows], self.x[0, rows:]
        self.x_obs_t = self.x_obs.t().unsqueeze(0)
        self.prob = self.log_prob = like.new_zeros(rows)
        self.negative_entropy = self.log_prob  # [B], estimates at obs

    def fill(self, batch: TransitionBatch, *, updates_actor: bool) -> int:
        """Copies the observations that the update needs; returns the number of rows filled."""
        self.x_next.copy_(batch.next_obs)
        if updates_actor:
            self.x_obs.copy_(batch.obs)
        return 2 * self.rows if updates_actor else self.rows


class _GaussianBuffers(_SACBuffers):
    """Buffers for sampled actions; further outputs are the ``logits`` [K, 2 B] of a choice."""

    def __init__(self, parameters: Parameters, rows: int, parallel: Parallel | None, action_dim: int) -> None:
        super().__init__(parameters, rows)
        like, ends = parameters.flat, 2 * action_dim
        self.passes = {count: MlpPasses(parameters, buffers, parallel) for count, buffers in self.mlp_by_rows.items()}
        self.current_passes = MlpPasses(parameters, self.current, parallel)
        self.noise = like.new_zeros(action_dim, 2 * rows)
        out, grad_out = self.mlp.out[0], self.current.grad_out[0]
        self.mean, self.raw_log_std, self.logits = out[:action_dim], out[action_dim:ends], out[ends:]
        self.grad_mean, self.grad_log_std = grad_out[:action_dim], grad_out[action_dim:ends]
        self.grad_logits = grad_out[ends:]
        self.action = self.scaled_noise = like.new_zeros(action_dim, rows)
        self.log_std = like.new_zeros(action_dim, 2 * rows)
        self.fresh_log_std, self.fresh_raw_log_std = self.log_std[:, rows:], self.raw_log_std[:, rows:]
        self.in_range = torch.ones_like(self.action)
        self.inverse_rows, self.minus_inverse_rows = like.new_full((), 1.0 / rows), like.new_full((), -1.0 / rows)
        self.minus_mean_weights = like.new_full((rows,), -1.0 / rows)


class _SoftActorCritic(ActorCritic):
    """Base class with the entropy coefficient ``alpha`` [1], learned by its logarithm (eq. 18)."""

    name = "sac"
    _config: SoftActorCriticConfig
    _policy: str  # kind of the policy, as in ``inference.heads``
    _action_values: type[DiscreteCritics]  # class of the critics where there is a choice
    _create_critics = staticmethod(create_critics)
    _log_alpha_max: float | Tensor | None = None  # upper bound of log alpha; None: no bound

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        num_actions: int,
        config: SoftActorCriticConfig,
        seed: int,
        device: str = "cpu",
        *,
        masked: bool = False,
        **options: Any,
    ) -> None:
        """``action_dim`` is 0 without a continuous action, ``num_actions`` 0 without a choice."""
        self._action_dim, self._num_actions, self._masked = action_dim, num_actions, masked
        meta: dict[str, Any] = {"policy": self._policy}
        meta |= {"action_dim": action_dim} if action_dim else {}
        meta |= {"nvec": [num_actions]} if num_actions else {}
        meta |= {"action_mask": True} if masked else {}
        outputs = 2 * action_dim + num_actions
        super().__init__(obs_dim, outputs, config, seed, device, meta=meta, target_actor=False, **options)
        self.period = config.policy_delay
        coefficients = (action_dim > 0) + (num_actions > 0)
        self.log_alpha = self.actor.online.flat.new_full((coefficients,), math.log(config.initial_alpha))
        self.alpha = self.log_alpha.exp()
        self.alpha_gradient = torch.zeros_like(self.log_alpha)
        """[1], with respect to log alpha."""
        self._alpha_adam = FlatAdam(self.log_alpha, self.alpha_gradient, config.alpha_lr)
        self._optimizers.append(self._alpha_adam)

    def _new_critics(
        self, config: Any, inputs: int, generator: torch.Generator, device: torch.device, layers: HiddenLayers
    ) -> CriticNetworks[Any]:
        if not self._num_actions:
            return self._create_critics(config, inputs, self._action_dim, 2, generator, device, layers)
        return self._action_values(
            inputs + self._action_dim,
            self._num_actions,
            config.hidden_sizes,
            config.critic_lr,
            generator,
            lambda sizes: new_parameters(sizes, 2, device, layers=layers),
        )

    def _network_optimizers(self) -> list[FlatAdam]:
        return [adam for adam in super()._network_optimizers() if adam is not self._alpha_adam]

    def _alpha_step(self) -> None:
        self._alpha_adam.step()
        if self._log_alpha_max is not None:
            self.log_alpha.clamp_(max=self._log_alpha_max)
        torch.exp(self.log_alpha, out=self.alpha)

    @property
    def effective_tau(self) -> float:
        """Share of the weights that an update mixes into the targets."""
        return self._config.tau

    def update_targets(self) -> None:
        self._update_critics_target()

    def _actor_metrics(self) -> dict[str, float]:
        alpha = self.log_alpha[-1].exp().item()
        metrics = super()._actor_metrics() | {"alpha": alpha}
        if self._buffers is not None:
            entropy = -self._buffers.negative_entropy.mean().item()
            metrics |= finite({"entropy": entropy, "actor_loss": -alpha * entropy - self.critics.mean_action_value()})
        return metrics

    def _target_entropy_of_choice(self, obs: Tensor) -> Tensor | float:
        """A fraction of the maximum entropy; with masks in obs [B, O], of the allowed options."""
        ratio = self._config.target_entropy_ratio
        if not self._masked:
            return ratio * math.log(self._num_actions)
        return obs[:, -self._num_actions :].sum(1).log_().mean().mul_(ratio)

    def _tensors(self) -> dict[str, Tensor]:
        adam = {f"actor.alpha_adam.{name}": tensor for name, tensor in self._alpha_adam.tensors().items()}
        return super()._tensors() | {"actor.log_alpha": self.log_alpha} | adam

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        fits = super().load_state_arrays(arrays)
        torch.exp(self.log_alpha, out=self.alpha)
        return fits


class SAC(_SoftActorCritic):
    """SAC with a squashed Gaussian policy."""

    critics: Critics
    _buffers: _GaussianBuffers | None
    _policy = "squashed_gaussian"

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        config: SoftActorCriticConfig,
        seed: int,
        device: str = "cpu",
        *,
        num_actions: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(obs_dim, action_dim, num_actions, config, seed, device, **options)
        self._alpha_of_continuous = self.alpha[:1]
        self._target_entropy = torch.full_like(self.alpha, config.target_entropy_per_action * action_dim)

    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        """Actions and log-densities at next_obs and, if the actor is updated, actions at obs, in one pass."""
        rows = batch.obs.shape[0]
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _GaussianBuffers(self.actor.online, rows, self._parallel, self._action_dim)
        buffers = self._buffers
        filled = buffers.fill(batch, updates_actor=self._actor_update_due())
        buffers.passes[filled].forward(buffers.x[:, :filled])
        log_std, noise = buffers.log_std[:, :filled], buffers.noise[:, :filled]
        torch.clamp(buffers.raw_log_std[:, :filled], LOG_STD_MIN, LOG_STD_MAX, out=log_std)
        self.draw_noise(noise)
        action, log_prob, scaled_noise = losses.squashed_gaussian(buffers.mean[:, :filled], log_std, noise)
        if filled == rows:
            return ActorOutputs(action, log_prob, None)
        buffers.action, buffers.negative_entropy = action[:, rows:], log_prob[rows:]
        buffers.scaled_noise = scaled_noise[:, rows:]
        return ActorOutputs(action[:, :rows], log_prob[:rows], buffers.action)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount (min Q'(s', a') - alpha log pi(a'|s'))`` (eq. 5 to 7)."""
        assert next_log_prob is not None
        self.critics.set_joint_batch(batch.obs_action)
        value = self.critics.next_value(batch.target_net_obs, next_action)
        value.addcmul_(next_log_prob, self._devices.to_critics(self.alpha), value=-1.0)
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs_action, target, batch.weight)

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        return self.critics.action_gradient(batch.obs, action, use_min=True)

    def actor_step(self, dq_da: Tensor) -> None:
        """Gradient step on ``mean(alpha log pi(a|s) - Q(s, a))`` (eq. 9), then on alpha (eq. 18).

        ``action_penalty`` adds the mean square of the means to the loss.
        """
        buffers = self._buffers
        assert buffers is not None
        grad_mean, grad_log_std = losses.squashed_gaussian_backward(
            buffers.action,
            buffers.scaled_noise,
            dq_da * buffers.minus_inverse_rows,
            self._alpha_of_continuous * buffers.inverse_rows,
        )
        buffers.grad_mean.copy_(grad_mean)
        if self._config.action_penalty > 0.0:
            weight = 2.0 * self._config.action_penalty / grad_mean.numel()
            buffers.grad_mean.add_(buffers.mean[:, buffers.rows :], alpha=weight)
        # Outside its range log_std is constant and has no gradient.
        torch.eq(buffers.fresh_log_std, buffers.fresh_raw_log_std, out=buffers.in_range)
        torch.mul(grad_log_std, buffers.in_range, out=buffers.grad_log_std)
        if isinstance(self._parallel, TwoStreams) and self._config.tune_alpha:
            self._parallel.both(self._actor_descent, self._alpha_descent)
            return
        self._actor_descent()
        if self._config.tune_alpha:
            self._alpha_descent()

    def _actor_descent(self) -> None:
        assert self._buffers is not None
        self._buffers.current_passes.backward(self._buffers.x_obs_t, self.actor.gradient)
        self.actor.adam.step()

    def _alpha_descent(self) -> None:
        assert self._buffers is not None
        entropy = torch.dot(self._buffers.negative_entropy, self._buffers.minus_mean_weights)
        torch.sub(entropy, self._target_entropy, out=self.alpha_gradient)
        self._alpha_step()


class DiscreteSAC(_SoftActorCritic):
    """SAC over n actions with a softmax policy.

    Where ending an episode is a loss, the entropy bonus rewards long episodes: ``max_alpha`` limits alpha, which would
    grow without bound. With action masks, expectations are over valid actions, and the target entropy is a fraction of
    the logarithm of their number.
    """

    critics: DiscreteCritics
    _buffers: _SACBuffers | None
    _policy, _action_values = "categorical", DiscreteCritics

    def __init__(
        self, obs_dim: int, num_actions: int, config: SACConfig, seed: int, device: str = "cpu", **options: Any
    ) -> None:
        super().__init__(obs_dim, 0, num_actions, config, seed, device, **options)
        self._log_alpha_max = math.log(config.max_alpha)

    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        """Probabilities and log-probabilities at next_obs and, if the actor is updated, at obs, in one pass."""
        rows = batch.obs.shape[0]
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _SACBuffers(self.actor.online, rows)
        buffers = self._buffers
        filled = buffers.fill(batch, updates_actor=self._actor_update_due())
        x = buffers.x[:, :filled]
        logits = self.actor.online.forward(x, buffers.mlp_by_rows[filled])[0]
        log_prob = (losses.mask_logits(logits, x[0]) if self._masked else logits).log_softmax(0)
        prob = log_prob.exp()
        if filled == rows:
            return ActorOutputs(prob, log_prob, None)
        buffers.log_prob, buffers.prob = log_prob[:, rows:], prob[:, rows:]
        return ActorOutputs(prob[:, :rows], log_prob[:, :rows], buffers.prob)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount E_pi(min Q'(s', a') - alpha log pi(a'|s'))`` (eq. 10)."""
        assert next_log_prob is not None
        soft = self.critics.values(batch.target_net_obs, target=True).amin(0)
        soft.addcmul_(next_log_prob, self._devices.to_critics(self.alpha), value=-1.0)
        value = soft.mul_(next_action).sum(0)
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs, batch.action[:, 0].long(), target, weight=batch.weight)

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Minimum Q-value of each action: the gradient of E_pi Q with respect to its probability."""
        values = self.critics.values(batch.obs).amin(0)
        self.critics.action_value = (values * action).sum(0)
        return values

    def actor_step(self, dq_da: Tensor) -> None:
        """Gradient step on ``mean E_pi(alpha log pi(a|s) - Q(s, a))`` (eq. 12), then on alpha (eq. 11).

        ``dq_da`` [K, B] is Q of each action.
        """
        buffers = self._buffers
        assert buffers is not None
        grad, buffers.negative_entropy = losses.soft_policy_gradient(buffers.prob, buffers.log_prob, dq_da, self.alpha)
        torch.mul(grad, 1.0 / buffers.rows, out=buffers.current.grad_out[0])
        self.actor.online.backward(buffers.current, buffers.x_obs_t, self.actor.gradient)
        self.actor.adam.step()
        if self._config.tune_alpha:
            torch.neg(buffers.negative_entropy.mean(), out=self.alpha_gradient[0])
            self.alpha_gradient.sub_(self._target_entropy_of_choice(buffers.x_obs))
            self._alpha_step()


class HybridCritics(DiscreteCritics):
    """Twin networks Q(s, a) of continuous actions a, with a value [K] for each choice; their input is ``obs | a``."""

    def action_gradient(self, x: Tensor, prob: Tensor, num_continuous: int) -> Tensor:
        """Gradient [A + K, B] of ``E_prob min Q`` by the continuous action [A, B] and the probabilities [K, B]."""
        values = self._q(x, self.online)
        lowest, index = values.min(0, keepdim=True)
        self.action_value = (lowest[0] * prob).sum(0)
        self._buffers.grad_out.zero_().scatter_(0, index, prob.unsqueeze(0))
        self.online.backward(self._buffers, None, None)
        by_continuous = torch.bmm(self.online.weights[0][:, -num_continuous:], self._buffers.grads_t[0]).sum(0)
        return torch.cat((by_continuous, lowest[0]))


class HybridSAC(SAC):
    """SAC over continuous actions and one of n choices, independent of each other given the state (arXiv 1912.11077).

    The continuous part is sampled; the expectation over the choice is exact. Each part has its own entropy coefficient.
    Between actor and critics, an action is the continuous part and the probabilities of the choices; its
    log-probability is those of the continuous part and of all choices.
    """

    critics: HybridCritics  # type: ignore[assignment]
    _policy, _action_values = "squashed_mixed", HybridCritics

    def __init__(
        self,
        obs_dim: int,
        num_actions: int,
        config: SACConfig,
        seed: int,
        device: str = "cpu",
        *,
        num_continuous: int,
        **options: Any,
    ) -> None:
        """``num_continuous``: dimension of the continuous action."""
        super().__init__(obs_dim, num_continuous, config, seed, device, num_actions=num_actions, **options)
        self._log_alpha_max = torch.tensor([math.inf, math.log(config.max_alpha)], device=self.log_alpha.device)
        self._negative_entropy_of_choice = torch.zeros(1, device=self.log_alpha.device)  # until the first actor step

    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        next_continuous, next_log_prob, continuous = super().actor_forward(batch)
        assert self._buffers is not None
        assert next_log_prob is not None
        buffers, rows = self._buffers, len(batch.obs)
        filled = slice(0, rows if continuous is None else 2 * rows)
        logits = buffers.logits[:, filled]
        log_prob = (losses.mask_logits(logits, buffers.x[0, filled]) if self._masked else logits).log_softmax(0)
        prob = log_prob.exp()
        buffers.log_prob, buffers.prob = log_prob[:, rows:], prob[:, rows:]
        return ActorOutputs(
            torch.cat((next_continuous, prob[:, :rows])),
            torch.cat((next_log_prob.unsqueeze(0), log_prob[:, :rows])),
            None if continuous is None else torch.cat((continuous, buffers.prob)),
        )

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount (E_pi(min Q' - alpha_c log pi(c|s')) - alpha log pi(a|s'))``, c the choice."""
        assert next_log_prob is not None
        num_continuous, alpha = self._action_dim, self._devices.to_critics(self.alpha)
        x = torch.cat((batch.target_net_obs, next_action[:num_continuous].t()), 1)
        soft = self.critics.values(x, target=True).amin(0)
        soft.addcmul_(next_log_prob[1:], alpha[1], value=-1.0)
        value = soft.mul_(next_action[num_continuous:]).sum(0).addcmul_(next_log_prob[0], alpha[0], value=-1.0)
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs_action[:, :-1], batch.action[:, -1].long(), target, weight=batch.weight)

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        num_continuous = self._action_dim
        x = torch.cat((batch.obs, action[:num_continuous].t()), 1)
        return self.critics.action_gradient(x, action[num_continuous:], num_continuous)

    def actor_step(self, dq_da: Tensor) -> None:
        """Gradient step on ``mean(alpha log pi(a|s) + E_pi(alpha_c log pi(c|s) - Q(s, a, c)))``, c the choice."""
        buffers, num_continuous = self._buffers, self._action_dim
        assert buffers is not None
        grad, self._negative_entropy_of_choice = losses.soft_policy_gradient(
            buffers.prob, buffers.log_prob, dq_da[num_continuous:], self.alpha[1]
        )
        torch.mul(grad, buffers.inverse_rows, out=buffers.grad_logits)
        super().actor_step(dq_da[:num_continuous])

    def _alpha_descent(self) -> None:
        buffers = self._buffers
        assert buffers is not None
        target = self._target_entropy[0], self._target_entropy_of_choice(buffers.x_obs)
        for index, negative in enumerate((buffers.negative_entropy, self._negative_entropy_of_choice)):
            self.alpha_gradient[index] = -negative.mean() - target[index]
        self._alpha_step()

    def _actor_metrics(self) -> dict[str, float]:
        """The metrics of SAC, with entropy and loss of both parts; ``alpha`` is the choice's."""
        metrics = super()._actor_metrics() | {"alpha_numbers": self.alpha[0].item()}
        if self._buffers is not None:
            of_continuous, of_choice = (
                -part.mean().item() for part in (self._buffers.negative_entropy, self._negative_entropy_of_choice)
            )
            loss = (
                -self.alpha[0].item() * of_continuous - metrics["alpha"] * of_choice - self.critics.mean_action_value()
            )
            metrics |= finite({"entropy": of_continuous + of_choice, "actor_loss": loss})
        return metrics


ALGORITHMS = (
    AlgorithmRow(
        name="sac",
        config=SACConfig,
        continuous=SAC,
        discrete=DiscreteSAC,
        hybrid=HybridSAC,
        images=True,
        over_vectors={"env.normalize_obs": True},
        # Sums over three steps leave out the entropies in between; with single ones value spreads too slowly (Acrobot).
        for_discrete={"env.normalize_obs": False, "sac.n_step": 3},
        over_images=over_images("sac") | {"sac.n_step": 3},  # as DrQ-v2 (arXiv 2107.09645)
        over_sequences={"learner.batch_size": 512},
    ),
)
