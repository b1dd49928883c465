"""What a new metric costs: one row of the table and one key of an algorithm, from the learner to the page."""

import contextlib
import dataclasses
import json
import math
import os

import numpy as np
import pytest
from played_graphs import SPEC, filled

from spreeze.algorithms.td3 import DDPG
from spreeze.cli.terminal import plain_line
from spreeze.config.algorithms import find_row
from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.dashboard import live_api
from spreeze.errors import WorkerError
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.table import METRICS, SLOTS, TABLE, Chart, Kind, Metric, MetricTable, Needs
from spreeze.run_directory import RunDir
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, GroupSample, Rates
from spreeze.runtime.recorder import Recorder
from spreeze.transport.replay_ring import ReplayReader
from spreeze.transport.shared_memory import with_own_descriptors
from spreeze.transport.status_table import StatusTable
from spreeze.workers.collectors.collector import SamplerStats
from spreeze.workers.context import WorkerContext
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.roles import ROLES, Address

ROW = Metric("weight_norm", "norm", "Euclidean norm of the policy's weights", "algorithm", in_terminal=True,
             chart=Chart("weight_norm", "Size of the policy", "Learning"))  # fmt: skip


class Telling(DDPG):
    """Tells one number more than it does."""

    def metrics(self):
        arrays = self.policy_arrays().values()
        return super().metrics() | {"weight_norm": math.sqrt(sum(float(np.square(array).sum()) for array in arrays))}


class LastSeen:
    """A view that keeps the newest snapshot."""

    def update(self, snapshot):
        self.snapshot = snapshot

    def note(self, text):
        """Nothing."""


@pytest.fixture
def told(monkeypatch):
    """The numbers of a learner that has taken one update of the made-up algorithm."""
    row = dataclasses.replace(find_row("ddpg"), continuous=Telling)
    monkeypatch.setattr("spreeze.algorithms.find_row", lambda name, import_module: row)
    with filled() as ring:
        trainer = ReplayTrainer(SPEC, "ddpg", SECTIONS["ddpg"](hidden_sizes=(8, 8)), ring.spec.layout,
                                ReplayReader(ring), LearnerConfig(batch_size=16, device="cpu"), seed=1,
                                normalize_obs=False)  # fmt: skip
        trainer.update(1)
        yield trainer.metrics(wait_s=0.0, publish_s=0.0)


@pytest.fixture
def extend():
    """Adds rows to the table of metrics, as a module of ``--import`` does, for one test."""
    metrics, by_name, slots = TABLE.metrics, TABLE._by_name, dict(TABLE.slots)
    yield TABLE.extend
    TABLE.metrics, TABLE._by_name = metrics, by_name
    TABLE.slots.clear()
    TABLE.slots.update(slots)


