"""The table of metrics: each number that Spreeze reports is described by one row of ``METRICS``.

A row gives unit, meaning, writer, slot of shared memory, how the metric follows from that slot, its chart on the Live
page, and whether the terminal shows it. A number from an algorithm's ``metrics()`` only needs a row with the writer
``algorithm``; a module of ``--import`` adds rows by ``TABLE.extend``. assets/docs/architecture.md tells the way of a
number from its worker to the page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

SUPERVISOR = "supervisor"
ALGORITHM = "algorithm"
"""Writer of an algorithm's own metrics; its gauges arrive as messages, everything else through slots."""
EVALUATION = "evaluation"
"""Writer of numbers that come with an evaluation's record and are stored at the time of its weights."""
GROUPS = ("Task", "Speed", "Machine", "Balance", "Learning")  # groups of charts on the Live page, from top to bottom
RETURN = "Return"  # the chart of returns, which the page draws separately


class Kind(Enum):
    """Derivation of a metric from the numbers that workers post."""

    GAUGE = "the newest value; of several samplers the mean over those that have finished an episode"
    COUNTER = "the total since the start, the sum over samplers"
    RATE = "increase of a counter in a second, over the latest seconds"
    SHARE = "part of its role's time; the slot holds cumulative seconds"


class Needs(Enum):
    """When a number of the learner is known. Otherwise it is None."""

    NOTHING = "always"
    UPDATES = "once there was an update"
    REPLAY = "once there was an update, of a learner that draws from replay"
    ROLLOUTS = "once there was an update, of a learner that takes whole rollouts"


class Chart(NamedTuple):
    """Chart of a metric on the Live page; rows with the same key share a chart."""

    key: str
    title: str
    group: str
    unit: str = ""  # the unit as shown; empty: the unit of the metric
    scale: float = 1.0  # factor from stored to shown values


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str
    writer: str  # a role, ``supervisor``, ``algorithm`` or ``evaluation``
    kind: Kind = Kind.GAUGE
    slot: str | None = None
    """Its source as ``role.slot``; None: the same name at the writer, or no source if that is the supervisor."""
    per_s_of: str | None = None  # the counter of a rate; None: the supervisor computes the rate in another way
    needs: Needs = Needs.NOTHING
    parts: str = ""
    """The name of one part, if each has its own series, ``name/part``. In a run with several learners, other metrics
    have such series for each group as well."""
    in_terminal: bool = False
    """True if the terminal shows it: as a field of ``Snapshot`` or, without such a field, by its name."""
    chart: Chart | None = None
    cumulative: bool = False  # True if a restarted worker continues from the value in its slot; always so for shares
    label: str = ""  # its name in a box of the Live page's pipeline; empty: ``name`` with spaces
    per_learner: bool = False  # True if terminal and page show it for each of several learners, and for each other host
    return_power: int = 0
    """Power of the unit of returns in its value, such as 2 of a squared error. Algorithms from replay learn returns in
    units of their deviation; the value is multiplied by that to this power, which gives units of the task."""

    @property
    def box_label(self) -> str:
        return self.label or self.name.replace("_", " ")

    @property
    def box_unit(self) -> str:
        """The unit behind its value in such a box, unless the label says it or it has none."""
        unit = "/s" if self.unit == "1/s" else self.unit
        return "" if unit in ("ratio", "share", "norm", "B") or unit in self.box_label else unit

    @property
    def source(self) -> tuple[str, str] | None:
        """The (role, slot) of its source, or None."""
        if self.slot is not None:
            return _address(self.slot)
        role = "learner" if self.writer == ALGORITHM else self.writer
        return None if role in (SUPERVISOR, EVALUATION) else (role, self.name)

    @property
    def is_evaluated(self) -> bool:
        """True if it comes with evaluations, so that its values carry the earlier time of the weights."""
        return self.writer in ("evaluator", EVALUATION)

    @property
    def is_sent(self) -> bool:
        """True if it comes in messages instead of a slot: a gauge of an algorithm."""
        return self.writer == ALGORITHM and self.kind is Kind.GAUGE and self.slot is None

    @property
    def known_from(self) -> Needs:
        """``needs``; an algorithm's own metrics are never known before the first update."""
        return Needs.UPDATES if self.writer == ALGORITHM and self.needs is Needs.NOTHING else self.needs

    @property
    def series(self) -> tuple[str, ...]:
        """Its series as a chart names them; ``name/*`` stands for all parts or groups."""
        return (f"{self.name}/*",) if self.parts else (self.name, f"{self.name}/*")

    @property
    def sentence(self) -> str:
        return f"{self.meaning[0].upper()}{self.meaning[1:]} [{self.unit}]."


