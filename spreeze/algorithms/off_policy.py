"""Off-policy algorithms: base class, steps of an update, critics.

An update calls two methods of the actor and two of the critics; only their arguments and results pass between the two::

    actor side                                         critic side
    actor_forward(batch)   -- next actions, log_probs -->  critic_step(batch, ...)
                           -- current actions         -->  action_gradient(batch, action)
    actor_step(dq_da)      <-- dQ/da                  --

``update`` runs them in this order, on one device or two (``DeviceSplit``, the two-GPU split of the Spreeze paper). With
``overlap``, dQ/da is computed before the critics' step: both devices work in parallel and the actor follows the critics
of the previous update. Tensors of actions are component-first, [A, B]. Algorithms without an actor (DQN) have no
``action_gradient`` and no ``actor_step``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.algorithm import Algorithm, LazySnapshot, finite
from spreeze.algorithms.networks.conv_networks import ConvParameters, ImageEncoder
from spreeze.algorithms.networks.fused_mlp import (
    RELU,
    HiddenLayers,
    MlpBuffers,
    Parameters,
    new_parameters,
    policy_snapshot,
    row_chunks,
)
from spreeze.algorithms.networks.recurrent_networks import RecurrentEncoder
from spreeze.algorithms.networks.value_heads import DuelingHead, NoisyNetworks, ReturnHead, perceptron_of
from spreeze.algorithms.optimizers import Encoder, F, FlatAdam, TrainedNetworks
from spreeze.algorithms.parallel_work import Parallel, TwoStreams, TwoThreads
from spreeze.config.algorithm_bases import ActionValueConfig, ActorCriticConfig, AlgorithmConfig, RecurrentReplayConfig
from spreeze.config.algorithms import NetworkRow
from spreeze.errors import ConfigError
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import FrameSpec, TransitionBatch


class ActorOutputs(NamedTuple):
    """Outputs of the actor that the critics need in an update.

    Of a discrete policy, probabilities [K, B] of all actions and their logarithms [K, B]; dQ/da is then the value of
    each action [K, B]. Of DQN, the index of one action [1, B].
    """

    next_action: Tensor  # [A, B], at next_obs
    next_log_prob: Tensor | None  # [B] in nat; None where the algorithm has no entropy term
    action: Tensor | None  # [A, B], actions of the current policy at obs; None if this update moves no actor


class DeviceSplit:
    """Devices of actor and critics."""

    def __init__(self, actor: torch.device, critics: torch.device, *, split: bool) -> None:
        self.actor, self.critics, self.split = actor, critics, split

    @classmethod
    def parse(cls, text: str) -> DeviceSplit:
        """``cpu``, ``cuda:0``, or ``ACTOR+CRITICS`` such as ``cuda:0+cuda:1``; a ConfigError for anything else."""
        try:
            actor, *critics = (torch.device(name) for name in text.split("+", 1))
        except RuntimeError:
            raise ConfigError(f"device {text}: expected cpu, cuda:N, or two of them as ACTOR+CRITICS") from None
        return cls(actor, *(critics or [actor]), split=bool(critics))

    def to_critics(self, tensor: Tensor) -> Tensor:
        return self._moved(tensor, self.critics)

    def to_actor(self, tensor: Tensor) -> Tensor:
        return self._moved(tensor, self.actor)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not self.split:
            return tensor
        # A copy to the CPU must block: otherwise its numbers may be read before they have arrived.
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


_MAX_HEALTH_IMAGES = 128  # number of images of a batch for which hidden units are evaluated


class OffPolicyAlgorithm(Algorithm):
    """Networks, losses and update; subclasses set ``_config``, and without an actor override ``policy_arrays``."""

    critics: CriticNetworks[Any]
    actor: TrainedNetworks[Parameters] | None
    _config: AlgorithmConfig
    _optimizers: list[FlatAdam]
    _schedule, _lr_end = "constant", 0.1
    encoder: Encoder | None = None
    """Converts images or sequences to features for actor and critics; None if these read observations."""
    imitation: losses.Imitation | None = None  # behavior cloning in the actor's gradient; None: there is none
    period = 1  # number of updates per actor and target step, such as for a delayed actor

    def __init__(
        self,
        actor: TrainedNetworks[Parameters] | None,
        critics: CriticNetworks[Any],
        generator: torch.Generator,
        meta: dict[str, Any],
        devices: DeviceSplit | None = None,
        *,
        overlap: bool = False,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(generator, meta if encoder is None else meta | encoder.meta)
        self.actor, self.critics, self.encoder = actor, critics, encoder
        self._optimizers = [part.adam for part in (critics, actor, encoder) if part is not None]
        critics.gives_obs_gradient = encoder is not None
        self._devices = devices or DeviceSplit(generator.device, generator.device, split=False)
        self._overlap = overlap
        self._parallel: Parallel | None = None
        self._buffers: Any = None
        """Buffers of the actor, which depend on the batch size."""

    def set_parallel(self, parallel: Parallel | None) -> None:
        """Splits updates over two threads or streams; None: does not split them."""
        self._parallel = self.critics.parallel = parallel
        self.drop_buffers()

    def draw_noise(self, out: Tensor) -> None:
        """Fills ``out`` with standard normal numbers; the source of all noise in updates."""
        out.normal_(generator=self.generator)

    def _actor_update_due(self) -> bool:
        """True in the last update of a period, which steps the actor."""
        return (self.updates + 1) % self.period == 0

    @abstractmethod
    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        """Actor: actions at ``next_obs`` and, if there is an actor, at ``obs``; draws all noise."""

    @abstractmethod
    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critics: one gradient step toward the target."""

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critics: dQ/da."""
        raise NotImplementedError

    def actor_step(self, dq_da: Tensor) -> None:
        """Actor: one gradient step."""
        raise NotImplementedError

    def update_targets(self) -> None:
        """Moves the target networks, by default at the end of a period."""
        if self._actor_update_due():
            self._update_critics_target()
            if self.actor is not None:
                self.actor.update_target(self._config.tau)

    def _update_critics_target(self) -> None:
        self.critics.update_target(self._config.tau)
        if self.encoder is not None:
            self.encoder.update_target(self._config.tau)

    def update(self, batch: Any, actor_batch: TransitionBatch | None = None) -> tuple[float, float]:
        """Runs one update. Steps with a non-finite gradient are skipped and counted.

        ``batch`` (SequenceBatch with memory, else TransitionBatch) is on the critics' device; ``actor_batch`` (only
        obs, next_obs) on the actor's, if another. Returns seconds of the critic step, with ``actor_forward``, and of
        the actor step; on a GPU, to enqueue them.
        """
        devices, start_s = self._devices, perf_counter()
        if self.encoder is not None:  # outside inference mode, whose tensors autograd cannot store
            batch = self.encoder.encode(batch, self.generator)
            if devices.split:
                actor_batch = batch._replace(obs=devices.to_actor(batch.obs), next_obs=devices.to_actor(batch.next_obs))
        with torch.inference_mode():
            outputs = self.actor_forward(batch if actor_batch is None else actor_batch)
            if devices.split:
                outputs = ActorOutputs._make(part if part is None else devices.to_critics(part) for part in outputs)
            next_action, next_log_prob, action = outputs
            dq_da: Tensor | None = None
            if self._overlap and action is not None:
                dq_da = devices.to_actor(self._gradient_for_actor(batch, action).clone())
            self.critic_step(batch, next_action, next_log_prob)
            if self.encoder is not None:
                assert self.critics.obs_gradient is not None
                self.encoder.step(self.critics.obs_gradient[:, : self.encoder.size])
            critic_done_s = perf_counter()
            if action is not None:
                if dq_da is None:
                    dq_da = devices.to_actor(self._gradient_for_actor(batch, action))
                self.actor_step(dq_da)
            self.update_targets()
            self.updates += 1
            return critic_done_s - start_s, perf_counter() - critic_done_s

    def _gradient_for_actor(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Gradient dQ/da, or with ``imitation`` the gradient that replaces it."""
        gradient, value = self.action_gradient(batch, action), self.critics.action_value
        return gradient if self.imitation is None else self.imitation.gradient(gradient, value, batch.action, action)

    def set_optimizers(self, config: AlgorithmConfig) -> None:
        """Sets up the optimizers from shared settings, before the first update."""
        for networks in (self.critics, self.actor, self.encoder):
            if networks is not None:
                networks.adam.weight_decay, networks.adam.beta1 = config.weight_decay, config.adam_beta1
        self._schedule, self._lr_end = config.lr_schedule, config.lr_end
        self.anneal(0.0)

    def anneal(self, progress: float) -> None:
        """Sets the learning rates from ``lr_multiplier`` and the schedule, if any, for a progress of 0 to 1."""
        if self._schedule == "constant" and self.lr_multiplier == 1.0:
            return
        shapes = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
        for adam in self._optimizers:
            adam.scale_lr((self._lr_end + (1.0 - self._lr_end) * shapes[self._schedule]) * self.lr_multiplier)

    @property
    def effective_tau(self) -> float:
        """Mean fraction of the online weights mixed into the targets per update."""
        return self._config.tau / self.period

    def drop_buffers(self) -> None:
        """Frees all memory that depends on the batch size; the next update allocates it again."""
        self.critics.drop_buffers()
        self._buffers = None

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest step (reads the device)."""
        critics, metrics = self.critics, dict[str, float]()
        if critics.td_error is not None and critics.td_target is not None:
            metrics["critic_loss"] = critics.td_error.square().mean().item()
            metrics["q_mean"] = (critics.td_error.mean() + critics.td_target.mean()).item()
            metrics["critic_grad_norm"] = critics.adam.gradient_norm
        return finite(metrics | self._actor_metrics())

    def _actor_metrics(self) -> dict[str, float]:
        if self.actor is None:
            return {}
        return {"actor_loss": -self.critics.mean_action_value(), "actor_grad_norm": self.actor.adam.gradient_norm}

    def _network_optimizers(self) -> list[FlatAdam]:
        return self._optimizers

    def _perceptrons(self, batch: Any) -> Iterator[tuple[Parameters, Tensor]]:
        networks = [] if self.actor is None else [self.actor.online]
        if isinstance(self.critics, Critics):
            networks.append(self.critics.plain)
        elif isinstance(self.critics, ActionValues):
            networks.append(self.critics.mlp)
            if isinstance(self.critics.mean, ConvParameters):
                obs, mean = batch.obs[:_MAX_HEALTH_IMAGES], self.critics.mean
                yield self.critics.mlp, mean.features(obs, mean.convolutions)
        for mlp in networks:
            for x in (batch.obs, getattr(batch, "obs_action", None)):  # sequences have no such rows
                if x is not None and x.dim() == 2 and x.shape[1] == mlp.sizes[0] and x.device == mlp.flat.device:
                    yield mlp, x

    def row_errors(self) -> np.ndarray:
        """Magnitude of the error of each row [B] in the latest update: its priority in replay (reads the device)."""
        errors = self.critics.row_errors()
        return (errors if self.encoder is None else self.encoder.row_errors(errors)).cpu().numpy()

    @property
    def policy_parameters(self) -> list[Tensor]:
        return [part.online.flat for part in (self.actor or self.critics, self.encoder) if part is not None]

    def policy_arrays(self) -> dict[str, np.ndarray]:
        assert self.actor is not None
        return self.actor.online.arrays() | ({} if self.encoder is None else self.encoder.arrays())

    def policy_snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """Copies the weights, without waiting if there is an actor; returns a function for their ``policy_arrays``."""
        if self.actor is not None and self.encoder is None:
            return policy_snapshot(self.actor.online)
        arrays = self.policy_arrays()
        return lambda: arrays

    def value_snapshot(self, scale: float) -> LazySnapshot | None:
        """The first critic's Q(s, a); for a policy that consists of values, as in DQN, only their unit."""
        critics = self.critics
        if self.encoder is None and self.actor is None:
            return dict, {"scale": scale, "gamma": self.gamma, "values": "policy"}
        if self.encoder is not None or not isinstance(critics, Critics) or critics.online.layers.custom is not None:
            return None
        read, grid = policy_snapshot(critics.plain), critics.value_arrays()
        return lambda: read() | grid, self._values_of(critics.plain, "actions", scale)

    def _tensors(self) -> dict[str, Tensor]:
        parts = {"actor": self.actor, "critics": self.critics, "encoder": self.encoder}
        return {
            f"{side}.{name}": value
            for side, part in parts.items()
            if part is not None
            for name, value in part.tensors().items()
        }


