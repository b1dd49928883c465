"""The GALA mode (arXiv 1906.04585): several learners, each with samplers of its own, that mix their parameters.

Each learner is wired as in mode hts with a lag of 0: its samplers and it take turns, and the seed of its environments
is ``run.seed`` + its number. All begin with the same parameters. After an update each sends its parameters to its
out-neighbours, takes the mean with what has arrived from its in-neighbours, and goes on; it waits only for one of
which nothing came for ``gala.max_staleness`` rollouts (``transport.mixing``). The mean of all policies is published
and evaluated; each learner writes checkpoints of its own. This process measures how far apart they are. Learners of
other hosts may be in the ring (settings ``exchange``, or ``--cluster``): a run on each host, which publishes the mean
of its own learners; one that joins begins with a neighbour's parameters.

*Learning rate.* Each of n learners has 1/n of the rows, so its gradient has sqrt(n) times the noise, and Adam makes
steps of one size of either. The mean of n such steps goes 1/sqrt(n) as far as one step from all rows would. So the
learning rate is multiplied by sqrt(n) (``gala.scale_lr``), but not to above 4e-3, where learners fall back
(``assets/figures.md``). Learners keep samplers of their own, also on small tasks: that costs no env steps, and a crash
of an environment ends no learner.

Mode tianji wires its on-policy learners in the same way, with a lag of 1: samplers fill one storage while the learner
learns from the other, so as many rows are consumed as are produced. Each learner takes the mean of all parameters every
``learner.average_interval`` updates; each policy is published and evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spreeze.config.layers import Settings
from spreeze.metrics import median
from spreeze.modes import hts
from spreeze.run_directory import SIMILARITY, RunDir, group_folder
from spreeze.runtime.cluster.learner_bridge import learner_bridge_spec
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher, WorkerSpec
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import CounterSample, GroupSample, Outcome, Recorder, View
from spreeze.runtime.supervisor import Wired, open_place, run_workers, tell_place, watcher_specs
from spreeze.transport.gossip import GlooPlace
from spreeze.transport.mixing import NORMS, MixMemory, MixSpec
from spreeze.transport.status_table import StatusTable
from spreeze.transport.topology import (
    asynchronous_bound,
    contraction,
    cosines,
    mixing_matrix,
    radius,
    synchronous_bound,
)
from spreeze.workers.roles import Address, RestartLimit

_LIMIT = RestartLimit(failures=20, window_s=60.0, quarantine_s=None, backoff_s=0.05, max_delay_s=1.0)
"""The others learn on without a learner that fails, so it may fail more often than a learner that is alone."""
_MOST_LR = 4e-3
"""Learning rate to which the number of learners may raise one."""
_SLOW = 0.5
_WINDOW_S = 5.0
_NAMED_S = 60.0


class Team(NamedTuple):
    """One learner's plan and memory."""

    plan: RunPlan
    memory: hts.Memory
    wakeups: hts.Wakeups


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains until a stop condition or an interrupt; a ResourceError if there is no room for rollouts."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(open_place(plan, run_dir.path))
        numbers = range(plan.learners) if place is None else place.own
        teams = [open_team(stack, plan, run_dir.path, group, number) for group, number in enumerate(numbers)]
        env_steps = sum(hts.continued(team.plan, team.memory.rollouts).earlier.env_steps for team in teams)
        plan = dataclasses.replace(plan, earlier=dataclasses.replace(plan.earlier, env_steps=env_steps))
        recorder = Recorder(plan, run_dir, view)
        tell_place(place, recorder.event)
        return run_workers(plan, run_dir, recorder, interrupts, launcher,
                           _wired(plan, run_dir.path, teams, recorder, place))


def open_team(
    stack: contextlib.ExitStack, plan: RunPlan, run_dir: Path, group: int, number: int | None = None
) -> Team:
    """Opens one learner's memory; its folder is made. ``number`` counts the learners of all hosts."""
    own, folder = _plan_of(plan, group, group if number is None else number), group_folder(run_dir, group)
    folder.mkdir(parents=True, exist_ok=True)
    memory = stack.enter_context(hts.open_memory(own, folder))
    return Team(own, memory, stack.enter_context(hts.open_wakeups(own)))


def _plan_of(plan: RunPlan, group: int, number: int) -> RunPlan:
    """The plan of one learner by itself."""
    run = dataclasses.replace(plan.config.run, learners=1, seed=plan.config.run.seed + number)
    settings = Settings(dataclasses.replace(plan.config, run=run), {})
    return dataclasses.replace(plan, settings=settings, samplers=plan.samplers_of(group))


