"""Synchronous advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783): one gradient step per rollout.

On data one rollout old, with correction "delayed", that step is eq. 6 of HTS-RL (arXiv 2012.09849):
``theta(j + 1) = theta(j) + step(gradient at theta(j - 1))``, with values and advantages of theta(j - 1). With "none"
the gradient is taken at theta(j). With "truncated-is" it is too, each term is multiplied by
``min(1, pi_theta(j) / pi_theta(j - 1))``, and advantages and targets are those of V-trace with these weights.
"""

from __future__ import annotations

from spreeze.algorithms.lazy_torch import Tensor
from spreeze.algorithms.on_policy import OnPolicyAlgorithm, Passed, Samples
from spreeze.algorithms.optimizers import FlatRMSProp
from spreeze.config.algorithm_settings import A2CConfig


class A2C(OnPolicyAlgorithm):
    name = "a2c"
    single_step = True
    _config: A2CConfig

    def _new_optimiser(self) -> FlatRMSProp:
        config = self._config
        return FlatRMSProp(self.net.flat, self.net.gradient, config.lr, config.rmsprop_alpha, config.rmsprop_eps,
                           config.max_grad_norm)

    def _update(self, samples: Samples, passed: Passed | None, theta: Tensor | None) -> None:
        self._gradient(samples, passed)
        if theta is not None:
            self.net.flat.copy_(theta)
        self.optimiser.step()
        self.updates += 1
