"""The metrics store: what goes in comes out, peaks survive, trouble with the disk never reaches training."""

import contextlib
import math
import re
import sqlite3
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from spreeze.errors import RunError
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.metrics.table import METRICS, TABLE
from spreeze.metrics.writer import _SCHEMA, MetricsWriter, _open_for_writing

REPO = Path(__file__).resolve().parents[3]


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
    assert (found.unit, found.meaning) == ("updates", TABLE.by_name("updates").meaning)


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
    with contextlib.closing(sqlite3.connect(path)) as db, db:
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
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        rows = db.execute("SELECT bucket, n, max FROM rollup_10s WHERE series = 1 ORDER BY bucket").fetchall()
    db.close()
    assert rows == [(0, 10, 9.0), (1, 4, 99.0)]
    assert MetricsReader(path).latest()["eval_return"] == (8.5, 8, 5.0)


def test_old_raw_points_go_and_rollups_stay(path):
    writer = _fill(path, 7200 + 61, every_s=5.0)
    writer.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        (oldest_us,) = db.execute("SELECT min(us) FROM samples").fetchone()
        (buckets,) = db.execute("SELECT count(*) FROM rollup_60s").fetchone()
    db.close()
    assert 7260 - 3600 - 600 <= oldest_us / 1e6 <= 7260 - 3600, "removed each ten minutes"
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


def test_a_copy_has_what_the_writer_holds_back(path, tmp_path):
    writer = MetricsWriter(path)
    writer.write(1.0, 10, {"updates": 7.0})
    writer.event(1.5, "info", "test", "written at once")
    assert MetricsReader(path).latest()["updates"].value == 7.0
    MetricsReader(path).copy_to(tmp_path / "copy.db")
    (tmp_path / "alone").mkdir()
    (tmp_path / "copy.db").rename(tmp_path / "alone" / "metrics.db")
    assert MetricsReader(tmp_path / "alone" / "metrics.db").latest()["updates"].value == 7.0
    writer.close()
    path.write_bytes(b"no database" * 500)
    with pytest.raises(RunError, match="cannot be copied"):
        MetricsReader(path).copy_to(tmp_path / "copy.db")


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
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        rows = db.execute("SELECT n, min, max FROM rollup_60s WHERE series = 1").fetchall()
        names = db.execute("SELECT name, id FROM series ORDER BY id").fetchall()
    db.close()
    assert rows == [(26, 0.0, 25.0)]
    assert names == [("updates", 1), ("alpha", 2)]


def test_a_series_recorded_by_its_earlier_name_is_read_and_continued(path):
    _fill(path, 3, name="rollbacks").close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE series SET name = 'times_back'")
    reader = MetricsReader(path)
    assert (reader.names(), reader.latest()["rollbacks"].value) == (["rollbacks"], 2.0)
    again = MetricsWriter(path)
    again.write(3.0, 3, {"rollbacks": 3.0})
    again.close()
    assert reader.series("rollbacks").mean.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [point.value for point in reader.tail(["rollbacks"], 1.0)["rollbacks"]] == [2.0, 3.0]


def test_events_and_evaluations_come_back_without_control_characters(path):
    writer = MetricsWriter(path)
    writer.event(1.0, "warn", "sampler-0", "gone\x1b[31m\nSIGKILL")
    record = EvaluationRow(2.0, 100, 50, 0, 40, 10, -150.5, 3.25, 200.0)
    writer.evaluation(record)
    reader = MetricsReader(path)
    assert reader.events() == [(1.0, "warn", "sampler-0", "gone [31m SIGKILL")]
    assert reader.evaluations() == [record]
    writer.close()


def test_the_best_and_the_last_evaluation_are_found(path):
    assert MetricsReader(path).best_evaluation() is None
    writer = MetricsWriter(path)
    rows = [EvaluationRow(float(t), t, t, 0, t, 10, mean, 1.0, 20.0) for t, mean in ((1, -5.0), (2, 7.0), (3, 6.0))]
    writer.evaluation(*rows)
    reader = MetricsReader(path)
    assert reader.best_evaluation() == rows[1]
    assert reader.last_evaluation() == (3, rows[2])
    cut = EvaluationRow(4.0, 4, 4, 0, 4, 1, 90.0, 0.0, 20.0)
    writer.evaluation(cut)
    assert (reader.best_evaluation(), reader.last_evaluation()) == (rows[1], (4, cut)), "one episode is no best"
    writer.close()


