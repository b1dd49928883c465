"""Twin delayed deep deterministic policy gradient (TD3), and its predecessor DDPG.

Lillicrap et al. 2016 (arXiv 1509.02971); Fujimoto et al. 2018 (arXiv 1802.09477): two critics, smoothed target actions
and fewer updates of the actor. Departures from the first paper: Gaussian instead of Ornstein-Uhlenbeck exploration
noise, no weight decay, no batch normalization, and torch.nn.Linear's initialization for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spreeze.algorithms import losses
from spreeze.algorithms.distributional import create_critics
from spreeze.algorithms.networks.conv_networks import over_images
from spreeze.algorithms.networks.fused_mlp import MlpBuffers, MlpPasses, Parameters
from spreeze.algorithms.off_policy import ActorCritic, ActorOutputs, Critics
from spreeze.algorithms.optimizers import TrainedNetworks
from spreeze.algorithms.parallel_work import Parallel
from spreeze.config.algorithm_bases import ActorCriticConfig, DistributionalConfig
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import setting
from spreeze.inference.lazy_torch import Tensor
from spreeze.types import TransitionBatch


@dataclass(frozen=True, kw_only=True)
class DDPGConfig(ActorCriticConfig):
    """Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv 1509.02971)."""

    exploration_noise: float = setting(0.1, "standard deviation of the exploration noise", low=0.0)
    exploration_noise_max: float = setting(
        0.0,
        "standard deviation in a sampler's last environment, spaced evenly from the first (arXiv 2307.12983); "
        "below exploration_noise: equal in all",
        low=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class TD3Config(DDPGConfig, DistributionalConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477)."""

    policy_delay: int = setting(2, "critic steps per actor step", low=1, high=100)
    target_noise: float = setting(
        0.2, "standard deviation of the target policy smoothing noise; actions lie in [-1, 1]", low=0.0
    )
    target_noise_clip: float = setting(0.5, "bound of the target policy smoothing noise", low=0.0)
    bc_alpha: float = setting(
        0.0,
        "TD3+BC (arXiv 2106.06860): weight of the normalized value against imitating the actions in replay; 2.5 in "
        "the paper, which is for --offline; 0: no imitation",
        low=0.0,
        high=1e6,
    )


class _TD3Buffers:
    """Buffers of the actor, which depend on the batch size."""

    def __init__(self, actor: TrainedNetworks[Parameters], rows: int, parallel: Parallel | None) -> None:
        like, action_dim = actor.online.flat, actor.online.sizes[-1]
        self.rows = rows
        self.mlp = MlpBuffers.allocate(actor.online, rows)
        self.online, self.target = (
            MlpPasses(actor.online, self.mlp, parallel),
            MlpPasses(actor.target, self.mlp, parallel),
        )
        self.noise = like.new_zeros(action_dim, rows)
        self.action = like.new_zeros(action_dim, rows)
        self.x_obs_t = like.new_zeros(1, actor.online.sizes[0], rows)
        self.minus_inverse_rows = like.new_full((), -1.0 / rows)


class DDPG(ActorCritic):
    """Policy a = tanh(net(s)) with a target copy."""

    name = "ddpg"
    num_critics = 1
    critics: Critics
    _config: DDPGConfig
    _buffers: _TD3Buffers | None

    def __init__(
        self, obs_dim: int, action_dim: int, config: DDPGConfig, seed: int, device: str = "cpu", **options: Any
    ) -> None:
        self._action_dim = action_dim
        meta = {"policy": "deterministic", "action_dim": action_dim, "exploration_noise": config.exploration_noise}
        if config.exploration_noise_max > config.exploration_noise:
            meta["exploration_noise_max"] = config.exploration_noise_max
        super().__init__(obs_dim, action_dim, config, seed, device, meta=meta, target_actor=True, **options)

    def _new_critics(self, config: Any, inputs: int, *arguments: Any) -> Critics:
        return create_critics(config, inputs, self._action_dim, self.num_critics, *arguments)

    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        """Target actions and, if the actor is updated, fresh ones, with activations stored for ``actor_step``."""
        rows = batch.obs.shape[0]
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _TD3Buffers(self.actor, rows, self._parallel)
        buffers, fresh = self._buffers, None
        next_action = self._smoothed(buffers.target.forward(batch.next_obs.unsqueeze(0))[0].tanh(), buffers.noise)
        if self._actor_update_due():
            buffers.x_obs_t = batch.obs.t().unsqueeze(0)
            fresh = buffers.action = buffers.online.forward(batch.obs.unsqueeze(0))[0].tanh()
        return ActorOutputs(next_action, None, fresh)

    def _smoothed(self, action: Tensor, noise: Tensor) -> Tensor:
        return action

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount min Q'(s', a')`` (algorithm 1 of both papers); DDPG has one critic."""
        value = self.critics.next_value(batch.next_obs, next_action)
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs_action, target, batch.weight)

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        return self.critics.action_gradient(batch.obs, action, use_min=False)

    def actor_step(self, dq_da: Tensor) -> None:
        """Gradient step on ``-mean Q(s, pi(s))`` (deterministic policy gradient, arXiv 1509.02971, eq. 6).

        ``action_penalty`` adds the mean square of the outputs before tanh to the loss.
        """
        buffers = self._buffers
        assert buffers is not None
        buffers.mlp.grad_out[0].copy_(losses.tanh_backward(buffers.action, dq_da * buffers.minus_inverse_rows))
        if self._config.action_penalty > 0.0:
            weight = 2.0 * self._config.action_penalty / buffers.action.numel()
            buffers.mlp.grad_out[0].add_(buffers.mlp.out[0], alpha=weight)
        buffers.online.backward(buffers.x_obs_t, self.actor.gradient)
        self.actor.adam.step()


class TD3(DDPG):
    """DDPG with two critics, smoothed target actions, and an actor update every ``policy_delay`` updates."""

    name = "td3"
    num_critics = 2
    _config: TD3Config

    def __init__(
        self, obs_dim: int, action_dim: int, config: TD3Config, seed: int, device: str = "cpu", **options: Any
    ) -> None:
        super().__init__(obs_dim, action_dim, config, seed, device, **options)
        self.period = config.policy_delay

    def _smoothed(self, action: Tensor, noise: Tensor) -> Tensor:
        if self._config.target_noise == 0.0:
            return action
        self.draw_noise(noise)
        return losses.smoothed_action(action, noise, self._config.target_noise, self._config.target_noise_clip)


ALGORITHMS = (
    # FastTD3 (arXiv 2505.22642) drew 16 to 512 rows for each new one; SAC was tried here at 8 to 512, the general band.
    AlgorithmRow(
        name="td3",
        config=TD3Config,
        continuous=TD3,
        images=True,
        defaults={"replay.samples_per_insert_min": 16.0, "replay.samples_per_insert_max": 512.0},
        over_vectors={"env.normalize_obs": True},
        over_images=over_images("td3"),
    ),
    AlgorithmRow(name="ddpg", config=DDPGConfig, continuous=DDPG, images=True, over_images=over_images("ddpg")),
)
