"""The bench of IMPACT: what it starts, and what it makes of known figures; no test judges a speed."""

import contextlib
import json

import pytest

from spreeze.bench import impact
from spreeze.bench.__main__ import build_parser
from spreeze.bench.impact import CountedCurve, counted_curve
from spreeze.errors import ConfigError, UsageError
from spreeze.metrics.store import EvaluationRow, MetricsWriter


def document(arguments, env_steps_per_s=500.0, time_s=4.0):
    return {"run_dir": "r", "env_steps_per_s": env_steps_per_s, "time_split": {"learner_wait_share": 0.5},
            "time_to_target_s": time_s, "process_s": 9.0, "env_steps": 100, "updates": 3, "eval_return_best": 480.0,
            "eval_return_mean": 470.0, "policy_lag_mean": 7.0}  # fmt: skip


def bench(run, **fields):
    return impact.ImpactBench(env_ids=("CartPole-v1",), seeds=2, seconds=5.0, step_seconds=5.0, target_return=475.0,
                              runs_dir="r", say=lambda text: None, run=run, **fields)  # fmt: skip


def test_the_share_of_linear_is_that_of_one_sampler():
    def run(arguments, timeout_s):
        assert "--env-steps" not in arguments, "that of other parts: all are measured for the same time"
        samplers = int(arguments[arguments.index("--samplers") + 1])
        return document(arguments, env_steps_per_s=500.0 * samplers * (0.8 if samplers == 4 else 1.0))

    rows = impact.steps_rows(bench(run, samplers=(1, 2, 4), env_steps=1000))
    found = {row["samplers"]: row["value"] for row in rows if row["metric"] == "share_of_linear"}
    assert found == {1: 1.0, 2: 1.0, 4: 0.8}


def test_all_cases_run_in_turn_seed_by_seed_and_are_compared_with_impact():
    told = []

    def run(arguments, timeout_s):
        told.append(arguments)
        return document(arguments, time_s=2.0 if "impact" in arguments else 4.0)

    rows = impact.target_rows(bench(run))
    algorithms = [arguments[arguments.index("--algo") + 1] for arguments in told]
    assert algorithms == ["impact", "ppo", "ppo", "appo", "impala"] * 2
    ratios = {row["case"]: (row["value"], row.get("target")) for row in rows if row["metric"] == "time_over"}
    goals = {"hts ppo": "<= 1", "serial ppo": None, "appo": None, "impala": "<= 0.7"}
    assert ratios == {case: (0.5, goal) for case, goal in goals.items()}


def test_ablations_have_slow_weights_and_every_setting_is_one(tmp_path, monkeypatch):
    told = []
    curve = CountedCurve([10, 20], [1, 2], [100.0, 480.0], 3.0)
    monkeypatch.setattr(impact, "counted_curve", lambda flags, env_steps, every: told.append(flags) or curve)
    made = bench(None, ablations=("ratio", "N"), curves=tmp_path / "curves.jsonl")
    rows = impact.ablation_rows(made)
    assert len(told) == 2 * 6, "R3 and N = 4 are the same runs"
    assert all("impact.broadcast_updates=256" in flags for flags in told)
    settings = [impact._settings(flags)[0].config.on_policy for flags in told]
    assert {one.target_interval for one in settings} == {0}, "whatever the task's profile has"
    assert [row["value"] for row in rows if row["metric"] == "env_steps_to_target"] == [20] * 7
    assert impact.ablation_rows(made) == rows, "from the file"
    assert len(told) == 2 * 6
    pytest.importorskip("matplotlib")
    impact.draw_ablations(rows, tmp_path / "impact.png")
    assert (tmp_path / "impact.png").read_bytes().startswith(b"\x89PNG")


def test_impala_s_score_is_that_of_ten_evaluations_and_impact_is_timed_until_it_holds_it(tmp_path):
    def run(name, returns, episodes=10):
        (tmp_path / name).mkdir()
        with contextlib.closing(MetricsWriter(tmp_path / name / "metrics.db")) as writer:
            for at, value in enumerate(returns, 1):
                count = episodes if at == len(returns) else 10
                writer.evaluation(EvaluationRow(float(at), 100 * at, 1, 1, at, count, value, 0.0, 1.0))
        return {"run_dir": str(tmp_path / name)}

    rows = impact._impala_rows([run("impact", [0.0] + [50.0] * 15), run("never", [1.0] * 20)],
                               [run("impala", [0.0] * 10 + [40.0] * 12), run("other", [5.0] * 10)], "E")  # fmt: skip
    assert [(row["metric"], row["repeats"], row["reached"]) for row in rows] == [
        ("wall_s_to_impala_score", [0.5, None], 1), ("env_steps_to_impala_score", [0.5, None], 1)]
    rows = impact._impala_rows([run("third", [50.0] * 15)], [run("short", [0.0] * 9)], "E")
    assert [row["repeats"] for row in rows] == [[], []], "nobody can reach a score that there is not"
    rows = impact._impala_rows([run("fourth", [9.5] * 20)], [run("cut short", [9.0] * 9 + [99.0], episodes=0)], "E")
    assert [row["repeats"] for row in rows] == [[1.0], [1.0]], "an evaluation of no episode does not count"


def test_a_picture_without_an_ablation_is_refused_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr(impact, "steps_rows", lambda bench: pytest.fail("was run"))
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [{"metric": "env_steps"}]}))
    args = build_parser().parse_args(["impact", "--parts", "steps", "--rows", str(tmp_path / "rows.json"), "--out",
                                      str(tmp_path / "impact.png")])
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="the picture is of part ablation"):
        impact.impact_rows(args, lambda text: None)


def test_a_counted_run_is_the_same_each_time_and_uses_each_rollout_k_times():
    flags = ["--env", "CartPole-v1", "--algo", "impact", "--seed", "3", "--sync-interval", "8",
             "--envs-per-sampler", "2", "--set", "impact.uses=3", "--set", "impact.hidden_sizes=[4]",
             "--set", "impact.broadcast_updates=20", "--set", "evaluation.episodes=2"]  # fmt: skip
    first, again = (counted_curve(flags, 640, 160) for _ in range(2))
    assert first == again
    assert len(first.returns) == 4
    assert first.updates[-1] == pytest.approx(3 * 640 / 16, rel=0.1), "but for those that wait for their turn"
    assert first.lag > 10.0
    with pytest.raises(ConfigError, match="--algo ppo: it does not learn from rollouts of any age"):
        counted_curve(["--env", "CartPole-v1", "--algo", "ppo", "--mode", "hts"], 100, 50)
