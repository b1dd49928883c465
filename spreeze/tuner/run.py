"""Runs the tuner: facts, results of earlier tunings, one tuner at a time, and the resulting settings layer."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from spreeze.config.layers import RESUMED, USER, Layer, Settings
from spreeze.config.modes import DECLARED
from spreeze.config.schema import MAX_LEARNERS, Config, LearnerConfig
from spreeze.envs.families import engine_of
from spreeze.envs.probe import TIMED_STEPS, Probe, probe_of
from spreeze.errors import ConfigError
from spreeze.files import write_json
from spreeze.formatting import clean
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import Machine, canonical_device, is_split, memory_limits
from spreeze.machine.utilisation import ExternalLoad
from spreeze.run_directory import take_lock, versions
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.knobs import host_knobs, knob_names, knobs_of, ordered
from spreeze.tuner.measure import Measurer
from spreeze.tuner.model import formula, observer_cores
from spreeze.tuner.problem import (
    DEVICE,
    JOINT,
    LEARNERS,
    PRECISION,
    ROLLOUT,
    ROLLOUT_ENVS,
    ROLLOUT_SAMPLERS,
    SAMPLERS,
    SCHEMA,
    SYNC_INTERVAL,
    Device,
    OnResult,
    Setting,
    TrialResult,
    TuningProblem,
    result_line,
)
from spreeze.tuner.search import Search, tune
from spreeze.tuner.trials import Stopping

_CLOSING_S = 1.5  # Time to end the last processes and to write the result.
_SAMPLER_BYTES, _ENV_BYTES, _LEARNER_BYTES = 120_000_000, 30_000_000, 500_000_000
"""Memory of a sampler with its first environment, of each further one (measured on Bullet tasks), of the learner."""
_ENGINE_ENV_BYTES = 2_000_000
"""Memory of each further environment of an engine: EnvPool's robots take less than a megabyte each."""
_CAP_SHARE = 0.8  # A candidate may take this share of the memory that is free.
_SPEED_IRRELEVANT_FACTS = ("reward_threshold", "obs_shape")  # Facts about an environment on which no speed depends.
_NOT_MEASURED = ("budget_s", "algorithm_share", "step_us", "while_training")
"""Settings of the tuner that affect how it measures, not which setting is best."""
_BUSY_CORES = 0.1  # Load of other programs that is worth reporting.
_BUSY_SHARE, _QUIETER = 0.15, 0.5
"""Other programs that keep this share of the cores busy make a result provisional; it is measured again once they keep
no more than the second share of what they kept then."""
_LOAD_CHECK_S = 1.0  # Time to check whether the machine is quieter now [s].
_MAX_TRIES, _TRY_AGAIN_S = 3, 86_400.0
"""A result that is provisional for another reason than load is measured again this often, then once a day."""
_SAME_STEP, _OWN_STEP_US = 2.0, 20.0
"""A result holds while the time of an env step is within this factor of the stored one, including the sampler's share:
for an environment that takes 10 us, twice that is noise. The bounds are relative to the stored time, since noise could
cross those of a fixed scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunerCallbacks:
    say: Callable[[str], None]
    on_result: OnResult = lambda result: None
    before: Callable[[], None] = lambda: None  # called once, before anything is measured; not if the result is known


class Tuning:
    """A task to be tuned on this machine, with the results of earlier tunings."""

    def __init__(
        self,
        settings: Settings,
        probe: Probe,
        machine: Machine,
        interrupts: Stopping,
        listener: TunerCallbacks,
        *,
        samplers_only: bool = False,
    ) -> None:
        """Measures only the environment's step, if ``probe`` lacks its time; a ConfigError if nothing is to choose.

        Values of ``settings`` from the user, or kept by their profile, are pins. ``samplers_only`` chooses samplers and
        environments for a host whose learner is elsewhere.
        """
        check_tunable(settings.config)
        if probe.step_us_median is None:
            probe = probe_of(settings.config, steps=TIMED_STEPS, interrupted=lambda: interrupts.stop_requested)
        self.settings, self.probe, self.machine, self.samplers_only = settings, probe, machine, samplers_only
        self.interrupts, self.listener = interrupts, listener
        self._key = cache_key(_cached_by(settings, probe, machine, samplers_only=samplers_only))
        self._path = cache_dir() / f"tune-{self._key}.json"
        self._tries = 1
        self._free_bytes = memory_limits().usable_bytes

    def problem(self) -> TuningProblem:
        """The choices to make, with the memory that was free at first; a ConfigError about an invalid knob."""
        return problem_of(self.settings, self.probe, self.machine, self._free_bytes, samplers_only=self.samplers_only)

    def known(self) -> dict[str, Any] | None:
        """The record of an earlier tuning that is still valid."""
        say = self.listener.say
        record = _load(self._path, self._key, self.settings, say)
        if record is None:
            return None
        if why := _outdated(record, self.probe, self.machine, self.interrupts):
            say(f"tuned before on this machine ({record['measured_at']}), measuring again because {why}")
            self._tries = (record["tries"] or 1) + 1 if record["provisional"] else 1
            return None
        say(f"tuned before on this machine ({record['measured_at']}), reused; --fresh measures again")
        for text in (*record["limits"], *record["notes"]):  # free memory and load may have changed
            say(f"  {clean(text)}")
        return {**record, "reused": True}

    def measured(self, *, spent_s: float, fresh: bool) -> dict[str, Any]:
        """Measures in processes of its own and stores the record; another tuner's result counts, unless ``fresh``.

        ``spent_s``, the age of this process, is part of the budget.
        """
        seen_s = _changed_s(self._path)
        self.listener.before()
        with only_tuner(self.listener.say, self.interrupts) as note:
            if not fresh and _changed_s(self._path) != seen_s and (record := self.known()) is not None:
                return record
            start, problem, config = AWAKE(), self.problem(), self.settings.config
            self.listener.say(
                f"tuning for {self.probe.spec.env_id} on this machine ({config.tuning.budget_s:.0f} s at most):"
            )
            measurer = self.measurer(problem, start + config.tuning.budget_s - spent_s)
            return self.search(problem, measurer, note, spent_s=spent_s)

    def measurer(self, problem: TuningProblem, ends_s: float, **more: Any) -> Measurer:
        """Measures in processes of its own, all done at ``ends_s``; ``more`` as for a ``Measurer``."""
        config, cores = self.settings.config, self.machine.cores.usable
        samplers = config.run.learners if config.on_policy is None else problem.configured.get(ROLLOUT_SAMPLERS, 1)
        return Measurer(
            RunPlan(settings=self.settings, spec=self.probe.spec, samplers=samplers, free_core=False, to_tune=True),
            usable_cores=cores,
            memory_cap_bytes=int(_CAP_SHARE * self._free_bytes),
            ends_s=ends_s - _CLOSING_S,
            group_bytes=_LEARNER_BYTES + int(cores * (_SAMPLER_BYTES + _ENV_BYTES)),
            samplers_only=self.samplers_only,
            **{"interrupts": self.interrupts, **more},
        )

    def search(
        self, problem: TuningProblem, measurer: Measurer, note: str | None, *, spent_s: float = 0.0
    ) -> dict[str, Any]:
        """Searches with ``measurer``; stores and returns the record, with a ``note`` if there is one."""
        start, say = AWAKE(), self.listener.say
        load, cores = ExternalLoad(self.machine.cores.ids), self.machine.cores.usable
        measurer.step_us = self.probe.step_us_median

        def external_cores() -> float | None:
            # Under a quota, other programs on these cores need not take anything from this one.
            return load.cores() if cores >= len(self.machine.cores.ids) else None

        def on_result(result: TrialResult) -> None:
            say(result_line(problem, result))
            self.listener.on_result(result)

        try:
            with measurer:
                search = tune(problem, measurer, on_result, busy=lambda: _is_busy(external_cores(), self.machine))
        except OSError as error:  # the system has no process, descriptor or disk left
            search = Search(problem, measurer, on_result)
            search.fall_back(f"nothing could be measured: {error}")
            search.conclude()
        seconds = AWAKE() - start + spent_s
        say(f"  measured in {seconds:.0f} s")
        record = self._record(search, external_cores(), seconds)
        record["notes"] += [note] if note is not None else []
        with contextlib.suppress(OSError):  # the next tuning measures again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, record | {"checksum": cache_key(record)})
        return record

    def _record(self, search: Search, external_cores: float | None, seconds: float) -> dict[str, Any]:
        config, machine, probe = self.settings.config, self.machine, self.probe
        result, provisional = search.as_json(), _doubts(search, external_cores, machine)
        notes = [*result["notes"], *provisional.values()]
        if external_cores is not None and external_cores >= _BUSY_CORES and LOAD not in provisional:
            notes.append(f"{_load_text(external_cores, machine)}: --fresh measures again once they are gone")
        if provisional:
            when = "later" if ROWS in provisional else "on mains"
            when = f"at a start {'on a quieter machine' if LOAD in provisional else when}"
            notes.append(f"provisional: used now, measured again by itself {when}; --fresh measures again now")
        # Values that were not measured keep their source, profile or default.
        chosen = result["choice"]
        if search.fell_back:
            chosen = {name: value for name, value in chosen.items() if value != _configured(config, name, machine)}
        return {
            **result,
            "notes": notes,
            "provisional": provisional,
            "fell_back": search.fell_back,
            "settings": chosen,
            "measured_at": time.strftime("%Y-%m-%d %H:%M"),
            "measured_s": time.time(),
            "seconds": seconds,
            "machine": dataclasses.asdict(machine),
            "machine_id": machine.identity(),
            "env": probe.spec.env_id,
            "algo": config.run.algo,
            "env_step_us_median": probe.step_us_median,
            "env_step_cv": probe.step_cv,
            "other_programs_cores": external_cores,
            "targets": dataclasses.asdict(config.tuning),
            "versions": versions(),
            "packages": probe.packages,
            "key": self._key,
            "tries": self._tries,
        }


# --- validity of a result ---

LOAD, BATTERY, ROWS = "load", "battery", "rows"  # causes that make a result provisional


def _is_busy(external_cores: float | None, machine: Machine) -> bool:
    """True if other programs take so much that measurements are not valid without them."""
    return external_cores is not None and external_cores >= max(_BUSY_CORES, _BUSY_SHARE * machine.cores.usable)


def _load_text(external_cores: float, machine: Machine) -> str:
    return f"other programs used {external_cores:.1f} of {machine.cores.usable:g} cores meanwhile"


def _doubts(search: Search, external_cores: float | None, machine: Machine) -> dict[str, str]:
    """Why a result is provisional: cause -> sentence; empty for a final one."""
    doubts = {}
    if search.doubts:
        doubts[ROWS] = "; ".join(search.doubts)
    if external_cores is not None and _is_busy(external_cores, machine):
        doubts[LOAD] = _load_text(external_cores, machine)
    if machine.power_source == "battery":
        doubts[BATTERY] = "measured on battery power"
    return doubts


def _outdated(record: dict[str, Any], probe: Probe, machine: Machine, interrupts: Stopping) -> str | None:
    """Why a result of the same key has to be measured again; None while it is valid, or no better one can be had."""
    then, now = record["env_step_us_median"], probe.step_us_median
    ratio = 1.0 if not now or not then else (now + _OWN_STEP_US) / (then + _OWN_STEP_US)
    if (then is None) != (now is None) or not 1.0 / _SAME_STEP < ratio < _SAME_STEP:
        before, after = ("more than a second" if one is None else f"{one:.0f} us" for one in (then, now))
        return f"an env step took {before} then and takes {after} now"
    causes = set(record["provisional"] or ()) - {BATTERY}  # a result on mains has another key
    if LOAD in causes:
        load = ExternalLoad(machine.cores.ids)
        end_s = time.monotonic() + _LOAD_CHECK_S
        while time.monotonic() < end_s:
            if interrupts.stop_requested:
                raise KeyboardInterrupt
            time.sleep(min(0.1, _LOAD_CHECK_S))
        now_cores = load.cores()
        return "the machine is quieter now" if now_cores <= _QUIETER * record["other_programs_cores"] else None
    tries, age_s = record["tries"] or 1, time.time() - (record["measured_s"] or 0.0)
    if causes and (tries < _MAX_TRIES or age_s > _TRY_AGAIN_S):
        return f"that result is provisional ({clean(record['provisional'][ROWS], 200)})"
    return None


def problem_of(
    settings: Settings, probe: Probe, machine: Machine, free_bytes: int, *, samplers_only: bool = False
) -> TuningProblem:
    """The tuning problem; ``samplers_only`` for a host without a learner. A ConfigError for a wrongly declared knob."""
    config = settings.config
    knobs = host_knobs() if samplers_only else knobs_of(config)
    values = {knob.name: _configured(config, knob.name, machine) for knob in knobs}
    if samplers_only and values[SAMPLERS] is None:
        values[SAMPLERS] = max(1, int(machine.cores.usable))
    kept = settings.kept & values.keys()
    # A resumed run keeps what its stored data depend on.
    pins = {knob.name for knob in knobs if settings.sources.get(knob.name) == USER} | kept
    resumed = frozenset({knob.name for knob in knobs if knob.fixed and settings.sources.get(knob.name) == RESUMED})
    pins |= resumed
    if config.learner.device == "auto":
        pins.discard(DEVICE)
    if LEARNERS in values:
        values = _with_learners(values, pins, config.rollout_cores(machine.cores.usable))
    if SYNC_INTERVAL in values and values[SYNC_INTERVAL] is None:
        samplers = values[ROLLOUT_SAMPLERS] // values.get(LEARNERS, config.run.learners)
        values[SYNC_INTERVAL] = config.rollout_interval(samplers * values[ROLLOUT_ENVS])
    on_policy, paired = config.on_policy is not None, probe.spec.choices is None
    engine = engine_of(probe.spec.env_id) is not None
    row_bytes = 1 if on_policy else config.algorithm.row_layout(probe.spec).step_bytes
    return TuningProblem(
        knobs=ordered(knobs),
        configured=Setting(values),
        pins=frozenset(pins),
        kept=kept,
        resumed=resumed,
        targets=config.tuning,
        trial=ROLLOUT if on_policy or samplers_only else JOINT,
        usable_cores=machine.cores.usable,
        physical_cores=machine.cores.physical,
        memory_bytes=free_bytes,
        step_us=probe.step_us_median,
        step_cpu_share=probe.step_cpu_share,
        row_bytes=row_bytes,
        learning_starts=config.replay.learning_starts,
        samplers=config.samplers_beside(machine.cores.usable),
        sampler_bytes=max(_SAMPLER_BYTES, probe.memory_bytes + _SAMPLER_BYTES // 2),
        env_bytes=_ENGINE_ENV_BYTES if engine else max(_ENV_BYTES, probe.memory_bytes // 2),
        learner_bytes=_LEARNER_BYTES,
        one_call=engine,
        devices=_devices(machine, config.learner, pins, paired),
        paired=paired,
        balanced=config.data_flow.balanced,
        observer_cores=0.0 if samplers_only else observer_cores(config),
    )


def _configured(config: Config, name: str, machine: Machine) -> Any:
    """Value of a run without the tuner; None if not known yet."""
    part, item = name.split(".")
    owner = (config.on_policy or config.algorithm) if part == config.run.algo else getattr(config, part)
    value = getattr(owner, item)
    if name == DEVICE:
        return canonical_device(value)
    return config.rollout_samplers(machine.cores.usable) if name == ROLLOUT_SAMPLERS and value is None else value


def _with_learners(values: dict[str, Any], pins: set[str], usable: float) -> dict[str, Any]:
    """The values for a mode whose number of learners is chosen: at least two at first, each with a sampler."""
    cores, samplers = max(2, min(int(usable), MAX_LEARNERS)), values[ROLLOUT_SAMPLERS]
    learners = values[LEARNERS]
    if LEARNERS not in pins:
        fitting = [count for count in range(2, cores + 1) if samplers % count == 0]
        learners = cores if ROLLOUT_SAMPLERS not in pins else max(fitting, default=min(samplers, MAX_LEARNERS))
    if ROLLOUT_SAMPLERS not in pins:
        samplers = learners * max(1, int(usable) // learners)
    return values | {LEARNERS: learners, ROLLOUT_SAMPLERS: samplers}


def _devices(machine: Machine, learner: LearnerConfig, pins: set[str], can_split: bool) -> tuple[Device, ...]:
    """Devices of the learner: CPU, each visible GPU, the first two as a split; float32 unless asked otherwise."""
    precision = learner.precision if PRECISION in pins else "float32"
    on_cpu, on_gpu = ("bfloat16", "float32") if precision == "bfloat16" else ("float32", precision)
    memory = {f"cuda:{gpu.index}": gpu.memory_free_bytes for gpu in machine.gpus}
    if can_split and len(machine.gpus) >= 2:
        free = [gpu.memory_free_bytes for gpu in machine.gpus[:2] if gpu.memory_free_bytes is not None]
        memory["cuda:0+cuda:1"] = min(free, default=None)
    if DEVICE in pins and is_split(learner.device):
        memory.setdefault(canonical_device(learner.device), None)
    gpus = (
        Device(name=name, memory_bytes=free_bytes, precision=on_gpu if "cuda" in name else on_cpu)
        for name, free_bytes in memory.items()
    )
    return Device(name="cpu", precision=on_cpu), *gpus


_SPEED = ("overlap", "gpu_replay", "updates_per_launch", "compile", "device", "threads", "precision")
"""Settings of the learner on which rates depend, also where no knob is for them."""


def _cached_by(settings: Settings, probe: Probe, machine: Machine, *, samplers_only: bool) -> dict[str, Any]:
    """Everything that a result depends on, except the time of an env step, which always varies."""
    untimed = dataclasses.replace(probe, step_us_median=None, step_cv=None, step_cpu_share=1.0)
    config, problem = settings.config, problem_of(settings, untimed, machine, 0, samplers_only=samplers_only)
    # Learning rates, discounts and other floats do not change how long anything takes.
    part = dataclasses.asdict(config.on_policy or config.algorithm)
    custom = [knob for knob in problem.knobs if knob.varied_last]
    return {
        **({"samplers_only": True} if samplers_only else {}),
        "schema": SCHEMA,
        "machine": machine.identity(),
        "versions": versions(),
        "mode": config.run.mode,
        "battery": machine.power_source == "battery",
        "packages": probe.packages,
        "physical_cores": problem.physical_cores,  # two usable cores may be one, if this process is pinned
        "env": {
            name: value for name, value in dataclasses.asdict(probe.spec).items() if name not in _SPEED_IRRELEVANT_FACTS
        },
        "normalize_obs": config.env.normalize_obs,
        "tuning": {name: one for name, one in dataclasses.asdict(config.tuning).items() if name not in _NOT_MEASURED},
        "algo": config.run.algo,
        "correction": config.rollout.correction,
        "formula": formula(problem),
        "mixing": dataclasses.asdict(config.gala) if config.data_flow.mixes_parameters else None,
        "algorithm": {name: value for name, value in part.items() if not isinstance(value, float)},
        "configured": {name: repr(value) for name, value in problem.configured.items()},
        "pins": sorted(problem.pins),
        "learning_starts": config.replay.learning_starts,
        "learner": {key: getattr(config.learner, key) for key in _SPEED if f"learner.{key}" not in problem.configured},
        "own": {knob.name: list(map(repr, knob.candidates(problem, problem.configured))) for knob in custom},
    }


def check_tunable(config: Config) -> None:
    """Raises a ConfigError if the mode has nothing to choose for the algorithm, or has several learners."""
    if config.run.learners > 1 and LEARNERS not in knob_names(config.data_flow):
        raise ConfigError(
            f"--auto: it tunes a single learner, not run.learners = {config.run.learners}"
            "; remove --auto, or set --batch-size and --samplers as in a tuned run with one learner"
        )
    if not config.data_flow.tunable:
        flows = {mode.name: mode.data_flow(on_policy=config.on_policy is not None) for mode in DECLARED}
        others = [name for name, data_flow in flows.items() if data_flow and data_flow.tunable]
        raise ConfigError(
            f"--auto: {config.run.algo} in --mode {config.run.mode} has nothing to tune; use --mode "
            f"{' or '.join(others)}, or remove --auto"
        )


# --- results of earlier tunings ---

_MAX_BYTES = 4_000_000


def cache_dir() -> Path:
    """Cache directory: ``$XDG_CACHE_HOME/spreeze``, ``~/.cache/spreeze``, or a temporary one."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spreeze"
    except RuntimeError:  # this user has no home
        return Path(tempfile.gettempdir()) / f"spreeze-cache-{os.getuid()}"


