"""Training and trained policies from Python: ``from spreeze import train, load_policy``.

    run = train("Pendulum-v1", target_return=-200)
    updates = run.metric("updates_per_s")  # arrays: updates.t, updates.value
    policy = load_policy(run)
    action = policy.predict(observation)

A run is a separate process, ``python -m spreeze.train``: it does not affect threads, signal handlers and CUDA context
of the caller, and can be watched, stopped and resumed from the command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import numpy as np

from spreeze import errors
from spreeze.cli.arguments import CHECKPOINTS
from spreeze.cli.evaluate import environment_errors, find_weights, policy_of, recorded_spec
from spreeze.config import python_path
from spreeze.config.section import value_text
from spreeze.envs.callers import name_of, unwrap_call
from spreeze.envs.make import refuse_foreign
from spreeze.envs.obs_flattening import MASK, Flattener, Leaf, LeafError, joined_mask, leaves_of
from spreeze.envs.task import ActionScaling, open_env
from spreeze.errors import ConfigError, EnvError, SpreezeError, UsageError, WorkerError, did_you_mean
from spreeze.files import read_json
from spreeze.inference.policy import Policy, State, exploring_arrays
from spreeze.inference.user_modules import end_import
from spreeze.machine.output import BackgroundWriter, followed, write
from spreeze.machine.processes import ENDS_WITH
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.metrics.table import TABLE
from spreeze.run_directory import find_run, read_config, state_of
from spreeze.runtime.callback import BaseCallback
from spreeze.transport.weights import Weights, read_weights
from spreeze.types import EnvSpec

if TYPE_CHECKING:
    import gymnasium

    from spreeze.envs.callers import Task

_LAST_LINES = 20
_ERROR = "error: "


def train(
    env: Task,
    *,
    algo: str | None = None,
    mode: str | None = None,
    seed: int = 1,
    auto: bool = False,
    seconds: float | None = None,
    env_steps: int | None = None,
    updates: int | None = None,
    target_return: float | None = None,
    settings: Mapping[str, Any] | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
    import_module: str | None = None,
    env_args: Mapping[str, Any] | Sequence[str] = (),
    callbacks: Iterable[type[BaseCallback] | Callable[[], BaseCallback] | str] = (),
    quiet: bool = False,
) -> Run:
    """Trains until a stop condition, or without one until the run ends by itself, and returns the run.

    Ctrl-C (``KeyboardInterrupt``, also the stop button of a notebook) writes a checkpoint, evaluates, and returns the
    run; a second one stops it at once and is raised. If this process is killed, the run stops as if you had pressed
    Ctrl-C.

    Args:
        env: Gymnasium id of the task, Gymnasium's ``EnvSpec``, or a class or function at the top of this script or of
            a module that makes it; ``lambda: MyEnv(size=5)`` is the class with that argument. Each process of the run
            imports the script; without a main guard, the import stops at this call.
        algo: algorithm; None: from profile or action space.
        mode: such as ``spreeze``, ``hts`` or ``serial``; None: from profile or algorithm, otherwise ``spreeze``.
        seed: random seed of networks, exploration and environments.
        auto: let the tuner choose settings that are not set; in mode ``spreeze`` it measures while the run trains, for
            at most 60 s; results are cached.
        seconds: stop after this training time. Without a stop condition the run ends by itself: at the published
            return of the task, once returns no longer rise, or after ``stop.budget_s``; 0: it trains until Ctrl-C.
        env_steps: stop after this many env steps.
        updates: stop after this many gradient steps.
        target_return: stop at this mean evaluation return.
        settings: other settings, such as ``{"sac.gamma": 0.98, "learner.batch_size": 512}``.
        runs_dir: parent directory of run directories.
        name: name of the run; None: from date, environment, algorithm and seed.
        import_module: module or script that defines or registers the environment; None: that of its class, if this
            program has registered it. Classes and functions of a notebook cannot be imported.
        env_args: keyword arguments of the environment's constructor: a mapping to None, numbers, strings, and nested
            lists, tuples and dictionaries, or ``key=value`` strings as for ``--env-arg``.
        callbacks: classes of callbacks (``spreeze.BaseCallback``) at the top of this script or of a module, lambdas
            such as ``lambda: Curriculum(goal=5)``, or ``MODULE:CLASS`` texts; each gets its own process.
        quiet: do not print the output of the run.

    Raises:
        UsageError: invalid arguments, before anything was started; see its subclasses.
        WorkerError: the run failed; it can be resumed.
        KeyboardInterrupt: interrupted before training started, or twice.
    """
    end_import()
    env, arguments = unwrap_call(env)
    env_id, import_module = name_of(env, import_module)
    texts = [f"{key}={value_text(value)}" for key, value in arguments.items()]
    if isinstance(env_args, Mapping):
        texts += [f"{key}={value_text(value)}" for key, value in env_args.items()]
    elif isinstance(env_args, str):
        raise UsageError(f"env_args = {env_args!r}: expected a mapping such as {{'g': 5.0}}, or ['g=5.0']")
    else:
        texts += env_args
    return _train([
        f"--env={env_id}", f"--seed={seed}", f"--runs-dir={os.fspath(runs_dir)}",
        *_flags(algo=algo, mode=mode, name=name), *(f"--env-arg={text}" for text in texts),
        *_common_flags(import_module, auto, settings),
        *(f"--callback={_callback_flag(callback)}" for callback in callbacks),
        *_flags(seconds=seconds, env_steps=env_steps, updates=updates, target_return=target_return),
    ], import_module, quiet)  # fmt: skip


def load_policy(
    run: Run | str | os.PathLike[str],
    which: str = "best",
    *,
    runs_dir: str | os.PathLike[str] = "runs",
    import_module: str | None = None,
    seed: int | None = None,
) -> TrainedPolicy:
    """Loads the policy of a run; constructs the environment only for nested observations.

    Args:
        run: a ``Run``, the name or path of one, "latest", a ``.safetensors`` file of weights, or the name of a
            pretrained policy, such as "walker2d".
        which: "best" (by evaluation; before the first one the latest) or "latest".
        runs_dir: directory in which names are looked up.
        import_module: module that registers the environment, if it is constructed.
        seed: random seed of ``predict(deterministic=False)``; None: random.

    Raises:
        RunError: no such run, or it has no weights yet.
        WeightsError: the weights are damaged.
        EnvError: the environment cannot be constructed.
    """
    if which not in CHECKPOINTS:
        raise ConfigError(f"which = {which!r}: expected {' or '.join(CHECKPOINTS)}")
    if isinstance(run, Run):
        import_module = import_module or run.import_module
    weights = read_weights(find_weights(_run_argument(run), Path(runs_dir), which))
    return TrainedPolicy(weights, import_module, seed)


@dataclass(frozen=True, eq=False)
class History:
    """One metric over a run, K points: the last hour as sampled, one day as means over 10 s, before that over 1 min."""

    name: str
    unit: str
    meaning: str
    t: np.ndarray
    """Wall seconds since the run started, float64 [K]."""
    env_steps: np.ndarray
    """Env steps at that time, int64 [K]."""
    value: np.ndarray
    """float64 [K], in ``unit``."""

    def __len__(self) -> int:
        return len(self.t)


@dataclass(frozen=True, eq=False)
class Evaluations:
    """The K evaluations of a run, oldest first."""

    t: np.ndarray
    """Wall seconds since the run started, float64 [K]."""
    env_steps: np.ndarray
    """Env steps of the policy, int64 [K]."""
    updates: np.ndarray
    """Gradient steps of the policy, int64 [K]."""
    episodes: np.ndarray
    """Episodes played, int64 [K]."""
    return_mean: np.ndarray
    """Mean return of the episodes, float64 [K]."""
    return_std: np.ndarray
    """Standard deviation of the returns, float64 [K]."""
    length_mean: np.ndarray
    """Mean length of the episodes in env steps, float64 [K]."""

    def __len__(self) -> int:
        return len(self.t)


class Run:
    """A run by name, path or "latest"; running, ended or crashed. Properties read its directory each time."""

    def __init__(
        self,
        name_or_path: str | os.PathLike[str] = "latest",
        runs_dir: str | os.PathLike[str] = "runs",
        *,
        import_module: str | None = None,
    ) -> None:
        """``policy`` and ``resume`` may import ``import_module`` for the environment; a RunError without such a run."""
        self.path = find_run(_run_argument(name_or_path), Path(runs_dir)).absolute()
        self.import_module = import_module

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})  # {self.state}"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> str:
        """One of ``LIVE_STATES``, ``finished``, ``stopped``, ``failed``, ``crashed`` (process killed), ``damaged``."""
        return state_of(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """Summary of the last session that ended normally; empty before."""
        return read_json(self.path / "summary.json")

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """All settings that are set, as section -> field -> value."""
        return read_config(self.path)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have values."""
        return tuple(self._reader.names())

    def metric(self, name: str) -> History:
        """One metric over the whole run, perhaps empty; a ConfigError if unknown, a RunError if its file is damaged."""
        with self._reader.connected() as reader:
            known, series = reader.names(), reader.whole_series(name)
        unit, meaning = series.unit, series.meaning
        if name not in known:
            try:
                row = TABLE.by_name(name)
            except KeyError:
                names = dict.fromkeys([*known, *(metric.name for metric in TABLE.metrics)])
                raise ConfigError(f"no metric '{name}'{did_you_mean(name, names)} (run.metrics has all)") from None
            unit, meaning = row.unit, row.meaning
        return History(name, unit, meaning, series.t, series.step.astype(np.int64), series.mean)

    @property
    def evaluations(self) -> Evaluations:
        rows = self._reader.evaluations()
        columns = dict(zip(EvaluationRow._fields, zip(*rows, strict=True), strict=True)) if rows else {}
        counts = ("env_steps", "updates", "episodes")
        kinds = {name: np.int64 if name in counts else np.float64 for name in Evaluations.__dataclass_fields__}
        return Evaluations(**{name: np.array(columns.get(name, ()), kind) for name, kind in kinds.items()})

    def policy(self, which: str = "best", *, seed: int | None = None) -> TrainedPolicy:
        """The policy of this run; arguments and errors as ``load_policy``."""
        return load_policy(self, which, seed=seed)

    def resume(
        self,
        *,
        auto: bool = False,
        seconds: float | None = None,
        env_steps: int | None = None,
        updates: int | None = None,
        target_return: float | None = None,
        settings: Mapping[str, Any] | None = None,
        callbacks: Iterable[type[BaseCallback] | Callable[[], BaseCallback] | str] = (),
        quiet: bool = False,
    ) -> Run:
        """Continues this run from its checkpoint with its settings; arguments and errors as ``train``.

        ``seconds`` counts from now; ``env_steps`` and ``updates`` count from the start of the run.
        """
        end_import()
        return _train([
            f"--resume={self.path}", *_common_flags(self.import_module, auto, settings),
            *(f"--callback={_callback_flag(callback)}" for callback in callbacks),
            *_flags(seconds=seconds, env_steps=env_steps, updates=updates, target_return=target_return),
        ], self.import_module, quiet)  # fmt: skip

    @property
    def _reader(self) -> MetricsReader:
        return MetricsReader(self.path / "metrics.db")


