"""Deep Q-learning (Mnih et al. 2015), optionally with double estimation and dueling streams.

Departures from the paper: Adam instead of RMSProp, squared error under a bound of the gradient's norm, and optionally a
soft target update. The clipped error of the paper, made for rewards that are signs, is Huber's loss with ``huber`` = 1:
an error of 1 then pulls as much as one of 100, which in other tasks ends of episodes can have. There is no actor: the
policy is the best action of the Q network, so ``actor_forward`` only picks next actions and nothing crosses back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.conv_networks import ConvParameters, refuse_layers
from spreeze.algorithms.fused_mlp import HiddenLayers, host_copies, policy_arrays
from spreeze.algorithms.off_policy import ActionValues, ActorOutputs, DiscreteCritics, OffPolicyAlgorithm
from spreeze.config.algorithm_settings import ActionValueConfig
from spreeze.config.algorithms import AlgorithmRow, NetworkRow
from spreeze.config.section import setting
from spreeze.errors import ConfigError
from spreeze.inference.convolution import CNNS, conv_layers, features
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import FrameSpec, TransitionBatch


@dataclass(frozen=True, kw_only=True)
class DQNConfig(ActionValueConfig):
    """Deep Q-learning (Mnih et al. 2015) with double estimation and dueling streams as options."""

    layer_norm: bool = setting(False, "normalise the hidden layers (arXiv 1607.06450); not for images", fixed=True)
    cnn: str = setting(
        "nature", "convolutional layers for images; hidden_sizes follow", choices=tuple(CNNS), fixed=True
    )
    duelling: bool = setting(
        False, "dueling network: separate streams for value and advantages (arXiv 1511.06581)", fixed=True
    )
    huber: float = setting(
        0.0,
        "threshold of the Huber loss, with normalize_returns in standard deviations of the return; 0: squared error",
        low=0.0,
        high=1e9,
    )


class DQN(OffPolicyAlgorithm):
    name = "dqn"
    _config: DQNConfig

    def __init__(
        self,
        obs_dim: int,
        num_actions: int,
        config: DQNConfig,
        seed: int,
        device: str = "cpu",
        frames: FrameSpec | None = None,
        *,
        masked: bool = False,
        network: NetworkRow | None = None,
    ) -> None:
        there = torch.device(device)
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(there).manual_seed(seed + 1)
        hidden, lr, duelling = config.hidden_sizes, config.lr, config.duelling
        bound = config.max_grad_norm
        self.critics: DiscreteCritics | ImageCritics
        image: dict[str, Any] = {}
        layers = HiddenLayers(config.activation, config.layer_norm, network)
        if network is not None and duelling:
            raise ConfigError("dqn.duelling = true: custom networks have no such streams; remove one of them")
        if frames is None:
            self.critics = DiscreteCritics(
                obs_dim, num_actions, hidden, 1, lr, init, there, duelling=duelling, layers=layers, max_norm=bound
            )
        else:
            refuse_layers(layers, "dqn")
            self.critics = ImageCritics(
                frames, num_actions, config.cnn, hidden, lr, init, there, duelling=duelling, max_norm=bound
            )
            image = {"cnn": config.cnn, "image": self.critics.image}
        self._config, self.period = config, config.target_interval
        self._loss_gradient = partial(losses.huber_gradient, threshold=config.huber) if config.huber else None
        self._next_q: Tensor | None = None
        meta = {
            "policy": "q_values",
            "obs_dim": obs_dim,
            "num_actions": num_actions,
            "hidden_sizes": list(self.critics.mlp.sizes[1:-1]),
            "epsilon_start": config.epsilon_start,
            "epsilon_end": config.epsilon_end,
            "epsilon_env_steps": config.epsilon_env_steps,
            **image,
            **layers.meta,
        } | ({"action_mask": True} if masked else {})
        self._masked = masked
        super().__init__(None, self.critics, noise, meta)

    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        """Next actions [1, B] as indices: the best allowed of the online network (double) or of the target network."""
        # Without double estimation, critic_step reuses these values.
        self._next_q = self.critics.values(batch.next_obs, target=not self._config.double)
        next_q = losses.mask_logits(self._next_q[0], batch.next_obs) if self._masked else self._next_q[0]
        return ActorOutputs(next_q.argmax(0, keepdim=True), None, None)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount Q'(s', a')``, squared error or Huber's loss."""
        next_q = self.critics.values(batch.next_obs, target=True) if self._config.double else self._next_q
        assert next_q is not None
        value = next_q[0].gather(0, next_action)[0]
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs, batch.action[:, 0].long(), target, self._loss_gradient)

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._next_q = None

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the Q network's weights, with a dueling head as the equivalent single layer."""
        if self.critics.mlp.layers.own is not None:
            return policy_arrays(self.critics.mlp)
        weight, bias = self.critics.policy_head()
        own = {"head_w": weight.t().contiguous(), "head_b": bias}
        if isinstance(self.critics, ImageCritics):
            own |= self.critics.online.trunk()
        return policy_arrays(self.critics.mlp) | host_copies(own)


class ImageCritics(ActionValues[ConvParameters]):
    """Q(s, .) [K] of images, by autograd; S = 1."""

    def __init__(
        self,
        frames: FrameSpec,
        num_actions: int,
        cnn: str,
        hidden_sizes: tuple[int, ...],
        lr: float,
        generator: torch.Generator,
        device: torch.device,
        *,
        duelling: bool = False,
        max_norm: float | None = None,
    ) -> None:
        self.image = [frames.stack * frames.channels, frames.height, frames.width]
        conv = conv_layers(cnn, *self.image)

        def parameters(sizes: tuple[int, ...]) -> ConvParameters:
            flat = torch.zeros(ConvParameters.count(conv, sizes), device=device)
            return ConvParameters(flat, conv, sizes)

        super().__init__(
            features(conv), num_actions, hidden_sizes, lr, generator, parameters, duelling=duelling, max_norm=max_norm
        )
        self._leaves = self.online.leaves()

    def _q(self, obs: Tensor, networks: ConvParameters, *, record: bool = False) -> Tensor:
        if record:
            with torch.inference_mode(False), torch.enable_grad():
                recorded = networks.forward(obs, self._leaves)
            self._buffers, out = recorded, recorded.detach()
        else:
            with torch.no_grad():
                out = networks.forward(obs, networks.tensors())
        return (out if self._dueling is None else out @ self._dueling.joint.t()).t().unsqueeze(0)

    def _differentiate(self, obs: Tensor, grad_q: Tensor) -> None:
        grad = grad_q[0].t() / len(obs)
        out, self._buffers = self._buffers, None
        leaves = [tensor for pair in self._leaves for tensor in pair]
        found = torch.autograd.grad(out, leaves, grad if self._dueling is None else grad @ self._dueling.joint)
        own = [tensor for pair in self.gradient.tensors() for tensor in pair]
        for tensor, value in zip(own, found, strict=True):
            tensor.copy_(value)


# Small batches and networks: what learns is targets that move, tau times updates, and each takes a gradient step.
ALGORITHMS = (
    AlgorithmRow(
        name="dqn",
        config=DQNConfig,
        discrete=DQN,
        preferred=True,
        images=True,
        over_vectors={"learner.batch_size": 64},
        over_images={"dqn.hidden_sizes": (256, 256), "dqn.lr": 3e-4, "dqn.huber": 1.0},
    ),
)
