"""What a setting is worth: one formula for each objective, higher is better.

U: updates/s. B: batch size. E: env steps/s. All measured with learner and samplers running together.
"""

from __future__ import annotations

import math

BATCH_HALF_WORTH = 16.0
"""B0 (transitions): the batch at which an update has half of its greatest worth; fitted (``tests/stress``)."""
UPDATES_PER_STEP = 2.0
"""R (updates per env step): the ratio at which an update has half of the worth it has on fresh data; fitted too."""

FORMULAS = {
    "return": f"U * B / (B + {BATCH_HALF_WORTH:g}) * E / (E + U / {UPDATES_PER_STEP:g})",
    "paper": "the smallest power of two B with b B / (a + b B) >= gpu_target, where an update takes a + b B; "
             "then E while the run keeps at most cpu_target of the cores busy",
    "sampling": "E, with the configured batch",
    "updates": "U, with the configured batch",
}  # fmt: skip
"""Objective -> its formula in one line (U updates/s, E env steps/s, B batch size)."""


def batch_worth(batch_size: int) -> float:
    """Worth of one update, from 0 to 1: ``B / (B + B0)``."""
    return batch_size / (batch_size + BATCH_HALF_WORTH)


def fresh_worth(updates_per_s: float, env_steps_per_s: float) -> float:
    """Worth of an update by how fresh its data is, from 0 to 1: ``E / (E + U / R)``."""
    if env_steps_per_s <= 0.0:
        return 0.0
    return env_steps_per_s / (env_steps_per_s + updates_per_s / UPDATES_PER_STEP)


def learner_score(objective: str, batch_size: int, updates_per_s: float) -> float:
    """Worth of a learner before the samplers are known; all that run are equal where only env steps count."""
    if objective == "sampling":
        return float(updates_per_s > 0.0)
    return updates_per_s * (batch_worth(batch_size) if objective == "return" else 1.0)


def joint_score(objective: str, batch_size: int, updates_per_s: float, env_steps_per_s: float) -> float:
    """Worth of learner and samplers together; ``paper`` takes the batch by its rule and scores E."""
    if objective == "return":
        return updates_per_s * batch_worth(batch_size) * fresh_worth(updates_per_s, env_steps_per_s)
    return updates_per_s if objective == "updates" else env_steps_per_s


def paper_batch(a_s: float, b_s: float, gpu_target: float) -> int:
    """Smallest power of two whose frame rate reaches ``gpu_target`` of the asymptotic one, 1/b (papers: 3.3).

    Args:
        a_s: time of an update that does not depend on its batch.
        b_s: time that each row of the batch adds.
        gpu_target: share to reach, below 1.
    """
    needed = gpu_target / (1.0 - gpu_target) * a_s / b_s
    return 1 << max(0, math.ceil(math.log2(max(needed, 1.0)) - 1e-9))
