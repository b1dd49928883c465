"""Algorithms: networks, losses and updates, independent of processes and transport.

An algorithm is one file: its settings, its class and its row in ``ALGORITHMS``. ``config/algorithms.py`` maps names to
files, which are imported on first use; shared settings are in ``config/algorithm_bases.py``. Torch is imported
through ``inference.lazy_torch``, so that the command line, samplers and the dashboard can read settings without it.

To understand an update, read these files, as ``tests/contract/test_reading.py`` does:

=============  ================================
sac            sac, off_policy, losses
sac discrete   sac, off_policy, losses
sac hybrid     sac, off_policy, losses
crossq         crossq, sac, off_policy, losses
td3            td3, off_policy, losses
ddpg           td3, off_policy, losses
dqn            dqn, off_policy, losses
qmix           qmix, off_policy, losses
ppo            ppo, on_policy, losses
a2c            a2c, on_policy, losses
impact         impact, on_policy, losses
appo           impact, on_policy, losses
impala         impact, on_policy, losses
=============  ================================

SAC, CrossQ and TD3 support distributional critics (``distributional``) with the same interface. DQN has dueling
streams and distributions, and noise in its weights (``networks.value_heads``). Memories are in
``networks.recurrent_networks``. Mode ``device`` acts and learns from its rollouts by ``on_device``.

*Gradients are hand-derived.* ``networks.fused_mlp`` replaces ``torch.nn`` and autograd, ``optimizers`` replaces
``torch.optim``; ``tests/support/lean_sac.py`` measures the speed-up over autograd (``assets/figures.md``). QMIX, image
networks (``networks.conv_networks``) and custom networks (``networks.custom_networks``) use autograd.
"""

from __future__ import annotations

import importlib
from typing import Any

from spreeze.algorithms import losses
from spreeze.algorithms.off_policy import DeviceSplit, OffPolicyAlgorithm
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.config.algorithm_bases import AlgorithmConfig, OnPolicyConfig
from spreeze.config.algorithms import Maker, find_network, find_row, rows
from spreeze.errors import ConfigError
from spreeze.types import EnvSpec


def create(
    name: str,
    obs_dim: int,
    action_dim: int,
    config: AlgorithmConfig,
    seed: int,
    device: str = "cpu",
    *,
    num_actions: int | None = None,
    import_module: str | None = None,
    **options: Any,
) -> OffPolicyAlgorithm:
    """A new off-policy algorithm; ``seed`` determines all its randomness.

    ``num_actions`` is None for continuous actions. The ``--import`` module ``import_module`` may declare the row. The
    class is called with (obs_dim, action_dim or num_actions, config, seed, device) and options by name, if they apply:
    ``overlap`` for continuous actions, ``frames`` for images, ``masked`` for action masks, ``team`` for several agents,
    ``num_continuous``: continuous dimensions of a mixed action, ``network`` for a custom network.

    Raises:
        ConfigError: no algorithm of that name for these actions.
    """
    kind, size = ("continuous", action_dim) if num_actions is None else ("discrete", num_actions)
    kind = "team" if "team" in options else "hybrid" if "num_continuous" in options else kind
    network = find_network(config.network, import_module)
    options |= {} if network is None else {"network": network}
    algorithm: OffPolicyAlgorithm = _class(name, kind, import_module)(obs_dim, size, config, seed, device, **options)
    algorithm.set_optimizers(config)
    clones, alpha = getattr(config, "bc_updates", 0), getattr(config, "bc_alpha", 0.0)
    if clones or alpha:
        algorithm.imitation = losses.Imitation(clones, alpha, DeviceSplit.parse(device).critics)
    return algorithm


def create_on_policy(
    name: str, spec: EnvSpec, config: OnPolicyConfig, seed: int, device: str = "cpu", **options: Any
) -> OnPolicyAlgorithm:
    """A new on-policy algorithm; ``seed`` determines all its randomness; options as in ``OnPolicyAlgorithm``.

    Raises:
        ConfigError: no algorithm or correction of that name.
    """
    algorithm: OnPolicyAlgorithm = _class(name, "on_policy", spec.import_module)(spec, config, seed, device, **options)
    return algorithm


def _class(name: str, kind: str, import_module: str | None) -> Any:
    maker: Maker = getattr(find_row(name, import_module), kind)
    if not maker:
        known = ", ".join(row.name for row in rows().values() if getattr(row, kind))
        of_what = "a team's" if kind == "team" else kind.replace("_", "-")
        raise ConfigError(f"no algorithm '{name}' for {of_what} actions (known: {known})")
    if not isinstance(maker, str):
        return maker
    module, _, class_name = maker.partition(":")
    return getattr(importlib.import_module(module), class_name)
