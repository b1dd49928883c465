"""The protocol of HTS-RL: its three metrics, bootstrap intervals, groups and pairs, by hand-worked numbers."""

import dataclasses
import json

import numpy as np
import pytest

from spreeze.cli import evaluate
from spreeze.config.layers import Layer, resolve, to_toml
from spreeze.metrics.comparison import (
    Curve,
    Rules,
    RunGroup,
    curve_of,
    differing,
    group_cells,
    read_curve,
    report,
    split_by_settings,
    spread,
    spread_text,
    text,
    verdicts,
)
from spreeze.metrics.return_curve import final_metric, required_time, running_mean, whole, worst_of_last
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter

HTS, SERIAL = RunGroup("T-v0", "ppo", "hts"), RunGroup("T-v0", "ppo", "serial")


def evaluations(*points, episodes=10):
    """(wall time, mean return) -> evaluations of ten episodes each."""
    return [EvaluationRow(t, int(10 * t), int(t), 1, int(t), episodes, value, 1.0, 20.0) for t, value in points]


def curve(group, seed, *points, end_s=None, **settings):
    found = evaluations(*points)
    return Curve(
        name=f"{group.mode}-{seed}",
        group=group,
        seed=seed,
        end_s=end_s or points[-1][0],
        evaluations=found,
        settings=settings,
    )


def test_the_running_mean_looks_back_only_and_starts_with_what_there_is():
    assert running_mean(evaluations((1, 3.0), (2, 6.0), (3, 9.0), (4, 0.0)), 3) == [3.0, 4.5, 6.0, 5.0]


def test_the_mean_is_over_episodes_so_a_short_evaluation_counts_less():
    run = [*evaluations((1, 10.0), episodes=10), *evaluations((2, 40.0), episodes=5)]
    assert final_metric(run) == (10 * 10.0 + 5 * 40.0) / 15


def test_an_evaluation_that_time_cut_short_is_no_worst_one():
    run = [*evaluations((1, 10.0), (2, 20.0)), *evaluations((3, 1.0), episodes=4)]
    assert worst_of_last(run) == 10.0
    assert worst_of_last(evaluations(*((t, float(t)) for t in range(25)))) == 5.0, "of the latest twenty"
    assert [record.episodes for record in whole(run)] == [10, 10]
    assert worst_of_last([]) is None


def test_the_final_metric_is_of_the_last_ten_policies():
    run = evaluations(*((t, float(t)) for t in range(1, 13)))
    assert final_metric(run) == sum(range(3, 13)) / 10
    assert final_metric(run, policies=2) == 11.5


def test_the_final_time_metric_knows_only_the_policies_of_that_time():
    run = evaluations((1, 0.0), (2, 3.0), (3, 6.0), (4, 9.0))
    assert final_metric(run, 3, limit_s=3.5) == 3.0
    assert final_metric(run, 3, limit_s=0.5) is None


def test_the_required_time_waits_for_a_full_window():
    run = evaluations((1, 9.0), (2, 3.0), (3, 6.0), (4, 9.0))
    assert required_time(run, 6.0, policies=3) == 3.0
    assert required_time(run, 9.0, policies=1) == 1.0
    assert required_time(run, 6.1, policies=3) is None
    assert required_time(run, 0.0, policies=5) is None


# --- over seeds ---


def test_fewer_than_three_seeds_have_no_interval_and_none_has_no_mean():
    assert spread([4.0], Rules()).low is None
    assert spread([], Rules()) is None
    two = spread([0.0, 1.0], Rules())
    assert (two.centre, two.low, two.high, two.seeds) == (0.5, None, None, 2)
    three = spread([0.0, 1.0, 2.0], Rules())
    assert (three.centre, three.low, three.high, three.seeds) == (1.0, 0.0, 2.0, 3)


def test_the_centre_over_seeds_is_their_interquartile_mean_where_that_is_asked_for():
    values = [0.0, 2.0, 4.0, 100.0]
    assert spread(values, Rules()).centre == 26.5
    robust = spread(values, Rules(robust=True))
    assert (robust.centre, robust.seeds) == (3.0, 4)
    assert robust.low < 3.0 < robust.high <= 100.0
    curves = [curve(HTS, seed, (1, value)) for seed, value in enumerate(values)]
    found = report(curves, Rules(policies=1, robust=True))
    assert found.groups[0].final.centre == 3.0
    assert text(found).startswith("interquartile means over seeds")