def action_value_meta(config: ActionValueConfig, obs_dim: int, num_actions: int) -> dict[str, Any]:
    """Metadata of a policy that takes the action of the highest value, with epsilon-greedy exploration."""
    names = ("epsilon_start", "epsilon_end", "epsilon_env_steps")
    epsilon = {name: getattr(config, name) for name in names}
    return {"policy": "q_values", "obs_dim": obs_dim, "num_actions": num_actions, **epsilon}


class ActorCritic(OffPolicyAlgorithm):
    """Base class of algorithms with an actor: a perceptron, after an encoder of images or sequences."""

    actor: TrainedNetworks[Parameters]
    _config: ActorCriticConfig

    def __init__(
        self,
        obs_dim: int,
        outputs: int,
        config: ActorCriticConfig,
        seed: int,
        device: str = "cpu",
        *,
        meta: dict[str, Any],
        target_actor: bool,
        overlap: bool = False,
        network: NetworkRow | None = None,
        frames: FrameSpec | None = None,
    ) -> None:
        """``outputs`` and ``meta``: width and metadata of the actor's head; ``overlap``: see the module.

        ``network`` holds the user's own hidden layers; with ``frames``, observations are images.
        """
        devices = DeviceSplit.parse(device)
        encoder: Encoder | None = None
        if frames is not None:
            encoder = ImageEncoder(frames, config, seed, devices.critics)
        elif isinstance(config, RecurrentReplayConfig) and config.sequence is not None:
            encoder = RecurrentEncoder(obs_dim, config, config.n_step, seed, devices.critics, lr=config.critic_lr)
        inputs = obs_dim if encoder is None else encoder.size
        # Networks are initialized in this order from one generator, so that a seed always gives the same weights.
        init, sizes = torch.Generator().manual_seed(seed), (inputs, *config.actor_sizes, outputs)
        layers = HiddenLayers(config.activation, config.actor_layer_norm, network)
        actor = TrainedNetworks(
            lambda: new_parameters(sizes, 1, devices.actor, layers=layers), config.actor_lr, init, target=target_actor
        )
        critic_layers = HiddenLayers(config.activation, config.critic_layer_norm, network)
        critics = self._new_critics(config, inputs, init, devices.critics, critic_layers)
        noise = torch.Generator(devices.actor).manual_seed(seed + 1)
        meta = {"obs_dim": obs_dim, "hidden_sizes": list(config.actor_sizes), **layers.meta, **meta}
        super().__init__(actor, critics, noise, meta, devices, overlap=overlap, encoder=encoder)
        self._config = config

    @abstractmethod
    def _new_critics(
        self, config: Any, inputs: int, generator: torch.Generator, device: torch.device, layers: HiddenLayers
    ) -> CriticNetworks[Any]:
        """Critics over ``inputs`` features."""


