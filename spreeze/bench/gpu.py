"""One command that judges Spreeze on a GPU: right first, then fast, then what is learned in what time.

It takes one item after the other until its time is up. Each result is appended to ``gpu.jsonl`` in the folder of
results as it comes, and a second start goes on where the first stopped: what is there of this device, machine and
version is not taken again, but for what was wrong. At the end stands every figure that the project aims at, as
measured, missed or not taken. Without a GPU the same items run on ``--device cpu``, as far as they mean anything there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.bench import Row, row
from spreeze.bench.gpu_checks import CHECKS, Finding, Place
from spreeze.bench.gpu_rates import BATCHES, Rate, probe, wanted
from spreeze.bench.runs import Document, Say, on_cores, train
from spreeze.envs.make import default_env_id
from spreeze.errors import SpreezeError, UsageError
from spreeze.machine.gpu import read_gpus
from spreeze.machine.hardware import read_machine
from spreeze.metrics import median
from spreeze.run_directory import versions
from spreeze.tuner.model import fit_cost, paper_batch
from spreeze.workers.torch_devices import resolve_device

Record = dict[str, Any]
"""A result: ``verdict`` (right, wrong, measured, not taken), ``text``, and figures."""
_KNEE = 0.85
"""Share of the highest update frame rate that the paper's batch has to reach (section 3.3)."""
_CHECK_LIMIT_S, _OUTSIDE_S = 240.0, 120.0
_KERNELS = "kernels of an update"
_PENDULUM_RETURN, _WALKER_RETURN = -200.0, 1500.0


YARDSTICKS = {
    256: "reckoned: 36 kernels in a graph take 0.11 ms, so at most 9,000 updates/s; published: LeanRL SAC, H100, 725",
    8192: "reckoned: 2,400 to 3,500 updates/s in float32, 3,300 to 5,000 in tf32; published: UniLab SAC, RTX 4090, "
          "1.64 M update frames/s",
    32_768: "published: FastTD3, about 1.0 M update frames/s",
    65_536: "reckoned: 450 updates/s in float32, 640 to 920 in tf32",
}
"""By batch size what an H100 may reach with 2 x 256 units, 22 observations and 6 actions (2.28 MFLOP a row), and what
others have published."""


class Item(NamedTuple):
    """One result that is to be taken."""

    key: str
    part: str
    needs_s: float
    """Time that it takes on a card, about; it is not begun with less left."""
    take: Callable[[], Record]


