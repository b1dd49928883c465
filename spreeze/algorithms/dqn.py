"""Deep Q-learning (Mnih et al. 2015), and by settings its extensions up to Rainbow (Hessel et al. 2018, 1710.02298).

These are double estimation and n-step returns, both on, dueling streams, distributions of the return and noisy networks
(``value_heads``), and prioritised replay (``transport.prioritised_replay``). There is no actor: the policy is the best
action of the Q network, so ``actor_forward`` only chooses the next actions.

Departures from the paper: Adam instead of RMSProp, squared error with clipped gradient norm, and optionally a soft
target update. The paper's clipped error, for rewards that are signs, is Huber's loss with ``huber`` = 1: an error of 1
then has as large a gradient as one of 100, as ends of episodes can have in other tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.networks.conv_networks import ConvParameters
from spreeze.algorithms.networks.fused_mlp import HiddenLayers, host_copies, new_parameters
from spreeze.algorithms.networks.recurrent_networks import RecurrentEncoder
from spreeze.algorithms.networks.value_heads import CategoricalReturns, QuantileReturns, ReturnHead
from spreeze.algorithms.off_policy import (
    ActionValues,
    ActorOutputs,
    DiscreteCritics,
    OffPolicyAlgorithm,
    action_value_meta,
)
from spreeze.config.algorithm_bases import ActionValueConfig, RecurrentReplayConfig, ReturnRange, average_setting
from spreeze.config.algorithms import AlgorithmRow, NetworkRow
from spreeze.config.section import NO_LIMIT, setting
from spreeze.errors import ConfigError
from spreeze.inference.convolution import CNNS, TrunkInputs
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import EnvSpec, FrameSpec, TransitionBatch


@dataclass(frozen=True, kw_only=True)
class DQNConfig(RecurrentReplayConfig, ReturnRange, ActionValueConfig):
    """Deep Q-learning (Mnih et al. 2015) with the extensions of Rainbow (arXiv 1710.02298) as options."""

    policy_average: float = average_setting(0.998)
    layer_norm: bool = setting(False, "normalize the hidden layers (arXiv 1607.06450); not for images", fixed=True)
    cnn: str = setting(
        "nature", "convolutional layers for images; hidden_sizes follow", choices=tuple(CNNS), fixed=True
    )
    dueling: bool = setting(
        False, "dueling network: separate streams for value and advantages (arXiv 1511.06581)", fixed=True
    )
    critics: str = setting(
        "mean",
        "what is learned of each action's return: mean; quantile: quantiles (QR-DQN, arXiv 1710.10044); categorical: "
        "probabilities on a grid (C51, arXiv 1707.06887)",
        choices=("mean", "quantile", "categorical"),
        fixed=True,
    )
    quantiles: int = setting(50, "critics = quantile: quantiles of each action", low=1, high=1000, fixed=True)
    atoms: int = setting(51, "critics = categorical: atoms of each action", low=2, high=1001, fixed=True)
    noisy: bool = setting(
        False,
        "explore by learned noise in the weights (arXiv 1706.10295) instead of random actions: epsilon is 0",
        fixed=True,
    )
    noise_scale: float = setting(
        0.5, "noisy: initial standard deviation of a weight, times the root of the layer's inputs", low=0.0, high=10.0
    )
    huber: float = setting(
        0.0,
        "critics = mean: threshold of the Huber loss, with normalize_returns in standard deviations of the return; "
        "0: squared error",
        low=0.0,
        high=NO_LIMIT,
    )

    def check_task(self, spec: EnvSpec) -> None:
        super().check_task(spec)
        for name, plain in (("dueling", False), ("noisy", False), ("critics", "mean")):
            if self.network and getattr(self, name) != plain:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}: the custom network {self.network!r} has no such layers; "
                    f"remove {name} or network"
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
        torch_device = torch.device(device)
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(torch_device).manual_seed(seed + 1)
        lr, max_norm = config.lr, config.max_grad_norm
        layers = HiddenLayers(config.activation, config.layer_norm, network)
        self._atoms: Tensor | None = None
        encoder: RecurrentEncoder | None = None
        if config.sequence is not None:
            encoder = RecurrentEncoder(obs_dim, config, config.n_step, seed, torch_device, lr=lr, max_norm=max_norm)
        shared = num_actions, config.hidden_sizes, lr, init
        options: dict[str, Any] = {
            "dueling": config.dueling,
            "max_norm": max_norm,
            "head": self._new_head(config, torch_device),
            "noise": config.noise_scale if config.noisy else 0.0,
        }
        self.critics: DiscreteCritics | ImageCritics
        image: dict[str, Any] = {}
        if frames is None:
            inputs = obs_dim if encoder is None else encoder.size
            self.critics = DiscreteCritics(
                inputs, *shared, lambda sizes: new_parameters(sizes, 1, torch_device, layers=layers), **options
            )
        else:
            images, cnn = TrunkInputs.of(frames), config.cnn
            self.critics = ImageCritics(
                images.features(cnn),
                *shared,
                lambda sizes: ConvParameters.zeros(images, cnn, sizes, torch_device),
                **options,
            )
            image = images.meta(cnn)
        self._config, self.period = config, config.target_interval
        self._loss_gradient = partial(losses.huber_gradient, threshold=config.huber) if config.huber else None
        self._next_out: Tensor | None = None
        meta = action_value_meta(config, obs_dim, num_actions) | image | layers.meta
        meta |= {"hidden_sizes": list(self.critics.mlp.sizes[1:-1])} | ({"action_mask": True} if masked else {})
        if config.noisy:
            meta |= {"epsilon_start": 0.0, "epsilon_end": 0.0}
            outputs = {"quantile": config.quantiles, "categorical": config.atoms}.get(config.critics, 1)
            meta["noisy"] = {"duelling": config.dueling, "outputs": outputs, "mean": config.critics == "quantile"}
        self._masked = masked
        super().__init__(None, self.critics, noise, meta, encoder=encoder)

    def _new_head(self, config: DQNConfig, device: torch.device) -> ReturnHead | None:
        if config.critics == "quantile":
            return QuantileReturns(config.quantiles, device)
        if config.critics == "mean":
            return None
        head = CategoricalReturns(config.atoms, config.v_min, config.v_max, device)
        self._atoms = head.grid
        return head

    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        """Next actions [1, B] as indices: the best allowed of the online network (double) or of the target network."""
        # Without double estimation, critic_step reuses these outputs. Choice, value and step have separate noise.
        critics, target = self.critics, not self._config.double
        critics.draw(self.draw_noise, target=target)
        self._next_out = critics.outputs(batch.target_net_obs if target else batch.next_obs, target=target)
        next_q = critics.values_of(self._next_out)[0]
        if self._masked:
            masks = critics.numbers(batch.next_obs) if isinstance(critics, ImageCritics) else batch.next_obs
            next_q = losses.mask_logits(next_q, masks)
        return ActorOutputs(next_q.argmax(0, keepdim=True), None, None)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount Q'(s', a')``, squared error or Huber's loss; or with each return instead of Q'."""
        critics, next_out = self.critics, self._next_out
        if self._config.double:
            critics.draw(self.draw_noise, target=True)
            next_out = critics.outputs(batch.target_net_obs, target=True)
        assert next_out is not None
        value = critics.next_value(next_out, next_action)
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        critics.draw(self.draw_noise)
        critics.step(batch.obs, batch.action[:, 0].long(), target, self._loss_gradient, batch.weight)

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._next_out = None

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the Q network's weights, with dueling streams and quantiles folded into one equivalent layer.

        The deviations of noisy weights are not folded; their names begin with ``noise_``.
        """
        if self.critics.mlp.layers.custom is not None:
            return self.critics.mlp.arrays()
        weight, bias = self.critics.policy_head()
        tensors = {"head_w": weight.t().contiguous(), "head_b": bias}
        tensors |= {} if self._atoms is None else {"atoms": self._atoms}
        arrays = self.critics.mlp.arrays() | host_copies(tensors) | self.critics.noise_arrays()
        if isinstance(self.critics, ImageCritics):
            return arrays | self.critics.mean.arrays()
        return arrays if self.encoder is None else arrays | self.encoder.arrays()


class ImageCritics(ActionValues[ConvParameters]):
    """Q(s, .) [K] of images, by autograd; S = 1."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._leaves = self._online.leaves()

    def numbers(self, obs: Tensor) -> Tensor:
        return self.mean.numbers(obs)

    def _q(self, obs: Tensor, networks: ConvParameters, *, record: bool = False) -> Tensor:
        if record:
            with torch.inference_mode(False), torch.enable_grad():
                recorded = networks.forward(obs, self._leaves)
            self._buffers, out = recorded, recorded.detach()
        else:
            with torch.no_grad():
                out = networks.forward(obs, networks.tensors())
        return (out if self._dueling is None else self._dueling.join_rows(out)).t().unsqueeze(0)

    def _differentiate(self, obs: Tensor, grad_q: Tensor) -> None:
        grad = grad_q[0].t() / len(obs)
        out, self._buffers = self._buffers, None
        grad = grad if self._dueling is None else self._dueling.part_rows(grad)
        self._gradient.set_gradient([out], self._leaves, [grad])


# Small batches and networks: progress depends on the movement of the targets, tau per update, hence on many updates.
ALGORITHMS = (
    AlgorithmRow(
        name="dqn",
        config=DQNConfig,
        discrete=DQN,
        preferred=True,
        images=True,
        over_vectors={"learner.batch_size": 64},
        over_sequences={"learner.batch_size": 512},
        over_images={"dqn.hidden_sizes": (256, 256), "dqn.lr": 3e-4, "dqn.huber": 1.0},
    ),
)
