"""Limits of a task's environment: how many can exist at a time, and how many fit into memory and start-up time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from spreeze.config.layers import USER, Layer, Settings, Values
from spreeze.envs.families import engine_of
from spreeze.envs.probe import Probe
from spreeze.errors import ConfigError, ResourceError
from spreeze.formatting import size
from spreeze.workers.episodes.lockstep import envs_at_once

_LEARNER_BYTES, _PROCESS_BYTES = 450_000_000, 80_000_000
"""Memory of a learner, and of a process with an environment, the environment excluded."""
_KEPT_SHARE = 0.9  # Share of the free memory that a plan may take.
_SMALL_SHARE = 0.25  # Share of the free memory below which environments are small, and nothing is changed for them.
_PATIENCE_S = 40.0  # longest planned start of a sampler's environments, one after the other, if they are slow to start
_SLOW_START_S = 5.0


class Counts(NamedTuple):
    """Environments of a run."""

    samplers: int
    per_sampler: int
    max_envs: int  # environments of the evaluator at a time; 0: it has none
    pictures: bool


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Numbers of environments and samplers that a plan takes over."""

    samplers: int
    settings: Settings
    reasons: dict[str, str] = field(default_factory=dict)
    single_env: bool = False
    max_envs: int | None = None
    sampler_bytes: int = 0


