"""The state of a run at one time, for views; None is unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.layers import SAMPLES_PER_INSERT_BOUNDS
from spreeze.config.modes import DataFlow
from spreeze.config.schema import StopConfig
from spreeze.formatting import DASH, clean, duration, percent, size
from spreeze.metrics.table import TABLE
from spreeze.run_directory import finite_number, whole_number

OTHER_LOADS, LOADS_S = ("external_cpu_cores", "sibling_cpu_cores"), 20.0
"""Other programs' loads, and the seconds over which views take their means: the advice does not follow each peak."""
_ALL = 0.95  # share of the samplers from which on they count as all: an ended run has their mean over time


@dataclass(frozen=True, kw_only=True)
class GpuSnapshot:
    index: int
    use: float | None = None
    memory_used_bytes: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_hz: float | None = None
    clock_max_hz: float | None = None

    @property
    def figures(self) -> str:
        """Power, clock and memory, each with its limit if known; GPU use alone says little."""
        power, clock = _of(self.power_w, self.power_limit_w, "W", 0), _of(self.clock_hz, self.clock_max_hz, "GHz", 2)
        memory = "" if self.memory_bytes is None else f" of {size(self.memory_bytes)}"
        return f"{power}, {clock}, {size(self.memory_used_bytes)}{memory}"

    @property
    def power_share(self) -> float | None:
        """Share of the power that it may draw."""
        return self.power_w / self.power_limit_w if self.power_w is not None and self.power_limit_w else None


