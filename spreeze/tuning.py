"""The tuner at work: facts, cache, one tuner at a time, and the settings layer that comes out."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spreeze.autotune import sweep as autotune
from spreeze.envs.probe import Probe
from spreeze.errors import ConfigError, SpreezeError, WorkerError
from spreeze.hardware import Machine
from spreeze.modes.measure import measure_samplers, measure_updates
from spreeze.rundir import versions, write_json
from spreeze.settings import Layer, Settings, Values, resolve
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan

SCHEMA = 1
_TUNABLE = ("learner.batch_size", "learner.threads", "sampling.samplers", "sampling.envs_per_sampler")
_SAMPLER_BYTES, _ENV_BYTES = 120_000_000, 30_000_000
"""Memory of a sampler process and of each further environment (measured on Bullet tasks)."""
_LOCK_WAIT_S = 120.0


def cache_dir() -> Path:
    """Where results are kept: ``$XDG_CACHE_HOME/spreeze`` or ``~/.cache/spreeze``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spreeze"


def tuned_layer(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, *, fresh: bool,
    say: Callable[[str], None],
) -> tuple[Layer, dict[str, Any]]:
    """The tuner's choice as a settings layer, and its record for ``tune.json``.

    Raises:
        SpreezeError: nothing could be measured.
    """
    key = _key(settings, probe, machine)
    path = cache_dir() / f"tune-{key}.json"
    record = None if fresh else _read(path, say)
    if record is not None:
        say(f"tuned before on this machine ({record['measured_at']}), reused; --fresh measures again")
    else:
        with _only_tuner(say, interrupts):
            record = _measure(settings, probe, machine, interrupts, say)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, record)
    for reason in record["reasons"].values():
        say(f"  {reason}")
    if record["paper_batch_size"]:
        paper = record["paper_batch_size"]
        say(f"  (the Spreeze paper's rule, 0.85 of the highest frame rate, would take batch {paper})")
    return _layer(record), record


def _layer(record: dict[str, Any]) -> Layer:
    values: Values = {}
    for name, value in record["choice"].items():
        part, item = name.split(".")
        values.setdefault(part, {})[item] = value
    return Layer("tuner", values)


def _pinned(settings: Settings, name: str) -> Any:
    """The user's own value of a setting, or None where the tuner may choose."""
    if settings.sources.get(name) != "user":
        return None
    part, item = name.split(".")
    return getattr(getattr(settings.config, part), item)


def _measure(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, say: Callable[[str], None]
) -> dict[str, Any]:
    start = time.monotonic()
    say(f"tuning for {probe.spec.env_id} on this machine (under a minute):")
    config, pinned = settings.config, {name: _pinned(settings, name) for name in _TUNABLE}
    knobs = autotune.Knobs(
        usable_cores=machine.cores.usable, configured_batch=config.learner.batch_size,
        largest_batch=max(config.replay.capacity // 4, 1), step_us=probe.step_us_median,
        memory_for_samplers=max(1, machine.memory.usable_bytes // 2 // (_SAMPLER_BYTES + 8 * _ENV_BYTES)),
        batch_size=pinned["learner.batch_size"], threads=pinned["learner.threads"],
        samplers=pinned["sampling.samplers"], envs_per_sampler=pinned["sampling.envs_per_sampler"],
    )
    plan = RunPlan(settings=settings, spec=probe.spec, samplers=1, free_core=False)
    try:
        tuning = autotune.tune(
            knobs, lambda sizes, threads: measure_updates(plan, sizes, threads, interrupts),
            lambda counts, envs, batch, threads: measure_samplers(plan, counts, envs, batch, threads, interrupts), say,
        )
    except ValueError as error:
        raise WorkerError(f"tuning failed: {error}") from None
    seconds = time.monotonic() - start
    say(f"  measured in {seconds:.0f} s")
    return {
        "schema": SCHEMA, "measured_at": time.strftime("%Y-%m-%d %H:%M"), "seconds": seconds,
        "machine": machine.to_json(), "env": probe.spec.env_id, "algo": config.run.algo,
        "env_step_us_median": probe.step_us_median, "env_step_cv": probe.step_cv,
        "pinned": {name: value for name, value in pinned.items() if value is not None},
        "versions": versions(), **autotune.as_json(tuning),
    }


def _key(settings: Settings, probe: Probe, machine: Machine) -> str:
    """What a result depends on, as 16 hexadecimal digits."""
    config = settings.config
    facts = [
        SCHEMA, machine.identity(), probe.spec.env_id, probe.spec.plain, probe.spec.args,
        probe.spec.obs_dim, probe.spec.action_dim,
        config.run.algo,
        config.algorithm.hidden_sizes, config.algorithm.n_step, config.learner.batch_size, config.learner.device,
        config.replay.capacity,
        [_pinned(settings, name) for name in _TUNABLE], sorted((k, str(v)) for k, v in versions().items()),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read(path: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """A cached result, or None; a damaged one is said and measured anew."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA or set(record["choice"]) != set(_TUNABLE):
            raise ValueError("another schema")
        _ = record["reasons"].values(), record["measured_at"], record["paper_batch_size"]
        resolve([_layer(record)])  # impossible values are no reason to refuse the run
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        say(f"the cached tuning result is damaged ({error}); measuring again")
        return None
    return dict(record)


@contextlib.contextmanager
def _only_tuner(say: Callable[[str], None], interrupts: Interrupts) -> Iterator[None]:
    """One tuner on this machine at a time: two would measure each other."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        fd = os.open(cache_dir() / "tune.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline, told = time.monotonic() + _LOCK_WAIT_S, False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not told:
                    say("another tuner is measuring this machine; waiting for it")
                    told = True
                if time.monotonic() > deadline:
                    raise SpreezeError(f"another tuner still measures after {_LOCK_WAIT_S:.0f} s; try again") from None
                if interrupts.asked:
                    raise KeyboardInterrupt from None
                time.sleep(0.2)
        yield
    finally:
        os.close(fd)