def cache_key(values: dict[str, Any]) -> str:
    """Key of a result in the cache, which changes with each of the facts that it depends on; checksum of a result."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _changed_s(path: Path) -> float | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def layer_of(record: dict[str, Any]) -> Layer:
    return Setting(record["settings"]).layer()


def _load(path: Path, key: str, settings: Settings, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The cached result, or None; ``say`` gets a message about a damaged one."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("checksum") != cache_key(record):
            raise ValueError("its checksum differs")
        if record["schema"] != SCHEMA or record["key"] != key:
            raise ValueError("it has another version or key")
        settings.with_layer(layer_of(record))  # impossible values must not stop the run
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        say(f"the cached tuning result is damaged ({text}); measuring again")
        return None


# --- one tuner at a time ---

_LOCK_WAIT_S = 75.0  # A tuning takes a minute.


def lock_path() -> Path:
    """The file whose lock all tuners of this machine share; those with another ``TMPDIR`` count as other load."""
    return Path(tempfile.gettempdir()) / "spreeze-tune.lock"


@contextlib.contextmanager
def only_tuner(say: Callable[[str], None], interrupts: Stopping) -> Iterator[str | None]:
    """Holds the lock of this machine's tuners: two would measure each other. Yields a note if it is not available.

    A lock held for longer than a tuning takes is ignored, and so is anything but a file at its path. A
    KeyboardInterrupt if the user stops.
    """
    fd = _open_lock(say)
    if fd is None:
        yield None
        return
    try:
        yield _wait_for_lock(fd, say, interrupts)
    finally:
        os.close(fd)


def _open_lock(say: Callable[[str], None]) -> int | None:
    """A descriptor of the lock's file; None, with a message, if anything else is at its path."""
    path = lock_path()
    # O_NONBLOCK: a FIFO would wait for its other end.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(fd, 0o644)  # other users' tuners wait for it too, whatever the umask
        except FileExistsError:  # in a sticky folder, another user's file opens only without O_CREAT
            fd = os.open(path, flags)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        why = "it is not a regular file"
        os.close(fd)
    except OSError as error:
        why = error.strerror or str(error)
    say(f"{clean(path)} cannot be locked ({why}): measuring without waiting for other tuners")
    return None


