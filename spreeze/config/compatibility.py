"""Which algorithm fits which action space and mode: the tables, the checks and the default that follow from them."""

from __future__ import annotations

from spreeze.config.modes import DECLARED, Mode
from spreeze.errors import ConfigError
from spreeze.types import EnvSpec, Reasoned

CONTINUOUS = ("sac", "td3", "ddpg")
"""Off-policy algorithms for actions that are vectors of real numbers, the default first."""
DISCRETE = ("dqn", "sac")
"""Off-policy algorithms for one of n actions, the default first."""
IMAGES = ("dqn",)
"""Off-policy algorithms with a network for images; their actions are one of n."""
ON_POLICY = ("ppo", "a2c")
"""Algorithms that learn from what their own policy has just collected; they fit every task."""
OFF_POLICY = tuple(dict.fromkeys(CONTINUOUS + DISCRETE))
"""Algorithms that learn from replay."""
ALGORITHMS = OFF_POLICY + ON_POLICY
"""Every algorithm's name."""


def runs(mode: Mode, algo: str) -> bool:
    """Whether the mode runs that algorithm."""
    return mode.wiring(on_policy=algo in ON_POLICY) is not None


def fitting_algorithms(spec: EnvSpec, mode: Mode | None = None) -> tuple[str, ...]:
    """The algorithms that can learn this environment and that the mode runs (None: any), the default first."""
    if spec.frames is not None:
        off_policy: tuple[str, ...] = IMAGES
    else:
        off_policy = CONTINUOUS if spec.num_actions is None else DISCRETE
    return tuple(name for name in off_policy + ON_POLICY if mode is None or runs(mode, name))


def default_algorithm(spec: EnvSpec, mode: Mode) -> Reasoned:
    """The algorithm that is taken when none is named."""
    name, *others = fitting_algorithms(spec, mode)
    too = f" ({_listed(others, 'fit')} too)" if others else ""
    return Reasoned(name, f"algorithm {name}: the default for {task_text(spec)}{too}")


def check_algorithm(name: str, spec: EnvSpec, mode: Mode) -> None:
    """Refuses an algorithm that cannot learn this environment's actions, or that the mode does not run.

    Raises:
        ConfigError: it does not fit; the message says what would.
    """
    fitting = fitting_algorithms(spec, mode)
    if name not in fitting_algorithms(spec):
        raise ConfigError(f"--algo {name}: {spec.env_id} has {task_text(spec)}; {_listed(fitting, 'fit')}")
    if name not in fitting:
        needs = "what its own policy has just collected" if name in ON_POLICY else "replay"
        modes = [f"--mode {other.name}" for other in DECLARED if runs(other, name)]
        raise ConfigError(
            f"--algo {name}: it learns from {needs}, which mode {mode.name} does not have; use {' or '.join(modes)}, "
            f"or --algo {' or '.join(fitting)}"
        )


def task_text(spec: EnvSpec) -> str:
    """What decides about the algorithm: the actions, and whether observations are images."""
    return actions_text(spec) if spec.frames is None else f"images and {actions_text(spec)}"


def actions_text(spec: EnvSpec) -> str:
    """How many actions, and of which kind."""
    if spec.num_actions is not None:
        return f"{spec.num_actions} discrete actions"
    return "one continuous action" if spec.action_dim == 1 else f"{spec.action_dim} continuous actions"


def _listed(names: tuple[str, ...] | list[str], verb: str) -> str:
    text = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{text} {verb}{'s' if len(names) == 1 else ''}"
