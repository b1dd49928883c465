"""Settings: one frozen dataclass per section, each field with meaning, unit and range.

A configuration is built from layers, where later ones win: defaults < profile < tuner < user. ``Settings`` records the
layer of each value. Nothing changes a setting in place.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spreeze.config.algorithm_bases import AlgorithmConfig, AsyncOnPolicyConfig, OnPolicyConfig, ReplayConfig
from spreeze.config.algorithm_bases import uses_replay as _replay
from spreeze.config.algorithms import ALGORITHMS, find_row
from spreeze.config.modes import DECLARED, DataFlow, Mode, find_mode
from spreeze.config.section import NO_LIMIT, Condition, Section, always, non_none_type, not_offered, setting
from spreeze.errors import ConfigError
from spreeze.types import type_hints

SINKS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Each is the name of a sink (``runtime.metric_sinks``), of its package and of the extra that installs it."""
MIXINGS = ("gossip", "all_reduce", "hogwild", "none")
MAX_SAMPLERS, MAX_HOST_SAMPLERS = 512, 64  # on this machine; on each other host
MAX_LEARNERS = 16  # on this machine
MAX_DEFAULT_SAMPLERS = 16
"""Maximum of samplers by default; more are seldom worth a core each."""
_RESERVED = ("con", "prn", "aux", "nul", "latest")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _rollouts(data_flow: DataFlow) -> bool:
    return not data_flow.from_replay


def _processes(data_flow: DataFlow) -> bool:
    return not data_flow.serial


def _mixes(data_flow: DataFlow) -> bool:
    return data_flow.mixes_parameters


