"""RolloutWriter and RolloutReader: rollouts are whole, in order, and used at most K times, whoever is killed."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import REPO, poll
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spreeze.errors import ConfigError
from spreeze.transport.rollouts import RolloutReader, Rollouts, RolloutSpec, RolloutWriter, StepRows

T, M = 3, 2

DYING = """
import json, os, signal, sys
sys.path[:0] = [os.path.join(os.environ["PYTHONPATH"], "tests", name) for name in ("contract", "support")]
from test_rollout_transports import step
from spreeze.transport.rollouts import COLUMNS, RolloutSpec, RolloutsHandle, RolloutWriter
handle = RolloutsHandle(fds=(int(sys.argv[1]),), spec=RolloutSpec.from_json(json.loads(sys.argv[2])))
writer = RolloutWriter(handle.attach(), 0, 2)

class HalfWritten:
    def __init__(self, array):
        self.array = array

    def __setitem__(self, index, values):
        self.array[index][0] = -1.0
        os.kill(os.getpid(), signal.SIGKILL)

while writer.steps[0] < int(sys.argv[4]):
    step(writer, writer.may_step())
number = COLUMNS.index(sys.argv[3])
writer._arrays[number] = HalfWritten(writer._arrays[number])
step(writer, writer.may_step())
"""
WRITER = """
import json, os, sys
sys.path[:0] = [os.path.join(os.environ["PYTHONPATH"], "tests", name) for name in ("contract", "support")]
from test_rollout_transports import step
from spreeze.transport.rollouts import RolloutSpec, RolloutsHandle, RolloutWriter
handle = RolloutsHandle(fds=(int(sys.argv[1]),), spec=RolloutSpec.from_json(json.loads(sys.argv[2])))
writer = RolloutWriter(handle.attach(), 0, 2)
while True:
    step(writer, writer.may_step())
