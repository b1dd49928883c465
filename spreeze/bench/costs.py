"""What the learner loses to publishing its weights and to the guard against non-finite gradients.

Each repeat is a few short blocks of real updates with and without, in turn, so that drift of the
machine meets both alike.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from spreeze.algorithms import create
from spreeze.algorithms.actor_critic import ActorCritic
from spreeze.algorithms.adam import FlatAdam
from spreeze.bench.learner import algorithm_config, synthetic_batch
from spreeze.transport.weights import WeightsStore
from spreeze.types import RowLayout, TransitionBatch
from spreeze.workers.publisher import Publisher

_BLOCK_S, _BLOCKS = 0.5, 4
_OBS_DIM, _ACTION_DIM = 22, 6

Row = dict[str, Any]


def in_turn(first: Callable[[], float], second: Callable[[], float], repeats: int) -> list[tuple[float, float]]:
    """Both measures, ``repeats`` times a few blocks in turn; each pair is the means of one repeat."""
    pairs = []
    for _ in range(repeats):
        blocks = [(first(), second()) for _ in range(_BLOCKS)]
        pairs.append((statistics.mean(a for a, _ in blocks), statistics.mean(b for _, b in blocks)))
    return pairs


def learner_for_bench(algo: str, batch_size: int) -> tuple[ActorCritic, TransitionBatch]:
    """An algorithm with 2x256 networks for Walker2D's sizes and a batch of random rows, both warm."""
    config = algorithm_config(algo, (256, 256))
    algorithm = create(algo, _OBS_DIM, _ACTION_DIM, config, seed=0)
    assert isinstance(algorithm, ActorCritic)
    batch = synthetic_batch(RowLayout(_OBS_DIM, _ACTION_DIM), batch_size, config.gamma)
    for _ in range(3):
        algorithm.update(batch)
    return algorithm, batch


def updates_per_s(update: Callable[[], object], seconds: float = _BLOCK_S) -> float:
    """Calls a second, over a block of that length."""
    start_s = perf_counter()
    for count in itertools.count(1):
        update()
        if (took_s := perf_counter() - start_s) >= seconds:
            return count / took_s
    raise AssertionError("counting ended")


def publication_rows(batch_size: int, algo: str, repeats: int, per_s: float = 10.0) -> list[Row]:
    """Updates/s with weights published at that rate and without, one product thread."""
    torch.set_num_threads(1)
    algorithm, batch = learner_for_bench(algo, batch_size)
    versions = itertools.count(1)
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        written: list[float] = []
        publisher = Publisher(WeightsStore(Path(folder), min_age_s=1.0), lambda: written.append(perf_counter()))
        due_s = 0.0

        def publishing() -> None:
            nonlocal due_s
            algorithm.update(batch)
            if (now_s := perf_counter()) >= due_s:
                publisher.offer(algorithm.policy_snapshot(), algorithm.policy_meta(), 1, next(versions))
                due_s = now_s + 1.0 / per_s

        def with_publications() -> float:
            rate = updates_per_s(publishing)
            publisher.flush(1.0)
            return rate

        pairs = in_turn(lambda: updates_per_s(lambda: algorithm.update(batch)), with_publications, repeats)
        publisher.close()
    blocks_s = repeats * _BLOCKS * _BLOCK_S
    rows = _cost_rows("publication", pairs, batch_size)
    return [*rows, {"metric": "publications_per_s", "value": len(written) / blocks_s, "unit": "1/s",
                    "batch_size": batch_size}]


def guard_rows(batch_size: int, algo: str, repeats: int) -> list[Row]:
    """Updates/s as they are, and with Adam applied whatever the gradient is; one product thread."""
    torch.set_num_threads(1)
    guarded, batch = learner_for_bench(algo, batch_size)
    plain, _ = learner_for_bench(algo, batch_size)
    for adam in plain.optimisers():
        _take_guard_away(adam)
    pairs = in_turn(lambda: updates_per_s(lambda: plain.update(batch)), lambda: updates_per_s(
        lambda: guarded.update(batch)), repeats)
    return _cost_rows("guard", pairs, batch_size)


def _take_guard_away(adam: FlatAdam) -> None:
    adam.step = adam.apply  # type: ignore[method-assign]


def _cost_rows(name: str, pairs: list[tuple[float, float]], batch_size: int) -> list[Row]:
    costs = [1.0 - with_it / without for without, with_it in pairs]
    return [
        {"metric": f"updates_per_s_without_{name}", "value": statistics.median(pair[0] for pair in pairs),
         "unit": "1/s", "repeats": [pair[0] for pair in pairs], "batch_size": batch_size},
        {"metric": f"updates_per_s_with_{name}", "value": statistics.median(pair[1] for pair in pairs),
         "unit": "1/s", "repeats": [pair[1] for pair in pairs], "batch_size": batch_size},
        {"metric": f"{name}_cost", "value": statistics.median(costs), "unit": "share", "repeats": costs,
         "target": "< 0.01", "batch_size": batch_size},
    ]
