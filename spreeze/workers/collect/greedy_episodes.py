"""Greedy episodes and the statistics of their returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spreeze.envs.make import is_bullet
from spreeze.envs.task import ObsRows, Task
from spreeze.types import EnvSpec

MAX_STEPS = 10_000
"""Env steps after which an episode ends where the environment itself never ends one."""

Act = Callable[[np.ndarray], np.ndarray]
"""Observations float32 [N, O] to actions float32 [N, A] in [-1, 1], or indices of discrete ones [N, 1]."""


OnError = Callable[[int, int, Exception], None]
"""Told of an episode that an error ended: its place in the seeds, its env steps until then, and the error."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished episode."""

    seed: int
    episode_return: float
    """Undiscounted sum of the rewards."""
    length: int
    """Env steps."""
    terminated: bool
    """True where the MDP ended; False where time ran out."""


class Score(NamedTuple):
    """What some episodes say together; the deviation is that of these episodes (divided by n)."""

    episodes: int
    return_mean: float
    return_std: float
    length_mean: float


def score(episodes: Sequence[Episode]) -> Score:
    """Mean and deviation of the returns of at least one episode."""
    returns = np.array([episode.episode_return for episode in episodes], dtype=np.float64)
    lengths = [episode.length for episode in episodes]
    return Score(len(episodes), float(returns.mean()), float(returns.std()), float(np.mean(lengths)))


def seed_list(first_seed: int, episodes: int) -> range:
    """The fixed seeds of an evaluation."""
    return range(first_seed, first_seed + episodes)


def lanes_for(spec: EnvSpec) -> int:
    """How many environments to step together.

    A Bullet environment takes 29 MiB and its step costs 30 times a policy call, so batching the
    calls gains nothing there. The number depends on the id alone: the batch size decides the last
    bit of an action, and a score must repeat on another day and machine.
    """
    return 2 if is_bullet(spec.env_id) else 16


def run_episodes(
    make_task: Callable[[], Task],
    policy_act: Act,
    seeds: Sequence[int],
    on_step: Callable[[int, Task], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    *,
    max_envs: int | None = None,
    tasks: list[Task] | None = None,
    on_error: OnError | None = None,
    whole_rounds: bool = False,
) -> list[Episode]:
    """Runs one episode for each seed; the environments advance together, one policy call a step.

    Where only so much time is left, the episodes that end first are the short ones, and a mean over them says little
    of the policy. So rounds are whole: as many episodes begin as there are environments, the next ones when all of
    these are over, and of a round that a stop cuts none counts.

    Args:
        make_task: makes an environment when one more is needed.
        policy_act: the greedy policy.
        seeds: seed of each episode's reset.
        on_step: called with the episode's place in ``seeds`` after its reset and each of its steps.
        should_stop: asked before every step; True abandons what is not finished.
        max_envs: environments at most; by ``lanes_for`` if None.
        tasks: environments to reuse; new ones are added, and the caller closes them.
        on_error: told when an environment raises or gives a bad transition, which then costs its episode; the
            environment is made anew. None: the error is raised.
        whole_rounds: see above; without a stop the episodes are the same.

    Returns:
        The finished episodes, in the order of ``seeds``.
    """
    pool = [] if tasks is None else tasks
    try:
        if not pool:
            add_task(pool, make_task)
        lanes = min(len(seeds), max_envs or lanes_for(pool[0].spec))
        while len(pool) < lanes:
            add_task(pool, make_task)
        return _Lockstep(pool, lanes, policy_act, seeds, on_step, on_error, make_task).run(should_stop, whole_rounds)
    finally:
        if tasks is None:
            for task in pool:
                task.close()


def add_task(pool: list[Task], make_task: Callable[[], Task]) -> None:
    """Adds an environment that has been reset once.

    The first episode of a Bullet environment differs from every later one of the same seed (it
    starts before the state is saved to which later resets return); after one reset, an episode
    depends on its seed and the policy alone.
    """
    pool.append(make_task())
    _warm_up(pool[-1])


def _warm_up(task: Task) -> None:
    with contextlib.suppress(Exception):  # nobody needs this episode: who needs one hears of the next error
        task.reset(seed=0)


class _Lane:
    """One environment and the episode that it is in."""

    def __init__(self, row: int, task: Task) -> None:
        self.row = row
        self.task = task
        self.place = -1
        self.total = 0.0
        self.length = 0


class _Lockstep:
    """Episodes in progress. The batch keeps its size when lanes fall idle, so that no result depends on that."""

    def __init__(
        self, pool: list[Task], lanes: int, act: Act, seeds: Sequence[int],
        on_step: Callable[[int, Task], None] | None, on_error: OnError | None, make_task: Callable[[], Task],
    ) -> None:
        self._pool, self._act, self._seeds = pool, act, seeds
        self._on_step, self._on_error, self._make_task = on_step, on_error, make_task
        self._next = 0
        self._done: dict[int, Episode] = {}
        self._lanes = [_Lane(row, task) for row, task in enumerate(pool[:lanes])]
        if not self._lanes:
            return
        spec = pool[0].spec
        self._limit = MAX_STEPS if spec.max_episode_steps is None else spec.max_episode_steps
        self._obs = ObsRows(lanes, spec)

    def run(self, should_stop: Callable[[], bool] | None, whole_rounds: bool) -> list[Episode]:
        """Steps until all episodes are finished or it is told to stop."""
        settled = 0
        while busy := [lane for lane in self._lanes if self._begin(lane)]:
            while busy:
                if should_stop is not None and should_stop():
                    return self._episodes(before=settled if whole_rounds else self._next)
                actions = busy[0].task.to_native(self._act(self._obs.array))
                busy = [lane for lane in busy
                        if self._step(lane, actions[lane.row]) or (not whole_rounds and self._begin(lane))]
            settled = self._next
        return self._episodes(before=self._next)

    def _episodes(self, *, before: int) -> list[Episode]:
        return [self._done[place] for place in sorted(self._done) if place < before]

    def _begin(self, lane: _Lane) -> bool:
        """Starts the next seed's episode in a lane; False when none is left."""
        while self._next < len(self._seeds):
            lane.place, lane.total, lane.length = self._next, 0.0, 0
            self._next += 1
            try:
                first = lane.task.reset(seed=int(self._seeds[lane.place]))
            except Exception as error:
                self._lost(lane, error)
                continue
            self._obs.start(lane.row, first)
            if self._on_step is not None:
                self._on_step(lane.place, lane.task)
            return True
        return False

    def _step(self, lane: _Lane, action: np.ndarray) -> bool:
        """One env step; False when the episode is over."""
        try:
            obs, reward, terminated, truncated = lane.task.step(action)
        except Exception as error:
            self._lost(lane, error)
            return False
        self._obs.put(lane.row, obs)
        lane.total += reward
        lane.length += 1
        if self._on_step is not None:
            self._on_step(lane.place, lane.task)
        if not (terminated or truncated or lane.length >= self._limit):
            return True
        self._done[lane.place] = Episode(
            seed=int(self._seeds[lane.place]), episode_return=lane.total, length=lane.length, terminated=terminated
        )
        return False

    def _lost(self, lane: _Lane, error: Exception) -> None:
        """The episode is over without a result, and its environment is made anew."""
        if self._on_error is None:
            raise error
        self._on_error(lane.place, lane.length, error)
        old = self._pool.pop(lane.row)
        with contextlib.suppress(Exception):
            old.close()
        lane.task = self._make_task()
        self._pool.insert(lane.row, lane.task)
        _warm_up(lane.task)