def test_the_time_limit_of_a_task_is_the_end_of_its_fastest_run():
    other = RunGroup("U-v0", "ppo", "hts")
    found = report(
        [
            curve(HTS, 1, (1, 1.0), (5, 5.0), end_s=6.0),
            curve(SERIAL, 1, (2, 2.0), (4, 4.0), end_s=4.5),
            curve(other, 1, (1, 7.0), end_s=1.5),
        ],
        Rules(policies=1),
    )
    assert [run.limit_s for run in found.runs] == [4.5, 4.5, 1.5]
    assert [run.final_time for run in found.runs] == [1.0, 4.0, 7.0]
    assert [run.final for run in found.runs] == [5.0, 4.0, 7.0]


def test_the_final_return_of_a_group_leaves_out_runs_that_have_not_come_half_as_far():
    """A run that has just begun would pull it down; one that ended at its target return counts."""
    curves = [curve(HTS, 0, (100, 8.0)), curve(HTS, 1, (49, 1.0)), curve(HTS, 2, (50, 6.0))]
    compared = report(curves, Rules())
    assert (compared.groups[0].final.centre, compared.groups[0].runs) == (7.0, 3)
    assert group_cells(compared)[0]["final return"] == "7 (2 of 3)"
    curves[1] = dataclasses.replace(curves[1], ended_at=1.0)
    assert group_cells(report(curves[:2], Rules()))[0]["final return"] == "4.50"


def test_a_target_that_one_seed_missed_has_no_mean_time():
    curves = [curve(HTS, 1, (1, 0.0), (2, 9.0)), curve(HTS, 2, (1, 9.0), (3, 9.0)), curve(HTS, 3, (1, 0.0), (2, 5.0))]
    group = report(curves, Rules(policies=1, targets=(5.0, 9.0))).groups[0]
    assert group.required_s[0].centre == pytest.approx((2 + 1 + 2) / 3)
    assert group.required_s[1] is None
    assert group.reached == (3, 2)


def test_the_verdict_says_who_was_first_and_how_long_the_others_took():
    curves = [
        *(curve(HTS, seed, (1, 0.0), (4, 9.0)) for seed in (1, 2, 3)),
        *(curve(SERIAL, seed, (1, 0.0), (200, 9.0)) for seed in (1, 2, 3)),
    ]
    slower = RunGroup(HTS.env, "dqn", "spreeze")
    assert verdicts(report(curves, Rules(policies=1, targets=(9.0,))))[1:] == [
        f"{HTS.env}: {HTS.label} was first at 9, after 4 s; {SERIAL.label} took 3:20, 50.0 times as long"
    ]
    curves += [curve(slower, 1, (1, 0.0), (2, 9.0)), curve(slower, 2, (1, 0.0), (2, 5.0))]
    assert verdicts(report(curves, Rules(policies=1, targets=(9.0, 10.0))))[1:] == [
        f"{HTS.env}: {HTS.label} was first at 9, after 4 s; {SERIAL.label} took 3:20, 50.0 times as long; dqn spreeze "
        "did with 1 of 2 runs. With fewer than 3 seeds each this may be chance",
        f"{HTS.env}: no group reached 10 in every run",
    ]
    assert verdicts(report(curves[:2], Rules(policies=1, targets=(9.0,)))) == []


def test_a_run_that_had_ended_by_then_did_not_miss_a_target():
    curves = [curve(HTS, 1, (1, 0.0), (120, 9.0)), curve(SERIAL, 1, (1, 0.0), (100, 8.0))]
    found = verdicts(report(curves, Rules(policies=1, targets=(9.0,))))[-1]
    assert f"; {SERIAL.label} ended before that, after 1:40" in found


def test_runs_in_many_settings_leave_room_for_the_verdict():
    many = RunGroup(HTS.env, HTS.algo, HTS.mode, ", ".join(f"ppo.setting_{number}=1" for number in range(100)))
    curves = [curve(group, seed, (1, 0.0), (4, 9.0)) for group in (HTS, many) for seed in (1, 2, 3)]
    assert all(len(sentence) < 600 for sentence in verdicts(report(curves, Rules(policies=1, targets=(9.0,)))))


