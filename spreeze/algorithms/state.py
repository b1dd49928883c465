"""Named tensors to arrays and back, for checkpoints; bit-exact."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spreeze.errors import CheckpointError

GENERATOR = "generator"
_MAX_SEED = 2**63 - 1


def to_arrays(tensors: dict[str, Tensor], generator: torch.Generator) -> dict[str, np.ndarray]:
    """Copies of all tensors and of the generator's state (uint8)."""
    arrays = {name: tensor.detach().to("cpu", copy=True).numpy() for name, tensor in tensors.items()}
    arrays[GENERATOR] = generator.get_state().cpu().numpy().copy()
    return arrays


def generator_fits(generator: torch.Generator, arrays: dict[str, np.ndarray]) -> bool:
    """False where the random state is that of another kind of device: 5,056 bytes on a CPU, 16 on a CUDA GPU."""
    return GENERATOR not in arrays or arrays[GENERATOR].size == generator.get_state().numel()


def seed_anew(generator: torch.Generator, seed: int, updates: int) -> None:
    """Seeds for what follows so many updates, the same wherever it is done, other than for the first updates."""
    words = np.random.SeedSequence([seed, updates]).generate_state(1, np.uint64)
    generator.manual_seed(int(words[0]) & _MAX_SEED)


def load_arrays(tensors: dict[str, Tensor], generator: torch.Generator | None, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays into the tensors in place, all or nothing.

    Args:
        tensors: to be written.
        generator: takes over the random state; None: the random state is left out.
        arrays: what ``to_arrays`` gave.

    Raises:
        CheckpointError: a name is missing, or a shape is that of another network.
    """
    for name, tensor in tensors.items():
        if name not in arrays:
            raise CheckpointError(f"checkpoint has no '{name}'; it was made by another algorithm or version")
        if tuple(arrays[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"checkpoint '{name}' has shape {tuple(arrays[name].shape)}, this network needs "
                f"{tuple(tensor.shape)}; use the hidden_sizes and the environment of the checkpoint"
            )
    if GENERATOR not in arrays:
        raise CheckpointError(f"checkpoint has no '{GENERATOR}'; it was made by another algorithm or version")
    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(np.array(arrays[name])))
    if generator is None:
        return
    try:
        generator.set_state(torch.from_numpy(np.array(arrays[GENERATOR], dtype=np.uint8)))
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint '{GENERATOR}' does not fit this device: {error}") from None
