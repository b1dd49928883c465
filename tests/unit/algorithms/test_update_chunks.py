"""Batches of more rows than go through a network at once: the same update, whatever the chunks and threads."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from batches import ACT, NAMES, OBS, batches, exact

from spreeze.algorithms import create
from spreeze.algorithms.networks import fused_mlp
from spreeze.algorithms.networks.fused_mlp import MlpBuffers, new_parameters
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.schema import SECTIONS

ROWS = 700


def trained(name, hidden, paired=False):
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=hidden)
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(contextlib.closing(TwoThreads())) if paired else None
        algorithm = exact(create, name, OBS, ACT, config, 1)
        algorithm.set_parallel(pair)
        for batch in batches(4, ROWS):
            algorithm.update(type(batch)(*(x.double() if isinstance(x, torch.Tensor) else x for x in batch)))
        return algorithm.state_arrays()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hidden", [(16, 16), (8, 16, 12)])
@pytest.mark.parametrize("paired", [False, True])
def test_rows_in_chunks_give_the_update_of_all_rows_at_once(name, hidden, paired, monkeypatch):
    chunked = trained(name, hidden, paired)
    assert fused_mlp.CHUNK_ROWS < ROWS
    monkeypatch.setattr(fused_mlp, "CHUNK_ROWS", 2 * ROWS)
    whole = trained(name, hidden)
    assert chunked.keys() == whole.keys()
    for key, value in whole.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(chunked[key], value, rtol=1e-9, atol=1e-12, err_msg=key)


def test_slopes_are_the_gradient_of_ones():
    parameters = exact(new_parameters, (5, 8, 8, 1), 2, torch.device("cpu"), dtype=torch.float64)
    parameters.initialize(torch.Generator().manual_seed(0))
    x, buffers = torch.randn(2, 7, 5, dtype=torch.float64), MlpBuffers.allocate(parameters, 7)
    parameters.forward(x, buffers)
    slopes = parameters.derivative(buffers).clone()
    parameters.forward(x, buffers)
    buffers.grad_out.fill_(1.0)
    torch.testing.assert_close(slopes, parameters.backward(buffers, None, None))
    assert slopes.abs().max() > 0
