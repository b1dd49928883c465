"""Processes of a run beside each other: what sampler and learner keep, two samplers over one, and their memory.

Processes are started once, those of a run as it has them; for each measurement all that must not work are stopped by
SIGSTOP and go on afterwards. ``python tests/processes_together.py [--env ID]`` prints the figures.
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

from spreeze.bench import Row, line, row
from spreeze.bench.sampling import let_sample, names, publish_policy, run_folder, task_plan
from spreeze.errors import WorkerError
from spreeze.machine.hardware import read_machine
from spreeze.modes.spreeze import open_memory, worker_specs
from spreeze.runtime.launcher import RunContext
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.supervisor import ProcessSupervisor
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.status_table import StatusTable
from spreeze.tuner.trials import counters

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
                with contextlib.suppress(ProcessLookupError):  # ``pass_time`` reports it
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
                let_sample(ring, status)
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
    more = names(plan)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="Walker2DBulletEnv-v0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    plan = task_plan(args.env)
    rows = [*samplers_rows(plan, args.repeats, args.seconds), *together_rows(plan, args.repeats, args.seconds)]
    print(read_machine().one_line(), *map(line, rows), sep="\n")


if __name__ == "__main__":
    main()
