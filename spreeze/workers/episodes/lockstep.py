"""Episodes played in lockstep, with one policy call a step for several environments, and their score."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spreeze.envs.make import is_bullet
from spreeze.envs.task import MAX_EVALUATION_STEPS, ObsBuffer, Task
from spreeze.inference.policy import State, begin_episode
from spreeze.machine.hardware import memory_limits
from spreeze.machine.processes import close_in_time
from spreeze.types import EnvSpec

_SLOW_START_S = 5.0  # start time above which fewer environments are used in parallel [s]
_LARGE_BYTES, _KEPT_FREE = 50_000_000, 3
"""No further environment is made if one takes this much memory and less than this many times as much is left."""

Act = Callable[[np.ndarray, State], tuple[np.ndarray, State]]
"""Like ``Policy.act``: maps observations [N, ...] and state to float32 actions [N, A] and the next state."""
OnError = Callable[[int, int, Exception], None]
"""Called when an error ends an episode: its position in the seeds, its env steps so far, and the error."""


class EnvStep(NamedTuple):
    """One env step, or the reset of an episode."""

    obs: np.ndarray  # observation that it led to, as ``Task.step`` gives it
    action: np.ndarray | None  # action [A] as ``Task.step`` takes it; None at the reset
    reward: float = 0.0


OnStep = Callable[[int, Task, EnvStep], None]
"""Called after each reset and env step, with the episode's position in the seeds."""


class Episode(NamedTuple):
    seed: int
    episode_return: float
    length: int
    terminated: bool  # True if the MDP ended, False if time ran out
    success: bool | None = None  # ``info["is_success"]`` at its end; None if the environment does not report it


