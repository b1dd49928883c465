"""Base classes of the algorithms' settings, and the settings of replay.

Each algorithm has a section of its own, made from one of these, in its own file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from spreeze.config.modes import DataFlow
from spreeze.config.section import NO_LIMIT, Section, setting
from spreeze.errors import ConfigError, first_true
from spreeze.inference.convolution import CNNS
from spreeze.inference.policy import ACTIVATIONS
from spreeze.inference.recurrence import CELLS, state_dim
from spreeze.types import EnvSpec, RowLayout, SequenceShape

_NETWORK = setting(
    "",
    "name of a network of the --import module, in place of what hidden_sizes, activation and layer normalization "
    "describe; empty: none",
    fixed=True,
)
_NORMALIZE_RETURNS = setting(
    True, "divide rewards by the running standard deviation of discounted returns (not with clip_rewards)", fixed=True
)


def average_setting(decay: float) -> float:
    """The setting ``policy_average`` of an off-policy algorithm, with its default."""
    average: float = setting(
        decay,
        "decay per update of an exponential moving average of the policy, which is evaluated, shown and "
        "saved; 0: off; 0.998 averages about 500 updates, early on a tenth of those so far",
        low=0.0,
        high=0.999999,
    )
    return average


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section):
    """Settings of all off-policy algorithms."""

    hidden_sizes: tuple[int, ...] = setting((256, 256), "units of each hidden layer", low=1, high=4096, fixed=True)
    network: str = _NETWORK
    activation: str = setting("relu", "activation of all networks; convolutions: relu", choices=ACTIVATIONS, fixed=True)
    gamma: float = setting(0.99, "discount factor per env step", low=0.0, high=1.0)
    tau: float = setting(0.02, "Polyak coefficient: share of online weights in each target update", low=0.0, high=1.0)
    n_step: int = setting(1, "n of n-step returns", unit="env steps", low=1, high=64)
    weight_decay: float = setting(0.0, "decoupled weight decay (AdamW, arXiv 1711.05101)", low=0.0, high=10.0)
    adam_beta1: float = setting(0.9, "beta1 of Adam: decay of the running mean of gradients", low=0.0, high=0.999999)
    lr_schedule: str = setting(
        "constant",
        "linear or cosine: decay all learning rates to lr_end times their value at the first stop condition; "
        "earlier sessions count",
        choices=("constant", "linear", "cosine"),
    )
    lr_end: float = setting(
        0.1,
        "final learning rate of lr_schedule, as a share of the initial one; 0: learning ends with the schedule",
        low=0.0,
        high=1.0,
    )
    normalize_returns: bool = _NORMALIZE_RETURNS
    policy_average: float = average_setting(0.0)
    explore_average: bool = setting(False, "samplers explore with the averaged policy, too")
    priority_exponent: float = setting(
        0.0,
        "prioritised replay (arXiv 1511.05952): draw transitions in proportion to this power of their latest error, "
        "0.5 to 0.7 as a rule; 0: uniformly",
        low=0.0,
        high=2.0,
    )
    importance_exponent: float = setting(
        0.4,
        "priority_exponent > 0: initial power of the importance weights, which correct for prioritised sampling; it "
        "rises linearly to 1 at the first stop condition",
        low=0.0,
        high=1.0,
    )

    @property
    def sequence(self) -> SequenceShape | None:
        """Sizes of the sequences in replay, on which a recurrent policy is trained; None: replay holds transitions."""
        return None

    def check_task(self, spec: EnvSpec) -> None:
        """Raises a ConfigError if a setting does not fit the task."""
        _check_memory(self, spec)

    def row_layout(self, spec: EnvSpec) -> RowLayout:
        """The layout of replay rows for a task."""
        if self.sequence is None:
            return RowLayout.of(spec, self.n_step)
        return RowLayout(spec.obs_dim, spec.action_dim, sequence=self.sequence)


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(AlgorithmConfig):
    """Settings of the algorithms with an actor."""

    actor_lr: float = setting(1e-3, "learning rate of the actor (Adam)", low=0.0, high=1.0)
    critic_lr: float = setting(1e-3, "learning rate of the critics (Adam)", low=0.0, high=1.0)
    actor_hidden_sizes: tuple[int, ...] = setting(
        (), "units of each hidden layer of the actor; empty: hidden_sizes", low=1, high=4096, fixed=True
    )
    actor_layer_norm: bool = setting(False, "layer normalization in the actor (arXiv 1607.06450)", fixed=True)
    critic_layer_norm: bool = setting(False, "layer normalization in the critics (arXiv 1607.06450)", fixed=True)
    action_penalty: float = setting(
        0.0,
        "weight of the squared pre-tanh actions (of their mean, where actions are sampled): penalises "
        "saturated actions. 1e-3 in the authors' code of arXiv 1801.01290",
        low=0.0,
        high=1e3,
    )
    cnn: str = setting(
        "nature",
        "convolutional layers for images, which actor and critics share; hidden sizes follow",
        choices=tuple(CNNS),
        fixed=True,
    )
    random_shift: int = setting(
        4, "images: largest random shift in a batch (DrQ-v2, arXiv 2107.09645); 0: none", unit="pixels", low=0, high=64
    )

    bc_updates: int = setting(
        0,
        "updates at the start in which the actor only imitates the actions in replay (behavior cloning); samplers "
        "wait meanwhile. For --demonstrations",
        unit="updates",
        low=0,
        high=NO_LIMIT,
    )

    def check_task(self, spec: EnvSpec) -> None:
        super().check_task(spec)
        if spec.box is None and self.action_penalty > 0.0:
            raise ConfigError(f"action_penalty = {self.action_penalty:g}: discrete actions have no tanh; remove it")
        if spec.frames is not None and self.network:
            raise ConfigError(f"network = {self.network!r}: for images set cnn; remove it")
        if spec.choices is not None and self.bc_updates:
            raise ConfigError(f"bc_updates = {self.bc_updates}: only continuous actions are imitated; remove it")

    @property
    def actor_sizes(self) -> tuple[int, ...]:
        """``actor_hidden_sizes``, or ``hidden_sizes``."""
        return self.actor_hidden_sizes or self.hidden_sizes


@dataclass(frozen=True, kw_only=True)
class RecurrentReplayConfig(Section):
    """Settings of the algorithms that train recurrent policies from replay, which then holds sequences (R2D2)."""

    recurrent: str = setting(
        "none",
        "memory of the policy: a recurrent cell between observation and hidden sizes, which actor and critics share "
        "and the critics' loss teaches (R2D2); batch size and replay count env steps. Not for images and action masks",
        choices=("none", *CELLS),
        fixed=True,
    )
    recurrent_size: int = setting(64, "recurrent: units of the cell", unit="units", low=1, high=4096, fixed=True)
    sequence_length: int = setting(
        32,
        "recurrent: env steps of a sequence in replay, the maximum length of backpropagation through time; an update "
        "draws learner.batch_size / sequence_length sequences",
        unit="env steps",
        low=2,
        high=4096,
        fixed=True,
    )
    burn_in: int = setting(
        16,
        "recurrent: env steps replayed before each sequence to refresh the hidden state; 0: use the state that the "
        "sampler stored",
        unit="env steps",
        low=0,
        high=4096,
        fixed=True,
    )

    @property
    def sequence(self) -> SequenceShape | None:
        if self.recurrent == "none":
            return None
        return SequenceShape(self.sequence_length, self.burn_in, state_dim(self.recurrent, self.recurrent_size))


@dataclass(frozen=True, kw_only=True)
class ReturnRange(Section):
    """The grid of returns of categorical critics."""

    v_min: float = setting(
        -10.0,
        "critics = categorical: lowest atom; with normalize_returns in standard deviations of the return",
        low=-NO_LIMIT,
        high=NO_LIMIT,
        fixed=True,
    )
    v_max: float = setting(
        10.0, "critics = categorical: highest atom, in that unit", low=-NO_LIMIT, high=NO_LIMIT, fixed=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v_min >= self.v_max:
            raise ConfigError(
                f"v_min = {self.v_min:g} is not below v_max = {self.v_max:g}; set them to the range of "
                "discounted returns"
            )


@dataclass(frozen=True, kw_only=True)
class DistributionalConfig(ReturnRange, ActorCriticConfig):
    """Settings of the algorithms with two critics, which learn the mean or the distribution of the return."""

    critics: str = setting(
        "twin",
        "what the critics learn: twin: the mean return, with the minimum of two critics; quantile: quantiles "
        "(TQC, arXiv 2005.04269); categorical: probabilities on a grid (C51, arXiv 1707.06887)",
        choices=("twin", "quantile", "categorical"),
        fixed=True,
    )
    quantiles: int = setting(25, "critics = quantile: quantiles per critic", low=1, high=1000, fixed=True)
    drop_quantiles: int = setting(2, "critics = quantile: top quantiles per critic to drop in targets", low=0, high=999)
    atoms: int = setting(101, "critics = categorical: number of atoms", low=2, high=1001, fixed=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_quantiles >= self.quantiles:
            raise ConfigError(
                f"drop_quantiles = {self.drop_quantiles}: none of quantiles = {self.quantiles} would be "
                "left; drop fewer"
            )

    def check_task(self, spec: EnvSpec) -> None:
        super().check_task(spec)
        if spec.choices is not None and self.critics != "twin":
            raise ConfigError(
                f"critics = {self.critics}: with discrete actions the critics give one value for each "
                "action; use critics = twin"
            )


@dataclass(frozen=True, kw_only=True)
class ActionValueConfig(AlgorithmConfig):
    """Settings of the algorithms that take the action of the highest value."""

    hidden_sizes: tuple[int, ...] = setting((128, 128), "units of each hidden layer", low=1, high=4096, fixed=True)
    lr: float = setting(1e-3, "learning rate (Adam)", low=0.0, high=1.0)
    n_step: int = setting(3, "n of n-step returns", unit="env steps", low=1, high=64)
    max_grad_norm: float = setting(10.0, "clip gradients to this norm", low=1e-6, high=NO_LIMIT)
    target_interval: int = setting(
        1, "updates per target update (tau = 1: a copy)", unit="updates", low=1, high=NO_LIMIT
    )
    double: bool = setting(True, "double Q-learning (arXiv 1509.06461)")
    epsilon_start: float = setting(1.0, "initial probability of a random action", low=0.0, high=1.0)
    epsilon_end: float = setting(0.05, "final probability of a random action", low=0.0, high=1.0)
    epsilon_env_steps: int = setting(
        20_000, "env steps over which epsilon decays linearly", unit="env steps", low=0, high=10**12
    )

    def check_task(self, spec: EnvSpec) -> None:
        super().check_task(spec)
        _check_layers(self, spec)


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(Section):
    """Settings of the on-policy algorithms."""

    shortest_rollout: ClassVar[int] = 16
    """Fewest env steps per environment in a rollout whose interval is not set."""

    hidden_sizes: tuple[int, ...] = setting(
        (64, 64), "units of each hidden layer of policy and value network", low=1, high=4096, fixed=True
    )
    network: str = _NETWORK
    activation: str = setting("tanh", "activation of networks; convolutions: relu", choices=ACTIVATIONS, fixed=True)
    layer_norm: bool = setting(False, "LayerNorm in both networks (arXiv 1607.06450); not with images", fixed=True)
    cnn: str = setting("nature", "shared trunk for images; hidden_sizes follow", choices=tuple(CNNS), fixed=True)
    recurrent: str = setting(
        "none",
        "memory of the policy: a recurrent cell between observation and hidden_sizes, which policy and value share; "
        "not for images",
        choices=("none", *CELLS),
        fixed=True,
    )
    recurrent_size: int = setting(64, "recurrent: units of the cell", unit="units", low=1, high=4096, fixed=True)
    sequence_length: int = setting(
        64,
        "recurrent: env steps that a gradient goes back; the nearest length that cuts a rollout into equal sequences",
        unit="env steps",
        low=1,
        high=2**20,
    )
    burn_in: int = setting(
        0,
        "recurrent: env steps replayed before each sequence (at most its length) to refresh the hidden state; 0: use "
        "the state by the parameters before the rollout's first update",
        unit="env steps",
        low=0,
        high=2**20,
    )
    gamma: float = setting(0.99, "discount factor per env step", low=0.0, high=1.0)
    gae_lambda: float = setting(0.95, "lambda of GAE; 1: Monte Carlo returns (arXiv 1506.02438)", low=0.0, high=1.0)
    lr: float = setting(3e-4, "learning rate", low=0.0, high=1.0)
    lr_schedule: str = setting(
        "constant",
        "linear: decay the learning rate to lr_end times its value at stop.env_steps, or at the time limit "
        "(stop.seconds, stop.budget_s) unless stop.updates or stop.target_return may end the run; earlier sessions "
        "count. Time has no effect with learners on several hosts or gala.mixing = all_reduce",
        choices=("linear", "constant"),
    )
    lr_end: float = setting(
        0.1,
        "final learning rate of lr_schedule, as a share of the initial one; 0: learning ends with the schedule",
        low=0.0,
        high=1.0,
    )
    value_coef: float = setting(0.5, "weight of the value loss", low=0.0, high=1e3)
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", low=0.0, high=1e3)
    max_grad_norm: float = setting(
        0.5, "clip gradients to this norm (see separate_grad_norms)", low=1e-6, high=NO_LIMIT
    )
    separate_grad_norms: bool = setting(
        True, "clip the gradients of policy and value network separately (with images they are one network)"
    )
    normalize_advantage: bool = setting(True, "normalize advantages per rollout")
    normalize_returns: bool = _NORMALIZE_RETURNS
    initial_log_std: float = setting(0.0, "initial log standard deviation of actions", low=-20.0, high=2.0)
    policy_average: float = setting(
        0.0,
        "decay per update of an exponential moving average of the policy, which is evaluated, shown and "
        "saved, but does not collect data; 0: off",
        low=0.0,
        high=0.999999,
    )

    @property
    def state_dim(self) -> int:
        """S: values of the policy's state in an episode; 0 without memory."""
        return state_dim(self.recurrent, self.recurrent_size)

    def sequence_of(self, steps: int) -> int:
        """L: the divisor of ``steps`` nearest to ``sequence_length``, by ratio; 1 without memory."""
        if not self.state_dim:
            return 1
        divisor = nearest_divisor(steps, self.sequence_length)
        return min(divisor, steps, key=lambda length: abs(math.log(length / self.sequence_length)))

    def check_task(self, spec: EnvSpec) -> None:
        """Raises a ConfigError if a setting does not fit the task."""
        _check_memory(self, spec)
        _check_layers(self, spec)

    def minibatches_of(self, rows: int, steps: int = 1) -> int:
        """Number of equal minibatches of ``rows`` env steps, ``steps`` of each environment."""
        return 1