def _governed(data_flow: DataFlow) -> bool:
    """True if the CPU governor can pause samplers: the learner does not wait for them."""
    return not data_flow.serial and (data_flow.from_replay or data_flow.asynchronous)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Algorithm, mode and seed of a run, and where its files go."""

    when, personal = not_offered, True

    algo: str = setting(
        "sac",
        f"algorithm: {', '.join(ALGORITHMS)}, or one of the --import module",
        flag="--algo",
        fixed=True,
        shared=True,
        default_text="from profile, mode and action space: sac, dqn, qmix, ppo or impact",
    )
    mode: str = setting(
        DECLARED[0].name,
        "how samplers and learners work together: "
        f"{', '.join(mode.name for mode in DECLARED)}, or one of the --import module",
        flag="--mode",
        shared=True,
        default_text="from profile and algorithm; otherwise spreeze",
    )
    seed: int = setting(1, "seed of networks, exploration and environments", low=0, high=2**31 - 1, flag="--seed")
    runs_dir: str = setting("runs", "parent directory of run directories", flag="--runs-dir", command_line_only=True)
    name: str | None = setting(
        None, "run directory's name; default: time, environment, algorithm, seed", flag="--name", command_line_only=True
    )
    learners: int = setting(
        1,
        "number of learners, each with its own samplers, data and seed (modes spreeze, tianji and gala)",
        unit="learners",
        low=1,
        high=MAX_LEARNERS,
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
class EnvConfig(Section):
    when, personal = not_offered, True

    id: str = setting(
        "Walker2DBulletEnv-v0",
        "Gymnasium id; MODULE:CLASS of the --import module; mpe2:NAME or lbf:ID for several agents. "
        "Observations and actions: Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of them",
        flag="--env",
        fixed=True,
        default_text="Walker2DBulletEnv-v0; Walker2d-v5 without Bullet; Pendulum-v1 without MuJoCo",
    )
    import_module: str | None = setting(
        None, "module or script of your environments, algorithms or networks", flag="--import", command_line_only=True
    )
    plain: bool = setting(False, "use the pybullet package's own tasks, not Spreeze's faster ones", flag="--plain-env")
    args: tuple[str, ...] = setting(
        (), "key=value arguments of the environment (command line only)", fixed=True, command_line_only=True
    )
    normalize_obs: bool = setting(
        False, "normalize observations by running mean and standard deviation", when=always, fixed=True, shared=True
    )
    image: bool | None = setting(
        None,
        "treat observations as images for a CNN (true) or as vectors (false); default: those parts as images that "
        "are bytes (0 to 255) of at least 36 x 36 pixels",
        when=always,
    )


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Section):
    """Frames of environments that observe images; settings marked "Atari:" hold for Atari games alone."""

    stack: int = setting(4, "number of stacked frames in an observation", unit="frames", low=1, high=16, fixed=True)
    size: int = setting(84, "height and width of a frame", unit="pixels", low=36, high=512, fixed=True)
    grey: bool = setting(True, "convert frames to greyscale (Atari: always)", fixed=True)
    frame_skip: int = setting(4, "Atari: emulator frames per action", unit="frames", low=1, high=60)
    sticky_actions: float = setting(0.25, "Atari: probability to repeat the last action in a frame", low=0.0, high=1.0)
    full_actions: bool = setting(False, "Atari: use all 18 actions, not only those of the game")
    episodic_life: bool = setting(False, "Atari: end the episode when a life is lost, except in evaluation")
    clip_rewards: bool = setting(True, "Atari: train on the sign of rewards; reported returns are not clipped")
    noop_max: int = setting(30, "Atari: maximum of random no-op frames after a reset", unit="frames", low=0, high=1000)
    fire_reset: bool = setting(False, "Atari: press FIRE after a reset, in games that have this action")
    max_episode_frames: int = setting(
        108_000, "Atari: emulator frames after which an episode is truncated", unit="frames", low=100, high=NO_LIMIT
    )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    samplers: int | None = setting(
        None,
        "number of sampler processes; default: from the usable cores",
        low=1,
        high=MAX_SAMPLERS,
        flag="--samplers",
        machine=True,
        when=lambda data_flow: _replay(data_flow) and _processes(data_flow),
    )
    envs_per_sampler: int = setting(
        8, "environments per sampler process", low=1, high=65536, flag="--envs-per-sampler", machine=True, when=_replay
    )
    nan_policy: str = setting(
        "drop",
        "what to do with a NaN or infinite observation or reward: drop the transition, or fail the run",
        choices=("drop", "fail"),
    )
    step_deadline_s: float = setting(
        30.0, "an env step that takes longer counts as hung, and its sampler is restarted", unit="s", low=0.5, high=1e6
    )
    start_deadline_s: float = setting(
        120.0,
        "longest time to construct and reset an environment; raise it for simulators that start slowly",
        unit="s",
        low=1.0,
        high=1e6,
        flag="--start-deadline-s",
    )
    memory_limit_bytes: int | None = setting(
        None,
        "private memory at which a sampler is restarted (evaluator and visualizer: in proportion to their "
        "environments); default: from the free memory",
        unit="bytes",
        low=10_000_000,
        high=2**50,
        when=_processes,
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """Collection of rollouts, in all modes in which learners use them."""

    when = _rollouts

    samplers: int | None = setting(
        None,
        "number of sampler processes; default: one per usable core, at most 16 (mode serial: 1, in the main process)",
        low=1,
        high=MAX_SAMPLERS,
        flag="--samplers",
        machine=True,
    )
    envs_per_sampler: int = setting(
        8, "environments per sampler process", low=1, high=65536, flag="--envs-per-sampler", machine=True
    )
    inference_workers: int = setting(
        0,
        "modes hts and tianji, one learner: processes that run the policy for all samplers in batches; 0: "
        "each sampler runs it. The results are identical",
        low=0,
        high=MAX_SAMPLERS,
        flag="--inference-workers",
        machine=True,
        when=lambda data_flow: data_flow.inference_workers,
    )
    size: int = setting(
        2048,
        "env steps per rollout, summed over all environments of a learner; used if sync_interval is not set",
        unit="env steps",
        low=1,
        high=2**30,
        default_text="128 with a2c, else 2048",
    )
    sync_interval: int | None = setting(
        None,
        "env steps per environment and rollout (SB3: n_steps); default: rollout.size / environments, at least "
        "16 (a2c: 5); 16 with impact, appo and impala",
        unit="env steps",
        low=1,
        high=65_536,
        flag="--sync-interval",
        machine=True,
    )
    correction: str = setting(
        "delayed",
        "modes hts and tianji: off-policy correction of rollouts that were collected by the previous policy "
        "(ppo: none by default)",
        choices=("delayed", "none", "truncated-is"),
        flag="--correction",
        when=lambda data_flow: bool(data_flow.lag) and not data_flow.asynchronous,
    )
    synchrony: str = setting(
        "batch",
        "mode serial: environments wait for each other after every step, or after every rollout (batch)",
        choices=("step", "batch"),
        flag="--synchrony",
        when=lambda data_flow: data_flow.lag == 0,
    )


@dataclass(frozen=True, kw_only=True)
class GalaConfig(Section):
    """Parameter mixing of the learners in mode gala."""

    when = _mixes

    topology: str = setting(
        "ring",
        "who sends parameters to a learner: ring: the learner before it; exponential: those 1, 2, 4, ... places "
        "before it; full: all others",
        choices=("ring", "exponential", "full"),
        flag="--topology",
    )
    max_staleness: int = setting(
        100,
        "maximum rollouts without a message from a neighbour before a learner blocks; 0: lockstep",
        unit="rollouts",
        low=0,
        high=NO_LIMIT,
        flag="--max-staleness",
    )
    mixing: str = setting(
        "gossip",
        "gossip; baselines: all_reduce (gradients are averaged before each step, target_kl has no effect), "
        "hogwild (one set of shared parameters), none (independent learners)",
        choices=MIXINGS,
    )
    scale_lr: bool = setting(
        True,
        "multiply the learning rate by the square root of the number of learners, to at most 4e-3 (mixing = "
        "gossip): each one learns from a fraction of the env steps",
    )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Section):
    batch_size: int = setting(
        256,
        "batch size of updates from replay; on-policy algorithms: see ppo.minibatch_size",
        unit="transitions",
        low=1,
        high=2**24,
        flag="--batch-size",
        when=_replay,
    )
    threads: int = setting(
        1,
        "CPU threads of the learner: 2 split an update by networks and rows, more split each matmul",
        low=1,
        high=256,
        flag="--learner-threads",
        machine=True,
    )
    device: str = setting(
        "auto",
        "auto, cpu, cuda, cuda:N, ACTOR+CRITICS such as cuda:0+cuda:1 (the same GPU twice: two streams), or "
        "split for cuda:0+cuda:1. auto: a GPU if there is one, but the CPU for on-policy algorithms without "
        "images",
        flag="--device",
        machine=True,
    )
    precision: str = setting(
        "float32",
        "precision of matmul inputs: tf32 needs a GPU, bfloat16 a CPU that supports it; weights, optimizer "
        "and accumulation stay in float32",
        choices=("float32", "tf32", "bfloat16"),
        machine=True,
        when=_replay,
    )
    overlap: bool = setting(
        False, "update the actor with the previous critics, so that both train in parallel on two devices", when=_replay
    )
    gpu_replay: bool = setting(True, "keep a copy of replay in the learner's GPU memory, as much as fits", when=_replay)
    updates_per_launch: int = setting(
        1, "with gpu_replay: updates in one CUDA graph; 0: no CUDA graphs", unit="updates", low=0, high=64, when=_replay
    )
    compile: bool = setting(False, "fuse kernels by torch.compile, in up to a minute; a GPU needs Triton", when=_replay)
    average_interval: int = setting(
        100,
        "mode tianji: updates between averagings of the learners' parameters",
        unit="updates",
        low=1,
        high=NO_LIMIT,
        when=lambda data_flow: data_flow.averages_parameters,
    )
    publish_interval_s: float = setting(
        0.25, "time between publications of the weights", unit="s", low=0.01, high=3600, when=_processes
    )
    checkpoint_interval_s: float = setting(30.0, "time between checkpoints", unit="s", low=0.5, high=1e6)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Section):
    """Samplers and learners on other hosts, through Ray."""

    when, personal = not_offered, True

    address: str | None = setting(
        None,
        "HOST:PORT of a Ray cluster's head node, auto, or local:N to simulate N hosts on this machine "
        "(command line only)",
        flag="--cluster",
        command_line_only=True,
    )
    samplers: int | None = setting(
        None,
        "sampler processes on each other host; default: chosen there",
        low=1,
        high=MAX_HOST_SAMPLERS,
        flag="--host-samplers",
    )
    learners: int | None = setting(
        None,
        "modes gala and tianji: learners of all hosts together, one on each other host; default: run.learners plus "
        "one for each host of local:N; with any other address, plus three",
        unit="learners",
        low=2,
        high=64,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Greedy episodes that give the return curve."""

    personal = True

    enabled: bool = setting(True, "evaluate the policy during training and at the end", flag="--no-evaluator")
    episodes: int = setting(10, "episodes per evaluation, each from a fresh reset", low=1, high=10_000)
    seed: int = setting(10_000, "base seed of all evaluation episodes", low=0, high=2**31 - 1)
    cpu_share: float = setting(
        0.15, "fraction of a core that the evaluator may use while all are busy", low=0.01, high=1.0
    )
    interval_updates: int | None = setting(
        None,
        "mode serial: updates between evaluations, which makes curves independent of the load; default: by "
        "time, see cpu_share",
        unit="updates",
        low=1,
        high=NO_LIMIT,
    )
    keep_episodes: int = setting(
        60, "evaluations whose best, median and worst episodes the dashboard can show; 0: none", low=0, high=10_000
    )
    keep_episodes_mb: float = setting(100.0, "disk space of kept episodes", unit="MB", low=1, high=1e6)


