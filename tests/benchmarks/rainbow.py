"""Parts of Rainbow, each alone and all together, by counts of env steps; and the time of a draw by priority."""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from common import SUPPORT, compare, main, rows_of, rows_of_target
from figures import Row, row

from spreeze.algorithms import create
from spreeze.algorithms.dqn import DQNConfig
from spreeze.transport.prioritised_replay import open_reader
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec
from spreeze.types import RowLayout

_PARTS = {
    "plain": {},
    "short": {"epsilon_env_steps": 1000},
    "prioritised": {"priority_exponent": 0.6},
    "quantile": {"critics": "quantile"},
    "categorical": {"critics": "categorical"},
    "noisy": {"noisy": "true"},
    "rainbow": {"critics": "categorical", "noisy": "true", "dueling": "true", "priority_exponent": 0.5},
}

_CELLS = 20
_HEADS = {
    **{name: settings for name, settings in _PARTS.items() if name in ("plain", "quantile", "categorical")},
    "categorical, 0 to 1": {"critics": "categorical", "v_min": 0.0, "v_max": 1.0},
    "plain, twice the learning rate": {"lr": 2e-3},
    "categorical, twice the learning rate": {"critics": "categorical", "lr": 2e-3},
    "categorical, four times the learning rate": {"critics": "categorical", "lr": 4e-3},
    "noisy": {"noisy": True},
    "rainbow": {"critics": "categorical", "noisy": True, "dueling": True},
}

_RATIO = ["--batch-size", "32", "--set=replay.samples_per_insert_min=8", "--set=replay.samples_per_insert_max=8",
          "--set=replay.learning_starts=1000"]  # fmt: skip
"""An update of 32 rows for four env steps, as in Mnih et al. 2015, after 1,000."""


def returns(args: argparse.Namespace) -> list[Row]:
    """Final return, and env steps to the target, of DQN with each part."""
    module = [] if args.module == "" else ["--import", args.module]
    common = [*module, "--env", args.env, "--algo", "dqn", "--mode", "serial", "--env-steps", str(args.env_steps),
              "--envs-per-sampler", "1", *_RATIO, f"--set=evaluation.interval_updates={args.interval}"]  # fmt: skip
    cases = {name: [f"--set=dqn.{key}={value}" for key, value in _PARTS[name].items()] for name in args.cases}
    if args.target_return < np.inf:
        common += ["--target-return", str(args.target_return)]
    found = compare(args, cases, common)
    return [
        *rows_of(found, "eval_return_mean", "env_steps_per_s", env=args.env),
        *rows_of_target(found, args.target_return, env=args.env),
    ]


def same_rows(args: argparse.Namespace) -> list[Row]:
    """Updates that each head takes on the same rows, every action in every cell, until its greedy actions are right.

    It separates learning from exploration: nothing is collected.
    """
    seeds, rows = range(1, args.repeats + 1), []
    for name, settings in _HEADS.items():
        rows.append(row("updates until right", "", [_updates_until_right(seed, settings) for seed in seeds], case=name))
    return rows


def _updates_until_right(seed: int, settings: Mapping[str, Any], most: int = 10_000) -> int | None:
    config = DQNConfig(**settings)
    algo = create("dqn", _CELLS, 2, config, seed, num_actions=2)
    layout = RowLayout(_CELLS, 1, config.n_step)
    rows, right = _chain_rows(layout, config, seed)
    rng, cells, critics = np.random.default_rng(seed), torch.eye(_CELLS)[:-1], algo.critics
    for count in range(1, most + 1):
        algo.update(layout.split(torch.from_numpy(rows[rng.integers(len(rows), size=32)]), config.gamma))
        if count % 25 == 0:
            with torch.inference_mode():
                critics.draw(torch.Tensor.zero_)  # the means of noisy weights
                values = critics.values_of(critics.outputs(cells))[0]
            if np.array_equal(values.argmax(0).numpy(), right):
                return count
    return None


def _chain_rows(layout: RowLayout, config: DQNConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [N, W] from each cell by each action, twenty of each, then random ones; the right actions [cells - 1]."""
    from chain_env import Chain  # common has added its folder to the path

    rng, env, rows = np.random.default_rng(seed), Chain(_CELLS), []
    for cell, first, _ in itertools.product(range(_CELLS - 1), (0, 1), range(20)):
        env.reset()
        env._cell = cell
        row, action, reward = np.zeros(layout.width, np.float32), first, 0.0
        row[layout.obs], row[layout.action] = env._observation(), first
        for step in range(config.n_step):
            obs, gained, over, _, _ = env.step(action)
            reward += config.gamma**step * gained
            row[layout.next_obs], row[layout.terminated], row[layout.num_steps] = obs, over, step + 1
            if over:
                break
            action = int(rng.integers(2))
        row[layout.reward] = reward
        rows.append(row)
    return np.array(rows), env._right[:-1]


def draw(args: argparse.Namespace) -> list[Row]:
    """Processor time of a draw of 256 of a million rows, and of giving their errors back, over an even draw."""
    rng, layout = np.random.default_rng(0), RowLayout(22, 6)
    rows, out = [], np.empty((256, layout.width), np.float32)
    with contextlib.closing(ReplayRing.create(RingSpec(layout, 1, 1_000_000))) as ring:
        ring.reserved[0] = ring.committed[0] = 1_000_000
        ring.rows[:] = 0.0
        for name, exponent in (("uniform", 0.0), ("prioritised", 0.6)):
            reader = open_reader(ring, exponent)

            def turn(reader: ReplayReader = reader, exponent: float = exponent) -> None:
                reader.sample(rng, out)
                if exponent:
                    reader.importance_weights(0.4)
                    reader.set_errors(rng.random(256))

            rows.append(row("draw", "us", [1e6 * _least_s(turn) for _ in range(args.repeats)], case=name))
    return rows


def _least_s(turn: Callable[[], None], blocks: int = 20, count: int = 100) -> float:
    """Least processor time of a turn, of the mean over each block."""
    least = np.inf
    for _ in range(blocks):
        start_s = time.process_time()
        for _ in range(count):
            turn()
        least = min(least, (time.process_time() - start_s) / count)
    return least


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"returns": returns, "same-rows": same_rows, "draw": draw},
        flags={"env_steps": 40_000, "interval": 100, "module": str(SUPPORT / "chain_env.py"), "cases": tuple(_PARTS)},
        env="Chain-v0",
        target_return=0.99,
        seconds=600.0,
    )
