"""``python -m spreeze play``: shows a policy in a window, or writes a clip if there is no display."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from spreeze.cli.arguments import (
    Parser,
    add_checkpoint,
    add_flag,
    add_import,
    add_start_deadline,
    check_output,
    guarded,
)
from spreeze.cli.evaluate import (
    environment_errors,
    find_weights,
    policy_of,
    pretrained_policies,
    run_or_policy,
    spec_of,
    start_limit,
)
from spreeze.envs.make import has_display, is_bullet
from spreeze.envs.task import ObsBuffer, Task, check_fits, frame_options, make_task
from spreeze.errors import ConfigError, SpreezeError, WeightsError, described
from spreeze.inference.policy import State
from spreeze.machine.output import say, stdout_to_stderr
from spreeze.machine.processes import close_in_time, no_child_left
from spreeze.run_directory import refuse_links
from spreeze.transport.weights import Weights, read_weights
from spreeze.types import EnvSpec
from spreeze.workers.evaluator import MAX_STEPS
from spreeze.workers.visualizer import ClipWriter, clip_stride


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m spreeze play", description="Show a policy in a window, or record a clip if there is no display."
    )
    parser.add_argument("run", metavar="RUN", help=run_or_policy())
    add = partial(add_flag, parser)
    add("--runs-dir", text="directory of the runs", default="runs")
    add_checkpoint(parser, "; both are reloaded while a run trains")
    text = "record an MP4 clip even with a display"
    add("--clip", text=text, shown="in the run's video folder, or next to the weights file", metavar="FILE")
    add("--episodes", text="number of episodes", shown="in a window until Ctrl-C, in a clip 1", type=int)
    add("--seed", text="seed of the first episode", default=10_000)
    add_import(parser)
    add_start_deadline(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return guarded(lambda: _play(args))


def _play(args: argparse.Namespace) -> int:
    stage = _Stage(args)
    with no_child_left():
        try:
            with stdout_to_stderr():
                text = play(args, stage)
            say(text)
        except KeyboardInterrupt:  # ends a window in order
            pass
        finally:
            with stdout_to_stderr():
                stage.close()
    return 0


class _Stage:
    """The environment that is shown, in a window where there is a display."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._task: Task | None = None
        self.in_window = args.clip is None and has_display()

    def task(self, source: _Source) -> Task:
        """The environment, made where there is none.

        Raises:
            EnvironmentError_: it cannot be made, or does not fit the weights.
        """
        spec = source.spec
        if self._task is None:
            with start_limit(spec.env_id, self._args.start_deadline_s):
                self._task = make_task(
                    spec.env_id,
                    self._args.import_module,
                    "human" if self.in_window else "rgb_array",
                    args=spec.args,
                    plain=spec.plain,
                    image=frame_options(spec),
                    picture=spec.frames is not None,
                    action_mask=spec.action_mask,
                )
            check_fits(spec, self._task.spec, source.weights.path)
        return self._task

    def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            close_in_time(task.close)


def play(args: argparse.Namespace, stage: _Stage) -> str:
    """Shows the policy and returns a summary of what was shown; an error of the environment costs its episode.

    Raises:
        UsageError: no such run, environment or number, or no episode could be shown.
        WeightsError: the weights are damaged.
    """
    if args.episodes is not None and args.episodes < 1:
        raise ConfigError(f"--episodes {args.episodes}: at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: at least 0")
    check_output(args.clip)
    source = _Source(args)
    if any(text.startswith("render_mode=") for text in source.spec.args):  # it observes what it draws
        stage.in_window = False
    with environment_errors(source.spec.env_id):
        stage.task(source)
        return _window(source, stage, args) if stage.in_window else _clip(source, stage, args)


class _Source:
    """The weights to show; follows a run that is still training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        path = self._path()
        self._shown = _identity(path)
        self.weights: Weights = read_weights(path)
        self.spec: EnvSpec = spec_of(self.weights, args.import_module)
        self.policy = policy_of(self.weights, self.spec)

    def _path(self) -> Path:
        return find_weights(self._args.run, Path(self._args.runs_dir), self._args.checkpoint)

    def renew(self) -> None:
        """Loads newer weights if there are any; keeps the old ones on errors."""
        try:
            path = self._path()
            found = _identity(path)  # before reading: a later replacement is noticed next time
            if found == self._shown:
                return
            weights = read_weights(path)
            # The file may have become one that needs a foreign module.
            policy = policy_of(weights, spec_of(weights, self._args.import_module))
        except SpreezeError:
            return
        self._shown, self.weights, self.policy = found, weights, policy


def _identity(path: Path) -> tuple[str, int, int, int]:
    """Changes when the file is replaced: the best weights always have the same name.

    Raises:
        WeightsError: the file cannot be read.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from None
    return str(path), status.st_ino, status.st_mtime_ns, status.st_size


