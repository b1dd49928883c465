"""Draws pictures of a recorded episode from its seed and its actions, on request of the page.

``python -m spreeze.workers.episodes.episode_redraw RUN ID KIND`` writes them as they are made, so that a player can
show the first ones while the last are drawn; ``main`` can also be started ahead. Rewards and observations are compared
with the recorded ones at each env step: if an episode does not repeat, the pictures end with a message.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from spreeze.envs.task import Task, open_task, spec_from
from spreeze.errors import SpreezeError, described
from spreeze.files import read_json
from spreeze.machine.output import stdout_to_stderr
from spreeze.machine.processes import LOW_PRIORITY, close_in_time, exit_process, lower_priority
from spreeze.metrics.recorded_episodes import (
    MAX_FRAME_BYTES,
    NOTE,
    UNFINISHED,
    EvaluationKey,
    RecordedEpisode,
    frame_record,
    frames_path,
    prune,
    read_recording,
)
from spreeze.run_directory import finite_number, read_config, take_lock
from spreeze.workers.episodes.lockstep import new_task

_SIDE = 400
_QUALITY = 75
_MAX_FRAMES = 600  # most pictures of one episode; a longer episode has more env steps per picture
_LONGEST_S = 300.0
_URGENT_S = 10.0
"""Time at normal priority, while a viewer waits. At low priority, beside a run that uses all cores, two to four env
steps a second would be drawn."""
_LONGEST_WAIT_S = 120.0
_TOLERANCE = 1e-6  # relative difference up to which a number counts as equal to the recorded one


def clip_stride(render_fps: float, frames_per_s: float = 20.0) -> int:
    """Env steps between two pictures, so that about ``frames_per_s`` play in real time."""
    return max(1, round(render_fps / frames_per_s))


def jpeg(picture: np.ndarray, side: int | None = _SIDE) -> bytes:
    """A picture uint8 [H, W, 3] as JPEG, at most ``side`` pixels wide and high; None: as large as it is."""
    from PIL import Image  # an evaluator that draws nothing does without

    image = Image.fromarray(picture)
    if side is not None:
        image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


def replay(task: Task, episode: RecordedEpisode) -> Iterator[tuple[bool, int]]:
    """Plays a recorded episode again; yields True while it is as recorded, and the number of env steps so far."""
    yield _same(task.reset(seed=episode.seed), episode.obs[0]), 0
    for step in range(episode.length):
        obs, reward, terminated, truncated = task.step(episode.action[step])
        same = _same(obs, episode.obs[step + 1]) and bool(np.isclose(reward, episode.reward[step], _TOLERANCE, 1e-9))
        last = step + 1 == episode.length
        yield same and terminated == (last and episode.terminated), step + 1
        if (terminated or truncated) and not last:
            return


def _same(obs: np.ndarray, recorded: np.ndarray) -> bool:
    """True if an observation has the recorded numbers; images are not compared, their rewards are."""
    if obs.dtype == np.uint8:
        return True
    return np.allclose(obs.reshape(-1)[: len(recorded)], recorded, _TOLERANCE, 1e-6)


def drawing_task(run_dir: Path) -> Task:
    """The run's task with rendering; raises what its constructor raises."""
    return new_task(partial(open_task, spec_from(read_json(run_dir / "env.json")), "rgb_array", whole_games=True))


def draw(run_dir: Path, key: EvaluationKey, kind: str, make_task: Callable[[Path], Task] = drawing_task) -> str:
    """Draws the pictures of an episode, unless another process does; returns why they end early, or nothing.

    ``make_task`` may return a task of this run made before. A RunError without such an episode, an OSError if the run
    directory cannot be written to.
    """
    episode = read_recording(run_dir, key).of_kind(kind)
    path = frames_path(run_dir, key, episode.kinds[0])
    unfinished = path.with_suffix(UNFINISHED)
    if _is_locked(unfinished):
        return ""
    unfinished.unlink(missing_ok=True)  # of a process that was killed
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb", 0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        note = ""
        try:
            task = make_task(run_dir)
            try:
                stride = max(clip_stride(task.render_fps), -(-episode.length // _MAX_FRAMES))
                for data in _pictures(task, episode, stride):
                    file.write(data)
            finally:
                close_in_time(task.close)
        except _Ended as end:
            note = str(end)
        except Exception as error:  # of the environment's code
            note = f"no pictures: {described(error)}"
        if note:
            file.write(frame_record(NOTE, note.encode()[:500]))
        os.replace(unfinished, path)
    config = read_config(run_dir).get("evaluation", {})
    count, size_mb = finite_number(config.get("keep_episodes")), finite_number(config.get("keep_episodes_mb"))
    prune(run_dir, int(count or 10_000), 1e6 * (size_mb or 1e6))
    return note


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return take_lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) is False
    finally:
        os.close(fd)


class _Ended(Exception):
    """Why the pictures end before the episode does."""


def _pictures(task: Task, episode: RecordedEpisode, stride: int) -> Iterator[bytes]:
    started_s, size, urgent = time.monotonic(), 0, True
    for same, step in replay(task, episode):
        if not same:
            raise _Ended(
                f"the pictures end at step {step:,}: with the same seed and actions the environment did not do there "
                "what it had done"
            )
        if step % stride and step != episode.length:
            continue
        data = frame_record(step, jpeg(task.render()))
        size += len(data)
        if urgent and time.monotonic() - started_s > _URGENT_S:
            urgent = False
            lower_priority(LOW_PRIORITY)
        if size > MAX_FRAME_BYTES or time.monotonic() - started_s > _LONGEST_S:
            limits = f"{MAX_FRAME_BYTES // 10**6} MB or {_LONGEST_S:.0f} s"
            raise _Ended(f"the pictures end at step {step:,}: they take more than {limits}")
        yield data


def _prepared(run_dir: Path) -> Task | None:
    """The run's task after its first picture, which takes longest; None if that fails: drawing reports the error."""
    with contextlib.suppress(Exception):
        task = drawing_task(run_dir)
        task.reset(seed=0)
        jpeg(task.render())
        return task
    return None


def _draw_later(run_dir: Path | None) -> None:
    """Loads the packages, prepares the task of a run, if one is named, and draws the episode that comes on stdin."""
    from PIL import Image  # noqa: F401

    from spreeze.envs import single_env  # noqa: F401

    task = None if run_dir is None else _prepared(run_dir)
    ready, _, _ = select.select([sys.stdin], [], [], _LONGEST_WAIT_S)
    if not (line := sys.stdin.readline() if ready else ""):
        return
    directory, text, kind = map(str, json.loads(line))
    make_task = drawing_task if task is None or Path(directory) != run_dir else lambda _: task
    draw(Path(directory), EvaluationKey.parse(text), kind, make_task)


def main(argv: list[str]) -> int:
    """Arguments are a run directory, an evaluation's ID and the kind of episode.

    Without the last two it prepares itself, for that run if it is named, and reads all three from standard input.
    """
    try:
        with stdout_to_stderr():
            if len(argv) < 3:
                _draw_later(Path(argv[0]) if argv else None)
            else:
                draw(Path(argv[0]), EvaluationKey.parse(argv[1]), argv[2])
    except (SpreezeError, OSError) as error:
        sys.stderr.write(f"{described(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
