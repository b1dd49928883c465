"""Settings: one frozen dataclass a part, every field with meaning, unit and range.

A configuration is built from layers, later ones winning: defaults < profile < tuner < user.
``Settings`` remembers which layer each value came from. Nothing changes a setting in place.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.algorithm_settings import AlgorithmConfig, AnyAgeConfig, OnPolicyConfig
from spreeze.config.algorithms import ALGORITHMS, find_row
from spreeze.config.modes import DECLARED, Mode, Wiring, find_mode
from spreeze.config.part import Condition, Part, always, set_type, setting, unoffered
from spreeze.errors import ConfigError

SINKS = ("tensorboard", "wandb", "mlflow")
"""Each is the name of a sink (``runtime.metric_sinks``), of its package and of the extra that installs it."""
MIXINGS = ("gossip", "all_reduce", "hogwild", "none")
_RESERVED = ("con", "prn", "aux", "nul", "latest")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _replay(wiring: Wiring) -> bool:
    return wiring.lag is None


def _rollouts(wiring: Wiring) -> bool:
    return wiring.lag is not None


def _processes(wiring: Wiring) -> bool:
    return not wiring.in_turns


def _mixes(wiring: Wiring) -> bool:
    return wiring.mixes


def _governed(wiring: Wiring) -> bool:
    return not wiring.in_turns and (wiring.lag is None or wiring.free_running)


MOST_DEFAULT_SAMPLERS = 16
"""Samplers that a run starts unasked; more are seldom worth a core each."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Part):
    """Algorithm, mode and seed of a run, and where its files go."""

    read, personal = unoffered, True

    algo: str = setting(
        "sac",
        f"algorithm: {', '.join(ALGORITHMS)}, or one that the module of --import declares",
        flag="--algo",
        fixed=True,
        shared=True,
        default_text="the profile's, else by mode and task: sac, dqn, qmix, ppo or impact",
    )
    mode: str = setting(
        DECLARED[0].name,
        "how the parts are wired together: "
        f"{', '.join(mode.name for mode in DECLARED)}, or one that the module of --import declares",
        flag="--mode",
        shared=True,
        default_text="the profile's, else the algorithm's own, else spreeze",
    )
    seed: int = setting(1, "seed of networks, exploration and environments", low=0, high=2**31 - 1, flag="--seed")
    runs_dir: str = setting(
        "runs", "directory that holds the run directories", flag="--runs-dir", command_line_only=True
    )
    name: str | None = setting(
        None,
        "name of the run directory; built from time, env, algo and seed if not given",
        flag="--name",
        command_line_only=True,
    )
    learners: int = setting(
        1,
        "learners side by side, each with samplers, data and seed of its own (modes spreeze, tianji, gala)",
        unit="learners",
        low=1,
        high=16,
        flag="--learners",
        fixed=True,
        machine=True,
        shared=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None:
            check_name(self.name)


@dataclass(frozen=True, kw_only=True)
class EnvConfig(Part):
    read, personal = unoffered, True

    id: str = setting(
        "Walker2DBulletEnv-v0",
        "Gymnasium id, or MODULE:CLASS of the module or script of --import; mpe2:NAME or "
        "lbf:ID for several agents; observations "
        "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple; actions Box, Discrete, MultiDiscrete "
        "or MultiBinary",
        flag="--env",
        fixed=True,
        default_text="a walking robot: Walker2DBulletEnv-v0, or Walker2d-v5 without Bullet; Pendulum-v1 without either",
    )
    import_module: str | None = setting(
        None,
        "module, or script such as my_envs.py, to import first: it registers tasks, algorithms or modes (command "
        "line only)",
        flag="--import",
        command_line_only=True,
    )
    plain: bool = setting(False, "use the package's own Bullet tasks, not our faster equivalents", flag="--plain-env")
    args: tuple[str, ...] = setting(
        (), "key=value texts for the environment's constructor (command line only)", fixed=True, command_line_only=True
    )
    normalize_obs: bool = setting(
        False, "scale observations by their running mean and standard deviation", read=always, fixed=True, shared=True
    )
    image: bool | None = setting(
        None,
        "take observations as pictures for a CNN, or as numbers; not set: bytes to 255 "
        "of at least 36 x 36 pixels are pictures",
        read=always,
    )


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Part):
    """Frames of environments that observe images; the lines marked ALE hold for Atari games alone."""

    stack: int = setting(4, "frames in one observation", unit="frames", low=1, high=16, fixed=True)
    size: int = setting(84, "height and width of a frame", unit="pixels", low=36, high=512, fixed=True)
    grey: bool = setting(True, "one grey channel instead of red, green and blue (ALE: always)", fixed=True)
    frame_skip: int = setting(4, "ALE: emulator frames with one action", unit="frames", low=1, high=60)
    sticky_actions: float = setting(0.25, "ALE: probability that a frame repeats the action before", low=0.0, high=1.0)
    full_actions: bool = setting(False, "ALE: all 18 actions, not only those that the game reads")
    episodic_life: bool = setting(False, "ALE: a lost life ends the episode, except in evaluation")
    clip_rewards: bool = setting(True, "ALE: replay holds the sign of a reward; returns are counted in full")
    noop_max: int = setting(
        30, "ALE: idle frames at the start, a random number up to this", unit="frames", low=0, high=1000
    )
    fire_reset: bool = setting(False, "ALE: press FIRE after a reset where the game has that action")
    max_episode_frames: int = setting(
        108_000, "ALE: emulator frames after which a game is truncated", unit="frames", low=100, high=10**9
    )


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Part):
    """Shared-memory replay and the balance between its two sides."""

    read = _replay

    capacity: int = setting(
        1_000_000,
        "transitions that replay can hold",
        unit="transitions",
        low=2,
        high=10**10,
        flag="--replay-capacity",
        machine=True,
    )
    learning_starts: int = setting(
        5_000, "env steps collected, with uniform actions, before the first update", unit="env steps", low=0, high=10**9
    )
    samples_per_insert_min: float = setting(8.0, "below this ratio the samplers wait", low=0.0, high=1e6)
    samples_per_insert_max: float = setting(512.0, "above this ratio the learner waits", low=0.0, high=1e9)
    save: bool = setting(False, "store replay with every checkpoint", flag="--save-replay")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_insert_min > self.samples_per_insert_max:
            raise ConfigError(
                f"samples_per_insert_min = {self.samples_per_insert_min:g} is above "
                f"samples_per_insert_max = {self.samples_per_insert_max:g}: "
                "samplers and learner would wait for each other for ever"
            )

    @property
    def samples_per_insert_band(self) -> list[float]:
        """Both bounds."""
        return [self.samples_per_insert_min, self.samples_per_insert_max]

    def serial_ratio(self, batch_size: int) -> float:
        """As the function, within this band."""
        return serial_ratio(batch_size, self.samples_per_insert_min, self.samples_per_insert_max)


