"""From a command line to layers of settings, and from settings and what the environment allows to the plan of a run."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.cli.arguments import user_values
from spreeze.cli.resume import settings_of
from spreeze.config.layers import (
    DEFAULT,
    RESUMED,
    SAMPLES_PER_INSERT_BOUNDS,
    USER,
    Layer,
    Settings,
    Values,
    default_of,
    iterate,
)
from spreeze.config.profiles import applicable, chosen_profile, or_in_runs_dir, reached_with
from spreeze.config.schema import FLAG_OF, MAX_DEFAULT_SAMPLERS, Config, RunConfig, StopConfig, marked
from spreeze.envs.families import engine_of
from spreeze.envs.make import default_env_id, parse_args, refuse_foreign
from spreeze.envs.probe import Probe
from spreeze.errors import ConfigError, ResourceError
from spreeze.formatting import clean, number, size
from spreeze.machine.hardware import Machine, check_precision, memory_limits, named_devices
from spreeze.process_identity import process_age_s
from spreeze.run_directory import read_run
from spreeze.runtime.cluster.ray_nodes import check_installed, check_reachable, parse_address
from spreeze.runtime.plan import EarlierSessions, RunPlan
from spreeze.transport.gossip import GossipHandle
from spreeze.transport.shared_memory import check_room
from spreeze.workers.episodes.lockstep import envs_at_once

_MAX_HOSTS, _LIKELY_HOSTS, _MAX_HOST_SHARDS = 32, 3, 64
"""Other hosts that may take part at a time, those that replay is laid out for, and shards of it for their rows."""


def fixed_settings(config: Config) -> list[str]:
    """The settings of a run that a resume cannot change, each as ``section.field``."""
    algo = config.run.algo
    fixed = [*marked("fixed"), *(f"{algo}.{name}" for name in config.sections()[algo].marked("fixed"))]
    if config.on_policy is not None:
        fixed += ["run.mode", "rollout.correction"]
        if not config.data_flow.asynchronous:  # episodes are repeated from their seeds
            fixed += ["run.seed", *(f"image.{item.name}" for item in dataclasses.fields(config.image))]
    elif config.replay.save:  # saved rows are discounted sums of n rewards
        fixed += [f"{algo}.n_step", *([f"{algo}.gamma"] if config.algorithm.n_step > 1 else [])]
    return fixed


def layers_of(args: argparse.Namespace, resumed: Path | None, machine: Machine) -> tuple[list[Layer], list[str]]:
    """Layers from weakest to strongest (the user's last), and notes to print."""
    user = Layer("user", user_values(args))
    if resumed is not None:
        if args.profile:
            raise ConfigError(f"--profile {args.profile}: a resumed run keeps its settings; change them with --set")
        if (name := user.values.get("run", {}).get("name")) not in (None, resumed.name):
            raise ConfigError(f"--name {name}: the resumed run keeps its name, {resumed.name}; remove it")
        module = user.values.get("env", {}).get("import_module")
        old = settings_of(resumed, module)
        values: dict[str, dict[str, Any]] = {}
        for section, name, value in iterate(old.config):
            values.setdefault(section, {})[name] = value
        notes = [f"continuing {resumed.name}", *_without_met_condition(values, resumed, user.values)]
        for key in fixed_settings(old.config):
            section, name = key.split(".")
            asked, before = user.values.get(section, {}).get(name), values[section][name]
            asked = tuple(asked) if isinstance(asked, list) else asked
            if key == "env.args" and asked is not None and parse_args(asked) == parse_args(before):
                continue  # another spelling of the same
            if asked is not None and asked != before:
                raise ConfigError(f"{key} = {asked} cannot change on resume: the run has {before}")
        env = values["env"]
        refuse_foreign(str(env["id"]), env["import_module"], module)
        return [Layer(RESUMED, values), user], [*notes, *_without_code(values, user.values)]
    notes, layers = [], []
    env_id = user.values.get("env", {}).get("id")
    if env_id is None:
        choice = default_env_id()
        env_id = choice.value
        layers.append(Layer(DEFAULT, {"env": {"id": env_id}}))
        notes.append(f"environment {env_id}: {choice.reason}")
    runs_dir = user.values.get("run", {}).get("runs_dir", RunConfig.runs_dir)
    profile = chosen_profile(or_in_runs_dir(args.profile, runs_dir), env_id)
    if profile is not None:
        notes.append(f"settings from {profile.source}")
        algo = (profile.choice or {}).get("algo")
        as_measured = algo is None or user.values.get("run", {}).get("algo", algo) == algo
        if as_measured and (reached := reached_with(profile, env_id)) is not None:
            notes.append(f"  what it reached: {reached}")
        profile, unfit = applicable(profile, machine.identity())
        layers.append(profile)
        notes += unfit
    return [*layers, user], notes


def _without_met_condition(values: Values, resumed: Path, asked: Values) -> list[str]:
    """Takes the stop condition that ended the run out of its settings; a note on those that still hold."""
    stop = values["stop"]
    flags = {name: FLAG_OF[f"stop.{name}"] for name in StopConfig.CONDITIONS}
    if (reason := read_run(resumed).get("exit_reason")) in flags:
        del stop[reason]
    kept = [name for name in flags if stop.get(name) is not None and name not in asked.get("stop", {})]
    conditions = ", ".join(f"{flags[name]} {number(stop[name])}" for name in kept)
    return [f"stop conditions as before: {conditions}"] if kept else []


def _without_code(values: dict[str, dict[str, Any]], asked: Values) -> list[str]:
    """Takes other hosts and callbacks out of a file's settings; notes on what was not asked for again.

    A file must not say whose code runs here: Ray runs what members of its cluster send.
    """
    notes = []
    address = values.get("cluster", {}).pop("address", None)
    if address is not None and "address" not in asked.get("cluster", {}):
        notes.append(f"it used other hosts (--cluster {clean(address, 80)}): pass that again to use them")
    callbacks = values.get("callback", {}).pop("classes", ())
    if callbacks and "classes" not in asked.get("callback", {}):
        flags = " ".join(f"--callback {clean(text, 80)!r}" for text in callbacks)
        notes.append(f"it had callbacks ({flags}): pass them again to use them")
    return notes


def cluster_note(address: str) -> str:
    """Line about ``--cluster``, or a ConfigError. The run itself joins later, since that takes seconds."""
    cluster = parse_address(address)
    check_installed()
    check_reachable(cluster)
    if cluster.local:
        hosts = "1 host" if cluster.local == 1 else f"{cluster.local} hosts"
        return f"--cluster {address}: {hosts} simulated on this machine, sharing its cores"
    return f"--cluster {address}: other hosts join while the run goes on"


def tune_arguments(settings: Settings) -> tuple[str, ...]:
    """Flags of ``spreeze tune`` with which another host measures samplers and environments for this task."""
    env, run = settings.config.env, settings.config.run
    flags = ["--env", env.id, "--algo", run.algo, "--mode", run.mode]
    flags += ["--import", env.import_module] if env.import_module else []
    flags += ["--plain-env"] if env.plain else []
    return (*flags, *(f"--env-arg={text}" for text in env.args))


def plan_of(
    settings: Settings,
    probe: Probe,
    machine: Machine,
    earlier: EarlierSessions,
    tuned: dict[str, str] | None = None,
    *,
    tune_hosts: bool = False,
    to_tune: bool = False,
) -> RunPlan:
    """Decides what is left open; ``tuned`` has the tuner's reasons, ``to_tune`` is a plan that it has still to see."""
    config, reasons, on_policy = settings.config, dict(tuned or {}), settings.config.on_policy is not None
    samplers, inference_workers = _samplers(settings, machine, reasons), config.inference_workers if on_policy else 0
    row_bytes = 0 if on_policy else config.algorithm.row_layout(probe.spec).step_bytes
    limited = allowed(
        settings,
        probe,
        samplers,
        free_bytes=memory_limits().usable_bytes,
        samplers_are_set=settings.sources.get("rollout.samplers" if on_policy else "sampling.samplers") == USER,
        shared_bytes=0 if to_tune else config.replay.capacity * row_bytes,
    )
    requested = limited.settings if on_policy else settings  # a resumed run has as many environments as its rollouts
    config, samplers, reasons = limited.settings.config, limited.samplers, reasons | limited.reasons
    settings = _with_intervals(limited.settings, samplers, reasons)
    cluster, all_learners = None if config.cluster.address is None else parse_address(config.cluster.address), 0
    if cluster is not None and config.data_flow.supports_remote_learners:
        all_learners = config.cluster.learners or config.run.learners + (cluster.local or _LIKELY_HOSTS)
        unknown = config.cluster.learners is None and not cluster.local
        scale_is_open = settings.sources.get("gala.scale_lr") in (None, RESUMED)
        if unknown and config.data_flow.mixes_parameters and scale_is_open:
            settings = settings.with_layer(Layer("cluster", {"gala": {"scale_lr": False}}))
            reasons["gala.scale_lr"] = (
                "false: how many learners will come is not known; for the root of their number --set cluster.learners=N"
            )
        cluster = None  # rows stay on their hosts
    return RunPlan(
        hosts=0 if cluster is None else cluster.local or _MAX_HOSTS,
        # As if each host had as many samplers as this one; how many hosts will come is not known.
        host_shards=0 if cluster is None else min((cluster.local or _LIKELY_HOSTS) * samplers, _MAX_HOST_SHARDS),
        host_tune=tune_arguments(settings) if tune_hosts and cluster is not None else (),
        all_learners=all_learners,
        joined_run=GossipHandle.inherited(),
        settings=settings,
        requested_settings=requested,
        spec=probe.spec,
        samplers=samplers,
        inference_workers=inference_workers,
        reasons=reasons,
        single_env=limited.single_env,
        max_envs=limited.max_envs,
        sampler_bytes=limited.sampler_bytes,
        start_s=probe.start_s,
        to_tune=to_tune,
        free_core=machine.cores.usable - samplers - config.learner.threads * config.run.learners >= 1.0,
        earlier=earlier,
        process_age_s=process_age_s(),
    )


def _samplers(settings: Settings, machine: Machine, reasons: dict[str, str]) -> int:
    """Number of samplers, as set or by the cores; adds the reasons for it, the device and inference workers."""
    config, usable = settings.config, machine.cores.usable
    learners, data_flow = config.run.learners, config.data_flow
    if config.on_policy is None:
        if data_flow.serial or config.sampling.samplers is not None:
            return 1 if data_flow.serial else config.sampling.samplers or 1
        threads = config.learner.threads * learners
        whose = "the learner" if learners == 1 else f"{learners} learners, at least one for each"
        samplers = config.samplers_beside(usable)
        text = f"{samplers}: {usable:g} usable cores less {threads} for {whose}{_at_most(usable - threads)}"
        reasons["sampling.samplers"] = text
        return samplers
    default = max(1, config.rollout_samplers(usable) // learners) * learners
    if config.rollout.samplers is None and not data_flow.serial:
        cores = config.rollout_cores(usable)
        per_learner = "" if learners == 1 else f", at least one for each of {learners} learners"
        reasons["rollout.samplers"] = f"{default}: {cores:g} usable cores{_at_most(cores)}{per_learner}"
    if "rollout.inference_workers" not in settings.sources and data_flow.inference_workers:
        text = "none: each sampler runs the policy itself, which avoids the communication"
        reasons["rollout.inference_workers"] = text
    if machine.gpus and settings.sources.get("learner.device") == default_of(settings):
        text = "networks over vectors are too small to keep a GPU busy; use --device cuda:0 to force it"
        reasons["learner.device"] = f"{config.learner.device}: {text}"
    return config.rollout.samplers or (1 if data_flow.serial else default)


def _with_intervals(settings: Settings, samplers: int, reasons: dict[str, str]) -> Settings:
    """Settings with the length of a rollout, and with the balance of replay in modes that keep one; adds reasons."""
    config, rollout = settings.config, settings.config.rollout
    if config.on_policy is not None and rollout.sync_interval is None:
        envs = samplers // config.run.learners * rollout.envs_per_sampler
        interval = config.rollout_interval(envs)
        settings = settings.with_layer(Layer(default_of(settings), {"rollout": {"sync_interval": interval}}))
        size = f"rollout.size = {rollout.size}"
        text = f"{interval}: {envs * interval} env steps of {envs} environments together ({size})"
        reasons["rollout.sync_interval"] = text
    if config.data_flow.balanced:
        ratio = config.replay.serial_ratio(config.learner.batch_size)
        settings = settings.with_layer(Layer("mode", {"replay": dict.fromkeys(SAMPLES_PER_INSERT_BOUNDS, ratio)}))
        text = (
            f"{ratio:g}: rows drawn for each inserted one, "
            f"as in mode serial: the controller of mode {config.run.mode} keeps this balance"
        )
        reasons |= dict.fromkeys([f"replay.{name}" for name in SAMPLES_PER_INSERT_BOUNDS], text)
    return settings


def _at_most(cores: float) -> str:
    return f", at most {MAX_DEFAULT_SAMPLERS}" if int(cores) > MAX_DEFAULT_SAMPLERS else ""


def check_machine(plan: RunPlan, machine: Machine) -> None:
    """Rejects, before anything is written, a plan that this machine cannot run."""
    capacity_is_open = plan.to_tune and plan.settings.sources.get("replay.capacity") not in (USER, RESUMED)
    if not capacity_is_open:  # else the tuner chooses what there is room for
        check_room(*plan.shared_bytes())
    learner = plan.config.learner
    devices = named_devices(learner.device, len(machine.gpus), machine.gpu_reason)
    check_precision(learner.precision, on_gpu=any(device != "cpu" for device in devices))
    if len(devices) == 2 and plan.spec.choices is not None:
        raise ConfigError(
            f"learner.device = {learner.device}: two devices are the actor's and the critics'; discrete "
            "actions take one device"
        )


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
    first_bytes = probe.memory_bytes
    further_bytes = first_bytes if probe.further_env_bytes is None else probe.further_env_bytes
    if engine_of(probe.spec.env_id) is None:
        demand = _Demand(probe.spec.env_id, first_bytes, further_bytes, _LEARNER_BYTES + shared_bytes)
        fitting = demand.lowered(counts, free_bytes, fixed, config.run.learners)
        why = f"an environment takes {size(further_bytes)} of memory, {size(free_bytes)} are free"
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
    return Allowed(
        samplers=counts.samplers,
        settings=_with(settings, values),
        reasons=reasons,
        max_envs=None if counts.max_envs == wanted.max_envs else counts.max_envs,
        sampler_bytes=first_bytes + (counts.per_sampler - 1) * further_bytes,
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
        more = (few._replace(per_sampler=number) for number in range(1, wanted.per_sampler + 1))
        fitting = list(itertools.takewhile(lambda counts: self._fits(counts, free_bytes), more))
        remedy = "close other programs, or give it a machine with more memory"
        if fitting:
            no_pictures = " and --no-visualizer" if counts.pictures else ""
            remedy = f"use --envs-per-sampler {fitting[-1].per_sampler}{no_pictures}"
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
    why = f"only one {env_id} can exist {where}at a time (making a second one failed: {probe.alone})"
    if num_envs > 1 and settings.sources.get(f"{part}.envs_per_sampler") == USER:
        raise ConfigError(f"{part}.envs_per_sampler = {num_envs}: {why}; use --envs-per-sampler 1, or remove it")
    reasons = {f"{part}.envs_per_sampler": f"1: {why}"}
    values: Values = {part: {"envs_per_sampler": 1}}
    if probe.alone_in_process and not config.data_flow.takes_turns(samplers):
        return Allowed(samplers=samplers, settings=_with(settings, values), reasons=reasons, max_envs=1)
    if samplers > 1 and samplers_are_set:
        raise ConfigError(f"{part}.samplers = {samplers}: {why}; use --samplers 1, or remove it")
    if config.run.learners > 1:
        raise ConfigError(f"run.learners = {config.run.learners}: each needs a sampler, and {why}; remove it")
    reasons[f"{part}.samplers"] = "1: for the same reason as envs_per_sampler"
    if config.evaluation.enabled:
        reasons["evaluation.enabled"] = "by the sampler, in turn with sampling, in the one environment"
    if config.visualizer.enabled:
        reasons["visualizer.enabled"] = "false: it would need an environment of its own"
        values["visualizer"] = {"enabled": False}
    return Allowed(samplers=1, settings=_with(settings, values), reasons=reasons, single_env=True, max_envs=1)