def _wait_for_lock(fd: int, say: Callable[[str], None], interrupts: Stopping) -> str | None:
    """Waits until the lock is free or no longer worth waiting for; then returns a note on its holder."""
    deadline, reported = time.monotonic() + _LOCK_WAIT_S, False
    while (locked := take_lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)) is False:
        who, stopped = _holder(fd)
        if interrupts.stop_requested:
            raise KeyboardInterrupt
        if stopped or time.monotonic() > deadline:
            why = "is stopped" if stopped else f"still holds the tuners' lock after {_LOCK_WAIT_S:.0f} s"
            say(f"{who} {why}: measuring anyway")
            return f"measured while another tuner held the lock: {who}"
        if not reported:
            say(f"another tuner is measuring this machine: {who}; waiting for it, {_LOCK_WAIT_S:.0f} s at most")
            reported = True
        time.sleep(0.2)
    if locked is None:
        say(f"{clean(lock_path())} cannot be locked (no locks there): measuring without waiting for other tuners")
    return None


def _holder(fd: int) -> tuple[str, bool]:
    """Description of the process that locks a file, and whether it is stopped."""
    inode = str(os.fstat(fd).st_ino)
    with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # 5: FLOCK ADVISORY WRITE 4711 08:01:131 0 EOF
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
                process = psutil.Process(int(fields[4]))
                command = clean(" ".join(process.cmdline()) or process.name(), 100)
                holder = f"process {process.pid} of {clean(process.username(), 40)} ({command})"
                return holder, process.status() == psutil.STATUS_STOPPED
    return "a process that this one cannot see", False
