"""Notices target networks that follow too slowly for the updates that this machine makes."""

from __future__ import annotations

_PACE_S = 20.0
"""Time over which the pace is measured, once."""
_LEAST_BACKUPS_PER_S = 2.0
"""Target backups a second, below which values may need minutes to be of the right size."""


class TargetPace:
    """The share of the online weights that goes into the targets in a second: how fast values can follow."""

    def __init__(self, share: float, gamma: float, n_step: int) -> None:
        """An update mixes ``share`` of the online weights into the targets, on average."""
        self._share, self._settles = share, 1.0 - gamma**n_step
        self._began: tuple[float, int] | None = None
        self._done = False

    def note(self, now_s: float, updates: int) -> str | None:
        """Advice where they are too slow, given once; ``now_s`` is time of the run without pauses [s]."""
        if self._began is None:
            self._began = now_s, updates
        elapsed_s = now_s - self._began[0]
        if self._done or elapsed_s < _PACE_S:
            return None
        self._done = True
        return slow_targets(self._share, (updates - self._began[1]) / elapsed_s, self._settles)


def slow_targets(share: float, updates_per_s: float, settles: float) -> str | None:
    """Advice where target networks follow too slowly; None where they do not.

    Values have the time constant ``1 / (share settles)`` updates, where ``settles`` is 1 - gamma^n.
    """
    backups_per_s = share * updates_per_s
    if updates_per_s <= 0.0 or settles <= 0.0 or backups_per_s >= _LEAST_BACKUPS_PER_S:
        return None
    return (
        f"target networks change slowly: {backups_per_s:.2g} backups/s (tau {share:g} an update, "
        f"{updates_per_s:.3g} updates/s), so values take {1.0 / (backups_per_s * settles):,.0f} s to "
        f"converge; choose smaller networks or a smaller --batch-size, else raise tau or n_step"
    )