def memory_refusal(config: type, spec: EnvSpec) -> str | None:
    """The reason why a policy with settings of this class can have no memory in this environment, or None."""
    reasons = {
        "its policy has no memory": not hasattr(config, "recurrent"),
        "it is not supported with images": spec.frames is not None,
        "with action masks it is supported by on-policy algorithms only": spec.action_mask
        and not issubclass(config, OnPolicyConfig),
    }
    return first_true(reasons)


def _check_layers(config: ActionValueConfig | OnPolicyConfig, spec: EnvSpec) -> None:
    """Rejects, for images, settings of hidden layers that networks for images do not have."""
    if spec.frames is None:
        return
    if config.network:
        raise ConfigError(f"network = {config.network!r}: for images set cnn; remove it")
    for name, only in (("activation", "relu"), ("layer_norm", False)):
        if (value := getattr(config, name, only)) not in (only, getattr(type(config), name, only)):
            raise ConfigError(f"{name} = {value}: networks for images use relu without layer normalization; remove it")


def _check_memory(config: AlgorithmConfig | OnPolicyConfig, spec: EnvSpec) -> None:
    recurrent = getattr(config, "recurrent", "none")
    with_network = f"it cannot be combined with network = {config.network}" if config.network else None
    if recurrent != "none" and (why := memory_refusal(type(config), spec) or with_network):
        raise ConfigError(f"recurrent = {recurrent}: {why}; remove it")


