"""Constructs environments by id and derives their ``EnvSpec``.

Gymnasium is imported inside the functions: the supervisor, which needs only the default id, starts faster.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes.util
import functools
import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from spreeze.config.schema import ImageConfig
from spreeze.config.section import literal_or_text
from spreeze.envs.action_spaces import action_of, space_text
from spreeze.envs.families import as_single, constructing, engine_of, is_team
from spreeze.envs.goals import goals_of
from spreeze.envs.obs_flattening import leaves_of
from spreeze.envs.pictures import pictures_in, refuse_pictures
from spreeze.envs.vector_task import make_single
from spreeze.errors import ConfigError, EnvError, described, did_you_mean
from spreeze.inference.user_modules import import_named, is_script, is_within
from spreeze.machine.output import say
from spreeze.types import Choices, EnvSpec, FrameSpec, Reasoned, TeamSpec

if TYPE_CHECKING:
    import gymnasium


class EnvOptions(TypedDict, total=False):
    """Options for making an environment, besides its id, module and render mode."""

    plain: bool  # takes pybullet-envs-gymnasium's own environment for its ids
    args: tuple[str, ...]  # ``key=value`` texts for the environment's constructor (``parse_args``)
    image: dict[str, Any] | None  # values of the image part of the configuration; its defaults if None
    picture: bool | None  # True: it observes pictures, which become frames; False: numbers; None: its space decides


BULLET_MODULE = "pybullet_envs_gymnasium"
_FAST_MODULE = "spreeze.envs.bullet"
_IMAGE_MODULE, _MASK_MODULE = "spreeze.envs.images", "spreeze.envs.masks"
_ATARI_PREFIX = "ALE/"
_PLANE = 0  # MuJoCo's ``mjGEOM_PLANE``
_SHADOW_PIXELS = 1024  # side of MuJoCo's shadow map, 4,096 in its models
BULLET_IDS = tuple(
    f"{name}BulletEnv-v0"
    for name in (
        "Walker2D", "HalfCheetah", "Ant", "Hopper", "Humanoid", "HumanoidFlagrun", "HumanoidFlagrunHarder",
        "InvertedPendulum", "InvertedDoublePendulum", "InvertedPendulumSwingup", "Reacher", "Pusher", "Thrower",
    )
)  # fmt: skip
"""Ids that ``pybullet_envs_gymnasium`` 0.6 registers."""

MUJOCO_ID, FALLBACK_ID = "Walker2d-v5", "Pendulum-v1"  # the default task without Bullet, and without MuJoCo either
OWN_IDS = {"spreeze/Synthetic-v0": "spreeze.envs.small_tasks"}
"""Our own environments that need no ``--import`` -> the module that registers each."""
PLUGINS = "gymnasium.envs"  # entry points of packages that register environments
PACKAGES = {
    "MiniGrid-": ("minigrid", "minigrid"), "BabyAI-": ("minigrid", "minigrid"), "Fetch": ("gymnasium_robotics",
    "gymnasium-robotics"), "highway-": ("highway_env", "highway-env"), "ALE/": ("ale_py", "ale-py"),
    "PandaReach": ("panda_gym", "panda-gym"), "PandaPush": ("panda_gym", "panda-gym"),
    "MinAtar/": ("minatar", "minatar"),
}  # fmt: skip
"""Prefix of well-known ids -> the module that registers them, and the package to install."""
_RESERVED_ARGS = ("id", "disable_env_checker", "vectorization_mode", "num_envs")
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_NO_RENDER_MODE = re.compile(r"argument 'render_mode'|takes no arguments")
"""In the TypeErrors of constructors that draw nothing."""


def bullet_missing() -> str | None:
    """Why the Bullet environments cannot be used here, with the remedy; None if they can."""
    if importlib.util.find_spec("pybullet") and importlib.util.find_spec(BULLET_MODULE):
        return None
    version, instead = f"{sys.version_info.major}.{sys.version_info.minor}", f"use --env {_without_bullet()}"
    if sys.version_info >= (3, 12):
        return f"pybullet has no wheel for Python {version}: use Python 3.11, or {instead}"
    return f"pybullet is not installed for Python {version}: pip install pybullet pybullet-envs-gymnasium, or {instead}"


def _without_bullet() -> str:
    return FALLBACK_ID if importlib.util.find_spec("mujoco") is None else MUJOCO_ID


def default_env_id() -> Reasoned:
    """The walking robot of the installed engine, or a task that needs no engine."""
    missing = bullet_missing()
    if missing is None:
        return Reasoned("Walker2DBulletEnv-v0", "default task: Walker2DBulletEnv-v0, pybullet is installed")
    env_id = _without_bullet()
    return Reasoned(env_id, f"{env_id} instead of Walker2DBulletEnv-v0: {missing.split(':')[0]}")


def make_env(
    env_id: str, import_module: str | None = None, render_mode: str | None = None, **options: Unpack[EnvOptions]
) -> gymnasium.Env[Any, Any]:
    """Makes one environment (time limit included, no autoreset, no checker).

    The usual Bullet ids get the task of ``spreeze.envs.bullet``, which differs only in speed, wherever that is proven
    and no picture is requested (``bullet_engine``). An EnvError for an unknown id, a missing module, or a
    constructor that raises.

    Args:
        env_id: Gymnasium id; ``module:Id``, or ``module:Class`` (or function) without an id, only where
            ``import_module`` names the same module or script; or the id of an engine or of a team.
        import_module: module, or path of a script, to import first.
        render_mode: ``rgb_array`` for pictures, ``human`` for a window, None for neither.
        options: as ``EnvOptions``.
    """
    (env_id, args), picture = as_single(env_id, options.get("args", ())), options.get("picture")
    values = parse_args(args)
    if import_module is not None:
        import_user_module(import_module)
    if engine_of(env_id) is not None:
        return _of_engine(make_single(env_id, render_mode, values), env_id, picture)
    if is_team(env_id):
        from spreeze.envs.team_env import make_team

        _refuse_window(env_id, render_mode)
        team = make_team(env_id, import_module, render_mode, values)
        if render_mode == "human" and not team.metadata.get("render_modes"):
            team.close()
            raise EnvError(f'{env_id} does not support render_mode="human": no window')
        return _check_drawing(team, env_id, render_mode)
    name = env_id.rpartition(":")[2]
    registered = _registered(env_id, import_module, fast=not (render_mode or options.get("plain") or args))
    _refuse_window(name, render_mode)
    _catch_mujoco_warnings(registered)
    with constructing(name):
        if render_mode is not None:  # a constructor that draws nothing may lack this argument
            values["render_mode"] = render_mode
        if values.get("render_mode") == "rgb_array" and not has_display():
            _render_offscreen()
        try:
            env = _construct(registered, values, ImageConfig(**(options.get("image") or {})), picture)
        except TypeError as error:
            if render_mode is None or not _NO_RENDER_MODE.search(str(error)):
                raise
            text = f"{name} does not render: no clips and no live picture; its constructor has no render_mode=None"
            raise EnvError(text) from error
        return _check_drawing(env, name, render_mode)


def _of_engine(env: gymnasium.Env[Any, Any], env_id: str, picture: bool | None) -> gymnasium.Env[Any, Any]:
    """The environment of an engine; an EnvError if it observes pictures, which engines do not support."""
    with closed_on_error(env):
        if picture is None:
            refuse_pictures(env.observation_space, f"{env_id}: observation space {space_text(env.observation_space)}")
        if picture:
            raise EnvError(f"{env_id}: env.image = true is not supported for vector engines; use a plain id")
    return env


@contextlib.contextmanager
def closed_on_error(env: gymnasium.Env[Any, Any]) -> Iterator[None]:
    """Closes an environment if the block raises an error."""
    try:
        yield
    except BaseException:
        env.close()
        raise


def _registered(env_id: str, import_module: str | None, *, fast: bool) -> Any:
    """Argument of ``gymnasium.make`` for an id or ``module:Class``: a registered name or a specification."""
    import gymnasium

    module, colon, name = env_id.rpartition(":")
    if colon and not is_within(module, import_module):
        raise EnvError(f"'{env_id}' would import module '{module}': add --import {module} to allow it")
    _register(name, gymnasium.registry)
    if name not in gymnasium.registry:
        entry_point = attribute_at(import_module, name) if colon and import_module else None
        if not callable(entry_point):
            raise _unknown(name, gymnasium.registry, import_module, of_module=bool(colon))
        return gymnasium.envs.registration.EnvSpec(id=f"{os.path.basename(module)}:{name}", entry_point=entry_point)
    registered = _fast_spec(name, gymnasium.registry[name]) if fast else name
    if registered is name:
        _force_direct(gymnasium.registry[name].entry_point)
    return registered


def attribute_at(module: str, name: str) -> Any:
    """``name``, such as ``MyEnv`` or ``Tasks.MyEnv``, in an imported module; None if there is none."""
    return functools.reduce(lambda value, part: getattr(value, part, None), name.split("."), sys.modules.get(module))


def needs_no_import(env_id: str) -> bool:
    """True if the id shows that this package finds the environment's module by itself."""
    return env_id.startswith(_ATARI_PREFIX) or env_id in OWN_IDS or env_id in BULLET_IDS


