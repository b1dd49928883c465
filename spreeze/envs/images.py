"""Frames of environments that observe images, alone or beside numbers: bytes, with the configured size and colours.

Atari 2600 games run in ale-py, with the usual preprocessing in one step function: frame skip with repeated actions, the
pixel-wise maximum of the last two frames, grey 84 x 84 pictures, up to 30 no-op frames at the start, episodes that end
when a life is lost (Mnih et al. 2015, "Human-level control"); sticky actions, all 18 actions, whole games as episodes
(Machado et al. 2018, arXiv 1709.06009). ``ImageConfig`` selects among them. Sticky actions and the number of no-op
frames are drawn here, from the seed of the reset, as the emulator is deterministic. So a game can start from a
snapshot, far faster than loading it for a seed.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np

from spreeze.config.schema import ImageConfig
from spreeze.envs.masks import source_of
from spreeze.envs.obs_flattening import Flattener, LeafError, leaves_of, path_text, without
from spreeze.envs.scalars import array_like
from spreeze.errors import BadTransition
from spreeze.types import FrameSpec, PictureSpec

_GREY = np.array([0.299, 0.587, 0.114], np.float32)  # luma of red, green and blue (ITU-R BT.601)
_TRIAL_FRAMES = 60


class AreaResize:
    """Shrinks or stretches a picture; each output pixel is the mean of the area that it covers.

    Weights repeat after ``gcd`` of the two sizes, so each axis is a matmul with one small block.
    """

    def __init__(self, height: int, width: int, size: int) -> None:
        self._shape, self._size = (height, width), size
        rows, columns = math.gcd(height, size), math.gcd(width, size)
        self._row_block = np.ascontiguousarray(_area_weights(height // rows, size // rows).T)
        self._column_block = _area_weights(width // columns, size // columns)
        self._input = np.empty((height * columns, width // columns), np.float32)
        self._narrow = np.empty((height * columns, size // columns), np.float32)
        self._tall = self._narrow.reshape(rows, height // rows, size)
        self._output = np.empty((rows, size // rows, size), np.float32)

    def __call__(self, picture: np.ndarray, out: np.ndarray) -> None:
        """Writes ``picture`` [H, W], of any number type, to ``out`` [size, size] uint8."""
        np.copyto(self._input, picture.reshape(self._input.shape), casting="unsafe")
        np.dot(self._input, self._column_block, out=self._narrow)
        np.matmul(self._row_block, self._tall, out=self._output)
        self._output += 0.5  # uint8 cuts off
        np.copyto(out, self._output.reshape(self._size, self._size), casting="unsafe")


def _area_weights(old: int, new: int) -> np.ndarray:
    """[old, new]: weight of each old pixel in the mean of each new one."""
    scale = old / new
    edge = np.arange(new) * scale
    pixel = np.arange(old)[:, None]
    overlap = np.minimum(edge + scale, pixel + 1) - np.maximum(edge, pixel)
    weights: np.ndarray = np.maximum(overlap, 0.0) / scale
    return weights.astype(np.float32)


class _Shrunk:
    """One picture of an observation as an image [C, H, W]; only red, green and blue become grey (``image.grey``)."""

    def __init__(self, source: PictureSpec, options: ImageConfig, env_id: str) -> None:
        self._source, self._to_grey, self._env_id = source, options.grey and source.rgb, env_id
        self.channels = source.channels // 3 if self._to_grey else source.channels
        height, width = (source.shape[axis] for axis in source.order[-2:])
        self._low, high = source.bounds
        self._scale = 255.0 / (high - self._low)
        self._resize = AreaResize(height, width, options.size)

    def __call__(self, observation: Any, out: np.ndarray) -> None:
        """Writes the image to ``out`` [C, H, W] uint8; a BadTransition if the observation has no such picture."""
        planes = self._picture(observation).transpose(self._source.order)
        if self._to_grey:
            planes = np.moveaxis(planes, -3, -1) @ _GREY
        height, width = planes.shape[-2:]
        for plane, target in zip(planes.reshape(-1, height, width), out, strict=True):
            self._resize(plane, target)

    def _picture(self, observation: Any) -> np.ndarray:
        """The picture from the observation, scaled to 0..255."""
        source = self._source
        try:
            for key in source.path:
                observation = observation[key]
            picture = np.asarray(array_like(observation))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
            raise self._bad(f"{str(observation)[:60]} ({type(observation).__name__})") from None
        if picture.shape != source.shape:
            raise self._bad(f"shape {picture.shape}; expected {source.shape}")
        if picture.dtype == np.uint8:
            return picture
        try:
            values = (picture.astype(np.float32) - np.float32(self._low)) * np.float32(self._scale)
        except (TypeError, ValueError):
            raise self._bad(f"{str(picture)[:60]} ({picture.dtype})") from None
        if not np.isfinite(values).all():
            raise self._bad(str(picture[~np.isfinite(values)][0]))
        return np.clip(values, 0.0, 255.0, out=values)

    def _bad(self, value: str) -> BadTransition:
        where = f" ({path_text(self._source.path)})" if self._source.path else ""
        return BadTransition(f"picture observed{where}", value, self._env_id)


class ImageFrames(gymnasium.ObservationWrapper[np.ndarray, Any, Any]):
    """Frames of any environment that observes pictures, alone or beside numbers (see ``FrameSpec``)."""

    def __init__(
        self, env: gymnasium.Env[Any, Any], sources: tuple[PictureSpec, ...], options: ImageConfig, *, as_asked: bool
    ) -> None:
        super().__init__(env)
        self._env_id = self.spec.id if self.spec else "environment"
        shrunk = [_Shrunk(source, options, self._env_id) for source in sources]
        leaves = without(leaves_of(env.observation_space, "observation space"), {source.path for source in sources})
        self._flatten = Flattener(leaves)
        images = [f"{path_text(source.path)} (image, {source.shape})" for source in sources]
        self.obs_layout = (*images, *(leaf.text() for leaf in leaves)) if leaves or len(sources) > 1 else ()
        """Parts of an observation; empty where it is a single image."""
        self.frame_spec = FrameSpec(
            channels=shrunk[0].channels,
            height=options.size,
            width=options.size,
            stack=options.stack,
            sign_rewards=False,
            options=asdict(options),
            source=sources[0],
            more=sources[1:],
            vector_dim=self._flatten.obs_dim,
            as_asked=as_asked,
        )
        self._bytes, self._shape = self.frame_spec.frame_bytes, self.frame_spec.shape
        ends = np.cumsum([math.prod(shape) for shape in self.frame_spec.images]).tolist()
        slices = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        self._slots = list(zip(shrunk, slices, self.frame_spec.images, strict=True))
        self.mask_source = source_of(env)
        self.observation_space = gymnasium.spaces.Box(0, 255, self.frame_spec.shape, np.uint8)

    def observation(self, observation: Any) -> np.ndarray:
        """The frame of an observation, a new array; a BadTransition if a part has another shape or is not finite."""
        out = np.empty(self._bytes, np.uint8)
        for shrunk, part, shape in self._slots:
            shrunk(observation, out[part].reshape(shape))
        if self._flatten.obs_dim:
            out[-4 * self._flatten.obs_dim :] = self._vector(observation).view(np.uint8)
        return out.reshape(self._shape)

    def _vector(self, observation: Any) -> np.ndarray:
        try:
            values = self._flatten(observation)
        except LeafError as error:
            raise BadTransition(error.name, error.value, self._env_id) from None
        if not np.isfinite(values).all():
            index = int(np.flatnonzero(~np.isfinite(values))[0])
            raise BadTransition(f"number {index} of the observation", str(values[index]), self._env_id)
        return values


def register() -> None:
    """Registers the ids with Gymnasium; limits ale-py's own messages to errors."""
    ale_py: Any = importlib.import_module("ale_py")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)


