"""The contract of on-policy algorithms: they learn from intervals of T env steps of N environments.

theta(j) are the parameters that collect interval j, D(j) its data. A mode may collect interval j while the
algorithm learns from D(j - 1), so parameters can be one interval ahead of the data. What is done about that
is the *correction*:

=============  =========================================================================================
on-policy      theta(j + 1) from D(j), nothing to correct: rollout and learning take turns
delayed        the update that D(j - 1) asks for at theta(j - 1), which collected it, applied to theta(j):
               HTS-RL (arXiv 2012.09849, eq. 6)
none           the update at theta(j), as if theta(j) had collected D(j - 1)
truncated-is   the update at theta(j), each sample weighted by min(1, pi_theta(j) / pi_theta(j - 1))
=============  =========================================================================================
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from spreeze.types import RolloutBatch

CORRECTIONS = ("on-policy", "delayed", "none", "truncated-is")


class OnPolicyAlgorithm(Protocol):
    """Networks, losses and update of one on-policy algorithm."""

    name: str
    updates: int
    """Gradient steps so far, refused ones included."""

    def learn(self, batch: RolloutBatch, progress: float | None) -> None:
        """Everything that one interval's data is used for.

        A gradient that is not finite is not applied, and counted.

        Args:
            batch: collected by theta(j) with correction "on-policy", by theta(j - 1) with the others.
            progress: share of the run that is over, for the step size's schedule; None where nobody knows.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest update by their names in ``spreeze.metrics``; what is not finite is left out."""
        ...

    def updates_skipped(self) -> int:
        """Gradients that were not applied."""
        ...

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of theta(j)'s policy as ``Policy.from_weights`` reads it, its own normaliser included."""
        ...

    def policy_meta(self) -> dict[str, Any]:
        """What the policy is."""
        ...

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of both thetas, the optimiser, the running statistics and the random state."""
        ...

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes over what ``state_arrays`` gave.

        Raises:
            CheckpointError: of another network or algorithm.
        """
        ...

    def state_json(self) -> dict[str, Any]:
        """Counters and identity."""
        ...

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_json`` gave.

        Raises:
            CheckpointError: of another algorithm or correction.
        """
        ...