class InternalSlot(NamedTuple):
    """A number that a worker posts for other processes only, and that is not recorded."""

    slot: str  # ``role.slot``
    unit: str
    meaning: str
    cumulative: bool = False  # as in ``Metric``


# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric("env_steps", "env steps", "env steps since the start of the run, over all samplers; replay does not keep all of those while the tuner measures", "supervisor",
           kind=Kind.COUNTER, slot="sampler.env_steps", cumulative=True),
    Metric("env_steps_per_s", "1/s", "env steps per second, over all samplers", "supervisor", kind=Kind.RATE,
           per_s_of="env_steps", in_terminal=True, chart=Chart("env", "Env steps/s", "Speed"), label="env steps",
           per_learner=True),
    Metric("sampler_env_steps_per_s", "1/s", "env steps per second of one sampler (one series each)", "supervisor",
           kind=Kind.RATE, parts="sampler"),
    Metric("updates", "updates", "gradient steps of the critics since the start of the run, without those that a killed learner lost", "learner",
           kind=Kind.COUNTER),
    Metric("updates_per_s", "1/s", "gradient steps of the critics per second", "supervisor", kind=Kind.RATE,
           per_s_of="updates", in_terminal=True, chart=Chart("updates", "Updates/s", "Speed"), label="updates",
           per_learner=True),
    Metric("update_frames_per_s", "1/s", "updates per second times batch size (as in the Spreeze paper)",
           "supervisor", kind=Kind.RATE, in_terminal=True, chart=Chart("frames", "Update frames/s", "Speed"),
           label="update frames"),
    Metric("samples_per_insert", "ratio", "transitions drawn / transitions inserted since the learner started or the tuner last changed settings; steps that replay does not keep count as none", "supervisor",
           in_terminal=True, chart=Chart("ratio", "Samples per insert", "Balance"), label="samples per insert on average"),
    Metric("samples_per_insert_now", "ratio", "transitions drawn / transitions inserted in the last seconds (tianji)",
           "supervisor", in_terminal=True, chart=Chart("ratio", "Samples per insert", "Balance"), label="samples per insert"),
    Metric("staleness", "ratio", "rows of a batch / rows in replay (tianji; Eq. 2 of the paper)", "supervisor",
           in_terminal=True),
    Metric("success_rate", "share", "successes (info['is_success']) among the samplers' latest 100 episodes",
           "supervisor", in_terminal=True, chart=Chart("success", "Success rate", "Task", "%", 100.0)),
    Metric("eval_success_rate", "share", "successes (info['is_success']) among the episodes of the newest evaluation",
           "evaluation", in_terminal=True, chart=Chart("success", "Success rate", "Task", "%", 100.0)),
    Metric("info", "value", "mean of a number in the environment's info: over env steps of the latest second, or, "
           "of one that comes only at an episode's end, over the latest 100 episodes (one series for each)",
           "supervisor", parts="number", chart=Chart("info", "Numbers in info", "Task")),
    Metric("callback", "value", "number that a callback logs (one series for each)", "supervisor", parts="number",
           chart=Chart("callback", "Numbers of callbacks", "Task")),
    Metric("policy_lag", "updates",
           "mean age in updates of the policies that collected the drawn transitions; PPO and A2C: rollouts between the "
           "policy that collected and the one that learns; IMPACT: updates between these", "learner",
           needs=Needs.UPDATES, in_terminal=True, chart=Chart("lag", "Policy lag", "Balance")),
    Metric("transition_age", "env steps", "mean age of drawn transitions in env steps", "learner", needs=Needs.REPLAY,
           in_terminal=True, chart=Chart("age", "Transition age", "Balance")),
    Metric("rollout_uses", "uses", "mean number of earlier uses of the rollouts in recent updates (impact)", "learner",
           needs=Needs.ROLLOUTS, in_terminal=True, chart=Chart("uses", "Uses per rollout", "Balance"), label="uses"),
    Metric("rollouts_dropped", "rollouts", "rollouts overwritten before their first use (impact)", "learner",
           kind=Kind.COUNTER, needs=Needs.ROLLOUTS, in_terminal=True, label="dropped"),
    Metric("gossip_radius", "norm", "norm of the learners' parameters minus their mean, over all learners (gala)",
           "algorithm", in_terminal=True, chart=Chart("radius", "Distance from the mean", "Balance"),
           label="distance from the mean"),
    Metric("gossip_bound_1", "norm",
           "bound of that distance by Proposition 1 of GALA, for mixing at every update (gala)", "algorithm",
           chart=Chart("radius", "Distance from the mean", "Balance")),
    Metric("gossip_bound_2", "norm", "bound of that distance by Proposition 2, for the delays so far, with worst-case constants (gala)",
           "algorithm", chart=Chart("worst_radius", "Bound for any delay", "Balance")),
    Metric("gossip_staleness", "rollouts",
           "rollouts since the last message of the neighbour that has been silent longest (gala)", "algorithm", in_terminal=True,
           chart=Chart("stale", "Gossip staleness", "Balance"), label="staleness", per_learner=True),
    Metric("gossip_messages", "messages", "messages that a learner averages per update (gala)",
           "algorithm", chart=Chart("messages", "Messages per update", "Balance")),
    Metric("learners_best", "return", "mean return of recent episodes of the best learner (gala)",
           "algorithm", chart=Chart("learners", "Learners' returns", "Learning")),
    Metric("learners_spread", "return", "difference between the best and the worst learner's mean return (gala)", "algorithm",
           in_terminal=True, chart=Chart("learners", "Learners' returns", "Learning"), label="spread of returns"),
    Metric("replay_fill", "share", "rows that can be drawn / capacity of replay; those about to be overwritten cannot",
           "learner", needs=Needs.REPLAY, in_terminal=True, label="fill"),
    Metric("rows_redrawn", "rows", "rows redrawn because they were overwritten while being copied", "learner",
           kind=Kind.COUNTER, needs=Needs.REPLAY, cumulative=True),
    Metric("transitions_rejected", "rows", "transitions rejected because of a non-finite value or wrong shape", "sampler",
           kind=Kind.COUNTER, cumulative=True),
    Metric("env_errors", "errors", "exceptions raised by environments", "sampler", kind=Kind.COUNTER, cumulative=True),
    Metric("episodes", "episodes", "episodes finished by the samplers", "sampler", kind=Kind.COUNTER, cumulative=True),
    Metric("episode_return", "return", "undiscounted return of the samplers' recent episodes (exploring policy)", "sampler",
           in_terminal=True, chart=Chart("return", "Return", RETURN)),
    Metric("episode_length", "env steps", "length of the samplers' recent episodes", "sampler",
           chart=Chart("length", "Episode length", "Task")),
    Metric("eval_return", "return", "mean undiscounted return of greedy evaluation episodes", "evaluator",
           in_terminal=True, chart=Chart("return", "Return", RETURN), per_learner=True, label="greedy return"),
    Metric("eval_length", "env steps", "mean length of these episodes", "evaluator",
           chart=Chart("length", "Episode length", "Task")),
    Metric("eval_terminated", "share", "evaluation episodes that terminated; the others ended by their time limit",
           "evaluation", chart=Chart("terminated", "Terminated episodes", "Task", "%", 100.0)),
    Metric("eval_actions_at_bound", "share",
           "numbers of continuous actions within 1 % of their range at a bound, over the evaluation's env steps",
           "evaluation", chart=Chart("at_bound", "Actions at their bounds", "Learning", "%", 100.0)),
    Metric("eval_start_value", "return",
           "value of the first env step by the critic (the first of two) or the value function, mean over the evaluation's episodes; with SAC it includes rewards of entropy",
           "evaluation", chart=Chart("start_value", "Value at the start", "Learning")),
    Metric("eval_discounted_return", "return",
           "discounted return from that step on, which the value estimates; where the time limit cut the episode, the value of its last env step stands for the rest",
           "evaluation", chart=Chart("start_value", "Value at the start", "Learning")),
    Metric("policy_version", "updates", "number of updates at the latest publication of the weights", "learner"),
    Metric("samplers_active", "samplers",
           "samplers that the CPU governor keeps running; for a fraction one runs part of the time", "supervisor", in_terminal=True,
           label="active"),
    Metric("external_cpu_cores", "cores", "usable cores that other programs use, the page and its browser among them", "supervisor", in_terminal=True),
    Metric("sibling_cpu_cores", "cores", "usable cores that the page, your other runs and programs of low priority use", "supervisor"),
    Metric("sampler_policy_share", "share", "sampler time spent in policy inference", "supervisor", kind=Kind.SHARE,
           slot="sampler.policy_s"),
    Metric("sampler_env_share", "share", "sampler time spent in the environments", "supervisor", kind=Kind.SHARE,
           slot="sampler.env_s"),
    Metric("sampler_write_share", "share", "sampler time spent writing rows", "supervisor", kind=Kind.SHARE,
           slot="sampler.write_s"),
    Metric("sampler_wait_share", "share", "sampler time spent waiting for the limiter", "supervisor", kind=Kind.SHARE,
           slot="sampler.wait_s"),
    Metric("inference_rows_per_batch", "rows", "mean batch size of an inference worker (hts)", "supervisor"),
    Metric("inference_policy_share", "share", "inference worker time spent in inference (hts)", "supervisor",
           kind=Kind.SHARE, slot="inference.policy_s"),
    Metric("inference_wait_share", "share", "inference worker time spent waiting for requests (hts)",
           "supervisor", kind=Kind.SHARE, slot="inference.wait_s"),
    Metric("learner_wait_share", "share", "learner time spent waiting for data or the limiter", "supervisor",
           kind=Kind.SHARE, slot="learner.wait_s"),
    Metric("learner_gather_share", "share", "learner time spent gathering batches", "supervisor", kind=Kind.SHARE,
           slot="learner.gather_s", needs=Needs.REPLAY),
    Metric("learner_critic_share", "share", "learner time spent in critic steps", "supervisor", kind=Kind.SHARE,
           slot="learner.critic_s", needs=Needs.REPLAY),
    Metric("learner_actor_share", "share", "learner time spent in actor steps", "supervisor", kind=Kind.SHARE,
           slot="learner.actor_s", needs=Needs.REPLAY),
    Metric("learner_learn_share", "share", "learner time spent learning from rollouts (PPO, A2C)", "supervisor",
           kind=Kind.SHARE, slot="learner.learn_s", needs=Needs.ROLLOUTS),
    Metric("learner_publish_share", "share", "learner time spent publishing weights and checkpoints", "supervisor",
           kind=Kind.SHARE, slot="learner.publish_s"),
    Metric("critic_loss", "loss", "mean squared temporal-difference error of the critics", "algorithm",
           chart=Chart("critic", "Critic loss", "Learning"), return_power=2),
    Metric("actor_loss", "loss", "loss of the actor", "algorithm",
           chart=Chart("actor", "Actor loss", "Learning"), return_power=1),
    Metric("q_mean", "return", "mean Q-value over the batch", "algorithm",
           chart=Chart("q", "Mean Q-value", "Learning"), return_power=1),
    Metric("return_scale", "return",
           "running standard deviation of discounted returns, by which rewards are divided", "algorithm",
           chart=Chart("return_scale", "Reward scale", "Learning")),
    Metric("rollbacks", "times",
           "times that the learner rolled back to its best checkpoint after a fall, each with half the learning rates",
           "algorithm", chart=Chart("rollbacks", "Rollbacks", "Learning")),
    Metric("alpha", "ratio", "entropy coefficient (SAC)", "algorithm",
           chart=Chart("alpha", "Entropy coefficient", "Learning")),
    Metric("alpha_numbers", "ratio", "entropy coefficient of the numbers beside a choice (SAC); alpha is the choice's",
           "algorithm", chart=Chart("alpha", "Entropy coefficient", "Learning")),
    Metric("entropy", "nat",
           "mean negative log-probability of sampled actions (SAC); entropy of the policy (PPO, A2C)", "algorithm",
           chart=Chart("entropy", "Entropy", "Learning")),
    Metric("policy_loss", "loss", "policy loss of the latest minibatch (PPO, A2C)", "algorithm",
           chart=Chart("policy_loss", "Policy loss", "Learning")),
    Metric("value_loss", "loss", "value loss of the latest minibatch: half the mean squared error (PPO, A2C)",
           "algorithm", chart=Chart("value_loss", "Value loss", "Learning")),
    Metric("explained_variance", "share",
           "1 - Var(return - value) / Var(return) of the latest rollout", "algorithm",
           chart=Chart("variance", "Explained variance", "Learning")),
    Metric("approx_kl", "nat", "estimated KL divergence: mean of r - 1 - log r over the ratios r of the latest minibatch; with PPO and A2C from the collecting policy", "algorithm",
           chart=Chart("kl", "KL divergence per update", "Learning")),
    Metric("learning_rate", "ratio", "learning rate of the latest update (PPO, A2C)", "algorithm",
           chart=Chart("rate", "Learning rate", "Learning")),
    Metric("clip_share", "share", "share of clipped probability ratios in the latest minibatch", "algorithm",
           chart=Chart("clipped", "Clipped ratios", "Learning", "%", 100.0)),
    Metric("target_divergence", "nat", "KL divergence of the policy from the target policy, latest rollout (IMPACT)",
           "algorithm", chart=Chart("target_divergence", "KL divergence from the target", "Learning")),
    Metric("kl_coef", "ratio", "weight of the KL divergence from the target policy in the loss (IMPACT)", "algorithm",
           chart=Chart("kl_coef", "KL coefficient (IMPACT)", "Learning")),
    Metric("target_updates", "copies", "target network updates since the start of the run (IMPACT)", "algorithm",
           in_terminal=True, chart=Chart("target_updates", "Target updates", "Learning"), label="target copies"),
    Metric("grad_norm", "norm", "norm of the latest gradient before clipping (PPO, A2C)",
           "algorithm", chart=Chart("grad", "Gradient norm before clipping", "Learning")),
    Metric("critic_grad_norm", "norm", "gradient norm of the critics", "algorithm",
           chart=Chart("critic_grad", "Critic gradient norm", "Learning")),
    Metric("actor_grad_norm", "norm", "gradient norm of the actor", "algorithm",
           chart=Chart("actor_grad", "Actor gradient norm", "Learning")),
    Metric("update_size", "ratio",
           "norm of what the latest update changed / norm of the parameters, the largest of the optimizers",
           "algorithm", chart=Chart("update_size", "Size of an update", "Learning")),
    Metric("dead_units", "share",
           "hidden ReLU units that are 0 in all rows of the newest batch (of at most 512), over actor and critics",
           "algorithm", chart=Chart("dead_units", "Dead units", "Learning", "%", 100.0)),
    Metric("updates_skipped", "updates", "updates skipped because loss or gradient was not finite", "learner",
           kind=Kind.COUNTER, needs=Needs.UPDATES),
    Metric("cpu_core_use", "share", "utilisation of one CPU core (one series each)", "supervisor", parts="core"),
    Metric("cpu_use", "share", "mean utilisation of the usable cores", "supervisor", in_terminal=True,
           chart=Chart("cpu", "CPU utilisation", "Machine", "%", 100.0)),
    Metric("memory_used_bytes", "B", "memory in use on the machine", "supervisor", in_terminal=True,
           chart=Chart("memory", "Memory in use", "Machine", "GiB", 2.0**-30)),
    Metric("process_cpu_use", "cores", "CPU time per second of one process (one series each)", "supervisor",
           parts="process"),
    Metric("process_memory_bytes", "B", "resident memory of one process (one series each)", "supervisor",
           parts="process"),
    Metric("gpu_use", "share", "share of the time with a kernel running (one series per GPU)", "supervisor", parts="GPU",
           chart=Chart("gpu", "GPU use", "Machine", "%", 100.0)),
    Metric("gpu_power_w", "W", "power drawn by one GPU", "supervisor", parts="GPU",
           chart=Chart("power", "GPU power", "Machine")),
    Metric("gpu_memory_used_bytes", "B", "memory in use on one GPU", "supervisor", parts="GPU",
           chart=Chart("vram", "GPU memory in use", "Machine", "GiB", 2.0**-30)),
    Metric("gpu_clock_hz", "Hz", "clock of one GPU's multiprocessors", "supervisor", parts="GPU",
           chart=Chart("clock", "GPU clock", "Machine", "GHz", 1e-9)),
    Metric("gpu_memory_bytes", "B", "memory of one GPU", "supervisor", parts="GPU"),
    Metric("gpu_power_limit_w", "W", "power that one GPU may draw", "supervisor", parts="GPU"),
    Metric("gpu_clock_max_hz", "Hz", "highest clock of one GPU's multiprocessors", "supervisor", parts="GPU"),
    Metric("energy_j", "J", "energy used in this session by CPU packages (RAPL) and GPUs (NVML), including other programs; none without such counters", "supervisor", kind=Kind.COUNTER),
    Metric("energy_per_million_steps_kj", "kJ", "energy used per million env steps", "supervisor",
           chart=Chart("energy", "Energy per million env steps", "Machine")),
    Metric("disk_write_bytes_per_s", "B/s", "bytes written to disk per second by the processes of this run", "supervisor",
           kind=Kind.RATE),
    Metric("hosts_alive", "hosts", "other hosts that deliver transitions (--cluster)", "supervisor", in_terminal=True,
           chart=Chart("hosts_alive", "Other hosts", "Speed")),
    Metric("host_env_steps_per_s", "1/s", "env steps per second of one other host (one series each)", "supervisor",
           kind=Kind.RATE, parts="host", chart=Chart("host_rate", "Env steps/s by host", "Speed"), per_learner=True),
    Metric("host_lag", "updates", "updates by which a host's policy lags behind the newest one", "host", slot="host.lag",
           parts="host", chart=Chart("host_lag", "Policy lag, by host", "Balance"), per_learner=True),
    Metric("host_weights_delay_s", "s", "delay between publishing weights and a host using them", "host",
           slot="host.weights_delay_s", parts="host", chart=Chart("host_delay", "Weight delay by host", "Balance")),
    Metric("host_chunks", "chunks", "chunks of rows received from a host", "host", kind=Kind.COUNTER,
           slot="host.chunks", parts="host"),
    Metric("host_chunks_lost", "chunks", "chunks lost in transit because a host or its connection failed",
           "host", kind=Kind.COUNTER, slot="host.chunks_lost", parts="host",
           chart=Chart("host_lost", "Chunks lost, by host", "Speed"), per_learner=True),
    Metric("host_rows_lost", "rows", "rows lost, by gaps in the sequence numbers", "host", kind=Kind.COUNTER,
           slot="host.rows_lost", parts="host"),
    Metric("host_rows_again", "rows", "duplicate or late rows, which were not stored", "host",
           kind=Kind.COUNTER, slot="host.rows_again", parts="host"),
    Metric("host_clock_difference_s", "s", "clock difference to a host, up to half a round trip", "host",
           slot="host.clock_difference_s", parts="host"),
    Metric("host_round_trip_s", "s", "round trip time of a message to a host", "host", slot="host.round_trip_s",
           parts="host"),
    Metric("restarts", "restarts", "restarts of worker processes in this session", "supervisor", kind=Kind.COUNTER),
)

