"""The tuner at work: facts, cache, one tuner at a time, and the settings layer that comes out."""
from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

from spreeze.config.layers import Layer, Settings
from spreeze.config.modes import DECLARED, REPLAY_KNOBS
from spreeze.config.schema import PARTS, Config
from spreeze.envs.probe import Probe, probe_env
from spreeze.errors import ConfigError
from spreeze.machine.hardware import Machine, memory_limits
from spreeze.machine.utilisation import ExternalLoad
from spreeze.run_directory import versions
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.cache import cache_key, layer_of, load, only_tuner, save
from spreeze.tuner.measure import ReplayMeasurer
from spreeze.tuner.problem import SCHEMA, Configured, Device, Pins, Targets, TrialResult, TuningProblem
from spreeze.tuner.rollout_measure import RolloutMeasurer
from spreeze.tuner.rollout_search import RolloutProblem, RolloutSetting, tune_rollouts
from spreeze.tuner.search import tune

BUDGET_S = 60.0
"""All of a tuning, the start of this process included."""
_CLOSING_S = 1.5
"""Of it, what ending the last processes and writing the result take."""
_SAMPLER_BYTES, _ENV_BYTES, _LEARNER_BYTES = 120_000_000, 30_000_000, 500_000_000
"""Memory of a sampler with its first environment, of each further one (measured on Bullet tasks), of the learner."""
_CAP_SHARE = 0.8
"""A candidate may take this share of the memory that is free."""
_PROBE_STEPS = 2000
_BUSY_CORES = 0.1
"""Load of other programs that is worth a word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listener:
    """Who is told what the tuner does, as it does it."""

    say: Callable[[str], None]
    on_row: Callable[[TrialResult], None] = lambda row: None
    before: Callable[[], None] = lambda: None
    """Called once, before anything is measured; not where the answer is known."""


def tuned_layer(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, listener: Listener, *, fresh: bool,
    spent_s: float = 0.0,
) -> tuple[Layer, dict[str, Any]]:
    """The tuner's choice as a settings layer, and its record for ``tune.json``.

    Args:
        settings: what is set so far; values whose source is the user are pins.
        probe: the environment as it was tried; its step is timed here if it was not yet.
        machine: facts.
        interrupts: the user's wish to stop.
        listener: hears each line and each measured row.
        fresh: measure even if the answer is known.
        spent_s: age of this process, which counts against the budget.

    Raises:
        SpreezeError: nothing could be measured, nothing is to choose, or a pinned value that cannot work.
        KeyboardInterrupt: the user asked to stop.
    """
    check_tunable(settings.config)
    key = cache_key(_facts(settings, probe, machine))
    record = None if fresh else load(key, SCHEMA, listener.say)
    if record is not None:
        listener.say(f"tuned before on this machine ({record['measured_at']}), reused; --fresh measures again")
        return layer_of(record), record
    listener.before()
    with only_tuner(listener.say, interrupts):
        record = {**_measured(settings, probe, machine, interrupts, listener, spent_s), "key": key}
    save(key, record)
    return layer_of(record), record


def _measured(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, listener: Listener, spent_s: float
) -> dict[str, Any]:
    start = time.monotonic()
    listener.say(f"tuning for {probe.spec.env_id} on this machine (under a minute):")
    load = ExternalLoad(machine.cores.ids)

    def told(row: TrialResult) -> None:
        listener.say(row.line())
        listener.on_row(row)

    search = _replay_search if settings.config.on_policy is None else _rollout_search
    found, probe = search(settings, probe, machine, interrupts, told, start + BUDGET_S - spent_s - _CLOSING_S)
    others = load.cores()
    seconds = time.monotonic() - start + spent_s
    listener.say(f"  measured in {seconds:.0f} s")
    known = {name for name in found["choice"] if _is_setting(name)}
    return {
        **found, "notes": [*found["notes"], *_circumstances(machine, others)],
        "settings": {name: value for name, value in found["choice"].items() if name in known},
        "measured_at": time.strftime("%Y-%m-%d %H:%M"), "seconds": seconds, "machine": machine.to_json(),
        "machine_id": machine.identity(), "env": probe.spec.env_id, "algo": settings.config.run.algo,
        "env_step_us_median": probe.step_us_median, "env_step_cv": probe.step_cv, "other_programs_cores": others,
        "targets": dataclasses.asdict(_targets(settings)), "versions": versions(),
    }


def _replay_search(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, told: Callable[[TrialResult], None],
    ends_s: float,
) -> tuple[dict[str, Any], Probe]:
    """Batch, learner and samplers of a mode with replay; the environment's step is timed where it was not yet."""
    plan = RunPlan(settings=settings, spec=probe.spec, samplers=1, free_core=False)
    free_bytes = memory_limits().usable_bytes
    with ReplayMeasurer(
        plan, usable_cores=machine.cores.usable, memory_cap_bytes=int(_CAP_SHARE * free_bytes),
        group_bytes=_LEARNER_BYTES + int(machine.cores.usable * (_SAMPLER_BYTES + _ENV_BYTES)),
        ends_s=ends_s, interrupts=interrupts,
    ) as measuring:
        if probe.step_us_median is None:
            spec = probe.spec
            probe = probe_env(spec.env_id, spec.import_module, steps=_PROBE_STEPS, plain=spec.plain, args=spec.args,
                              image=dataclasses.asdict(settings.config.image), interrupted=lambda: interrupts.asked)
        measuring.step_us = probe.step_us_median
        knobs = _knobs(settings, probe, machine, free_bytes, plan.layout.row_bytes, measuring.seconds_left())
        return tune(knobs, measuring, told).as_json(), probe


