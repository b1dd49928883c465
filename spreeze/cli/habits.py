"""Command lines as users of other libraries type them: taken where they can mean one thing, else told what to type.

``train CartPole``, ``--algo SAC``, ``--total-timesteps 100000`` and ``--algo ppo --lr 1e-3`` are taken.
"""

from __future__ import annotations

from collections.abc import Callable

from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.schema import SECTIONS
from spreeze.errors import UsageError

_SAME = {
    "--total-timesteps": "--env-steps",
    "--n-timesteps": "--env-steps",
    "--timesteps": "--env-steps",
    "--algorithm": "--algo",
    "--env-id": "--env",
    "--buffer-size": "--replay-capacity",
}
"""Flags of other libraries, and ours of the same meaning."""
_SETTINGS = {
    "--gamma": "gamma",
    "--tau": "tau",
    "--lr": "lr",
    "--learning-rate": "lr",
    "--ent-coef": "entropy_coef",
    "--clip-range": "clip",
    "--gae-lambda": "gae_lambda",
    "--n-epochs": "epochs",
}
"""Flags that mean a setting of the algorithm."""
_AMBIGUOUS = {
    "--n-envs": "--samplers (processes) and --envs-per-sampler",
    "--num-envs": "--samplers (processes) and --envs-per-sampler",
    "--steps": "--env-steps, or --updates for gradient steps",
    "--n-steps": "--sync-interval (env steps of each environment in a rollout), or --set ALGO.n_step for returns",
    "--learning-starts": "--set replay.learning_starts=N",
    "--tensorboard-log": "--log tensorboard",
    "--eval-freq": "--set evaluation.cpu_share=S; evaluations follow each other as that share of a core allows",
}
"""Flags that may mean several things, and what to type."""


def translated(arguments: list[str], note: Callable[[str], None]) -> list[str]:
    """The arguments in this library's words; ``note`` is told of what was not typed as it is meant.

    Raises:
        UsageError: a flag of another library that can mean several things.
    """
    found: list[str] = []
    if arguments and not arguments[0].startswith("-"):
        found.append("--env")
    for argument in arguments:
        name, sep, value = argument.partition("=")
        if name in _AMBIGUOUS:
            raise UsageError(f"{name}: type {_AMBIGUOUS[name]}")
        found += [_SAME[name], *([value] if sep else [])] if name in _SAME else [argument]
    found = _split(found, ("--algo", "--env", *_SETTINGS))
    algo = None
    for place, name in enumerate(found[:-1]):
        value = found[place + 1]
        if name == "--algo":
            if value not in ALGORITHMS and value.lower() in ALGORITHMS:
                found[place + 1] = value.lower()
            algo = found[place + 1]
        elif name == "--env":
            from spreeze.envs.make import newest_version  # verbs without a task need not load it

            if (newest := newest_version(value)) is not None:
                found[place + 1] = newest
                note(f"--env {value}: {newest}, its newest version")
    for place, name in enumerate(found[:-1]):
        if name in _SETTINGS:
            found[place : place + 2] = ["--set", f"{_setting(name, algo, found[place + 1])}={found[place + 1]}"]
    return found


def _split(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """``--name=value`` as two arguments."""
    found: list[str] = []
    for argument in arguments:
        name, sep, value = argument.partition("=")
        found += [name, value] if sep and name in names else [argument]
    return found


def _setting(flag: str, algo: str | None, value: str) -> str:
    name = _SETTINGS[flag]
    if algo is None or algo not in ALGORITHMS:
        raise UsageError(f"{flag}: type --set ALGO.{name}={value}, such as --set ppo.{name}={value}, or add --algo")
    fields = SECTIONS[algo].__dataclass_fields__
    if name in fields:
        return f"{algo}.{name}"
    parts = [other for other in fields if other.endswith(f"_{name}")]
    if not parts:
        raise UsageError(f"{flag}: {algo} has no setting {name}")
    raise UsageError(f"{flag}: type {' '.join(f'--set {algo}.{part}={value}' for part in parts)}")
