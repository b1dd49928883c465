"""The state of a run at one time, for views, and the sentence that names its bottleneck; None is unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.layers import SAMPLES_PER_INSERT_BOUNDS
from spreeze.config.modes import DataFlow
from spreeze.config.schema import StopConfig
from spreeze.formatting import DASH, clean, duration, number, percent, size
from spreeze.metrics.table import TABLE
from spreeze.run_directory import finite_number, whole_number

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
    """The state of a run now. Shares are 0 to 1; rates are over the last seconds."""

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
    def samplers_rest(self) -> bool:
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
    rests = tuner_measures and lag is not None  # its workers are suspended in turns, whatever their activity
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
        "sampler_shares": {} if rests else split_of(values, "sampler"),
        "learner_shares": {} if rests else split_of(values, "learner", on_policy=on_policy),
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


# --- the bottleneck ---

WAITS = 0.10  # share of time above which a side counts as waiting; less is within the noise of two-second windows
CPU_FULL = 0.85
_BACKGROUND_CORES = 0.15  # load of other programs that is always there, as for the governor
_HEAVY_CORES = 0.5  # load of other programs that is named with any bottleneck: it lowers the rates
_WORTH_CORES = 0.25  # external load whose end would noticeably raise the rates
_NOTHING_MOVES = 0.9  # Share of time that both sides wait where neither does anything.
GPU_IDLE = 0.50
POWER_IDLE = 0.40  # share of its power limit below which a GPU whose kernels run all the time has little to compute
_AT_BOUND = 0.05  # relative distance to a bound of the limiter that counts as having reached it
_ENDED = ("finished", "stopped", "failed", "crashed", "damaged")  # states of a run
_LEARNING = ("running", "training")  # as the page and the run itself call it
OTHERS_LIMIT = "Other programs are the limit"  # Beginning of the sentence where they are.


def bottleneck(snapshot: Snapshot) -> str:
    """One sentence on a run's bottleneck and a remedy, by time splits, the limiter's band and the machine's use.

    Only the limiter makes a side wait (samplers below its lower bound, the learner above its upper one), so the waiting
    side shows that the other one is the bottleneck. Samplers that rest for other programs do not count as waiting; they
    are named first.
    """
    sentence = _instead_of_rates(snapshot) or _bottleneck(snapshot)
    used, who = _used_elsewhere(snapshot), _cpu_users(snapshot)
    names_another = snapshot.unevaluated or snapshot.tuner_measures or sentence.startswith(OTHERS_LIMIT)
    if not names_another and who not in sentence and (used or 0.0) >= _HEAVY_CORES:
        sentence = f"{sentence.removesuffix('.')}; {who} keep {number(used)} cores busy."
    return sentence


def _instead_of_rates(snapshot: Snapshot) -> str | None:
    """The sentence for a run whose rates do not show its bottleneck (yet); None if they do."""
    if snapshot.unevaluated:
        return "No evaluation: the evaluator keeps failing, so the target return cannot be reached; see its log."
    if snapshot.tuner_measures and snapshot.state in _ENDED:
        return "It ended before the tuner had chosen."
    if snapshot.tuner_measures:
        turns = "taking turns with the run, which is paused meanwhile"
        how = "on the running workers" if snapshot.lag is None else turns
        return f"The tuner measures {how}: rates change until it has chosen."
    wanted = number(snapshot.learning_starts)
    if not snapshot.updates and (snapshot.env_steps or 0) < (snapshot.learning_starts or 0):
        return f"Warming up: {number(snapshot.env_steps)} of {wanted} env steps before the first update."
    refills = snapshot.updates and snapshot.lag is None and snapshot.samples_per_insert is None
    if refills and snapshot.state in _LEARNING:
        return f"Warming up: replay gets {wanted} env steps before learning goes on."
    return None


def _bottleneck(snapshot: Snapshot) -> str:
    learner_wait = snapshot.learner_shares.get("wait")
    sampler_wait = snapshot.sampler_shares.get("wait")
    needless = sampler_wait is not None and sampler_wait >= WAITS  # active samplers wait: more would not help
    others = _others_active(snapshot)
    if snapshot.samplers_rest and learner_wait is not None and not needless and (others or learner_wait >= WAITS):
        return _resting(snapshot, learner_wait, others=others)
    if learner_wait is None or sampler_wait is None:
        missing = "learner" if learner_wait is None else "samplers"
        return f"Bottleneck unknown: no times of the {missing} in the last seconds."
    if min(learner_wait, sampler_wait) >= _NOTHING_MOVES and not (snapshot.updates_per_s or snapshot.env_steps_per_s):
        return (
            f"Nothing moves: learner waits {percent(learner_wait)}, samplers {percent(sampler_wait)} of their time, as "
            "just after a restart; see the events."
        )
    if snapshot.updates and snapshot.updates_per_s == 0.0 and learner_wait < WAITS:
        return (
            "No update in the last seconds, although the learner does not wait for data: it is restarting, "
            "saving, or an update takes that long; see the events."
        )
    if snapshot.on_device:
        return _on_device(snapshot)
    if snapshot.lag is not None:
        return _on_policy(snapshot, learner_wait, sampler_wait)
    if snapshot.serial:
        return (
            "Sampling and learning alternate in one process; a mode with several processes, such as spreeze, does both "
            "at once."
        )
    if learner_wait >= WAITS and sampler_wait >= WAITS:
        return _limiter_bound(snapshot, learner_wait, sampler_wait)
    if learner_wait >= WAITS:
        return _sampler_bound(snapshot, learner_wait)
    if sampler_wait >= WAITS:
        return _learner_bound(snapshot, learner_wait, sampler_wait)
    return _balanced(snapshot, learner_wait, sampler_wait)


def _cores_full(snapshot: Snapshot) -> bool:
    return snapshot.cpu_use is not None and snapshot.cpu_use >= CPU_FULL


def _others_active(snapshot: Snapshot) -> bool:
    """True if other programs use more cores than usually in the background."""
    return (snapshot.external_cpu_cores or 0.0) > _BACKGROUND_CORES


def _used_elsewhere(snapshot: Snapshot) -> float | None:
    """Cores that other programs and the user's other runs keep busy; None if too few to matter for the rates."""
    known = [cores for cores in (snapshot.external_cpu_cores, snapshot.sibling_cpu_cores) if cores is not None]
    return sum(known) if sum(known) > _WORTH_CORES else None


