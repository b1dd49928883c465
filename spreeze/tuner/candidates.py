"""Everything that may be tried on a machine: the candidates of each knob, pins and bounds applied."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spreeze.errors import ConfigError, did_you_mean
from spreeze.formatting import size
from spreeze.tuner.model import Kind
from spreeze.tuner.objective import FORMULAS
from spreeze.tuner.problem import Choice, Device, TuningProblem

LEAST_BATCH = 128
"""Objective ``return`` takes no smaller batch unless it is pinned or the profile has one: its score was fitted to the
early returns of easy tasks and ranks batch 32 above 256, which was at 909 on Walker2D in 139 to 207 s with each of
three seeds, batch 32 with one of three in 290 s."""
_LEAST_FITTED_BATCH = 32
UPDATES_PER_STEP_BOUND = 8.0
"""Samples per insert are never allowed above this many updates per env step (times the batch)."""
_RATIO_STEP = 4.0
_LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MOST_MEASURED = 8
"""Numbers of samplers measured on one machine."""
_KINDS = 6
"""Kinds of learner (device, precision, threads) measured at most."""


def check_pins(knobs: TuningProblem) -> None:
    """Refuses a pin that no measurement is needed to refuse.

    Raises:
        ConfigError: with the limit that it breaks.
    """
    pins = knobs.pins
    if knobs.targets.objective not in FORMULAS:
        raise ConfigError(f"tuning.objective = {knobs.targets.objective!r}: choose from {', '.join(FORMULAS)}"
                          f"{did_you_mean(knobs.targets.objective, FORMULAS)}")
    names = [device.name for device in knobs.devices]
    if pins.device is not None and pins.device not in names:
        raise ConfigError(f"learner.device = {pins.device!r}: this machine offers {', '.join(names)}")
    offered = {precision for device in _devices(knobs) for precision in device.precisions}
    if pins.precision is not None and pins.precision not in offered:
        raise ConfigError(f"learner.precision = {pins.precision!r}: {pins.device or 'this machine'} offers "
                          f"{', '.join(sorted(offered))}")
    low, high = pins.samples_per_insert_min, pins.samples_per_insert_max
    if low is not None and high is not None and low > high:
        raise ConfigError(f"samples_per_insert_min = {low:g} is above samples_per_insert_max = {high:g}: nobody "
                          "could ever move")


def _devices(knobs: TuningProblem) -> list[Device]:
    return [device for device in knobs.devices if knobs.pins.device in (None, device.name)]


def learner_kinds(knobs: TuningProblem) -> list[Kind]:
    """Kinds of learner worth trying, the plainest of each device first.

    Two threads share an update as a pair, which a busy core slows by its share only. More also share each
    product, and are only tried up to half of the cores: a product whose threads wait for a busy core stalls
    altogether (1.3 instead of 81 updates/s were seen on two cores).
    """
    plain: list[Kind] = []
    others: list[Kind] = []
    for device in _devices(knobs):
        precisions = [one for one in device.precisions if knobs.pins.precision in (None, one)]
        threads = [knobs.pins.threads] if knobs.pins.threads is not None else [
            count for count in (1, 2, 4, 8)
            if count == 1 or (device.name == "cpu" and count <= _most_threads(knobs, count))
        ]
        found = [(device.name, precision, count) for count in threads for precision in precisions]
        plain += found[:1]
        others += found[1:]
    return [*plain, *others][:_KINDS]


def _most_threads(knobs: TuningProblem, count: int) -> float:
    return knobs.cores if count == 2 and knobs.paired else knobs.cores / 2


def batch_sizes(knobs: TuningProblem, room: Room) -> list[int]:
    """Powers of two and the configured batch, from the least that may be chosen up to what replay allows; or the pin.

    Nothing else bounds them: a batch that the device's memory does not hold, or whose update takes too long, is found
    so by measuring, and larger ones are left out then.
    """
    if knobs.pins.batch_size is not None:
        return [knobs.pins.batch_size]
    most = room.batch_size
    configured = knobs.configured.batch_size
    if knobs.targets.objective in ("sampling", "updates"):
        return [min(configured, room.batch_size)]
    ladder = {2**power for power in range(int(math.log2(max(1, most))) + 1)} | {configured}
    return sorted(batch for batch in ladder if least_batch(knobs) <= batch <= most) or [most]


def least_batch(knobs: TuningProblem) -> int:
    """The smallest batch that may be chosen; a profile that asks for a smaller one knows its task."""
    if knobs.targets.objective != "return":
        return _LEAST_FITTED_BATCH
    return min(LEAST_BATCH, knobs.configured.batch_size)


def most_samplers(knobs: TuningProblem, room: Room, threads: int) -> int:
    """Samplers beside a learner: each has a core, and one may share; none with a learner of several threads.

    Two even on one core: samplers run at a low priority, so their number sets the share that they get of it.
    """
    spare = math.floor(knobs.cores + 1e-9) - threads + (1 if threads == 1 else 0)
    return max(1, min(max(spare, 2), room.samplers))


def sampler_grid(knobs: TuningProblem, room: Room, threads: int) -> list[int]:
    """Numbers of samplers to choose from: 1, 2, 3, 4, 6, 8 ... and those that just fill the cores.

    Coarse on purpose: 14 or 15 samplers do the same, and noise would choose between them.
    """
    if knobs.pins.samplers is not None:
        return [knobs.pins.samplers]
    most = most_samplers(knobs, room, threads)
    physical = int(knobs.physical_cores or knobs.usable_cores) - threads
    return sorted({count for count in (*_LADDER, physical, most) if 1 <= count <= most
                   and not (most * 0.85 < count < most)})


def sampler_ladder(knobs: TuningProblem, room: Room, threads: int) -> list[int]:
    """Numbers of samplers to measure, at most eight: the fewest, the most, then what lies between."""
    steps = sampler_grid(knobs, room, threads)
    while len(steps) > _MOST_MEASURED:
        # The neighbour that lies nearest, relatively, tells least; both ends stay.
        gaps = [steps[i + 1] / steps[i - 1] for i in range(1, len(steps) - 1)]
        steps.pop(1 + gaps.index(min(gaps)))
    return [*steps[:1], *steps[1:][-1:], *steps[1:-1]]


def ratio_bound(knobs: TuningProblem, batch_size: int) -> float:
    """Samples per insert above which the learner has to wait, at most."""
    if knobs.pins.samples_per_insert_max is not None:
        return knobs.pins.samples_per_insert_max
    low = knobs.pins.samples_per_insert_min or 0.0
    return max(knobs.configured.samples_per_insert_max, UPDATES_PER_STEP_BOUND * batch_size, low)


def ratio_options(knobs: TuningProblem, batch_size: int) -> Sequence[float]:
    """Samples per insert below which samplers wait: the configured value, and that in steps of four."""
    if knobs.pins.samples_per_insert_min is not None:
        return [knobs.pins.samples_per_insert_min]
    bound = ratio_bound(knobs, batch_size)
    start = min(knobs.configured.samples_per_insert_min, bound)
    if knobs.targets.objective == "paper" or start <= 0.0:
        return [start]
    most = min(bound, UPDATES_PER_STEP_BOUND * batch_size) / 2.0
    steps = [start * _RATIO_STEP**power for power in range(-2, 5)]
    return [one for one in steps if one == start or 0.5 <= one <= most]


HEADROOM = 0.9
"""Share of free memory that may be planned for: the load grows after a measurement."""
REPLAY_SHARE = 0.5
"""Share of that which replay may take where its capacity is the tuner's choice."""
BATCHES_IN_REPLAY = 4
"""Replay has to hold this many batches, or a batch draws the same rows again and again."""
SMALLEST_BATCH = 64
INFERENCE_US, INFERENCE_SHARE = 15.0, 0.04
"""Time of one batched inference of a sampler, and the share of the env steps it may take."""
SLOW_STEP_US = 5000.0
MOST_SAMPLERS = 512