def _register(name: str, registry: Any) -> None:
    """Registers an id of ours, of Atari, of Bullet or of an installed plugin, which need no ``--import``."""
    if name.startswith(_ATARI_PREFIX):
        if importlib.util.find_spec("ale_py") is None:
            raise EnvError(f"{name}: ale-py is not installed: pip install 'spreeze[atari]'")
        importlib.import_module(_IMAGE_MODULE).register()
    elif name in OWN_IDS:
        importlib.import_module(OWN_IDS[name])
    elif (namespace := name.partition("/")[0]) != name:
        if not any(known.startswith(f"{namespace}/") for known in registry):
            _load_plugins(namespace)
    elif name not in registry and bullet_missing() is None:
        importlib.import_module(BULLET_MODULE)


def _load_plugins(namespace: str) -> None:
    """Registers the environments of installed plugins with this namespace (newer versions of Gymnasium do not)."""
    for plugin in metadata.entry_points(group=PLUGINS, name=namespace):
        try:
            plugin.load()()
        except Exception as error:
            raise EnvError(f"environments {namespace}/: {plugin.value}: {described(error)}") from error


def known_ids() -> tuple[str, ...]:
    """Ids of all registered environments, and Bullet's."""
    import gymnasium

    return (*gymnasium.registry, *BULLET_IDS)


