"""``python -m spreeze play``: shows a policy in a window, or writes a clip if there is no display."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from spreeze.cli.arguments import Parser, check_output
from spreeze.cli.evaluate import (
    environment_errors,
    find_weights,
    open_checked,
    policy_of,
    pretrained_policies,
    run_or_policy,
    spec_of,
)
from spreeze.envs.make import has_display, is_bullet
from spreeze.envs.task import ObsBuffer, Task
from spreeze.errors import ConfigError, SpreezeError, WeightsError, described
from spreeze.inference.policy import Policy, State
from spreeze.machine.output import say, stdout_to_stderr
from spreeze.machine.processes import close_in_time, no_child_left
from spreeze.run_directory import refuse_links
from spreeze.transport.weights import Weights, read_weights
from spreeze.types import EnvSpec
from spreeze.workers.episodes.episode_redraw import clip_stride
from spreeze.workers.episodes.lockstep import MAX_STEPS
from spreeze.workers.visualizer import ClipWriter

_MAX_LOST = 3  # consecutive episodes lost to environment errors, after which the window closes


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m spreeze play", description="Show a policy in a window, or record a clip if there is no display."
    )
    parser.add_argument("run", metavar="RUN", help=run_or_policy())
    parser.flag("--runs-dir", text="directory of the runs", default="runs")
    parser.add_checkpoint("; both are reloaded while a run trains")
    text = "record an MP4 clip even with a display"
    parser.flag("--clip", text=text, shown="in the run's video folder, or next to the weights file", metavar="FILE")
    parser.flag("--episodes", text="number of episodes", shown="in a window until Ctrl-C, in a clip 1", type=int)
    parser.flag("--seed", text="seed of the first episode", default=10_000)
    parser.add_import()
    parser.add_start_deadline()
    return parser.run(argv, _play)


def _play(args: argparse.Namespace) -> int:
    stage = _Stage(args)
    with no_child_left():
        try:
            with stdout_to_stderr():
                text = play(args, stage)
            say(text)
        except KeyboardInterrupt:  # the normal end of a window
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
        """The environment, constructed at the first call; errors as ``open_checked``."""
        if self._task is None:
            mode = "human" if self.in_window else "rgb_array"
            self._task = open_checked(source.spec, source.weights.path, self._args, mode)
        return self._task

    def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            close_in_time(task.close)


def play(args: argparse.Namespace, stage: _Stage) -> str:
    """Shows the policy and returns a summary of what was shown; an error of the environment costs its episode.

    Raises a UsageError (no such run, environment or number, or no episode could be shown) or a WeightsError.
    """
    if args.episodes is not None and args.episodes < 1:
        raise ConfigError(f"--episodes {args.episodes}: at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: at least 0")
    check_output(args.clip)
    source = _Source(args)
    if any(text.startswith("render_mode=") for text in source.spec.args):  # its observations are its pictures
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
            identity = _identity(path)  # before reading: a later replacement is noticed next time
            if identity == self._shown:
                return
            weights = read_weights(path)
            # The new file may need a foreign module.
            policy = policy_of(weights, spec_of(weights, self._args.import_module))
        except SpreezeError:
            return
        self._shown, self.weights, self.policy = identity, weights, policy


def _identity(path: Path) -> tuple[str, int, int, int]:
    """Identifies a file's content, since the best weights keep their name. A WeightsError if it cannot be read."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from None
    return str(path), status.st_ino, status.st_mtime_ns, status.st_size


class _Episode:
    """One episode, and the error of the environment that ended it, if any."""

    def __init__(self) -> None:
        self.total, self.length = 0.0, 0
        self.lost: Exception | None = None

    def play(
        self, task: Task, policy: Policy, seed: int, draw: Callable[[int], np.ndarray | None]
    ) -> Iterator[np.ndarray | None]:
        """Yields the result of ``draw(number of steps so far)`` at each step but the last."""
        obs, state = ObsBuffer(1, task.spec), State()
        limit = task.spec.max_episode_steps or MAX_STEPS
        try:
            obs.start(0, task.reset(seed=seed))
            terminated = truncated = False
            while not (terminated or truncated or self.length >= limit):
                yield draw(self.length)
                drawn, state = policy.act(obs.array, state)
                next_obs, reward, terminated, truncated = task.step(task.to_env_units(drawn)[0])
                obs.put(0, next_obs)
                self.total += reward
                self.length += 1
        except Exception as error:
            self.lost = error


def _window(source: _Source, stage: _Stage, args: argparse.Namespace) -> str:
    """Shows episodes in real time, until ``--episodes`` or Ctrl-C."""
    bullet = is_bullet(source.spec.env_id)
    shown = started = consecutive_losses = 0
    while args.episodes is None or started < args.episodes:
        source.renew()
        task, episode = stage.task(source), _Episode()

        def draw(length: int, task: Task = task) -> None:
            if bullet and length:
                task.env.render()  # moves Bullet's camera, and waits for the next frame

        due_s = time.monotonic()
        for _ in episode.play(task, source.policy, args.seed + started, draw):
            time.sleep(max(0.0, due_s - time.monotonic()))
            due_s = max(due_s + 1.0 / task.render_fps, time.monotonic() - 0.1)
        started += 1
        if episode.lost is None:
            shown, consecutive_losses = shown + 1, 0
        else:
            consecutive_losses += 1
            if consecutive_losses == min(_MAX_LOST, args.episodes or _MAX_LOST):
                raise episode.lost from None
            stage.close()  # the next one has a new environment
        say(_line(source, episode), as_json=True)  # to stderr: stdout is for the summary
    lost = f", {started - shown} lost" if started > shown else ""
    return f"{shown} episode{'' if shown == 1 else 's'} shown{lost}"


def _clip(source: _Source, stage: _Stage, args: argparse.Namespace) -> str:
    path, count = Path(args.clip) if args.clip else _default_clip(source.weights), args.episodes or 1
    stride = clip_stride(stage.task(source).render_fps, 30.0)
    lines, lost = [], 0
    with ClipWriter(path, stage.task(source).render_fps / stride) as clip:
        for number in range(count):
            source.renew()
            task, episode = stage.task(source), _Episode()

            def draw(length: int, task: Task = task) -> np.ndarray | None:
                return None if length % stride else task.render()

            for picture in episode.play(task, source.policy, args.seed + number, draw):
                if picture is not None:
                    clip.add(picture)
            if episode.lost is not None:
                lost += 1
                if lost == count:
                    raise episode.lost from None
                stage.close()
            lines.append(_line(source, episode))
    lines += [f"{count - lost} of {count} episodes, {lost} lost"] if lost else []
    return "\n".join([*lines, f"clip: {path}" + ("" if args.clip or has_display() else " (no display for a window)")])


def _default_clip(weights: Weights) -> Path:
    """A file in the run's ``videos``, or beside the weights if they are not in a run; of a pretrained policy here."""
    if weights.path in pretrained_policies().values():
        return Path(f"play-{weights.path.stem}.mp4")
    folder = weights.path.absolute().parent
    if (folder.parent / "videos").is_dir():
        folder = folder.parent / "videos"
        refuse_links(folder)
    path = folder / f"play-v{weights.version}.mp4"
    path.unlink(missing_ok=True)  # a hard-linked file must not be overwritten in place
    return path


def _line(source: _Source, episode: _Episode) -> str:
    version = f"{source.weights.epoch}-{source.weights.version}"
    if episode.lost is not None:
        return f"weights {version}: episode lost at step {episode.length + 1}: {described(episode.lost)}"
    return f"weights {version}: return {episode.total:.1f} in {episode.length} env steps"
