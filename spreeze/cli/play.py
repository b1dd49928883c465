"""``python -m spreeze play``: shows a policy in a window, or writes a clip if there is no display."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from spreeze.cli.arguments import Parser, check_output, guarded
from spreeze.cli.evaluate import (
    CHECKPOINTS,
    environment_errors,
    find_weights,
    policy_of,
    pretrained_policies,
    run_or_policy,
    spec_of,
)
from spreeze.envs.make import has_display, is_bullet
from spreeze.envs.task import ObsRows, Task, check_fits, frame_options, make_task
from spreeze.errors import ConfigError, SpreezeError, WeightsError
from spreeze.machine.output import say, stdout_to_stderr
from spreeze.run_directory import refuse_links
from spreeze.transport.weights import Weights, read_weights
from spreeze.types import EnvSpec
from spreeze.workers.evaluator import MAX_STEPS
from spreeze.workers.visualizer import ClipWriter, clip_stride


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m spreeze play",
                    description="Show a policy in a window, or write a clip where there is no display.")
    parser.add_argument("run", metavar="RUN", help=run_or_policy())
    parser.add_argument("--runs-dir", default="runs", help="directory of the runs (default: runs)")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="best",
                        help="which weights; both follow a run that is training (default: best)")
    parser.add_argument("--clip", metavar="FILE",
                        help="write an MP4 clip even with a display (default: with the run's videos, beside a file of "
                        "weights, or here)")
    parser.add_argument("--episodes", type=int,
                        help="episodes to show (default: until Ctrl-C in a window, 1 in a clip)")
    parser.add_argument("--seed", type=int, default=10_000, help="seed of the first episode (default: 10000)")
    parser.add_argument("--import", dest="import_module", metavar="MODULE",
                        help="module to import first (default: none)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return guarded(lambda: _play(args))


def _play(args: argparse.Namespace) -> int:
    try:
        with stdout_to_stderr():
            text = play(args)
    except KeyboardInterrupt:  # ends a window in order
        return 0
    say(text)
    return 0


def play(args: argparse.Namespace) -> str:
    """Shows the policy and returns a summary of what was shown.

    Raises:
        UsageError: no such run, environment or number.
        WeightsError: the weights are damaged.
    """
    if args.episodes is not None and args.episodes < 1:
        raise ConfigError(f"--episodes {args.episodes}: at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: at least 0")
    check_output(args.clip)
    source = _Source(args)
    window = args.clip is None and has_display()
    task = make_task(
        source.spec.env_id, args.import_module, "human" if window else "rgb_array", args=source.spec.args,
        plain=source.spec.plain, image=frame_options(source.spec), action_mask=source.spec.action_mask,
    )
    try:
        check_fits(source.spec, task.spec, source.weights.path)
        with environment_errors(source.spec.env_id):
            return _window(source, task, args) if window else _clip(source, task, args)
    finally:
        task.close()


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


class _Episode:
    def __init__(self, source: _Source, task: Task, seed: int) -> None:
        self._policy, self._task = source.policy, task
        self._obs = ObsRows(1, task.spec)
        self._obs.start(0, task.reset(seed=seed))
        self.total, self.length = 0.0, 0
        self._limit = task.spec.max_episode_steps or MAX_STEPS

    def step(self) -> bool:
        """Takes one env step; False at the end of the episode."""
        action = self._task.to_native(self._policy.act_greedy(self._obs.array))
        obs, reward, terminated, truncated = self._task.step(action[0])
        self._obs.put(0, obs)
        self.total += reward
        self.length += 1
        return not (terminated or truncated or self.length >= self._limit)


def _window(source: _Source, task: Task, args: argparse.Namespace) -> str:
    """Shows episodes in real time, until ``--episodes`` or Ctrl-C."""
    bullet = is_bullet(source.spec.env_id)
    shown = 0
    while args.episodes is None or shown < args.episodes:
        source.renew()
        episode = _Episode(source, task, args.seed + shown)
        due_s = time.monotonic()
        running = True
        while running:
            running = episode.step()
            if bullet:
                task.env.render()  # moves Bullet's camera, and waits for the next frame
            due_s = max(due_s + 1.0 / task.render_fps, time.monotonic() - 0.1)
            time.sleep(max(0.0, due_s - time.monotonic()))
        shown += 1
        say(_line(source, episode), as_json=True)  # to stderr: stdout is for the summary
    return f"{shown} episode{'' if shown == 1 else 's'} shown"


def _clip(source: _Source, task: Task, args: argparse.Namespace) -> str:
    path = Path(args.clip) if args.clip else _default_clip(source.weights)
    stride = clip_stride(task.render_fps, 30.0)
    lines = []
    with ClipWriter(path, task.render_fps / stride) as clip:
        for number in range(args.episodes or 1):
            source.renew()
            episode = _Episode(source, task, args.seed + number)
            clip.add(task.render())
            while episode.step():
                if episode.length % stride == 0:
                    clip.add(task.render())
            lines.append(_line(source, episode))
    return "\n".join([*lines, f"clip: {path}" + ("" if args.clip else " (no display for a window)")])


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
    return f"weights {version}: return {episode.total:.1f} in {episode.length} env steps"