def _of(value: float | None, limit: float | None, unit: str, digits: int) -> str:
    scale = 1e-9 if unit == "GHz" else 1.0
    now, bound = (DASH if known is None else f"{known * scale:.{digits}f}" for known in (value, limit))
    return f"{now} {unit}" if limit is None else f"{now} of {bound} {unit}"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run now. Shares are 0 to 1; rates are over the last seconds, loads over ``LOADS_S``."""

    env_id: str
    algo: str
    lag: int | None = None
    """On-policy algorithms: rollouts between the policy that collects and the one that learns; None: off-policy."""
    serial: bool = False  # one process does everything, one thing at a time
    on_device: bool = False  # its learner steps the environments, on its device
    asynchronous: bool = False  # the learner does not pace the samplers: ``lag`` is its minimum
    state: str = "starting"
    wall_s: float | None = None

    env_steps: int | None = None
    env_steps_per_s: float | None = None
    updates: int | None = None
    updates_per_s: float | None = None
    update_frames_per_s: float | None = None
    learning_starts: int | None = None
    samples_per_insert: float | None = None
    samples_per_insert_min: float | None = None
    samples_per_insert_max: float | None = None
    policy_lag: float | None = None
    transition_age: float | None = None
    replay_fill: float | None = None

    eval_return: float | None = None
    eval_best: float | None = None
    eval_final: float | None = None
    eval_returns: tuple[float, ...] = ()  # evaluations so far, oldest first, for the sparkline
    episode_return: float | None = None

    cpu_use: float | None = None
    core_uses: tuple[float, ...] = ()
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    gpus: tuple[GpuSnapshot, ...] = ()
    learner_device: str | None = None  # ``cpu`` or ``cuda:N``

    sampler_shares: dict[str, float] = field(default_factory=dict)
    """Time split of the samplers, by parts (policy, env, write, wait)."""
    learner_shares: dict[str, float] = field(default_factory=dict)
    """Time split of the learner, by parts (wait, gather, critic, actor, learn, publish)."""
    bottleneck: str | None = None
    more: tuple[tuple[str, float], ...] = ()  # other metrics that the terminal shows according to the table, by name

    samplers_alive: int | None = None
    samplers_wanted: int | None = None
    samplers_active: float | None = None  # samplers that the governor lets work
    external_cpu_cores: float | None = None  # usable cores that other programs keep busy
    sibling_cpu_cores: float | None = None  # usable cores that the user's other runs keep busy
    leave_free: float = 0.0  # share of the usable cores that the user leaves to other programs
    restarts: int = 0
    unevaluated: bool = False  # the run should stop at a return, but the evaluator keeps failing
    tuner_measures: bool = False  # the tuner has not chosen yet, and measures while the run trains
    env_errors: int | None = None  # errors and bad transitions of environments so far; each costs an episode
    progress: float | None = None  # share of the nearest stop condition, 0 to 1; None without one
    eta_s: float | None = None
    may_end_earlier: bool = False  # a return may end it before ``progress`` is 1
    first_error: tuple[str, str] | None = None  # (process name, text) of the first exception in any worker
    events: tuple[str, ...] = ()  # latest events, oldest first

    @property
    def time_left(self) -> str | None:
        """Share that is done, and the time left; None if unknown."""
        if self.progress is None:
            return None
        most = "at most " if self.may_end_earlier else ""
        return percent(self.progress) + ("" if self.eta_s is None else f", {most}{duration(self.eta_s)} left")

    @property
    def learner_gpus(self) -> tuple[GpuSnapshot, ...]:
        parts = (self.learner_device or "").split("+")
        return tuple(gpu for gpu in self.gpus if f"cuda:{gpu.index}" in parts)

    @property
    def samplers_paused(self) -> bool:
        """True while the governor lets clearly fewer samplers work than there are."""
        if self.samplers_active is None or self.samplers_wanted is None:
            return False
        return self.samplers_active < _ALL * self.samplers_wanted


def snapshot_of(
    run: Mapping[str, Any],
    config: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, float | None],
    data_flow: DataFlow | None,
    *,
    state: str,
    **extra: Any,
) -> Snapshot:
    """The state of a run now: for its terminal from the run's own process, for the page from its directory.

    Args:
        run: its ``run.json``.
        config: its settings, part -> field -> value.
        values: the newest value of each series, None or absent if unknown.
        data_flow: how its mode runs its algorithm; None if unknown.
        state: its state.
        extra: fields of the snapshot that only the run's own process knows, or knows better.
    """
    lag = data_flow.lag if data_flow else None
    replay = config.get("replay", {}) if lag is None else {}
    # Taken from the metrics, because the configuration of an old run may lack it.
    on_policy = lag is not None or bool(values.get("learner_learn_share"))
    # A mode may have narrowed the bounds that were set.
    band: Sequence[float | None] = run.get("samples_per_insert_band") or ()
    if len(band) != 2:
        band = [finite_number(replay.get(bound)) for bound in SAMPLES_PER_INSERT_BOUNDS]
    low, high = band
    device, gpus = clean(config.get("learner", {}).get("device", ""), 40), _gpus(values)
    rates = parts_of(values, "sampler_env_steps_per_s").values()
    active = [rate for rate in rates if rate > 0.0]
    wanted = config.get("sampling" if lag is None else "rollout", {}).get("samplers")  # None: as many as there are
    errors = [value for name in ("env_errors", "transitions_rejected") if (value := values.get(name)) is not None]
    fields = {item.name for item in dataclasses.fields(Snapshot)}
    shown = [metric.name for metric in TABLE.metrics if metric.in_terminal]
    per_learner = [metric.name for metric in TABLE.metrics if metric.per_learner]
    by_part = [f"{name}/{part}" for name in per_learner for part in parts_of(values, name)]
    more = ((name, values.get(name)) for name in (*shown, *by_part) if name not in fields)
    tuner_measures = run.get("tuner_measures") is True
    suspended = tuner_measures and lag is not None  # its workers are suspended in turns, whatever their activity
    known: dict[str, Any] = {
        **{name: values.get(name) for name in shown if name in fields},
        "more": tuple((name, value) for name, value in more if value is not None),
        "env_id": clean(run.get("env_id"), 80),
        "algo": clean(run.get("algo"), 20),
        "state": state,
        "lag": lag,
        **{name: bool(getattr(data_flow, name, False)) for name in ("serial", "on_device", "asynchronous")},
        **{name: run.get(name) for name in ("wall_s", "eval_best", "eval_final")},
        "sibling_cpu_cores": values.get("sibling_cpu_cores"),
        "unevaluated": run.get("unevaluated") is True,
        "tuner_measures": tuner_measures,
        "learning_starts": whole_number(replay.get("learning_starts")),
        "samples_per_insert_min": low if replay else None,
        "samples_per_insert_max": high if replay else None,
        "samplers_wanted": whole_number(wanted) or len(rates) or None,
        "leave_free": finite_number(run.get("leave_free", config.get("tuning", {}).get("leave_free")), 1.0, 0.0) or 0.0,
        "samplers_alive": len(active) or None,
        "env_errors": int(sum(errors)) if errors else None,
        "may_end_earlier": ends_at_return(config.get("stop", {})),
        "learner_device": device if device != "auto" else ("cuda:0" if gpus else "cpu"),
        "env_steps": whole_number(values.get("env_steps")),
        "updates": whole_number(values.get("updates")),
        "restarts": whole_number(values.get("restarts")) or 0,
        "core_uses": tuple(parts_of(values, "cpu_core_use").values()),
        "gpus": gpus,
        "sampler_shares": {} if suspended else split_of(values, "sampler"),
        "learner_shares": {} if suspended else split_of(values, "learner", on_policy=on_policy),
    }
    return Snapshot(**known | extra)


def ends_at_return(stop: Mapping[str, Any]) -> bool:
    """True if a return may end a run with these settings of ``stop``."""
    if all(stop.get(name) is None for name in StopConfig.CONDITIONS):
        return True
    return stop.get("target_return") is not None and stop.get("target_evaluations") != 0


def split_of(values: Mapping[str, float | None], role: str, *, on_policy: bool = False) -> dict[str, float]:
    """Split of a role's time by part; waiting is last, as in the charts."""
    rows = [
        (slot.removesuffix("_s"), values.get(metric.name)) for metric, slot in TABLE.splits(role, on_policy=on_policy)
    ]
    return {part: value for part, value in sorted(rows, key=lambda row: row[0] == "wait") if value is not None}


def parts_of(values: Mapping[str, float | None], name: str) -> dict[int, float]:
    """The known series ``name/0``, ``name/1`` and so on, by number."""
    known = ((series.partition("/"), value) for series, value in values.items() if value is not None)
    return dict(sorted((int(part), value) for (base, _, part), value in known if base == name and part.isdecimal()))


def _gpus(values: Mapping[str, float | None]) -> tuple[GpuSnapshot, ...]:
    indices = sorted({int(name.split("/")[1]) for name in values if name.startswith("gpu_") and "/" in name})
    names = [item.name for item in dataclasses.fields(GpuSnapshot) if item.name != "index"]
    return tuple(GpuSnapshot(index=i, **{name: values.get(f"gpu_{name}/{i}") for name in names}) for i in indices)
