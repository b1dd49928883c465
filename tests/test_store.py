"""The metrics store: what goes in comes out, peaks survive, trouble with the disk never reaches training."""

import math
import sqlite3
import statistics
import time
from functools import partial

import numpy as np
import pytest

from spreeze.errors import RunError
from spreeze.metrics.store import EvaluationRow, MetricsReader, MetricsWriter, _open_for_writing
from spreeze.metrics.table import METRICS


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.db"


def _fill(path, seconds, value=lambda t: t, name="updates", every_s=1.0):
    writer = MetricsWriter(path)
    for i in range(int(seconds / every_s)):
        writer.write(i * every_s, i, {name: value(i * every_s)})
    return writer


def test_points_come_back_as_written(path):
    writer = _fill(path, 20)
    found = MetricsReader(path).series("updates")
    writer.close()
    assert found.t.tolist() == list(range(20))
    assert found.mean.tolist() == list(range(20))
    assert found.step.tolist() == list(range(20))
    assert (found.unit, found.meaning) == ("updates", "gradient steps of the critics since the start of the run")


def test_unknown_metric_is_refused_and_nothing_of_it_is_stored(path):
    writer = MetricsWriter(path)
    with pytest.raises(KeyError):
        writer.write(0.0, 0, {"updates": 1.0, "update_count": 1.0})
    writer.close()
    assert MetricsReader(path).names() == []


def test_series_of_a_part_takes_unit_from_its_metric(path):
    writer = MetricsWriter(path)
    writer.write(0.0, 0, {"cpu_core_use/3": 0.5})
    writer.close()
    assert MetricsReader(path).series("cpu_core_use/3").unit == "share"


def test_none_and_nan_are_left_out(path):
    writer = MetricsWriter(path)
    writer.write(0.0, 0, {"updates": None, "alpha": math.nan, "q_mean": math.inf, "actor_loss": -1.0})
    writer.close()
    assert MetricsReader(path).names() == ["actor_loss"]


def test_rollups_hold_min_max_mean_last_and_count(path):
    writer = _fill(path, 25, value=lambda t: (t - 4) ** 2)
    writer.close()
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT bucket, min, max, mean, last, n FROM rollup_10s ORDER BY bucket").fetchall()
    db.close()
    values = [(t - 4) ** 2 for t in range(25)]
    expected = [
        (b, min(part), max(part), sum(part) / len(part), part[-1], len(part))
        for b, part in enumerate((values[:10], values[10:20], values[20:]))
    ]
    assert rows == [pytest.approx(row) for row in expected]


def test_late_point_spoils_no_rollup(path):
    writer = _fill(path, 12)
    writer.write(8.5, 8, {"eval_return": 5.0})
    writer.write(9.5, 9, {"updates": 99.0})
    writer.write(12.0, 12, {"updates": 12.0})
    writer.close()
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT bucket, n, max FROM rollup_10s WHERE series = 1 ORDER BY bucket").fetchall()
    db.close()
    assert rows == [(0, 10, 9.0), (1, 4, 99.0)]
    assert MetricsReader(path).latest()["eval_return"] == (8.5, 8, 5.0)


def test_old_raw_points_go_and_rollups_stay(path):
    writer = _fill(path, 7200 + 61, every_s=5.0)
    writer.close()
    with sqlite3.connect(path) as db:
        (oldest,) = db.execute("SELECT min(t) FROM points").fetchone()
        (buckets,) = db.execute("SELECT count(*) FROM rollup_60s").fetchone()
    db.close()
    assert 3500 <= oldest <= 3700
    assert buckets == 7255 // 60 + 1
    found = MetricsReader(path).series("updates", max_points=100_000)
    assert (np.diff(found.t) > 0).all()
    assert np.diff(found.t).max() <= 10.0
    assert (found.t[0], found.t[-1]) == (5.0, 7255.0)


