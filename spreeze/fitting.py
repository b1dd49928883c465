"""Which algorithm fits which action space: one table, the check and the default that follow from it."""

from __future__ import annotations

from spreeze.errors import ConfigError
from spreeze.types import EnvSpec, Reasoned

CONTINUOUS = ("sac", "td3", "ddpg")
"""Algorithms for actions that are vectors of real numbers, the default first."""
DISCRETE = ("dqn", "sac")
"""Algorithms for one of n actions, the default first."""
IMAGES = ("dqn",)
"""Algorithms with a network for images; their actions are one of n."""
ALGORITHMS = tuple(dict.fromkeys(CONTINUOUS + DISCRETE))
"""Every algorithm's name."""


def fitting_algorithms(spec: EnvSpec) -> tuple[str, ...]:
    """The algorithms that can learn this environment, the default first."""
    if spec.frames is not None:
        return IMAGES
    return CONTINUOUS if spec.num_actions is None else DISCRETE


def default_algorithm(spec: EnvSpec) -> Reasoned:
    """The algorithm that is taken when none is named."""
    name, *others = fitting_algorithms(spec)
    too = f" ({_listed(others, 'fit')} too)" if others else ""
    return Reasoned(name, f"algorithm {name}: the default for {task_text(spec)}{too}")


def check_algorithm(name: str, spec: EnvSpec) -> None:
    """Refuses an algorithm that cannot learn this environment's actions.

    Raises:
        ConfigError: it does not fit; the message says what would.
    """
    fitting = fitting_algorithms(spec)
    if name not in fitting:
        raise ConfigError(f"--algo {name}: {spec.env_id} has {task_text(spec)}; {_listed(fitting, 'fit')}")


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