def _cpu_users(snapshot: Snapshot) -> str:
    if (snapshot.sibling_cpu_cores or 0.0) <= _BACKGROUND_CORES:
        return "other programs"
    low_priority = "the page, other runs and programs of low priority"
    return f"other programs, {low_priority}" if _others_active(snapshot) else low_priority


def _less_load(snapshot: Snapshot) -> str:
    return f"less load from {_cpu_users(snapshot)}, which keep {number(_used_elsewhere(snapshot))} cores busy,"


def _on_policy(snapshot: Snapshot, learner_wait: float, sampler_wait: float) -> str:
    """The side that has finished its rollout waits for the other; samplers also wait for inference workers."""
    waits = f"learner waits {percent(learner_wait)}, samplers {percent(sampler_wait)}"
    if snapshot.lag == 0:
        more = "--mode hts does both at once" if snapshot.serial else "other learners use the cores in the meantime"
        return f"Collecting and learning alternate: {waits}; {more}."
    if abs(learner_wait - sampler_wait) < WAITS:
        return f"Balanced: {waits}."
    if learner_wait > sampler_wait:
        cores = "more cores" if _used_elsewhere(snapshot) is None else _less_load(snapshot)
        remedy = cores.removesuffix(",") if _cores_full(snapshot) else "more samplers, more environments each"
        return f"Collecting is the limit: {waits}; {remedy} or a faster environment would help."
    passes = "uses of a rollout" if snapshot.asynchronous else "epochs"
    remedy = f"fewer {passes}, a smaller network or a GPU{_not_cores(snapshot)}"
    if _used_elsewhere(snapshot) is not None:  # hardware would not help while other programs use the cores
        remedy = f"{_less_load(snapshot)} fewer {passes} or a smaller network"
    return f"Learner is the limit: {waits}; {remedy} would help."