@pytest.mark.parametrize("max_points", [7, 50, 400, 5000])
def test_peaks_survive_any_reduction(path, max_points):
    spikes = {1001.0: 900.0, 4500.0: -700.0, 6999.0: 800.0}
    writer = _fill(path, 7000, value=lambda t: spikes.get(t, 1.0))
    reader = MetricsReader(path)
    for _ in range(2):  # while it is written, and closed
        found = reader.series("updates", max_points=max_points)
        assert len(found.t) <= max_points
        assert (found.high.max(), found.low.min()) == (900.0, -700.0)
        assert found.high[-1] == 800.0
        assert (np.diff(found.t) > 0).all()
        writer.close()


def test_since_gives_only_what_came_after(path):
    _fill(path, 100).close()
    assert MetricsReader(path).series("updates", since=90.0).t.tolist() == list(range(90, 100))


def test_latest_knows_a_series_that_has_been_silent_for_hours(path):
    writer = MetricsWriter(path)
    writer.write(1.0, 10, {"eval_return": 7.0})
    for t in range(60, 9000, 60):
        writer.write(float(t), t, {"updates": float(t)})
    latest = MetricsReader(path).latest()
    writer.close()
    assert latest["eval_return"] == (1.0, 10, 7.0)
    assert latest["updates"] == (8940.0, 8940, 8940.0)


def test_buckets_open_at_a_crash_are_rebuilt(path):
    writer = _fill(path, 25)
    writer._disconnect()  # as after SIGKILL: open buckets were never stored
    again = MetricsWriter(path)
    again.write(25.0, 25, {"updates": 25.0, "alpha": 1.0})
    again.close()
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT n, min, max FROM rollup_60s WHERE series = 1").fetchall()
        names = db.execute("SELECT name, id FROM series ORDER BY id").fetchall()
    db.close()
    assert rows == [(26, 0.0, 25.0)]
    assert names == [("updates", 1), ("alpha", 2)]


def test_events_and_evaluations_come_back_without_control_characters(path):
    writer = MetricsWriter(path)
    writer.event(1.0, "warn", "sampler-0", "gone\x1b[31m\nSIGKILL")
    record = EvaluationRow(2.0, 100, 50, 0, 40, 10, -150.5, 3.25, 200.0)
    writer.evaluation(record)
    reader = MetricsReader(path)
    assert reader.events() == [(1.0, "warn", "sampler-0", "gone [31m SIGKILL")]
    assert reader.evaluations() == [record]
    writer.close()


def test_full_disk_is_counted_and_made_good_later(path, monkeypatch):
    full = [True]

    def connect(place):
        connection = _open_for_writing(place)
        if full[0]:
            connection.execute("PRAGMA max_page_count = 12")
        return connection

    monkeypatch.setattr("spreeze.metrics.store._RETRY_S", 0.0)
    writer = MetricsWriter(path, connect=connect)
    for i in range(200):
        writer.write(float(i), i, {"updates": float(i), "alpha": 1.0})
    assert writer.failures > 0
    assert "full" in writer.trouble
    full[0] = False
    writer.write(200.0, 200, {"updates": 200.0})
    assert writer.trouble is None
    writer.close()
    assert MetricsReader(path).series("updates").mean.tolist() == list(range(201))


def test_lasting_trouble_keeps_memory_bounded(path, monkeypatch):
    def connect(place):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("spreeze.metrics.store._MAX_PENDING", 100)
    writer = MetricsWriter(path, connect=connect)
    writer.event(0.0, "error", "learner", "the first error is kept")
    for i in range(500):
        writer.write(float(i), i, {"updates": float(i)})
    assert len(writer._pending) <= 200
    assert writer.rows_dropped > 300
    assert any("the first error is kept" in row for _, row in writer._pending)
    writer.close()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["events", "evaluations", "many series"])
