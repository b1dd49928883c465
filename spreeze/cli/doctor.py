"""``python -m spreeze doctor``: checks this machine, with a one-line remedy for each problem.

Exit code 0 if the default command would work. Torch, Bullet and the encoder are tried in parallel child processes, so
that a broken library can neither end nor hang this one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from spreeze.cli.arguments import Parser
from spreeze.cli.terminal import Screen
from spreeze.config.algorithm_bases import ReplayConfig, memory_refusal
from spreeze.config.algorithms import actions_text, fitting_algorithms, rows
from spreeze.envs.make import FALLBACK_ID, MUJOCO_ID, default_env_id, has_display, is_bullet
from spreeze.envs.pictures import observation_note
from spreeze.envs.probe import START_S, Probe, in_child, probe_env
from spreeze.errors import SpreezeError
from spreeze.files import existing_parent
from spreeze.formatting import clean, number, percent, size
from spreeze.machine.hardware import GpuFacts, Machine, read_machine
from spreeze.machine.output import emit, say
from spreeze.machine.utilisation import busy_s
from spreeze.metrics.snapshot import GpuSnapshot
from spreeze.run_directory import MIN_FREE_DISK_BYTES, is_alive, list_runs, versions
from spreeze.runtime.cluster.ray_nodes import parse_address, survey
from spreeze.types import Choices, RowLayout

Status = Literal["ok", "warn", "fail"]
CHILD_TIMEOUT_S = 30.0  # time limit of each check that runs in a child process


@dataclass(frozen=True)
class Check:
    """One finding; ``fail`` means that training would not work."""

    name: str
    status: Status
    text: str
    remedy: str | None = None


def _finding(name: str, text: str, remedy: str | None = None) -> Check:
    """A finding that is a warning where it has a remedy."""
    return Check(name, "ok" if remedy is None else "warn", text, remedy)


_GPU_BUSY, _GPU_MEMORY_USED = 0.10, 0.25  # a GPU above these fractions of time or memory is in use by other programs
_UNEVEN = 10.0  # ratio of p99 to median step time above which environments stepped together wait for the slowest
_SLOW_RESET = 50.0  # ratio of median reset time to median step time above which resets are reported as slow
_LARGE_OBSERVATION = 1e6
_LOAD_S = 0.5  # during which the use of the cores is measured
_BUSY_SHARE = 0.25  # of the cores, above which other programs are reported
_SLOW_CLOCK_S, _SLOW_TRIP_S, _SLOW_BYTES_PER_S = 1.0, 0.2, 20e6
"""A clock difference or round trip above these, or a bandwidth below, is reported."""
_PACKAGE_OF = {MUJOCO_ID: "'gymnasium[mujoco]'", FALLBACK_ID: "gymnasium"}
"""Packages that the default tasks without Bullet need."""
PROCESS_BYTES = 450 * 2**20
"""Rough resident memory of a learner with Torch; all other processes together take about as much."""
_DEFAULT_LAYOUT = RowLayout(obs_dim=22, action_dim=6)  # rows of the default task, Walker2DBulletEnv-v0
_TORCH = (
    "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available() "
    "and torch.cuda.device_count()]))"
)
_ENCODER = "import av; av.codec.Codec('h264', 'w'); print(av.__version__)"


def check_env(
    env_id: str,
    import_module: str | None,
    args: tuple[str, ...] = (),
    timeout_s: float = START_S,
    on_wait: Callable[[str], object] = lambda text: None,
) -> tuple[list[Check], dict[str, Any] | None]:
    """Checks of an environment and their figures; a single failed check if it cannot be used."""
    try:
        probe = probe_env(env_id, import_module, deadline_s=timeout_s, steps=300, args=args, on_wait=on_wait)
    except SpreezeError as error:
        return [Check("environment", "fail", clean(error), "fix the error above, or choose another --env")], None
    args = probe.spec.args  # with those that the probe found necessary
    checks, checkup = _check_steps(probe, env_id, import_module, args, timeout_s)
    # Rendering may crash its process, so it gets a separate one, after the timing.
    checks = [*_spaces(probe), *checks, _pictures(env_id, import_module, args, timeout_s)]
    return checks, {**dataclasses.asdict(probe), "checkup": checkup}


def speed(probe: Probe) -> str:
    """Median step time with its relative standard deviation."""
    if probe.step_us_median is None:
        return "speed unknown"
    spread = "" if probe.step_cv is None else f" (standard deviation {100 * probe.step_cv:.0f} % of the mean)"
    return f"{probe.step_us_median:.0f} us a step{spread}"


def _spaces(probe: Probe) -> list[Check]:
    spec, fitting, known = probe.spec, fitting_algorithms(probe.spec), rows(probe.spec.import_module)
    steps = spec.max_episode_steps
    limit = "no registered time limit" if steps is None else f"at most {steps} env steps"
    text = f"{spec.env_id}: {spec.obs_dim} observation values, {actions_text(spec)}, {limit}"
    checks = [_finding("environment", f"{text}; algorithms that fit: {', '.join(fitting)}")]
    others: dict[str, list[str]] = {}
    for row in known.values():
        others.setdefault(row.why_not(spec), []).append(row.name)
    unfit = "; ".join(f"{', '.join(names)} ({why})" for why, names in others.items() if why)
    checks += [_finding("other algorithms", f"do not fit: {unfit}")] if unfit else []
    if isinstance(spec.action, Choices) and "sac" in fitting:
        text = "with discrete actions try dqn or ppo first: where an episode's end is a loss, sac learns only because"
        checks.append(_finding("discrete sac", f"{text} sac.max_alpha bounds its entropy coefficient"))
    if recurrent := [name for name in fitting if not memory_refusal(known[name].config, spec)]:
        text = f"where an observation does not tell all, --set {recurrent[0]}.recurrent=lstm gives the policy a memory"
        checks.append(_finding("recurrent", f"{text} ({', '.join(recurrent)})"))
    if spec.goals is not None:
        text = "--set replay.her=future also learns from goals that were achieved"
        text += ", the default here, where a reward comes only at a goal" if spec.goals.sparse else ""
        missing = "without compute_reward(achieved_goal, desired_goal, info) there is no hindsight (replay.her)"
        checks.append(_finding("goals", text if spec.goals.computes_reward else missing))
    if spec.obs_layout:
        checks.append(_finding("env layout", "; ".join(spec.obs_layout)))
    if (description := observation_note(spec)) is not None:
        checks.append(_finding("env observation", description))
    return checks + [Check("env notes", "warn" if " is not used" in note else "ok", note) for note in probe.notes]


def _check_steps(
    probe: Probe, env_id: str, import_module: str | None, args: tuple[str, ...], timeout_s: float
) -> tuple[list[Check], dict[str, Any] | None]:
    try:
        # It constructs three environments one after the other.
        checkup = in_child("check", env_id, import_module, deadline_s=timeout_s + 3.0 * probe.start_s, args=args)
    except SpreezeError as error:
        remedy = "a plain loop of reset and step shows it, too; a run would go on, and lose an episode each time"
        return [Check("env speed", "fail", clean(error), remedy)], None
    memory, checks = f"{size(probe.memory_bytes)} for the first environment in a process", [_speeds(checkup)]
    if checkup["alone"] is None:
        memory = f"{memory}, {size(checkup['further_env_bytes'])} for each additional one"
        checks.append(_finding("env memory", memory))
    else:
        text = f"a second instance in the same process fails: {checkup['alone']}"
        remedy = "training uses one sampler with one environment, which also runs the evaluations"
        checks += [_finding("env memory", memory), _finding("environments", text, remedy)]
    checks += _values(checkup["largest_observation"], probe.spec.obs_dim)
    notes = clean("; ".join(checkup["notes"]) or "Gymnasium's checker: no warnings", 600)
    advice = "training works, but fix these warnings first" if checkup["notes"] else None
    return [*checks, _finding("env checker", notes, advice)], checkup


def _values(largest: float, obs_dim: int) -> list[Check]:
    """A warning if observations are too large for networks to learn from."""
    if largest <= _LARGE_OBSERVATION:
        return []
    text = f"the largest of its {obs_dim} values was {largest:.3g}; networks learn best from values of about 1"
    remedy = "scale observations with --set env.normalize_obs=true, or remove entries that grow without bound, "
    return [_finding("env observation", text, f"{remedy}such as a clock")]


def _speeds(checkup: dict[str, Any]) -> Check:
    names = ("step_us_p50", "step_us_p99", "step_us_max", "reset_us_median")
    p50, p99, worst, reset = (checkup[name] for name in names)
    text = (
        f"{number(checkup['steps_per_s'])} env steps/s on one core with random actions, resets included; "
        f"a step {p50:.0f} us (median), {p99:.0f} us (p99), longest {worst / p50:.0f} times the median; "
        f"a reset {reset:.0f} us"
    )
    remedy = None
    if p99 > _UNEVEN * p50:
        remedy = "step times vary, and the environments of a sampler wait for the slowest: "
        remedy += "try --envs-per-sampler 1 and more --samplers"
    elif reset > _SLOW_RESET * p50 and reset > 10_000:
        remedy = "resets are slow: longer episodes, or a reset that reuses the simulation, would help"
    return _finding("env speed", text, remedy)


def _pictures(env_id: str, import_module: str | None, args: tuple[str, ...], timeout_s: float) -> Check:
    try:
        picture = in_child("draw", env_id, import_module, deadline_s=timeout_s, args=args)
    except SpreezeError as error:
        remedy = "training works without; add render_mode=None to the constructor, or use --no-visualizer"
        return _finding("env pictures", clean(error), remedy)
    return _finding("env pictures", f"draws {picture['width']} x {picture['height']} without a window")


def check_cluster(
    address: str, env_id: str | None, import_module: str | None, env_args: tuple[str, ...]
) -> tuple[list[Check], dict[str, Any] | None]:
    """Checks of each other host of a Ray cluster and their figures; a single failed check if it cannot be joined."""
    task = {"env_id": env_id or default_env_id().value, "import_module": import_module, "args": env_args}
    try:
        cluster = survey(parse_address(address), task)
    except SpreezeError as error:
        return [Check("cluster", "fail", clean(error, 600), "not used; --cluster runs samplers on other hosts")], None
    hosts = cluster["hosts"]
    text = f"Ray {cluster['ray']}, {len(hosts)} other host{'' if len(hosts) == 1 else 's'}"
    checks = [_finding("cluster", text, None if hosts else "run ray start --address HOST:PORT on another machine")]
    if not cluster["authenticated"]:
        remedy = "ray get-auth-token --generate, copy ~/.ray/auth_token to all hosts, and set RAY_AUTH_MODE=token"
        text = "no authentication: whoever reaches its ports can run code on these hosts"
        checks.append(_finding("cluster token", text, f"{remedy} there before ray start"))
    for index, host in enumerate(hosts):
        checks += _host_checks(f"host {index}", host, versions())
    return checks, cluster


def _host_checks(name: str, host: dict[str, Any], ours: dict[str, Any]) -> list[Check]:
    where = clean(host["name"] or host["address"], 60)
    if "failure" in host:
        remedy = "install the same version of Spreeze there, in the Python environment that runs ray start"
        return [Check(name, "fail", f"{where}: {clean(host['failure'], 300)}", remedy)]
    theirs = host["versions"]
    packages = ", ".join(f"{package} {theirs.get(package)}" for package in ("spreeze", "torch", "gymnasium"))
    bandwidth, trip_s, clock_s = (host[key] for key in ("bandwidth_bytes_per_s", "round_trip_s", "clock_difference_s"))
    text = (
        f"{where}: {host['cores']:g} usable cores, {size(host['memory_free_bytes'])} free; python "
        f"{host['python']}, {packages}; round trip {1e3 * trip_s:.1f} ms, "
        f"{size(bandwidth)}/s, clock {1e3 * clock_s:+.1f} ms"
    )
    checks = [_finding(name, text)]
    differ = [
        f"{package} {theirs.get(package)}, here {ours.get(package)}"
        for package in ("spreeze", "gymnasium", "numpy")
        if theirs.get(package) != ours.get(package)
    ]
    if differ:
        status: Status = "fail" if differ[0].startswith("spreeze") else "warn"
        checks.append(Check(f"{name} versions", status, "; ".join(differ), "install the same versions there"))
    if host.get("env_error"):
        remedy = "install the packages of the environment on that host, too"
        checks.append(Check(f"{name} environment", "fail", host["env_error"], remedy))
    elif host.get("env"):
        step_us = host["env"]["step_us"]
        text = "made and stepped" if step_us is None else f"{step_us:.0f} us a step"
        checks.append(_finding(f"{name} environment", text))
    slow = [f"clocks differ by {clock_s:+.1f} s"] if abs(clock_s) > _SLOW_CLOCK_S else []
    slow += [f"a round trip takes {1e3 * trip_s:.0f} ms"] if trip_s > _SLOW_TRIP_S else []
    slow += [f"{size(bandwidth)}/s"] if bandwidth < _SLOW_BYTES_PER_S else []
    if slow:
        remedy = "synchronize the clocks by NTP; a slow network delays policies and limits the rate of transitions"
        checks.append(_finding(f"{name} network", "; ".join(slow), remedy))
    return checks


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Python 3.11 runs everything; newer versions have MuJoCo in place of Bullet, which has no wheels for them."""
    hint = "the Bullet tasks need Python 3.11; MuJoCo is used by default instead" if version[:2] > (3, 11) else None
    return Check("Python", "ok", ".".join(str(part) for part in version), hint)


