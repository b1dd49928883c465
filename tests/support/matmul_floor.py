"""Updates/s of the fused update, alone, and its share of the matmul floor.

The floor is the list of matmuls that one update cannot avoid. They run alone at the same shapes and on the same core,
in turn with the updates, on few enough buffers to stay in cache. Share of the floor = time of the matmuls / time of an
update. Matmuls whose result an update throws away (gradients of the critics' weights in the actor step, of the input
in the critic step) are not in the list.

``python tests/support/matmul_floor.py --batch-size 256 1024`` prints the figures, with ``--json`` as a document.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from figures import Row, line

from spreeze.algorithms import create
from spreeze.algorithms.networks.fused_mlp import matmuls_by_onednn
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.algorithm_bases import AlgorithmConfig
from spreeze.config.schema import SECTIONS
from spreeze.machine.hardware import read_machine
from spreeze.types import RowLayout, TransitionBatch
from spreeze.workers.torch_devices import largest_matmul, matmuls_in

OBS_DIM, ACTION_DIM = 22, 6
"""Sizes of Walker2DBulletEnv-v0."""
HIDDEN = (256, 256)
_BLOCK_S = 0.25
"""Length of one timed block; updates and matmuls take turns block by block."""


class Matmul(NamedTuple):
    """``stack`` matmuls [m, k] x [k, n] and how many of them one update makes."""

    stack: int
    m: int
    k: int
    n: int
    times: float = 1.0

    @property
    def flop(self) -> float:
        """Operations in one update: a multiplication and an addition for each m n k."""
        return 2.0 * self.times * self.stack * self.m * self.k * self.n


def forward(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Matmul]:
    return [Matmul(stack, rows, a, b, times) for a, b in pairwise(sizes)]


def weight_gradients(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Matmul]:
    """Matmuls that give the weight gradients."""
    return [Matmul(stack, a, rows, b, times) for a, b in pairwise(sizes)]


def input_gradients(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Matmul]:
    """Matmuls that carry the gradient down to the first layer; a head with one output needs none."""
    pairs = pairwise(sizes[1:])
    return [Matmul(stack, rows, b, a, times) for a, b in pairs if b > 1]


def matmuls(
    algo: str, batch_size: int, obs_dim: int, action_dim: int, hidden: tuple[int, ...], policy_delay: int = 1
) -> list[Matmul]:
    """The matmuls that one update of an algorithm cannot avoid."""
    critic = (obs_dim + action_dim, *hidden, 1)
    actor = (obs_dim, *hidden, 2 * action_dim if algo == "sac" else action_dim)
    stack = 1 if algo == "ddpg" else 2
    moves = 1.0 / policy_delay
    least_of = stack if algo == "sac" else 1
    b = batch_size
    return [
        *forward(1, b, actor),
        *forward(stack, b, critic, 2.0),
        *weight_gradients(stack, b, critic),
        *input_gradients(stack, b, critic),
        *forward(1, b, actor, moves),
        *forward(least_of, b, critic, moves),
        *input_gradients(least_of, b, critic, moves),
        Matmul(least_of, b, hidden[0], action_dim, moves),
        *weight_gradients(1, b, actor, moves),
        *input_gradients(1, b, actor, moves),
    ]


class MatmulRound:
    """All matmuls of ``count`` updates, ready to be run; one set of buffers for each shape."""

    def __init__(self, listed: list[Matmul], device: str = "cpu") -> None:
        self.flop = sum(matmul.flop for matmul in listed)
        merged: dict[tuple[int, int, int, int], float] = {}
        for matmul in listed:
            key = (matmul.stack, matmul.m, matmul.k, matmul.n)
            merged[key] = merged.get(key, 0.0) + matmul.times
        self._calls = [(_matmul_call(device, *shape), count) for shape, count in merged.items()]

    def run(self, updates: int) -> None:
        """Makes the matmuls of that many updates."""
        for call, count in self._calls:
            for _ in range(round(updates * count)):
                call()


def _matmul_call(device: str, stack: int, m: int, k: int, n: int) -> Callable[[], Any]:
    """One matmul, written the way that is fastest for its shape."""
    a, b = torch.randn(stack, m, k, device=device), torch.randn(stack, k, n, device=device)
    if n == 1:
        times_vector = torch.linalg.vecdot if matmuls_by_onednn() else torch.mv
        rows = [(a[index], b[index, :, 0].contiguous(), torch.empty(m, device=device)) for index in range(stack)]
        if m < k:
            rows = [(matrix.t().contiguous().t(), vector, out) for matrix, vector, out in rows]
        return lambda: [times_vector(matrix, vector, out=out) for matrix, vector, out in rows]
    if n < 64 <= m:
        out, a_t, b_t = torch.empty(stack, n, m, device=device), a.transpose(1, 2), b.transpose(1, 2).contiguous()
        return lambda: torch.bmm(b_t, a_t, out=out)
    if stack == 1:
        out, a0, b0 = torch.empty(m, n, device=device), a[0], b[0]
        return lambda: torch.mm(a0, b0, out=out)
    out = torch.empty(stack, m, n, device=device)
    return lambda: torch.bmm(a, b, out=out)


def synthetic_batch(layout: RowLayout, batch_size: int, gamma: float, seed: int = 0) -> TransitionBatch:
    """A batch of random rows, as the ring would give it."""
    rows = torch.randn(batch_size, layout.width, generator=torch.Generator().manual_seed(seed))
    rows[:, layout.action].tanh_()
    rows[:, layout.terminated] = 0.0
    return layout.split(rows, gamma)


def algorithm_config(algo: str, hidden: tuple[int, ...]) -> AlgorithmConfig:
    """Defaults of an algorithm with hidden layers of these sizes."""
    part = SECTIONS[algo]
    assert issubclass(part, AlgorithmConfig)
    return dataclasses.replace(part(), hidden_sizes=hidden)


def learner_cases(
    batch_sizes: Sequence[int],
    repeats: int = 5,
    *,
    obs_dim: int = OBS_DIM,
    action_dim: int = ACTION_DIM,
    hidden: tuple[int, ...] = HIDDEN,
    threads: Sequence[int] = (1,),
    algo: str = "sac",
    precisions: Sequence[str] = ("float32",),
) -> list[dict[str, Any]]:
    """Measures one case for each batch size, precision and number of threads; all take turns, matmuls too.

    The matmuls are those of one thread throughout: the floor of one core, in the case's precision.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        pair = stack.enter_context(contextlib.closing(TwoThreads())) if any(count > 1 for count in threads) else None
        cases: list[_Case] = []
        for size, precision, count in itertools.product(batch_sizes, precisions, threads):
            with matmuls_in(precision, "cpu", largest_matmul(hidden, size)):
                cases.append(_Case(algo, size, obs_dim, action_dim, hidden, pair if count > 1 else None, precision))
        for _ in range(repeats):
            for case in cases:
                with matmuls_in(case.precision, "cpu", largest_matmul(hidden, case.batch_size)):
                    case.measure()
        return [case.figures(cases) for case in cases]