def newest_version(env_id: str) -> str | None:
    """The newest version of an id without a version; None if the id is unknown, or has one."""
    if not re.fullmatch(r"[A-Za-z]\w*", env_id):
        return None
    versions = [name for name in known_ids() if re.fullmatch(rf"{env_id}-v\d+", name)]
    return max(versions, key=lambda name: int(name.rpartition("-v")[2]), default=None)


def is_bullet(env_id: str) -> bool:
    """True for the Bullet tasks; each environment takes about 30 MB."""
    return env_id.rpartition(":")[2] in BULLET_IDS


def is_known_to_repeat(env_id: str) -> bool:
    """True if several environments of this id are known to work at once: ours, Gymnasium's own and those of engines."""
    import gymnasium

    name = env_id.rpartition(":")[2]
    registered = gymnasium.registry.get(name)
    entry = "" if registered is None or not isinstance(registered.entry_point, str) else registered.entry_point
    return engine_of(env_id) is not None or is_bullet(env_id) or entry.startswith(("gymnasium.", "spreeze."))


def parse_args(args: tuple[str, ...]) -> dict[str, Any]:
    """``key=value`` texts as keywords; a value is read as JSON or Python, a bare word as a string.

    An EnvError: no '=', no name, a name given twice or reserved, or a value that ``literal_or_text`` refuses.
    """
    values: dict[str, Any] = {}
    for text in args:
        key, sep, raw = text.partition("=")
        key, start = key.strip(), f"--env-arg {text[:80]!r}:"
        if not sep or not key.isidentifier():
            raise EnvError(f"{start} expected key=value, for example max_episode_steps=200")
        if key in _RESERVED_ARGS:
            raise EnvError(f"{start} '{key}' is set by Spreeze; remove it")
        if key in values:
            raise EnvError(f"{start} '{key}' was given twice")
        try:
            values[key] = literal_or_text(raw)
        except ConfigError as error:
            raise EnvError(f"{start} {error}") from None
        if key == "render_mode" and values[key] == "human":
            raise EnvError(f"{start} samplers cannot open windows; use spreeze play")
    return values