def test_full_disk_is_counted_and_made_good_later(path, monkeypatch):
    full = [True]

    def connect(place):
        connection = _open_for_writing(place)
        if full[0]:
            connection.execute("PRAGMA max_page_count = 12")
        return connection

    monkeypatch.setattr("spreeze.metrics.writer._RETRY_S", 0.0)
    monkeypatch.setattr("spreeze.metrics.writer._open_for_writing", connect)
    writer = MetricsWriter(path)
    for i in range(200):
        writer.write(float(i), i, {"updates": float(i), "alpha": 1.0})
    assert "full" in writer.trouble
    full[0] = False
    writer.write(200.0, 200, {"updates": 200.0})
    assert writer.trouble is None
    writer.close()
    assert MetricsReader(path).series("updates").mean.tolist() == list(range(201))


def test_lasting_trouble_keeps_memory_bounded(path, monkeypatch):
    def connect(place):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("spreeze.metrics.writer._MAX_PENDING", 100)
    monkeypatch.setattr("spreeze.metrics.writer._open_for_writing", connect)
    writer = MetricsWriter(path)
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

    monkeypatch.setattr("spreeze.metrics.writer._MAX_PENDING", 100)
    monkeypatch.setattr("spreeze.metrics.writer._FIRST_EVENTS", 10)
    monkeypatch.setattr("spreeze.metrics.writer._open_for_writing", connect)
    writer = MetricsWriter(path)
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


def test_hostile_file_cannot_hang_the_reader(path, monkeypatch):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS name, x AS id FROM c"
        db.execute(f"CREATE VIEW series AS {endless} ORDER BY -x")
    db.close()
    monkeypatch.setattr("spreeze.metrics.store._QUERY_TIMEOUT_S", 0.2)
    with pytest.raises(RunError):
        MetricsReader(path).names()


def test_text_where_numbers_belong_is_a_run_error(path):
    _fill(path, 3).close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE samples SET data = 'many'")
    db.close()
    for read in (MetricsReader(path).latest, partial(MetricsReader(path).series, "updates")):
        with pytest.raises(RunError):
            read()


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


# --- a sample is a row ---


OLD_SCHEMA = [statement for statement in _SCHEMA if " samples " not in statement]
"""Of versions that stored each raw value as a row of ``points``."""


