"""Updates a second of the whole learner on a device or a split, with draws from replay: what a run does.

Besides the rate: what crosses between the two sides of a split, how often the host waits for the device by
accident, and how the time of the host divides. On a GPU, batches come from the mirror of replay and updates
are one launch.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

from spreeze.config import PARTS, AlgorithmConfig
from spreeze.transport.ring import Ring, RingSpec
from spreeze.transport.ring_reader import RingReader
from spreeze.types import EnvSpec, RowLayout
from spreeze.workers.devices import HostWaits, learner_threads, products_in, resolve_device, synchronise
from spreeze.workers.filling import fill
from spreeze.workers.learning import Learning

_ROWS = 2**17
_WARM_UPDATES = 16
_OBS, _ACT = 22, 6
_UNITS = {
    "updates_per_s": "1/s", "update_frames_per_s": "1/s", "learner_gather_share": "share",
    "learner_critic_share": "share", "learner_actor_share": "share", "crossed_bytes_per_update": "bytes",
    "host_waits_per_update": "waits",
}


def placed_rows(
    batch_sizes: list[int], repeats: int, device: str, algo: str = "sac", *, precision: str = "float32",
    overlap: bool = False, updates_per_launch: int = 1, repeat_s: float = 2.0,
) -> list[dict[str, Any]]:
    """Rows for each batch size: Walker2D's sizes, networks as configured by default, synthetic rows in replay.

    Raises:
        ConfigError: the device or the precision is not there.
    """
    spec = EnvSpec(
        env_id="synthetic rows", import_module=None, obs_dim=_OBS, action_dim=_ACT, action_low=(-1.0,) * _ACT,
        action_high=(1.0,) * _ACT, max_episode_steps=None, reward_threshold=None,
    )
    layout, config, device = RowLayout(_OBS, _ACT), PARTS[algo](), resolve_device(device)
    assert isinstance(config, AlgorithmConfig)
    ring = Ring.create(RingSpec(layout, 1, _ROWS))
    rows: list[dict[str, Any]] = []
    try:
        fill(ring, spec)
        with products_in(precision, device), learner_threads(spec, 1, device):
            for batch_size in batch_sizes:
                learning = Learning(
                    spec, algo, config, layout, RingReader(ring), batch_size=batch_size, device=device, seed=0,
                    normalize_obs=False, overlap=overlap, mirror=True, updates_per_launch=updates_per_launch,
                )
                rates, values = _measured(learning, repeats, repeat_s, device)
                more = {"batch_size": batch_size, "algo": algo, "device": device, "precision": precision,
                        "overlap": overlap, "notes": learning.notes}
                rows += [{"metric": name, "value": value, "unit": _UNITS[name],
                          "repeats": rates if name == "updates_per_s" else [], **more}
                         for name, value in values.items()]
    finally:
        ring.close()
    return rows


def _measured(learning: Learning, repeats: int, repeat_s: float, device: str) -> tuple[list[float], dict[str, float]]:
    """Updates a second of each repeat, and all figures by name."""
    while learning.updates < _WARM_UPDATES:
        learning.update()
    synchronise(device)
    began, crossed = learning.updates, learning.algorithm.crossed_bytes
    before_s = learning.gather_s, learning.critic_s, learning.actor_s
    rates = []
    for _ in range(repeats):
        start, count = perf_counter(), 0
        while perf_counter() - start < repeat_s:
            count += learning.update()
        synchronise(device)
        rates.append(count / (perf_counter() - start))
    updates = learning.updates - began
    now_s = learning.gather_s, learning.critic_s, learning.actor_s
    gather_s, critic_s, actor_s = (now - before for now, before in zip(now_s, before_s, strict=True))
    crossed = learning.algorithm.crossed_bytes - crossed
    with HostWaits(device) as waits:
        checked = learning.update()
    total_s = gather_s + critic_s + actor_s
    return rates, {
        "updates_per_s": statistics.median(rates),
        "update_frames_per_s": statistics.median(rates) * learning.batch_size,
        "learner_gather_share": gather_s / total_s, "learner_critic_share": critic_s / total_s,
        "learner_actor_share": actor_s / total_s, "crossed_bytes_per_update": crossed / updates,
        "host_waits_per_update": waits.count / checked,
    }