def check_torch(*, has_gpu: bool = False) -> Check:
    code, output = _child(_TORCH)
    if code is None:
        return _finding("PyTorch", f"still importing after {CHILD_TIMEOUT_S:g} s", "try again; the disk may be slow")
    try:
        version, cuda, devices = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return Check("PyTorch", "fail", clean(output[-200:]) or f"exit code {code}", "pip install 'torch>=2.11,<2.14'")
    if cuda is None:
        remedy = "a build with CUDA would use the GPU" if has_gpu else None
        return _finding("PyTorch", f"{version}, built for CPU", remedy)
    if not devices:
        text = f"{version}, CUDA {cuda}, sees no GPU"
        if has_gpu:
            return _finding("PyTorch", text, "update the NVIDIA driver")
        return Check("PyTorch", "ok", text, "without a GPU the build for CPU is enough, and smaller")
    return _finding("PyTorch", f"{version}, CUDA {cuda}, {devices} GPU(s)")


def check_packages() -> Check:
    installed, missing = [], []
    for name in ("numpy", "gymnasium", "safetensors", "psutil", "rich", "pillow"):
        try:
            installed.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("libraries", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return _finding("libraries", ", ".join(installed))


def check_default_task() -> Check:
    """The default task: a real reset and steps in a child process."""
    choice = default_env_id()
    env_id = str(choice.value)
    try:
        probe = probe_env(env_id, deadline_s=CHILD_TIMEOUT_S, steps=300)
    except SpreezeError as error:
        remedy = f"pip install --force-reinstall {'pybullet==3.2.7' if is_bullet(env_id) else _PACKAGE_OF[env_id]}"
        return Check("default task", "fail", clean(error), remedy)
    if env_id == FALLBACK_ID:
        return _finding("default task", f"{choice.reason}; {speed(probe)}", "pip install 'gymnasium[mujoco]'")
    return _finding("default task", f"{env_id if is_bullet(env_id) else choice.reason}: {speed(probe)}")


def check_encoder() -> Check:
    """H.264 encoding, which only clips need."""
    code, output = _child(_ENCODER)
    if code == 0:
        return _finding("video encoder", f"PyAV {clean(output.splitlines()[-1], 40)} with H.264")
    text = clean(output[-120:]) or "does not answer"
    return _finding("video encoder", text, "pip install 'av>=14'; or --no-visualizer")


def check_system() -> list[Check]:
    """A warning on another system than Linux, with what Spreeze cannot have there."""
    text = "built for it, tested on Linux without Linux's own calls, never run on this system"
    missing = "what is missing here: pinning to cores, limits of a worker's memory, and notice of other programs' load"
    return [_finding("system", f"{platform.system()}: {text}", missing)] if sys.platform != "linux" else []


def check_cores(machine: Machine) -> Check:
    cores = machine.cores
    physical = "" if cores.physical is None else f", {cores.physical} physical"
    text = f"{cores.usable:g} usable of {machine.cpu_model or 'an unknown processor'}{physical}: {cores.reason}"
    remedy = "samplers and learner share one core; allow at least 2 cores" if cores.usable < 2 else None
    return _finding("processor", text, remedy)


def check_memory(machine: Machine, replay: ReplayConfig) -> Check:
    needed, memory = replay.capacity * _DEFAULT_LAYOUT.row_bytes + 2 * PROCESS_BYTES, machine.memory
    limit = memory.cgroup_limit_bytes
    bound = "" if limit is None else f" (cgroup limit {size(limit)})"
    free = f"{size(memory.usable_bytes)} free of {size(memory.total_bytes)}{bound}"
    text = f"{free}; the default run takes about {size(needed)}"
    if memory.usable_bytes < needed:
        return Check("memory", "fail", text, "close other programs, or lower --replay-capacity and --samplers")
    return _finding("memory", text)


def check_disk(runs_dir: Path) -> Check:
    folder = existing_parent(runs_dir)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".spreeze-doctor-"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", "fail", f"{runs_dir} cannot be written: {error.strerror}", "choose another --runs-dir")
    text = f"{size(free)} free for {runs_dir}"
    if free < MIN_FREE_DISK_BYTES:
        remedy = f"a run needs {size(MIN_FREE_DISK_BYTES)}: free some, or choose another --runs-dir"
        return Check("disk", "fail", text, remedy)
    return _finding("disk", text)


def check_sqlite(runs_dir: Path) -> Check:
    """The metrics store needs SQLite's write-ahead log, which network file systems do not support."""
    remedy = "choose a --runs-dir on a local disk"
    try:
        with (
            tempfile.TemporaryDirectory(dir=existing_parent(runs_dir), prefix=".spreeze-doctor-") as folder,
            contextlib.closing(sqlite3.connect(Path(folder) / "try.db")) as db,
        ):
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            db.execute("CREATE TABLE try (x)")
    except (OSError, sqlite3.Error) as error:
        return Check("metrics store", "fail", f"SQLite in {runs_dir}: {clean(error)}", remedy)
    if mode != "wal":
        return _finding("metrics store", f"SQLite journal is '{mode}', not 'wal'", remedy)
    return _finding("metrics store", f"SQLite {sqlite3.sqlite_version} with write-ahead log")


def check_gpus(machine: Machine) -> Check:
    if not machine.gpus:
        return Check("GPU", "ok", machine.gpu_reason, "the learner runs on the CPU")
    text = f"{'; '.join(map(_gpu_text, machine.gpus))}; driver {machine.gpus[0].driver}"
    busy = [gpu for gpu in machine.gpus if (gpu.use or 0.0) >= _GPU_BUSY or _memory_used(gpu) >= _GPU_MEMORY_USED]
    names = ", ".join(f"GPU {gpu.index}" for gpu in busy)
    remedy = f"other programs use {names} (see nvidia-smi); rates measured now will not be representative"
    return _finding("GPU", text, remedy if busy else None)


def _gpu_text(gpu: GpuFacts) -> str:
    total, free = gpu.memory_bytes, gpu.memory_free_bytes
    used = None if total is None or free is None else total - free
    same = {name: getattr(gpu, name) for name in ("index", "power_w", "power_limit_w", "clock_hz", "clock_max_hz")}
    now = GpuSnapshot(memory_used_bytes=used, memory_bytes=total, **same)
    return f"{gpu.name}: kernels run {percent(gpu.use)} of the time, {now.figures} in use"


def _memory_used(gpu: GpuFacts) -> float:
    """Fraction of its memory that is in use; 0 if unknown."""
    if not gpu.memory_bytes or gpu.memory_free_bytes is None:
        return 0.0
    return 1.0 - gpu.memory_free_bytes / gpu.memory_bytes


def check_device_physics(machine: Machine) -> Check:
    """Where mode ``device`` steps environments: on a GPU, or on the CPU for tests."""
    device = "a GPU" if machine.gpus else "the CPU, which is for tests"
    try:
        engine = f"warp:ID by MuJoCo Warp {metadata.version('mujoco-warp')}"
    except metadata.PackageNotFoundError:
        engine = "warp:ID once 'spreeze[warp]' is installed"
    return _finding("device physics", f"--mode device steps vector:ID, and {engine}, on {device}")


def check_display() -> Check:
    if has_display():
        display = os.environ.get("WAYLAND_DISPLAY") or os.environ.get("DISPLAY") or "the system's own"
        return _finding("display", clean(display, 60))
    return Check("display", "ok", "none", "spreeze play writes a clip instead of opening a window")


def check_power(machine: Machine) -> Check:
    """A laptop on battery is slower, so its measurements are not representative."""
    if machine.power_source == "battery":
        remedy = "plug it in: on battery the processor is slower, and measurements are not representative"
        return _finding("power", "on battery", remedy)
    return _finding("power", machine.power_source or "no battery reported")


def check_load(machine: Machine) -> Check:
    """Cores that other programs keep busy; called before the other checks, which compute."""
    cores = machine.cores
    before_s, start_s = busy_s(cores.ids), time.monotonic()
    time.sleep(_LOAD_S)
    busy = min((busy_s(cores.ids) - before_s) / (time.monotonic() - start_s), cores.usable)
    remedy = "stop other programs or runs: beside them training is slower, and the tuner's measurements less certain"
    text = f"{busy:.1f} of {cores.usable:g} cores were busy before these checks, live runs included"
    return _finding("load", text, remedy if busy > _BUSY_SHARE * cores.usable else None)


def check_live_runs(runs_dir: Path) -> Check:
    alive = [run.name for run in list_runs(runs_dir) if is_alive(run)]
    text = f"{len(alive)} running: {clean(', '.join(alive), 200)}" if alive else f"none in {clean(runs_dir, 200)}"
    remedy = "a new run would share the cores; stop one with python -m spreeze runs stop NAME"
    return _finding("live runs", text, remedy if alive else None)


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all checks, the slow ones in parallel; returns the JSON document."""
    replay, machine, runs_dir = ReplayConfig(), read_machine(), Path(args.runs_dir)
    env_args, load = tuple(args.env_arg), check_load(machine)
    with ThreadPoolExecutor(max_workers=3) as pool:
        jobs = [pool.submit(check_torch, has_gpu=bool(machine.gpus))]
        jobs += [pool.submit(check) for check in (check_default_task, check_encoder)]
        env_job = None
        if args.env:
            on_wait = partial(say, as_json=True)
            env_job = pool.submit(check_env, args.env, args.import_module, env_args, args.start_deadline_s, on_wait)
        quick = [
            check_cores(machine), check_memory(machine, replay),
            check_gpus(machine), check_device_physics(machine), check_disk(runs_dir), check_sqlite(runs_dir),
            check_display(), check_power(machine), load, check_live_runs(runs_dir),
        ]  # fmt: skip
        checks = [check_python(), *check_system(), check_packages(), *(job.result() for job in jobs), *quick]
        environment = None
        if env_job is not None:
            more, environment = env_job.result()
            checks += more
    hosts = None
    if args.cluster is not None:  # not beside the timings above
        more, hosts = check_cluster(args.cluster, args.env, args.import_module, env_args)
        checks += more
    return {
        "ok": all(check.status != "fail" for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
        "machine": {**dataclasses.asdict(machine), "identity": machine.identity(), "one_line": machine.one_line()},
        "env": environment,
        "cluster": hosts,
        "versions": versions(),
    }


def _child(code: str) -> tuple[int | None, str]:
    """Runs Python code in a child process: (exit code, output); the code is None after ``CHILD_TIMEOUT_S``."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=CHILD_TIMEOUT_S, check=False, text=True, errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def _print(document: dict[str, Any], args: argparse.Namespace) -> None:
    table = Table.grid(padding=(0, 2))
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in document["checks"]:
        text = Text(check["text"])
        if check["remedy"]:
            text.append(f"\n-> {check['remedy']}", style="dim")
        table.add_row(Text(check["status"], style=styles[check["status"]]), Text(check["name"]), text)
    console = Screen(file=sys.stdout)
    console.print(table)
    given = [("--env", args.env), ("--import", args.import_module), *(("--env-arg", text) for text in args.env_arg)]
    arguments = [argument for flag, value in given if value for argument in (flag, value)]
    ready = f"Ready: {shlex.join(['python', '-m', 'spreeze.train', '--auto', *arguments])}"
    console.print(Text(ready if document["ok"] else "Not ready: see the failed checks above.", style="bold"))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m spreeze doctor", description="Check that this machine is ready for training.")
    parser.flag("--env", text="also test this environment", metavar="ID")
    parser.add_import()
    text = "keyword argument of the environment's constructor, may be repeated"
    parser.flag("--env-arg", text=text, default=[], metavar="KEY=VALUE")
    text = "also check the other hosts of a Ray cluster: HOST:PORT, auto or local:N"
    parser.flag("--cluster", text=text, metavar="ADDRESS")
    parser.add_start_deadline()
    parser.add_common_flags()
    return parser.run(argv, _doctor)


def _doctor(args: argparse.Namespace) -> int:
    document = examine(args)
    if args.json:
        emit(document)
    else:
        _print(document, args)
    return 0 if document["ok"] else 1