def old_file(path, seconds):
    """A file of an earlier version."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for statement in OLD_SCHEMA:
            db.execute(statement)
        db.executemany("INSERT INTO series VALUES (?, ?, 'updates', 'x')", [(1, "updates"), (2, "alpha")])
        db.executemany(
            "INSERT INTO points VALUES (?, ?, ?, ?)",
            [(number, float(t), t, float(t * number)) for t in range(seconds) for number in (1, 2)],
        )
    db.close()


def test_a_file_of_an_earlier_version_is_read_and_continued(path):
    old_file(path, 65)
    reader = MetricsReader(path)
    assert reader.series("alpha").mean.tolist() == [2.0 * t for t in range(65)]
    assert reader.latest() == {"updates": (64.0, 64, 64.0), "alpha": (64.0, 64, 128.0)}
    writer = MetricsWriter(path)
    for t in range(65, 130):
        writer.write(float(t), t, {"updates": float(t), "critic_loss": 0.5})
    assert reader.series("updates").mean.tolist() == list(range(130))
    assert reader.tail(["updates", "alpha"], 62.0) == {
        "updates": [(float(t), t, float(t)) for t in range(63, 130)],
        "alpha": [(63.0, 63, 126.0), (64.0, 64, 128.0)],
    }
    writer.close()
    assert reader.latest() == {
        "updates": (129.0, 129, 129.0),
        "alpha": (64.0, 64, 128.0),
        "critic_loss": (129.0, 129, 0.5),
    }
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        rows = db.execute("SELECT bucket, min, max, n FROM rollup_60s WHERE series = 1 ORDER BY bucket").fetchall()
    db.close()
    assert rows == [(0, 0.0, 59.0, 60), (1, 60.0, 119.0, 60), (2, 120.0, 129.0, 10)]


def test_the_recorded_sample_run_is_still_read():
    reader = MetricsReader(REPO / "assets" / "sample_run" / "metrics.db")
    latest = reader.latest()
    assert latest["env_steps"].value > 0
    found = reader.whole_series("env_steps")
    assert (found.t[-1], found.mean[-1]) == (latest["env_steps"].t, latest["env_steps"].value)


def test_the_newest_and_all_values_are_those_written_in_any_order(path, monkeypatch):
    """Late values, values of one time, silent series, a writer that is killed: beside a plain table."""
    monkeypatch.setattr("spreeze.metrics.writer._UPKEEP_S", 50.0)
    rng, names = np.random.default_rng(1), [metric.name for metric in METRICS if not metric.parts][:12]
    writer, told, t = MetricsWriter(path), {}, 0.0
    for trial in range(600):
        t += float(rng.choice([0.0, 0.25, 0.5, 7.0, 31.0]))
        at = max(0.0, t - float(rng.choice([0.0, 0.0, 0.0, 3.0, 90.0])))
        chosen = rng.choice(names[: 3 + trial // 60], size=3, replace=False).tolist()
        values = {name: float(rng.integers(1000)) for name in chosen}
        writer.write(at, trial, values)
        told |= {(name, at): (trial, value) for name, value in values.items()}
        if trial % 97 == 96:
            writer._disconnect()  # as after SIGKILL
            writer = MetricsWriter(path)
        if trial % 20 == 0:
            _compare(path, told, t)
    writer.close()
    _compare(path, told, t)


def _compare(path, told, t):
    reader = MetricsReader(path)
    latest = reader.latest()
    for name in {name for name, _ in told}:
        newest = max(at for known, at in told if known == name)
        assert latest[name] == (newest, *told[name, newest])
        expected = [(at, *told[name, at]) for known, at in sorted(told) if known == name and at > t - 1800.0]
        assert reader.tail([name], t - 1800.0, 10_000)[name] == expected


def written_bytes():
    return int(re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
@pytest.mark.parametrize(("series", "most_gb", "minutes"), [(21, 0.5, 60), (125, 2.0, 15)])
def test_a_day_writes_little_to_the_disk(path, series, most_gb, minutes):
    """Two samples a second and an evaluation each ten seconds, for some minutes: from 8 and 59 GB a day."""
    names = [f"cpu_core_use/{i}" for i in range(series)]
    writer, before = MetricsWriter(path), written_bytes()
    for i in range(120 * minutes):
        t = 0.5 * i
        writer.write(t, i, {name: math.sin(i + place) for place, name in enumerate(names)})
        if i % 20 == 0:
            writer.evaluation(EvaluationRow(t, i, i, 1, i, 10, 1.0, 1.0, 1.0))
            writer.write(t - 3.0, i, {"eval_return": float(i), "eval_length": 1.0})
    assert MetricsReader(path).latest()[names[0]].t == t, "and nothing waits"
    assert 24 * 60 / minutes * (written_bytes() - before) < most_gb * 1e9
    writer.close()


# --- damage and trouble, each told once ---


def overwritten(path):
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def folder(path):
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("kept")


def other_tables(path):
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE series (a, b)")
        db.execute("CREATE TABLE points (c)")
    db.close()


def text_in_numbers(path):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE points SET value = 'many'")
        db.execute("UPDATE samples SET data = 'many'")
    db.close()


def pictures_in_numbers(path):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE samples SET step = x'ff00'")
    db.close()


def noise(path):
    path.write_bytes(np.random.default_rng(0).bytes(5000))


DAMAGES = (overwritten, cut, folder, other_tables, text_in_numbers, pictures_in_numbers, noise)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_kept_and_a_new_one_begun(path, damage):
    for count in (1, 2):
        writer = MetricsWriter(path)
        writer.reports()
        for t in range(100):
            writer.write(float(t), t, {"updates": float(t)})
            writer.write(t - 0.5, t, {"alpha": 1.0})
        writer.close()
        damage(path)
        before = path.read_bytes()[100:] if path.is_file() else None
        writer = MetricsWriter(path)
        writer.write(100.0, 100, {"updates": 100.0})
        ((level, told),) = writer.reports()
        name = "metrics.db.damaged" + ("" if count == 1 else "-2")
        assert level == "warning"
        assert f"it was renamed to {name}" in told
        assert (writer.trouble, writer.rows_dropped, path.with_name(name).exists()) == (None, 0, True)
        assert before is None or path.with_name(name).read_bytes()[100:] == before or damage is other_tables
        writer.close()
        assert MetricsReader(path).latest() == {"updates": (100.0, 100, 100.0)}
    assert len(list(path.parent.glob("metrics.db.damaged*"))) == 2, "no earlier one is overwritten"
    if damage is folder:
        assert (path.with_name("metrics.db.damaged") / "mine").read_text() == "kept"


def test_damage_that_shows_while_a_run_writes_costs_no_later_row(path, monkeypatch):
    monkeypatch.setattr("spreeze.metrics.writer._RETRY_S", 0.0)
    writer = MetricsWriter(path)
    for t in range(300):
        writer.write(float(t), t, {"updates": float(t)})
    writer._disconnect()  # the last connection folds the log in
    assert MetricsWriter(path).trouble is None
    writer._connected()
    overwritten(path)  # of which the open connection learns by a page that it has not read yet
    writer._connection.execute("PRAGMA shrink_memory")
    for t in range(300, 310):
        writer.write(float(t), t, {"updates": float(t)})
    ((_, told),) = writer.reports()
    assert "metrics.db is damaged" in told
    writer.close()
    assert MetricsReader(path).series("updates").mean.tolist()[-10:] == list(range(300, 310))


def test_damaged_files_do_not_pile_up_for_ever(path):
    for count in range(12):
        path.write_bytes(b"no database" * 100)
        writer = MetricsWriter(path)
        writer.write(float(count), 0, {"updates": 1.0})
        assert len(writer.reports()) == 1
        writer.close()
    assert len(list(path.parent.iterdir())) == 10


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("attempt to write a readonly database", "make the file and its directory writable"),
        ("unable to open database file", "make the file and its directory writable"),
        ("database or disk is full", "free some disk space"),
        ("disk I/O error", "check the disk"),
    ],
)
def test_trouble_is_told_once_and_its_end_with_the_rows_lost(path, monkeypatch, error, remedy):
    monkeypatch.setattr("spreeze.metrics.writer._RETRY_S", 0.0)
    monkeypatch.setattr("spreeze.metrics.writer._MAX_PENDING", 50)
    codes = {"full": sqlite3.SQLITE_FULL, "readonly": sqlite3.SQLITE_READONLY, "open": sqlite3.SQLITE_CANTOPEN}
    bad = [True]

    def connect(place):
        if bad[0]:
            raised = sqlite3.OperationalError(error)
            known = (code for word, code in codes.items() if word in error)
            raised.sqlite_errorcode = next(known, sqlite3.SQLITE_IOERR)
            raise raised
        return _open_for_writing(place)

    monkeypatch.setattr("spreeze.metrics.writer._open_for_writing", connect)
    writer = MetricsWriter(path)
    for t in range(200):
        writer.write(float(t), t, {"updates": float(t)})
    ((_, told),) = writer.reports()
    assert (
        told == f"metrics are not stored (metrics.db: {error}): they are kept in memory, the newest 50 values at "
        f"most; {told.rpartition('; ')[2]}"
    )
    assert told.rpartition("; ")[2].startswith(remedy)
    bad[0] = False
    writer.write(200.0, 200, {"updates": 200.0})
    ((_, told),) = writer.reports()
    lost = f"{writer.rows_dropped} rows of them were lost"
    assert re.fullmatch(rf"metrics are stored again after \d+ s; {lost}", told)
    assert 100 < writer.rows_dropped < 200
    writer.close()
    assert MetricsReader(path).series("updates").mean.tolist()[-1] == 200.0
    assert writer.reports() == []


def test_events_that_wait_are_bounded_and_the_first_ones_stay(path, monkeypatch):
    def connect(place):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("spreeze.metrics.writer._MAX_PENDING", 500)
    monkeypatch.setattr("spreeze.metrics.writer._open_for_writing", connect)
    writer = MetricsWriter(path)
    for count in range(5000):
        writer.event(float(count), "warning", "learner", f"event {count}")
    texts = [row[3] for _, row in writer._pending]
    assert len(texts) <= 500
    assert (texts[0], texts[99], texts[-1]) == ("event 0", "event 99", "event 4999")
    writer.close()
    assert writer.rows_dropped == 5000


def test_a_file_that_another_program_holds_for_a_moment_is_no_news(path):
    writer = MetricsWriter(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer.write(1.0, 1, {"updates": 1.0})
        assert writer.trouble is not None
        other.execute("ROLLBACK")
    writer.close()
    assert writer.reports() == []
    assert MetricsReader(path).latest()["updates"].value == 1.0


def test_what_is_not_finite_spoils_no_later_reading(path):
    writer = MetricsWriter(path)
    writer.write(math.nan, 1, {"updates": 1.0})
    writer.evaluation(EvaluationRow(1.0, 1, 1, 1, 1, 10, math.nan, 0.0, 1.0))
    writer.write(1.0, 1, {"updates": 2.0})
    writer.close()
    reader = MetricsReader(path)
    assert (reader.latest()["updates"].value, reader.evaluations()) == (2.0, [])


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
