"""Machines that exist only as numbers: cores, update cost, environment, contention, noise; and their whole grid."""

import math
import random
from dataclasses import dataclass, field, replace

from spreeze.config.modes import find_mode
from spreeze.config.schema import TuningConfig
from spreeze.tuner.knobs import (
    KNOBS,
    batch_sizes,
    find_memory_plan,
    knob_names,
    learner_kinds,
    max_samplers,
    ordered,
    ratios,
)
from spreeze.tuner.model import paper_batch, worth
from spreeze.tuner.problem import (
    BATCH,
    DEVICE,
    ENVS,
    JOINT,
    LEARNER,
    PRECISION,
    RATIO,
    SAMPLERS,
    THREADS,
    Device,
    Setting,
    TrialResult,
    TuningProblem,
)

CONFIGURED = {DEVICE: "cpu", BATCH: 256, THREADS: 1, PRECISION: "float32", SAMPLERS: None, ENVS: 8,
              "replay.capacity": 1_000_000, RATIO: 8.0, "replay.samples_per_insert_max": 512.0}  # fmt: skip

REPLAY_KNOBS = ordered(knob for knob in KNOBS if knob.name in knob_names(find_mode("spreeze").replay))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The truth that the tuner does not know."""

    cores: float = 4.0
    physical: int = 4
    a: float = 4e-3
    b: float = 3e-5
    step_us: float = 400.0
    inference_us: float = 12.0
    thread_speedup: float = 0.7
    """Share of each further thread that a matrix product makes use of."""
    smt: float = 0.3
    bandwidth: float = 0.01
    """What each further busy thread costs all the others."""
    favour: float = 1.0
    """The learner's share of a crowded machine against a sampler's: 1 is fair."""
    overhead: float = 0.03
    """What reading replay costs the learner, as a share of its time."""
    gpu: tuple[float, float] | None = None
    """a and b of a GPU."""
    memory_bytes: int = 16 * 2**30
    gpu_bytes: int = 6 * 2**30
    crash_from_batch: int | None = None
    crash_from_samplers: int | None = None

    def problem(self, *, batch_size=256, pins=None, **targets):
        devices = [Device(name="cpu")]
        if self.gpu:
            devices.append(Device(name="cuda:0", memory_bytes=self.gpu_bytes))
        return TuningProblem(
            usable_cores=self.cores, physical_cores=self.physical, memory_bytes=self.memory_bytes,
            step_us=self.step_us, row_bytes=240,
            sampler_bytes=120_000_000, env_bytes=30_000_000, devices=tuple(devices), learning_starts=5000,
            knobs=REPLAY_KNOBS,
            configured=Setting({**CONFIGURED, BATCH: batch_size, **(pins or {})}), pins=frozenset(pins or {}),
            targets=TuningConfig(**targets),
        )  # fmt: skip

    def update_s(self, setting: Setting) -> float:
        """Seconds of an update that nobody disturbs."""
        if setting[DEVICE] != "cpu":
            assert self.gpu
            return self.gpu[0] + self.gpu[1] * setting[BATCH]
        return self.a + self.b * setting[BATCH] / (1.0 + self.thread_speedup * (setting[THREADS] - 1))

    def rates(self, setting: Setting) -> tuple[float, float, float]:
        """(updates/s, env steps/s, share of the cores) without noise, by the fixed point of the waiting."""
        envs = setting[ENVS]
        alone = 1.0 / self.update_s(setting) / (1.0 + self.overhead)
        one = envs / (envs * (self.step_us + 2.0) + self.inference_us) * 1e6
        low, high = 0.0, 1.0
        for _ in range(25):
            duty = (low + high) / 2.0
            updates, steps = self._shared(alone, one, setting, duty)
            if setting[RATIO] * steps > updates * setting[BATCH]:
                high = duty
            else:
                low = duty
        duty = high if high == 1.0 else low
        updates, steps = self._shared(alone, one, setting, duty)
        return updates, steps, min(1.0, (setting[SAMPLERS] * duty + setting[THREADS]) / self.cores)

    def _shared(self, alone, one, setting, duty):
        threads = setting[THREADS]
        busy = threads + setting[SAMPLERS] * duty
        fast = min(busy, self.physical, self.cores)
        speed = min(1.0, (fast + self.smt * (min(busy, self.cores) - fast)) / busy)
        speed /= 1.0 + self.bandwidth * (busy - 1.0)
        learner = speed
        if busy > self.cores:
            # What the scheduler gives the learner more than its share is taken from the samplers.
            learner = min(1.0, speed * self.favour)
            if threads > 2:  # a pair shares whole passes, more threads each product
                learner /= 20.0
        others = speed if busy <= threads else max(0.0, (speed * busy - learner * threads) / (busy - threads))
        if threads > 2 and busy > self.cores:
            others = speed
        return alone * learner, setting[SAMPLERS] * duty * one * min(others, 1.0)


@dataclass
class Bench:
    """Measures a machine: what it takes, how it fails, and how the figures scatter."""

    machine: Machine
    noise: float = 0.0
    seed: int = 0
    budget_s: float = 60.0
    start_s: float = 3.0
    group_s: float = 5.0
    gpu_start_s: float = 0.0
    """Context, libraries and kernels, once a device."""
    gpu_warm_s: float = 0.0
    """Warm-up of each batch on a GPU: a graph is recorded."""
    hang: frozenset = frozenset()
    load: float = 0.0
    """How much other programs disturb: rates fall to 1 / (1 + load) and scatter by about as much."""
    load_s: float = math.inf
    """Seconds of the budget after which they are gone."""
    left_s: float = field(init=False)
    asked: list = field(default_factory=list)

    def __post_init__(self):
        self.left_s, self.dice = self.budget_s, random.Random(self.seed)

    def seconds_left(self):
        return self.left_s

    def busy(self):
        """Whether other programs have kept a good part of the machine busy since the start."""
        spent_s = self.budget_s - self.left_s
        return bool(self.load) and min(1.0, self.load_s / max(spent_s, 1e-9)) > 0.3

    def _noisy(self, value):
        if self.load and self.budget_s - self.left_s < self.load_s:
            value *= math.exp(self.dice.gauss(0.0, 0.6 * math.log1p(self.load))) / (1.0 + self.load)
        slowed = 0.75 if self.noise and self.dice.random() < 0.03 else 1.0
        return value * slowed * math.exp(self.dice.gauss(0.0, self.noise))

    def learner(self, settings, *, within_s, on_result):
        # One process loads what a learner loads; each measurement is a fork of it.
        found, slow, spent = [], set(), 0.0 if self.asked else self.start_s
        for one in settings:
            if one.without(BATCH) in slow:
                continue
            cost = 0.4 + 3 * max(0.3, 2 * self.machine.update_s(one))
            if one[DEVICE] != "cpu":
                known = any(
                    seen[DEVICE] == one[DEVICE] and SAMPLERS not in seen
                    for seen in (*self.asked, *(rate.setting for rate, _ in found))
                )
                cost += self.gpu_warm_s + (0.0 if known else self.gpu_start_s)
            if spent + cost > within_s and found:
                break
            spent += cost
            found.append((self._learner_rate(one), cost))
            if self.machine.update_s(one) > 0.25:
                slow.add(one.without(BATCH))
        self.left_s -= spent - sum(cost for _, cost in found)
        turns = [[] for _ in found]
        for _ in range(3):  # everyone once a turn, so that what disturbs a while meets all alike
            for (row, cost), rates in zip(found, turns, strict=True):
                self.left_s -= cost / 3
                rates += [self._noisy(rate) for rate in row.updates_per_s[:1]]
        for (row, _), rates in zip(found, turns, strict=True):
            row.updates_per_s = tuple(rates)
            on_result(row)
        self.asked += [row.setting for row, _ in found]
        return [row for row, _ in found]

    def _learner_rate(self, one):
        crash = self.machine.crash_from_batch
        if crash is not None and one[BATCH] >= crash:
            return TrialResult(trial=LEARNER, setting=one, failure="out of memory")
        rate = 1.0 / self.machine.update_s(one)
        return TrialResult(trial=LEARNER, setting=one, updates_per_s=(rate,) * 3)

    def joint(self, settings, *, within_s, on_result):
        found, spent, groups = [], 0.0, set()
        for one in settings:
            group = one.without(SAMPLERS)
            cost = (0.0 if group in groups else self.group_s) + 3 * 0.7
            if spent + cost > within_s and found:
                break
            groups.add(group)
            spent += cost
            found.append(self._joint_rate(one))
            on_result(found[-1])
        self.left_s -= spent
        self.asked += [one.setting for one in found]
        return found

    def _joint_rate(self, one):
        crash = self.machine.crash_from_samplers
        if one in self.hang or (crash is not None and one[SAMPLERS] >= crash):
            return TrialResult(trial=JOINT, setting=one, failure="no env step within 30 s")
        updates, steps, cpu = self.machine.rates(one)
        return TrialResult(
            trial=JOINT, setting=one, updates_per_s=tuple(self._noisy(updates) for _ in range(3)),
            env_steps_per_s=tuple(self._noisy(steps) for _ in range(3)), cpu_share=(cpu,) * 3,
        )  # fmt: skip


def chosen(tuning) -> Setting:
    """The choice as one setting of the trials."""
    names = (DEVICE, BATCH, THREADS, PRECISION, SAMPLERS, ENVS, RATIO)
    return Setting({name: tuning.choices[name].value for name in names})


def true_score(machine: Machine, problem: TuningProblem, setting: Setting) -> float:
    """Score of a setting without noise, by the objective's own formula."""
    return worth(problem, setting, *machine.rates(setting)).score