def test_lasting_trouble_keeps_memory_bounded_whatever_is_written(path, monkeypatch, kind):
    def connect(place):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("spreeze.metrics.store._MAX_PENDING", 100)
    writer = MetricsWriter(path, connect=connect)
    for i in range(1000):
        if kind == "events":
            writer.event(float(i), "warning", "learner", f"event number {i}")
        elif kind == "evaluations":
            writer.evaluation(EvaluationRow(*[float(i)] * len(EvaluationRow._fields)))
        else:
            writer.write(60.0 * i, i, {f"cpu_core_use/{core}": 1.0 for core in range(40)})
        assert len(writer._pending) <= 300
    assert writer.rows_dropped > 500
    if kind == "events":
        kept = [row[-1] for _, row in writer._pending]
        assert (kept[0], kept[-1]) == ("event number 0", "event number 999")
    writer.close()


def test_damaged_file_is_set_aside_by_the_writer(path):
    path.write_bytes(b"this is no database" * 100)
    writer = MetricsWriter(path)
    writer.write(0.0, 0, {"updates": 1.0})
    writer.close()
    assert MetricsReader(path).latest()["updates"].value == 1.0
    assert path.with_name("metrics.db.damaged").read_bytes().startswith(b"this is no")


@pytest.mark.parametrize("content", [None, b""])
def test_absent_or_empty_file_reads_as_empty(path, content):
    if content is not None:
        path.write_bytes(content)
    reader = MetricsReader(path)
    assert (reader.names(), reader.latest(), reader.events(), reader.evaluations()) == ([], {}, [], [])
    assert len(reader.series("updates").t) == 0


def test_foreign_file_is_a_run_error_that_names_it(path):
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(RunError, match=r"metrics\.db cannot be read"):
        MetricsReader(path).latest()


def test_truncated_or_overwritten_file_never_gives_another_error(path):
    _fill(path, 500).close()
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    reader = MetricsReader(path)
    messages = []
    for trial in range(60):
        damaged = bytearray(whole[: int(generator.integers(1, len(whole)))] if trial % 2 else whole)
        for _ in range(trial):
            damaged[int(generator.integers(len(damaged)))] = int(generator.integers(256))
        path.write_bytes(bytes(damaged))
        for read in (reader.names, reader.latest, reader.events, reader.evaluations, partial(reader.series, "updates")):
            try:
                read()
            except RunError as error:
                messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


def test_hostile_file_cannot_hang_the_reader(path):
    with sqlite3.connect(path) as db:
        endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS name, x AS id FROM c"
        db.execute(f"CREATE VIEW series AS {endless} ORDER BY -x")
    db.close()
    with pytest.raises(RunError):
        MetricsReader(path, timeout_s=0.2).names()


def test_text_where_numbers_belong_is_a_run_error(path):
    _fill(path, 3).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE points SET value = 'many'")
    db.close()
    with pytest.raises(RunError):
        MetricsReader(path).series("updates")


def test_read_only_folder_can_be_read(path, tmp_path):
    _fill(path, 5).close()
    tmp_path.chmod(0o555)
    try:
        assert len(MetricsReader(path).series("updates").t) == 5
    finally:
        tmp_path.chmod(0o755)


def test_close_leaves_one_file_and_is_quick(path, tmp_path):
    _fill(path, 50).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.db"]


def test_sixty_series_are_one_commit(path):
    names = [metric.name for metric in METRICS] + [f"cpu_core_use/{i}" for i in range(60)]
    writer, times = MetricsWriter(path), {1: [], 60: []}
    for i in range(300):
        for count, taken in times.items():
            values = {name: float(i) for name in names[:count]}
            start = time.thread_time()
            writer.write(i + count / 100, i, values)
            taken.append(time.thread_time() - start)
    writer.close()
    # Three times as much here; sixty commits would be sixty times.
    assert statistics.median(times[60]) < 20 * statistics.median(times[1])


@pytest.mark.parametrize("begins", [0.5, 11.3, 70.2])
def test_a_series_is_read_point_by_point_from_its_beginning_on(tmp_path, begins):
    writer = MetricsWriter(tmp_path / "metrics.db")
    times = [round(begins + 0.5 * step, 1) for step in range(8)]
    for t in times:
        writer.write(t, int(10 * t), {"critic_loss": t})
    writer.close()
    found = MetricsReader(tmp_path / "metrics.db").series("critic_loss")
    assert found.t.tolist() == times
    assert found.mean.tolist() == times