N = TypeVar("N", bound=Parameters | ConvParameters)
T = TypeVar("T")


class CriticNetworks(TrainedNetworks[F]):
    """The critic networks of an algorithm."""

    parallel: Parallel | None = None  # threads or streams that split the work, if any; a change needs new buffers
    _buffers: Any = None  # buffers that depend on the batch size
    td_error: Tensor | None = None  # [S, B], of the latest step
    td_target: Tensor | None = None  # [B], of the latest step
    gives_obs_gradient = False  # True if a step computes ``obs_gradient``
    obs_gradient: Tensor | None = None
    """[B, O], derivative of the latest step's loss with respect to the observations, or [B, O + A] to all inputs."""
    action_value: Tensor | None = None  # [B], Q-values of the latest actions of the current policy

    def row_errors(self) -> Tensor:
        """Magnitude of each row's temporal difference [B] in the latest step, averaged over the critics."""
        assert self.td_error is not None
        return self.td_error.abs().mean(0)

    def mean_action_value(self) -> float:
        """Mean Q of the latest actions of the current policy, NaN if there are none (reads the device)."""
        return math.nan if self.action_value is None else self.action_value.mean().item()

    def drop_buffers(self) -> None:
        self._buffers = self.td_error = self.td_target = self.action_value = self.obs_gradient = None


