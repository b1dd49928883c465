"""Algorithms by name. One file, one line here and one test make a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spreeze.algorithms.a2c import A2C
from spreeze.algorithms.ddpg import DDPG
from spreeze.algorithms.discrete_sac import DiscreteSAC
from spreeze.algorithms.dqn import DQN
from spreeze.algorithms.nn.two_thread_update import ThreadPair
from spreeze.algorithms.off_policy import ActorCritic, OffPolicyAlgorithm
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.algorithms.ppo import PPO
from spreeze.algorithms.pql import PQL
from spreeze.algorithms.sac import SAC
from spreeze.algorithms.td3 import TD3
from spreeze.config.schema import AlgorithmConfig, OnPolicyConfig
from spreeze.errors import ConfigError, did_you_mean
from spreeze.types import EnvSpec

Table = dict[str, Callable[..., OffPolicyAlgorithm]]
REGISTRY: Table = {"sac": SAC, "td3": TD3, "ddpg": DDPG}
"""For continuous actions; all of them can share an update between a pair of threads."""
DISCRETE_REGISTRY: Table = {"dqn": DQN, "sac": DiscreteSAC}
"""For one of n actions."""
ON_POLICY_REGISTRY: dict[str, Callable[..., OnPolicyAlgorithm]] = {"ppo": PPO, "a2c": A2C}
"""For any task."""


def create(
    name: str, obs_dim: int, action_dim: int, config: AlgorithmConfig, seed: int, device: str = "cpu", *,
    num_actions: int | None = None, copy_interval: int = 0, **options: Any,
) -> OffPolicyAlgorithm:
    """A new algorithm with its networks; everything random in it follows from ``seed``.

    Args:
        name: as in ``spreeze.config.compatibility``.
        obs_dim: O.
        action_dim: A, of continuous actions.
        config: the algorithm's part.
        seed: of networks and noise.
        device: where its tensors live.
        num_actions: K where actions are discrete, else None.
        copy_interval: updates between two copies of the weights where actor and critics train at once, each
            beside a copy of the other; 0 where they share every update.
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
    if copy_interval:
        return _copied(table[name], obs_dim, size, config, seed, device, copy_interval, **options)
    return table[name](obs_dim, size, config, seed, device, **options)


def _copied(
    kind: Callable[..., OffPolicyAlgorithm], obs_dim: int, action_dim: int, config: AlgorithmConfig, seed: int,
    device: str, interval: int, pair: ThreadPair | None = None, **options: Any,
) -> PQL:
    """Two algorithms of one seed, and so of one beginning: the actor's on the first device, the critics' on the last.

    Raises:
        ConfigError: the algorithm has no actor beside its critics.
    """
    names = device.split("+")
    sides = [kind(obs_dim, action_dim, config, seed, name, **options) for name in (names[0], names[-1])]
    if not isinstance(sides[0], ActorCritic) or not isinstance(sides[1], ActorCritic):
        raise ConfigError(f"learner.copy_interval = {interval}: {sides[0].name} has no actor beside its critics; use 0")
    return PQL(sides[0], sides[1], interval, pair)


def create_on_policy(
    name: str, spec: EnvSpec, config: OnPolicyConfig, seed: int, device: str = "cpu", *, correction: str,
    normalize_obs: bool = False, **options: Any,
) -> OnPolicyAlgorithm:
    """A new on-policy algorithm with its networks; everything random in it follows from ``seed``.

    Args:
        name: as in ``spreeze.config.compatibility``.
        spec: the task; decides about networks and kind of policy.
        config: the algorithm's part.
        seed: of networks and shuffling.
        device: where its tensors live.
        correction: one of ``on_policy.CORRECTIONS``.
        normalize_obs: whether observations are scaled by their running statistics.
        options: handed on, such as ``dtype``.

    Raises:
        ConfigError: no algorithm or correction of that name.
    """
    if name not in ON_POLICY_REGISTRY:
        known = ", ".join(ON_POLICY_REGISTRY)
        raise ConfigError(f"no on-policy algorithm '{name}'{did_you_mean(name, ON_POLICY_REGISTRY)} (known: {known})")
    return ON_POLICY_REGISTRY[name](
        spec, config, seed, device, correction, normalize_obs=normalize_obs, **options
    )
