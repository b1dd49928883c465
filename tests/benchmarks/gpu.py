"""All figures of a GPU by one command: checks, rates, kernels and bounds of an update, the tuner, times to returns.

    python tests/benchmarks/gpu.py --minutes 25

Steps follow one another, each in a process of its own; one for which the time is too short is left out and named. What
a step printed is kept in ``--out``, where the next call finds it: steps that have succeeded are not repeated. A table
of all steps ends the output. ``--device cpu`` tries the command itself, small.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "support"))
REPEATS = 5
KNEE = 0.85
"""Share of the highest update frame rate that the paper's batch has to reach (section 3.3)."""


class Step(NamedTuple):
    name: str
    needs_s: float
    """Time that it takes on an H100, about."""
    command: list[str]


def steps(device: str, env_id: str) -> list[Step]:
    small, python = device == "cpu", sys.executable
    train = [python, "-m", "spreeze.train", "--device", device, "--no-visualizer", "--seed", "1", "--json"]
    tiny = ["--updates", "20", "--batch-size", "16", "--set", "replay.learning_starts=200"] if small else []
    grid = (
        ["--batch-size", "128", "--samplers", "1", "--env", "Pendulum-v1"]
        if small
        else ["--batch-size", "256", "1024", "8192", "--samplers", "1", "4", "8", "16", "--env", env_id]
    )
    physics = [python, str(TESTS / "benchmarks" / "physics.py"), "--device", device]
    some = ["--seconds", "0.1", "--repeats", "1"] if small else []
    on_device = [*train, "--mode", "device", *tiny]
    many = ["--envs-per-sampler", "4096", "--sync-interval", "24", "--set", "ppo.minibatch_size=24576",
            "--set", "ppo.epochs=5", "--set", "env.normalize_obs=true"]  # fmt: skip
    pendulum, large = (
        ["vector:DevicePendulum-v0", "--import", "device_envs"],
        ["--envs", "4096", "--batch-size", "8192"],
    )
    robots = [] if importlib.util.find_spec("mujoco_warp") is None or small else ["HalfCheetah-v5", "Humanoid-v5"]
    return [
        Step("physics: 64 pendulums", 60.0, [*physics, "--env", *pendulum, "--envs", "64", *some]),
        *([] if small else [Step("physics: 4,096 pendulums", 60.0, [*physics, "--env", *pendulum, *large])]),
        *(
            Step(f"physics: 4,096 of warp:{name}", 150.0, [*physics, "--env", f"warp:{name}", *large])
            for name in robots
        ),
        *(
            Step(
                f"warp:{name} to {text}",
                seconds + 60.0,
                [
                    *on_device,
                    "--env",
                    f"warp:{name}",
                    "--algo",
                    "ppo",
                    *many,
                    "--target-return",
                    text.replace(",", ""),
                    "--seconds",
                    f"{seconds:.0f}",
                    "--start-deadline-s",
                    "600",
                ],
            )
            for name, text, seconds in (("HalfCheetah-v5", "4,000", 240.0), ("Humanoid-v5", "5,000", 300.0))
            if name in robots
        ),
        Step(
            "64 pendulums to -300 on the device",
            90.0,
            [
                *on_device,
                "--env",
                *pendulum,
                "--env-arg",
                f"device={device}",
                "--algo",
                "ppo",
                "--envs-per-sampler",
                "64",
                "--sync-interval",
                "32",
                "--target-return",
                "-300",
                "--seconds",
                "20" if small else "80",
            ],
        ),
        Step("checks", 480.0, [python, "-m", "pytest", str(TESTS), "-m", "gpu", "-n", "1", "-q"]),
        Step("rates", 400.0, [python, __file__, "--device", device, "--minutes", "7", "--rates"]),
        Step("kernels and bounds", 60.0, [python, __file__, "--device", device, "--minutes", "0", "--bounds"]),
        Step(
            "tuner over its grid",
            240.0,
            [python, str(TESTS / "benchmarks" / "tune.py"), "--repeats", "1", "--rounds", "1", *grid],
        ),
        Step(
            "Pendulum-v1 to -200",
            60.0,
            [*train, "--env", "Pendulum-v1", "--target-return", "-200", "--seconds", "60", *tiny],
        ),
        Step(
            f"{env_id} to 1,500", 240.0, [*train, "--env", env_id, "--target-return", "1500", "--seconds", "240", *tiny]
        ),
    ]