POSTED: tuple[InternalSlot, ...] = (
    InternalSlot("sampler.policy_version", "updates", "version of the policy that this sampler uses"),
    InternalSlot("sampler.returns", "returns", "discounted returns, whose standard deviation divides the rewards", cumulative=True),
    InternalSlot("sampler.returns_sum", "return", "sum of the discounted returns", cumulative=True),
    InternalSlot("sampler.returns_square_sum", "return^2", "sum of the squares of the discounted returns", cumulative=True),
    InternalSlot("learner.checkpoint_updates", "updates", "updates in the newest checkpoint"),
    InternalSlot("learner.batch_size", "transitions", "batch size now; the learner halves it where a device has too little memory"),
    InternalSlot("learner.checkpoint_left_bytes", "B", "of a checkpoint that is being written: what is left to write and check"),
    InternalSlot("inference.rows", "rows", "observations that this inference worker has answered", cumulative=True),
    InternalSlot("inference.batches", "batches", "forward passes for all observations", cumulative=True),
    InternalSlot("inference.policy_version", "rollouts", "rollout of the policy that it infers with"),
    InternalSlot("evaluator.evaluations", "evaluations", "evaluations done"),
    InternalSlot("evaluator.policy_version", "updates", "version of the policy that was evaluated last"),
    InternalSlot("evaluator.env_steps", "env steps", "env steps of the run when the evaluated policy was published"),
    InternalSlot("visualizer.frames", "frames", "pictures drawn"),
    InternalSlot("visualizer.clips", "clips", "clips recorded"),
    InternalSlot("visualizer.policy_version", "updates", "version of the policy that is shown"),
    InternalSlot("host.rows_arrived", "rows", "rows of a host that were stored"),
    InternalSlot("host.pulls", "pulls", "chunks requested and not received yet"),
    InternalSlot("host.seen", "flag", "1 once there was such a host"),
    InternalSlot("host.alive", "flag", "1 while it answers and gives rows"),
    InternalSlot("visualizer.paused", "flag", "1 while it is paused"),
)
# fmt: on


