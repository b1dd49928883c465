"""The algorithms: one row each, and which of them fit which actions and mode; nothing of them is imported here.

A module that ``--import`` names may declare more of them, as its own ``ALGORITHMS``. To add one that comes with
Spreeze, write its module in ``spreeze.algorithms``, its settings in ``config.algorithm_settings``, and its row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.modes import DECLARED, Mode, extended, find
from spreeze.errors import ConfigError
from spreeze.types import EnvSpec, Reasoned

Maker = str | Callable[..., Any]
"""A class as ``MODULE:CLASS``, imported when it learns, or the class itself; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmRow:
    """All that is known of an algorithm without running it."""

    name: str
    config: type | None = None
    """Its settings, a ``schema.Part``: ``--set NAME.FIELD=VALUE``; None: the part of that name in ``schema.Config``."""
    continuous: Maker = ""
    """An ``OffPolicyAlgorithm`` for actions that are vectors of real numbers."""
    discrete: Maker = ""
    """An ``OffPolicyAlgorithm`` for one of n actions."""
    team: Maker = ""
    """An ``OffPolicyAlgorithm`` for several agents, each with one of n actions, that share one reward."""
    on_policy: Maker = ""
    """An ``OnPolicyAlgorithm``: it learns from what its own policy has just collected; fits every task of one agent."""
    images: bool = False
    """``discrete`` has a network for images."""
    any_age: bool = False
    """``on_policy`` corrects for the age of its rollouts: it runs where samplers set their own pace, and only there."""
    correction: str | None = None
    """This algorithm's default for ``rollout.correction``; None: the general default."""
    sync_interval: int | None = None
    """The same for ``rollout.sync_interval``."""
    rollout_size: int | None = None
    """The same for ``rollout.size``."""
    for_discrete: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its own that have another default where actions are discrete."""
    samples_per_insert: tuple[float, float] | None = None
    """The same for the bounds ``replay.samples_per_insert_min`` and ``_max``."""
    batch_size: int | None = None
    """The same for ``learner.batch_size``; not over images."""
    over_images: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of its own settings where it learns from images."""

    def fits(self, spec: EnvSpec) -> bool:
        """Whether it can learn this environment."""
        if spec.team is not None:
            return bool(self.team)
        if self.on_policy:
            return True
        if spec.frames is not None:
            return self.images
        return bool(self.continuous if spec.num_actions is None else self.discrete)

    def runs_in(self, mode: Mode) -> bool:
        """Whether the mode runs it."""
        wiring = mode.wiring(on_policy=bool(self.on_policy))
        return wiring is not None and wiring.free_running == self.any_age


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """A network that a module of ``--import`` declares in ``NETWORKS``; ``--set ALGO.network=NAME`` uses it."""

    name: str
    make: Callable[[int, int], Any]
    """From the numbers of inputs I and outputs K to a ``torch.nn.Module`` from [M, I] to [M, K], without buffers."""


# One update takes the rollout of one sampler by default, so rollouts are as short as PPO's minibatches.
_ANY_AGE: dict[str, Any] = {"any_age": True, "correction": "none", "sync_interval": 16}
ROWS = (
    # Small batches and networks: what learns is targets that move, tau times updates, and each takes a gradient step.
    AlgorithmRow(name="dqn", discrete="spreeze.algorithms.dqn:DQN", images=True, batch_size=64,
                 over_images={"hidden_sizes": (256, 256), "lr": 3e-4, "huber": 1.0}),
    AlgorithmRow(name="sac", continuous="spreeze.algorithms.sac:SAC", discrete="spreeze.algorithms.sac:DiscreteSAC"),
    # FastTD3 (arXiv 2505.22642) drew 16 to 512 rows for each new one; SAC was tried here at 8 to 512, the general band.
    AlgorithmRow(name="td3", continuous="spreeze.algorithms.td3:TD3", samples_per_insert=(16.0, 512.0)),
    AlgorithmRow(name="ddpg", continuous="spreeze.algorithms.td3:DDPG"),
    AlgorithmRow(name="qmix", team="spreeze.algorithms.qmix:QMIX", batch_size=128),
    # PPO's clip already bounds how far data of an earlier policy leads; a delayed displacement of a whole loop of
    # updates is made twice before its effect is seen.
    AlgorithmRow(name="ppo", on_policy="spreeze.algorithms.ppo:PPO", correction="none",
                 for_discrete={"entropy_coef": 0.01}),
    AlgorithmRow(name="a2c", on_policy="spreeze.algorithms.a2c:A2C", rollout_size=128),
    AlgorithmRow(name="impact", on_policy="spreeze.algorithms.impact:Impact", **_ANY_AGE),
    AlgorithmRow(name="appo", on_policy="spreeze.algorithms.impact:Appo", **_ANY_AGE),
    AlgorithmRow(name="impala", on_policy="spreeze.algorithms.impact:Impala", **_ANY_AGE),
)
"""The algorithms that come with Spreeze; the first that fits a task is its default."""
ON_POLICY = tuple(row.name for row in ROWS if row.on_policy)
OFF_POLICY = tuple(row.name for row in sorted(ROWS, key=lambda row: not row.continuous) if not row.on_policy)
ALGORITHMS = OFF_POLICY + ON_POLICY


