"""Updates a second of the real learner step, against the matrix products that it cannot avoid.

The floor is the list of products of one update. Their operations are counted, and the products alone
are run at the same shapes, on the same core, in turn with the updates, on few enough buffers to
stay in cache; that gives the matrix rate. Share of the floor = time of the products / time of an
update. Products whose result an update throws away (gradients of the critics' weights in the actor
step, of the input in the critic step) are not in the list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch

from spreeze.algorithms import create
from spreeze.algorithms.pair import Pair
from spreeze.config import PARTS, AlgorithmConfig
from spreeze.networks import products_round
from spreeze.types import RowLayout, TransitionBatch
from spreeze.workers.devices import products_in

_BLOCK_S = 0.25
"""Length of one timed block; updates and products take turns block by block."""


class Product(NamedTuple):
    """``stack`` products [m, k] x [k, n] and how many of them one update makes."""

    stack: int
    m: int
    k: int
    n: int
    times: float = 1.0

    @property
    def flop(self) -> float:
        """Operations in one update: a multiplication and an addition for each m n k."""
        return 2.0 * self.times * self.stack * self.m * self.k * self.n


def forward(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Product]:
    """Products of a forward pass."""
    return [Product(stack, rows, a, b, times) for a, b in pairwise(sizes)]


def weight_gradients(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Product]:
    """Products that give the weight gradients."""
    return [Product(stack, a, rows, b, times) for a, b in pairwise(sizes)]


def input_gradients(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Product]:
    """Products that carry the gradient down to the first layer; a head with one output needs none."""
    pairs = pairwise(sizes[1:])
    return [Product(stack, rows, b, a, times) for a, b in pairs if b > 1]


def products(
    algo: str, batch_size: int, obs_dim: int, action_dim: int, hidden: tuple[int, ...], policy_delay: int = 2
) -> list[Product]:
    """The matrix products that one update of an algorithm cannot avoid."""
    critic = (obs_dim + action_dim, *hidden, 1)
    actor = (obs_dim, *hidden, 2 * action_dim if algo == "sac" else action_dim)
    stack = 1 if algo == "ddpg" else 2
    moves = 1.0 / policy_delay if algo == "td3" else 1.0
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
        Product(least_of, b, hidden[0], action_dim, moves),
        *weight_gradients(1, b, actor, moves),
        *input_gradients(1, b, actor, moves),
    ]


class ProductRound:
    """All products of ``count`` updates, ready to be run; one set of buffers for each shape."""

    def __init__(self, listed: list[Product]) -> None:
        self.flop = sum(product.flop for product in listed)
        merged: dict[tuple[int, int, int, int], float] = {}
        for product in listed:
            key = (product.stack, product.m, product.k, product.n)
            merged[key] = merged.get(key, 0.0) + product.times
        self._calls = [(_product_call(*shape), count) for shape, count in merged.items()]

    def run(self, updates: int) -> None:
        """Makes the products of that many updates."""
        for call, count in self._calls:
            for _ in range(round(updates * count)):
                call()


def _product_call(stack: int, m: int, k: int, n: int) -> Callable[[], Any]:
    """One product, written the way that is fastest for its shape."""
    a, b = torch.randn(stack, m, k), torch.randn(stack, k, n)
    if n == 1:
        product = torch.linalg.vecdot if products_round() else torch.mv
        rows = [(a[index], b[index, :, 0].contiguous(), torch.empty(m)) for index in range(stack)]
        if m < k:
            rows = [(matrix.t().contiguous().t(), vector, out) for matrix, vector, out in rows]
        return lambda: [product(matrix, vector, out=out) for matrix, vector, out in rows]
    if n < 64 <= m:
        out, a_t, b_t = torch.empty(stack, n, m), a.transpose(1, 2), b.transpose(1, 2).contiguous()
        return lambda: torch.bmm(b_t, a_t, out=out)
    if stack == 1:
        out, a0, b0 = torch.empty(m, n), a[0], b[0]
        return lambda: torch.mm(a0, b0, out=out)
    out = torch.empty(stack, m, n)
    return lambda: torch.bmm(a, b, out=out)


def synthetic_batch(layout: RowLayout, batch_size: int, gamma: float, seed: int = 0) -> TransitionBatch:
    """A batch of random rows, as the ring would give it."""
    rows = torch.randn(batch_size, layout.width, generator=torch.Generator().manual_seed(seed))
    rows[:, layout.action].tanh_()
    rows[:, layout.terminated] = 0.0
    return layout.split(rows, gamma)


def algorithm_config(algo: str, hidden: tuple[int, ...]) -> AlgorithmConfig:
    """Defaults of an algorithm with hidden layers of these sizes."""
    part = PARTS[algo]
    assert issubclass(part, AlgorithmConfig)
    return dataclasses.replace(part(), hidden_sizes=hidden)


def learner_rows(
    batch_sizes: tuple[int, ...] | list[int],
    repeats: int = 5,
    obs_dim: int = 22,
    action_dim: int = 6,
    hidden: tuple[int, ...] = (256, 256),
    threads: tuple[int, ...] | list[int] = (1,),
    algo: str = "sac",
    precisions: tuple[str, ...] | list[str] = ("float32",),
    copy_interval: int = 0,
) -> list[dict[str, Any]]:
    """Measures one row for each batch size, precision and number of threads; all take turns, products too.

    With ``copy_interval`` a pair is also measured with actor and critics beside copies of each other.
    The products are those of one thread throughout: the floor of one core, in the row's precision.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        pair = stack.enter_context(Pair()) if copy_interval or any(count > 1 for count in threads) else None
        ways = [(count, 0) for count in threads] + ([(2, copy_interval)] if copy_interval else [])
        cases: list[_Case] = []
        for size, precision, (count, interval) in itertools.product(batch_sizes, precisions, ways):
            with products_in(precision, "cpu"):
                cases.append(_Case(algo, size, obs_dim, action_dim, hidden, pair if count > 1 else None, precision,
                                   interval))
        for _ in range(repeats):
            for case in cases:
                with products_in(case.precision, "cpu"):
                    case.measure()
        return [case.row(cases) for case in cases]


