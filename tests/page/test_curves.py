"""Curves over runs and the tuner's rows, by hand-worked numbers."""

import json

import numpy as np
import pytest

pytest.importorskip("streamlit")
from spreeze.dashboard import compare, components, run_data
from spreeze.metrics import comparison, html_report, tuning_record
from spreeze.metrics.evidence import iqm
from spreeze.metrics.store import EvaluationRow


def curve(*points):
    return [EvaluationRow(t, int(10 * t), int(t), 1, int(t), 5, value, 1.0, 10.0) for t, value in points]


def test_the_interquartile_mean_drops_the_best_and_the_worst_quarter():
    assert iqm(np.array([0.0, 1.0, 3.0, 100.0])) == 2.0
    assert iqm(np.array([7.0])) == 7.0
    assert iqm(np.array([[1.0, 10.0], [3.0, 30.0]])).tolist() == [2.0, 20.0]


def test_a_curve_is_a_step_unknown_before_its_first_and_after_its_last_point():
    x, values = comparison.on_grid([(np.array([1.0, 4.0]), np.array([5.0, 7.0]))], 5)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    np.testing.assert_array_equal(values, [[np.nan, 5.0, 5.0, 5.0, 7.0]])
    _, values = comparison.on_grid([(np.array([one]), np.array([5.0])) for one in (2.0, 4.0)], 5)
    assert np.isfinite(values).sum() == 2, "runs of one evaluation each"


def test_a_groups_curve_ends_with_the_first_of_its_runs_and_leaves_out_those_that_were_cut_short():
    def run(*at):
        return np.array(at), np.array(at)

    assert comparison.on_grid([run(0.0, 3.0), run(1.0, 4.0)], 5)[1].tolist()[0][1:4] == [0.0, 0.0, 3.0]
    assert np.isnan(comparison.on_grid([run(0.0, 3.0), run(1.0, 4.0)], 5)[1][:, [0, 4]]).all()
    cut_short = comparison.on_grid([run(0.0, 1.0), run(0.0, 4.0)], 5)[1]
    assert np.isfinite(cut_short).tolist() == [[False] * 5, [True] * 5], "the mean would jump where it ends"


def test_a_band_holds_the_centre_and_one_run_has_none():
    values = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, np.nan]])
    band = comparison.band(np.array([0.0, 1.0]), values, robust=False)
    assert band.centre.tolist() == [3.0, 2.0]
    assert 1.0 <= band.low[0] < 3.0 < band.high[0] <= 5.0
    assert np.isnan(band.low[1])
    assert band.runs.tolist() == [3, 1]


def test_bands_of_many_runs_cover_the_true_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        band = comparison.band(np.array([0.0]), rng.normal(size=(20, 1)), robust=False)
        hits += band.low[0] <= 0.0 <= band.high[0]
    assert hits >= 50


def test_a_run_with_one_evaluation_is_a_point_and_one_with_two_a_line():
    one, two = (np.array([3.0]), np.array([5.0])), (np.array([3.0, 4.0]), np.array([5.0, 6.0]))
    shown = compare.figure({"greedy return": {"one": [one], "two": [two]}}, "wall time [s]", robust=False).data
    assert [trace.mode for trace in shown] == ["markers", "lines"]
    assert set(shown[0].y) == {5.0}


def test_a_legend_says_how_many_runs_of_a_group_are_drawn():
    def run(*at):
        return np.array(at), np.array(at)

    groups = {"whole": [run(0.0, 4.0), run(0.0, 3.0)], "cut short": [run(0.0, 1.0), run(0.0, 4.0)]}
    shown = compare.figure({"greedy return": groups}, "wall time [s]", robust=False).data
    assert [trace.name for trace in shown] == ["whole (2 runs)", "cut short (1 of 2 runs)"]
    drawn = html_report._trace("cut short", groups["cut short"], robust=False)
    assert (drawn.x[-1], len(drawn.x) > 2) == (4.0, True), "the report draws the longer one too"


def test_smoothing_averages_three_and_looks_back_only():
    x, y = comparison.returns(curve((1, 3.0), (2, 6.0), (3, 9.0), (4, 0.0)), "env_steps")
    assert (x.tolist(), y.tolist()) == ([10.0, 20.0, 30.0, 40.0], [3.0, 4.5, 6.0, 5.0])


def test_where_the_counters_of_a_resumed_run_go_back_its_later_session_counts():
    steps = [10, 20, 30, 40, 20, 25, 50]
    values = [1.0, 2.0, 99.0, 99.0, 3.0, 4.0, 5.0]
    evaluations = [
        EvaluationRow(float(t), step, 2 * step, 1, t, 5, value, 1.0, 10.0)
        for t, (step, value) in enumerate(zip(steps, values, strict=True))
    ]
    x, y = comparison.returns(evaluations, "updates")
    assert (x.tolist(), y.tolist()) == ([20.0, 40.0, 50.0, 100.0], [1.0, 2.0, 8 / 3, 4.0])
    assert len(comparison.returns(evaluations, "t")[0]) == len(steps)
    x, curves = comparison.on_grid([(np.array(steps, np.float64), np.array(values))], 6)
    assert x.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    np.testing.assert_array_equal(curves[0], [np.nan, 1.0, 3.0, 4.0, 4.0, 5.0])


