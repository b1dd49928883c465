"""Settings: one frozen dataclass a part, every field with meaning, unit and range.

A configuration is built from layers, later ones winning: defaults < profile < tuner < user.
``Settings`` remembers which layer each value came from. Nothing changes a setting in place.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.algorithms import ALGORITHMS, find_row
from spreeze.config.modes import DECLARED, Mode, Wiring, find_mode
from spreeze.errors import ConfigError, did_you_mean
from spreeze.inference.convolution import CNNS
from spreeze.inference.policy import ACTIVATIONS
from spreeze.types import EnvSpec

SINKS = ("tensorboard", "wandb", "mlflow")
"""Each is the name of a sink (``runtime.metric_sinks``), of its package and of the extra that installs it."""
TRANSPORTS = ("shared", "gloo")
MIXINGS = ("gossip", "all_reduce", "hogwild", "none")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def setting(
    default: Any, doc: str, *, unit: str = "", low: float | None = None, high: float | None = None,
    choices: tuple[str, ...] | None = None, flag: str = "",
) -> Any:
    """A dataclass field: all that is known of a setting, for checks, the command line and the page.

    ``doc`` says of a switch what is done while it is on. ``low`` and ``high`` are themselves allowed. The ``flag`` of a
    switch inverts its default (``--no-...`` if the default is on).
    """
    known = {"doc": doc, "unit": unit, "low": low, "high": high, "choices": choices, "flag": flag}
    return field(default=default, metadata=known)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Base of all parts: checks type and range of every field when built."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = _coerced(getattr(self, item.name), hints[item.name], item)
            object.__setattr__(self, item.name, value)


def _coerced(value: Any, hint: Any, item: dataclasses.Field[Any]) -> Any:
    """``value`` as the field's type, or a ConfigError that names the field and what is allowed."""
    wanted = _set_type(hint)
    if value is None and wanted is not hint:
        return None
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple) or not (value or item.default == ()):
            raise ConfigError(f"{item.name} = {value!r}: expected a list of {typing.get_args(wanted)[0].__name__}")
        return tuple(_scalar(entry, typing.get_args(wanted)[0], item) for entry in value)
    return _scalar(value, wanted, item)