"""


def spec(slots=2, uses=1, *, asynchronous=False, least_uses=0, samplers=2, obs=2):
    return RolloutSpec(sync_interval=T, num_envs=samplers * M, obs_shape=(obs,), obs_dtype="float32", action_dim=1,
                       log_steps=4, num_slots=slots, max_uses=uses, least_uses=least_uses,
                       asynchronous=asynchronous)  # fmt: skip


class Memory:
    """Rollouts of two samplers."""

    def __init__(self, spec):
        self.rollouts = Rollouts.create(spec)
        self.writers = [RolloutWriter(self.rollouts, first, M) for first in range(0, spec.num_envs, M)]
        self.reader = RolloutReader(self.rollouts, M)

    def fill(self, writer, rollouts=1):
        """So many whole rollouts; stops when no environment may step."""
        for _ in range(rollouts):
            while step(self.writers[writer], self.writers[writer].may_step()) and not self.writers[writer].filled:
                pass

    def close(self):
        for writer in self.writers:
            writer.close()
        self.rollouts.close()


def step(writer, indices):
    """One step of those environments; every number tells the environment's step."""
    if not indices:
        return False
    number = np.array([writer.steps[index] for index in indices], np.float32)
    version = (number // T).astype(np.int64)
    size = writer._rollouts.spec.obs_shape[0]
    obs = np.repeat(number[:, None], size, axis=1)
    ended = [steps % 5 == 4 for steps in number.tolist()]
    writer.commit(indices, StepRows(obs, number[:, None], -number, version, number.tolist(), ended,
                                  [False] * len(ended), obs + 1))  # fmt: skip
    return True


def is_whole(taken):
    """Whether a rollout has exactly the steps that belong there."""
    expected = (taken.rollout * T + np.arange(T, dtype=np.float32))[:, None]
    batch = taken.batch
    assert (taken.versions == taken.rollout).all()
    assert taken.version == taken.rollout
    return (
        (batch.reward == expected).all() and (batch.obs == expected[..., None]).all()
        and (batch.next_obs == expected[..., None] + 1).all() and (batch.action[..., 0] == expected).all()
        and (batch.log_prob == -expected).all() and (batch.terminated == (expected % 5 == 4)).all()
    )  # fmt: skip


IMPLEMENTATIONS = {
    "paced, as HTS-RL": spec(),
    "paced, 4 slots": spec(4, 3),
    "asynchronous, 2 slots": spec(2, 1, asynchronous=True),
    "asynchronous, as IMPACT": spec(5, 2, asynchronous=True),
    "asynchronous, each used twice": spec(5, 2, asynchronous=True, least_uses=2),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def memory(request):
    made = Memory(IMPLEMENTATIONS[request.param])
    yield made
    made.close()


@pytest.fixture
def circular():
    made = Memory(IMPLEMENTATIONS["asynchronous, as IMPACT"])
    yield made
    made.close()


def uses_left(reader):
    """Remaining uses of all readable rollouts."""
    return sum(reader._rollouts.spec.max_uses - uses for _, uses in reader._readable())


def go_on(memory):
    """The learner of a paced run lets the samplers go on."""
    if not memory.rollouts.spec.asynchronous and memory.rollouts.full:
        memory.rollouts.swap()


def test_a_rollout_is_taken_when_it_is_whole_at_most_k_times_and_then_no_more(memory):
    uses = memory.rollouts.spec.max_uses
    assert (memory.reader.take(), uses_left(memory.reader)) == (None, 0)
    for _ in range(T - 1):
        step(memory.writers[0], memory.writers[0].may_step())
    assert (memory.reader.take(), uses_left(memory.reader)) == (None, 0)
    step(memory.writers[0], memory.writers[0].may_step())
    assert uses_left(memory.reader) == uses
    for use in range(1, uses + 1):
        taken = memory.reader.take()
        assert (taken.writer, taken.rollout, taken.use) == (0, 0, use)
        assert is_whole(taken)
        assert uses_left(memory.reader) == uses - use
    assert (memory.reader.take(), uses_left(memory.reader)) == (None, 0)


def test_rollouts_come_whole_and_in_order_from_every_sampler(memory):
    seen = []
    for _ in range(7):
        for writer in range(2):
            memory.fill(writer)
        while (taken := memory.reader.take()) is not None:
            assert is_whole(taken)
            seen.append((taken.rollout, taken.writer, taken.use))
        go_on(memory)
    uses = memory.rollouts.spec.max_uses
    expected = [(rollout, writer, use) for rollout in range(7) for writer in range(2) for use in range(1, uses + 1)]
    assert sorted(seen) == expected
    assert [use for rollout, writer, use in seen if (rollout, writer) == (3, 1)] == list(range(1, uses + 1))


def test_a_reader_that_is_opened_late_takes_what_is_there_and_counts_on(memory):
    memory.fill(0)
    taken = memory.reader.take()
    later = RolloutReader(memory.rollouts, M)
    assert uses_left(later) == uses_left(memory.reader) == memory.rollouts.spec.max_uses - taken.use
    memory.fill(1)
    assert later.take().writer == 1, "the one that was used least comes first"


def test_a_successor_goes_on_with_the_next_step(memory):
    step(memory.writers[0], [0, 1])
    step(memory.writers[0], [1])
    successor = RolloutWriter(memory.rollouts, 0, M)
    assert successor.steps == [1, 2]
    while not successor.filled:
        step(successor, successor.may_step())
    assert is_whole(memory.reader.take())
    successor.close()


def test_no_environment_gets_a_rollout_ahead_of_the_others(memory):
    writer = memory.writers[0]
    for _ in range(T):
        step(writer, [0])
    assert writer.may_step() == [1]
    assert not writer.filled
    for _ in range(T):
        step(writer, [1])
    assert writer.filled
    assert writer.may_step() == ([0, 1] if memory.rollouts.spec.asynchronous else [])


@pytest.mark.warm
def test_samplers_that_are_killed_leave_whole_rollouts_only(memory):
    rollouts, text = memory.rollouts, json.dumps(memory.rollouts.spec.to_json())
    seen = {}
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(rollouts.handle.fds[0]), text]
        child = subprocess.Popen(
            command, pass_fds=[rollouts.handle.fds[0]], env={**os.environ, "PYTHONPATH": str(REPO)}
        )
        before = len(seen)
        try:

            def come(before=before):
                memory.fill(1)
                while (taken := memory.reader.take()) is not None:
                    assert is_whole(taken)
                    key = taken.writer, taken.rollout
                    assert taken.use == seen.get(key, 0) + 1
                    seen[key] = taken.use
                go_on(memory)
                return len(seen) > before + 20

            poll(come)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
    assert max(seen.values()) <= rollouts.spec.max_uses


# What only a circular buffer has to do: nobody waits for anybody.


@pytest.mark.warm
@pytest.mark.parametrize("field", ["obs", "version", "next_obs"])
def test_no_slot_is_read_that_a_sampler_was_killed_over_in_the_middle_of_a_write(circular, field):
    """SIGKILL while that array of the oldest rollout's slot is half overwritten: before, in and after its step."""
    rollouts, slots = circular.rollouts, circular.rollouts.spec.num_slots
    command = [sys.executable, "-c", DYING, str(rollouts.handle.fds[0]), json.dumps(rollouts.spec.to_json()), field]
    for last, oldest in ((slots * T, 1), ((slots + 1) * T + 1, 2)):  # at the first step of a rollout, and in its middle
        child = subprocess.run([*command, str(last)], pass_fds=[rollouts.handle.fds[0]], check=False,
                               env={**os.environ, "PYTHONPATH": str(REPO)})  # fmt: skip
        assert child.returncode == -signal.SIGKILL
        assert rollouts.steps[:M].tolist() == [last] * M, "the step in which it died does not count"
        taken = [circular.reader.take() for _ in range(slots - 1)]
        assert sorted(one.rollout for one in taken) == list(range(oldest, oldest + slots - 1))
        assert all(is_whole(one) for one in taken)
    circular.writers[0] = RolloutWriter(rollouts, 0, M)
    circular.fill(0)
    assert is_whole(circular.reader.take()), "its successor writes the step again"


def test_the_newest_rollouts_stay_and_the_oldest_are_written_over(circular):
    circular.fill(0, rollouts=12)
    assert uses_left(circular.reader) == 2 * 4
    assert [circular.reader.take().rollout for _ in range(8)] == [8, 9, 10, 11] * 2
    assert circular.reader.take() is None


def test_a_slow_sampler_s_old_policy_goes_first_and_a_fast_one_is_not_held_up(circular):
    circular.fill(1)
    circular.fill(0, rollouts=9)
    taken = [circular.reader.take() for _ in range(5)]
    assert [(one.writer, one.version) for one in taken] == [(1, 0), (0, 5), (0, 6), (0, 7), (0, 8)]


def test_what_is_written_over_unused_is_counted_also_if_the_sampler_is_killed_over_it(circular):
    circular.fill(0, rollouts=3)
    assert circular.reader.take().rollout == 0
    circular.fill(0, rollouts=9)
    assert circular.reader.dropped == 7, "rollouts 1 to 7; 8 to 11 can still be used"
    assert circular.reader.take().rollout == 8
    later = RolloutReader(circular.rollouts, M)  # of a learner that was started again
    for _ in range(2 * T + 1):  # the last one is of rollout 14, over the unused rollout 9
        step(circular.writers[0], circular.writers[0].may_step())
    assert (circular.reader.dropped, later.dropped) == (8, 8)
    successor = RolloutWriter(circular.rollouts, 0, M)  # the sampler was killed in the middle
    assert [circular.reader.take().rollout for _ in range(2)] == [10, 11]
    assert (circular.reader.dropped, successor.steps) == (8, [14 * T + 1] * M)
    successor.close()


def test_a_sampler_that_may_not_write_over_unused_rollouts_waits_for_its_own_alone():
    memory = Memory(spec(3, 2, asynchronous=True, least_uses=1))
    memory.fill(0, rollouts=5)
    assert memory.writers[0].steps == [2 * T] * M
    assert (memory.writers[0].may_step(), memory.writers[1].may_step()) == ([], [0, 1])
    assert memory.reader.take().rollout == 0
    memory.fill(0, rollouts=5)
    assert memory.writers[0].steps == [3 * T] * M, "one rollout was used once, so one more was written"
    assert [memory.reader.take().rollout for _ in range(3)] == [1, 2, 1]
    assert memory.reader.dropped == 0
    memory.close()


def test_a_reader_goes_round_and_uses_none_again_before_all_others():
    """As an epoch of PPO goes through its minibatches; where it is faster than the samplers it waits for them."""
    memory = Memory(spec(3, 4, asynchronous=True))
    reader = RolloutReader(memory.rollouts, M, cycles=True)
    for writer in (0, 1):
        memory.fill(writer, rollouts=2)
    order = [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(one.writer, one.rollout) for one in (reader.take() for _ in range(16))] == order * 4
    assert reader.take() is None
    memory.fill(0)
    assert [reader.take().rollout, reader.take(), uses_left(reader)] == [2, None, 3]
    memory.fill(1)
    assert [(one.writer, one.rollout) for one in (reader.take(), memory.reader.take())] == [(1, 2), (0, 2)]
    memory.close()


@pytest.mark.parametrize("pattern", [[0], [0, 0, 0, 0, 1]])
def test_a_sampler_that_is_dead_or_slow_takes_no_uses_from_the_rollouts_of_another(pattern):
    memory = Memory(spec(3, 8, asynchronous=True))
    reader, uses = RolloutReader(memory.rollouts, M, cycles=True), {}
    for writer in (0, 1):
        memory.fill(writer, rollouts=2)
    for turn in range(40):
        while (taken := reader.take()) is not None:
            uses[taken.writer, taken.rollout] = taken.use
        memory.fill(pattern[turn % len(pattern)])
    rollouts = [rollout for writer, rollout in uses if writer == 0]
    late = [uses[0, rollout] for rollout in rollouts if max(rollouts) - 8 < rollout < max(rollouts)]
    assert np.mean(late) >= 6, "nearly all of 8; by turns with a dead one it was 1"
    memory.close()


def test_a_reader_that_goes_round_waits_for_nobody_while_a_sampler_waits_for_it():
    memory = Memory(spec(3, 4, asynchronous=True, least_uses=2))
    reader = RolloutReader(memory.rollouts, M, cycles=True)
    memory.fill(0, rollouts=2)
    while reader.take() is not None:
        pass
    memory.fill(0)
    assert [reader.take().rollout, reader.take()] == [2, None], "sampler 0 goes on by itself"
    memory.fill(1, rollouts=2)
    taken = [reader.take() for _ in range(4)]
    assert [(one.writer, one.rollout, one.use) for one in taken] == [(1, 0, 1), (1, 1, 1), (0, 2, 2), (1, 0, 2)]
    assert reader.take() is None, "now sampler 1 may go on, too"
    memory.close()


def test_of_a_rollout_that_is_known_only_the_versions_are_copied(circular):
    circular.fill(0)
    assert is_whole(circular.reader.take())
    again = circular.reader.take(known={(0, 0)})
    assert (again.use, again.batch, again.versions.tolist()) == (2, None, [[0] * M] * T)


def test_a_rollout_that_is_written_over_during_its_copy_is_not_given(circular, monkeypatch):
    circular.fill(0, rollouts=5)
    fields, late = circular.rollouts.fields, [True]
    in_order = fields.in_order

    def writes_meanwhile():
        in_order()
        if late and circular.rollouts.uses(1, 0) == 1:  # after the use was counted, before the copy
            late.clear()
            circular.fill(0)

    monkeypatch.setattr(fields, "in_order", writes_meanwhile)
    taken = circular.reader.take()
    assert not late
    assert taken.rollout == 2, "rollout 1 may be half overwritten"
    assert is_whole(taken)


def test_a_reader_that_is_killed_after_it_counted_has_used_that_rollout(circular, monkeypatch):
    circular.fill(0)

    def killed():
        if circular.rollouts.uses(0, 0):
            raise KeyboardInterrupt

    monkeypatch.setattr(circular.rollouts.fields, "in_order", killed)
    with pytest.raises(KeyboardInterrupt):
        circular.reader.take()
    monkeypatch.undo()
    successor = RolloutReader(circular.rollouts, M)
    assert [successor.take().use, successor.take()] == [2, None]


@pytest.mark.parametrize("uses", [0, 3])
def test_least_uses_above_max_uses_are_refused(uses):
    with pytest.raises(ConfigError, match="at least 3 uses" if uses == 0 else "at least 4 uses"):
        spec(2, uses, asynchronous=True, least_uses=uses + 1 if uses else 3)


@pytest.mark.parametrize(("slots", "uses"), [(1, 1), (2, 0), (2, 2**16)])
def test_slots_that_cannot_be_used_are_refused(slots, uses):
    with pytest.raises(ConfigError, match=f"{slots} rollout slots with {uses} uses"):
        spec(slots, uses)


def test_environments_that_are_not_whole_samplers_are_refused(circular):
    with pytest.raises(ConfigError, match="4 environments are not samplers of 3 each"):
        RolloutReader(circular.rollouts, 3)


class CircularBuffer(RuleBasedStateMachine):
    """Samplers and a learner at any speeds, killed at any store, against lists of what was committed and used."""

    @initialize(slots=st.integers(2, 4), uses=st.integers(1, 3))
    def start(self, slots, uses):
        self.memory = Memory(spec(slots, uses, asynchronous=True))
        self.slots, self.uses = slots, uses
        self.steps, self.used = [[0] * M for _ in range(2)], {}

    @rule(sampler=st.integers(0, 1), which=st.sets(st.integers(0, M - 1), min_size=1), dies=st.booleans())
    def a_sampler_steps(self, sampler, which, dies):
        writer, fields = self.memory.writers[sampler], self.memory.rollouts.fields
        indices = sorted(which & set(writer.may_step()))
        if not indices:
            return
        if not dies:
            step(writer, indices)
            for index in indices:
                self.steps[sampler][index] += 1
            return

        def killed():
            raise KeyboardInterrupt

        fields.in_order, in_order = killed, fields.in_order  # the rows are there, the step does not count
        try:
            with pytest.raises(KeyboardInterrupt):
                step(writer, indices)
        finally:
            fields.in_order = in_order
        writer.close()
        self.memory.writers[sampler] = RolloutWriter(self.memory.rollouts, sampler * M, M)

    @rule(starts_again=st.booleans(), meanwhile=st.lists(st.integers(0, 1), max_size=12))
    def the_learner_takes_one_while_samplers_go_on(self, starts_again, meanwhile):
        memory = self.memory
        if starts_again:
            memory.reader = RolloutReader(memory.rollouts, M)
        fields, before = memory.rollouts.fields, self.usable()
        writes, in_order = list(meanwhile), fields.in_order

        def others_move():
            fields.in_order = in_order
            for writer in writes:
                step(memory.writers[writer], memory.writers[writer].may_step())
                self.steps[writer] = list(memory.writers[writer].steps)
            writes.clear()
            fields.in_order = others_move
            return in_order()

        fields.in_order = others_move
        try:
            taken = memory.reader.take()
        finally:
            fields.in_order = in_order
        after = self.usable()
        if taken is None:
            assert not before & after, "what could be taken all the time is taken"
            self.used = self.used_in_memory()
            return
        assert is_whole(taken)
        key = taken.writer, taken.rollout
        assert taken.use <= self.uses
        assert taken.use > self.used.get(key, 0)
        self.used = self.used_in_memory()
        assert self.used[key] == taken.use

    def usable(self):
        found = set()
        for writer, steps in enumerate(self.steps):
            for rollout in range(min(steps) // T):
                if max(steps) < (rollout + self.slots) * T and self.used.get((writer, rollout), 0) < self.uses:
                    found.add((writer, rollout))
        return found

    def used_in_memory(self):
        """Lost takes count as uses, too."""
        found = dict(self.used)
        for writer in range(2):
            for rollout in range(max(self.steps[writer]) // T + 1):
                if used := self.memory.rollouts.uses(rollout, writer * M):
                    assert used >= found.get((writer, rollout), 0)
                    found[writer, rollout] = used
        return found

    @invariant()
    def every_state_is_that_of_the_model(self):
        if not hasattr(self, "memory"):
            return
        usable = self.usable()
        assert uses_left(self.memory.reader) == sum(self.uses - self.used.get(key, 0) for key in usable)
        readable = self.memory.reader._readable()
        found = {one.key: one.uses for one in readable if one.uses < self.uses}
        assert found == {key: self.used.get(key, 0) for key in usable}

    def teardown(self):
        if hasattr(self, "memory"):
            self.memory.close()


CircularBuffer.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCircularBuffer = CircularBuffer.TestCase
