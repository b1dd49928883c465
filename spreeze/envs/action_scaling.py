"""From a policy's actions to an environment's own unit."""

from __future__ import annotations

import numpy as np

from spreeze.types import EnvSpec


class ActionScaling:
    """Maps [-1, 1] to the bounds of an environment's actions and clips there; a discrete action stays its index.

    What depends on the bounds alone is computed once: each call of NumPy costs a process that has just slept five
    microseconds.
    """

    def __init__(self, spec: EnvSpec, *, bounded: bool = False) -> None:
        """Args: ``bounded`` where the policy's actions lie in [-1, 1]: such bounds then need no clipping."""
        self.low, self.high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        self._half = (self.high - self.low) * np.float32(0.5)
        self._middle = self.low + self._half
        self._discrete = spec.num_actions is not None
        self._unit = bool(np.all(self.low == -1.0) and np.all(self.high == 1.0))
        self._as_given = self._unit and bounded

    def __call__(self, actions: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Actions [N, A] as ``Task.step`` takes them.

        Args:
            actions: as a policy gives them, float32.
            out: where they go, float32 [N, A]; environments may write into it. None makes a new array.

        Returns:
            ``out`` or the new array; of discrete actions ``actions`` itself.
        """
        if self._discrete:
            return actions
        if self._as_given and out is not None:
            np.copyto(out, actions)
            return out
        if self._unit:
            native: np.ndarray = np.maximum(actions, self.low, out=out)
        else:
            native = np.multiply(actions, self._half, out=out)
            native += self._middle
            np.maximum(native, self.low, out=native)  # rounding may lead out of the bounds
        np.minimum(native, self.high, out=native)
        return native
