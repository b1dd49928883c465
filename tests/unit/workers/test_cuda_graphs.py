"""Updates from a mirror, singly and as graphs: the same parameters, the same counts, and what is said where it fails.

A graph is played by a stand-in that does what it recorded, without Python's own counting, as a GPU would.
"""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import same
from learner_rates import HostWaits
from played_graphs import LAYOUT, SPEC, PlayedGraph, filled

from spreeze.algorithms import create
from spreeze.algorithms.parallel_work import TwoStreams
from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.inference.policy import exploring_arrays
from spreeze.transport.replay_ring import ReplayReader
from spreeze.types import Choices
from spreeze.workers import gpu_replay as mirror_module
from spreeze.workers import gpu_replay as module
from spreeze.workers import replay_trainer as learning_module
from spreeze.workers.gpu_replay import (
    CudaGraph,
    DeviceStream,
    GpuReplay,
    GraphedUpdates,
    NotRecorded,
    StreamEvent,
    fitted_gpu_replay,
    reason_against,
)
from spreeze.workers.replay_trainer import ReplayTrainer

CPU, BATCH = torch.device("cpu"), 16
CASES = [("sac", {}), ("sac", {"critics": "quantile"}), ("td3", {"critics": "categorical"}), ("ddpg", {}),
         ("td3", {"policy_delay": 3}), ("dqn", {"target_interval": 2})]  # fmt: skip


def launches_of(ring, name, changes=None, **options):
    discrete = 2 if name == "dqn" else None
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(8, 8), **(changes or {}))
    algorithm = create(name, 3, 1, config, 1, num_actions=discrete)
    mirror = GpuReplay(ReplayReader(ring), BATCH, CPU, 5)
    mirror.pull()
    graphs = options.pop("graphs", None)
    if graphs is not None:
        options["make_graph"] = lambda: graphs.append(PlayedGraph(algorithm)) or graphs[-1]
    told = options.pop("told", [])
    found = GraphedUpdates(algorithm, mirror, lambda rows: algorithm.update(LAYOUT.split(rows, 0.99)),
                     options.pop("lane", DeviceStream(CPU)), on_failure=told.append, **options)  # fmt: skip
    return algorithm, found


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_graphs_give_the_very_parameters_of_single_updates(name, changes):
    with filled(discrete=name == "dqn") as ring:
        graphs = []
        one, single = launches_of(ring, name, changes)
        other, several = launches_of(ring, name, changes, graphs=graphs, wanted=2)
        while one.updates < 31:
            assert single.run() == 1
        while other.updates < 31:
            several.run(31 - other.updates)
        assert other.updates == one.updates == 31
        assert graphs[0].replays >= 3
        assert same(one.state_arrays(), other.state_arrays())


def test_no_launch_makes_more_updates_than_asked():
    with filled() as ring:
        algorithm, launches = launches_of(ring, "td3", graphs=[], wanted=8)
        for most in (1, 1, 1, 1, 8, 7, 3):
            before = algorithm.updates
            done = launches.run(most)
            assert done == algorithm.updates - before <= most
        assert algorithm.updates == 4 + 8 + 1 + 1


def test_another_batch_size_is_recorded_anew():
    with filled() as ring:
        graphs = []
        algorithm, launches = launches_of(ring, "sac", graphs=graphs)
        for size in (BATCH, 2 * BATCH):
            launches.set_batch_size(size)
            for _ in range(6):
                launches.run()
        assert [graph.replays for graph in graphs] == [3, 3]
        assert algorithm.updates == 12


def test_work_that_cannot_be_recorded_goes_on_singly_and_says_why_once():
    class Refusing(PlayedGraph):
        def record(self, work, generators):
            super().record(work, generators)
            raise NotRecorded("operation not permitted when stream is capturing")

    with filled() as ring:
        told = []
        algorithm, launches = launches_of(ring, "sac", told=told, make_graph=lambda: Refusing(algorithm))
        plain, single = launches_of(ring, "sac")
        for _ in range(10):
            assert launches.run() == single.run() == 1
        assert same(plain.state_arrays(), algorithm.state_arrays())
        assert told == ["no CUDA graphs: recording failed: operation not permitted when stream is capturing"]


