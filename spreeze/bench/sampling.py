"""What sampling costs: the real sampler loop beside bare environments, and real processes beside each other.

The bare loop steps equal environments, seeded alike, with the sampler's very actions, so both go through the same
trajectories, in one process and in short turns. Processes are started once, those of a run as it has them; for each
measurement all that must not work are stopped by SIGSTOP and go on afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from spreeze.bench import Row, row
from spreeze.config.layers import Layer, resolve, with_algorithm
from spreeze.config.profiles import task_profile
from spreeze.envs.probe import probe_env
from spreeze.envs.task import ActionScaling, open_task, vector_maker
from spreeze.errors import WorkerError
from spreeze.inference.policy import Policy
from spreeze.machine.hardware import read_machine
from spreeze.machine.output import stdout_to_stderr
from spreeze.modes.spreeze import open_memory, worker_specs
from spreeze.run_directory import SUBDIRECTORIES
from spreeze.runtime.launcher import RunContext
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.supervisor import ProcessSupervisor
from spreeze.transport import status_table as words
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_reader import open_reader
from spreeze.transport.replay_ring import ReplayRing, ShardWriter
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import WeightsStore
from spreeze.tuner.trials import counters
from spreeze.workers.collectors import TransitionCollector
from spreeze.workers.context import WorkerContext
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.roles import Address
from spreeze.workers.sampler import SamplerJob, SamplerLoop

_TURN_S = 0.05
"""The sampler and the bare loop take turns this long, so that a slow moment of the machine meets them alike."""
_START_S, _SETTLE_S = 60.0, 0.5
_FIRST_STEPS = 2000
"""Env steps of each sampler before anything is measured."""
_LEARNING_SETTLES_S = 8.0
STATES: dict[str, tuple[str, ...]] = {
    "learner alone": ("learner",),
    "samplers alone": ("sampler",),
    "together": ("learner", "sampler"),
    "with evaluator and visualizer": ("learner", "sampler", "evaluator", "visualizer"),
}
"""Which roles work."""


def task_plan(
    env_id: str, samplers: int = 1, envs_per_sampler: int | None = None, import_module: str | None = None, *,
    plain: bool = False, env_args: tuple[str, ...] = (),
) -> RunPlan:
    """The task's own settings, nobody throttled, the visualizer on."""
    profile = task_profile(env_id)
    layers = [
        *([profile] if profile else []),
        Layer("bench", {
            "env": {"id": env_id, "import_module": import_module, "plain": plain, "args": env_args},
            "sampling": {"samplers": samplers, **({"envs_per_sampler": envs_per_sampler} if envs_per_sampler else {})},
            "replay": {"samples_per_insert_min": 0.0, "samples_per_insert_max": 1e9, "learning_starts": 2000},
        }),
    ]
    settings = resolve(layers)
    spec = probe_env(env_id, import_module, steps=0, plain=plain, args=env_args,
                     image=dataclasses.asdict(settings.config.image)).spec
    settings, _ = with_algorithm(layers, settings, spec)
    return RunPlan(settings=settings, spec=spec, samplers=samplers,
                   free_core=read_machine().cores.usable - samplers >= 2.0)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A temporary folder as a run has it."""
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as name:
        for sub in SUBDIRECTORIES:
            (Path(name) / sub).mkdir()
        yield Path(name)


# --- the sampler's loop, in this process ---


def sampling_rows(plan: RunPlan, repeats: int, seconds: float) -> list[Row]:
    """Env steps a second of the sampler and of the bare loop, and their ratio, repeat by repeat."""
    with run_folder() as folder, stdout_to_stderr():
        publish_policy(plan, folder)
        found = [_measure(plan, folder, 1000 + repeat, seconds) for repeat in range(repeats)]
    more = _names(plan)
    shares = [pair.shares for pair in found]
    return [
        row("sampler_env_steps_per_s", "1/s", [pair.sampler_per_s for pair in found], **more),
        row("bare_env_steps_per_s", "1/s", [pair.bare_per_s for pair in found], **more),
        row("sampler_share_of_bare", "ratio", [pair.sampler_per_s / pair.bare_per_s for pair in found],
            target=">= 0.92" if plan.spec.frames is None else ">= 0.6", **more),
        *(row(f"sampler_{name}_share", "share", [share[name] for share in shares], **more) for name in shares[0]),
    ]


def _names(plan: RunPlan) -> dict[str, Any]:
    return {"env": plan.spec.env_id, "envs_per_sampler": plan.config.sampling.envs_per_sampler}


class _Pair(NamedTuple):
    sampler_per_s: float
    bare_per_s: float
    shares: dict[str, float]


def publish_policy(plan: RunPlan, run_dir: Path) -> None:
    """Weights of an untrained policy, published as the learner does."""
    with contextlib.closing(ReplayRing.create(plan.ring_spec())) as ring:
        learning = ReplayTrainer(plan.spec, plan.config.run.algo, plan.config.algorithm, plan.layout, open_reader(ring),
                            batch_size=64, device="cpu", seed=1, normalize_obs=plan.config.env.normalize_obs)
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
                taken = loop.turn()
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


def _let_sample(ring: ReplayRing, status: StatusTable) -> None:
    """Weights are there, and the limiter, which is asked each time, always says yes."""
    status.header[words.WEIGHTS_HINT] = 1
    ring.begin_learning()
    ring.sampled = 2**60


def real_sampler(
    plan: RunPlan, run_dir: Path, ring: ReplayRing, status: StatusTable, seed: int
) -> tuple[SamplerLoop, TransitionCollector]:
    """The loop of a sampler process, in this one, and the environments that it steps."""
    config, num_envs = plan.config, plan.config.sampling.envs_per_sampler
    _let_sample(ring, status)
    job = SamplerJob(
        run_dir=str(run_dir), spec=plan.spec, index=0, seed=seed, num_envs=num_envs, n_step=config.algorithm.n_step,
        gamma=config.algorithm.gamma, nan_policy="drop", ring_fd=ring.block.fd, ring=ring.spec,
        limiter=RateLimiter(8.0, 512.0, 0, 256, num_envs * ring.spec.num_shards),
    )
    sink = ShardWriter(ring, 0)
    sampling = TransitionCollector(
        lambda: open_task(plan.spec),
        num_envs, plan.spec, sink, n_step=job.n_step, gamma=job.gamma, seeds=_seeds(seed, num_envs),
        make_vector=vector_maker(plan.spec),
    )
    return SamplerLoop(
        WorkerContext(Address("sampler"), status, 0, None), job, sink, sampling, np.random.default_rng(seed)
    ), sampling


class _Bare:
    """Plain environments stepped with given actions, reset by hand: what no sampler can beat."""

    def __init__(self, plan: RunPlan, seed: int) -> None:
        self._spec, num_envs = plan.spec, plan.config.sampling.envs_per_sampler
        self._to_native = ActionScaling(self._spec)
        self._envs = [open_task(self._spec).env for _ in range(num_envs)]
        for env, env_seed in zip(self._envs, _seeds(seed, num_envs), strict=True):
            env.reset(seed=env_seed)

    def run(self, actions: np.ndarray) -> float:
        """Steps all environments with ``actions`` [T, N, A]; returns the seconds of the loop alone."""
        native = self._native(actions)
        start = time.perf_counter()
        for of_step in native:
            for env, action in zip(self._envs, of_step, strict=True):
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
        for env in self._envs:
            env.close()


def policy_rows(plan: RunPlan, repeats: int) -> list[Row]:
    """Microseconds of one batched inference, for 1 and 8 environments."""
    rows = []
    with run_folder() as folder:
        publish_policy(plan, folder)
        weights = WeightsStore(folder / "weights").read_latest(None)
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
            rows.append(row("policy_us", "us", times, envs=count))
    return rows


def _observations(plan: RunPlan, count: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Random observations of so many environments, and how many calls make a timing."""
    frames = plan.spec.frames
    if frames is None:
        return rng.standard_normal((count, plan.spec.obs_dim), np.float32), 2000
    return rng.integers(256, size=(count, frames.stack, *frames.shape), dtype=np.uint8), 50


