"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), also with a lag of one rollout.

An update is an inner loop of K = epochs x minibatches steps phi_0, phi_1 ... phi_K on one rollout. With a lag of one
rollout it depends on the correction:

- delayed: the loop starts at phi_0 = theta(j - 1), which collected the data, with ratios to pi_theta(j - 1), values,
  advantages and normaliser of theta(j - 1): this is exactly the update of serial PPO.
  Its displacement is applied to theta(j): ``theta(j + 1) = theta(j) + phi_K - theta(j - 1)``. With one epoch
  and one minibatch that is eq. 6 of HTS-RL (arXiv 2012.09849): one optimizer step with the gradient at theta(j - 1).
  Adam's moments continue from update to update.
- none: phi_0 = theta(j), values of theta(j), ratios to the log-probabilities stored with the data; this is what the
  authors' release does, and by the ratio it is PPO on data of one policy earlier.
- truncated-is: phi_0 = theta(j), ratios to pi_theta(j), each advantage times ``min(1, pi_theta(j) / pi_theta(j - 1))``,
  which no gradient goes through, advantages and targets by V-trace with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spreeze.algorithms import losses
from spreeze.algorithms.on_policy import OnPolicyAlgorithm, Passed, Samples
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.config.algorithm_settings import OnPolicyConfig, nearest_divisor
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import setting
from spreeze.inference.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347)."""

    clip: float = setting(0.2, "clip range of the probability ratio", low=1e-3, high=10.0)
    clip_value: bool = setting(False, "clip the value function, with the same range")
    epochs: int = setting(10, "epochs per rollout", low=1, high=1000)
    minibatch_size: int = setting(
        64,
        "env steps per minibatch (SB3: batch_size), rounded so that it divides a rollout",
        unit="env steps",
        low=1,
        high=2**24,
    )
    adam_eps: float = setting(1e-5, "epsilon of Adam", low=1e-12, high=1.0)
    target_kl: float | None = setting(
        None,
        "target KL divergence per rollout of an adaptive learning rate of at most lr (SB3 stops the epochs "
        "early instead)",
        unit="nat",
        low=1e-6,
        high=10.0,
    )

    def minibatches_of(self, rows: int, steps: int = 1) -> int:
        """Equal minibatches, of whole sequences, whose size is nearest to ``minibatch_size``, by ratio."""
        return nearest_divisor(rows // self.sequence_of(steps), rows / self.minibatch_size)


class PPO(OnPolicyAlgorithm):
    name = "ppo"
    single_step = False
    _config: PPOConfig
    _step_share = 1.0
    """Factor of the scheduled learning rate, adapted to the KL divergence."""

    def _new_optimiser(self) -> FlatAdam:
        config = self._config
        return FlatAdam(self.net.flat, self.net.gradient, config.lr, config.adam_eps, config.max_grad_norm)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self._clip_share(self._config.clip)

    def _update(self, samples: Samples, passed: Passed | None, theta: Tensor | None) -> None:
        config, sequences = self._config, samples.sequences
        minibatches = config.minibatches_of(len(samples.target), 1 if sequences is None else sequences.begins.shape[1])
        start = self.net.flat.clone() if theta is not None else None
        self.optimiser.lr *= self._step_share
        divergences: list[Tensor] = []
        for epoch in range(config.epochs):
            for part in samples.minibatches(minibatches, self._generator):
                self._gradient(part)
                if config.target_kl is not None and epoch == config.epochs - 1:
                    divergences.append(self._divergence())
                self.optimiser.step()
                self.updates += 1
        if config.target_kl is not None:
            divergence = torch.stack(divergences).mean().item()
            self._step_share = losses.adaptive_lr_factor(self._step_share, divergence, config.target_kl)
        if theta is not None and start is not None:
            self.net.flat.sub_(start).add_(theta)

    def _policy_derivative(self, log_prob: Tensor, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        return losses.clipped_surrogate(log_ratio.exp(), advantage, self._config.clip)

    def _value_error(self, value: Tensor, samples: Samples) -> Tensor:
        if self._config.clip_value:
            return losses.clipped_value_error(value, samples.target, samples.value, self._config.clip)
        return super()._value_error(value, samples)

    def state_json(self) -> dict[str, Any]:
        share = {} if self._config.target_kl is None else {"step_share": self._step_share}
        return super().state_json() | share

    def load_state_json(self, state: dict[str, Any]) -> None:
        super().load_state_json(state)
        # Without target_kl, then or now, the learning rate is the whole one.
        self._step_share = 1.0 if self._config.target_kl is None else float(state.get("step_share", 1.0))


# The clip already bounds how far data of an earlier policy leads; a delayed displacement of a whole loop of updates is
# made twice before its effect is seen.
ALGORITHMS = (
    AlgorithmRow(
        name="ppo",
        config=PPOConfig,
        on_policy=PPO,
        defaults={"rollout.correction": "none"},
        for_discrete={"ppo.entropy_coef": 0.01},
    ),
)
