"""What a run's outcome says of its last evaluation and of its environments' errors."""

import json
import sqlite3
from types import SimpleNamespace

import pytest

from spreeze.cli import train
from spreeze.metrics import writer
from spreeze.metrics.snapshot import Snapshot
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import group_folder
from spreeze.runtime import recorder
from spreeze.runtime.plan import EarlierSessions
from spreeze.workers.evaluator import append_row

RECORD = {
    "wall_s": 1.0, "env_steps": 100, "updates": 5, "epoch": 1, "version": 5, "episodes": 10, "return_mean": 7.0,
    "return_std": 1.0, "length_mean": 20.0, "episodes_cut": 0, "episodes_lost": 0, "whole": True,
}  # fmt: skip
REACHED = {"reached": True, "episodes": 20, "return_mean": 7.0}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A recorder of a run of ten evaluation episodes and a target of 5, and its notes."""
    quiet = {name: lambda *args: None for name in ("event", "write", "evaluation", "close")}
    monkeypatch.setattr(recorder, "MetricsWriter", lambda path: SimpleNamespace(**quiet, reports=list, rows_dropped=0))
    stop = SimpleNamespace(
        target_return=5.0, target_evaluations=3, seconds=None, at_return=True, updates=None, env_steps=None
    )
    config = SimpleNamespace(
        evaluation=SimpleNamespace(episodes=10),
        stop=stop,
        logging=SimpleNamespace(sinks=()),
        callback=SimpleNamespace(classes=()),
        env=SimpleNamespace(import_module=None),
        data_flow=SimpleNamespace(balanced=False),
        on_policy=None,
    )
    earlier = EarlierSessions()
    plan = SimpleNamespace(
        config=config,
        batch_size=1,
        learners=1,
        policies=1,
        earlier=earlier,
        ending=None,
        target_return=5.0,
        working_samplers=1,
    )
    notes = []
    found = recorder.Recorder(
        plan, SimpleNamespace(path=tmp_path, requested=lambda name: False), SimpleNamespace(note=notes.append)
    )
    found.notes = notes
    yield found
    found.close()


def test_views_get_the_mean_load_of_other_programs_over_the_last_twenty_seconds(made, monkeypatch):
    seen = []
    monkeypatch.setattr(
        recorder,
        "snapshot_of",
        lambda run, config, values, *flow, **more: seen.append(values) or Snapshot(env_id="", algo=""),
    )
    made._plan.config.sections, made._plan.config.run = dict, SimpleNamespace(algo="sac")
    monkeypatch.setattr(recorder, "_progress", lambda *facts: (None, None))
    made._plan.spec, made.rates = SimpleNamespace(env_id="Any-v0"), SimpleNamespace(read=lambda reading: {})
    made._metrics = {"external_cpu_cores": 9.0}
    for t_s, cores in ((0.0, 5.0), (21.0, 1.0), (30.0, None), (41.0, 0.5)):
        made._other_loads.append((t_s, {"external_cpu_cores": cores, "sibling_cpu_cores": None}))
    made.snapshot("training")
    assert seen[0]["external_cpu_cores"] == 0.75
    made.snapshot("finished", {"external_cpu_cores": 2.0})
    assert seen[1]["external_cpu_cores"] == 2.0, "of the whole run"


def test_a_paused_run_has_the_same_wall_time_and_time_left_for_page_and_terminal(made, monkeypatch):
    written, shown, asked = [], [], iter((True, False))
    made._run_dir = SimpleNamespace(
        requested=lambda name: next(asked),
        withdraw=lambda name: None,
        write_state=lambda **state: written.append(state),
    )
    facts = {"wall_s": 272.0, "progress": 0.9, "eta_s": 30.0}
    monkeypatch.setattr(made, "snapshot", lambda state: Snapshot(env_id="", algo="", state=state, **facts))
    made._view.update = shown.append
    made.wait_while_paused(lambda: True)
    assert written == [{"state": "paused", **facts}]
    assert [{name: getattr(one, name) for name in facts} for one in shown] == [facts]


def counts(outcome):
    return outcome.eval_episodes, outcome.eval_episodes_cut, outcome.eval_episodes_lost


def test_an_evaluation_that_was_cut_says_of_how_many_episodes_it_is_and_is_no_best(made):
    made.evaluation(RECORD | {"episodes": 4, "episodes_cut": 6, "whole": False}, final=True)
    assert (made.outcome.eval_return_mean, made.outcome.eval_return_best) == (7.0, None)
    assert counts(made.outcome) == (4, 6, 0)
    assert made.notes == ["final evaluation: 4 of 10 episodes, the others would take too long"]  # fmt: skip


def test_that_nobody_evaluates_while_a_return_is_waited_for_is_told_and_not_each_time(made, monkeypatch):
    told = []
    monkeypatch.setattr(made, "event", lambda level, text, source="supervisor": told.append(text))
    made.note_evaluator(True)
    assert told == []
    for _ in range(12):
        made.note_evaluator(False)
        made.note_evaluator(False)
        made.note_evaluator(True)
    assert told == ["without an evaluator, the target return of 5 cannot stop the run"] * 2, (
        "at the first and the tenth time"
    )
    made._plan.config.stop.at_return = False
    made.note_evaluator(False)
    assert len(told) == 2


def test_lost_episodes_are_counted_and_a_score_of_few_is_no_best(made):
    made.evaluation(RECORD | {"episodes": 3, "episodes_lost": 7, "whole": False})
    assert counts(made.outcome) == (3, 0, 7)
    assert made.outcome.eval_return_best is None
    made.evaluation(RECORD | {"episodes": 8, "episodes_lost": 2})
    assert counts(made.outcome) == (8, 0, 2)
    assert made.outcome.eval_return_best == 7.0


def test_a_target_is_reached_when_the_evaluator_says_so_and_it_is_told_by_how_many_episodes(made):
    made._plan.config.stop.target_evaluations = 1
    made.evaluation(RECORD | {"target": None})
    assert made.outcome.time_to_target_s is None
    made.evaluation(RECORD | {"target": {"reached": False, "episodes": 20, "return_mean": 3.25}})
    assert (made.outcome.time_to_target_s, made.stop_reason()) == (None, None)
    made.evaluation(RECORD | {"target": {"reached": True, "episodes": 40, "return_mean": 5.5}})
    assert made.outcome.time_to_target_s is not None
    assert made.stop_reason() == "target_return"
    assert made.notes == [
        "target return 5 not confirmed: 3.25, the mean of 20 episodes on fresh seeds",
        "target return 5 reached: 5.5, the mean of 40 episodes",
    ]


def test_means_of_few_episodes_end_a_run_only_once_the_target_is_confirmed(made):
    for version in range(1, 5):
        made.evaluation(RECORD | {"episodes": 2, "version": version})
        assert made.stop_reason() is None
    made.evaluation(RECORD | {"episodes": 2, "version": 5, "target": REACHED})
    assert made.stop_reason() == "target_return"


def test_a_target_met_once_by_luck_is_told_apart_from_one_that_is_held(made):
    returns = [1.0, 8.0, 1.0, 3.0, 6.0, 6.0, 9.0]
    ended, held = [], []
    for version, value in enumerate(returns, start=1):
        target = {"target": REACHED} if value == 8.0 else {}
        made.evaluation(RECORD | {"return_mean": value, "version": version} | target)
        ended.append(made.stop_reason())
        held.append(made.outcome.time_to_target_held_s is not None)
    assert made.outcome.time_to_target_s is not None
    assert ended == [None] * 5 + ["target_return"] * 2, "the first mean of three evaluations of at least 5"
    assert held == [False] * 6 + [True], "(1 + 3 + 6 + 6 + 9) / 5"
    assert made.outcome.eval_return_final == pytest.approx(sum(returns) / 7)
    assert (
        made.outcome.eval_return_final_evaluations,
        made.outcome.eval_return_worst_of_20,
        made.outcome.eval_return_best,
    ) == (7, 1.0, 9.0)
    for version in range(8, 32):
        made.evaluation(RECORD | {"version": version})
    assert (
        made.outcome.eval_return_final,
        made.outcome.eval_return_final_evaluations,
        made.outcome.eval_return_worst_of_20,
    ) == (7.0, 10, 7.0)


def test_a_target_that_ends_nothing_is_told_all_the_same(made):
    made._plan.config.stop.target_evaluations = 0
    for version in range(1, 6):
        made.evaluation(RECORD | {"return_mean": 6.0, "version": version, "target": REACHED})
        assert made.stop_reason() is None
    assert made.outcome.time_to_target_s is not None
    assert made.outcome.time_to_target_held_s is not None


@pytest.mark.parametrize(("outcome", "failed"), [
    ({"stopped_by": "seconds"}, False), ({"stopped_by": "seconds", "error": "the learner failed"}, True), ({}, True),
])  # fmt: skip
def test_sinks_are_told_of_a_failure_also_where_an_exception_ended_the_run(made, monkeypatch, outcome, failed):
    told = []
    monkeypatch.setattr(made._loggers, "close", lambda **options: told.append(options["failed"]))
    for name, value in outcome.items():
        setattr(made.outcome, name, value)
    made.close()
    assert told == [failed]


def test_without_a_whole_round_the_score_of_before_stays_and_it_is_said(made):
    made.evaluation(RECORD)
    made.no_final_evaluation(6.0)
    assert (made.outcome.eval_return_mean, counts(made.outcome)) == (7.0, (10, 0, 0))
    assert made.notes[-1].startswith("no complete evaluation within 6 s; using the last evaluation")


def test_a_run_that_was_never_evaluated_says_so(made):
    made.no_final_evaluation(45.0)
    assert made.notes[-1] == "no complete evaluation within 45 s; the run ends without an evaluation"


@pytest.mark.parametrize(("cut", "lost", "words"), [
    (0, 0, "greedy return 7.0 (best evaluation 8.0)"),
    (6, 0, "greedy return 7.0 (best evaluation 8.0; of 4 episodes, 6 cut short)"),
    (4, 2, "greedy return 7.0 (best evaluation 8.0; of 4 episodes, 4 cut short, 2 lost to environment errors)"),
])  # fmt: skip
def test_the_closing_words_of_a_run_say_what_its_score_lacks(cut, lost, words):
    document = {
        "env": "Own-v0",
        "algo": "sac",
        "stopped_by": "seconds",
        "env_steps": 1,
        "updates": 1,
        "run_dir": "runs/x",
        "eval_return_mean": 7.0,
        "eval_return_best": 8.0,
        "eval_episodes": 4,
        "eval_episodes_cut": cut,
        "eval_episodes_lost": lost,
    }
    assert f"{words}\n" in train._final_report(document, None)
    final = {"eval_return_final": 512.34, "eval_return_final_evaluations": 10}
    assert f"{words}, 512.3 over the last 10 evaluations\n" in train._final_report(document | final, None)
    one = train._final_report(document | final | {"eval_return_final_evaluations": 1}, None)
    assert "over the last" not in one, "one evaluation is the last"
    assert train._final_report(document, "my_robot").count("runs/x --import my_robot") == 3
    known = train._final_report(document | {"env": "Pendulum-v1", "stopped_by": "plateau"}, None)
    assert ", because returns no longer rose: " in known
    assert "RL Baselines3 Zoo, TD3 on Pendulum-v1 after 20k env steps: -151.9" in known
    assert "before its first update" not in known
    assert "it ended before its first update: give it more time" in train._final_report(document | {"updates": 0}, None)


def test_the_closing_words_name_the_policy_that_the_next_commands_use(tmp_path):
    document = {"env": "Own-v0", "stopped_by": "seconds", "env_steps": 1, "updates": 1, "run_dir": str(tmp_path)}
    assert "best policy" not in train._final_report(document, None)
    (tmp_path / "checkpoints").mkdir()
    best = {"updates": 2661, "return": 34.2, "played": 40}
    (tmp_path / "checkpoints" / "best.json").write_text(json.dumps(best))
    words = "these commands use the best policy: of update 2,661, return 34.2 over 40 episodes\n"
    assert words in train._final_report(document, None)


def session(path, notes, *, sessions, policies=1):
    """A recorder with a store of its own."""
    config = SimpleNamespace(
        evaluation=SimpleNamespace(episodes=10),
        logging=SimpleNamespace(sinks=()),
        callback=SimpleNamespace(classes=()),
        env=SimpleNamespace(import_module=None),
        stop=SimpleNamespace(target_return=None, target_evaluations=1, seconds=None),
        data_flow=SimpleNamespace(balanced=False),
    )
    plan = SimpleNamespace(
        config=config,
        batch_size=1,
        learners=policies,
        policies=policies,
        earlier=EarlierSessions(sessions=sessions),
        ending=None,
        target_return=None,
        working_samplers=1,
    )
    return recorder.Recorder(
        plan, SimpleNamespace(path=path, requested=lambda name: False), SimpleNamespace(note=notes.append)
    )


def test_a_damaged_file_of_metrics_is_told_and_its_evaluations_come_from_the_csv(tmp_path):
    first, notes = session(tmp_path, [], sessions=0), []
    for version, value in enumerate((3.0, 9.0, 5.0), 1):
        record = RECORD | {"version": version, "return_mean": value, "wall_s": float(version)}
        append_row(tmp_path / "eval.csv", record)
        first.evaluation(record)
    first.close()
    (tmp_path / "metrics.db").write_bytes(b"no database" * 500)
    second = session(tmp_path, notes, sessions=1)
    assert [note.partition(":")[0] for note in notes] == ["warning", "metrics"]
    assert "metrics.db is damaged (file is not a database): it was renamed to metrics.db.damaged" in notes[0]
    assert notes[1] == "metrics: 3 evaluations of earlier sessions were read from eval.csv"
    assert (second.outcome.eval_return_best, second.outcome.eval_return_final_evaluations) == (9.0, 3)
    second.close()
    reader = MetricsReader(tmp_path / "metrics.db")
    assert [row.return_mean for row in reader.evaluations()] == [3.0, 9.0, 5.0]
    assert "is damaged" in reader.events()[0].text
    assert "is damaged" in second.outcome.metrics_trouble
    assert second.outcome.metrics_rows_lost == 0


def test_the_csv_of_several_learners_gives_the_curve_of_the_best(tmp_path):
    for group, values in ((0, (1.0, 4.0, 2.0)), (1, (3.0, 3.5, 9.0))):
        folder = group_folder(tmp_path, group)
        folder.mkdir(parents=True, exist_ok=True)
        for version, value in enumerate(values, 1):
            append_row(
                folder / "eval.csv",
                RECORD | {"version": version, "return_mean": value, "wall_s": 10.0 * version + group},
            )
    made = session(tmp_path, [], sessions=1, policies=2)
    made.close()
    assert [row.return_mean for row in MetricsReader(tmp_path / "metrics.db").evaluations()] == [1.0, 3.0, 4.0, 9.0]


def test_metrics_that_cannot_be_stored_are_told_at_once_and_at_the_end(tmp_path, monkeypatch):
    def connect(path):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(writer, "_open_for_writing", connect)
    notes = []
    made = session(tmp_path, notes, sessions=0)
    made.evaluation(RECORD)
    made.close()
    assert notes[0].startswith("warning: metrics are not stored (metrics.db: disk I/O error): they are kept in memory")
    lost = made.outcome.metrics_rows_lost
    assert lost >= 3, "the warning itself, the evaluation, its values"
    assert notes[1].startswith(f"warning: {lost} rows of metrics were lost in this session: metrics are not stored")
    assert len(notes) == 2


def test_missing_figures_of_a_gpu_are_told_when_they_begin_and_end(made):
    for trouble in (None, "GPU 0 does not respond (lost?)", "the driver has not answered for 4 s", None, "x", None):
        made._utilisation = SimpleNamespace(trouble=trouble, close=lambda: None)
        made._report_trouble()
    assert made.notes == [
        "warning: GPU metrics are missing: GPU 0 does not respond (lost?)",
        "GPU metrics are available again",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_return_that_is_no_number_becomes_no_best(made, value):
    made.evaluation(RECORD | {"return_mean": value})
    made.evaluation(RECORD | {"return_mean": 1.0, "version": 6})
    assert made.outcome.eval_return_best == 1.0


def test_numbers_that_come_with_an_evaluation_are_stored_at_the_time_of_its_weights(tmp_path):
    made = session(tmp_path, [], sessions=0)
    numbers = {"eval_terminated": 0.25, "eval_start_value": float("nan"), "of_a_newer_version": 1.0, "updates": 9.0}
    made.evaluation(RECORD | {"metrics": numbers})
    made.close()
    latest = MetricsReader(tmp_path / "metrics.db").latest()
    assert (latest["eval_terminated"].t, latest["eval_terminated"].value) == (1.0, 0.25)
    assert not {"eval_start_value", "of_a_newer_version", "updates"} & latest.keys()


def test_the_bottleneck_of_a_finished_run_is_that_of_its_whole_time(made, monkeypatch):
    seen = []

    def snapshot(state, changes=None):
        seen.append((state, changes))
        return SimpleNamespace(bottleneck="of the whole run")

    monkeypatch.setattr(made, "snapshot", snapshot)
    monkeypatch.setattr(made.rates, "steady", lambda: {"learner_wait_share": 0.25, "updates_per_s": None})
    made.outcome.bottleneck = "of the last second"
    made._loads["cpu_use"] = 3.0, 4
    made.finish()
    assert made.outcome.bottleneck == "of the whole run"
    assert seen == [("finished", {"learner_wait_share": 0.25, "cpu_use": 0.75})]