class _Case:
    """One batch size: an algorithm, its product round, and what was measured."""

    def __init__(self, algo: str, batch_size: int, obs_dim: int, action_dim: int, hidden: tuple[int, ...],
                 pair: Pair | None = None, precision: str = "float32", copy_interval: int = 0) -> None:
        config = algorithm_config(algo, hidden)
        self.algo, self.batch_size, self.hidden = algo, batch_size, hidden
        self.obs_dim, self.action_dim = obs_dim, action_dim
        self.threads, self.precision, self.copy_interval = 1 if pair is None else 2, precision, copy_interval
        options: dict[str, Any] = {} if pair is None else {"pair": pair}
        self.algorithm = create(algo, obs_dim, action_dim, config, seed=0, copy_interval=copy_interval, **options)
        self.batch = synthetic_batch(RowLayout(obs_dim, action_dim), batch_size, config.gamma)
        delay = getattr(config, "policy_delay", 1)
        self.round = ProductRound(products(algo, batch_size, obs_dim, action_dim, hidden, delay))
        self.update_s: list[float] = []
        self.product_s: list[float] = []
        self.critic_s = self.actor_s = 0.0
        self._block = 2
        self._update_block()
        self.round.run(2)
        self._block = max(2, 2 * round(_BLOCK_S / self._update_block() / 2))

    def measure(self) -> None:
        """One repeat: a quarter of the block of each kind in turn, four times."""
        quarter, whole = max(2, self._block // 4), self._block
        self._block = quarter
        update_s = product_s = 0.0
        for _ in range(4):
            update_s += self._update_block() / 4
            start_s = perf_counter()
            self.round.run(quarter)
            product_s += (perf_counter() - start_s) / quarter / 4
        self._block = whole
        self.update_s.append(update_s)
        self.product_s.append(product_s)

    def _update_block(self) -> float:
        """Seconds of one update, over a block."""
        start_s = perf_counter()
        for _ in range(self._block):
            critic_s, actor_s = self.algorithm.update_timed(self.batch)
            self.critic_s += critic_s
            self.actor_s += actor_s
        return (perf_counter() - start_s) / self._block

    def _over(self, others: list[_Case], name: str, **plain: Any) -> dict[str, float]:
        """Ratio of this rate to that of the same case with ``plain`` values, repeat by repeat; empty without one."""
        wanted = {"batch_size": self.batch_size, "threads": self.threads, "precision": self.precision,
                  "copy_interval": self.copy_interval, **plain}
        for other in others:
            if other is not self and all(getattr(other, key) == value for key, value in wanted.items()):
                ratios = [slow / fast for slow, fast in zip(other.update_s, self.update_s, strict=True)]
                return {name: statistics.median(ratios)}
        return {}

    def row(self, cases: list[_Case]) -> dict[str, Any]:
        """The measured row; medians beside all repeats, and the ratio to the same updates on one core, in float32."""
        updates_per_s = [1.0 / value for value in self.update_s]
        shares = [product / update for product, update in zip(self.product_s, self.update_s, strict=True)]
        rates = [self.round.flop / value for value in self.product_s]
        return {
            "algo": self.algo,
            "batch_size": self.batch_size,
            "hidden_sizes": list(self.hidden),
            "obs_dim": self.obs_dim,
            "action_dim": self.action_dim,
            "learner_threads": self.threads,
            "precision": self.precision,
            "copy_interval": self.copy_interval,
            **self._over(cases, "over_one_thread", threads=1, copy_interval=0),
            **self._over(cases, "over_float32", precision="float32"),
            "updates_per_s": statistics.median(updates_per_s),
            "update_frames_per_s": statistics.median(updates_per_s) * self.batch_size,
            "product_floor_share": statistics.median(shares),
            "product_flop": self.round.flop,
            "matrix_flop_per_s": statistics.median(rates),
            "learner_critic_share": self.critic_s / (self.critic_s + self.actor_s),
            "learner_actor_share": self.actor_s / (self.critic_s + self.actor_s),
            "repeats": {
                "updates_per_s": updates_per_s,
                "product_floor_share": shares,
                "matrix_flop_per_s": rates,
            },
        }
