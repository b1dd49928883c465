"""Step environments and store what they give: as replay rows, or as rollouts.

An environment that raises or gives a bad transition loses only its own episode. For replay, the row is dropped and the
environment replaced. In a rollout, the episode ends, truncated, at the last good observation, whose value is still
learned from, and a new environment, reset with the seed of the next episode, collects the row. So a rollout keeps its T
rows of every environment, and the others are not affected: their actions and noise depend only on their own number,
episode and step. If the error depends only on an episode's seed and actions, the run repeats bit for bit, with any
number of inference workers and any deaths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spreeze.envs.info_numbers import InfoNumbers
from spreeze.envs.task import ActionScaling, ObsBuffer, Task, TaskSource
from spreeze.envs.vector_engines import VectorTask
from spreeze.errors import BadTransition, WorkerError, described
from spreeze.inference.normalizer import DiscountedReturns
from spreeze.inference.policy import Policy, State, begin_episode, exploring_arrays
from spreeze.machine.processes import close_in_time
from spreeze.metrics.table import SLOTS, Phase
from spreeze.transport.replay_ring import ShardWriter
from spreeze.transport.rollouts import Responses, Rollouts, RolloutWriter, StepRows
from spreeze.transport.transitions import FrameLog, NStepBatch
from spreeze.transport.weights import ParameterSource, VersionedParameters
from spreeze.types import EnvSpec
from spreeze.workers.context import is_power_of_ten

if TYPE_CHECKING:
    from spreeze.workers.evaluator import TurnEvaluation

# Looked up once, since every round over the environments posts; rollout samplers have the same slots.
_ENV_STEPS, _EPISODES, _EPISODE_RETURN, _EPISODE_LENGTH, _TRANSITIONS_REJECTED, _ENV_ERRORS = (
    SLOTS["sampler"].index(name)
    for name in ("env_steps", "episodes", "episode_return", "episode_length", "transitions_rejected", "env_errors")
)
_POLICY_S, _ENV_S, _WRITE_S, _WAIT_S = (
    SLOTS["sampler"].index(name) for name in ("policy_s", "env_s", "write_s", "wait_s")
)
_MOST_ERRORS, _WINDOW_STEPS = 20, 1000
"""This many errors within so many env steps end the process."""
_RETURNS = SLOTS["sampler"].index("returns")
"""Slot of the number of returns; their sum and sum of squares follow it."""
_BLOCK_STEPS = 32
"""Steps whose noise is drawn at once: setting up a generator takes some ten microseconds."""
_REWARD_STEPS, _FIRST_REWARDS = 128, 4096
"""Steps whose rewards are added up at once, and the number of steps up to which a fourth of them are: 0.1 ms a time."""
_SEED_BITS = 31
_ALL = slice(None)
_SLOW_S = 1.0

OnError = Callable[[str, Exception, int], None]
"""Called to report an error: where it happened, the error, and the number of errors so far."""
OnProgress = Callable[[Phase], None]
"""Called before something that may take long, as a heartbeat."""


def _ignore(*_: object) -> None:
    pass


@dataclass
class SamplerStats:
    """Counters of one sampler of either kind; times are cumulative seconds."""

    env_steps: int = 0
    episodes: int = 0
    episode_return: float | None = None
    episode_length: float | None = None
    transitions_rejected: int = 0
    env_errors: int = 0
    policy_s: float = 0.0
    env_s: float = 0.0
    write_s: float = 0.0
    wait_s: float = 0.0
    returns: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Count, sum and sum of squares of discounted returns."""
    _posted: tuple[float, float, float] | None = None

    def post(self, slots: np.ndarray, base: Sequence[float]) -> None:
        """Writes all but the policy's version into the slots; ``base`` holds the counters of earlier processes."""
        slots[_ENV_STEPS] = base[_ENV_STEPS] + self.env_steps
        slots[_EPISODES] = base[_EPISODES] + self.episodes
        if self.episode_return is not None and self.episode_length is not None:
            slots[_EPISODE_RETURN] = self.episode_return
            slots[_EPISODE_LENGTH] = self.episode_length
        slots[_TRANSITIONS_REJECTED] = base[_TRANSITIONS_REJECTED] + self.transitions_rejected
        slots[_ENV_ERRORS] = base[_ENV_ERRORS] + self.env_errors
        slots[_POLICY_S] = base[_POLICY_S] + self.policy_s
        slots[_ENV_S] = base[_ENV_S] + self.env_s
        slots[_WRITE_S] = base[_WRITE_S] + self.write_s
        slots[_WAIT_S] = base[_WAIT_S] + self.wait_s
        if self.returns is not self._posted:
            self._posted = self.returns
            for index, value in enumerate(self.returns, _RETURNS):
                slots[index] = base[index] + value