def serial_ratio(batch_size: int, low: float, high: float) -> float:
    """Rows drawn for each inserted one in mode serial: one update after each env step, within a band."""
    return min(max(float(batch_size), low), high)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Part):
    samplers: int | None = setting(
        None,
        "sampler processes; from the usable cores if not given",
        low=1,
        high=512,
        flag="--samplers",
        machine=True,
        read=lambda wiring: _replay(wiring) and _processes(wiring),
    )
    envs_per_sampler: int = setting(
        8,
        "environments stepped in one sampler",
        low=1,
        high=1024,
        flag="--envs-per-sampler",
        machine=True,
        read=_replay,
    )
    nan_policy: str = setting("drop", "what to do with a non-finite observation or reward", choices=("drop", "fail"))
    step_deadline_s: float = setting(
        30.0, "a sampler whose env step takes longer counts as hung and is started again", unit="s", low=0.5, high=1e6
    )
    start_deadline_s: float = setting(
        120.0,
        "longest time that an environment may take to be made and reset, wherever "
        "one is: a simulator that needs minutes to come up needs more",
        unit="s",
        low=1.0,
        high=1e6,
        flag="--start-deadline-s",
    )
    memory_limit_bytes: int | None = setting(
        None,
        "private memory above which a sampler is started anew, and a watcher by its number of environments; from "
        "the free memory if not given",
        unit="bytes",
        low=10_000_000,
        high=2**50,
        read=_processes,
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Part):
    """Collection of rollouts in modes hts, serial and impact."""

    read = _rollouts

    samplers: int | None = setting(
        None,
        "sampler processes; not set: hts one a usable core, at most 16, serial 1, which steps in the run's own process",
        low=1,
        high=512,
        flag="--samplers",
        machine=True,
    )
    envs_per_sampler: int = setting(
        8, "environments stepped in one sampler", low=1, high=1024, flag="--envs-per-sampler", machine=True
    )
    inference_workers: int = setting(
        0,
        "hts, tianji with one learner: processes that infer actions in batches; 0: "
        "samplers infer for themselves, the same bits",
        low=0,
        high=512,
        flag="--inference-workers",
        machine=True,
        read=lambda wiring: wiring.inference_workers,
    )
    size: int = setting(
        2048,
        "env steps of a learner's rollout, of all its environments together; sets sync_interval where that is not set",
        unit="env steps",
        low=1,
        high=2**30,
        default_text="128 with a2c, else 2048",
    )
    sync_interval: int | None = setting(
        None,
        "env steps of each environment in one rollout (SB3: n_steps); not set: "
        "as many as size asks for, at least 16, or 5 with a2c; with impact, appo, "
        "impala 16",
        unit="env steps",
        low=1,
        high=65_536,
        flag="--sync-interval",
        machine=True,
    )
    correction: str = setting(
        "delayed",
        "hts, tianji: off-policy correction for rollouts that the previous policy collected (default with ppo: none)",
        choices=("delayed", "none", "truncated-is"),
        flag="--correction",
        read=lambda wiring: bool(wiring.lag) and not wiring.free_running,
    )
    synchrony: str = setting(
        "batch",
        "serial: environments wait for each other at every step, or once a rollout",
        choices=("step", "batch"),
        flag="--synchrony",
        read=lambda wiring: wiring.lag == 0,
    )