class _Lost(Exception):
    """An error of the environment, the cause, that ends an episode."""


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _Lost from error


class _Episode:
    """One episode; each of its methods raises ``_Lost`` where the environment raises."""

    def __init__(self, source: _Source) -> None:
        self._policy, self._state = source.policy, State()
        self.total, self.length = 0.0, 0
        self.lost: str | None = None
        """The error that ended it."""

    def begin(self, task: Task, seed: int) -> None:
        self._task, self._obs = task, ObsBuffer(1, task.spec)
        self._limit = task.spec.max_episode_steps or MAX_STEPS
        with _losing():
            self._obs.start(0, task.reset(seed=seed))

    def step(self) -> bool:
        """Takes one env step; False at the end of the episode."""
        drawn, self._state = self._policy.act(self._obs.array, self._state)
        action = self._task.unscale_action(drawn)
        with _losing():
            obs, reward, terminated, truncated = self._task.step(action[0])
        self._obs.put(0, obs)
        self.total += reward
        self.length += 1
        return not (terminated or truncated or self.length >= self._limit)

    def lose(self, lost: _Lost, stage: _Stage) -> None:
        """Notes why it ended; the next one has a new environment."""
        self.lost = described(lost.__cause__ or lost)
        stage.close()

    def picture(self) -> np.ndarray:
        with _losing():
            return self._task.render()


_MOST_LOST = 3
"""Number of consecutive episodes lost to environment errors that ends the window."""


def _window(source: _Source, stage: _Stage, args: argparse.Namespace) -> str:
    """Shows episodes in real time, until ``--episodes`` or Ctrl-C."""
    bullet = is_bullet(source.spec.env_id)
    shown = begun = in_a_row = 0
    while args.episodes is None or begun < args.episodes:
        source.renew()
        task, episode = stage.task(source), _Episode(source)
        try:
            episode.begin(task, args.seed + begun)
            due_s = time.monotonic()
            running = True
            while running:
                running = episode.step()
                if bullet:
                    with _losing():
                        task.env.render()  # moves Bullet's camera, and waits for the next frame
                due_s = max(due_s + 1.0 / task.render_fps, time.monotonic() - 0.1)
                time.sleep(max(0.0, due_s - time.monotonic()))
            shown, in_a_row = shown + 1, 0
        except _Lost as lost:
            in_a_row += 1
            if in_a_row == min(_MOST_LOST, args.episodes or _MOST_LOST):
                raise lost.__cause__ or lost from None
            episode.lose(lost, stage)
        begun += 1
        say(_line(source, episode), as_json=True)  # to stderr: stdout is for the summary
    return f"{shown} episode{'' if shown == 1 else 's'} shown" + (f", {begun - shown} lost" if begun > shown else "")


def _clip(source: _Source, stage: _Stage, args: argparse.Namespace) -> str:
    path, count = Path(args.clip) if args.clip else _default_clip(source.weights), args.episodes or 1
    stride = clip_stride(stage.task(source).render_fps, 30.0)
    lines, lost = [], 0
    with ClipWriter(path, stage.task(source).render_fps / stride) as clip:
        for number in range(count):
            source.renew()
            task, episode = stage.task(source), _Episode(source)
            try:
                episode.begin(task, args.seed + number)
                clip.add(episode.picture())
                while episode.step():
                    if episode.length % stride == 0:
                        clip.add(episode.picture())
            except _Lost as error:
                lost += 1
                if lost == count:
                    raise error.__cause__ or error from None
                episode.lose(error, stage)
            lines.append(_line(source, episode))
    return "\n".join(
        [
            *lines,
            *([f"{count - lost} of {count} episodes, {lost} lost"] if lost else []),
            f"clip: {path}" + ("" if args.clip or has_display() else " (no display for a window)"),
        ]
    )


def _default_clip(weights: Weights) -> Path:
    """A file in the run's ``videos``, or beside the weights if they are not in a run; of a pretrained policy here.

    Raises:
        RunError: that folder has links that lead out of it.
    """
    if weights.path in pretrained_policies().values():
        return Path(f"play-{weights.path.stem}.mp4")
    folder = weights.path.absolute().parent
    if (folder.parent / "videos").is_dir():
        folder = folder.parent / "videos"
        refuse_links(folder)
    path = folder / f"play-v{weights.version}.mp4"
    path.unlink(missing_ok=True)  # a file with a second name elsewhere must not be written through
    return path


def _line(source: _Source, episode: _Episode) -> str:
    version = f"{source.weights.epoch}-{source.weights.version}"
    if episode.lost is not None:
        return f"weights {version}: episode lost at step {episode.length + 1}: {episode.lost}"
    return f"weights {version}: return {episode.total:.1f} in {episode.length} env steps"
