"""From an algorithm's row in ``spreeze.config.algorithms`` to its object."""

from __future__ import annotations

import importlib
from typing import Any

from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.config.algorithms import Maker, find_row, rows
from spreeze.config.schema import AlgorithmConfig, OnPolicyConfig
from spreeze.errors import ConfigError
from spreeze.types import EnvSpec


def create(
    name: str, obs_dim: int, action_dim: int, config: AlgorithmConfig, seed: int, device: str = "cpu", *,
    num_actions: int | None = None, import_module: str | None = None, **options: Any,
) -> OffPolicyAlgorithm:
    """A new algorithm with its networks; everything random in it follows from ``seed``.

    Its class is called with (obs_dim, action_dim or num_actions, config, seed, device) and the options by name.

    Args:
        name: of its row.
        obs_dim: O.
        action_dim: A, of continuous actions.
        config: the algorithm's part.
        seed: of networks and noise.
        device: where its tensors live.
        num_actions: K where actions are discrete, else None.
        import_module: of the command's ``--import``, which may declare the row.
        options: ``dtype``; where they are set, for continuous actions ``pair`` and ``overlap``, for images ``frames``.

    Raises:
        ConfigError: no algorithm of that name for these actions.
    """
    row = find_row(name, import_module)
    maker, size = (row.continuous, action_dim) if num_actions is None else (row.discrete, num_actions)
    if not maker:
        kind = "continuous" if num_actions is None else "discrete"
        known = (row.name for row in rows().values() if (row.continuous if num_actions is None else row.discrete))
        raise ConfigError(f"no algorithm '{name}' for {kind} actions (known: {', '.join(known)})")
    algorithm: OffPolicyAlgorithm = _class(maker)(obs_dim, size, config, seed, device, **options)
    return algorithm


def create_on_policy(
    name: str, spec: EnvSpec, config: OnPolicyConfig, seed: int, device: str = "cpu", *, correction: str,
    normalize_obs: bool = False, **options: Any,
) -> OnPolicyAlgorithm:
    """A new on-policy algorithm with its networks; everything random in it follows from ``seed``.

    Args:
        name: of its row.
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
    row = find_row(name, spec.import_module)
    if not row.on_policy:
        known = ", ".join(row.name for row in rows().values() if row.on_policy)
        raise ConfigError(f"no on-policy algorithm '{name}' (known: {known})")
    algorithm: OnPolicyAlgorithm = _class(row.on_policy)(
        spec, config, seed, device, correction, normalize_obs=normalize_obs, **options
    )
    return algorithm


def _class(maker: Maker) -> Any:
    if not isinstance(maker, str):
        return maker
    module, _, name = maker.partition(":")
    return getattr(importlib.import_module(module), name)
