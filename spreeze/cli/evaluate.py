"""``python -m spreeze evaluate``: greedy episodes of trained weights, with uncertainty."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.cli.arguments import Parser, check_output, print_result
from spreeze.config import SHIPPED
from spreeze.envs.make import refuse_foreign
from spreeze.envs.task import Task, check_fits, make_task, options_of, spec_from
from spreeze.errors import ConfigError, EnvError, RunError, SpreezeError, WeightsError, described
from spreeze.files import read_json
from spreeze.formatting import clean, percent
from spreeze.inference.policy import Policy, exploring_arrays
from spreeze.machine.output import say, stdout_to_stderr
from spreeze.machine.processes import OutOfTime, close_in_time, no_child_left, time_limit
from spreeze.metrics import comparison
from spreeze.metrics.comparison import MIN_RUNS
from spreeze.metrics.evidence import RESAMPLES, bootstrap_interval
from spreeze.metrics.return_curve import FINAL_EVALUATIONS
from spreeze.run_directory import find_run
from spreeze.transport.demonstrations import check_demonstrable, save_demonstrations
from spreeze.transport.weights import LATEST, Weights, read_weights
from spreeze.types import EnvSpec
from spreeze.workers.episodes.episode_redraw import clip_stride
from spreeze.workers.episodes.lockstep import EnvStep, Episode, OnStep, run_episodes, score, success_rate

_FIRST_SEED = 1_000_000
_PRETRAINED = SHIPPED / "assets" / "policies"
_FIRST_NOTE_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m spreeze evaluate",
        description="Evaluate trained weights over greedy episodes; report the mean return and its confidence "
        "interval.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"{run_or_policy()}; several runs with --protocol")
    parser.flag("--episodes", text="episodes to run", default=10)
    shown = f"{_FIRST_SEED}, disjoint from the seeds with which a run selects its best policy"
    parser.flag("--seed", text="seed of the first episode", default=_FIRST_SEED, shown=shown)
    parser.add_checkpoint()
    parser.flag("--csv", text="write a CSV file with one row per episode", metavar="FILE")
    parser.flag("--record", text="write the episodes to an .npz file for train --demonstrations", metavar="FILE")
    parser.flag("--video", text="record the first episode as an MP4 clip", metavar="FILE")
    parser.add_import()
    parser.add_start_deadline()
    parser.add_common_flags()
    protocol = parser.add_argument_group("compare recorded evaluations of runs, without new episodes")
    text = "protocol of HTS-RL: final, final-time and required-time metric with bootstrap intervals over seeds"
    parser.flag("--protocol", text=text, choices=("hts",), group=protocol)
    text = "score of the required-time metric, may be repeated"
    parser.flag("--target", text=text, default=[], type=float, metavar="SCORE", group=protocol)
    text, shown = "wall time of the final-time metric [s]", "the duration of the fastest run per environment"
    parser.flag("--limit-s", text=text, shown=shown, type=float, group=protocol)
    parser.flag("--policies", text="number of policies per metric", default=FINAL_EVALUATIONS, group=protocol)
    parser.add_centre(", from four seeds on", protocol)
    parser.flag("--resamples", text="bootstrap resamples", default=RESAMPLES, group=protocol)
    text = "group runs by this setting only, may be repeated"
    shown = "by all settings that differ between runs of the same environment, algorithm and mode"
    parser.flag("--by", text=text, shown=shown, action="append", metavar="SECTION.FIELD", group=protocol)
    return parser.run(argv, lambda args: _compare(args) if args.protocol else _evaluate(args))


def _evaluate(args: argparse.Namespace) -> int:
    tasks: list[Task] = []
    with no_child_left():
        try:
            with stdout_to_stderr():
                document = evaluate(args, tasks)
            return print_result(args, document, lambda: _summary(document))
        finally:
            with stdout_to_stderr():
                close_in_time(*(task.close for task in tasks))


def _compare(args: argparse.Namespace) -> int:
    targets, robust = tuple(args.target), args.centre == "iqm"
    rules = comparison.Rules(
        policies=args.policies, targets=targets, limit_s=args.limit_s, resamples=args.resamples, robust=robust
    )
    paths = [find_run(run, Path(args.runs_dir)) for run in args.runs]
    report = comparison.report_of(paths, args.by, rules)
    return print_result(args, {"protocol": "hts", **dataclasses.asdict(report)}, lambda: comparison.text(report))


def evaluate(args: argparse.Namespace, tasks: list[Task]) -> dict[str, Any]:
    """Runs the episodes and returns the JSON document; an error of the environment costs its episode.

    ``tasks`` gets environments, which the caller closes. A UsageError (no such run or environment, number out of range,
    no episode finished) or a WeightsError.
    """
    if len(args.runs) > 1:
        raise ConfigError(f"{len(args.runs)} runs: only one run can be evaluated; compare several with --protocol hts")
    if args.episodes < 1:
        raise ConfigError(f"--episodes {args.episodes}: at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: at least 0")
    for path in (args.csv, args.video, args.record):
        check_output(path)
    weights = read_weights(find_weights(args.runs[0], Path(args.runs_dir), args.checkpoint))
    spec = spec_of(weights, args.import_module)
    policy = policy_of(weights, spec)
    recorded: list[list[Any]] = []
    if args.record:
        if not args.record.endswith(".npz"):
            raise ConfigError(f"--record {args.record}: expected a name that ends in .npz")
        check_demonstrable(spec, f"--record {args.record}")

    def make() -> Task:
        task = open_checked(spec, weights.path, args, "rgb_array" if args.video else None)
        return RecordingTask(task, recorded) if args.record else task

    seeds, lost = range(args.seed, args.seed + args.episodes), list[str]()  # the same starts for each policy

    def on_error(index: int, length: int, error: Exception) -> None:
        lost.append(f"seed {seeds[index]}, step {length + 1}: {described(error)}")

    with environment_errors(spec.env_id), clip_of(Path(args.video) if args.video else None) as record:
        episodes = run_episodes(make, policy.act, seeds, on_step=record, tasks=tasks, on_error=on_error)
        if not episodes:
            raise EnvError(f"{spec.env_id}: none of {args.episodes} episodes finished; last error: {lost[-1]}")
    if args.csv:
        lines = ["seed,return,length,terminated\n"]
        lines += [f"{e.seed},{e.episode_return!r},{e.length},{int(e.terminated)}\n" for e in episodes]
        Path(args.csv).write_text("".join(lines), encoding="utf-8")
    if args.record:
        save_demonstrations(Path(args.record), recorded)
    return _document(weights, spec.env_id, episodes, lost, args)


def open_checked(spec: EnvSpec, where: Path, args: argparse.Namespace, render_mode: str | None) -> Task:
    """The environment of the weights in ``where``; prints a note if it takes long to start.

    An EnvError if it cannot be made, takes longer than ``--start-deadline-s``, or does not fit the weights.
    """
    limit_s = args.start_deadline_s

    def note_wait(waited_s: float) -> None:
        text = f"waiting for {spec.env_id} to start: {waited_s:.0f} s so far, at most {limit_s:g} s"
        say(f"{text} (--start-deadline-s)", as_json=True)  # to stderr: stdout is for the summary

    try:
        with time_limit(limit_s, every_s=_FIRST_NOTE_S, on_wait=note_wait):
            options, masks = options_of(spec, whole_games=True), spec.action_mask
            task = make_task(spec.env_id, args.import_module, render_mode, action_mask=masks, **options)
    except OutOfTime:
        raise EnvError(
            f"{spec.env_id} was not made within {limit_s:g} s; if it needs longer to start, set --start-deadline-s "
            f"{2 * limit_s:g}"
        ) from None
    try:
        check_fits(spec, task.spec, where)
    except EnvError:
        close_in_time(task.close)
        raise
    return task


class RecordingTask(Task):
    """A task that keeps its episodes, in the form that ``save_demonstrations`` takes."""

    def __init__(self, task: Task, episodes: list[list[Any]]) -> None:
        super().__init__(task.env, task.spec)
        self._episodes, self._last_obs = episodes, np.zeros(0)

    def reset(self, seed: int | None = None) -> np.ndarray:
        self._last_obs = super().reset(seed)
        self._episode: list[Any] = []
        self._episodes.append(self._episode)
        return self._last_obs

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        choices = self.spec.choices
        native = action.copy() if choices is None else choices.to_env(action.reshape(1, -1)).reshape(-1)
        obs, reward, terminated, truncated = super().step(action)
        self._episode.append((self._last_obs, native, reward, terminated, obs))
        self._last_obs = obs
        return obs, reward, terminated, truncated


@contextlib.contextmanager
def clip_of(path: Path | None, frames_per_s: float = 20.0) -> Iterator[OnStep | None]:
    """Yields a callback that records the episodes of the first seed as a clip; None without a path."""
    if path is None:
        yield None
        return
    from spreeze.workers.visualizer import ClipWriter  # loads the encoder only if a clip is wanted

    clip: ClipWriter | None = None
    step = 0

    def on_step(index: int, task: Task, moment: EnvStep) -> None:
        nonlocal clip, step
        if index != 0:
            return
        step = 0 if moment.action is None else step + 1
        stride = clip_stride(task.render_fps, frames_per_s)
        if clip is None:
            clip = stack.enter_context(ClipWriter(path, task.render_fps / stride))
        if step % stride == 0:
            clip.add(task.render())

    with contextlib.ExitStack() as stack:
        yield on_step


def _document(
    weights: Weights, env_id: str, episodes: Sequence[Episode], lost: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    returns = [episode.episode_return for episode in episodes]
    low, high = bootstrap_interval(returns) if len(returns) >= MIN_RUNS else (None, None)
    return {
        "weights": str(weights.path),
        "env": env_id,
        "algo": weights.meta.get("algo"),
        "epoch": weights.epoch,
        "version": weights.version,
        "env_steps": weights.meta.get("env_steps"),
        "updates": weights.meta.get("updates"),
        **score(episodes),
        "episodes_asked": args.episodes,
        "episodes_lost": len(lost),
        "last_error": lost[-1] if lost else None,
        "seed": args.seed,
        "return_low": low,
        "return_high": high,
        "level": 0.95,
        "success_rate": success_rate(episodes),
        "csv": args.csv,
        "video": args.video,
        "record": args.record,
        "per_episode": [episode._asdict() for episode in episodes],
    }


def _summary(document: dict[str, Any]) -> str:
    interval = ""
    if document["return_low"] is not None:
        interval = f"95 % interval {document['return_low']:.1f} to {document['return_high']:.1f}, "
    lost, of_total = document["episodes_lost"], f"of {document['episodes_asked']} "
    count = f"{document['episodes']} {of_total if lost else ''}episodes" + (f", {lost} lost" if lost else "")
    lines = [
        f"{document['env']}, {document['algo']}, weights {document['epoch']}-{document['version']}",
        f"file    {document['weights']}",
        f"return  {document['return_mean']:.1f}  ({interval}standard deviation {document['return_std']:.1f}, {count})",
        f"length  {document['length_mean']:.1f} env steps",
    ]
    if document["success_rate"] is not None:
        lines.append(f"success {percent(document['success_rate'])} of episodes")
    lines += [f"lost    {document['last_error']}"] if document["last_error"] else []
    lines += [f"{kind:<6}  {document[kind]}" for kind in ("csv", "video", "record") if document[kind]]
    return "\n".join(lines)


def pretrained_policies() -> dict[str, Path]:
    """The weights files that come with Spreeze, by name."""
    return {path.stem: path for path in sorted(_PRETRAINED.glob("*.safetensors"))}


def run_or_policy() -> str:
    """Help text of the argument RUN."""
    names = ", ".join(pretrained_policies())
    return f"name or path of a run, 'latest', a .safetensors file, or a pretrained policy: {names}"


def find_weights(run_or_path: str, runs_dir: Path, which: str = "best") -> Path:
    """The weights file of a run, or else of a pretrained policy; the path itself if it ends in ``.safetensors``.

    ``which``: ``best`` (the newest until the first evaluation has ended) or ``latest``. A RunError without such a run,
    file or weights; a ConfigError for an invalid name.
    """
    if run_or_path.endswith(".safetensors"):
        path = Path(run_or_path)
        if not path.is_file():
            raise RunError(f"no weights file {path}")
        return path
    pretrained = pretrained_policies()
    if run_or_path in pretrained and not (runs_dir / run_or_path / "run.json").is_file():
        return pretrained[run_or_path]
    run = find_run(run_or_path, runs_dir, others=pretrained)
    best = run / "checkpoints" / "best.safetensors"
    if which == "best" and best.is_file():
        return best
    folder = run / "weights"
    latest = folder / Path(str(read_json(folder / LATEST).get("file", ""))).name  # the folder itself: no such file
    files = [latest] if latest.is_file() else sorted(folder.glob("w-*.safetensors"))
    if not files:
        raise RunError(f"run {run.name} has no weights: it ended before its first update, or has not reached it yet")
    return files[-1]


def spec_of(weights: Weights, import_module: str | None) -> EnvSpec:
    """The environment of the weights; an EnvError if there is none, or it needs another ``--import``."""
    spec = recorded_spec(weights)
    refuse_foreign(spec.env_id, spec.import_module, import_module)
    return spec


def recorded_spec(weights: Weights) -> EnvSpec:
    """The environment of the weights' metadata, without an import; an EnvError or WeightsError without one."""
    fields: Any = weights.meta.get("env")
    if not isinstance(fields, dict):
        raise EnvError(f"{weights.path} does not say which environment it was trained on")
    try:
        return spec_from(fields)
    except ValueError as error:
        raise WeightsError(f"{weights.path} does not say which environment it was trained on: {clean(error)}") from None


