"""The best policy of a run, chosen by a lower bound of its mean return and not by one lucky evaluation.

1. A policy's bound is its mean return less ``t s / sqrt(n)`` over the n episodes that it has played: the one-sided 90 %
   bound for the mean of normal values (Student 1908).
2. Until the kept policy is confirmed, a policy with a higher bound replaces it.
3. At most once in eight evaluations, and at the end of the run, a policy plays as many episodes again, from fresh
   starts: the kept one if it is not confirmed, otherwise the challenger, which has the highest bound of those whose
   mean was above the kept one's since the last such test. It replaces the kept policy if its bound over all of its
   episodes is higher.
4. A policy whose returns lie far above those of the kept one (their means differ by more than four standard deviations
   of each) replaces it at once, unconfirmed: where evaluations are few, a test would come minutes later, or never.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.files import replace_bytes, write_json
from spreeze.metrics import student_quantile
from spreeze.run_directory import best_record

_TEST_EVERY = 8  # evaluations for one test
_FAR = 4.0  # standard deviations of the returns of either policy
Z_90, Z_99 = 1.2815515655446004, 2.3263478740408408  # quantiles of the normal distribution


class ReturnStats(NamedTuple):
    """Statistics of the returns of some episodes; the standard deviation is the population one (divided by n)."""

    episodes: int
    mean: float
    std: float

    @property
    def bound(self) -> float:
        """One-sided 90 % lower bound of the expected return; the mean itself for a single episode."""
        return self.lower_bound(Z_90)

    def lower_bound(self, z: float) -> float:
        """Lower bound of the expected return, at the confidence level whose normal quantile is ``z``."""
        freedom = self.episodes - 1
        if freedom < 1:
            return self.mean
        return self.mean - student_quantile(z, freedom) * self.std / math.sqrt(freedom)

    def with_more(self, other: ReturnStats) -> ReturnStats:
        """Statistics of both sets of episodes together."""
        episodes = self.episodes + other.episodes
        weight = other.episodes / episodes
        between = weight * (1.0 - weight) * (other.mean - self.mean) ** 2
        within = (1.0 - weight) * self.std**2 + weight * other.std**2
        return ReturnStats(episodes, self.mean + weight * (other.mean - self.mean), math.sqrt(within + between))


class Candidate(NamedTuple):
    stats: ReturnStats
    data: bytes
    record: dict[str, Any]


class BestPolicy:
    """``checkpoints/best.safetensors`` of a run, with ``best.json``, and the challenger beside it."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "checkpoints"
        self._kept, self._confirmed = _stored(self._folder, "best")
        self._challenger, _ = _stored(self._folder, "challenger")
        self.tests = self._evaluations = self._tested_at = 0

    def offer(self, candidate: Candidate) -> None:
        """Takes a policy that was evaluated on all seeds."""
        self._evaluations += 1
        kept, stats = self._kept, candidate.stats
        if kept is None or (not self._confirmed and stats.bound > kept.stats.bound):
            self._keep(candidate, confirmed=False)
        elif self._confirmed and stats.mean - kept.stats.mean > _FAR * (stats.std + kept.stats.std):
            self._forget_challenger()
            self._keep(candidate, confirmed=False)
        elif (
            self._confirmed
            and stats.mean > kept.stats.mean
            and (self._challenger is None or stats.bound > self._challenger.stats.bound)
        ):
            self._challenger = candidate
            self._store("challenger", candidate, confirmed=False)

    def due(self, *, last: bool = False) -> Candidate | None:
        """The policy that is to play on fresh seeds now, if any; ``last``: however few evaluations there were since."""
        if not last and self._evaluations - self._tested_at < _TEST_EVERY:
            return None
        return self._challenger if self._confirmed else self._kept

    def record_retest(self, candidate: Candidate, more: ReturnStats | None) -> None:
        """Takes the result of a candidate's test; None if it gave none."""
        self.tests, self._tested_at = self.tests + 1, self._evaluations
        tested = candidate if more is None else candidate._replace(stats=candidate.stats.with_more(more))
        is_kept = candidate is self._kept
        if not is_kept:
            self._forget_challenger()
        if more is not None and (is_kept or self._kept is None or tested.stats.bound > self._kept.stats.bound):
            self._keep(tested, confirmed=True)

    def _forget_challenger(self) -> None:
        self._challenger = None
        for name in ("challenger.json", "challenger.safetensors"):
            (self._folder / name).unlink(missing_ok=True)

    def _keep(self, candidate: Candidate, *, confirmed: bool) -> None:
        self._store("best", candidate, confirmed=confirmed)
        self._kept, self._confirmed = candidate, confirmed

    def _store(self, name: str, candidate: Candidate, *, confirmed: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stats = candidate.stats
        replace_bytes(self._folder / f"{name}.safetensors", candidate.data)
        write_json(
            self._folder / f"{name}.json",
            {
                **candidate.record,
                "return": stats.mean,
                "bound": stats.bound,
                "played": stats.episodes,
                "std": stats.std,
                "confirmed": confirmed,
            },
        )


def best_updates(run_dir: Path) -> int | None:
    """Updates of the best policy of a run so far; None where there is none."""
    updates = best_record(run_dir).get("updates")
    return updates if isinstance(updates, int) else None


def _stored(folder: Path, name: str) -> tuple[Candidate | None, bool]:
    """Candidate that this or an earlier session kept under that name, and whether it was confirmed."""
    try:
        record = json.loads((folder / f"{name}.json").read_bytes())
        stats = ReturnStats(int(record.pop("played")), float(record.pop("return")), float(record.pop("std")))
        confirmed = bool(record.pop("confirmed"))
        path = folder / f"{name}.safetensors"
        data = path.read_bytes() if path.is_file() else b""
        return Candidate(stats, data, record), confirmed or not data
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, False