def entry(**fields):
    setting = {"learner.batch_size": 64, "learner.threads": 1, "learner.device": "cpu"}
    return {"stage": "learner", "setting": setting, "updates_per_s": [90.0, 100.0, 120.0], **fields}


def test_rows_of_a_tuner_at_work_are_read_and_unknown_fields_are_no_trouble(tmp_path):
    lines = [
        entry(new_field=[1]),
        {
            "stage": "joint",
            "setting": {"sampling.samplers": 2},
            "env_steps_per_s": [10.0],
            "updates_per_s": [5.0],
            "score": 1.5,
        },
        entry(updates_per_s=[], failure="out of memory"),
        ["no", "row"],
    ]
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"batch_size": 1'  # the last line is being written
    (tmp_path / tuning_record.PROGRESS).write_text(text)
    found = tuning_record.read(tmp_path)
    first, failed = found.of("learner")
    assert (first.updates_per_s, first.spread, first.frames_per_s) == (100.0, 0.3, 6400.0)
    assert (failed.updates_per_s, failed.frames_per_s, failed.failure) == (None, None, "out of memory")
    assert [(row.setting, row.env_steps_per_s, row.updates_per_s) for row in found.of("joint")] == [
        ({"sampling.samplers": 2}, 10.0, 5.0)]  # fmt: skip
    assert found.choice == {}


def test_the_result_takes_the_place_of_the_progress(tmp_path):
    (tmp_path / tuning_record.PROGRESS).write_text(json.dumps(entry()))
    rates = [entry(setting={"learner.batch_size": 8, "learner.threads": 1})]
    (tmp_path / "tune.json").write_text(json.dumps({"update_rates": rates, "choice": {"a.b": 1}}))
    found = tuning_record.read(tmp_path)
    assert [row.setting["learner.batch_size"] for row in found.of("learner")] == [8]
    assert found.choice == {"a.b": 1}


def test_the_chosen_row_is_the_one_that_has_all_that_was_chosen():
    choice = {"sampling.samplers": 2, "learner.batch_size": 256, "replay.samples_per_insert_min": 64.0, "x.y": 1}

    def measured(samplers, **more):
        return tuning_record.MeasuredRow("joint", {"sampling.samplers": samplers, **more})

    learner = {"learner.batch_size": 256, "learner.threads": 8}
    rows = [measured(2, **learner, **{"replay.samples_per_insert_min": least}) for least in (8.0, 64.0)]
    rows += [measured(1, **learner, **{"replay.samples_per_insert_min": 64.0}), measured(2)]
    assert [row.is_choice(choice) for row in rows] == [False, True, False, True]
    assert not rows[0].is_choice({})


def test_damaged_rows_and_records_are_left_out(tmp_path):
    rates = [3, None, entry(setting={"learner.batch_size": "x"}), {"stage": []}, {"setting": {}}]
    (tmp_path / "tune.json").write_text(json.dumps({"update_rates": rates, "choice": [], "reasons": 1}))
    assert tuning_record.read(tmp_path).of("learner") == []


def test_rows_of_learner_and_joint_stage_hold_medians_spread_and_score(tmp_path):
    from spreeze.tuner.problem import JOINT, LEARNER, Setting, TrialResult

    learner = Setting({"learner.batch_size": 256, "learner.threads": 1})
    joint = Setting({**learner, "sampling.samplers": 2, "sampling.envs_per_sampler": 8,
                     "replay.samples_per_insert_min": 8.0})  # fmt: skip
    rows = [
        TrialResult(trial=LEARNER, setting=learner, updates_per_s=(90.0, 100.0, 115.0), score=50.0),
        TrialResult(
            trial=JOINT, setting=joint, updates_per_s=(80.0, 80.0), env_steps_per_s=(1800.0, 2200.0), score=40.0
        ),
    ]
    (tmp_path / tuning_record.PROGRESS).write_text("".join(json.dumps(row.as_json()) + "\n" for row in rows))
    found = tuning_record.read(tmp_path)
    assert found.of("learner") == [tuning_record.MeasuredRow("learner", dict(learner), 100.0, spread=0.25, score=50.0)]
    assert found.of("joint") == [tuning_record.MeasuredRow("joint", dict(joint), 80.0, 2000.0, spread=0.2, score=40.0)]
    assert [row.spread for row in rows] == [row.spread for row in found.rows], "the tuner's own"


