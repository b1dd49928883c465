"""Processes of a run beside each other: what sampler and learner keep, two samplers over one, and their memory.

Processes are started once, those of a run as it has them; for each measurement all that must not work are stopped by
SIGSTOP and go on afterwards. ``python tests/processes_together.py [--env ID]`` prints the figures.
"""

from __future__ import annotations

import argparse
import dataclasses

import psutil

from spreeze.bench import Row, line, row
from spreeze.bench.paper import scaling_rows, worker_group
from spreeze.bench.sampling import names, task_plan
from spreeze.machine.hardware import read_machine
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.supervisor import ProcessSupervisor

_START_S = 60.0
_LEARNING_SETTLES_S = 8.0
STATES: dict[str, tuple[str, ...]] = {
    "learner alone": ("learner",),
    "samplers alone": ("sampler",),
    "together": ("learner", "sampler"),
    "with evaluator and visualizer": ("learner", "sampler", "evaluator", "visualizer"),
}
"""Which roles work."""


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
    with worker_group(plan, STATES["with evaluator and visualizer"]) as found:
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
    rows = [*memory_rows(plan), *scaling_rows(plan, [1, 2], args.repeats, args.seconds),
            *together_rows(plan, args.repeats, args.seconds)]
    print(read_machine().one_line(), *map(line, rows), sep="\n")


if __name__ == "__main__":
    main()
