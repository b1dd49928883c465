"""A pair of threads or streams does the work of one exactly, says what went wrong in either, and ends."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest
import torch
from batches import batches, exact
from harness import PATIENCE_S
from rollouts import task

from spreeze.algorithms import create
from spreeze.algorithms.parallel_work import TwoStreams, TwoThreads
from spreeze.config.schema import SECTIONS
from spreeze.workers.torch_devices import learner_threads

OBS, ACT = 5, 2


def trained(name, dtype, pair, updates):
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(32, 32))
    algorithm = exact(create, name, OBS, ACT, config, 1, dtype=dtype)
    algorithm.set_parallel(pair)
    for batch in batches(updates):
        algorithm.update(type(batch)(*(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in batch)))
    return {key: torch.from_numpy(value.copy()) for key, value in algorithm.state_arrays().items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("name", "updates"), [
    ("sac", 200), ("td3", 100),
    *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in ("sac", "td3", "ddpg")),
])  # fmt: skip
def test_updates_in_two_lanes_are_those_of_one_core(name, updates, dtype, tolerance):
    with contextlib.closing(TwoThreads()) as pair:
        paired = trained(name, dtype, pair, updates)
    for key, alone in trained(name, dtype, None, updates).items():
        if alone.is_floating_point():
            scale = alone.abs().max().clamp(min=1e-12)
            assert (paired[key] - alone).abs().max() <= tolerance * scale, key


def test_both_calls_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    with contextlib.closing(TwoThreads()) as pair:
        pair.both(meeting.wait, meeting.wait)


def test_an_error_in_either_lane_reaches_the_caller_and_the_lanes_go_on():
    def fail():
        raise ValueError("thread")

    done = []
    with contextlib.closing(TwoThreads()) as pair:
        with pytest.raises(ValueError, match="thread"):
            pair.both(lambda: done.append(1), fail)
        with pytest.raises(ValueError, match="thread"):
            pair.both(fail, lambda: done.append(2))
        pair.both(lambda: done.append(3), lambda: done.append(4))
    assert sorted(done) == [1, 2, 3, 4]


def test_closing_ends_the_second_lane_and_may_be_done_twice():
    before = threading.active_count()
    pair = TwoThreads()
    assert threading.active_count() == before + 1
    pair.close()
    pair.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("threads", "paired", "of_a_product"), [(1, False, 1), (2, True, 1), (3, True, 1), (4, True, 2)]
)
def test_threads_become_a_pair_first_and_threads_of_a_product_then(threads, paired, of_a_product):
    before = torch.get_num_threads()
    with learner_threads(task(), threads, "cpu") as pair:
        assert (pair is not None, torch.get_num_threads()) == (paired, of_a_product)
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "changes"), [
    ("sac", {}), ("sac", {"critics": "quantile", "critic_layer_norm": True}), ("sac", {"tune_alpha": False}),
    ("crossq", {"critics": "quantile"}),
    ("td3", {"critics": "categorical"}), ("td3", {"activation": "gelu"}), ("ddpg", {}),
])  # fmt: skip
def test_updates_of_a_pair_of_streams_are_those_of_one(name, changes):
    found = []
    for pair in (None, TwoStreams()):
        config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(32, 32), **changes)
        algorithm = exact(create, name, OBS, ACT, config, 1, dtype=torch.float64)
        algorithm.set_parallel(pair)
        for batch in batches(50):
            algorithm.update(type(batch)(*(x.double() if isinstance(x, torch.Tensor) else x for x in batch)))
        found.append(algorithm.state_arrays())
    alone, paired = found
    for key, array in alone.items():
        np.testing.assert_allclose(paired[key], array, rtol=1e-9, atol=1e-12, err_msg=key)


class Stream:
    """Notes what was recorded on it and for which other streams it waited."""

    def __init__(self, device="cuda:0"):
        self.device, self.log = device, []

    def wait_stream(self, other):
        self.log.append(("waits for", list(other.log)))


@pytest.fixture
def recording(monkeypatch):
    """A recording that is pretended: the stack of current streams, and all streams that were made."""
    current, made = [Stream()], []

    class Made(Stream):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    @contextlib.contextmanager
    def entered(stream):
        current.append(stream)
        yield
        current.pop()

    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", Made)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return current, made


def test_branches_of_a_recording_begin_after_what_came_before_and_are_waited_for(recording):
    current, made = recording
    pair, main = TwoStreams(), current[0]

    def kernel(name):
        return lambda: current[-1].log.append(name)

    kernel("before")()
    pair.both(kernel("here"), kernel("there"))
    kernel("after")()
    assert made[0].log == [("waits for", ["before"]), "there"]
    assert main.log == ["before", "here", ("waits for", made[0].log), "after"]


def test_branches_within_branches_have_streams_of_their_own_which_later_ones_use_again(recording):
    current, made = recording
    pair, used = TwoStreams(), []

    def note():
        used.append(current[-1])

    def inner():
        pair.both(note, note)

    for _ in range(2):
        pair.both(inner, inner)
    first, second = used[:4], used[4:]
    assert len(made) == 3
    assert len(set(map(id, first))) == 4
    assert first == second


def test_a_recording_that_fails_in_a_branch_leaves_the_pair_as_it_was(recording):
    current, made = recording
    pair = TwoStreams()

    def fail():
        raise RuntimeError("capture")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="capture"):
            pair.both(fail, lambda: current[-1].log.append("there"))
        del current[1:]
    assert len(made) == 1
    assert current[0].log[-1] == ("waits for", made[0].log)  # or the recording could not be ended
