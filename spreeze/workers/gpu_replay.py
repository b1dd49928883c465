"""GPU replay: a copy of replay on the learner's device. Only new rows are copied; batches are gathered on the device.

The rules are those of the ring (``transport.replay_ring``). A pull notes the committed rows, copies the new ones, reads
``reserved`` afterwards and drops rows that may have been overwritten meanwhile. Draws are uniform over the rows on the
device that the ring's reader would draw. Copies run beside the updates: a pull copies at most ``chunk`` rows of a shard
at a time, and draws leave out the oldest ``chunk`` rows. So it waits only for draws with older windows, which are
nearly always done.

Replay on the device only (``DeviceReplay``) is written there by a collector, with one copy. It has the methods of the
ring in shared memory and of its reader (``transport``) that a learner uses, and draws like ``GpuReplay``. The number of
rows stays on the device, so that neither writing nor drawing waits; the host reads it in ``synchronize``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.envs.vector_task import VectorStep
from spreeze.errors import ResourceError, TransportError
from spreeze.formatting import size
from spreeze.transport.replay_ring import ReplayReader
from spreeze.types import RowLayout
from spreeze.workers.torch_devices import out_of_memory

_CHUNK_ROWS = 4096
_FRACTION = 0.8  # fraction of a device's free memory that GPU replay may take; updates need the rest
_MIN_BATCHES = 16  # GPU replay of fewer batches than this is not worth its memory
_LONGEST_PERIOD = 16  # longest period of Python decisions that a graph may hold, in updates
_MIN_SINGLE_UPDATES = 3
_MAX_IN_FLIGHT = 2  # launches in flight at once: the device never waits for the host, and the host is never far ahead
_MAX = torch.finfo(torch.float32).max
_COUNTED = 1024  # newest rows that a normalizer counts each time: a small copy, however many environments there are


def gpu_replay_bytes(layout: RowLayout, num_shards: int, rows_per_shard: int) -> int:
    """Device memory for that many rows; pinned buffers are host memory."""
    return num_shards * rows_per_shard * 4 * layout.width


class GpuReplay:
    """The newest rows of every shard on a device."""

    is_copy = True  # the learner can do without it: all rows are in shared memory as well

    def __init__(
        self,
        reader: ReplayReader,
        batch_size: int,
        device: torch.device,
        seed: int,
        rows_per_shard: int | None = None,
        *,
        main: DeviceStream | None = None,
        side_stream: DeviceStream | None = None,
    ) -> None:
        """Allocates the device's memory; ``pull`` copies the rows.

        ``rows_per_shard`` newest rows of each shard are kept (None: as many as the ring has). Draws run on the stream
        ``main`` (None: the device's current one), copies on ``side_stream`` (None: a stream of their own).
        """
        spec, pinned = reader.ring.spec, device.type == "cuda"
        self._reader, self._layout = reader, spec.layout
        self.rows_per_shard = min(spec.rows_per_shard, rows_per_shard or spec.rows_per_shard)
        self._chunk = max(1, min(_CHUNK_ROWS, self.rows_per_shard // 16))
        self._main, self._side_stream = main or DeviceStream(device), side_stream or DeviceStream(device, side=True)
        self._rows = torch.zeros((spec.num_shards * self.rows_per_shard, spec.layout.width), device=device)
        self._side_stream.record_use(self._rows)
        self._staging = Staging((self._chunk, spec.layout.width), torch.float32, pinned=pinned)
        self._end = [0] * spec.num_shards
        self._floor = [0] * spec.num_shards
        self._staged_windows = Staging((2, spec.num_shards), torch.int64, pinned=pinned)
        self._windows = torch.zeros((3, spec.num_shards), dtype=torch.int64, device=device)
        """For each shard: end of its draws, offset from a draw to a logical index, first row."""
        self._windows[2] = torch.arange(spec.num_shards, device=device) * self.rows_per_shard
        # Memory is zeroed on the main stream: an earlier copy would be lost.
        self._draws_before = self._main.mark()
        self.generator = torch.Generator(device).manual_seed(seed)
        self.available = 0
        self.set_batch_size(batch_size)

    def set_batch_size(self, batch_size: int) -> None:
        device = self._rows.device
        self.batch = torch.zeros((batch_size, self._layout.width), device=device)
        """[B, W], the rows of the latest draw."""
        self.logical = torch.zeros(batch_size, dtype=torch.int64, device=device)
        """[B], the rows' logical indices in their shards."""
        self.shard = torch.zeros_like(self.logical)
        self._random = torch.zeros_like(self.logical)

    @property
    def size_bytes(self) -> int:
        return self._rows.element_size() * self._rows.nelement()

    def pull(self) -> None:
        """Copies the rows committed since the last pull, chunk by chunk, and refreshes the windows of the draws."""
        self._reader.refresh()
        windows = self._reader.windows
        for shard, (_, end) in enumerate(windows):
            # Rows older than the draws' window need no copy.
            oldest = end - self.rows_per_shard + self._chunk
            if self._end[shard] < oldest:
                self._end[shard] = self._floor[shard] = oldest
                self._draws_before = self._main.mark()  # a jump may overwrite any row of the current windows
        while True:
            self._side_stream.follow(self._draws_before)
            for shard, (_, end) in enumerate(windows):
                self._copy(shard, min(end, self._end[shard] + self._chunk))
            self._publish(windows)
            if all(copied == end for copied, (_, end) in zip(self._end, windows, strict=True)):
                return

    def _copy(self, shard: int, end: int) -> None:
        """Copies rows ``[self._end, end)`` of a shard by the ring's protocol."""
        begin, ring = self._end[shard], self._reader.ring
        if end == begin:
            return
        staged, capacity = self._staging.next(), ring.spec.rows_per_shard
        host, first = staged.numpy(), shard * ring.spec.stride_rows
        for at, row, count in _pieces(begin, end, capacity):
            np.copyto(host[at : at + count], ring.rows[first + row : first + row + count])
        ring.in_order()
        safe = ring.counters()[shard][0] - capacity  # read after the copy is complete
        torn = min(max(0, safe - begin), end - begin)
        if torn:
            self._floor[shard] = max(self._floor[shard], begin + torn)
        first = shard * self.rows_per_shard
        for at, row, count in _pieces(begin + torn, end, self.rows_per_shard):
            self._side_stream.copy(self._rows[first + row : first + row + count], staged[torn + at : torn + at + count])
        self._staging.sent(self._side_stream.mark())
        self._end[shard] = end

    def _publish(self, windows: list[tuple[int, int]]) -> None:
        kept = self.rows_per_shard - self._chunk
        lows = np.array(
            [max(low, floor, end - kept) for (low, _), floor, end in zip(windows, self._floor, self._end, strict=True)]
        )
        sizes = np.maximum(0, np.array(self._end) - lows)
        ends = sizes.cumsum()
        staged = self._staged_windows.next()
        staged.numpy()[:] = ends, lows - ends + sizes
        self._main.follow(self._side_stream.mark())
        self._draws_before = self._main.mark()
        self._main.copy(self._windows[:2], staged)
        self._staged_windows.sent(self._main.mark())
        self.available = int(ends[-1])

    def draw(self) -> Tensor:
        """Draws rows uniformly with replacement into ``batch`` [B, W], on the device alone; not before a pull."""
        if self.available < 1:
            raise TransportError("replay is empty: no row was copied yet")
        ends = self._windows[0]
        self._random.random_(generator=self.generator).remainder_(ends[-1])
        torch.searchsorted(ends, self._random, right=True, out=self.shard)
        shifts, starts = self._windows[1:, self.shard]
        torch.add(self._random, shifts, out=self.logical)
        rows = torch.remainder(self.logical, self.rows_per_shard).add_(starts)
        return torch.index_select(self._rows, 0, rows, out=self.batch)

    def synchronize(self) -> None:
        """Waits until all copies and draws are done, so that the memory may be freed."""
        self._side_stream.mark().wait()
        self._main.mark().wait()

    def last_lag_age(self, version_now: int) -> tuple[float, float]:
        """Mean policy lag and age of the latest draw (reads the device); 0 before anything was pulled."""
        if self.available < 1:
            return 0.0, 0.0
        shard, logical = self.shard.cpu().numpy(), self.logical.cpu().numpy()
        spec = self._reader.ring.spec
        return self._reader.lag_and_age(shard * spec.stride_rows + logical % spec.rows_per_shard, version_now)


def _pieces(begin: int, end: int, capacity: int) -> list[tuple[int, int, int]]:
    """Logical rows ``[begin, end)`` as (offset, row, count), split where a shard of ``capacity`` rows wraps."""
    pieces, at = [], begin
    while at < end:
        row = at % capacity
        count = min(end - at, capacity - row)
        pieces.append((at - begin, row, count))
        at += count
    return pieces


def fitted_gpu_replay(
    reader: ReplayReader, batch_size: int, device: torch.device, seed: int, free_bytes: int
) -> tuple[GpuReplay | None, str]:
    """The largest GPU replay that fits into ``free_bytes`` (None if too small to be useful), and a note on it."""
    spec = reader.ring.spec
    needed = gpu_replay_bytes(spec.layout, spec.num_shards, spec.rows_per_shard)
    rows = min(spec.rows_per_shard, int(_FRACTION * free_bytes) // gpu_replay_bytes(spec.layout, spec.num_shards, 1))
    min_rows = min(spec.rows_per_shard, -(-_MIN_BATCHES * batch_size // spec.num_shards))
    while rows >= min_rows:
        try:
            gpu_replay = GpuReplay(reader, batch_size, device, seed, rows)
        except torch.OutOfMemoryError:
            rows //= 2  # taken by another process in the meantime, or fragmented
            continue
        note = f"replay is mirrored on {device}: {size(gpu_replay.size_bytes)} of {size(free_bytes)} free memory"
        if rows < spec.rows_per_shard:
            note += f", so only the newest {spec.num_shards * rows} of {spec.capacity} rows ({size(needed)})"
        return gpu_replay, note
    return None, (
        f"batches are gathered on the host: a copy of replay needs {size(needed)}, {device} has {size(free_bytes)} free"
    )


class DeviceReplay:
    """The newest ``capacity`` rows; ``write`` appends, ``draw`` reads."""

    is_copy = False

    def __init__(self, layout: RowLayout, capacity: int, batch_size: int, device: torch.device, seed: int) -> None:
        """Allocates the memory; a ResourceError where the device has no room."""
        self.spec, self.capacity = SimpleNamespace(layout=layout), capacity
        try:  # the last row receives the rows that are not stored
            self._rows = torch.zeros((capacity + 1, layout.width), device=device)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            needed = size(4 * layout.width * (capacity + 1))
            text = f"replay of {capacity} rows takes {needed}, which {device} does not have; lower --replay-capacity"
            raise ResourceError(text) from None
        self._versions = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        self._end = torch.zeros((), dtype=torch.int64, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.inserted = self.available = self._pending = self.rows_drawn = 0
        self.inserted_at_learning_start = -1
        self._layout = layout
        self.set_batch_size(batch_size)

    def write(self, rows: Tensor, stored: Tensor, version: int) -> None:
        """Appends those of ``rows`` [M, W] that are ``stored`` [M]; ``version`` is that of the policy."""
        slots = (self._end + stored.cumsum(0) - 1).remainder_(self.capacity)
        slots = torch.where(stored, slots, self.capacity)
        self._rows.index_copy_(0, slots, rows)
        self._versions.index_fill_(0, slots, version)
        self._end += stored.sum()

    # --- as the ring ---

    def expect(self, rows: int) -> None:
        """Counts rows that were written since ``synchronize``, as far as the host knows."""
        self._pending += rows

    def synchronize(self) -> None:
        """Reads how many rows there are (waits for the device)."""
        if self._pending:
            self.inserted, self._pending = int(self._end), 0
            self.available = min(self.inserted, self.capacity)

    def total_committed(self) -> int:
        return self.inserted + self._pending

    def begin_learning(self) -> None:
        self.inserted_at_learning_start, self.rows_drawn = self.total_committed(), 0

    # --- as its reader ---

    @property
    def ends(self) -> list[int]:
        return [self.inserted]

    def refresh(self) -> None:
        """Does nothing: a draw always sees all rows."""

    pull = refresh

    def newer(self, shard: int, begin: int, columns: slice) -> tuple[np.ndarray, int]:
        """Columns of at most ``_COUNTED`` newest rows after ``begin``, and their end (waits for the device)."""
        count = min(self.inserted - begin, _COUNTED, self.capacity)
        slots = torch.arange(self.inserted - count, self.inserted, device=self._rows.device) % self.capacity
        return self._rows[slots, columns].cpu().numpy(), self.inserted

    def sample(self, rng: np.random.Generator, rows: np.ndarray, frames: np.ndarray | None = None) -> int:
        raise TransportError("replay on a device is drawn from there")

    def last_lag_age(self, version_now: int) -> tuple[float, float]:
        """Mean policy lag and age of the latest draw (waits for the device)."""
        age = (self._end - 1 - self._drawn).remainder(self.capacity).float().mean()
        return version_now - float(self._versions[self._drawn].float().mean()), float(age)

    # --- as GPU replay ---

    def set_batch_size(self, batch_size: int) -> None:
        self.batch = torch.zeros((batch_size, self._layout.width), device=self._rows.device)
        self._drawn = torch.zeros(batch_size, dtype=torch.int64, device=self._rows.device)

    def draw(self) -> Tensor:
        """Draws rows uniformly with replacement into ``batch`` [B, W]; zeros before the first row."""
        size = self._end.clamp(1, self.capacity)
        self._drawn.random_(generator=self.generator).remainder_(size)
        return torch.index_select(self._rows, 0, self._drawn, out=self.batch)


class DeviceRows:
    """Turns steps of N environments into rows of replay, over n steps as ``transitions.NStepBatch``."""

    def __init__(self, replay: DeviceReplay, n_step: int, gamma: float, num_envs: int) -> None:
        layout, device = replay.spec.layout, replay.batch.device
        self._replay, self._n, self._gamma, self._slot = replay, n_step, gamma, 0
        self._obs = torch.zeros((n_step, num_envs, layout.obs_dim), device=device)
        self._action = torch.zeros((n_step, num_envs, layout.action_dim), device=device)
        self._reward = torch.zeros((n_step, num_envs), dtype=torch.float64, device=device)
        self._length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        """[N]: steps of an environment whose transitions are not finished."""
        self._ages = torch.arange(n_step, device=device).unsqueeze(1)

    def store(self, obs: Tensor, action: Tensor, step: VectorStep, good: Tensor, ended: Tensor, version: int) -> None:
        """Adds a step; where not ``good`` [N] there was none, and unfinished transitions are dropped."""
        n, slot = self._n, self._slot
        self._obs[slot], self._action[slot], self._reward[slot] = obs, action, step.reward
        if n == 1:
            stored, sums = good, step.reward
        else:
            self._length = (self._length + 1) * good
            order = [(slot - age) % n for age in range(n)]
            returns = [self._reward[slot]]
            for age in range(1, n):
                returns.append(returns[-1] * self._gamma + self._reward[order[age]])
            stored = ((self._ages < self._length) & (ended | (self._ages == n - 1))).flatten()
            sums = torch.cat(returns).clamp_(-_MAX, _MAX).float()
            self._length = (self._length * ~ended).clamp_(max=n - 1)
            obs, action = (torch.cat([part[at] for at in order]) for part in (self._obs, self._action))
        columns = [obs, action, sums.unsqueeze(1), step.terminated.float().repeat(n).unsqueeze(1),
                   step.next_obs.repeat(n, 1)]  # fmt: skip
        if n > 1:
            columns.append((self._ages + 1).float().repeat(1, len(good)).reshape(-1, 1))
        self._replay.write(torch.cat(columns, 1), stored, version)
        self._replay.expect(len(good))
        self._slot = (slot + 1) % n

    def read_back(self) -> None:
        self._replay.synchronize()

    def forget(self) -> None:
        """Drops unfinished transitions, since all environments were reset."""
        self._length.zero_()


AnyGpuReplay = GpuReplay | DeviceReplay  # replay from which batches are drawn on the device alone


class StreamEvent:
    """A point in the work of a stream; on a CPU, where calls are synchronous, it is always reached."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    def wait(self) -> None:
        """Blocks the host until all work before this point is done."""
        if self.event is not None:
            self.event.synchronize()


class DeviceStream:
    """Work that runs in the order in which it was given: a device's current stream, or one beside it."""

    def __init__(self, device: torch.device, *, side: bool = False) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._side_stream = torch.cuda.Stream(device) if side and self._on_gpu else None  # type: ignore[no-untyped-call]

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._side_stream is None else self._side_stream

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copies, without waiting where ``source`` is pinned; it must not change until a later event is reached."""
        with contextlib.nullcontext() if self._side_stream is None else torch.cuda.stream(self._side_stream):
            to.copy_(source, non_blocking=True)

    def record_use(self, tensor: Tensor) -> None:
        """Keeps memory of the current stream, once freed, from reuse until this stream's work is done."""
        if self._side_stream is not None:
            tensor.record_stream(self._side_stream)

    def mark(self) -> StreamEvent:
        if not self._on_gpu:
            return StreamEvent()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting host yields its core
        event.record(self._stream())
        return StreamEvent(event)

    def follow(self, event: StreamEvent) -> None:
        """Work given from now on starts after this event of another stream."""
        if event.event is not None:
            self._stream().wait_event(event.event)


class Staging:
    """Two alternating host buffers: one is filled while the other may still be copied."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> None:
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._sent = [StreamEvent(), StreamEvent()]
        self._turn = 0

    def next(self) -> Tensor:
        """The other buffer, after its last copy is done."""
        self._turn = 1 - self._turn
        self._sent[self._turn].wait()
        return self._buffers[self._turn]

    def sent(self, event: StreamEvent) -> None:
        """Notes the event at which the copy of the current buffer is done."""
        self._sent[self._turn] = event


class NotRecorded(Exception):
    """The work cannot be a graph; the device is still usable."""


class CudaGraph:
    """Several updates as one launch: everything from the draw to the target networks.

    A GPU with small networks waits for its next kernel, a hundred in an update. A graph holds work of the device only:
    draws from GPU replay, noise of registered generators. Decisions by the count of updates (delayed actor, targets
    every n updates) are fixed while it is recorded, so a graph holds whole periods of these.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], object], generators: Sequence[torch.Generator]) -> None:
        """Records the device work of ``work`` without running it; it must have run before, so that its buffers exist.

        A NotRecorded if the work waits for the host, or there is no room for the graph's memory.
        """
        states, stream = [generator.get_state() for generator in generators], torch.cuda.current_stream(self._device)
        for generator in generators:
            self._graph.register_generator_state(generator)
        torch.cuda.synchronize(self._device)
        try:
            # Only waits of this thread spoil a recording: other threads may use the device in the meantime.
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


def reason_against(*, split: bool, period: int) -> str | None:
    """Why updates cannot be a graph, or None if they can."""
    if split:
        return "actor and critics are on different devices"
    if period > _LONGEST_PERIOD:
        return f"steps repeat every {period} updates, a graph holds at most {_LONGEST_PERIOD}"
    return None


class GraphedUpdates:
    """Updates with batches from GPU replay: one by one at first, then as graphs if possible."""

    def __init__(
        self,
        algorithm: OffPolicyAlgorithm,
        gpu_replay: AnyGpuReplay,
        update: Callable[[Tensor], None],
        stream: DeviceStream,
        *,
        wanted: int = 1,
        make_graph: Callable[[], CudaGraph] | None = None,
        on_failure: Callable[[str], None],
    ) -> None:
        """``update`` runs one update with rows [B, W] on ``stream``; ``wanted`` updates, rounded up, are one graph.

        Without ``make_graph`` every kernel is launched by itself; ``on_failure`` gets why none could be recorded.
        """
        self.gpu_replay = gpu_replay
        self.in_graph = -(-max(1, wanted) // algorithm.period) * algorithm.period
        self._algorithm, self._update, self._stream = algorithm, update, stream
        self._make_graph, self._on_failure = make_graph, on_failure
        self._graph: CudaGraph | None = None
        self._single_updates = 0
        self._in_flight: deque[StreamEvent] = deque()

    @property
    def updates_before_replay(self) -> int:
        """Updates before the first replay: single ones, then the launch that records; 0 without graphs."""
        if self._make_graph is None:
            return 0
        period = self._algorithm.period
        return period * -(-max(period, _MIN_SINGLE_UPDATES) // period) + self.in_graph

    def run(self, max_updates: int | None = None) -> int:
        """Starts one launch and returns its number of updates, at most ``max_updates``, before they are done."""
        if len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._in_flight.popleft().wait()
        done = self._launch(max_updates)
        self._in_flight.append(self._stream.mark())
        return done

    def _launch(self, max_updates: int | None) -> int:
        algorithm, count = self._algorithm, self.in_graph
        starts_period = algorithm.updates % algorithm.period == 0
        # Every buffer must exist before recording, so a whole period runs first, one by one.
        warm = self._single_updates >= max(algorithm.period, _MIN_SINGLE_UPDATES)
        if starts_period and warm and (max_updates is None or max_updates >= count):
            if self._graph is None and self._make_graph is not None:
                self._record(self._make_graph())
            if self._graph is not None:
                self._graph.replay()
                algorithm.updates += count
                return count
        self._update(self.gpu_replay.draw())
        self._single_updates += 1
        return 1

    def _record(self, graph: CudaGraph) -> None:
        before = self._algorithm.updates

        def several() -> None:
            for _ in range(self.in_graph):
                self._update(self.gpu_replay.draw())

        try:
            graph.record(several, [self._algorithm.generator, self.gpu_replay.generator])
            self._graph = graph
        except NotRecorded as error:
            self._make_graph = None
            self._on_failure(f"no CUDA graphs: recording failed: {error}")
        finally:
            self._algorithm.updates = before  # recorded, not done

    def set_batch_size(self, batch_size: int) -> None:
        """Draws that many rows from now on; the graph is recorded again."""
        self._graph, self._single_updates = None, 0
        self.gpu_replay.set_batch_size(batch_size)