class Collector:
    """The environments of one process; counts their episodes and errors, and replaces broken ones."""

    def __init__(
        self,
        make_task: Callable[[], Task],
        num_envs: int,
        *,
        nan_policy: str,
        on_error: OnError,
        on_progress: OnProgress,
    ) -> None:
        """With ``nan_policy`` "fail" the first bad transition ends the process."""
        self.num_envs = num_envs
        self.counts = SamplerStats()
        self._new_task, self._nan_policy = make_task, nan_policy
        self.info = InfoNumbers()
        """Sums of the numbers in ``info``; engines that step several environments at once give none."""
        self._on_error, self._on_progress = on_error, on_progress
        self._error_steps: deque[int] = deque(maxlen=_MOST_ERRORS)
        self._errors = 0
        self._tasks: list[Task] = []
        self._versions: list[int] = []
        """Versions of the arguments that each environment was made with."""
        self.on_episode: Callable[[float, int, bool | None], None] = _ignore
        """Called with return, length and success of each episode."""
        self.interlude: TurnEvaluation | None = None
        """Evaluations between the episodes that are collected."""
        self._returns, self._lengths = [0.0] * num_envs, [0] * num_envs
        self._recent: deque[tuple[float, int]] = deque(maxlen=10)
        self._is_slow = True
        """True if the latest step of all environments took long: then each of them has a heartbeat of its own."""

    @property
    def _version(self) -> int:
        return self._new_task.version if isinstance(self._new_task, TaskSource) else 0

    def _make_task(self) -> Task:
        task = self._new_task()
        task.info_numbers = self.info
        return task

    def _count_episode(self, index: int) -> None:
        self._recent.append((self._returns[index], self._lengths[index]))
        self.counts.episodes += 1
        self.counts.episode_return = sum(entry[0] for entry in self._recent) / len(self._recent)
        self.counts.episode_length = sum(entry[1] for entry in self._recent) / len(self._recent)
        success = self._tasks[index].success if self._tasks else None  # an engine's environments have none
        self.on_episode(self._returns[index], self._lengths[index], success)

    def _between_episodes(self, index: int) -> None:
        if self.interlude is not None:
            self._tasks[index].info_numbers = None
            self._tasks[index] = self.interlude.play(self._tasks[index]) or self._make_task()
            self._tasks[index].info_numbers = self.info
        if self._versions and self._version != self._versions[index]:
            self._renew(index)

    def _renew(self, index: int) -> None:
        """Replaces an environment by one of other arguments; keeps it where that cannot be made."""
        self._on_progress(Phase.INIT)
        self._versions[index], task = self._version, None
        try:
            task = self._make_task()
            task.reset()
        except Exception as error:
            close_in_time(*() if task is None else (task.close,))
            if self._versions.count(self._version) == 1:  # the first one of this process
                self._on_error(f"environment {index}, made with other arguments", error, 1)
            return
        close_in_time(self._tasks[index].close)
        self._tasks[index] = task

    def _count_error(self, where: str, error: Exception) -> None:
        """Counts an error; reports the 1st, 10th, 100th and so on, so that errors over weeks do not fill the disk.

        Raises:
            WorkerError: too many errors in the window, or a bad transition with ``nan_policy`` "fail".
        """
        counts = self.counts
        if isinstance(error, BadTransition):
            counts.transitions_rejected += 1
            if self._nan_policy == "fail":
                raise WorkerError(f"{where} returned an invalid transition: {error}") from error
        else:
            counts.env_errors += 1
        self._errors += 1
        if is_power_of_ten(self._errors):
            self._on_error(where, error, self._errors)
        self._error_steps.append(counts.env_steps)
        within = counts.env_steps - self._error_steps[0]
        if len(self._error_steps) == _MOST_ERRORS and within < _WINDOW_STEPS:
            raise WorkerError(
                f"{_MOST_ERRORS} environment errors within {within} env steps; the last: {where}: {described(error)}"
            ) from error

    def _replace(self, index: int) -> None:
        self._on_progress(Phase.INIT)
        try:
            self._tasks[index].close()
        except Exception:
            self.counts.env_errors += 1
        self._tasks[index] = self._make_task()

    def close(self) -> None:
        """Closes the environments; an error in closing does not hide an earlier one."""
        close_in_time(*(task.close for task in self._tasks))