def bullet_engine(env_id: str, *, plain: bool = False, args: tuple[str, ...] = ()) -> Reasoned | None:
    """Choice of ``fast`` or ``plain`` for a usual Bullet id, with its reason; None for any other id."""
    name = env_id.rpartition(":")[2]
    if name not in BULLET_IDS or bullet_missing() is not None:
        return None
    fast: Any = importlib.import_module(_FAST_MODULE)
    if plain:
        return Reasoned("plain", f"{BULLET_MODULE}'s own environment, as requested")
    reason = "--env-arg is for its constructor" if args else fast.unproven()
    if not args and _bullet_task(name) not in fast.TASKS:
        reason = "there is no faster equivalent"
    if reason is not None:
        return Reasoned("plain", f"{BULLET_MODULE}'s own environment: {reason}")
    return Reasoned("fast", f"batched Bullet calls, equal to {BULLET_MODULE} bit for bit")


def _bullet_task(name: str) -> str:
    return name.removesuffix("BulletEnv-v0")


def _fast_spec(name: str, registered: Any) -> Any:
    """Specification of the fast task for a registered name, or the name itself."""
    is_package = isinstance(registered.entry_point, str) and registered.entry_point.startswith(BULLET_MODULE)
    engine = bullet_engine(name) if is_package else None  # a user may have registered another under the same id
    if engine is None or engine.value != "fast":
        return name
    spec = copy.deepcopy(registered)
    spec.entry_point, spec.kwargs = f"{_FAST_MODULE}:make", {"task": _bullet_task(name)}
    return spec


def has_display() -> bool:
    """True where a window can be opened; Bullet ends the whole process without one."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _refuse_window(name: str, render_mode: str | None) -> None:
    if render_mode == "human" and not has_display():
        raise EnvError(f"no display for a window of {name}: set DISPLAY or record a clip")


def _check_drawing(env: gymnasium.Env[Any, Any], name: str, render_mode: str | None) -> gymnasium.Env[Any, Any]:
    """The environment, unless a picture is wanted and by its metadata it draws only in a window, or not at all."""
    modes = (env.metadata or {}).get("render_modes")
    if render_mode == "rgb_array" and modes is not None and "rgb_array" not in modes:
        env.close()
        how = f"renders only as {', '.join(map(str, modes))}, which needs a display" if modes else "does not render"
        raise EnvError(f"{name} {how}: no clips and no live picture; add 'rgb_array' to its render_modes")
    renderer: Any = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is not None:
        _follow_robot(renderer)
        # A policy's observations stay as they are.
        if render_mode == "rgb_array" and not pictures_in(env.observation_space):
            _draw_faster(renderer)
    return env


def _follow_robot(renderer: Any) -> None:
    """Points MuJoCo's camera at the robot, over an infinite floor.

    Gymnasium 1.4's camera is static: each picture resets its type to a free one, despite ``trackbodyid``. A plane of
    size 0 is drawn up to the horizon; for contacts every plane is infinite.
    """
    if renderer.camera_id != -1:
        return
    model = renderer.model
    cameras = [model.camera(index).name for index in range(model.ncam)]
    if "track" in cameras:
        renderer.camera_id = cameras.index("track")
        for floor in [geom for geom in range(model.ngeom) if model.geom_type[geom] == _PLANE]:
            size, material = model.geom_size[floor, :2], model.geom_matid[floor]
            if material >= 0 and not model.mat_texuniform[material] and (size > 0.0).all():
                # The texture was repeated this often over the whole plane; now the number counts per metre.
                model.mat_texrepeat[material] /= 2.0 * size
            size[:] = 0.0


def _draw_faster(renderer: Any) -> None:
    """Draws MuJoCo's pictures with coarser shadows and edges, which takes a quarter of the time without a GPU."""
    quality = renderer.model.vis.quality
    quality.shadowsize = min(quality.shadowsize, _SHADOW_PIXELS)
    quality.offsamples = 0


