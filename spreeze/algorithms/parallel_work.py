"""Runs two parts of an update in parallel: in two CPU threads, or in two branches of a CUDA graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from spreeze.inference.lazy_torch import torch

Work = Callable[[], object]


class TwoThreads:
    """Two threads that split an update over two cores, until ``close``.

    Threads of one matmul spin while they wait for each other: each stalls if something else runs on one of their cores.
    Here the second thread sleeps until it gets a whole pass of a network, some milliseconds of work. Torch releases the
    GIL in every matmul. ``threads`` is the number per matmul in each of the two.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._work_ready, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="learner-2", daemon=True)
        self._thread.start()

    def both(self, main_work: Work, side_work: Work) -> None:
        """Runs ``side_work`` in the second thread, ``main_work`` in the caller's; raises errors, the latter's first."""
        self._work = side_work
        self._work_ready.release()
        try:
            main_work()
        finally:
            self._done.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        if self._thread.is_alive():
            self._work = None
            self._work_ready.release()
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a setting of each thread
        with torch.inference_mode():
            while True:
                self._work_ready.acquire()
                # Finished work is not kept, since it holds the buffers of a batch.
                work, self._work = self._work, None
                if work is None:
                    return
                try:
                    work()
                except BaseException as error:
                    self._error = error
                del work
                self._done.release()


class TwoStreams:
    """Two branches of a CUDA graph that split an update; without a recording they run in sequence.

    Small batches take a hundred kernels of a few microseconds on a few multiprocessors each, so independent ones run in
    parallel. Calls of ``both`` may be nested.
    """

    def __init__(self) -> None:
        self._streams: list[Any] = []
        self._taken = 0

    def both(self, main_work: Work, side_work: Work) -> None:
        """Records ``side_work`` as a branch parallel to ``main_work``; later kernels wait for both."""
        cuda: Any = torch.cuda
        if torch.compiler.is_compiling() or not (cuda.is_initialized() and cuda.is_current_stream_capturing()):
            side_work()
            main_work()
            return
        main = cuda.current_stream()
        if self._taken == len(self._streams):
            self._streams.append(cuda.Stream(main.device))
        # A stream is used only once until the outermost call ends: further work would wait for the earlier one.
        side, outermost = self._streams[self._taken], self._taken == 0
        self._taken += 1
        try:
            side.wait_stream(main)
            with cuda.stream(side):
                side_work()
            main_work()
        except BaseException:
            # A recording with an unjoined branch cannot be ended, nor its memory be freed.
            with contextlib.suppress(RuntimeError):
                main.wait_stream(side)
            raise
        else:
            main.wait_stream(side)
        finally:
            if outermost:
                self._taken = 0


Parallel = TwoThreads | TwoStreams
