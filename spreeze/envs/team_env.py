"""Tasks of several agents: a parallel environment of PettingZoo, stepped by one agent that acts for the whole team.

``mpe2:NAME`` is an environment of the package mpe2, ``lbf:ID`` one of lbforaging (extra ``multiagent``);
``parallel:MODULE`` is made by ``parallel_env()`` of the ``--import`` module. SMAC is not supported: it needs StarCraft.

An observation is ``obs of each agent | state`` (``types.TeamSpec``), with the result of ``state()`` left out if it only
repeats the observations, as in mpe2. An action is one index per agent. The team's reward is the sum of its agents'
rewards, as in EPyMARL: in a task that gives all n agents the same reward, n times as much. An episode ends when no
agent is left; it was truncated if any of them was. An agent that has left observes zeros, and its actions are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from spreeze.envs.families import FAMILIES, constructing
from spreeze.envs.obs_flattening import MASK, Flattener, leaves_of
from spreeze.envs.pictures import refuse_pictures
from spreeze.envs.scalars import flag_of, number_of
from spreeze.errors import BadTransition, EnvError
from spreeze.types import TeamSpec


class TeamEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """A parallel environment with the interface of a single agent that acts for all."""

    def __init__(self, env_id: str, env: Any) -> None:
        """An EnvError if the spaces of the agents cannot be learned, or if they have action masks."""
        self._env, self._agents = env, tuple(env.possible_agents)
        self._flatten: list[Flattener] = []
        for agent in self._agents:
            space, what = env.observation_space(agent), f"{env_id}: observation space of {agent}"
            self._flatten.append(Flattener(leaves_of(space, what)))
            refuse_pictures(space, what)
        actions = [env.action_space(agent) for agent in self._agents]
        for agent, space in zip(self._agents, actions, strict=True):
            if not isinstance(space, gymnasium.spaces.Discrete):
                raise EnvError(f"{env_id}: action space of {agent} is {space}; agents need Discrete actions")
        self._starts = [int(space.start) for space in actions]
        size = max(flatten.obs_dim for flatten in self._flatten)
        self._starting_state(env_id, size)
        self.team = TeamSpec(actions=tuple(int(space.n) for space in actions), obs_dim=size, state_dim=self._state_dim)
        self.obs_layout = (
            *(
                f"{size * index}:{size * index + flatten.obs_dim} {agent}"
                for index, (agent, flatten) in enumerate(zip(self._agents, self._flatten, strict=True))
            ),
            *([f"{size * len(actions)}:{self._obs_dim} state"] if self._state_dim else []),
        )
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (self._obs_dim,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete(list(self.team.actions))
        self.metadata = dict(env.metadata or {})
        limit = getattr(env.unwrapped, "max_cycles", None) if hasattr(env, "unwrapped") else None
        self.spec = gymnasium.envs.registration.EnvSpec(
            id=env_id, entry_point=f"{__name__}:TeamEnv", max_episode_steps=None if limit is None else int(limit)
        )
        self._truncated = False

    def _starting_state(self, env_id: str, size: int) -> None:
        """Checks one reset: sets the dimensions of the state, if it has one of its own, and refuses masks."""
        self._state_dim, self._obs_dim, self._size = 0, size * len(self._agents), size
        obs, infos = self._env.reset(seed=0)
        parts = [part.get(agent) for part in (infos, obs) for agent in self._agents]
        if any(MASK in part for part in parts if isinstance(part, dict)):
            raise EnvError(
                f"{env_id} gives its agents an {MASK!r}, not supported for teams: wrap it so that invalid actions "
                "do nothing"
            )
        try:
            state = np.ravel(self._env.state())
        except (AttributeError, NotImplementedError):
            return
        joined = self._joined(obs)
        if state.shape != joined.shape or not np.array_equal(state.astype(np.float32), joined):
            self._state_dim = state.size
            self._obs_dim += state.size

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._truncated = False
        obs, _ = self._env.reset(seed=seed, options=options)
        return self._joined(obs), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step of all agents that are left; ``action`` [n] holds an index for each agent."""
        left = list(self._env.agents)
        chosen = {
            agent: start + int(index)
            for agent, start, index in zip(self._agents, self._starts, action, strict=True)
            if agent in left
        }
        obs, rewards, terminated, truncated, _ = self._env.step(chosen)
        truncated_agents = {agent: self._read("truncated", truncated, agent, flag_of) for agent in left}
        self._truncated |= any(truncated_agents.values())
        ended = not self._env.agents or all(
            self._read("terminated", terminated, agent, flag_of) or truncated_agents[agent] for agent in left
        )
        reward = sum(self._read("reward", rewards, agent, number_of) for agent in left)
        return self._joined(obs), reward, ended and not self._truncated, ended and self._truncated, {}

    def _read(self, field: str, values: dict[Any, Any], agent: Any, read: Callable[[Any], Any]) -> Any:
        try:
            return read(values[agent])
        except KeyError:
            raise BadTransition(f"{field} of {agent}", "missing", self.spec.id if self.spec else "team") from None
        except ValueError as error:
            raise BadTransition(f"{field} of {agent}", str(error), self.spec.id if self.spec else "team") from None

    def _joined(self, obs: dict[Any, Any]) -> np.ndarray:
        """Observations of the agents that are left, and the state, in one float32 vector [O]."""
        out = np.zeros(self._obs_dim, np.float32)
        for index, (agent, flatten) in enumerate(zip(self._agents, self._flatten, strict=True)):
            if agent in obs:
                out[self._size * index :][: flatten.obs_dim] = flatten(obs[agent])
        if self._state_dim:
            out[-self._state_dim :] = np.ravel(self._env.state())
        return out

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


def make_team(env_id: str, import_module: str | None, render_mode: str | None, args: dict[str, Any]) -> TeamEnv:
    """The environment of a team's id, after its module was imported; an EnvError if it cannot be made."""
    prefix, _, name = env_id.partition(":")
    with constructing(env_id):
        return TeamEnv(env_id, FAMILIES[prefix].make(name, import_module, render_mode, args))