class Chunk:
    """Cached views of a row range, for one critic or all: a view costs as much as a small addition."""

    def __init__(
        self,
        networks: tuple[Parameters, ...],
        critics: slice,
        buffers: _CriticBuffers,
        scratch: MlpBuffers,
        rows: slice,
    ) -> None:
        self.online, self.target, self.gradient = networks
        self.critics, self.rows, self.is_first, self.num_critics = critics, rows, rows.start == 0, self.online.stack
        self.buffers = scratch.under(buffers.out[critics, :, rows], buffers.grad_out[critics, :, rows])
        self.all_q, self.all_grad = self.buffers.out[:, 0], self.buffers.grad_out[:, 0]
        self.x = buffers.x[rows].expand(self.num_critics, -1, -1)
        self.td_error = buffers.td_error[critics, rows]
        self.action_gradients = buffers.action_gradients[critics, :, rows]
        self.action_weights = self.online.weights[0][:, buffers.obs_dim :]


class _CriticBuffers:
    """Buffers that depend on the batch size."""

    def __init__(self, critics: Critics, rows: int, obs_dim: int, parallel: Parallel | None) -> None:
        networks = (critics.plain, critics.target, critics.gradient)
        like, num_critics, inputs = critics.online.flat, critics.online.stack, critics.online.sizes[0]
        self.rows, self.obs_dim = rows, obs_dim
        outputs = critics.online.sizes[-1]
        self.out, self.grad_out = like.new_zeros(num_critics, outputs, rows), like.new_zeros(num_critics, outputs, rows)
        self.td_error = like.new_zeros(num_critics, rows)
        self.q_action = like.new_full((rows,), math.nan)
        self.action_gradients = like.new_zeros(num_critics, inputs - obs_dim, rows)
        self.gradients: list[Tensor] = list(self.action_gradients)
        self.is_first = torch.zeros(rows, dtype=torch.bool, device=like.device)
        self.min_gradient = torch.zeros_like(self.gradients[0])
        self.x = like.new_zeros(rows, inputs)
        self.x_obs, self.x_action_t = self.x[:, :obs_dim], self.x[:, obs_dim:].t()
        self.inverse_rows = like.new_full((), 1.0 / rows)
        self.q = [self.out[index, 0] for index in range(num_critics)]
        single = [
            (tuple(network.one(index) for network in networks), slice(index, index + 1)) for index in range(num_critics)
        ]
        (chunks,) = row_chunks(like.device, rows)
        groups = [(networks, slice(0, num_critics))] if parallel is None and len(chunks) == 1 else single
        scratch = [MlpBuffers.allocate(groups[0][0][0], chunks[0].stop) for _ in range(1 if parallel is None else 2)]
        self.groups = [
            [Chunk(*group, self, scratch[index % len(scratch)], chunk) for chunk in chunks]
            for index, group in enumerate(groups)
        ]
        """Chunks of all critics, or of each critic."""
        threads = 2 if isinstance(parallel, TwoThreads) else 1
        self.first = [
            [Chunk(*single[0], self, scratch[thread], chunk) for chunk in part]
            for thread, part in enumerate(row_chunks(like.device, rows, threads))
        ]
        """Chunks of the first critic; with two threads, half of the rows for each."""

    def fill(self, obs: Tensor, action: Tensor) -> None:
        """Copies obs [B, O] and actions [A, B] into the networks' input."""
        if self.x.device.type == "cpu":
            self.x_obs.copy_(obs)
            self.x_action_t.copy_(action)
        else:  # one kernel
            torch.cat((obs, action.t()), 1, out=self.x)


