"""IMPACT, APPO and IMPALA: on-policy algorithms with corrections for any policy lag.

An update uses one rollout of T env steps of M environments, or a minibatch of several. pi_worker is the policy that
collected it; its log-probabilities are stored. The first use of a rollout computes everything except pi_theta:

======  ==========================================  =================================================
        ratios of V-trace                           objective, with advantages A
======  ==========================================  =================================================
impact  pi_target / pi_worker, values of target     min(R A, clip(R, 1 - eps, 1 + eps) A) - eta KL(pi_target, pi_theta)
appo    pi_theta / pi_worker, values of theta       min(r A, clip(r, 1 - eps, 1 + eps) A), r = pi_theta / pi_worker
impala  pi_theta / pi_worker, values of theta       rho A log pi_theta
======  ==========================================  =================================================

IMPACT (Luo et al. 2020, arXiv 1912.00167): R = min(pi_worker / pi_target, rho) pi_theta / pi_worker; the target is a
copy of theta, renewed every ``target_interval`` updates, so ratios to it have one trust region for all samplers. With N
= K = 1, an interval of 1 and no lag it is PPO. IMPALA: Espeholt et al. 2018, arXiv 1802.01561. Without ``vtrace`` its
ratios are 1 for impact and appo: advantages are those of GAE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.algorithm import finite
from spreeze.algorithms.networks.recurrent_networks import Sequences
from spreeze.algorithms.on_policy import AdamOnPolicy, ClippedPolicy, ForwardPass, Samples
from spreeze.config.algorithm_bases import AsyncOnPolicyConfig, ClippedPolicyConfig
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import NO_LIMIT, setting
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import EnvSpec, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig(AsyncOnPolicyConfig):
    """Importance-weighted actor-learner (Espeholt et al. 2018, arXiv 1802.01561), with Adam."""

    gae_lambda: float = setting(
        1.0, "lambda of V-trace; 1: Monte Carlo returns (arXiv 1802.01561, remark 2)", low=0.0, high=1.0
    )
    lr: float = setting(1e-3, "learning rate", low=0.0, high=1.0)
    normalize_advantage: bool = setting(False, "normalize the weighted advantages per rollout")


@dataclass(frozen=True, kw_only=True)
class AppoConfig(ClippedPolicyConfig, AsyncOnPolicyConfig):
    """Asynchronous PPO: clipped ratio to the collecting policy, without a target network."""

    uses: int = setting(20, "maximum uses of a rollout (K)", low=1, high=65_535)
    vtrace: bool = setting(
        True, "advantages and value targets by V-trace; false: by GAE, without off-policy correction"
    )
    target_kl: float | None = setting(
        None,
        "target KL divergence of an adaptive learning rate of at most lr: from the policy in the denominator "
        "of the ratio, averaged over one pass through the buffer",
        unit="nat",
        low=1e-6,
        high=10.0,
    )


@dataclass(frozen=True, kw_only=True)
class ImpactConfig(AppoConfig):
    """Importance-weighted asynchronous architecture with clipped target networks (arXiv 1912.00167)."""

    ratio: str = setting(
        "R3",
        "clipped ratio: R3: pi / max(pi_target, pi_worker / rho); the paper's ablations: R1: pi / pi_target, "
        "R2: pi / pi_worker",
        choices=("R1", "R2", "R3"),
    )
    rho: float = setting(2.0, "bound of pi_worker over pi_target in R3", low=1.0, high=1e6)
    target_interval: int = setting(
        0,
        "updates between target network updates (t_target); 0: one pass through the buffer, slots x uses x minibatches",
        unit="updates",
        low=0,
        high=NO_LIMIT,
    )
    kl_coef: float = setting(
        0.0, "initial weight of the KL divergence from the target policy; 0: no such term", low=0.0, high=1e6
    )
    kl_target: float = setting(
        0.01,
        "target KL divergence from the target policy, averaged over one pass through the buffer: above twice this "
        "value kl_coef grows by half, below half of it kl_coef is halved",
        unit="nat",
        low=1e-6,
        high=10.0,
    )


class Evaluated(NamedTuple):
    """A rollout with the quantities computed at its first use."""

    samples: Samples  # log_prob is the logarithm of the ratio's denominator
    out: Tensor  # [K, M], logits or means of the policy that the ratios of V-trace refer to
    log_std: Tensor  # [A, M], its log standard deviations

    def map(self, change: Callable[[Tensor, int], Tensor], sequences: Sequences | None) -> Evaluated:
        """The results of ``change(tensor, dimension of the rows)``, with other sequences."""
        columns = (change(column, 0) for column in self.samples.columns)
        return Evaluated(Samples.of(columns, sequences), change(self.out, 1), change(self.log_std, 1))

    def chunk(self, count: int) -> list[Evaluated]:
        """Equal parts of consecutive rows, as views, or of sequences."""
        rows, sequences = len(self.samples.target) // count, self.samples.sequences
        parts = [None] * count if sequences is None else sequences.split(count)
        starts = range(0, count * rows, rows)
        return [
            self.map(lambda tensor, dim, start=start: tensor.narrow(dim, start, rows), part)  # type: ignore[misc]
            for start, part in zip(starts, parts, strict=True)
        ]

    def parts(self) -> list[Any]:
        """All tensors, and the arrays of the sequences, if any."""
        return [*self.samples.columns, self.out, self.log_std, *(self.samples.sequences or ())]


class RolloutCache:
    """Rollouts of R rows each in slots of one block, so that one gather draws from all; with memory, sequences."""

    def __init__(self, capacity: int, generator: torch.Generator) -> None:
        """Creates a cache of ``capacity`` rollouts; the ``generator`` shuffles rows."""
        self._capacity, self._generator = capacity, generator
        self._block: Evaluated | None = None
        self._slots: dict[tuple[int, int], int] = {}
        self._free = list(range(capacity))
        self._undrawn: dict[int, Tensor] = {}
        """Slot -> rows, or sequences, not yet drawn in the current pass, in random order."""
        self._draws = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __setitem__(self, key: tuple[int, int], evaluated: Evaluated) -> None:
        if self._block is None:
            sequences, count = evaluated.samples.sequences, self._capacity
            all_sequences = None if sequences is None else sequences.repeated(count)
            self._block = evaluated.map(lambda tensor, dim: _unfilled(tensor, dim, count), all_sequences)
        slot = self._free.pop()
        for stored, part in zip(self._views(slot).parts(), evaluated.parts(), strict=True):
            if stored is not None and part is not None:
                stored[...] = part
        self._slots[key], self._undrawn[slot] = slot, torch.empty(0, dtype=torch.int64)

    def __getitem__(self, key: tuple[int, int]) -> Evaluated:
        """Views, valid until the next rollout is stored."""
        return self._views(self._slots[key])

    def _views(self, slot: int) -> Evaluated:
        assert self._block is not None
        samples = self._block.samples
        rows = len(samples.target) // self._capacity
        sequences = None if samples.sequences is None else samples.sequences.split(self._capacity)[slot]
        return self._block.map(lambda tensor, dim: tensor.narrow(dim, slot * rows, rows), sequences)

    def __delitem__(self, key: tuple[int, int]) -> None:
        self._free.append(self._slots.pop(key))

    def draw(self) -> Evaluated:
        """Draws R rows in random order, equally many from each rollout, and each row once per pass."""
        assert self._block is not None
        samples = self._block.samples
        length = 1 if samples.sequences is None else samples.sequences.begins.shape[1]
        rows, count = len(samples.target) // self._capacity // length, len(self._slots)
        self._draws += 1
        taken = []
        for turn, slot in enumerate(self._slots.values(), self._draws):  # the larger parts rotate
            needed = rows * (turn % count + 1) // count - rows * (turn % count) // count
            while needed > len(self._undrawn[slot]):
                taken.append(self._undrawn[slot])
                needed -= len(self._undrawn[slot])
                self._undrawn[slot] = torch.randperm(rows, generator=self._generator) + slot * rows
            taken.append(self._undrawn[slot][:needed])
            self._undrawn[slot] = self._undrawn[slot][needed:]
        index = torch.cat(taken)
        if count > 1:
            index = index[torch.randperm(rows, generator=self._generator)]
        sequences = None if samples.sequences is None else samples.sequences.of(index.numpy())
        if length > 1:
            index = (index.unsqueeze(1) * length + torch.arange(length)).flatten()
        index = index.to(samples.target.device)
        return self._block.map(lambda tensor, dim: tensor.index_select(dim, index), sequences)


def _unfilled(tensor: Tensor, dim: int, count: int) -> Tensor:
    """Memory for ``count`` of that tensor along ``dim``; a page of it is taken once it is written."""
    shape = list(tensor.shape)
    shape[dim] *= count
    return tensor.new_empty(shape)


class AsyncOnPolicy(AdamOnPolicy):
    """Base class of algorithms that correct for any policy lag (IMPACT, APPO, IMPALA)."""

    single_step = False
    _config: AsyncOnPolicyConfig

    @property
    def minibatches(self) -> int:
        """Updates per use of a rollout."""
        return self._config.minibatches

    def learn(self, batch: RolloutBatch, progress: float | None) -> None:
        """Runs all K uses of a rollout."""
        cache = self.new_rollout_cache(1)
        cache[0, 0] = self.evaluate(batch)
        for _ in range(self._config.uses):
            for part in self.parts(cache, (0, 0)):
                self.update_minibatch(part, progress)

    def evaluate(self, batch: RolloutBatch, sampler: int = 0, is_new: bool = True) -> Evaluated:
        """Quantities computed at a rollout's first use; afterwards, its observations are added to the normalizer.

        ``sampler`` collected it: the returns whose scale divides rewards continue over each sampler's rollouts. A
        rollout from before a restart, not ``is_new``, is in these statistics already.
        """
        config, (steps, envs) = self._config, batch.reward.shape
        with torch.no_grad():
            obs = self._tensor(self._rows(batch.obs), self.normalizer)
            action = self._tensor(self._rows(batch.action))
            worker = self._tensor(self._rows(batch.log_prob))
            unrolled = self._unrolled(batch, obs, self.normalizer)
            sequences = None if unrolled is None else unrolled.sequences
            out, value = (part.clone() for part in self._forward(obs, sequences))
            reference = self._kind.log_prob(out, action)
            ratio = self._grid(self._importance_ratios(reference, worker), steps, envs)
            old = self._grid(value, steps, envs)
            ended = np.asarray(batch.terminated, bool), np.asarray(batch.truncated, bool)
            reward = self._scaled(batch.reward, *ended, sampler, is_new=is_new)
            rho = np.minimum(ratio, config.rho_bar)
            excess, ahead = losses.vtrace(
                reward,
                old,
                self._next_values(batch, old, self.normalizer) if unrolled is None else unrolled.next_values,
                *ended,
                config.gamma,
                config.gae_lambda,
                rho,
                np.minimum(ratio, config.c_bar),
            )
            target = excess + old
            advantages, targets = self._columns(self._advantage(excess, rho * ahead), target, old)
            denominator = self._denominator(reference, worker)
            samples = Samples(obs, action, denominator, advantages, targets, value, sequences)
        if is_new and self.normalizer is not None:
            self._count_obs(self.normalizer, batch.obs)
        return Evaluated(samples, out, self.net.log_std.clone().unsqueeze(1).expand(-1, steps * envs))

    def new_rollout_cache(self, rollouts: int) -> RolloutCache:
        return RolloutCache(rollouts, self.generator)

    def parts(self, cache: RolloutCache, key: tuple[int, int]) -> list[Evaluated]:
        """The data of all updates of one use: the rollout itself, or minibatches of the whole cache."""
        return [cache[key]] if self.minibatches == 1 else cache.draw().chunk(self.minibatches)

    def update_minibatch(self, evaluated: Evaluated, progress: float | None) -> None:
        """Runs one update, skipped and counted if its gradient is not finite; ``progress`` as for ``learn``."""
        self._set_lr(progress)
        with torch.no_grad():
            self._minibatch_step(evaluated)
        self.updates += 1

    def _minibatch_step(self, evaluated: Evaluated) -> None:
        self._gradient(evaluated.samples)
        self.optimizer.step()

    def _update(self, samples: Samples, forward_pass: ForwardPass | None, theta: Tensor | None) -> None:
        raise NotImplementedError("an update is update_minibatch()")

    def _importance_ratios(self, reference: Tensor, worker: Tensor) -> Tensor:
        """Importance weights [M], which V-trace clips; 1 if the lag is not corrected, which is GAE."""
        return (reference - worker).exp_()

    def _advantage(self, excess: np.ndarray, weighted: np.ndarray) -> np.ndarray:
        """Advantage of V-trace-GAE, ``v - V``, or IMPALA's ``rho (r + gamma v' - V)``."""
        return excess

    def _denominator(self, reference: Tensor, worker: Tensor) -> Tensor:
        return worker


class Impala(AsyncOnPolicy):
    name = "impala"
    _config: ImpalaConfig

    def _advantage(self, excess: np.ndarray, weighted: np.ndarray) -> np.ndarray:
        return weighted


class Appo(ClippedPolicy, AsyncOnPolicy):
    name = "appo"
    _config: AppoConfig
    _divergences = 0  # number of updates since the last adaptation to the divergence

    def __init__(self, spec: EnvSpec, config: AppoConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(spec, config, *arguments, **options)
        self._divergence_sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        """Sums since the last adaptation: divergence from the ratio's denominator, by k3, and from the target."""

    def _minibatch_step(self, evaluated: Evaluated) -> None:
        config = self._config
        self.optimizer.lr *= self._lr_factor
        super()._minibatch_step(evaluated)
        if not self._adapts:
            return
        self._divergence_sums[0] += self._divergence()
        self._divergences += 1
        if self._divergences >= config.updates_of_buffer:
            self._adapt(*(self._divergence_sums / self._divergences).tolist())
            self._divergence_sums.zero_()
            self._divergences = 0

    @property
    def _adapts(self) -> bool:
        return self._config.target_kl is not None

    def _adapt(self, divergence: float, from_target: float) -> None:
        """Adapts to the means of ``_divergence_sums`` over the updates of a whole buffer."""
        self._adapt_lr(divergence)

    def state_json(self) -> dict[str, Any]:
        if not self._adapts:
            return super().state_json()
        sums = [total if math.isfinite(total) else None for total in self._divergence_sums.tolist()]
        return super().state_json() | {"divergences": self._divergences, "divergence_sums": sums}

    def load_state_json(self, state: dict[str, Any]) -> None:
        super().load_state_json(state)
        if self._adapts and "divergences" in state:
            sums = [math.inf if total is None else float(total) for total in state["divergence_sums"]]
            self._divergence_sums.copy_(torch.tensor(sums, dtype=torch.float64))
            self._divergences = int(state["divergences"])

    def _importance_ratios(self, reference: Tensor, worker: Tensor) -> Tensor:
        return super()._importance_ratios(reference, worker) if self._config.vtrace else torch.ones_like(worker)


