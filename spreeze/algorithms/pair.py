"""Two threads that share the work of one update exactly: the learner's second core.

A product's own threads wait for each other by spinning; where anything else runs on one of their
cores, each product stalls (1.3 instead of 81 updates/s were measured). Here the second thread sleeps until
it is handed a whole pass of a network, some milliseconds of work, so a busy core costs its share and
no more. Torch lets go of the interpreter's lock inside of every product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch

Work = Callable[[], object]


class Pair:
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

    def __enter__(self) -> Pair:
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


def pair_for(threads: int) -> tuple[Pair | None, int]:
    """How a number of learner threads is used: (a pair or None, threads of one product).

    Two threads are a pair of one thread each; with more, each of the pair has threads in its products.
    """
    if threads < 2:
        return None, 1
    return Pair(threads // 2), threads // 2
