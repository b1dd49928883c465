"""Which environments observe images, and how they are made; what draws or resizes is loaded only for those."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from spreeze.config import ImageConfig
from spreeze.errors import EnvironmentError_

if TYPE_CHECKING:
    import gymnasium

_ATARI_PREFIX = "ALE/"
_ATARI_MODULE = "spreeze.envs.atari"


def register_atari(name: str) -> None:
    """Makes the Atari ids known if ``name`` is one.

    Raises:
        EnvironmentError_: it is, and ale-py is missing.
    """
    if not name.startswith(_ATARI_PREFIX):
        return
    if importlib.util.find_spec("ale_py") is None:
        raise EnvironmentError_(f"{name}: ale-py is not installed: pip install 'spreeze[atari]'")
    importlib.import_module(_ATARI_MODULE).register()


def is_image(space: Any) -> bool:
    """True for a Box of bytes with at least two dimensions."""
    from gymnasium import spaces

    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1


def made_with_frames(name: Any, values: dict[str, Any], image: ImageConfig) -> gymnasium.Env[Any, Any]:
    """The environment of a registered name (or specification), or its frames where it observes images."""
    import gymnasium

    if isinstance(name, str) and name.startswith(_ATARI_PREFIX):
        atari: Any = importlib.import_module(_ATARI_MODULE)
        return cast("gymnasium.Env[Any, Any]", atari.make_atari(name, image, values))
    env = gymnasium.make(name, disable_env_checker=True, **values)
    if not is_image(env.observation_space):
        return env
    frames: Any = importlib.import_module("spreeze.envs.frames")
    return cast("gymnasium.Env[Any, Any]", frames.ImageFrames(env, image))
