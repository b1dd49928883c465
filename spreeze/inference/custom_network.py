"""A policy network from a user's module, in processes that need no gradients.

The samplers of such a run load torch, and step slower: for few rows, a call of a module takes ten times as long as
NumPy. In ``sample`` each row is a separate call, so that its result cannot depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.errors import WeightsError
from spreeze.inference.user_modules import import_named
from spreeze.types import Arrays


class CustomNetwork:
    """The module named by the weights; maps [N, I] to [N, K] on the CPU."""

    def __init__(self, arrays: Arrays, meta: dict[str, Any], outputs: int) -> None:
        """Makes the network of the run's ``--import`` module, and loads the weights.

        Raises:
            WeightsError: that module declares no such network, or the weights do not fit it.
        """
        import torch

        self._torch = torch
        name, source = meta["network"], (meta.get("env") or {}).get("import_module")
        rows = getattr(import_named(source), "NETWORKS", ()) if source else ()
        row = next((row for row in rows if row.name == name), None)
        if row is None:
            raise WeightsError(f"weights need the network {name!r}, which --import {source} does not declare")
        self._module = row.make(int(meta["obs_dim"]), outputs).eval()
        with torch.no_grad():
            for parameter, tensor in self._module.named_parameters():
                array = arrays.get(f"net.{parameter}")
                if array is None or array.shape != tuple(tensor.shape):
                    raise WeightsError(
                        f"network {name!r} has a parameter {parameter!r} {tuple(tensor.shape)}; the weights "
                        f"have {None if array is None else array.shape}"
                    )
                tensor.copy_(torch.from_numpy(np.array(array)))

    def __call__(self, x: np.ndarray, out: np.ndarray, *, row_by_row: bool) -> np.ndarray:
        """Fills and returns ``out`` [N, K]."""
        with self._torch.inference_mode():
            rows = self._torch.from_numpy(np.array(x))
            parts = self._torch.split(rows, 1 if row_by_row else max(1, len(rows)))
            out[...] = self._torch.cat([self._module(part) for part in parts]).numpy()
        return out