def _render_offscreen() -> None:
    """Makes MuJoCo and pygame draw without a display, which they would otherwise want; a user's setting is kept."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if "MUJOCO_GL" not in os.environ and importlib.util.find_spec("mujoco") is not None:
        library = next((name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)), None)
        if library is not None:
            os.environ["MUJOCO_GL"] = library.lower()


def _catch_mujoco_warnings(registered: Any) -> None:
    """Sends MuJoCo's warnings to the log: without a handler it appends them to a file in the working directory."""
    import gymnasium

    entry = gymnasium.registry[registered].entry_point if isinstance(registered, str) else registered.entry_point
    if isinstance(entry, str):
        with contextlib.suppress(Exception):  # making the environment raises the same error
            importlib.import_module(entry.partition(":")[0])
    if (mujoco := sys.modules.get("mujoco")) is not None and hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(_mujoco_warning)


@functools.cache
def _mujoco_warning(text: str) -> None:
    """Prints each warning once."""
    say(f"MuJoCo: {text}", as_json=True)


def refuse_foreign(env_id: str, import_module: str | None, allowed: str | None) -> None:
    """Raises an EnvError if an environment named by a file, of any origin, needs a module not allowed."""
    module = foreign_module(env_id, import_module)
    if module not in (None, allowed):
        raise EnvError(f"{env_id} comes from module '{module}': if you trust it, add --import {module}")


def foreign_module(env_id: str, import_module: str | None) -> str | None:
    """The module from outside of this package that an environment needs; None if it needs none."""
    prefix = "" if engine_of(env_id) is not None or is_team(env_id) else env_id.rpartition(":")[0]
    modules = filter(None, (import_module, prefix))
    return next((module for module in modules if module.partition(".")[0] != "spreeze"), None)


def import_user_module(module: str) -> None:
    """Imports the module or script that ``--import`` names; an EnvError if that fails."""
    if not is_script(module) and not _MODULE.match(module):
        raise EnvError(
            f"--import {module!r}: expected a module name such as my_package.my_envs, or a script such as my_envs.py"
        )
    try:
        import_named(module)
    except Exception as error:
        raise EnvError(f"--import {module}: {described(error)}") from error


def _unknown(name: str, registry: Any, import_module: str | None, *, of_module: bool) -> EnvError:
    """The error about an unregistered id; ``of_module``: a class of the module was searched for, too."""
    if name in BULLET_IDS:
        return EnvError(f"{name} needs pybullet; {bullet_missing() or 'its module does not register it'}")
    package = next((entry for prefix, entry in PACKAGES.items() if name.startswith(prefix)), None)
    imported = None if import_module is None else import_module.partition(".")[0]
    if package is not None and imported != package[0]:
        module, install = package
        steps = [] if importlib.util.find_spec(module) else [f"pip install {install}"]
        steps += [] if "/" in name else [f"add --import {module}"]  # plugins register their ids themselves
        if steps:
            return EnvError(f"{name} comes from module '{module}': {', then '.join(steps)}")
    known = [*registry, *BULLET_IDS, *OWN_IDS]
    if import_module is None:
        script = name if is_script(name) else "my_robot.py"
        hint = "" if script == name else did_you_mean(name, known)
        hint = hint or f"; your own: --import MODULE that registers it, or --import {script} --env {script}:CLASS"
        return EnvError(f"unknown environment '{name}'{hint}")
    text = f"unknown environment '{name}': module '{import_module}' was imported, but has no such"
    if not of_module and isinstance(getattr(sys.modules[import_module], name, None), type):
        return EnvError(f"{text} id; its class {name} is --env {import_module}:{name}")
    names = [env_id for env_id, spec in registry.items() if _top_module(spec.entry_point) == imported]
    if of_module:
        kinds = {key: value for key, value in vars(sys.modules[import_module]).items() if isinstance(value, type)}
        names += [key for key, value in kinds.items() if getattr(value, "__module__", None) == import_module]
    hint = did_you_mean(name, names) or did_you_mean(name, known)
    if not hint and names:
        hint = f"; it has {', '.join(names[:5])}"
    hint = hint or "; gymnasium.register has to be called when that module is imported"
    kind = "id, class or function" if of_module else "id"
    if is_script(import_module):
        hint += "; code under if __name__ == '__main__', or after its first training call, does not run"
    return EnvError(f"{text} {kind}{hint}")


def _top_module(entry_point: Any) -> str:
    module = entry_point if isinstance(entry_point, str) else str(getattr(entry_point, "__module__", ""))
    return module.partition(":")[0].partition(".")[0]