# --- processes of a run, stopped and let go on in turns ---


class _Processes:
    """Workers of a run, of whom only those work that a measurement is about."""

    def __init__(self, workers: ProcessSupervisor, status: StatusTable, ring: ReplayRing, samplers: int) -> None:
        self.workers, self.status, self.ring, self._samplers = workers, status, ring, samplers

    def pass_time(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Watches them for so long, or until the condition is true.

        Raises:
            WorkerError: one died.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            self.workers.wait(0.02)
            self.workers.watch()
            if self.workers.restarts:
                raise WorkerError(f"a worker died during the measurement: {self.workers.first_error}")

    def let_work(self, roles: Collection[str], first: int | None = None) -> None:
        """Those of these roles work, of each only the first so many if that is said; the others stand still."""
        for post in self.workers.handles.values():
            if post.process is not None:
                works = post.spec.role.name in roles and (first is None or post.spec.address.index < first)
                os.kill(post.process.pid, signal.SIGCONT if works else signal.SIGSTOP)

    def rates(self, seconds: float) -> tuple[float, float]:
        """(env steps, updates) a second over that time."""
        self.pass_time(_SETTLE_S)
        before, start = counters(self.status, self._samplers), time.monotonic()
        self.pass_time(seconds)
        after, took_s = counters(self.status, self._samplers), time.monotonic() - start
        return (after[0] - before[0]) / took_s, (after[1] - before[1]) / took_s


@contextlib.contextmanager
def _processes(plan: RunPlan, roles: Collection[str]) -> Iterator[_Processes]:
    """Those of the run that ``plan`` describes; they have ended when this ends."""
    num_rows = plan.samplers + 3
    with run_folder() as folder, open_memory(plan, folder, num_rows) as (status, (ring,)):
        run_context = RunContext(run_dir=folder, status_fd=status.block.fd, status_rows=num_rows,
                                 nonce=secrets.token_hex(8))
        workers = ProcessSupervisor(run_context, status, on_event=lambda level, text: None)
        found = _Processes(workers, status, ring, plan.samplers)
        try:
            if "learner" not in roles:
                publish_policy(plan, folder)
                _let_sample(ring, status)
            for spec in worker_specs(plan, folder, [ring], time.monotonic()).values():
                if spec.role.name in roles:
                    workers.add(spec)
            yield found
        finally:
            found.let_work(roles)
            workers.stop(hurry=lambda: True, on_messages=lambda messages: None)


def samplers_rows(plan: RunPlan, repeats: int, seconds: float) -> list[Row]:
    """Memory of a sampler process, bytes of a row, env steps a second of one sampler and of two.

    Raises:
        WorkerError: a sampler died, or one took no env steps within a minute.
    """
    plan = dataclasses.replace(plan, samplers=2)
    pairs = []
    with _processes(plan, ("sampler",)) as found:
        def all_step() -> bool:
            return min(float(found.status.named_slots(index, "sampler")["env_steps"]) for index in range(2)) \
                >= _FIRST_STEPS

        found.pass_time(_START_S, until=all_step)
        if not all_step():
            raise WorkerError(f"the samplers did not take {_FIRST_STEPS} env steps each within {_START_S:g} s")
        memory = _memory_bytes(found.workers)
        for _ in range(repeats):
            found.let_work(["sampler"], first=1)
            one = found.rates(seconds)[0]
            found.let_work(["sampler"])
            pairs.append((one, found.rates(seconds)[0]))
    more = _names(plan)
    return [
        {"metric": "sampler_memory_bytes", "unit": "bytes", "value": memory, "target": "<= 350e6", **more},
        {"metric": "row_bytes", "unit": "bytes", "value": plan.layout.row_bytes, **more},
        row("one_sampler_env_steps_per_s", "1/s", [one for one, _ in pairs], **more),
        row("two_samplers_env_steps_per_s", "1/s", [both for _, both in pairs], **more),
        row("two_samplers_over_one", "ratio", [both / one for one, both in pairs],
            target=">= 1.9 on two free cores", **more),
    ]


def _memory_bytes(workers: ProcessSupervisor) -> int:
    """The largest proportional resident memory of a worker (its share of pages that processes have in common)."""
    children = [handle.process for handle in workers.handles.values() if handle.process is not None]
    held = [psutil.Process(child.pid).memory_full_info() for child in children]
    return max(int(getattr(info, "pss", info.rss)) for info in held)


def together_rows(plan: RunPlan, repeats: int, seconds: float) -> list[Row]:
    """Rates of sampler and learner alone, together, and with evaluator and visualizer; what each side keeps.

    Raises:
        WorkerError: a worker died.
    """
    rates: dict[str, list[tuple[float, float]]] = {state: [] for state in STATES}
    with _processes(plan, STATES["with evaluator and visualizer"]) as found:
        found.pass_time(_START_S, until=lambda: found.ring.sampled > 0)
        found.pass_time(_LEARNING_SETTLES_S)
        for _ in range(repeats):
            for state, working in STATES.items():
                found.let_work(working)
                rates[state].append(found.rates(seconds))
    rows = []
    for state, pairs in rates.items():
        for at, (metric, role) in enumerate((("env_steps_per_s", "sampler"), ("updates_per_s", "learner"))):
            if role in STATES[state]:
                rows.append(row(metric, "1/s", [pair[at] for pair in pairs], state=state))
    comparisons = (
        ("sampler_kept_together", 0, "together", "samplers alone", ">= 0.9"),
        ("learner_kept_together", 1, "together", "learner alone", ">= 0.9"),
        ("learner_kept_beside_evaluator_and_visualizer", 1, "with evaluator and visualizer", "together",
         ">= 0.95 on three free cores"),
    )
    for name, at, state, reference, target in comparisons:
        pairs_of = zip(rates[state], rates[reference], strict=True)
        rows.append(row(name, "ratio", [new[at] / old[at] for new, old in pairs_of if old[at]], target=target))
    return rows
