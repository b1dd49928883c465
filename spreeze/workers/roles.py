"""The roles of workers, one row each: priority, and what failures mean for the run; and the phases of their work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from spreeze.machine.processes import LOW_PRIORITY


class Phase(IntEnum):
    """A worker's activity, on which the supervisor's deadline depends."""

    START = 0
    INIT = 1
    RESET = 2
    STEP = 3
    WAIT = 4
    UPDATE = 5
    PUBLISH = 6
    CHECKPOINT = 7
    EVALUATE = 8
    RENDER = 9
    DONE = 10


DEADLINE_S: dict[Phase, float] = {
    **dict.fromkeys(Phase, 60.0),
    **dict.fromkeys((Phase.START, Phase.INIT, Phase.CHECKPOINT), 120.0),
    **dict.fromkeys((Phase.STEP, Phase.WAIT, Phase.DONE), 30.0),
}
"""Seconds without a heartbeat after which a worker in that phase counts as hung."""


def deadlines(step_s: float, start_s: float) -> dict[Phase, float]:
    """``DEADLINE_S`` of a process with environments, with these limits for a step and a start."""
    # In these phases an environment may have to be constructed.
    constructing = {phase: max(DEADLINE_S[phase], start_s) for phase in (Phase.RESET, Phase.EVALUATE, Phase.RENDER)}
    return DEADLINE_S | constructing | {Phase.STEP: step_s, Phase.INIT: start_s}


def deadline_text(phase: Phase, deadline_s: float) -> str:
    """The setting of a phase's deadline, in brackets for a message; empty if no setting made it."""
    if phase not in (Phase.STEP, Phase.INIT, Phase.RESET) or (phase, deadline_s) == (Phase.RESET, DEADLINE_S[phase]):
        return ""
    return f" (sampling.{'step' if phase is Phase.STEP else 'start'}_deadline_s = {deadline_s:g})"


@dataclass(frozen=True, kw_only=True)
class RestartLimit:
    failures: int  # after this many failures within the window the worker rests for ``quarantine_s``, or is given up
    window_s: float
    quarantine_s: float | None  # None: no further restart
    first_delay_s: float = 0.0
    backoff_s: float = 0.5
    max_delay_s: float = 30.0


class FailurePolicy(Enum):
    """The losses of a role's workers that end the run."""

    ANY = "any of them"
    MAJORITY = "more than half of them"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class Role:
    """A kind of worker: priorities, capabilities and what failures mean; deadlines belong to phases."""

    name: str
    limit: RestartLimit
    on_loss: FailurePolicy
    label: str = ""  # name of its workers, whose slots they have; empty: as the role
    several: bool = False  # True if a group can have several; their names end in a number
    nice: int = 0
    """Above 0 only where no other worker waits for it: a worker that others wait for, at a lower priority than theirs,
    would stop them as soon as any program wants its core. At nice 5 a process gets a quarter of a core that it shares
    with one other, at 15 a thirtieth."""
    oom_score: int = 0  # when memory runs out, Linux kills the process with the highest score first
    has_envs: bool = False
    steps: bool = False
    may_end: bool = False
    infers: bool = False
    learns: bool = False
    """True if it takes gradient steps and writes checkpoints: a stop waits for its last one.

    The run ends when all such workers have finished. Their imports are slow, so a process may start them before the job
    is known.
    """
    pausable: bool = False  # the governor may pause it while other programs need its core

    @property
    def slots(self) -> str:
        """The writer, in the table of metrics, whose numbers its workers post."""
        return self.label or self.name

    def niceness(self, *, gives_way: bool) -> int:
        """Nice value of its processes; ``LOW_PRIORITY`` is added for all roles if the run ``gives_way``."""
        return self.nice + (LOW_PRIORITY if gives_way else 0)


@dataclass(frozen=True)
class Address:
    """Identity of a worker. A group is a learner with its own samplers, buffer, weights and checkpoints."""

    role: str
    group: int = 0
    index: int = 0  # among the workers of its role in its group

    @property
    def name(self) -> str:
        """Name in logs and metrics: ``learner``, ``sampler-3``; in group 1 ``learner-g1``, ``sampler-g1-3``."""
        group = f"-g{self.group}" if self.group else ""
        label = ROLES[self.role].label or self.role
        return f"{label}{group}-{self.index}" if ROLES[self.role].several else f"{label}{group}"


def role_of(name: str) -> Role | None:
    """The role of a worker by its name, or None if no role has such names."""
    return ROLES.get(name.partition("-")[0])


_OBSERVER = RestartLimit(failures=3, window_s=600.0, quarantine_s=300.0, first_delay_s=1.0)
_ALL = (
    # The run cannot continue without it: the last to be killed when memory runs out.
    Role(
        name="learner",
        learns=True,
        on_loss=FailurePolicy.ANY,
        limit=RestartLimit(failures=3, window_s=600.0, quarantine_s=None),
    ),
    # Cheap to replace, and no worker waits for a single one.
    Role(
        name="sampler",
        several=True,
        has_envs=True,
        steps=True,
        pausable=True,
        oom_score=500,
        on_loss=FailurePolicy.MAJORITY,
        limit=RestartLimit(failures=5, window_s=60.0, quarantine_s=300.0),
    ),
    # The learner waits for each of them.
    Role(
        name="rollout-sampler",
        label="sampler",
        several=True,
        has_envs=True,
        steps=True,
        oom_score=500,
        on_loss=FailurePolicy.ANY,
        limit=RestartLimit(failures=5, window_s=60.0, quarantine_s=None),
    ),
    Role(
        name="inference",
        several=True,
        infers=True,
        oom_score=300,
        on_loss=FailurePolicy.ANY,
        limit=RestartLimit(failures=5, window_s=60.0, quarantine_s=None),
    ),
    # Without it the run continues with its own samplers. Its crash is Ray's, and a new one joins the cluster again.
    Role(
        name="bridge",
        oom_score=300,
        on_loss=FailurePolicy.NEVER,
        limit=RestartLimit(failures=5, window_s=300.0, quarantine_s=60.0, first_delay_s=1.0, backoff_s=2.0),
    ),
    # Keeps to its share of a core by pausing; at nice 15 a score of Pendulum came seconds after its policy.
    Role(
        name="evaluator",
        nice=5,
        oom_score=300,
        has_envs=True,
        may_end=True,
        on_loss=FailurePolicy.NEVER,
        limit=_OBSERVER,
    ),
    Role(
        name="visualizer",
        nice=15,
        oom_score=300,
        has_envs=True,
        may_end=True,
        on_loss=FailurePolicy.NEVER,
        limit=_OBSERVER,
    ),
)
ROLES: dict[str, Role] = {role.name: role for role in _ALL}
"""Roles by name. Supervision is one-for-one as in Erlang: a failed worker is restarted alone."""
