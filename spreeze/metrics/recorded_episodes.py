"""Episodes that evaluations leave in a run directory: numbers of each env step, pictures, and sentences on both.

``episodes/ID.npz`` holds the best, the median and the worst episode of one evaluation, ``episodes/ID-KIND.frames`` the
pictures of one, by the first of its kinds. An ID is the evaluation's position in the run: wall time [ms], env steps,
updates and group. A file may come from anywhere: reading is bounded, and nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import RunError, refuse_newer
from spreeze.formatting import number
from spreeze.run_directory import finite_number

FOLDER = "episodes"
FORMAT = 1
KINDS = ("best", "median", "worst")
FRAMES, UNFINISHED = ".frames", ".drawing"  # suffixes of files of pictures: complete, and still being drawn
MAX_FRAME_BYTES = 64_000_000  # length of one episode's pictures
_MAX_BYTES = 128_000_000
_NAME = re.compile(r"e(\d{1,13})-(\d{1,16})-(\d{1,16})-(\d{1,4})")
_FRAME = struct.Struct("<II")
NOTE = 2**32 - 1  # replaces a frame's env step if its bytes are a sentence on the pictures
_AT_BOUND = 0.01  # An action is at its bound within this share of the range.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, EOFError)
"""Errors of reading a file that is no recording."""
_OFTEN, _NEARLY_ALWAYS = 0.2, 0.9
_OUTLIER = 4.0  # deviations from the mean of the steps' rewards


class EvaluationKey(NamedTuple):
    """Position of an evaluation in its run: that of the weights when they were published."""

    wall_s: float
    env_steps: int
    updates: int
    group: int = 0

    @property
    def id(self) -> str:
        return f"e{round(1e3 * self.wall_s)}-{self.env_steps}-{self.updates}-{self.group}"

    @classmethod
    def parse(cls, text: str) -> EvaluationKey:
        """The key with this ID; a RunError if it is none: only an ID is safe as part of a path."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise RunError(f"'{text[:40]}' names no recorded evaluation; expected the form e1000-200-100-0")
        wall_ms, env_steps, updates, group = map(int, match.groups())
        return cls(wall_ms / 1e3, env_steps, updates, group)


@dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """One episode of T env steps."""

    seed: int
    episode_return: float
    terminated: bool
    success: bool | None
    reward: np.ndarray  # float64 [T]
    action: np.ndarray  # float32 [T, A], as the environment took them
    obs: np.ndarray
    """float32 [T + 1, O]: after the reset and each env step; the first columns of a wide one, none of an image."""
    info: np.ndarray  # float32 [T, K], NaN where a step lacks the number
    value: np.ndarray
    """float32 [T], the critic's value of the state that each action was chosen in; empty where unknown."""
    kinds: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        return len(self.reward)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Episodes that are kept of one evaluation."""

    key: EvaluationKey
    facts: Mapping[str, Any]
    """``return_mean``, ``return_std``, ``played``, ``env_id``, ``fps``, ``limit``, and ``names`` and bounds of actions,
    observations and numbers of ``info``."""
    episodes: tuple[RecordedEpisode, ...]

    def of_kind(self, kind: str) -> RecordedEpisode:
        """The best, median or worst episode; a RunError if there is none."""
        for episode in self.episodes:
            if kind in episode.kinds:
                return episode
        raise RunError(f"evaluation {self.key.id} has no {kind[:20]} episode; there are {', '.join(KINDS)}")


_COLUMNS = ("reward", "action", "obs", "info", "value")


def packed(recording: Recording) -> bytes:
    """The bytes of a recording's file."""
    arrays: dict[str, np.ndarray] = {}
    episodes = []
    for index, episode in enumerate(recording.episodes):
        arrays |= {f"{index}.{name}": getattr(episode, name) for name in _COLUMNS}
        values = {name: getattr(episode, name) for name in ("seed", "terminated", "success", "kinds")}
        episodes.append({"return": episode.episode_return, **values})
    facts = json.dumps({**recording.facts, "format": FORMAT, "episodes": episodes})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, facts=np.frombuffer(facts.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def read_recording(run_dir: Path, key: EvaluationKey) -> Recording:
    """The recording of an evaluation; a RunError if there is none, or it is damaged, too large, or newer."""
    path = run_dir / FOLDER / f"{key.id}.npz"
    try:
        with _arrays(path) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            refuse_newer(facts.get("format"), FORMAT, path, RunError)
            entries = facts.pop("episodes")[: len(KINDS)]
            episodes = tuple(_episode(index, entry, arrays) for index, entry in enumerate(entries))
    except FileNotFoundError:
        raise RunError(f"{key.id} is not kept: evaluation.keep_episodes bounds how many evaluations are") from None
    except _DAMAGE as error:
        raise RunError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    return Recording(key=key, facts=facts, episodes=episodes)


@contextlib.contextmanager
def _arrays(path: Path) -> Iterator[Any]:
    """The arrays of a file by their names; a RunError if they would fill the memory."""
    with _opened(path) as file:
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > _MAX_BYTES:
            raise RunError(f"{path} unpacks to {size} bytes, more than {_MAX_BYTES}: it is not a recording")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays


def _opened(path: Path) -> Any:
    """Opens a file below a run directory; refuses links, which may lead outside."""
    if path.parent.is_symlink():
        raise RunError(f"{path.parent} is a symbolic link")
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def _episode(index: int, entry: Mapping[str, Any], arrays: Any) -> RecordedEpisode:
    columns = {name: np.asarray(arrays[f"{index}.{name}"]) for name in _COLUMNS}
    steps = len(columns["reward"])
    for name, array in columns.items():
        dims, rows = (1 if name in ("reward", "value") else 2), steps + (name == "obs")
        if array.dtype.kind != "f" or array.ndim != dims or len(array) not in (rows, 0 if name == "value" else rows):
            raise ValueError(f"{name} has shape {array.shape} and type {array.dtype} in an episode of {steps} steps")
    return RecordedEpisode(
        seed=int(entry["seed"]),
        episode_return=float(entry["return"]),
        terminated=bool(entry["terminated"]),
        success=None if entry["success"] is None else bool(entry["success"]),
        kinds=tuple(kind for kind in KINDS if kind in entry["kinds"]),
        **columns,
    )


def kept_evaluations(run_dir: Path) -> list[EvaluationKey]:
    """The evaluations with recorded episodes, in the order of their time."""
    with contextlib.suppress(OSError):
        names = (os.path.splitext(name) for name in os.listdir(run_dir / FOLDER))
        return sorted(EvaluationKey.parse(stem) for stem, end in names if end == ".npz" and _NAME.fullmatch(stem))
    return []


def prune(run_dir: Path, max_evaluations: int, max_bytes: float) -> None:
    """Enforces the limits: deletes the oldest pictures, then the evaluations that their neighbours represent best.

    An evaluation counts by the share of the run's time between its neighbours, and by how far its return is from
    those of its learner as a share of the range of returns. So the evaluations left cover the whole run; the deepest
    dips stay, as do the first and the newest evaluation.
    """
    keys, folder = kept_evaluations(run_dir), run_dir / FOLDER
    pictures = sorted((_age_and_size(path), path) for path in folder.glob(f"e*{FRAMES}"))
    sizes = {key: _age_and_size(folder / f"{key.id}.npz")[1] for key in keys}
    total = sum(sizes.values()) + sum(size for (_, size), _ in pictures)
    for (_, size), path in pictures:
        if total <= max_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size
    while len(keys) > 2 and (len(keys) > max_evaluations or total > max_bytes):
        t = np.array([key.wall_s for key in keys])
        y = np.array([_return_mean(folder / f"{key.id}.npz") for key in keys])
        gap, off = (t[2:] - t[:-2]) / max(t[-1] - t[0], 1e-9), np.zeros(len(keys))
        for group in {key.group for key in keys}:  # each learner has returns of its own
            at = np.array([index for index, key in enumerate(keys) if key.group == group])
            off[at[1:-1]] = np.abs(y[at[1:-1]] - (y[at[2:]] + y[at[:-2]]) / 2.0) / max(np.ptp(y[at]), 1e-9)
        key = keys.pop(1 + int(np.argmin(gap + off[1:-1])))
        total -= sizes[key]
        for path in [folder / f"{key.id}.npz", *folder.glob(f"{key.id}-*")]:
            path.unlink(missing_ok=True)


@lru_cache(4096)
def _return_mean(path: Path) -> float:
    with contextlib.suppress(*_DAMAGE, RunError), _arrays(path) as arrays:
        return finite_number(json.loads(arrays["facts"].tobytes()).get("return_mean")) or 0.0
    return 0.0


def _age_and_size(path: Path) -> tuple[float, int]:
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size


# --- pictures ---


def frame_record(step: int, data: bytes) -> bytes:
    """One picture, JPEG after ``step`` env steps, as a file of pictures has it; with ``NOTE`` a sentence."""
    return _FRAME.pack(step, len(data)) + data


def frames_path(run_dir: Path, key: EvaluationKey, kind: str) -> Path:
    """The file of an episode's pictures, which may not exist yet; a RunError for an unknown kind."""
    if kind not in KINDS:
        raise RunError(f"kind of episode '{kind[:20]}': expected {', '.join(KINDS)}")
    return run_dir / FOLDER / f"{key.id}-{kind}{FRAMES}"


def read_frames(path: Path, offset: int, max_bytes: int) -> tuple[bytes, bool]:
    """At most ``max_bytes`` of an episode's pictures from ``offset``, and whether these are the last ones."""
    for file_path, final in ((path, True), (path.with_suffix(UNFINISHED), False), (path, True)):
        with contextlib.suppress(OSError), _opened(file_path) as file:
            file.seek(offset)
            data = file.read(max_bytes)
            return data, final and offset + len(data) >= os.fstat(file.fileno()).st_size
    return b"", False


# --- what an episode shows ---


class Mark(NamedTuple):
    """A sentence on an episode, and the env step that it is about."""

    text: str
    step: int | None = None


def discounted_returns(reward: np.ndarray, gamma: float, last_value: float | None = None) -> np.ndarray:
    """The discounted sum [T] of the rewards from each env step on: G_t = r_t + gamma G_(t+1).

    ``last_value``, that of the last env step, stands for its reward and all after it, where the time limit cut the
    episode; None: it terminated, or the value is unknown.
    """
    returns, total = np.empty(len(reward)), 0.0
    rewards = reward if last_value is None else np.append(reward[:-1], last_value)
    for step in range(len(rewards) - 1, -1, -1):
        total = float(rewards[step]) + gamma * total
        returns[step] = total
    return returns


def returns_to_go(episode: RecordedEpisode, gamma: float) -> np.ndarray:
    """``discounted_returns`` of an episode."""
    is_cut = not episode.terminated and len(episode.value) > 0
    return discounted_returns(episode.reward, gamma, episode.value[-1] if is_cut else None)


def step_numbers(recording: Recording, gamma: float | None) -> dict[str, np.ndarray]:
    """Numbers of the env steps in the kept episodes of an evaluation, by name; unknown ones are absent.

    ``action``: all numbers of the actions, those with two finite bounds scaled to -1 .. 1, or else the options.
    ``value``: the critic's. ``advantage``: the actual discounted return minus the value.
    """
    facts, actions = recording.facts, np.concatenate([episode.action for episode in recording.episodes])
    continuous = [column for column, options in enumerate(facts.get("options") or ()) if not options]
    if continuous:
        actions = actions[:, continuous]
        low, high = np.asarray(facts["bounds"], np.float64).reshape(-1, 2).T[:, : len(continuous)]
        finite = np.isfinite(high - low) & (high > low)
        middle, half = np.where(finite, (low + high) / 2, 0.0), np.where(finite, (high - low) / 2, 1.0)
        actions = (actions - middle) / half
    columns = {"action": actions.reshape(-1)}
    valued = [episode for episode in recording.episodes if len(episode.value)]
    if valued:
        columns["value"] = np.concatenate([episode.value for episode in valued])
        if gamma is not None:
            advantages = [returns_to_go(episode, gamma) - episode.value for episode in valued]
            columns["advantage"] = np.concatenate(advantages)
    return {name: values[np.isfinite(values)] for name, values in columns.items()}


def at_bound(action: np.ndarray, bounds: Any) -> np.ndarray:
    """True where a number of actions [..., k] is within 1 % of its range at one of its ``bounds`` [k, 2]."""
    low, high = np.asarray(bounds, np.float64).reshape(-1, 2).T
    margin = np.where(np.isfinite(high - low), _AT_BOUND * (high - low), np.nan)  # without an end there is no bound
    return np.asarray((action <= low + margin) | (action >= high - margin))


_FALLS = ("Walker", "Hopper", "Humanoid", "Ant")  # Beginnings of tasks that end an episode when the robot falls.


def can_fall(env_id: object) -> bool:
    """True if episodes of the task terminate because the robot falls, judging by its name."""
    return str(env_id or "").startswith(_FALLS)


def marks_of(
    episode: RecordedEpisode, facts: Mapping[str, Any], gamma: float | None, is_soft: bool = False
) -> list[Mark]:
    """Sentences on how an episode ended, its actions at their bounds, its rewards and its critic.

    ``is_soft``: the critic's value includes rewards of entropy (SAC) and may lie above the return.
    """
    marks = [_ending(episode, facts)]
    if episode.success is not None:
        marks.append(Mark("a success, as the environment says" if episode.success else "no success"))
    marks += _action_marks(episode, facts)
    marks += _reward_marks(episode, facts)
    if gamma is not None and len(episode.value):
        actual = returns_to_go(episode, gamma)[0]
        value = float(episode.value[0])
        verdict = "about right"
        if abs(value - actual) > max(0.1 * abs(actual), 1e-3):
            verdict = f"{number(abs(value - actual))} {'above' if value > actual else 'below'} it"
            if is_soft and value > actual:
                verdict += ", rewards of entropy included"
        text = f"value at the start {number(value)}, actual discounted return {number(actual)}"
        marks.append(Mark(f"{text}: {verdict}", 1))
    return marks


def _ending(episode: RecordedEpisode, facts: Mapping[str, Any]) -> Mark:
    limit, steps = finite_number(facts.get("limit")), f"{episode.length:,}"
    if not episode.terminated:
        return Mark(f"ran to the time limit of {steps} steps", episode.length)
    how = "fell" if can_fall(facts.get("env_id")) else "terminated"
    return Mark(f"{how} at step {steps}" + (f" of at most {limit:,.0f}" if limit else ""), episode.length)


def _action_marks(episode: RecordedEpisode, facts: Mapping[str, Any]) -> Iterator[Mark]:
    names, bounds, counts = names_of(facts, "actions"), facts.get("bounds"), facts.get("options")
    for column, name in enumerate(names[: episode.action.shape[1]]):
        values = episode.action[:, column]
        if isinstance(counts, list) and column < len(counts) and counts[column]:
            options, often = np.unique(values, return_counts=True)
            share = often.max() / max(1, len(values))
            if share >= _NEARLY_ALWAYS:
                yield Mark(f"{name} chose {options[often.argmax()]:g} {share:.0%} of the time".replace("%", " %"))
        elif isinstance(bounds, list) and column < len(bounds):
            is_at_bound = at_bound(values[:, None], [bounds[column]])
            if len(values) and (share := is_at_bound.mean()) >= _OFTEN:
                step = int(is_at_bound.argmax()) + 1
                yield Mark(f"{name} at its bound {share:.0%} of the time".replace("%", " %"), step)


def _reward_marks(episode: RecordedEpisode, facts: Mapping[str, Any]) -> Iterator[Mark]:
    reward = episode.reward
    if len(reward) > 2:
        worst = int(reward.argmin())
        if reward[worst] < reward.mean() - _OUTLIER * reward.std():
            yield Mark(f"least reward {number(float(reward[worst]))} at step {worst + 1:,}", worst + 1)
    names = enumerate(names_of(facts, "info")[: episode.info.shape[1]])
    sums = [(name, float(np.nansum(episode.info[:, column]))) for column, name in names if is_term(name)]
    if sums:
        sums.sort(key=lambda term: -abs(term[1]))
        yield Mark("sum of each term: " + ", ".join(f"{name} {number(total)}" for name, total in sums[:6]))


def is_term(name: str) -> bool:
    """True if the name of a number of ``info`` suggests a term of the reward."""
    return any(word in name.lower() for word in ("reward", "rew_", "cost", "penalty", "bonus"))


def names_of(facts: Mapping[str, Any], name: str) -> Sequence[str]:
    """The names of actions, observations or numbers of ``info`` in a recording's facts, none if they are damaged."""
    names = facts.get(name)
    return [str(text)[:80] for text in names] if isinstance(names, list) else []
