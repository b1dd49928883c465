"""The on-policy half of the tuner: executors, environments, actors and interval, by env steps a second.

How fast data is collected and learned is tuned, what is learned is not: an interval keeps about its rows and
exactly its minibatches, so more environments mean fewer steps of each. One knob after the other is varied around
the best setting so far, with the whole group running: executors, actors, environments, then executors again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spreeze.errors import ConfigError, WorkerError
from spreeze.metrics.repeats import median, spread
from spreeze.tuner.problem import SCHEMA, Choice

TIE = 0.03
"""Rates this near to the best one count as equal to it."""
SHORTEST_INTERVAL = 16
"""Env steps of an interval at least: shorter ones cut returns short and swap too often."""
_ROWS_OFF = 0.25
"""An interval's rows may differ from the configured ones by this share, where they do not divide."""
_STAGES = ("executors", "actors", "envs_per_executor", "executors")
_HEADROOM = 0.9
FORMULA = "env steps/s with everything running; rows and minibatches of an interval as configured"


@dataclass(frozen=True, kw_only=True, order=True)
class RolloutSetting:
    """One way to collect and learn at the same time."""

    executors: int
    envs_per_executor: int
    actors: int
    sync_interval: int
    minibatches: int

    @property
    def envs(self) -> int:
        """Environments in all."""
        return self.executors * self.envs_per_executor

    @property
    def rows(self) -> int:
        """Transitions of an interval."""
        return self.envs * self.sync_interval


@dataclass(frozen=True, kw_only=True)
class RolloutRate:
    """What one setting reached; no repeat where it failed."""

    setting: RolloutSetting
    env_steps_per_s: tuple[float, ...] = ()
    cpu_share: tuple[float, ...] = ()
    """Share of the usable cores that all of it kept busy, each repeat."""
    memory_bytes: int | None = None
    failure: str | None = None

    @property
    def median(self) -> float:
        """Median env steps a second; 0 for a failed candidate."""
        return median(self.env_steps_per_s)

    def as_json(self) -> dict[str, Any]:
        """A dictionary of plain values, also a line of ``tune-progress.jsonl``."""
        return {"stage": "rollout", **dataclasses.asdict(self.setting), "env_steps_per_s": list(self.env_steps_per_s),
                "cpu_share": list(self.cpu_share), "memory_bytes": self.memory_bytes, "failure": self.failure}

    def line(self) -> str:
        """One line for a terminal."""
        one = self.setting
        where = (f"{one.executors} executors x {one.envs_per_executor}, {one.actors} actors, interval "
                 f"{one.sync_interval}, {one.minibatches} minibatches")
        if self.failure:
            return f"  {where}: {self.failure}"
        noise = spread(self.env_steps_per_s)
        return f"  {where}: {self.median:8.0f} env steps/s" + (f" (+-{50 * noise:.0f} %)" if noise is not None else "")


@dataclass(frozen=True, kw_only=True)
class RolloutProblem:
    """Facts, what is configured, and which of it the user has set."""

    cores: float
    """Cores that may be used."""
    memory_bytes: int
    """Main memory that may still be taken."""
    executor_bytes: int
    """An executor process with its first environment."""
    env_bytes: int
    """Each further environment."""
    learner_bytes: int
    configured: RolloutSetting
    """Defaults, profile and the user's values; ties go to it."""
    pins: frozenset[str] = frozenset()
    """Names of the setting's fields that stay as they are."""


