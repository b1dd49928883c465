"""Env steps/s of environments on a device: the engine alone, with policy and rows, and with a learner beside.

    python tests/benchmarks/physics.py --env warp:Humanoid-v5 --device cuda:0 --envs 4096

The three take turns, so that neighbours disturb all alike. Rows are written as in mode ``device``, SAC draws
``--samples-per-insert`` for each new one. Prints one JSON document of medians with least and greatest.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import torch

from spreeze.algorithms import create
from spreeze.algorithms.on_device import DeviceActor
from spreeze.config.algorithms import find_row
from spreeze.envs.make import import_user_module
from spreeze.envs.task import make_task
from spreeze.envs.vector_task import DeviceTask, make_vector
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.workers.device_learner import DeviceCollector
from spreeze.workers.gpu_replay import CudaGraph, DeviceReplay, DeviceRows, DeviceStream, GraphedUpdates
from spreeze.workers.torch_devices import synchronize


class DevicePath:
    """The collector with replay, and updates on request."""

    def __init__(self, spec, make, args, device):
        config = find_row("sac").config()
        layout = config.row_layout(spec)
        self.algorithm = create("sac", spec.obs_dim, spec.action_dim, config, 0, args.device)
        self.replay = DeviceReplay(layout, args.capacity, args.batch_size, device, 0)
        self.limiter = RateLimiter(0.0, args.samples_per_insert, 1, args.batch_size, args.envs, serial=True)
        self.layout, self.gamma = layout, config.gamma
        self.collector = DeviceCollector(
            make, args.envs, DeviceRows(self.replay, config.n_step, config.gamma, args.envs),
            DeviceActor(self.algorithm, 1), None, seed=0, nan_policy="drop", on_error=print, heartbeat=lambda _: None,
        )  # fmt: skip
        self.replay.begin_learning()
        graph = (lambda: CudaGraph(device)) if device.type == "cuda" else None
        self.updates = GraphedUpdates(
            self.algorithm, self.replay, self.update, DeviceStream(device), make_graph=graph, on_failure=print
        )

    def update(self, rows):
        self.algorithm.update(self.layout.split(rows, self.gamma))

    def collect(self):
        self.collector.step(0)

    def learn(self):
        self.collector.step(0)
        replay = self.replay
        while self.limiter.may_sample(replay.total_committed(), replay.inserted_at_learning_start, replay.rows_drawn):
            replay.rows_drawn += self.updates.run() * self.limiter.batch_size


def rate(step, args):
    """Env steps/s of ``step`` for at least ``args.seconds``."""
    step()
    synchronize(args.device)
    start_s, steps = time.perf_counter(), 0
    while time.perf_counter() - start_s < args.seconds:
        for _ in range(args.steps):
            step()
        steps += args.steps
        synchronize(args.device)
    return steps * args.envs / (time.perf_counter() - start_s)


def main(args):
    if args.module:
        import_user_module(args.module)
    task = make_task(args.env, args.module)
    spec, device = task.spec, torch.device(args.device)
    options = {"device": args.device}
    bare = make_vector(args.env, args.envs, 0, options)
    bare.reset(seed=0)
    low, high = (torch.from_numpy(bound).to(device) for bound in spec.box.float32_bounds())

    def engine():
        bare.step(low + (high - low) * torch.rand((args.envs, spec.action_dim), device=device))

    path = DevicePath(
        spec, lambda seed: DeviceTask(make_vector(args.env, args.envs, seed, options), spec, device), args, device
    )
    ways = {"engine": engine, "policy and rows": path.collect, "learner too": path.learn}
    found = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(args.repeats):
            for name, step in ways.items():
                found[name].append(rate(step, args))
    table = {name: [median(values), min(values), max(values)] for name, values in found.items()}
    counts = path.collector.counts
    spent = {name: getattr(counts, name) for name in ("policy_s", "env_s", "write_s")}
    overhead = [there / here for here, there in zip(found["engine"], found["policy and rows"], strict=True)]
    shown = {"env": args.env, "device": args.device, "envs": args.envs, "n": args.repeats, "batch": args.batch_size,
             "samples_per_insert": args.samples_per_insert, "env_steps_per_s": table,
             "shares": {name: round(seconds / sum(spent.values()), 3) for name, seconds in spent.items()},
        "path over engine": [median(overhead), min(overhead), max(overhead)]}  # fmt: skip
    print(json.dumps(shown))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="vector:DevicePendulum-v0")
    parser.add_argument("--import", dest="module", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--envs", type=int, default=1024)
    parser.add_argument("--capacity", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--samples-per-insert", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2, help="between two looks at the clock")
    parser.add_argument("--repeats", type=int, default=5)
    main(parser.parse_args())
