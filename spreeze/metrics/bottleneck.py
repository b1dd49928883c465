"""The sentence that names a run's bottleneck, and a remedy."""

from __future__ import annotations

from spreeze.formatting import number, percent
from spreeze.metrics.snapshot import LOADS_S, Snapshot

WAITS = 0.10  # share of time above which a side counts as waiting; less is within the noise of two-second windows
CPU_FULL = 0.85
BACKGROUND_CORES = 0.15  # load of other programs that is always there
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
    side shows that the other one is the bottleneck. Samplers paused for other programs do not count as waiting; they
    are named first.
    """
    sentence = _instead_of_rates(snapshot) or _bottleneck(snapshot)
    used, who = _used_elsewhere(snapshot), _cpu_users(snapshot)
    names_another = snapshot.unevaluated or snapshot.tuner_measures or sentence.startswith(OTHERS_LIMIT)
    if not names_another and who not in sentence and (used or 0.0) >= _HEAVY_CORES:
        sentence = f"{sentence.removesuffix('.')}; {who} keep {_busy(snapshot, used)}."
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
        return f"Warming up: replay is refilled with {wanted} env steps before learning continues."
    return None


def _bottleneck(snapshot: Snapshot) -> str:
    learner_wait = snapshot.learner_shares.get("wait")
    sampler_wait = snapshot.sampler_shares.get("wait")
    needless = sampler_wait is not None and sampler_wait >= WAITS  # active samplers wait: more would not help
    others = _others_active(snapshot)
    if snapshot.samplers_paused and learner_wait is not None and not needless and (others or learner_wait >= WAITS):
        return _paused(snapshot, learner_wait, others=others)
    if learner_wait is None or sampler_wait is None:
        missing = "learner" if learner_wait is None else "samplers"
        return f"Bottleneck unknown: no times of the {missing} in the last seconds."
    if min(learner_wait, sampler_wait) >= _NOTHING_MOVES and not (snapshot.updates_per_s or snapshot.env_steps_per_s):
        return (
            f"Neither side makes progress: learner waits {percent(learner_wait)}, samplers {percent(sampler_wait)} of "
            "their time, as just after a restart; see the events."
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
    return (snapshot.external_cpu_cores or 0.0) > BACKGROUND_CORES


def _used_elsewhere(snapshot: Snapshot) -> float | None:
    """Cores that other programs and the user's other runs keep busy; None if too few to matter for the rates."""
    known = [cores for cores in (snapshot.external_cpu_cores, snapshot.sibling_cpu_cores) if cores is not None]
    return sum(known) if sum(known) > _WORTH_CORES else None


def _cpu_users(snapshot: Snapshot) -> str:
    if (snapshot.sibling_cpu_cores or 0.0) <= BACKGROUND_CORES:
        return "other programs"
    low_priority = "the page, other runs and programs of low priority"
    return f"other programs, {low_priority}" if _others_active(snapshot) else low_priority


def _busy(snapshot: Snapshot, cores: float | None) -> str:
    """Cores with the time over which they were busy; of a run that has ended that is the whole session."""
    return f"{number(cores)} cores busy{'' if snapshot.state in _ENDED else f' (mean of {LOADS_S:g} s)'}"


def _less_load(snapshot: Snapshot) -> str:
    return f"less load from {_cpu_users(snapshot)}, which keep {_busy(snapshot, _used_elsewhere(snapshot))},"


def _on_policy(snapshot: Snapshot, learner_wait: float, sampler_wait: float) -> str:
    """The side that has finished its rollout waits for the other; samplers also wait for inference workers."""
    waits = f"learner waits {percent(learner_wait)}, samplers {percent(sampler_wait)}"
    if snapshot.lag == 0:
        several = "with several learners (--learners) the others use the cores meanwhile"
        more = "--mode hts does both at once" if snapshot.serial else several
        return f"Collecting and learning alternate: {waits}; {more}."
    if abs(learner_wait - sampler_wait) < WAITS:
        return f"Balanced: {waits}."
    if learner_wait > sampler_wait:
        cores = "more cores" if _used_elsewhere(snapshot) is None else _less_load(snapshot)
        remedy = cores if _cores_full(snapshot) else "more samplers, more environments each"
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


def _paused(snapshot: Snapshot, learner_wait: float, *, others: bool) -> str:
    waits = f"learner waits {percent(learner_wait)}"
    if others and snapshot.leave_free == 0.0:
        active, cores = _active_samplers(snapshot), _busy(snapshot, snapshot.external_cpu_cores)
        return f"{OTHERS_LIMIT}: they keep {cores}, so {active}; {waits}."
    limited = "the limit" if learner_wait >= WAITS else "the limit of env steps/s, not of updates/s"
    return f"Paused samplers are {limited}: {_why_paused(snapshot)}; {waits}."


def _active_samplers(snapshot: Snapshot) -> str:
    return f"{number(snapshot.samplers_active)} of {number(snapshot.samplers_wanted)} samplers are active"


def _why_paused(snapshot: Snapshot) -> str:
    """Number of active samplers, and the reason, where other programs alone are not it."""
    if snapshot.leave_free > 0.0:  # without it samplers share the cores with other programs
        why = f"{percent(snapshot.leave_free)} of the cores are to be left free"
        if (used := _used_elsewhere(snapshot)) is not None:
            why += f", and {_cpu_users(snapshot)} keep {_busy(snapshot, used)}"
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
    elif snapshot.samplers_paused:
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