class Critics(CriticNetworks[Parameters]):
    """S networks Q(s, a) as one stacked network, or one network in each of two threads or streams.

    On a CPU, batches above ``CHUNK_ROWS`` rows go through one critic after the other, in chunks whose gradients are
    summed.
    """

    def __init__(
        self,
        config: ActorCriticConfig,
        obs_dim: int,
        action_dim: int,
        num_critics: int,
        generator: torch.Generator,
        device: torch.device,
        layers: HiddenLayers = RELU,
        *,
        outputs: int = 1,
    ) -> None:
        sizes = (obs_dim + action_dim, *config.hidden_sizes, outputs)
        super().__init__(lambda: new_parameters(sizes, num_critics, device, layers=layers), config.critic_lr, generator)
        self._obs_dim = obs_dim

    @property
    def plain(self) -> Parameters:
        """The critics as perceptrons whose rows are independent of each other."""
        return self.online

    def value_arrays(self) -> dict[str, np.ndarray]:
        """Arrays needed to interpret the outputs, besides the networks' weights."""
        return {}

    def set_joint_batch(self, obs_action: Tensor) -> None:
        """Hook for critics that normalize over rows (CrossQ): hands them [B, O + A] before the targets are computed."""

    def _sized(self, rows: int) -> _CriticBuffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _CriticBuffers(self, rows, self._obs_dim, self.parallel)
            self.action_value = self._buffers.q_action
        buffers: _CriticBuffers = self._buffers
        return buffers

    def _run(self, work: Callable[[list[T]], object], groups: list[list[T]]) -> None:
        """Calls ``work`` with each group, two at a time if parallel."""
        if self.parallel is None or len(groups) == 1:
            for chunks in groups:
                work(chunks)
        else:
            first, second = groups
            self.parallel.both(lambda: work(first), lambda: work(second))

    def _evaluate(self, next_obs: Tensor, next_action: Tensor) -> _CriticBuffers:
        """Fills the buffers' outputs with those of the target networks."""
        buffers = self._sized(next_obs.shape[0])
        buffers.fill(next_obs, next_action)

        def evaluate(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                chunk.target.forward(chunk.x, chunk.buffers)

        self._run(evaluate, buffers.groups)
        return buffers

    def _take_step(self, obs_action: Tensor, mean_td_target: Tensor, fill: Callable[[Chunk], None]) -> None:
        """One gradient step; ``fill`` sets a chunk's ``buffers.grad_out`` and ``td_error`` from its outputs.

        ``mean_td_target`` [B] is for the metrics.
        """
        buffers = self._sized(obs_action.shape[0])
        self.td_error, self.td_target = buffers.td_error, mean_td_target
        streams = self.parallel if isinstance(self.parallel, TwoStreams) else None
        shape = (*buffers.td_error.shape, self._obs_dim)
        by_obs = obs_action.new_empty(shape) if self.gives_obs_gradient else None

        def differentiate(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                x = obs_action[chunk.rows].expand(chunk.num_critics, -1, -1)
                chunk.online.forward(x, chunk.buffers)
                fill(chunk)
                chunk.online.backward(
                    chunk.buffers, x.transpose(1, 2), chunk.gradient, add=not chunk.is_first, streams=streams
                )
                if by_obs is not None:
                    by_obs[chunk.critics, chunk.rows] = _input_gradient(chunk.online, chunk.buffers)[
                        :, :, : self._obs_dim
                    ]

        self._run(differentiate, buffers.groups)
        self.obs_gradient = None if by_obs is None else by_obs.sum(0)
        self.adam.step()

    def next_value(self, next_obs: Tensor, next_action: Tensor) -> Tensor:
        """Minimum [B] of the target networks' values at actions [A, B] (clipped double Q, arXiv 1802.09477, eq. 10)."""
        q = self._evaluate(next_obs, next_action).q
        return q[0].clone() if self.online.stack == 1 else torch.minimum(*q)

    def step(self, obs_action: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """One gradient step on ``sum over critics of mean weight (Q - target)^2 / 2``; target [B], weight [B] (1)."""
        inverse_rows = self._sized(obs_action.shape[0]).inverse_rows

        def fill(chunk: Chunk) -> None:
            torch.sub(chunk.all_q, target[chunk.rows], out=chunk.td_error)
            torch.mul(chunk.td_error, inverse_rows, out=chunk.all_grad)
            if weight is not None:
                chunk.all_grad.mul_(weight[chunk.rows])

        self._take_step(obs_action, target, fill)

    def action_gradient(self, obs: Tensor, action: Tensor, *, use_min: bool) -> Tensor:
        """dQ/da [A, B] of the critics' minimum or the first critic, in a buffer that the next call overwrites."""
        buffers = self._sized(obs.shape[0])
        buffers.fill(obs, action)
        if not use_min or self.online.stack == 1:
            self._run(_action_gradients, buffers.first)
            buffers.q_action.copy_(buffers.q[0])
            return buffers.gradients[0]
        self._run(_action_gradients, buffers.groups)
        first, second = buffers.q
        torch.minimum(first, second, out=buffers.q_action)
        # Only the lower critic counts in each row, in a tie the first.
        torch.le(first, second, out=buffers.is_first)
        return torch.where(buffers.is_first, buffers.gradients[0], buffers.gradients[1], out=buffers.min_gradient)


def _input_gradient(networks: Parameters, buffers: MlpBuffers) -> Tensor:
    """Derivatives [S, M, I] with respect to the inputs, after ``Parameters.backward``."""
    return torch.bmm(buffers.grads[0], networks.weights_t[0])


def _action_gradients(chunks: list[Chunk]) -> None:
    """Computes Q and dQ/da of each network, without a sum over rows."""
    for chunk in chunks:
        chunk.online.forward(chunk.x, chunk.buffers)
        chunk.online.derivative(chunk.buffers)
        torch.bmm(chunk.action_weights, chunk.buffers.grads_t[0], out=chunk.action_gradients)


class ActionValues(CriticNetworks[Any], Generic[N]):
    """Networks Q(s, .) [K], optionally with dueling streams; subclasses evaluate and differentiate them.

    With a ``head`` they have Z outputs per action; with ``noise`` above 0 their weights are random (``NoisyNetworks``).
    """

    def __init__(
        self,
        inputs: int,
        num_actions: int,
        hidden_sizes: tuple[int, ...],
        lr: float,
        generator: torch.Generator,
        make: Callable[[tuple[int, ...]], N],
        *,
        dueling: bool = False,
        max_norm: float | None = None,
        head: ReturnHead | None = None,
        noise: float = 0.0,
    ) -> None:
        self._head, self._outputs = head, 1 if head is None else head.outputs
        sizes = (inputs, *hidden_sizes, num_actions * self._outputs)
        if dueling:
            sizes = (inputs, *hidden_sizes[:-1], 2 * hidden_sizes[-1], (1 + num_actions) * self._outputs)

        def make_networks() -> Any:
            return NoisyNetworks(lambda: make(sizes), noise) if noise else make(sizes)

        super().__init__(make_networks, lr, generator, max_norm=max_norm)
        self.noisy = isinstance(self.online, NoisyNetworks)
        self._online, self._target = ((part.drawn if self.noisy else part) for part in (self.online, self.target))
        self.mean: N = self.online.means if self.noisy else self.online
        """The networks without noise."""
        self._gradient: N = self.gradient.means if self.noisy else self.gradient
        self.mlp = perceptron_of(self.mean)
        self._dueling = DuelingHead(self.mlp, num_actions, self._outputs) if dueling else None
        if self._dueling is not None:
            self._dueling.initialize(self.mlp)
            if self.noisy:
                self._dueling.initialize(perceptron_of(self.online.deviations))
        self.target.flat.copy_(self.online.flat)

    @abstractmethod
    def _q(self, obs: Tensor, networks: N, *, record: bool = False) -> Tensor:
        """Outputs [S, K Z, B]; ``record`` stores the data for ``_differentiate``."""

    @abstractmethod
    def _differentiate(self, obs: Tensor, grad_q: Tensor) -> None:
        """Fills ``_gradient``: ``grad_q`` holds the derivative of each row, and the loss is the mean over rows."""

    def policy_head(self) -> tuple[Tensor, Tensor]:
        """Weight [K, H] and bias [K] of the first network's action values, or [K Z, H] and [K Z] of its outputs."""
        weight, bias = self.mlp.head_weight[0], self.mlp.head_bias[0, :, 0]
        if self._head is not None:
            return self._folded(self._head, weight), self._folded(self._head, bias.unsqueeze(1))[:, 0]
        return (weight, bias) if self._dueling is None else (self._dueling.joint @ weight, self._dueling.joint @ bias)

    def _folded(self, head: ReturnHead, rows: Tensor) -> Tensor:
        rows = head.folded(rows.view(-1, self._outputs, rows.shape[1]))
        return (rows if self._dueling is None else torch.tensordot(self._dueling.joint, rows, 1)).flatten(0, 1)

    def noise_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the deviations of noisy weights, ``noise_w0`` and so on; none without noise."""
        arrays = perceptron_of(self.online.deviations).arrays() if self.noisy else {}
        return {f"noise_{name}": array for name, array in arrays.items()}

    def draw(self, fill: Callable[[Tensor], None], *, target: bool = False) -> None:
        """Draws the weights of noisy networks anew; ``fill`` fills a tensor with standard normal numbers."""
        if self.noisy:
            (self.target if target else self.online).draw(fill)

    def outputs(self, obs: Tensor, *, target: bool = False) -> Tensor:
        """Outputs [S, K Z, B] for all actions at obs [B, ...], in a buffer that the next call may overwrite."""
        return self._q(obs, self._target if target else self._online)

    def values(self, obs: Tensor, *, target: bool = False) -> Tensor:
        """Q-values [S, K, B] of all actions at obs [B, ...], in a buffer that the next call may overwrite."""
        return self.values_of(self.outputs(obs, target=target))

    def values_of(self, out: Tensor) -> Tensor:
        """Q-values [S, K, B] of ``outputs``."""
        return out if self._head is None else self._head.means(self._by_action(out))

    def _by_action(self, out: Tensor) -> Tensor:
        return out.view(len(out), -1, self._outputs, out.shape[2])

    def next_value(self, out: Tensor, action: Tensor) -> Tensor:
        """Value [B], or returns [M, B], of actions [1, B] from the first network's ``outputs``."""
        if self._head is None:
            return out[0].gather(0, action)[0]
        index = action.unsqueeze(1).expand(1, self._outputs, -1)
        return self._head.next_returns(self._by_action(out)[0].gather(0, index)[0])

    def step(
        self,
        obs: Tensor,
        action: Tensor,
        target: Tensor,
        loss_gradient: Callable[[Tensor], Tensor] | None = None,
        weight: Tensor | None = None,
    ) -> None:
        """One gradient step on ``sum over networks of mean weight loss(Q(s, a) - target)``.

        ``action`` [B] holds indices; ``loss_gradient`` maps errors to derivatives of the loss (None: error^2 / 2);
        ``weight`` [B] is 1 if None. A head has its own loss and a target [M, B].
        """
        q = self._q(obs, self._online, record=True)
        if self._head is None:
            index = action.expand(len(q), 1, -1)
            self.td_error, self.td_target = torch.gather(q, 1, index)[:, 0] - target, target
            derivative = self.td_error if loss_gradient is None else loss_gradient(self.td_error)
            derivative = derivative if weight is None else derivative * weight
            grad_q = torch.zeros_like(q).scatter_(1, index, derivative.unsqueeze(1))
        else:
            by_action, index = self._by_action(q), action.expand(1, 1, self._outputs, -1)
            derivative, error, self.td_target = self._head.loss_gradient(by_action.gather(1, index)[0, 0], target)
            derivative = derivative if weight is None else derivative * weight
            self.td_error = error.unsqueeze(0)
            grad_q = torch.zeros_like(by_action).scatter_(1, index, derivative[None, None]).flatten(1, 2)
        self._differentiate(obs, grad_q)
        if self._dueling is not None:
            perceptron_of(self._gradient).head_weight.mul_(self._dueling.mask)
        if self.noisy:
            self.online.set_gradient(self.gradient)
        self.adam.step()

    def row_errors(self) -> Tensor:
        """Magnitudes of the errors [B] of the latest step; with a head, the losses."""
        return super().row_errors() if self._head is None else self._head.row_losses()


class DiscreteCritics(ActionValues[Parameters]):
    """S networks over vectors."""

    def _q(self, obs: Tensor, networks: Parameters, *, record: bool = False) -> Tensor:
        if self._buffers is None or self._buffers.out.shape[2] != len(obs):
            self._buffers = MlpBuffers.allocate(networks, len(obs))
        out = networks.forward(obs.expand(networks.stack, -1, -1), self._buffers)
        return out if self._dueling is None else self._dueling.join(out)

    def _differentiate(self, obs: Tensor, grad_q: Tensor) -> None:
        buffers: MlpBuffers = self._buffers
        if self._dueling is None:
            torch.mul(grad_q, 1.0 / len(obs), out=buffers.grad_out)
        else:
            self._dueling.part(grad_q.mul_(1.0 / len(obs)), buffers.grad_out)
        self._online.backward(buffers, obs.t().expand(self._online.stack, -1, -1), self._gradient)
        if self.gives_obs_gradient:
            self.obs_gradient = _input_gradient(self._online, buffers).sum(0)
