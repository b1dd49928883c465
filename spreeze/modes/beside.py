"""What every mode of processes has beside its own workers: evaluator, visualizer, the watch, the last evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from spreeze.errors import ResourceError
from spreeze.rundir import RunDir
from spreeze.transport.memory import available_bytes
from spreeze.workers.crew import Crew
from spreeze.workers.evaluator import EvaluatorJob
from spreeze.workers.final import final_evaluation
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.jobs import VisualizerJob
from spreeze.workers.plan import RunPlan
from spreeze.workers.recorder import Recorder
from spreeze.workers.spawn import WorkerSpec
from spreeze.workers.supervisor import Supervisor

_FINAL_EVALUATION_S = 6.0
_EXIT_S = 12.0
"""From the wish to stop to the end of the final evaluation; the rest of 15 s is for closing."""
_VISUALIZER_AFTER_S = 4.0
_LEAST_LIMIT_BYTES = 2**30
"""What who steps environments may always have; beyond it, its share of half of the memory that is free."""


def memory_limit_bytes(plan: RunPlan) -> int:
    """Memory above which a sampler or executor is started anew."""
    asked = plan.config.sampling.memory_limit_bytes
    return asked or max(_LEAST_LIMIT_BYTES, available_bytes() // (2 * plan.samplers))


def supervise(
    supervisor: Supervisor, crew: Crew, specs: dict[str, WorkerSpec], learning_began: Callable[[], bool]
) -> None:
    """Starts the workers and watches them to the end of the run; nobody is left when it returns.

    Raises:
        ResourceError: a worker could not be started.
    """
    visualizer = specs.pop("visualizer", None)

    began_s: float | None = None

    def start_visualizer() -> None:
        # Not before learning is well under way: its imports would only delay the first updates.
        nonlocal visualizer, began_s
        if began_s is None and learning_began():
            began_s = time.monotonic()
        if visualizer is not None and began_s is not None and time.monotonic() - began_s > _VISUALIZER_AFTER_S:
            chosen = visualizer
            visualizer = None
            try:
                crew.add(chosen)
            except OSError as error:  # never a reason to end the run
                crew.on_event("warning", f"no pictures: the visualizer could not be started: {error}")

    try:
        for spec in specs.values():
            try:
                crew.add(spec)
            except OSError as error:
                raise ResourceError(
                    f"{spec.name} could not be started: {error}; use fewer {spec.role}s, or raise the limit of "
                    "processes and open files (ulimit -u, ulimit -n)"
                ) from None
        supervisor.run(on_sample=start_visualizer)
    finally:
        supervisor.stop()


def watcher_specs(plan: RunPlan, run_dir: Path, first_row: int) -> dict[str, WorkerSpec]:
    """Evaluator and visualizer, in rows ``first_row`` and the next of the board."""
    config = plan.config
    evaluator = EvaluatorJob(
        run_dir=str(run_dir), spec=plan.spec, episodes=config.evaluation.episodes,
        first_seed=config.evaluation.seed, cpu_share=config.evaluation.cpu_share, has_free_core=plan.free_core,
    )
    specs = {"evaluator": WorkerSpec(role="evaluator", index=0, row=first_row, job=evaluator.to_json())}
    if config.visualizer.enabled:
        part = config.visualizer
        visualizer = VisualizerJob(
            run_dir=str(run_dir), spec=plan.spec, frames_per_s=part.frames_per_s,
            clip_interval_s=part.clip_interval_s, clip_length_s=part.clip_length_s,
            cpu_share=part.cpu_share, has_free_core=plan.free_core, seed=config.run.seed,
        )
        specs["visualizer"] = WorkerSpec(role="visualizer", index=0, row=first_row + 1, job=visualizer.to_json())
    return specs


def last_evaluation(
    plan: RunPlan, run_dir: RunDir, recorder: Recorder, supervisor: Supervisor, interrupts: Interrupts
) -> None:
    """Greedy episodes of the last policy, as far as time allows."""
    budget_s = min(_FINAL_EVALUATION_S, _EXIT_S - supervisor.stopping_s)
    if not interrupts.urgent and recorder.outcome.updates > 0 and budget_s >= 1.0:
        record = final_evaluation(run_dir, plan, budget_s, interrupts, recorder.event)
        if record is not None:
            recorder.evaluation(record, final=True)
        elif not interrupts.urgent:
            recorder.no_final_evaluation(budget_s)
