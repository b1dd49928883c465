"""How fast a learner is on a card: updates of the whole learner by batch, precision and kind, and two bounds of them.

Updates are timed by the tuner's own probe. *Launch bound*: a graph of as many kernels that do nothing, one after the
other, as an update has; kernels in branches of a graph run at once and may pass it. *Matmul bound*: the matmuls that an
update cannot avoid, alone, in a graph. Both are taken in the same session as the updates, on the same device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch

from spreeze.bench.gpu_checks import VECTORS, Place, ring_of, trainer_of
from spreeze.bench.learner import ACTION_DIM, OBS_DIM, synthetic_spec
from spreeze.bench.matmuls import MatmulRound, matmuls
from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import LearnerConfig
from spreeze.errors import ConfigError
from spreeze.machine.hardware import check_precision, read_machine
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.measure import UpdateHelper
from spreeze.workers.gpu_replay import CudaGraph
from spreeze.workers.jobs import UpdateTurn
from spreeze.workers.torch_devices import gpus_of, matmuls_in, synchronise

BATCHES = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536)
SMALL_BATCHES = (64, 256)
_DEADLINE_S, _FUSING_DEADLINE_S = 30.0, 150.0
_SHORT_S, _LONG_S = 0.05, 0.3
"""Length of one repeat, small and on a card."""
_TOGETHER = 32
"""Runs between two waits for the device."""


class LaunchKind(NamedTuple):
    """A way to run the kernels of an update."""

    name: str
    settings: dict[str, Any]
    """Of ``LearnerConfig``."""
    reason: str
    """Why a processor has it not; empty if it has."""


KINDS = {kind.name: kind for kind in (
    LaunchKind("graph", {"updates_per_launch": 1}, "a processor has no graphs"),
    LaunchKind("graph of 8", {"updates_per_launch": 8}, "a processor has no graphs"),
    LaunchKind("two streams", {"updates_per_launch": 1, "overlap": True}, "a processor has no streams"),
    LaunchKind("eager", {"updates_per_launch": 0}, ""),
    LaunchKind("fused", {"updates_per_launch": 0, "fuse": True}, ""),
    LaunchKind("fused graph", {"updates_per_launch": 1, "fuse": True}, "a processor has no graphs"),
    LaunchKind("replay on the host", {"updates_per_launch": 0, "mirror": False}, "a processor has no copy of replay"),
)}  # fmt: skip


class Rate(NamedTuple):
    """One figure that is to be taken."""

    precision: str
    batch_size: int
    kind: str

    @property
    def key(self) -> str:
        return f"rate {self.precision} {self.batch_size} {self.kind}"

    def needs_s(self, place: Place) -> float:
        return 40.0 if "fused" in self.kind else 10.0 if place.on_gpu and self.batch_size == BATCHES[0] else 4.0


def wanted(place: Place) -> list[Rate]:
    """What is timed, the most telling first: all batches as graphs, then other kinds where they make a difference."""
    batches = SMALL_BATCHES if place.small else BATCHES
    main = [Rate(precision, batch, "graph") for precision in ("tf32", "float32") for batch in batches]
    eager = [Rate("tf32", batch, "eager") for batch in batches]
    first, large, last = batches[0], batches[len(batches) // 2], batches[-1]
    more = [Rate("tf32", batch, "replay on the host") for batch in (first, large)]
    more += [Rate("tf32", first, "graph of 8"), Rate("float32", first, "graph of 8"), Rate("float32", first, "eager")]
    more += [Rate("tf32", batch, "two streams") for batch in (first, large)]
    more += [Rate("bfloat16", first, "graph")]
    fused = [Rate("tf32", batch, kind) for batch in (first, large, last) for kind in ("fused graph", "fused")]
    found = [*main, *eager, *more, *fused]
    if not place.on_gpu:  # float32 is what a processor has
        found = [one._replace(precision="float32") if one.precision == "tf32" else one for one in found]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def probe(place: Place) -> Iterator[Callable[[Rate, int], dict[str, Any]]]:
    """A function that times a rate with so many repeats; its answer is a record of the results."""
    settings = resolve([Layer("bench", {"sac": {"hidden_sizes": place.hidden}, "replay": {"capacity": 2**17}})])
    plan = RunPlan(settings=settings, spec=synthetic_spec(), samplers=1, free_core=False)
    with Interrupts() as interrupts:
        helper = UpdateHelper(plan, read_machine().memory.usable_bytes, interrupts)
        try:
            yield lambda rate, repeats: _timed(helper, plan, place, rate, repeats)
        finally:
            helper.close()


def _timed(helper: UpdateHelper, plan: RunPlan, place: Place, rate: Rate, repeats: int) -> dict[str, Any]:
    kind, own = KINDS[rate.kind], rate._asdict()
    if kind.reason and not place.on_gpu:
        return {**own, "verdict": "not taken", "text": kind.reason}
    try:
        check_precision(rate.precision, on_gpu=place.on_gpu)
    except ConfigError as error:
        return {**own, "verdict": "not taken", "text": str(error)}
    device = f"{place.device}+{place.device}" if rate.kind == "two streams" else place.device
    learner = LearnerConfig(batch_size=rate.batch_size, device=device, precision=rate.precision, **kind.settings)
    found = helper.answer(UpdateTurn(
        learner=learner, algorithm=dataclasses.asdict(plan.config.algorithm), repeats=repeats,
        repeat_s=_SHORT_S if place.small else _LONG_S, kept=place.on_gpu,
        deadline_s=_FUSING_DEADLINE_S if kind.settings.get("fuse") else _DEADLINE_S,
    ))
    if found.get("failure"):
        refused = "ConfigError" in found["failure"]
        return {**own, "verdict": "not taken" if refused else "wrong", "text": found["failure"]}
    notes = [note for note in found["notes"] if "one by one" in note or "not fused" in note]
    updates = statistics.median(found["updates_per_s"])
    return {
        **own, "verdict": "wrong" if notes else "measured", "updates_per_s": found["updates_per_s"],
        "memory_bytes": found["memory_bytes"], "start_s": found["start_s"],
        "text": f"{updates:.0f} updates/s, {updates * rate.batch_size:.3g} update frames/s"
                + "".join(f"; {one}" for one in notes),
    }


# --- what bounds them, each in a process of its own: a profiler may disturb recordings that come after it ---


def kernels(place: Place) -> dict[str, int]:
    """Kernels of one update with its draw, as a graph has them and, on a GPU, fused; on a processor the operations."""
    case, found = VECTORS[0], {}
    with ring_of(case.spec()) as ring:
        for name in ("eager", "fused") if place.on_gpu else ("eager",):
            trainer = trainer_of(ring, case, place, per_launch=0, fuse=name == "fused", branches=name == "eager")
            for _ in range(3):
                trainer.update()
            found[name] = trainer.kernels()
    return found


def bounds(place: Place, count: int, repeats: int) -> dict[str, Any]:
    """Seconds of ``count`` empty launches, and of the matmuls of an update by precision and batch, each repeat."""
    repeat_s = _SHORT_S if place.small else _LONG_S
    counter = torch.zeros((), device=place.device)

    def launches() -> None:
        for _ in range(count):
            counter.add_(1.0)

    found: dict[str, Any] = {"launch_s": _seconds(launches, place.device, repeats, repeat_s), "count": count,
                             "matmul_s": {}, "flop": {}}
    for precision in ("float32", "tf32") if place.on_gpu else ("float32",):
        with matmuls_in(precision, place.device):
            for batch in SMALL_BATCHES if place.small else BATCHES:
                round_ = MatmulRound(matmuls("sac", batch, OBS_DIM, ACTION_DIM, place.hidden), place.device)
                found["matmul_s"][f"{precision} {batch}"] = _seconds(
                    lambda one=round_: one.run(1), place.device, repeats, repeat_s)  # type: ignore[misc]
                found["flop"][str(batch)] = round_.flop
    return found


def _seconds(work: Callable[[], object], device: str, repeats: int, repeat_s: float) -> list[float]:
    """Time of ``work``, each repeat; on a GPU as a graph."""
    for _ in range(3):
        work()
    run: Callable[[], object] = work
    if gpus_of(device):
        graph = CudaGraph(torch.device(device))
        graph.record(work, [])
        run = graph.replay
    found = []
    for _ in range(repeats + 1):
        synchronise(device)
        start, count = perf_counter(), 0
        while perf_counter() - start < repeat_s:
            for _ in range(_TOGETHER):
                run()
            count += _TOGETHER
            synchronise(device)
        found.append((perf_counter() - start) / count)
    return found[1:]


def main(argv: list[str]) -> int:
    """``kernels PLACE`` or ``bounds PLACE COUNT REPEATS``: the result as one JSON line."""
    what, place = argv[0], Place.from_json(json.loads(argv[1]))
    found = kernels(place) if what == "kernels" else bounds(place, int(argv[2]), int(argv[3]))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
