"""Data types that all packages share.

Shapes in all docstrings: B batch, T time, N environments stepped together, O observation size, A action size,
K number of discrete actions, W row width. Actions that are choices are stored as A float32 components, each the index
0 .. n-1 of one choice; a Discrete space has one. Those of Dict and Tuple spaces are one row: the numbers of all boxes,
then the indices of all choices. Torch is not imported here, because samplers never load it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

Arrays = dict[str, np.ndarray]  # arrays by name, such as the weights of a policy


@dataclass(frozen=True, kw_only=True)
class PictureSpec:
    """Layout of an environment's image in its observations."""

    path: tuple[str | int, ...]  # keys of the nested observation that lead to it; empty where it is the observation
    shape: tuple[int, ...]  # its own shape
    order: tuple[int, ...]  # its axes as [..., H, W]: those before are channels, or frames and their channels
    bounds: tuple[float, float] = (0.0, 255.0)  # the values that become bytes 0 and 255

    @property
    def rgb(self) -> bool:
        """True if the axis beside height and width is red, green and blue."""
        return len(self.order) > 2 and self.shape[self.order[-3]] == 3

    @property
    def channels(self) -> int:
        """Planes of height and width."""
        return math.prod(self.shape[axis] for axis in self.order[:-2])


@dataclass(frozen=True, kw_only=True)
class FrameSpec:
    """The frames of a task whose observations have images; each step gives one frame.

    A single image is a frame [C, H, W]. Several, or an image beside numbers, make a frame [F] of bytes: the images one
    after the other, then V float32 numbers. Policies take the images of the last k frames and the newest numbers.
    """

    channels: int  # C: 1 grey, 3 red, green and blue; any other number as the environment has them
    height: int  # H, in pixels
    width: int  # W, in pixels
    stack: int  # k: frames in one observation
    sign_rewards: bool  # True if replay stores only the sign of each reward
    options: dict[str, Any]  # values of the ``image`` settings, from which the same environment can be made again
    source: PictureSpec | None = field(default=None, compare=False)
    """The picture that is shrunk; None with Atari, whose screen is read, and in files of earlier versions."""
    more: tuple[PictureSpec, ...] = ()
    """The other pictures of an observation, which become images of the same height and width."""
    vector_dim: int = 0  # V: numbers beside the images
    as_asked: bool = True
    """False where the environment's space alone says which parts are pictures, without ``env.image = true``."""

    @property
    def images(self) -> tuple[tuple[int, int, int], ...]:
        """[C, H, W] of each image of a frame."""
        planes = (part.channels // (3 if part.rgb and self.options["grey"] else 1) for part in self.more)
        return tuple((channels, self.height, self.width) for channels in (self.channels, *planes))

    @property
    def is_single(self) -> bool:
        """True if a frame is one image and nothing else."""
        return not self.more and not self.vector_dim

    @property
    def shape(self) -> tuple[int, ...]:
        """[C, H, W] of a single image, else [F]."""
        return self.images[0] if self.is_single else (self.frame_bytes,)

    @property
    def frame_bytes(self) -> int:
        """F: bytes of one frame."""
        return sum(map(math.prod, self.images)) + 4 * self.vector_dim

    def numbers(self, obs: np.ndarray) -> np.ndarray:
        """A copy of the newest numbers, float32 [N, V], of observations uint8 [N, k, ...]."""
        newest = obs[:, -1].reshape(len(obs), -1)
        return np.ascontiguousarray(newest[:, self.frame_bytes - 4 * self.vector_dim :]).view(np.float32)


@dataclass(frozen=True)
class Box:
    """Actions that are vectors of real numbers; policies give them in [-1, 1]."""

    low: tuple[float, ...]  # lower bound of each component, in the environment's unit
    high: tuple[float, ...]  # upper bound of each component, in the environment's unit
    shape: tuple[int, ...] | None = None
    """The environment's own shape of an action; None in files that do not record it."""

    @property
    def dim(self) -> int:
        """A: number of components."""
        return len(self.low)

    def float32_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds [A]; a float64 bound that float32 cannot represent is rounded inwards, to a valid action."""
        exact_low, exact_high = np.array(self.low), np.array(self.high)
        low, high = exact_low.astype(np.float32), exact_high.astype(np.float32)
        return (
            np.where(low < exact_low, np.nextafter(low, np.float32(np.inf)), low),
            np.where(high > exact_high, np.nextafter(high, np.float32(-np.inf)), high),
        )

    def half_and_middle(self) -> tuple[np.ndarray, np.ndarray]:
        """Half the range and the middle [A] of the bounds: an action in [-1, 1] times one plus the other."""
        low, high = self.float32_bounds()
        half = (high - low) * np.float32(0.5)
        return half, low + half


@dataclass(frozen=True)
class Choices:
    """Actions that are one or several choices among numbered options.

    A Discrete space is one choice, a MultiDiscrete space several, a MultiBinary space several of two options, a team
    one choice an agent. Policies give the index of each, 0 .. n - 1.
    """

    nvec: tuple[int, ...]  # number of options of each choice
    start: tuple[int, ...] = ()  # the environment's number for option 0 of each choice; given empty: zeros
    shape: tuple[int, ...] = ()  # the environment's own shape of an action; empty where it is a single number

    def __post_init__(self) -> None:
        if not self.start:
            object.__setattr__(self, "start", (0,) * len(self.nvec))

    @property
    def dim(self) -> int:
        """A: number of choices."""
        return len(self.nvec)

    @property
    def options(self) -> int:
        """K: options of all choices together, as many as a policy has logits and a mask has flags."""
        return sum(self.nvec)

    @property
    def low(self) -> tuple[int, ...]:
        """The environment's lowest number of each choice."""
        return self.start

    @property
    def high(self) -> tuple[int, ...]:
        """The environment's highest number of each choice."""
        return tuple(first + count - 1 for first, count in zip(self.start, self.nvec, strict=True))

    @functools.cached_property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the options of each choice among all K."""
        ends = np.cumsum(self.nvec).tolist()
        return tuple(slice(end - count, end) for end, count in zip(ends, self.nvec, strict=True))

    def to_env(self, index: np.ndarray) -> np.ndarray:
        """The environment's own numbers, int64 [..., *shape], of indices [..., A]."""
        return (index.astype(np.int64) + self.start).reshape((*index.shape[:-1], *self.shape))[()]


@dataclass(frozen=True)
class Mixed:
    """Actions of numbers and choices; policies give ``numbers in [-1, 1] | indices``."""

    box: Box
    choice: Choices

    @property
    def shape(self) -> None:
        """None: ``EnvSpec.action_parts`` have shapes."""

    @property
    def dim(self) -> int:
        """A: number of components."""
        return self.box.dim + self.choice.dim

    @property
    def low(self) -> tuple[float, ...]:
        """Lower bounds of the box and the environment's lowest number of each choice."""
        return self.box.low + self.choice.low

    @property
    def high(self) -> tuple[float, ...]:
        """Upper bounds of the box and the environment's highest number of each choice."""
        return self.box.high + self.choice.high


ActionSpec = Box | Choices | Mixed


Converter = Callable[[np.ndarray], Any]


@dataclass(frozen=True, kw_only=True)
class ActionPart:
    """A Box, Discrete, MultiDiscrete or MultiBinary within a Dict or Tuple."""

    path: tuple[str | int, ...]  # keys that lead to it; within a Tuple, its index
    begin: int  # its first column in the flat action
    shape: tuple[int, ...]  # the environment's own shape of it
    dtype: str
    start: tuple[int, ...] | None = None  # the environment's number for option 0 of each choice; None of a Box

    @property
    def columns(self) -> slice:
        return slice(self.begin, self.begin + math.prod(self.shape))

    def form(self) -> Converter:
        """A function from actions [..., A], as of ``EnvSpec.form``, to this part of them, [..., *shape]."""
        columns, shape, dtype = self.columns, self.shape, np.dtype(self.dtype)
        if self.start is None:
            return lambda rows: rows[..., columns].reshape((*rows.shape[:-1], *shape)).astype(dtype)
        start = np.array(self.start, np.int64)

        def numbers(rows: np.ndarray) -> Any:
            return (rows[..., columns].astype(np.int64) + start).reshape((*rows.shape[:-1], *shape)).astype(dtype)

        if shape:
            return numbers
        kind, first = dtype.type, self.start[0]
        return lambda rows: kind(int(rows[self.begin]) + first) if rows.ndim == 1 else numbers(rows)


@dataclass(frozen=True, kw_only=True)
class TeamSpec:
    """The agents of a task that several solve together; n is their number.

    The flat observation of such a task is ``obs of agent 0 | ... | obs of agent n - 1 | state``, its action one index
    an agent (A = n), its reward the sum of all agents' rewards.
    """

    actions: tuple[int, ...]  # number of discrete actions of each agent; K of the task is the largest
    obs_dim: int  # length of one agent's observation; shorter ones end in zeros
    state_dim: int
    """Length of the state of the whole, which only the learner's mixer reads; 0: it reads all observations instead."""

    @property
    def size(self) -> int:
        """n: number of agents."""
        return len(self.actions)


@dataclass(frozen=True, kw_only=True)
class GoalSpec:
    """The two goals in the observation of a goal task (Plappert et al. 2018, arXiv 1802.09464)."""

    achieved: tuple[int, int]  # first and end column of ``achieved_goal`` in the flat observation
    desired: tuple[int, int]  # first and end column of ``desired_goal``; as many as those of ``achieved``
    computes_reward: bool  # True if the environment has ``compute_reward``
    sparse: bool = False  # True if that gave at most two rewards: one at the goal, one elsewhere


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Static facts about an environment."""

    env_id: str  # Gymnasium id without module prefix, for example ``Walker2DBulletEnv-v0``
    import_module: str | None  # module to import before ``gymnasium.make``, so that a child process knows the id
    obs_dim: int
    """O: length of the flat float32 observation; where ``action_mask`` is true its last K values are the mask."""
    action: ActionSpec  # the action space as one row: a box, one or several choices, or both
    max_episode_steps: int | None  # env steps after which the environment truncates an episode; None if it never does
    reward_threshold: float | None  # episode return at which the task counts as solved; None if not stated
    plain: bool = False  # use the original Bullet task instead of the equivalent fast one
    args: tuple[str, ...] = ()  # ``key=value`` texts for the environment's constructor, as ``--env-arg`` takes them
    obs_layout: tuple[str, ...] = ()
    """Columns of each part of a nested observation in the flat one; empty for a single Box."""
    obs_shape: tuple[int, ...] | None = None
    """The environment's own shape of a single Box, before it is made flat; None for other observations."""
    frames: FrameSpec | None = None
    """Frames of a task with images: each step gives one, uint8; an observation is the last k. None: vectors."""
    action_mask: bool = False  # True if ``info["action_mask"]`` marks at each step which of the K options are allowed
    team: TeamSpec | None = None  # the agents where several act at once; None: a single one
    action_parts: tuple[ActionPart, ...] = ()  # the parts of a Dict or Tuple action; empty for other spaces
    goals: GoalSpec | None = None
    """The goals of a task whose observation is a Dict of ``observation``, ``achieved_goal`` and ``desired_goal``."""

    @property
    def action_dim(self) -> int:
        """A: length of the flat action vector."""
        return self.action.dim

    @property
    def box(self) -> Box | None:
        """The numbers of an action; None where there are only choices."""
        if isinstance(self.action, Mixed):
            return self.action.box
        return self.action if isinstance(self.action, Box) else None

    @property
    def choices(self) -> Choices | None:
        """The choices of an action; None where it is a Box."""
        if isinstance(self.action, Mixed):
            return self.action.choice
        return self.action if isinstance(self.action, Choices) else None

    def form(self) -> Converter:
        """A function from a row [A] to the action that ``env.step`` takes; for rows [N, A], each part is [N, ...].

        The rows are numbers in the environment's unit and indices of choices.
        """
        if self.action_parts:
            return nested([(part.path, part.form()) for part in self.action_parts])
        if isinstance(self.action, Choices):
            return self.action.to_env
        shape = (-1,) if self.action.shape is None else self.action.shape
        return lambda rows: rows.reshape((*rows.shape[:-1], *shape))

    @property
    def mask_dim(self) -> int:
        """Values at the end of an observation that are the action mask: K, or 0 without masks."""
        return self.choices.options if self.action_mask and self.choices is not None else 0

    @property
    def vector_dim(self) -> int:
        """V: numbers of an observation, which a normalizer scales: O, or those beside images."""
        return self.obs_dim if self.frames is None else self.frames.vector_dim

    def masks(self, obs: np.ndarray) -> np.ndarray:
        """The action masks float32 [N, K] at the end of observations, or of rows of numbers [N, ...]."""
        return (obs if self.frames is None or obs.ndim == 2 else self.frames.numbers(obs))[:, -self.mask_dim :]

    @property
    def parts(self) -> tuple[str, ...]:
        """``obs_layout`` without the mask, which is its last entry; empty where the rest is a single Box."""
        parts = self.obs_layout[: len(self.obs_layout) - self.action_mask]
        return () if parts == (f"0:{self.obs_dim - self.mask_dim} observation (Box)",) else parts


def nested(parts: list[tuple[tuple[str | int, ...], Callable[[Any], Any]]]) -> Callable[[Any], Any]:
    """Combines the functions at all paths into one that returns a nested dictionary or tuple of their results."""
    if not parts[0][0]:
        return parts[0][1]
    groups: dict[str | int, list[tuple[tuple[str | int, ...], Callable[[Any], Any]]]] = {}
    for (key, *rest), make in parts:
        groups.setdefault(key, []).append((tuple(rest), make))
    makers = {key: nested(group) for key, group in groups.items()}
    if isinstance(parts[0][0][0], int):
        ordered = [makers[index] for index in range(len(makers))]
        return lambda rows: tuple([make(rows) for make in ordered])
    return lambda rows: {key: make(rows) for key, make in makers.items()}


class TransitionBatch(NamedTuple):
    """B transitions; arrays or tensors, all float32. Columns may be strided views of one row block."""

    obs: Any  # [B, O]
    action: Any  # [B, A], in [-1, 1]; indices of choices
    obs_action: Any  # [B, O + A]: adjacent columns of a row, so no copy
    reward: Any  # [B]: sum of gamma^i r_i over the n steps of the transition
    terminated: Any  # [B]: 1.0 where the MDP ended; a truncated transition has 0.0
    discount: Any  # [B] or float: gamma^k for a transition over k env steps
    next_obs: Any  # [B, O]: at the end of an episode its true last observation
    weight: Any = None  # [B]: factor of each row's loss; None: 1
    target_obs: Any = None  # [B, O]: input of the target networks; None: ``next_obs``

    @property
    def target_net_obs(self) -> Any:
        """The observations [B, O] at which target networks are evaluated."""
        return self.next_obs if self.target_obs is None else self.target_obs


class SequenceBatch(NamedTuple):
    """B sequences of M slots, arrays or tensors, all float32: the first b are burn-in, the other T are trained on.

    A slot is one env step, or, where an episode was cut off, its last observation. Episodes follow one another.
    """

    obs: Any  # [B, M + 1, O]; the last one follows the last slot
    action: Any  # [B, M, A], as of ``TransitionBatch``; zeros in slots without a step
    reward: Any  # [B, M]
    terminated: Any  # [B, M]: 1.0 where the MDP ended
    valid: Any  # [B, M]: 1.0 where the slot is an env step
    begins: Any  # [B, M]: 1.0 where an episode begins
    state: Any  # [B, S]: the policy's state before the first slot
    discount: float  # gamma
    weight: Any = None  # [B]: factor of each sequence's loss; None: 1


class RolloutBatch(NamedTuple):
    """T env steps of N environments, collected by one policy. NumPy views, valid only during one update.

    ``obs[t + 1]`` of an environment equals its ``next_obs[t]``, unless its episode ended at t.
    """

    obs: np.ndarray  # [T, N, O] float32; images: uint8 [T, N, k, *frame]
    action: np.ndarray  # [T, N, A] float32, as drawn, not clipped; indices of choices
    log_prob: np.ndarray  # [T, N] float32, in nat, under the policy that drew the action
    reward: np.ndarray  # [T, N] float32
    terminated: np.ndarray  # [T, N]: nonzero where the MDP ended
    truncated: np.ndarray  # [T, N]: nonzero where the time limit was reached
    next_obs: np.ndarray  # like obs: the true next observation, also at the end of an episode
    state: np.ndarray | None = None  # [N, S] float32: the policy's state before the first step; None without memory


@dataclass(frozen=True)
class SequenceShape:
    """Sizes of a sequence in replay."""

    length: int  # T: slots that are trained on; each slot of a sampler's stream is among these in exactly one sequence
    burn_in: int  # b: slots before them; the previous sequence contains them too
    state_dim: int  # S: values of the policy's state

    @property
    def slots(self) -> int:
        """M: b + T."""
        return self.burn_in + self.length


@dataclass(frozen=True)
class RowLayout:
    """Layout of a transition in a float32 replay row.

    Order: obs | action | reward | terminated | next_obs [| num_steps] [| back | age] [| checksum].
    ``num_steps`` exists only with n-step returns and images; ``checksum``, the CRC-32 of the columns before it, only in
    checked rings (for tests).

    Images: ``obs_dim`` is 0, and each row owns one uint8 frame in a separate table, the newest frame of its
    ``next_obs``. Older frames are those of earlier rows: ``back`` is the distance to the row of the environment's
    previous step, ``age`` the number of such rows in the episode. The first row of an episode holds the frame of the
    reset and no transition (num_steps 0). So each frame is stored once, whatever the stack.

    Sequences: a row holds one, ``obs | action | reward | terminated | valid | begins | state [| checksum]``, as
    ``SequenceBatch`` has them, and no other columns.
    """

    obs_dim: int
    action_dim: int
    n_step: int = 1
    checksum: bool = False
    frame_bytes: int = 0  # F: bytes of one frame; 0 for vector observations
    stack: int = 0  # k: frames in one observation; 0 for vector observations
    frame_numbers: int = 0  # V: float32 numbers at the end of a frame
    sequence: SequenceShape | None = field(default=None, repr=False)  # keeps replay of earlier versions readable
    """Sizes of the sequences; None: rows are transitions."""

    @classmethod
    def of(cls, spec: EnvSpec, n_step: int = 1) -> RowLayout:
        if spec.frames is None:
            return cls(spec.obs_dim, spec.action_dim, n_step)
        frame_bytes, stack = spec.frames.frame_bytes, spec.frames.stack
        return cls(0, spec.action_dim, n_step, False, frame_bytes, stack, spec.frames.vector_dim)

    @property
    def width(self) -> int:
        """W: float32 values in a row."""
        if self.sequence is not None:
            slots = self.sequence.slots
            return slots * (self.obs_dim + self.action_dim + 4) + self.obs_dim + self.sequence.state_dim + self.checksum
        links = 2 * (self.frame_bytes > 0)
        return 2 * self.obs_dim + self.action_dim + 2 + (self.num_steps is not None) + links + self.checksum

    @property
    def env_steps_per_row(self) -> int:
        """Env steps that a row trains on."""
        return 1 if self.sequence is None else self.sequence.length

    @property
    def row_bytes(self) -> int:
        """Bytes of one row and its frame, without padding."""
        return 4 * self.width + self.frame_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes that replay takes for each env step, without padding."""
        return -(-self.row_bytes // self.env_steps_per_row)

    @property
    def obs(self) -> slice:
        return slice(0, self.obs_dim)

    @property
    def action(self) -> slice:
        return slice(self.obs_dim, self.reward)

    @property
    def reward(self) -> int:
        """Column of the (n-step) reward."""
        return self.obs_dim + self.action_dim

    @property
    def terminated(self) -> int:
        return self.reward + 1

    @property
    def next_obs(self) -> slice:
        return slice(self.reward + 2, self.reward + 2 + self.obs_dim)

    @property
    def num_steps(self) -> int | None:
        """Column of the number of env steps that a row spans; None with one-step transitions of vectors."""
        return self.reward + 2 + self.obs_dim if self.n_step > 1 or self.frame_bytes else None

    @property
    def back(self) -> int:
        """Column of the distance, in rows, to the environment's previous step (images only)."""
        return self.reward + 3 + self.obs_dim

    @property
    def episode_step(self) -> int:
        """Column of the number of earlier rows in the episode, at most ``depth`` (images only)."""
        return self.back + 1

    @property
    def depth(self) -> int:
        """Rows back to the oldest frame of a transition's ``obs``; 0 for vector observations."""
        return self.n_step + self.stack - 1 if self.frame_bytes else 0

    @property
    def window(self) -> int:
        """T: frames that a sampled transition needs (images only)."""
        return self.stack + 1 if self.n_step == 1 else 2 * self.stack

    @property
    def normalized_columns(self) -> slice:
        """Columns of a row that a normalizer counts; with images bytes at the end of a frame."""
        if self.sequence is not None:
            return slice(0, self.width)
        return slice(self.frame_bytes - 4 * self.frame_numbers, self.frame_bytes) if self.frame_bytes else self.obs

    def counted(self, columns: np.ndarray) -> np.ndarray:
        """Observations [n, O] for a normalizer, from ``normalized_columns``; each one of a stream once."""
        if self.sequence is None:
            return columns
        batch, learned = self.split_sequences(columns, 1.0), slice(self.sequence.burn_in, self.sequence.slots)
        return np.asarray(batch.obs[:, learned][batch.valid[:, learned] > 0.0])

    def observations(self, rows: Any, frames: Any) -> tuple[Any, ...]:
        """Views of ``obs`` and ``next_obs`` in rows [B, W], with images in ``frames`` [B, T, *frame] uint8.

        Sequences have one view [B, M + 1, O].
        """
        if self.sequence is not None:
            return (self.split_sequences(rows, 1.0).obs,)
        if frames is None:
            return rows[:, self.obs], rows[:, self.next_obs]
        return frames[:, : self.stack], frames[:, self.window - self.stack :]

    def split(self, rows: Any, gamma: float) -> TransitionBatch:
        """Views of ``rows`` ([B, W], array or tensor) as a batch; only ``discount`` is a new array."""
        discount = gamma if self.n_step == 1 else gamma ** rows[:, self.num_steps]
        return TransitionBatch(
            obs=rows[:, self.obs],
            action=rows[:, self.action],
            obs_action=rows[:, : self.reward],
            reward=rows[:, self.reward],
            terminated=rows[:, self.terminated],
            discount=discount,
            next_obs=rows[:, self.next_obs],
        )

    def pack(self, obs: Any, action: Any, reward: Any, terminated: Any, next_obs: Any, num_steps: Any) -> np.ndarray:
        """Rows [N, W] float32 of transitions of vectors; ``num_steps`` [N] is left out where they have one step."""
        rows = np.zeros((len(reward), self.width), np.float32)
        rows[:, self.obs], rows[:, self.action], rows[:, self.next_obs] = obs, action, next_obs
        rows[:, self.reward], rows[:, self.terminated] = reward, terminated
        if self.num_steps is not None:
            rows[:, self.num_steps] = num_steps
        return rows

    @property
    def sequence_rewards(self) -> slice:
        """Columns of the rewards of a sequence."""
        assert self.sequence is not None
        begin = self.sequence.slots * (self.obs_dim + self.action_dim) + self.obs_dim
        return slice(begin, begin + self.sequence.slots)

    def split_sequences(self, rows: Any, gamma: float) -> SequenceBatch:
        """Views of ``rows`` ([B, W], array or tensor) as sequences."""
        assert self.sequence is not None
        slots, count, at = self.sequence.slots, len(rows), self.sequence_rewards.start
        obs_end, end = (slots + 1) * self.obs_dim, at + 4 * slots
        reward, terminated, valid, begins = rows[:, at:end].reshape(count, 4, slots).swapaxes(0, 1)
        return SequenceBatch(
            obs=rows[:, :obs_end].reshape(count, slots + 1, self.obs_dim),
            action=rows[:, obs_end:at].reshape(count, slots, self.action_dim),
            reward=reward, terminated=terminated, valid=valid, begins=begins,
            state=rows[:, end : end + self.sequence.state_dim], discount=gamma,
        )  # fmt: skip

    def split_frames(self, rows: Any, frames: Any, gamma: float) -> TransitionBatch:
        """Views of ``rows`` [B, W] and ``frames`` [B, T, *frame] (uint8) as a batch of image transitions.

        ``obs`` and ``next_obs`` are [B, k, *frame], oldest frame first.
        """
        obs, next_obs = self.observations(rows, frames)
        return self.split(rows, gamma)._replace(obs=obs, next_obs=next_obs, obs_action=None)


class Reasoned(NamedTuple):
    """An automatic choice and its reason, which are always shown together."""

    value: Any
    reason: str


class PolicyFormat(NamedTuple):
    """A file format of exported policies; ``inference.policy_formats`` writes it."""

    name: str
    suffix: str
    packages: tuple[str, ...]  # packages that writing and checking a file needs, beside NumPy
    runs_on: str  # package that a program with this file needs, as pip knows it
    exact: bool = True  # False: weights are rounded, so that actions may differ from the policy's
    open: str = ""  # Python source of an example that opens ``file``, which acts on ``x``, and with a ``state``
    act: str = ""
    act_with_state: str = ""


POLICY_FORMATS = (
    PolicyFormat(
        "onnx",
        ".onnx",
        ("onnx", "onnxruntime"),
        "onnxruntime",
        open="session = onnxruntime.InferenceSession(file)",
        act='session.run(None, {"obs": x})[0][0]',
        act_with_state='session.run(None, {"obs": x, "state": state})',
    ),
    PolicyFormat(
        "torch",
        ".pt2",
        ("torch",),
        "torch",
        open="policy = torch.export.load(file).module()",
        act="policy(torch.from_numpy(x)).numpy()[0]",
        act_with_state="(part.numpy() for part in policy(torch.from_numpy(x), torch.from_numpy(state)))",
    ),
    PolicyFormat(
        "numpy",
        ".npz",
        (),
        "numpy",
        open="policy = dict(np.load(file))",
        act="run(policy, x)[0]",
        act_with_state="run_with_state(policy, x, state)",
    ),
    PolicyFormat("c", ".h", (), "a C99 compiler"),
    PolicyFormat("c-int8", ".h", (), "a C99 compiler", exact=False),
)


_T = TypeVar("_T")


class Jsonable:
    """Mixin for dataclasses of scalars, tuples of scalars, and such dataclasses."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Inverse of ``to_json``; a TypeError for an unknown or missing key."""
        return rebuild(cls, data)


type_hints: Callable[[Any], Mapping[str, Any]] = functools.cache(typing.get_type_hints)
"""Types of a class's fields by name, evaluated once: it takes milliseconds."""


def rebuild(cls: type[_T], data: dict[str, Any]) -> _T:
    """Makes a dataclass, with nested dataclasses and tuples, from a dictionary.

    Raises:
        TypeError: a key is unknown or missing, or a value is not of its field's type.
    """
    hints = type_hints(cls)
    return cls(**{name: _value(name, hints.get(name), value) for name, value in data.items()})


def _value(name: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        fitting = (option for option in options if _has_fields(option, value))
        hint = type(value) if type(value) in options else next(fitting, options[0])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return rebuild(hint, value)
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_value(name, typing.get_args(hint)[0], entry) for entry in value)
    wanted = typing.get_origin(hint) or hint
    fits = not isinstance(value, bool) if wanted in (int, float) else True
    if isinstance(wanted, type) and not (fits and isinstance(value, (int, float) if wanted is float else wanted)):
        raise TypeError(f"{name} = {str(value)[:60]}: expected {getattr(hint, '__name__', hint)}")
    return value


def _has_fields(option: Any, value: Any) -> bool:
    """True if a value may have the type ``option`` of a union; a dataclass is recognized by its field names."""
    if not dataclasses.is_dataclass(option) or not isinstance(value, dict):
        return option not in (str, int) or isinstance(value, option)
    return value.keys() <= {entry.name for entry in dataclasses.fields(option)}