@pytest.mark.parametrize("fails", [True, False])
def test_after_a_recording_that_failed_the_allocator_is_not_asked_for_its_cache(monkeypatch, fails):
    class Asked(PlayedGraph):
        def record(self, work, generators):
            super().record(work, generators)
            if fails:
                assert isinstance(self.algorithm.critics.parallel, TwoStreams)
                raise NotRecorded("operation not permitted when stream is capturing")

    asked = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(True))
    with filled() as ring:
        learning = learning_of(ring, updates_per_launch=1)
        learning.use_gpu_replay(GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: Asked(learning.algorithm))
        learning.release_cached()
        assert asked == [True], "nothing was recorded yet"
        while learning.updates < 6:
            learning.update()
        assert (learning.algorithm.critics.parallel is None) == fails
        learning.release_cached()
        assert learning.drop_gpu_replay(), "and it stays so without the mirror"
        learning.release_cached()
        assert len(asked) == (1 if fails else 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_a_recording_that_fails_costs_no_update_and_no_memory():
    with filled() as ring:
        learning = learning_of(ring, device="cuda:0", gpu_replay=True, updates_per_launch=1)
        update = learning._graphed._update

        def waits(rows):
            update(rows)
            rows.sum().item()  # a wait of the host, which no graph can hold

        learning._graphed._update = waits
        while learning.updates < 12:
            learning.update()
        assert any("recording failed" in note for note in learning.notes)
        learning.drop_gpu_replay()
        learning.release_cached()
        learning.set_batch_size(BATCH // 2)
        for _ in range(5):
            learning.update()
        assert learning.updates == 17


class Counting(DeviceStream):
    """Counts the launches that were not waited for."""

    def __init__(self):
        super().__init__(CPU)
        self.under_way = self.most = 0

    def mark(self):
        lane = self
        lane.under_way += 1
        lane.most = max(lane.most, lane.under_way)

        class Counted(StreamEvent):
            def wait(self):
                lane.under_way -= 1

        return Counted()


def test_the_host_is_never_more_than_two_launches_ahead():
    with filled() as ring:
        lane = Counting()
        _, launches = launches_of(ring, "ddpg", graphs=[], lane=lane)
        for _ in range(12):
            launches.run()
        assert lane.most == 2


def test_a_graph_holds_whole_periods():
    sizes = {}
    for wanted in (0, 1, 3, 4):
        launches = GraphedUpdates(
            SimpleNamespace(period=3), None, None, DeviceStream(CPU), wanted=wanted, on_failure=None
        )
        sizes[wanted] = launches.in_graph
    assert sizes == {0: 3, 1: 3, 3: 3, 4: 6}


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"split": True, "period": 1}, "different devices"), ({"split": False, "period": 1000}, "every 1000 updates"),
     ({"split": False, "period": 2}, None)],
)  # fmt: skip
def test_what_cannot_be_a_graph_is_known_before(facts, words):
    reason = reason_against(**facts)
    assert reason is None if words is None else words in reason


