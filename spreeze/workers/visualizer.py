"""The visualizer: shows the current policy in an environment of its own, as ``live.jpg`` and as clips.

It feeds nothing back, runs at low priority, and keeps to its share of a core: it measures the cost of each frame
and sleeps accordingly. Outside of clips it only draws while a viewer watches. A picture that fails costs the clip; the
next attempt is made with a new environment, after a pause that grows with the failures in a row.
"""

from __future__ import annotations

import contextlib
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageOps

from spreeze.envs.task import ObsBuffer, Task, open_task
from spreeze.errors import described
from spreeze.files import remove_unfinished, replace_bytes, temp_name, write_json
from spreeze.formatting import in_a_row, is_power_of_ten
from spreeze.inference.policy import Policy, State
from spreeze.machine.processes import close_in_time
from spreeze.transport import status_table
from spreeze.transport.weights import Weights
from spreeze.workers.context import WorkerContext, pause_s
from spreeze.workers.episodes.episode_redraw import clip_stride, jpeg
from spreeze.workers.evaluator import WeightsWatch
from spreeze.workers.jobs import VisualizerJob
from spreeze.workers.roles import Phase

_POLL_S = 0.2
_FIRST_CLIP_S, _MIN_CLIP_S = 5.0, 1.0
"""When the first clip begins, and the playing time from which one that a stop cuts short is kept."""
_NEW_WEIGHTS_S = 3.0
_MAX_CLIPS = 300
_FEW_PIXELS = 2
_WATCHED_S = 3.0  # A viewer asks for pictures many times a second and touches control/viewer once a second
_UNWATCHED_PICTURE_S = 30.0
"""Longest age of ``live.jpg`` without a viewer, for users of the terminal and for the first view."""


def run_visualizer(context: WorkerContext, job: VisualizerJob) -> None:
    """Shows the newest policy until the supervisor asks to stop; ends early if nothing can be drawn."""
    context.heartbeat(Phase.INIT)
    with contextlib.ExitStack() as stack:
        try:
            task = open_task(job.spec, "rgb_array", whole_games=True)
            stack.callback(task.close)
            task.reset(seed=job.seed)
            task.render()
        except Exception as error:
            context.event("warning", f"visualizer disabled, training continues: {described(error)}")
            return
        show = _Show(context, job, task)
        stack.pop_all()  # the show closes it, or its replacement
        stack.callback(show.close)
        show.run()


