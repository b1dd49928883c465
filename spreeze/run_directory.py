"""The run directory, which holds everything that is known about a run.

A run is alive while its supervisor holds the flock on ``run.lock``; on a file system without locks, while the process
that ``run.json`` names lives and its state is one of a live run. Names cannot leave the runs directory; directories are
private (0700).

Its files are listed in ``assets/docs/architecture.md``; none is a pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import math
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from spreeze import __version__
from spreeze.config.schema import check_name, is_valid_name
from spreeze.errors import ResourceError, RunError, did_you_mean, refuse_newer
from spreeze.files import read_json, write_json
from spreeze.formatting import clean
from spreeze.process_identity import pid_exists, same_process

FORMAT = 1
"""Format number of a run directory, in ``run.json``: older versions of Spreeze cannot use one with a higher number."""
LAUNCHES = ".launches"  # folder beside the runs: records and logs of starts from a page, and the server's tokens
SUBDIRECTORIES = ("logs", "weights", "checkpoints", "videos", "errors", "control")
_PACKAGES = ("numpy", "torch", "gymnasium", "pybullet", "pybullet-envs-gymnasium", "safetensors")
REQUESTS = ("stop", "pause", "evaluate", "checkpoint", "leave-free", "timeline", "env-args")
"""Names of files in ``control`` in which a page or a command sends a request to a live run."""
TIMELINE = "timeline.json"  # trace of worker phases (``runtime.supervisor.Timeline``)
LIVE_STATES = ("starting", "tuning", "running", "paused", "stopping")
MIN_FREE_DISK_BYTES = 200_000_000
_LOCK_S = 0.2
_LOCK_TAKEN = (errno.EAGAIN, errno.EACCES)
"""Errors of ``flock`` where another process holds the lock; anything else means that the file system has no locks."""
_FRESH_S = 60.0  # A run on another host without locks is alive while its heartbeat is no older
_MAX_BYTES = 1_000_000


def group_folder(run: Path, group: int) -> Path:
    """Directory of a group's weights, checkpoints and ``eval.csv``; that of group 0 is the run directory itself."""
    return run / "groups" / str(group) if group else run


def new_name(env_id: str, algo: str, seed: int) -> str:
    """``20261121-101502_Walker2DBulletEnv-v0_sac_s1``."""
    env = "".join(c if c.isalnum() or c in "._-" else "-" for c in env_id)[:60]
    return f"{time.strftime('%Y%m%d-%H%M%S')}_{env}_{algo}_s{seed}"


def names_from(name: str) -> Iterator[str]:
    """A name, then the name with the endings ``-2``, ``-3``, ..."""
    return itertools.chain((name,), (f"{name}-{number}" for number in itertools.count(2)))


def launch_log(name: str, runs_dir: Path) -> Path:
    """The file for the terminal output of a run that a page or a sweep has started."""
    return runs_dir / LAUNCHES / f"{name}.log"


def free_names(runs_dir: Path, name: str) -> Iterator[str]:
    """Names of ``names_from`` that no directory and no launch from a page uses."""
    for free in names_from(name):
        if not (runs_dir / free).exists() and not (runs_dir / LAUNCHES / f"{free}.json").exists():
            yield free


def new_nonce() -> str:
    """A random text that identifies all processes of one session of a run."""
    return secrets.token_hex(8)


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A run directory of this process that is removed afterwards; also removes those that killed processes left."""
    remove_leftovers(prefix)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", ignore_cleanup_errors=True) as path:
        for sub in SUBDIRECTORIES:
            (Path(path) / sub).mkdir()
        yield Path(path)


def remove_leftovers(prefix: str) -> None:
    """Removes the scratch folders of processes that were killed: their names start with a prefix and a process id."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not pid_exists(int(pid)) and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


