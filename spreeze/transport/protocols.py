"""The seams between samplers and learners: who writes what, who reads it, and what is promised to both.

Nobody blocks on a peer, alive or dead: every call returns at once with what there is. A writer asks before it writes
and does something else where the answer is no. Tests in ``tests/test_contract_*.py`` run over every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from spreeze.types import RolloutBatch, RowLayout

Arrays = dict[str, np.ndarray]


class FrameColumns(NamedTuple):
    """What N rows of images hold besides the fields of every row (see ``RowLayout``)."""

    frame: np.ndarray  # [N, F] uint8
    back: np.ndarray  # [N]
    age: np.ndarray  # [N]


class ReplayCounts(NamedTuple):
    """What the rate limiter of a sampler has to know."""

    inserted: int  # rows in replay since it exists, those of this sink on their way included
    baseline: int  # ``inserted`` when learning began, -1 before
    sampled: int  # rows drawn since


class TransitionSink(Protocol):
    """Where one sampler's transitions go: a shard of the ring, or a socket to one.

    Rows arrive whole, in the order in which they were written, each at most once. Of a writer that is killed those that
    ``write`` had published arrive; the last write is there as a whole or in its first rows. A ring overwrites its
    oldest rows; a socket takes no more while ``has_room`` is false. There is one writer of a sink at any time.
    """

    @property
    def layout(self) -> RowLayout: ...

    @property
    def next_logical(self) -> int:
        """Number of the row that is written next, counted over all writers that this sink had."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether ``write`` may be called now; of a ring always."""
        ...

    def counts(self) -> ReplayCounts:
        """The newest counts that are known here.

        Raises:
            TransportError: the other side is gone for good.
        """
        ...

    def write(
        self, obs: Any, action: Any, reward: Any, terminated: Any, next_obs: Any, num_steps: Any = None,
        version: int = 0, frames: FrameColumns | None = None,
    ) -> None:
        """Appends N transitions that policy ``version`` collected; arrays as in ``RowLayout``, ``reward`` [N].

        Raises:
            ValueError: a shape that does not fit; nothing was published.
            TransportError: no room, or the other side is gone for good; nothing was taken.
        """
        ...

    def close(self) -> None: ...


class BatchSource(Protocol):
    """What a learner draws batches from.

    Every row that it gives is one that some sink published, whole, whoever was killed. A source that is opened late
    sees what is still there.
    """

    inserted: int
    """Rows committed by all writers at the last refresh."""
    available: int
    """Rows that could be drawn at the last refresh."""

    @property
    def capacity(self) -> int:
        """Most rows that could ever be drawn."""
        ...

    def refresh(self) -> None:
        """Looks at the writers' counters."""
        ...

    def sample(self, rng: np.random.Generator, rows: np.ndarray, frames: np.ndarray | None = None) -> int:
        """Fills ``rows`` [B, W] float32, and of images ``frames`` [B, T, F] uint8, uniformly with replacement.

        Returns:
            How many draws were repeated because a writer may have been in their rows.

        Raises:
            TransportError: there is nothing to draw.
        """
        ...

    def last_lag_age(self, version_now: int) -> tuple[float, float]:
        """Mean policy lag (updates) and mean age (env steps of all samplers) of the last batch."""
        ...


class StepRows(NamedTuple):
    """One env step of some environments, in the order of their numbers; columns of n."""

    obs: np.ndarray  # [n, O] or [n, k, C, H, W]
    action: np.ndarray  # [n, A] as drawn
    log_prob: np.ndarray  # [n]
    version: np.ndarray | int  # [n] version of the parameters that drew it
    reward: Sequence[float]  # [n]
    terminated: Sequence[bool]  # [n]
    truncated: Sequence[bool]  # [n]
    next_obs: np.ndarray  # as obs


class RolloutSink(Protocol):
    """The environments of one rollout sampler, by their index from 0, on their way into rollouts of T steps each.

    A step counts from the moment ``commit`` returns and is whole then, whoever is killed. A successor goes on behind
    the last step that counts. A rollout that a reader may be using is never changed.
    """

    steps: list[int]
    """Env steps of each since the run began."""
    episode: list[int]
    """Number of each one's current episode."""

    def open(self, *, step_synchronous: bool = False) -> list[int]:
        """Indices of those that may take a step now; none while the rollout has to wait for its reader."""
        ...

    def question(self, index: int) -> int:
        """Number of the question about its next action: a new one after each step and each abandoned episode."""
        ...

    def rows(self, indices: Sequence[int]) -> slice | np.ndarray:
        """Picks ``indices`` of an array over these environments."""
        ...

    def commit(self, indices: Sequence[int], rows: StepRows) -> None:
        """Stores one env step of each of ``indices`` [n], ascending."""
        ...

    def abandon(self, index: int) -> None:
        """Ends the current episode, truncated, after its last row; the next one begins."""
        ...

    @property
    def filled(self) -> bool:
        """True when the last step completed a rollout of all these environments."""
        ...

    @property
    def last_of_step(self) -> bool:
        """True where all environments, of other samplers too, have come as far as these."""
        ...

    def close(self) -> None: ...


class TakenRollout(NamedTuple):
    """A rollout as a learner gets it, in arrays of its own."""

    writer: int  # number of the sampler that filled it
    rollout: int  # j, counted by that sampler
    use: int  # 1 to K
    version: int  # oldest policy in it
    versions: np.ndarray  # [T, M]
    batch: RolloutBatch


class RolloutSource(Protocol):
    """What a learner takes rollouts from, each at most K times and none that is not whole, whoever is killed.

    A rollout is gone when it was used K times, or when its writer needs the place: the newest are kept.
    """

    def take(self) -> TakenRollout | None:
        """The rollout that was used least, among these the oldest; None while there is none."""
        ...

    @property
    def uses_left(self) -> int:
        """How often ``take`` would succeed now if nobody wrote."""
        ...


class PublishedParameters(Protocol):
    """One version of a network's arrays."""

    @property
    def arrays(self) -> Arrays: ...

    @property
    def meta(self) -> dict[str, Any]: ...

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, version): the epoch rises when a learner starts, the version with its updates."""
        ...


class ParameterPublisher(Protocol):
    """A learner's side: there is one publisher at any time, and it never waits for a reader."""

    def publish(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> object:
        """Makes a version visible, as a whole or not at all.

        A version that is there already stays as it is; this may be an error.

        Raises:
            WeightsError: an older version than what is there, or values that are not finite; nothing was changed.
            OSError: no room; the version before it is still there.
        """
        ...


class ParameterSource(Protocol):
    """A reader's side; it may be opened late, and never sees an older version than it has."""

    def read_latest(self, newer_than: tuple[int, int] | None = None) -> PublishedParameters | None:
        """The newest version, or None: nothing there, nothing newer than (epoch, version), or being written."""
        ...
