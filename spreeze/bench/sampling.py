"""What sampling costs beside the environments: the real sampler loop against a bare loop.

The sampler goes first and its actions are kept; the bare loop then steps equal environments, seeded
alike, with those very actions, so both step the same trajectories. Both run in this process, in turn.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.envs.registry import make_env
from spreeze.envs.stdout import stdout_to_stderr
from spreeze.envs.task import Task, native_bounds, to_native
from spreeze.policies import Policy
from spreeze.rundir import SUBDIRECTORIES
from spreeze.transport import board as words
from spreeze.transport.board import Board
from spreeze.transport.ring import Ring, ShardWriter
from spreeze.transport.weights import WeightsStore
from spreeze.workers.learning import Learning
from spreeze.workers.link import Link
from spreeze.workers.plan import RunPlan
from spreeze.workers.sampler import SamplerJob, SamplerLoop
from spreeze.workers.sampling import Sampling

Row = dict[str, Any]


def sampling_rows(plan: RunPlan, repeats: int, seconds: float) -> list[Row]:
    """Env steps a second of the sampler and of the bare loop, and their ratio, repeat by repeat."""
    sampler, bare, split = [], [], []
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder, stdout_to_stderr():
        for sub in SUBDIRECTORIES:
            (Path(folder) / sub).mkdir()
        _publish_policy(plan, Path(folder))
        for repeat in range(repeats):
            rate, actions, shares = _sampler_rate(plan, Path(folder), 1000 + repeat, seconds)
            sampler.append(rate)
            split.append(shares)
            bare.append(_bare_rate(plan, actions, 1000 + repeat))
    ratios = [ours / theirs for ours, theirs in zip(sampler, bare, strict=True)]
    more = {"env": plan.spec.env_id, "envs_per_sampler": plan.config.sampling.envs_per_sampler}
    return [
        _row("sampler_env_steps_per_s", "1/s", sampler, **more),
        _row("bare_env_steps_per_s", "1/s", bare, **more),
        _row("sampler_share_of_bare", "ratio", ratios, target=">= 0.92", **more),
        *(_row(f"sampler_{name}_share", "share", [shares[name] for shares in split], **more) for name in split[0]),
    ]


def _row(metric: str, unit: str, repeats: list[float], **more: Any) -> Row:
    return {"metric": metric, "unit": unit, "value": float(np.median(repeats)), "repeats": repeats, **more}


def _publish_policy(plan: RunPlan, run_dir: Path) -> None:
    """Weights of an untrained policy, published as the learner does."""
    from spreeze.transport.ring_reader import RingReader

    ring = Ring.create(plan.ring_spec())
    try:
        learning = Learning(plan.spec, plan.config.run.algo, plan.config.algorithm, plan.layout, RingReader(ring),
                            batch_size=64, device="cpu", seed=1, normalize_obs=plan.config.env.normalize_obs)
        arrays, meta = learning.policy(plan.spec, plan.config.run.algo)
        WeightsStore(run_dir / "weights").publish(arrays, meta, 1, 1)
    finally:
        ring.close()


def _seeds(seed: int, count: int) -> list[int]:
    return [int(s) for s in np.random.default_rng(seed).integers(2**31, size=count)]


def _sampler_rate(
    plan: RunPlan, run_dir: Path, seed: int, seconds: float
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Rate of the real loop with limiter, weights look-up, policy, ring and numbers; actions [T, N, A]."""
    config, num_envs = plan.config, plan.config.sampling.envs_per_sampler
    ring, board = Ring.create(plan.ring_spec()), Board.create(1)
    try:
        board.header[words.WEIGHTS_HINT] = 1
        ring.begin_learning()
        ring.sampled = 2**60  # the limiter is asked each time and always says yes
        job = SamplerJob(
            run_dir=str(run_dir), spec=plan.spec, index=0, seed=seed, num_envs=num_envs, n_step=config.algorithm.n_step,
            gamma=config.algorithm.gamma, nan_policy="drop", ring_fd=ring.block.fd, ring=ring.spec.to_json(),
            samples_per_insert_min=8.0, samples_per_insert_max=512.0, learning_starts=0, batch_size=256,
        )
        sampling = Sampling(
            lambda: Task(make_env(plan.spec.env_id, plan.spec.import_module, plain=plan.spec.plain), plan.spec),
            num_envs, plan.spec,
            ShardWriter(ring, 0), n_step=job.n_step, gamma=job.gamma, seeds=_seeds(seed, num_envs),
        )
        loop = SamplerLoop(Link("sampler", 0, board, 0, None), job, ring, sampling, np.random.default_rng(seed))
        actions, start = [], time.perf_counter()
        while time.perf_counter() - start < seconds:
            taken = loop.turn()
            if taken is not None:
                actions.append(taken)
        took = time.perf_counter() - start
        slots = board.named_slots(0, "sampler")
        total = sum(slots[f"{name}_s"] for name in ("policy", "env", "write", "wait"))
        shares = {name: slots[f"{name}_s"] / total for name in ("policy", "env", "write")}
        sampling.close()
        return sampling.counts.env_steps / took, np.stack(actions), shares
    finally:
        board.close()
        ring.close()


def _bare_rate(plan: RunPlan, actions: np.ndarray, seed: int) -> float:
    """Rate of plain environments stepped with precomputed actions [T, N, A], reset at episode ends."""
    low, high = native_bounds(plan.spec)
    native = to_native(actions.reshape(-1, actions.shape[-1]).copy(), low, high).reshape(actions.shape)
    spec = plan.spec
    envs = [make_env(spec.env_id, spec.import_module, plain=spec.plain) for _ in range(actions.shape[1])]
    for env, env_seed in zip(envs, _seeds(seed, len(envs)), strict=True):
        env.reset(seed=env_seed)
    start = time.perf_counter()
    for row in native:
        for env, action in zip(envs, row, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
    took = time.perf_counter() - start
    for env in envs:
        env.close()
    return float(actions.shape[0] * actions.shape[1] / took)


def policy_rows(plan: RunPlan, repeats: int) -> list[Row]:
    """Microseconds of one batched inference, for 1 and 8 environments."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        _publish_policy(plan, Path(folder))
        weights = WeightsStore(Path(folder) / "weights").read_latest(None)
        assert weights is not None
        policy, rng = Policy.from_weights(weights.arrays, weights.meta), np.random.default_rng(0)
        for count in (1, 8):
            obs = rng.standard_normal((count, plan.spec.obs_dim), np.float32)
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                for _ in range(2000):
                    policy.act(obs, rng)
                times.append(1e6 * (time.perf_counter() - start) / 2000)
            rows.append(_row("policy_us", "us", times, envs=count))
    return rows