@dataclass(frozen=True, kw_only=True)
class Room:
    """What fits into memory together."""

    capacity: Choice
    envs_per_sampler: Choice
    samplers: int
    """Sampler processes that memory allows, at least 1."""
    batch_size: int
    """Largest batch that replay allows."""
    limits: tuple[str, ...]


def find_room(knobs: TuningProblem) -> Room:
    """Divides memory between learner, replay and samplers.

    Raises:
        ConfigError: what is pinned does not fit, or nothing does; the message names the limit.
    """
    limits: list[str] = []
    free = int(knobs.memory_bytes * HEADROOM) - knobs.learner_bytes
    envs = _envs_per_sampler(knobs)
    count, pinned = knobs.pins.samplers or 1, knobs.pins.envs_per_sampler is not None
    while not pinned and envs.value > 1 and _group_bytes(knobs, count, envs.value) > free / 2:
        envs = Choice(envs.value // 2, f"{envs.value // 2} environments a sampler: memory allows no more")
    group = _group_bytes(knobs, count, envs.value)
    if group > free:
        raise ConfigError(_no_memory(knobs, count, envs.value, group))
    capacity = _capacity(knobs, free - group, limits)
    batch = _batch_bound(knobs, capacity.value)
    per_sampler = _group_bytes(knobs, 1, envs.value)
    most = max(1, min((free - capacity.value * knobs.row_bytes) // max(per_sampler, 1), MOST_SAMPLERS))
    if knobs.pins.samplers is not None:
        most = knobs.pins.samplers
    _check_rows(knobs, capacity.value, count * envs.value)
    most = max(count, min(most, capacity.value // (2 * envs.value)))
    return Room(capacity=capacity, envs_per_sampler=envs, samplers=most, batch_size=batch, limits=tuple(limits))


def _group_bytes(knobs: TuningProblem, samplers: int, envs: int) -> int:
    return samplers * (knobs.sampler_bytes + (envs - 1) * knobs.env_bytes)


def _no_memory(knobs: TuningProblem, samplers: int, envs: int, needed: int) -> str:
    bound = (f"{size(knobs.memory_bytes)} of memory may be used, of which the learner needs "
             f"{size(knobs.learner_bytes)}")
    if knobs.pins.samplers is None and knobs.pins.envs_per_sampler is None:
        return f"not even one sampler fits: it needs {size(needed)}; {bound}; free some memory"
    return (f"samplers = {samplers} with {envs} environments each need {size(needed)}: {bound}; lower "
            "--samplers or --envs-per-sampler")


def _envs_per_sampler(knobs: TuningProblem) -> Choice:
    """Enough environments that one batched inference costs little beside their steps."""
    if knobs.pins.envs_per_sampler is not None:
        count = knobs.pins.envs_per_sampler
        return Choice(count, f"{count} environments a sampler: set by you", pinned=True)
    step = knobs.step_us
    if step is None or step <= 0.0:
        return Choice(8, "8 environments a sampler: step time not known")
    if step > SLOW_STEP_US:
        return Choice(4, f"4 environments a sampler: a step takes {step:.0f} us, inference costs nothing beside it")
    count = 8
    while count < 32 and INFERENCE_US / (count * step) > INFERENCE_SHARE:
        count *= 2
    return Choice(count, f"{count} environments a sampler: a step takes {step:.0f} us, inference is shared")


def _capacity(knobs: TuningProblem, left: int, limits: list[str]) -> Choice:
    """Replay capacity: as pinned or configured, less where memory or shared memory say so."""
    bounds = {"memory": left if knobs.pins.capacity else int(left * REPLAY_SHARE)}
    if knobs.shared_memory_bytes is not None:
        bounds["shared memory"] = int(knobs.shared_memory_bytes * HEADROOM)
    name = min(bounds, key=lambda one: bounds[one])
    most = max(bounds[name], 0) // max(knobs.row_bytes, 1)
    wanted = knobs.pins.capacity or knobs.configured.capacity
    if knobs.pins.capacity is not None:
        if wanted > most:
            raise ConfigError(
                f"replay.capacity = {wanted}: needs {size(wanted * knobs.row_bytes)}, {name} leaves "
                f"{size(max(bounds[name], 0))}; at most {most} transitions fit"
            )
        return Choice(wanted, f"replay of {wanted} transitions: set by you", pinned=True)
    if wanted <= most:
        return Choice(wanted, f"replay of {wanted} transitions: as configured, {size(wanted * knobs.row_bytes)}")
    rounded = most - most % 1000 if most >= 10_000 else most
    limits.append(f"replay capacity {rounded} instead of {wanted}: {name} has room for no more")
    return Choice(rounded, f"replay of {rounded} transitions: {size(rounded * knobs.row_bytes)}, as {name} allows")


def _batch_bound(knobs: TuningProblem, capacity: int) -> int:
    pinned = knobs.pins.batch_size
    if pinned is not None:
        if pinned > capacity:
            raise ConfigError(f"learner.batch_size = {pinned}: replay holds {capacity} transitions; lower the batch")
        return pinned
    return max(capacity // BATCHES_IN_REPLAY, 1)


def _check_rows(knobs: TuningProblem, capacity: int, envs: int) -> None:
    """Refuses a replay too small to learn from at all."""
    needed = max(2 * envs, knobs.configured.learning_starts)
    if knobs.pins.batch_size is None:
        needed = max(needed, BATCHES_IN_REPLAY * SMALLEST_BATCH)
    if capacity < needed:
        raise ConfigError(
            f"replay has room for {capacity} transitions, at least {needed} are needed (learning starts after "
            f"{knobs.configured.learning_starts}, {envs} environments); free memory or shared memory, or set less"
        )
