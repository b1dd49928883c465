"""One update from its four functions, and what all algorithms do alike with their state."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import torch

from spreeze.algorithms.base import OffPolicyAlgorithm
from spreeze.errors import CheckpointError
from spreeze.types import TransitionBatch


def run_update(algorithm: OffPolicyAlgorithm, batch: TransitionBatch) -> tuple[float, float]:
    """One whole update on one device; returns (critic_s, actor_s)."""
    with torch.inference_mode():
        start_s = perf_counter()
        proposal = algorithm.propose(batch)
        algorithm.critic_step(batch, proposal.next_action, proposal.next_log_prob)
        critic_done_s = perf_counter()
        if proposal.action is not None:
            algorithm.actor_step(algorithm.action_gradient(batch, proposal.action))
        algorithm.update_targets()
        return critic_done_s - start_s, perf_counter() - critic_done_s


def finite_only(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that are finite: an unknown value is left out, never shown as a number."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def checked_updates(name: str, state: dict[str, Any]) -> int:
    """The update count of a saved state.

    Raises:
        CheckpointError: the state of another algorithm.
    """
    if state.get("algo") != name:
        raise CheckpointError(f"checkpoint was made by '{state.get('algo')}', not by '{name}'; use the same algorithm")
    return int(state["updates"])