def _on_device(snapshot: Snapshot) -> str:
    """One process steps and learns in turns; on a GPU these are the times of launching work or waiting for it."""
    stepping = sum(snapshot.sampler_shares.get(part, 0.0) for part in ("policy", "env", "write"))
    learning = sum(snapshot.learner_shares.get(part, 0.0) for part in ("gather", "critic", "actor", "learn"))
    engine = snapshot.sampler_shares.get("env", 0.0)
    split = f"stepping takes {percent(stepping)} (the engine {percent(engine)}), learning {percent(learning)}"
    if learning > stepping:
        remedy = "a larger minibatch or fewer epochs" if snapshot.lag is not None else (
            "fewer samples per insert (replay.samples_per_insert_min) or larger batches"
        )  # fmt: skip
        return f"Learner is the limit: {split}; {remedy} would help."
    return f"Environments are the limit: {split}; more of them at once would help."


def _resting(snapshot: Snapshot, learner_wait: float, *, others: bool) -> str:
    waits = f"learner waits {percent(learner_wait)}"
    if others and snapshot.leave_free == 0.0:
        active, cores = _active_samplers(snapshot), number(snapshot.external_cpu_cores)
        return f"{OTHERS_LIMIT}: they keep {cores} cores, so {active}; {waits}."
    limited = "the limit" if learner_wait >= WAITS else "the limit of env steps/s, not of updates/s"
    return f"Paused samplers are {limited}: {_why_paused(snapshot)}; {waits}."


def _active_samplers(snapshot: Snapshot) -> str:
    return f"{number(snapshot.samplers_active)} of {number(snapshot.samplers_wanted)} samplers are active"


def _why_paused(snapshot: Snapshot) -> str:
    """Number of active samplers, and the reason, where other programs alone are not it."""
    if snapshot.leave_free > 0.0:  # without it samplers share the cores with other programs
        why = f"{percent(snapshot.leave_free)} of the cores are to be left free"
        if (used := _used_elsewhere(snapshot)) is not None:
            why += f", and {_cpu_users(snapshot)} keep {number(used)} cores busy"
    else:
        why = "of the balance of samples per insert"
    return f"{_active_samplers(snapshot)} because {why}"


def _limiter_bound(snapshot: Snapshot, learner_wait: float, sampler_wait: float) -> str:
    ratio = number(snapshot.samples_per_insert)
    low, high = number(snapshot.samples_per_insert_min), number(snapshot.samples_per_insert_max)
    return (
        f"The rate limiter is the limit: it keeps samples per insert at {ratio} (band {low} to {high}), learner waits "
        f"{percent(learner_wait)} and samplers {percent(sampler_wait)}; a wider band would help."
    )


def _sampler_bound(snapshot: Snapshot, learner_wait: float) -> str:
    shares = snapshot.sampler_shares
    env, policy = shares.get("env"), shares.get("policy")
    cause = "" if env is None else f" ({percent(env)} of their time is the environment)"
    if env is not None and policy is not None and policy > env:
        cause = f" ({percent(policy)} of their time is policy inference)"
        remedy = "more environments per sampler or a smaller network"
    elif snapshot.cpu_use is not None and snapshot.cpu_use < CPU_FULL:
        remedy = f"more samplers (the cores are {percent(snapshot.cpu_use)} busy)"
    else:
        cores = "more cores" if _used_elsewhere(snapshot) is None else _less_load(snapshot)
        remedy = f"{cores} or a faster environment"
    if _bound_reached(snapshot) == "upper":
        high = number(snapshot.samples_per_insert_max)
        remedy += f", or a samples-per-insert bound above {high}, which now limits the learner"
    return f"Samplers are the limit{cause}: learner waits {percent(learner_wait)} for rows; {remedy} would help."


