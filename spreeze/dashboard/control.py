"""Starts, stops, resumes and deletes runs, by the same commands that a user would type.

A started run outlives this process. Its state comes from the run directory and its lock; before it has a
directory, from ``.launches/NAME.json`` beside the runs.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spreeze.config import python_path
from spreeze.config.layers import Layer, Values, resolve, toml_value
from spreeze.config.modes import DECLARED
from spreeze.config.profiles import applicable, read_profile, task_profile
from spreeze.config.schema import FLAG_OF, Config, RunConfig, field_of, kind_of
from spreeze.dashboard.run_data import SAMPLE, live_run, one_at_a_time, tail_lines
from spreeze.envs.families import imports_only
from spreeze.errors import ConfigError, ResourceError, RunError, SpreezeError
from spreeze.files import read_json, write_json
from spreeze.formatting import clean
from spreeze.machine.hardware import read_machine
from spreeze.metrics import html_report
from spreeze.metrics.store import MetricsReader
from spreeze.process_identity import process_identity, same_process
from spreeze.run_directory import (
    LAUNCHES,
    LIVE_STATES,
    find_live_run,
    free_names,
    is_alive,
    kill_supervisor,
    launch_log,
    names_from,
    new_name,
    read_config,
    read_run,
    refuse_links,
    requested_s,
    state_of,
    steer,
)
from spreeze.types import PolicyFormat

_MODULE = re.compile(r"^[A-Za-z_]\w{0,60}(\.[A-Za-z_]\w{0,60}){0,5}$", re.ASCII)
_COUNTS = ("stop.env_steps", "stop.updates")
_COMMAND_S = 120.0
_MAX_ERROR_TEXT = 300
FORCE_AFTER_S = 30.0  # time after a stop request from which a page offers to kill the run
COMMAND = (sys.executable, "-m", "spreeze.train")  # starts a run; tests replace it
SWEEP_COMMAND = (sys.executable, "-m", "spreeze", "sweep")

IMPORT = "SPREEZE_DASHBOARD_IMPORT"
"""Environment variable that ``app.py`` sets from its ``--import``: a module whose modes the page offers. A name in a
run directory is never imported."""


def is_module(name: str) -> bool:
    """True if it is a module's name as ``--import`` takes it here, such as ``my_robot``."""
    return _MODULE.match(name) is not None


def imported() -> str | None:
    """The module that was given with ``--import``."""
    return os.environ.get(IMPORT) or None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run to start; settings that it leaves out come from profile, tuner or default."""

    env_id: str
    mode: str = DECLARED[0].name
    algo: str = RunConfig.algo
    compares: bool = False  # the command compares the algorithms that fit, and continues the best one
    seed: int = RunConfig.seed
    auto: bool = True
    fresh: bool = False  # let the tuner measure again where it has a result of this machine
    import_module: str | None = None  # a module that registers the task; it is never imported in this process
    args: tuple[str, ...] = ()  # ``KEY=VALUE`` texts for the task's constructor
    profile: str | None = None  # name of a profile in place of the task's own
    settings: Mapping[str, Any] = field(default_factory=dict)  # ``section.field`` -> its value

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` if the command line would reject it."""
        # With a colon Gymnasium would import a module, which only the command line may do.
        if not imports_only(self.env_id, self.import_module or imported()):
            raise ConfigError(
                f"environment {clean(self.env_id, 80)!r}: expected a Gymnasium id such as Pendulum-v1; put its "
                f"module in the field for modules"
            )
        if self.import_module is not None and not is_module(self.import_module):
            raise ConfigError(f"module {clean(self.import_module, 80)!r}: expected a name such as my_robot")
        for text in self.args:
            if not text.partition("=")[0].isidentifier() or "=" not in text:
                raise ConfigError(f"argument {clean(text, 80)!r}: expected KEY=VALUE, such as push=2.0")
        counted = [name for name in _COUNTS if self.settings.get(name) is not None]
        if self.compares and (self.profile or counted or not self.auto):
            raise ConfigError(
                f"algorithms are compared by time, with Autotune: choose an algorithm, or leave out "
                f"{' and '.join(counted) or 'the profile'}"
            )
        data_flow = self.config.data_flow
        if self.auto and not data_flow.tunable:
            raise ConfigError(f"mode {self.mode} has nothing to tune for {self.algo}: switch off Autotune")

    @cached_property
    def config(self) -> Config:
        """Settings chosen so far."""
        values: Values = {
            "run": {"mode": self.mode, "algo": self.algo, "seed": self.seed},
            "env": {"id": self.env_id, "import_module": self.import_module or imported(), "args": self.args},
        }
        for key, value in self.settings.items():
            part, name = key.split(".")
            values.setdefault(part, {})[name] = value
        profile = read_profile(self.profile, self.env_id) if self.profile else task_profile(self.env_id)
        layers = [] if profile is None else applicable(profile, read_machine().identity())[0].for_algorithm(self.algo)
        return resolve([*layers, Layer("the page", values)], imported()).config


