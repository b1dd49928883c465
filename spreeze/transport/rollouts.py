"""Rollouts in N slots of shared memory, the mailbox for their actions, and the state for restarts and resumes.

Samplers fill rollout j of T steps in slot j mod N, each environment its own column. ``steps`` counts the rows of each
environment since the run started and is stored last: the rows that it counts are complete, whichever process is killed.

*Paced* (HTS-RL, arXiv 2012.09849, section 3; N = 2, K = 1): all environments collect rollout ``current`` while the
learner reads the previous one in place. Only the learner raises ``current``, when that rollout is full and the previous
one is used up.

*Free running* (the circular buffer of IMPACT, arXiv 1912.00167, section 3.2): each sampler continues over its oldest
rollout, once that has had its ``least_uses``, and ``RolloutReader`` takes copies, each rollout up to K times. Rollout j
is complete once ``steps`` has reached (j + 1) T, and untouched until it reaches (j + N) T, which a reader checks again
after its copy. So N - 1 rollouts of a sampler can be read.

The actions of each environment's current episode are kept, so that it can be replayed. The start of an episode is
announced (``next_*``) before the row that ends the previous one is committed, so that one store decides. The state of a
policy with memory cannot be replayed: earlier steps had earlier parameters. So the one before each next step is kept
(``memory``), in the place of the step's parity, and that before each rollout (``state``), from which a learner computes
all others.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import CheckpointError, ConfigError
from spreeze.inference.policy import State
from spreeze.transport.shared_memory import ArraySpec, Handle, SharedArrays
from spreeze.transport.weights import VersionedParameters
from spreeze.types import Arrays, EnvSpec, Jsonable, RolloutBatch

MAX_LOGGED_STEPS = 32_768  # actions kept of one episode; a longer episode cannot be replayed
_MARKS = 2  # so that a learner killed while it marks rollout j + 1 leaves the mark of j intact
_USES_BASE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(Jsonable):
    """Sizes and use of the slots."""

    sync_interval: int  # T: env steps of each environment between two swaps
    num_envs: int  # N: all environments of all samplers
    obs_shape: tuple[int, ...]  # [O], or [k, C, H, W] of images
    obs_dtype: str  # uint8 of images, else float32
    action_dim: int
    log_steps: int  # L: actions kept of an episode
    num_slots: int = 2  # of which each sampler fills one
    max_uses: int = 1  # K: times that RolloutReader gives a rollout
    least_uses: int = 0  # an asynchronous sampler waits until its oldest rollout was given so often
    asynchronous: bool = False  # True if samplers wait for ``least_uses`` at most; else the learner paces them
    state_dim: int = 0  # S: values of the policy's state in an episode; 0 without memory

    def __post_init__(self) -> None:
        if self.num_slots < 2 or not 1 <= self.max_uses < _USES_BASE or not 0 <= self.least_uses <= self.max_uses:
            raise ConfigError(
                f"{self.num_slots} rollout slots with {self.max_uses} uses: at least 2 slots, one to "
                f"fill and one to read, 1 to {_USES_BASE - 1} uses, and at least {self.least_uses} uses"
            )

    @classmethod
    def of(cls, spec: EnvSpec, sync_interval: int, num_envs: int, state_dim: int = 0) -> RolloutSpec:
        """Two slots, paced, for an environment and a policy with ``state_dim`` values of memory."""
        frames = spec.frames
        return cls(
            sync_interval=sync_interval,
            num_envs=num_envs,
            obs_dtype="float32" if frames is None else "uint8",
            action_dim=spec.action_dim,
            obs_shape=(spec.obs_dim,) if frames is None else (frames.stack, *frames.shape),
            log_steps=min(spec.max_episode_steps or MAX_LOGGED_STEPS, MAX_LOGGED_STEPS),
            state_dim=state_dim,
        )

    @property
    def rows(self) -> int:
        """Rows of one rollout of all environments."""
        return self.sync_interval * self.num_envs

    @property
    def size_bytes(self) -> int:
        return SharedArrays.size_bytes(self.fields())

    def fields(self) -> tuple[ArraySpec, ...]:
        count, slots = self.num_envs, (self.num_slots, self.sync_interval, self.num_envs)
        log, obs = (count, self.log_steps, self.action_dim), (*slots, *self.obs_shape)
        counters = ("steps", "start", "episode", "next_start", "next_episode")
        return (
            ArraySpec("current", (1,), "int64"),
            ArraySpec("began", (3,), "int64"),
            *(ArraySpec(name, (count,), "int64") for name in counters),
            ArraySpec("log", log, "float32"),
            ArraySpec("marked_log", (_MARKS, *log), "float32"),
            *(ArraySpec(name, (_MARKS, count), "int64") for name in ("marked_start", "marked_episode")),
            *(ArraySpec(name, obs, self.obs_dtype) for name in ("obs", "next_obs")),
            ArraySpec("action", (*slots, self.action_dim), "float32"),
            *(ArraySpec(name, slots, "float32") for name in ("log_prob", "reward")),
            *(ArraySpec(name, slots, "uint8") for name in ("terminated", "truncated")),
            ArraySpec("version", slots, "int64"),
            ArraySpec("uses", (self.num_slots, count), "int64"),
            ArraySpec("given", (1,), "int64"),
            *(ArraySpec(name, (places, count, self.state_dim), "float32") for name, places in self._states),
        )

    @property
    def _states(self) -> tuple[tuple[str, int], ...]:
        """Names of the arrays of policies' states, and the places of each."""
        return (("state", self.num_slots), ("memory", 2), ("marked_memory", _MARKS)) if self.state_dim else ()


