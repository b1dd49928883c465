"""The forms of an environment's id: Gymnasium's own, ``ENGINE:ID``, ``TEAM:NAME``, ``MODULE:ID``, ``MODULE:CLASS``.

The module may be a script, named by its file: ``my_envs.py:MyEnv``.

A family is one row here, and a function that makes its environments. Its package is imported when one is made.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from spreeze.errors import EnvError, described, did_you_mean, first_true
from spreeze.inference.user_modules import is_within
from spreeze.types import EnvSpec

_RIVALS = re.compile(r"^simple_(adversary|crypto|push|tag|world_comm)_v\d+$")
"""Tasks of mpe2 in which agents play against each other."""


@contextlib.contextmanager
def constructing(env_id: str) -> Iterator[None]:
    """Turns any error in this context into an EnvError about the constructor; hides advice to authors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ``make.describe`` checks what matters to a user
            yield
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(f"{env_id} could not be constructed: {described(error)}") from error


class Family(NamedTuple):
    """Environments whose ids begin with one prefix and a colon."""

    prefix: str
    make: Callable[..., Any]
    """Factory: (name, num_envs, seed, args) -> vector environment for ``vector_task.make_vector``; for teams (name,
    import_module, render_mode, args) -> parallel environment for ``team_env.make_team``."""
    team: bool = False
    """True: its tasks have several agents; False: each environment is a vector of N that its own engine steps."""
    own_args: tuple[str, ...] | None = None
    """Arguments that only its engine takes, for names that are Gymnasium's: a single environment, for evaluation,
    pictures and probes, is then Gymnasium's own. None: it is a vector of one."""
    package: str = ""  # package that a program without Spreeze has to install for its tasks


def envpool(name: str, num_envs: int, seed: int, args: dict[str, Any]) -> Any:
    """``num_envs`` environments of EnvPool."""
    if importlib.util.find_spec("envpool") is None:
        raise EnvError(f"envpool:{name} needs envpool: pip install 'spreeze[envpool]', or use --env {name}")
    package: Any = importlib.import_module("envpool")
    if name not in package.list_all_envs():
        raise EnvError(f"envpool has no '{name}'{did_you_mean(name, package.list_all_envs())}")
    # One thread: a sampler is one core, and samplers are what the tuner counts.
    return package.make(name, env_type="gymnasium", num_envs=num_envs, seed=seed, **{"num_threads": 1, **args})


def gymnasium_vector(name: str, num_envs: int, seed: int, args: dict[str, Any]) -> Any:
    """The vector environment that is registered with a Gymnasium id."""
    import gymnasium

    known = gymnasium.registry.get(name)
    if known is None or known.vector_entry_point is None:
        reason = "is not registered" if known is None else "has no vector environment of its own"
        raise EnvError(f"vector:{name}: '{name}' {reason}; use --env {name}: each sampler steps several")
    return gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="vector_entry_point", **args)


def mujoco_warp(name: str, num_envs: int, seed: int, args: dict[str, Any]) -> Any:
    """Gymnasium's MuJoCo task of that name, stepped by MuJoCo Warp on a GPU, or on a CPU for tests."""
    if importlib.util.find_spec("mujoco_warp") is None:
        raise EnvError(f"warp:{name} needs mujoco-warp: pip install 'spreeze[warp]', or use --env {name}")
    from spreeze.envs.warp_envs import WarpEnv

    return WarpEnv(name, num_envs, seed, **args)


def own_module(name: str, import_module: str | None, render_mode: str | None, args: dict[str, Any]) -> Any:
    """The environment that ``parallel_env()`` of the ``--import`` module makes."""
    if name != import_module:
        raise EnvError(f"'parallel:{name}' would import module '{name}': add --import {name} to allow it")
    return _parallel_env(importlib.import_module(name), render_mode, args)


def _parallel_env(module: Any, render_mode: str | None, args: dict[str, Any]) -> Any:
    if not hasattr(module, "parallel_env"):
        raise EnvError(f"module '{module.__name__}' has no parallel_env(), which constructs the environment")
    return module.parallel_env(**args, **({} if render_mode is None else {"render_mode": render_mode}))


def foraging(name: str, import_module: str | None, render_mode: str | None, args: dict[str, Any]) -> _Foraging:
    """Level-Based Foraging of lbforaging."""
    if importlib.util.find_spec("lbforaging") is None:
        raise EnvError(f"lbf:{name} needs lbforaging: pip install 'spreeze[multiagent]'")
    import gymnasium

    importlib.import_module("lbforaging")  # registers its ids
    known = [known_id for known_id in gymnasium.registry if known_id.startswith("Foraging")]
    if name not in known:
        raise EnvError(
            f"lbforaging has no '{name}'{did_you_mean(name, known)}; for example "
            "Foraging-8x8-2p-3f-v3: size, players, foods"
        )
    return _Foraging(name, **args)


