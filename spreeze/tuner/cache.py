"""Results of earlier tunings, and the lock that lets only one tuner measure at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spreeze.config.layers import Layer, resolve
from spreeze.errors import ConfigError, SpreezeError
from spreeze.run_directory import write_json
from spreeze.runtime.interrupts import Interrupts
from spreeze.tuner.problem import Setting

_LOCK_WAIT_S = 120.0
_MAX_BYTES = 4_000_000


def cache_dir() -> Path:
    """Where results are kept: ``$XDG_CACHE_HOME/spreeze`` or ``~/.cache/spreeze``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spreeze"


def cache_key(facts: dict[str, Any]) -> str:
    """16 hexadecimal digits that differ when anything differs that a result depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def load(key: str, schema: int, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The cached result of that key, or None; ``say`` hears of a damaged one."""
    path = _path(key)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != schema or record["key"] != key:
            raise ValueError("it is of another version or another key")
        names = ("reasons", "measured_at", "notes", "limits", "formula", "labels", "update_rates", "joint_rates")
        if missing := [name for name in names if name not in record]:
            raise ValueError(f"it has no {', '.join(missing)}")
        if set(record["reasons"]) != set(record["choice"]):
            raise ValueError("reasons and choice differ")
        resolve([layer_of(record)])  # impossible values must not stop the run
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        say(f"the cached tuning result is damaged ({text}); measuring again")
        return None
    return dict(record)


def save(key: str, record: dict[str, Any]) -> None:
    """Writes a result; where the disk does not take it, the next tuning measures again."""
    with contextlib.suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        write_json(_path(key), record)


def _path(key: str) -> Path:
    return cache_dir() / f"tune-{key}.json"


def layer_of(record: dict[str, Any]) -> Layer:
    """The choice of a record as a layer of settings."""
    return Setting(record["settings"]).layer()


def lock_path() -> Path:
    """The file whose lock all tuners of this machine share, whoever runs them."""
    return Path(tempfile.gettempdir()) / "spreeze-tune.lock"


def _lock_file() -> int | None:
    """Descriptor of the lock file; None where it cannot be had, which is no reason not to measure."""
    # Where the folder is sticky, a file of somebody else's opens only without O_CREAT.
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):
        with contextlib.suppress(OSError):
            fd = os.open(lock_path(), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            return fd
    return None


@contextlib.contextmanager
def only_tuner(say: Callable[[str], None], interrupts: Interrupts, wait_s: float | None = None) -> Iterator[None]:
    """Holds the lock of this machine's tuners: two would measure each other.

    The kernel frees it when its holder ends, however it ends.

    Raises:
        SpreezeError: another tuner holds it for too long.
        KeyboardInterrupt: the user asked to stop.
    """
    fd = _lock_file()
    if fd is None:
        yield
        return
    limit_s = _LOCK_WAIT_S if wait_s is None else wait_s
    try:
        deadline, said = time.monotonic() + limit_s, False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not said:
                    say("another tuner is measuring this machine; waiting for it")
                    said = True
                if interrupts.asked:
                    raise KeyboardInterrupt from None
                if time.monotonic() > deadline:
                    raise SpreezeError(f"another tuner still measures after {limit_s:.0f} s; try again") from None
                time.sleep(0.2)
        yield
    finally:
        os.close(fd)
