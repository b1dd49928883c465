"""Table 1 and Figs. 3 and 4 of the Spreeze paper (arXiv 2312.06126) as this machine gives them, and samplers at once.

Every row but those of ``samplers`` is of whole runs, which take turns seed by seed. The columns of Table 1 are its own:
use of processor and GPU, sampling rate, update frames, updates, and of the transfer how often the learner takes over
new rows (here with every batch), how many rows a second reach replay, and what share of them is lost on the way.
``tests/stress/queue_ablation.py`` gives the transfer by queues, at any rate of rows and length of an update.
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
from pathlib import Path
from typing import Any

from spreeze.bench import Row, ratios, row
from spreeze.bench.runs import Document, Say, in_turn, on_cores, time_row, train
from spreeze.errors import WorkerError
from spreeze.machine.hardware import read_machine
from spreeze.metrics import median
from spreeze.metrics.store import MetricsReader
from spreeze.modes import assemble
from spreeze.modes.replay import ReplayData
from spreeze.runtime.assembly import Assembly, assembled
from spreeze.runtime.launcher import RunContext
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.supervisor import ProcessSupervisor

_OUTSIDE_S = 240.0
"""What a run may take beyond its own time: tuning, start and end."""
_SETTLED = 1.0 / 3.0
"""Share of a run that passes before its use of processor and GPU counts."""
_CPU_SHARES = (1.0, 0.5, 0.25)
"""Of the usable cores, as in Fig. 3."""
_LEARNED = {"env_steps_per_s": "1/s", "updates_per_s": "1/s", "updates": "updates", "eval_return_final": "return",
            "eval_return_best": "return"}
_BATCHES = (128, 8192)
"""Of the paper's own rows of Table 1."""
_START_S, _SETTLE_S = 60.0, 0.5
_COUNTED_S = 86_400.0
"""Of a run that ends by its updates, the most."""
_FIRST_STEPS = 2000
"""Env steps of each sampler before anything is measured."""


