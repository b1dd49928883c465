"""On-policy algorithms: base class, gradients, networks and distributions of PPO, A2C and IMPACT.

They learn from rollouts of T env steps of N environments. theta(j) are the parameters that collect rollout j, D(j) its
data. A mode may collect rollout j while the algorithm learns from D(j - 1), so the parameters can be one rollout ahead.
The *correction* is how an algorithm handles that:

=============  =========================================================================================
on-policy      theta(j + 1) from D(j), nothing to correct: collecting and learning alternate
delayed        the update computed from D(j - 1) at theta(j - 1), which collected it, applied to theta(j):
               HTS-RL (arXiv 2012.09849, eq. 6)
none           the update at theta(j), as if theta(j) had collected D(j - 1)
truncated-is   the update at theta(j), each sample weighted by min(1, pi_theta(j) / pi_theta(j - 1))
=============  =========================================================================================
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.algorithm import Algorithm, LazySnapshot, finite
from spreeze.algorithms.networks.conv_networks import ConvActorCritic
from spreeze.algorithms.networks.fused_mlp import ActorCriticMlp, ActorCriticSpec, HiddenLayers, Parameters
from spreeze.algorithms.networks.recurrent_networks import RecurrentActorCritic, Sequences, Unrolled
from spreeze.algorithms.optimizers import FlatAdam, FlatRMSProp
from spreeze.config.algorithm_bases import AdamOnPolicyConfig, ClippedPolicyConfig, OnPolicyConfig
from spreeze.config.algorithms import find_network
from spreeze.errors import CheckpointError, UsageError
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.inference.normalizer import DiscountedReturns, Normalizer, ScalingStatistics, scaled_rewards
from spreeze.types import EnvSpec, RolloutBatch


class Samples(NamedTuple):
    """M env steps for a gradient; views of one row block."""

    obs: Tensor  # [M, O], normalized; images are uint8 [M, k, *frame]
    action: Tensor  # [M, A]
    log_prob: Tensor  # [M], the denominator of PPO's ratio
    advantage: Tensor  # [M], weighted with correction "truncated-is"
    target: Tensor  # [M], of the value
    value: Tensor  # [M], before the first gradient step
    sequences: Sequences | None = None  # whose rows these are, concatenated; None without memory

    @classmethod
    def of(cls, columns: Iterable[Tensor], sequences: Sequences | None) -> Samples:
        """Inverse of ``columns``, with the sequences."""
        parts: list[Any] = [*columns, sequences]
        return cls(*parts)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All tensors with a row per step."""
        return self[:-1]

    def minibatches(self, count: int, generator: torch.Generator) -> Iterator[Samples]:
        """Equal minibatches in random order: of all rows, or of whole sequences."""
        rows, columns, sequences = len(self.target), self.columns, self.sequences
        units = rows if sequences is None else len(sequences.begins)
        order = torch.randperm(units, generator=generator)
        if sequences is None:
            order = order.to(self.target.device)
            shuffled = (column.index_select(0, order).chunk(count) for column in columns)
            yield from (Samples(*part) for part in zip(*shuffled, strict=True))
            return
        steps = torch.arange(rows // units)
        for part in order.chunk(count):
            index = (part.unsqueeze(1) * len(steps) + steps).flatten().to(self.target.device)
            yield Samples.of((column.index_select(0, index) for column in columns), sequences.of(part.numpy()))


ForwardPass = tuple[Tensor, Tensor]
"""Outputs [K, M] and values [M] of the network's latest forward pass, over all samples."""


class OnPolicyAlgorithm(Algorithm, ScalingStatistics):
    """Base class of on-policy algorithms; subclasses implement ``_update``."""

    _config: OnPolicyConfig
    returns: DiscountedReturns | None
    single_step: bool  # True if a rollout is one gradient step: then values and gradient share one forward pass

    def __init__(
        self,
        spec: EnvSpec,
        config: OnPolicyConfig,
        seed: int,
        device: str,
        correction: str,
        *,
        normalize_obs: bool = False,
    ) -> None:
        self.on_gradient: Callable[[], None] = lambda: None
        """Callback before each gradient, since learning from one rollout may take minutes."""
        self.correction = correction
        self.policy_average = config.policy_average
        """Decay per update of the averaged policy that a trainer publishes; 0: it publishes the newest policy."""
        self._device, self._config = torch.device(device), config
        self._numbers = 0 if spec.box is None else spec.box.dim
        outputs = self._numbers + (0 if spec.choices is None else spec.choices.options)
        network = find_network(config.network, spec.import_module)
        layers = HiddenLayers(config.activation, config.layer_norm, network)
        generator = torch.Generator().manual_seed(seed)
        sizes = ActorCriticSpec(outputs, self._numbers, config.hidden_sizes, layers, generator, self._device)
        self.net: MlpActorCritic | ConvActorCritic | RecurrentActorCritic
        if spec.frames is not None:
            self.net = ConvActorCritic(spec.frames, config.cnn, sizes)
        elif config.state_dim:
            self.net = RecurrentActorCritic(spec.obs_dim, config.recurrent, config.recurrent_size, sizes)
        else:
            self.net = MlpActorCritic(spec.obs_dim, sizes)
        self.net.log_std.fill_(config.initial_log_std)
        self._kind = distribution_of(spec, self.net.log_std, self.net.grad_log_std)
        self._masked = spec.action_mask
        self.optimizer = self._new_optimizer()
        self._optimizers = [self.optimizer]
        self.optimizer.apart = self.net.of_value if config.separate_grad_norms else None
        self._before = self.net.flat.clone() if correction == "delayed" else None
        """theta(j - 1)."""
        self._frames = spec.frames
        self.normalizer, self._normalizer_before = (
            Normalizer(spec.vector_dim, spec.mask_dim) if enabled else None
            for enabled in (normalize_obs, normalize_obs and correction == "delayed")
        )
        """Statistics of observations, if they are normalized."""
        # With sign_rewards, rewards have the same scale in every task already.
        scales = config.normalize_returns and not (spec.frames and spec.frames.sign_rewards)
        self.returns = DiscountedReturns(config.gamma) if scales else None
        """Discounted returns, whose standard deviation divides the rewards; None if they are not scaled."""
        masked = {"action_mask": True} if spec.action_mask else {}
        meta = {**self._kind.meta, "obs_dim": spec.obs_dim, **self.net.meta, **masked}
        super().__init__(torch.Generator().manual_seed(seed + 1), meta)
        self._latest: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        """Objective, log-ratio, value and target [M] of the latest gradient; not views of a rollout's data, which are
        valid only during ``learn``."""
        self._explained_variance = math.nan

    @abstractmethod
    def _new_optimizer(self) -> FlatAdam | FlatRMSProp:
        """A new optimizer of ``net`` with the settings of ``_config``."""

    @abstractmethod
    def _update(self, samples: Samples, forward_pass: ForwardPass | None, theta: Tensor | None) -> None:
        """Takes all gradient steps on a rollout's samples; ``forward_pass`` is given if ``single_step``.

        ``theta`` is theta(j) if the network holds theta(j - 1); at the end it must hold theta(j + 1).
        """

    def _policy_derivative(self, log_prob: Tensor, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The objective to maximize, and its derivative with respect to the log-probabilities; all are [M]."""
        return log_prob * advantage, advantage.clone()

    def _value_error(self, value: Tensor, samples: Samples) -> Tensor:
        """Derivative [M] of the value loss with respect to the values."""
        return value - samples.target

    def learn(self, batch: RolloutBatch, progress: float | None) -> None:
        """Learns from one rollout. Steps with a non-finite gradient are skipped and counted.

        ``batch`` is of theta(j) with correction "on-policy", else of theta(j - 1). ``progress`` of the run, 0 to 1,
        sets the learning rate schedule; None if unknown.
        """
        self._set_lr(progress)
        with torch.no_grad():
            theta = None
            if self._before is not None:
                theta = self.net.flat.clone()
                self.net.flat.copy_(self._before)
                self._before.copy_(theta)
            self._update(*self._samples(batch), theta)
        if self.normalizer is None:
            return
        if self._normalizer_before is not None:
            self._normalizer_before.load_state(self.normalizer.state())
        self._count_obs(self.normalizer, batch.obs)

    def learn_samples(self, samples: Samples, progress: float | None) -> None:
        """Learns from samples that the caller computed from a rollout of theta(j), with correction "on-policy"."""
        self._set_lr(progress)
        with torch.no_grad():
            self._explained_variance = losses.explained_variance(
                samples.value.cpu().numpy(), samples.target.cpu().numpy()
            )
            self._update(samples, self._forward(samples.obs) if self.single_step else None, None)

    @property
    def settings(self) -> OnPolicyConfig:
        return self._config

    def _count_obs(self, normalizer: Normalizer, obs: np.ndarray) -> None:
        """Adds a rollout's observations [T, N, ...] to the normalizer, unless a value is not finite."""
        rows = obs.reshape(-1, *obs.shape[2:])
        if self._frames is not None:
            rows = self._frames.numbers(rows)
        if np.isfinite(rows).all():
            normalizer.update(rows)

    def _set_lr(self, progress: float | None) -> None:
        config = self._config
        decayed = 0.0 if progress is None or config.lr_schedule == "constant" else min(max(progress, 0.0), 1.0)
        self.optimizer.lr = config.lr * (1.0 - decayed * (1.0 - config.lr_end))

    def _samples(self, batch: RolloutBatch) -> tuple[Samples, ForwardPass | None]:
        """The rollout with advantages and targets computed from the network's current parameters."""
        steps, envs = batch.reward.shape
        normalizer = self.normalizer if self._normalizer_before is None else self._normalizer_before
        obs = self._tensor(self._rows(batch.obs), normalizer)
        action, log_prob = self._tensor(self._rows(batch.action)), self._tensor(self._rows(batch.log_prob))
        weighted = self.correction == "truncated-is"
        unrolled = self._unrolled(batch, obs, normalizer)
        sequences = None if unrolled is None else unrolled.sequences
        forward_pass = self._forward(obs, sequences) if weighted or self.single_step else None
        if forward_pass is not None:
            value = forward_pass[1].clone()
        else:
            value = self.net.values(obs) if unrolled is None else unrolled.value
        weight = torch.ones_like(value)
        if weighted and forward_pass is not None:
            now = self._kind.log_prob(forward_pass[0], action)
            weight = (now - log_prob).clamp_(max=0.0).exp_()
            log_prob = now
        old = self._grid(value, steps, envs)
        ended = np.asarray(batch.terminated, bool), np.asarray(batch.truncated, bool)
        reward = self._scaled(batch.reward, *ended)
        target, advantage = losses.advantages(
            reward,
            old,
            self._next_values(batch, old, normalizer) if unrolled is None else unrolled.next_values,
            *ended,
            self._config.gamma,
            self._config.gae_lambda,
            self._grid(weight, steps, envs),
        )
        advantages, targets = self._columns(advantage, target, old)
        samples = Samples(obs, action, log_prob, advantages * weight, targets, value, sequences)
        return samples, forward_pass if self.single_step else None

    def _columns(self, advantage: np.ndarray, target: np.ndarray, value: np.ndarray) -> Sequence[Tensor]:
        """Advantages, normalized where the settings say so, and targets as columns [M], from arrays [T, N]."""
        self._explained_variance = losses.explained_variance(value, target)
        if self._config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return self._tensor(np.stack((self._rows(advantage), self._rows(target)), 1)).unbind(1)

    def _rows(self, array: np.ndarray) -> np.ndarray:
        """An array [T, N, ...] as rows [M, ...], ordered by step or, with memory, by sequence."""
        steps, envs, *shape = array.shape
        length = self._config.sequence_of(steps)
        return array.reshape(steps // length, length, envs, *shape).swapaxes(1, 2).reshape(steps * envs, *shape)

    def _grid(self, rows: Tensor, steps: int, envs: int) -> np.ndarray:
        """Rows [M] as an array [T, N]; inverse of ``_rows``."""
        length = self._config.sequence_of(steps)
        return rows.cpu().numpy().reshape(steps // length, envs, length).swapaxes(1, 2).reshape(steps, envs)

    def _unrolled(self, batch: RolloutBatch, obs: Tensor, normalizer: Normalizer | None) -> Unrolled | None:
        """Values and states along the rollout with the network's current parameters; None without memory."""
        if not isinstance(self.net, RecurrentActorCritic):
            return None
        if batch.state is None:
            raise UsageError("the rollout has no state of the policy, which a recurrent one needs: RolloutBatch.state")
        needed = _needs_next_value(batch)
        return self.net.unroll(
            obs,
            np.logical_or(batch.terminated, batch.truncated),
            needed,
            self._tensor(batch.next_obs[needed], normalizer),
            self._tensor(batch.state),
            length=self._config.sequence_of(len(needed)),
            burn_in=self._config.burn_in,
        )

    def _scaled(
        self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, source: int = 0, *, is_new: bool = True
    ) -> np.ndarray:
        """A rollout's rewards [T, N] in units of the returns' deviation; new ones are first added to its statistics.

        The returns of the environments of ``source``, which collected the rollout, continue in its next rollout.
        """
        if self.returns is None:
            return reward
        if is_new:
            self.returns.add(reward, np.logical_or(terminated, truncated), source)
        return scaled_rewards(reward, self.returns.scale)

    def _next_values(self, batch: RolloutBatch, value: np.ndarray, normalizer: Normalizer | None) -> np.ndarray:
        """Values [T, N] of the states after each step; arbitrary where the MDP ended."""
        next_values = np.empty_like(value)
        next_values[:-1] = value[1:]
        needed = _needs_next_value(batch)
        next_values[needed] = self.net.values(self._tensor(batch.next_obs[needed], normalizer)).cpu().numpy()
        return next_values

    def _forward(self, obs: Tensor, sequences: Sequences | None = None) -> ForwardPass:
        """Outputs and values; logits of invalid actions are masked."""
        if isinstance(self.net, RecurrentActorCritic):
            assert sequences is not None
            out, value = self.net.forward(obs, sequences)
        else:
            out, value = self.net.forward(obs)
        if self._masked:
            masks = self.net.numbers(obs) if isinstance(self.net, ConvActorCritic) else obs
            out = losses.mask_logits(out, masks, self._numbers)
        return out, value

    def _gradient(self, samples: Samples, forward_pass: ForwardPass | None = None) -> None:
        """Fills the gradient of policy loss + value_coef value loss - entropy_coef entropy, all means over M."""
        self.on_gradient()
        config, rows = self._config, len(samples.target)
        out, value = self._forward(samples.obs, samples.sequences) if forward_pass is None else forward_pass
        log_prob = self._kind.log_prob(out, samples.action)
        log_ratio = log_prob - samples.log_prob
        objective, derivative = self._policy_derivative(log_prob, log_ratio, samples.advantage)
        error = self._value_error(value, samples)
        grad_out = self._kind.backward(derivative.mul_(-1.0 / rows), config.entropy_coef / rows)
        self._penalise(out, grad_out)
        self.net.backward(grad_out, error.mul_(config.value_coef / rows))
        self._latest = objective, log_ratio, value, samples.target

    def _penalise(self, out: Tensor, grad_out: Tensor) -> None:
        """Adds a further loss's gradients with respect to outputs [K, M] to ``grad_out`` and ``net.grad_log_std``."""

    def _tensor(self, array: np.ndarray, normalizer: Normalizer | None = None) -> Tensor:
        """A copy on the device; with a ``normalizer``, normalized."""
        array = np.array(array)
        if normalizer is not None:
            normalizer.apply(array)
        tensor = torch.from_numpy(array)
        return tensor.to(self._device) if tensor.dtype == torch.uint8 else tensor.to(self._device, self.net.flat.dtype)

    def metrics(self) -> dict[str, float]:
        if self._latest is None:
            return {}
        objective, _, value, target = self._latest
        return finite(
            {
                "policy_loss": -objective.mean().item(),
                "value_loss": 0.5 * (value - target).square().mean().item() * self.return_scale**2,
                "entropy": self._kind.entropy(),
                "approx_kl": self._divergence().item(),
                "explained_variance": self._explained_variance,
                "learning_rate": self.optimizer.lr,
                "grad_norm": self.optimizer.gradient_norm,
                "return_scale": self.return_scale,
            }
        )

    def _network_optimizers(self) -> tuple[FlatAdam | FlatRMSProp, ...]:
        return () if self._latest is None else (self.optimizer,)

    def _perceptrons(self, batch: Any) -> Iterator[tuple[Parameters, Tensor]]:
        if isinstance(self.net, MlpActorCritic) and self._latest is not None:
            yield self.net.networks, self.net.obs

    def _divergence(self) -> Tensor:
        """KL divergence in nat on the latest minibatch, by the estimator k3 of Schulman 2020, never negative."""
        assert self._latest is not None
        log_ratio = self._latest[1]
        return (log_ratio.exp() - 1.0 - log_ratio).mean()

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Theta(j)'s policy and its normalizer."""
        arrays = self.net.policy_arrays()
        if len(self.net.log_std):
            arrays["log_std"] = self.net.log_std.to("cpu", copy=True).numpy()
        return arrays if self.normalizer is None else arrays | self.normalizer.arrays()

    def value_snapshot(self, scale: float) -> LazySnapshot | None:
        """V(s) of perceptrons."""
        network = self.net.value_network if isinstance(self.net, MlpActorCritic) else None
        if network is None or network.layers.custom is not None:
            return None
        arrays = network.arrays()
        return lambda: arrays, self._values_of(network, "states", scale)

    def parameters(self) -> np.ndarray:
        """A copy of all parameters of policy and value, float32 [d]."""
        return self.net.flat.to("cpu", copy=True).numpy()

    def set_parameters(self, values: np.ndarray) -> None:
        self.net.flat.copy_(torch.from_numpy(values))

    def gradient(self) -> np.ndarray:
        """A copy of the latest gradient [d], clipped as it was applied."""
        return self.net.gradient.to("cpu", copy=True).numpy()

    def share_gradients(self, reduce: Callable[[np.ndarray, int], np.ndarray]) -> None:
        """Replaces the gradient of each step by ``reduce(gradient [d], number of the step)``."""

        def exchange(gradient: Tensor) -> None:
            gradient.copy_(torch.from_numpy(reduce(self.gradient(), self.updates)))

        self.optimizer.exchange = exchange

    def state_json(self) -> dict[str, Any]:
        statistics = {name: part.state() for name, part in self._statistics().items()}
        return super().state_json() | {"correction": self.correction, **statistics}

    def load_state_json(self, state: dict[str, Any]) -> None:
        super().load_state_json(state)
        if state.get("correction") != self.correction:
            raise CheckpointError(
                f"checkpoint was made with correction '{state.get('correction')}', not "
                f"'{self.correction}'; use the same"
            )
        for name, part in self._statistics().items():
            if name not in state:
                raise CheckpointError(f"checkpoint has no '{name}'; use the settings that it was made with")
            part.load_state(state[name])

    def _statistics(self) -> dict[str, Normalizer | DiscountedReturns]:
        parts = {"normalizer": self.normalizer, "normalizer_before": self._normalizer_before,
                 "reward_scale": self.returns}  # fmt: skip
        return {name: part for name, part in parts.items() if part is not None}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"theta": self.net.flat} | ({} if self._before is None else {"theta_before": self._before})
        return tensors | {f"optimiser.{name}": tensor for name, tensor in self.optimizer.tensors().items()}


class AdamOnPolicy(OnPolicyAlgorithm):
    """Base class of the algorithms whose steps are Adam's."""

    _config: AdamOnPolicyConfig

    def _new_optimizer(self) -> FlatAdam:
        config = self._config
        return FlatAdam(self.net.flat, self.net.gradient, config.lr, config.adam_eps, config.max_grad_norm)


class ClippedPolicy(AdamOnPolicy):
    """PPO's clipped objective, with a learning rate that adapts to the KL divergence if ``target_kl`` is set."""

    _config: ClippedPolicyConfig
    _lr_factor = 1.0  # factor of the scheduled learning rate, adapted to the KL divergence

    def _policy_derivative(self, log_prob: Tensor, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        return losses.clipped_surrogate(log_ratio.exp(), advantage, self._config.clip)

    def _adapt_lr(self, divergence: float) -> None:
        if self._config.target_kl is not None:
            self._lr_factor = losses.adaptive_lr_factor(self._lr_factor, divergence, self._config.target_kl)

    def metrics(self) -> dict[str, float]:
        """With the fraction of the latest minibatch whose ratio is outside of ``1 - clip .. 1 + clip``."""
        metrics = super().metrics()
        if self._latest is not None and not self._latest[1].isnan().any():
            outside = self._latest[1].expm1().abs_() > self._config.clip
            metrics["clip_share"] = outside.float().mean().item()
        return metrics

    def state_json(self) -> dict[str, Any]:
        factor = {} if self._config.target_kl is None else {"step_share": self._lr_factor}
        return super().state_json() | factor

    def load_state_json(self, state: dict[str, Any]) -> None:
        super().load_state_json(state)
        # Without target_kl, then or now, the learning rate is not scaled.
        self._lr_factor = 1.0 if self._config.target_kl is None else float(state.get("step_share", 1.0))


def _needs_next_value(batch: RolloutBatch) -> np.ndarray:
    """The steps [T, N] whose next observation is not a row of the rollout: truncated ones, and the last."""
    needed = np.array(batch.truncated, dtype=bool)
    needed[-1] = True
    return needed


class MlpActorCritic(ActorCriticMlp):
    """Policy and value over observations; ``backward`` fills ``gradient`` except for ``grad_log_std``."""

    def __init__(self, obs_dim: int, spec: ActorCriticSpec) -> None:
        super().__init__(obs_dim, spec)
        self.of_value: Tensor | None = torch.zeros_like(self.flat)
        """[d]: 1 for parameters of the value network, 0 for those of the policy."""
        for view in self.networks.over(self.of_value[: len(self.networks.flat)]).one(1).views():
            view.fill_(1.0)
        self.obs = self.flat[:0]
        """Observations [M, O] of the latest forward pass."""
        if spec.layers.custom is None:
            self._initialize(spec.generator)
        else:
            self.networks.initialize(spec.generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [K, M] (logits or means) and values [M] at M rows, in buffers that the next call overwrites."""
        self.obs = obs
        return self._forward(obs)

    def backward(self, grad_out: Tensor, grad_value: Tensor) -> None:
        """Back-propagates the gradients of the latest outputs [K, M] and values [M]."""
        self._backward(self.obs, grad_out, grad_value)


class CategoricalDistribution:
    """A independent choices; outputs are the concatenated logits of their options.

    Log-probabilities and entropies are sums over them. ``backward`` and ``entropy`` refer to the latest ``log_prob``.
    """

    def __init__(self, nvec: tuple[int, ...]) -> None:
        self.meta: dict[str, Any] = {"policy": "categorical", "nvec": list(nvec)}
        self._nvec = list(nvec)
        self.log_pi: list[Tensor] = []
        """Log-probabilities of all options of each choice, from the latest ``log_prob``."""
        self._index: tuple[Tensor, ...] = ()

    @property
    def is_single(self) -> bool:
        return len(self._nvec) == 1

    def _split(self, out: Tensor) -> tuple[Tensor, ...]:
        """The logits of each choice."""
        return (out,) if self.is_single else torch.split(out, self._nvec)

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities [M] in nat of actions [M, A] under outputs [K, M]."""
        index = action.t().long()
        if self.is_single:  # avoids views and lists, which cost as much as kernels at this size
            log_pi, chosen = losses.categorical(out, index)
            self._index, self.log_pi = (index,), [log_pi]
            return chosen
        self._index = torch.split(index, 1)
        log_pis, chosen_by_choice = zip(*map(losses.categorical, self._split(out), self._index), strict=True)
        self.log_pi = list(log_pis)
        return _sum(chosen_by_choice)

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """Gradient of ``sum(grad_log_prob log pi) - entropy_weight sum H`` with respect to the outputs [K, M]."""
        if self.is_single:
            return losses.categorical_backward(self.log_pi[0], self._index[0], grad_log_prob, entropy_weight)
        choices = zip(self.log_pi, self._index, strict=True)
        return torch.cat([losses.categorical_backward(*choice, grad_log_prob, entropy_weight) for choice in choices])

    def kl(self, out_p: Tensor, log_std_p: Tensor, out_q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """``KL(p, q)`` [M] in nat of policies with outputs [K, M], and its gradients with respect to q.

        ``log_std_p`` [A, M] are p's log standard deviations; q has those of this object. The gradients are to outputs
        [K, M] and log standard deviations [A, M]; the latter is None without numbers.
        """
        choices = zip(self._split(out_p), self._split(out_q), strict=True)
        divergences, gradients = zip(
            *(losses.categorical_kl(p.log_softmax(0), q.log_softmax(0)) for p, q in choices), strict=True
        )
        return _sum(divergences), gradients[0] if self.is_single else torch.cat(gradients), None

    def entropy(self) -> float:
        """Mean in nat (reads the device)."""
        return -sum((log_pi.exp() * log_pi).sum(0).mean().item() for log_pi in self.log_pi)


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


class GaussianDistribution:
    """Independent Gaussians, not squashed; outputs are means, log standard deviations do not depend on the state."""

    def __init__(self, log_std: Tensor, grad_log_std: Tensor) -> None:
        self._log_std, self._grad_log_std = log_std, grad_log_std
        self.meta: dict[str, Any] = {"policy": "gaussian", "action_dim": len(log_std)}
        self._z: Tensor | None = None

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        self._z, log_prob = losses.gaussian(out, self._log_std, action.t())
        return log_prob

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """Gradient with respect to the means; that of the log standard deviations is stored in ``grad_log_std``."""
        assert self._z is not None
        grad_mean, grad_log_std = losses.gaussian_backward(self._z, self._log_std, grad_log_prob, entropy_weight)
        self._grad_log_std.copy_(grad_log_std)
        return grad_mean

    def kl(self, out_p: Tensor, log_std_p: Tensor, out_q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return losses.gaussian_kl(out_p, log_std_p, out_q, self._log_std)

    def entropy(self) -> float:
        return losses.gaussian_entropy(self._log_std).item()


class MixedDistribution:
    """Independent Gaussian numbers and choices: results are sums over both; outputs are means, then logits."""

    def __init__(self, numbers: GaussianDistribution, choices: CategoricalDistribution) -> None:
        self._numbers, self._choices = numbers, choices
        self._split = int(numbers.meta["action_dim"])
        self.meta = numbers.meta | choices.meta | {"policy": "mixed"}

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        split = self._split
        return self._numbers.log_prob(out[:split], action[:, :split]) + self._choices.log_prob(
            out[split:], action[:, split:]
        )

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        return torch.cat([kind.backward(grad_log_prob, entropy_weight) for kind in (self._numbers, self._choices)])

    def kl(self, out_p: Tensor, log_std_p: Tensor, out_q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        split = self._split
        numbers, by_mean, by_log_std = self._numbers.kl(out_p[:split], log_std_p, out_q[:split])
        choices, by_logits, _ = self._choices.kl(out_p[split:], log_std_p, out_q[split:])
        return numbers + choices, torch.cat((by_mean, by_logits)), by_log_std

    def entropy(self) -> float:
        return self._numbers.entropy() + self._choices.entropy()


Distribution = CategoricalDistribution | GaussianDistribution | MixedDistribution


def distribution_of(spec: EnvSpec, log_std: Tensor, grad_log_std: Tensor) -> Distribution:
    """The distribution of a task's actions, over parameters ``log_std`` [A] of its numbers and their gradient."""
    numbers = GaussianDistribution(log_std, grad_log_std)
    if spec.choices is None:
        return numbers
    choices = CategoricalDistribution(spec.choices.nvec)
    return choices if spec.box is None else MixedDistribution(numbers, choices)