class _Show:
    """The loop: advance, draw, write the picture, feed the clip, rest."""

    def __init__(self, context: WorkerContext, job: VisualizerJob, task: Task) -> None:
        self._context, self._job, self._config, self._has_free_core = context, job, job.config, job.has_free_core
        self._task, self._failures, run_dir = task, 0, Path(job.run_dir)
        self._live, self._viewer = run_dir / "live.jpg", run_dir / "control" / "viewer"
        self._videos = run_dir / "videos"
        self._videos.mkdir(parents=True, exist_ok=True)
        for folder in (run_dir, self._videos):
            remove_unfinished(folder)
        self._watch = WeightsWatch(run_dir)
        self._live_stride = max(1, round(task.render_fps / job.config.frames_per_s))
        self._clip_stride = clip_stride(task.render_fps)
        self._clip_fps = task.render_fps / self._clip_stride
        self._clip_frames = max(1, round(job.config.clip_length_s * self._clip_fps))
        self._weights: Weights | None = None
        self._policy: Policy | None = None
        self._clip: ClipWriter | None = None
        self._next_clip_s, self._next_picture_s, self._new_weights_s = float("inf"), 0.0, 0.0
        self._frames = self._clips = 0
        self._number = max((_number_of(path) for path in self._videos.glob("clip-*-v*.mp4")), default=0)
        self._obs = ObsBuffer(1, task.spec)
        self._seed = job.seed
        self._returns: list[float] = []  # returns of the episodes that ended in this clip
        self._restart()

    def run(self) -> None:
        context = self._context
        while not context.stopping:
            if context.header_word(status_table.VISUALIZER_PAUSED):
                context.post(paused=1.0)
                context.sleep(_POLL_S)
                continue
            begin_s, cpu_s = time.monotonic(), time.process_time()
            needed = self._needed()
            if needed:
                self._take_new_weights()
            if self._policy is None or not needed:
                context.sleep(_POLL_S)
                continue
            try:
                if self._failures:  # the environment may be what fails
                    context.heartbeat(Phase.INIT)
                    close_in_time(self._task.close)
                    self._task = open_task(self._job.spec, "rgb_array", whole_games=True)
                    self._restart()
                self._frame(self._policy)
                self._failures = 0
            except Exception as error:
                self._failed(error)
            context.post(frames=self._frames, clips=self._clips, paused=0.0)
            self._rest(begin_s, time.process_time() - cpu_s)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if is_power_of_ten(self._failures):
            self._context.event("warning", f"rendering failed{in_a_row(self._failures)}: {described(error)}")
        self.drop_clip()
        self._context.sleep(pause_s(self._failures))

    def close(self) -> None:
        """Finishes an unfinished clip early: in a short run it is the only one."""
        if self._clip is not None and self._clip.frames >= _MIN_CLIP_S * self._clip_fps:
            try:
                self._finish_clip(self._clip)
            except Exception as error:
                self._context.event("warning", f"the last clip was not written: {described(error)}")
        self.drop_clip()
        close_in_time(self._task.close)

    def _needed(self) -> bool:
        """True while a clip is due or a viewer requested a picture lately."""
        if self._clip is not None or time.monotonic() >= min(self._next_clip_s, self._next_picture_s):
            return True
        try:
            return abs(time.time() - self._viewer.stat().st_mtime) <= _WATCHED_S  # the clock may have been set back
        except OSError:
            return False

    def _take_new_weights(self) -> None:
        """Takes newer weights at the start of an episode or every few seconds, but never within a clip."""
        now_s = time.monotonic()
        if self._clip is not None or not (self._at_start or now_s >= self._new_weights_s):
            return
        weights = self._watch.newer(self._context.weights_counter)
        if weights is None:
            return
        if self._policy is None:
            self._next_clip_s = now_s + min(_FIRST_CLIP_S, self._config.clip_interval_s)
        self._weights, self._policy = weights, Policy.from_weights(weights.arrays, weights.meta)
        self._new_weights_s = now_s + _NEW_WEIGHTS_S
        self._context.post(policy_version=weights.version)

    def _frame(self, policy: Policy) -> None:
        self._context.heartbeat(Phase.RENDER)
        if self._clip is None and time.monotonic() >= self._next_clip_s and self._weights is not None:
            self._next_clip_s = time.monotonic() + self._config.clip_interval_s
            self._restart()
            self._returns = []
            self._number += 1
            path = self._videos / f"clip-{self._number:04d}-v{self._weights.version}.mp4"
            self._clip = ClipWriter(path, self._clip_fps)
        else:
            self._advance(policy, self._live_stride if self._clip is None else self._clip_stride)
        picture = self._task.render()
        replace_bytes(self._live, jpeg(picture, side=None))
        self._next_picture_s = time.monotonic() + _UNWATCHED_PICTURE_S
        self._frames += 1
        if self._clip is not None:
            self._clip.add(picture)
            if self._clip.frames >= self._clip_frames:
                self._finish_clip(self._clip)

    def _restart(self) -> None:
        self._obs.start(0, self._task.reset(seed=self._seed))
        self._seed = (self._seed + 1) % 2**31
        self._return, self._at_start, self._state = 0.0, True, State()

    def _advance(self, policy: Policy, steps: int) -> None:
        for _ in range(steps):
            drawn, self._state = policy.act(self._obs.array, self._state)
            action = self._task.to_env_units(drawn)
            obs, reward, terminated, truncated = self._task.step(action[0])
            self._obs.put(0, obs)
            self._return += reward
            self._at_start = False
            if terminated or truncated:
                self._returns = [*self._returns[-99:], self._return]
                self._restart()
                return

    def _finish_clip(self, clip: ClipWriter) -> None:
        """Writes the JSON first, so that a visible clip always has its metadata."""
        assert self._weights is not None
        meta = self._weights.meta
        write_json(
            clip.path.with_suffix(".json"),
            {
                "version": self._weights.version,
                "epoch": self._weights.epoch,
                "env_steps": meta.get("env_steps"),
                "wall_s": meta.get("wall_s"),
                "episode_returns": self._returns,
                "return_so_far": self._return,
                "frames": clip.frames,
                "frames_per_s": clip.frames_per_s,
            },
        )
        clip.finish()
        self._clip = None
        self._clips += 1
        _prune(self._videos)

    def drop_clip(self) -> None:
        if self._clip is not None:
            self._clip.discard()
            self._clip = None

    def _rest(self, begin_s: float, cpu_s: float) -> None:
        in_clip = self._clip is not None and self._has_free_core
        period_s = 1.0 / (self._clip_fps if in_clip else self._config.frames_per_s)
        if not self._has_free_core:
            period_s = max(period_s, cpu_s / self._config.cpu_share)
        self._context.sleep(max(0.0, period_s - (time.monotonic() - begin_s)))


