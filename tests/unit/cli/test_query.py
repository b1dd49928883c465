"""SQL over a run: what it answers, and that it can neither write nor reach anything else."""

import json

import pytest

from spreeze.cli import runs
from spreeze.cli.runs import query, run_query
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"env_id": "CartPole-v1", "algo": "ppo", "state": "finished"}))
    (path / "config.toml").write_text("[ppo]\nlr = 0.001\nhidden_sizes = [64, 64]\n")
    writer = MetricsWriter(path / "metrics.db")
    for second in range(4):
        writer.write(float(second), 10 * second, {"updates_per_s": 100.0 * second})
    writer.evaluation(EvaluationRow(2.0, 20, 5, 1, 5, 3, -7.25, 0.5, 200.0))
    writer.event(1.0, "warning", "supervisor", "slow \x1b[2J disk")
    writer.close()
    return path


def asked(run, sql, capsys, *flags):
    code = query([run.name, sql, "--runs-dir", str(run.parent), *flags])
    return code, capsys.readouterr()


@pytest.mark.parametrize(("sql", "rows"), [
    ("SELECT metric, sum(mean), max(env_steps) FROM metrics GROUP BY metric", [["updates_per_s", 600.0, 30]]),
    ("SELECT return_mean, env_steps FROM evaluations", [[-7.25, 20]]),
    ("SELECT level, source FROM events", [["warning", "supervisor"]]),
    ("SELECT * FROM settings ORDER BY name", [["ppo.hidden_sizes", "[64, 64]"], ["ppo.lr", 0.001]]),
    ("SELECT value FROM run WHERE name = 'algo'", [["ppo"]]),
    ("SELECT 1 WHERE 0", []),
])  # fmt: skip
def test_every_table_is_answered_from(run, capsys, sql, rows):
    code, told = asked(run, sql, capsys, "--json")
    assert code == 0
    assert json.loads(told.out)["rows"] == rows


def test_a_person_sees_columns_without_control_characters(run, capsys):
    code, told = asked(run, "SELECT level, text, NULL AS missing FROM events", capsys)
    assert code == 0
    assert told.out.splitlines()[0].split() == ["level", "text", "missing"]
    assert told.out.splitlines()[1].startswith("warning  slow")
    assert told.out.splitlines()[1].endswith("disk  -")
    assert "\x1b" not in told.out


@pytest.mark.parametrize(("sql", "why"), [
    ("DELETE FROM metrics", "not authorized"), ("DROP TABLE run", "not authorized"), ("SELEC 1", "syntax error"),
    ("ATTACH DATABASE 'x.db' AS x", "not authorized"), ("PRAGMA writable_schema = 1", "not authorized"),
    ("SELECT load_extension('x')", "not authorized"), ("SELECT * FROM nowhere", "no such table"),
    ("SELECT 1; SELECT 2", "one statement at a time"), ("", "a SELECT statement is needed"),
])  # fmt: skip
def test_what_is_no_question_is_refused_in_one_line_and_changes_nothing(run, capsys, sql, why):
    before = run_query(run, "SELECT * FROM metrics")
    code, told = asked(run, sql, capsys)
    assert code == 2
    assert why in told.err
    assert len(told.err.splitlines()) == 1
    assert run_query(run, "SELECT * FROM metrics") == before


def test_a_question_without_an_end_is_ended(run, capsys, monkeypatch):
    monkeypatch.setattr(runs, "_LONGEST_S", 0.0)
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"
    code, told = asked(run, endless, capsys)
    assert code == 2
    assert "interrupted" in told.err
    monkeypatch.setattr(runs, "_LONGEST_S", 60.0)
    monkeypatch.setattr(runs, "_MAX_ROWS", 2)
    assert "more than 2 rows; add LIMIT" in asked(run, "SELECT * FROM metrics", capsys)[1].err