class RolloutMeasure(Protocol):
    """The measuring side; like ``autotune.records.Measure``, failures are results."""

    def rollouts(
        self, settings: Sequence[RolloutSetting], *, within_s: float, on_rate: Callable[[RolloutRate], None]
    ) -> list[RolloutRate]:
        """Executors, actors and learner of each setting at work, repeats interleaved."""

    def seconds_left(self) -> float:
        """Seconds of the budget that are left; negative when it is overdrawn."""


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """The choice, its reasons, and everything that was measured."""

    choices: dict[str, Choice]
    """By field of ``RolloutSetting``."""
    rates: tuple[RolloutRate, ...]
    notes: tuple[str, ...] = ()

    def as_json(self, names: dict[str, str]) -> dict[str, Any]:
        """A record as ``TuningView.as_json`` gives it; ``names`` has the setting of each field."""
        choices = {names[field]: choice for field, choice in self.choices.items() if field in names}
        return {
            "schema": SCHEMA, "objective": "rollout", "formula": FORMULA,
            "choice": {name: choice.value for name, choice in choices.items()},
            "reasons": {name: choice.reason for name, choice in choices.items()},
            "pinned": sorted(name for name, choice in choices.items() if choice.pinned),
            "runners_up": {name: [list(one) for one in choice.runners_up] for name, choice in choices.items()},
            "limits": [], "notes": list(self.notes), "update_rates": [], "joint_rates": [],
            "rollout_rates": [rate.as_json() for rate in self.rates],
        }


def tune_rollouts(
    knobs: RolloutProblem, measure: RolloutMeasure, say: Callable[[RolloutRate], None]
) -> RolloutResult:
    """Measures and chooses within the budget; ``say`` is told each rate as it is measured.

    Raises:
        ConfigError: the configured setting itself has no room, or its numbers do not go together.
        WorkerError: nothing could be measured.
    """
    here = fitted(knobs, knobs.configured)
    if here is None:
        raise ConfigError(
            f"{knobs.configured.envs} environments x sync_interval {knobs.configured.sync_interval} and "
            f"{knobs.configured.minibatches} minibatches do not go together, or memory has no room; set fewer of them"
        )
    rates: dict[RolloutSetting, RolloutRate] = {}
    for number, name in enumerate(_STAGES):
        left_s = measure.seconds_left()
        wanted = [one for one in (here, *variations(knobs, here, name)) if one not in rates]
        if wanted and left_s > 0.0:
            for rate in measure.rollouts(wanted, within_s=left_s / (len(_STAGES) - number), on_rate=say):
                rates[rate.setting] = rate
        here = pick(knobs, rates.values()) or here
    if here not in rates or rates[here].failure:
        failures = [f"{rate.failure}" for rate in rates.values() if rate.failure]
        raise WorkerError(f"no setting of the mode could be measured: {(failures or ['no time was left'])[0]}")
    return _answer(knobs, rates, here)


