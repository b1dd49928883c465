"""``python -m spreeze bench``: updates/s of the learner on one GPU by batch size, precision and kind of launch.

The tuner's probe measures them, the most informative first, until the time is up. ``pytest -m gpu`` tests that results
on a card are correct. The scripts of ``tests/benchmarks/`` measure other figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from spreeze.cli.arguments import Parser, print_result
from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import LearnerConfig
from spreeze.errors import ConfigError, UsageError
from spreeze.machine.hardware import check_precision, read_gpus, read_machine
from spreeze.machine.output import say
from spreeze.metrics import median
from spreeze.run_directory import versions
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.measure import UpdateHelper
from spreeze.types import Box, EnvSpec
from spreeze.workers.jobs import UpdateTurn
from spreeze.workers.torch_devices import gpus_of, resolve_device

Row = dict[str, Any]
OBS_DIM, ACTION_DIM = 22, 6  # sizes of Walker2DBulletEnv-v0
BATCHES = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536)
SMALL_BATCHES = (64, 256)
_DEADLINE_S, _FUSING_DEADLINE_S = 30.0, 150.0
_SHORT_S, _LONG_S = 0.05, 0.3  # length of one repeat, small and on a card


class LaunchKind(NamedTuple):
    """A way to run the kernels of an update."""

    settings: dict[str, Any]  # fields of ``LearnerConfig``
    reason: str = ""  # reason why a CPU does not support it; empty if it does


_NO_GRAPHS = "a processor has no graphs"
KINDS = {
    "graph": LaunchKind({"updates_per_launch": 1}, _NO_GRAPHS),
    "graph of 8": LaunchKind({"updates_per_launch": 8}, _NO_GRAPHS),
    "eager": LaunchKind({"updates_per_launch": 0}),
    "fused": LaunchKind({"updates_per_launch": 0, "compile": True}),
    "fused graph": LaunchKind({"updates_per_launch": 1, "compile": True}, _NO_GRAPHS),
    "replay on the host": LaunchKind({"updates_per_launch": 0, "gpu_replay": False}, "a CPU has no copy of replay"),
}


class Rate(NamedTuple):
    """One figure to measure."""

    precision: str
    batch_size: int
    kind: str

    def needs_s(self) -> float:
        """Approximate time to measure it on a GPU."""
        return 40.0 if "fused" in self.kind else 10.0 if self.batch_size == BATCHES[0] else 4.0


def synthetic_spec(**changes: Any) -> EnvSpec:
    """A task that only has the sizes of Walker2DBulletEnv-v0, or ``changes`` of them; its rows are synthetic."""
    sizes: dict[str, Any] = {"obs_dim": OBS_DIM, "action": Box((-1.0,) * ACTION_DIM, (1.0,) * ACTION_DIM)} | changes
    return EnvSpec(env_id="synthetic rows", import_module=None, max_episode_steps=None, reward_threshold=None, **sizes)


def rates_to_measure(device: str) -> list[Rate]:
    """Measures all batch sizes with graphs, then the other kinds where they matter."""
    batches = BATCHES if gpus_of(device) else SMALL_BATCHES
    first, large, last = batches[0], batches[len(batches) // 2], batches[-1]
    rates = [Rate(precision, batch, "graph") for precision in ("tf32", "float32") for batch in batches]
    rates += [Rate("tf32", batch, "eager") for batch in batches]
    rates += [Rate("tf32", batch, "replay on the host") for batch in (first, large)]
    rates += [Rate("tf32", first, "graph of 8"), Rate("float32", first, "graph of 8"), Rate("float32", first, "eager")]
    rates += [Rate("bfloat16", first, "graph")]
    rates += [Rate("tf32", batch, kind) for batch in (first, large, last) for kind in ("fused graph", "fused")]
    if not gpus_of(device):  # a CPU has no tf32
        rates = [rate._replace(precision="float32") if rate.precision == "tf32" else rate for rate in rates]
    return list(dict.fromkeys(rates))


@contextlib.contextmanager
def timer(device: str) -> Iterator[Callable[[Rate, int], Row]]:
    """Yields a function that measures a rate with n repeats; its row has a ``failure`` if that fails."""
    small = not gpus_of(device)
    hidden = (16, 16) if small else (256, 256)
    settings = resolve([Layer("bench", {"sac": {"hidden_sizes": hidden}, "replay": {"capacity": 2**17}})])
    plan = RunPlan(settings=settings, spec=synthetic_spec(), samplers=1, free_core=False)
    repeat_s = _SHORT_S if small else _LONG_S
    with Interrupts() as interrupts:
        helper = UpdateHelper(plan, read_machine().memory.usable_bytes, interrupts)
        try:
            yield lambda rate, repeats: _timed(helper, plan, device, rate, repeats, repeat_s)
        finally:
            helper.close()


def _timed(helper: UpdateHelper, plan: RunPlan, device: str, rate: Rate, repeats: int, repeat_s: float) -> Row:
    kind, on_gpu = KINDS[rate.kind], bool(gpus_of(device))
    row: Row = {"metric": "updates_per_s", "unit": "1/s", "value": None, "repeats": [], **rate._asdict()}
    if kind.reason and not on_gpu:
        return {**row, "failure": kind.reason}
    try:
        check_precision(rate.precision, on_gpu=on_gpu)
    except ConfigError as error:
        return {**row, "failure": str(error)}
    learner = LearnerConfig(batch_size=rate.batch_size, precision=rate.precision, device=device, **kind.settings)
    result = helper.run_turn(
        UpdateTurn(
            learner=learner,
            algorithm=dataclasses.asdict(plan.config.algorithm),
            repeats=repeats,
            repeat_s=repeat_s,
            kept=on_gpu,
            deadline_s=_FUSING_DEADLINE_S if kind.settings.get("compile") else _DEADLINE_S,
        )
    )
    notes = [note for note in result.get("notes", ()) if "no CUDA graphs" in note or "not compiled" in note]
    if failure := result.get("failure") or "; ".join(notes):
        return {**row, "failure": failure}
    updates_per_s = median(result["updates_per_s"])
    return {
        **row,
        "value": updates_per_s,
        "repeats": result["updates_per_s"],
        "memory_bytes": result["memory_bytes"],
        "update_frames_per_s": updates_per_s * rate.batch_size,
    }


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m spreeze bench",
        description="Updates/s of the learner on one GPU by batch, precision and kind of launch.",
    )
    parser.flag("--device", text="device to measure; cpu tries the bench itself, small", shown="the first GPU")
    parser.flag("--minutes", text="time after which no measurement starts", default=8.0, shown="8")
    parser.flag("--repeats", text="repeats of each figure", default=5)
    parser.flag("--json", text="one JSON document on standard output", default=False)
    return parser.run(argv, _bench)


def _bench(args: argparse.Namespace) -> int:
    rows = gpu_rows(args, lambda text: say(text, as_json=args.json))
    machine = read_machine().one_line()
    return print_result(args, {"machine": machine, "versions": versions(), "rows": rows}, machine)


def missing_device() -> str | None:
    """Reason why there is no GPU to measure, in one line; None if there is one."""
    if torch.cuda.is_available():
        return None
    report = read_gpus()
    if torch.version.cuda is None:
        cause = f"PyTorch {torch.__version__} is built without CUDA"
        cause += "" if report.gpus else f", and {report.reason}"
        remedy = "install a CUDA build of PyTorch" + ("" if report.gpus else " on a machine with an NVIDIA GPU")
    elif report.gpus:
        cause, remedy = (
            "PyTorch finds no GPU that it can use",
            "update the NVIDIA driver to one that supports PyTorch's CUDA version",
        )
    else:
        cause, remedy = report.reason, "use a machine with an NVIDIA GPU and its driver"
    return f"no CUDA device: {cause}; {remedy}, or try the bench itself with --device cpu"


def gpu_rows(
    args: argparse.Namespace, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> list[Row]:
    """The rates that fit into ``args.minutes``; a UsageError without such a device, or without any GPU."""
    if args.device is None and (missing := missing_device()) is not None:
        raise UsageError(missing)
    device, end_s = resolve_device(args.device or "cuda:0"), clock() + 60.0 * args.minutes
    rates: list[Row] = []
    with timer(device) as measure:
        for rate in rates_to_measure(device):
            if clock() + rate.needs_s() > end_s:
                result = f"skipped: needs {rate.needs_s():.0f} s, more than is left of {args.minutes:g} minutes"
            else:
                rates.append(row := measure(rate, args.repeats))
                result = row.get("failure") or (
                    f"{row['value']:,.0f} updates/s [{min(row['repeats']):,.0f} .. {max(row['repeats']):,.0f}]"
                )
            say(f"  {rate.precision}, batch {rate.batch_size}, {rate.kind}: {result}")
    return rates