def test_a_table_of_the_tuner_has_the_knobs_names_exact_settings_and_no_column_that_tells_nothing():
    setting = {"learner.device": "cpu", "learner.batch_size": 16384, "learner.threads": 1, "x.envs_per_sampler": 0.5}
    rates = [
        {"stage": "learner", "setting": setting | {"learner.threads": threads}, "updates_per_s": [10.0, 12.0]}
        for threads in (1, 2)
    ]
    found = tuning_record.of_record({"update_rates": rates, "labels": {"learner.batch_size": "batch"}})
    ((title, rows),) = found.stages
    assert title == "The learner alone"
    first, second = found.table(rows)
    assert first == {
        "batch": "16384",
        "threads": "1",
        "envs per sampler": "0.5",
        "updates/s": "11",
        "update frames/s": "180 k",
        "spread": "18 %",
        "note": "",
    }
    assert second == first | {"threads": "2"}
    rates[0]["setting"]["learner.device"] = "cuda:0"
    again = tuning_record.of_record({"update_rates": rates})
    assert [line["device"] for line in again.table(again.rows)] == ["cuda:0", "cpu"]


def test_a_running_tuner_has_the_columns_of_a_finished_one_and_equal_heads_are_told_apart(tmp_path):
    labels = {"learner.batch_size": "batch", "x.samplers": "envs", "y.samplers": "envs", "z.busy": "cpu"}
    setting = {"learner.threads": 1, "learner.batch_size": 8, "x.samplers": 2, "y.samplers": 3, "z.busy": 4}
    measured = entry(setting=setting)
    lines = [json.dumps({"labels": labels}), json.dumps(measured), '{"stage": "lea']
    (tmp_path / tuning_record.PROGRESS).write_text("\n".join(lines))
    running, finished = (
        tuning_record.read(tmp_path),
        tuning_record.of_record({"update_rates": [measured], "labels": labels}),
    )
    (line,) = running.table(running.rows)
    assert line == finished.table(finished.rows)[0]
    assert {name: line[name] for name in ("batch", "x.samplers", "y.samplers", "z.busy")} == {
        "batch": "8",
        "x.samplers": "2",
        "y.samplers": "3",
        "z.busy": "4",
    }
    assert running.record == {}


def test_text_of_a_file_is_no_markdown():
    assert components.plain("![x](http://evil/y) a|b $x$ <b>") == r"\!\[x\](http\://evil/y) a\|b \$x\$ \<b\>"
    assert components.plain(None) == "-"
    table = components.table(("a", "b"), [(1, None), ("x|y", "z\nw")])
    assert table.splitlines()[:3] == ["| a | b |", "| --- | --- |", "| 1 | - |"]
    assert len(table.splitlines()) == 4
    assert components.bullets(["a", "b*"]) == "- a\n- b\\*"


def test_odd_facts_of_a_clip_are_left_out(tmp_path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "clip-0001-v1.mp4").touch()
    facts = {"version": 3, "wall_s": "x", "env_steps": None, "episode_returns": [1.0, "y", None]}
    (tmp_path / "videos" / "clip-0001-v1.json").write_text(json.dumps(facts))
    (clip,) = run_data.clips(tmp_path)
    assert (clip.values, clip.episode_returns) == ({"version": 3.0}, [1.0])


def test_rows_of_the_on_policy_tuner_are_read_at_work_and_when_it_is_done(tmp_path):
    from spreeze.tuner.problem import ROLLOUT, Setting, TrialResult

    setting = Setting({"rollout.samplers": 2, "rollout.envs_per_sampler": 8, "rollout.inference_workers": 0,
                       "rollout.sync_interval": 64, "impact.minibatches": 4})  # fmt: skip
    rates = [
        TrialResult(trial=ROLLOUT, setting=setting, env_steps_per_s=(90.0, 100.0, 120.0), cpu_share=(0.5,)),
        TrialResult(trial=ROLLOUT, setting=setting, failure="out of memory"),
    ]
    (tmp_path / tuning_record.PROGRESS).write_text("".join(json.dumps(rate.as_json()) + "\n" for rate in rates))
    first, failed = tuning_record.read(tmp_path).of("rollout")
    assert list(first.setting.values()) == [2, 8, 0, 64, 4]
    assert (first.env_steps_per_s, first.cpu_share, first.failure) == (100.0, 0.5, None)
    assert (failed.env_steps_per_s, failed.failure) == (None, "out of memory")
    choice = {
        "rollout.samplers": 2,
        "rollout.envs_per_sampler": 8,
        "rollout.inference_workers": 0,
        "rollout.sync_interval": 64,
    }
    (tmp_path / "tune.json").write_text(
        json.dumps(
            {"rollout_rates": [rate.as_json() for rate in rates], "choice": choice, "reasons": {}, "update_rates": []}
        )
    )
    found = tuning_record.read(tmp_path)
    assert found.of("rollout")[0].is_choice(found.choice)
    assert not found.of("rollout")[0].is_choice({**choice, "rollout.inference_workers": 1})