@dataclass(frozen=True, kw_only=True)
class VisualizerConfig(Section):
    """The picture and the clips of the current policy."""

    personal = True

    enabled: bool = setting(True, "run the visualizer process", flag="--no-visualizer")
    frames_per_s: float = setting(8.0, "maximum frame rate of the live picture", unit="1/s", low=0.1, high=60)
    clip_interval_s: float = setting(120.0, "time between video clips", unit="s", low=1, high=1e6)
    clip_length_s: float = setting(10.0, "playing time of a clip", unit="s", low=0.5, high=600)
    cpu_share: float = setting(
        0.10, "fraction of a core that the visualizer may use while all are busy", low=0.01, high=1.0
    )


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Section):
    """Objective of the tuner, and the share of the machine that stays with the user."""

    personal = True

    objective: str = setting(
        "return",
        "what the tuner maximizes: return (progress of the return), paper (the paper's rule), sampling (env "
        "steps/s) or updates (updates/s)",
        choices=("return", "paper", "sampling", "updates"),
        flag="--objective",
        when=_replay,
        tuner=True,
    )
    cpu_target: float = setting(
        0.75, "objective paper: share of cores used", low=0.05, high=1.0, flag="--cpu-target", when=_replay, tuner=True
    )
    gpu_target: float = setting(
        0.85,
        "objective paper: share of the highest update frame rate that the batch size must reach",
        low=0.05,
        high=0.99,
        flag="--gpu-target",
        when=_replay,
        tuner=True,
    )
    budget_s: float = setting(60.0, "longest time that the tuner measures", unit="s", low=5.0, high=600.0, tuner=True)
    algorithm_share: float = setting(
        0.1,
        "with --auto on a task without a profile: share of the run's time (at most 5 min) for training the algorithms "
        "that are compared but not chosen; 0: use the default algorithm",
        low=0.0,
        high=0.5,
        tuner=True,
    )
    step_us: float | None = setting(
        None,
        "time of an env step by which replay.learning_starts and rollout.size are lowered for a slow environment; "
        "default: measured with --auto",
        unit="us",
        low=0.001,
    )
    while_training: bool = setting(
        True,
        "measure while the run trains, if this machine has its only learner; otherwise before it trains, for up to a "
        "minute",
        flag="--tune-first",
        inverse="tune before training starts (up to a minute) instead of during it",
        when=_processes,
        tuner=True,
    )
    govern: bool = setting(
        True, "pause samplers to keep cores free (see leave_free, give_way)", flag="--no-governor", when=_governed
    )
    leave_free: float = setting(
        0.0, "share of cores to leave free for other programs", low=0.0, high=0.9, flag="--leave-free", when=_processes
    )
    give_way: bool = setting(
        False,
        "give other programs priority: run all workers at low priority, and pause up to half of the samplers "
        "while other programs fill the cores",
        flag="--give-way",
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """Loggers in addition to the run directory."""

    personal = True

    sinks: tuple[str, ...] = setting(
        (), f"also log to {', '.join(SINKS)}, separated by commas; each needs its extra", choices=SINKS, flag="--log"
    )
    project: str = setting("spreeze", "project (Weights & Biases, trackio) or experiment (MLflow)")


@dataclass(frozen=True, kw_only=True)
class CallbackConfig(Section):
    """Code of the user that follows and steers the run (``spreeze.BaseCallback``)."""

    when, personal = not_offered, True

    classes: tuple[str, ...] = setting((), "MODULE:CLASS of each callback (--callback)", command_line_only=True)
    deadline_s: float = setting(
        10.0,
        "longest time that a callback's method may take; after that, the callback is disabled",
        unit="s",
        low=0.1,
        high=1e6,
    )


@dataclass(frozen=True, kw_only=True)
class StopConfig(Section):
    """When training ends. Without a condition: at the published return, at a plateau, or after ``budget_s``."""

    when, personal = not_offered, True
    CONDITIONS: ClassVar = ("seconds", "env_steps", "updates", "target_return")
    """The settings of which any one may end the run."""

    seconds: float | None = setting(
        None, "stop after this training time; 0: train until Ctrl-C", unit="s", low=0.0, flag="--seconds"
    )
    env_steps: int | None = setting(None, "stop after this many env steps", unit="env steps", low=1, flag="--env-steps")
    updates: int | None = setting(
        None, "stop after this many updates (gradient steps of the critics)", unit="updates", low=1, flag="--updates"
    )
    target_return: float | None = setting(
        None,
        "stop once the policy reaches this mean return with confidence; 20 to 100 further episodes confirm it where "
        "one evaluation cannot",
        flag="--target-return",
    )
    target_evaluations: int = setting(
        1,
        "evaluations in a row that must reach target_return; 0: only report it",
        unit="evaluations",
        low=0,
        high=NO_LIMIT,
    )

    budget_s: float = setting(
        1800.0,
        "without any of these conditions: stop at the published return of the task, once returns have stopped "
        "rising, or after this training time",
        unit="s",
        low=1.0,
    )

    @property
    def by_itself(self) -> bool:
        """True if no condition was set, so that the run itself decides when it ends."""
        return all(getattr(self, name) is None for name in self.CONDITIONS)

    @property
    def limit_s(self) -> float | None:
        """Training time after which a session ends at the latest; None without a limit."""
        return self.budget_s if self.by_itself else self.seconds or None

    @property
    def at_return(self) -> bool:
        """True if a return ends the run."""
        return self.target_return is not None and self.target_evaluations > 0

    @property
    def by_counts(self) -> StopConfig:
        """Without the time if a count also ends the run, so that learning does not depend on the clock."""
        counted = self.env_steps is not None or self.updates is not None
        return dataclasses.replace(self, seconds=None) if counted else self


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run. Workers receive only the sections that they need."""

    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    algo_settings: AlgorithmConfig | OnPolicyConfig | None = None
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
            find_mode(self.run.mode)  # a mode of a module is found when it is used: files are read without imports
        if self.algo_settings is None:
            object.__setattr__(self, "algo_settings", algorithm_section(self.run.algo, self.env.import_module)())

    def sections(self) -> dict[str, Section]:
        """Name -> section, in order; of the algorithms only the chosen one."""
        names = [item.name for item in dataclasses.fields(self)]
        return {self.run.algo if name == "algo_settings" else name: getattr(self, name) for name in names}

    @property
    def mode(self) -> Mode:
        """The declaration of the chosen mode; imports the module of ``--import`` if the mode is not a built-in one."""
        return find_mode(self.run.mode, self.env.import_module)

    def rollout_cores(self, usable: float) -> float:
        """Cores for samplers of rollouts, less ``leave_free`` if no governor enforces it."""
        return usable if self.data_flow.asynchronous else usable * (1.0 - self.tuning.leave_free)

    def rollout_samplers(self, usable: float) -> int:
        """Default number of samplers of rollouts."""
        return max(1, min(int(self.rollout_cores(usable)), MAX_DEFAULT_SAMPLERS))

    def rollout_interval(self, envs: int) -> int:
        """Env steps per environment of a learner in one rollout: as set, or from ``rollout.size``."""
        if self.rollout.sync_interval is not None:
            return self.rollout.sync_interval
        shortest = OnPolicyConfig.shortest_rollout if self.on_policy is None else self.on_policy.shortest_rollout
        return max(shortest, round(self.rollout.size / envs))

    def samplers_beside(self, usable: float) -> int:
        """Default number of samplers beside learners with replay: one per core, at least one per learner."""
        learners = self.run.learners
        return max(learners, min(int(usable) - self.learner.threads * learners, MAX_DEFAULT_SAMPLERS))

    @property
    def inference_workers(self) -> int:
        """Number of inference processes for samplers of rollouts; 0 if the mode has none."""
        return self.rollout.inference_workers if self.data_flow.inference_workers else 0

    @property
    def data_flow(self) -> DataFlow:
        """Data flow of the chosen mode and algorithm; a ConfigError if the mode does not support it."""
        data_flow = self.mode.data_flow(on_policy=self.on_policy is not None)
        if data_flow is None or data_flow.asynchronous != isinstance(self.on_policy, AsyncOnPolicyConfig):
            raise ConfigError(f"--mode {self.run.mode} does not run --algo {self.run.algo}; change one of them")
        return data_flow

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The section of the chosen off-policy algorithm; a ConfigError if it learns on policy."""
        if not isinstance(self.algo_settings, AlgorithmConfig):
            raise ConfigError(f"--algo {self.run.algo}: it learns on policy, without replay; use --mode hts or serial")
        return self.algo_settings

    @property
    def on_policy(self) -> OnPolicyConfig | None:
        """The section of the chosen on-policy algorithm; None where it learns off policy."""
        return self.algo_settings if isinstance(self.algo_settings, OnPolicyConfig) else None


SHARED_SECTIONS: dict[str, type[Section]] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if isinstance(hint, type)
}
"""The sections of every run."""