class Learner:
    """A learner's context and the end of its pipe that the supervisor reads."""

    def __init__(self):
        self.status = StatusTable.create(2)
        self._read_fd, write_fd = os.pipe()
        for fd in (self._read_fd, write_fd):
            os.set_blocking(fd, False)
        self.context = WorkerContext(Address("learner"), self.status, 1, write_fd)

    def messages(self):
        """The values of the messages that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [json.loads(line)["values"] for line in os.read(self._read_fd, 2**20).splitlines()]
        return []

    def group(self):
        samplers = (self.status.named_slots(0, "sampler"),)
        return GroupSample(samplers, self.status.named_slots(1, "learner"), 400, 0, 16)

    def close(self):
        self.context.close()
        os.close(self._read_fd)


@contextlib.contextmanager
def learner_of():
    with contextlib.closing(Learner()) as learner:
        yield learner


def record(tmp_path, reading, *messages, groups=1, name="run"):
    """Writes a reading and messages to a run's metrics; gives the run and what its view saw.

    Each further group reports 1 more than the one before it.
    """
    plan = RunPlan(settings=resolve([Layer("test", {"env": {"id": "x"}})]), spec=SPEC, samplers=1, free_core=False)
    run_dir, view = RunDir.create(tmp_path, name), LastSeen()
    recorder = Recorder(plan, run_dir, view)
    try:
        for group in range(groups):
            for values in messages:
                more = values if group == 0 else {name: value + group for name, value in values.items()}
                recorder.reported[group] |= more
        recorder.sample(reading, pids=None)
    finally:
        recorder.close()
        run_dir.close()
    return run_dir.path, view.snapshot


def test_a_made_up_metric_goes_from_the_algorithm_to_store_terminal_and_page_by_one_row(told, tmp_path, extend):
    extend([ROW])
    with learner_of() as learner:
        learner.context.report(told)
        path, shown = record(tmp_path, CounterSample(1.0, (learner.group(),)), *learner.messages())
    value = told["weight_norm"]
    assert value > 0.0
    assert MetricsReader(path / "metrics.db").latest()["weight_norm"].value == value
    assert shown.more == (("weight_norm", value),)
    assert "weight norm" in plain_line(shown)
    assert live_api.live_response(path, 0.0, 0, "")["series"]["weight_norm"]["y"] == [pytest.approx(value, rel=1e-5)]
    (card,) = [chart for chart in live_api.chart_specs("updates") if chart["key"] == "weight_norm"]
    assert (card["title"], card["unit"], card["group"], card["series"]) == (
        "Size of the policy", "norm", "Learning", ("weight_norm", "weight_norm/*"))  # fmt: skip
    assert card["help"] == "Euclidean norm of the policy's weights [norm]."


def test_without_its_row_an_algorithm_s_number_is_refused_and_the_table_is_named(told):
    with learner_of() as learner, pytest.raises(WorkerError, match=r"'weight_norm'.*metrics/table.py"):
        learner.context.report(told)


def test_a_made_up_counter_has_its_rate_by_a_row_of_its_own(extend):
    row = Metric("episodes_per_s", "1/s", "episodes a second", "supervisor", kind=Kind.RATE, per_s_of="episodes")
    extend([row])
    samplers = [tuple({**dict.fromkeys(TABLE.slots["sampler"], 0.0), "episodes": done} for done in pair)
                for pair in ((1.0, 2.0), (4.0, 5.0))]  # fmt: skip
    rates, learner = Rates(1), dict.fromkeys(TABLE.slots["learner"], 0.0)
    for t_s, both in zip((0.0, 2.0), samplers, strict=True):
        metrics = rates.read(CounterSample(t_s, (GroupSample(both, learner, 0, -1, 0),)))
    assert metrics["episodes_per_s"] == 3.0


def test_a_learner_s_number_is_known_when_its_row_says(extend):
    rows = {need: Metric(f"made_up_{need.name.lower()}", "x", "made up", "learner", needs=need) for need in Needs}
    extend(rows.values())
    learner = {**dict.fromkeys(TABLE.slots["learner"], 0.0), **{row.name: 7.0 for row in rows.values()}}

    def known(**changes):
        metrics = Rates(1).read(CounterSample(0.0, (GroupSample((), learner | changes, 0, -1, 16),)))
        return {need for need, row in rows.items() if metrics[row.name] == 7.0}

    assert known() == {Needs.NOTHING}
    assert known(updates=1.0) == {Needs.NOTHING, Needs.UPDATES, Needs.REPLAY}
    assert known(updates=1.0, learn_s=1.0) == {Needs.NOTHING, Needs.UPDATES, Needs.ROLLOUTS}


def test_a_row_says_whether_its_slot_goes_on_over_a_restart():
    assert set(TABLE.cumulative("learner")) == {
        "wait_s",
        "gather_s",
        "critic_s",
        "actor_s",
        "learn_s",
        "publish_s",
        "rows_redrawn",
    }
    assert set(TABLE.cumulative("sampler")) == {
        "env_steps", "episodes", "transitions_rejected", "env_errors", "policy_s", "env_s", "write_s", "wait_s",
        "returns", "returns_sum", "returns_square_sum"}  # fmt: skip
    assert TABLE.cumulative("evaluator") == ()
    table = MetricTable((*METRICS, ROW._replace(kind=Kind.COUNTER, cumulative=True)))
    assert set(table.cumulative("learner")) - set(TABLE.cumulative("learner")) == {"weight_norm"}


def test_rows_that_a_module_adds_come_behind_the_slots_that_were_there():
    table = MetricTable(METRICS)
    before, counter = table.slots["learner"], ROW._replace(name="resets", kind=Kind.COUNTER, chart=None)
    for _ in range(2):
        table.extend([ROW, counter])
    assert table.slots["learner"] == (*before, "resets"), "a gauge of an algorithm travels in messages"
    assert (table.by_name("weight_norm"), table.by_name("resets")) == (ROW, counter)
    assert table.slots["sampler"] == TABLE.slots["sampler"]
    with pytest.raises(ValueError, match="two metrics are called weight_norm"):
        table.extend([ROW._replace(unit="other")])


@pytest.mark.parametrize("count", [7, 60, 3000])
def test_an_algorithm_may_report_any_number_of_gauges(tmp_path, count, extend):
    extend(ROW._replace(name=f"own_{index}", chart=None) for index in range(count))
    values = {f"own_{index}": index / 3.0 for index in range(count)}
    with learner_of() as learner:
        messages = []
        for _ in range(1 + count // 300):  # what the pipe has no room for comes later
            learner.context.report({"updates": 9.0, **values})
            messages += learner.messages()
        assert {name for message in messages for name in message} == {*values}
        assert learner.group().learner["updates"] == 9.0
        path, _ = record(tmp_path, CounterSample(1.0, (learner.group(),)), *messages)
    latest = MetricsReader(path / "metrics.db").latest()
    assert {name: latest[name].value for name in values} == values


@pytest.mark.parametrize("count", [60, 3000])
def test_an_algorithm_may_have_any_number_of_counters_each_with_a_slot(count, extend):
    extend(ROW._replace(name=f"own_{index}", kind=Kind.COUNTER, chart=None) for index in range(count))
    with learner_of() as learner:
        learner.context.report({f"own_{index}": float(index) for index in range(count)})
        assert learner.messages() == []
        attached = with_own_descriptors(learner.status.handle).attach()
        found = attached.named_slots(1, "learner")
        assert [found[f"own_{index}"] for index in range(count)] == [*range(count)]
        assert not attached.events(1).any(), "the slots reach into nothing else"
        attached.close()


def test_gauges_leave_room_in_the_pipe_for_events_while_nobody_reads():
    with learner_of() as learner:
        for _ in range(2000):
            learner.context.report({"critic_loss": 1.0})
        learner.context.event("warning", "x" * 500)
        lines = os.read(learner._read_fd, 2**20).splitlines()
    assert 10 < len(lines) < 1000
    assert json.loads(lines[-1])["text"] == "x" * 500


def test_a_message_of_gauges_arrives_whole_or_not_at_all(extend):
    extend(ROW._replace(name=f"own_{index}_{'x' * 60}", chart=None) for index in range(200))
    names = [metric.name for metric in TABLE.metrics if metric.name.startswith("own_")]
    with learner_of() as learner:
        learner.context.report(dict.fromkeys(names, -1.2345678901234567e-300))
        lines = os.read(learner._read_fd, 2**20).splitlines(keepends=True)
        learner.context.report({})
        lines += os.read(learner._read_fd, 2**20).splitlines(keepends=True)
    assert all(len(line) <= 4096 for line in lines), "one write of at most PIPE_BUF bytes each"
    assert sorted(name for line in lines for name in json.loads(line)["values"]) == sorted(names)


def test_only_gauges_of_an_algorithm_are_taken_from_a_message(tmp_path):
    with learner_of() as learner:
        learner.context.post(updates=3.0)
        learner.context.post(batch_size=16.0)
        bad = {"critic_loss": 2.0, "updates": 9e9, "unknown": 1.0, "alpha": "high", "q_mean": None}
        path, _ = record(tmp_path, CounterSample(1.0, (learner.group(),)), bad)
    latest = {name: point.value for name, point in MetricsReader(path / "metrics.db").latest().items()}
    assert (latest["critic_loss"], latest["updates"]) == (2.0, 3.0)
    assert not {"unknown", "alpha", "q_mean"} & latest.keys()


def test_gauges_are_means_over_learners_that_have_learned_and_unknown_ones_are_left_out(tmp_path):
    blank = dict.fromkeys(SLOTS["learner"], 0.0)
    learned, other = (GroupSample((), blank | {"updates": count}, 400, 0, 16) for count in (5.0, 0.0))
    reports = [{"alpha": 0.5, "critic_loss": math.inf, "actor_loss": 0.0}]
    path, _ = record(tmp_path, CounterSample(1.0, (learned,)), *reports)
    latest = {name: point.value for name, point in MetricsReader(path / "metrics.db").latest().items()}
    assert (latest["alpha"], latest["actor_loss"]) == (0.5, 0.0)
    assert not {"critic_loss", "entropy", "alpha/0"} & latest.keys(), "not finite, not reported, one learner alone"
    path, _ = record(tmp_path, CounterSample(1.0, (learned, learned, other)), *reports, groups=3, name="three")
    latest = {name: point.value for name, point in MetricsReader(path / "metrics.db").latest().items()}
    assert [latest[name] for name in ("alpha", "alpha/0", "alpha/1")] == [1.0, 0.5, 1.5]
    assert "alpha/2" not in latest


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two metrics are called weight_norm"):
        MetricTable((*METRICS, ROW, ROW))


def test_a_sampler_s_counts_come_back_by_their_names():
    stats = SamplerStats(1, 2, 3.0, 4.0, 5, 6, 7.0, 8.0, 9.0, 10.0, (11.0, 12.0, 13.0))
    status = StatusTable.create(1)
    try:
        stats.post(status.slots(0), np.full(len(TABLE.slots["sampler"]), 100.0))
        found = status.named_slots(0, "sampler")
        assert ROLES["rollout-sampler"].slots == "sampler"
    finally:
        status.close()
    assert found == {
        "env_steps": 101.0, "episodes": 102.0, "episode_return": 3.0, "episode_length": 4.0,
        "transitions_rejected": 105.0, "env_errors": 106.0, "policy_s": 107.0, "env_s": 108.0, "write_s": 109.0,
        "wait_s": 110.0, "policy_version": 0.0, "returns": 111.0, "returns_sum": 112.0, "returns_square_sum": 113.0,
    }  # fmt: skip


def test_which_slots_go_on_after_a_restart_follows_from_the_rows():
    times = {"wait_s", "gather_s", "critic_s", "actor_s", "learn_s", "publish_s"}
    assert set(TABLE.cumulative("learner")) == times | {"rows_redrawn"}, "updates come back with a checkpoint"
    assert set(TABLE.cumulative("sampler")) == {
        "env_steps", "episodes", "transitions_rejected", "env_errors", "policy_s", "env_s", "write_s", "wait_s",
        "returns", "returns_sum", "returns_square_sum",
    }  # fmt: skip
    counted = ROW._replace(name="made_up_count", writer="learner", kind=Kind.COUNTER, chart=None)
    assert "made_up_count" not in MetricTable((*METRICS, counted)).cumulative("learner")
    assert "made_up_count" in MetricTable((*METRICS, counted._replace(cumulative=True))).cumulative("learner")
