"""A pair of threads does the work of one core exactly, says what went wrong in either, and ends."""

import dataclasses
import threading

import pytest
import torch
from exact import exact
from harness import PATIENCE_S
from test_algorithms import batches

from spreeze.algorithms import create
from spreeze.algorithms.fused_mlp import ThreadPair, thread_pair_for
from spreeze.config.schema import PARTS

OBS, ACT = 5, 2
UPDATES = 1000


def trained(name, dtype, pair):
    config = dataclasses.replace(PARTS[name](), hidden_sizes=(32, 32))
    algorithm = exact(create, name, OBS, ACT, config, 1, dtype=dtype, pair=pair)
    for batch in batches(UPDATES):
        algorithm.update(type(batch)(*(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in batch)))
    return {key: torch.from_numpy(value.copy()) for key, value in algorithm.state_arrays().items()}


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_a_thousand_updates_in_two_lanes_are_those_of_one_core(name, dtype, tolerance):
    with ThreadPair() as pair:
        paired = trained(name, dtype, pair)
    for key, alone in trained(name, dtype, None).items():
        if alone.is_floating_point():
            scale = alone.abs().max().clamp(min=1e-12)
            assert (paired[key] - alone).abs().max() <= tolerance * scale, key


def test_both_calls_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    with ThreadPair() as pair:
        pair.both(meeting.wait, meeting.wait)


def test_an_error_in_either_lane_reaches_the_caller_and_the_lanes_go_on():
    def fail():
        raise ValueError("thread")

    done = []
    with ThreadPair() as pair:
        with pytest.raises(ValueError, match="thread"):
            pair.both(lambda: done.append(1), fail)
        with pytest.raises(ValueError, match="thread"):
            pair.both(fail, lambda: done.append(2))
        pair.both(lambda: done.append(3), lambda: done.append(4))
    assert sorted(done) == [1, 2, 3, 4]


def test_closing_ends_the_second_lane_and_may_be_done_twice():
    before = threading.active_count()
    pair = ThreadPair()
    assert threading.active_count() == before + 1
    pair.close()
    pair.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("threads", "paired", "of_a_product"), [(1, False, 1), (2, True, 1), (3, True, 1), (4, True, 2)]
)
def test_threads_become_a_pair_first_and_threads_of_a_product_then(threads, paired, of_a_product):
    pair, product = thread_pair_for(threads)
    assert (pair is not None, product) == (paired, of_a_product)
    if pair is not None:
        pair.close()