class Impact(Appo):
    name = "impact"
    _config: ImpactConfig

    def __init__(self, spec: EnvSpec, config: ImpactConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(spec, config, *arguments, **options)
        self.target = self.net.flat.clone()
        self.target_updates = 0
        self.target_interval = config.target_interval or config.updates_of_buffer
        self._kl_coef = config.kl_coef
        self._evaluated: Evaluated | None = None

    def evaluate(self, batch: RolloutBatch, sampler: int = 0, is_new: bool = True) -> Evaluated:
        """Evaluates a rollout with the target network, whose parameters temporarily replace those of the network."""
        theta = self.net.flat.clone()
        self.net.flat.copy_(self.target)
        try:
            return super().evaluate(batch, sampler, is_new)
        finally:
            self.net.flat.copy_(theta)

    def _denominator(self, reference: Tensor, worker: Tensor) -> Tensor:
        return losses.ratio_denominator(reference, worker, self._config.rho, self._config.ratio)

    def _minibatch_step(self, evaluated: Evaluated) -> None:
        self._evaluated = evaluated
        super()._minibatch_step(evaluated)
        if (self.updates + 1) % self.target_interval == 0:
            self.target.copy_(self.net.flat)
            self.target_updates += 1

    def _penalise(self, out: Tensor, grad_out: Tensor) -> None:
        """Adds ``eta KL(pi_target, pi_theta)``."""
        if not self._kl_coef or self._evaluated is None:
            return
        divergence, by_out, by_log_std = self._kind.kl(self._evaluated.out, self._evaluated.log_std, out)
        weight = self._kl_coef / len(divergence)
        grad_out.add_(by_out, alpha=weight)
        if by_log_std is not None:
            self.net.grad_log_std.add_(by_log_std.sum(1), alpha=weight)
        self._divergence_sums[1] += divergence.mean()

    @property
    def _adapts(self) -> bool:
        return super()._adapts or self._config.kl_coef > 0.0

    def _adapt(self, divergence: float, from_target: float) -> None:
        super()._adapt(divergence, from_target)
        if self._kl_coef:
            self._kl_coef = losses.adapted_coefficient(self._kl_coef, from_target, self._config.kl_target)

    def metrics(self) -> dict[str, float]:
        metrics = super().metrics()
        if self._evaluated is not None:
            with torch.no_grad():
                out = self._forward(self._evaluated.samples.obs, self._evaluated.samples.sequences)[0]
                divergence = self._kind.kl(self._evaluated.out, self._evaluated.log_std, out)[0]
            metrics["target_divergence"] = divergence.mean().item()
            metrics |= {"target_updates": float(self.target_updates), "kl_coef": self._kl_coef}
        return finite(metrics)

    def state_json(self) -> dict[str, Any]:
        return super().state_json() | {"target_updates": self.target_updates, "kl_coef": self._kl_coef}

    def load_state_json(self, state: dict[str, Any]) -> None:
        super().load_state_json(state)
        self.target_updates = int(state["target_updates"])
        # Without the penalty, then or now, it starts at the setting.
        self._kl_coef = float(state["kl_coef"]) if state["kl_coef"] and self._config.kl_coef else self._config.kl_coef

    def _tensors(self) -> dict[str, Tensor]:
        return super()._tensors() | {"target": self.target}


# By default an update takes the rollout of one sampler, so rollouts are as short as PPO's minibatches.
_ANY_AGE: dict[str, Any] = {
    "off_policy_corrected": True,
    "defaults": {"rollout.correction": "none", "rollout.sync_interval": 16},
}
ALGORITHMS = (
    AlgorithmRow(name="impact", config=ImpactConfig, on_policy=Impact, **_ANY_AGE),
    AlgorithmRow(name="appo", config=AppoConfig, on_policy=Appo, **_ANY_AGE),
    AlgorithmRow(name="impala", config=ImpalaConfig, on_policy=Impala, **_ANY_AGE),
)
