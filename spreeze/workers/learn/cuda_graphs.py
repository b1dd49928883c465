"""Several updates as one launch: a CUDA graph of everything from the draw to the target networks.

With small networks a GPU waits for its next kernel, and an update has a hundred of them. A graph launches all of them
at once. It can hold only work of the device: draws from GPU replay, noise of registered generators. What Python decides
by counting updates (a delayed actor, a target that moves every n updates) is fixed while the graph is recorded, so a
graph holds whole periods of these decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.workers.learn.gpu_replay import GpuReplay, Stream, StreamEvent

_LONGEST_PERIOD = 16
"""Longest period of Python decisions that a graph may hold, in updates."""
_SINGLES = 3
_MOST_IN_FLIGHT = 2
"""Launches in flight at once: the device never waits for the host, and the host is never far ahead."""


class NotRecorded(Exception):
    """The work cannot be a graph; the device is still usable."""


class Graph(Protocol):
    """Work that is recorded once and replayed many times."""

    def record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> None:
        """Records the device work of ``work`` without running it.

        Raises:
            NotRecorded: it cannot be recorded; it can still run kernel by kernel.
        """
        ...

    def replay(self) -> None:
        """Starts the recorded work; returns before it is done."""
        ...


class CudaGraph:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> None:
        """Records; the work must have run before, so that its buffers exist.

        Raises:
            NotRecorded: the work waits for the host, or there is no room for the graph's memory.
        """
        states, stream = [generator.get_state() for generator in generators], torch.cuda.current_stream(self._device)
        for generator in generators:
            self._graph.register_generator_state(generator)
        torch.cuda.synchronize(self._device)
        try:
            # Only waits of this thread spoil a recording: other threads may use the device meanwhile.
            with torch.cuda.device(self._device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # a lost device raises here again, uncaught
            # A failed recording leaves its stream set and its generators in recording state.
            torch.cuda.set_stream(stream)
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(torch.Generator(self._device).set_state(state))
            raise NotRecorded(" ".join(str(error).split())[:200]) from None

    def replay(self) -> None:
        self._graph.replay()


def updates_in_graph(wanted: int, period: int) -> int:
    """Updates of one launch: ``wanted`` rounded up to whole periods."""
    return -(-max(1, wanted) // period) * period


def reason_against(*, split: bool, period: int) -> str | None:
    """Why updates cannot be a graph, or None if they can."""
    if split:
        return "actor and critics are on two devices"
    if period > _LONGEST_PERIOD:
        return f"the target network moves every {period} updates, a graph holds at most {_LONGEST_PERIOD}"
    return None


class GraphedUpdates:
    """Updates with batches from GPU replay: one by one at first, then as graphs if possible."""

    def __init__(
        self, algorithm: OffPolicyAlgorithm, mirror: GpuReplay, update: Callable[[Tensor], None], stream: Stream, *,
        wanted: int = 1, make_graph: Callable[[], Graph] | None = None, tell: Callable[[str], None],
    ) -> None:
        """Records nothing yet.

        ``update`` runs one update with rows [B, W] on ``stream``; ``wanted`` updates, rounded up to whole periods of
        the algorithm, are one graph. Without ``make_graph`` every kernel is launched by itself. ``tell`` gets the
        reason if no graph can be recorded.
        """
        self.mirror = mirror
        self.in_graph = updates_in_graph(wanted, algorithm.period)
        self._algorithm, self._update, self._stream = algorithm, update, stream
        self._make_graph, self._tell = make_graph, tell
        self.recording_failed = False
        """PyTorch's allocator then considers it unfinished, and ``torch.cuda.empty_cache`` would fail."""
        self._graph: Graph | None = None
        self._singles = 0
        self._in_flight: deque[StreamEvent] = deque()

    @property
    def updates_before_replay(self) -> int:
        """Updates before the first replay: single ones, then the launch that records; 0 without graphs."""
        if self._make_graph is None:
            return 0
        period = self._algorithm.period
        return period * -(-max(period, _SINGLES) // period) + self.in_graph

    def run(self, most: int | None = None) -> int:
        """Starts one launch; returns its number of updates, at most ``most`` (None: no limit).

        Returns before they are done, but waits until at most one earlier launch is in flight, so that the count is
        never far ahead of the device.
        """
        if len(self._in_flight) >= _MOST_IN_FLIGHT:
            self._in_flight.popleft().wait()
        done = self._launch(most)
        self._in_flight.append(self._stream.mark())
        return done

    def _launch(self, most: int | None) -> int:
        algorithm, count = self._algorithm, self.in_graph
        starts_period = algorithm.updates % algorithm.period == 0
        # Every buffer must exist before recording, so a whole period runs first, one by one.
        warm = self._singles >= max(algorithm.period, _SINGLES)
        if starts_period and warm and (most is None or most >= count):
            if self._graph is None and self._make_graph is not None:
                self._record(self._make_graph())
            if self._graph is not None:
                self._graph.replay()
                algorithm.updates += count
                return count
        self._one()
        self._singles += 1
        return 1

    def _record(self, graph: Graph) -> None:
        before = self._algorithm.updates

        def several() -> None:
            for _ in range(self.in_graph):
                self._one()

        try:
            graph.record(several, [self._algorithm.noise, self.mirror.generator])
            self._graph = graph
        except NotRecorded as error:
            self._make_graph, self.recording_failed = None, True
            self._tell(f"kernels are launched one by one: no graph could be recorded: {error}")
        finally:
            self._algorithm.updates = before  # recorded, not done

    def _one(self) -> None:
        self._update(self.mirror.draw())

    def set_batch_size(self, batch_size: int) -> None:
        """Draws that many rows from now on; the graph is recorded again."""
        self._graph, self._singles = None, 0
        self.mirror.set_batch_size(batch_size)