@dataclass(frozen=True, kw_only=True)
class GalaConfig(Part):
    """How the learners of mode gala share what they learn."""

    read = _mixes

    topology: str = setting(
        "ring",
        "whose parameters a learner takes: ring, those of the one before it; exponential, "
        "of those 1, 2, 4, ... before it; full, of all",
        choices=("ring", "exponential", "full"),
        flag="--topology",
    )
    max_staleness: int = setting(
        100,
        "most rollouts of a learner without a message from a neighbour before it waits for one; 0: lockstep",
        unit="rollouts",
        low=0,
        high=10**9,
        flag="--max-staleness",
    )
    mixing: str = setting(
        "gossip",
        "gossip; or, to compare it with, all_reduce: gradients are averaged before each "
        "step, whose size no target_kl changes; hogwild: all update the same parameters; none",
        choices=MIXINGS,
    )
    scale_lr: bool = setting(
        True,
        "gossip: the learning rate times the root of the number of learners, up to 4e-3, as "
        "each learns from that share of the env steps, with more noise",
    )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Part):
    batch_size: int = setting(
        256,
        "transitions in one update from replay; for rollouts see ppo.minibatch_size",
        unit="transitions",
        low=1,
        high=2**24,
        flag="--batch-size",
        read=_replay,
    )
    threads: int = setting(
        1,
        "threads of the learner: two share an update as a pair, more share each matmul",
        low=1,
        high=256,
        flag="--learner-threads",
        machine=True,
    )
    device: str = setting(
        "auto",
        "auto, cpu, cuda, cuda:N, split (actor on cuda:0, critics on cuda:1), ACTOR+CRITICS "
        "(one GPU twice: two streams of it); "
        "auto is a GPU where there is one, but the CPU for algorithms of rollouts without images",
        flag="--device",
        machine=True,
    )
    precision: str = setting(
        "float32",
        "what matmuls round their inputs to: tf32 on GPUs, bfloat16 on processors "
        "that have it; weights and optimisers are always float32, and so are sums of "
        "products",
        choices=("float32", "tf32", "bfloat16"),
        machine=True,
        read=_replay,
    )
    overlap: bool = setting(
        False, "the actor follows the critics of one update before: two devices work at once", read=_replay
    )
    mirror: bool = setting(
        True, "keep a copy of replay on the learner's GPU, as far as its memory allows", read=_replay
    )
    updates_per_launch: int = setting(
        1,
        "updates in one launch on a GPU with such a copy (a CUDA graph); 0: every kernel by itself",
        unit="updates",
        low=0,
        high=64,
        read=_replay,
    )
    fuse: bool = setting(
        False,
        "fuse the small kernels of an update by torch.compile, which takes up to a minute "
        "before learning begins and, on a GPU, Triton",
        read=_replay,
    )
    average_interval: int = setting(
        100,
        "mode tianji: updates of a learner between two averagings of its parameters with those of the others",
        unit="updates",
        low=1,
        high=10**9,
        read=lambda wiring: wiring.averages,
    )
    publish_interval_s: float = setting(
        0.25, "time between two published weights", unit="s", low=0.01, high=3600, read=_processes
    )
    checkpoint_interval_s: float = setting(30.0, "time between two checkpoints", unit="s", low=0.5, high=1e6)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Part):
    """Samplers and learners on other hosts, through Ray."""

    read, personal = unoffered, True

    address: str | None = setting(
        None,
        "HOST:PORT of a Ray cluster's head, auto, or local:N for N hosts simulated on this machine (command line only)",
        flag="--cluster",
        command_line_only=True,
    )
    samplers: int | None = setting(
        None,
        "sampler processes on each other host; not set: chosen there by its own tuner or its usable cores",
        low=1,
        high=64,
        flag="--host-samplers",
    )
    learners: int | None = setting(
        None,
        "gala, tianji: learners of all hosts together, one on each other host; not set: run.learners and "
        "one for each of local:N, else three more",
        unit="learners",
        low=2,
        high=64,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Part):
    """Greedy episodes that give the return curve."""

    personal = True

    enabled: bool = setting(True, "evaluate the policy, beside training and at the end", flag="--no-evaluator")
    episodes: int = setting(10, "episodes in one evaluation, each from a fresh start", low=1, high=10_000)
    seed: int = setting(10_000, "seed from which those of all evaluations are drawn", low=0, high=2**31 - 1)
    cpu_share: float = setting(0.15, "share of one core the evaluator may use when no core is free", low=0.01, high=1.0)
    interval_updates: int | None = setting(
        None,
        "serial: updates from one evaluation to the next, so that a curve is the same on a busy machine; not "
        "set: by time, as cpu_share says",
        unit="updates",
        low=1,
        high=10**9,
    )


