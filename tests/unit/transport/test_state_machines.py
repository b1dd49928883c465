"""State machines with random histories: checkpoint store, workers and ring with crashes, damage and hangs."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rings import count_torn
from test_checkpoint import OPERATIONS, Crash
from test_worker_pool import Stage

from spreeze.errors import CheckpointError, WorkerError
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.types import RowLayout
from spreeze.workers.roles import Phase

LONG = "SPREEZE_LONG_TESTS" in os.environ
_SETTINGS = settings(max_examples=500 if LONG else 10, stateful_step_count=50 if LONG else 15, deadline=None,
                     suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
pytestmark = pytest.mark.timeout(1800 if LONG else 600)


class CheckpointMachine(RuleBasedStateMachine):
    """Against a list of what was saved: the newest undamaged one is loaded, whatever happened."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = CheckpointStore(self.folder)
        self.updates, self.good, self.bad = 0, [], set()

    def _save(self):
        self.updates += 1
        self.store.save({"a": np.full(3, self.updates, np.float32)}, {"updates": self.updates}, epoch=1,
                        updates=self.updates, keep=3)  # fmt: skip

    @rule()
    def save(self):
        self._save()
        self.good = [*self.good, self.updates]
        self._forget()

    def _forget(self):
        present = {int(path.name.split("-")[2]) for path in self.store.paths()}
        self.good = [n for n in self.good if n in present]

    @rule(number=st.integers(1, 40))
    def crash_in_a_save(self, number):
        count = [0]

        def wrap(original, name):
            def operation(*args, **kwargs):
                count[0] += 1
                if count[0] >= number:
                    if name == "close":
                        with contextlib.suppress(OSError):  # on the way out some are closed twice
                            original(*args, **kwargs)
                    raise Crash
                return original(*args, **kwargs)

            return operation

        patches = [mock.patch.object(os, name, wrap(getattr(os, name), name)) for name in OPERATIONS]
        for patch in patches:
            patch.start()
        try:
            self._save()
        except Crash:
            pass
        finally:
            for patch in patches:
                patch.stop()
        if any(int(path.name.split("-")[2]) == self.updates for path in self.store.paths()):
            self.good = [*self.good, self.updates]
        self._forget()

    @precondition(lambda self: len(self.good) > 1)
    @rule(file=st.sampled_from(["MANIFEST.json", "tensors.safetensors", "state.json"]), cut=st.integers(0, 8))
    def damage_the_newest(self, file, cut):
        path = next(p for p in self.store.paths() if int(p.name.split("-")[2]) == self.good[-1]) / file
        path.write_bytes(path.read_bytes()[:cut])
        self.good = self.good[:-1]

    @invariant()
    def the_newest_good_one_is_loaded(self):
        try:
            found = self.store.load_latest()
        except CheckpointError:
            assert self.good == []
            return
        if found is None:
            assert self.good == []
        else:
            assert found.updates == self.good[-1] == int(found.tensors["a"][0])

    def teardown(self):
        shutil.rmtree(self.folder)


class CrewMachine(RuleBasedStateMachine):
    """Pretended processes and a clock: one process a post, no shard with two writers, a limit to all patience."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stage = Stage(self.folder, ["learner", "sampler-0", "sampler-1", "evaluator"])
        self.over = False

    def _watch(self):
        try:
            self.stage.workers.watch()
        except WorkerError:
            self.over = True

    def _living(self):
        return [name for name, post in self.stage.workers.handles.items() if post.process is not None]

    @precondition(lambda self: not self.over and self._living())
    @rule(choice=st.integers(0, 9), code=st.sampled_from([-11, -9, 0, 1]))
    def die(self, choice, code):
        living = self._living()
        self.stage.child(living[choice % len(living)]).code = code
        self._watch()

    @precondition(lambda self: not self.over)
    @rule(seconds=st.floats(0.1, 4.0), silent=st.booleans())
    def time_passes(self, seconds, silent):
        self.stage.now += seconds
        for name in self._living()[silent:]:
            self.stage.heartbeat(name, Phase.STEP if name.startswith("sampler") else Phase.WAIT)
        self._watch()

    @rule(refuse=st.booleans())
    def processes_run_out_or_not(self, refuse):
        self.stage.refuse = refuse

    @invariant()
    def every_old_process_is_dead_and_every_post_has_one_at_most(self):
        held = {id(post.process) for post in self.stage.workers.handles.values() if post.process is not None}
        for child in self.stage.started:
            assert id(child) in held or child.code is not None

    @invariant()
    def a_learner_is_started_at_most_three_times_in_ten_minutes(self):
        if self.stage.now < 600.0:
            assert self.stage.order.count("start learner") <= 3

    def teardown(self):
        self.stage.workers.stop(hurry=lambda: True, on_messages=lambda messages: None)
        self.stage.close()
        shutil.rmtree(self.folder)


class RingMachine(RuleBasedStateMachine):
    """Two shards: writes, writers that die after the intent or in the middle of the rows, successors, draws."""

    def __init__(self):
        super().__init__()
        self.ring = ReplayRing.create(RingSpec(RowLayout(2, 1, checksum=True), 2, 24))
        self.writers = [ShardWriter(self.ring, shard) for shard in range(2)]
        self.count = [0, 0]

    def _rows(self, shard, n):
        value = np.arange(self.count[shard], self.count[shard] + n, dtype=np.float32)
        obs = np.repeat(value[:, None], 2, axis=1)
        return obs, value[:, None] * 0, value, value * 0, obs

    @rule(shard=st.integers(0, 1), n=st.integers(1, 30))
    def write(self, shard, n):
        self.writers[shard].write(*self._rows(shard, n))
        self.count[shard] += n

    @rule(shard=st.integers(0, 1), n=st.integers(1, 12), written=st.integers(0, 12))
    def die_in_a_write(self, shard, n, written):
        committed, reserved = int(self.ring.committed[shard]), int(self.ring.reserved[shard])
        self.ring.reserved[shard] = max(reserved, committed + n)
        for logical in range(committed, committed + min(written, n)):
            self.ring.rows[shard * self.ring.spec.stride_rows + logical % 24] = 777.0
        self.writers[shard] = ShardWriter(self.ring, shard)

    @invariant()
    def what_is_drawn_is_whole_and_was_published(self):
        reader = ReplayReader(self.ring)
        assert self.ring.total_committed() == sum(self.count)
        if reader.available:
            out = np.empty((200, self.ring.spec.layout.width), dtype=np.float32)
            reader.sample(np.random.default_rng(0), out)
            assert count_torn(reader, out) == 0
            assert out[:, 0].max() < max(self.count)

    def teardown(self):
        self.writers.clear()
        self.ring.close()


TestCheckpointMachine = CheckpointMachine.TestCase
TestCrewMachine = CrewMachine.TestCase
TestRingMachine = RingMachine.TestCase
TestCheckpointMachine.settings = TestCrewMachine.settings = TestRingMachine.settings = _SETTINGS