def _in_lockstep(plan: RunPlan) -> bool:
    """Whether all mix at every update, as Proposition 1 has it."""
    return plan.config.wiring.mixes and plan.config.gala.max_staleness == 0


@contextlib.contextmanager
def _wired(
    plan: RunPlan, run_dir: Path, teams: list[Team], recorder: Recorder, place: GlooPlace | None
) -> Iterator[Wired]:
    with (
        contextlib.closing(StatusTable.create(plan.samplers + plan.learners + 3)) as status,
        contextlib.closing(MixMemory.create(plan.learners, lockstep=_in_lockstep(plan))) as memory,
    ):
        for group, team in enumerate(teams):
            memory.board["env_steps"][group] = team.memory.rollouts.current * team.memory.rollouts.spec.rows
        specs = worker_specs(plan, run_dir, teams, memory, recorder.started_s, place)
        readers = [hts.reader(team.plan, team.memory, status, specs, group) for group, team in enumerate(teams)]
        spread = LearnerSpread(plan, run_dir, memory, recorder)

        def read() -> CounterSample:
            now, groups = time.monotonic(), tuple(read_one() for read_one in readers)
            alone = plan.learners == 1 or plan.config.exchange.spans_hosts  # parameters of other hosts are not here
            return CounterSample(now, groups if alone else spread.measured(groups, now))

        yield Wired(status=status, specs=specs, read=read)


def worker_specs(
    plan: RunPlan, run_dir: Path, teams: Sequence[Team], memory: MixMemory, run_started_s: float,
    place: GlooPlace | None = None,
) -> dict[str, WorkerSpec]:
    """Worker specifications in starting order: the learners, slowest to import, all samplers, the watchers."""
    learners, samplers = [], []
    for group, team in enumerate(teams):
        folder = group_folder(run_dir, group)
        for spec in hts.worker_specs(team.plan, folder, team.memory, team.wakeups, run_started_s).values():
            address = Address(spec.address.role, group, spec.address.index)
            if spec.role.learns:
                learners.append(_with_mix(dataclasses.replace(spec, address=address, row=plan.samplers + group), plan,
                                          teams, memory, place))
            else:
                row = group * team.plan.samplers + spec.address.index
                samplers.append(dataclasses.replace(spec, address=address, row=row))
    first = plan.samplers + plan.learners
    specs = [*learners, *samplers, *watcher_specs(plan, run_dir, first).values()]
    if place is not None and plan.config.cluster.address is not None:
        specs.append(learner_bridge_spec(plan, place, first + 2))
    return {spec.name: spec for spec in specs}