def rows(import_module: str | None = None) -> dict[str, AlgorithmRow]:
    """Name -> row: the declared ones, then those of a module (see ``modes.extended``)."""
    declared = {row.name: row for row in sorted(ROWS, key=lambda row: ALGORITHMS.index(row.name))}
    found: dict[str, AlgorithmRow] = extended(declared, import_module, "ALGORITHMS", AlgorithmRow)
    if own := [row.name for row in found.values() if row.name not in ALGORITHMS and row.config is None]:
        raise ConfigError(f"--import {import_module}: algorithm {own[0]!r} has no config")
    return found


def find_row(name: str, import_module: str | None = None) -> AlgorithmRow:
    """The row of that name (see ``modes.find``)."""
    row: AlgorithmRow = find(name, import_module, rows, "run.algo")
    return row


def implied_mode(row: AlgorithmRow) -> str:
    """The mode in which an algorithm runs where none was asked for: the first that collects and learns at once."""
    wirings = {mode.name: mode.wiring(on_policy=bool(row.on_policy)) for mode in DECLARED if row.runs_in(mode)}
    at_once = [name for name, wiring in wirings.items() if wiring is not None and not wiring.in_turns]
    return (*at_once, *wirings, DECLARED[0].name)[0]


def _networks(import_module: str | None) -> dict[str, NetworkRow]:
    return extended({}, import_module, "NETWORKS", NetworkRow)


def find_network(name: str, import_module: str | None) -> NetworkRow | None:
    """The network of that name (see ``modes.find``); None for an empty one."""
    if not name:
        return None
    row: NetworkRow = find(name, import_module, _networks, "network")
    return row


def fitting_algorithms(spec: EnvSpec, mode: Mode | None = None) -> tuple[str, ...]:
    """The algorithms that can learn this environment and that the mode runs (None: any), the default first."""
    return tuple(row.name for row in ROWS if row.fits(spec) and (mode is None or row.runs_in(mode)))


def default_algorithm(spec: EnvSpec, mode: Mode) -> Reasoned:
    """The algorithm that is taken when none is named."""
    name, *others = fitting_algorithms(spec, mode) or (None,)
    if name is None:
        check_algorithm(fitting_algorithms(spec)[0], spec, mode)
    too = f" ({_listed(others, 'fit')} too)" if others else ""
    return Reasoned(name, f"algorithm {name}: the default for {task_text(spec)}{too}")


def check_algorithm(name: str, spec: EnvSpec, mode: Mode) -> None:
    """Rejects an algorithm that does not fit the environment or the mode, with a ConfigError that says what would."""
    row, fitting = find_row(name, spec.import_module), fitting_algorithms(spec, mode)
    if not row.fits(spec):
        why = "it is for several agents with discrete actions; " if row.team and spec.team is None else ""
        best = find_row(fitting_algorithms(spec)[0])
        use = _listed(fitting, "fit") if fitting else f"use --algo {best.name} with {_modes_of(best)}"
        raise ConfigError(f"--algo {name}: {why}{spec.env_id} has {task_text(spec)}; {use}")
    if not row.runs_in(mode):
        needs = "rollouts of any age" if row.any_age else "what its own policy has just collected"
        needs = needs if row.on_policy else "replay"
        others = [f"or --algo {' or '.join(own)}"] if (own := fitting_algorithms(spec, mode)) else []
        raise ConfigError(f"--algo {name}: it learns from {needs}, which mode {mode.name} does not have; use "
                          f"{', '.join([_modes_of(row), *others])}")


def _modes_of(row: AlgorithmRow) -> str:
    *first, last = [f"--mode {mode.name}" for mode in DECLARED if row.runs_in(mode)]
    return f"{', '.join(first)} or {last}" if first else last


def task_text(spec: EnvSpec) -> str:
    """What decides about the algorithm: the actions, and whether observations are images."""
    return actions_text(spec) if spec.frames is None else f"images and {actions_text(spec)}"


def actions_text(spec: EnvSpec) -> str:
    """How many actions, and of which kind."""
    if spec.team is not None:
        fewest, most = min(spec.team.actions), max(spec.team.actions)
        return f"{spec.team.size} agents with {most if fewest == most else f'{fewest} to {most}'} discrete actions each"
    if spec.num_actions is not None:
        return f"{spec.num_actions} discrete actions"
    return "one continuous action" if spec.action_dim == 1 else f"{spec.action_dim} continuous actions"


def _listed(names: tuple[str, ...] | list[str], verb: str) -> str:
    text = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{text} {verb}{'s' if len(names) == 1 else ''}"
