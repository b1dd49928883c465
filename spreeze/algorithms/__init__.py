"""Off-policy algorithms by name. One file, one line here and one test make a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spreeze.algorithms.base import OffPolicyAlgorithm
from spreeze.algorithms.ddpg import DDPG
from spreeze.algorithms.sac import SAC
from spreeze.algorithms.td3 import TD3
from spreeze.config import AlgorithmConfig
from spreeze.errors import ConfigError, did_you_mean

REGISTRY: dict[str, Callable[..., OffPolicyAlgorithm]] = {"sac": SAC, "td3": TD3, "ddpg": DDPG}


def create(
    name: str, obs_dim: int, action_dim: int, config: AlgorithmConfig, seed: int, device: str = "cpu", **options: Any
) -> OffPolicyAlgorithm:
    """A new algorithm with its networks; everything random in it follows from ``seed``.

    Raises:
        ConfigError: no algorithm of that name.
    """
    if name not in REGISTRY:
        raise ConfigError(f"no algorithm '{name}'{did_you_mean(name, REGISTRY)} (known: {', '.join(REGISTRY)})")
    return REGISTRY[name](obs_dim, action_dim, config, seed, device, **options)