class MetricTable:
    """The rows by name, and the slots and time splits that follow from them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Raises a ValueError if two rows have the same name."""
        self.metrics = tuple(metrics)
        self._by_name = {metric.name: metric for metric in self.metrics}
        if len(self._by_name) < len(self.metrics):
            names = [metric.name for metric in self.metrics]
            raise ValueError(f"two metrics are called {max(names, key=names.count)}; a metric is one row")
        slots: dict[str, dict[str, None]] = defaultdict(dict)
        sources = [metric.source for metric in self.metrics if not metric.is_sent]
        for role, slot in [source for source in sources if source] + [_address(row.slot) for row in POSTED]:
            slots[role][slot] = None
        slots["host"] = {**slots["sampler"], **slots["host"]}  # the sums over its samplers, then its own
        self.slots = {role: tuple(names) for role, names in slots.items()}
        """role -> names of its float64 slots, in order, if it has any. Times (in seconds) and counts are cumulative."""

    def extend(self, metrics: Iterable[Metric]) -> None:
        """Adds rows of an imported module; a ValueError if another row has the name. Slots keep their indices."""
        more = MetricTable((*self.metrics, *(row for row in metrics if row not in self.metrics)))
        self.metrics, self._by_name = more.metrics, more._by_name
        for role, slots in more.slots.items():
            self.slots[role] = tuple(dict.fromkeys((*self.slots.get(role, ()), *slots)))

    def cumulative(self, role: str) -> tuple[str, ...]:
        """The slots of a role in which a restarted worker continues from its predecessor's values."""
        resumed = [metric for metric in self.metrics if metric.cumulative or metric.kind is Kind.SHARE]
        sources = [metric.source for metric in resumed if not metric.is_sent]
        sources += [_address(row.slot) for row in POSTED if row.cumulative]
        return tuple(dict.fromkeys(source[1] for source in sources if source and source[0] == role))

    def by_name(self, name: str) -> Metric:
        """The metric of a series ``name`` or ``name/part``; a KeyError if there is none."""
        return self._by_name[name.split("/", 1)[0]]

    def get(self, name: str) -> Metric | None:
        return self._by_name.get(name)

    def of(self, role: str, *kinds: Kind) -> list[tuple[Metric, str]]:
        """The metrics of these kinds that come from slots of a role, each with its slot."""
        sources = [(metric, metric.source) for metric in self.metrics if metric.kind in kinds and not metric.is_sent]
        return [(metric, source[1]) for metric, source in sources if source and source[0] == role]

    def splits(self, role: str, *, on_policy: bool = False) -> list[tuple[Metric, str]]:
        """The shares of a role's time, each with the slot of its seconds; ``on_policy``: of a learner from rollouts."""
        other = Needs.REPLAY if on_policy else Needs.ROLLOUTS
        return [row for row in self.of(role, Kind.SHARE) if row[0].needs is not other]


def _address(slot: str) -> tuple[str, str]:
    role, _, name = slot.partition(".")
    return role, name


TABLE = MetricTable(METRICS)
SLOTS = TABLE.slots
by_name = TABLE.by_name
