"""Two rollout storages in shared memory, and what a dead executor or a resumed run needs to go on with the same bits.

Executors fill the storage of interval j (side j mod 2), each environment its own column, while the learner reads
the one of interval j - 1 (HTS-RL, arXiv 2012.09849, section 3). ``steps`` counts the rows of each environment
since the run began and is stored last: whatever is behind it is whole, whoever is killed. ``interval`` is
raised by the learner alone, when the write side is full and the read side used up.

For replay the actions of each environment's current episode are kept. An episode's begin is announced
(``next_*``) before the row that ends the one before it is committed, so that one store decides.
"""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import CheckpointError
from spreeze.transport.shared_memory import ArraySpec, SharedArrays
from spreeze.types import EnvSpec, Jsonable, RolloutBatch

MAX_LOGGED_STEPS = 32_768
"""Actions of one episode that are kept; a longer episode cannot be replayed."""


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(Jsonable):
    """Sizes of the storages."""

    sync_interval: int
    """T: env steps of each environment between two swaps."""
    num_envs: int
    """N: all environments of all executors."""
    obs_shape: tuple[int, ...]
    """[O], or [k, C, H, W] of images."""
    images: bool
    action_dim: int
    noise_dim: int
    log_steps: int
    """L: actions kept of an episode."""

    @classmethod
    def of(cls, spec: EnvSpec, sync_interval: int, num_envs: int) -> RolloutSpec:
        """The storages of an environment."""
        frames = spec.frames
        return cls(
            sync_interval=sync_interval, num_envs=num_envs, images=frames is not None, action_dim=spec.action_dim,
            obs_shape=(spec.obs_dim,) if frames is None else (frames.stack, *frames.shape),
            noise_dim=1 if spec.num_actions is not None else spec.action_dim,
            log_steps=min(spec.max_episode_steps or MAX_LOGGED_STEPS, MAX_LOGGED_STEPS),
        )

    @property
    def rows(self) -> int:
        """Rows of one interval: T * N."""
        return self.sync_interval * self.num_envs

    @property
    def size_bytes(self) -> int:
        """Bytes of the block."""
        return SharedArrays.size_bytes(self.fields())

    @property
    def obs_dtype(self) -> str:
        """Type of an observation's values."""
        return "uint8" if self.images else "float32"

    def fields(self) -> tuple[ArraySpec, ...]:
        """The arrays of the block; those that begin with 2 have one half for each parity of the interval."""
        count, side = self.num_envs, (2, self.sync_interval, self.num_envs)
        log, obs = (count, self.log_steps, self.action_dim), (*side, *self.obs_shape)
        return (
            ArraySpec("interval", (1,), "int64"),
            ArraySpec("steps", (count,), "int64"),
            ArraySpec("start", (count,), "int64"),
            ArraySpec("episode", (count,), "int64"),
            ArraySpec("next_start", (count,), "int64"),
            ArraySpec("next_episode", (count,), "int64"),
            ArraySpec("log", log, "float32"),
            ArraySpec("marked_log", (2, *log), "float32"),
            ArraySpec("marked_start", (2, count), "int64"),
            ArraySpec("marked_episode", (2, count), "int64"),
            ArraySpec("obs", obs, self.obs_dtype),
            ArraySpec("action", (*side, self.action_dim), "float32"),
            ArraySpec("log_prob", side, "float32"),
            ArraySpec("version", side, "int64"),
            ArraySpec("reward", side, "float32"),
            ArraySpec("terminated", side, "uint8"),
            ArraySpec("truncated", side, "uint8"),
            ArraySpec("next_obs", obs, self.obs_dtype),
        )


SIDE = ("obs", "action", "log_prob", "version", "reward", "terminated", "truncated", "next_obs")
"""The arrays of a storage, in the order of ``StepRows``."""


class StepRows(NamedTuple):
    """One env step of some environments, in the order of their numbers; columns of n."""

    obs: np.ndarray  # [n, O] or [n, k, C, H, W]
    action: np.ndarray  # [n, A] as drawn
    log_prob: np.ndarray  # [n]
    version: np.ndarray | int  # [n] interval of the parameters that drew it
    reward: Sequence[float]  # [n]
    terminated: Sequence[bool]  # [n]
    truncated: Sequence[bool]  # [n]
    next_obs: np.ndarray  # as obs