class _Sections(Mapping[str, type[Section]]):
    """The sections of every run and of all algorithms; each algorithm is imported when its section is requested."""

    def __getitem__(self, name: str) -> type[Section]:
        if name in ALGORITHMS:
            section: type[Section] = find_row(name).config
            return section
        return SHARED_SECTIONS[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*SHARED_SECTIONS, *ALGORITHMS))

    def __len__(self) -> int:
        return len(SHARED_SECTIONS) + len(ALGORITHMS)

    def __contains__(self, name: object) -> bool:
        return name in SHARED_SECTIONS or name in ALGORITHMS


SECTIONS = _Sections()
FLAG_OF: dict[str, str] = {
    f"{section}.{item.name}": item.metadata["flag"]
    for section, kind in SHARED_SECTIONS.items()
    for item in dataclasses.fields(kind)
    if item.metadata["flag"]
}
"""section.field -> flag; --set section.field=value sets any other field. One flag may set a field of several sections:
``--samplers`` sets the samplers for replay and for rollouts, of which a run has one kind."""


def marked(mark: str) -> tuple[str, ...]:
    """The settings with ``setting(MARK=True)``, as ``section.field``, without those of algorithms."""
    return tuple(f"{name}.{item}" for name, section in SHARED_SECTIONS.items() for item in section.marked(mark))


