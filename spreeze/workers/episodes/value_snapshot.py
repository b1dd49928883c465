"""Values that a learner publishes beside its policy, for the episodes that the evaluator keeps.

These are the networks of vectors: V(s) of the algorithms that learn from rollouts, the first critic's Q(s, a) of those
with actor and critic; where the policy itself is made of values, as in DQN, only their unit. Networks of images, those
with memory, custom ones and those of teams publish none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spreeze.algorithms.algorithm import Algorithm
from spreeze.algorithms.distributional import CategoricalCritics
from spreeze.algorithms.fused_mlp import Parameters, policy_arrays, policy_snapshot
from spreeze.algorithms.off_policy import Critics, OffPolicyAlgorithm
from spreeze.algorithms.on_policy import MlpActorCritic, OnPolicyAlgorithm
from spreeze.transport.weights import Arrays

Snapshot = tuple[Callable[[], Arrays], dict[str, Any]]
"""Arrays, which another thread may fetch later, and metadata for ``step_values``."""


def value_snapshot(algorithm: Algorithm, scale: float) -> Snapshot | None:
    """The values of an algorithm, which learns rewards divided by ``scale``; None where it publishes none."""
    unit = {"scale": scale, "gamma": algorithm.gamma}
    if isinstance(algorithm, OnPolicyAlgorithm) and isinstance(algorithm.net, MlpActorCritic):
        network = algorithm.net.value_network
        if network.layers.own is None:
            arrays = policy_arrays(network)
            return lambda: arrays, unit | _meta(network, "states")
    if not isinstance(algorithm, OffPolicyAlgorithm) or algorithm.encoder is not None:
        return None
    if algorithm.actor is None:
        return dict, unit | {"values": "policy"}
    critics = algorithm.critics
    if not isinstance(critics, Critics) or critics.online.layers.own is not None:
        return None
    own: Arrays = {}
    if isinstance(critics, CategoricalCritics):
        own["atoms"] = critics.grid[:, 0].cpu().numpy().astype(np.float32)
    read = policy_snapshot(critics.plain)
    return lambda: read() | own, unit | _meta(critics.plain, "actions")


def _meta(network: Parameters, kind: str) -> dict[str, Any]:
    return {"values": kind, "layers": len(network.weights), **network.layers.meta}