def test_what_the_tuner_chose_and_no_user_set_makes_no_groups():
    key = "rollout.samplers"
    runs = [
        dataclasses.replace(curve(HTS, seed, (1, 0.0)), settings={key: str(seed)}, sources={key: source})
        for seed, source in ((1, "tuner"), (2, "default"), (3, "user"))
    ]
    assert [found.group.variant for found in split_by_settings(runs[:2])] == ["", ""]
    assert [found.group.variant for found in split_by_settings(runs)] == [f"{key}={seed}" for seed in (1, 2, 3)]
    assert [found.group.variant for found in split_by_settings(runs[:2], also=[key])] == [f"{key}=1", f"{key}=2"]


def test_of_many_settings_a_group_is_named_by_those_that_tell_it_from_the_others():
    runs = [
        dataclasses.replace(curve(HTS, 1, (1, 0.0)), settings=settings | more)
        for settings, more in (
            ({"ppo.gamma": "0.97"}, {"ppo.a": "1", "ppo.b": "1", "ppo.c": "1"}),
            ({"ppo.gamma": "0.9"}, {"ppo.a": "2", "ppo.b": "2", "ppo.c": "2"}),
            ({"ppo.gamma": "0.98"}, {"ppo.a": "2", "ppo.b": "2", "ppo.c": "2"}),
        )
    ]
    names = [f"ppo.gamma={gamma} and 3 more settings" for gamma in ("0.97", "0.9", "0.98")]
    assert [found.group.variant for found in split_by_settings(runs)] == names
    by_user = [dataclasses.replace(run, sources={"ppo.b": "user"}) for run in runs[:2]]
    assert [found.group.variant for found in split_by_settings(by_user)] == [
        "ppo.b=1 and 3 more settings",
        "ppo.b=2 and 3 more settings",
    ]
    varied = split_by_settings(runs, also=["ppo.c"])
    assert varied[0].group.variant == "ppo.c=1, ppo.gamma=0.97 and 2 more settings"


def test_a_setting_that_a_run_of_an_older_version_lacks_has_its_default_there():
    key = "ppo.new"
    old, usual, chosen = (
        dataclasses.replace(curve(HTS, 1, (1, 0.0)), settings=settings, sources=sources)
        for settings, sources in (({}, {}), ({key: "0"}, {key: "default"}), ({key: "5"}, {key: "user"}))
    )
    assert [found.group.variant for found in split_by_settings([old, usual])] == ["", ""]
    assert [found.group.variant for found in split_by_settings([old, usual, chosen])] == [
        f"{key}=0",
        f"{key}=0",
        f"{key}=5",
    ]
    assert [found.group.variant for found in split_by_settings([old, chosen])] == [f"{key}=not set", f"{key}=5"]


def test_a_run_s_settings_file_tells_where_each_value_came_from(tmp_path):
    user = {"run": {"algo": "ppo", "mode": "hts"}, "ppo": {"epochs": 7}}
    settings = resolve([Layer("tuner", {"rollout": {"samplers": 3}}), Layer("user", user)])
    (tmp_path / "config.toml").write_text(to_toml(settings))
    found = curve_of(tmp_path, ()).sources
    assert (found["rollout.samplers"], found["ppo.epochs"], found["ppo.lr"]) == ("tuner", "user", "default")


def test_times_to_a_target_whose_intervals_overlap_are_said_to_be_perhaps_chance():
    times = {HTS: (13, 14, 15), SERIAL: (15, 16, 28)}
    curves = [curve(group, seed, (1, 0.0), (times[group][seed], 9.0)) for group in (HTS, SERIAL) for seed in range(3)]
    (told,) = verdicts(report(curves, Rules(policies=1, targets=(9.0,))))[1:]
    assert told.endswith(
        f"1.4 times as long. The intervals of {HTS.label} and {SERIAL.label} overlap, so this may be chance"
    )


def test_groups_whose_runs_all_have_the_same_return_do_not_differ():
    curves = [curve(group, seed, (10, 500.0)) for group in (HTS, SERIAL) for seed in range(3)]
    (told, *_) = verdicts(report(curves, Rules()))
    assert told.endswith("all runs have the same return, so the groups do not differ at this time")


