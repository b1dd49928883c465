"""The balance between inserting and sampling, as arithmetic on counters.

Like Reverb's rate limiter (Cassirer et al. 2021, arXiv 2102.04736), it keeps an error term inside a band. Here there is
no lock and no waiting: each side asks before it acts and does something else, or sleeps a little, when the answer is
no. Hence a dead peer cannot block the other side.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

from spreeze.errors import ConfigError


@dataclass(frozen=True)
class RateLimiter:
    """Keeps samples per insert between ``minimum`` and ``maximum``.

    With i = inserted - inserted_at_learning_start, s = sampled, b = batch_size and w = rows_per_write:

    * insert r <= w rows iff (i + r - w) * minimum <= s
    * sample b rows iff s <= i * maximum

    *No deadlock.* Where inserting is not allowed, s < (i + r - w) * minimum <= i * minimum <= i * maximum, so sampling
    is allowed: one side can always continue, whatever the speeds. With minimum = maximum, the sum of both slacks,
    w * minimum + b, is the smallest with which that holds (up to one unit). *Bounds.* After an insertion
    s >= (i - w) * minimum, after a batch s <= i * maximum + b, so the ratio lies within 5 % of the band once i >= 20 w
    and i >= 20 b / maximum.

    Before learning starts (-1), up to w - 1 rows more than ``learning_starts`` may be inserted. The count
    is taken when learning starts and after every restart: rows inserted before earn no updates, so there is no burst.
    """

    minimum: float  # samples per insert below which samplers wait; 0 means that they never wait
    maximum: float  # samples per insert above which the learner waits
    learning_starts: int  # rows inserted before the first batch; 0 counts as 1
    batch_size: int  # b: rows drawn at once
    rows_per_write: int  # w: rows that all samplers together may insert between two reads of the counters
    serial: bool = False
    """Inserting and sampling alternate: each batch is drawn as soon as its rows are there. Once learning has started,
    inserting waits for nothing, and ``sampled`` never exceeds i * ``maximum``."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.minimum <= self.maximum < math.inf and self.maximum > 0.0):
            raise ConfigError(
                f"samples per insert {self.minimum}:{self.maximum} would deadlock: the minimum must be 0 "
                "(no limit) or more and at most the maximum, which must be finite and above 0"
            )
        if self.batch_size < 1 or self.rows_per_write < 1:
            raise ConfigError(
                f"batch of {self.batch_size} and writes of {self.rows_per_write} rows would deadlock: "
                "both must be at least 1"
            )

    def within(self, minimum: float, maximum: float) -> Self:
        """Returns this limiter with other bounds."""
        return dataclasses.replace(self, minimum=minimum, maximum=maximum)

    def may_insert(self, inserted: int, inserted_at_learning_start: int, sampled: int, rows: int) -> bool:
        """True if a sampler may write ``rows`` more rows now, at most ``rows_per_write``; see ``ReplayCounts``."""
        if self.serial:
            return inserted_at_learning_start >= 0 or inserted < max(self.learning_starts, 1)
        if self.minimum == 0:
            return True
        if inserted_at_learning_start < 0:
            return inserted + rows <= max(self.learning_starts, 1) + self.rows_per_write - 1
        return (inserted - inserted_at_learning_start + rows - self.rows_per_write) * self.minimum <= sampled

    def rows_allowed(self, inserted: int, inserted_at_learning_start: int, sampled: int) -> int | None:
        """Rows that may be inserted now, all writers together; None without a limit."""
        if self.minimum == 0:
            return None
        limit = (
            max(self.learning_starts, 1) - 1
            if inserted_at_learning_start < 0
            else inserted_at_learning_start + int(sampled / self.minimum)
        )
        return max(0, limit + self.rows_per_write - inserted)

    def may_sample(self, inserted: int, inserted_at_learning_start: int, sampled: int) -> bool:
        """True if the learner may draw a batch now, or, with -1 for ``inserted_at_learning_start``, start to learn."""
        if inserted < max(self.learning_starts, 1):
            return False
        ahead = self.batch_size if self.serial else 0
        return (
            inserted_at_learning_start < 0 or sampled + ahead <= (inserted - inserted_at_learning_start) * self.maximum
        )
