"""Demonstrations: transitions from a file, with which replay starts.

Three kinds of files hold them: a Minari data set (HDF5, https://minari.farama.org, read with h5py), an ``.npz`` file
with ``observations``, ``actions``, ``rewards``, ``terminations`` and ``truncations``, which ``spreeze evaluate
--record`` writes, and replay that a run has saved. Nothing is downloaded, and no pickle is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import CheckpointError, ConfigError
from spreeze.inference.normalizer import DiscountedReturns, ReturnMoments
from spreeze.transport.checkpoint import STATE, CheckpointStore, load_replay
from spreeze.transport.replay_ring import ReplayRing, fill
from spreeze.types import Box, Choices, EnvSpec, RowLayout

_MINARI_ID = re.compile(r"^([\w-]+/)*[\w.-]+-v\d+$")
_MINARI_FILES = ("main_data.hdf5", "data/main_data.hdf5")
_PART = re.compile(r"^(\d+):(\d+) (.+?) \((.*)\)$")  # a line of ``EnvSpec.obs_layout``
_KEY = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_NAMES = {
    "observations": ("observations",),
    "actions": ("actions",),
    "rewards": ("rewards",),
    "terminations": ("terminations", "terminals"),
    "truncations": ("truncations", "timeouts"),
}
"""Array -> its names, of which D4RL has others."""
ReturnSums = tuple[float, float, float]  # count, sum and sum of squares of discounted returns
NO_RETURNS: ReturnSums = (0.0, 0.0, 0.0)


class Demonstrations(NamedTuple):
    """N transitions in the order in which they happened, episode after episode."""

    obs: np.ndarray  # [N, O] float32
    action: np.ndarray  # [N, A] float32, as policies give them
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    ended: np.ndarray  # [N] bool: the episode's last
    next_obs: np.ndarray  # [N, O] float32


def load_demonstrations(text: str, spec: EnvSpec, ring: ReplayRing, gamma: float) -> tuple[int, ReturnSums]:
    """Writes the transitions of a file into an empty ring, the newest ones if there are more than it holds.

    Returns their number and the moments of their returns (zeros if a file of replay lacks them). A ConfigError if the
    file does not exist, cannot be read, or is of another task.
    """
    path = find_demonstrations(text, verify=True)
    if path.suffix == ".safetensors":
        try:
            return load_replay(path, ring), _returns_beside(path)
        except CheckpointError as error:
            raise ConfigError(f"--demonstrations {text}: {error}") from None
    data = read_demonstrations(path, text, spec)
    returns = DiscountedReturns(gamma)
    returns.add(data.reward[:, np.newaxis], data.ended[:, np.newaxis])
    rows = rows_of(data, ring.spec.layout, gamma)
    return fill(ring, rows, np.zeros(len(rows), np.int64)), returns.sums()


def _returns_beside(path: Path) -> ReturnSums:
    """Sums of the returns that the learner of a checkpoint's replay had seen; zeros if unknown."""
    moments = ReturnMoments()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        moments.load_state(json.loads((path.parent / STATE).read_bytes())["returns"])
    return moments.sums()


def find_demonstrations(text: str, *, verify: bool = False) -> Path:
    """The file that ``--demonstrations`` names: itself, or that of a data set's or a run's directory.

    ``verify``: saved replay, which may have gigabytes, is compared with its hash.

    A ConfigError if there is none; for a Minari data set not on disk, with the command that downloads it.
    """
    path = Path(text).expanduser()
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")
    is_id = not path.exists() and _MINARI_ID.match(text)
    if is_id:
        path = root / text
    if path.is_dir():
        for name in _MINARI_FILES:
            if (path / name).is_file():
                return path / name
        store = CheckpointStore(path / "checkpoints")
        checkpoint = store.load_latest(large=verify) if (path / "run.json").is_file() else None
        if checkpoint is not None and checkpoint.replay_path is not None:
            return checkpoint.replay_path
        raise ConfigError(
            f"--demonstrations {text}: neither a Minari data set in HDF5 nor a run with saved replay (--save-replay)"
        )
    if is_id:
        raise ConfigError(
            f"--demonstrations {text}: no such file, and {root} has no data set of that name; if it is one of "
            f"Minari's, download it first: minari download {text}"
        )
    if not path.is_file():
        raise ConfigError(f"--demonstrations {text}: no such file")
    if path.suffix not in (".npz", ".hdf5", ".h5", ".safetensors"):
        raise ConfigError(f"--demonstrations {text}: expected .npz, .hdf5 or .safetensors, or a directory with one")
    return path


