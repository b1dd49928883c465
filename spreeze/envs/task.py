"""One environment, stepped: float32 in, float32 out, every transition checked for shape and finiteness."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from spreeze.config.algorithms import actions_text
from spreeze.envs.families import engine_of
from spreeze.envs.info_numbers import InfoNumbers, success_of
from spreeze.envs.make import EnvOptions, closed_on_error, describe, import_user_module, make_env, parse_args
from spreeze.envs.obs_flattening import MASK, Flattener, LeafError, leaves_of, mask_of
from spreeze.envs.pictures import DrawnPictures
from spreeze.envs.scalars import FLOAT32_MAX, array_like, flag_of, number_of
from spreeze.envs.vector_task import VectorTask, make_vector
from spreeze.errors import BadTransition, EnvError, first_true
from spreeze.formatting import clean
from spreeze.types import Choices, EnvSpec, Mixed, rebuild

if TYPE_CHECKING:
    import gymnasium


_FLOAT32 = np.dtype(np.float32)
"""NumPy has a single object for it, and ``is`` takes a tenth of the time of a comparison."""
CHANGED_ARGS = "env_args.json"  # file of a run directory with all changed ``key=value`` texts
_REWARD_TYPES = frozenset({float, int, np.float64, np.float32})  # types of nearly all rewards
_MIN = -FLOAT32_MAX
_MAX_VALUES = 100_000_000  # numbers in one observation or action that a description may have
MAX_EVALUATION_STEPS = 10_000  # length limit of an evaluation episode if the environment has none


class ActionScaling:
    """Maps [-1, 1] to the bounds of boxes and clips there, with few calls of NumPy; choices stay indices."""

    def __init__(self, spec: EnvSpec, *, bounded: bool = False) -> None:
        """``bounded``: the policy's actions lie in [-1, 1], so that bounds of -1 and 1 need no clipping."""
        self._choosing = spec.box is None
        if spec.box is None:
            return
        self.low, self.high = spec.box.float32_bounds()
        self._half, self._middle = spec.box.half_and_middle()
        if spec.choices is not None:  # indices: 1 x + 0, within 0 .. n - 1
            highest = np.array(spec.choices.nvec, np.float32) - 1.0
            zeros = np.zeros_like(highest)
            self.low, self.high = np.concatenate((self.low, zeros)), np.concatenate((self.high, highest))
            self._half, self._middle = np.concatenate((self._half, zeros + 1.0)), np.concatenate((self._middle, zeros))
        self._unit = bool(np.all(self.low == -1.0) and np.all(self.high == 1.0))
        self._as_given = self._unit and bounded

    def __call__(self, actions: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """A policy's actions [N, A] float32 as those of ``Task.step``, in ``out`` or a new array; indices stay.

        Environments may modify and keep ``out``.
        """
        if self._choosing:
            return actions
        if self._as_given and out is not None:
            np.copyto(out, actions)
            return out
        if self._unit:
            native: np.ndarray = np.maximum(actions, self.low, out=out)
        else:
            native = np.multiply(actions, self._half, out=out)
            native += self._middle
            np.maximum(native, self.low, out=native)  # rounding may lead out of the bounds
        np.minimum(native, self.high, out=native)
        return native


class Task:
    """One environment, checked at every step; the caller resets it.

    Every observation is a new array, because some environments reuse theirs. With images it returns single frames,
    uint8; ``ObsBuffer`` stacks them.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], spec: EnvSpec) -> None:
        from gymnasium import spaces

        self.env = env
        self.spec = spec
        self._zeros = np.zeros(spec.obs_dim - spec.mask_dim, np.float32)
        space, shape = env.observation_space, tuple(env.observation_space.shape or ())
        is_box = isinstance(space, spaces.Box)
        self._flatten = None if is_box else Flattener(leaves_of(space, "observation space"))
        self._shape = shape if is_box else None
        self._flat = is_box and len(shape) == 1
        self._frame = None if spec.frames is None else shape
        self._action_shape = tuple(env.action_space.shape or ())
        self._action_dtype = env.action_space.dtype
        self._plain_action = len(self._action_shape) == 1 and self._action_dtype == np.float32
        self._choices = None if spec.action_parts else spec.choices
        self._form = spec.form() if spec.action_parts else None
        self._masked_choices = spec.choices if spec.action_mask else None
        self._steps = 0
        self.mask: np.ndarray | None = None
        """float32 [K], the current action mask; None without masks."""
        self._to_picture = DrawnPictures()
        self._options: list[Any] = []
        """The environment's value of each option, if an action is a single one, made once in the space's own type:
        checking a Python integer costs Gymnasium a third more."""
        if self._choices is not None and not self._choices.shape:
            kind = getattr(self._action_dtype, "type", np.int64)
            self._options = [kind(self._choices.start[0] + index) for index in range(self._choices.options)]
        self.info_numbers: InfoNumbers | None = None
        """Collects the numbers of each step's ``info`` for metrics."""
        self.info: Any = {}
        """``info`` of the latest step."""
        self.success: bool | None = None
        """True if the latest episode that has ended was a success; None if the environment does not report it."""
        self.to_env_units = ActionScaling(spec)
        """Converts actions [N, A] of a policy to those of ``step``."""

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Starts an episode; returns the observation, float32 [O], or frame. A BadTransition as for ``step``."""
        self.success = None
        result = self.env.reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._bad("reset", f"{type(result).__name__}; expected (observation, info)")
        obs = self._checked_obs(result[0])
        if self._masked_choices is not None:
            self._steps = 0
            return self._with_mask(obs, self._masked_choices, result[1])
        return obs

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One env step; returns next observation float32 [O], reward, terminated, truncated.

        ``action`` is float32 [A]: numbers in the environment's own unit, indices of choices. A BadTransition for a
        wrong shape, a value not finite in float32, a missing or wrong mask, or not Gymnasium's five values.
        """
        if self._options:
            result: Any = self.env.step(self._options[int(action.item())])
        elif self._choices is not None:
            result = self.env.step(self._choices.to_env(action.reshape(1, -1))[0].astype(self._action_dtype))
        elif self._plain_action:
            result = self.env.step(action)
        elif self._form is not None:
            result = self.env.step(self._form(action))
        else:
            result = self.env.step(action.reshape(self._action_shape).astype(self._action_dtype))
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            raise self._bad("step", "not the five values (obs, reward, terminated, truncated, info)") from None
        try:
            reward = float(reward) if type(reward) in _REWARD_TYPES else number_of(reward)
        except (ValueError, OverflowError) as error:
            raise self._bad("reward", str(error)) from None
        if not _MIN <= reward <= FLOAT32_MAX:  # NaN fails, too
            raise self._bad("reward", str(reward))
        checked = self._checked_obs(obs)
        if terminated is not False and terminated is not True:
            terminated = self._flag("terminated", terminated)
        if truncated is not False and truncated is not True:
            truncated = self._flag("truncated", truncated)
        self.info = info
        if isinstance(info, dict) and info:
            self._note(info, ended=terminated or truncated)
        if self._masked_choices is not None:
            self._steps += 1
            checked = self._with_mask(checked, self._masked_choices, info, terminated=terminated)
        return checked, reward, terminated, truncated

    def _note(self, info: dict[Any, Any], *, ended: bool) -> None:
        numbers = self.info_numbers
        if numbers is not None and (ended or numbers.left > 0):
            numbers.add(info, ended=ended)
        if ended:
            self.success = success_of(info)

    def _flag(self, field: str, value: Any) -> bool:
        try:
            return bool(value) if type(value) is np.bool_ else flag_of(value)
        except ValueError as error:
            raise self._bad(field, str(error)) from None

    def _with_mask(self, obs: np.ndarray, choice: Choices, info: Any, *, terminated: bool = False) -> np.ndarray:
        try:
            self.mask = mask_of(info, choice, terminated=terminated, parts=self.spec.action_parts)
            part = self.mask if self._frame is None else self.mask.view(np.uint8)
        except LeafError as error:
            position = f"step {self._steps} of its episode" if self._steps else "reset"
            raise self._bad(error.name, f"{error.value} (at {position})") from None
        return np.concatenate((obs.reshape(-1), part))

    def _bad(self, field: str, value: str) -> BadTransition:
        return BadTransition(field, value, self.spec.env_id)

    def _checked_obs(self, obs: Any) -> np.ndarray:
        """A new float32 [O] vector, checked to be finite."""
        if self._frame is not None:
            if type(obs) is not np.ndarray or obs.dtype != np.uint8 or obs.shape != self._frame:
                text = f"{getattr(obs, 'dtype', type(obs).__name__)} {getattr(obs, 'shape', '')}"
                raise self._bad("frame", f"{text}; expected uint8 {self._frame}")
            return obs
        if type(obs) is np.ndarray and obs.dtype is _FLOAT32 and obs.shape == self._shape:
            flat = obs.copy() if self._flat else obs.flatten()
        else:
            flat = self._converted(obs)
        if np.vdot(flat, self._zeros) != 0.0:  # NaN if any value is not finite; takes half the time of isfinite
            index = int(np.flatnonzero(~np.isfinite(flat))[0])
            raise self._bad(f"observation[{index}]", str(flat[index]))
        return flat

    def _converted(self, obs: Any) -> np.ndarray:
        if self._flatten is not None:
            try:
                return self._flatten(obs)
            except LeafError as error:
                raise self._bad(error.name, error.value) from None
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                array = np.array(array_like(obs), dtype=np.float32)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise self._bad("observation", f"{str(obs)[:60]} ({type(obs).__name__})") from None
        if array.shape != self._shape:
            raise self._bad("observation", f"shape {array.shape}; expected {self._shape}")
        return array.reshape(-1)

    def render(self) -> np.ndarray:
        """The current picture, uint8 [H, W, 3]; a BadTransition if the environment drew none."""
        try:
            return self._to_picture(self.env.render())
        except ValueError as error:
            raise self._bad("picture", str(error)) from None

    @property
    def render_fps(self) -> float:
        """Env steps/s at which the environment is meant to be shown; 30 if not stated."""
        fps = (self.env.metadata or {}).get("render_fps")
        return float(fps) if fps else 30.0

    def close(self) -> None:
        self.env.close()


def make_task(
    env_id: str,
    import_module: str | None = None,
    render_mode: str | None = None,
    *,
    action_mask: bool | None = None,
    **options: Unpack[EnvOptions],
) -> Task:
    """Makes, describes and wraps an environment; arguments and errors as ``make_env``.

    ``action_mask``: True if it gives masks; if None, an environment with choices is reset once to find out.
    """
    env = make_env(env_id, import_module, render_mode, **options)
    with closed_on_error(env):
        plain, args = options.get("plain", False), options.get("args", ())
        spec = dataclasses.replace(describe(env, import_module), plain=plain, args=args)
        if engine_of(env_id) is not None:  # another engine may have made this environment
            spec = dataclasses.replace(spec, env_id=env_id)
        choosing = spec.choices is not None and spec.team is None
        if choosing and (gives_masks(env) if action_mask is None else action_mask):
            spec = _with_masks(spec, getattr(env, "mask_source", f"info['{MASK}']"))
        return Task(env, spec)


def gives_masks(env: gymnasium.Env[Any, Any]) -> bool:
    """True if the info of a reset holds an action mask."""
    result = env.reset(seed=0)
    return isinstance(result, tuple) and isinstance(result[-1], dict) and result[-1].get(MASK) is not None


def _with_masks(spec: EnvSpec, source: str) -> EnvSpec:
    """The description of an environment that also gives masks, which become part of its observations."""
    plain, count = spec.vector_dim, 0 if spec.choices is None else spec.choices.options
    frames, obs_dim = spec.frames, spec.obs_dim + count
    if frames is not None:
        frames = dataclasses.replace(frames, vector_dim=plain + count)
        obs_dim = frames.stack * frames.frame_bytes
    observation = f"0:{plain} observation (Box)" if frames is None else "observation (image)"
    layout = (*(spec.obs_layout or (observation,)), f"{plain}:{plain + count} {source}")
    return dataclasses.replace(spec, action_mask=True, obs_dim=obs_dim, obs_layout=layout, frames=frames)


def vector_maker(spec: EnvSpec) -> Callable[[int, int], VectorTask] | None:
    """Factory (number, seed) -> vector environment for ids of vector engines; None for plain ids."""
    if engine_of(spec.env_id) is None:
        return None

    return lambda num_envs, seed: VectorTask(vector_env(spec, num_envs, seed), spec)


def vector_env(spec: EnvSpec, num_envs: int, seed: int) -> Any:
    """The vector environment of an id of a vector engine, after the user's module that may register it."""
    if spec.import_module is not None:
        import_user_module(spec.import_module)
    return make_vector(spec.env_id, num_envs, seed, parse_args(spec.args))


def open_task(spec: EnvSpec, render_mode: str | None = None, *, whole_games: bool = False) -> Task:
    """Makes an environment of a known description; errors as ``make_env``.

    ``whole_games``: an Atari episode is the whole game, even if a lost life ends it for the samplers (evaluation).
    """
    env = make_env(spec.env_id, spec.import_module, render_mode, **options_of(spec, whole_games=whole_games))
    return Task(env, spec)


class TaskSource:
    """Opens environments of one description; a new ``version`` means that earlier ones have outdated arguments."""

    def __init__(self, spec: EnvSpec, run_dir: Path, version: Callable[[], int]) -> None:
        self._spec, self._file, self._version = spec, run_dir / CHANGED_ARGS, version

    @property
    def version(self) -> int:
        """Number of changes so far; 0: the run's own arguments."""
        return self._version()

    def __call__(self) -> Task:
        """A new environment; errors as ``open_task``, or an OSError if the changes cannot be read."""
        if not self.version:
            return open_task(self._spec)
        changed = json.loads(self._file.read_text(encoding="utf-8"))
        return open_task(dataclasses.replace(self._spec, args=merged_args(self._spec.args, changed)))


def merged_args(args: tuple[str, ...], changed: list[str]) -> tuple[str, ...]:
    """``key=value`` texts, of which later ones replace earlier ones of the same key."""
    return tuple({text.partition("=")[0].strip(): text for text in (*args, *changed)}.values())


def open_env(spec: EnvSpec, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Makes an unwrapped environment of a known description for user code; errors as ``make_env``.

    With images, it observes its last k frames, uint8 [k, *frame], the input of policies. Also raises an
    EnvError if its spaces are not those of the description.
    """
    env = make_env(spec.env_id, spec.import_module, render_mode, **options_of(spec, whole_games=True))
    with closed_on_error(env):
        made = describe(env, spec.import_module)
        source = getattr(env, "mask_source", f"info['{MASK}']")
        check_fits(spec, _with_masks(made, source) if spec.action_mask else made, spec.env_id)
    if spec.frames is None:
        return env
    from gymnasium.wrappers import FrameStackObservation

    return FrameStackObservation(env, spec.frames.stack)  # the first frame of an episode stands for those before it


def check_fits(spec: EnvSpec, made: EnvSpec, where: Path | str) -> None:
    """Raises ``EnvError`` if the spaces of an environment differ from those that a policy was trained on."""
    for (how, before, trained), (_, after, now) in zip(_facts(spec), _facts(made), strict=True):
        if before != after and None not in (before, after):  # an older version did not record all shapes
            raise EnvError(f"{where}: trained {how} {trained}, but {made.env_id} has {now}")


def _facts(env: EnvSpec) -> list[tuple[str, Any, str]]:
    """How a policy was trained in these spaces: a phrase, a value and its text, in the order of their checks."""
    actions, frames = actions_text(env), env.frames and (env.frames.stack, *env.frames.shape)
    parts = [(part.path, part.shape, part.dtype) for part in env.action_parts]
    low, high = (
        f"{side[0]:g}" if len(set(side)) == 1 else clean([float(f"{value:g}") for value in side], 80)
        for side in (env.action.low, env.action.high)
    )
    return [
        ("for", (env.obs_dim, actions, env.team), f"{env.obs_dim} observations and {actions}"),
        ("on an observation laid out as", env.obs_layout, "; ".join(env.obs_layout) or "one Box"),
        ("on an observation of shape", env.obs_shape, str(env.obs_shape)),
        ("on an action of shape", env.action.shape, str(env.action.shape)),
        ("on frames of shape", frames, str(frames)),
        ("on an action of the parts", env.action_parts, clean(parts, 200)),
        ("with actions within", (env.action.low, env.action.high), f"{low} to {high}"),
    ]


def options_of(spec: EnvSpec, *, whole_games: bool) -> EnvOptions:
    """Options for making a known environment again, with the same parts of observations as pictures."""
    image, picture = None, spec.frames is not None and (spec.frames.as_asked or None)
    if spec.frames is not None:
        image = spec.frames.options | ({"episodic_life": False} if whole_games else {})
    return {"plain": spec.plain, "args": spec.args, "image": image, "picture": picture}


class ObsBuffer:
    """The current observations of N environments: vectors float32 [N, O], or frames uint8 [N, k, *frame].

    Frames are stacked oldest first; the first one of an episode stands for those before it.
    """

    def __init__(self, num_envs: int, spec: EnvSpec) -> None:
        frames = spec.frames
        if frames is None:
            self.array = np.zeros((num_envs, spec.obs_dim), np.float32)
        else:
            self.array = np.zeros((num_envs, frames.stack, *frames.shape), np.uint8)
        self._stacked = frames is not None

    def start(self, row: int, obs: np.ndarray) -> None:
        self.array[row] = obs

    def put(self, row: int, obs: np.ndarray) -> None:
        if self._stacked:
            stack = self.array[row]
            stack[:-1] = stack[1:]  # one move within the cache: a thousandth of a step's time
            stack[-1] = obs
        else:
            self.array[row] = obs


def spec_from(data: Any) -> EnvSpec:
    """The description of an environment from a file's data; a ValueError for wrong or contradictory values."""
    if not isinstance(data, dict):
        raise ValueError("it names no environment")
    try:
        spec = rebuild(EnvSpec, data)
    except TypeError as error:
        raise ValueError(str(error)) from None
    sizes = {"obs_dim": spec.obs_dim, "action_dim": spec.action_dim}
    if spec.choices is not None:
        sizes |= {"action.nvec": min(spec.choices.nvec, default=0), "sum of action.nvec": spec.choices.options}
    if spec.max_episode_steps is not None:
        sizes["max_episode_steps"] = spec.max_episode_steps
    if spec.frames is not None:
        sizes |= {name: getattr(spec.frames, name) for name in ("channels", "height", "width", "stack")}
        sizes |= {"frames.vector_dim": spec.frames.vector_dim + 1}
    if spec.team is not None:
        sizes |= {"team.obs_dim": spec.team.obs_dim, "team.actions": min(spec.team.actions, default=0)}
    for name, size in sizes.items():
        if not 1 <= size <= (_MAX_VALUES if name != "max_episode_steps" else 2**63):
            raise ValueError(f"{name} = {size}: expected 1 to {_MAX_VALUES}")
    if (wrong := first_true(_contradictions(spec))) is not None:
        raise ValueError(f"{wrong} does not fit the other values of the environment")
    return spec


def _contradictions(spec: EnvSpec) -> dict[str, bool]:
    action, team, unfit = spec.action, spec.team, dict[str, bool]()
    if spec.choices is not None:
        unfit["action.start"] = len(spec.choices.start) != spec.choices.dim
    if (box := spec.box) is not None:
        pairs = list(zip(box.low, box.high, strict=False))
        unfit["action.low"] = not all(map(math.isfinite, (*box.low, *box.high))) or any(a > b for a, b in pairs)
        unfit["action.high"] = len(box.high) != box.dim
    return unfit | {
        "action_parts": not _parts_fit(spec),
        "env_id": not spec.env_id.strip(),
        "action.shape": action.shape is not None and math.prod(action.shape) != action.dim,
        "team": team is not None and (not isinstance(action, Choices) or action.nvec != team.actions),
        "action_mask": spec.action_mask and not 0 < spec.mask_dim < spec.obs_dim,
        "obs_shape": spec.obs_shape is not None and math.prod(spec.obs_shape) != spec.obs_dim - spec.mask_dim,
        "frames": spec.frames is not None and spec.frames.stack * spec.frames.frame_bytes > _MAX_VALUES,
    }


def _parts_fit(spec: EnvSpec) -> bool:
    """True if the parts of a nested action cover all of its columns, boxes before choices."""
    parts, continuous = spec.action_parts, 0 if spec.box is None else len(spec.box.low)
    if not parts:
        return not isinstance(spec.action, Mixed)
    stops = [0, *(part.columns.stop for part in parts)]
    kinds_fit = all(
        (part.start is None) == (part.columns.stop <= continuous)
        and len(part.start or ()) in (0, math.prod(part.shape))
        for part in parts
    )
    if not kinds_fit or sorted(stops) != sorted([*(part.begin for part in parts), spec.action_dim]):
        return False
    try:
        spec.form()(np.zeros(spec.action_dim, np.float32))
    except (ValueError, TypeError, IndexError, KeyError):
        return False
    return True
