"""The tuner at work: facts, results of earlier tunings, one tuner at a time, and the settings layer that comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spreeze.config.layers import RESUMED, USER, Layer, Settings
from spreeze.config.modes import DECLARED
from spreeze.config.schema import Config, LearnerConfig
from spreeze.envs.probe import Probe, probe_of
from spreeze.envs.vector_engines import engine_of
from spreeze.errors import ConfigError, SpreezeError
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import Machine, memory_limits
from spreeze.machine.utilisation import ExternalLoad
from spreeze.run_directory import versions, write_json
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.knobs import MOST_LEARNERS, host_knobs, knobs_of
from spreeze.tuner.measure import Measurer
from spreeze.tuner.model import formula
from spreeze.tuner.problem import (
    DEVICE,
    INTERVAL,
    JOINT,
    LEARNERS,
    PRECISION,
    ROLLOUT,
    ROLLOUT_ENVS,
    ROLLOUT_SAMPLERS,
    SAMPLERS,
    SCHEMA,
    Device,
    Setting,
    TrialResult,
    TuningProblem,
    result_line,
)
from spreeze.tuner.search import tune
from spreeze.types import RowLayout

BUDGET_S = 60.0
"""All of a tuning, the start of this process included."""
_CLOSING_S = 1.5
"""Of it, what ending the last processes and writing the result take."""
_SAMPLER_BYTES, _ENV_BYTES, _LEARNER_BYTES = 120_000_000, 30_000_000, 500_000_000
"""Memory of a sampler with its first environment, of each further one (measured on Bullet tasks), of the learner."""
_ENGINE_ENV_BYTES = 2_000_000
"""Of each further environment of an engine: EnvPool's robots take less than a megabyte each."""
_CAP_SHARE = 0.8
"""A candidate may take this share of the memory that is free."""
_PROBE_STEPS = 2000
_NOT_SPEED = ("reward_threshold", "obs_shape", "action_shape")
"""Facts about an environment on which no speed depends."""
_BUSY_CORES = 0.1
"""Load of other programs that is worth a word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listener:
    """Who hears what the tuner does, as it does it."""

    say: Callable[[str], None]
    on_row: Callable[[TrialResult], None] = lambda row: None
    before: Callable[[], None] = lambda: None
    """Called once, before anything is measured; not where the answer is known."""


def tuned_layer(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, listener: Listener, *, fresh: bool,
    spent_s: float = 0.0, samplers_only: bool = False,
) -> tuple[Layer, dict[str, Any]]:
    """The tuner's choice as a settings layer, and its record for ``tune.json``.

    ``samplers_only`` chooses for a host whose learner is elsewhere: samplers and environments.

    Values of ``settings`` whose source is the user, or that their profile keeps, are pins. The environment's step is
    timed if ``probe`` has no time for it. ``fresh`` measures even if the answer is known. ``spent_s``, the age of this
    process, is part of the budget.

    Raises:
        SpreezeError: nothing could be measured, nothing is to choose, or a pinned value that cannot work.
        KeyboardInterrupt: the user asked to stop.
    """
    check_tunable(settings.config)
    facts = _facts(settings, probe, machine, samplers_only=samplers_only)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / f"tune-{key}.json"

    def known() -> dict[str, Any] | None:
        record = None if fresh else _load(path, key, settings, listener.say)
        if record is not None:
            listener.say(f"tuned before on this machine ({record['measured_at']}), reused; --fresh measures again")
            for limit in record["limits"]:  # that of free memory may hold no longer
                listener.say(f"  {limit}")
        return record

    record = known()
    if record is not None:
        return layer_of(record), {**record, "reused": True}
    listener.before()
    with only_tuner(listener.say, interrupts):
        if os.path.exists(path) and (record := known()) is not None:  # by the tuner that this one had to wait for
            return layer_of(record), {**record, "reused": True}
        record = {**_measured(settings, probe, machine, interrupts, listener, spent_s, samplers_only=samplers_only),
                  "key": key}
    with contextlib.suppress(OSError):  # the next tuning measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    return layer_of(record), record


def _measured(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, listener: Listener, spent_s: float, *,
    samplers_only: bool,
) -> dict[str, Any]:
    start, spec, config = AWAKE(), probe.spec, settings.config
    listener.say(f"tuning for {spec.env_id} on this machine (under a minute):")
    load, free_bytes = ExternalLoad(machine.cores.ids), memory_limits().usable_bytes
    cores = machine.cores.usable
    configured = problem_of(settings, probe, machine, free_bytes, samplers_only=samplers_only).configured
    samplers = config.run.learners if config.on_policy is None else configured.get(ROLLOUT_SAMPLERS, 1)
    with Measurer(
        RunPlan(settings=settings, spec=spec, samplers=samplers, free_core=False, to_tune=True), usable_cores=cores,
        memory_cap_bytes=int(_CAP_SHARE * free_bytes), ends_s=start + BUDGET_S - spent_s - _CLOSING_S,
        group_bytes=_LEARNER_BYTES + int(cores * (_SAMPLER_BYTES + _ENV_BYTES)), interrupts=interrupts,
        samplers_only=samplers_only,
    ) as measurer:
        if probe.step_us_median is None:
            probe = probe_of(config, steps=_PROBE_STEPS, interrupted=lambda: interrupts.asked)
        measurer.step_us = probe.step_us_median
        problem = problem_of(settings, probe, machine, free_bytes, samplers_only=samplers_only)

        def heard(result: TrialResult) -> None:
            listener.say(result_line(problem, result))
            listener.on_row(result)

        found = tune(problem, measurer, heard).as_json()
    # Of cores with a quota, what others do there need take nothing from us.
    others = load.cores() if machine.cores.usable >= len(machine.cores.ids) else None
    seconds = AWAKE() - start + spent_s
    listener.say(f"  measured in {seconds:.0f} s")
    if others is not None and others >= _BUSY_CORES:
        found["notes"].append(f"other programs kept {others:.1f} of {machine.cores.usable:g} cores busy meanwhile: "
                              "with --fresh the tuner measures again once they are gone")
    if machine.power_source == "battery":
        found["notes"].append("measured on battery: on mains rates may be higher")
    return {
        **found, "settings": found["choice"], "measured_at": time.strftime("%Y-%m-%d %H:%M"), "seconds": seconds,
        "machine": machine.to_json(), "machine_id": machine.identity(), "env": spec.env_id, "algo": config.run.algo,
        "env_step_us_median": probe.step_us_median, "env_step_cv": probe.step_cv, "other_programs_cores": others,
        "targets": dataclasses.asdict(config.tuning), "versions": versions(),
    }


def problem_of(
    settings: Settings, probe: Probe, machine: Machine, free_bytes: int, *, samplers_only: bool = False
) -> TuningProblem:
    """What is to be chosen, from the settings and the facts; ``samplers_only`` for a host without a learner.

    Raises:
        ConfigError: a knob of the mode or of ``--import`` is not declared as it has to be.
    """
    config = settings.config
    knobs = host_knobs() if samplers_only else knobs_of(config)
    values = {knob.name: _configured(config, knob.name, machine) for knob in knobs}
    if samplers_only and values[SAMPLERS] is None:
        values[SAMPLERS] = max(1, int(machine.cores.usable))
    order = [name for name in (*config.wiring.knobs, *values) if name in values]
    kept = settings.kept & values.keys()
    # A resumed run keeps what its stored data depend on.
    pins = {knob.name for knob in knobs if settings.sources.get(knob.name) == USER or knob.name in kept
            or (knob.fixed and settings.sources.get(knob.name) == RESUMED)}
    if config.learner.device == "auto":
        pins.discard(DEVICE)
    if LEARNERS in values:
        values = _with_learners(values, pins, config.rollout_cores(machine.cores.usable))
    if INTERVAL in values and values[INTERVAL] is None:
        samplers = values[ROLLOUT_SAMPLERS] // values.get(LEARNERS, config.run.learners)
        values[INTERVAL] = config.rollout_interval(samplers * values[ROLLOUT_ENVS])
    on_policy, paired = config.on_policy is not None, probe.spec.num_actions is None
    engine = engine_of(probe.spec.env_id) is not None
    row_bytes = 1 if on_policy else RowLayout.of(
        probe.spec, config.algorithm.n_step, checksum=config.replay.checksum).row_bytes
    return TuningProblem(
        knobs=knobs, configured=Setting({name: values[name] for name in order}), pins=frozenset(pins),
        kept=kept, targets=config.tuning, stage=ROLLOUT if on_policy or samplers_only else JOINT,
        usable_cores=machine.cores.usable, physical_cores=machine.cores.physical, memory_bytes=free_bytes,
        # On Linux replay lies in nameless memory, which only main memory bounds.
        shared_memory_bytes=None if sys.platform == "linux" else machine.shared_memory_free_bytes,
        step_us=probe.step_us_median, step_cpu_share=probe.step_cpu_share, row_bytes=row_bytes,
        learning_starts=config.replay.learning_starts,
        sampler_bytes=max(_SAMPLER_BYTES, probe.memory_bytes + _SAMPLER_BYTES // 2),
        env_bytes=_ENGINE_ENV_BYTES if engine else max(_ENV_BYTES, probe.memory_bytes // 2),
        learner_bytes=_LEARNER_BYTES, one_call=engine,
        devices=_devices(machine, config.learner, pins, paired), paired=paired, balanced=config.wiring.balanced,
    )


def _configured(config: Config, name: str, machine: Machine) -> Any:
    """What a run would take without the tuner; None where that is not known yet."""
    part, item = name.split(".")
    owner = (config.on_policy or config.algorithm) if part == config.run.algo else getattr(config, part)
    value = getattr(owner, item)
    if name == DEVICE:
        return {"cuda": "cuda:0", "split": "cuda:0+cuda:1"}.get(value, value)
    return config.rollout_samplers(machine.cores.usable) if name == ROLLOUT_SAMPLERS and value is None else value


def _with_learners(values: dict[str, Any], pins: set[str], usable: float) -> dict[str, Any]:
    """The values of a mode whose learners are to be chosen: at least two to begin with, each with a sampler."""
    cores, samplers = max(2, min(int(usable), MOST_LEARNERS)), values[ROLLOUT_SAMPLERS]
    learners = values[LEARNERS]
    if LEARNERS not in pins:
        fitting = [count for count in range(2, cores + 1) if samplers % count == 0]
        learners = cores if ROLLOUT_SAMPLERS not in pins else max(fitting, default=min(samplers, MOST_LEARNERS))
    if ROLLOUT_SAMPLERS not in pins:
        samplers = learners * max(1, int(usable) // learners)
    return values | {LEARNERS: learners, ROLLOUT_SAMPLERS: samplers}


def _devices(machine: Machine, learner: LearnerConfig, pins: set[str], can_split: bool) -> tuple[Device, ...]:
    """Where a learner may run: the processor, every GPU that this process can see, the first two as a split.

    In float32; another precision only where the user asks for it, since it changes what is learned.
    """
    precision = learner.precision if PRECISION in pins else "float32"
    on_cpu, on_gpu = ("bfloat16", "float32") if precision == "bfloat16" else ("float32", precision)
    found = [Device(name="cpu", precision=on_cpu)]
    found += [Device(name=f"cuda:{gpu.index}", memory_bytes=gpu.memory_free_bytes, precision=on_gpu)
              for gpu in machine.gpus]
    if can_split and len(machine.gpus) >= 2:
        free = [gpu.memory_free_bytes for gpu in machine.gpus[:2] if gpu.memory_free_bytes is not None]
        found.append(Device(name="cuda:0+cuda:1", memory_bytes=min(free, default=None), precision=on_gpu))
    if DEVICE in pins and "+" in learner.device and learner.device not in {device.name for device in found}:
        found.append(Device(name=learner.device, precision=on_gpu if "cuda" in learner.device else on_cpu))
    return tuple(found)


_SPEED = ("overlap", "mirror", "updates_per_launch", "fuse", "device", "threads", "precision")
"""Settings of the learner on which rates depend, also where no knob is for them."""


def _facts(settings: Settings, probe: Probe, machine: Machine, *, samplers_only: bool = False) -> dict[str, Any]:
    """Everything that a result depends on."""
    config, problem = settings.config, problem_of(settings, probe, machine, 0, samplers_only=samplers_only)
    # Learning rates, discounts and other floats do not change how long anything takes.
    part = dataclasses.asdict(config.on_policy or config.algorithm)
    return {
        **({"samplers_only": True} if samplers_only else {}),
        "schema": SCHEMA, "machine": machine.identity(), "versions": versions(), "mode": config.run.mode,
        "physical_cores": problem.physical_cores,  # of two usable ones perhaps one, by whatever pins this process
        "env": {name: value for name, value in dataclasses.asdict(probe.spec).items() if name not in _NOT_SPEED},
        "normalize_obs": config.env.normalize_obs, "tuning": dataclasses.asdict(config.tuning),
        "algo": config.run.algo, "correction": config.rollout.correction,
        "formula": formula(problem),
        "mixing": dataclasses.asdict(config.gala) if config.wiring.mixes else None,
        "algorithm": {name: value for name, value in part.items() if not isinstance(value, float)},
        "configured": {name: repr(value) for name, value in problem.configured.items()},
        "pins": sorted(problem.pins), "learning_starts": config.replay.learning_starts,
        "learner": {name: getattr(config.learner, name) for name in _SPEED
                    if f"learner.{name}" not in problem.configured},
        "own": {knob.name: [repr(value) for value in knob.candidates(problem, problem.configured)]
                for knob in problem.knobs if knob.own},
    }


def check_tunable(config: Config) -> None:
    """Rejects a mode in which nothing is to choose.

    Raises:
        ConfigError: the mode declares no knob for that kind of algorithm, or several learners are asked for.
    """
    if config.run.learners > 1 and LEARNERS not in config.wiring.knobs:
        raise ConfigError(f"--auto: it measures one learner and its samplers, not run.learners = {config.run.learners}"
                          "; leave --auto out, or set --batch-size and --samplers as a tuned run of one learner has it")
    if not config.wiring.knobs:
        found = [mode.wiring(on_policy=config.on_policy is not None) for mode in DECLARED]
        others = [mode.name for mode, wiring in zip(DECLARED, found, strict=True) if wiring and wiring.knobs]
        raise ConfigError(f"--auto: {config.run.algo} in --mode {config.run.mode} leaves nothing to choose; "
                          f"use --mode {' or '.join(others)}, or leave --auto out")


# --- results of earlier tunings ---

_MAX_BYTES = 4_000_000
_NEEDED = ("reasons", "measured_at", "notes", "limits", "formula", "labels", "update_rates", "joint_rates")


def cache_dir() -> Path:
    """Where results are kept: ``$XDG_CACHE_HOME/spreeze``, ``~/.cache/spreeze``, or a temporary folder without both."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spreeze"
    except RuntimeError:  # this user has no home
        return Path(tempfile.gettempdir()) / f"spreeze-cache-{os.getuid()}"


