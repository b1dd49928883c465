"""Several updates as one launch: a CUDA graph of everything from the draw to the target networks.

Small networks leave a GPU waiting for its next kernel: an update is a hundred of them. A graph hands all
of them over at once. It can hold only work of the device: draws from a mirror of replay, noise of generators
registered with it. What Python decides by counting updates (a delayed actor, a target that moves every
n updates) is decided while the graph is recorded, so one graph holds whole periods of these decisions.
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
"""Updates in one graph at most because of what Python decides."""
_SINGLES = 3
_UNDER_WAY = 2
"""Launches that may be under way at once: the device never waits for the host, which is never far ahead."""


class NotRecorded(Exception):
    """Work that cannot be a graph; the device is fine."""


class Graph(Protocol):
    """Work that is recorded once and repeated at will."""

    def record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> None:
        """Records what ``work`` asks of the device, without doing it.

        Raises:
            NotRecorded: it cannot be recorded; it may still be done kernel by kernel.
        """
        ...

    def replay(self) -> None:
        """Starts what was recorded; returns before it is done."""
        ...


class CudaGraph:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> None:
        """Records; the work must have been done before, so that its buffers exist.

        Raises:
            NotRecorded: it asks for something that waits for the host, or there is no room for the graph's memory.
        """
        states, stream = [generator.get_state() for generator in generators], torch.cuda.current_stream(self._device)
        for generator in generators:
            self._graph.register_generator_state(generator)
        torch.cuda.synchronize(self._device)
        try:
            # Only this thread's own waits spoil a recording: another one may well use the device meanwhile.
            with torch.cuda.device(self._device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # a device that is lost says so again here, and that is not caught
            # A recording that failed leaves its stream in force and its generators waiting for the end of it.
            torch.cuda.set_stream(stream)
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(torch.Generator(self._device).set_state(state))
            raise NotRecorded(" ".join(str(error).split())[:200]) from None

    def replay(self) -> None:
        self._graph.replay()


def updates_in_graph(wanted: int, period: int) -> int:
    """Updates of one launch: at least as many as wanted, in whole periods."""
    return -(-max(1, wanted) // period) * period


def reason_against(*, split: bool, period: int) -> str | None:
    """Why updates cannot be a graph; None where they can."""
    if split:
        return "actor and critics are on two devices"
    if period > _LONGEST_PERIOD:
        return f"the target network moves every {period} updates, a graph holds at most {_LONGEST_PERIOD}"
    return None


class GraphedUpdates:
    """Updates with batches from a mirror of replay: one by one at first, then as graphs if there is one."""

    def __init__(
        self, algorithm: OffPolicyAlgorithm, mirror: GpuReplay, update: Callable[[Tensor], None], stream: Stream, *,
        wanted: int = 1, make_graph: Callable[[], Graph] | None = None, tell: Callable[[str], None],
    ) -> None:
        """Makes nothing yet.

        Args:
            algorithm: what is updated.
            mirror: where batches are drawn.
            update: one update with rows [B, W].
            stream: of the updates.
            wanted: updates in one graph, rounded up to whole periods of the algorithm.
            make_graph: gives an empty graph; None: every kernel is launched by itself.
            tell: is told why no graph can be recorded.
        """
        self.mirror = mirror
        self.in_graph = updates_in_graph(wanted, algorithm.period)
        self._algorithm, self._update, self._stream = algorithm, update, stream
        self._make_graph, self._tell = make_graph, tell
        self.recording_failed = False
        """PyTorch's allocator takes it for unfinished from then on: ``torch.cuda.empty_cache`` would fail."""
        self._graph: Graph | None = None
        self._singles = 0
        self._under_way: deque[StreamEvent] = deque()

    @property
    def updates_before_replay(self) -> int:
        """Updates until the next one is a replay: single ones, then the launch that records; 0 without graphs."""
        if self._make_graph is None:
            return 0
        period = self._algorithm.period
        return period * -(-max(period, _SINGLES) // period) + self.in_graph

    def run(self, most: int | None = None) -> int:
        """One launch; returns how many updates it is, at most ``most`` (None: no limit).

        Returns before they are done, but not before the launch before the last one is: what is counted is
        never far ahead of the device.
        """
        if len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft().wait()
        done = self._launch(most)
        self._under_way.append(self._stream.mark())
        return done

    def _launch(self, most: int | None) -> int:
        algorithm, count = self._algorithm, self.in_graph
        starts_period = algorithm.updates % algorithm.period == 0
        # Every buffer has to exist before recording: a whole period goes first, one by one.
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
        """Draws that many rows from now on; a graph is recorded anew."""
        self._graph, self._singles = None, 0
        self.mirror.set_batch_size(batch_size)