class RunDir:
    def __init__(self, path: Path, lock_fd: int, nonce: str | None = None, *, guarded: bool = True) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self.guarded = guarded
        """True if a lock keeps others from continuing this run; False on a file system without locks."""
        self.nonce = nonce or new_nonce()
        self._record: dict[str, Any] = {}  # last content of run.json, in case the file is damaged

    @classmethod
    def create(cls, runs_dir: Path, name: str, nonce: str | None = None, *, numbered: bool = False) -> RunDir:
        """Makes a new run directory; the first process whose mkdir succeeds owns the name.

        With ``numbered``, a name that is taken gets the first free ending of ``-2``, ``-3``, ...; else a RunError.
        A ResourceError if the disk is full or not writable.
        """
        check_name(name)
        make_runs_dir(runs_dir)
        try:
            free = shutil.disk_usage(runs_dir).free
            if free < MIN_FREE_DISK_BYTES:
                raise ResourceError(
                    f"{runs_dir}: a run needs {MIN_FREE_DISK_BYTES / 1e6:.0f} MB of disk, "
                    f"{free / 1e6:.0f} MB are free; free some disk space or choose another --runs-dir"
                )
            for free_name in free_names(runs_dir, name) if numbered else ():
                path = runs_dir / free_name
                with contextlib.suppress(FileExistsError):  # another process may be faster
                    path.mkdir(mode=0o700)
                    break
            else:
                path = runs_dir / name
                path.mkdir(mode=0o700)
            for sub in SUBDIRECTORIES:
                (path / sub).mkdir(mode=0o700)
        except FileExistsError:
            remedy = ", but it is not a run (no run.json); choose another --name, or delete it"
            if (runs_dir / name / "run.json").is_file():
                remedy = f"; choose another --name, or --resume {name}"
            raise RunError(f"{runs_dir / name} exists{remedy}") from None
        except OSError as error:
            raise ResourceError(f"cannot write below {runs_dir}: {error}") from None
        fd, guarded = _lock(path)
        return cls(path, fd, nonce, guarded=guarded)

    @classmethod
    def open(cls, path: Path, nonce: str | None = None) -> RunDir:
        """Opens an existing run directory to continue it; a ResourceError if it is not writable.

        A RunError if it is no run, its supervisor is alive, a link in it leads outside, or a newer version wrote it.
        """
        if not (path / "run.json").is_file():
            raise RunError(f"{path} is not a run directory (no run.json)")
        check_format(path)
        refuse_links(path)
        try:
            for sub in SUBDIRECTORIES:
                (path / sub).mkdir(mode=0o700, exist_ok=True)
            fd, guarded = _lock(path)
        except OSError as error:
            raise ResourceError(f"{path} cannot be written: {error}") from None
        run = cls(path, fd, nonce, guarded=guarded)
        try:
            run._own_files()
        except OSError as error:
            run.close()
            raise ResourceError(
                f"{path} cannot be written: {error}; it has hard-linked files, but a run needs its own copies"
            ) from None
        for name in REQUESTS:
            run.withdraw(name)  # meant for the earlier session
        return run

    def _own_files(self) -> None:
        """Makes a copy of each file that has a second name elsewhere, as in a backup of hard links.

        Otherwise the other file would change with it. Weights and checkpoints stay shared: they are replaced or
        deleted, never changed in place.
        """
        left = [self.path]
        while left:
            with os.scandir(left.pop()) as entries:
                for entry in list(entries):
                    if entry.is_dir(follow_symlinks=False):
                        left += [Path(entry.path)] if entry.name not in ("weights", "checkpoints") else []
                    elif entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_nlink > 1:
                        temporary = f"{entry.path}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
                        try:
                            shutil.copy2(entry.path, temporary, follow_symlinks=False)
                            if entry.name == "run.lock":
                                self._lock_replacement(temporary)
                            os.replace(temporary, entry.path)
                        except OSError:
                            with contextlib.suppress(OSError):
                                os.unlink(temporary)
                            raise

    def _lock_replacement(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.dup2(fd, self._lock_fd, inheritable=False)
        os.close(fd)

    def requested(self, name: str) -> bool:
        """True if a request is pending in ``control``."""
        return (self.path / "control" / name).exists()

    def take_request(self, name: str) -> str | None:
        """Removes a request and returns its text; None if there is none."""
        taken = self.path / "control" / f".{name}.taken"
        try:
            os.rename(self.path / "control" / name, taken)  # a request written meanwhile is taken next time
            with open(os.open(taken, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                return file.read(1000).decode(errors="replace")
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                taken.unlink()

    def withdraw(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / "control" / name).unlink()

    def write_state(self, *, durable: bool = False, **fields: Any) -> None:
        """Merges fields into ``run.json`` atomically, on the disk if ``durable``; disk errors are ignored."""
        with contextlib.suppress(OSError):
            record = {**self._record, "format": FORMAT, **read_run(self.path), **fields, "heartbeat": time.time()}
            self._record = record
            write_json(self.path / "run.json", record, durable=durable)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def refuse_links(path: Path) -> None:
    """Rejects a directory in which writing could change something outside of it.

    A run directory may come from anywhere, such as an archive. All of it is checked, not only the names that a run
    usually writes: opening a pipe would block forever, and some names, such as those of clips, are chosen at run time.
    A RunError if the directory or anything in it is a symbolic link or not a regular file.
    """
    if path.is_symlink():
        target = _shown(path.resolve())
        raise RunError(f"{_shown(path)} is a symbolic link; use its target: {target}")
    left = [path]
    while left:
        folder = left.pop()
        try:
            with os.scandir(folder) as entries:
                kinds = [(entry.path, _refused_kind(entry), entry.is_dir(follow_symlinks=False)) for entry in entries]
        except FileNotFoundError:
            continue  # a live run replaces its files
        except OSError as error:
            raise RunError(f"{_shown(path)}: {_shown(folder)} cannot be read: {error.strerror}") from None
        for entry_path, reason, is_folder in kinds:
            if reason is not None:
                inside = _shown(Path(entry_path).relative_to(path))
                raise RunError(
                    f"{_shown(path)}: {inside} is {reason}, but runs only write to regular files of their own; "
                    f"replace it with a copy, or delete it"
                )
            left += [Path(entry_path)] if is_folder else []


def _refused_kind(entry: os.DirEntry[str]) -> str | None:
    """Kind of a directory entry, if writing to it could change something outside of the directory; else None."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link"
    # A hard-linked file is allowed: ``RunDir.open`` replaces it by a copy before anything writes to it.
    return None if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else "neither a file nor a directory"


def _shown(path: Path) -> str:
    return clean(path, 300)


def requested_s(path: Path, name: str) -> float | None:
    """Seconds since a pending request without a text was sent, immune to clock changes; None if there is none.

    A file that ``send_request`` did not write has its age by the clock.
    """
    file = path / "control" / name
    try:
        age_s = max(0.0, time.time() - file.stat().st_mtime)
        with open(file, encoding="ascii", errors="replace") as content:
            text = content.read(100)
    except OSError:
        return None
    with contextlib.suppress(ValueError):
        since_s = time.monotonic() - float(text)
        return age_s if since_s < 0.0 else since_s
    return age_s


def send_request(path: Path, name: str, text: str = "") -> None:
    """Sends a request to a run: a file in its ``control`` directory. No link is followed or written through.

    Without a text, the file holds the monotonic time [s]. A RunError if it cannot be written.
    """
    folder = None
    try:
        folder = os.open(path / "control", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        written = f".{name}.{secrets.token_hex(4)}"
        fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with open(fd, "wb") as file:
            file.write((text or f"{time.monotonic()!r}\n").encode())
        os.rename(written, name, src_dir_fd=folder, dst_dir_fd=folder)  # atomic: the run finds it complete
    except OSError as error:
        raise RunError(f"{_shown(path)}: control/{name} cannot be written: {error.strerror}") from None
    finally:
        if folder is not None:
            os.close(folder)


def take_lock(fd: int, operation: int) -> bool | None:
    """Takes a ``flock``; False if another process holds it, None where the file system has no locks."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        return False if error.errno in _LOCK_TAKEN else None
    return True


def _lock(path: Path) -> tuple[int, bool]:
    """The descriptor of the run's lock, and True if it guards anything; retries, as ``is_alive`` holds it briefly."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        fd = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        held = take_lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if held or (held is None and not _seems_alive(path)):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), os.stat(path / "run.lock")):  # else it was replaced in the meantime
                    return fd, held is not None
        elif held is None or time.monotonic() >= deadline:
            linked = os.fstat(fd).st_nlink > 1
            os.close(fd)
            or_copy = ", or another run with the same hard-linked files" if linked else ""
            raise RunError(
                f"{path.name} is running (process {read_run(path).get('pid')}){or_copy}; stop it first: "
                f"spreeze runs stop {path.name}"
            )
        os.close(fd)
        time.sleep(0.01)


def is_alive(path: Path) -> bool:
    """True if a supervisor holds the run's lock, or seems to live where there are no locks."""
    try:
        fd = os.open(path / "run.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        free = take_lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(fd)
    return _seems_alive(path) if free is None else not free


def _seems_alive(path: Path) -> bool:
    """True if a run that no lock guards seems alive by its ``run.json``."""
    run = read_run(path)
    if run.get("state") not in LIVE_STATES:
        return False
    if run.get("host") in (None, socket.gethostname()):
        return same_process(run)
    heartbeat = run.get("heartbeat")
    return isinstance(heartbeat, int | float) and time.time() - heartbeat < _FRESH_S


def read_run(path: Path) -> dict[str, Any]:
    """``run.json`` without fields of impossible values; empty when it is missing or damaged."""
    stored = read_json(path / "run.json")
    fields = {name: checked(name, value) for name, value in stored.items()}
    return {name: value for name, value in fields.items() if value is not None or stored[name] is None}


def best_record(path: Path) -> dict[str, Any]:
    """The record of the policy that a run keeps as its best (``workers.best_policy``); empty where there is none."""
    return read_json(path / "checkpoints" / "best.json")


def kept_policy(path: Path) -> str:
    """The policy of ``best_record`` in words: update, return, and the episodes it is the mean of; empty without one."""
    best = best_record(path)
    value, played, updates = finite_number(best.get("return")), best.get("played"), whole_number(best.get("updates"))
    if value is None or updates is None:
        return ""
    return f"update {updates:,}, return {value:.1f} over {played} episodes"


def check_format(path: Path) -> None:
    """Raises a RunError for the directory of a run that a newer version of Spreeze has written."""
    refuse_newer(read_run(path).get("format"), FORMAT, path / "run.json", RunError)


def checked(name: str, value: object) -> Any:
    """The value of a field of ``run.json``; None if the field cannot have that value."""
    return _FIELDS[name](value) if name in _FIELDS else value


_MAX_COUNTED, _MAX_S, _MAX_VALUE = 2**53, 1e11, 1e100


def finite_number(value: object, maximum: float = _MAX_VALUE, minimum: float = -math.inf) -> float | None:
    """The value if it is a finite number in the range; None for anything else, booleans included."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if max(-maximum, minimum) <= value <= maximum else None


def gamma_of(run: Mapping[str, Any], config: Mapping[str, Any]) -> float | None:
    """The discount of a run's algorithm; None if it is unknown."""
    return finite_number(config.get(str(run.get("algo")), {}).get("gamma"), 1.0, 0.0)


def whole_number(value: object) -> int | None:
    """A count that a float can hold; None for all else."""
    count = finite_number(value, _MAX_COUNTED, 0.0)
    return None if count is None else int(count)


def _seconds(value: object) -> float | None:
    return finite_number(value, _MAX_S, 0.0)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _numbers(value: object) -> list[float] | None:
    return [entry for entry in value if _seconds(entry) is not None] if isinstance(value, list) else None


_FIELDS: dict[str, Callable[[object], Any]] = {
    **dict.fromkeys(
        ("format", "env_steps", "updates", "episodes", "sessions", "checkpoint_left_bytes", "seed", "pid"), whole_number
    ),
    **dict.fromkeys(("wall_s", "heartbeat", "tuning_began", "started_s", "eta_s"), _seconds),
    **dict.fromkeys(("eval_best", "eval_final"), finite_number),
    **dict.fromkeys(
        ("state", "env_id", "algo", "mode", "mode_before", "started", "nonce", "machine", "exit_reason"), _text
    ),
    **dict.fromkeys(("session_starts", "samples_per_insert_band"), _numbers),
    **dict.fromkeys(("leave_free", "progress"), lambda value: finite_number(value, 1.0, 0.0)),
    **dict.fromkeys(("data_flow", "versions", "sinks"), lambda value: value if isinstance(value, dict) else None),
    "command": lambda value: value if isinstance(value, list) else None,
}
"""Fields of ``run.json``, each with a function that returns a usable value unchanged, and None for any other."""


def session_starts(run: Mapping[str, Any]) -> list[float]:
    """Wall time at which each session of a run started, from its ``run.json``."""
    return [float(t) for t in run.get("session_starts") or ()]


def started_s(run: Mapping[str, Any]) -> float | None:
    """When a run started [s since 1970], from its ``run.json``; None if it is not recorded."""
    start_s: float | None = run.get("started_s")
    if start_s is None:
        with contextlib.suppress(ValueError, OverflowError, OSError):
            start_s = datetime.fromisoformat(run.get("started") or "").timestamp()
    return start_s


@dataclass(frozen=True, kw_only=True)
class About:
    """Title, note and tags that a user gave a run (``about.json``); training does not use them."""

    title: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()


def read_about(path: Path) -> About:
    """Title, note and tags of a run; empty where there are none, or the file is damaged."""
    return _about(read_json(path / "about.json"))


def describe(path: Path, **changes: Any) -> About:
    """Changes ``title``, ``note`` or ``tags`` of a run; a RunError if the file is a link or cannot be written."""
    about = _about({**vars(read_about(path)), **changes})
    if (path / "about.json").is_symlink():
        raise RunError(f"{_shown(path)}: about.json is a symbolic link; delete it first")
    try:
        write_json(path / "about.json", dataclasses.asdict(about))
    except OSError as error:
        raise RunError(f"{_shown(path)}: about.json cannot be written: {error.strerror}") from None
    return about


def _about(data: Mapping[str, Any]) -> About:
    tags = data.get("tags")
    cleaned = (clean(tag, 40).strip() for tag in tags if isinstance(tag, str)) if isinstance(tags, list | tuple) else ()
    note = data.get("note")
    return About(
        title=clean(data.get("title") or "", 100).strip(),
        note="\n".join(clean(line, 500) for line in note.splitlines()[:100]) if isinstance(note, str) else "",
        tags=tuple(dict.fromkeys(tag for tag in cleaned if tag))[:20],
    )


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """``config.toml`` of a run as part -> field -> value; empty when missing or damaged."""
    try:
        with open(path / "config.toml", "rb") as file:
            values = tomllib.loads(file.read(_MAX_BYTES).decode("utf-8", "replace"))
    except (OSError, tomllib.TOMLDecodeError, RecursionError):
        return {}
    return {part: fields for part, fields in values.items() if isinstance(fields, dict)}


def state_of(path: Path) -> str:
    """The run's state; "crashed" if it claims to be running but no process holds its lock."""
    state = str(read_run(path).get("state") or "damaged")
    if state in LIVE_STATES and not is_alive(path):
        return "crashed"
    return state


def list_runs(runs_dir: Path) -> list[Path]:
    """Returns all run directories with valid names, oldest first."""
    runs = [path for path in _run_directories(runs_dir) if is_valid_name(path.name)]
    return sorted(runs, key=lambda path: (_age_key(path)[1], path.name))


def _age_key(path: Path) -> tuple[bool, float]:
    """Sort key: True and when the run started [s since 1970]; else False and when ``run.json`` was last written."""
    known = started_s(read_run(path))
    if known is not None:
        return True, known
    try:
        return False, (path / "run.json").stat().st_mtime
    except OSError:
        return False, 0.0


def misnamed_runs(runs_dir: Path) -> list[Path]:
    """Run directories that no command accepts because of their names, such as a file manager's "walk (copy)"."""
    return sorted(path for path in _run_directories(runs_dir) if not is_valid_name(path.name))


def _run_directories(runs_dir: Path) -> list[Path]:
    if not runs_dir.is_dir():
        return []
    return [path for path in runs_dir.iterdir() if (path / "run.json").is_file() and not path.is_symlink()]


def find_run(name_or_path: str, runs_dir: Path, others: Iterable[str] = ()) -> Path:
    """A run by name, by path, or "latest"; a RunError if there is none, or a newer version wrote it.

    ``others`` are names that may have been meant.
    """
    runs = list_runs(runs_dir)
    if name_or_path == "latest":
        if not runs:
            raise RunError(f"no run in {runs_dir}; start one with: python -m spreeze.train --auto")
        path = _latest(runs)
    else:
        path = Path(name_or_path) if "/" in name_or_path else runs_dir / check_name(name_or_path)
    if not (path / "run.json").is_file():
        names = [*(run.name for run in runs), *others]
        raise RunError(f"no run '{name_or_path}' in {runs_dir}{did_you_mean(name_or_path, names)}")
    check_format(path)
    return path


def _latest(runs: list[Path]) -> Path:
    """The last of ``runs``; a RunError if a damaged one may be newer."""
    newest = next((path for path in reversed(runs) if _age_key(path)[0]), None)
    if newest == runs[-1] or len(runs) == 1:
        return runs[-1]
    alternative = "" if newest is None else f", or {newest.name}, the newest of the others"
    raise RunError(
        f"latest: {runs[-1].name} may be the newest run, but its run.json is damaged; name the run "
        f"explicitly: {runs[-1].name}{alternative}"
    )


def find_live_run(name_or_path: str, runs_dir: Path) -> Path:
    """Like ``find_run``, with a RunError if the run is not alive."""
    path = find_run(name_or_path, runs_dir)
    if not is_alive(path):
        raise RunError(f"{path.name} is not running (state: {state_of(path)})")
    return path


def steer(name_or_path: str, runs_dir: Path, request: str, text: str = "") -> Path:
    """Sends one of ``REQUESTS`` to a live run, or lets it ``continue``; returns its directory, or raises a RunError."""
    path = find_live_run(name_or_path, runs_dir)
    if request == "continue":
        (path / "control" / "pause").unlink(missing_ok=True)
    else:
        send_request(path, request, text)
    return path


def kill_supervisor(path: Path) -> None:
    """Kills the supervisor of a run, and so its workers; a RunError if its pid belongs to another process by now."""
    run = read_run(path)
    if not same_process(run):
        raise RunError(f"{path.name}: process {run.get('pid')} is no longer its supervisor; nothing was killed")
    with contextlib.suppress(ProcessLookupError):
        os.kill(run["pid"], signal.SIGKILL)


def make_runs_dir(path: Path) -> None:
    """Makes the directory of the runs, where it does not exist; a ResourceError if it is a file or not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot write below {path}: {error}") from None


def versions() -> dict[str, str | None]:
    """Versions of everything that can change a result; None if not installed."""
    known: dict[str, str | None] = {"spreeze": __version__, "python": sys.version.split()[0]}
    for name in _PACKAGES:
        known[name] = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known