def score(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Statistics of at least one episode; the standard deviation is the population one (divided by n)."""
    returns = np.array([episode.episode_return for episode in episodes], dtype=np.float64)
    return {
        "episodes": len(episodes),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "length_mean": float(np.mean([episode.length for episode in episodes])),
    }


def success_rate(episodes: Sequence[Episode]) -> float | None:
    """Share of successes among the episodes that report success."""
    outcomes = [episode.success for episode in episodes if episode.success is not None]
    return sum(outcomes) / len(outcomes) if outcomes else None


def fresh_seeds(count: int, *entropy: int) -> list[int]:
    """Seeds of ``count`` environments that follow from ``entropy`` alone: another entropy gives other seeds."""
    return [int(seed) for seed in np.random.SeedSequence(entropy).generate_state(count) >> 1]


def envs_at_once(spec: EnvSpec) -> int:
    """Number of environments to step together; depends on the id only.

    The batch size decides the last bit of an action, and scores must repeat on other days and machines. A Bullet
    environment takes 29 MiB, and its step costs 30 times a policy call, so batching gains nothing.
    """
    return 2 if is_bullet(spec.env_id) else 16


def run_episodes(
    make_task: Callable[[], Task],
    policy_act: Act,
    seeds: Sequence[int],
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
    *,
    max_envs: int | None = None,
    tasks: list[Task] | None = None,
    on_error: OnError | None = None,
    whole_rounds: bool = False,
    heartbeat: Callable[[], object] = lambda: None,
    max_tasks: int | None = None,
) -> list[Episode]:
    """Runs one episode for each seed, with one policy call a step; returns the finished ones in the order of the seeds.

    ``on_step`` is called with the episode's position in ``seeds`` after its reset and each step, ``should_stop`` before
    every step, ``heartbeat`` before each environment that is made or reset, since either may take long. New ones are
    added to ``tasks``, which the caller closes. An environment that raises or gives a bad transition loses its episode
    and is replaced; without ``on_error`` the error is raised.

    There are at most ``max_tasks`` environments, and fewer if a second one cannot be made, starts too slowly or takes
    too much memory. The policy's batch size stays the same.

    Under a time limit the short episodes end first, and their mean would be biased. With ``whole_rounds``, as many
    episodes start as there are environments, the next ones start when all of these are over, and a round cut by a stop
    does not count. Without a stop the episodes are the same either way.
    """
    pool = [] if tasks is None else tasks
    try:
        if not pool:
            pool.append(new_task(make_task))
        count = min(len(seeds), max_envs or envs_at_once(pool[0].spec))
        _fill(pool, min(count, max_tasks or count), make_task, heartbeat)
        lockstep = _Lockstep(pool, count, policy_act, seeds, on_step, on_error, make_task, heartbeat)
        return lockstep.run(should_stop, whole_rounds)
    finally:
        if tasks is None:
            close_in_time(*(task.close for task in pool))


def _fill(pool: list[Task], count: int, make_task: Callable[[], Task], heartbeat: Callable[[], object]) -> None:
    """Makes environments until there are ``count``, as long as they start quickly and fit into memory."""
    while len(pool) < count:
        heartbeat()
        began_s, before_bytes = time.monotonic(), memory_limits().usable_bytes
        try:
            task = make_task()
        except Exception:  # no more are possible
            return
        try:
            task.reset(seed=0)
        except Exception:
            close_in_time(task.close)
            return
        pool.append(task)
        left_bytes = memory_limits().usable_bytes
        taken_bytes = before_bytes - left_bytes  # other programs' changes are small beside what matters here
        if time.monotonic() - began_s > _SLOW_START_S or (
            taken_bytes > _LARGE_BYTES and left_bytes < _KEPT_FREE * taken_bytes
        ):
            return


def new_task(make_task: Callable[[], Task]) -> Task:
    """An environment that has been reset once.

    The first episode of a Bullet environment differs from later ones of the same seed: it starts before the state is
    saved to which later resets return. After one reset, an episode depends on its seed and the policy alone.
    """
    task = make_task()
    with contextlib.suppress(Exception):  # this episode is not used; the next reset raises again
        task.reset(seed=0)
    return task


class _Env:
    def __init__(self, row: int, task: Task) -> None:
        self.row, self.task = row, task
        self.position, self.total, self.length = -1, 0.0, 0


@dataclass
class _Lockstep:
    """Episodes in progress. The batch size stays the same when environments fall idle, so no result depends on that."""

    pool: list[Task]
    count: int
    act: Act
    seeds: Sequence[int]
    on_step: OnStep | None
    on_error: OnError | None
    make_task: Callable[[], Task]
    heartbeat: Callable[[], object]

    def __post_init__(self) -> None:
        self._next = 0
        self._done: dict[int, Episode] = {}
        self._envs = [_Env(row, task) for row, task in enumerate(self.pool[: self.count])]
        self._lost_rows: set[int] = set()  # rows whose environment could not be made again
        spec = self.pool[0].spec
        self._limit = MAX_EVALUATION_STEPS if spec.max_episode_steps is None else spec.max_episode_steps
        self._obs, self._state = ObsBuffer(self.count, spec), State()

    def run(self, should_stop: Callable[[], bool] | None, whole_rounds: bool) -> list[Episode]:
        settled = 0
        while busy := [env for env in self._envs if self._begin(env)]:
            while busy:
                if should_stop is not None and should_stop():
                    return self._episodes(before=settled if whole_rounds else self._next)
                drawn, self._state = self.act(self._obs.array, self._state)
                actions = busy[0].task.to_env_units(drawn)
                busy = [
                    env for env in busy if self._step(env, actions[env.row]) or (not whole_rounds and self._begin(env))
                ]
            settled = self._next
        return self._episodes(before=self._next)

    def _episodes(self, *, before: int) -> list[Episode]:
        return [self._done[position] for position in sorted(self._done) if position < before]

    def _begin(self, env: _Env) -> bool:
        """Starts the next seed's episode; False if none is left, or its environment is lost."""
        while self._next < len(self.seeds) and env.row not in self._lost_rows:
            env.position, env.total, env.length = self._next, 0.0, 0
            begin_episode(self._state, env.row)
            self._next += 1
            self.heartbeat()
            try:
                obs = env.task.reset(seed=int(self.seeds[env.position]))
                self._obs.start(env.row, obs)
            except Exception as error:
                self._lose(env, error)
                continue
            if self.on_step is not None:
                self.on_step(env.position, env.task, EnvStep(obs, None))
            return True
        return False

    def _step(self, env: _Env, action: np.ndarray) -> bool:
        """One env step; False when the episode is over."""
        try:
            obs, reward, terminated, truncated = env.task.step(action)
        except Exception as error:
            self._lose(env, error)
            return False
        self._obs.put(env.row, obs)
        env.total += reward
        env.length += 1
        if self.on_step is not None:
            self.on_step(env.position, env.task, EnvStep(obs, action, reward))
        if not (terminated or truncated or env.length >= self._limit):
            return True
        self._done[env.position] = Episode(
            int(self.seeds[env.position]), env.total, env.length, terminated, env.task.success
        )
        return False

    def _lose(self, env: _Env, error: Exception) -> None:
        """Ends the episode without a result and replaces its environment."""
        if self.on_error is None:
            raise error
        self.on_error(env.position, env.length, error)
        index, env.length = self.pool.index(env.task), 0
        close_in_time(self.pool.pop(index).close)
        try:
            env.task = new_task(self.make_task)
        except Exception as failure:
            self._lost_rows.add(env.row)
            if len(self._lost_rows) < len(self._envs):
                return
            if not self._done:
                raise
            while self._next < len(self.seeds):  # no environment is left
                self.on_error(self._next, 0, failure)
                self._next += 1
        else:
            self.pool.insert(index, env.task)