def _set_type(hint: Any) -> Any:
    """The type of a setting where it is set: T of ``T | None``."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(option for option in options if option is not type(None))


def _scalar(value: Any, wanted: type, item: dataclasses.Field[Any]) -> Any:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{item.name} = {value!r}: expected {wanted.__name__}, got {type(value).__name__}")
    low, high, choices = (item.metadata.get(key) for key in ("low", "high", "choices"))
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{item.name} = nan: expected a number")
    if (low is not None and value < low) or (high is not None and value > high):
        least, most = "" if low is None else f"{low:g}", "" if high is None else f"{high:g}"
        allowed = f"{least} to {most}" if least and most else f"at least {least}" if least else f"at most {most}"
        raise ConfigError(f"{item.name} = {value!r}: allowed is {allowed}")
    if choices and value not in choices:
        near = did_you_mean(str(value), choices)
        raise ConfigError(f"{item.name} = {value!r}: allowed is {', '.join(choices)}{near}")
    if isinstance(value, str) and len(value) > 4096:
        raise ConfigError(f"{item.name}: text of {len(value)} characters; at most 4096")
    return value


@dataclass(frozen=True, kw_only=True)
class RunConfig(Part):
    """What is run and where its files go."""

    algo: str = setting("sac", f"algorithm: {', '.join(ALGORITHMS)}, or one that the module of --import declares; not "
                        "set: by the action space", flag="--algo")
    mode: str = setting(DECLARED[0].name, "how the parts are wired together: "
                        f"{', '.join(mode.name for mode in DECLARED)}, or one that the module of --import declares",
                        flag="--mode")
    seed: int = setting(1, "seed of networks, exploration and environments", low=0, high=2**31 - 1, flag="--seed")
    runs_dir: str = setting("runs", "directory that holds the run directories", flag="--runs-dir")
    name: str | None = setting(None, "name of the run directory; built from time, env, algo and seed if not given",
                               flag="--name")
    learners: int = setting(1, "learners side by side, each with samplers, data and seed of its own (modes spreeze, "
                            "tianji, gala)", unit="learners", low=1, high=16, flag="--learners")
    forgiven_failures: int = setting(0, "crashes of a worker that do not count toward its limit of restarts: for tests",
                                     low=0, high=10**9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None:
            check_name(self.name)


@dataclass(frozen=True, kw_only=True)
class EnvConfig(Part):
    id: str = setting("Walker2DBulletEnv-v0", "Gymnasium id, or mpe2:NAME or lbf:ID for several agents; observations "
                      "must be Box, actions Box or Discrete", flag="--env")
    import_module: str | None = setting(None, "module to import before the id is made (command line only)",
                                        flag="--import")
    plain: bool = setting(False, "step Bullet tasks as their package has them, not the fast equal ones",
                          flag="--plain-env")
    args: tuple[str, ...] = setting((), "key=value texts for the environment's constructor (command line only)")
    normalize_obs: bool = setting(False, "scale observations by their running mean and standard deviation")


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Part):
    """Frames of environments that observe images; the lines marked ALE hold for Atari games alone."""

    stack: int = setting(4, "frames in one observation", unit="frames", low=1, high=16)
    size: int = setting(84, "height and width of a frame", unit="pixels", low=36, high=512)
    grey: bool = setting(True, "one grey channel instead of red, green and blue (ALE: always)")
    frame_skip: int = setting(4, "ALE: emulator frames with one action", unit="frames", low=1, high=60)
    sticky_actions: float = setting(0.25, "ALE: probability that a frame repeats the action before", low=0.0, high=1.0)
    full_actions: bool = setting(False, "ALE: all 18 actions, not only those that the game reads")
    episodic_life: bool = setting(False, "ALE: a lost life ends the episode, except in evaluation")
    clip_rewards: bool = setting(True, "ALE: replay holds the sign of a reward; returns are counted in full")
    noop_max: int = setting(30, "ALE: idle frames at the start, a random number up to this", unit="frames",
                            low=0, high=1000)
    fire_reset: bool = setting(False, "ALE: press FIRE after a reset where the game has that action")
    max_episode_frames: int = setting(108_000, "ALE: emulator frames after which a game is truncated",
                                      unit="frames", low=100, high=10**9)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Part):
    """What all off-policy algorithms share."""

    hidden_sizes: tuple[int, ...] = setting((256, 256), "width of each hidden layer", unit="units", low=1, high=4096)
    network: str = setting("", "own network that the module of --import declares, in place of hidden_sizes, activation "
                           "and layer norm; empty: none")
    activation: str = setting("relu", "function between the layers of all networks; images always have relu",
                              choices=ACTIVATIONS)
    gamma: float = setting(0.99, "discount of one env step", low=0.0, high=1.0)
    tau: float = setting(0.005, "share of the online weights mixed into the target at each update", low=0.0, high=1.0)
    n_step: int = setting(1, "env steps a stored transition spans", unit="env steps", low=1, high=64)
    weight_decay: float = setting(0.0, "share of the weights that a step takes off, times its size (AdamW, arXiv "
                                  "1711.05101)", low=0.0, high=10.0)
    lr_schedule: str = setting("constant", "linear, cosine: all step sizes fall to 0 at the stop condition that comes "
                               "first, that of time counted from the start of the session",
                               choices=("constant", "linear", "cosine"))
    policy_average: float = setting(0.0, "decay in one update of an average of the policy's weights, which is what is "
                                    "evaluated, shown and kept; 0: the newest weights; 0.998 averages 500 updates",
                                    low=0.0, high=0.999999)
    explore_average: bool = setting(False, "samplers explore with the averaged policy too, not with the newest one")

    def check_task(self, spec: EnvSpec) -> None:
        """Raises a ConfigError if a setting does not fit the task."""


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(AlgorithmConfig):
    """What the algorithms with an actor share."""

    actor_lr: float = setting(3e-4, "Adam step size of the actor", low=0.0, high=1.0)
    critic_lr: float = setting(3e-4, "Adam step size of the critics", low=0.0, high=1.0)
    actor_hidden_sizes: tuple[int, ...] = setting((), "width of each hidden layer of the actor, which is what samplers "
                                                  "compute; empty: as hidden_sizes", unit="units", low=1, high=4096)
    actor_layer_norm: bool = setting(False, "normalise the hidden layers of the actor (arXiv 1607.06450)")
    critic_layer_norm: bool = setting(False, "normalise the hidden layers of the critics (arXiv 1607.06450)")
    action_penalty: float = setting(0.0, "weight of the mean square of actions before they are squashed, of their mean "
                                    "where they are drawn: holds a policy off its bounds (1e-3 in the authors' code "
                                    "of arXiv 1801.01290)", low=0.0, high=1e3)

    def check_task(self, spec: EnvSpec) -> None:
        if spec.num_actions is not None and self.action_penalty > 0.0:
            raise ConfigError(f"action_penalty = {self.action_penalty:g}: discrete actions are not squashed; leave it "
                              "out")

    @property
    def actor_sizes(self) -> tuple[int, ...]:
        """``actor_hidden_sizes``, or ``hidden_sizes``."""
        return self.actor_hidden_sizes or self.hidden_sizes


@dataclass(frozen=True, kw_only=True)
class DistributionalConfig(ActorCriticConfig):
    """What the algorithms with two critics share: what these learn of the return."""

    critics: str = setting("twin", "what the critics learn of the return: its mean, of which the lesser of two counts; "
                           "quantiles (TQC, arXiv 2005.04269); probabilities on a grid (C51, arXiv 1707.06887)",
                           choices=("twin", "quantile", "categorical"))
    quantiles: int = setting(25, "critics = quantile: quantiles of each critic", low=1, high=1000)
    drop_quantiles: int = setting(2, "critics = quantile: of these, how many of the highest no target counts",
                                  low=0, high=999)
    atoms: int = setting(101, "critics = categorical: returns on the grid", low=2, high=1001)
    v_min: float = setting(-250.0, "critics = categorical: lowest discounted return on the grid", low=-1e9, high=1e9)
    v_max: float = setting(250.0, "critics = categorical: highest discounted return on the grid", low=-1e9, high=1e9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_quantiles >= self.quantiles:
            raise ConfigError(f"drop_quantiles = {self.drop_quantiles}: none of quantiles = {self.quantiles} would be "
                              "left; drop fewer")
        if self.v_min >= self.v_max:
            raise ConfigError(f"v_min = {self.v_min:g} is not below v_max = {self.v_max:g}; set them to the range of "
                              "discounted returns")

    def check_task(self, spec: EnvSpec) -> None:
        super().check_task(spec)
        if spec.num_actions is not None and self.critics != "twin":
            raise ConfigError(f"critics = {self.critics}: with discrete actions the critics give one value for each "
                              "action; use critics = twin")


@dataclass(frozen=True, kw_only=True)
class SACConfig(DistributionalConfig):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905); with discrete actions arXiv 1910.07207."""

    alpha_lr: float = setting(3e-4, "Adam step size of the temperature", low=0.0, high=1.0)
    policy_delay: int = setting(1, "critic steps for one step of actor and temperature", low=1, high=100)
    initial_alpha: float = setting(1.0, "temperature at the start", low=1e-8, high=1e3)
    tune_alpha: bool = setting(True, "adjust the temperature to the target entropy")
    target_entropy_per_action: float = setting(-1.0, "target entropy of one action component", unit="nat",
                                               low=-100, high=100)
    target_entropy_ratio: float = setting(0.98, "target entropy of discrete actions over that of uniform ones",
                                          low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class TD3Config(DistributionalConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477)."""

    policy_delay: int = setting(2, "critic steps for one actor step", low=1, high=100)
    target_noise: float = setting(0.2, "standard deviation of the noise on the target action; actions lie in [-1, 1]",
                                  low=0.0)
    target_noise_clip: float = setting(0.5, "bound of that noise", low=0.0)
    exploration_noise: float = setting(0.1, "standard deviation of the noise on the actions of samplers", low=0.0)
    exploration_noise_max: float = setting(0.0, "that of a sampler's last environment, between first and last evenly "
                                           "spaced (arXiv 2307.12983); below exploration_noise: the same in all",
                                           low=0.0)


@dataclass(frozen=True, kw_only=True)
class DDPGConfig(ActorCriticConfig):
    """Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv 1509.02971)."""

    exploration_noise: float = setting(0.1, "standard deviation of the noise on the actions of samplers", low=0.0)
    exploration_noise_max: float = setting(0.0, "that of a sampler's last environment, between first and last evenly "
                                           "spaced (arXiv 2307.12983); below exploration_noise: the same in all",
                                           low=0.0)


@dataclass(frozen=True, kw_only=True)
class ActionValueConfig(AlgorithmConfig):
    """What the algorithms share that take the action of the highest value."""

    lr: float = setting(3e-4, "Adam step size", low=0.0, high=1.0)
    target_interval: int = setting(1, "updates between two moves of the target network by tau; tau = 1 copies",
                                   unit="updates", low=1, high=10**9)
    double: bool = setting(True, "the online network chooses the next action (arXiv 1509.06461)")
    epsilon_start: float = setting(1.0, "share of random actions at the start", low=0.0, high=1.0)
    epsilon_end: float = setting(0.05, "share of random actions at the end of the schedule", low=0.0, high=1.0)
    epsilon_env_steps: int = setting(50_000, "env steps over which that share falls, in a straight line",
                                     unit="env steps", low=0, high=10**12)


@dataclass(frozen=True, kw_only=True)
class DQNConfig(ActionValueConfig):
    """Deep Q-learning (Mnih et al. 2015) with double estimation and duelling streams as options."""

    layer_norm: bool = setting(False, "normalise the hidden layers (arXiv 1607.06450); not for images")
    cnn: str = setting("nature", "convolutional layers for images; hidden_sizes follow them", choices=tuple(CNNS))
    duelling: bool = setting(False, "streams of state value and advantages (arXiv 1511.06581)")


@dataclass(frozen=True, kw_only=True)
class QMIXConfig(ActionValueConfig):
    """QMIX for teams of agents (Rashid et al. 2018, arXiv 1803.11485), and VDN (arXiv 1706.05296) as its ablation."""

    hidden_sizes: tuple[int, ...] = setting((64, 64), "width of each hidden layer of the agents' network",
                                            unit="units", low=1, high=4096)
    mixer: str = setting("qmix", "how agents' values make the team's: qmix, a network that rises in each and reads the "
                         "state; vdn, their sum", choices=("qmix", "vdn"))
    mixing_units: int = setting(32, "mixer = qmix: width of the mixing network", unit="units", low=1, high=1024)
    max_grad_norm: float = setting(10.0, "norm to which a larger gradient is scaled down", low=1e-6, high=1e6)


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(Part):
    """What the on-policy algorithms share."""

    hidden_sizes: tuple[int, ...] = setting((64, 64), "width of each hidden layer, of policy and value network each",
                                            unit="units", low=1, high=4096)
    network: str = setting("", "own network that the module of --import declares, in place of hidden_sizes, activation "
                           "and layer norm; empty: none")
    activation: str = setting("tanh", "function between the layers of both networks; images always have relu",
                              choices=ACTIVATIONS)
    layer_norm: bool = setting(False, "normalise the hidden layers of both networks (arXiv 1607.06450); not for images")
    cnn: str = setting("nature", "convolutional layers for images, which policy and value share; hidden_sizes follow",
                       choices=tuple(CNNS))
    gamma: float = setting(0.99, "discount of one env step", low=0.0, high=1.0)
    gae_lambda: float = setting(0.95, "lambda of the advantage estimate; 1: returns alone (arXiv 1506.02438)",
                                low=0.0, high=1.0)
    lr: float = setting(3e-4, "step size", low=0.0, high=1.0)
    lr_schedule: str = setting("linear", "linear: the step size falls to 0 at stop.env_steps, if that is set",
                               choices=("linear", "constant"))
    value_coef: float = setting(0.5, "weight of the value loss", low=0.0, high=1e3)
    entropy_coef: float = setting(0.0, "weight of the policy's entropy", low=0.0, high=1e3)
    max_grad_norm: float = setting(0.5, "a gradient with a larger norm is scaled down to it", low=1e-6, high=1e9)
    normalize_advantage: bool = setting(True, "scale the advantages of a rollout to mean 0 and standard deviation 1")
    normalize_returns: bool = setting(False, "divide rewards by the running standard deviation of returns")
    initial_log_std: float = setting(0.0, "log standard deviation of actions at the start", low=-20.0, high=2.0)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347)."""

    clip: float = setting(0.2, "range of the probability ratio around 1", low=1e-3, high=10.0)
    clip_value: bool = setting(False, "keep new values within clip of the old ones")
    epochs: int = setting(10, "passes over the data of a rollout", low=1, high=1000)
    minibatches: int = setting(4, "minibatches of a rollout, one update each", low=1, high=2**20)
    adam_eps: float = setting(1e-5, "epsilon of Adam", low=1e-12, high=1.0)
    target_kl: float | None = setting(None, "divergence in the update from one rollout that the step size aims at: "
                                      "lr is its upper bound then", unit="nat", low=1e-6, high=10.0)


