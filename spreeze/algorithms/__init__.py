"""Off-policy algorithms by name. One file, one line here and one test make a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spreeze.algorithms.base import OffPolicyAlgorithm
from spreeze.algorithms.ddpg import DDPG
from spreeze.algorithms.discrete_sac import DiscreteSAC
from spreeze.algorithms.dqn import DQN
from spreeze.algorithms.sac import SAC
from spreeze.algorithms.td3 import TD3
from spreeze.config import AlgorithmConfig
from spreeze.errors import ConfigError, did_you_mean

Table = dict[str, Callable[..., OffPolicyAlgorithm]]
REGISTRY: Table = {"sac": SAC, "td3": TD3, "ddpg": DDPG}
"""For continuous actions; all of them can share an update between a pair of threads."""
DISCRETE_REGISTRY: Table = {"dqn": DQN, "sac": DiscreteSAC}
"""For one of n actions."""


def create(
    name: str, obs_dim: int, action_dim: int, config: AlgorithmConfig, seed: int, device: str = "cpu", *,
    num_actions: int | None = None, **options: Any,
) -> OffPolicyAlgorithm:
    """A new algorithm with its networks; everything random in it follows from ``seed``.

    Args:
        name: as in ``spreeze.fitting``.
        obs_dim: O.
        action_dim: A, of continuous actions.
        config: the algorithm's part.
        seed: of networks and noise.
        device: where its tensors live.
        num_actions: K where actions are discrete, else None.
        options: handed on, such as ``dtype``.

    Raises:
        ConfigError: no algorithm of that name for these actions.
    """
    table, size = (REGISTRY, action_dim) if num_actions is None else (DISCRETE_REGISTRY, num_actions)
    if name not in table:
        kind = "continuous" if num_actions is None else "discrete"
        raise ConfigError(
            f"no algorithm '{name}' for {kind} actions{did_you_mean(name, table)} (known: {', '.join(table)})"
        )
    return table[name](obs_dim, size, config, seed, device, **options)
