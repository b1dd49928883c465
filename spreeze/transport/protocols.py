"""The interfaces between samplers and learners, and their guarantees.

No call blocks on a peer, alive or dead: every call returns at once with what there is. The tests in
``tests/contract/`` run over every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from spreeze.types import RolloutBatch, RowLayout

if TYPE_CHECKING:
    from spreeze.transport.weights import Weights

Arrays = dict[str, np.ndarray]


class FrameColumns(NamedTuple):
    """The additional columns of N rows of images (see ``RowLayout``)."""

    frame: np.ndarray  # [N, F] uint8
    back: np.ndarray  # [N]
    age: np.ndarray  # [N]


class ReplayCounts(NamedTuple):
    """Inputs of a sampler's rate limiter."""

    inserted: int  # rows inserted into replay so far
    baseline: int  # ``inserted`` when learning started, -1 before
    sampled: int  # rows drawn since learning started


class TransitionSink(Protocol):
    """Sink for the transitions of one sampler: a shard of the ring, which overwrites its oldest rows.

    Rows arrive complete, in order, each at most once. If a writer is killed, what ``write`` had published still
    arrives; of the write in which it was killed, the first rows may arrive, perhaps all. A sink has one writer at any
    time.
    """

    @property
    def layout(self) -> RowLayout: ...

    @property
    def next_logical(self) -> int: ...  # number of the next row, counted over all writers that this sink has had

    def counts(self) -> ReplayCounts: ...

    def write(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        next_obs: Any,
        num_steps: Any = None,
        version: int = 0,
        frames: FrameColumns | None = None,
    ) -> None:
        """Appends N transitions that policy ``version`` collected; arrays as in ``RowLayout``, ``reward`` [N].

        Raises:
            ValueError: a shape does not fit; nothing was published.
        """
        ...

    def close(self) -> None: ...


class BatchSource(Protocol):
    """Source from which a learner draws batches.

    Every drawn row is complete and was published by some sink, whichever process was killed. A source that is opened
    late sees the rows that are still there.
    """

    inserted: int  # rows committed by all writers at the last refresh
    available: int  # rows that could be drawn at the last refresh

    @property
    def capacity(self) -> int: ...  # largest number of rows that can ever be drawn

    @property
    def ends(self) -> list[int]: ...  # rows that each shard ever held, at the last refresh

    def refresh(self) -> None: ...  # reads the writers' counters

    def newer(self, shard: int, begin: int, columns: slice) -> tuple[np.ndarray, int]:
        """Copies columns of a shard's rows from ``begin`` to the last refresh; returns them and where they end."""
        ...

    def sample(self, rng: np.random.Generator, rows: np.ndarray, frames: np.ndarray | None = None) -> int:
        """Fills ``rows`` [B, W] float32, and for images ``frames`` [B, T, F] uint8, uniformly with replacement.

        Returns how many draws were repeated because a writer may have been changing their rows. Raises a
        TransportError if there is nothing to draw.
        """
        ...

    def last_lag_age(self, version_now: int) -> tuple[float, float]:
        """Mean policy lag (updates) and mean age (env steps of all samplers) of the last batch."""
        ...


class StepRows(NamedTuple):
    """One env step of each of n environments, in the order of their numbers."""

    obs: np.ndarray  # [n, O] or [n, k, C, H, W]
    action: np.ndarray  # [n, A] as drawn
    log_prob: np.ndarray  # [n]
    version: np.ndarray | int  # [n] version of the parameters that drew the action
    reward: Sequence[float]  # [n]
    terminated: Sequence[bool]  # [n]
    truncated: Sequence[bool]  # [n]
    next_obs: np.ndarray  # as obs
    state: np.ndarray | None = None  # [n, S] the policy's before the step; None without memory
    next_state: np.ndarray | None = None  # [n, S] after it, whether or not the episode ended


class RolloutSink(Protocol):
    """Sink for the steps of one sampler: rollouts of T steps of its environments, indexed from 0.

    A step counts when ``commit`` returns and is complete then, whichever process is killed. A restarted sampler
    continues after the last step that counts. A rollout that a reader may be using is never changed.
    """

    steps: list[int]  # of each environment since the run started
    episode: list[int]  # number of each environment's current episode

    def open(self, *, step_synchronous: bool = False) -> list[int]:
        """Indices of the environments that may take a step now; none while the rollout has to wait for its reader."""
        ...

    def request_id(self, index: int) -> int:
        """Number of the request for the next action; a new one after each step and each abandoned episode."""
        ...

    def rows(self, indices: Sequence[int]) -> slice | np.ndarray:
        """An index that selects ``indices`` from an array over these environments."""
        ...

    def commit(self, indices: Sequence[int], rows: StepRows) -> None:
        """Stores one env step of each of ``indices`` [n], ascending."""
        ...

    def abandon(self, index: int) -> None:
        """Truncates the current episode after its last row and starts the next one."""
        ...

    @property
    def filled(self) -> bool: ...  # the last step completed a rollout of all these environments

    @property
    def last_of_step(self) -> bool: ...  # no environment of any sampler is behind these

    def close(self) -> None: ...


class TakenRollout(NamedTuple):
    """A copy of a rollout."""

    writer: int  # number of the sampler that filled it
    rollout: int  # j, counted by that sampler
    use: int  # 1 to K
    version: int  # of the oldest policy in it
    versions: np.ndarray  # [T, M]
    batch: RolloutBatch | None  # None of a rollout that the taker knew


class ParameterPublisher(Protocol):
    """The learner's side: one at any time, which never waits for a reader."""

    def publish(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> object:
        """Makes a version visible atomically; one that was already published stays as it is, perhaps with an error.

        Raises:
            WeightsError: a newer version was published, or a value is not finite; nothing was changed.
            OSError: no room; the previous version is still there.
        """
        ...


class ParameterSource(Protocol):
    """A reader's side; it may be opened late and never goes back to an older version."""

    def read_latest(self, newer_than: tuple[int, int] | None = None) -> Weights | None:
        """The newest version; None if there is none newer than (epoch, version), or while it is being written."""
        ...


class ParameterStore(ParameterPublisher, ParameterSource, Protocol):
    """Both sides in one, for weights that are found by a path."""
