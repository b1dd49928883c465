"""Images for actor-critic algorithms: one encoder, learned by the critics' loss alone, and random shifts.

DrQ-v2 (Yarats et al. 2022, arXiv 2107.09645). Actor and critics read features, through which no gradient of the actor
flows back; there is no target encoder. Each image of a drawn batch is moved by a few pixels, so that critics learn what
does not depend on the place of a pixel. Departures from the authors' code: the trunks of the other algorithms; the
first layers of actor and critics, with layer normalisation, in place of a projection to 50 features; losses and
exploration of the algorithm that uses this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from spreeze.algorithms.conv_networks import Trunks
from spreeze.algorithms.fused_mlp import host_copies
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.config.algorithm_settings import ActorCriticConfig
from spreeze.inference.convolution import TrunkInputs
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import FrameSpec, TransitionBatch

_CHUNK_ROWS = 128
"""Rows that go through the trunks at once on a CPU: a layer's output is still in the cache for the next one."""


def over_images(name: str) -> dict[str, Any]:
    """Defaults of algorithm ``name`` where it learns from images."""
    return {f"{name}.actor_layer_norm": True, f"{name}.critic_layer_norm": True}


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Images [B, C, H, W], each moved by up to ``most`` pixels up or down and to a side, in new memory.

    What moves in at a side is the row or column that was there (replicate padding, arXiv 2004.13649).
    """
    moves = torch.randint(-most, most + 1, (2, len(images), 1), generator=generator, device=generator.device)
    rows, columns = (
        (torch.arange(size, device=images.device) + move).clamp_(0, size - 1)
        for size, move in zip(images.shape[2:], moves.to(images.device), strict=True)
    )
    places = (rows[:, :, None] * images.shape[3] + columns[:, None]).flatten(1)
    found = images.flatten(2).gather(2, places[:, None].expand(-1, images.shape[1], -1))
    return found.view(images.shape)


class ImageEncoder:
    """Trunks with their optimizer, which turn batches of images into batches of features."""

    def __init__(self, frames: FrameSpec, config: ActorCriticConfig, seed: int, device: torch.device) -> None:
        inputs, cnn = TrunkInputs.of(frames), config.cnn
        self.size, self.meta = inputs.features(cnn), inputs.meta(cnn)
        """Inputs of actor and critics; JSON values for samplers."""
        self.online, self._gradient = (
            Trunks(torch.zeros(Trunks.count(inputs, cnn), device=device), inputs, cnn) for _ in range(2)
        )
        self.online.initialise(torch.Generator().manual_seed(seed + 2))
        self.adam = FlatAdam(self.online.flat, self._gradient.flat, config.critic_lr)
        self._leaves = self.online.leaves()
        self._most = config.random_shift
        self._recorded: list[Tensor] = []
        self._chunk_rows = _CHUNK_ROWS if device.type == "cpu" else None

    def encode(self, batch: TransitionBatch, noise: torch.Generator) -> TransitionBatch:
        """The batch with features of shifted images; keeps the graph of those of ``obs`` for ``step``."""
        shift = partial(shifted, most=self._most, generator=noise) if self._most else None
        parts = torch.split(batch.obs, self._chunk_rows or len(batch.obs))
        following = torch.split(batch.next_obs, self._chunk_rows or len(batch.obs))
        with torch.enable_grad():
            self._recorded = [self.online.features(part, self._leaves, shift) for part in parts]
        obs = torch.cat([part.detach() for part in self._recorded])
        with torch.no_grad():
            layers = self.online.tensors()
            next_obs = torch.cat([self.online.features(part, layers, shift) for part in following])
        return batch._replace(obs=obs, next_obs=next_obs, obs_action=torch.cat((obs, batch.action), 1))

    def step(self, grad_obs: Tensor) -> None:
        """One gradient step by the derivative [B, F + V] of the critics' loss by the features."""
        leaves = [tensor for pair in self._leaves for tensor in pair]
        own = [tensor for pair in self._gradient.tensors() for tensor in pair]
        self._gradient.flat.zero_()
        recorded, self._recorded = self._recorded, []
        for out, part in zip(recorded, torch.split(grad_obs, self._chunk_rows or len(grad_obs)), strict=True):
            for tensor, found in zip(own, torch.autograd.grad(out, leaves, part), strict=True):
                tensor.add_(found)
        self.adam.step()

    def update_target(self, tau: float) -> None:
        """Does nothing: there is no target."""

    def row_errors(self, errors: Tensor) -> Tensor:
        """Those of the transitions [B] themselves."""
        return errors

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the trunks, as ``inference.convolution.Trunk`` reads them."""
        return host_copies(self.online.trunk())

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {"online": self.online.flat} | {f"adam.{name}": tensor for name, tensor in self.adam.tensors().items()}
