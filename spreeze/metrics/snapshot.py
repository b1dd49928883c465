"""One moment of a run, as views and the bottleneck sentence read it; None is unknown."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class GpuSnapshot:
    """Live figures of one GPU."""

    index: int
    use: float | None = None
    memory_used_bytes: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a run looks like now. Shares are of 1; rates are of the last seconds."""

    env_id: str
    algo: str
    lag: int | None = None
    """On-policy algorithms: intervals between the policy that collects and the one that learns; None: off-policy."""
    state: str = "starting"
    wall_s: float | None = None

    env_steps: int | None = None
    env_steps_per_s: float | None = None
    updates: int | None = None
    updates_per_s: float | None = None
    update_frames_per_s: float | None = None
    learning_starts: int | None = None
    samples_per_insert: float | None = None
    samples_per_insert_min: float | None = None
    samples_per_insert_max: float | None = None
    policy_lag: float | None = None
    transition_age: float | None = None
    replay_fill: float | None = None

    eval_return: float | None = None
    eval_best: float | None = None
    eval_returns: tuple[float, ...] = ()
    """Evaluations so far, oldest first, for the sparkline."""
    episode_return: float | None = None

    cpu_use: float | None = None
    core_uses: tuple[float, ...] = ()
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    gpus: tuple[GpuSnapshot, ...] = ()
    learner_device: str | None = None
    """``cpu`` or ``cuda:N``."""

    sampler_shares: dict[str, float] = field(default_factory=dict)
    """Time split of the samplers: policy, env, write, wait."""
    learner_shares: dict[str, float] = field(default_factory=dict)
    """Time split of the learner: wait, gather, critic, actor, publish."""
    bottleneck: str | None = None

    samplers_alive: int | None = None
    samplers_wanted: int | None = None
    samplers_active: float | None = None
    """How many of them the governor lets work."""
    foreign_cores: float | None = None
    """Usable cores that other programs keep busy."""
    restarts: int = 0
    env_errors: int | None = None
    """Errors and bad transitions of environments so far, each of which cost an episode."""
    progress: float | None = None
    """Share of the nearest stop condition, 0 to 1; None without one."""
    eta_s: float | None = None
    first_error: tuple[str, str] | None = None
    """(process name, text) of the first exception of any child."""
    events: tuple[str, ...] = ()
    """Latest events, oldest first."""

    @property
    def samplers_rest(self) -> bool:
        """True while the governor lets fewer samplers work than there are."""
        if self.samplers_active is None or self.samplers_wanted is None:
            return False
        return self.samplers_active < self.samplers_wanted
