"""Cost of sampling: the real sampler loop beside bare environments.

The bare loop steps equal environments, seeded alike, with the sampler's very actions. Both go through the same
trajectories, in one process and in short turns.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import Row, row
from whole_runs import task_settings

from spreeze.config.layers import Layer, Values
from spreeze.config.schema import LearnerConfig
from spreeze.envs.task import ActionScaling, open_task, vector_maker
from spreeze.machine.hardware import read_machine
from spreeze.machine.output import stdout_to_stderr
from spreeze.run_directory import SUBDIRECTORIES
from spreeze.runtime.plan import RunPlan
from spreeze.transport import status_table
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, ShardWriter
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import WeightsStore
from spreeze.workers.collectors.transition_collector import TransitionCollector, VectorCollector
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import ReplaySamplerJob
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.roles import Address
from spreeze.workers.samplers import SamplerLoop

_TURN_S = 0.05
"""The sampler and the bare loop take turns this long, so that a slow moment of the machine meets them alike."""


def task_plan(
    env_id: str,
    samplers: int = 1,
    envs_per_sampler: int | None = None,
    import_module: str | None = None,
    *,
    plain: bool = False,
    env_args: tuple[str, ...] = (),
) -> RunPlan:
    """The task's own settings, without a limit on samples per insert."""
    sampling = {"samplers": samplers} | ({"envs_per_sampler": envs_per_sampler} if envs_per_sampler else {})
    values: Values = {
        "run": {"mode": "spreeze"},
        "env": {"id": env_id, "import_module": import_module, "plain": plain, "args": env_args},
        "sampling": sampling,
        "replay": {"samples_per_insert_min": 0.0, "samples_per_insert_max": 1e9, "learning_starts": 2000},
    }
    settings, spec = task_settings([Layer("bench", values)])
    return RunPlan(
        settings=settings, spec=spec, samplers=samplers, free_core=read_machine().cores.usable - samplers >= 2.0
    )


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A temporary folder as a run has it."""
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as name:
        for sub in SUBDIRECTORIES:
            (Path(name) / sub).mkdir()
        yield Path(name)


# --- the sampler's loop, in this process ---


def sampling_rows(plan: RunPlan, repeats: int, seconds: float) -> list[Row]:
    """Env steps/s of the sampler and of the bare loop, and their ratio, repeat by repeat."""
    with run_folder() as folder, stdout_to_stderr():
        publish_policy(plan, folder)
        found = [_measure(plan, folder, 1000 + repeat, seconds) for repeat in range(repeats)]
    more = names(plan)
    shares = [pair.shares for pair in found]
    return [
        row("sampler_env_steps_per_s", "1/s", [pair.sampler_per_s for pair in found], **more),
        row("bare_env_steps_per_s", "1/s", [pair.bare_per_s for pair in found], **more),
        row(
            "sampler_share_of_bare",
            "ratio",
            [pair.sampler_per_s / pair.bare_per_s for pair in found],
            target=">= 0.92" if plan.spec.frames is None else ">= 0.6",
            **more,
        ),
        *(row(f"sampler_{name}_share", "share", [share[name] for share in shares], **more) for name in shares[0]),
    ]


def names(plan: RunPlan) -> dict[str, Any]:
    return {"env": plan.spec.env_id, "envs_per_sampler": plan.config.sampling.envs_per_sampler}


class _Pair(NamedTuple):
    sampler_per_s: float
    bare_per_s: float
    shares: dict[str, float]


def publish_policy(plan: RunPlan, run_dir: Path) -> None:
    """Weights of an untrained policy, published as the learner does."""
    with contextlib.closing(ReplayRing.create(plan.ring_spec())) as ring:
        learning = ReplayTrainer(
            plan.spec,
            plan.config.run.algo,
            plan.config.algorithm,
            plan.layout,
            ReplayReader(ring),
            LearnerConfig(batch_size=64, device="cpu"),
            seed=1,
            normalize_obs=plan.config.env.normalize_obs,
        )
        arrays, meta = learning.policy()
        WeightsStore(run_dir / "weights").publish(arrays, meta, 1, 1)


def _seeds(seed: int, count: int) -> list[int]:
    return [int(s) for s in np.random.default_rng(seed).integers(2**31, size=count)]


def _measure(plan: RunPlan, run_dir: Path, seed: int, seconds: float) -> _Pair:
    """The real loop (limiter, weights look-up, policy, ring, numbers) and the bare one, in turns of 50 ms."""
    with (
        contextlib.closing(ReplayRing.create(plan.ring_spec())) as ring,
        contextlib.closing(StatusTable.create(1)) as status,
    ):
        loop, sampling = real_sampler(plan, run_dir, ring, status, seed)
        bare = _Bare(plan, seed)
        sampler_s = bare_s = 0.0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            actions = []
            while time.perf_counter() - start < _TURN_S:
                taken = loop.step_or_wait()
                if taken is not None:
                    actions.append(taken)
            sampler_s += time.perf_counter() - start
            bare_s += bare.run(np.stack(actions))
        slots = status.named_slots(0, "sampler")
        total = sum(slots[f"{name}_s"] for name in ("policy", "env", "write", "wait"))
        steps = sampling.counts.env_steps
        sampling.close()
        bare.close()
        shares = {name: slots[f"{name}_s"] / total for name in ("policy", "env", "write")}
        return _Pair(steps / sampler_s, steps / bare_s, shares)


def let_sample(ring: ReplayRing, status: StatusTable) -> None:
    """Weights are there, and the limiter, which is asked each time, always says yes."""
    status.header[status_table.WEIGHTS_COUNTER] = 1
    ring.begin_learning()
    ring.rows_drawn = 2**60


def real_sampler(
    plan: RunPlan, run_dir: Path, ring: ReplayRing, status: StatusTable, seed: int
) -> tuple[SamplerLoop, TransitionCollector]:
    """The loop of a sampler process, in this one, and the environments that it steps."""
    config, num_envs = plan.config, plan.config.sampling.envs_per_sampler
    let_sample(ring, status)
    job = ReplaySamplerJob(
        group_dir=str(run_dir),
        spec=plan.spec,
        index=0,
        seed=seed,
        num_envs=num_envs,
        n_step=config.algorithm.n_step,
        gamma=config.algorithm.gamma,
        nan_policy="drop",
        replay=ring.handle,
        limiter=RateLimiter(8.0, 512.0, 0, 256, num_envs * ring.spec.num_shards),
    )
    sink = ShardWriter(ring, 0)
    make_vector = vector_maker(plan.spec)
    sampling = (TransitionCollector if make_vector is None else partial(VectorCollector, make_vector=make_vector))(
        lambda: open_task(plan.spec),
        num_envs,
        plan.spec,
        sink,
        n_step=job.n_step,
        gamma=job.gamma,
        seeds=_seeds(seed, num_envs),
    )
    return SamplerLoop(
        WorkerContext(Address("sampler"), status, 0, None), job, sink, sampling, np.random.default_rng(seed)
    ), sampling


class _Bare:
    """Plain environments stepped with given actions, reset by hand: what no sampler can beat.

    Those of an engine are stepped by it, in its own loop, and reset themselves.
    """

    def __init__(self, plan: RunPlan, seed: int) -> None:
        self._spec, num_envs = plan.spec, plan.config.sampling.envs_per_sampler
        self._to_env_units = ActionScaling(self._spec)
        make, self._envs, self._vector = vector_maker(self._spec), [], None
        if make is not None:
            self._vector = make(num_envs, seed)
            self._vector.reset(seed)
            return
        self._envs = [open_task(self._spec).env for _ in range(num_envs)]
        for env, env_seed in zip(self._envs, _seeds(seed, num_envs), strict=True):
            env.reset(seed=env_seed)

    def run(self, actions: np.ndarray) -> float:
        """Steps all environments with ``actions`` [T, N, A]; returns the seconds of the loop alone."""
        native = self._native(actions)
        start = time.perf_counter()
        for of_step in native:
            if self._vector is not None:
                self._vector.env.step(of_step)
                continue
            for env, action in zip(self._envs, of_step, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return time.perf_counter() - start

    def _native(self, actions: np.ndarray) -> Any:
        """The actions as the environments take them: vectors, or integers of choices."""
        if self._vector is not None:
            return [self._vector.native(of_step) for of_step in self._to_env_units(actions)]
        form = self._spec.form()
        return [[form(row) for row in self._to_env_units(of_step)] for of_step in actions]

    def close(self) -> None:
        for env in self._envs:
            env.close()
        if self._vector is not None:
            self._vector.close()