def layer_of(record: dict[str, Any]) -> Layer:
    """The choice of a record as a layer of settings."""
    return Setting(record["settings"]).layer()


def _load(path: Path, key: str, settings: Settings, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The cached result, or None; ``say`` hears of a damaged one."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA or record["key"] != key:
            raise ValueError("it is of another version or another key")
        if missing := [name for name in _NEEDED if name not in record]:
            raise ValueError(f"it has no {', '.join(missing)}")
        if set(record["reasons"]) != set(record["choice"]):
            raise ValueError("reasons and choice differ")
        settings.with_layer(layer_of(record))  # impossible values must not stop the run
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        say(f"the cached tuning result is damaged ({text}); measuring again")
        return None


# --- one tuner at a time ---

_LOCK_WAIT_S = 120.0


def lock_path() -> Path:
    """The file whose lock all tuners of this machine share, whoever runs them."""
    return Path(tempfile.gettempdir()) / "spreeze-tune.lock"


@contextlib.contextmanager
def only_tuner(say: Callable[[str], None], interrupts: Interrupts) -> Iterator[None]:
    """Holds the lock of this machine's tuners: two would measure each other.

    The kernel frees it when its holder ends, however it ends. A lock file that cannot be opened is no reason not to
    measure.

    Raises:
        SpreezeError: another tuner holds it for too long.
        KeyboardInterrupt: the user asked to stop.
    """
    fd = None
    # Where the folder is sticky, a file of somebody else's opens only without O_CREAT.
    for flags in (os.O_RDONLY | os.O_CREAT, os.O_RDONLY):
        with contextlib.suppress(OSError):
            fd = fd or os.open(lock_path(), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    if fd is None:
        yield
        return
    try:
        _wait_for_lock(fd, say, interrupts)
        yield
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, say: Callable[[str], None], interrupts: Interrupts) -> None:
    deadline, said = time.monotonic() + _LOCK_WAIT_S, False
    while True:
        with contextlib.suppress(OSError):
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not said:
            say("another tuner is measuring this machine; waiting for it")
            said = True
        if interrupts.asked:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise SpreezeError(f"another tuner still measures after {_LOCK_WAIT_S:.0f} s; try again")
        time.sleep(0.2)
