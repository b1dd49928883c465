"""The actor side of TD3 and DDPG: a deterministic tanh policy, its target and its optimiser."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.nn.fused_mlp import Parameters, Tape, new_parameters
from spreeze.algorithms.nn.optimizers import FlatAdam
from spreeze.algorithms.nn.q_networks import Critics
from spreeze.algorithms.nn.two_thread_update import MlpPasses, ThreadPair
from spreeze.algorithms.off_policy import Placement
from spreeze.config.schema import DDPGConfig, TD3Config


class _Buffers:
    """Everything whose size depends on the batch."""

    def __init__(self, online: Parameters, target: Parameters, rows: int, pair: ThreadPair | None) -> None:
        like, action_dim = online.flat, online.sizes[-1]
        self.rows = rows
        self.tape = Tape.allocate(online, rows)
        self.online, self.target = MlpPasses(online, self.tape, pair), MlpPasses(target, self.tape, pair)
        self.noise = like.new_zeros(action_dim, rows)
        self.action = like.new_zeros(action_dim, rows)
        self.x_obs_t = like.new_zeros(1, online.sizes[0], rows)
        self.minus_per_row = like.new_full((), -1.0 / rows)


class DeterministicActor:
    """Policy a = tanh(net(s)) and its target copy."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: tuple[int, ...],
        lr: float,
        init: torch.Generator,
        noise: torch.Generator,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        pair: ThreadPair | None = None,
    ) -> None:
        sizes = (obs_dim, *hidden_sizes, action_dim)
        self.online = new_parameters(sizes, 1, device, dtype)
        self.online.initialise(init)
        self.target = new_parameters(sizes, 1, device, dtype)
        self.target.flat.copy_(self.online.flat)
        self.gradient = new_parameters(sizes, 1, device, dtype)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, lr)
        self._noise, self._pair = noise, pair
        self._buffers: _Buffers | None = None

    def target_action(self, next_obs: Tensor, deviation: float = 0.0, clip: float = 0.0) -> Tensor:
        """Target policy's action [A, B] at next_obs [B, O], with clipped noise if ``deviation`` > 0."""
        buffers = self._sized(next_obs.shape[0])
        action = buffers.target.forward(next_obs.unsqueeze(0))[0].tanh()
        if deviation == 0.0:
            return action
        buffers.noise.normal_(generator=self._noise)
        return losses.smoothed_action(action, buffers.noise, deviation, clip)

    def fresh_action(self, obs: Tensor) -> Tensor:
        """Policy's action [A, B] at obs [B, O]; its activations are kept for ``step``."""
        buffers = self._sized(obs.shape[0])
        buffers.x_obs_t = obs.t().unsqueeze(0)
        buffers.action = buffers.online.forward(obs.unsqueeze(0))[0].tanh()
        return buffers.action

    def step(self, dq_da: Tensor) -> None:
        """Gradient step on ``-mean Q(s, pi(s))`` (deterministic policy gradient, arXiv 1509.02971, eq. 6)."""
        buffers = self._buffers
        assert buffers is not None
        buffers.tape.grad_out[0].copy_(losses.tanh_backward(buffers.action, dq_da * buffers.minus_per_row))
        buffers.online.backward(buffers.x_obs_t, self.gradient)
        self.adam.step()

    def update_target(self, tau: float) -> None:
        """Moves the target policy toward the online one."""
        losses.polyak_(self.target.flat, self.online.flat, tau)

    def metrics(self, mean_action_value: float) -> dict[str, float]:
        """actor_loss and actor_grad_norm of the latest step (reads the device)."""
        return {"actor_loss": -mean_action_value, "actor_grad_norm": self.adam.gradient_norm}

    def refused(self) -> int:
        """Steps that were not applied (reads the device)."""
        return self.adam.refused

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        self._buffers = None

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        own = {"online": self.online.flat, "target": self.target.flat}
        return own | {f"adam.{name}": tensor for name, tensor in self.adam.tensors().items()}

    def _sized(self, rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _Buffers(self.online, self.target, rows, self._pair)
        return self._buffers


def deterministic_parts(
    obs_dim: int, action_dim: int, config: TD3Config | DDPGConfig, seed: int, placement: Placement, dtype: torch.dtype,
    *, num_critics: int, pair: ThreadPair | None = None,
) -> tuple[DeterministicActor, Critics, torch.Generator, dict[str, Any]]:
    """What TD3 and DDPG are made of: actor, critics, the generator of all noise, the policy's metadata.

    Networks are drawn in this order from one generator, so that a seed means the same weights for ever.
    """
    hidden = config.hidden_sizes
    init = torch.Generator().manual_seed(seed)
    noise = torch.Generator(placement.actor).manual_seed(seed + 1)
    actor = DeterministicActor(obs_dim, action_dim, hidden, config.actor_lr, init, noise, placement.actor, dtype, pair)
    critics = Critics(obs_dim, action_dim, hidden, num_critics, config.critic_lr, init, placement.critics, dtype, pair)
    meta = {
        "policy": "deterministic",
        "obs_dim": obs_dim,
        "action_dim": action_dim,
        "hidden_sizes": list(hidden),
        "exploration_noise": config.exploration_noise,
    }
    return actor, critics, noise, meta