def field_of(key: str, config: Config | None = None) -> dataclasses.Field[Any]:
    """The field of the setting ``section.field``; for an imported algorithm, ``config`` has its section."""
    section, name = key.split(".")
    fields: dict[str, dataclasses.Field[Any]] = _class_of(section, config).__dataclass_fields__
    return fields[name]


def condition_of(key: str, config: Config) -> Condition:
    """The runs that read the setting ``section.field``, given that its algorithm is used."""
    section, name = key.split(".")
    return _class_of(section, config).condition_of(name)


def kind_of(key: str, config: Config | None = None) -> type:
    """The type of a setting that is set: int, float, bool, str or tuple."""
    section, name = key.split(".")
    hint = type_hints(_class_of(section, config))[name]
    kind: type = typing.get_origin(non_none_type(hint)) or non_none_type(hint)
    return kind


def _class_of(section: str, config: Config | None) -> type[Section]:
    chosen = {} if config is None else {config.run.algo: type(config.algo_settings)}
    return chosen.get(section) or SECTIONS[section]  # type: ignore[return-value]


def active_settings(config: Config) -> tuple[str, ...]:
    """The settings that mode and algorithm read, the algorithm's first; none that name run, task or end."""
    algo, data_flow, sections = config.run.algo, config.data_flow, config.sections()
    return tuple(
        f"{name}.{item.name}"
        for name, section in ({algo: sections[algo]} | sections).items()
        for item in dataclasses.fields(section)
        if section.condition_of(item.name)(data_flow)
    )


def algorithm_section(name: str, import_module: str | None = None) -> type[Any]:
    """The class of an algorithm's section (see ``algorithms.rows``); a ConfigError without a valid one."""
    row = find_row(name, import_module)
    base = OnPolicyConfig if row.on_policy else AlgorithmConfig
    if name in SHARED_SECTIONS or not name.isidentifier() or not issubclass(row.config, base):
        raise ConfigError(
            f"--import {import_module}: algorithm {name!r} with settings {row.config.__name__}: expected a new "
            f"name such as my_sac, and a dataclass derived from {base.__name__}"
        )
    return row.config


def is_valid_name(name: str) -> bool:
    """True if a run or profile may have this name."""
    return _NAME.fullmatch(name) is not None and name.split(".")[0].lower() not in _RESERVED


def check_name(name: str) -> str:
    """Rejects a run or profile name that could leave its directory or be invalid in a file system."""
    if not is_valid_name(name):
        raise ConfigError(
            f"name {name[:80]!r}: expected up to 128 letters, digits, '.', '_' and '-', beginning "
            "with a letter or digit, and no reserved name (con, prn, aux, nul, latest)"
        )
    return name