def _with_mix(
    spec: WorkerSpec, plan: RunPlan, teams: Sequence[Team], memory: MixMemory, place: GlooPlace | None
) -> WorkerSpec:
    """A learner's specification with its part in the mixing; one alone has none, so it learns as in mode serial."""
    if plan.learners == 1 and place is None:
        return spec
    gala, own, averages = plan.config.gala, spec.address.group, plan.config.wiring.averages
    means = own == 0 and plan.policies == 1
    policies = tuple(team.memory.handover.policies.fds for team in teams) if means else ()
    mix = MixSpec(
        learner=own, learners=plan.learners, mixing="average" if averages else gala.mixing, topology=gala.topology,
        max_staleness=None if averages else gala.max_staleness,
        interval=-(-plan.config.learner.average_interval // plan.updates_in_rollout),
        similarity_interval=gala.similarity_interval,
        rows=tuple(plan.samplers + group for group in range(plan.learners)), board_fd=memory.board.block.fd,
        shared_fd=memory.shared_fd, message_fds=tuple(one.fds for one in memory.messages),
        mixed_fds=tuple(one.fds for one in memory.mixed), gradient_fds=tuple(one.fds for one in memory.gradients),
        policy_fds=policies, gloo=place,
    )
    fds = {*spec.inherited_fds, *memory.fds(), *(fd for each in policies for fd in each)}
    job = spec.job | {"mix": mix.to_json(), "seed": plan.config.run.seed}  # the same parameters to begin with
    if gala.scale_lr and mix.mixing == "gossip":
        algorithm, learners = spec.job["algorithm"], plan.learners if place is None else place.learners
        lr = float(algorithm["lr"])
        job["algorithm"] = algorithm | {"lr": min(lr * math.sqrt(learners), max(lr, _MOST_LR))}
    if mix.mixing == "all_reduce" and "target_kl" in spec.job["algorithm"]:
        job["algorithm"] = spec.job["algorithm"] | {"target_kl": None}  # else each would take steps of its own size
    return dataclasses.replace(spec, job=job, inherited_fds=tuple(sorted(fds)), limit=_LIMIT)


class LearnerSpread:
    """Measures how far apart the learners are, compares their gradients, and names the slow ones."""

    def __init__(self, plan: RunPlan, run_dir: Path, memory: MixMemory, recorder: Recorder) -> None:
        self._memory, self._recorder, self._file = memory, recorder, run_dir / SIMILARITY
        self._gala, self._learners = plan.config.gala, plan.learners
        self._beta = contraction(mixing_matrix(self._gala.topology, plan.learners))
        self._gossips = plan.config.wiring.mixes and self._gala.mixing == "gossip"
        self._lockstep = _in_lockstep(plan)
        self._start = None if plan.earlier.sessions else 0.0
        self._compared = 0
        self._past: deque[tuple[float, list[float]]] = deque()
        self._named_s = [-math.inf] * plan.learners

    def measured(self, groups: tuple[GroupSample, ...], now_s: float) -> tuple[GroupSample, ...]:
        """The groups with what is known of all of them together, as numbers of the first one's learner."""
        found = self._sizes()
        returns = [sampler["episode_return"] for group in groups for sampler in group.samplers if sampler["episodes"]]
        means = [float(np.mean([sampler["episode_return"] for sampler in group.samplers if sampler["episodes"]]))
                 for group in groups if any(sampler["episodes"] for sampler in group.samplers)]
        if len(returns) and len(means) == len(groups):
            found |= {"learners_best": max(means), "learners_spread": max(means) - min(means)}
        self._compare()
        self._name_slow([group.learner["updates"] for group in groups], now_s)
        first = dataclasses.replace(groups[0], learner=groups[0].learner | found)
        return (first, *groups[1:])

    def _sizes(self) -> dict[str, float]:
        """The radius and its bounds; a bound is unknown where the learners do not gossip.

        Both propositions begin with equal parameters. After a resume the radius that was measured first comes on top:
        mixing never makes it larger.
        """
        memory, board = self._memory, self._memory.board
        parameters = memory.aligned() if self._lockstep else memory.newest()
        if parameters is None:
            return {}
        found = {"gossip_radius": radius(np.stack(parameters))}
        self._start = found["gossip_radius"] if self._start is None else self._start
        if not self._gossips:
            return found
        numbers = np.full(self._learners, board["number"].min()) if self._lockstep else board["number"]
        latest = [norms[np.arange(number - NORMS + 1, number + 1) % NORMS]
                  for norms, number in zip(board["norms"], numbers, strict=True)]
        if self._lockstep:  # the slots of what came after that number hold other updates
            latest = [norms[NORMS // 2:] for norms in latest]
        bound = asynchronous_bound(float(board["largest"].max()), self._gala.topology, self._learners,
                                   float(board["staleness"].max()))
        return found | {"gossip_bound_1": self._start + synchronous_bound(np.stack(latest), self._beta),
                        "gossip_bound_2": self._start + bound if math.isfinite(bound) else math.nan}

    def _compare(self) -> None:
        """Appends the cosines between the learners' gradients once all have kept one of the same interval."""
        kept = [parameters.read_latest() for parameters in self._memory.gradients]
        weights = [one for one in kept if one is not None]
        if len(weights) < self._learners or min(one.version for one in weights) <= self._compared:
            return
        self._compared = min(one.version for one in weights)
        found = cosines(np.stack([one.arrays["gradient"].astype(np.float64) for one in weights]))
        line = {"wall_s": round(self._recorder.wall_s, 3), "updates": [one.meta["updates"] for one in weights],
                "cosine": np.round(found, 4).tolist()}
        try:
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._recorder.event("warning", f"gradients' similarity not written: {error}")

    def _name_slow(self, updates: list[float], now_s: float) -> None:
        """An event for a learner that takes less than half as many updates as the others, at most one a minute."""
        self._past.append((now_s, updates))
        while len(self._past) > 2 and now_s - self._past[1][0] >= _WINDOW_S:
            self._past.popleft()
        then_s, before = self._past[0]
        if now_s - then_s < _WINDOW_S or not all(before):  # one that still loads is not slow
            return
        rates = [max(after - one, 0.0) / (now_s - then_s) for one, after in zip(before, updates, strict=True)]
        for learner, rate in enumerate(rates):
            others = median([*rates[:learner], *rates[learner + 1:]])
            if others > 0.0 and rate < _SLOW * others and now_s - self._named_s[learner] >= _NAMED_S:
                self._named_s[learner] = now_s
                limit = f" before the staleness limit of {self._gala.max_staleness} rollouts" if self._gossips else ""
                self._recorder.event("warning", f"{Address('learner', learner).name} is slow: {rate:.3g} updates/s, "
                                     f"the others {others:.3g}; nobody waits for it{limit}")
