"""All randomness of on-policy collection: it belongs to the environments, and is a function of counters.

What an environment draws depends on the run's seed, its own number, its episode and its step alone, never on
who asks, when, or in which order (Salmon et al. 2011, Philox). Nothing else in executors and actors is random.
"""

from __future__ import annotations

import numpy as np

_BLOCK_STEPS = 32
"""Steps whose noise is drawn at once: a generator costs some ten microseconds to set up."""
_SEED_BITS = 31


def reset_seed(seed: int, env: int, episode: int) -> int:
    """Seed of an environment's reset."""
    return int(np.random.SeedSequence((seed, env, episode)).generate_state(1)[0]) >> (32 - _SEED_BITS)


class ActionNoise:
    """The noise of one environment's actions."""

    def __init__(self, seed: int, env: int, noise_dim: int, *, uniform: bool) -> None:
        """Args: ``uniform`` for discrete actions, noise in [0, 1); else standard normal."""
        self._key = (seed, env)
        self._noise_dim, self._uniform = noise_dim, uniform
        self._held: tuple[int, int] | None = None
        self._block = np.zeros((0, noise_dim), np.float32)

    def at(self, episode: int, step: int) -> np.ndarray:
        """Noise float32 [Z] of a step; valid until the next call."""
        number, row = divmod(step, _BLOCK_STEPS)
        if self._held != (episode, number):
            self._held = (episode, number)
            # The generator counts up the first word; the other two name the block.
            rng = np.random.Generator(np.random.Philox(key=self._key, counter=(0, number, episode, 0)))
            draw = rng.random if self._uniform else rng.standard_normal
            self._block = draw((_BLOCK_STEPS, self._noise_dim), np.float32)
        noise: np.ndarray = self._block[row]
        return noise
