"""Threads that change places as often as the interpreter lets them."""

import sys
import threading

from harness import PATIENCE_S


def race(work, count=4):
    """Runs ``work`` in so many threads at once, and waits for their end."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval_s)
