"""Two threads that share the work of one update exactly: the learner's second core.

A product's own threads wait for each other by spinning; where anything else runs on one of their
cores, each product stalls (1.3 instead of 81 updates/s were measured). Here the second thread sleeps until
it is handed a whole pass of a network, some milliseconds of work, so a busy core costs its share and
no more. Torch lets go of the interpreter's lock inside of every product.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType

import torch
from torch import Tensor

from spreeze.algorithms.nn.fused_mlp import (
    Parameters,
    Tape,
    head_weight_gradients,
    input_gradients,
    mlp_backward,
    mlp_forward,
    weight_gradients,
)

Work = Callable[[], object]


class ThreadPair:
    """Runs two calls at once; use it as a context or ``close`` it."""

    def __init__(self, threads: int = 1) -> None:
        """Args: ``threads`` of one product, in each of the two."""
        self._threads = threads
        self._handed, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="learner-2", daemon=True)
        self._thread.start()

    def both(self, here: Work, there: Work) -> None:
        """Runs ``there`` in the second thread and ``here`` in the caller's; returns when both are done.

        Raises:
            BaseException: what either raised; the caller's own first.
        """
        self._work = there
        self._handed.release()
        try:
            here()
        finally:
            self._done.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Ends the second thread."""
        if self._thread.is_alive():
            self._work = None
            self._handed.release()
            self._thread.join()

    def __enter__(self) -> ThreadPair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a setting of each thread
        with torch.inference_mode():
            while True:
                self._handed.acquire()
                # Nothing keeps the work once it is done: it holds the buffers of a batch.
                work, self._work = self._work, None
                if work is None:
                    return
                try:
                    work()
                except BaseException as error:
                    self._error = error
                del work
                self._done.release()


def thread_pair_for(threads: int) -> tuple[ThreadPair | None, int]:
    """How a number of learner threads is used: (a pair or None, threads of one product).

    Two threads are a pair of one thread each; with more, each of the pair has threads in its products.
    """
    if threads < 2:
        return None, 1
    return ThreadPair(threads // 2), threads // 2


_CHUNK_ROWS = 512
"""Rows that go through a network at once on a CPU, so that what a layer gives is in the core's cache for the next."""


class MlpPasses:
    """Passes of one network over the rows of one tape."""

    def __init__(self, parameters: Parameters, tape: Tape, pair: ThreadPair | None = None) -> None:
        self._parameters, self._tape, self._pair = parameters, tape, pair
        rows, lanes = tape.out.shape[2], 1 if pair is None else 2
        step = _CHUNK_ROWS if tape.out.device.type == "cpu" else rows

        def cut(begin: int, end: int) -> list[tuple[slice, Tape]]:
            ends = (slice(start, min(start + step, end)) for start in range(begin, end, step))
            return [(chunk, tape.part(chunk.start, chunk.stop)) for chunk in ends]

        self._lanes = [cut(*ends) for ends in pairwise(rows * lane // lanes for lane in range(lanes + 1))]
        self._down = cut(0, rows)

    def forward(self, x: Tensor) -> Tensor:
        """``mlp_forward`` of x [1, M, I]."""
        if self._pair is None:
            self._up(self._lanes[0], x)
        else:
            self._pair.both(lambda: self._up(self._lanes[0], x), lambda: self._up(self._lanes[1], x))
        return self._tape.out

    def _up(self, chunks: list[tuple[slice, Tape]], x: Tensor) -> None:
        for rows, tape in chunks:
            mlp_forward(self._parameters, x[:, rows], tape)

    def backward(self, x_t: Tensor, gradient: Parameters) -> None:
        """``mlp_backward`` of the tape's ``grad_out`` with weight gradients; x_t is [1, I, M]."""
        for rows, tape in self._down:
            if self._pair is None or len(tape.hidden) < 2:
                mlp_backward(self._parameters, tape, x_t[:, :, rows], gradient, add=rows.start > 0)
            else:
                self._by_both(self._pair, tape, x_t[:, :, rows], gradient, add=rows.start > 0)

    def _by_both(self, pair: ThreadPair, tape: Tape, x_t: Tensor, gradient: Parameters, *, add: bool) -> None:
        head_weight_gradients(tape, gradient, add=add)
        input_gradients(self._parameters, tape, len(tape.hidden))
        for index in range(len(tape.hidden) - 1, 0, -1):

            def way_down(index: int = index) -> None:
                input_gradients(self._parameters, tape, index)
                if index == 1:
                    weight_gradients(tape, x_t, gradient, 0, add=add)

            pair.both(lambda index=index: weight_gradients(tape, x_t, gradient, index, add=add),  # type: ignore[misc]
                      way_down)