def test_groups_at_a_target_at_about_the_same_time_are_level():
    curves = [
        *(curve(HTS, seed, (1, 0.0), (50, 9.0)) for seed in (1, 2, 3)),
        *(curve(SERIAL, seed, (1, 0.0), (51, 9.0)) for seed in (1, 2, 3)),
    ]
    assert verdicts(report(curves, Rules(policies=1, targets=(9.0,))))[1:] == [
        f"{HTS.env}: {HTS.label} and {SERIAL.label} were level at 9, after 50 s"
    ]


@pytest.mark.parametrize(
    ("seeds", "gap", "ending"),
    [
        (3, 50.0, f"{HTS.label} is better: every run of {HTS.label} has a higher return than each of the other 3"),
        (
            3,
            5.0,  # 5, 15, 25 against 0, 10, 20: 6 of 9 pairs
            f"a run of {HTS.label} has a higher return than one of {SERIAL.label} with probability 67 % [67 %, 100 %], "
            "ties count half (interval over the 3 pairs of equal seeds), but their intervals overlap, so "
            "3 seeds cannot tell them apart; 1 more seed each would suffice if the difference is real",
        ),
        (3, 0.0, "but their intervals overlap, so 3 seeds cannot tell them apart"),
        (2, 50.0, "fewer than 3 seeds each cannot tell them apart"),
    ],
)
def test_a_group_is_called_better_only_where_the_intervals_at_equal_time_part_it(seeds, gap, ending):
    curves = [
        curve(group, seed, (10, low + 10.0 * seed), (500, 1000.0 if group is SERIAL else 0.0), end_s=end_s)
        for group, low, end_s in ((HTS, gap, 20.0), (SERIAL, 0.0, 600.0))
        for seed in range(seeds)
    ]
    sentence = verdicts(report(curves, Rules(policies=1)))[0]
    assert sentence.startswith(f"{HTS.env}, after 20 s, the end of the shortest run: {HTS.label} has a return of ")
    assert sentence.endswith(ending)
    sentence = verdicts(report(curves, Rules(policies=1, limit_s=1000.0)))[0]
    assert sentence.startswith(f"{HTS.env}, after 16:40, the time limit: ")


def test_a_run_that_was_ended_for_reaching_a_return_has_reached_it():
    ended = dataclasses.replace(curve(HTS, 1, (5, 400.0), (13, 500.0), end_s=13.5), ended_at=475.0)
    long = curve(SERIAL, 1, *((t, 420.0) for t in range(1, 30)))
    found = report([ended, long], Rules(targets=(411.0, 480.0)))
    assert found.runs[0].required_s == (13.5, None)
    assert found.runs[0].first_s == (13, 13)
    assert f"{SERIAL.label} was first at 411 by its mean of 10 evaluations, after 10 s" in verdicts(found)[1]
    assert f"{HTS.label} took 13.5 s" in verdicts(found)[1]


def test_the_mean_of_ten_of_a_run_with_more_evaluations_is_not_taken_from_its_end():
    rows = [*((t, 100.0) for t in range(1, 11)), (11, 500.0)]
    (found,) = report(
        [dataclasses.replace(curve(HTS, 1, *rows, end_s=13.5), ended_at=475.0)], Rules(targets=(475.0,))
    ).runs
    assert (found.first_s, found.required_s) == ((11,), (None,))


def test_pairs_take_the_seeds_that_both_have():
    curves = [
        curve(HTS, 1, (1, 10.0)),
        curve(HTS, 2, (2, 20.0)),
        curve(HTS, 3, (1, 99.0)),
        curve(SERIAL, 2, (4, 17.0)),
        curve(SERIAL, 1, (4, 9.0)),
        curve(SERIAL, 4, (1, 0.0), end_s=4),
        curve(HTS, 4, (1, 2.0)),
        curve(SERIAL, 5, (1, 9.0)),
    ]
    (pair,) = report(curves, Rules(policies=1, targets=(9.0,), limit_s=9.0)).pairs
    assert (pair.group, pair.against, pair.seeds) == (HTS, SERIAL, 3)
    assert (pair.final.centre, pair.final.low, pair.final.high) == (2.0, 1.0, 3.0)
    assert pair.required_ratio[0] is None, "seed 4 did not get there"
    (pair,) = report(curves[:5], Rules(policies=1, targets=(9.0,), limit_s=9.0)).pairs
    assert pair.required_ratio[0].centre == (1 / 4 + 2 / 4) / 2
    assert (pair.final.centre, pair.final.low) == (2.0, None), "two seeds have no interval"