def _rollout_search(
    settings: Settings, probe: Probe, machine: Machine, interrupts: Interrupts, told: Callable[[TrialResult], None],
    ends_s: float,
) -> tuple[dict[str, Any], Probe]:
    """Executors, environments, actors and interval of the HTS-RL mode."""
    free_bytes = memory_limits().usable_bytes
    knobs = rollout_knobs(
        settings, machine.cores.usable, free_bytes, executor_bytes=max(_SAMPLER_BYTES, probe.memory_bytes
        + _SAMPLER_BYTES // 2), env_bytes=max(_ENV_BYTES, probe.memory_bytes // 2), learner_bytes=_LEARNER_BYTES,
    )
    plan = RunPlan(settings=settings, spec=probe.spec, samplers=knobs.configured.executors, free_core=False)
    measuring = RolloutMeasurer(plan, usable_cores=machine.cores.usable, memory_cap_bytes=int(_CAP_SHARE * free_bytes),
                                 ends_s=ends_s, interrupts=interrupts)
    return tune_rollouts(knobs, measuring, told).as_json(setting_names(settings.config)), probe


def _is_setting(name: str) -> bool:
    part, item = name.split(".")
    return part in PARTS and item in PARTS[part].__dataclass_fields__


def _circumstances(machine: Machine, others: float | None) -> list[str]:
    """What made this measurement other than one of an idle machine on mains."""
    found = []
    if others is not None and others >= _BUSY_CORES:
        found.append(f"other programs kept {others:.1f} of {machine.cores.usable:g} cores busy meanwhile: "
                     "with --fresh the tuner measures again once they are gone")
    if machine.power_source == "battery":
        found.append("measured on battery: on mains rates may be higher")
    return found


def _knobs(
    settings: Settings, probe: Probe, machine: Machine, free_bytes: int, row_bytes: int, budget_s: float
) -> TuningProblem:
    config = settings.config
    return TuningProblem(
        usable_cores=machine.cores.usable, physical_cores=machine.cores.physical, memory_bytes=free_bytes,
        # On Linux replay lies in nameless memory, which only main memory bounds.
        shared_memory_bytes=None if sys.platform == "linux" else machine.shared_memory_free_bytes,
        step_us=probe.step_us_median, step_cv=probe.step_cv, row_bytes=row_bytes,
        sampler_bytes=max(_SAMPLER_BYTES, probe.memory_bytes + _SAMPLER_BYTES // 2),
        env_bytes=max(_ENV_BYTES, probe.memory_bytes // 2), learner_bytes=_LEARNER_BYTES,
        devices=_devices(machine, probe.spec.num_actions is None, _pins(settings)),
        paired=probe.spec.num_actions is None,
        configured=Configured(
            batch_size=config.learner.batch_size, capacity=config.replay.capacity,
            learning_starts=config.replay.learning_starts,
            samples_per_insert_min=config.replay.samples_per_insert_min,
            samples_per_insert_max=config.replay.samples_per_insert_max,
        ),
        pins=_pins(settings),
        targets=_targets(settings),
        budget_s=budget_s,
    )


def _targets(settings: Settings) -> Targets:
    part = settings.config.tuning
    return Targets(objective=part.objective, cpu_target=part.cpu_target, gpu_target=part.gpu_target,
                   leave_free=part.leave_free)


def _devices(machine: Machine, can_split: bool, pins: Pins) -> tuple[Device, ...]:
    """Where a learner may run: the processor, every GPU that this process can see, the first two as a split.

    In float32; another precision only where the user asks for it, since it changes what is learned.
    """
    on_cpu = ("bfloat16",) if pins.precision == "bfloat16" else ("float32",)
    on_gpu = ("tf32",) if pins.precision == "tf32" else ("float32",)
    found = [Device(name="cpu", precisions=on_cpu)]
    found += [Device(name=f"cuda:{gpu.index}", memory_bytes=gpu.memory_free_bytes, precisions=on_gpu)
              for gpu in machine.gpus]
    if can_split and len(machine.gpus) >= 2:
        free = [gpu.memory_free_bytes for gpu in machine.gpus[:2] if gpu.memory_free_bytes is not None]
        found.append(Device(name="cuda:0+cuda:1", memory_bytes=min(free, default=None), precisions=on_gpu))
    if pins.device is not None and "+" in pins.device and pins.device not in {device.name for device in found}:
        found.append(Device(name=pins.device, precisions=on_gpu if "cuda" in pins.device else on_cpu))
    return tuple(found)


def _pins(settings: Settings) -> Pins:
    """The user's own values; a resumed run keeps the size of its replay."""
    values: dict[str, Any] = {}
    for name in REPLAY_KNOBS:
        part, item = name.split(".")
        source = settings.sources.get(name)
        if source == "user" or (source == "resumed run" and name == "replay.capacity"):
            values[item] = getattr(getattr(settings.config, part), item)
    device = settings.config.learner.device
    if settings.sources.get("learner.device") == "user" and device != "auto":
        values["device"] = {"cuda": "cuda:0", "split": "cuda:0+cuda:1"}.get(device, device)
    return Pins(**values)


def _facts(settings: Settings, probe: Probe, machine: Machine) -> dict[str, Any]:
    """Everything that a result depends on."""
    config = settings.config
    # Step sizes, discounts and other floats do not change how long anything takes.
    part = dataclasses.asdict(config.on_policy or config.algorithm)
    algorithm = {name: value for name, value in part.items() if not isinstance(value, float)}
    spec = {name: value for name, value in dataclasses.asdict(probe.spec).items() if name != "reward_threshold"}
    return {
        "schema": SCHEMA, "machine": machine.identity(), "env": spec, "normalize_obs": config.env.normalize_obs,
        "algo": config.run.algo, "algorithm": algorithm, "tuning": dataclasses.asdict(config.tuning),
        "learner": [config.learner.batch_size, config.learner.device],
        "replay": [config.replay.capacity, config.replay.learning_starts, config.replay.samples_per_insert_min,
                   config.replay.samples_per_insert_max],
        "pins": dataclasses.asdict(_pins(settings)), "versions": versions(),
        "rollout": rollout_facts(settings, machine.cores.usable) if config.on_policy is not None else None,
    }


def check_tunable(config: Config) -> None:
    """Rejects a mode in which nothing is to choose.

    Raises:
        ConfigError: the mode declares no knob for that kind of algorithm, or several learners are asked for.
    """
    if config.run.learners > 1:
        raise ConfigError(f"--auto: it measures one learner and its samplers, not run.learners = {config.run.learners}"
                          "; leave --auto out, or set --batch-size and --samplers as a tuned run of one learner has it")
    if not config.wiring.knobs:
        found = [mode.wiring(on_policy=config.on_policy is not None) for mode in DECLARED]
        others = [mode.name for mode, wiring in zip(DECLARED, found, strict=True) if wiring and wiring.knobs]
        raise ConfigError(f"--auto: {config.run.algo} in --mode {config.run.mode} leaves nothing to choose; "
                          f"use --mode {' or '.join(others)}, or leave --auto out")


def setting_names(config: Config) -> dict[str, str]:
    """Field of ``RolloutSetting`` -> the setting that it is; A2C takes an interval in one update."""
    names = {}
    for knob in config.wiring.knobs:
        part, name = knob.split(".")
        if part != "algorithm":
            names[name] = knob
        elif hasattr(config.on_policy, name):
            names[name] = f"{config.run.algo}.{name}"
    return names


def configured(config: Config, usable_cores: float) -> RolloutSetting:
    """What a run would take without the tuner."""
    part = config.rollout
    return RolloutSetting(
        executors=part.executors or max(1, int(usable_cores)), envs_per_executor=part.envs_per_executor,
        actors=part.actors, sync_interval=part.sync_interval,
        minibatches=int(getattr(config.on_policy, "minibatches", 1)),
    )


def pins(settings: Settings) -> frozenset[str]:
    """What the user has set; a resumed run keeps everything that its stored interval depends on."""
    names = setting_names(settings.config)
    return frozenset(
        field for field, name in names.items()
        if settings.sources.get(name) == "user" or (settings.sources.get(name) == "resumed run" and field != "actors")
    )


def rollout_knobs(
    settings: Settings, usable_cores: float, memory_bytes: int, *, executor_bytes: int, env_bytes: int,
    learner_bytes: int,
) -> RolloutProblem:
    """Facts of the machine and of the task, for ``autotune.rollouts.tune_rollouts``."""
    config = settings.config
    return RolloutProblem(
        cores=usable_cores * (1.0 - config.tuning.leave_free), memory_bytes=memory_bytes,
        executor_bytes=executor_bytes, env_bytes=env_bytes, learner_bytes=learner_bytes,
        configured=configured(config, usable_cores), pins=pins(settings),
    )


def rollout_facts(settings: Settings, usable_cores: float) -> dict[str, Any]:
    """What a kept result depends on besides machine, task and algorithm."""
    found = configured(settings.config, usable_cores)
    return {"mode": settings.config.run.mode, "configured": repr(found), "pins": sorted(pins(settings)),
            "correction": settings.config.rollout.correction}