class _Case:
    """One batch size: an algorithm, the matmuls of its update, and what was measured."""

    def __init__(
        self,
        algo: str,
        batch_size: int,
        obs_dim: int,
        action_dim: int,
        hidden: tuple[int, ...],
        pair: TwoThreads | None,
        precision: str,
    ) -> None:
        config = algorithm_config(algo, hidden)
        self.algo, self.batch_size = algo, batch_size
        self.threads, self.precision = 1 if pair is None else 2, precision
        self.algorithm = create(algo, obs_dim, action_dim, config, seed=0)
        self.algorithm.set_parallel(pair)
        self.batch = synthetic_batch(RowLayout(obs_dim, action_dim), batch_size, config.gamma)
        delay = getattr(config, "policy_delay", 1)
        self.round = MatmulRound(matmuls(algo, batch_size, obs_dim, action_dim, hidden, delay))
        self.update_s: list[float] = []
        self.matmul_s: list[float] = []
        self.critic_s = self.actor_s = 0.0
        self._update_block(2)
        self.round.run(2)
        self._block = max(2, 2 * round(_BLOCK_S / self._update_block(2) / 2))

    def measure(self) -> None:
        """One repeat: a quarter of the block of each kind in turn, four times."""
        quarter = max(2, self._block // 4)
        update_s = matmul_s = 0.0
        for _ in range(4):
            update_s += self._update_block(quarter) / 4
            start_s = perf_counter()
            self.round.run(quarter)
            matmul_s += (perf_counter() - start_s) / quarter / 4
        self.update_s.append(update_s)
        self.matmul_s.append(matmul_s)

    def _update_block(self, updates: int) -> float:
        """Seconds of one update, over so many."""
        start_s = perf_counter()
        for _ in range(updates):
            critic_s, actor_s = self.algorithm.update(self.batch)
            self.critic_s += critic_s
            self.actor_s += actor_s
        return (perf_counter() - start_s) / updates

    def _over(self, others: list[_Case], name: str, **plain: Any) -> dict[str, float]:
        """Ratio of this rate to that of the same case with ``plain`` values, repeat by repeat; empty without one."""
        wanted = {"batch_size": self.batch_size, "threads": self.threads, "precision": self.precision, **plain}
        for other in others:
            if other is not self and all(getattr(other, key) == value for key, value in wanted.items()):
                ratios = [slow / fast for slow, fast in zip(other.update_s, self.update_s, strict=True)]
                return {name: statistics.median(ratios)}
        return {}

    def figures(self, cases: list[_Case]) -> dict[str, Any]:
        """Medians beside all repeats, and the ratio to the same updates on one core, in float32."""
        repeats = {
            "updates_per_s": [1.0 / value for value in self.update_s],
            "update_frames_per_s": [self.batch_size / value for value in self.update_s],
            "matmul_floor_share": [a / b for a, b in zip(self.matmul_s, self.update_s, strict=True)],
            "matmul_flop_per_s": [self.round.flop / value for value in self.matmul_s],
        }
        step_s = self.critic_s + self.actor_s
        return {
            "algo": self.algo,
            "batch_size": self.batch_size,
            "learner_threads": self.threads,
            "precision": self.precision,
            **{name: statistics.median(values) for name, values in repeats.items()},
            **self._over(cases, "over_one_thread", threads=1),
            **self._over(cases, "over_float32", precision="float32"),
            "matmul_flop": self.round.flop,
            "learner_critic_share": self.critic_s / step_s,
            "learner_actor_share": self.actor_s / step_s,
            "repeats": repeats,
        }


_UNITS = {
    "updates_per_s": "1/s",
    "update_frames_per_s": "1/s",
    "matmul_floor_share": "share",
    "matmul_flop_per_s": "flop/s",
    "over_one_thread": "ratio",
    "over_float32": "ratio",
    "matmul_flop": "flop",
    "learner_critic_share": "share",
    "learner_actor_share": "share",
}
_FLOOR_TARGETS = {256: ">= 0.85", 1024: ">= 0.92", 8192: ">= 0.92"}


def case_rows(cases: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        more = {name: case[name] for name in ("batch_size", "algo", "learner_threads", "precision")}
        plain = case["learner_threads"] == 1 and case["precision"] == "float32"
        for name in (name for name in _UNITS if name in case):
            target = _FLOOR_TARGETS.get(case["batch_size"]) if plain and name == "matmul_floor_share" else None
            rows.append(
                {
                    "metric": name,
                    "value": case[name],
                    "unit": _UNITS[name],
                    "repeats": case["repeats"].get(name, []),
                    **more,
                    **({"target": target} if target else {}),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, nargs="+", default=[256])
    parser.add_argument("--algo", default="sac")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = case_rows(
        learner_cases(args.batch_size, args.repeats, threads=args.threads, algo=args.algo, precisions=args.precision)
    )
    if args.json:
        print(json.dumps({"machine": read_machine().one_line(), "rows": rows}))
    else:
        print(read_machine().one_line(), *map(line, rows), sep="\n")


if __name__ == "__main__":
    main()