def test_seeds_that_are_needed_are_those_of_both_groups():
    found = report(
        [
            curve(group, seed, (1, 10.0 * seed + more))
            for group, more in ((HTS, 1.0), (SERIAL, 0.0))
            for seed in range(4)
        ],
        Rules(policies=1),
    )
    (pair,) = found.pairs
    assert (pair.improvement.centre, pair.seeds_needed) == (10 / 16, 2), "by seed it is above each time, by as much"
    ahead = found.standings[HTS.env]
    assert (ahead.first, ahead.apart, ahead.more) == (HTS, False, 1), "intervals of groups overlap all the same"
    assert report([curve(HTS, 1, (1, 1.0))], Rules(policies=1)).standings == {}
    two = report([curve(group, 1, (1, 1.0)) for group in (HTS, SERIAL)], Rules(policies=1))
    assert two.standings[HTS.env].more == 2, "three are the fewest that have an interval"


def test_groups_of_two_algorithms_are_a_pair():
    other = RunGroup(HTS.env, "impact", "impact")
    (pair,) = report([curve(HTS, 1, (1, 1.0)), curve(other, 1, (1, 3.0))], Rules(policies=1)).pairs
    assert (pair.group, pair.against, pair.final.centre) == (HTS, other, -2.0)


def test_groups_of_different_tasks_or_without_a_common_seed_are_no_pair():
    curves = [
        curve(HTS, 1, (1, 1.0)),
        curve(SERIAL, 2, (1, 1.0)),
        curve(RunGroup("U-v0", "ppo", "serial"), 1, (1, 1.0)),
    ]
    assert report(curves, Rules(policies=1)).pairs == []


def test_runs_are_parted_by_a_setting_only_where_it_differs():
    key = "rollout.correction"
    curves = [
        curve(HTS, 1, (1, 1.0), **{key: "delayed"}),
        curve(HTS, 1, (1, 1.0), **{key: "none"}),
        curve(SERIAL, 1, (1, 1.0), **{key: "delayed"}),
    ]
    assert [found.group.variant for found in split_by_settings(curves)] == [f"{key}=delayed", f"{key}=none", ""]
    assert [found.group.variant for found in split_by_settings(curves, ())] == ["", "", ""]
    stops = [curve(HTS, 1, (1, 1.0), **{"stop.seconds": seconds}) for seconds in ("300", "600")]
    assert [found.group.variant for found in split_by_settings(stops)] == ["", ""], "longer, and otherwise the same"
    apart = ["stop.seconds=300", "stop.seconds=600"]
    assert [found.group.variant for found in split_by_settings(stops, ["stop.seconds"])] == apart, "by --by"
    assert [found.group.variant for found in split_by_settings(stops, also=["stop.seconds"])] == apart


def test_settings_of_algorithms_that_no_run_has_part_nothing():
    curves = [
        curve(HTS, 1, (1, 1.0), **{"impact.slots": "2", "ppo.epochs": "5"}),
        curve(HTS, 2, (1, 1.0), **{"impact.slots": "16", "ppo.epochs": "10"}),
    ]
    assert [found.group.variant for found in split_by_settings(curves)] == ["ppo.epochs=5", "ppo.epochs=10"]


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_over_few_seeds_covers_the_mean_less_often_than_it_says(seeds):
    # A known weakness of the percentile bootstrap of few values, shown so that nobody relies on it.
    rng = np.random.default_rng(seeds)
    hits = 0
    for _ in range(100):
        found = spread(rng.normal(size=seeds).tolist(), Rules(resamples=400))
        hits += found.low <= 0.0 <= found.high
    assert 50 <= hits <= 93


# --- run directories and the verb ---


def make_run(folder, name, mode, seed, points, correction="delayed"):
    path = folder / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(
        json.dumps(
            {
                "state": "finished",
                "env_id": "T-v0",
                "algo": "ppo",
                "mode": mode,
                "seed": seed,
                "wall_s": points[-1][0] + 1.0,
                "started": name,
            }
        )
    )
    (path / "config.toml").write_text(f'[rollout]\ncorrection = "{correction}"\n')
    writer = MetricsWriter(path / "metrics.db")
    for record in evaluations(*points):
        writer.evaluation(record)
    writer.close()
    return path


