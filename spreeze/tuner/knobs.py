"""The knob table: one row for each setting that the tuner chooses, and what bounds it.

A row says in which data flows it is tuned. A module that ``--import`` names may declare more of them as ``KNOBS``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from spreeze.config.algorithm_bases import serial_ratio
from spreeze.config.modes import DataFlow
from spreeze.config.schema import MAX_HOST_SAMPLERS, MAX_LEARNERS, MAX_SAMPLERS, SECTIONS, Config
from spreeze.errors import ConfigError
from spreeze.formatting import size
from spreeze.inference.user_modules import extended
from spreeze.tuner.model import MAX_USES, UPDATES_PER_STEP_BOUND, ratio_bound
from spreeze.tuner.problem import (
    BATCH,
    CAPACITY,
    DEVICE,
    ENVS,
    FACTS,
    INFERENCE_WORKERS,
    JOINT,
    LEARNER,
    LEARNERS,
    MINIBATCHES,
    PRECISION,
    RATIO,
    RATIO_MAX,
    ROLLOUT_ENVS,
    ROLLOUT_SAMPLERS,
    SAMPLERS,
    SLOTS,
    SYNC_INTERVAL,
    THREADS,
    USES,
    Choice,
    Device,
    Knob,
    MemoryPlan,
    Setting,
    TuningProblem,
)

HEADROOM = 0.9  # share of free memory that a plan may use: memory use grows after a measurement
MIN_BATCH = 128
"""Smallest batch for objective ``return``, unless the user or profile sets a smaller one (``assets/figures.md``)."""
_MIN_FITTED_BATCH = 32
SHORTEST_ROLLOUT = 16  # env steps of a rollout at least: shorter ones cut returns short and swap too often
_RATIO_STEP = 4.0
_LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MAX_MEASURED = 8  # Numbers of samplers measured on one machine.
_MAX_KINDS = 6  # Kinds of learner (device, precision, threads) measured at most.
_ROWS_OFF = 0.25  # Largest relative change of a rollout's rows when they do not divide evenly.


# --- learner ---


def check_pins(problem: TuningProblem) -> None:
    """Raises a ConfigError, with the limit that it breaks, for a pin that is invalid without any measurement."""
    device, precision, names = problem.pin(DEVICE), problem.pin(PRECISION), [one.name for one in problem.devices]
    if device is not None and device not in names:
        raise ConfigError(f"{DEVICE} = {device!r}: this machine offers {', '.join(names)}")
    if not _devices(problem):
        offered = sorted({one.precision for one in problem.devices if device in (None, one.name)})
        raise ConfigError(f"{PRECISION} = {precision!r}: {device or 'this machine'} offers {', '.join(offered)}")


def _devices(problem: TuningProblem) -> list[Device]:
    device, precision = problem.pin(DEVICE), problem.pin(PRECISION)
    return [one for one in problem.devices if device in (None, one.name) and precision in (None, one.precision)]


def _threads(problem: TuningProblem, setting: Setting) -> list[int]:
    # Two threads share an update as a pair, which a busy core slows by its share only. More also share each matmul, and
    # are only tried up to half of the cores: a matmul whose threads wait for a busy core stalls altogether.
    if problem.pin(THREADS) is not None:
        return [problem.pin(THREADS)]
    if setting[DEVICE] != "cpu":
        return [1]
    pair = problem.cores if problem.paired else problem.cores / 2
    return [1, *(count for count in (2, 4, 8) if count <= (pair if count == 2 else problem.cores / 2))]


def learner_kinds(problem: TuningProblem) -> list[Setting]:
    """Kinds of learner worth trying (``model.kind_of``): each device with the fewest threads, then with more."""
    devices = [Setting({DEVICE: device.name, PRECISION: device.precision}) for device in _devices(problem)]
    kinds = [device.replace(THREADS, count) for device in devices for count in _threads(problem, device)]
    return sorted(kinds, key=lambda kind: kind[THREADS] > 1)[:_MAX_KINDS]


def batch_sizes(problem: TuningProblem, setting: Setting | None = None) -> list[int]:
    """Powers of two and the configured batch up to what replay allows, or the pin; measuring finds other bounds."""
    if problem.pin(BATCH) is not None:
        return [problem.pin(BATCH)]
    high, configured = problem.known_memory_plan.batch_size, problem.configured[BATCH]
    if problem.objective in ("sampling", "updates"):
        return [min(configured, high)]
    ladder = {2**power for power in range(int(math.log2(max(1, high))) + 1)} | {configured}
    # A profile with a smaller batch was made for its task.
    low = min(MIN_BATCH, configured) if problem.objective == "return" else _MIN_FITTED_BATCH
    return sorted(batch for batch in ladder if low <= batch <= high) or [high]


def _batch_remark(problem: TuningProblem, setting: Setting) -> str:
    if problem.objective == "paper":
        return f"smallest power of two with {100 * problem.targets.gpu_target:.0f} % of the highest frame rate"
    if problem.objective in ("sampling", "updates"):
        return "as configured; this objective keeps the batch size"
    if setting[BATCH] == MIN_BATCH:
        return f"below {MIN_BATCH} batch sizes are only used if set explicitly"
    return ""


# --- samplers and replay ---

_STEPPING_SHARE = 0.8  # Share of a core that samplers on it may take together by stepping alone.
_MAX_PER_CORE = 12  # Samplers on one core at most.


def max_samplers(problem: TuningProblem, threads: int) -> int:
    """Samplers beside a learner: each has a core, and one may share; none with a learner of several threads.

    At least two, since their number determines their share of a core; more where environments mostly wait.
    """
    spare = math.floor(problem.cores + 1e-9) - threads + (1 if threads == 1 else 0)
    return max(1, min(max(spare, 2) * _samplers_per_core(problem), problem.known_memory_plan.samplers))


def _samplers_per_core(problem: TuningProblem) -> int:
    return max(1, min(round(_STEPPING_SHARE / max(problem.step_cpu_share, 0.01)), _MAX_PER_CORE))


def sampler_counts(problem: TuningProblem, setting: Setting) -> list[int]:
    """Numbers of samplers: 1, 2, 3, 4, 6, 8 ... and those that fill the cores; finer steps would be chosen by noise."""
    if problem.pin(SAMPLERS) is not None:
        return [problem.pin(SAMPLERS)]
    high = max_samplers(problem, setting[THREADS])
    physical = int(problem.physical_cores or problem.usable_cores) - setting[THREADS]
    return sorted({count for count in (*_LADDER, physical, high) if 1 <= count <= 0.85 * high or count == high})


def sampler_counts_to_measure(problem: TuningProblem, setting: Setting) -> list[int]:
    """Numbers of samplers to measure, at most eight: the fewest, the most, then those between."""
    counts = sampler_counts(problem, setting)
    steps = sorted({counts[round((len(counts) - 1) * i / (_MAX_MEASURED - 1))] for i in range(_MAX_MEASURED)})
    return [*steps[:1], *steps[1:][-1:], *steps[1:-1]]


def ratios(problem: TuningProblem, setting: Setting) -> Sequence[float]:
    """Samples per insert below which samplers wait: as configured and in steps of four; one value if balanced."""
    if problem.balanced:
        return [serial_ratio(setting[BATCH], problem.configured[RATIO], problem.configured[RATIO_MAX])]
    if problem.pin(RATIO) is not None:
        return [problem.pin(RATIO)]
    bound = ratio_bound(problem, setting[BATCH])
    start = min(problem.configured[RATIO], bound)
    if problem.objective == "paper" or start <= 0.0:
        return [start]
    high = min(bound, UPDATES_PER_STEP_BOUND * setting[BATCH]) / 2.0
    steps = [start * _RATIO_STEP**power for power in range(-2, 5)]
    return [ratio for ratio in steps if ratio == start or 0.5 <= ratio <= high]


def _log_distance_from_configured(problem: TuningProblem, name: str, value: float) -> float:
    start = problem.configured[name]
    return round(abs(math.log(value / start)), 6) if value > 0 and start > 0 else 0.0


# --- memory ---

_REPLAY_SHARE = 0.5  # Share of the free memory that replay may take where its capacity is the tuner's choice.
_BATCHES_IN_REPLAY = 4  # Replay has to hold this many batches, or a batch draws the same rows again and again.
_SMALLEST_BATCH = 64
_INFERENCE_US, _INFERENCE_SHARE = 15.0, 0.04
"""Time of one batched inference of a sampler, and the share of the env steps it may take."""
_SLOW_STEP_US = 5000.0


def find_memory_plan(problem: TuningProblem) -> MemoryPlan:
    """Divides memory between learner, replay and samplers; a ConfigError, which names the limit, if they do not fit."""
    limits: list[str] = []
    free = int(problem.memory_bytes * HEADROOM) - problem.learner_bytes
    envs, count = _envs_per_sampler(problem), problem.pin(SAMPLERS) or 1
    while not envs.pinned and envs.value > 1 and _group_bytes(problem, count, envs.value) > free / 2:
        envs = Choice(envs.value // 2, f"{envs.value // 2} environments per sampler: limited by memory")
    group = _group_bytes(problem, count, envs.value)
    if group > free:
        available, learner = size(problem.memory_bytes), size(problem.learner_bytes)
        bound = f"{available} of memory available, of which the learner needs {learner}"
        if not {SAMPLERS, ENVS} & problem.pins:
            raise ConfigError(f"not even one sampler fits: it needs {size(group)}; {bound}; free some memory")
        raise ConfigError(
            f"samplers = {count} with {envs.value} environments each need {size(group)}: {bound}; lower "
            "--samplers or --envs-per-sampler"
        )
    choice = _capacity(problem, free - group, limits)
    capacity, pinned, starts = choice.value, problem.pin(BATCH), problem.learning_starts
    if pinned is not None and pinned > capacity:
        raise ConfigError(f"{BATCH} = {pinned}: replay holds {capacity} transitions; lower the batch")
    needed = max(2 * count * envs.value, starts, 0 if pinned else _BATCHES_IN_REPLAY * _SMALLEST_BATCH)
    if capacity < needed:
        raise ConfigError(
            f"replay has room for {capacity} transitions, at least {needed} are needed (learning starts "
            f"after {starts}, {count * envs.value} environments); free some memory, or set fewer"
        )
    fitting = (free - capacity * problem.row_bytes) // max(_group_bytes(problem, 1, envs.value), 1)
    samplers = problem.pin(SAMPLERS) or max(1, min(fitting, MAX_SAMPLERS))
    return MemoryPlan(
        capacity=choice,
        envs_per_sampler=envs,
        samplers=max(count, min(samplers, capacity // (2 * envs.value))),
        batch_size=pinned or max(capacity // _BATCHES_IN_REPLAY, 1),
        limits=tuple(limits),
    )


def as_configured(problem: TuningProblem) -> Setting:
    """Setting of a run without the tuner, as far as memory allows."""
    values, plan = dict(problem.configured), problem.memory_plan
    if plan is not None:
        values[CAPACITY] = plan.capacity.value
        values[SAMPLERS] = problem.pin(SAMPLERS) or min(values[SAMPLERS] or problem.samplers, plan.samplers)
        envs = plan.envs_per_sampler.value
        max_bytes = plan.samplers * _group_bytes(problem, 1, envs)
        while values[ENVS] > envs and _group_bytes(problem, values[SAMPLERS], values[ENVS]) > max_bytes:
            values[ENVS] //= 2
    elif SAMPLERS not in values:
        return fit_rollout(problem, problem.configured) or problem.configured
    return Setting(values)


def _group_bytes(problem: TuningProblem, samplers: int, envs: int) -> int:
    return samplers * (problem.sampler_bytes + (envs - 1) * problem.env_bytes)


def _envs_per_sampler(problem: TuningProblem) -> Choice:
    """Enough environments that one batched inference costs little beside their steps."""
    pinned, step = problem.pin(ENVS), problem.step_us
    if pinned is not None:
        count, why = pinned, problem.pinned_by(ENVS)
    elif problem.balanced:
        count, why = problem.configured[ENVS], "as configured: enough for one update per env step"
    elif problem.one_call:
        count, why = 32, "the engine steps all of them in one call"
    elif step is None or step <= 0.0:
        count, why = 8, "step time not known"
    elif step > _SLOW_STEP_US:
        count, why = 4, f"a step takes {step:.0f} us, inference is negligible"
    elif problem.objective == "return" and {device.name for device in problem.devices} == {"cpu"}:
        # More would spread the first env steps, which are random, over more beginnings of episodes.
        count, why = 8, f"a step takes {step:.0f} us, so these supply a learner on the processor"
    else:
        count = next((count for count in (8, 16) if _INFERENCE_US / (count * step) <= _INFERENCE_SHARE), 32)
        why = f"a step takes {step:.0f} us, inference is batched"
    return Choice(count, f"{count} environments per sampler: {why}", pinned=pinned is not None)


def _capacity(problem: TuningProblem, left: int, limits: list[str]) -> Choice:
    """Replay capacity: as pinned or configured, less if memory requires it."""
    pinned, row, wanted = CAPACITY in problem.pins, max(problem.row_bytes, 1), problem.configured[CAPACITY]
    bound = left if pinned else int(left * _REPLAY_SHARE)
    fitting, text = max(bound, 0) // row, "replay of {} transitions: {}"
    if pinned and wanted > fitting:
        raise ConfigError(
            f"{CAPACITY} = {wanted}: needs {size(wanted * row)}, memory leaves {size(max(bound, 0))}; at "
            f"most {fitting} transitions fit"
        )
    if pinned:
        return Choice(wanted, text.format(wanted, problem.pinned_by(CAPACITY)), pinned=True)
    if wanted <= fitting:
        return Choice(wanted, text.format(wanted, f"as configured, {size(wanted * row)}"))
    rounded = fitting - fitting % 1000 if fitting >= 10_000 else fitting
    limits.append(f"replay capacity {rounded} instead of {wanted}: memory has no more room")
    return Choice(rounded, text.format(rounded, f"{size(rounded * row)}, as memory allows"))


# --- rollouts ---


def rollout_rows(setting: Setting) -> int:
    """Transitions in a rollout: over all samplers of a learner, or over one sampler if each fills its own."""
    return _rollout_envs(setting) * int(setting[SYNC_INTERVAL])


def _rollout_envs(setting: Setting) -> int:
    """Environments of a rollout; samplers at their own pace have no inference workers to choose."""
    shares = INFERENCE_WORKERS in setting or LEARNERS in setting
    return int(setting[ROLLOUT_ENVS] * (setting[ROLLOUT_SAMPLERS] // setting.get(LEARNERS, 1) if shares else 1))


def fit_rollout(problem: TuningProblem, setting: Setting) -> Setting | None:
    """The setting with the interval that keeps the configured rows; None if none does, or memory is too small."""
    samplers, learners = setting[ROLLOUT_SAMPLERS], setting.get(LEARNERS, 1)
    wanted_workers = setting.get(INFERENCE_WORKERS)
    workers = None if wanted_workers is None else min(wanted_workers, samplers)
    if workers != wanted_workers and INFERENCE_WORKERS in problem.pins:
        return None
    if min(samplers, setting[ROLLOUT_ENVS]) < 1 or samplers % learners:
        return None
    configured, name = problem.configured, problem.full_name(MINIBATCHES)  # A2C has none
    rows, envs = rollout_rows(configured), _rollout_envs(setting)
    interval, minibatches = configured[SYNC_INTERVAL], configured[name] if name else 1
    if envs * interval != rows:
        if SYNC_INTERVAL not in problem.pins:
            step = minibatches // math.gcd(envs, minibatches)
            interval = step * max(1, round(rows / envs / step))
        if interval < SHORTEST_ROLLOUT or abs(interval * envs / rows - 1.0) > _ROWS_OFF:
            return None
    if (envs * interval) % minibatches:
        if name in problem.pins:
            return None
        minibatches = max(count for count in range(1, minibatches + 1) if (envs * interval) % count == 0)
    used_bytes = _group_bytes(problem, samplers, setting[ROLLOUT_ENVS]) + problem.learner_bytes * learners
    if used_bytes > HEADROOM * problem.memory_bytes:
        return None
    values = {**setting, SYNC_INTERVAL: interval, **({name: minibatches} if name else {})}
    return Setting(values if workers is None else {**values, INFERENCE_WORKERS: workers})


def _fit_fewer(problem: TuningProblem, setting: Setting) -> Setting | None:
    fitted = fit_rollout(problem, setting)
    if fitted is not None or setting[ROLLOUT_ENVS] <= 1 or ROLLOUT_ENVS in problem.pins:
        return fitted
    return _fit_fewer(problem, setting.replace(ROLLOUT_ENVS, setting[ROLLOUT_ENVS] // 2))


def _fit_learners(problem: TuningProblem, setting: Setting) -> Setting | None:
    if ROLLOUT_SAMPLERS not in problem.pins:
        setting = setting.replace(ROLLOUT_SAMPLERS, setting[LEARNERS])
    return _fit_fewer(problem, setting)


def _whole_cores(problem: TuningProblem) -> int:
    return max(1, math.floor(problem.cores + 1e-9))


def _shared(problem: TuningProblem, cores: int, *factors: int) -> list[int]:
    """Multiples of the cores, for environments that wait most of their time."""
    return [cores * factor for factor in factors if factor <= _samplers_per_core(problem)]


def _rollout_sampler_counts(problem: TuningProblem, current: Setting) -> Iterable[int]:
    cores, learners = _whole_cores(problem), current.get(LEARNERS, 1)
    counts = [learners, 2 * learners, 4 * learners]
    if learners == 1:
        counts = [cores, cores - 1, cores + 1, 2 * cores, cores // 2]
    counts += _shared(problem, cores, 4, 8)
    return [count for count in counts if count <= max(cores, learners) or not _keeps_free(problem)]


def _keeps_free(problem: TuningProblem) -> bool:
    """True if only the number of samplers keeps cores free: a governor pauses some only with rollouts of any age."""
    return problem.targets.leave_free > 0.0 and problem.full_name(USES) is None


def learner_counts(problem: TuningProblem, current: Setting) -> Iterable[int]:
    """Numbers of learners that mix: at least two, around what the cores hold, more where environments wait."""
    cores = max(2, _whole_cores(problem))
    counts = [cores, 2 * cores, cores // 2, *_shared(problem, cores, 4, 8)]
    return [count for count in counts if 2 <= count <= (cores if _keeps_free(problem) else MAX_LEARNERS)]


def _minibatches_remark(problem: TuningProblem, setting: Setting) -> str:
    name = problem.full_name(MINIBATCHES)
    is_configured = name is None or setting[name] == problem.configured[name]
    return "as configured, since they affect learning" if is_configured else "as many as divide the rows"


def _slots_remark(problem: TuningProblem, setting: Setting) -> str:
    configured, samplers = setting[problem.full_name(SLOTS) or SLOTS], setting[ROLLOUT_SAMPLERS]
    slots = samplers * -(-configured // samplers)  # samplers have equally many each
    more = f"; {slots} in total, one for each of {samplers} samplers" if slots > configured else ""
    return f"as configured{more}"


def _uses_remark(problem: TuningProblem, setting: Setting) -> str:
    more = setting[problem.full_name(USES) or USES] > MAX_USES
    tail = "; more uses need more updates" if more else " (images: 2), updates are equally useful"
    return f"as configured: up to {MAX_USES}, the paper's value for continuous actions{tail}"


# --- the table ---


_RATE = "{env_steps_per_s:.0f} env steps/s in a run"
KNOBS = (
    Knob(
        name=DEVICE,
        where=lambda data_flow: data_flow.from_replay,
        trial=LEARNER,
        candidates=lambda problem, current: [one.name for one in _devices(problem)],
        text_format="learner on {}",
        usual="cpu",
        precedence=2,
        tie=lambda problem, name, value: [one.name for one in problem.devices].index(value),
    ),
    Knob(
        name=BATCH,
        trial=LEARNER,
        candidates=batch_sizes,
        text_format="batch {}",
        label="batch",
        remark=_batch_remark,
        figures="{updates_per_s:.0f} updates/s in a run, with samplers",
    ),
    Knob(
        name=THREADS,
        where=lambda data_flow: data_flow.from_replay,
        trial=LEARNER,
        candidates=_threads,
        text_format="{} learner thread{s}",
        tie=lambda problem, name, value: value,
    ),
    Knob(name=PRECISION, trial=LEARNER, text_format="learner in {}", usual="float32", precedence=-1),
    Knob(
        name=SAMPLERS,
        candidates=sampler_counts,
        text_format="{} sampler{s}",
        precedence=1,
        tie=lambda problem, name, value: value,
        figures="{env_steps_per_s:.0f} env steps/s in a run, beside {updates_per_s:.0f} updates/s",
    ),
    Knob(name=ENVS, trial=FACTS, text_format="{} environment{s} per sampler", label="envs"),
    Knob(name=CAPACITY, trial=FACTS, fixed=True, text_format="replay of {} transitions"),
    Knob(
        name=RATIO,
        candidates=ratios,
        text_format="at least {:g} samples per insert",
        label="samples/insert",
        tie=_log_distance_from_configured,
    ),
    Knob(name=RATIO_MAX, trial=FACTS, text_format="the learner waits above {:g} samples per insert"),
    Knob(
        name=LEARNERS,
        where=lambda data_flow: data_flow.mixes_parameters,
        candidates=learner_counts,
        fit=_fit_learners,
        text_format="{} learner{s}",
        fixed=True,
        figures=_RATE,
    ),
    Knob(
        name=ROLLOUT_SAMPLERS,
        candidates=_rollout_sampler_counts,
        fit=_fit_fewer,
        text_format="{} sampler{s}",
        fixed=True,
        figures=_RATE,
    ),
    Knob(
        name=ROLLOUT_ENVS,
        fit=_fit_fewer,
        text_format="{} environment{s} per sampler",
        label="envs",
        fixed=True,
        precedence=1,
        candidates=lambda problem, current: [
            current[ROLLOUT_ENVS] * 2,
            current[ROLLOUT_ENVS] // 2,
            current[ROLLOUT_ENVS] * 4,
            1,
        ],
        figures=_RATE,
    ),
    Knob(
        name=INFERENCE_WORKERS,
        candidates=lambda problem, current: (0, 1, 2),
        fit=_fit_fewer,
        text_format="inference workers {}",
        label="inference",
        remark=lambda problem, setting: "" if setting[INFERENCE_WORKERS] else "samplers infer for themselves",
    ),
    Knob(
        name=SYNC_INTERVAL,
        trial=FACTS,
        text_format="sync interval {}",
        label="interval",
        fixed=True,
        remark=lambda problem, setting: (
            f"a rollout has {rollout_rows(setting)} rows, configured are {rollout_rows(problem.configured)}"
        ),
    ),
    Knob(name=MINIBATCHES, trial=FACTS, text_format="minibatches {}", fixed=True, remark=_minibatches_remark),
    Knob(name=SLOTS, trial=FACTS, text_format="buffer of {} rollout{s}", label="N", remark=_slots_remark),
    Knob(name=USES, trial=FACTS, text_format="each used {} time{s} at most", label="K", remark=_uses_remark),
)
"""Every knob of the modes that come with Spreeze, in display order."""
_MODELED = {BATCH, THREADS, DEVICE, PRECISION, SAMPLERS, ENVS, CAPACITY, RATIO, RATIO_MAX}
"""Knobs whose effect the model of replay modes forecasts; a replay mode varies all others after these."""


def _suits(knob: Knob, data_flow: DataFlow) -> bool:
    part, field = knob.name.split(".")
    if knob.where is not None:
        return knob.where(data_flow)
    return data_flow.asynchronous if part == "algorithm" else SECTIONS[part].condition_of(field)(data_flow)


def knob_names(data_flow: DataFlow) -> tuple[str, ...]:
    """Names of the knobs of a mode, with ``algorithm.FIELD`` unresolved."""
    return tuple(knob.name for knob in KNOBS if data_flow.tunable and _suits(knob, data_flow))


def _full_name(name: str, config: Config) -> str | None:
    """The setting of a knob; None if the chosen algorithm has no such field."""
    part, field = name.split(".")
    if part != "algorithm":
        return name
    return f"{config.run.algo}.{field}" if hasattr(config.algo_settings, field) else None


def tunable_settings(config: Config) -> tuple[str, ...]:
    """The settings that the tuner chooses for the mode and algorithm, without those that ``--import`` declares."""
    return tuple(filter(None, (_full_name(name, config) for name in knob_names(config.data_flow))))


def ordered(knobs: Iterable[Knob]) -> tuple[Knob, ...]:
    """Knobs in the order in which they are varied and decide ties: by ``precedence``, those decided by facts last."""
    return tuple(sorted(knobs, key=lambda knob: (knob.trial == FACTS, knob.precedence)))


def _host_sampler_counts(problem: TuningProblem, current: Setting) -> Iterable[int]:
    cores = _whole_cores(problem)
    counts = [cores, cores - 1, cores + 1, cores // 2, *_shared(problem, cores, 2, 4, 8)]
    return [count for count in counts if 1 <= count <= MAX_HOST_SAMPLERS]


def fit_host(problem: TuningProblem, setting: Setting) -> Setting | None:
    """The setting of a host without a learner; None if it does not fit into memory."""
    fits = _group_bytes(problem, setting[SAMPLERS], setting[ENVS]) <= HEADROOM * problem.memory_bytes
    return setting if fits else None


def host_knobs() -> tuple[Knob, ...]:
    """Knobs of a host that only collects: the rows of the table, with another trial."""
    rows = {knob.name: knob for knob in KNOBS}
    return (
        dataclasses.replace(rows[SAMPLERS], candidates=_host_sampler_counts, fit=fit_host, figures=_RATE),
        dataclasses.replace(
            rows[ENVS],
            trial=JOINT,
            fit=fit_host,
            figures=_RATE,
            candidates=lambda problem, current: [current[ENVS] * 2, current[ENVS] * 4, current[ENVS] // 2 or 1],
        ),
    )


def knobs_of(config: Config) -> tuple[Knob, ...]:
    """The knobs of the mode by full names, those of ``--import`` last."""
    declared, names = _declared_by(config.env.import_module), knob_names(config.data_flow)
    knobs = [*(knob for knob in KNOBS if knob.name in names), *(declared if names else ())]
    modeled = _MODELED if config.on_policy is None else {knob.name for knob in KNOBS}
    return tuple(
        dataclasses.replace(knob, name=name, varied_last=knob in declared or knob.name not in modeled)
        for knob in knobs
        if (name := _full_name(knob.name, config)) is not None
    )


def _declared_by(module: str | None) -> tuple[Knob, ...]:
    """``KNOBS`` of the module of the command's ``--import``, checked; it is imported."""
    knobs = tuple(extended({knob.name: knob for knob in KNOBS}, module, "KNOBS", Knob).values())[len(KNOBS) :]
    for knob in knobs:
        part, _, field = knob.name.partition(".")
        if part != "algorithm" and (part not in SECTIONS or field not in SECTIONS[part].__dataclass_fields__):
            raise ConfigError(
                f"--import {module}: knob {knob.name!r} is not a setting; expected SECTION.FIELD, for example "
                "learner.batch_size"
            )
    return knobs
