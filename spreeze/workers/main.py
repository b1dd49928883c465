"""Where every worker process begins: ``python -m spreeze.workers.main <job>``.

The job is one JSON argument. Thread counts come with the environment, before any import; standard
output and error already go to the worker's own log (Bullet prints from C).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from spreeze.machine.process_names import take_name
from spreeze.machine.processes import leave_to_supervisor
from spreeze.metrics.table import Phase
from spreeze.transport.status_table import StatusTable
from spreeze.workers.context import WorkerContext, worker_name
from spreeze.workers.sampler_stats import write_error

BODIES = {
    "sampler": ("spreeze.workers.sampler", "run_sampler", "SamplerJob"),
    "executor": ("spreeze.workers.rollout_sampler", "run_rollout_sampler", "RolloutSamplerJob"),
    "actor": ("spreeze.workers.inference_worker", "run_inference_worker", "InferenceWorkerJob"),
    "learner": ("spreeze.workers.learner", "run_learner", "LearnerJob"),
    "rollout-learner": ("spreeze.workers.on_policy_learner", "run_on_policy_learner", "OnPolicyLearnerJob"),
    "evaluator": ("spreeze.workers.evaluator", "run_evaluator", "EvaluatorJob"),
    "visualizer": ("spreeze.workers.visualizer", "run_visualizer", "VisualizerJob"),
}
"""body, mostly the role -> (module, function, type of its job); imported only in the process that runs it."""

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = {"sampler": 500, "executor": 500, "actor": 300, "evaluator": 300, "visualizer": 300}
_NICE = {"sampler": 10, "executor": 5, "actor": 2, "evaluator": 5, "visualizer": 15}
"""At nice 10 a process gets about a tenth of a core that another one wants; at 15 a third of that.

Executors are waited for like the learner, which then has nothing to do: what counts is that both are always busy.

The evaluator keeps to its share of a core by pausing, so once at work it goes before the samplers: at 15 a
score of Pendulum came seconds after the policy it was about.
"""


def main(argv: list[str]) -> int:
    """Runs one worker body; returns its exit code."""
    spec: dict[str, Any] = json.loads(argv[0])
    _die_with_supervisor(spec["lifeline_fd"], spec["supervisor_pid"])
    leave_to_supervisor()
    take_name(worker_name(spec["role"], spec["index"]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _lower_priority(spec["role"])
    _offer_to_oom_killer(spec["role"])
    board = StatusTable.attach(spec["board_fd"], spec["board_rows"])
    errors_dir = Path(spec["errors_dir"])
    link = WorkerContext(spec["role"], spec["index"], board, spec["row"], spec["message_fd"], errors_dir)
    link.beat(Phase.INIT)
    try:
        module, body, job_type = BODIES[spec["body"]]
        loaded = load(module)
        getattr(loaded, body)(link, getattr(loaded, job_type).from_json(spec["job"]))
    except BaseException as error:
        _report(link, errors_dir, error)
        return 1
    link.beat(Phase.DONE)
    link.close()
    return 0


def load(module: str) -> ModuleType:
    """Imports a module with the garbage collector off, which would take a sixth of torch's time and find nothing.

    What was imported stays; later collections leave it out.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _lower_priority(role: str) -> None:
    """Who gives way to whom, from the first import on: pictures to samplers, these to evaluation, all to the learner.

    The learner is what a run waits for. When another program takes a core, the samplers lose it at once,
    long before the governor has seen anything.
    """
    if role in _NICE and hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(_NICE[role])


def _offer_to_oom_killer(role: str) -> None:
    """Where memory runs out, Linux shall take a sampler first and the learner last: the former is cheap to replace."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE.get(role, 0)), encoding="ascii")


def _report(link: WorkerContext, errors_dir: Path, error: BaseException) -> None:
    """Tells the supervisor why this process ends: by a file (the truth) and by a message."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # a full disk must not hide the reason
        sys.stderr.write(text)
    record = write_error(errors_dir, link.name, error)
    link.send("error", error=record["error"], traceback=text[-2500:])


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_supervisor(lifeline_fd: int, supervisor_pid: int) -> None:
    """Ends this process when the supervisor is gone, however it died.

    Two ways, since each has a hole: the kernel's death signal follows the thread that spawned us
    (Linux only), and a waiting thread cannot run while C code holds the interpreter lock.
    """
    end_with_parent()
    if os.getppid() != supervisor_pid:
        os._exit(3)

    def watch() -> None:
        while True:
            try:
                if os.read(lifeline_fd, 1) == b"":
                    os._exit(3)
            except InterruptedError:
                continue
            except OSError:
                os._exit(3)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