@pytest.fixture
def runs_dir(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path, f"h{seed}", "hts", seed, [(1.0, 1.0 * seed), (2.0, 5.0 * seed)])
        make_run(tmp_path, f"s{seed}", "serial", seed, [(2.0, 1.0 * seed), (4.0, 4.0 * seed)])
    return tmp_path


def compare(runs_dir, *args):
    return evaluate.main([*args, "--protocol", "hts", "--runs-dir", str(runs_dir)])


def test_a_run_directory_of_any_mode_is_read(runs_dir):
    found = read_curve(runs_dir / "s2")
    assert (found.name, found.group, found.seed, found.end_s) == ("s2", SERIAL, 2, 5.0)
    assert [record.return_mean for record in found.evaluations] == [2.0, 8.0]
    assert found.settings == {"rollout.correction": "-"}, "it has no effect in mode serial"
    assert read_curve(runs_dir / "h1").settings == {"rollout.correction": "delayed"}
    assert differing([read_curve(runs_dir / name) for name in ("h1", "s2")]) == []


def test_the_verb_answers_with_one_document(runs_dir, capfd):
    args = ("h1", "h2", "s1", "s2", "--policies", "1", "--target", "5", "--target", "4", "--json")
    assert compare(runs_dir, *args) == 0
    document = json.loads(capfd.readouterr().out)
    hts, serial = document["groups"]
    assert hts["group"] == {"env": "T-v0", "algo": "ppo", "mode": "hts", "variant": ""}
    assert (hts["final"]["centre"], hts["final"]["low"], hts["final"]["high"]) == (7.5, None, None)
    assert (serial["final"]["centre"], serial["final_time"]["centre"]) == (6.0, 1.5), "the fastest run ends at 3 s"
    assert (hts["reached"], serial["reached"]) == ([2, 2], [1, 2])
    assert document["pairs"][0]["final"]["centre"] == 1.5
    assert document["pairs"][0]["required_ratio"][1]["centre"] == 0.5
    assert document["rules"]["resamples"] == 10_000


def test_the_table_names_limits_seeds_and_what_to_distrust(runs_dir, capfd):
    make_run(runs_dir, "other", "hts", 1, [(1.0, 1.0)])
    assert compare(runs_dir, "h1", "h2", "s1", "other", "--target", "1") == 0
    out = capfd.readouterr().out
    assert "T-v0, time limit 2 s" in out
    assert "h1 (seed 1)" in out
    assert "fewer than 10 policies were evaluated: h1 2, h2 2, s1 2, other 1" in out
    assert "T-v0 ppo hts: a seed occurs twice" in out


def test_settings_that_differ_part_the_groups_of_the_table(runs_dir, capfd):
    make_run(runs_dir, "plain", "hts", 1, [(1.0, 1.0)], correction="none")
    assert compare(runs_dir, "h1", "plain", "--policies", "1") == 0
    out = capfd.readouterr().out
    assert "ppo hts rollout.correction=none" in out
    assert "ppo hts rollout.correction=delayed minus ppo hts rollout.correction=none, same seeds" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["h1", "--policies", "0"], "at least 1"),
        (["h1", "--resamples", "5"], "at least 100"),
        (["h1", "--limit-s", "0"], "more than 0"),
        (["h1", "--by", "epochs"], "expected section.field"),
        (["h1", "--by", "rollout.corection"], "did you mean 'rollout.correction'?"),
        (["h3"], "no run 'h3'"),
        (["fresh"], "no evaluation yet"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(runs_dir, capfd, args, words):
    (runs_dir / "fresh").mkdir()
    (runs_dir / "fresh" / "run.json").write_text("{}")
    assert compare(runs_dir, *args) == 2
    captured = capfd.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert words in captured.err


def test_several_runs_without_a_protocol_are_refused(runs_dir, capfd):
    assert evaluate.main(["h1", "h2", "--runs-dir", str(runs_dir)]) == 2
    assert "compare several with --protocol hts" in capfd.readouterr().err


def test_an_unknown_spread_is_a_dash():
    assert spread_text(None) == "-"
    assert spread_text(spread([2.0], Rules())) == "2"
