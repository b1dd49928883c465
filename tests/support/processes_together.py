"""Processes of a run beside each other: what sampler and learner keep, two samplers over one, and their memory.

Processes are started once, those of a run as it has them; for each measurement all that must not work are stopped by
SIGSTOP and go on afterwards.
``python tests/support/processes_together.py [--env ID] [--samplers 1 2 4 8]`` prints the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterator

import psutil
from figures import Row, line, row
from sampler_cost import let_sample, names, publish_policy, run_folder, task_plan

from spreeze.errors import WorkerError
from spreeze.machine.hardware import read_machine
from spreeze.machine.logs import LogKeeper
from spreeze.modes import assemble
from spreeze.modes.replay_modes import ReplayData
from spreeze.runtime.assembly import Assembly, assembled
from spreeze.runtime.launcher import RunContext
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.worker_pool import WorkerPool

_START_S, _SETTLE_S = 60.0, 0.5
_LEARNING_SETTLES_S = 8.0
_FIRST_STEPS = 2000
"""Env steps of each sampler before anything is measured."""
STATES: dict[str, tuple[str, ...]] = {
    "learner alone": ("learner",),
    "samplers alone": ("sampler",),
    "together": ("learner", "sampler"),
    "with evaluator and visualizer": ("learner", "sampler", "evaluator", "visualizer"),
}
"""Which roles work."""


class WorkerGroup:
    """Workers of a run, of whom only those work that a measurement is about; the others are stopped by SIGSTOP."""

    def __init__(self, workers: WorkerPool, run: Assembly) -> None:
        self.workers, self.run = workers, run

    def pass_time(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Watches them for so long, or until the condition is true.

        Raises:
            WorkerError: one died.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            self.workers.wait(0.02)
            self.workers.watch()
            if self.workers.restart_count:
                raise WorkerError(f"a worker died during the measurement: {self.workers.first_error}")

    def let_work(self, roles: Collection[str], first: int | None = None) -> None:
        """Those of these roles work, of each only the first so many if that is said; the others stand still."""
        for post in self.workers.handles.values():
            if post.process is not None:
                works = post.spec.role.name in roles and (first is None or post.spec.address.index < first)
                with contextlib.suppress(ProcessLookupError):  # ``pass_time`` reports it
                    os.kill(post.process.pid, signal.SIGCONT if works else signal.SIGSTOP)

    def rates(self, seconds: float) -> tuple[float, float]:
        """(env steps, updates) a second over that time."""
        self.pass_time(_SETTLE_S)
        before, start = self.run.counters(), time.monotonic()
        self.pass_time(seconds)
        after, took_s = self.run.counters(), time.monotonic() - start
        return (after[0] - before[0]) / took_s, (after[1] - before[1]) / took_s

    def begun(self, env_steps: int = _FIRST_STEPS) -> bool:
        """Whether each sampler has taken so many env steps."""
        return all(
            self.run.slots(spec)["env_steps"] >= env_steps for spec in self.run.specs.values() if spec.role.steps
        )


@contextlib.contextmanager
def worker_group(plan: RunPlan, roles: Collection[str]) -> Iterator[WorkerGroup]:
    """Workers of these roles of the run that ``plan`` describes; they have ended when this ends."""
    with run_folder() as folder, assembled(assemble, plan, folder, time.monotonic()) as run, LogKeeper() as logs:
        run_context = RunContext(run_dir=folder, status=run.status, nonce=secrets.token_hex(8), logs=logs)
        workers = WorkerPool(run_context, on_event=lambda level, text: None)
        found = WorkerGroup(workers, run)
        try:
            if "learner" not in roles:
                publish_policy(plan, folder)
                (data,) = run.data
                assert isinstance(data, ReplayData)
                let_sample(data.ring, run.status)
            for spec in run.specs.values():
                if spec.role.name in roles:
                    workers.add(spec)
            yield found
        finally:
            found.let_work(roles)
            workers.stop(hurry=lambda: True, on_messages=lambda messages: None)


def scaling_rows(plan: RunPlan, counts: list[int], repeats: int, seconds: float) -> list[Row]:
    """Env steps/s of so many sampler processes at once without a learner, and over one, in turns.

    Raises:
        WorkerError: a sampler died, or one took too few env steps within a minute.
    """
    counts = sorted({1, *counts})
    plan = dataclasses.replace(plan, samplers=counts[-1])
    rates: dict[int, list[float]] = {count: [] for count in counts}
    with worker_group(plan, ("sampler",)) as found:
        found.pass_time(_START_S, until=found.begun)
        if not found.begun():
            raise WorkerError(f"the samplers did not take {_FIRST_STEPS} env steps each within {_START_S:g} s")
        for _ in range(repeats):
            for count in counts:
                found.let_work(["sampler"], first=count)
                rates[count].append(found.rates(seconds)[0])
    more = {"env": plan.spec.env_id, "envs_per_sampler": plan.config.sampling.envs_per_sampler}
    rows = [row("env_steps_per_s", "1/s", found_rates, samplers=count, **more) for count, found_rates in rates.items()]
    return rows + [
        row(
            "over_one_sampler",
            "ratio",
            [many / one for many, one in zip(rates[count], rates[1], strict=True)],
            samplers=count,
            target=">= 14" if count == 16 else None,
            **more,
        )
        for count in counts[1:]
    ]


def memory_rows(plan: RunPlan) -> list[Row]:
    """Memory of a sampler process beside another one, and bytes of a row.

    Raises:
        WorkerError: a sampler died.
    """
    plan = dataclasses.replace(plan, samplers=2)
    with worker_group(plan, ("sampler",)) as found:
        found.pass_time(_START_S, until=found.begun)
        memory = _memory_bytes(found.workers)
    more = names(plan)
    return [
        {"metric": "sampler_memory_bytes", "unit": "bytes", "value": memory, "target": "<= 350e6", **more},
        {"metric": "row_bytes", "unit": "bytes", "value": plan.layout.row_bytes, **more},
    ]


def _memory_bytes(workers: WorkerPool) -> int:
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
    with worker_group(plan, STATES["with evaluator and visualizer"]) as found:
        found.pass_time(_START_S, until=lambda: found.run.counters()[1] > 0)
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
        (
            "learner_kept_beside_evaluator_and_visualizer",
            1,
            "with evaluator and visualizer",
            "together",
            ">= 0.95 on three free cores",
        ),
    )
    for name, at, state, reference, target in comparisons:
        pairs_of = zip(rates[state], rates[reference], strict=True)
        rows.append(row(name, "ratio", [new[at] / old[at] for new, old in pairs_of if old[at]], target=target))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="Walker2DBulletEnv-v0")
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    plan = task_plan(args.env)
    rows = [
        *memory_rows(plan),
        *scaling_rows(plan, args.samplers, args.repeats, args.seconds),
        *together_rows(plan, args.repeats, args.seconds),
    ]
    print(read_machine().one_line(), *map(line, rows), sep="\n")


if __name__ == "__main__":
    main()
