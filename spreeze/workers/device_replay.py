"""Replay on the learner's device only: the collector there writes rows with one copy.

It has the methods of the ring in shared memory and of its reader (``transport``) that a learner uses, and draws like
``GpuReplay``. The number of rows stays on the device, so that neither writing nor drawing waits; the host reads it in
``synchronize``.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from spreeze.envs.on_device.device_task import DeviceStep
from spreeze.errors import ResourceError, TransportError
from spreeze.formatting import size
from spreeze.types import RowLayout
from spreeze.workers.torch_devices import out_of_memory

_MAX = torch.finfo(torch.float32).max
_COUNTED = 1024  # newest rows that a normalizer counts each time: a small copy, however many environments there are


class DeviceReplay:
    """The newest ``capacity`` rows; ``write`` appends, ``draw`` reads."""

    is_copy = False

    def __init__(self, layout: RowLayout, capacity: int, batch_size: int, device: torch.device, seed: int) -> None:
        """Allocates the memory; a ResourceError where the device has no room."""
        self.spec, self.capacity = SimpleNamespace(layout=layout), capacity
        try:  # the last row receives the rows that are not stored
            self._rows = torch.zeros((capacity + 1, layout.width), device=device)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            needed = size(4 * layout.width * (capacity + 1))
            text = f"replay of {capacity} rows takes {needed}, which {device} does not have; lower --replay-capacity"
            raise ResourceError(text) from None
        self._versions = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        self._end = torch.zeros((), dtype=torch.int64, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.inserted = self.available = self._pending = self.rows_drawn = 0
        self.inserted_at_learning_start = -1
        self._layout = layout
        self.set_batch_size(batch_size)

    def write(self, rows: Tensor, stored: Tensor, version: int) -> None:
        """Appends those of ``rows`` [M, W] that are ``stored`` [M]; ``version`` is that of the policy."""
        slots = (self._end + stored.cumsum(0) - 1).remainder_(self.capacity)
        slots = torch.where(stored, slots, self.capacity)
        self._rows.index_copy_(0, slots, rows)
        self._versions.index_fill_(0, slots, version)
        self._end += stored.sum()

    # --- as the ring ---

    def expect(self, rows: int) -> None:
        """Counts rows that were written since ``synchronize``, as far as the host knows."""
        self._pending += rows

    def synchronize(self) -> None:
        """Reads how many rows there are (waits for the device)."""
        if self._pending:
            self.inserted, self._pending = int(self._end), 0
            self.available = min(self.inserted, self.capacity)

    def total_committed(self) -> int:
        return self.inserted + self._pending

    def begin_learning(self) -> None:
        self.inserted_at_learning_start, self.rows_drawn = self.total_committed(), 0

    # --- as its reader ---

    @property
    def ends(self) -> list[int]:
        return [self.inserted]

    def refresh(self) -> None:
        """Does nothing: a draw always sees all rows."""

    pull = refresh

    def newer(self, shard: int, begin: int, columns: slice) -> tuple[np.ndarray, int]:
        """Columns of at most ``_COUNTED`` newest rows after ``begin``, and their end (waits for the device)."""
        count = min(self.inserted - begin, _COUNTED, self.capacity)
        slots = torch.arange(self.inserted - count, self.inserted, device=self._rows.device) % self.capacity
        return self._rows[slots, columns].cpu().numpy(), self.inserted

    def sample(self, rng: np.random.Generator, rows: np.ndarray, frames: np.ndarray | None = None) -> int:
        raise TransportError("replay on a device is drawn from there")

    def last_lag_age(self, version_now: int) -> tuple[float, float]:
        """Mean policy lag and age of the latest draw (waits for the device)."""
        age = (self._end - 1 - self._drawn).remainder(self.capacity).float().mean()
        return version_now - float(self._versions[self._drawn].float().mean()), float(age)

    # --- as GPU replay ---

    def set_batch_size(self, batch_size: int) -> None:
        self.batch = torch.zeros((batch_size, self._layout.width), device=self._rows.device)
        self._drawn = torch.zeros(batch_size, dtype=torch.int64, device=self._rows.device)

    def draw(self) -> Tensor:
        """Draws rows uniformly with replacement into ``batch`` [B, W]; zeros before the first row."""
        size = self._end.clamp(1, self.capacity)
        self._drawn.random_(generator=self.generator).remainder_(size)
        return torch.index_select(self._rows, 0, self._drawn, out=self.batch)


class DeviceRows:
    """Turns steps of N environments into rows of replay, over n steps as ``transitions.NStepBatch``."""

    def __init__(self, replay: DeviceReplay, n_step: int, gamma: float, num_envs: int) -> None:
        layout, device = replay.spec.layout, replay.batch.device
        self._replay, self._n, self._gamma, self._slot = replay, n_step, gamma, 0
        self._obs = torch.zeros((n_step, num_envs, layout.obs_dim), device=device)
        self._action = torch.zeros((n_step, num_envs, layout.action_dim), device=device)
        self._reward = torch.zeros((n_step, num_envs), dtype=torch.float64, device=device)
        self._length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        """[N]: steps of an environment whose transitions are not finished."""
        self._ages = torch.arange(n_step, device=device).unsqueeze(1)

    def store(self, obs: Tensor, action: Tensor, step: DeviceStep, good: Tensor, ended: Tensor, version: int) -> None:
        """Adds a step; where not ``good`` [N] there was none, and unfinished transitions are dropped."""
        n, slot = self._n, self._slot
        self._obs[slot], self._action[slot], self._reward[slot] = obs, action, step.reward
        if n == 1:
            stored, sums = good, step.reward
        else:
            self._length = (self._length + 1) * good
            order = [(slot - age) % n for age in range(n)]
            returns = [self._reward[slot]]
            for age in range(1, n):
                returns.append(returns[-1] * self._gamma + self._reward[order[age]])
            stored = ((self._ages < self._length) & (ended | (self._ages == n - 1))).flatten()
            sums = torch.cat(returns).clamp_(-_MAX, _MAX).float()
            self._length = (self._length * ~ended).clamp_(max=n - 1)
            obs, action = (torch.cat([part[at] for at in order]) for part in (self._obs, self._action))
        columns = [obs, action, sums.unsqueeze(1), step.terminated.float().repeat(n).unsqueeze(1),
                   step.next_obs.repeat(n, 1)]  # fmt: skip
        if n > 1:
            columns.append((self._ages + 1).float().repeat(1, len(good)).reshape(-1, 1))
        self._replay.write(torch.cat(columns, 1), stored, version)
        self._replay.expect(len(good))
        self._slot = (slot + 1) % n

    def read_back(self) -> None:
        self._replay.synchronize()

    def forget(self) -> None:
        """Drops unfinished transitions, since all environments were reset."""
        self._length.zero_()
