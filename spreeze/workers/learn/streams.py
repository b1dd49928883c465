"""Orders of work on a device: the learner's own stream and one beside it for copies.

On a GPU a lane is a CUDA stream and a moment an event in it: nothing is waited for by the host unless
``StreamEvent.wait`` is called. On the processor everything is done when the call returns, in the order of
the calls, so moments are over as soon as they are made.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
from torch import Tensor


class StreamEvent:
    """A point in the work of a lane."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    def wait(self) -> None:
        """Returns when all work before this point is done; the host waits."""
        if self.event is not None:
            self.event.synchronize()


class Stream(Protocol):
    """Work that is done in the order in which it was given."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copies ``source`` into ``to``; ``source`` must stay as it is until a later moment is over."""
        ...

    def mark(self) -> StreamEvent:
        """The point behind all work given so far."""
        ...

    def follow(self, moment: StreamEvent) -> None:
        """Work given from now on begins after that moment of another lane."""
        ...


class DeviceStream:
    """A lane of a device: its current stream, or a stream beside it."""

    def __init__(self, device: torch.device, *, beside: bool = False) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._beside = torch.cuda.Stream(device) if beside and self._on_gpu else None  # type: ignore[no-untyped-call]

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._beside is None else self._beside

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copies, without waiting where ``source`` is pinned or on the device."""
        with contextlib.nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            to.copy_(source, non_blocking=True)

    def mark(self) -> StreamEvent:
        """The point behind all work given so far."""
        if not self._on_gpu:
            return StreamEvent()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a host that waits leaves its core
        event.record(self._stream())
        return StreamEvent(event)

    def follow(self, moment: StreamEvent) -> None:
        """Work given from now on begins after that moment."""
        if moment.event is not None:
            self._stream().wait_event(moment.event)


class Staging:
    """Two buffers of the host in turn: one is filled while the other may still be on its way."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> None:
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._sent = [StreamEvent(), StreamEvent()]
        self._turn = 0

    def next(self) -> Tensor:
        """The buffer whose last copy is over."""
        self._turn = 1 - self._turn
        self._sent[self._turn].wait()
        return self._buffers[self._turn]

    def sent(self, moment: StreamEvent) -> None:
        """The copy of that buffer is over then."""
        self._sent[self._turn] = moment
