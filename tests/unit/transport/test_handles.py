"""A job's handles: what a worker inherits follows from them, however deep they lie in its job."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass

import numpy as np
from harness import PATIENCE_S

from spreeze.transport.mixing import MixHandle, MixMemory
from spreeze.transport.replay_ring import ReplayRing, RingHandle, RingSpec
from spreeze.transport.shared_memory import Wakeup, WakeupHandle, handles, inherited_fds, with_own_descriptors
from spreeze.transport.weights import VersionedParameters
from spreeze.types import Jsonable, RowLayout


@dataclass(frozen=True, kw_only=True)
class Job(Jsonable):
    seed: int
    replay: RingHandle
    mix: MixHandle
    wakeup: WakeupHandle | None = None
    samplers: tuple[WakeupHandle, ...] = ()


@contextlib.contextmanager
def channels():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(one)) for one in (
            ReplayRing.create(RingSpec(RowLayout(3, 1), 1, 100)), MixMemory.create(2), Wakeup.create(),
            Wakeup.create())]  # fmt: skip


def test_a_process_inherits_the_descriptors_of_all_handles_in_its_job_each_once():
    with channels() as (ring, memory, own, other):
        job = Job(seed=1, replay=ring.handle, mix=memory.handle, wakeup=own.handle, samplers=(other.handle, own.handle))
        parameters = [*memory.messages, *memory.mixed]
        expected = {ring.fd, memory.board.fd, memory.shared_fd, *own.fds, *other.fds}
        expected |= {fd for one in parameters for fd in one.fds}
        assert inherited_fds(job) == tuple(sorted(expected))
        assert len(list(handles(job))) == 1 + 2 + 4 + 3


def test_a_job_comes_back_from_json_with_handles_that_attach():
    with channels() as (ring, memory, own, _):
        job = Job(seed=1, replay=ring.handle, mix=memory.handle, samplers=(own.handle,))
        back = Job.from_json(json.loads(json.dumps(job.to_json())))
        assert back == job
        back.samplers[0].attach().notify()
        assert own.wait(PATIENCE_S)


def test_a_worker_of_the_same_process_gets_descriptors_that_it_may_close():
    with channels() as (ring, memory, own, _):
        job = Job(seed=1, replay=ring.handle, mix=memory.handle, samplers=(own.handle,))
        copy = with_own_descriptors(job)
        assert (copy.seed, copy.replay.spec) == (job.seed, job.replay.spec)
        copy.replay.attach().close()
        for own_copy in (copy.mix.board, copy.mix.shared):
            os.close(*own_copy.fds)
        assert ring.total_committed() == 0
        os.fstat(ring.fd)
        assert copy.samplers == job.samplers, "which nobody but their owner closes"


def test_attached_parameters_are_those_of_their_owner():
    with contextlib.closing(VersionedParameters.create()) as parameters:
        parameters.publish({"w": np.ones(2, np.float32)}, {}, 0, 1)
        found = parameters.handle.attach().read_latest()
        assert found is not None
        assert found.arrays["w"].tolist() == [1.0, 1.0]