def nearest_divisor(number: int, wanted: float) -> int:
    """The divisor of ``number`` that is nearest to ``wanted``, by ratio."""
    wanted = max(1.0, wanted)
    divisors = (count for count in range(1, min(number, math.ceil(4 * wanted)) + 1) if number % count == 0)
    return min(divisors, key=lambda count: abs(math.log(count / wanted)))


@dataclass(frozen=True, kw_only=True)
class AdamOnPolicyConfig(OnPolicyConfig):
    """Settings of the on-policy algorithms that step with Adam."""

    adam_eps: float = setting(1e-5, "epsilon of Adam", low=1e-12, high=1.0)


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyConfig(AdamOnPolicyConfig):
    """Settings of the algorithms with PPO's clipped objective."""

    clip: float = setting(0.2, "clip range of the probability ratio", low=1e-3, high=10.0)
    target_kl: float | None = setting(
        None,
        "target KL divergence per rollout of an adaptive learning rate of at most lr (SB3 stops the epochs "
        "early instead)",
        unit="nat",
        low=1e-6,
        high=10.0,
    )


@dataclass(frozen=True, kw_only=True)
class AsyncOnPolicyConfig(AdamOnPolicyConfig):
    """Settings of the algorithms of mode impact: the circular buffer C(N, K) and the correction for lag."""

    slots: int = setting(
        4, "rollouts in the buffer of all samplers (N); at least one per sampler", unit="rollouts", low=1, high=65_536
    )
    uses: int = setting(1, "maximum uses of a rollout (K)", low=1, high=65_535)
    minibatches: int = setting(
        1,
        "updates per use. 1: each update takes one rollout, in turn (as in the paper). More: each takes a "
        "minibatch of rows shuffled over all rollouts in use",
        unit="updates",
        low=1,
        high=65_536,
    )
    least_uses: int | None = setting(
        None,
        "a sampler waits until its oldest rollout has been used this often; default: uses / 2; 0: never wait, "
        "and count overwritten rollouts",
        low=0,
        high=65_535,
    )
    rho_bar: float = setting(1.0, "V-trace: bound of the importance weight of a temporal difference", low=0.0, high=1e6)
    c_bar: float = setting(1.0, "V-trace: bound of the importance weights of the trace", low=0.0, high=1e6)
    broadcast_updates: int = setting(
        4, "updates between publications of the weights to samplers (t_frequency)", unit="updates", low=1, high=NO_LIMIT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uses_before_overwrite > self.uses:
            raise ConfigError(
                f"least_uses = {self.least_uses} is above uses = {self.uses}: samplers would wait forever; lower "
                "it, or remove it (default: uses / 2)"
            )

    def minibatches_of(self, rows: int, steps: int = 1) -> int:
        """``minibatches``, independent of the rollout."""
        return self.minibatches

    @property
    def updates_of_buffer(self) -> int:
        """Updates that use up a whole buffer."""
        return self.slots * self.uses * self.minibatches

    @property
    def uses_before_overwrite(self) -> int:
        """``least_uses``, or half of ``uses``."""
        return self.uses // 2 if self.least_uses is None else self.least_uses


def uses_replay(data_flow: DataFlow) -> bool:
    """True if learners use replay."""
    return data_flow.from_replay


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Section):
    """Shared-memory replay and the balance between its two sides."""

    when = uses_replay

    capacity: int = setting(
        1_000_000, "capacity of replay", unit="transitions", low=2, high=10**10, flag="--replay-capacity", machine=True
    )
    learning_starts: int = setting(
        5_000, "env steps with random actions before the first update", unit="env steps", low=0, high=NO_LIMIT
    )
    samples_per_insert_min: float = setting(
        8.0,
        "lower bound of samples per insert (transitions trained on / collected): below it samplers wait",
        unit="ratio",
        low=0.0,
        high=1e6,
    )
    samples_per_insert_max: float = setting(
        512.0, "upper bound of samples per insert: above it the learner waits", unit="ratio", low=0.0, high=NO_LIMIT
    )
    save: bool = setting(False, "save the replay buffer with every checkpoint", flag="--save-replay")
    demonstrations: str = setting(
        "",
        "file with which replay starts: .npz, a Minari data set on disk (HDF5, its directory or its id), or a run with "
        "saved replay (command line only)",
        flag="--demonstrations",
        command_line_only=True,
    )
    offline: bool = setting(False, "learn from --demonstrations alone: no samplers are started", flag="--offline")
    roll_back: bool = setting(
        True,
        "mode spreeze with one learner: once the return has fallen below half of what was gained and stays there, roll "
        "back to the checkpoint nearest to the best policy, with half the learning rates",
    )
    her: str = setting(
        "off",
        "hindsight experience replay for goal tasks (arXiv 1707.01495): also store each transition with goals that "
        "its episode achieved later (future), or with the one that it achieved last (final); where a reward comes "
        "only at a goal, future is the default",
        choices=("off", "future", "final"),
    )
    her_goals: int = setting(4, "her = future: goals of each transition beside its own", unit="goals", low=1, high=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_insert_min > self.samples_per_insert_max:
            raise ConfigError(
                f"samples_per_insert_min = {self.samples_per_insert_min:g} is above "
                f"samples_per_insert_max = {self.samples_per_insert_max:g}: "
                "samplers and learner would deadlock"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of replay per env step: its transition, and those with other goals."""
        return {"off": 1, "final": 2}.get(self.her, 1 + self.her_goals)

    @property
    def samples_per_insert_band(self) -> list[float]:
        """Both bounds."""
        return [self.samples_per_insert_min, self.samples_per_insert_max]

    def serial_ratio(self, batch_size: int) -> float:
        """See ``serial_ratio``; with the bounds of this section."""
        return serial_ratio(batch_size, self.samples_per_insert_min, self.samples_per_insert_max)


def serial_ratio(batch_size: int, low: float, high: float) -> float:
    """Rows drawn for each inserted one in mode serial: one update after each env step, within a band."""
    return min(max(float(batch_size), low), high)
