"""What memory allows: transitions in replay, samplers, environments; and the pins that it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from spreeze.autotune.records import Choice, Knobs
from spreeze.errors import ConfigError
from spreeze.formats import size

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


def find_room(knobs: Knobs) -> Room:
    """Divides memory between learner, replay and samplers.

    Raises:
        ConfigError: what is pinned does not fit, or nothing does; the message names the limit.
    """
    limits: list[str] = []
    free = int(knobs.memory_bytes * HEADROOM) - knobs.learner_bytes
    envs = _envs_per_sampler(knobs)
    count, pinned = knobs.pins.samplers or 1, knobs.pins.envs_per_sampler is not None
    while not pinned and envs.value > 1 and _crew_bytes(knobs, count, envs.value) > free / 2:
        envs = Choice(envs.value // 2, f"{envs.value // 2} environments a sampler: memory allows no more")
    crew = _crew_bytes(knobs, count, envs.value)
    if crew > free:
        raise ConfigError(_no_memory(knobs, count, envs.value, crew))
    capacity = _capacity(knobs, free - crew, limits)
    batch = _batch_bound(knobs, capacity.value)
    per_sampler = _crew_bytes(knobs, 1, envs.value)
    most = max(1, min((free - capacity.value * knobs.row_bytes) // max(per_sampler, 1), MOST_SAMPLERS))
    if knobs.pins.samplers is not None:
        most = knobs.pins.samplers
    _check_rows(knobs, capacity.value, count * envs.value)
    most = max(count, min(most, capacity.value // (2 * envs.value)))
    return Room(capacity=capacity, envs_per_sampler=envs, samplers=most, batch_size=batch, limits=tuple(limits))


def _crew_bytes(knobs: Knobs, samplers: int, envs: int) -> int:
    return samplers * (knobs.sampler_bytes + (envs - 1) * knobs.env_bytes)


def _no_memory(knobs: Knobs, samplers: int, envs: int, needed: int) -> str:
    bound = (f"{size(knobs.memory_bytes)} of memory may be used, of which the learner needs "
             f"{size(knobs.learner_bytes)}")
    if knobs.pins.samplers is None and knobs.pins.envs_per_sampler is None:
        return f"not even one sampler fits: it needs {size(needed)}; {bound}; free some memory"
    return (f"samplers = {samplers} with {envs} environments each need {size(needed)}: {bound}; lower "
            "--samplers or --envs-per-sampler")


def _envs_per_sampler(knobs: Knobs) -> Choice:
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


def _capacity(knobs: Knobs, left: int, limits: list[str]) -> Choice:
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


def _batch_bound(knobs: Knobs, capacity: int) -> int:
    pinned = knobs.pins.batch_size
    if pinned is not None:
        if pinned > capacity:
            raise ConfigError(f"learner.batch_size = {pinned}: replay holds {capacity} transitions; lower the batch")
        return pinned
    return max(capacity // BATCHES_IN_REPLAY, 1)


def _check_rows(knobs: Knobs, capacity: int, envs: int) -> None:
    """Refuses a replay too small to learn from at all."""
    needed = max(2 * envs, knobs.configured.learning_starts)
    if knobs.pins.batch_size is None:
        needed = max(needed, BATCHES_IN_REPLAY * SMALLEST_BATCH)
    if capacity < needed:
        raise ConfigError(
            f"replay has room for {capacity} transitions, at least {needed} are needed (learning starts after "
            f"{knobs.configured.learning_starts}, {envs} environments); free memory or shared memory, or set less"
        )
