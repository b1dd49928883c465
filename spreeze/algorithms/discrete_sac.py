"""Soft actor-critic for discrete actions (Christodoulou 2019, arXiv 1910.07207).

The same objective, twin critics and temperature as ``sac``, but every expectation over actions is
computed exactly from the policy's probabilities: no action is drawn. Order of the steps as there.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.nn.fused_mlp import Parameters, Tape, mlp_backward, mlp_forward, new_parameters
from spreeze.algorithms.nn.optimizers import FlatAdam
from spreeze.algorithms.nn.q_networks import DiscreteCritics
from spreeze.algorithms.off_policy import ActorCritic, Proposal
from spreeze.algorithms.temperature import Temperature
from spreeze.config.schema import SACConfig
from spreeze.types import TransitionBatch


class _Buffers:
    """Everything whose size depends on the batch: rows 0..B-1 are next_obs, B..2B-1 obs."""

    def __init__(self, parameters: Parameters, rows: int) -> None:
        like, obs_dim, actions = parameters.flat, parameters.sizes[0], parameters.sizes[-1]
        self.rows = rows
        self.tape = Tape.allocate(parameters, 2 * rows)
        self.fresh = self.tape.part(rows, 2 * rows)
        self.x = like.new_zeros(1, 2 * rows, obs_dim)
        self.x_next, self.x_obs = self.x[0, :rows], self.x[0, rows:]
        self.x_obs_t = self.x[0, rows:].t().unsqueeze(0)
        self.log_prob = self.prob = like.new_zeros(actions, rows)
        self.entropy = like.new_zeros(rows)


class CategoricalActor:
    """The actor side: a softmax policy, the temperature, and their optimisers."""

    def __init__(
        self, obs_dim: int, num_actions: int, config: SACConfig, init: torch.Generator, device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        sizes = (obs_dim, *config.hidden_sizes, num_actions)
        self.online = new_parameters(sizes, 1, device, dtype)
        self.online.initialise(init)
        self.gradient = new_parameters(sizes, 1, device, dtype)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, config.actor_lr)
        self.temperature = Temperature(config, device, dtype)
        self._target_entropy = config.target_entropy_ratio * math.log(num_actions)
        self._buffers: _Buffers | None = None

    def propose(self, next_obs: Tensor, obs: Tensor) -> Proposal:
        """Probabilities and their logarithms at ``next_obs``, probabilities at ``obs``; one pass for both."""
        rows = obs.shape[0]
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _Buffers(self.online, rows)
        buffers = self._buffers
        buffers.x_next.copy_(next_obs)
        buffers.x_obs.copy_(obs)
        log_prob = mlp_forward(self.online, buffers.x, buffers.tape)[0].log_softmax(0)
        prob = log_prob.exp()
        buffers.log_prob, buffers.prob = log_prob[:, rows:], prob[:, rows:]
        return Proposal(prob[:, :rows], log_prob[:, :rows], buffers.prob)

    def step(self, values: Tensor) -> None:
        """Gradient step on ``mean E_pi(alpha log pi(a|s) - Q(s, a))`` (eq. 12), then on the temperature (eq. 11).

        Args:
            values: [K, B], Q of each action.
        """
        buffers = self._buffers
        assert buffers is not None
        grad, mean_log_prob = losses.soft_policy_gradient(
            buffers.prob, buffers.log_prob, values, self.temperature.alpha
        )
        buffers.entropy = mean_log_prob.neg_()
        torch.mul(grad, 1.0 / buffers.rows, out=buffers.fresh.grad_out[0])
        mlp_backward(self.online, buffers.fresh, buffers.x_obs_t, self.gradient)
        self.adam.step()
        if self.temperature.tuned:
            self.temperature.gradient.copy_(buffers.entropy.mean()).sub_(self._target_entropy)
            self.temperature.step()

    def metrics(self, mean_action_value: float) -> dict[str, float]:
        """alpha, entropy, actor_loss and actor_grad_norm of the latest step (reads the device)."""
        entropy = None if self._buffers is None else self._buffers.entropy
        return self.temperature.metrics(self.adam, entropy, mean_action_value)

    def refused(self) -> int:
        """Steps of actor and temperature that were not applied (reads the device)."""
        return self.temperature.refused(self.adam)

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        self._buffers = None

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return self.temperature.tensors(self.online.flat, self.adam)


class DiscreteSAC(ActorCritic):
    """SAC over n actions; see ``OffPolicyAlgorithm`` for what each member does."""

    name = "sac"

    def __init__(
        self, obs_dim: int, num_actions: int, config: SACConfig, seed: int, device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        place, hidden = torch.device(device), config.hidden_sizes
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(place).manual_seed(seed + 1)
        self.actor = CategoricalActor(obs_dim, num_actions, config, init, place, dtype)
        self.critics = DiscreteCritics(obs_dim, num_actions, hidden, 2, config.critic_lr, init, place, dtype)
        self._tau = config.tau
        meta = {
            "policy": "categorical",
            "obs_dim": obs_dim,
            "num_actions": num_actions,
            "hidden_sizes": list(hidden),
        }
        super().__init__(self.actor, self.critics, noise, meta)

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: one pass over next_obs and obs together."""
        return self.actor.propose(batch.next_obs, batch.obs)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: target ``r + discount E_pi(min Q'(s', a') - alpha log pi(a'|s'))`` (eq. 10)."""
        assert next_log_prob is not None
        soft = self.critics.least(batch.next_obs, target=True)
        soft.addcmul_(next_log_prob, self.actor.temperature.alpha, value=-1.0)
        value = soft.mul_(next_action).sum(0)
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs, batch.action[:, 0].long(), target)

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critic side: the lesser value of each action, which is the gradient of E_pi Q to its probability."""
        values = self.critics.least(batch.obs)
        self.critics.action_value = (values * action).sum(0)
        return values

    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side: actor, then temperature."""
        self.actor.step(dq_da)

    def update_targets(self) -> None:
        """Moves the target critics."""
        self.critics.update_target(self._tau)
        self.updates += 1

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        """Takes over what ``state_arrays`` gave; False if the noise was not taken over."""
        fits = super().load_state_arrays(arrays)
        self.actor.temperature.derive()
        return fits
