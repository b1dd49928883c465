"""The visualizer: shows the current policy in an environment of its own, as ``live.jpg`` and as clips.

It feeds nothing back, runs at low priority, and keeps to its share of a core: it measures the cost of each frame
and sleeps accordingly. Outside of clips it only draws while a viewer watches.
"""

from __future__ import annotations

import contextlib
import os
import time
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import av
import numpy as np
from PIL import Image

from spreeze.envs.make import one_line
from spreeze.envs.task import ObsRows, Task, open_task
from spreeze.inference.policy import Policy
from spreeze.metrics.table import Phase
from spreeze.transport.files import remove_unfinished, replace_json
from spreeze.transport.weights import Weights
from spreeze.workers.context import WorkerContext
from spreeze.workers.evaluator import WeightsWatch
from spreeze.workers.jobs import VisualizerJob

_POLL_S = 0.2
_FIRST_CLIP_S = 5.0
_NEW_WEIGHTS_S = 3.0
_MAX_CLIPS = 300
_MAX_FAILURES = 5
_WATCHED_S = 3.0
"""A viewer asks for pictures many times a second and touches ``control/viewer`` once a second."""
_UNWATCHED_PICTURE_S = 30.0
"""Longest age of ``live.jpg`` without a viewer, for users of the terminal and for the first view."""


def run_visualizer(context: WorkerContext, job: VisualizerJob) -> None:
    """Shows the newest policy until the supervisor asks to stop; ends early if nothing can be drawn."""
    context.beat(Phase.INIT)
    try:
        task = open_task(job.spec, "rgb_array", whole_games=True)
    except Exception as error:
        _give_up(context, error)
        return
    try:
        task.reset(seed=job.seed)
        task.render()
    except Exception as error:
        _give_up(context, error)
        task.close()
        return
    show = _Show(context, job, task)
    try:
        show.run()
    finally:
        show.close()


def _give_up(context: WorkerContext, error: Exception) -> None:
    context.send(
        "event", level="warning", text=f"no pictures: {type(error).__name__}: {one_line(error)}; training goes on"
    )


class _Player:
    def __init__(self, task: Task, seed: int) -> None:
        self.task = task
        self._seed = seed
        self.episode_return = 0.0
        self.returns: list[float] = []
        self.at_start = True
        self._obs = ObsRows(1, task.spec)
        self.restart()

    def restart(self) -> None:
        self._obs.start(0, self.task.reset(seed=self._seed))
        self._seed = (self._seed + 1) % 2**31
        self.episode_return, self.at_start = 0.0, True

    def advance(self, policy: Policy, steps: int) -> None:
        """Takes at most ``steps`` env steps, and ends with the episode."""
        for _ in range(steps):
            action = self.task.to_native(policy.act_greedy(self._obs.array))
            obs, reward, terminated, truncated = self.task.step(action[0])
            self._obs.put(0, obs)
            self.episode_return += reward
            self.at_start = False
            if terminated or truncated:
                self.returns = [*self.returns[-99:], self.episode_return]
                self.restart()
                return


class _Clip:
    """A clip being recorded, and the facts stored with it."""

    def __init__(self, folder: Path, number: int, weights: Weights, player: _Player, frames_per_s: float) -> None:
        self.path = folder / f"clip-{number:04d}-v{weights.version}.mp4"
        self.writer = ClipWriter(self.path, frames_per_s)
        self._weights = weights
        self._player = player
        player.returns = []

    def finish(self) -> None:
        """Writes the JSON first, so that a visible clip always has its facts."""
        meta = self._weights.meta
        facts: dict[str, Any] = {
            "version": self._weights.version, "epoch": self._weights.epoch, "env_steps": meta.get("env_steps"),
            "wall_s": meta.get("wall_s"), "episode_returns": self._player.returns,
            "return_so_far": self._player.episode_return, "frames": self.writer.frames,
            "frames_per_s": self.writer.frames_per_s,
        }
        replace_json(self.path.with_suffix(".json"), facts)
        self.writer.finish()