def take(wanted: list[Step], seconds: float, out: Path) -> int:
    """Runs the steps that the time is enough for, but those whose output is in ``out``; returns how many failed."""
    out.mkdir(parents=True, exist_ok=True)
    end_s, failed, rows = time.monotonic() + seconds, 0, list[tuple[str, str, str]]()
    paths = [str(TESTS.parent), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    for step in wanted:
        kept = out / (re.sub(r"[^A-Za-z0-9]+", "-", step.name) + ".txt")
        if kept.exists():
            rows.append((step.name, "before", last_line(kept)))
            continue
        left_s = end_s - time.monotonic()
        if left_s < step.needs_s:
            print(f"== {step.name}: left out, takes about {step.needs_s:.0f} s and {left_s:.0f} s are left", flush=True)
            rows.append((step.name, "left out", ""))
            continue
        print(f"== {step.name}", flush=True)
        began_s = time.monotonic()
        unfinished = kept.with_suffix(".part")
        with open(unfinished, "w") as file:
            try:
                code = subprocess.run(
                    step.command, stdin=subprocess.DEVNULL, stdout=file, env=environment, timeout=left_s, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
        print(unfinished.read_text(), end="")
        failed += code != 0
        took = f"{time.monotonic() - began_s:.0f} s" + (f", exit code {code}" if code else "")
        print(f"== {step.name}: {took}", flush=True)
        rows.append((step.name, took, last_line(unfinished)))
        if code == 0:
            unfinished.rename(kept)
    print("| step | took | result |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    return failed


def rates(device: str, minutes: float) -> None:
    """Prints the rates of ``spreeze bench``, the batches of the paper's rule, and the verdict."""
    from figures import line

    from spreeze.cli.bench import gpu_rows

    args = argparse.Namespace(device=device, minutes=minutes, repeats=REPEATS)
    rows = gpu_rows(args, lambda text: print(text, flush=True))
    print("\n".join(map(line, [*rows, *knees(rows), *verdict(rows)])))


def verdict(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rates that an H100 or H200 should reach, beside the best of these."""
    known = [one for one in rates if one["value"] is not None]
    graphs = [one for one in known if one["batch_size"] == 256 and "graph" in one["kind"]]
    return [
        _judged("updates/s at 256, graph", 4000.0, graphs, per_batch=False),
        _judged("update frames/s at 8,192", 12e6, [one for one in known if one["batch_size"] == 8192]),
        _judged("update frames/s, best of all batches", 20e6, known),
    ]


def _judged(figure: str, bound: float, rates: list[dict[str, Any]], *, per_batch: bool = True) -> dict[str, Any]:
    from figures import row

    best = max(rates, key=lambda one: float(one["update_frames_per_s"]), default=None)
    target = f">= {bound:,.0f}"
    if best is None:
        return row(figure, "1/s", [], target=target, verdict="not taken")
    values = [value * (best["batch_size"] if per_batch else 1) for value in best["repeats"]]
    reached = "met" if statistics.median(values) >= bound else "missed"
    more = {name: best[name] for name in ("precision", "batch_size", "kind")}
    return row(figure, "1/s", values, target=target, verdict=reached, **more)


def knees(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By precision and kind the batch of the paper's rule, where enough batches were timed."""
    from figures import row

    from spreeze.tuner.model import fit_cost, paper_batch

    points: dict[str, list[tuple[int, float]]] = {}
    for one in rates:
        if one["value"]:
            points.setdefault(f"{one['precision']}, {one['kind']}", []).append((one["batch_size"], 1.0 / one["value"]))
    costs = {name: fit_cost(own) for name, own in points.items() if len(own) > 1}
    return [
        row("batch of the paper's rule", "transitions", [paper_batch(*cost, KNEE)], case=name)
        for name, cost in costs.items()
        if cost.b > 1e-11
    ]


def last_line(path: Path) -> str:
    """The last line that a step printed; of a run's document its time, rates and return."""
    text = path.read_text()
    line = ([one for one in text.splitlines() if one.strip()] or [""])[-1]
    with contextlib.suppress(ValueError, TypeError):
        found = json.loads(text)
        names = ("wall_s", "env_steps", "env_steps_per_s", "updates_per_s", "eval_return_best", "stopped_by")
        if "parameters_sha256" in found:
            return ", ".join(f"{name} {found[name]}" for name in names if name in found)
    return line.replace("|", "/")[:400]


def bounds(device: str) -> dict[str, Any]:
    """Kernels of an update, seconds of as many empty launches, and of an update's matmuls by precision and batch."""
    import torch
    from gpu_checks import VECTORS, Place, ring_of, trainer_of
    from kernel_count import kernels_of_update
    from matmul_floor import ACTION_DIM, OBS_DIM, MatmulRound, matmuls

    from spreeze.workers.torch_devices import matmuls_in

    place, case, found = Place(device=device, small=device == "cpu"), VECTORS[0], {}
    for name in ("eager", "fused") if place.on_gpu else ("eager",):
        with contextlib.ExitStack() as stack:
            trainer = trainer_of(
                stack.enter_context(ring_of(case.spec())),
                case,
                place,
                per_launch=0,
                compile=name == "fused",
                branches=name == "eager",
            )
            for _ in range(3):
                trainer.update()
            found[f"kernels, {name}"] = kernels_of_update(trainer)
    counter = torch.zeros((), device=device)
    found["empty launches [s]"] = seconds_of(
        lambda: [counter.add_(1.0) for _ in range(found["kernels, eager"])], device
    )
    for precision in ("float32", "tf32") if place.on_gpu else ("float32",):
        for batch in (256, 1024, 8192, 65_536) if place.on_gpu else (64,):
            with matmuls_in(precision, device):
                one = MatmulRound(matmuls("sac", batch, OBS_DIM, ACTION_DIM, place.hidden), device)
                found[f"matmuls, {precision}, batch {batch} [s]"] = seconds_of(lambda one=one: one.run(1), device)
    return found


def seconds_of(work: Any, device: str) -> list[float]:
    """Time of ``work``, each repeat; on a GPU as a graph."""
    import torch

    from spreeze.workers.gpu_replay import CudaGraph
    from spreeze.workers.torch_devices import gpus_of, synchronize

    work()
    if gpus_of(device):
        graph = CudaGraph(torch.device(device))
        graph.record(work, [])
        work = graph.replay
    found = []
    for _ in range(REPEATS):
        synchronize(device)
        start_s, count = time.perf_counter(), 0
        while time.perf_counter() - start_s < 0.3:
            for _ in range(32):
                work()
            count += 32
            synchronize(device)
        found.append((time.perf_counter() - start_s) / count)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--env", default="Walker2DBulletEnv-v0")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--out", type=Path, default=Path("gpu-figures"), help="folder of what the steps printed")
    parser.add_argument("--bounds", action="store_true", help="only kernels and bounds, in this process")
    parser.add_argument("--rates", action="store_true", help="only updates/s and the verdict on them")
    args = parser.parse_args()
    if args.rates:
        rates(args.device, args.minutes)
    elif args.bounds:
        print(json.dumps(bounds(args.device)))
    else:
        sys.exit(take(steps(args.device, args.env), 60.0 * args.minutes, args.out) > 0)