def _learner_bound(snapshot: Snapshot, learner_wait: float, sampler_wait: float) -> str:
    waits_for_core = _cores_full(snapshot) and _used_elsewhere(snapshot) is not None
    computes = "computes or waits for a core" if waits_for_core else "computes"
    bound = ""
    if _bound_reached(snapshot) == "lower":
        bound = f" at the lower bound of {number(snapshot.samples_per_insert_min)} samples per insert"
    return (
        f"Learner is the limit: it {computes} {percent(1 - learner_wait)} of its time; {_learner_remedy(snapshot)} "
        f"would help; samplers wait {percent(sampler_wait)} for it{bound}."
    )


def _learner_remedy(snapshot: Snapshot) -> str:
    shares = snapshot.learner_shares
    if shares.get("publish", 0.0) > 0.2:
        return f"publishing less often (it takes {percent(shares['publish'])})"
    if shares.get("gather", 0.0) > 0.3:
        return f"a smaller batch (gathering rows takes {percent(shares['gather'])})"
    if "cuda" in (snapshot.learner_device or ""):
        return _gpu_remedy(snapshot)
    if _used_elsewhere(snapshot) is not None:
        return f"{_less_load(snapshot)} or a smaller batch"
    if _cores_full(snapshot) and (snapshot.samplers_wanted or 0) > 1:
        return "more cores, fewer samplers, a smaller batch or a GPU"
    return f"a smaller batch or a GPU{_not_cores(snapshot)}"


def _not_cores(snapshot: Snapshot) -> str:
    """A clause that more cores would not help, if the present ones are not fully used."""
    idle = snapshot.cpu_use is not None and snapshot.cpu_use < CPU_FULL
    return f", but not more cores ({percent(snapshot.cpu_use)} of these are in use)," if idle else ""


def _gpu_remedy(snapshot: Snapshot) -> str:
    """A remedy from the load of the GPUs: small kernels, each after the other, keep one busy but draw little power."""
    gpus = snapshot.learner_gpus or snapshot.gpus
    uses = [gpu.use for gpu in gpus if gpu.use is not None]
    if uses and max(uses) < GPU_IDLE:
        return f"a larger batch (kernels run only {percent(max(uses))} of the time)"
    known = [(gpu.power_share, gpu) for gpu in gpus if gpu.power_share is not None]
    share, hardest = max(known, key=lambda pair: pair[0], default=(1.0, None))
    if hardest is not None and share < POWER_IDLE:
        return (
            f"a larger batch (kernels run {percent(max(uses, default=None))} of the time but draw "
            f"{number(hardest.power_w)} of {number(hardest.power_limit_w)} W: limited by launches, not by "
            "compute) or learner.compile = true"
        )
    return "a smaller batch or a second GPU"


def _balanced(snapshot: Snapshot, learner_wait: float, sampler_wait: float) -> str:
    busy = f"the cores are {percent(snapshot.cpu_use)} busy"
    if snapshot.cpu_use is None:
        remedy = "; faster hardware would help both"
    elif snapshot.samplers_rest:
        remedy = f"; {_why_paused(snapshot)}"
    elif snapshot.cpu_use < CPU_FULL:
        remedy = f"; {busy}, so another sampler would add env steps"
    elif _used_elsewhere(snapshot) is not None:
        remedy = f", and {busy}; {_less_load(snapshot)} would help"
    else:
        remedy = f", and {busy}; only more cores or a GPU would help"
    waits = f"learner waits {percent(learner_wait)}, samplers {percent(sampler_wait)}"
    return f"Balanced: {waits}{remedy}."


def _bound_reached(snapshot: Snapshot) -> str | None:
    """``lower`` or ``upper`` if the measured ratio is at that bound of the limiter."""
    ratio = snapshot.samples_per_insert
    if ratio is None:
        return None
    if snapshot.samples_per_insert_min and ratio <= snapshot.samples_per_insert_min * (1 + _AT_BOUND):
        return "lower"
    if snapshot.samples_per_insert_max and ratio >= snapshot.samples_per_insert_max * (1 - _AT_BOUND):
        return "upper"
    return None