def make_atari(name: str, options: ImageConfig, arguments: dict[str, Any]) -> AtariFrames:
    """One game, with ``arguments`` for its constructor; ``AtariFrames``, not the emulator, skips frames."""
    env = gymnasium.make(
        name, disable_env_checker=True, frameskip=1, obs_type="grayscale", repeat_action_probability=0.0,
        full_action_space=options.full_actions, max_num_frames_per_episode=options.max_episode_frames, **arguments,
    )  # fmt: skip
    return AtariFrames(env, options)


class AtariFrames(gymnasium.Wrapper[np.ndarray, Any, np.ndarray, Any]):
    """Frames [1, size, size] of a game, one for each ``frame_skip`` frames of the emulator.

    After the first reset the emulator is stepped directly: Gymnasium's step would fetch each skipped picture.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], options: ImageConfig) -> None:
        super().__init__(env)
        game: Any = env.unwrapped
        self._options, self._ale = options, game.ale
        self.max_steps = -(-options.max_episode_frames // options.frame_skip)
        ale, size = self._ale, options.size
        height, width = ale.getScreenDims()
        self._resize = AreaResize(height, width, size)
        self.frame_spec = FrameSpec(
            channels=1, height=size, width=size, stack=options.stack, sign_rewards=options.clip_rewards,
            options=asdict(options),
        )  # fmt: skip
        self.observation_space = gymnasium.spaces.Box(0, 255, self.frame_spec.shape, np.uint8)
        self._actions = list(ale.getLegalActionSet() if options.full_actions else ale.getMinimalActionSet())
        meanings = game.get_action_meanings()
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None
        self._screen, self._before, self._first = (np.zeros((height, width), np.uint8) for _ in range(3))
        self._rng = np.random.default_rng()
        self._snapshot: Any = None
        self._last_action, self._lives = self._actions[0], 0
        self._game_over = self._is_new = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        """A new game, or the next life of this one where a lost life ended the episode."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        idle = 1
        if self._game_over or seed is not None:
            self._begin()
            idle = int(self._rng.integers(self._options.noop_max + 1)) if self._options.noop_max else 0
        self._idle(idle)
        if self._options.fire_reset and self._fire is not None:
            self._act(self._actions[self._fire])
            self._ale.getScreenGrayscale(self._screen)
        self._game_over = False
        self._lives = self._ale.lives()
        return self._frame(), {}

    def _begin(self) -> None:
        if self._is_new:
            self._load()
            self._is_new = False
            snapshot = self._ale.cloneState(include_rng=True)
            self._ale.getScreenGrayscale(self._first)
            if self._is_restored_by(snapshot):
                self._snapshot = snapshot
        if self._snapshot is None:
            self._load()
        else:
            self._ale.restoreState(self._snapshot)
        self._screen[...] = self._first  # a snapshot has no screen
        self._last_action = self._actions[0]

    def _load(self) -> None:
        self.env.reset(seed=0)  # the game is deterministic, so the seed does not matter

    def _is_restored_by(self, snapshot: Any) -> bool:
        """True if a snapshot restores a game exactly; of 104 games, it does not for Qbert and Tetris."""
        ale, memories = self._ale, []
        for shift in (0, 1, 0):
            memory = []
            for frame in range(_TRIAL_FRAMES):
                ale.act(self._actions[(frame // 4 + shift) % len(self._actions)])
                memory.append(ale.getRAM().tobytes())
            memories.append(memory)
            ale.restoreState(snapshot)
        return bool(memories[0] == memories[2])

    def _act(self, action: Any) -> float:
        """One frame of the emulator, with sticky actions: the previous one may be repeated (Machado et al. 2018)."""
        sticky = self._options.sticky_actions
        if not sticky or self._rng.random() >= sticky:
            self._last_action = action
        reward: float = self._ale.act(self._last_action)
        return reward

    def _idle(self, frames: int) -> None:
        """Runs no-op frames; starts the game again if it ends in the meantime."""
        for _ in range(frames):
            self._act(self._actions[0])
            if self._ale.game_over():
                self._begin()
        if frames:
            self._ale.getScreenGrayscale(self._screen)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """``frame_skip`` frames with one action: their rewards summed, the last two frames' maximum."""
        ale, act, skip = self._ale, self._actions[int(action)], self._options.frame_skip
        reward, ended = 0.0, False
        for frame in range(skip):
            reward += self._act(act)
            ended = ale.game_over()
            if frame == skip - 2:
                ale.getScreenGrayscale(self._before)
            if ended:
                break
        ale.getScreenGrayscale(self._screen)
        if skip > 1 and not ended:
            np.maximum(self._screen, self._before, out=self._screen)
        self._game_over = ended
        truncated = ended and ale.game_truncated()
        lost_life = self._options.episodic_life and ale.lives() < self._lives
        self._lives = ale.lives()
        return self._frame(), reward, (ended and not truncated) or lost_life, truncated, {"lives": self._lives}

    def _frame(self) -> np.ndarray:
        out = np.empty(self.frame_spec.shape, np.uint8)
        self._resize(self._screen, out[0])
        return out