def variations(knobs: RolloutProblem, here: RolloutSetting, name: str) -> list[RolloutSetting]:
    """Settings that differ from ``here`` in one knob, and in the interval that keeps the rows."""
    if name in knobs.pins:
        return []
    cores = max(1, math.floor(knobs.cores + 1e-9))
    envs = here.envs_per_executor
    options = {
        "executors": (cores, cores - 1, cores + 1, 2 * cores, cores // 2), "actors": (0, 1, 2),
        "envs_per_executor": (2 * envs, envs // 2, 4 * envs, 1),
    }[name]
    found = [_halved(knobs, dataclasses.replace(here, **{name: value})) for value in options if value >= 0]
    return list(dict.fromkeys(one for one in found if one is not None and one != here))


def _halved(knobs: RolloutProblem, setting: RolloutSetting) -> RolloutSetting | None:
    """The setting, with fewer environments of each executor where so many would leave an interval too short."""
    found = fitted(knobs, setting)
    while found is None and setting.envs_per_executor > 1 and "envs_per_executor" not in knobs.pins:
        setting = dataclasses.replace(setting, envs_per_executor=setting.envs_per_executor // 2)
        found = fitted(knobs, setting)
    return found


def fitted(knobs: RolloutProblem, setting: RolloutSetting) -> RolloutSetting | None:
    """The setting with the interval that keeps the configured rows; None where none does, or memory has no room."""
    if setting.executors < 1 or setting.envs_per_executor < 1:
        return None
    actors = min(setting.actors, setting.executors)
    if actors != setting.actors and "actors" in knobs.pins:
        return None
    rows, envs = knobs.configured.rows, setting.envs
    interval, minibatches = knobs.configured.sync_interval, knobs.configured.minibatches
    if "sync_interval" not in knobs.pins and envs != knobs.configured.envs:
        step = minibatches // math.gcd(envs, minibatches)
        interval = step * max(1, round(rows / envs / step))
        if interval < SHORTEST_INTERVAL or abs(interval * envs / rows - 1.0) > _ROWS_OFF:
            return None
    if (envs * interval) % minibatches:
        if "minibatches" in knobs.pins:
            return None
        minibatches = max(count for count in range(1, minibatches + 1) if (envs * interval) % count == 0)
    bytes_ = setting.executors * (knobs.executor_bytes + (setting.envs_per_executor - 1) * knobs.env_bytes)
    if bytes_ + knobs.learner_bytes > _HEADROOM * knobs.memory_bytes:
        return None
    return dataclasses.replace(setting, actors=actors, sync_interval=interval, minibatches=minibatches)


def pick(knobs: RolloutProblem, rates: Iterable[RolloutRate]) -> RolloutSetting | None:
    """The fastest setting; within ``TIE`` of it the one nearest to what is configured, then the smallest."""
    found = [rate for rate in rates if rate.failure is None and rate.env_steps_per_s]
    if not found:
        return None
    best = max(rate.median for rate in found)
    return min((rate for rate in found if rate.median >= best * (1.0 - TIE)),
               key=lambda rate: (_distance(knobs.configured, rate.setting), rate.setting)).setting


def _distance(one: RolloutSetting, other: RolloutSetting) -> int:
    """In how many fields two settings differ; the interval follows the others and does not count."""
    return sum(getattr(one, name) != getattr(other, name) for name in ("executors", "envs_per_executor", "actors"))


def _answer(
    knobs: RolloutProblem, rates: dict[RolloutSetting, RolloutRate], here: RolloutSetting
) -> RolloutResult:
    rate = rates[here].median
    words = {
        "executors": f"{here.executors} executors: {rate:.0f} env steps/s",
        "envs_per_executor": f"{here.envs_per_executor} environments of each: {rate:.0f} env steps/s",
        "actors": f"{here.actors} actor processes" + (": executors infer for themselves" if not here.actors else ""),
    }
    choices = {}
    for name, text in words.items():
        runners = _runners(rates, here, name)
        others = ", ".join(f"{value}: {100 * share:.0f} %" for value, share in runners)
        choices[name] = _choice(knobs, name, here, f"{text}; others: {others}" if others else text, runners)
    kept = (f"interval {here.sync_interval}: with {here.envs} environments {here.rows} rows, configured are "
            f"{knobs.configured.rows}")
    choices["sync_interval"] = _choice(knobs, "sync_interval", here, kept)
    same = here.minibatches == knobs.configured.minibatches
    why = "as configured, they change what is learned"
    parts = f"{here.minibatches} minibatches: " + (why if same else "as many as divide the rows")
    choices["minibatches"] = _choice(knobs, "minibatches", here, parts)
    notes = [] if here.rows == knobs.configured.rows else [
        f"an interval has {here.rows} rows in place of {knobs.configured.rows}: learning differs a little"]
    return RolloutResult(choices=choices, rates=tuple(rates.values()), notes=tuple(notes))


def _choice(
    knobs: RolloutProblem, name: str, here: RolloutSetting, reason: str, runners: tuple[tuple[Any, float], ...] = ()
) -> Choice:
    pinned = name in knobs.pins
    return Choice(getattr(here, name), f"{reason} (set by you)" if pinned else reason, pinned=pinned,
                  runners_up=runners)


def _runners(
    rates: dict[RolloutSetting, RolloutRate], here: RolloutSetting, name: str
) -> tuple[tuple[int, float], ...]:
    """Other values of one knob, the other knobs as chosen: (value, rate over that of the choice), best first."""
    others = [one for one in ("executors", "envs_per_executor", "actors") if one != name]
    own = rates[here].median
    near = [rate for rate in rates.values() if rate.setting != here and rate.failure is None
            and all(getattr(rate.setting, one) == getattr(here, one) for one in others)]
    found = [(getattr(rate.setting, name), rate.median / own) for rate in near]
    return tuple(sorted(found, key=lambda one: -one[1]))