@dataclass(frozen=True, kw_only=True)
class VisualizerConfig(Part):
    """The picture and the clips of the current policy."""

    personal = True

    enabled: bool = setting(True, "run the visualizer process", flag="--no-visualizer")
    frames_per_s: float = setting(8.0, "pictures a second at most", unit="1/s", low=0.1, high=60)
    clip_interval_s: float = setting(120.0, "time between two clips", unit="s", low=1, high=1e6)
    clip_length_s: float = setting(10.0, "length of a clip as played", unit="s", low=0.5, high=600)
    cpu_share: float = setting(
        0.10, "share of one core the visualizer may use when no core is free", low=0.01, high=1.0
    )


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Part):
    """Objective of the tuner, and the share of the machine that stays with the user."""

    personal = True

    objective: str = setting(
        "return",
        "what the tuner makes best: progress of the return, the paper's knee, env steps/s, or updates/s",
        choices=("return", "paper", "sampling", "updates"),
        flag="--objective",
        read=_replay,
        tuner=True,
    )
    cpu_target: float = setting(
        0.75,
        "objective paper: share of the usable cores up to which samplers are added",
        low=0.05,
        high=1.0,
        flag="--cpu-target",
        read=_replay,
        tuner=True,
    )
    gpu_target: float = setting(
        0.85,
        "objective paper: share of the highest update frame rate that the batch has to reach",
        low=0.05,
        high=0.99,
        flag="--gpu-target",
        read=_replay,
        tuner=True,
    )
    govern: bool = setting(
        True, "let samplers rest as leave_free and give_way ask", flag="--no-governor", read=_governed
    )
    leave_free: float = setting(
        0.0,
        "share of the usable cores that is left to other programs",
        low=0.0,
        high=0.9,
        flag="--leave-free",
        read=_processes,
    )
    give_way: bool = setting(
        False,
        "let other programs go first: every worker runs at low priority, and up to half of "
        "the samplers rest while others fill cores",
        flag="--give-way",
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Part):
    """Where a run is logged beside its own directory."""

    personal = True

    sinks: tuple[str, ...] = setting(
        (),
        "what also gets metrics, evaluations, settings and events: any of "
        f"{', '.join(SINKS)}, with commas between; each needs its extra",
        choices=SINKS,
        flag="--log",
    )
    project: str = setting("spreeze", "project of Weights & Biases, experiment of MLflow")


@dataclass(frozen=True, kw_only=True)
class CallbackConfig(Part):
    """Code of the user that hears of the run and steers it (``spreeze.BaseCallback``)."""

    read, personal = unoffered, True

    classes: tuple[str, ...] = setting(
        (), "MODULE:CLASS of each callback (command line only: --callback)", command_line_only=True
    )
    deadline_s: float = setting(
        10.0, "longest time that a callback's method may take; then that callback is off", unit="s", low=0.1, high=1e6
    )