@dataclass(frozen=True, kw_only=True)
class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783), synchronous, with RMSProp."""

    gae_lambda: float = setting(1.0, "lambda of the advantage estimate; 1: returns alone (arXiv 1506.02438)",
                                low=0.0, high=1.0)
    lr: float = setting(7e-4, "step size", low=0.0, high=1.0)
    entropy_coef: float = setting(0.01, "weight of the policy's entropy", low=0.0, high=1e3)
    normalize_advantage: bool = setting(False, "scale the advantages of a rollout to mean 0 and standard deviation 1")
    rmsprop_alpha: float = setting(0.99, "decay of the mean squared gradient", low=0.0, high=1.0)
    rmsprop_eps: float = setting(1e-5, "epsilon of RMSProp", low=1e-12, high=1.0)


@dataclass(frozen=True, kw_only=True)
class AnyAgeConfig(OnPolicyConfig):
    """What the algorithms of mode impact share: the circular buffer C(N, K) and the correction for lag."""

    slots: int = setting(4, "rollouts that the buffer holds, of all samplers together (N); each sampler has at least "
                         "one", unit="rollouts", low=1, high=65_536)
    uses: int = setting(1, "updates for which a rollout is used at most (K); one update takes one rollout",
                        unit="updates", low=1, high=65_535)
    least_uses: int | None = setting(
        None, "a sampler waits while its oldest rollout was used less often; not set: half of uses; 0: it never waits, "
        "and rollouts that are written over are counted", unit="updates", low=0, high=65_535)
    rho_bar: float = setting(1.0, "bound of the importance weight of a temporal difference (V-trace)", low=0.0,
                             high=1e6)
    c_bar: float = setting(1.0, "bound of the importance weights of the trace (V-trace)", low=0.0, high=1e6)
    broadcast_updates: int = setting(4, "updates between two weights for the samplers (t_frequency)", unit="updates",
                                     low=1, high=10**9)
    adam_eps: float = setting(1e-5, "epsilon of Adam", low=1e-12, high=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uses_before_overwrite > self.uses:
            raise ConfigError(f"least_uses = {self.least_uses} is above uses = {self.uses}: samplers would wait for "
                              "ever; leave it out, for half of uses")

    @property
    def uses_before_overwrite(self) -> int:
        """``least_uses``, or half of ``uses``."""
        return self.uses // 2 if self.least_uses is None else self.least_uses


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig(AnyAgeConfig):
    """Importance-weighted actor-learner (Espeholt et al. 2018, arXiv 1802.01561), with Adam."""

    gae_lambda: float = setting(1.0, "lambda of V-trace; 1: returns alone (arXiv 1802.01561, remark 2)", low=0.0,
                                high=1.0)
    entropy_coef: float = setting(0.0, "weight of the policy's entropy", low=0.0, high=1e3)


@dataclass(frozen=True, kw_only=True)
class AppoConfig(AnyAgeConfig):
    """Asynchronous PPO: its clipped ratio to the policy that collected, without a target network."""

    uses: int = setting(20, "updates for which a rollout is used at most (K); one update takes one rollout",
                        unit="updates", low=1, high=65_535)
    clip: float = setting(0.2, "range of the probability ratio around 1", low=1e-3, high=10.0)


@dataclass(frozen=True, kw_only=True)
class ImpactConfig(AppoConfig):
    """Importance-weighted asynchronous architecture with clipped target networks (arXiv 1912.00167)."""

    ratio: str = setting("R3", "what is clipped: R3, pi over max(pi_target, pi_worker / rho); or the paper's ablations "
                         "R1, pi over pi_target, and R2, pi over pi_worker", choices=("R1", "R2", "R3"))
    rho: float = setting(2.0, "bound of pi_worker over pi_target in R3", low=1.0, high=1e6)
    target_interval: int = setting(0, "updates between two copies into the target network (t_target); 0: as many as "
                                   "slots x uses", unit="updates", low=0, high=10**9)
    kl_coef: float = setting(0.0, "weight of the divergence from the target policy at the start; 0: without",
                             low=0.0, high=1e6)
    kl_target: float = setting(0.01, "divergence at which that weight stays; above twice of it grows by half, below "
                               "half of it is halved", unit="nat", low=1e-6, high=10.0)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Part):
    """Shared-memory replay and the balance between its two sides."""

    capacity: int = setting(1_000_000, "transitions that replay can hold", unit="transitions", low=2, high=10**10,
                            flag="--replay-capacity")
    learning_starts: int = setting(5_000, "env steps collected, with uniform actions, before the first update",
                                   unit="env steps", low=0, high=10**9)
    samples_per_insert_min: float = setting(8.0, "below this ratio the samplers wait", low=0.0, high=1e6)
    samples_per_insert_max: float = setting(512.0, "above this ratio the learner waits", low=0.0, high=1e9)
    save: bool = setting(False, "store replay with every checkpoint", flag="--save-replay")
    checksum: bool = setting(False, "a checksum in every row, for tests that look for torn rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_insert_min > self.samples_per_insert_max:
            raise ConfigError(f"samples_per_insert_min = {self.samples_per_insert_min:g} is above "
                              f"samples_per_insert_max = {self.samples_per_insert_max:g}: nobody could ever move")

    def serial_ratio(self, batch_size: int) -> float:
        """Rows drawn for each inserted one in mode serial: one update after each env step, within the band."""
        return min(max(float(batch_size), self.samples_per_insert_min), self.samples_per_insert_max)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Part):
    samplers: int | None = setting(None, "sampler processes; from the usable cores if not given", low=1, high=512,
                                   flag="--samplers")
    envs_per_sampler: int = setting(8, "environments stepped in one sampler", low=1, high=1024,
                                    flag="--envs-per-sampler")
    nan_policy: str = setting("drop", "what to do with a non-finite observation or reward", choices=("drop", "fail"))
    step_deadline_s: float = setting(30.0, "a sampler whose env step takes longer counts as hung and is started again",
                                     unit="s", low=0.5, high=1e6)
    memory_limit_bytes: int | None = setting(
        None, "private memory above which a sampler is started anew; from the free memory if not given",
        unit="bytes", low=10_000_000, high=2**50)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Part):
    """Collection of rollouts in modes hts, serial and impact."""

    samplers: int | None = setting(None, "sampler processes; not set: hts one a usable core, serial 1, which steps "
                                   "in the run's own process", low=1, high=512, flag="--samplers")
    envs_per_sampler: int = setting(8, "environments stepped in one sampler", low=1, high=1024,
                                    flag="--envs-per-sampler")
    inference_workers: int = setting(0, "hts: processes that infer actions in batches; 0: samplers infer for "
                                     "themselves, the same bits", low=0, high=512, flag="--inference-workers")
    sync_interval: int = setting(64, "env steps of each environment in one rollout (alpha)",
                                 unit="env steps", low=1, high=65_536, flag="--sync-interval")
    correction: str = setting("delayed", "hts: what is done about data that is one rollout old; with ppo none unless "
                              "it is set", choices=("delayed", "none", "truncated-is"), flag="--correction")
    synchrony: str = setting("batch", "serial: environments wait for each other at every step, or once a rollout",
                             choices=("step", "batch"), flag="--synchrony")
    fingerprint: bool = setting(False, "hashes of trajectories, parameters and optimiser at each swap, in "
                                "fingerprints.jsonl of the run")


@dataclass(frozen=True, kw_only=True)
class GalaConfig(Part):
    """How the learners of mode gala share what they learn."""

    topology: str = setting("ring", "whose parameters a learner takes: ring, those of the one before it; exponential, "
                            "of those 1, 2, 4, ... before it; full, of all", choices=("ring", "exponential", "full"),
                            flag="--topology")
    max_staleness: int = setting(100, "a learner waits for an in-neighbour of which nothing came in more than so many "
                                 "of its own updates; 0: it waits at each", unit="updates", low=0, high=10**9,
                                 flag="--max-staleness")
    mixing: str = setting("gossip", "gossip; or, to compare it with, all_reduce: gradients are averaged before each "
                          "step; hogwild: all update the same parameters; none", choices=MIXINGS)
    scale_lr: bool = setting(True, "gossip: the step size times the root of the number of learners, as each learns "
                             "from that share of the env steps, with more noise")
    similarity_interval: int = setting(500, "updates between two comparisons of the learners' gradients",
                                       unit="updates", low=1, high=10**9)


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Part):
    batch_size: int = setting(256, "transitions in one update", unit="transitions", low=1, high=2**24,
                              flag="--batch-size")
    threads: int = setting(1, "threads of the learner: two share an update as a pair, more share each matmul",
                           low=1, high=256, flag="--learner-threads")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N, split (actor on cuda:0, critics on cuda:1), ACTOR+CRITICS "
                          "(one GPU twice: two streams of it); "
                          "auto is a GPU where there is one, but the CPU for PPO and A2C without images",
                          flag="--device")
    precision: str = setting("float32", "what matmuls round their inputs to: tf32 on GPUs, bfloat16 on processors "
                             "that have it; weights, sums and optimisers are always float32",
                             choices=("float32", "tf32", "bfloat16"))
    overlap: bool = setting(False, "the actor follows the critics of one update before: two devices work at once")
    mirror: bool = setting(True, "keep a copy of replay on the learner's GPU, as far as its memory allows")
    updates_per_launch: int = setting(1, "updates in one launch on a GPU with such a copy (a CUDA graph); 0: every "
                                      "kernel by itself", unit="updates", low=0, high=64)
    fuse: bool = setting(False, "fuse the small kernels of an update by torch.compile, which takes up to a minute "
                         "before learning begins and, on a GPU, Triton")
    average_interval: int = setting(100, "mode tianji: updates of a learner between two averagings of its parameters "
                                    "with those of the others", unit="updates", low=1, high=10**9)
    publish_interval_s: float = setting(0.25, "time between two published weights", unit="s", low=0.01, high=3600)
    checkpoint_interval_s: float = setting(30.0, "time between two checkpoints", unit="s", low=0.5, high=1e6)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Part):
    """Samplers on other hosts, through Ray."""

    address: str | None = setting(None, "HOST:PORT of a Ray cluster's head, auto, or local:N for N hosts simulated on "
                                  "this machine (command line only)", flag="--cluster")
    samplers: int | None = setting(None, "sampler processes on each other host; as its own tuner or its usable cores "
                                   "say if not given", low=1, high=64, flag="--host-samplers")


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig(Part):
    """How the parameters of several learners reach each other (modes gala and tianji)."""

    transport: str = setting("shared", "shared memory of this machine, or gloo: the connections of torch.distributed",
                             choices=TRANSPORTS)
    listen: str = setting("127.0.0.1", "gloo: address at which learners take connections; the default one is seen by "
                          "this machine alone")
    learners: int | None = setting(None, "gloo: learners of all hosts together, where runs of other hosts join this "
                                   "one; not set: run.learners, and nobody joins", unit="learners", low=1, high=64)
    join: str | None = setting(None, "gloo: HOST:PORT of the run on another host that this one's learners join "
                               "(command line only)")
    secret_file: str | None = setting(None, "gloo: a copy of that run's file secret (command line only)")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.learners or self.join or self.secret_file
        if given and self.transport != "gloo":
            raise ConfigError(f"transport = {self.transport}: learners of other hosts are reached with "
                              "exchange.transport = gloo alone; set it")
        if (self.join is None) != (self.secret_file is None) or (self.join is not None and self.learners is not None):
            raise ConfigError("join and secret_file go together, without learners, whose number the run that is joined "
                              "says")

    @property
    def spans_hosts(self) -> bool:
        """Whether learners of other hosts may take part."""
        return self.learners is not None or self.join is not None


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Part):
    """Greedy episodes that give the return curve."""

    episodes: int = setting(10, "episodes in one evaluation, on a fixed seed list", low=1, high=10_000)
    seed: int = setting(10_000, "first seed of that list", low=0, high=2**31 - 1)
    cpu_share: float = setting(0.15, "share of one core the evaluator may use when no core is free", low=0.01, high=1.0)
    interval_updates: int | None = setting(
        None, "serial: updates from one evaluation to the next, so that a curve is the same on a busy machine; not "
        "set: by time, as cpu_share says", unit="updates", low=1, high=10**9)


@dataclass(frozen=True, kw_only=True)
class VisualizerConfig(Part):
    """The picture and the clips of the current policy."""

    enabled: bool = setting(True, "run the visualizer process", flag="--no-visualizer")
    frames_per_s: float = setting(8.0, "pictures a second at most", unit="1/s", low=0.1, high=60)
    clip_interval_s: float = setting(120.0, "time between two clips", unit="s", low=1, high=1e6)
    clip_length_s: float = setting(10.0, "length of a clip as played", unit="s", low=0.5, high=600)
    cpu_share: float = setting(0.10, "share of one core the visualizer may use when no core is free", low=0.01,
                               high=1.0)


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Part):
    """What the tuner aims at, and what of the machine stays with the user."""

    objective: str = setting("return", "what the tuner makes best: progress of the return, the paper's knee, env "
                             "steps/s, or updates/s", choices=("return", "paper", "sampling", "updates"),
                             flag="--objective")
    cpu_target: float = setting(0.75, "objective paper: share of the usable cores up to which samplers are added",
                                low=0.05, high=1.0, flag="--cpu-target")
    gpu_target: float = setting(0.85, "objective paper: share of the highest update frame rate that the batch has to "
                                "reach", low=0.05, high=0.99, flag="--gpu-target")
    govern: bool = setting(True, "let samplers rest as leave_free and give_way ask", flag="--no-governor")
    leave_free: float = setting(0.0, "share of the usable cores that is left to other programs", low=0.0, high=0.9,
                                flag="--leave-free")
    give_way: bool = setting(False, "let up to half of the samplers rest while other programs fill cores, which go "
                             "first by priority anyway", flag="--give-way")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Part):
    """Where a run is logged beside its own directory."""

    sinks: tuple[str, ...] = setting((), "what also gets metrics, evaluations, settings and events: any of "
                                     f"{', '.join(SINKS)}, with commas between; each needs its extra",
                                     choices=SINKS, flag="--log")
    project: str = setting("spreeze", "project of Weights & Biases, experiment of MLflow")


@dataclass(frozen=True, kw_only=True)
class StopConfig(Part):
    """When training ends by itself; without any condition it goes on until Ctrl-C."""

    seconds: float | None = setting(None, "wall time of training", unit="s", low=0.0, flag="--seconds")
    env_steps: int | None = setting(None, "env steps collected", unit="env steps", low=1, flag="--env-steps")
    updates: int | None = setting(None, "updates (gradient steps of the critics)", unit="updates", low=1,
                                  flag="--updates")
    target_return: float | None = setting(None, "mean greedy episode return of an evaluation", flag="--target-return")
    target_evaluations: int = setting(1, "evaluations in a row whose mean has to reach the target; 5: it is held",
                                      unit="evaluations", low=1, high=1000)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All parts of one run. Workers are given the parts they need, never the whole."""

    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    sac: SACConfig = field(default_factory=SACConfig)
    td3: TD3Config = field(default_factory=TD3Config)
    ddpg: DDPGConfig = field(default_factory=DDPGConfig)
    dqn: DQNConfig = field(default_factory=DQNConfig)
    qmix: QMIXConfig = field(default_factory=QMIXConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    a2c: A2CConfig = field(default_factory=A2CConfig)
    impact: ImpactConfig = field(default_factory=ImpactConfig)
    appo: AppoConfig = field(default_factory=AppoConfig)
    impala: ImpalaConfig = field(default_factory=ImpalaConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gala: GalaConfig = field(default_factory=GalaConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    visualizer: VisualizerConfig = field(default_factory=VisualizerConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    imported: AlgorithmConfig | OnPolicyConfig | None = None
    """The part of the chosen algorithm where the module of ``--import`` declares it; else None."""

    def __post_init__(self) -> None:
        if self.learner.batch_size > self.replay.capacity:
            raise ConfigError(f"learner.batch_size = {self.learner.batch_size} is larger than replay.capacity = "
                              f"{self.replay.capacity}; lower the batch or raise the capacity")
        if self.env.import_module is None:
            find_mode(self.run.mode)  # one of a module is looked for when it is used: files are read without imports
            find_row(self.run.algo)

    def parts(self) -> dict[str, Part]:
        """Name -> part, in order; an imported algorithm's own comes last."""
        return {name: getattr(self, name) for name in PARTS} | ({self.run.algo: self.imported} if self.imported else {})

    @property
    def mode(self) -> Mode:
        """The chosen mode's declaration; imports the module of ``--import`` where that has it."""
        return find_mode(self.run.mode, self.env.import_module)

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
        part = self.parts().get(self.run.algo)
        if not isinstance(part, AlgorithmConfig):
            raise ConfigError(f"--algo {self.run.algo}: it learns on policy, without replay; use --mode hts or serial")
        return part

    @property
    def on_policy(self) -> OnPolicyConfig | None:
        """The part of the chosen on-policy algorithm; None where it learns off policy."""
        part = self.parts().get(self.run.algo)
        return part if isinstance(part, OnPolicyConfig) else None


PARTS: dict[str, type[Part]] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if isinstance(hint, type)
}
FLAG_OF: dict[str, str] = {
    f"{part}.{item.name}": item.metadata["flag"]
    for part, kind in PARTS.items() for item in dataclasses.fields(kind) if item.metadata["flag"]
}
"""part.field -> flag; any other field is reached by --set part.field=value. One flag may set a field of several parts:
``--samplers`` means samplers for replay and for rollouts, of which a run has one kind."""


def field_of(key: str, config: Config | None = None) -> dataclasses.Field[Any]:
    """The field of a setting that is called ``part.field``; ``config`` knows an imported algorithm's part."""
    part, name = key.split(".")
    found: dict[str, dataclasses.Field[Any]] = _class_of(part, config).__dataclass_fields__
    return found[name]


def kind_of(key: str, config: Config | None = None) -> type:
    """int, float, bool, str or tuple: what a setting holds where it is set."""
    part, name = key.split(".")
    hint = typing.get_type_hints(_class_of(part, config))[name]
    kind: type = typing.get_origin(_set_type(hint)) or _set_type(hint)
    return kind


def _class_of(part: str, config: Config | None) -> type[Part]:
    return PARTS[part] if config is None else type(config.parts()[part])


_ONLY_WITH_REPLAY: tuple[str, ...] = (
    "replay", "sampling.samplers", "sampling.envs_per_sampler", "sampling.memory_limit_bytes", "learner.batch_size",
    "learner.precision", "learner.overlap", "learner.mirror", "learner.updates_per_launch",
    "learner.fuse",
)
_ONLY_ON_POLICY: tuple[str, ...] = ("rollout",)
_ALWAYS = ("env.normalize_obs", "image", "sampling", "learner", "evaluation", "visualizer", "tuning", "logging")


def offered(config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The settings that make a difference to the chosen mode and algorithm: what the tuner chooses, and the others.

    What names the run, its task and its end is not among them.
    """
    algo, on_policy = config.run.algo, config.on_policy is not None
    own, other = (_ONLY_ON_POLICY, _ONLY_WITH_REPLAY) if on_policy else (_ONLY_WITH_REPLAY, _ONLY_ON_POLICY)
    other += () if config.wiring.inference_workers else ("rollout.inference_workers",)
    own += ("gala",) if config.wiring.mixes else ()
    other += () if config.wiring.averages else ("learner.average_interval",)
    own += ("exchange",) if config.wiring.averages or config.wiring.mixes else ()
    other += ("exchange.join", "exchange.secret_file")  # of the command line
    keys = [f"{name}.{item.name}" for name, part in config.parts().items() for item in dataclasses.fields(part)]
    named = (knob.replace("algorithm.", f"{algo}.") for knob in config.wiring.knobs)
    knobs = tuple(knob for knob in named if knob in keys)
    read = [key for among in ((algo,), own, _ALWAYS) for key in keys
            if {key, key.partition(".")[0]} & {*among} and not {key, key.partition(".")[0]} & {*other}]
    return knobs, tuple(key for key in dict.fromkeys(read) if key not in knobs)


def algorithm_part(name: str, import_module: str | None = None) -> type[Any]:
    """The class of an algorithm's part; ``import_module`` as for ``algorithms.rows``.

    Raises:
        ConfigError: there is no such algorithm, or the module declares what cannot be its part.
    """
    row = find_row(name, import_module)
    if row.config is None:
        return PARTS[name]
    base = OnPolicyConfig if row.on_policy else AlgorithmConfig
    if name in PARTS or not name.isidentifier() or not issubclass(row.config, base):
        raise ConfigError(f"--import {import_module}: algorithm {name!r} with settings {row.config.__name__}: expected "
                          f"a name of its own like my_sac, and a dataclass made from {base.__name__}")
    return row.config


def check_name(name: str) -> str:
    """Rejects a run or profile name that could leave its directory or trouble a file system."""
    reserved = {"con", "prn", "aux", "nul", "latest"}
    if not _NAME.fullmatch(name) or name.split(".")[0].lower() in reserved:
        raise ConfigError(f"name {name[:80]!r}: allowed are up to 128 letters, digits, '.', '_' and '-', beginning "
                          "with a letter or digit, and no reserved name (con, prn, aux, nul, latest)")
    return name
