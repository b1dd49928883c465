"""A pair of learner threads against one thread, each with a real sampler that is held back beside it.

Two crews of a real learner and a real sampler run in turn, the other one paused; the sampler waits
wherever fewer transitions were drawn for each one inserted than asked, so most of its core is free.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from spreeze.autotune.records import LearnerSetting
from spreeze.errors import WorkerError
from spreeze.hardware import read_machine
from spreeze.modes.ensemble import Company, Ensemble
from spreeze.modes.troupe import Unfit, Window
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan

SAMPLES_PER_INSERT_MIN = 128.0
"""Two transitions inserted for each update of batch 256."""
_START_S, _SETTLE_S = 60.0, 0.5
_CAP_BYTES = 8 * 10**9


def beside_rows(plan: RunPlan, batch_size: int, repeats: int, window_s: float) -> list[dict[str, Any]]:
    """Updates/s and env steps/s with one and with two threads, and the ratio of each repeat.

    Raises:
        WorkerError: a learner or a sampler did not start, or died.
    """
    found: dict[int, list[Window]] = {1: [], 2: []}
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        crews = {threads: stack.enter_context(_crew(plan, batch_size, threads, interrupts)) for threads in found}
        try:
            for crew in crews.values():
                crew.start()
                crew.begin(_START_S)
            for number in range(repeats):
                for threads in sorted(crews, reverse=bool(number % 2)):
                    crews[threads].resume()
                    found[threads].append(crews[threads].window(plan.samplers, _SETTLE_S, window_s))
                    crews[threads].pause()
        except Unfit as unfit:
            raise WorkerError(f"no measurement beside a sampler: {unfit}") from None
    return _rows(found, batch_size, plan)


def _crew(plan: RunPlan, batch_size: int, threads: int, interrupts: Interrupts) -> Ensemble:
    company = Company(LearnerSetting(batch_size=batch_size, threads=threads), plan.config.sampling.envs_per_sampler,
                      SAMPLES_PER_INSERT_MIN)
    return Ensemble(plan, company, plan.samplers, usable_cores=read_machine().cores.usable,
                    memory_cap_bytes=_CAP_BYTES, interrupts=interrupts)


def _rows(found: dict[int, list[Window]], batch_size: int, plan: RunPlan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    more = {"batch_size": batch_size, "env": plan.spec.env_id}
    for threads, windows in found.items():
        for name in ("updates_per_s", "env_steps_per_s", "cpu_share"):
            values = [getattr(window, name) for window in windows]
            unit = "share" if name == "cpu_share" else "1/s"
            rows.append({"metric": name, "value": statistics.median(values), "unit": unit, "repeats": values,
                         "learner_threads": threads, **more})
    ratios = [two.updates_per_s / one.updates_per_s for one, two in zip(found[1], found[2], strict=True)]
    return [*rows, {"metric": "over_one_thread", "value": statistics.median(ratios), "unit": "ratio",
                    "repeats": ratios, "target": ">= 1.6", **more}]