@dataclass(frozen=True, kw_only=True)
class StopConfig(Part):
    """When training ends by itself; without any condition it goes on until Ctrl-C."""

    read, personal = unoffered, True

    seconds: float | None = setting(None, "wall time of training", unit="s", low=0.0, flag="--seconds")
    env_steps: int | None = setting(None, "env steps collected", unit="env steps", low=1, flag="--env-steps")
    updates: int | None = setting(
        None, "updates (gradient steps of the critics)", unit="updates", low=1, flag="--updates"
    )
    target_return: float | None = setting(
        None,
        "mean return of greedy episodes; reached when the lower "
        "bound of an evaluation is, or a second one of 20 to 100 fresh starts",
        flag="--target-return",
    )
    target_evaluations: int = setting(
        1,
        "consecutive evaluations whose mean must reach target_return; 0: report when it was reached, without a stop",
        unit="evaluations",
        low=0,
        high=10**9,
    )

    @property
    def at_return(self) -> bool:
        """True if a return ends the run."""
        return self.target_return is not None and self.target_evaluations > 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """All parts of one run. Workers are given the parts they need, never the whole."""

    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    own: AlgorithmConfig | OnPolicyConfig | None = None
    """The settings of the chosen algorithm; None: its defaults."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gala: GalaConfig = field(default_factory=GalaConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    visualizer: VisualizerConfig = field(default_factory=VisualizerConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    callback: CallbackConfig = field(default_factory=CallbackConfig)
    stop: StopConfig = field(default_factory=StopConfig)

    def __post_init__(self) -> None:
        if self.learner.batch_size > self.replay.capacity:
            raise ConfigError(
                f"learner.batch_size = {self.learner.batch_size} is larger than replay.capacity = "
                f"{self.replay.capacity}; lower the batch or raise the capacity"
            )
        if self.env.import_module is None:
            find_mode(self.run.mode)  # one of a module is looked for when it is used: files are read without imports
        if self.own is None:
            object.__setattr__(self, "own", algorithm_part(self.run.algo, self.env.import_module)())

    def parts(self) -> dict[str, Part]:
        """Name -> part, in order: the chosen algorithm's stands for those of all."""
        return {
            self.run.algo if item.name == "own" else item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
        }

    @property
    def mode(self) -> Mode:
        """The chosen mode's declaration; imports the module of ``--import`` where that has it."""
        return find_mode(self.run.mode, self.env.import_module)

    def rollout_cores(self, usable: float) -> float:
        """Cores for samplers of rollouts: without those to stay free, where no governor keeps them free."""
        return usable if self.wiring.free_running else usable * (1.0 - self.tuning.leave_free)

    def rollout_samplers(self, usable: float) -> int:
        """Samplers of rollouts where none are asked for."""
        return max(1, min(int(self.rollout_cores(usable)), MOST_DEFAULT_SAMPLERS))

    def rollout_interval(self, envs: int) -> int:
        """Env steps of each of a learner's environments in one rollout: as set, or by ``rollout.size``."""
        if self.rollout.sync_interval is not None:
            return self.rollout.sync_interval
        shortest = OnPolicyConfig.shortest_rollout if self.on_policy is None else self.on_policy.shortest_rollout
        return max(shortest, round(self.rollout.size / envs))

    def samplers_beside(self, usable: float) -> int:
        """Samplers beside learners with replay where none are asked for: a core each, one for each learner at least."""
        learners = self.run.learners
        return max(learners, min(int(usable) - self.learner.threads * learners, MOST_DEFAULT_SAMPLERS))

    @property
    def inference_workers(self) -> int:
        """Processes that infer for samplers of rollouts; none where the mode has no such processes."""
        return self.rollout.inference_workers if self.wiring.inference_workers else 0

    @property
    def wiring(self) -> Wiring:
        """How the chosen mode runs the chosen algorithm; a ConfigError if it does not."""
        wiring = self.mode.wiring(on_policy=self.on_policy is not None)
        if wiring is None or wiring.free_running != isinstance(self.on_policy, AnyAgeConfig):
            raise ConfigError(f"--mode {self.run.mode} does not run --algo {self.run.algo}")
        return wiring

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The part of the chosen off-policy algorithm; a ConfigError if it learns on policy."""
        if not isinstance(self.own, AlgorithmConfig):
            raise ConfigError(f"--algo {self.run.algo}: it learns on policy, without replay; use --mode hts or serial")
        return self.own

    @property
    def on_policy(self) -> OnPolicyConfig | None:
        """The part of the chosen on-policy algorithm; None where it learns off policy."""
        return self.own if isinstance(self.own, OnPolicyConfig) else None


SHARED_PARTS: dict[str, type[Part]] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if isinstance(hint, type)
}
"""The parts of every run."""


class _Parts(Mapping[str, type[Part]]):
    """The parts of every run and those of all algorithms, of which each is imported when it is asked for."""

    def __getitem__(self, name: str) -> type[Part]:
        if name in ALGORITHMS:
            part: type[Part] = find_row(name).config
            return part
        return SHARED_PARTS[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*SHARED_PARTS, *ALGORITHMS))

    def __len__(self) -> int:
        return len(SHARED_PARTS) + len(ALGORITHMS)

    def __contains__(self, name: object) -> bool:
        return name in SHARED_PARTS or name in ALGORITHMS


PARTS = _Parts()
FLAG_OF: dict[str, str] = {
    f"{part}.{item.name}": item.metadata["flag"]
    for part, kind in SHARED_PARTS.items()
    for item in dataclasses.fields(kind)
    if item.metadata["flag"]
}
"""part.field -> flag; any other field is reached by --set part.field=value. One flag may set a field of several parts:
``--samplers`` means samplers for replay and for rollouts, of which a run has one kind."""


def marked(mark: str) -> tuple[str, ...]:
    """The settings, as ``part.field``, that ``setting(MARK=True)`` marks, without those of algorithms."""
    return tuple(f"{name}.{item}" for name, part in SHARED_PARTS.items() for item in part.marked(mark))


def field_of(key: str, config: Config | None = None) -> dataclasses.Field[Any]:
    """The field of a setting that is called ``part.field``; ``config`` knows an imported algorithm's part."""
    part, name = key.split(".")
    found: dict[str, dataclasses.Field[Any]] = _class_of(part, config).__dataclass_fields__
    return found[name]