def read_demonstrations(path: Path, text: str, spec: EnvSpec) -> Demonstrations:
    """The transitions of an ``.npz`` or HDF5 file; a ConfigError names ``text`` and what does not fit."""
    check_demonstrable(spec, f"--demonstrations {text}")
    try:
        parts = [_episode(part, spec) for part in _episodes(path)]
    except (_Mismatch, KeyError) as error:
        raise ConfigError(f"--demonstrations {text}: {str(error).strip(chr(39))}") from None
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--demonstrations {text}: it cannot be read: {error}") from None
    if not sum(len(part.reward) for part in parts):
        raise ConfigError(f"--demonstrations {text}: it holds no transitions")
    data = Demonstrations(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    for name, values in (("observations", data.obs), ("actions", data.action), ("rewards", data.reward)):
        if not np.isfinite(values).all():
            raise ConfigError(f"--demonstrations {text}: {name} hold values that are not finite numbers")
    return data


def check_demonstrable(spec: EnvSpec, option: str) -> None:
    """Raises a ConfigError about a command's ``option`` if such files cannot hold this task's transitions."""
    kinds = {"images": spec.frames, "several agents": spec.team, "nested actions": spec.action_parts}
    if kind := next((name for name, present in kinds.items() if present), None):
        raise ConfigError(f"{option}: {spec.env_id} has {kind}, which files of demonstrations cannot hold; remove it")


class _Mismatch(Exception):
    """Arrays that are not of this task."""


def _episodes(path: Path) -> Iterator[Mapping[str, Any]]:
    """The arrays of each episode, or of all together, by name."""
    if path.suffix == ".npz":
        if not zipfile.is_zipfile(path):  # NumPy would advise to load it as a pickle
            raise _Mismatch("it is not an .npz file, or damaged")
        with np.load(path, allow_pickle=False) as file:
            yield dict(file)
        return
    try:
        import h5py
    except ImportError:
        raise _Mismatch("HDF5 is read with h5py; pip install h5py") from None
    with h5py.File(path, "r") as file:
        if "observations" in file:
            yield file
            return
        names = [name for name in file if re.fullmatch(r"episode_\d+", name)]
        for name in sorted(names, key=lambda name: int(name.rpartition("_")[2])):
            yield file[name]


def _episode(source: Mapping[str, Any], spec: EnvSpec) -> Demonstrations:
    """The transitions of one source, which may have several episodes if it has each observation once."""
    nodes = {name: next((source[key] for key in keys if key in source), None) for name, keys in _NAMES.items()}
    missing = [name for name, node in nodes.items() if node is None and name != "truncations"]
    if missing:
        raise _Mismatch(f"it has no {', '.join(missing)}; it has {', '.join(list(source)[:8])}")
    reward = np.asarray(nodes["rewards"]).reshape(-1).astype(np.float32)
    count = len(reward)
    terminated = np.asarray(nodes["terminations"]).reshape(-1).astype(bool)
    truncated = np.zeros(count, bool) if nodes["truncations"] is None else np.asarray(nodes["truncations"]).reshape(-1)
    obs, action = _observations(nodes["observations"], spec), _actions(nodes["actions"], spec)
    kept = np.ones(count, bool)
    ended = terminated | truncated.astype(bool)
    ended[-1:] = True
    if "next_observations" in source:
        next_obs = _observations(source["next_observations"], spec)
    elif len(obs) == count + 1:  # of one episode, with the observation after its last step
        obs, next_obs = obs[:-1], obs[1:]
    else:  # a truncated end bootstraps from the observation after it
        next_obs = np.concatenate([obs[1:], obs[-1:]])
        kept = terminated | ~ended
        ended[:-1] |= ~kept[1:] & ended[1:]
    sizes = {"observations": len(obs), "actions": len(action), "terminations": len(terminated),
             "truncations": len(truncated), "next observations": len(next_obs)}  # fmt: skip
    wrong = [f"{size} {name}" for name, size in sizes.items() if size != count]
    if wrong:
        raise _Mismatch(f"{count} rewards, but {', '.join(wrong)}")
    return Demonstrations(*(column[kept] for column in (obs, action, reward, terminated, ended, next_obs)))


def _observations(node: Any, spec: EnvSpec) -> np.ndarray:
    """Flat observations [n, O] float32 of an array, or of the arrays of a nested observation."""
    if not hasattr(node, "shape"):
        return _nested(node, spec)
    values = np.asarray(node)
    size = int(np.prod(values.shape[1:]))
    if size != spec.obs_dim or values.dtype.kind not in "fiub":
        raise _Mismatch(f"observations of {size} values ({values.dtype}), but {spec.env_id} has {spec.obs_dim}")
    return values.reshape(len(values), size).astype(np.float32)


def _nested(node: Mapping[str, Any], spec: EnvSpec) -> np.ndarray:
    columns = []
    for part in map(_PART.match, spec.parts):
        assert part is not None
        leaf: Any = node
        for index, key in _KEY.findall(part[3]):
            name = f"_index_{index}" if index else key
            if hasattr(leaf, "shape") or name not in leaf:
                raise _Mismatch(f"its observations have no {part[3]}, unlike those of {spec.env_id}")
            leaf = leaf[name]
        values, size = np.asarray(leaf), int(part[2]) - int(part[1])
        if int(np.prod(values.shape[1:])) != size:
            raise _Mismatch(f"{part[3]} of shape {values.shape[1:]}, but {spec.env_id} has {part[4]}")
        columns.append(values.reshape(len(values), size).astype(np.float32))
    if not columns or spec.mask_dim:
        raise _Mismatch(f"its observations are a Dict or Tuple, unlike those of {spec.env_id}")
    return np.concatenate(columns, axis=1)


def _actions(node: Any, spec: EnvSpec) -> np.ndarray:
    """Actions [n, A] float32 as policies give them, of those of the environment."""
    if not hasattr(node, "shape"):
        raise _Mismatch(f"its actions are a Dict or Tuple, unlike those of {spec.env_id}")
    values = np.asarray(node)
    size = int(np.prod(values.shape[1:]))
    kind = "discrete" if values.dtype.kind in "iub" else "continuous"
    wanted = "continuous" if isinstance(spec.action, Box) else "discrete"
    if (kind, size) != (wanted, spec.action_dim):
        raise _Mismatch(f"{kind} actions of size {size}, but {spec.env_id} has {wanted} ones of size {spec.action_dim}")
    values = values.reshape(len(values), size)
    if isinstance(spec.action, Box):
        low, high = np.array(spec.action.low), np.array(spec.action.high)
        scaled: np.ndarray = (values - low) / np.maximum(high - low, 1e-12) * 2.0 - 1.0
        return scaled.clip(-1.0, 1.0).astype(np.float32)
    assert isinstance(spec.action, Choices)
    index = values.astype(np.int64) - spec.action.start
    if (index < 0).any() or (index >= spec.action.nvec).any():
        raise _Mismatch(f"actions range from {values.min()} to {values.max()}, outside those of {spec.env_id}")
    return index.astype(np.float32)


def rows_of(data: Demonstrations, layout: RowLayout, gamma: float) -> np.ndarray:
    """Rows [N, W] float32 of n-step transitions, of which none reaches beyond its episode."""
    count = len(data.reward)
    total, length = np.zeros(count), np.zeros(count, np.int64)
    over = np.zeros(count, bool)
    for age in range(layout.n_step):
        live = np.flatnonzero(~over[: max(0, count - age)])
        total[live] += gamma**age * data.reward[live + age]
        over[live], length[live] = data.ended[live + age], age + 1
    last = np.arange(count) + length - 1
    return layout.pack(data.obs, data.action, total, data.terminated[last], data.next_obs[last], length)


def save_demonstrations(path: Path, episodes: Iterable[Sequence[tuple[Any, ...]]]) -> int:
    """Writes an ``.npz`` file of episodes; returns their env steps.

    A step is (observation [O], action in the environment's unit, reward, terminated, next observation [O]).
    """
    steps = [(*step, index == len(episode) - 1) for episode in episodes for index, step in enumerate(episode)]
    obs, action, reward, terminated, next_obs, last = zip(*steps, strict=True)
    ends = np.array(terminated, bool)
    np.savez(
        path,
        observations=np.stack(obs),
        actions=np.stack(action),
        rewards=np.array(reward, np.float64),
        terminations=ends,
        truncations=np.array(last, bool) & ~ends,
        next_observations=np.stack(next_obs),
    )
    return len(steps)
