"""Settings of replay, and the balance between its two sides."""

from __future__ import annotations

from dataclasses import dataclass

from spreeze.config.modes import DataFlow
from spreeze.config.section import Section, setting
from spreeze.errors import ConfigError


def uses_replay(data_flow: DataFlow) -> bool:
    """True if learners use replay."""
    return data_flow.lag is None


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Section):
    """Shared-memory replay and the balance between its two sides."""

    read = uses_replay

    capacity: int = setting(
        1_000_000, "capacity of replay", unit="transitions", low=2, high=10**10, flag="--replay-capacity", machine=True
    )
    learning_starts: int = setting(
        5_000, "env steps with uniformly random actions before the first update", unit="env steps", low=0, high=10**9
    )
    samples_per_insert_min: float = setting(
        8.0, "samplers wait while fewer transitions than this were drawn per transition inserted", low=0.0, high=1e6
    )
    samples_per_insert_max: float = setting(
        512.0, "the learner waits while more transitions than this were drawn per inserted one", low=0.0, high=1e9
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
    go_back: bool = setting(
        True,
        "mode spreeze with one learner: once the return has fallen below half of what was gained and stays there, go "
        "back to the checkpoint nearest to the best policy, with half the learning rates",
    )
    her: str = setting(
        "off",
        "hindsight experience replay for goal tasks (arXiv 1707.01495): also store each transition with goals that "
        "its episode achieved later (future), or with the one that it achieved last (final)",
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
        """Rows of replay that come of one env step: its transition, and those with other goals."""
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
