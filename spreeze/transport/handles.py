"""Channels between workers, and the handles by which jobs carry them to other processes.

The supervisor creates a channel, puts its ``handle`` into the job of each worker that takes part, and the worker
attaches to it. What a process has to inherit follows from its job (``inherited_fds``), so it is named in no other
place.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from spreeze.types import Jsonable


@dataclass(frozen=True, kw_only=True)
class Handle(Jsonable):
    """A channel as a job carries it. Subclasses add what else ``attach`` needs to know."""

    attached_owns: ClassVar[bool] = True
    """True if what ``attach`` returns closes these descriptors."""

    fds: tuple[int, ...]
    """Descriptors, which have the same numbers in the process that inherits them."""


def handles(job: Any) -> Iterator[Handle]:
    """Returns all handles in a job, also in nested dataclasses and tuples."""
    if isinstance(job, Handle):
        yield job
    elif isinstance(job, tuple):
        for entry in job:
            yield from handles(entry)
    elif dataclasses.is_dataclass(job):
        for field in dataclasses.fields(job):
            yield from handles(getattr(job, field.name))


def with_own_descriptors(job: Any) -> Any:
    """The job for a worker in the process that created its channels, which closes what it attaches to."""
    if isinstance(job, Handle):
        return dataclasses.replace(job, fds=tuple(map(os.dup, job.fds))) if job.attached_owns else job
    if not any(True for _ in handles(job)):
        return job
    if isinstance(job, tuple):
        return tuple(map(with_own_descriptors, job))
    found = {field.name: with_own_descriptors(getattr(job, field.name)) for field in dataclasses.fields(job)}
    return dataclasses.replace(job, **found)


def inherited_fds(job: Jsonable) -> tuple[int, ...]:
    """Descriptors that the process of a job inherits, each once."""
    return tuple(sorted({fd for handle in handles(job) for fd in handle.fds}))