@dataclass(frozen=True)
class Launch:
    """A process that was started from a page and has not yet written its run's state."""

    name: str
    pid: int
    log: Path


@dataclass(frozen=True)
class Activity:
    """The live run of a runs directory, and the progress of its start or stop."""

    name: str | None = None
    phase: str = ""
    lines: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Changes when a page needs different buttons."""
        return "" if self.name is None else f"{self.name}:{self.phase}"


def activity(folder: Path, shown: str | None = None) -> Activity:
    """Activity of the run that a page shows, else of the newest live one; read from disk, the same for all tabs."""
    name = live_run(folder, shown)
    if name is None:
        launch = launching(folder)
        if launch is None:
            return Activity()
        return Activity(launch.name, "starting", tuple(tail_lines(launch.log, 8)))
    path = folder / name
    waited_s = requested_s(path, "stop")
    if waited_s is None:
        state = state_of(path)
        if state in ("starting", "tuning"):
            return Activity(name, "starting", tuple(tail_lines(launch_log(name, folder), 8)))
        return Activity(name, state if state in ("stopping", "paused") else "running")
    lines = [f"\u2713 stop requested {waited_s:.0f} s ago"]
    try:
        events = MetricsReader(path / "metrics.db").events(20)
    except RunError as error:
        lines.append(str(error))
    else:
        since_t = (read_run(path).get("wall_s") or 0.0) - waited_s - 3.0
        lines += [f"\u2713 {event.text}" for event in events if event.t >= since_t][-6:]
    lines.append("\u2026 writing the last checkpoint and evaluating, then the processes end")
    return Activity(name, "late" if waited_s > FORCE_AFTER_S else "stopping", tuple(lines))


def task_flags(request: Request) -> list[str]:
    """Flags that ``train`` and ``sweep`` share."""
    module = request.import_module or imported()
    flags = ["--env", request.env_id, *(["--import", module] if module else [])]
    if request.compares:
        return flags
    flags += ["--profile", request.profile] if request.profile else []
    flags += ["--mode", request.mode] if request.profile or request.mode != DECLARED[0].name else []
    return [*flags, "--algo", request.algo]


def arguments(request: Request) -> list[str]:
    flags = [*task_flags(request), "--seed", str(request.seed)]
    flags += [part for text in request.args for part in ("--env-arg", text)]
    flags += ["--auto", *(["--fresh"] if request.fresh else [])] if request.auto else []
    for key, value in request.settings.items():
        flag, text = FLAG_OF.get(key), value if isinstance(value, str) else toml_value(value)
        if flag is not None and isinstance(value, tuple):
            flags.append(f"{flag}={','.join(value)}")
        elif flag is None:
            flags.append(f"--set={key}={text}")
        elif kind_of(key) is not bool:
            flags.append(f"{flag}={text}")
        else:  # the flag alone sets what is not the default, which a profile may set, too
            flags.append(flag if value != field_of(key).default else f"--set={key}={text}")
    return flags


def command_line(*parts: str) -> str:
    """``python -m PARTS``, to be shown and copied."""
    return shlex.join(("python", "-m", *parts))


def runs_dir_flags(folder: Path) -> tuple[str, ...]:
    """The flag for the runs directory; empty for the default one."""
    shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    return () if shown == "runs" else ("--runs-dir", shown)


def train_command(request: Request, folder: Path) -> str:
    return command_line("spreeze.train", *arguments(request), *runs_dir_flags(folder))


def runs_command(folder: Path, *arguments: str) -> str:
    return command_line("spreeze", "runs", *runs_dir_flags(folder), *arguments)


def sweep_command(flags: Sequence[str], folder: Path) -> str:
    return command_line("spreeze", "sweep", *flags, *runs_dir_flags(folder))


def start(request: Request, folder: Path) -> str:
    """Starts a run, returns its name at once; a RunError if one is alive, a ResourceError if none can be started."""
    with one_at_a_time(folder):
        _check_none_alive(folder)
        algo = "compare" if request.compares else request.algo
        name = next(free_names(folder, new_name(request.env_id, algo, request.seed)))
        _launch([*arguments(request), "--runs-dir", str(folder), "--name", name], folder, name)
        return name


def start_sweep(flags: Sequence[str], folder: Path) -> str:
    """Starts ``spreeze sweep`` with these flags, and returns its name at once; errors as ``start``."""
    with one_at_a_time(folder):
        _check_none_alive(folder)
        names = names_from(time.strftime("sweep-%Y%m%d-%H%M%S"))
        name = next(name for name in names if not launch_log(name, folder).exists())
        _launch([*flags, "--runs-dir", str(folder), "--name", name], folder, name, SWEEP_COMMAND)
        return name


def resume(path: Path, folder: Path, trusted: str | None = None) -> None:
    """Continues a run that has ended; ``trusted`` is the module that it may import.

    A RunError if a run is alive, this is the recorded sample, its settings import other code, or a link leads outside.
    """
    if path == SAMPLE:
        raise RunError("the sample run is a recording; start your own run")
    with one_at_a_time(folder):
        _check_none_alive(folder)
        refuse_links(path)
        module = module_of_run(path)
        if module is not None and module not in (trusted, imported()):
            raise RunError(f"{path.name} imports code ({clean(module, 80)}): allow this first, on the Runs page")
        more = () if module is None else ("--import", module)
        _launch(["--resume", path.name, "--runs-dir", str(folder), *more], folder, path.name)


def launching(folder: Path) -> Launch | None:
    """The live launch that has not yet started or continued its run, if any."""
    launches = (_pending(record, alive=True) for record in _newest_first(folder)[:5])
    return next(filter(None, launches), None)


def _newest_first(folder: Path) -> list[Path]:
    """The records of launches by their time: a resumed run keeps the date in its name."""
    dated = []
    for record in (folder / LAUNCHES).glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # dismissed in the meantime
            dated.append((record.stat().st_mtime_ns, record))
    return [record for _, record in sorted(dated, reverse=True)]


def failed_start(folder: Path) -> Launch | None:
    """The newest launch if its process ended before its run started, until ``dismiss`` is called."""
    newest = _newest_first(folder)[:1]
    return _pending(newest[0], alive=False) if newest else None


def dismiss(name: str, folder: Path) -> None:
    """Forgets a failed start; its log stays."""
    (folder / LAUNCHES / f"{name}.json").unlink(missing_ok=True)


def _pending(record: Path, *, alive: bool) -> Launch | None:
    """The launch of a record, if its process is (not) alive and its run has not written its state since."""
    process = read_json(record)
    pid, started = process.get("pid"), process.get("started")
    if not isinstance(pid, int) or same_process(process) is not alive:
        return None
    if not alive and (record.parents[1] / f"{record.stem}.sweep.json").is_file():  # a sweep that has started
        return None
    candidates = record.parents[1].glob(f"{record.stem}-*/run.json")  # of a comparison of algorithms
    if not alive and any(read_run(path.parent).get("state") != "failed" for path in candidates):
        return None
    run = read_run(record.parents[1] / record.stem)
    same = all(run.get(name) == process.get(name) for name in ("pid", "start_ticks", "boot_id"))
    if same and run.get("boot_id") is not None:
        return None
    if isinstance(started, int | float) and (run.get("heartbeat") or 0.0) >= started:
        return None
    return Launch(record.stem, pid, record.with_suffix(".log"))


def stop(name: str, folder: Path) -> None:
    """Requests a run or a launch to end, as Ctrl-C would; a RunError if it is not running."""
    launch = launching(folder)
    if launch is not None and launch.name == name:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launch.pid, signal.SIGINT)
        return
    steer(name, folder, "stop")


def comparing(folder: Path, live: str | None) -> Launch | None:
    """The comparison of algorithms of which the run ``live`` is a candidate; None once the best one continues."""
    launch = launching(folder)
    if launch is None or live is None or not live.startswith(f"{launch.name}-"):
        return None
    return None if read_run(folder / live).get("pid") == launch.pid else launch


def stop_command(name: str, folder: Path) -> str:
    launch = launching(folder)
    if launch is not None and launch.name == name:
        return shlex.join(("kill", "-INT", str(launch.pid)))
    return runs_command(folder, "stop", name)


def kill(name: str, folder: Path) -> None:
    """Kills a run like ``spreeze runs stop --force``; a RunError if it is not alive."""
    kill_supervisor(find_live_run(name, folder))


def why_no_export(path: Path, row: PolicyFormat) -> str | None:
    """Reason why a run's policy cannot be exported to a format; None if it can."""
    missing = [package for package in row.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install 'spreeze[export]'"
    if not any((path / "weights").glob("w-*.safetensors")) and not (path / "checkpoints/best.safetensors").is_file():
        if state_of(path) in LIVE_STATES:
            return "This run has no weights yet: they come with its first update."
        return "This run has no weights: it is a recording, or it ended before the first update."
    custom = read_config(path).get(str(read_run(path).get("algo")), {}).get("network")
    return f"Its network {clean(custom, 60)!r} is a custom module: export it with torch.onnx." if custom else None


def export_zip(path: Path, folder: Path, kind: str, suffix: str) -> bytes:
    """A ZIP of the files that ``spreeze export --format KIND`` writes; of the reason alone if that failed.

    The policy and its example; for ``csv`` metrics and evaluations.
    """
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / f"{path.name.replace(' ', '_')}{suffix}"
        try:
            done = _spreeze("export", str(path), "--runs-dir", str(folder), "--format", kind, "--out", str(out))
            failed = _error_text(done) if done.returncode else None
        except RunError as error:
            failed = str(error)
        files = sorted(Path(temporary).iterdir())
        if failed is not None:
            files = [Path(temporary) / "export_failed.txt"]
            files[0].write_text(f"{failed}\n", encoding="utf-8")
        return zipped({f"{path.name}/{part.name}": part for part in files})


def zipped(files: Mapping[str, Path]) -> bytes:
    """A ZIP of these files by their names in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in files.items():
            archive.write(part, name)
    return buffer.getvalue()


def report_html(
    paths: Sequence[Path], *, targets: Mapping[str, float] | None = None, robust: bool = False, also: Sequence[str] = ()
) -> str:
    """The report of these runs, or a page with the reason if it failed, because a download shows no error."""
    try:
        return html_report.make(paths, targets=targets, robust=robust, also=also)
    except SpreezeError as error:
        return f'<!doctype html>\n<meta charset="utf-8"><title>No report</title>\n<p>{html.escape(clean(error))}</p>\n'


def delete(path: Path, folder: Path) -> None:
    """Deletes a run that has ended; a RunError if it is alive or elsewhere, or if (some of) it cannot be deleted."""
    if path.parent != folder or path.is_symlink() or not (path / "run.json").is_file():
        raise RunError(f"{path.name} is no run in {folder}: nothing was deleted")
    if is_alive(path):
        raise RunError(f"{path.name} is running: stop it first")
    try:
        shutil.rmtree(path)
        for suffix in (".json", ".log"):
            (folder / LAUNCHES / f"{path.name}{suffix}").unlink(missing_ok=True)
        for record in _newest_first(folder):  # of the comparison whose last run this was
            was_last = path.name.startswith(f"{record.stem}-") and not [*folder.glob(f"{record.stem}-*/run.json")]
            if was_last and not same_process(read_json(record)):
                record.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{path.name} could not be deleted: {clean(error)}; make it writable and try again") from None


def _check_none_alive(folder: Path) -> None:
    busy = activity(folder).name
    if busy is not None:
        raise RunError(f"{busy} is running: stop it first; or start a second one from the command line")


def module_of_run(path: Path) -> str | None:
    """The module that a run needs, or None; a RunError if its settings name what is no module or no environment.

    A run directory may come from anywhere, so a click alone must not import that module.
    """
    env = read_config(path).get("env", {})
    env_id, module = env.get("id"), env.get("import_module")
    odd_module = module is not None and not (isinstance(module, str) and is_module(module))
    if odd_module or (env_id is not None and not imports_only(env_id, module)):
        raise RunError(
            f"{path.name} imports code ({clean(env_id if module is None else module, 80)}): if you trust "
            "it, resume it from the command line"
        )
    return module


def module_to_trust(path: Path) -> str | None:
    """The module of ``module_of_run`` if the user has to allow it first: this server has not been started with it."""
    module = module_of_run(path)
    return None if module == imported() else module


def examine(env_id: str, module: str | None, args: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Doctor's findings on an environment: (name, ok or warn or fail, text with remedy). The module is imported."""
    return [
        (clean(check["name"]), clean(check["status"]), clean(f"{check['text']} {check['remedy'] or ''}"))
        for check in doctor(*env_flags(env_id, module, args))["checks"]
        if check["name"].startswith("env")
    ]


def env_flags(env_id: str, module: str | None, args: tuple[str, ...]) -> list[str]:
    # Checked like a request: nothing else may get onto a command line.
    Request(env_id=env_id, import_module=module, args=args, auto=False)
    flags = ["--env", env_id, *(["--import", module] if module else [])]
    return [*flags, *(part for text in args for part in ("--env-arg", text))]


def doctor(*flags: str) -> dict[str, Any]:
    """The doctor's JSON document, from a child process, because the dashboard never loads Torch; else a RunError."""
    done = _spreeze("doctor", *flags, "--json")
    with contextlib.suppress(ValueError):
        if "checks" in (document := json.loads(done.stdout)):
            return dict(document)
    raise RunError(f"the doctor failed: {_error_text(done)}")


def _spreeze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m spreeze ARGUMENTS``; a RunError if it cannot be run or takes too long."""
    try:
        command = [sys.executable, "-m", "spreeze", *arguments]
        streams: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
        streams["stdin"] = subprocess.DEVNULL
        return subprocess.run(command, timeout=_COMMAND_S, check=False, env=environment(), **streams)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"spreeze {arguments[0]} could not be run: {clean(error)}") from None


def _error_text(done: subprocess.CompletedProcess[str]) -> str:
    return clean(done.stderr[-_MAX_ERROR_TEXT:]) or f"exit code {done.returncode}"


def _launch(options: list[str], folder: Path, name: str, start_with: Sequence[str] | None = None) -> None:
    """Starts a run in its own session, which neither the end of this process nor its signals reach."""
    log = launch_log(name, folder)
    command = [*(start_with or COMMAND), *options]
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "ab") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = subprocess.Popen(command, env=environment(), start_new_session=True, **streams)
    except OSError as error:
        raise ResourceError(f"the run could not be started: {clean(error)}") from None
    identity = process_identity(process.pid)
    reap(process)
    write_json(log.with_suffix(".json"), {**identity, "argv": command, "started": time.time()})


def reap(process: subprocess.Popen[bytes]) -> None:
    """Waits for the process in a thread, so that it does not stay as a zombie once it has ended."""
    threading.Thread(target=process.wait, name=f"reap {process.pid}", daemon=True).start()


def environment() -> dict[str, str]:
    """This process's environment, in which the package can be imported even if it is not installed."""
    return {**os.environ, "PYTHONPATH": python_path()}
