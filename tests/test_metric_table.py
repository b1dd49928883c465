"""What a new metric costs: one row of the table and one key of an algorithm, from the learner to the page."""

import contextlib
import math

import numpy as np
import pytest
from test_launches import SPEC, filled

from spreeze.algorithms.td3 import DDPG
from spreeze.cli.terminal import plain_line
from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import PARTS
from spreeze.dashboard import live_api
from spreeze.errors import WorkerError
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.table import METRICS, MOST_SLOTS, TABLE, Chart, Kind, Metric, MetricTable, Needs
from spreeze.run_directory import RunDir
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import CounterSample, GroupSample, Rates, Recorder
from spreeze.transport.replay_ring import ReplayReader
from spreeze.transport.status_table import StatusTable
from spreeze.workers.collectors import SamplerStats
from spreeze.workers.context import WorkerContext
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.roles import Address

ROW = Metric("weight_norm", "norm", "Euclidean norm of the policy's weights", "algorithm", shown=True,
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
    monkeypatch.setattr("spreeze.algorithms.td3.DDPG", Telling)
    with filled() as ring:
        trainer = ReplayTrainer(SPEC, "ddpg", PARTS["ddpg"](hidden_sizes=(8, 8)), ring.spec.layout, ReplayReader(ring),
                                batch_size=16, device="cpu", seed=1, normalize_obs=False)  # fmt: skip
        trainer.update(1)
        yield trainer.metrics(wait_s=0.0, publish_s=0.0)


@contextlib.contextmanager
def learner_of(table):
    status = StatusTable.create(2)
    context = WorkerContext(Address("learner"), status, 1, None, table=table)
    try:
        yield status, context
    finally:
        context.close()


def record(tmp_path, reading, table):
    """Writes a reading to a run's metrics; gives the run and what its view saw."""
    plan = RunPlan(settings=resolve([Layer("test", {"env": {"id": "x"}})]), spec=SPEC, samplers=1, free_core=False)
    run_dir, view = RunDir.create(tmp_path, "run"), LastSeen()
    recorder = Recorder(plan, run_dir, view, table)
    try:
        recorder.sample(reading, pids=None)
    finally:
        recorder.close()
        run_dir.close()
    return run_dir.path, view.snapshot


def test_a_made_up_metric_goes_from_the_algorithm_to_store_terminal_and_page_by_one_row(told, tmp_path):
    table = MetricTable((*METRICS, ROW))
    with learner_of(table) as (status, context):
        context.post(**told)
        reading = CounterSample(1.0, (GroupSample(
            (status.named_slots(0, "sampler", table),), status.named_slots(1, "learner", table), 400, 0, 16),)
        )  # fmt: skip
    path, shown = record(tmp_path, reading, table)
    value = told["weight_norm"]
    assert value > 0.0
    assert MetricsReader(path / "metrics.db").latest()["weight_norm"].value == value
    assert shown.more == (("weight_norm", value),)
    assert "weight norm" in plain_line(shown)
    assert live_api.answer(path, 0.0, 0, "", table)["series"]["weight_norm"]["y"] == [pytest.approx(value, rel=1e-5)]
    (card,) = [chart for chart in live_api.as_json("updates", table) if chart["key"] == "weight_norm"]
    assert (card["title"], card["unit"], card["group"], card["series"]) == (
        "Size of the policy", "norm", "Learning", ("weight_norm", "weight_norm/*"))  # fmt: skip
    assert card["help"] == "Euclidean norm of the policy's weights [norm]."


def test_without_its_row_an_algorithm_s_number_is_refused_and_the_table_is_named(told):
    with learner_of(TABLE) as (_, context), pytest.raises(WorkerError, match=r"'weight_norm'.*metrics/table.py"):
        context.post(**told)


def test_a_made_up_counter_has_its_rate_by_a_row_of_its_own():
    table = MetricTable((*METRICS, Metric("episodes_per_s", "1/s", "episodes a second", "supervisor", kind=Kind.RATE,
                                          per_s_of="episodes")))  # fmt: skip
    samplers = [tuple({**dict.fromkeys(table.slots["sampler"], 0.0), "episodes": done} for done in pair)
                for pair in ((1.0, 2.0), (4.0, 5.0))]  # fmt: skip
    rates = Rates(1, table=table)
    for t_s, both in zip((0.0, 2.0), samplers, strict=True):
        metrics = rates.read(CounterSample(t_s, (GroupSample(both, table.blank_learner(), 0, -1, 0),)))
    assert metrics["episodes_per_s"] == 3.0


def test_a_learner_s_number_is_known_when_its_row_says():
    rows = {need: Metric(f"made_up_{need.name.lower()}", "x", "made up", "learner", needs=need) for need in Needs}
    table = MetricTable((*METRICS, *rows.values()))
    learner = {**table.blank_learner(), **{row.name: 7.0 for row in rows.values()}}

    def known(**changes):
        metrics = Rates(1, table=table).read(CounterSample(0.0, (GroupSample((), learner | changes, 0, -1, 16),)))
        return {need for need, row in rows.items() if metrics[row.name] == 7.0}

    assert known() == {Needs.NOTHING}
    assert known(updates=1.0) == {Needs.NOTHING, Needs.UPDATES, Needs.REPLAY}
    assert known(updates=1.0, learn_s=1.0) == {Needs.NOTHING, Needs.UPDATES, Needs.ROLLOUTS}


def test_a_row_says_whether_its_slot_goes_on_over_a_restart():
    assert set(TABLE.cumulative("learner")) == {
        "wait_s", "gather_s", "critic_s", "actor_s", "learn_s", "publish_s", "rows_redrawn"}
    assert set(TABLE.cumulative("sampler")) == {
        "env_steps", "episodes", "rows_refused", "env_errors", "policy_s", "env_s", "write_s", "wait_s", "returns",
        "returns_sum", "returns_square_sum"}  # fmt: skip
    assert TABLE.cumulative("evaluator") == ()
    table = MetricTable((*METRICS, ROW._replace(cumulative=True)))
    assert set(table.cumulative("learner")) - set(TABLE.cumulative("learner")) == {"weight_norm"}


def test_rows_that_a_module_adds_come_behind_the_slots_that_were_there():
    table = MetricTable(METRICS)
    before = table.slots["learner"]
    for _ in range(2):
        table.extend([ROW])
    assert table.slots["learner"] == (*before, "weight_norm")
    assert table.by_name("weight_norm") == ROW
    assert table.slots["sampler"] == TABLE.slots["sampler"]
    with pytest.raises(ValueError, match="two metrics are called weight_norm"):
        table.extend([ROW._replace(unit="other")])


@pytest.mark.parametrize("count", [7, 60, 300])
def test_a_module_may_report_dozens_of_numbers_of_its_own(count):
    table = MetricTable(METRICS)
    table.extend(ROW._replace(name=f"own_{index}") for index in range(count))
    status = StatusTable.create(2)
    try:
        context = WorkerContext(Address("learner"), status, 1, None, table=table)
        context.post(**{f"own_{index}": float(index) for index in range(count)})
        found = status.named_slots(1, "learner", table)
        assert [found[f"own_{index}"] for index in range(count)] == [*range(count)]
        assert not status.events(1).any(), "the slots reach into nothing else"
    finally:
        status.close()


def test_two_rows_of_one_name_and_more_slots_than_there_is_room_for_are_refused():
    with pytest.raises(ValueError, match="two metrics are called weight_norm"):
        MetricTable((*METRICS, ROW, ROW))
    many = [ROW._replace(name=f"made_up_{index}") for index in range(MOST_SLOTS)]
    with pytest.raises(ValueError, match=f"numbers of the learner, at most {MOST_SLOTS} can be recorded; leave some"):
        MetricTable((*METRICS, *many))


def test_a_sampler_s_counts_come_back_by_their_names():
    stats = SamplerStats(1, 2, 3.0, 4.0, 5, 6, 7.0, 8.0, 9.0, 10.0, (11.0, 12.0, 13.0))
    status = StatusTable.create(1)
    try:
        stats.post(status.slots(0), np.full(MOST_SLOTS, 100.0))
        found = status.named_slots(0, "sampler")
        assert status.named_slots(0, "rollout-sampler") == found
    finally:
        status.close()
    assert found == {
        "env_steps": 101.0, "episodes": 102.0, "episode_return": 3.0, "episode_length": 4.0, "rows_refused": 105.0,
        "env_errors": 106.0, "policy_s": 107.0, "env_s": 108.0, "write_s": 109.0, "wait_s": 110.0,
        "policy_version": 0.0, "returns": 111.0, "returns_sum": 112.0, "returns_square_sum": 113.0,
    }  # fmt: skip


def test_which_slots_go_on_after_a_restart_follows_from_the_rows():
    times = {"wait_s", "gather_s", "critic_s", "actor_s", "learn_s", "publish_s"}
    assert set(TABLE.cumulative("learner")) == times | {"rows_redrawn"}, "updates come back with a checkpoint"
    assert set(TABLE.cumulative("sampler")) == {
        "env_steps", "episodes", "rows_refused", "env_errors", "policy_s", "env_s", "write_s", "wait_s", "returns",
        "returns_sum", "returns_square_sum",
    }  # fmt: skip
    counted = ROW._replace(name="made_up_count", writer="learner", kind=Kind.COUNTER, chart=None)
    assert "made_up_count" not in MetricTable((*METRICS, counted)).cumulative("learner")
    assert "made_up_count" in MetricTable((*METRICS, counted._replace(cumulative=True))).cumulative("learner")