class FailingCapture:
    def __init__(self, graph, capture_error_mode):
        assert capture_error_mode == "thread_local"

    def __enter__(self):
        pass

    def __exit__(self, *exc):
        raise RuntimeError("CUDA error:  operation not permitted when\n stream is capturing")


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_recording_is_an_answer_but_a_lost_device_ends_the_process(monkeypatch, lost):
    calls = []

    def synchronize(device):
        calls.append(device)
        if lost and len(calls) > 1:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered (pretended)")

    class Noise:
        state = "before"

        def __init__(self, device=None):
            pass

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = f"fresh, {state}"
            return self

        def graphsafe_set_state(self, other):
            self.state = other.state

    class Recording:
        def register_generator_state(self, generator):
            generator.state = "recording"

    streams = []
    monkeypatch.setattr(module.torch, "Generator", Noise)
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device: "main")
    monkeypatch.setattr(module.torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(module.torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(module.torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(module.torch.cuda, "graph", FailingCapture)
    monkeypatch.setattr(module.torch.cuda, "synchronize", synchronize)
    graph = CudaGraph(torch.device("cuda:0"))
    expected = (torch.AcceleratorError, "illegal memory access") if lost else (NotRecorded, "when stream is capturing")
    noise = Noise()
    with pytest.raises(expected[0], match=expected[1]):
        graph.record(lambda: None, [noise])
    if not lost:
        assert noise.state == "fresh, before", "single updates go on with the noise where it was"
        assert streams == ["main"]


@pytest.mark.parametrize(
    ("free_rows", "held", "words"),
    [(10_000, 512, "is mirrored on cpu"), (500, 400, "only the newest 400 of 512 rows"), (200, None, "on the host")],
)
def test_a_mirror_is_as_large_as_the_devices_free_memory_allows(free_rows, held, words):
    with filled() as ring:
        mirror, note = fitted_gpu_replay(ReplayReader(ring), BATCH, CPU, 1, free_rows * 4 * LAYOUT.width)
        assert words in note
        assert (None if mirror is None else mirror.rows_per_shard) == held


def test_memory_that_is_gone_when_the_mirror_is_made_gives_a_smaller_one(monkeypatch):
    class Crowded(GpuReplay):
        def __init__(self, reader, batch_size, device, seed, rows):
            if rows > 300:
                raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
            super().__init__(reader, batch_size, device, seed, rows)

    monkeypatch.setattr(mirror_module, "GpuReplay", Crowded)
    with filled() as ring:
        mirror, note = fitted_gpu_replay(ReplayReader(ring), BATCH, CPU, 1, 10**9)
        assert mirror.rows_per_shard == 256
        assert "only the newest 256 of 512 rows" in note


def learning_of(ring, *, policy_average=0.0, explore_average=False, normalize_returns=True, **options):
    config = dataclasses.replace(
        SECTIONS["sac"](),
        hidden_sizes=(8, 8),
        policy_average=policy_average,
        explore_average=explore_average,
        normalize_returns=normalize_returns,
    )
    own = {"normalize_obs": False, **options}
    own = {name: own[name] for name in ("normalize_obs", "session", "loaded_rows") if name in own}
    options = {name: value for name, value in options.items() if name not in own}
    how = LearnerConfig(
        **{"batch_size": BATCH, "device": "cpu", "gpu_replay": False, "updates_per_launch": 0, **options}
    )
    return ReplayTrainer(SPEC, "sac", config, LAYOUT, ReplayReader(ring), how, seed=1, **own)


@pytest.mark.parametrize("device", ["cpu", "cpu+cpu"])
def test_a_learner_with_a_mirror_counts_its_updates_and_tells_lag_and_age(device):
    with filled() as ring:
        learning = learning_of(ring, updates_per_launch=4, device=device)
        learning.use_gpu_replay(GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: PlayedGraph(learning.algorithm))
        done = [learning.update(20 - learning.updates) for _ in range(8)]
        assert done == [1, 1, 1, 4, 4, 4, 4, 1]
        assert learning.updates == learning.algorithm.updates == 20
        numbers = learning.metrics(wait_s=0.0, publish_s=0.0)
        assert numbers["policy_lag"] == 20
        assert numbers["transition_age"] == pytest.approx(200, rel=0.4)
        assert numbers["critic_s"] > 0
        assert learning.notes == []


def test_a_learner_that_goes_back_records_its_graph_again_with_half_the_learning_rate():
    with filled() as ring:
        learning = learning_of(ring, updates_per_launch=4)
        learning.use_gpu_replay(GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: PlayedGraph(learning.algorithm))
        for _ in range(5):
            learning.update()
        kept = learning.state()
        learning.roll_back(*kept)
        adam, before = learning.algorithm.actor.adam, learning.updates
        assert adam._scaled_lr.item() == pytest.approx(0.5 * adam.lr)
        assert [learning.update() for _ in range(5)] == [1, 1, 1, 4, 4], "the recorded one holds the old rate"
        assert learning.updates == learning.algorithm.updates == before + 11


@pytest.mark.parametrize(("options", "shared"), [
    ({"updates_per_launch": 1}, True), ({}, False), ({"updates_per_launch": 1, "device": "cpu+cpu"}, False),
])  # fmt: skip
def test_two_streams_share_an_update_only_while_it_is_recorded_as_a_graph(options, shared):
    with filled() as ring:
        learning = learning_of(ring, **options)
        assert learning.algorithm.critics.parallel is None
        learning.use_gpu_replay(GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: PlayedGraph(learning.algorithm))
        assert isinstance(learning.algorithm.critics.parallel, TwoStreams) == shared
        for _ in range(4):
            learning.update()
        learning.shrink()
        assert learning.algorithm.critics.parallel is None
        learning.update()


def test_a_mirror_that_is_given_back_leaves_batches_from_the_host():
    with filled() as ring:
        learning = learning_of(ring)
        learning.use_gpu_replay(GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: PlayedGraph(learning.algorithm))
        learning.update()
        assert learning.drop_gpu_replay()
        assert not learning.drop_gpu_replay()
        assert learning.update() == 1
        assert learning.metrics(wait_s=0.0, publish_s=0.0)["policy_lag"] == 2


@pytest.mark.parametrize(
    ("free", "words"),
    [(10**9, "replay is mirrored on cpu"), (10, "batches are gathered on the host: a copy of replay needs")],
)
def test_a_learner_says_where_its_batches_come_from(monkeypatch, free, words):
    monkeypatch.setattr(learning_module.torch.cuda, "mem_get_info", lambda device: (free, free))
    with filled() as ring:
        learning = learning_of(ring)
        learning._open_gpu_replay()
        assert len(learning.notes) == 1
        assert words in learning.notes[0]
        assert learning.drop_gpu_replay() == ("is mirrored" in words)


def test_batches_of_a_mirror_are_normalized_as_those_of_the_host(monkeypatch):
    taken = []
    with filled() as ring:
        learning = learning_of(ring, normalize_obs=True)
        mirror = GpuReplay(ReplayReader(ring), BATCH, CPU, 5)
        learning.use_gpu_replay(mirror, lambda: PlayedGraph(learning.algorithm))
        monkeypatch.setattr(learning.algorithm, "update", lambda batch, _: taken.append(batch) or (0.0, 0.0))
        for _ in range(30):
            learning.refresh()
            learning.update()
            raw = ring.rows[mirror.logical.numpy()]
            for columns, found in ((LAYOUT.obs, taken[-1].obs), (LAYOUT.next_obs, taken[-1].next_obs)):
                expected = raw[:, columns].copy()
                learning.statistics.normalizer.apply(expected)
                np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
            assert np.array_equal(taken[-1].reward.numpy(), raw[:, LAYOUT.reward])
        assert learning.statistics.normalizer.count == ring.total_committed(), "each row once"


def absurd(ring, at, reward):
    """The rows with these rewards at some places."""
    ring.rows[at, LAYOUT.reward] = reward


@pytest.mark.parametrize("mirrored", [False, True])
def test_rewards_are_divided_by_the_deviation_of_returns_at_the_draw_and_stay_raw_in_replay(monkeypatch, mirrored):
    taken = []
    with filled() as ring:
        learning = learning_of(ring)
        if mirrored:
            learning.use_gpu_replay(
                GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: PlayedGraph(learning.algorithm)
            )
        monkeypatch.setattr(learning.algorithm, "update", lambda batch, _: taken.append(batch) or (0.0, 0.0))
        stored = ring.rows.copy()
        learning.statistics.update_returns(np.array([4.0, 0.0, 100.0]))  # a deviation of 5
        for _ in range(8):
            learning.refresh()
            learning.update()
            drawn = learning._graphed.gpu_replay.logical.numpy() if mirrored else learning._reader._drawn.row
            np.testing.assert_allclose(taken[-1].reward.numpy(), stored[drawn, LAYOUT.reward] / 5.0, rtol=1e-5)
        assert np.array_equal(ring.rows, stored)
        assert learning.metrics(wait_s=0.0, publish_s=0.0)["return_scale"] == 5.0


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("reward", [np.inf, -np.inf, np.nan, 1e30])
def test_rows_of_absurd_rewards_do_not_stop_learning(reward, scaled, mirrored):
    with filled() as ring:
        absurd(ring, np.arange(0, 256, 3), reward)  # hardly a batch is without one
        learning = learning_of(ring, normalize_returns=scaled)
        if mirrored:
            learning.use_gpu_replay(
                GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: PlayedGraph(learning.algorithm)
            )
        learning.statistics.update_returns(np.array([4.0, 0.0, 100.0]))
        for _ in range(20):
            learning.refresh()
            learning.update()
        assert learning.algorithm.updates_skipped() == 0


def test_what_is_shown_is_in_the_units_of_the_task_and_the_same_is_learned_whatever_these_are():
    found = {}
    for factor in (1.0, 1000.0):
        with filled() as ring:
            ring.rows[:, LAYOUT.reward] *= np.float32(factor)
            learning = learning_of(ring)
            learning.statistics.update_returns(np.array([4.0, 0.0, 100.0]) * [1.0, factor, factor**2])
            for _ in range(5):
                learning.update()
            found[factor] = learning.algorithm.policy_parameters[0].clone(), learning.metrics(wait_s=0.0, publish_s=0.0)
    torch.testing.assert_close(found[1.0][0], found[1000.0][0], rtol=1e-3, atol=1e-5)
    for name, power in (("q_mean", 1), ("actor_loss", 1), ("critic_loss", 2), ("return_scale", 1)):
        assert found[1000.0][1][name] == pytest.approx(1000.0**power * found[1.0][1][name], rel=1e-2)


@pytest.mark.parametrize("normalize_returns", [False, True])
def test_a_trainer_that_is_read_back_learns_on_bit_by_bit_with_its_units(normalize_returns):
    with filled() as ring:
        options = {"normalize_obs": True, "normalize_returns": normalize_returns, "session": 1.0}
        whole = learning_of(ring, **options)
        whole.statistics.update_returns(np.array([4.0, 0.0, 100.0]))
        for update in range(20):
            if update == 10:
                tensors, state = whole.state()
                again = learning_of(ring, **options)
                again.load_state(tensors, json.loads(json.dumps(state)))
            whole.update()
        for _ in range(10):
            again.update()
        assert again.parameters_sha256() == whole.parameters_sha256()
        assert again.state()[1] == whole.state()[1]


def test_a_checkpoint_of_this_session_counts_nothing_twice_and_one_of_an_earlier_session_goes_on():
    with filled() as ring:
        first = learning_of(ring, normalize_obs=True, session=1.0)
        first.statistics.update_returns(np.array([4.0, 0.0, 100.0]))
        first.refresh()
        tensors, state = first.state()
        for session, returns, rows in ((1.0, 6.0, 400.0), (2.0, 10.0, 800.0)):
            again = learning_of(ring, normalize_obs=True, session=session)
            again.load_state(tensors, json.loads(json.dumps(state)))
            assert again.statistics.return_scale == 5.0
            again.statistics.update_returns(np.array([6.0, 0.0, 150.0]))
            again.refresh()
            assert (again.statistics.returns.count, again.statistics.normalizer.count) == (returns, rows)
        loaded = learning_of(ring, normalize_obs=True, session=2.0, loaded_rows=tuple(ring.committed.tolist()))
        loaded.load_state(tensors, state)
        loaded.refresh()
        assert loaded.statistics.normalizer.count == 400.0, "rows that an earlier session counted"


def test_a_split_with_a_mirror_launches_kernels_one_by_one_and_says_so():
    with filled() as ring:
        learning = learning_of(ring, updates_per_launch=1, device="cpu+cpu")
        learning._is_split = True  # stands in for a second device
        learning.use_gpu_replay(GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: pytest.fail("recorded"))
        assert learning.notes == ["no CUDA graphs: actor and critics are on different devices"]


def averaged(steps, decay, counts):
    """The average in NumPy, stepped at these counts of updates; ``steps`` are the newest weights, the first before."""
    found, before = steps[0].astype(np.float64), 0
    for newest, count in zip(steps[1:], counts, strict=True):
        kept = min(decay, (1 + count) / (10 + count)) ** (count - before)
        found, before = kept * found + (1.0 - kept) * newest, count
    return found


@pytest.mark.parametrize("graphs", [False, True])
def test_the_policy_is_published_as_an_average_and_as_the_newest_for_samplers(graphs):
    with filled() as ring:
        learning = learning_of(ring, policy_average=0.9, updates_per_launch=4)
        if graphs:
            learning.use_gpu_replay(
                GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda: PlayedGraph(learning.algorithm)
            )
        steps, counts = [learning.policy()[0]["w0"]], []
        while learning.updates < 43:
            before = learning._average.updates
            learning.update()
            if learning._average.updates != before:
                steps.append(learning.algorithm.policy_arrays()["w0"])
                counts.append(learning.updates)
        assert counts == ([11, 19, 27, 35, 43] if graphs else [8, 16, 24, 32, 40])
        published = learning.policy()[0]
        np.testing.assert_allclose(published["w0"], averaged(steps, 0.9, counts), rtol=1e-5, atol=1e-7)
        newest, explores = learning.algorithm.policy_arrays(), exploring_arrays(published)
        assert all(np.array_equal(explores[name], newest[name]) for name in newest)
        assert all(np.array_equal(value, newest[name]) for name, value in learning.exploring_policy()[0].items())


@pytest.mark.parametrize(("name", "changes"), [*CASES, ("dqn", {"dueling": True})])
def test_an_average_leaves_what_is_learned_as_it_was_and_goes_on_after_a_resume(name, changes):
    def learner(policy_average=0.0):
        config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(8, 8), policy_average=policy_average, **changes)
        spec = dataclasses.replace(SPEC, action=Choices((2,))) if name == "dqn" else SPEC
        return ReplayTrainer(
            spec,
            name,
            config,
            LAYOUT,
            ReplayReader(ring),
            LearnerConfig(batch_size=BATCH, device="cpu", gpu_replay=False, updates_per_launch=0),
            seed=1,
            normalize_obs=True,
        )

    with filled(discrete=name == "dqn") as ring:
        plain, averaging, resumed = learner(), learner(policy_average=0.99), learner(policy_average=0.99)
        for _ in range(21):
            plain.update()
            averaging.update()
            averaging.policy()
        assert plain.parameters_sha256() == averaging.parameters_sha256()
        resumed.load_state(*averaging.state())
        for _ in range(20):
            averaging.update()
            resumed.update()
        assert same(averaging.policy()[0], resumed.policy()[0])
        assert not np.array_equal(averaging.policy()[0]["w0"], averaging.exploring_policy()[0]["w0"])
        averaging.load_state(*plain.state())  # of a run that kept none: it begins at the weights of now
        assert np.array_equal(averaging.policy()[0]["w0"], plain.policy()[0]["w0"])


def test_samplers_may_explore_with_the_average_too():
    with filled() as ring:
        learning = learning_of(ring, policy_average=0.99, explore_average=True)
        for _ in range(9):
            learning.update()
        published = learning.policy()[0]
        assert published.keys() == learning.algorithm.policy_arrays().keys()
        assert same(learning.exploring_policy()[0], published)
        assert not np.array_equal(published["w0"], learning.algorithm.policy_arrays()["w0"])


def learner_of(ring, name, per_launch, device="cpu"):
    """A learner that takes large steps, so that what it did not do shows."""
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(32, 32), actor_lr=1e-2, critic_lr=1e-2)
    return ReplayTrainer(
        SPEC,
        name,
        config,
        LAYOUT,
        ReplayReader(ring),
        LearnerConfig(batch_size=BATCH, device=device, updates_per_launch=per_launch),
        seed=1,
        normalize_obs=False,
    )


def displacement(learning, name, updates=40):
    """How far so many updates move the policy: all of its parameters in one vector."""
    before = learning.policy()[0]
    while learning.updates < updates:
        learning.update(updates - learning.updates)
    after = learning.policy()[0]
    return np.concatenate([(after[key] - value).ravel() for key, value in before.items()])


def check_the_same_way(single, several):
    """Both moved far, and to the same place but for a hundredth of the way."""
    assert np.abs(single).max() > 0.1
    assert np.linalg.norm(several - single) <= 0.01 * np.linalg.norm(single)


class IdleGraph(PlayedGraph):
    """Says that it does what was recorded, and does nothing."""

    def replay(self):
        self.replays += 1


@pytest.mark.parametrize("name", ["sac", "td3"])
@pytest.mark.parametrize(("graph", "found_out"), [(PlayedGraph, False), (IdleGraph, True)])
def test_the_comparison_of_displacements_finds_out_replays_that_do_nothing(name, graph, found_out):
    with filled() as ring:
        moved = []
        for per_launch in (0, 4):
            learning = learner_of(ring, name, per_launch)
            learning.use_gpu_replay(
                GpuReplay(ReplayReader(ring), BATCH, CPU, 5), lambda one=learning: graph(one.algorithm)
            )
            moved.append(displacement(learning, name))
        with pytest.raises(AssertionError) if found_out else contextlib.nullcontext():
            check_the_same_way(*moved)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_on_a_gpu_graphs_give_the_parameters_of_single_updates_and_never_wait(name):
    with filled() as ring:
        moved = []
        for per_launch in (0, 4):
            learning = learner_of(ring, name, per_launch, "cuda:0")
            moved.append(displacement(learning, name))
            with HostWaits("cuda:0") as waits:
                learning.update()
            assert waits.count == 0
            assert not any("no CUDA graphs" in note for note in learning.notes), "a graph was recorded"
        check_the_same_way(*moved)


def test_a_smaller_batch_is_also_drawn_from_the_mirror():
    with filled() as ring:
        learning = learning_of(ring)
        mirror = GpuReplay(ReplayReader(ring), BATCH, CPU, 5)
        learning.use_gpu_replay(mirror, lambda: PlayedGraph(learning.algorithm))
        learning.set_batch_size(4)
        learning.update()
        assert mirror.batch.shape == (4, LAYOUT.width)


@pytest.mark.parametrize(("name", "changes"), CASES)
@pytest.mark.parametrize("wanted", [1, 8])
def test_the_updates_before_the_first_replay_are_counted_beforehand(name, changes, wanted):
    with filled(discrete=name == "dqn") as ring:
        _algorithm, launches = launches_of(ring, name, changes, graphs=[], wanted=wanted)
        expected, done = launches.updates_before_replay, 0
        while launches._graph is None or done < expected:
            done += launches.run()
        assert done == expected
        replays = launches._graph.replays
        launches.run()
        assert launches._graph.replays == replays + 1