class _Show:
    """The loop: advance, draw, write the picture, feed the clip, rest."""

    def __init__(self, context: WorkerContext, job: VisualizerJob, task: Task) -> None:
        self._context, self._job = context, job
        self._run_dir = Path(job.run_dir)
        self._videos = self._run_dir / "videos"
        self._videos.mkdir(parents=True, exist_ok=True)
        _clear(self._run_dir, self._videos)
        self._watch = WeightsWatch(self._run_dir / "weights")
        self._player = _Player(task, job.seed)
        self._live_stride = max(1, round(task.render_fps / job.frames_per_s))
        self._clip_stride = clip_stride(task.render_fps)
        self._clip_fps = task.render_fps / self._clip_stride
        self._clip_frames = max(1, round(job.clip_length_s * self._clip_fps))
        self._weights: Weights | None = None
        self._policy: Policy | None = None
        self._clip: _Clip | None = None
        self._next_clip_s = float("inf")
        self._next_picture_s = 0.0
        self._viewer = self._run_dir / "control" / "viewer"
        self._new_weights_s = 0.0
        self._frames = 0
        self._clips = 0
        self._number = _last_number(self._videos)

    def run(self) -> None:
        failures = 0
        while not self._context.stopping:
            if self._context.visualizer_paused:
                self._context.post(paused=1.0)
                self._context.sleep(_POLL_S)
                continue
            if self._unneeded():
                self._context.sleep(_POLL_S)
                continue
            begin_s, cpu_s = time.monotonic(), time.process_time()
            self._renew()
            if self._policy is None:
                self._context.sleep(_POLL_S)
                continue
            try:
                self._frame(self._policy)
                failures = 0
            except Exception as error:
                failures += 1
                if failures >= _MAX_FAILURES:
                    raise
                self._abandon(error)
            self._context.post(frames=self._frames, clips=self._clips, paused=0.0)
            self._rest(begin_s, time.process_time() - cpu_s)

    def _unneeded(self) -> bool:
        """True while no clip is due and no viewer asked for a picture lately."""
        now_s = time.monotonic()
        if self._clip is not None or now_s >= min(self._next_clip_s, self._next_picture_s):
            return False
        try:
            return time.time() - self._viewer.stat().st_mtime > _WATCHED_S
        except OSError:
            return True

    def _renew(self) -> None:
        """Takes newer weights at the start of an episode or every few seconds, but never within a clip."""
        now_s = time.monotonic()
        if self._clip is not None or not (self._player.at_start or now_s >= self._new_weights_s):
            return
        found = self._watch.newer(self._context.weights_hint)
        if found is None:
            return
        if self._policy is None:
            self._next_clip_s = now_s + min(_FIRST_CLIP_S, self._job.clip_interval_s)
        self._weights = found[0]
        self._policy = Policy.from_weights(self._weights.arrays, self._weights.meta)
        self._new_weights_s = now_s + _NEW_WEIGHTS_S
        self._context.post(policy_version=self._weights.version)

    def _frame(self, policy: Policy) -> None:
        self._context.beat(Phase.RENDER)
        if self._clip is None and time.monotonic() >= self._next_clip_s and self._weights is not None:
            self._next_clip_s = time.monotonic() + self._job.clip_interval_s
            self._player.restart()
            self._number += 1
            self._clip = _Clip(self._videos, self._number, self._weights, self._player, self._clip_fps)
        else:
            self._player.advance(policy, self._live_stride if self._clip is None else self._clip_stride)
        picture = self._player.task.render()
        write_jpeg(self._run_dir / "live.jpg", picture)
        self._next_picture_s = time.monotonic() + _UNWATCHED_PICTURE_S
        self._frames += 1
        if self._clip is not None:
            self._clip.writer.add(picture)
            if self._clip.writer.frames >= self._clip_frames:
                self._clip.finish()
                self._clip = None
                self._clips += 1
                _prune(self._videos)

    def _rest(self, begin_s: float, cpu_s: float) -> None:
        """Sleeps until the next frame is due in real time and within the share of a core."""
        in_clip = self._clip is not None and self._job.has_free_core
        period_s = 1.0 / (self._clip_fps if in_clip else self._job.frames_per_s)
        if not self._job.has_free_core:
            period_s = max(period_s, cpu_s / self._job.cpu_share)
        self._context.sleep(max(0.0, period_s - (time.monotonic() - begin_s)))

    def _abandon(self, error: Exception) -> None:
        """Reports the error, discards the clip, and begins a new episode."""
        self._context.send("event", level="warning", text=f"picture failed: {type(error).__name__}: {one_line(error)}")
        self._drop_clip()
        self._context.sleep(1.0)
        self._player.restart()

    def _drop_clip(self) -> None:
        if self._clip is not None:
            self._clip.writer.discard()
            self._clip = None

    def close(self) -> None:
        self._drop_clip()
        self._player.task.close()


