"""The algorithms by name, and which of them fit which actions and mode.

A built-in algorithm is a file ``algorithms/NAME.py`` with its settings, its class and its row in ``ALGORITHMS``, and an
entry here, in ``OFF_POLICY`` or ``ON_POLICY``, which maps its name to that file. An algorithm of a module that
``--import`` names needs no entry. The file is imported when the algorithm is requested by name, and without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from spreeze.config.modes import DECLARED, Mode, find_mode
from spreeze.errors import ConfigError
from spreeze.inference.user_modules import extended, find
from spreeze.types import EnvSpec, Reasoned

Maker = str | Callable[..., Any]
"""A class, or its name as ``MODULE:CLASS``, imported on first use; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmRow:
    """Declaration of an algorithm."""

    name: str
    config: type
    """Its settings: ``--set NAME.FIELD=VALUE``."""
    continuous: Maker = ""
    """An ``OffPolicyAlgorithm`` for actions that are vectors of real numbers."""
    discrete: Maker = ""
    """An ``OffPolicyAlgorithm`` for one of n actions."""
    hybrid: Maker = ""
    """An ``OffPolicyAlgorithm`` for real numbers and one of n choices."""
    team: Maker = ""
    """An ``OffPolicyAlgorithm`` for several agents, each with one of n actions, that share one reward."""
    on_policy: Maker = ""
    """An ``OnPolicyAlgorithm``: it learns from what its own policy has just collected; for a single agent."""
    preferred: bool = False
    """True: the default for environments that it fits, before all others in ``ALGORITHMS``."""
    images: bool = False
    """Its networks take images (option ``frames``)."""
    off_policy_corrected: bool = False
    """``on_policy`` corrects for the age of its rollouts: it runs only in modes whose samplers set their own pace."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """``section.field`` -> its default with this algorithm."""
    for_discrete: Mapping[str, Any] = field(default_factory=dict)
    """Its other defaults where actions are discrete."""
    over_vectors: Mapping[str, Any] = field(default_factory=dict)
    """Its other defaults where it learns from vectors."""
    over_images: Mapping[str, Any] = field(default_factory=dict)
    """Its other defaults where it learns from images."""
    over_sequences: Mapping[str, Any] = field(default_factory=dict)
    """Its other defaults where its policy has a memory, so that replay holds sequences."""

    def fits(self, spec: EnvSpec) -> bool:
        """True if it can learn this environment."""
        return not self.why_not(spec)

    def why_not(self, spec: EnvSpec) -> str:
        """The tasks that it supports, if it cannot learn this one; empty if it can."""
        if spec.team is not None:
            return "" if self.team else "single agents only"
        if self.team and not (self.on_policy or self.continuous or self.discrete):
            return "several agents with discrete actions only"
        if self.on_policy:
            return ""
        if spec.frames is not None and not self.images:
            return "no images"
        if spec.choices is None:
            return "" if self.continuous else "no continuous actions"
        if spec.choices.dim > 1:
            return "one choice at a time only"
        if spec.box is None:
            return "" if self.discrete else "no discrete actions"
        return "" if self.hybrid else "no mixed continuous and discrete actions"

    def runs_in(self, mode: Mode) -> bool:
        """True if the mode runs it."""
        data_flow = mode.data_flow(on_policy=bool(self.on_policy))
        return data_flow is not None and data_flow.asynchronous == self.off_policy_corrected


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """A network that a module of ``--import`` declares in ``NETWORKS``; ``--set ALGO.network=NAME`` uses it."""

    name: str
    make: Callable[[int, int], Any]
    """Maps numbers of inputs I and outputs K to a ``torch.nn.Module`` from [M, I] to [M, K], without buffers."""


OFF_POLICY = {"sac": "sac", "crossq": "crossq", "td3": "td3", "ddpg": "td3", "dqn": "dqn", "qmix": "qmix"}
ON_POLICY = {"ppo": "ppo", "a2c": "a2c", "impact": "impact", "appo": "impact", "impala": "impact"}
ALGORITHMS = OFF_POLICY | ON_POLICY
"""The algorithms that come with Spreeze -> their modules in ``spreeze.algorithms``, which hold their rows."""


def rows(import_module: str | None = None) -> dict[str, AlgorithmRow]:
    """Name -> row: the declared ones, then those of a module (see ``user_modules.extended``)."""
    return extended({name: _declared(name) for name in ALGORITHMS}, import_module, "ALGORITHMS", AlgorithmRow)


@cache
def _declared(name: str) -> AlgorithmRow:
    module = importlib.import_module(f"spreeze.algorithms.{ALGORITHMS[name]}")
    declared: AlgorithmRow = next(row for row in module.ALGORITHMS if row.name == name)
    return declared


def find_row(name: str, import_module: str | None = None) -> AlgorithmRow:
    """The row of that name (see ``user_modules.find``); imports only that one of Spreeze's own modules."""
    if name in ALGORITHMS:
        return _declared(name)
    return find(name, import_module, rows, "run.algo")