def allowed(
    settings: Settings, probe: Probe, samplers: int, *, free_bytes: int, shared_bytes: int, samplers_are_set: bool
) -> Allowed:
    """Lowers what the user did not set to what the environment allows; ``shared_bytes`` is the run's shared memory.

    A ConfigError if the user requested more than is possible, a ResourceError if not even the least fits into memory.
    """
    if probe.alone is not None:
        return _alone(settings, probe, samplers, samplers_are_set=samplers_are_set)
    config = settings.config
    part = "sampling" if config.on_policy is None else "rollout"
    key = f"{part}.envs_per_sampler"
    max_envs = min(config.evaluation.episodes, envs_at_once(probe.spec)) if config.evaluation.enabled else 0
    wanted = Counts(samplers, getattr(config, part).envs_per_sampler, max_envs, config.visualizer.enabled)
    counts, reasons = wanted, dict[str, str]()
    by_setting = {"per_sampler": key, "pictures": "visualizer.enabled"}
    fixed = {name for name, setting in by_setting.items() if settings.sources.get(setting) == USER}
    fixed |= {"samplers"} if samplers_are_set else set()
    if probe.start_s > _SLOW_START_S and "per_sampler" not in fixed:
        in_time = max(1, int(_PATIENCE_S // probe.start_s))
        if in_time < counts.per_sampler:
            counts = counts._replace(per_sampler=in_time)
            reasons[key] = f"{in_time}: an environment takes {probe.start_s:.0f} s to start"
    if engine_of(probe.spec.env_id) is None:
        further_bytes, other_bytes = _further(probe), _LEARNER_BYTES + shared_bytes
        demand = _Demand(probe.spec.env_id, probe.memory_bytes, further_bytes, other_bytes)
        fitting = demand.lowered(counts, free_bytes, fixed, config.run.learners)
        why = f"an environment takes {size(demand.further_bytes)} of memory, {size(free_bytes)} are free"
        if fitting.per_sampler != counts.per_sampler:
            reasons[key] = f"{fitting.per_sampler}: {why}"
        if fitting.samplers != counts.samplers:
            reasons[f"{part}.samplers"] = f"{fitting.samplers}: {why}"
        if fitting.pictures != counts.pictures:
            reasons["visualizer.enabled"] = f"false: {why}"
        if fitting.max_envs != counts.max_envs:
            reasons["evaluation.episodes"] = f"{fitting.max_envs} at a time: {why}"
        counts = fitting
    values: Values = (
        {part: {"envs_per_sampler": counts.per_sampler}} if counts.per_sampler != wanted.per_sampler else {}
    )
    if counts.pictures != wanted.pictures:
        values["visualizer"] = {"enabled": False}
    first, further = probe.memory_bytes, _further(probe)
    return Allowed(
        samplers=counts.samplers,
        settings=_with(settings, values),
        reasons=reasons,
        max_envs=None if counts.max_envs == wanted.max_envs else counts.max_envs,
        sampler_bytes=first + (counts.per_sampler - 1) * further,
    )


_TUNABLE_START_S = 8.0


def untunable_env(probe: Probe) -> str | None:
    """Why the tuner cannot measure with this environment; None if it can."""
    if probe.alone is not None and not probe.alone_in_process:
        return f"only one {probe.spec.env_id} at a time"
    if probe.start_s > _TUNABLE_START_S:
        return f"{probe.spec.env_id} takes {probe.start_s:.0f} s to start, too long for the tuner's measurements"
    return None


def _with(settings: Settings, values: Values) -> Settings:
    return settings.with_layer(Layer("environment", values)) if values else settings


def _further(probe: Probe) -> int:
    return probe.memory_bytes if probe.further_env_bytes is None else probe.further_env_bytes


@dataclass(frozen=True)
class _Demand:
    env_id: str
    first_bytes: int
    further_bytes: int
    other_bytes: int  # Memory of the learner and shared memory.

    def envs_bytes(self, counts: Counts) -> int:
        """Memory of all environments."""
        return sum(self.first_bytes + (envs - 1) * self.further_bytes for envs in self._processes(counts))

    def total_bytes(self, counts: Counts) -> int:
        return self.other_bytes + self.envs_bytes(counts) + len(self._processes(counts)) * _PROCESS_BYTES

    def _processes(self, counts: Counts) -> list[int]:
        return (
            [counts.per_sampler] * counts.samplers + [counts.max_envs] * (counts.max_envs > 0) + [1] * counts.pictures
        )

    def lowered(self, counts: Counts, free_bytes: int, fixed: set[str], learners: int) -> Counts:
        """The most environments that fit into memory, first fewer of the evaluator; a ResourceError if none do."""
        if self.envs_bytes(counts) < _SMALL_SHARE * free_bytes:
            return counts
        wanted = counts
        minima = {"max_envs": min(counts.max_envs, 1), "per_sampler": 1, "samplers": learners, "pictures": 0}
        for name, minimum in minima.items():
            while name not in fixed and getattr(counts, name) > minimum and not self._fits(counts, free_bytes):
                counts = counts._replace(**{name: type(getattr(counts, name))(getattr(counts, name) - 1)})
        if self._fits(counts, free_bytes):
            return counts
        few = Counts(counts.samplers, 1, min(counts.max_envs, 1), pictures=False)
        while (
            self._fits(few._replace(per_sampler=few.per_sampler + 1), free_bytes)
            and few.per_sampler < wanted.per_sampler
        ):
            few = few._replace(per_sampler=few.per_sampler + 1)
        remedy = "close other programs, or give it a machine with more memory"
        if self._fits(few, free_bytes):
            remedy = f"use --envs-per-sampler {few.per_sampler}" + (" and --no-visualizer" if counts.pictures else "")
        elif "samplers" in fixed and counts.samplers > learners:
            remedy = "use fewer --samplers"
        raise ResourceError(
            f"{self.env_id}: an environment takes {size(self.further_bytes)} of memory; {counts.samplers} "
            f"sampler{'s' * (counts.samplers > 1)} with {counts.per_sampler} each"
            f"{', one of the evaluator' if counts.max_envs else ''}"
            f"{', one of the visualizer' if counts.pictures else ''} "
            f"and the learner need {size(self.total_bytes(counts))}, {size(free_bytes)} are free; {remedy}"
        )

    def _fits(self, counts: Counts, free_bytes: int) -> bool:
        return self.total_bytes(counts) <= _KEPT_SHARE * free_bytes


def _alone(settings: Settings, probe: Probe, samplers: int, *, samplers_are_set: bool) -> Allowed:
    config, env_id = settings.config, probe.spec.env_id
    part = "sampling" if config.on_policy is None else "rollout"
    num_envs, where = getattr(config, part).envs_per_sampler, "in a process " if probe.alone_in_process else ""
    why = f"there can be one {env_id} {where}at a time (a second one: {probe.alone})"
    if num_envs > 1 and settings.sources.get(f"{part}.envs_per_sampler") == USER:
        raise ConfigError(f"{part}.envs_per_sampler = {num_envs}: {why}; use --envs-per-sampler 1, or remove it")
    reasons = {f"{part}.envs_per_sampler": f"1: {why}"}
    values: Values = {part: {"envs_per_sampler": 1}}
    if probe.alone_in_process and not (config.data_flow.serial and samplers == 1):
        return Allowed(samplers=samplers, settings=_with(settings, values), reasons=reasons, max_envs=1)
    if samplers > 1 and samplers_are_set:
        raise ConfigError(f"{part}.samplers = {samplers}: {why}; use --samplers 1, or remove it")
    if config.run.learners > 1:
        raise ConfigError(f"run.learners = {config.run.learners}: each needs a sampler, and {why}; remove it")
    reasons[f"{part}.samplers"] = "1: as for envs_per_sampler"
    if config.evaluation.enabled:
        reasons["evaluation.enabled"] = "by the sampler, in turn with sampling, in the one environment"
    if config.visualizer.enabled:
        reasons["visualizer.enabled"] = "false: it would need an environment of its own"
        values["visualizer"] = {"enabled": False}
    return Allowed(samplers=1, settings=_with(settings, values), reasons=reasons, single_env=True, max_envs=1)
