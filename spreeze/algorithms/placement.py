"""Where the two sides of an algorithm live, and what crosses between them.

Split after the Spreeze paper (section 3.1): the actor on one device, critics and targets on the other.
Per update cross the next actions with their log-densities and the fresh actions in one direction, dQ/da
in the other, and for SAC the temperature; rewards and terminations are never on the actor's device. The
steps and their order are those of one device, so the result is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spreeze.algorithms.base import Proposal
from spreeze.errors import ConfigError


class Placement:
    """Devices of both sides; counts the bytes that cross."""

    def __init__(self, actor: torch.device, critics: torch.device, *, split: bool) -> None:
        self.actor, self.critics, self.split = actor, critics, split
        self.crossed_bytes = 0
        """Since this placement exists; a split over one and the same device counts what would cross."""

    @classmethod
    def parse(cls, text: str) -> Placement:
        """``cpu``, ``cuda:0``, or ``ACTOR+CRITICS`` such as ``cuda:0+cuda:1``.

        Raises:
            ConfigError: more than two devices, or not a device.
        """
        names = text.split("+")
        if len(names) > 2:
            raise ConfigError(f"device {text}: expected one device, or two as ACTOR+CRITICS")
        try:
            devices = [torch.device(name) for name in names]
        except RuntimeError:
            raise ConfigError(f"device {text}: expected cpu, cuda:N, or two of them as ACTOR+CRITICS") from None
        return cls(devices[0], devices[-1], split=len(devices) == 2)

    def send(self, proposal: Proposal) -> Proposal:
        """What the actor side proposes, on the critics' device."""
        if not self.split:
            return proposal
        next_action, next_log_prob, action = proposal
        return Proposal(
            self.to_critics(next_action), None if next_log_prob is None else self.to_critics(next_log_prob),
            None if action is None else self.to_critics(action),
        )

    def to_critics(self, tensor: Tensor) -> Tensor:
        """A tensor of the actor side on the critics' device."""
        return self._moved(tensor, self.critics)

    def to_actor(self, tensor: Tensor) -> Tensor:
        """A tensor of the critic side on the actor's device."""
        return self._moved(tensor, self.actor)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not self.split:
            return tensor
        self.crossed_bytes += tensor.element_size() * tensor.nelement()
        # A copy to the processor is waited for: without that its numbers may be read before they are there.
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")
