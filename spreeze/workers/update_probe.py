"""A child process that times real updates on synthetic rows: ``python -m spreeze.workers.update_probe JOB``.

One JSON line per batch size on standard output; a crash or a hang of it is data for the caller.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch

from spreeze.config import PARTS
from spreeze.envs.task import uniform_actions
from spreeze.transport.frames import FrameLog, open_reader
from spreeze.transport.ring import Ring, RingSpec, ShardWriter
from spreeze.transport.ring_reader import RingReader
from spreeze.types import EnvSpec, RowLayout
from spreeze.workers.child import end_with_parent
from spreeze.workers.jobs import UpdateProbeJob
from spreeze.workers.learning import Learning, resolve_device

_ROWS, _IMAGE_ROWS = 20_000, 2_000


def main(argv: list[str]) -> int:
    """Times the batch sizes in rising order."""
    end_with_parent()
    job = UpdateProbeJob.from_json(json.loads(argv[0]))
    torch.set_num_threads(job.threads)
    layout = RowLayout.of(job.spec, int(job.algorithm["n_step"]))
    ring = Ring.create(RingSpec(layout, 1, _ROWS if job.spec.frames is None else _IMAGE_ROWS))
    try:
        _fill(ring, layout, job.spec)
        reader = open_reader(ring)
        for batch_size in job.batch_sizes:
            rates = _time(job, layout, reader, batch_size)
            sys.stdout.write(json.dumps({"batch_size": batch_size, "updates_per_s": rates}) + "\n")
            sys.stdout.flush()
            if min(rates) * job.slowest_update_s < 1.0:
                break
    finally:
        ring.close()
    return 0


def _fill(ring: Ring, layout: RowLayout, spec: EnvSpec) -> None:
    rng = np.random.default_rng(0)
    count = ring.spec.capacity
    if spec.frames is not None:
        _fill_frames(ring, spec, rng)
        return
    ShardWriter(ring, 0).write(
        rng.standard_normal((count, layout.obs_dim), np.float32), uniform_actions(spec, count, rng),
        rng.standard_normal(count, np.float32), np.zeros(count),
        rng.standard_normal((count, layout.obs_dim), np.float32),
        num_steps=np.ones(count) if layout.num_steps is not None else None,
    )


def _fill_frames(ring: Ring, spec: EnvSpec, rng: np.random.Generator) -> None:
    log = FrameLog(ShardWriter(ring, 0), 1, ring.spec.layout.n_step, 0.99)
    frames = rng.integers(256, size=(16, ring.spec.layout.frame_bytes), dtype=np.uint8)
    log.start(0, frames[0])
    for step, action in enumerate(uniform_actions(spec, ring.spec.capacity - 1, rng)):
        log.add(0, action, 0.0, False, False, frames[step % len(frames)])
        log.flush(0)


def _time(job: UpdateProbeJob, layout: RowLayout, reader: RingReader, batch_size: int) -> list[float]:
    """Updates a second, each repeat; the first updates (allocation, caches) are left out."""
    config: Any = PARTS[job.algo](**job.algorithm)
    device = resolve_device(job.device)
    learning = Learning(job.spec, job.algo, config, layout, reader, batch_size=batch_size, device=device, seed=0,
                        normalize_obs=False)
    for _ in range(3):
        learning.update()
    rates = []
    for _ in range(job.repeats):
        _synchronise(device)
        start = time.perf_counter()
        count = 0
        while time.perf_counter() - start < job.repeat_s:
            learning.update()
            count += 1
        _synchronise(device)
        rates.append(count / (time.perf_counter() - start))
    return rates


def _synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