class Journal:
    """The results so far of one device, machine and version, in a file of all."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, fresh: bool = False) -> None:
        """``fresh`` leaves out what was there before.

        Raises:
            UsageError: the folder cannot be made or written.
        """
        self.path, self._identity = folder / "gpu.jsonl", json.loads(json.dumps(identity))
        self.records: dict[str, Record] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read() != b"\n":  # of a start that was killed as it wrote
                        file.write(b"\n")
        except OSError as error:
            raise UsageError(f"--results {folder}: {error.strerror or error}; name one that can be written") from None
        for text in [] if fresh else self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(text)
                if record["of"] == self._identity:
                    self.records[record["item"]] = record

    def has(self, key: str) -> bool:
        """Whether an item need not be taken: a wrong one is, as its cause may be mended."""
        return key in self.records and self.records[key]["verdict"] != "wrong"

    def add(self, key: str, record: Record) -> None:
        self.records[key] = {"item": key, **record}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self.records[key], "at": time.strftime("%Y-%m-%d %H:%M:%S"),
                                   "of": self._identity}) + "\n")


# --- items ---


def in_child(name: str, place: Place) -> Finding:
    """A check in a process of its own, which a fault of the device or a hang ends."""
    done = _child("spreeze.bench.gpu_checks", [name, json.dumps(place.to_json())], _CHECK_LIMIT_S)
    return Finding(*done) if isinstance(done, list) else Finding(False, str(done))


def _child(module: str, arguments: list[str], limit_s: float) -> Any:
    """The JSON that a child prints, or a text that says why there is none."""
    try:
        done = subprocess.run([sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=limit_s, check=False, env={**os.environ, "OMP_NUM_THREADS": _threads()})
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:.0f} s"
    output = done.stdout.decode(errors="replace").strip()
    for text in (output, output.rpartition("\n")[2]) if done.returncode == 0 else ():  # more was printed before it
        with contextlib.suppress(ValueError):
            return json.loads(text)
    errors = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
    return f"its process ended with {done.returncode}: {errors[-1][:300]}"


def _threads() -> str:
    """Of a child's matmuls on the processor; it runs alone."""
    return str(max(1, min(8, int(read_machine().cores.usable) // 2)))


Measure = Callable[[Rate, int], Record]


class GpuBench(NamedTuple):
    """What the items use; tests put other functions in these places."""

    place: Place
    repeats: int
    runs_dir: str
    check: Callable[[str, Place], Finding] = in_child
    run: Callable[..., Document] = train

    def items(self, journal: Journal, measure: Callable[[], Measure]) -> Iterator[Item]:
        """All of them, in the order in which they are taken."""
        place = self.place
        for name, check in CHECKS.items():
            yield Item(name, "correctness", check.needs_s, partial(self._checked, name))
        for rate in wanted(place):
            yield Item(rate.key, "speed", rate.needs_s(place), partial(self._timed, measure, rate))
        yield Item(_KERNELS, "speed", 50.0, self._kernels)
        yield Item("bounds", "speed", 25.0, partial(self._bounds, journal))
        yield Item("tuner over its grid", "tuner", 240.0, self._tuner)
        cores = max(1, int(read_machine().cores.usable))
        walker = default_env_id().value
        learned = [("Pendulum-v1", _PENDULUM_RETURN, 90.0, place.device, cores), (walker, _WALKER_RETURN, 240.0,
                   place.device, cores), (walker, _WALKER_RETURN, 400.0, "cpu", 2)]
        for env_id, wanted_return, limit_s, device, use in dict.fromkeys(learned):
            yield Item(f"{env_id} to {wanted_return:g} on {device}, {use} cores", "learning", limit_s,
                       partial(self._learned, env_id, wanted_return, limit_s, device, use))

    def _timed(self, measure: Callable[[], Measure], rate: Rate) -> Record:
        return measure()(rate, self.repeats)

    def _checked(self, name: str) -> Record:
        found = self.check(name, self.place)
        return {"verdict": {True: "right", False: "wrong", None: "not taken"}[found.ok], "text": found.text}

    def _kernels(self) -> Record:
        found = _child("spreeze.bench.gpu_rates", ["kernels", json.dumps(self.place.to_json())], _CHECK_LIMIT_S)
        if not isinstance(found, dict):
            return {"verdict": "wrong", "text": str(found)}
        return {**found, "verdict": "measured", "text": ", ".join(f"{name} {count}" for name, count in found.items())}

    def _bounds(self, journal: Journal) -> Record:
        """The launches of as many kernels as an update has, and its matmuls."""
        count = journal.records.get(_KERNELS, {}).get("eager")
        if count is None:
            return {"verdict": "wrong", "text": "the number of an update's kernels is not known"}
        arguments = ["bounds", json.dumps(self.place.to_json()), str(count), str(self.repeats)]
        found = _child("spreeze.bench.gpu_rates", arguments, _CHECK_LIMIT_S)
        if not isinstance(found, dict):
            return {"verdict": "wrong", "text": str(found)}
        launch_s = median(found["launch_s"])
        return {**found, "verdict": "measured", "text": f"{count} empty launches take {1e3 * launch_s:.3f} ms: at most "
                f"{1.0 / launch_s:.0f} updates/s"}

    def _tuner(self) -> Record:
        """A fresh tuning against a thin grid around what a card may want, as ``bench tune`` does it."""
        small, env_id = self.place.small, default_env_id().value
        cores = max(1, int(read_machine().cores.usable))
        samplers = sorted({1, max(1, cores // 4), max(1, cores // 2), cores})
        found = _child("spreeze.bench", [
            "tune", "--json", "--repeats", "1", "--rounds", "1", "--env", "Pendulum-v1" if small else env_id,
            "--batch-size", *(["128"] if small else ["256", "1024", "8192"]),
            "--samplers", *map(str, samplers[:1] if small else samplers),
        ], 900.0)  # fmt: skip
        if not isinstance(found, dict) or "rows" not in found:
            return {"verdict": "wrong", "text": str(found)}
        rows = {one["metric"]: one for one in found["rows"]}
        share, seconds = rows["score_of_pick_over_best_of_grid"]["value"], rows["tuning_s"]["value"]
        return {"verdict": "measured", "share": share, "tuning_s": seconds,
                "text": f"{share:.2f} of the best of {len(found['rows']) - 2} settings, in {seconds:.0f} s; best: "
                        f"{rows['score_of_pick_over_best_of_grid']['best']}"}

    def _learned(self, env_id: str, wanted_return: float, limit_s: float, device: str, cores: int) -> Record:
        """Wall time to a return, all of these cores sampling."""
        flags = ["--env", env_id, "--device", device, "--samplers", str(cores), "--seed", "1", "--runs-dir",
                 self.runs_dir, "--no-visualizer", "--target-return", str(wanted_return), "--seconds", str(limit_s)]
        if self.place.small:
            flags += ["--updates", "20", "--batch-size", "16", "--set", "sac.hidden_sizes=[16,16]", "--set",
                      "replay.learning_starts=200"]
        with on_cores(cores):
            document = self.run(flags, limit_s + _OUTSIDE_S)
        names = ("time_to_target_s", "process_s", "env_steps", "updates", "env_steps_per_s", "updates_per_s",
                 "update_frames_per_s", "eval_return_best", "device")
        reached_s = document.get("time_to_target_s")
        best = document.get("eval_return_best")
        told = f"not reached in {document['process_s']:.0f} s" if reached_s is None else f"after {reached_s:.1f} s"
        told += f"; {document['env_steps']} env steps, {document['updates']} updates"
        return {"verdict": "measured", **{name: document.get(name) for name in names},
                "text": told + ("" if best is None else f", best {best:.0f}")}


def take_all(
    bench: GpuBench, journal: Journal, seconds: float, parts: Sequence[str], say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Takes the items that are not there yet, while there is time for the next one."""
    end_s = clock() + seconds
    with contextlib.ExitStack() as stack:
        opened: list[Measure] = []

        def measure() -> Measure:
            if not opened:
                opened.append(stack.enter_context(probe(bench.place)))
            return opened[0]

        for item in bench.items(journal, measure):
            if item.part not in parts or journal.has(item.key):
                continue
            if clock() + (0.0 if bench.place.small else item.needs_s) > end_s:
                say(f"  time is up before '{item.key}', which takes about {item.needs_s:.0f} s; start again to go on")
                continue
            start_s = clock()
            try:
                record = item.take()
            except (SpreezeError, OSError, ValueError, LookupError, TypeError) as error:  # the others are to go on
                record = {"verdict": "wrong", "text": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
            journal.add(item.key, {**record, "part": item.part, "seconds": round(clock() - start_s, 1)})
            say(f"  {record['verdict']:9s} {item.key}: {record['text']} ({clock() - start_s:.1f} s)")


# --- what is missing, and what was found ---


def missing_device() -> str | None:
    """Why there is no GPU to judge, in one line; None where there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    report = read_gpus()
    if torch.version.cuda is None:
        cause = f"PyTorch {torch.__version__} is built without CUDA"
        cause += "" if report.gpus else f", and {report.reason}"
        remedy = "install a CUDA build of PyTorch" + ("" if report.gpus else " on a machine with an NVIDIA GPU")
    elif report.gpus:
        cause, remedy = "PyTorch finds no GPU that it can use", "see that the driver is as new as PyTorch's CUDA"
    else:
        cause, remedy = report.reason, "take a machine with an NVIDIA GPU and its driver"
    return f"no CUDA device: {cause}; {remedy}, or try the bench itself with --device cpu"


class Target(NamedTuple):
    figure: str
    goal: str
    measured: str | None = None
    met: bool | None = None
    """None: there is no bound, or not all of it was taken."""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not taken"
        return "missed" if self.met is False else "measured"


def targets(records: dict[str, Record], place: Place) -> list[Target]:
    """The figures that the project aims at on an H100 or H200, with what was found; a stand-in has no rates."""
    rates = [] if place.small or not place.on_gpu else _rates(records)
    at_8192 = [one for one in rates if one["batch_size"] == 8192]
    graphs = [one for one in rates if one["batch_size"] == BATCHES[0] and "graph" in one["kind"]]
    tuner = {} if place.small else records.get("tuner over its grid", {})
    share, seconds = tuner.get("share"), tuner.get("tuning_s")
    checks = [records[name]["verdict"] for name in CHECKS if name in records]
    right, wrong = checks.count("right"), checks.count("wrong")
    return [
        _rate_target("updates/s at 256, graph", 4000.0, graphs, frames=False),
        _rate_target("update frames/s at 8,192", 12e6, at_8192, frames=True),
        _rate_target("update frames/s, best of all batches", 20e6, rates, frames=True),
        Target("tuner's pick over the best of its grid", ">= 0.95", share and f"{share:.2f}", share and share >= 0.95),
        Target("time that the tuner takes", "<= 60 s", seconds and f"{seconds:.0f} s", seconds and seconds <= 60.0),
        Target("correctness list", "all right", f"{right} right, {wrong} wrong, {len(CHECKS) - right - wrong} not taken"
               if checks else None, wrong == 0 if wrong or right == len(CHECKS) else None),
        _learning_target(records),
    ]


def _learning_target(records: dict[str, Record]) -> Target:
    """Time of the walking robot on the card, and on two cores without."""
    walking = [one for key, one in records.items() if f"to {_WALKER_RETURN:g} on" in key and "time_to_target_s" in one]
    times = [(one["item"], one["time_to_target_s"]) for one in walking]
    text = "; ".join(f"{name}: {'not reached' if time_s is None else f'{time_s:.0f} s'}" for name, time_s in times)
    return Target(f"walking robot to {_WALKER_RETURN:g}, all cores and the card over two cores without", "as measured",
                  text or None)


def _rates(records: dict[str, Record]) -> list[Record]:
    """Timed updates, in the order in which they were taken."""
    return [one for one in records.values() if one.get("updates_per_s") and one["item"].startswith("rate ")]


def _frames(rate: Record) -> float:
    return float(median(rate["updates_per_s"]) * rate["batch_size"])


def _rate_target(figure: str, bound: float, rates: list[Record], *, frames: bool) -> Target:
    goal, rate = f">= {bound:,.0f}", max(rates, key=_frames, default=None)
    if rate is None:
        return Target(figure, goal)
    values = [value * (rate["batch_size"] if frames else 1) for value in rate["updates_per_s"]]
    where = f"{rate['precision']}, batch {rate['batch_size']}, {rate['kind']}"
    return Target(figure, goal, f"{median(values):,.0f} [{min(values):,.0f} .. {max(values):,.0f}], n={len(values)} "
                  f"({where})", median(values) >= bound)


def knees(records: dict[str, Record]) -> dict[str, int]:
    """By precision and kind the batch of the paper's rule, where enough batches were timed."""
    points: dict[str, list[tuple[int, float]]] = {}
    for rate in _rates(records):
        name = f"{rate['precision']}, {rate['kind']}"
        points.setdefault(name, []).append((rate["batch_size"], 1.0 / median(rate["updates_per_s"])))
    found = {}
    for name, own in points.items():
        cost = fit_cost(own) if len(own) > 1 else None
        if cost is not None and cost.b > 1e-11:
            found[name] = paper_batch(*cost, _KNEE)
    return found


def rate_rows(records: dict[str, Record]) -> list[Row]:
    """Updates/s and update frames/s of each rate, with its shares of both bounds."""
    bounds, counts, rows = records.get("bounds", {}), records.get(_KERNELS, {}), []
    launch_s = median(bounds["launch_s"]) / bounds["count"] if bounds.get("launch_s") else None
    for rate in _rates(records):
        kernels = counts.get("fused" if "fused" in rate["kind"] else "eager")
        case = {name: rate[name] for name in ("batch_size", "precision", "kind", "memory_bytes")} | {"kernels": kernels}
        updates_per_s = rate["updates_per_s"]
        matmul_s = bounds.get("matmul_s", {}).get(f"{rate['precision']} {rate['batch_size']}")
        shares = {
            "launch_bound_share": launch_s and kernels and launch_s * kernels * median(updates_per_s),
            "matmul_bound_share": matmul_s and median(matmul_s) * median(updates_per_s),
        }
        rows += [row("updates_per_s", "1/s", updates_per_s, **case, **shares),
                 row("update_frames_per_s", "1/s", [value * rate["batch_size"] for value in updates_per_s], **case)]
    return [*rows, *(row("knee_of_the_papers_rule", "transitions", [batch], case=name)
                     for name, batch in knees(records).items())]


def markdown(records: dict[str, Record], place: Place, machine: str) -> str:
    """Everything in the form of ``assets/figures.md``."""
    devices = " ".join((place.device, *place.others))
    text = [f"`python -m spreeze.bench gpu --device {devices}` on {machine}", "", "| what | target | measured |",
            "|---|---|---|"]
    for one in targets(records, place):
        missed = "**missed**: " if one.verdict == "missed" else ""
        text.append(f"| {one.figure} | {one.goal} | {missed}{one.measured or 'not taken'} |")
    text += ["", "| check | result |", "|---|---|"]
    text += [f"| {name} | {records[name]['verdict']}: {records[name]['text']} |" for name in CHECKS if name in records]
    text += ["", "| batch | precision | kind | updates/s | update frames/s | kernels | of the launch bound | of the "
             "matmul bound |", "|---|---|---|---|---|---|---|---|"]
    text += [_rate_line(one) for one in rate_rows(records) if one["metric"] == "updates_per_s"]
    text += ["", *(_yardstick_line(batch, _rates(records)) for batch in YARDSTICKS)]
    text += [*(f"- knee by the paper's rule, {name}: batch {batch}" for name, batch in knees(records).items())]
    text += [f"- {one['item']}: {one['text']}" for one in records.values() if one["part"] in ("tuner", "learning")
             or (one["part"] == "speed" and one["verdict"] != "measured") or one["item"] == "bounds"]
    return "\n".join(text) + "\n"


def _yardstick_line(batch: int, rates: list[Record]) -> str:
    best = max((one for one in rates if one["batch_size"] == batch), key=_frames, default=None)
    here = "not taken" if best is None else (f"{median(best['updates_per_s']):,.0f} updates/s, {_frames(best):,.0f} "
                                             f"update frames/s ({best['precision']}, {best['kind']})")
    return f"- batch {batch}: {YARDSTICKS[batch]}; here: {here}"


def _rate_line(rate: Row) -> str:
    values, updates = rate["repeats"], rate["value"]
    shares = [f"{rate[name]:.2f}" if rate.get(name) else "-" for name in ("launch_bound_share", "matmul_bound_share")]
    cells = [rate["batch_size"], rate["precision"], rate["kind"],
             f"{updates:,.0f} [{min(values):,.0f} .. {max(values):,.0f}]", f"{updates * rate['batch_size']:,.0f}",
             rate.get("kernels", "-"), *shares]
    return f"| {' | '.join(map(str, cells))} |"


# --- the command ---


def gpu_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Takes what is missing and returns every figure.

    Raises:
        UsageError: there is no such device, or no GPU and no device was named.
    """
    if args.device is None:
        missing = missing_device()
        if missing is not None:
            raise UsageError(missing)
    devices = [resolve_device(one) for one in args.device] if args.device else _all_gpus()
    place = Place(device=devices[0], others=tuple(devices[1:]), small=args.small)
    machine, folder = read_machine(), Path(args.results)
    journal = Journal(folder, {"device": place.to_json(), "machine": machine.identity(), "versions": versions()},
                      fresh=args.fresh)
    bench = GpuBench(place=place, repeats=args.repeats, runs_dir=str(folder / "runs"))
    say(f"gpu: {place.device} for {args.minutes:g} minutes, {len(journal.records)} results are in {journal.path}")
    take_all(bench, journal, 60.0 * args.minutes, args.parts, say)
    text = markdown(journal.records, place, machine.one_line())
    (folder / "gpu.md").write_text(text, encoding="utf-8")
    found = targets(journal.records, place)
    for one in found:
        say(f"  {one.verdict:9s} {one.figure}: {one.measured or '-'} (target {one.goal})")
    say(f"  a table for assets/figures.md is in {folder / 'gpu.md'}")
    return [*({"metric": one.figure, "unit": one.verdict, "value": one.measured, "target": one.goal} for one in found),
            *rate_rows(journal.records)]


def _all_gpus() -> list[str]:
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