def implied_mode(row: AlgorithmRow) -> str:
    """The mode of an algorithm if none was requested: the first that collects and learns in parallel."""
    fitting = [mode for mode in DECLARED if row.runs_in(mode)]
    for mode in fitting:
        data_flow = mode.data_flow(on_policy=bool(row.on_policy))
        if data_flow is not None and not data_flow.serial:
            return mode.name
    return fitting[0].name if fitting else DECLARED[0].name


def find_network(name: str, import_module: str | None) -> NetworkRow | None:
    """The network of that name (see ``user_modules.find``); None for an empty one."""

    def table(module: str | None) -> dict[str, NetworkRow]:
        return extended({}, module, "NETWORKS", NetworkRow)

    return find(name, import_module, table, "network") if name else None


def fitting_algorithms(spec: EnvSpec, mode: Mode | None = None) -> tuple[str, ...]:
    """The algorithms that can learn this environment and run in this mode (None: in any), the default first."""
    fitting = [name for name, row in rows().items() if row.fits(spec) and (mode is None or row.runs_in(mode))]
    return tuple(sorted(fitting, key=lambda name: not find_row(name).preferred))


def default_algorithm(spec: EnvSpec, mode: Mode | None) -> Reasoned:
    """The default algorithm, which also implies the mode unless that is given."""
    mode = mode or find_mode(implied_mode(find_row(fitting_algorithms(spec)[0], spec.import_module)))
    name, *others = fitting_algorithms(spec, mode) or (None,)
    if name is None:
        check_algorithm(fitting_algorithms(spec)[0], spec, mode)
    too = f" ({_listed(others)} too)" if others else ""
    return Reasoned(name, f"algorithm {name}: the default for {task_text(spec)}{too}")


def check_algorithm(name: str, spec: EnvSpec, mode: Mode) -> None:
    """Rejects an algorithm that does not fit the environment or the mode; the ConfigError names ones that do."""
    row, fitting = find_row(name, spec.import_module), fitting_algorithms(spec, mode)
    if not row.fits(spec):
        use = _listed(fitting)
        if not fitting:
            best = find_row(fitting_algorithms(spec)[0])
            use = f"{_listed(fitting_algorithms(spec))}: use --algo {best.name} with {_modes_of(best)}"
        raise ConfigError(f"--algo {name}: it supports {row.why_not(spec)}; {spec.env_id} has {task_text(spec)}; {use}")
    if not row.runs_in(mode):
        needs = "rollouts of any age" if row.off_policy_corrected else "what its own policy has just collected"
        needs = needs if row.on_policy else "replay"
        others = [f"or --algo {' or '.join(own)}"] if (own := fitting_algorithms(spec, mode)) else []
        raise ConfigError(
            f"--algo {name}: it learns from {needs}, which mode {mode.name} does not provide; use "
            f"{', '.join([_modes_of(row), *others])}"
        )


def _modes_of(row: AlgorithmRow) -> str:
    """Modes for any environment that run an algorithm, as flags."""
    flows = ((mode, mode.data_flow(on_policy=bool(row.on_policy))) for mode in DECLARED if row.runs_in(mode))
    *first, last = [f"--mode {mode.name}" for mode, flow in flows if flow is not None and not flow.on_device]
    return f"{', '.join(first)} or {last}" if first else last


def task_text(spec: EnvSpec) -> str:
    """Properties of a task that determine the algorithm: its actions, and whether observations are images."""
    return actions_text(spec) if spec.frames is None else f"images and {actions_text(spec)}"


def actions_text(spec: EnvSpec) -> str:
    """Number and kind of actions, in words."""
    if spec.team is not None:
        low, high = min(spec.team.actions), max(spec.team.actions)
        return f"{spec.team.size} agents with {high if low == high else f'{low} to {high}'} discrete actions each"
    texts = []
    if spec.choices is not None:
        counts = [str(count) for count in dict.fromkeys(spec.choices.nvec)]
        among = f"{', '.join(counts)} discrete actions"
        texts.append(among if spec.choices.dim == 1 else f"{spec.choices.dim} choices at once among {among}")
    if spec.box is not None:
        texts.append("one continuous action" if spec.box.dim == 1 else f"{spec.box.dim} continuous actions")
    return " beside ".join(texts)


def _listed(names: Sequence[str]) -> str:
    """``a, b and c fit``."""
    text = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return f"{text} fit{'s' if len(names) == 1 else ''}"
