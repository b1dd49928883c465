"""Parts of Rainbow, each alone and all together, by counts of env steps; and the time of a draw by priority."""

import argparse
import contextlib
import time
from collections.abc import Callable

import numpy as np
from common import SUPPORT, compare, main, rows_of, rows_of_target
from figures import Row, row

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
    "rainbow": {"critics": "categorical", "noisy": "true", "duelling": "true", "priority_exponent": 0.5},
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
        {"returns": returns, "draw": draw},
        flags={"env_steps": 40_000, "interval": 100, "module": str(SUPPORT / "chain_env.py"), "cases": tuple(_PARTS)},
        env="Chain-v0",
        target_return=0.99,
        seconds=600.0,
    )
