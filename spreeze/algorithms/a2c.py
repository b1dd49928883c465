"""Synchronous advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783): one gradient step per rollout.

On data one rollout old, with correction "delayed", that step is eq. 6 of HTS-RL (arXiv 2012.09849):
``theta(j + 1) = theta(j) + step(gradient at theta(j - 1))``, with values and advantages of theta(j - 1). With "none"
the gradient is taken at theta(j). With "truncated-is" it is taken there, too, each term is multiplied by
``min(1, pi_theta(j) / pi_theta(j - 1))``, and advantages and targets are those of V-trace with these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spreeze.algorithms.on_policy import ForwardPass, OnPolicyAlgorithm, Samples
from spreeze.algorithms.optimizers import FlatRMSProp
from spreeze.config.algorithm_bases import OnPolicyConfig
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import setting
from spreeze.inference.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783), synchronous, with RMSProp."""

    shortest_rollout: ClassVar[int] = 5  # as in SB3

    gae_lambda: float = setting(1.0, "lambda of GAE; 1: returns alone (arXiv 1506.02438)", low=0.0, high=1.0)
    lr: float = setting(7e-4, "learning rate", low=0.0, high=1.0)
    entropy_coef: float = setting(0.01, "weight of the policy's entropy", low=0.0, high=1e3)
    normalize_advantage: bool = setting(False, "normalize advantages per rollout")
    rmsprop_alpha: float = setting(0.99, "decay of the mean squared gradient (RMSProp)", low=0.0, high=1.0)
    rmsprop_eps: float = setting(1e-5, "epsilon of RMSProp", low=1e-12, high=1.0)


class A2C(OnPolicyAlgorithm):
    name = "a2c"
    single_step = True
    _config: A2CConfig

    def _new_optimizer(self) -> FlatRMSProp:
        config = self._config
        return FlatRMSProp(
            self.net.flat, self.net.gradient, config.lr, config.rmsprop_alpha, config.rmsprop_eps, config.max_grad_norm
        )

    def _update(self, samples: Samples, forward_pass: ForwardPass | None, theta: Tensor | None) -> None:
        self._gradient(samples, forward_pass)
        if theta is not None:
            self.net.flat.copy_(theta)
        self.optimizer.step()
        self.updates += 1


ALGORITHMS = (AlgorithmRow(name="a2c", config=A2CConfig, on_policy=A2C, defaults={"rollout.size": 128}),)
