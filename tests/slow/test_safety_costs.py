"""What safety costs: the ring's protocol in a sampler's turn, checksums, the reader's second look, publication.

Each is the time of the real call less that of a bare one which only copies, taken in turns, over the time of what it
is part of. In the rate of a whole run these differences would drown in noise. A helper thread publishes, so what that
takes from the learner is at most its processor time.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_ENV=Walker2DBulletEnv-v0 SPREEZE_STRESS_REPEATS=5 pytest
tests/slow/test_safety_costs.py``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import Row, row
from long_form import asked, by_hand
from sampler_cost import publish_policy, real_sampler, run_folder, task_plan

from spreeze.machine.output import stdout_to_stderr
from spreeze.runtime.plan import RunPlan
from spreeze.transport.replay_ring import FrameColumns, ReplayReader, ReplayRing, RingSpec, SampledIndices, ShardWriter
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import WeightsStore
from spreeze.types import RowLayout
from spreeze.workers.replay_trainer import ReplayTrainer

_RING_ROWS = 50_000
_TURNS, _CALLS = 50, 20
"""Calls are timed in so many turns of so many calls; the median turn counts."""


class BareWriter(ShardWriter):
    """Copies rows of vectors to their places and counts them: no intent, no stamp, no checksum."""

    def write(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        next_obs: Any,
        num_steps: Any = None,
        version: int = 0,
        frames: FrameColumns | None = None,
    ) -> None:
        """Copies N rows; those at the end of the shard go to its start."""
        count = len(reward)
        if self._position + count > self._capacity:
            self._position = 0
        at = slice(self._position, self._position + count)
        self._obs[at], self._action[at], self._next_obs[at] = obs, action, next_obs
        self._reward[at], self._terminated[at] = reward, terminated
        self._position += count
        self._committed += count
        self._words[self._committed_word] = self._committed


class BareReader(ReplayReader):
    """Copies rows and never looks whether they were overwritten meanwhile."""

    def _copy(self, drawn: SampledIndices, rows: np.ndarray, frames: np.ndarray | None) -> tuple[np.ndarray, int]:
        self.ring.rows.take(drawn.row, axis=0, out=rows, mode="clip")
        return np.empty(0, np.int64), 0


def checks_rows(plan: RunPlan, repeats: int) -> list[Row]:
    """Shares of a sampler's turn and of the learner's time, for a task of vectors with one-step rows."""
    with run_folder() as folder, stdout_to_stderr():
        publish_policy(plan, folder)
        found = [_measure(plan, folder, repeat) for repeat in range(repeats)]
    count = plan.config.sampling.envs_per_sampler
    interval_us = 1e6 * plan.config.learner.publish_interval_s
    return [
        row("sampler_turn_us", "us", [one["turn"] for one in found], envs_per_sampler=count),
        row("ring_protocol_us", "us", [one["write"] - one["bare_write"] for one in found]),
        row(
            "ring_protocol_share_of_sampling",
            "share",
            [(one["write"] - one["bare_write"]) / one["turn"] for one in found],
            target="< 0.02",
        ),
        row(
            "checksums_share_of_sampling",
            "share",
            [(one["sealed"] - one["write"]) / one["turn"] for one in found],
            target="< 0.10",
        ),
        row("update_us", "us", [one["update"] for one in found], batch_size=plan.config.learner.batch_size),
        row(
            "second_look_share_of_learner", "share", [(one["draw"] - one["bare_draw"]) / one["update"] for one in found]
        ),
        row("publish_us", "us", [one["publish"] for one in found]),
        row("publish_processor_us", "us", [one["publish_processor"] for one in found]),
        row(
            "publish_share_of_learner",
            "share",
            [one["publish_processor"] / interval_us for one in found],
            target="< 0.01",
        ),
    ]


def _in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each call, all taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_TURNS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def _measure(plan: RunPlan, folder: Path, repeat: int) -> dict[str, float]:
    spec, layout = plan.spec, plan.layout
    rings = [
        ReplayRing.create(RingSpec(shape, 1, _RING_ROWS))
        for shape in (layout, layout, RowLayout(spec.obs_dim, spec.action_dim, layout.n_step, checksum=True))
    ]
    status = StatusTable.create(1)
    try:
        loop, sampling = real_sampler(plan, folder, rings[0], status, repeat)
        found = _in_turns({"turn": loop.step_or_wait}) | _write_times(plan, rings)
        sampling.close()
        return found | _learner_times(plan, rings[1], folder, repeat)
    finally:
        status.close()
        for ring in rings:
            ring.close()


def _write_times(plan: RunPlan, rings: list[ReplayRing]) -> dict[str, float]:
    """One sampler turn's rows, written in three ways; every page is touched before."""
    spec, rng = plan.spec, np.random.default_rng(0)
    count = plan.config.sampling.envs_per_sampler
    obs = rng.standard_normal((count, spec.obs_dim), np.float32)
    action, reward = rng.standard_normal((count, spec.action_dim), np.float32), np.zeros(count, np.float32)
    steps = np.ones(count, np.float32) if plan.layout.n_step > 1 else None
    writers = {"write": ShardWriter(rings[0], 0), "bare_write": BareWriter(rings[1], 0),
               "sealed": ShardWriter(rings[2], 0)}  # fmt: skip
    for writer in writers.values():
        for _ in range(_RING_ROWS // count + 1):
            writer.write(obs, action, reward, reward, obs, steps)
    return _in_turns(
        {name: (lambda w=writer: w.write(obs, action, reward, reward, obs, steps)) for name, writer in writers.items()}
    )


def _learner_times(plan: RunPlan, ring: ReplayRing, folder: Path, repeat: int) -> dict[str, float]:
    """Draws with and without the second look, updates, publications; the ring is full."""
    config, rng = plan.config, np.random.default_rng(repeat)
    writer = ShardWriter(ring, 0)
    obs = rng.standard_normal((1000, plan.spec.obs_dim), np.float32)
    action = rng.uniform(-1, 1, (1000, plan.spec.action_dim)).astype(np.float32)
    if plan.spec.choices is not None:
        action[:] = 0.0
    zeros, steps = np.zeros(1000, np.float32), np.ones(1000, np.float32)
    for _ in range(_RING_ROWS // 1000):
        writer.write(obs, action, zeros, zeros, obs, steps if plan.layout.n_step > 1 else None)
    readers = {"draw": ReplayReader(ring), "bare_draw": BareReader(ring)}
    out = np.empty((config.learner.batch_size, plan.layout.width), np.float32)
    found = _in_turns({name: (lambda r=reader: r.sample(rng, out)) for name, reader in readers.items()})
    learning = ReplayTrainer(
        plan.spec,
        config.run.algo,
        config.algorithm,
        plan.layout,
        readers["draw"],
        dataclasses.replace(config.learner, device="cpu"),
        seed=1,
        normalize_obs=config.env.normalize_obs,
    )
    store, times = WeightsStore(folder / "weights", min_age_s=0.0), []
    for version in range(40):
        start = time.perf_counter()
        learning.update()
        updated, processor = time.perf_counter(), time.thread_time()
        arrays, meta = learning.policy()
        store.publish(arrays, meta, 2 + repeat, version)
        times.append((updated - start, time.perf_counter() - updated, time.thread_time() - processor))
    medians = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return found | dict(zip(("update", "publish", "publish_processor"), medians, strict=True))


ENV, REPEATS = asked("ENV", "Pendulum-v1"), asked("REPEATS", 3)


def test_shares_of_sampler_and_learner_are_reported():
    rows = {row["metric"]: row for row in checks_rows(task_plan("Pendulum-v1"), 1)}
    assert rows["sampler_turn_us"]["value"] > 0.0
    for name in ("ring_protocol_share_of_sampling", "checksums_share_of_sampling"):  # differences of two times
        assert math.isfinite(rows[name]["value"])
    assert rows["publish_share_of_learner"]["value"] > 0.0


@by_hand
@pytest.mark.timeout(300.0 * REPEATS)
def test_safety_costs_little(report):
    rows = report(checks_rows(task_plan(ENV), REPEATS))
    assert rows["ring_protocol_share_of_sampling"]["value"] < 0.02
    assert rows["checksums_share_of_sampling"]["value"] < 0.10
