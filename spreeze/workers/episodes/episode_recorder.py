"""Records the best, the median and the worst episode of an evaluation for the page's player.

It is passive: the evaluation plays the same steps with or without it. Pictures are drawn on demand
(``episode_redraw``), from the seed and the actions, so they cost training nothing. If an episode does not repeat, which
the first recorded evaluation tests, they are drawn while it is played, within a share of the time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.config.schema import EvaluationConfig
from spreeze.envs.info_numbers import InfoNumbers
from spreeze.envs.task import Task, open_task
from spreeze.files import remove_unfinished, replace_bytes
from spreeze.inference.normalizer import obs_scale, scaled
from spreeze.inference.policy import Policy
from spreeze.machine.processes import close_in_time
from spreeze.metrics.recorded_episodes import (
    FOLDER,
    KINDS,
    EvaluationKey,
    RecordedEpisode,
    Recording,
    at_bound,
    discounted_returns,
    frame_record,
    frames_path,
    packed,
    prune,
)
from spreeze.run_directory import group_folder
from spreeze.transport.weights import Weights
from spreeze.types import EnvSpec
from spreeze.workers.context import open_values
from spreeze.workers.episodes.episode_redraw import clip_stride, jpeg, replay
from spreeze.workers.episodes.lockstep import EnvStep, Episode, new_task

MAX_OBS = 64
_MAX_INFO, _MAX_NAME = 16, 60
_MAX_HELD_BYTES = 64_000_000  # memory for the numbers of one evaluation; further episodes are not recorded
_DRAWING_SHARE = 0.2  # share of an evaluation's time for pictures where they cannot be drawn later
_CHECK_STEPS, _CHECK_S = 200, 2.0
_LARGEST = 1e30


class _Tape:
    def __init__(self) -> None:
        self.obs: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []
        self.rewards: list[float] = []
        self.infos: list[dict[str, float]] = []
        self.frames: list[bytes] = []


class EpisodeRecorder:
    """Keeps three episodes of each evaluation of a run, for at most ``evaluation.keep_episodes`` evaluations."""

    def __init__(self, run_dir: Path, spec: EnvSpec, config: EvaluationConfig, *, max_envs: int | None = None) -> None:
        self._run_dir, self._spec, self._config = run_dir, spec, config
        self._repeats_checked = max_envs is not None
        self._tapes: dict[int, _Tape] = {}
        self._numbers = InfoNumbers()
        self._held_bytes, self._fps = 0, 30.0
        self._values: tuple[Weights, Weights] | None = None
        """Values of the current evaluation, and the weights that they were published with."""
        self._started_s = self._drawing_s = 0.0
        self.repeats: bool | None = None
        """True if the same seed and actions give the same rewards again; None: not tried, or it cannot be."""
        self.draws = False
        """True if pictures are drawn while episodes are played, in environments made for that."""
        self.note = ""
        """Why the latest evaluation has no pictures; empty: it has, or they can be drawn later."""
        if config.keep_episodes:
            (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
            remove_unfinished(run_dir / FOLDER)

    def begin(self, weights: Weights, group: int = 0) -> bool:
        """Forgets earlier episodes; the next evaluation plays these weights of a group. False if it keeps none."""
        if not self._config.keep_episodes:
            return False
        values = open_values(group_folder(self._run_dir, group)).read_latest()
        too_old = values is None or values.epoch < weights.epoch or 2 * values.version < weights.version
        self._values = None if values is None or too_old else (values, weights)
        self._tapes.clear()
        self._held_bytes, self._drawing_s, self._started_s, self.note = 0, 0.0, time.monotonic(), ""
        return True

    def on_step(self, position: int, task: Task, step: EnvStep) -> None:
        """Records an env step of the episode at this position in the evaluation's seeds."""
        if step.action is None:
            self._fps = task.render_fps
            self._tapes[position] = _Tape()
        tape = self._tapes.get(position)
        if tape is None or self._held_bytes > _MAX_HELD_BYTES:
            self._tapes.pop(position, None)
            return
        values = _vector_part(step.obs, self._spec)
        tape.obs.append(values)
        self._held_bytes += values.nbytes + 100
        if step.action is not None:
            tape.actions.append(step.action.copy())
            tape.rewards.append(step.reward)
            numbers = self._numbers.numbers(task.info) if isinstance(task.info, dict) else ()
            tape.infos.append({name: min(max(value, -_LARGEST), _LARGEST) for name, value in numbers})
        if self.draws and (len(tape.rewards) % clip_stride(self._fps) == 0):
            self._draw(tape, task)

    def _draw(self, tape: _Tape, task: Task) -> None:
        started_s = time.monotonic()
        if self._drawing_s > _DRAWING_SHARE * (started_s - self._started_s) + 0.5:
            self.note = f"no pictures: drawing takes more than {_DRAWING_SHARE:.0%} of the evaluation"
            return
        tape.frames.append(frame_record(len(tape.rewards), jpeg(task.render())))
        self._held_bytes += len(tape.frames[-1])
        self._drawing_s += time.monotonic() - started_s

    def health(self, episodes: Sequence[Episode], seeds: Sequence[int]) -> dict[str, float]:
        """Means over an evaluation's episodes, before ``keep``: metrics of actions and values, as far as known."""
        played = self._played(episodes, seeds)
        if not played:
            return {}
        spec, metrics = self._spec, dict[str, float]()
        if spec.box is not None:
            actions = np.concatenate([np.stack(tape.actions) for _, tape in played])[:, : spec.box.dim]
            metrics["eval_actions_at_bound"] = float(at_bound(actions, np.stack(spec.box.float32_bounds(), 1)).mean())
        gamma = None if self._values is None else self._values[0].meta.get("gamma")
        begins, ends = (
            self._values_of(
                np.stack([tape.obs[:-1][step] for _, tape in played]),
                np.stack([tape.actions[step] for _, tape in played]).astype(np.float32).reshape(len(played), -1),
            )
            for step in (0, -1)
        )
        if gamma is not None and len(begins):
            discounted = [
                discounted_returns(np.array(tape.rewards), gamma, None if episode.terminated else float(value))[0]
                for (episode, tape), value in zip(played, ends, strict=True)
            ]
            metrics |= {"eval_start_value": float(begins.mean()), "eval_discounted_return": float(np.mean(discounted))}
        return metrics

    def _played(self, episodes: Sequence[Episode], seeds: Sequence[int]) -> list[tuple[Episode, _Tape]]:
        played = {episode.seed: episode for episode in episodes}
        found = [(played[seeds[position]], tape) for position, tape in self._tapes.items() if seeds[position] in played]
        return [(episode, tape) for episode, tape in found if len(tape.rewards) == episode.length]

    def keep(
        self,
        episodes: Sequence[Episode],
        seeds: Sequence[int],
        record: Mapping[str, Any],
        *,
        check_repeats: bool = True,
    ) -> bool:
        """Writes the best, median and worst of an evaluation's episodes, and deletes surplus recordings.

        With ``check_repeats`` it checks, once, whether an episode repeats. True if the environments have to be made
        anew, so that the next episodes are drawn while played; an OSError if the disk is full.
        """
        played, self._tapes = self._played(episodes, seeds), {}
        if not played:
            return False
        drew = self.draws
        played.sort(key=lambda pair: pair[0].episode_return)
        chosen: dict[int, list[str]] = {}
        for kind, index in zip(KINDS, (len(played) - 1, (len(played) - 1) // 2, 0), strict=True):
            chosen.setdefault(index, []).append(kind)
        names = sorted({name for index in chosen for info in played[index][1].infos for name in info})[:_MAX_INFO]
        key = EvaluationKey(record["wall_s"], record["env_steps"], record["updates"], record["group"])
        kept = [self._recorded(*played[index], kinds, names) for index, kinds in chosen.items()]
        if check_repeats and not self._repeats_checked:
            self._repeats_checked = True
            with contextlib.suppress(Exception):  # there can be no second environment
                self._check_repeats(min(kept, key=lambda episode: episode.length))
        drawn = any(tape.frames for _, tape in played)
        recording = Recording(key=key, facts=self._facts(record, names, drawn=drawn), episodes=tuple(kept))
        replace_bytes(self._run_dir / FOLDER / f"{key.id}.npz", packed(recording))
        for index, kinds in chosen.items():
            if frames := played[index][1].frames:
                replace_bytes(frames_path(self._run_dir, key, kinds[0]), b"".join(frames))
        prune(self._run_dir, self._config.keep_episodes, 1e6 * self._config.keep_episodes_mb)
        return self.draws and not drew

    def _recorded(self, episode: Episode, tape: _Tape, kinds: Sequence[str], names: Sequence[str]) -> RecordedEpisode:
        steps, obs = len(tape.rewards), np.stack(tape.obs)
        actions = np.stack(tape.actions).astype(np.float32).reshape(steps, -1)
        info = np.array([[row.get(name, np.nan) for name in names] for row in tape.infos], np.float32)
        return RecordedEpisode(
            seed=episode.seed,
            episode_return=episode.episode_return,
            terminated=episode.terminated,
            success=episode.success,
            reward=np.array(tape.rewards, np.float64),
            action=actions,
            obs=obs[:, :MAX_OBS].astype(np.float32),
            info=info.reshape(steps, len(names)),
            value=self._values_of(obs[:-1], actions),
            kinds=tuple(kinds),
        )

    def _values_of(self, obs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Values of an episode's states; empty where there are none."""
        if self._values is not None and self._spec.frames is None:
            with contextlib.suppress(Exception):  # networks of another form
                return step_values(*self._values, obs, actions, self._spec)
        return np.zeros(0, np.float32)

    def _facts(self, record: Mapping[str, Any], names: Sequence[str], *, drawn: bool) -> dict[str, Any]:
        spec = self._spec
        options = [0] * (spec.box.dim if spec.box else 0) + list(spec.choices.nvec if spec.choices else ())
        return {
            "env_id": spec.env_id,
            "fps": self._fps,
            "limit": spec.max_episode_steps,
            "version": record["version"],
            "return_mean": record["return_mean"],
            "return_std": record["return_std"],
            "played": record["episodes"],
            "actions": [f"action {column}" for column in range(spec.action_dim)],
            "options": options,
            "bounds": [] if spec.box is None else np.stack(spec.box.float32_bounds(), 1).astype(float).tolist(),
            "obs": _obs_names(spec)[:MAX_OBS],
            "info": list(names),
            "repeats": self.repeats,
            "drawn": drawn,
            "note": self.note,
        }

    def _check_repeats(self, episode: RecordedEpisode) -> None:
        task, end_s = new_task(partial(open_task, self._spec, whole_games=True)), time.monotonic() + _CHECK_S
        try:
            self.repeats = True
            for same, step in replay(task, episode):
                if not same or step >= _CHECK_STEPS or time.monotonic() > end_s:
                    self.repeats = same
                    break
        finally:
            close_in_time(task.close)
        self.draws = not self.repeats

    def make_task(self) -> Task:
        """An environment for evaluations; one that draws, if pictures are made while it is played."""
        if self.draws:
            try:
                return open_task(self._spec, "rgb_array", whole_games=True)
            except Exception:
                self.draws = False
        return open_task(self._spec, whole_games=True)


def _vector_part(obs: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """An observation [O] without its images."""
    if spec.frames is None:
        return obs.reshape(-1)
    count = spec.vector_dim - spec.mask_dim
    if not spec.obs_layout or not count:
        return np.zeros(0, np.float32)
    flat = np.ascontiguousarray(obs.reshape(-1)[-4 * spec.vector_dim :])
    return flat.view(np.float32)[:count]


def _obs_names(spec: EnvSpec) -> list[str]:
    """A name for each number of an observation, by its part where it has several."""
    names = [f"observation {column}" for column in range(spec.vector_dim)]
    for line in spec.obs_layout if spec.frames is None else ():
        columns, _, text = line.partition(" ")
        start, _, stop = columns.partition(":")
        if start.isdigit() and stop.isdigit():
            part = text.split(" ")[0][:_MAX_NAME]
            count = int(stop) - int(start)
            names[int(start) : int(stop)] = [part if count == 1 else f"{part} {index}" for index in range(count)]
    return names


# --- values, from the networks that a learner publishes beside its policy (``Algorithm.value_snapshot``) ---


def step_values(values: Weights, policy: Weights, obs: np.ndarray, action: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """Values float32 [T] in the unit of the task's rewards: V of each state, or Q of the state and the action.

    ``policy`` chose each ``action`` [T, A] in ``obs`` [T, O]; its normalizer of observations is taken, and ``values``
    were published beside it. A KeyError, ValueError or WeightsError if the arrays do not fit.
    """
    kind, scale = values.meta["values"], np.float32(values.meta["scale"])
    obs = np.ascontiguousarray(obs, np.float32)
    if kind == "policy":
        if spec.team is not None or "recurrent" in policy.meta or spec.choices is None or spec.choices.dim != 1:
            return np.zeros(0, np.float32)
        out = Policy.from_weights(policy.arrays, policy.meta).outputs(obs)
        return np.asarray(np.take_along_axis(out, action.astype(np.int64), 1)[:, 0] * scale, np.float32)
    x = scaled(obs, obs_scale(policy.arrays, obs.shape[1]))
    if kind == "actions":
        x = np.concatenate((x, _unit(action, spec)), 1)
    outputs = len(values.arrays["head_b"]) // len(values.arrays.get("atoms", (0,)))
    network = {"policy": "deterministic", "action_dim": outputs, "obs_dim": x.shape[1]}
    network |= {"hidden_sizes": range(values.meta["layers"])}
    out = Policy.from_weights(values.arrays, values.meta | network).outputs(x)
    # Quantiles have their mean, and the value network of two that are stacked has its first output.
    value = out.mean(1) if kind == "actions" else out[:, 0]
    return np.asarray(value * scale, np.float32)


def _unit(action: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """Actions [T, A] in [-1, 1], as critics take them."""
    if spec.box is None or spec.choices is not None:
        raise ValueError("critics of actions take numbers only")
    half, middle = spec.box.half_and_middle()
    unit: np.ndarray = np.clip((action - middle) / half, -1.0, 1.0).astype(np.float32)
    return unit