def grid(machine: Machine, problem: TuningProblem) -> list[Setting]:
    """Everything that may be chosen on a machine."""
    problem = replace(problem, memory_plan=find_memory_plan(problem))
    learners = [
        kind.replace(BATCH, batch) for kind in learner_kinds(problem)
        for batch in _true_sizes(machine, problem, batch_sizes(problem), kind)
    ]  # fmt: skip
    learners = [one for one in learners if machine.update_s(one) <= 1.0 or one[BATCH] == problem.pin(BATCH)]
    if problem.objective == "paper":
        learners = [_fastest(machine, learners)]
    return [
        Setting({**one, SAMPLERS: samplers, ENVS: problem.memory_plan.envs_per_sampler.value, RATIO: ratio})
        for one in learners
        for samplers in _every_number(problem, one[THREADS])
        for ratio in ratios(problem, one)
    ]


def _fastest(machine, learners):
    """The learner with the most update frames/s; a less plain one has to add a tenth."""
    best = learners[0]
    for one in learners[1:]:
        if one[BATCH] / machine.update_s(one) > 1.1 * best[BATCH] / machine.update_s(best):
            best = one
    return best


def _every_number(problem, threads):
    """All numbers of samplers up to 12, then about every eighth part more."""
    if problem.pin(SAMPLERS) is not None:
        return [problem.pin(SAMPLERS)]
    most = max_samplers(problem, threads)
    return [count for count in range(1, most + 1) if count <= 12 or count % (1 + count // 8) == 0 or count == most]


def _true_sizes(machine, problem, sizes, kind):
    """The batch of the paper's rule, for its objective; all sizes otherwise."""
    if problem.objective != "paper" or problem.pin(BATCH) is not None:
        return sizes
    small, large = (machine.update_s(kind.replace(BATCH, batch)) for batch in (1, 1001))
    row = (large - small) / 1000.0
    knee = paper_batch(small - row, row, problem.targets.gpu_target)
    return [batch for batch in sizes if batch >= knee][:1] or sizes[-1:]


def best_score(machine: Machine, problem: TuningProblem) -> float:
    """The greatest true score on the whole grid."""
    return max(true_score(machine, problem, one) for one in grid(machine, problem))


def random_machine(dice: random.Random) -> Machine:
    """A machine as they are: 0.5 to 32 cores, with or without SMT, quota, GPU; any environment."""
    cores = dice.choice([0.5, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 8.0, 8.0, 12.0, 16.0, 24.0, 32.0])
    physical = max(1, math.ceil(cores / 2)) if dice.random() < 0.5 and cores >= 4 else math.ceil(cores)
    gpu = None
    if dice.random() < 0.3:
        gpu = _log(dice, 3e-4, 4e-3), _log(dice, 1e-7, 3e-6)
    a, b, step_us = _log(dice, 5e-4, 1e-2), _log(dice, 3e-6, 1e-4), _log(dice, 8.0, 2e4)
    _log(dice, 0.02, 3.0)  # not used: a seed keeps its machine
    return Machine(
        cores=cores, physical=physical, a=a, b=b,
        step_us=step_us, inference_us=dice.uniform(8.0, 16.0),
        thread_speedup=dice.uniform(0.2, 0.9), smt=dice.uniform(0.15, 0.45), bandwidth=_log(dice, 1e-3, 2e-2),
        favour=dice.uniform(0.8, 1.3), overhead=dice.uniform(0.0, 0.1), gpu=gpu,
    )  # fmt: skip


def _log(dice: random.Random, low: float, high: float) -> float:
    return math.exp(dice.uniform(math.log(low), math.log(high)))
