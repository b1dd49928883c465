"""The bench of TianJi: what it starts, and what it makes of known figures; no test judges a speed."""

import json
import threading

import pytest

from spreeze.bench import tianji
from spreeze.bench.__main__ import build_parser
from spreeze.metrics.store import EvaluationRow, MetricsWriter

_SPLIT = {"policy": 0.2, "env": 0.2, "write": 0.1}


def document(**fields):
    known = {"run_dir": "r", "env_steps_per_s": 500.0, "updates_per_s": 50.0, "time_to_target_s": 4.0,
             "process_s": 9.0, "env_steps": 100, "updates": 3, "eval_return_best": -150.0, "samplers": 2,
             "samples_per_insert": 64.0, "samples_per_insert_band": [64.0, 64.0],
             "time_split": {f"sampler_{name}_share": share for name, share in _SPLIT.items()}}  # fmt: skip
    return {**known, **fields}


def bench(run, **fields):
    fields = {"seeds": 2, **fields}
    return tianji.TianjiBench(env_id="Pendulum-v1", algo="sac", target_return=-200.0, seconds=5.0, step_seconds=5.0,
                              runs_dir="r", say=lambda text: None, run=run, **fields)  # fmt: skip


def value(arguments, flag):
    return arguments[arguments.index(flag) + 1]


def test_the_controllers_time_is_compared_with_the_best_number_of_samplers():
    told = []

    def run(arguments, timeout_s):
        told.append(arguments)
        if "--auto" in arguments:
            return document(time_to_target_s=5.5, samplers=3)
        return document(time_to_target_s={"1": 8.0, "2": 5.0, "4": 7.0}[value(arguments, "--samplers")])

    rows = tianji.curve_rows(bench(run, samplers=(1, 2, 4)))
    assert [row["value"] for row in rows if row["metric"] == "controller_over_best"] == [1.1]
    assert value(told[0], "--seconds") == "1.0", "the machine is measured before, which no time includes"
    assert len(told) == 1 + 2 * 4
    assert all(value(arguments, "--mode") == "tianji" for arguments in told)


def test_sleeping_environments_are_tried_with_up_to_24_samplers():
    def run(arguments, timeout_s):
        samplers = 8 if "--auto" in arguments else int(value(arguments, "--samplers"))
        return document(samplers=samplers, time_to_target_s=abs(samplers - 8) + 2.0)

    rows = tianji.sleeping_rows(bench(run, seeds=1))
    times = {row["case"]: row["value"] for row in rows if row["metric"] == "time_to_target_s"}
    assert times == {"1": 9.0, "2": 8.0, "4": 6.0, "8": 2.0, "16": 10.0, "24": 18.0, "controller": 2.0}


def test_balance_is_judged_by_each_recorded_second_after_the_first_ten(tmp_path):
    now = {0.0: 10.0, 5.0: 200.0, 10.0: 64.0, 11.0: 66.0, 12.0: 80.0, 13.0: 62.0}

    def run(arguments, timeout_s):
        writer = MetricsWriter(tmp_path / "metrics.db")
        for t, ratio in now.items():
            writer.write(t, 0, {"samples_per_insert_now": ratio})
        writer.event(1.0, "info", "supervisor", "governor: 2 -> 1 of 2 samplers active")
        writer.close()
        return document(run_dir=str(tmp_path))

    rows = {row["metric"]: row["value"] for row in tianji.balance_rows(bench(run, seeds=1))}
    assert rows == {"ratio_whole_run": 1.0, "largest_stray": 0.25, "time_within_5_percent": 0.75,
                    "changes_of_samplers": 12.0}  # fmt: skip


def test_the_foreign_load_ends_with_the_measurement():
    before = threading.active_count()
    with tianji.load_that_comes_and_goes(0, 0.01):
        pass
    assert threading.active_count() == before


def test_groups_have_two_samplers_each_and_are_compared_with_one():
    def run(arguments, timeout_s):
        groups = int(value(arguments, "--learners"))
        assert int(value(arguments, "--samplers")) == 2 * groups
        return document(env_steps_per_s=500.0 * groups * (0.7 if groups == 4 else 1.0))

    rows = tianji.groups_rows(bench(run))
    shares = {row["groups"]: row["value"] for row in rows if row["metric"] == "share_of_linear"}
    assert shares == pytest.approx({1: 1.0, 2: 1.0, 4: 0.7})