def add_paper_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``bench paper``."""
    add = parser.add_argument
    add("--parts", nargs="+", choices=tuple(_PARTS), default=list(_PARTS), help="what to measure (default: all)")
    add("--env", default="Walker2DBulletEnv-v0", help="Gymnasium id (default: Walker2DBulletEnv-v0)")
    add("--seconds", type=float, default=60.0, help="length of one run [s] (default: 60)")
    add("--updates", type=int, default=None,
        help="part algorithms: runs end after so many updates and not by --seconds, in mode serial, whose counts no "
             "other program changes (default: off)")
    add("--target-return", type=float, default=909.0, help="return to reach (default: 909)")
    add("--batch-size", type=int, nargs="+", default=list(_BATCHES),
        help="part table: batch sizes beside the tuner's choice (default: 128 8192)")
    add("--samplers", type=int, nargs="+", default=None,
        help="part samplers: numbers of processes (default: 1, 2, 4 ... up to the usable cores)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def paper_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """The rows of the chosen parts, in their order.

    Raises:
        SpreezeError: a run failed, or a sampler died.
    """
    return [line for part in args.parts for line in _PARTS[part](args, say)]


def _run(args: argparse.Namespace, flags: list[str], seconds: float | None = None) -> Document:
    seconds = args.seconds if seconds is None else seconds
    return train(["--env", args.env, "--seconds", str(seconds), "--runs-dir", args.runs_dir, "--no-visualizer",
                  *flags], seconds + _OUTSIDE_S)


# --- Table 1 ---


def _table_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    cases = {"chosen by the tuner": ["--auto"]}
    cases |= {f"batch {batch}": ["--auto", "--batch-size", str(batch)] for batch in args.batch_size}
    found = in_turn(cases, args.repeats, lambda flags: _run(args, flags), say)
    return [line for case, documents in found.items() for line in table_columns(case, documents)]


def table_columns(case: str, documents: list[Document]) -> list[Row]:
    """The columns of Table 1 for some runs of one setting."""
    more = {"case": case, "env": documents[0]["env"],
            **{name: median([float(one[name]) for one in documents]) for name in ("batch_size", "samplers")}}

    def column(metric: str, unit: str, value: Callable[[Document], Any]) -> Row:
        return row(metric, unit, [value(one) for one in documents], **more)

    return [
        column("cpu_use", "share", lambda one: settled(one, "cpu_use")),
        column("sampling_per_s", "1/s", lambda one: one["env_steps_per_s"]),
        column("gpu_use", "share", lambda one: settled(one, "gpu_use")),
        column("update_frames_per_s", "1/s", lambda one: one["update_frames_per_s"]),
        column("updates_per_s", "1/s", lambda one: one["updates_per_s"]),
        column("transfer_cycle_hz", "Hz", lambda one: one["updates_per_s"]),
        column("transmitted_rows_per_s", "1/s", lambda one: one["env_steps_per_s"] * (1.0 - _lost(one))),
        column("rows_lost_share", "share", _lost),
    ]


def _lost(document: Document) -> float:
    """Share of the env steps of a run whose transition is not in replay; a refused one counts as lost."""
    return float(max(0.0, 1.0 - document["rows_stored"] / document["env_steps"]))


def settled(document: Document, metric: str) -> float | None:
    """Mean of a series of a run without its first third; of several GPUs the first. None: it has no such series."""
    reader = MetricsReader(Path(document["run_dir"]) / "metrics.db")
    name = next((one for one in sorted(reader.names()) if one.partition("/")[0] == metric), None)
    if name is None:
        return None
    series = reader.series(name, max_points=100_000)
    values = [value for t, value in zip(series.t, series.mean, strict=True) if t >= _SETTLED * series.t[-1]]
    return float(sum(values) / len(values)) if values else None


# --- Figs. 3 and 4 ---


def _cpu_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """The same run, tuned for what it has, on all, half and a quarter of the cores, by affinity."""
    usable, cases = read_machine().cores.usable, {}
    for share in _CPU_SHARES:
        cores = usable * share
        if cores >= 1.0 and cores == int(cores):
            cases[share] = int(cores)
        else:
            say(f"  {100 * share:.0f} % of {usable:g} usable cores: affinity gives whole cores only, so left out")

    def run(flags: list[str]) -> Document:
        share, *rest = flags
        with on_cores(cases[float(share)]):
            return _run(args, ["--auto", "--target-return", str(args.target_return), *rest])

    found = in_turn({str(share): [str(share)] for share in cases}, args.repeats, run, say)
    return [line for share, documents in found.items()
            for line in _learning(documents, cpu_share=float(share), cores=cases[float(share)])]


def _algorithm_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    counted = ["--mode", "serial", "--updates", str(args.updates)] if args.updates else ["--auto"]
    cases = {algo: ["--algo", algo, *counted] for algo in ("sac", "td3")}
    most_s = _COUNTED_S if args.updates else None
    found = in_turn(cases, args.repeats, lambda flags: _run(args, flags, most_s), say)
    return [line for algo, documents in found.items() for line in _learning(documents, algo=algo)]


def _learning(documents: list[Document], **more: Any) -> list[Row]:
    more["env"] = documents[0]["env"]
    found = [row(name, unit, [one.get(name) for one in documents], **more) for name, unit in _LEARNED.items()]
    if all(one["target_return"] is not None for one in documents):
        found.append(time_row(documents, **more))
    return found


# --- samplers at once ---


class WorkerGroup:
    """Workers of a run, of whom only those work that a measurement is about; the others are stopped by SIGSTOP."""

    def __init__(self, workers: ProcessSupervisor, run: Assembly) -> None:
        self.workers, self._run = workers, run

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
        before, start = self._run.counters(), time.monotonic()
        self.pass_time(seconds)
        after, took_s = self._run.counters(), time.monotonic() - start
        return (after[0] - before[0]) / took_s, (after[1] - before[1]) / took_s

    def begun(self, env_steps: int = _FIRST_STEPS) -> bool:
        """Whether each sampler has taken so many env steps."""
        return all(self._run.slots(spec)["env_steps"] >= env_steps
                   for spec in self._run.specs.values() if spec.role.steps)


@contextlib.contextmanager
def worker_group(plan: RunPlan, roles: Collection[str]) -> Iterator[WorkerGroup]:
    """Workers of these roles of the run that ``plan`` describes; they have ended when this ends."""
    from spreeze.bench.sampling import let_sample, publish_policy, run_folder  # takes torch along

    with run_folder() as folder, assembled(assemble, plan, folder, time.monotonic()) as run:
        run_context = RunContext(run_dir=folder, status_fd=run.status.block.fd, status_rows=run.status.num_rows,
                                 nonce=secrets.token_hex(8))
        workers = ProcessSupervisor(run_context, run.status, on_event=lambda level, text: None)
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


def _sampler_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.sampling import task_plan

    most = max(1, int(read_machine().cores.usable))
    counts = args.samplers or sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})
    return scaling_rows(task_plan(args.env), counts, args.repeats, min(args.seconds, 5.0))


def scaling_rows(plan: RunPlan, counts: list[int], repeats: int, seconds: float) -> list[Row]:
    """Env steps a second of so many sampler processes at once without a learner, and over one, in turns.

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
        row("over_one_sampler", "ratio", ratios(rates[count], rates[1]), samplers=count,
            target=">= 14" if count == 16 else None, **more)
        for count in counts[1:]
    ]


_PARTS: dict[str, Callable[[argparse.Namespace, Say], list[Row]]] = {
    "table": _table_rows, "cpu": _cpu_rows, "algorithms": _algorithm_rows, "samplers": _sampler_rows,
}