def _prune(videos: Path) -> None:
    """Deletes all but the newest clips, so that a run of weeks does not fill the disk."""
    for path in sorted(videos.glob("clip-*-v*.mp4"), key=_number_of)[:-_MAX_CLIPS]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)


def _number_of(path: Path) -> int:
    number = path.name.split("-")[1]
    return int(number) if number.isdigit() else 0


class ClipWriter(contextlib.AbstractContextManager["ClipWriter"]):
    """Encodes frames as they come; as a context manager it finishes the file, or removes it when the block raised."""

    def __init__(self, path: Path, frames_per_s: float) -> None:
        self.path, self.frames_per_s, self.frames = path, frames_per_s, 0
        self._temporary = path.with_name(temp_name())
        self._stream: Any = None
        self._container: Any = av.open(str(self._temporary), mode="w", format="mp4", options={"movflags": "faststart"})

    def add(self, frame: np.ndarray) -> None:
        """Adds one frame, uint8 [H, W, 3], fitted to the size of the first, made even for yuv420p."""
        if self._stream is None:
            self._begin(frame)
        picture = av.VideoFrame.from_ndarray(fitted(frame, self._stream.height, self._stream.width), format="rgb24")
        picture.pts = self.frames
        self._container.mux(self._stream.encode(picture))
        self.frames += 1

    def _begin(self, frame: np.ndarray) -> None:
        height, width = ((length + 1) // 2 * 2 for length in frame.shape[:2])
        rate = Fraction(self.frames_per_s).limit_denominator(1000)
        self._stream = self._container.add_stream("h264", rate=rate, options={"preset": "veryfast", "crf": "23"})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self._stream.codec_context.thread_count = 1  # it runs beside training

    def finish(self) -> None:
        """Writes the remaining data and renames the file to its final name; a ValueError if there is no frame."""
        if self._stream is None:
            self.discard()
            raise ValueError(f"no frame for {self.path}")
        self._container.mux(self._stream.encode())
        self._container.close()
        self._container = None
        os.replace(self._temporary, self.path)

    def discard(self) -> None:
        if self._container is not None:
            with contextlib.suppress(Exception):
                self._container.close()
            self._container = None
        self._temporary.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def fitted(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """A frame [H, W, 3] as [height, width, 3]: cut or continued by a pixel or two, else scaled as a whole."""
    more = height - frame.shape[0], width - frame.shape[1]
    if max(map(abs, more)) > _FEW_PIXELS:
        return np.asarray(ImageOps.pad(Image.fromarray(frame), (width, height)))
    rows, columns = (max(0, count) for count in more)
    return np.ascontiguousarray(np.pad(frame, ((0, rows), (0, columns), (0, 0)), mode="edge")[:height, :width])
