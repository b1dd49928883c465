"""What sampling costs beside the environments: the real sampler loop against a bare loop.

The bare loop steps equal environments, seeded alike, with the sampler's very actions, so both go through
the same trajectories, in one process and in short turns.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spreeze.envs.native import NativeActions
from spreeze.envs.stdout import stdout_to_stderr
from spreeze.envs.task import open_task, vector_maker
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
_TURN_S = 0.05
"""Both sides take turns this long, so that a slow moment of the machine meets them alike."""


def sampling_rows(plan: RunPlan, repeats: int, seconds: float) -> list[Row]:
    """Env steps a second of the sampler and of the bare loop, and their ratio, repeat by repeat."""
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder, stdout_to_stderr():
        for sub in SUBDIRECTORIES:
            (Path(folder) / sub).mkdir()
        publish_policy(plan, Path(folder))
        found = [_measure(plan, Path(folder), 1000 + repeat, seconds) for repeat in range(repeats)]
    more = {"env": plan.spec.env_id, "envs_per_sampler": plan.config.sampling.envs_per_sampler}
    shares = [pair.shares for pair in found]
    return [
        _row("sampler_env_steps_per_s", "1/s", [pair.sampler_per_s for pair in found], **more),
        _row("bare_env_steps_per_s", "1/s", [pair.bare_per_s for pair in found], **more),
        _row("sampler_share_of_bare", "ratio", [pair.sampler_per_s / pair.bare_per_s for pair in found],
             target=">= 0.92" if plan.spec.frames is None else ">= 0.6", **more),
        *(_row(f"sampler_{name}_share", "share", [share[name] for share in shares], **more) for name in shares[0]),
    ]


class _Pair(NamedTuple):
    """One repeat."""

    sampler_per_s: float
    bare_per_s: float
    shares: dict[str, float]


def _row(metric: str, unit: str, repeats: list[float], **more: Any) -> Row:
    return {"metric": metric, "unit": unit, "value": float(np.median(repeats)), "repeats": repeats, **more}


def publish_policy(plan: RunPlan, run_dir: Path) -> None:
    """Weights of an untrained policy, published as the learner does."""
    from spreeze.transport.frames import open_reader

    ring = Ring.create(plan.ring_spec())
    try:
        learning = Learning(plan.spec, plan.config.run.algo, plan.config.algorithm, plan.layout, open_reader(ring),
                            batch_size=64, device="cpu", seed=1, normalize_obs=plan.config.env.normalize_obs)
        arrays, meta = learning.policy(plan.spec, plan.config.run.algo)
        WeightsStore(run_dir / "weights").publish(arrays, meta, 1, 1)
    finally:
        ring.close()


def _seeds(seed: int, count: int) -> list[int]:
    return [int(s) for s in np.random.default_rng(seed).integers(2**31, size=count)]


def _measure(plan: RunPlan, run_dir: Path, seed: int, seconds: float) -> _Pair:
    """The real loop (limiter, weights look-up, policy, ring, numbers) and the bare one, in turns of 50 ms."""
    ring, board = Ring.create(plan.ring_spec()), Board.create(1)
    try:
        loop, sampling = real_sampler(plan, run_dir, ring, board, seed)
        bare = _Bare(plan, seed)
        sampler_s = bare_s = 0.0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            actions = []
            while time.perf_counter() - start < _TURN_S:
                taken = loop.turn()
                if taken is not None:
                    actions.append(taken)
            sampler_s += time.perf_counter() - start
            bare_s += bare.run(np.stack(actions))
        slots = board.named_slots(0, "sampler")
        total = sum(slots[f"{name}_s"] for name in ("policy", "env", "write", "wait"))
        steps = sampling.counts.env_steps
        sampling.close()
        bare.close()
        shares = {name: slots[f"{name}_s"] / total for name in ("policy", "env", "write")}
        return _Pair(steps / sampler_s, steps / bare_s, shares)
    finally:
        board.close()
        ring.close()


def real_sampler(plan: RunPlan, run_dir: Path, ring: Ring, board: Board, seed: int) -> tuple[SamplerLoop, Sampling]:
    """The loop of a sampler process, in this one, and the environments that it steps."""
    config, num_envs = plan.config, plan.config.sampling.envs_per_sampler
    board.header[words.WEIGHTS_HINT] = 1
    ring.begin_learning()
    ring.sampled = 2**60  # the limiter is asked each time and always says yes
    job = SamplerJob(
        run_dir=str(run_dir), spec=plan.spec, index=0, seed=seed, num_envs=num_envs, n_step=config.algorithm.n_step,
        gamma=config.algorithm.gamma, nan_policy="drop", ring_fd=ring.block.fd, ring=ring.spec.to_json(),
        samples_per_insert_min=8.0, samples_per_insert_max=512.0, learning_starts=0, batch_size=256,
    )
    sampling = Sampling(
        lambda: open_task(plan.spec),
        num_envs, plan.spec, ShardWriter(ring, 0), n_step=job.n_step, gamma=job.gamma, seeds=_seeds(seed, num_envs),
        make_vector=vector_maker(plan.spec),
    )
    return SamplerLoop(Link("sampler", 0, board, 0, None), job, ring, sampling, np.random.default_rng(seed)), sampling


class _Bare:
    """Plain environments stepped with given actions, reset by hand: what no sampler can beat."""

    def __init__(self, plan: RunPlan, seed: int) -> None:
        self._spec, num_envs = plan.spec, plan.config.sampling.envs_per_sampler
        self._to_native = NativeActions(self._spec)
        self._envs = [open_task(self._spec).env for _ in range(num_envs)]
        for env, env_seed in zip(self._envs, _seeds(seed, num_envs), strict=True):
            env.reset(seed=env_seed)

    def run(self, actions: np.ndarray) -> float:
        """Steps all environments with ``actions`` [T, N, A]; returns the seconds of the loop alone."""
        native = self._native(actions)
        start = time.perf_counter()
        for row in native:
            for env, action in zip(self._envs, row, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return time.perf_counter() - start

    def _native(self, actions: np.ndarray) -> Any:
        """The actions as the environments take them: vectors, or integers of discrete ones."""
        if self._spec.num_actions is not None:
            return (actions[:, :, 0].astype(np.int64) + self._spec.action_start).tolist()
        return self._to_native(actions)

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()


def policy_rows(plan: RunPlan, repeats: int) -> list[Row]:
    """Microseconds of one batched inference, for 1 and 8 environments."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        publish_policy(plan, Path(folder))
        weights = WeightsStore(Path(folder) / "weights").read_latest(None)
        assert weights is not None
        policy, rng = Policy.from_weights(weights.arrays, weights.meta), np.random.default_rng(0)
        for count in (1, 8):
            obs, calls = _observations(plan, count, rng)
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                for _ in range(calls):
                    policy.act(obs, rng)
                times.append(1e6 * (time.perf_counter() - start) / calls)
            rows.append(_row("policy_us", "us", times, envs=count))
    return rows


def _observations(plan: RunPlan, count: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Random observations of so many environments, and how many calls make a timing."""
    frames = plan.spec.frames
    if frames is None:
        return rng.standard_normal((count, plan.spec.obs_dim), np.float32), 2000
    return rng.integers(256, size=(count, frames.stack, *frames.shape), dtype=np.uint8), 50
