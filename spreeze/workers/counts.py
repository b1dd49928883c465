"""What a process that steps environments has done, and how it tells the supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Counts:
    """What one sampler or executor has done so far; times are cumulative seconds."""

    env_steps: int = 0
    episodes: int = 0
    episode_return: float | None = None
    episode_length: float | None = None
    rows_refused: int = 0
    env_errors: int = 0
    policy_s: float = 0.0
    env_s: float = 0.0
    write_s: float = 0.0

    def post(self, slots: np.ndarray, base: Sequence[float] | np.ndarray, wait_s: float) -> None:
        """Writes all but the policy's version into the slots of the role, in the order of ``metrics.SLOTS``.

        Args:
            slots: of this process.
            base: what its predecessors in this place had done.
            wait_s: seconds waited so far.
        """
        slots[0] = base[0] + self.env_steps
        slots[1] = base[1] + self.episodes
        if self.episode_return is not None and self.episode_length is not None:
            slots[2] = self.episode_return
            slots[3] = self.episode_length
        slots[4] = base[4] + self.rows_refused
        slots[5] = base[5] + self.env_errors
        slots[7] = base[7] + self.policy_s
        slots[8] = base[8] + self.env_s
        slots[9] = base[9] + self.write_s
        slots[10] = base[10] + wait_s