class TrainedPolicy:
    """A NumPy policy from observations to actions of the environment, without torch.

    It flattens nested observations, normalizes them, runs the network, and scales actions to the bounds of the action
    space. Threads may share an instance.
    """

    def __init__(self, weights: Weights, import_module: str | None = None, seed: int | None = None) -> None:
        """Errors as ``load_policy``."""
        self.path = weights.path
        self.spec = recorded_spec(weights)
        """Spaces of the environment."""
        self._import_module = import_module
        if "network" in weights.meta:  # defined in the run's module
            _refuse_foreign(self.spec, import_module)
        self._has_memory = policy_of(weights, self.spec).state_dim > 0  # raises if they have no policy
        self._weights = weights
        self._free = {greedy: [self._new_policy(greedy=greedy)] for greedy in (True, False)}
        """Idle policies: no thread uses them, so their buffers may be overwritten."""
        self._to_env_units, self._form = ActionScaling(self.spec), self.spec.form()
        self._rng = np.random.default_rng(seed)
        # The parts of a team's observation, or of one with images, are joined by the environment.
        nested = self.spec.parts and not self.spec.team and self.spec.frames is None
        self._leaves = self._leaves_of_env() if nested else ()
        self._flatten = Flattener(self._leaves)

    def predict(self, obs: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """The action of ``act`` by a policy without memory; a UsageError by one with."""
        if self._has_memory:
            raise UsageError(
                "this policy has a memory, which predict would lose at each step; use act: action, state = "
                "policy.act(obs, state), with state = () at an episode's first step"
            )
        return self.act(obs, None, deterministic, action_mask=action_mask)[0]

    def act(
        self, obs: Any, state: State | None = None, deterministic: bool = True, *, action_mask: Any = None
    ) -> tuple[Any, State]:
        """Returns the action for one observation, or actions for N, and the state for the next step.

        Args:
            obs: observation of the environment, with its shape or [N, *shape]; for ``Dict`` and ``Tuple`` such a
                structure, a structure of stacked arrays (as from vector environments), or a list of structures; with
                images the last k frames uint8 [k, *frame], as from ``make_env``.
            state: returned by the previous step; None or empty at the start of an episode, and for policies without
                memory.
            deterministic: return the best action; otherwise sample one as for exploration.
            action_mask: mask [K] or [N, K], such as ``info["action_mask"]``; None: from the observation, if it has one.
                For Dict and Tuple actions also such a structure of masks [n], for one observation.

        Returns:
            Continuous: float32 [*action_shape], or [N, *action_shape], within the bounds of the action space.
            Discrete: the environment's own number, ``np.int64``, or int64 [N].
            MultiDiscrete and MultiBinary: the environment's own numbers, int64 [*shape], or [N, *shape].
            Dict and Tuple: such a structure of these, in the types of the environment's spaces.
            A team: one number for each agent, int64 [agents], or [N, agents].

        Raises:
            UsageError: observation or mask have the wrong shape, or are not finite.
        """
        rows, single = self._rows(obs)
        if action_mask is None and self.spec.action_mask and isinstance(obs, Mapping):
            action_mask = obs.get(MASK)
        if self.spec.action_mask or action_mask is not None:
            rows = self._with_masks(rows, self._mask(action_mask, len(rows)))
        drawn, state = self._act(rows, state or (), greedy=deterministic)
        actions = self._to_env_units(drawn)
        return self._form(actions[0] if single else actions), state

    def make_env(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Constructs an environment compatible with ``predict``; an EnvError if none can be made that fits."""
        spec = self.spec
        _refuse_foreign(spec, self._import_module)
        with environment_errors(spec.env_id):
            return open_env(spec, render_mode)

    def _act(self, rows: np.ndarray, state: State, *, greedy: bool) -> tuple[np.ndarray, State]:
        """Actions and next state, from a policy that no other thread uses during the call."""
        free = self._free[greedy]
        try:
            policy = free.pop()  # atomic for a list
        except IndexError:
            policy = self._new_policy(greedy=greedy)
        try:
            return policy.act(rows, state, None if greedy else self._rng)
        finally:
            free.append(policy)

    def _new_policy(self, *, greedy: bool) -> Policy:
        arrays = self._weights.arrays
        return Policy.from_weights(arrays if greedy else exploring_arrays(arrays), self._weights.meta)

    def _mask(self, mask: Any, count: int) -> np.ndarray:
        """Masks as the network takes them, float32 [count, K]."""
        choice = self.spec.choices
        if not self.spec.action_mask or choice is None:
            raise UsageError(f"action_mask: {self.spec.env_id} gives none; remove it")
        if mask is None:
            raise UsageError(f"{self.spec.env_id} masks actions: pass action_mask=info['action_mask'] of reset or step")
        try:
            masks = np.atleast_2d(np.asarray(joined_mask(mask, choice, self.spec.action_parts), np.float32))
        except (TypeError, ValueError):
            raise UsageError(f"action_mask {str(mask)[:60]}: expected an array of 0 and 1") from None
        if masks.shape != (count, self.spec.mask_dim):
            raise UsageError(
                f"action_mask of shape {masks.shape}: expected {(self.spec.mask_dim,)} for each of {count} observations"
            )
        if not np.isin(masks, (0.0, 1.0)).all() or not all(masks[:, part].any(axis=1).all() for part in choice.slices):
            of_which = "" if choice.dim == 1 else " of each choice"
            raise UsageError(f"action_mask: expected 1 for each action that is allowed, at least one{of_which}, else 0")
        return masks

    def _with_masks(self, rows: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """Appends each observation's mask; with images to each of its frames."""
        if self.spec.frames is None:
            return np.concatenate([rows, masks], axis=1)
        frames = rows.reshape(*rows.shape[:2], -1)
        repeated = np.repeat(masks.view(np.uint8)[:, None], frames.shape[1], axis=1)
        return np.concatenate([frames, repeated], axis=2)

    def _leaves_of_env(self) -> tuple[Leaf, ...]:
        """The parts of a nested observation: their ranges are known to the environment alone."""
        with contextlib.closing(self.make_env()) as env:
            leaves = leaves_of(env.observation_space, "observation space")
        layout = tuple(leaf.text() for leaf in leaves)
        if layout != self.spec.parts:
            raise EnvError(
                f"{self.path}: trained on an observation laid out as {'; '.join(self.spec.parts)}, but "
                f"{self.spec.env_id} has {'; '.join(layout)}"
            )
        return leaves

    def _rows(self, obs: Any) -> tuple[np.ndarray, bool]:
        """Observations as the network takes them, [N, ...], and whether there was a single one."""
        frames, spec = self.spec.frames, self.spec
        if self._leaves:
            parts, single = self._structures(obs)
            try:
                rows = np.stack([self._flatten(part) for part in parts])
            except LeafError as error:
                raise UsageError(f"observation: {error}") from None
        else:
            size = spec.obs_dim - spec.mask_dim
            shape = (size,) if spec.obs_shape is None else spec.obs_shape  # a team's observation has none
            if frames is not None:  # the masks follow
                shape = (frames.stack, *dataclasses.replace(frames, vector_dim=spec.vector_dim - spec.mask_dim).shape)
            rows, single = self._array(obs, shape)
            if frames is not None:
                return rows, single
            rows = rows.reshape(len(rows), size)
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
            raise UsageError(f"observation[{column}] = {rows[row, column]}: only finite values have a best action")
        return rows, single

    def _array(self, obs: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, bool]:
        images = self.spec.frames is not None
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinite, and is rejected later
                array = np.asarray(obs) if images else np.asarray(obs, np.float32)
        except (TypeError, ValueError):
            raise UsageError(f"observation {str(obs)[:60]} ({type(obs).__name__}): expected an array") from None
        if images and array.dtype != np.uint8:
            raise UsageError(f"observation of type {array.dtype}: expected images of bytes (uint8)")
        if array.shape == shape:
            return array[None], True
        if array.shape[1:] != shape or not len(array):
            kind = "; policy.make_env() stacks frames so" if images else ""
            several = ", ".join(map(str, ("N", *shape)))
            raise UsageError(f"observation of shape {array.shape}: expected {shape}, or ({several}) for several{kind}")
        return array, False

    def _structures(self, obs: Any) -> tuple[list[Any], bool]:
        """Nested observations, one by one, and whether there was a single one."""
        first = self._leaves[0]
        if isinstance(obs, list) and first.path:
            parts, single = obs, False
        else:
            value = obs
            try:
                for key in first.path:
                    value = value[key]
            except (KeyError, IndexError, TypeError):
                raise UsageError(f"observation: {first.name} is missing") from None
            shape = np.shape(value)
            single = len(shape) <= len(first.space.shape)
            parts = [obs] if single else [_part(obs, index) for index in range(shape[0])]
        if not parts:
            raise UsageError("no observation: expected at least one")
        return parts, single


def _refuse_foreign(spec: EnvSpec, allowed: str | None) -> None:
    """Calls ``refuse_foreign``; its error names the Python argument in place of the flag."""
    try:
        refuse_foreign(spec.env_id, spec.import_module, allowed)
    except EnvError as error:
        raise EnvError(_in_python_terms(str(error))) from None


def _in_python_terms(text: str) -> str:
    """A message of the command line, with its flag replaced by the Python argument."""
    return re.sub(r"(?:add )?--import ([\w./-]*\w)", r"give import_module='\1'", text)


def _part(obs: Any, index: int) -> Any:
    if isinstance(obs, Mapping):
        return {key: _part(value, index) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_part(value, index) for value in obs)
    return obs[index]


def _run_argument(run: Run | str | os.PathLike[str]) -> str:
    """Argument of ``find_run``: a text is a name or a path, a path object always a path."""
    if isinstance(run, Run):
        return str(run.path)
    if not isinstance(run, str | os.PathLike):
        raise UsageError(f"run = {run!r}: expected a Run, the name or path of one, or 'latest'")
    return run if isinstance(run, str) else str(Path(run).absolute())


def _callback_flag(callback: Any) -> str:
    """``MODULE:CLASS(name=value, ...)`` of a callback."""
    if isinstance(callback, str):
        return callback
    if isinstance(callback, BaseCallback):
        kind = type(callback).__name__
        raise UsageError(f"callbacks: an instance of {kind} cannot be sent to another process; give {kind} itself")
    made: Any
    try:
        made, arguments = unwrap_call(callback)
        if not (isinstance(made, type) and issubclass(made, BaseCallback)):
            kind = " ".join(repr(made).split())[:80]
            raise UsageError(f"callbacks: {kind} is not a subclass of spreeze.BaseCallback")
        name, module = name_of(cast("Any", made))
    except UsageError as error:
        text = str(error).replace("env = ", "callbacks: ", 1)
        raise UsageError(text.replace("make_env", "make_callback").replace("the environment", "the callback")) from None
    given = ", ".join(f"{key}={value_text(value)}" for key, value in arguments.items())
    return f"{module}:{name.rpartition(':')[2]}" + (f"({given})" if given else "")


def _flags(**values: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _common_flags(import_module: str | None, auto: bool, settings: Mapping[str, Any] | None) -> list[str]:
    if not isinstance(settings, Mapping | None):
        raise UsageError(f"settings = {settings!r}: expected a mapping such as {{'sac.gamma': 0.98}}")
    flags = [f"--import={import_module}"] if import_module else []
    flags += ["--auto"] if auto else []
    return flags + [f"--set={key}={value_text(value)}" for key, value in (settings or {}).items()]


def _train(options: Iterable[str], import_module: str | None, quiet: bool) -> Run:
    # Ctrl-C reaches the foreground process group of a terminal and Python's main thread. If the main thread waits for
    # the run, it forwards Ctrl-C, so the run has its own group: a second Ctrl-C would mean hurry. Other threads get no
    # KeyboardInterrupt to forward.
    main = threading.current_thread() is threading.main_thread()
    # The child finds the modules that this process finds.
    paths = python_path(*(path or os.getcwd() for path in sys.path))
    with tempfile.TemporaryFile() as document:
        process = subprocess.Popen(
            [sys.executable, "-m", "spreeze.train", "--json", *options],
            stdin=subprocess.DEVNULL,
            stdout=document,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": paths, ENDS_WITH: str(os.getpid())},
            process_group=0 if main else None,
        )
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        with process, followed(sys.stdout) as output:
            interrupts = _follow(process, lines, None if quiet else output)
        document.seek(0)
        result: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError):
            result |= json.loads(document.read())
    if "run_dir" not in result:
        if interrupts:
            raise KeyboardInterrupt
        raise _rejection(result, process.returncode, lines)
    if interrupts > 1:
        raise KeyboardInterrupt
    if process.returncode:
        raise WorkerError(f"{result.get('error')}; the run is {result['run_dir']}")
    return Run(Path(result["run_dir"]), import_module=import_module)


def _follow(process: subprocess.Popen[str], lines: deque[str], output: TextIO | BackgroundWriter | None) -> int:
    """Prints the output of a training process until it exits; forwards interrupts and returns their number."""
    interrupts = 0
    while True:
        try:
            for line in process.stderr or ():
                text = line.rstrip("\n")
                lines.append(text)
                if not text.startswith(_ERROR):
                    write(output, text + "\n")
            process.wait()
            return interrupts
        except KeyboardInterrupt:
            interrupts += 1
            process.send_signal(signal.SIGINT if interrupts <= 2 else signal.SIGKILL)
        except BaseException:  # a handler of SIGTERM raised SystemExit, for example
            process.send_signal(signal.SIGINT)
            raise  # the caller waits for its end


def _rejection(document: dict[str, Any], code: int, lines: Sequence[str]) -> SpreezeError:
    text = document.get("error")
    if text is None:
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        return SpreezeError(f"the training ended without a result ({ending}): {lines[-1] if lines else 'no output'}")
    kind = getattr(errors, str(document.get("kind")), None)
    if isinstance(kind, type) and issubclass(kind, SpreezeError) and kind is not errors.BadTransition:
        return kind(_in_python_terms(text))
    return UsageError(text) if code == UsageError.exit_code else SpreezeError(text)