COLUMNS = ("obs", "action", "log_prob", "version", "reward", "terminated", "truncated", "next_obs")
"""The arrays of a slot, in the order of ``StepRows``."""


@dataclass(frozen=True, kw_only=True)
class RolloutsHandle(Handle):
    """Carries ``Rollouts``."""

    spec: RolloutSpec

    def attach(self) -> Rollouts:
        return Rollouts(self.spec, SharedArrays.attach(self.fds[0], self.spec.fields()))


class Rollouts:
    """Typed view of the block; the supervisor creates it, samplers and learner attach by descriptor."""

    def __init__(self, spec: RolloutSpec, fields: SharedArrays) -> None:
        self.spec, self.fields = spec, fields
        self.steps = fields["steps"]
        self._current, self._slots = fields["current"], spec.num_slots
        self._began = fields["began"]
        """The rollout that was restored, the run's env steps before it, and the first rollout whose rows are here."""

    @classmethod
    def create(cls, spec: RolloutSpec) -> Rollouts:
        return cls(
            spec, SharedArrays.create("spreeze-rollouts", spec.fields(), smaller="rollout.size or its environments")
        )

    @property
    def handle(self) -> RolloutsHandle:
        return RolloutsHandle(fds=(self.fields.fd,), spec=self.spec)

    @property
    def current(self) -> int:
        """j: the rollout that is being collected, if the learner paces it."""
        return int(self._current[0])

    @property
    def first(self) -> int:
        """The first rollout whose rows are here; those before it were learned from, or dropped by a resume."""
        return int(self._began[2])

    def env_steps_before(self, rollout: int) -> int:
        """Env steps of all rollouts before that one, since the run started, which may have had other sizes."""
        began, env_steps, _ = self._began.tolist()
        return int(env_steps + (rollout - began) * self.spec.rows)

    @property
    def full(self) -> bool:
        """True once every environment has taken its T steps of this rollout."""
        is_full = int(self.steps.min()) >= self.spec.sync_interval * (self.current + 1)
        self.fields.in_order()
        return is_full

    def episode_of(self, envs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first step and the number of each environment's current episode, [n] each."""
        fields = self.fields
        next_start = fields["next_start"][envs]  # read once: a sampler may change it
        begun = next_start <= self.steps[envs]
        start = np.where(begun, next_start, fields["start"][envs])
        return start, np.where(begun, fields["next_episode"][envs], fields["episode"][envs])

    def played(self, env: int) -> np.ndarray | None:
        """The actions [n, A] of an environment's current episode; None if there were too many to keep."""
        start, _ = self.episode_of(np.array([env]))
        count = int(self.steps[env]) - int(start[0])
        return None if count > self.spec.log_steps else self.fields["log"][env, :count].copy()

    def last_obs(self, env: int) -> np.ndarray | None:
        """``next_obs`` of an environment's last row; None before its first row."""
        last = int(self.steps[env]) - 1
        if last < 0:
            return None
        rollout, at = divmod(last, self.spec.sync_interval)
        return np.asarray(self.fields["next_obs"][rollout % self._slots, at, env])

    def memory_of(self, envs: np.ndarray) -> np.ndarray:
        """The policy's state [n, S] before the next step of ``envs`` [n]: zeros where an episode begins."""
        start, _ = self.episode_of(envs)
        steps = self.steps[envs]
        return np.where((start < steps)[:, None], self.fields["memory"][steps % 2, envs], np.float32(0.0))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all arrays of a slot."""
        return (*COLUMNS, "state") if self.spec.state_dim else COLUMNS

    def batch(self, rollout: int) -> RolloutBatch:
        """Views of a paced rollout; valid for the next N - 1 swaps after its own."""
        slot, names = rollout % self._slots, (name for name in self.columns if name != "version")
        return RolloutBatch(**{name: self.fields[name][slot] for name in names})

    def versions(self, rollout: int) -> np.ndarray:
        """[T, N] version of the parameters that drew each action."""
        return np.asarray(self.fields["version"][rollout % self._slots])

    def uses(self, rollout: int, first: int) -> int:
        """Uses so far of a rollout of the sampler that begins at ``first``; a count of another rollout is ignored."""
        of, uses = divmod(int(self.fields["uses"][rollout % self._slots, first]), _USES_BASE)
        return uses if of == rollout else 0

    def may_begin(self, rollout: int, first: int) -> bool:
        """True if the rollout that ``rollout`` leaves to be overwritten next has had its least uses."""
        oldest = rollout - self._slots + 1
        return oldest < 0 or self.uses(oldest, first) >= self.spec.least_uses

    def mark(self) -> None:
        """Saves the state of every episode for the following swap; the rollout must be full."""
        fields, mark = self.fields, (self.current + 1) % _MARKS
        start, episode = self.episode_of(np.arange(self.spec.num_envs))
        for env, count in enumerate(np.minimum(self.steps - start, self.spec.log_steps).tolist()):
            fields["marked_log"][mark, env, :count] = fields["log"][env, :count]
        fields["marked_start"][mark], fields["marked_episode"][mark] = start, episode
        if self.spec.state_dim:
            fields["marked_memory"][mark] = self.memory_of(np.arange(self.spec.num_envs))

    def swap(self) -> None:
        """Starts the next rollout, over the oldest one."""
        self.fields.in_order()
        self._current[0] += 1

    def state_arrays(self, *, with_batch: bool) -> dict[str, np.ndarray]:
        """Copies of the state for a resume; ``with_batch`` adds the previous rollout, if it is not learned from yet."""
        fields, mark = self.fields, self.current % _MARKS
        start, episode = fields["marked_start"][mark], fields["marked_episode"][mark]
        longest = int(np.minimum(self.current * self.spec.sync_interval - start, self.spec.log_steps).max())
        arrays = {"start": start, "episode": episode, "log": fields["marked_log"][mark, :, :longest]}
        arrays["sync_interval"] = np.array(self.spec.sync_interval)
        if self.current > 0:
            before, with_batch = (self.current - 1) % self._slots, with_batch and self.current > self.first
            arrays["last_obs"] = fields["next_obs"][before, -1]
            arrays |= {f"side_{name}": fields[name][before] for name in self.columns if with_batch}
        if self.spec.state_dim:
            arrays["memory"] = fields["marked_memory"][mark]
        return {name: array.copy() for name, array in arrays.items()}

    def restore(self, arrays: dict[str, np.ndarray], rollout: int, env_steps: int) -> bool:
        """Restores the result of ``state_arrays`` at the start of ``rollout``, ``env_steps`` into the run.

        False if it is of other sizes: all environments begin new episodes, and the rollout before is lost. A
        CheckpointError if the policy had another memory.
        """
        fields, spec = self.fields, self.spec
        if (dim := arrays["memory"].shape[1] if "memory" in arrays else 0) != spec.state_dim:
            raise CheckpointError(
                f"the checkpoint has {dim} values of a policy's memory, now it is {spec.state_dim}; "
                "use the same recurrent network"
            )
        side = {name: arrays[f"side_{name}"] for name in self.columns if f"side_{name}" in arrays}
        same_sizes = (int(arrays["sync_interval"]), len(arrays["start"])) == (spec.sync_interval, spec.num_envs)
        self.steps[:] = rollout * spec.sync_interval
        self._began[:] = rollout, env_steps, rollout - bool(same_sizes and side)
        if same_sizes:
            self._restore_episodes(arrays, side, rollout)
        else:
            for name, value in (("start", self.steps), ("episode", arrays["episode"].max() + 1)):
                fields[name][:] = fields[f"next_{name}"][:] = value
        self._current[0] = rollout - 1
        self.mark()
        self._current[0] = rollout
        return same_sizes

    def _restore_episodes(self, arrays: dict[str, np.ndarray], side: dict[str, np.ndarray], rollout: int) -> None:
        fields = self.fields
        fields["log"][:, : arrays["log"].shape[1]] = arrays["log"]
        for name in ("start", "episode"):
            fields[name][:] = fields[f"next_{name}"][:] = arrays[name]
        for name, array in side.items():
            fields[name][(rollout - 1) % self._slots] = array
        if "last_obs" in arrays:
            fields["next_obs"][(rollout - 1) % self._slots, -1] = arrays["last_obs"]
        if self.spec.state_dim:
            fields["memory"][(rollout * self.spec.sync_interval) % 2] = arrays["memory"]

    def close(self) -> None:
        del self.steps, self._current, self._began
        self.fields.close()


_TO_COME = 2**62  # an env step that no environment ever reaches
_LONG_AGO = 2**62


class StepRows(NamedTuple):
    """One env step of each of n environments, in the order of their numbers."""

    obs: np.ndarray  # [n, O] or [n, k, C, H, W]
    action: np.ndarray  # [n, A] as drawn
    log_prob: np.ndarray  # [n]
    version: np.ndarray | int  # [n] version of the parameters that drew the action
    reward: Sequence[float]  # [n]
    terminated: Sequence[bool]  # [n]
    truncated: Sequence[bool]  # [n]
    next_obs: np.ndarray  # as obs
    state: np.ndarray | None = None  # [n, S] the policy's before the step; None without memory
    next_state: np.ndarray | None = None  # [n, S] after it, whether or not the episode ended


class RolloutWriter:
    """Writes the steps of one sampler's environments ``first`` to ``first + count - 1``, indexed from 0 here.

    A step counts, complete, when ``commit`` returns, whichever process is killed. A restarted sampler continues after
    the last one that counts. A rollout that a reader may be using is never changed.
    """

    def __init__(self, rollouts: Rollouts, first: int, count: int) -> None:
        self._rollouts, self._spec, self._first, self._count = rollouts, rollouts.spec, first, count
        self._mine = slice(first, first + count)
        self._steps, self._log = rollouts.steps, rollouts.fields["log"]
        self._arrays = [rollouts.fields[name] for name in COLUMNS]
        self._states = (rollouts.fields["state"], rollouts.fields["memory"]) if rollouts.spec.state_dim else None
        self._rollout_steps = rollouts.spec.sync_interval
        start, episode = rollouts.episode_of(np.arange(first, first + count))
        self.steps: list[int] = rollouts.steps[self._mine].tolist()
        self.episode: list[int] = episode.tolist()
        self._start: list[int] = start.tolist()

    @property
    def _end(self) -> int:
        """Env steps that each may reach now; if free running, no environment gets a rollout ahead of the others."""
        if not self._spec.asynchronous:
            return self._rollout_steps * (self._rollouts.current + 1)
        rollout, begun = divmod(max(self.steps), self._rollout_steps)
        if begun or max(self.steps) > min(self.steps):
            return self._rollout_steps * (min(self.steps) // self._rollout_steps + 1)
        self._rollouts.fields.in_order()  # readers see that this rollout began before its rows cover older ones
        # The oldest rollout that can be read is written over after this one. There is no deadlock: while it waits
        # for uses, the reader can take it.
        return self._rollout_steps * (rollout + self._rollouts.may_begin(rollout, self._first))

    def may_step(self, *, step_synchronous: bool = False) -> list[int]:
        """Indices of those that may take a step; ``step_synchronous``: none gets a step ahead of any environment."""
        end = self._end
        if step_synchronous:
            end = min(end, int(self._steps.min()) + 1)
        return [index for index, steps in enumerate(self.steps) if steps < end]

    def request_id(self, index: int) -> int:
        """Number of the request for the next action; a new one after each step and each abandoned episode."""
        return self.steps[index] + self.episode[index] + 1

    def rows(self, indices: Sequence[int]) -> slice | np.ndarray:
        """An index that selects ``indices`` from an array over these environments; a slice for all, which is faster."""
        return slice(0, self._count) if len(indices) == self._count else np.array(indices)

    def commit(self, indices: Sequence[int], rows: StepRows) -> None:
        """Stores one env step of each of ``indices`` [n], ascending."""
        steps, start, action, log_steps = self.steps, self._start, rows.action, self._spec.log_steps
        envs, at_rows = self._index_of(indices)
        for array, values in zip(self._arrays, rows, strict=False):
            array[at_rows] = values
        if self._states is not None:
            self._keep_states(indices, rows.state, rows.next_state)
        ended = []
        for row, index in enumerate(indices):
            played = steps[index] - start[index]
            if played < log_steps:
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

    def _keep_states(self, indices: Sequence[int], before: np.ndarray | None, following: np.ndarray | None) -> None:
        """Keeps the policy's state [n, S] before a rollout's first step, and that before the next step."""
        assert self._states is not None
        assert before is not None
        state, memory = self._states
        envs = np.array(indices) + self._first
        steps = self._steps[envs]
        memory[(steps + 1) % 2, envs] = following
        rollouts, ats = np.divmod(steps, self._rollout_steps)
        if not ats.all():
            begins = ats == 0
            state[rollouts[begins] % self._spec.num_slots, envs[begins]] = before[begins]

    def _index_of(self, indices: Sequence[int]) -> tuple[slice | np.ndarray, tuple[Any, ...]]:
        """The environments' numbers, and the index of their next rows in a slot's arrays."""
        first_step = self.steps[indices[0]]
        if len(indices) == self._count == self.steps.count(first_step):
            rollout, at = divmod(first_step, self._rollout_steps)
            return self._mine, (rollout % self._spec.num_slots, at, self._mine)
        envs = np.array(indices) + self._first
        rollouts, ats = np.divmod(self._steps[envs], self._rollout_steps)
        return envs, (rollouts % self._spec.num_slots, ats, envs)

    def _announce(self, index: int) -> None:
        """Announces that an episode starts after the current step; takes effect once ``steps`` has reached it."""
        fields, env = self._rollouts.fields, self._first + index
        fields["start"][env], fields["episode"][env] = self._start[index], self.episode[index]
        fields.in_order()
        fields["next_start"][env] = self.steps[index] + 1
        fields["next_episode"][env] = self.episode[index] + 1

    def abandon(self, index: int) -> None:
        """Truncates the current episode after its last row and starts the next one.

        A row of an earlier rollout stays: it may be in use, and nothing is summed over a rollout's end.
        """
        fields, env, steps, start = self._rollouts.fields, self._first + index, self.steps[index], self._start[index]
        rollout, at = divmod(steps, self._rollout_steps)
        if start < steps and at > 0:
            # First: if killed after this, the successor meets the same error or continues after a needless truncation.
            fields["truncated"][rollout % self._spec.num_slots, at - 1, env] = True
        # One pair of start and number is always valid: ``start`` and ``episode`` while ``next_start`` is in the future.
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
        """True if the last step completed a rollout of all these environments."""
        lowest = min(self.steps)
        if self._spec.asynchronous:
            return 0 < lowest == max(self.steps) and lowest % self._rollout_steps == 0
        return lowest >= self._end

    @property
    def last_of_step(self) -> bool:
        """True if no environment of any sampler is behind these."""
        return int(self._steps.min()) >= max(self.steps)

    def close(self) -> None:
        del self._steps, self._log, self._arrays, self._states


class RolloutCopy(NamedTuple):
    """A copy of a rollout."""

    writer: int  # number of the sampler that filled it
    rollout: int  # j, counted by that sampler
    use: int  # 1 to K
    version: int  # of the oldest policy in it
    versions: np.ndarray  # [T, M]
    batch: RolloutBatch | None  # None for a ``known`` rollout


class RolloutReader:
    """Gives copies of complete rollouts, each at most K times, whichever process is killed; the only reader.

    It cycles through the rollouts, new ones first. A rollout is dropped after K uses, or when its writer needs the
    slot. Uses are counted in shared memory before a copy: a killed reader may lose a use but never adds one.
    """

    def __init__(self, rollouts: Rollouts, envs_per_writer: int, *, cycles: bool = False) -> None:
        """``cycles``: a rollout is given again only after all others that are stored, as in an epoch of PPO.

        Then ``take`` returns None until the next rollout is complete, unless a sampler waits for uses; rollouts of a
        sampler that is dead, at rest or far slower count only until they are used up. If false, one rollout is given
        again until it is used up, where samplers are slower.
        """
        spec = rollouts.spec
        if envs_per_writer < 1 or spec.num_envs % envs_per_writer:
            raise ConfigError(f"{spec.num_envs} environments are not samplers of {envs_per_writer} each")
        self._rollouts, self._cycles = rollouts, cycles
        self._columns = [slice(first, first + envs_per_writer) for first in range(0, spec.num_envs, envs_per_writer)]
        self._takes, self._taken_at = 0, dict[tuple[int, int], int]()
        self._exhausted_at = -1  # Complete rollouts when there was none to give.
        self._seen_ends = np.zeros(len(self._columns), np.int64)  # ``_ends`` at the last ``take``.
        self._ended_at = np.zeros(len(self._columns), np.int64)
        """Complete rollouts of all samplers when the latest of each was seen."""
        self._gaps = np.zeros(len(self._columns))
        """Rollouts that all samplers completed for one of each, when the latest of it was seen."""

    @property
    def readable(self) -> set[tuple[int, int]]:
        """Sampler and number of each rollout that is complete and not overwritten."""
        return {key for key, _ in self._readable()}

    @property
    def dropped(self) -> int:
        """Rollouts that were written over before they were given once, even without a reader."""
        unused = sum(uses == 0 for _, uses in self._readable())
        return max(0, int(self._ends.sum()) - unused - int(self._rollouts.fields["given"][0]))

    @property
    def _ends(self) -> np.ndarray:
        """Complete rollouts of each sampler so far, [samplers]."""
        return np.asarray(self._steps.min(1) // self._rollouts.spec.sync_interval)

    @property
    def _steps(self) -> np.ndarray:
        """Env steps of each sampler's environments, [samplers, M]."""
        return self._rollouts.steps.reshape(len(self._columns), -1)

    def take(self, known: Container[tuple[int, int]] = ()) -> RolloutCopy | None:
        """Takes a rollout that was never given, the oldest first, or else the one given longest ago; None without one.

        Of rollouts (writer, j) that are ``known`` nothing but the versions is copied.
        """
        spec, fields = self._rollouts.spec, self._rollouts.fields
        ends = self._ends
        complete = int(ends.sum())
        if complete == self._exhausted_at:  # a waiting reader calls this thousands of times a second
            return None
        self._note_pace(ends, complete)
        for _ in range(len(self._columns) * spec.num_slots):
            readable = self._readable()
            chosen = self._next(readable)
            if chosen is None:
                self._exhausted_at = complete
                break
            (writer, rollout), uses = chosen
            slot, columns = rollout % spec.num_slots, self._columns[writer]
            fields["uses"][slot, columns.start] = rollout * _USES_BASE + uses + 1
            fields.in_order()
            names = ("version",) if chosen.key in known else self._rollouts.columns
            copies = {
                name: (fields[name][slot, columns] if name == "state" else fields[name][slot, :, columns]).copy()
                for name in names
            }
            fields.in_order()
            if rollout >= self._first_intact()[writer]:
                self._takes += 1
                if uses == 0:
                    fields["given"][0] += 1
                    stored = {key for key, _ in readable}
                    self._taken_at = {key: at for key, at in self._taken_at.items() if key in stored}
                self._taken_at[chosen.key] = self._takes
                versions = copies.pop("version")
                return RolloutCopy(
                    writer, rollout, uses + 1, int(versions.min()), versions, RolloutBatch(**copies) if copies else None
                )
        return None

    def _note_pace(self, ends: np.ndarray, complete: int) -> None:
        more = ends - self._seen_ends
        moved = more > 0
        self._gaps[moved] = (complete - self._ended_at[moved]) / more[moved]
        self._ended_at[moved] = complete
        self._seen_ends = ends

    def _next(self, readable: list[_Readable]) -> _Readable | None:
        """The rollout whose turn it is: a new one, of these the oldest, or the one that was given longest ago."""
        spec, versions = self._rollouts.spec, self._rollouts.fields["version"]
        if new := [entry for entry in readable if entry.uses == 0]:
            first, slots = [column.start for column in self._columns], spec.num_slots
            return min(
                new, key=lambda entry: (versions[entry.key[1] % slots, 0, first[entry.key[0]]], *entry.key[::-1])
            )
        # Rollouts that only an earlier reader has given come first.
        left = [entry for entry in readable if entry.uses < spec.max_uses]
        turns = [(self._taken_at.get(entry.key, entry.uses - _LONG_AGO), entry) for entry in left]
        if not turns:
            return None
        taken_at, chosen = min(turns)
        return None if self._cycles and self._is_early(taken_at, readable) and not self._sampler_waits() else chosen

    def _is_early(self, taken_at: int, readable: list[_Readable]) -> bool:
        """True if fewer were given since then than others are stored, without used-up ones of slow samplers."""
        # At equal speed each sampler completes one in as many rollouts as there are samplers.
        pace = np.maximum(self._gaps, self._ended_at.max() - self._ended_at)
        keeps_up: list[bool] = (pace < 2 * len(self._columns)).tolist()
        max_uses = self._rollouts.spec.max_uses
        others = sum([entry.uses < max_uses or keeps_up[entry.key[0]] for entry in readable]) - 1
        return self._takes - taken_at < others

    def _readable(self) -> list[_Readable]:
        """Every rollout that is complete and not overwritten."""
        spec, fields = self._rollouts.spec, self._rollouts.fields
        ends = self._ends.tolist()
        fields.in_order()
        uses = fields["uses"][:, :: self._columns[0].stop].T.tolist()
        fields.in_order()
        readable = []
        for writer, (first, end) in enumerate(zip(self._first_intact(), ends, strict=True)):
            for rollout in range(max(0, first), end):
                of, used = divmod(uses[writer][rollout % spec.num_slots], _USES_BASE)
                readable.append(_Readable((writer, rollout), used if of == rollout else 0))
        return readable

    def _first_intact(self) -> list[int]:
        """First rollout of each sampler over which it cannot have begun another one."""
        spec = self._rollouts.spec
        if not spec.asynchronous:
            return [self._rollouts.current - spec.num_slots + 1] * len(self._columns)
        return [steps // spec.sync_interval - spec.num_slots + 1 for steps in self._steps.max(1).tolist()]

    def _sampler_waits(self) -> bool:
        """True if a sampler waits until its oldest rollout has been given more often."""
        interval = self._rollouts.spec.sync_interval
        return any(
            steps % interval == 0 and not self._rollouts.may_begin(steps // interval, columns.start)
            for columns, steps in zip(self._columns, self._steps.max(1).tolist(), strict=True)
        )


class _Readable(NamedTuple):
    key: tuple[int, int]  # (writer, rollout)
    uses: int


class Responses(NamedTuple):
    """Actions that inference workers chose for n environments."""

    action: np.ndarray  # [n, A]
    log_prob: np.ndarray  # [n]
    version: np.ndarray | int  # [n] of the parameters
    state: State = ()  # [n, S] for the next step; empty without memory

    def of(self, rows: list[int]) -> Responses:
        version = self.version if isinstance(self.version, int) else self.version[rows]
        return Responses(self.action[rows], self.log_prob[rows], version, tuple(part[rows] for part in self.state))


@dataclass(frozen=True, kw_only=True)
class MailboxHandle(Handle):
    """Carries an ``InferenceMailbox``."""

    spec: RolloutSpec

    def attach(self) -> InferenceMailbox:
        return InferenceMailbox(self.spec, SharedArrays.attach(self.fds[0], InferenceMailbox.fields(self.spec)))


_MAIL_STATES = ("state", "next_state")


class InferenceMailbox:
    """State and action buffers between rollout samplers and inference workers, one slot per environment.

    A sampler writes observation, noise and any policy state, then the request's id; an inference worker writes the
    response, with the next state, then the same id into ``answered`` (HTS-RL, section 3). If one is killed in between,
    the request stays open and the restarted worker gives the same response.
    """

    def __init__(self, spec: RolloutSpec, fields: SharedArrays) -> None:
        self._spec, self._fields = spec, fields
        self.requested, self.answered = fields["requested"], fields["answered"]
        self.obs, self.noise = fields["obs"], fields["noise"]

    @staticmethod
    def fields(spec: RolloutSpec) -> tuple[ArraySpec, ...]:
        count = spec.num_envs
        return (
            *(ArraySpec(name, (count,), "int64") for name in ("requested", "answered", "version")),
            ArraySpec("obs", (count, *spec.obs_shape), spec.obs_dtype),
            ArraySpec("noise", (count, spec.action_dim), "float32"),
            ArraySpec("action", (count, spec.action_dim), "float32"),
            ArraySpec("log_prob", (count,), "float32"),
            *(ArraySpec(name, (count, spec.state_dim), "float32") for name in _MAIL_STATES if spec.state_dim),
        )

    @classmethod
    def create(cls, spec: RolloutSpec) -> InferenceMailbox:
        return cls(spec, SharedArrays.create("spreeze-mailbox", cls.fields(spec)))

    @property
    def handle(self) -> MailboxHandle:
        return MailboxHandle(fds=(self._fields.fd,), spec=self._spec)

    def request(self, envs: np.ndarray, obs: np.ndarray, noise: np.ndarray, state: State, ids: np.ndarray) -> None:
        """Requests actions for ``envs`` [n]; the ``ids`` [n] come from ``RolloutWriter.request_id``, all different."""
        self.obs[envs], self.noise[envs] = obs, noise
        if state:
            self._fields["state"][envs] = state[0]
        self._fields.in_order()
        self.requested[envs] = ids

    def pending(self, envs: slice) -> np.ndarray:
        """Returns those of ``envs`` (a slice with a start) with an open request."""
        waiting = np.flatnonzero(self.requested[envs] != self.answered[envs])
        self._fields.in_order()
        return np.asarray(waiting * (envs.step or 1) + envs.start)

    def state_of(self, envs: np.ndarray) -> State:
        """Returns a copy of the policy states in the requests of ``envs`` [n]; empty without memory."""
        return (self._fields["state"][envs],) if self._spec.state_dim else ()

    def respond(self, envs: np.ndarray, responses: Responses) -> None:
        """Answers the requests of ``envs`` [n]; only their inference worker may call this."""
        fields = self._fields
        fields["action"][envs], fields["log_prob"][envs] = responses.action, responses.log_prob
        fields["version"][envs] = responses.version
        if responses.state:
            fields["next_state"][envs] = responses.state[0]
        fields.in_order()
        self.answered[envs] = self.requested[envs]

    def responses(self, envs: np.ndarray) -> Responses:
        """Copies of the responses to ``envs`` [n], which must exist."""
        fields = self._fields
        fields.in_order()
        state = (fields["next_state"][envs],) if self._spec.state_dim else ()
        return Responses(fields["action"][envs], fields["log_prob"][envs], fields["version"][envs], state)

    def close(self) -> None:
        del self.requested, self.answered, self.obs, self.noise
        self._fields.close()


ROLLOUTS, LEARNER = "rollouts/", "learner/"  # prefixes of the names of a checkpoint's tensors


class LearnerMemory(NamedTuple):
    """Memory of an on-policy run that outlives its learner."""

    policies: VersionedParameters  # theta(j) and theta(j + 1) for the inference workers
    states: VersionedParameters  # the learner's whole state at the start of rollouts j and j + 1


def restore_rollouts(tensors: Arrays, state: dict[str, Any], rollouts: Rollouts, memory: LearnerMemory) -> bool:
    """Restores a checkpoint into shared memory, before any sampler or learner has started.

    False if it had another number of environments, or rollouts of another length: then they begin new episodes. Raises
    a CheckpointError if the policy had another memory, a KeyError if it is not that of an on-policy run.
    """

    def part(name: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(name): array for key, array in tensors.items() if key.startswith(name)}

    current = int(state["interval"])
    restored = rollouts.restore(part(ROLLOUTS), current, int(state["collected_env_steps"]))
    memory.states.publish(part(LEARNER), state["learner"], 0, current)
    return restored