def condition_of(key: str, config: Config) -> Condition:
    """The runs in which a setting that is called ``part.field`` makes a difference, where its algorithm learns."""
    part, name = key.split(".")
    return _class_of(part, config).condition_of(name)


def kind_of(key: str, config: Config | None = None) -> type:
    """int, float, bool, str or tuple: what a setting holds where it is set."""
    part, name = key.split(".")
    hint = typing.get_type_hints(_class_of(part, config))[name]
    kind: type = typing.get_origin(set_type(hint)) or set_type(hint)
    return kind


def _class_of(part: str, config: Config | None) -> type[Part]:
    own = {} if config is None else {config.run.algo: type(config.own)}
    return own.get(part) or PARTS[part]  # type: ignore[return-value]


def active_settings(config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The settings that make a difference to the chosen mode and algorithm: what the tuner chooses, and the others.

    What names the run, its task and its end is not among them.
    """
    algo, wiring, parts = config.run.algo, config.wiring, config.parts()
    parts = {algo: parts[algo]} | parts
    read = [
        f"{name}.{item.name}"
        for name, part in parts.items()
        for item in dataclasses.fields(part)
        if part.condition_of(item.name)(wiring)
    ]
    named = (knob.replace("algorithm.", f"{algo}.") for knob in wiring.knobs)
    keys = {f"{name}.{item.name}" for name, part in parts.items() for item in dataclasses.fields(part)}
    knobs = tuple(knob for knob in named if knob in keys)
    return knobs, tuple(key for key in read if key not in knobs)


def algorithm_part(name: str, import_module: str | None = None) -> type[Any]:
    """The class of an algorithm's part; ``import_module`` as for ``algorithms.rows``.

    Raises:
        ConfigError: there is no such algorithm, or the module declares what cannot be its part.
    """
    row = find_row(name, import_module)
    base = OnPolicyConfig if row.on_policy else AlgorithmConfig
    if name in SHARED_PARTS or not name.isidentifier() or not issubclass(row.config, base):
        raise ConfigError(
            f"--import {import_module}: algorithm {name!r} with settings {row.config.__name__}: expected "
            f"a name of its own like my_sac, and a dataclass made from {base.__name__}"
        )
    return row.config


def may_name(name: str) -> bool:
    """True if a run or profile may have this name."""
    return _NAME.fullmatch(name) is not None and name.split(".")[0].lower() not in _RESERVED


def check_name(name: str) -> str:
    """Rejects a run or profile name that could leave its directory or trouble a file system."""
    if not may_name(name):
        raise ConfigError(
            f"name {name[:80]!r}: allowed are up to 128 letters, digits, '.', '_' and '-', beginning "
            "with a letter or digit, and no reserved name (con, prn, aux, nul, latest)"
        )
    return name
