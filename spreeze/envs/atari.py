"""Atari 2600 games through ale-py, with the usual preprocessing in one step function.

What is done, and by whom it was introduced: frames skipped while the action is repeated, the pixel-wise
maximum of the last two of them, grey 84 x 84 pictures, up to 30 idle frames at the start, an episode
ended by a lost life (Mnih et al. 2015, "Human-level control"); actions that stick, all 18 actions, the
game itself as the episode (Machado et al. 2018, arXiv 1709.06009). ``ImageConfig`` says which hold.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np

from spreeze.config import ImageConfig
from spreeze.envs.frames import AreaResize
from spreeze.types import FrameSpec

_FIRE = "FIRE"


def register() -> None:
    """Makes the ids known to Gymnasium; ale-py's own messages are kept to errors."""
    ale_py: Any = importlib.import_module("ale_py")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)


def make_atari(name: str, options: ImageConfig, arguments: dict[str, Any]) -> AtariFrames:
    """One game, with further ``arguments`` for its constructor such as its mode.

    The emulator's own frame skip is off, since the frames that are skipped are looked at here.
    """
    env = gymnasium.make(
        name, disable_env_checker=True, frameskip=1, obs_type="grayscale",
        repeat_action_probability=options.sticky_actions, full_action_space=options.full_actions,
        max_num_frames_per_episode=options.max_episode_frames, **arguments,
    )  # fmt: skip
    return AtariFrames(env, options)


class AtariFrames(gymnasium.Wrapper[np.ndarray, Any, np.ndarray, Any]):
    """Frames [1, size, size] of a game, one for each ``frame_skip`` frames of the emulator.

    After the first reset the emulator is stepped directly: Gymnasium's step would fetch a picture of
    every skipped frame.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], options: ImageConfig) -> None:
        super().__init__(env)
        game: Any = env.unwrapped
        self._options, self._ale = options, game.ale
        self.max_steps = -(-options.max_episode_frames // options.frame_skip)
        height, width = self._ale.getScreenDims()
        size = options.size
        self._resize = AreaResize(height, width, size)
        self.frame_spec = FrameSpec(
            channels=1, height=size, width=size, stack=options.stack, sign_rewards=options.clip_rewards,
            options=asdict(options),
        )  # fmt: skip
        self.observation_space = gymnasium.spaces.Box(0, 255, self.frame_spec.shape, np.uint8)
        ale = self._ale
        self._actions = list(ale.getLegalActionSet() if options.full_actions else ale.getMinimalActionSet())
        self._fire = game.get_action_meanings().index(_FIRE) if _FIRE in game.get_action_meanings() else None
        self._screen, self._before = (np.zeros((height, width), np.uint8) for _ in range(2))
        self._lives = 0
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        """A new game, or the next life of this one where a lost life ended the episode."""
        if self._over or seed is not None:
            _, info = self.env.reset(seed=seed, options=options)
            rng = self.env.unwrapped.np_random
            self._idle(int(rng.integers(self._options.noop_max + 1)) if self._options.noop_max else 0)
        else:
            info = {}
            self._idle(1)
        if self._options.fire_reset and self._fire is not None:
            self._ale.act(self._actions[self._fire])
        self._over = False
        self._lives = self._ale.lives()
        self._ale.getScreenGrayscale(self._screen)
        return self._frame(), info

    def _idle(self, frames: int) -> None:
        """Lets frames pass without an action; a game that ends meanwhile is begun again."""
        for _ in range(frames):
            self._ale.act(self._actions[0])
            if self._ale.game_over():
                self.env.reset()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """``frame_skip`` frames with one action: their rewards summed, the last two frames' maximum."""
        ale, act, skip = self._ale, self._actions[int(action)], self._options.frame_skip
        reward, ended = 0.0, False
        for frame in range(skip):
            reward += ale.act(act)
            ended = ale.game_over()
            if frame == skip - 2:
                ale.getScreenGrayscale(self._before)
            if ended:
                break
        ale.getScreenGrayscale(self._screen)
        if skip > 1 and not ended:
            np.maximum(self._screen, self._before, out=self._screen)
        self._over = ended
        truncated = ended and ale.game_truncated()
        lost_life = self._options.episodic_life and ale.lives() < self._lives
        self._lives = ale.lives()
        return self._frame(), reward, (ended and not truncated) or lost_life, truncated, {"lives": self._lives}

    def _frame(self) -> np.ndarray:
        """The screen as a frame, a new array."""
        out = np.empty(self.frame_spec.shape, np.uint8)
        self._resize(self._screen, out[0])
        return out
