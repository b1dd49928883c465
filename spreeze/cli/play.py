"""``python -m spreeze play``: shows a policy in a window, or writes a clip if there is no display."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from spreeze.cli.arguments import Parser, check_output
from spreeze.cli.evaluate import (
    clip_of,
    environment_errors,
    find_weights,
    open_checked,
    policy_of,
    pretrained_policies,
    run_or_policy,
    spec_of,
)
from spreeze.envs.make import has_display, is_bullet
from spreeze.envs.task import Task
from spreeze.errors import ConfigError, SpreezeError, WeightsError, described
from spreeze.machine.output import say, stdout_to_stderr
from spreeze.machine.processes import close_in_time, no_child_left
from spreeze.run_directory import refuse_links
from spreeze.transport.weights import Weights, read_weights
from spreeze.types import EnvSpec
from spreeze.workers.episodes.lockstep import EnvStep, Episode, OnStep, run_episodes

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
    tasks: list[Task] = []
    with no_child_left():
        try:
            with stdout_to_stderr():
                text = play(args, tasks)
            say(text)
        finally:
            with stdout_to_stderr():
                close_in_time(*(task.close for task in tasks))
    return 0


def play(args: argparse.Namespace, tasks: list[Task]) -> str:
    """Shows the policy and returns a summary of what was shown; an error of the environment costs its episode.

    ``tasks`` gets the environment, which the caller closes. Raises a UsageError (no such run, environment or number, or
    no episode could be shown) or a WeightsError.
    """
    if args.episodes is not None and args.episodes < 1:
        raise ConfigError(f"--episodes {args.episodes}: at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: at least 0")
    check_output(args.clip)
    source = _Source(args)
    is_drawn = any(text.startswith("render_mode=") for text in source.spec.args)  # its observations are its pictures
    in_window = args.clip is None and has_display() and not is_drawn

    def make() -> Task:
        return open_checked(source.spec, source.weights.path, args, "human" if in_window else "rgb_array")

    def show(number: int, on_step: OnStep | None) -> Episode | _Lost:
        """Shows an episode of the newest policy."""
        source.renew()
        lost: list[_Lost] = []
        shown = run_episodes(
            make, source.policy.act, [args.seed + number], on_step, max_envs=1, tasks=tasks,
            on_error=lambda _, length, error: lost.append(_Lost(length, error)),
        )  # fmt: skip
        return shown[0] if shown else lost[0]

    with environment_errors(source.spec.env_id):
        return (_window if in_window else _clip)(source, show, args)


class _Lost(NamedTuple):
    """An episode that an error of the environment ended."""

    length: int
    error: Exception


_Show = Callable[[int, OnStep | None], Episode | _Lost]
"""Shows the episode of that number, as from 0, and calls the function at each of its steps."""


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


def _window(source: _Source, show: _Show, args: argparse.Namespace) -> str:
    """Shows episodes in real time, until ``--episodes`` or Ctrl-C."""
    bullet, due_s = is_bullet(source.spec.env_id), 0.0
    shown = started = consecutive_losses = 0

    def on_step(_: int, task: Task, moment: EnvStep) -> None:
        nonlocal due_s
        if bullet and moment.action is not None:
            task.env.render()  # moves Bullet's camera, and waits for the next frame
        time.sleep(max(0.0, due_s - time.monotonic()))
        due_s = max(due_s + 1.0 / task.render_fps, time.monotonic() - 0.1)

    with contextlib.suppress(KeyboardInterrupt):  # the normal end of a window
        while args.episodes is None or started < args.episodes:
            episode = show(started, on_step)
            started += 1
            if isinstance(episode, _Lost):
                consecutive_losses += 1
                if consecutive_losses == min(_MAX_LOST, args.episodes or _MAX_LOST):
                    raise episode.error from None
            else:
                shown, consecutive_losses = shown + 1, 0
            say(_line(source, episode), as_json=True)  # to stderr: stdout is for the summary
    lost = f", {started - shown} lost" if started > shown else ""
    return f"{shown} episode{'' if shown == 1 else 's'} shown{lost}"


def _clip(source: _Source, show: _Show, args: argparse.Namespace) -> str:
    path, count = Path(args.clip) if args.clip else _default_clip(source.weights), args.episodes or 1
    lines, lost = [], 0
    with clip_of(path, 30.0) as on_step:
        for number in range(count):
            episode = show(number, on_step)
            if isinstance(episode, _Lost):
                lost += 1
                if lost == count:
                    raise episode.error from None
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


def _line(source: _Source, episode: Episode | _Lost) -> str:
    version = f"{source.weights.epoch}-{source.weights.version}"
    if isinstance(episode, _Lost):
        return f"weights {version}: episode lost at step {episode.length + 1}: {described(episode.error)}"
    return f"weights {version}: return {episode.episode_return:.1f} in {episode.length} env steps"