def mpe2(name: str, import_module: str | None, render_mode: str | None, args: dict[str, Any]) -> Any:
    """A task of mpe2 in which agents work together."""
    if importlib.util.find_spec("mpe2") is None:
        raise EnvError(f"mpe2:{name} needs mpe2: pip install 'spreeze[multiagent]'")
    package = importlib.import_module("mpe2")
    known = [module.name for module in pkgutil.iter_modules(package.__path__) if re.search(r"_v\d+$", module.name)]
    if name not in known:
        hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
        raise EnvError(f"mpe2 has no '{name}'{hint}")
    if _RIVALS.match(name):
        teams = ", ".join(other for other in known if not _RIVALS.match(other))
        raise EnvError(f"mpe2:{name}: its agents compete, but a team must share one reward; use one of {teams}")
    return _parallel_env(importlib.import_module(f"mpe2.{name}"), render_mode, args)


class _Foraging:
    """Level-Based Foraging, whose API has tuples over agents, as a parallel environment without pictures."""

    def __init__(self, env_id: str, **args: Any) -> None:
        import gymnasium

        spec = copy.deepcopy(gymnasium.spec(env_id))
        # Its own step ends an episode; ``gymnasium.make`` would pass the limit only to a wrapper, which has no effect.
        if "max_episode_steps" in args:
            spec.kwargs["max_episode_steps"] = args.pop("max_episode_steps")
        self._env: Any = gymnasium.make(spec, disable_env_checker=True, **args)
        self.possible_agents = [f"player {index + 1}" for index in range(len(self._env.action_space))]  # type: ignore[arg-type]
        self.metadata: dict[str, Any] = {"render_modes": []}
        self.agents: list[str] = []
        self.unwrapped = self
        self.max_cycles = int((self._env.spec.kwargs if self._env.spec else {})["max_episode_steps"])
        self._steps = 0

    def observation_space(self, agent: str) -> Any:
        return self._env.observation_space[self.possible_agents.index(agent)]

    def action_space(self, agent: str) -> Any:
        return self._env.action_space[self.possible_agents.index(agent)]

    def _by_agent(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        obs, _ = self._env.reset(seed=seed, options=options)
        self.agents, self._steps = list(self.possible_agents), 0
        return self._by_agent(obs), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        obs, rewards, done, _, _ = self._env.step(tuple(actions[agent] for agent in self.possible_agents))
        given, self._steps = self.agents, self._steps + 1
        self.agents = [] if done else given
        limit = bool(done) and self._steps >= self.max_cycles  # the package does not distinguish both ends
        return (
            self._by_agent(obs),
            self._by_agent(rewards),
            dict.fromkeys(given, bool(done) and not limit),
            dict.fromkeys(given, limit),
            {agent: {} for agent in given},
        )

    def close(self) -> None:
        self._env.close()


FAMILIES = {
    family.prefix: family
    for family in (
        Family("envpool", envpool),
        Family("vector", gymnasium_vector),
        Family("warp", mujoco_warp, own_args=("device", "nconmax", "njmax")),
        Family("mpe2", mpe2, team=True, package="mpe2"),
        Family("lbf", foraging, team=True, package="lbforaging"),
        Family("parallel", own_module, team=True),
    )
}
_PLAIN = re.compile(rf"^(({'|'.join(FAMILIES)}):)?[A-Za-z0-9][A-Za-z0-9_./-]{{0,99}}$")


def family_of(env_id: str) -> Family | None:
    """The family of an id with a known prefix; None for a plain id."""
    prefix, colon, _ = env_id.partition(":")
    return FAMILIES.get(prefix) if colon else None


def engine_of(env_id: str) -> str | None:
    """``envpool``, ``vector`` or ``warp`` for an id with that prefix; None for others."""
    family = family_of(env_id)
    return None if family is None or family.team else family.prefix


def refusal_on_device(env_id: str, spec: EnvSpec | None) -> str | None:
    """Reason why the learner's device cannot step the environment; None if ``spec`` shows none."""
    reasons = {"environments on a device come from an engine (vector:ID or warp:ID)": engine_of(env_id) is None}
    if spec is not None:
        reasons |= {
            "actions must be a Box": spec.box is None or spec.choices is not None,
            "images and masks are not supported there": spec.frames is not None or spec.action_mask,
        }
    return first_true(reasons)


def as_single(env_id: str, args: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The id and arguments for a single environment: Gymnasium's, if the engine steps Gymnasium's tasks."""
    family = family_of(env_id)
    if family is None or family.own_args is None:
        return env_id, args
    kept = tuple(text for text in args if text.partition("=")[0] not in family.own_args)
    return env_id.partition(":")[2], kept


def is_team(env_id: str) -> bool:
    family = family_of(env_id)
    return family is not None and family.team


def imports_only(env_id: object, module: object) -> bool:
    """True if the environment of an id is made without importing a module other than ``module``.

    Always true for ``parallel:MODULE``: ``envs.team_env`` refuses it unless ``--import`` names that module, too.
    """
    if not isinstance(env_id, str) or ".." in env_id:
        return False
    prefix, colon, name = env_id.rpartition(":")
    return _PLAIN.match(name if colon and isinstance(module, str) and is_within(prefix, module) else env_id) is not None