def _clear(run_dir: Path, videos: Path) -> None:
    """Removes files of a killed visualizer, but no clip that ``play`` may be writing there."""
    remove_unfinished(videos)
    for path in [*run_dir.glob(".live.jpg.*.tmp"), *videos.glob(".clip-*.tmp")]:
        path.unlink(missing_ok=True)


def _last_number(videos: Path) -> int:
    numbers = [path.name.split("-")[1] for path in videos.glob("clip-*-v*.mp4")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _prune(videos: Path) -> None:
    """Deletes all but the newest clips, so that a run of weeks does not fill the disk."""
    clips = sorted(videos.glob("clip-*-v*.mp4"), key=lambda path: int(path.name.split("-")[1]))
    for path in clips[:-_MAX_CLIPS]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)


def write_jpeg(path: Path, frame: np.ndarray, quality: int = 80) -> None:
    """Replaces a picture atomically; ``frame`` is uint8 [H, W, 3]."""
    temporary = _temporary(path)
    try:
        Image.fromarray(frame).save(temporary, format="JPEG", quality=quality)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class ClipWriter:
    """Encodes frames as they come, so memory does not grow with the length of the clip.

    As a context manager it finishes the file at the end, or removes it when the block raised.
    """

    def __init__(self, path: Path, frames_per_s: float) -> None:
        self.path = path
        self.frames_per_s = frames_per_s
        self.frames = 0
        self._temporary = _temporary(path)
        self._shape: tuple[int, ...] = ()
        self._stream: Any = None
        self._container: Any = av.open(str(self._temporary), mode="w", format="mp4", options={"movflags": "faststart"})

    def add(self, frame: np.ndarray) -> None:
        """Adds one frame, uint8 [H, W, 3]; an odd last row or column is cut (yuv420p needs even sizes).

        Raises:
            ValueError: size differs from the first frame, or is less than two pixels high or wide.
        """
        if self._stream is None:
            self._begin(frame)
        if frame.shape != self._shape:
            raise ValueError(f"frame of shape {frame.shape} in a clip of {self._shape}")
        height, width = self._stream.height, self._stream.width
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
        picture.pts = self.frames
        self._container.mux(self._stream.encode(picture))
        self.frames += 1

    def _begin(self, frame: np.ndarray) -> None:
        height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2
        if not height or not width:
            raise ValueError(f"frame of shape {frame.shape} is too small for a clip")
        self._shape = frame.shape
        rate = Fraction(self.frames_per_s).limit_denominator(1000)
        self._stream = self._container.add_stream("h264", rate=rate, options={"preset": "veryfast", "crf": "23"})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self._stream.codec_context.thread_count = 1  # it runs beside training

    def finish(self) -> Path:
        """Writes the remaining data and renames the file to its final name.

        Raises:
            ValueError: there is no frame.
        """
        if self._stream is None:
            self.discard()
            raise ValueError(f"no frame for {self.path}")
        self._container.mux(self._stream.encode())
        self._container.close()
        self._container = None
        os.replace(self._temporary, self.path)
        return self.path

    def discard(self) -> None:
        if self._container is not None:
            with contextlib.suppress(Exception):
                self._container.close()
            self._container = None
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def clip_stride(render_fps: float, frames_per_s: float = 20.0) -> int:
    """Env steps between two frames, so that a clip of about ``frames_per_s`` plays in real time."""
    return max(1, round(render_fps / frames_per_s))


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