class TransitionCollector(Collector):
    """N environments stepped together; with ``make_vector`` they are one, and an error ends all its episodes."""

    rows_per_step = 1
    """Most rows that one env step writes."""

    def __init__(
        self,
        make_task: Callable[[], Task],
        num_envs: int,
        spec: EnvSpec,
        sink: ShardWriter,
        *,
        n_step: int,
        gamma: float,
        seeds: list[int],
        nan_policy: str = "drop",
        on_progress: OnProgress = _ignore,
        on_error: OnError = _ignore,
        make_vector: Callable[[int, int], VectorTask] | None = None,
    ) -> None:
        super().__init__(make_task, num_envs, nan_policy=nan_policy, on_error=on_error, on_progress=on_progress)
        self._unscale_action = ActionScaling(spec, bounded=True)
        self._rows = self._open_rows(spec, num_envs, sink, n_step, gamma)
        self.state = State()
        """The policy's state in the current episodes."""
        self._reward = np.zeros(num_envs, np.float32)
        self._terminated = np.zeros(num_envs, np.float32)
        self._discounted, self._in_block = DiscountedReturns(gamma), 0
        self._rewards = np.zeros((_REWARD_STEPS, num_envs), np.float32)
        self._ends = np.zeros((_REWARD_STEPS, num_envs), bool)
        self._block_steps = _REWARD_STEPS // 4
        self._make_vector, self._seed = make_vector, seeds[0]
        self._running = np.zeros((2, num_envs))
        """Return and length of each current episode of a vector environment."""
        self._later_seeds = np.random.default_rng(seeds)
        self._vector: VectorTask | None = None
        if make_vector is not None:
            self._renew_vector()
        for index in range(num_envs if make_vector is None else 0):
            on_progress(Phase.INIT)
            self._versions.append(self._version)
            self._tasks.append(self._make_task())
            self._reset(index, seeds[index])

    def _open_rows(
        self, spec: EnvSpec, num_envs: int, sink: ShardWriter, n_step: int, gamma: float
    ) -> VectorRowWriter | FrameRowWriter:
        return (VectorRowWriter if spec.frames is None else FrameRowWriter)(spec, num_envs, sink, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        return self._rows.obs

    def step(self, actions: np.ndarray, version: int) -> None:
        """Steps every environment once with a policy's ``actions`` [N, A] and stores the rows."""
        start = perf_counter()
        native = self._unscale_action(actions, np.empty_like(actions))  # new: environments may keep their action
        ended, broken = self._step_tasks(native) if self._make_vector is None else self._step_vector(native)
        stepped = perf_counter()
        self._is_slow = stepped - start > _SLOW_S
        if self.interlude is not None and not ended and not broken and self.interlude.overdue:
            ended = [(0, True)]
        self._rows.store(StepBatch(actions, self._reward, self._terminated, dict(ended), broken, version))
        self._count_rewards(ended, broken)
        written = perf_counter()
        self.counts.env_steps += self.num_envs - len(broken)
        for index in broken:
            begin_episode(self.state, index)
        for index, _ in ended:
            begin_episode(self.state, index)
            self._count_episode(index)
            self._between_episodes(index)
            self._reset(index, None)
        if self._make_vector is None:
            for index in broken:
                self._reset(index, self._rebuild(index))
        elif self._vector is None:
            self._renew_vector()
        else:
            self._rows.start(_ALL, self._vector.obs)
        self.counts.env_s += stepped - start + perf_counter() - written
        self.counts.write_s += written - stepped

    def _count_rewards(self, ended: list[tuple[int, bool]], broken: list[int]) -> None:
        """Keeps the rewards of this step, and adds a block of them to the returns once it is full."""
        at = self._in_block
        self._rewards[at] = self._reward
        if ended or broken:
            self._ends[at, [index for index, _ in ended] + broken] = True
            self._rewards[at, broken] = 0.0
        self._in_block = steps = at + 1
        if steps == self._block_steps:
            self._discounted.add(self._rewards[:steps], self._ends[:steps])
            self.counts.returns = self._discounted.sums()
            self._ends[...], self._in_block = False, 0
            if self._discounted.count >= _FIRST_REWARDS:
                self._block_steps = _REWARD_STEPS

    def _step_tasks(self, native: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Steps one by one; returns (index, truncated) of ended episodes, and the environments without a row."""
        ended: list[tuple[int, bool]] = []
        broken: list[int] = []
        take, reward, terminated = self._rows.take, self._reward, self._terminated
        for index, task in enumerate(self._tasks):
            if self._is_slow:
                self._on_progress(Phase.STEP)
            try:
                step_obs, step_reward, step_terminated, step_truncated = task.step(native[index])
            except Exception as error:
                self._count_error(f"environment {index}", error)
                broken.append(index)
                continue
            take(index, step_obs)
            reward[index] = step_reward
            terminated[index] = step_terminated
            self._returns[index] += step_reward
            self._lengths[index] += 1
            if step_terminated or step_truncated:
                ended.append((index, step_truncated))
        return ended, broken

    def _step_vector(self, native: np.ndarray) -> tuple[list[tuple[int, bool]], list[int]]:
        """Like ``_step_tasks`` for a vector environment, whose steps that start an episode may give no row."""
        assert self._vector is not None
        try:
            done = self._vector.step(native)
        except Exception as error:
            self._count_error("environment 0", error)
            self._vector.close()
            self._vector = None
            return [], list(range(self.num_envs))
        self._rows.take(_ALL, done.next_obs)
        self._reward[...], self._terminated[...] = done.reward, done.terminated
        np.add(self._running[0], done.reward, out=self._running[0], where=done.valid)
        self._running[1] += done.valid
        over = np.flatnonzero(done.terminated | done.truncated).tolist()
        for index in over:
            self._returns[index], self._lengths[index] = float(self._running[0, index]), int(self._running[1, index])
            self._running[:, index] = 0.0
        return [(index, bool(done.truncated[index])) for index in over], np.flatnonzero(~done.valid).tolist()

    def _renew_vector(self) -> None:
        """Makes and resets the vector environment, and tries again as long as that raises."""
        assert self._make_vector is not None
        while True:
            self._on_progress(Phase.INIT)
            try:
                self._vector = self._make_vector(self.num_envs, self._seed)
                self._rows.start(_ALL, self._vector.reset(self._seed))
                break
            except Exception as error:
                self._count_error("environment 0", error)
        self._seed += self.num_envs  # other episodes after an error
        self._running[...] = 0.0

    def _reset(self, index: int, seed: int | None) -> None:
        """Resets one environment, replacing it as long as its reset raises; a vector one resets itself."""
        while self._make_vector is None:
            self._on_progress(Phase.RESET)
            try:
                self._rows.start(index, self._tasks[index].reset(seed))
                break
            except Exception as error:
                self._count_error(f"environment {index}", error)
                seed = self._rebuild(index)
        self._returns[index], self._lengths[index] = 0.0, 0

    def _rebuild(self, index: int) -> int:
        """Replaces an environment; returns the seed of its first reset, so that runs are repeatable."""
        self._replace(index)
        return int(self._later_seeds.integers(2**31))

    def close(self) -> None:
        super().close()
        if self._vector is not None:
            close_in_time(self._vector.close)


class StepBatch(NamedTuple):
    actions: np.ndarray  # [N, A], as the policy gave them
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    ended: dict[int, bool]  # environment -> truncated, of those whose episode ended
    broken: list[int]  # environments that raised; they get no row
    version: int  # of the policy


class VectorRowWriter:
    """Writes rows of vector observations; ``obs`` [N, O] is current, and two buffers alternate."""

    def __init__(self, spec: EnvSpec, num_envs: int, sink: ShardWriter, n_step: int, gamma: float) -> None:
        self.obs = np.zeros((num_envs, spec.obs_dim), np.float32)
        self._next_obs = np.zeros_like(self.obs)
        self._sink = sink
        self._windows = NStepBatch(n_step, gamma, num_envs, spec.obs_dim, spec.action_dim) if n_step > 1 else None

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        self.obs[index] = obs

    def take(self, index: int | slice, obs: np.ndarray) -> None:
        self._next_obs[index] = obs

    def store(self, batch: StepBatch) -> None:
        columns = [self.obs, batch.actions, batch.reward, batch.terminated, self._next_obs]
        num_steps = None
        if self._windows is not None:
            *columns, num_steps = self._windows.push(
                *columns, ended=self._among(batch.ended), lost=self._among(batch.broken)
            )
        elif batch.broken:
            kept = ~self._among(batch.broken)
            columns = [column[kept] for column in columns]
        obs, actions, reward, terminated, next_obs = columns
        if len(obs):
            self._sink.write(obs, actions, reward, terminated, next_obs, num_steps, batch.version)
        self.obs, self._next_obs = self._next_obs, self.obs

    def _among(self, indices: Iterable[int]) -> np.ndarray:
        """Bool [N]: True for these environments."""
        found = np.zeros(len(self.obs), bool)
        found[list(indices)] = True
        return found


class FrameRowWriter:
    """Writes rows of images: frame stacks for the policy are kept here, each frame is stored once in replay."""

    def __init__(self, spec: EnvSpec, num_envs: int, sink: ShardWriter, n_step: int, gamma: float) -> None:
        assert spec.frames is not None
        self._rows = ObsBuffer(num_envs, spec)
        self._sign = spec.frames.sign_rewards
        self._log = FrameLog(sink, num_envs, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        """[N, k, *frame] uint8."""
        return self._rows.array

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.start(index, obs)
        self._log.start(index, obs.reshape(-1))

    def take(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.put(index, obs)

    def store(self, batch: StepBatch) -> None:
        newest = self._rows.array[:, -1]
        reward = np.sign(batch.reward) if self._sign else batch.reward
        for index in range(len(newest)):
            if index not in batch.broken:
                self._log.add(
                    index,
                    batch.actions[index],
                    float(reward[index]),
                    bool(batch.terminated[index]),
                    batch.ended.get(index, False),
                    newest[index].reshape(-1),
                )
        self._log.flush(batch.version)


class RolloutPolicy:
    """The policy of the current rollout, read again when a new rollout starts."""

    def __init__(self, rollouts: Rollouts, policies: VersionedParameters) -> None:
        self._rollouts, self._policies = rollouts, policies
        self._policy: Policy | None = None
        self.version = -1
        """Rollout of the policy that was returned last."""

    def current(self) -> Policy | None:
        """The policy, or None while it is not published. A rollout lasts until no worker needs its policy any more."""
        current = self._rollouts.current
        if current != self.version:
            weights = self._policies.read(current)
            if weights is None:
                return None
            self._policy = Policy.from_weights(exploring_arrays(weights.arrays), weights.meta)
            self.version = current
        return self._policy


class NewestPolicy:
    """The newest published policy, for samplers that do not wait for anybody."""

    def __init__(self, weights: ParameterSource) -> None:
        self._weights = weights
        self._held: tuple[int, int] | None = None
        self._policy: Policy | None = None

    @property
    def version(self) -> int:
        """Updates of the learner when it published this policy."""
        return self._held[1] if self._held else 0

    def refresh(self) -> None:
        weights = self._weights.read_latest(self._held)
        if weights is not None:
            self._policy = Policy.from_weights(exploring_arrays(weights.arrays), weights.meta)
            self._held = weights.order

    def current(self) -> Policy | None:
        return self._policy


class RolloutCollector(Collector):
    """M environments, ``first`` to ``first + M - 1`` of all, each at its own pace within a rollout."""

    def __init__(
        self,
        make_task: Callable[[], Task],
        spec: EnvSpec,
        rollouts: Rollouts,
        *,
        first: int,
        num_envs: int,
        seed: int,
        step_synchronous: bool = False,
        replays: bool = True,
        nan_policy: str = "drop",
        on_progress: OnProgress = _ignore,
        on_error: OnError = _ignore,
    ) -> None:
        """Makes the environments and brings each to its state in the rollout storages.

        Without ``replays`` each starts a new episode instead; the one before is truncated.

        Raises:
            WorkerError: an environment is not repeatable, its episode is too long for a replay, or too many errors.
        """
        super().__init__(make_task, num_envs, nan_policy=nan_policy, on_error=on_error, on_progress=on_progress)
        self._spec, self._rollouts, self._seed, self._first = spec, rollouts, seed, first
        # Where the arguments have changed, an episode may have begun with others than it would have again.
        self._step_synchronous, self._replays = step_synchronous, replays and not self._version
        self.columns = RolloutWriter(rollouts, first, num_envs)
        self._rows = ObsBuffer(num_envs, spec)
        self._sign = spec.frames is not None and spec.frames.sign_rewards
        noise_dim, numbers = rollouts.spec.action_dim, 0 if spec.box is None else spec.box.dim
        envs = range(first, first + num_envs)
        self._noise = [ActionNoise(seed, env, noise_dim, numbers) for env in envs]
        self._noise_rows = np.zeros((num_envs, noise_dim), np.float32)
        state_dim = rollouts.spec.state_dim
        self._state: State = (np.zeros((num_envs, state_dim), np.float32),) if state_dim else ()
        """The policy's, before the next step of each environment."""
        try:
            for index in range(num_envs):
                on_progress(Phase.INIT)
                self._versions.append(self._version)
                self._tasks.append(self._make_task())
                self._restore(index)
        except BaseException:
            self.close()
            raise

    def _restore(self, index: int) -> None:
        """Restores an environment: starts its current episode and repeats the episode's actions."""
        env = self._first + index
        if not self._replays:
            self.columns.abandon(index)
            self._reset(index)
            return
        actions = self._rollouts.played(env)
        if actions is None:
            raise WorkerError(
                f"environment {env} of {self._spec.env_id} cannot be restored: its episode is longer than the "
                f"{self._rollouts.spec.log_steps} logged actions; set a step limit for the environment"
            )
        if not len(actions):
            self._reset(index)
            return
        # These steps succeeded before, so an error does not belong to the episode, which is tried again.
        while (ended := self._replayed(index, actions)) is None:
            self._replace(index)
        stored = self._rollouts.last_obs(env)
        if ended:
            raise self._not_deterministic(
                env, f"its episode ended after {self._lengths[index]} of {len(actions)} steps"
            )
        if stored is not None and not np.array_equal(stored, self._rows.array[index]):
            raise self._not_deterministic(env, f"its observation after {len(actions)} steps differs")
        for part in self._state:
            part[index] = self._rollouts.memory_of(np.array([env]))[0]

    def _replayed(self, index: int, actions: np.ndarray) -> bool | None:
        """Repeats the current episode with actions; whether it ended, or None if the environment raised."""
        try:
            self._begin(index)
            for action in self._tasks[index].unscale_action(actions):
                self._on_progress(Phase.RESET)
                obs, reward, terminated, truncated = self._tasks[index].step(action)
                self._take(index, obs, reward)
                if terminated or truncated:
                    return True
        except Exception as error:
            self._count_error(self._where(index, f"step {self._lengths[index] + 1}, repeated"), error)
            return None
        return False

    def _not_deterministic(self, env: int, what: str) -> WorkerError:
        return WorkerError(
            f"environment {env} is not deterministic: with the same seed and actions {what}; "
            f"{self._spec.env_id} cannot be replayed, so a restarted or resumed run would differ"
        )

    def _reset(self, index: int) -> None:
        """Starts the current episode, or the next one whose reset does not raise."""
        while True:
            self._on_progress(Phase.RESET)
            try:
                self._begin(index)
                return
            except Exception as error:
                self._drop_episode(index, "reset", error)

    def _drop_episode(self, index: int, what: str, error: Exception) -> None:
        """Gives up the current episode and replaces its environment; does not start the next episode."""
        self._count_error(self._where(index, what), error)
        self.columns.abandon(index)
        self._replace(index)

    def _where(self, index: int, what: str) -> str:
        return f"environment {self._first + index}, episode {self.columns.episode[index]}, {what}"

    def _begin(self, index: int) -> None:
        self._returns[index], self._lengths[index] = 0.0, 0
        begin_episode(self._state, index)
        seed = reset_seed(self._seed, self._first + index, self.columns.episode[index])
        self._rows.start(index, self._tasks[index].reset(seed))

    def _take(self, index: int, obs: np.ndarray, reward: float) -> None:
        self._rows.put(index, obs)
        self._returns[index] += reward
        self._lengths[index] += 1

    def may_step(self) -> list[int]:
        return self.columns.may_step(step_synchronous=self._step_synchronous)

    def requests(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray, State]:
        """Observations [n, O], noise [n, Z] and states [n, S] for the next actions; valid until the next step."""
        episode, lengths = self.columns.episode, self._lengths
        for index in indices:
            self._noise_rows[index] = self._noise[index].at(episode[index], lengths[index])
        rows = self.columns.rows(indices)
        return self._rows.array[rows], self._noise_rows[rows], tuple(part[rows] for part in self._state)

    def advance(self, policies: RolloutPolicy | NewestPolicy) -> bool:
        """Steps all open environments with actions drawn here; False if there are none, or no policy yet."""
        start = perf_counter()
        indices = self.may_step()
        policy = policies.current() if indices else None
        if policy is not None:
            action, log_prob, state = policy.draw(*self.requests(indices))
        self.counts.policy_s += perf_counter() - start
        if policy is not None:
            self.step(indices, Responses(action, log_prob, policies.version, state))
        return policy is not None

    def step(self, indices: Sequence[int], responses: Responses) -> None:
        """Steps environments and commits their rows."""
        start = perf_counter()
        obs = self._rows.array[self.columns.rows(indices)].copy()
        native = self._tasks[0].unscale_action(responses.action)
        rewards, terminated, truncated = [], [], []
        failed: dict[int, Exception] = {}
        for row, index in enumerate(indices):
            if self._is_slow:
                self._on_progress(Phase.STEP)
            try:
                step_obs, reward, is_terminated, is_truncated = self._tasks[index].step(native[row])
            except Exception as error:
                failed[index] = error
                continue
            self._take(index, step_obs, reward)
            rewards.append(reward)
            terminated.append(is_terminated)
            truncated.append(is_truncated)
        stepped = perf_counter()
        self._is_slow = stepped - start > _SLOW_S
        if self.interlude is not None and truncated and self.interlude.overdue:
            truncated[0] = not terminated[0]
        if failed:
            kept = [row for row, index in enumerate(indices) if index not in failed]
            indices, obs, responses = [indices[row] for row in kept], obs[kept], responses.of(kept)
        if self._sign:
            rewards = np.sign(rewards).tolist()
        if indices:
            at = self.columns.rows(indices)
            next_obs, states = self._rows.array[at], (*(part[at] for part in self._state), *responses.state)
            self.columns.commit(
                indices, StepRows(obs, *responses[:3], rewards, terminated, truncated, next_obs, *states)
            )
            for part, following in zip(self._state, responses.state, strict=True):
                part[at] = following
        written = perf_counter()
        self.counts.env_steps += len(indices)
        for row, index in enumerate(indices):
            if terminated[row] or truncated[row]:
                self._count_episode(index)
                self._between_episodes(index)
                self._reset(index)
        for index, reason in failed.items():
            self._drop_episode(index, f"step {self._lengths[index] + 1}", reason)
            self._reset(index)
        self.counts.env_s += stepped - start + perf_counter() - written
        self.counts.write_s += written - stepped

    def close(self) -> None:
        self.columns.close()
        super().close()


def reset_seed(seed: int, env: int, episode: int) -> int:
    return int(np.random.SeedSequence((seed, env, episode)).generate_state(1)[0]) >> (32 - _SEED_BITS)


class ActionNoise:
    def __init__(self, seed: int, env: int, noise_dim: int, numbers: int) -> None:
        """Draws noise for so many ``numbers`` of an action from a standard normal, else uniformly from [0, 1)."""
        self._key = (seed, env)
        self._noise_dim, self._numbers = noise_dim, numbers
        self._held: tuple[int, int] | None = None
        self._block = np.zeros((0, noise_dim), np.float32)

    def at(self, episode: int, step: int) -> np.ndarray:
        """Noise float32 [Z] of a step; valid until the next call."""
        number, row = divmod(step, _BLOCK_STEPS)
        if self._held != (episode, number):
            self._held = (episode, number)
            # The generator increments the first word; the other two identify the block.
            rng = np.random.Generator(np.random.Philox(key=self._key, counter=(0, number, episode, 0)))
            normal = rng.standard_normal((_BLOCK_STEPS, self._numbers), np.float32)
            self._block = np.hstack((normal, rng.random((_BLOCK_STEPS, self._noise_dim - self._numbers), np.float32)))
        noise: np.ndarray = self._block[row]
        return noise
