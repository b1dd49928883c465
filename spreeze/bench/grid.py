"""The exhaustive grid of the tuner's bench, measured beside one setting that all others are compared with.

The speed of a shared machine changes by a third within seconds and minutes. So the comparison is made turn by
turn: each group of a few settings runs in turns with the same reference, and a setting's score is the median of
its ratios to it. The best of so many settings is partly the luckiest: the leaders and what the tuner picked are
measured once more, and only that counts for them.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spreeze.autotune.records import JointRate, JointSetting
from spreeze.autotune.scores import joint_score
from spreeze.errors import SpreezeError
from spreeze.modes.measure import Measuring

_SLOWEST_UPDATE_S = 0.1
"""Larger batches are left out of the grid once an update takes longer."""
_WINDOW_S, _START_S = 4.5, 8.0
"""All windows of one setting, and the start of a group of crews, about."""
_CREWS = 3
"""Crews that take turns with the reference; their start is the dearest part."""
_LEADERS, _FINAL_ROUNDS = 6, 2


@dataclass
class Point:
    """Everything measured at one setting."""

    env_steps_per_s: list[float] = field(default_factory=list)
    updates_per_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Scores over those of the reference in the same turns."""
    final: list[float] = field(default_factory=list)
    """The same, of the rounds among the leaders."""
    failure: str | None = None

    @property
    def score(self) -> float:
        """Median ratio to the reference, of the final rounds if it was in them; 0 where it could not run."""
        ratios = self.final or self.ratios
        return statistics.median(ratios) if ratios else 0.0

    def take(self, rate: JointRate, reference: JointRate, objective: str, *, final: bool) -> None:
        """Takes in a measurement and that of the reference in the same turns."""
        self.env_steps_per_s += rate.env_steps_per_s
        self.updates_per_s += rate.updates_per_s
        self.failure = rate.failure
        pairs = zip(_scores(rate, objective), _scores(reference, objective), strict=False)
        found = self.final if final else self.ratios
        found += [own / other for own, other in pairs if other > 0.0]


def _scores(rate: JointRate, objective: str) -> list[float]:
    batch = rate.setting.learner.batch_size
    return [joint_score(objective, batch, updates, steps)
            for updates, steps in zip(rate.updates_per_s, rate.env_steps_per_s, strict=True)]


def measure_grid(
    settings: Sequence[JointSetting], picks: Sequence[JointSetting], rounds: int, objective: str,
    open_measuring: Callable[[float], Measuring], say: Callable[[str], None],
) -> dict[JointSetting, Point]:
    """Every setting ``rounds`` times, in groups that change from round to round, then the leaders again.

    Args:
        settings: to measure; those of one crew (all but the number of samplers equal) stay together.
        picks: the tuner's; the most frequent one is the reference, which runs in every group.
        rounds: over the whole grid.
        objective: whose score is compared.
        open_measuring: opens the measuring for that many seconds.
        say: told of each round.

    Raises:
        SpreezeError: the reference could not be measured.
    """
    reference = statistics.mode(picks)
    points = {setting: Point() for setting in dict.fromkeys([reference, *picks, *settings])}
    points[reference].ratios.append(1.0)
    points[reference].final.append(1.0)
    grid = _Grid(points, reference, objective, open_measuring)
    dice = random.Random(0)
    for number in range(rounds):
        crews = _crews([one for one in points if one != reference and not _too_slow(one, points)])
        dice.shuffle(crews)
        grid.measure(crews, final=False)
        say(f"  grid: round {number + 1} of {rounds}, {sum(map(len, crews)) + 1} settings")
    others = sorted(set(points) - {reference}, key=lambda one: -points[one].score)
    leaders = _crews(list(dict.fromkeys([*others[:_LEADERS], *(one for one in picks if one != reference)])))
    for number in range(_FINAL_ROUNDS):
        dice.shuffle(leaders)
        grid.measure(leaders, final=True)
        say(f"  leaders: round {number + 1} of {_FINAL_ROUNDS}, {sum(map(len, leaders)) + 1} settings")
    return points


@dataclass(frozen=True)
class _Grid:
    points: dict[JointSetting, Point]
    reference: JointSetting
    objective: str
    open_measuring: Callable[[float], Measuring]

    def measure(self, crews: Sequence[Sequence[JointSetting]], *, final: bool) -> None:
        """Once, in groups of crews, each in turns with the reference."""
        points, reference = self.points, self.reference
        for group in [crews[at : at + _CREWS] for at in range(0, len(crews), _CREWS)]:
            wanted = [reference, *itertools.chain.from_iterable(group)]
            within_s = _WINDOW_S * len(wanted) + _START_S
            with self.open_measuring(within_s) as measuring:
                found = {rate.setting: rate for rate in
                         measuring.joint(wanted, within_s=within_s, on_rate=lambda rate: None)}
            if reference not in found or found[reference].failure:
                why = found[reference].failure if reference in found else "no time"
                raise SpreezeError(f"the reference could not be measured: {why}")
            for setting, rate in found.items():
                if setting != reference:
                    points[setting].take(rate, found[reference], self.objective, final=final)
            points[reference].env_steps_per_s += found[reference].env_steps_per_s
            points[reference].updates_per_s += found[reference].updates_per_s


def _crews(settings: Sequence[JointSetting]) -> list[list[JointSetting]]:
    """The settings that one crew can run."""
    found: dict[tuple[object, ...], list[JointSetting]] = {}
    for one in settings:
        found.setdefault((one.learner, one.envs_per_sampler, one.samples_per_insert_min), []).append(one)
    return list(found.values())


def _too_slow(setting: JointSetting, points: dict[JointSetting, Point]) -> bool:
    """True for a larger batch than one whose update already takes too long; never for the smallest."""
    return any(
        point.updates_per_s and statistics.median(point.updates_per_s) * _SLOWEST_UPDATE_S < 1.0
        and setting.learner.batch_size > other.learner.batch_size
        for other, point in points.items()
    )