def _force_direct(entry_point: Any) -> None:
    """Gives each Bullet environment its own client.

    ``BulletClient()`` without a mode joins any Bullet server of this machine with open shared memory. The replacement
    also loads models from zeroed memory, and caches bound functions, which saves a sixth of a step.
    """
    if not isinstance(entry_point, str) or not entry_point.startswith(BULLET_MODULE):
        return
    bases: Any = importlib.import_module(f"{BULLET_MODULE}.env_bases")
    if isinstance(bases.bullet_client, types.SimpleNamespace):
        return
    base: Any = importlib.import_module(f"{_FAST_MODULE}.base")
    original: Any = bases.bullet_client.BulletClient
    direct: int = bases.pybullet.DIRECT

    class DirectClient(original):  # type: ignore[misc]
        def __init__(self, connection_mode: int | None = None, hostName: str | None = None, options: str = "") -> None:  # noqa: N803
            super().__init__(direct if connection_mode is None else connection_mode, hostName, options)

        def __getattr__(self, name: str) -> Any:
            function = super().__getattr__(name)
            if name == "loadMJCF":
                function = base.zeroed_links()(function)
            if name != "disconnect":
                self.__dict__[name] = function
            return function

    bases.bullet_client = types.SimpleNamespace(BulletClient=DirectClient)


def describe(env: gymnasium.Env[Any, Any], import_module: str | None = None) -> EnvSpec:
    """An environment's description; an EnvError names a space that no algorithm here can handle."""
    spec = env.spec
    env_id = spec.id if spec is not None else type(env.unwrapped).__name__
    frames: FrameSpec | None = getattr(env, "frame_spec", None)
    team: TeamSpec | None = getattr(env, "team", None) if is_team(env_id) else None
    if team is None:
        action, parts = action_of(env_id, env.action_space)
    else:
        action, parts = Choices(team.actions, shape=(team.size,)), ()
    if frames is None:
        obs_dim, layout = _observations(env_id, env.observation_space)
    else:
        obs_dim, layout = frames.stack * frames.frame_bytes, ()
    if frames is not None or team is not None:
        layout = getattr(env, "obs_layout", ())
    return EnvSpec(
        env_id=env_id,
        import_module=import_module,
        action=action,
        action_parts=parts,
        team=team,
        obs_dim=obs_dim,
        obs_layout=layout,
        frames=frames,
        max_episode_steps=None if spec is None else getattr(env, "max_steps", None) or spec.max_episode_steps,
        obs_shape=None if frames is not None or layout else tuple(env.observation_space.shape or ()),
        reward_threshold=None if spec is None or spec.reward_threshold is None else float(spec.reward_threshold),
        goals=None if frames is not None else goals_of(env),
    )


def _observations(env_id: str, space: Any) -> tuple[int, tuple[str, ...]]:
    """O, and the layout of the leaves of a nested or discrete space in the vector; empty for a single Box."""
    from gymnasium import spaces

    what = f"{env_id}: observation space {space_text(space)}"
    leaves = () if isinstance(space, spaces.Box) else leaves_of(space, what)
    size = spaces.flatdim(space) if isinstance(space, spaces.Box) else leaves[-1].stop if leaves else 0
    if not size:
        raise EnvError(f"{what} is empty")
    return size, tuple(leaf.text() for leaf in leaves)


def _construct(name: Any, values: dict[str, Any], image: ImageConfig, picture: bool | None) -> gymnasium.Env[Any, Any]:
    """The environment of a registered name (or specification), or its frames where it observes pictures."""
    import gymnasium

    images: Any = importlib.import_module(_IMAGE_MODULE)
    if isinstance(name, str) and name.startswith(_ATARI_PREFIX) and values.get("obs_type") != "ram":
        return cast("gymnasium.Env[Any, Any]", images.make_atari(name, image, values))
    env = gymnasium.make(name, disable_env_checker=True, **values)
    masks: Any = importlib.import_module(_MASK_MODULE)
    with closed_on_error(env):
        env = masks.with_info_mask(env)
        name = name if env.spec is None else env.spec.id
        text = f"{name}: observation space {space_text(env.observation_space)}"
        pictures = pictures_in(env.observation_space, picture, text)
    return images.ImageFrames(env, pictures, image, as_asked=bool(picture)) if pictures else env  # type: ignore[no-any-return]