def policy_of(weights: Weights, spec: EnvSpec) -> Policy:
    """The policy of a weights file, after a test on one observation; a WeightsError if it does not fit the task."""
    if spec.frames is None:
        obs = np.zeros((1, spec.obs_dim), np.float32)
        obs[:, spec.obs_dim - spec.mask_dim :] = 1.0
    else:
        obs = np.zeros((1, spec.frames.stack, *spec.frames.shape), np.uint8)
        if spec.mask_dim:
            obs[:, -1, -4 * spec.mask_dim :] = np.ones(spec.mask_dim, np.float32).view(np.uint8)
    try:
        policy = Policy.from_weights(weights.arrays, weights.meta)
        if spec.choices is not None:
            needed = spec.choices.options if spec.team is None else max(spec.choices.nvec)
            if policy.options != needed:
                raise WeightsError(f"it has {policy.options} actions; {needed} are needed")
        exploring = Policy.from_weights(exploring_arrays(weights.arrays), weights.meta)
        for actions, _ in (policy.act(obs, ()), exploring.act(obs, (), np.random.default_rng(0))):
            if actions.shape != (1, spec.action_dim):
                raise WeightsError(f"it gives actions of shape {actions.shape}; {(1, spec.action_dim)} is needed")
    except (WeightsError, ValueError, IndexError, TypeError, MemoryError) as error:
        raise WeightsError(f"{weights.path} holds no policy for {clean(spec.env_id, 80)}: {clean(error)}") from None
    return Policy.from_weights(weights.arrays, weights.meta)


def read_policy(path: Path) -> tuple[Weights, EnvSpec]:
    """The weights of a policy, and its task, whose module is not imported; a WeightsError if it is damaged."""
    weights = read_weights(path)
    spec = recorded_spec(weights)
    if "network" not in weights.meta:  # else it is defined in the run's module
        policy_of(weights, spec)
    return weights, spec


@contextlib.contextmanager
def environment_errors(env_id: str) -> Iterator[None]:
    """Turns exceptions of an environment into a one-line ``EnvError``."""
    try:
        yield
    except SpreezeError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(f"{env_id} failed: {described(error)}") from error