class Rollouts:
    """Typed view of the block; the supervisor creates it, executors and learner attach by descriptor."""

    def __init__(self, spec: RolloutSpec, fields: SharedArrays) -> None:
        self.spec, self.fields = spec, fields
        self.steps = fields["steps"]
        self._interval = fields["interval"]

    @classmethod
    def create(cls, spec: RolloutSpec) -> Rollouts:
        """Allocates empty storages.

        Raises:
            ResourceError: no room in shared memory.
        """
        return cls(spec, SharedArrays.create("spreeze-rollouts", spec.fields()))

    @classmethod
    def attach(cls, fd: int, spec: RolloutSpec) -> Rollouts:
        """Attaches to an inherited descriptor.

        Raises:
            TransportError: it holds something else.
        """
        return cls(spec, SharedArrays.attach(fd, spec.fields()))

    @property
    def fd(self) -> int:
        """The descriptor that children inherit."""
        return self.fields.block.fd

    @property
    def interval(self) -> int:
        """j: the interval that is being collected."""
        return int(self._interval[0])

    @property
    def full(self) -> bool:
        """True once every environment has taken its T steps of this interval."""
        is_full = int(self.steps.min()) >= self.spec.sync_interval * (self.interval + 1)
        self.fields.in_order()
        return is_full

    def episode_of(self, envs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each environment's current episode the step at which it began and its number, [n] each."""
        fields = self.fields
        next_start = fields["next_start"][envs]  # once: an executor may be about to change it
        begun = next_start <= self.steps[envs]
        start = np.where(begun, next_start, fields["start"][envs])
        return start, np.where(begun, fields["next_episode"][envs], fields["episode"][envs])

    def played(self, env: int) -> np.ndarray | None:
        """The actions [n, A] of an environment's current episode; None where they are too many to be kept."""
        start, _ = self.episode_of(np.array([env]))
        count = int(self.steps[env]) - int(start[0])
        return None if count > self.spec.log_steps else self.fields["log"][env, :count].copy()

    def last_obs(self, env: int) -> np.ndarray | None:
        """The observation that an environment's last row led to; None before its first row."""
        last = int(self.steps[env]) - 1
        if last < 0:
            return None
        interval, at = divmod(last, self.spec.sync_interval)
        obs: np.ndarray = self.fields["next_obs"][interval % 2, at, env]
        return obs

    def batch(self, interval: int) -> RolloutBatch:
        """Views of the storage of an interval; valid until the swap after the next."""
        side = {name: self.fields[name][interval % 2] for name in SIDE if name != "version"}
        return RolloutBatch(**side)

    def versions(self, interval: int) -> np.ndarray:
        """[T, N] interval of the parameters that drew each action."""
        versions: np.ndarray = self.fields["version"][interval % 2]
        return versions

    def mark(self) -> None:
        """Keeps where every episode stands for the swap that follows; the write side must be full."""
        fields, parity = self.fields, (self.interval + 1) % 2
        start, episode = self.episode_of(np.arange(self.spec.num_envs))
        for env, count in enumerate(np.minimum(self.steps - start, self.spec.log_steps).tolist()):
            fields["marked_log"][parity, env, :count] = fields["log"][env, :count]
        fields["marked_start"][parity], fields["marked_episode"][parity] = start, episode

    def swap(self) -> None:
        """The next interval begins: write and read side change places."""
        self.fields.in_order()
        self._interval[0] += 1

    def trajectories_sha256(self, interval: int) -> str:
        """Hash of everything collected in an interval."""
        digest = hashlib.sha256()
        for name in SIDE:
            digest.update(name.encode() + np.ascontiguousarray(self.fields[name][interval % 2]).data)
        return digest.hexdigest()

    def state_arrays(self, *, with_batch: bool) -> dict[str, np.ndarray]:
        """Copies of what a resume needs to begin this interval again: episodes, and the storage to learn from.

        Args: ``with_batch`` where the last interval has not been learned from yet.
        """
        fields, parity = self.fields, self.interval % 2
        start, episode = fields["marked_start"][parity], fields["marked_episode"][parity]
        longest = int(np.minimum(self.interval * self.spec.sync_interval - start, self.spec.log_steps).max())
        arrays = {"start": start, "episode": episode, "log": fields["marked_log"][parity, :, :longest]}
        if self.interval > 0:
            before = (self.interval - 1) % 2
            arrays["last_obs"] = fields["next_obs"][before, -1]
            arrays |= {f"side_{name}": fields[name][before] for name in SIDE if with_batch}
        return {name: array.copy() for name, array in arrays.items()}

    def restore(self, arrays: dict[str, np.ndarray], interval: int) -> None:
        """Takes over what ``state_arrays`` gave at the beginning of that interval; nobody else may be there yet.

        Raises:
            CheckpointError: it was saved with other sizes.
        """
        fields, count = self.fields, self.spec.num_envs
        side = {name: arrays.get(f"side_{name}") for name in SIDE}
        sizes = [array.shape == fields[name].shape[1:] for name, array in side.items() if array is not None]
        if len(arrays["start"]) != count or not all(sizes) or arrays["log"].shape[1] > self.spec.log_steps:
            raise CheckpointError(
                f"the checkpoint has {len(arrays['start'])} environments, now it is {count} (executors x "
                "envs_per_executor); and sync_interval must be as it was"
            )
        fields["log"][:, : arrays["log"].shape[1]] = arrays["log"]
        for name in ("start", "next_start"):
            fields[name][:] = arrays["start"]
        for name in ("episode", "next_episode"):
            fields[name][:] = arrays["episode"]
        for name, array in side.items():
            if array is not None:
                fields[name][(interval - 1) % 2] = array
        if "last_obs" in arrays:
            fields["next_obs"][(interval - 1) % 2, -1] = arrays["last_obs"]
        self.steps[:] = interval * self.spec.sync_interval
        self._interval[0] = interval - 1
        self.mark()
        self._interval[0] = interval

    def close(self) -> None:
        """Drops the views and the mapping."""
        del self.steps, self._interval
        self.fields.close()


_TO_COME = 2**62
"""An env step that no environment ever takes."""


class RolloutWriter:
    """Environments ``first`` to ``first + count - 1`` of all, here by their index from 0."""

    def __init__(self, rollouts: Rollouts, first: int, count: int) -> None:
        """Finds out where each of them is."""
        self._rollouts, self._first, self._count = rollouts, first, count
        self._mine = slice(first, first + count)
        self._steps, self._log = rollouts.steps, rollouts.fields["log"]
        self._sides = [rollouts.fields[name] for name in SIDE]
        self._interval_steps, self._log_steps = rollouts.spec.sync_interval, rollouts.spec.log_steps
        start, episode = rollouts.episode_of(np.arange(first, first + count))
        self.steps: list[int] = rollouts.steps[self._mine].tolist()
        """Env steps of each since the run began."""
        self.episode: list[int] = episode.tolist()
        """Number of each one's current episode."""
        self._start: list[int] = start.tolist()

    def open(self, *, step_synchronous: bool = False) -> list[int]:
        """Indices of those that may take a step: the interval is not full for them, and none of all is behind.

        Args: ``step_synchronous`` where those behind are waited for.
        """
        rollouts = self._rollouts
        end = self._interval_steps * (rollouts.interval + 1)
        if step_synchronous:
            end = min(end, int(self._steps.min()) + 1)
        return [index for index, steps in enumerate(self.steps) if steps < end]

    def question(self, index: int) -> int:
        """Number of the question about its next action: a new one after each step and each abandoned episode."""
        return self.steps[index] + self.episode[index] + 1

    def rows(self, indices: Sequence[int]) -> slice | np.ndarray:
        """Picks ``indices`` of an array over these environments; all of them as a slice, which takes less time."""
        return slice(0, self._count) if len(indices) == self._count else np.array(indices)

    def commit(self, indices: Sequence[int], rows: StepRows) -> None:
        """Stores one env step of each of ``indices`` [n], ascending."""
        steps, start, action = self.steps, self._start, rows.action
        envs, place = self._place(indices)
        for array, values in zip(self._sides, rows, strict=True):
            array[place] = values
        ended = []
        for row, index in enumerate(indices):
            played = steps[index] - start[index]
            if played < self._log_steps:
                self._log[self._first + index, played] = action[row]
            if rows.terminated[row] or rows.truncated[row]:
                ended.append(index)
                self._announce(index)
        self._rollouts.fields.in_order()
        self._steps[envs] += 1
        for index in indices:
            steps[index] += 1
        for index in ended:
            start[index] = steps[index]
            self.episode[index] += 1

    def _place(self, indices: Sequence[int]) -> tuple[slice | np.ndarray, tuple[Any, ...]]:
        """The environments' numbers, and where their next rows go."""
        first_step = self.steps[indices[0]]
        if len(indices) == self._count == self.steps.count(first_step):
            interval, at = divmod(first_step, self._interval_steps)
            return self._mine, (interval % 2, at, self._mine)
        envs = np.array(indices) + self._first
        intervals, ats = np.divmod(self._steps[envs], self._interval_steps)
        return envs, (intervals % 2, ats, envs)

    def _announce(self, index: int) -> None:
        """An episode will begin after the step at hand: in force as soon as ``steps`` has come to it."""
        fields, env = self._rollouts.fields, self._first + index
        fields["start"][env], fields["episode"][env] = self._start[index], self.episode[index]
        fields.in_order()
        fields["next_start"][env] = self.steps[index] + 1
        fields["next_episode"][env] = self.episode[index] + 1

    def abandon(self, index: int) -> None:
        """Gives the current episode up after its last row, which becomes its truncated end; the next one begins.

        A row of an earlier interval stays as it is: nothing is summed over an interval's end, and it may be in use.
        """
        fields, env, steps, start = self._rollouts.fields, self._first + index, self.steps[index], self._start[index]
        interval, at = divmod(steps, self._interval_steps)
        if start < steps and at > 0:
            # First: whoever is killed after it comes to the same error, or goes on with a row cut without need.
            fields["truncated"][interval % 2, at - 1, env] = True
        # All the time either pair of start and number is in force and whole: ``start`` while ``next_start`` is to come.
        fields["start"][env], fields["episode"][env] = start, self.episode[index]
        fields.in_order()
        fields["next_start"][env] = _TO_COME
        fields.in_order()
        fields["next_episode"][env] = self.episode[index] + 1
        fields.in_order()
        fields["next_start"][env] = steps
        self._start[index] = steps
        self.episode[index] += 1

    @property
    def filled(self) -> bool:
        """True while there is nothing left to step in this interval."""
        return min(self.steps) >= self._interval_steps * (self._rollouts.interval + 1)

    @property
    def last_of_step(self) -> bool:
        """True where all environments have come as far as these: who was ahead may go on."""
        return int(self._steps.min()) >= max(self.steps)

    def close(self) -> None:
        """Drops the views."""
        del self._steps, self._log, self._sides