def test_collection_is_set_beside_equation_1():
    def run(arguments, timeout_s):
        return document(env_steps_per_s={"1": 100.0, "2": 160.0}[value(arguments, "--samplers")])

    rows = [row for row in tianji.collect_rows(bench(run, samplers=(1, 2))) if row["obs_bytes"] == 32]
    found = {(row["metric"], row["samplers"]): row["value"] for row in rows}
    assert found == pytest.approx({
        ("collect_1000_s", 1): 10.0, ("by_equation_1_s", 1): 10.0, ("writing_share", 1): 0.2,
        ("collect_1000_s", 2): 6.25, ("by_equation_1_s", 2): 5.0, ("writing_share", 2): 0.2,
    })  # fmt: skip


def test_env_steps_to_the_return_are_those_of_the_policy_that_has_it(tmp_path):
    def run(arguments, timeout_s):
        path, tianji_run = tmp_path / value(arguments, "--mode"), value(arguments, "--mode") == "tianji"
        path.mkdir(exist_ok=True)
        writer = MetricsWriter(path / "metrics.db")
        for env_steps, mean in ((500, -300.0), (900 if tianji_run else 1000, -150.0), (1500, -120.0)):
            writer.evaluation(EvaluationRow(1.0, env_steps, 10, 1, env_steps, 10, mean, 1.0, 200.0))
        writer.close()
        return document(run_dir=str(path), env_steps=5000)

    rows = tianji.serial_rows(bench(run, seeds=1))
    assert [row["value"] for row in rows if row["metric"] == "env_steps_over_serial"] == [0.9]


def test_simple_spread_is_learned_by_counts_in_mode_serial_and_by_time_in_this_one(monkeypatch):
    told = []

    def run(arguments, timeout_s):
        told.append(arguments)
        return document()

    monkeypatch.setattr(tianji, "scores", lambda found, env_id: [])
    tianji.qmix_rows(bench(run, seeds=1, env_steps=5000))
    tianji.qmix_rows(bench(run, seeds=1))
    assert [value(arguments, "--mode") for arguments in told] == ["serial", "serial", "tianji", "tianji"]
    assert [value(arguments, "--env-steps") for arguments in told[:2]] == ["5000", "5000"]
    assert all("--env-steps" not in arguments for arguments in told[2:])


def test_the_two_step_game_is_played_by_qmix_and_vdn():
    rows = tianji.game_rows(bench(lambda arguments, timeout_s: document(
        eval_return_mean=7.0 if "qmix.mixer=vdn" in arguments else 8.0)))
    assert {(row["case"], row["value"], row["target"]) for row in rows} == {("qmix", 8.0, "8"), ("vdn", 7.0, "7")}


def test_a_picture_marks_the_controllers_choice(tmp_path):
    pytest.importorskip("matplotlib")

    def run(arguments, timeout_s):
        return document(samplers=1 if "--auto" in arguments else int(value(arguments, "--samplers")))

    rows = [{**row, "part": "curve"} for row in tianji.curve_rows(bench(run, samplers=(1, 2)))]
    rows += [{**row, "part": "collect"} for row in tianji.collect_rows(bench(run, samplers=(1, 2)))]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    args = build_parser().parse_args(["tianji", "--parts", "--rows", str(tmp_path / "rows.json"), "--out",
                                      str(tmp_path / "tianji.png")])
    assert [row["value"] for row in tianji.tianji_rows(args, print)] == [str(tmp_path / "tianji.png")]
    assert (tmp_path / "tianji.png").read_bytes().startswith(b"\x89PNG")


def test_algorithms_are_timed_in_this_mode_and_in_their_own():
    rows = tianji.modes_rows(bench(lambda arguments, timeout_s: document(), seeds=3))
    assert {(row["case"], row["value"]) for row in rows if row["metric"] == "time_to_target_s"} == {
        (case, 4.0) for case in ("tianji ppo", "hts ppo", "impact", "tianji dqn", "spreeze dqn")}  # fmt: skip
    assert len(rows[0]["repeats"]) == 3


def test_the_flags_of_every_part_are_read():
    args = build_parser().parse_args(["tianji", "--parts", *tianji.PARTS, "--long", "--samplers", "1", "24"])
    assert (args.parts, args.samplers, args.long) == (list(tianji.PARTS), [1, 24], True)
