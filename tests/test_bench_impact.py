"""The bench of IMPACT: what it starts, and what it makes of known figures; no test judges a speed."""

from spreeze.bench import impact
from spreeze.bench.__main__ import build_parser


def document(arguments, env_steps_per_s=500.0, time_s=4.0):
    return {"run_dir": "r", "env_steps_per_s": env_steps_per_s, "time_split": {"learner_wait_share": 0.5},
            "time_to_target_s": time_s, "process_s": 9.0, "env_steps": 100, "updates": 3, "eval_return_best": 480.0,
            "eval_return_mean": 470.0, "policy_lag_mean": 7.0}  # fmt: skip


def bench(run, **fields):
    return impact.ImpactBench(env_ids=("CartPole-v1",), seeds=2, seconds=5.0, step_seconds=5.0, target_return=475.0,
                              runs_dir="r", say=lambda text: None, run=run, **fields)  # fmt: skip


def test_the_share_of_linear_is_that_of_one_sampler():
    def run(arguments, timeout_s):
        samplers = int(arguments[arguments.index("--samplers") + 1])
        return document(arguments, env_steps_per_s=500.0 * samplers * (0.8 if samplers == 4 else 1.0))

    rows = impact.steps_rows(bench(run, samplers=(1, 2, 4)))
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


def test_ablations_have_slow_weights_and_every_setting_is_one():
    told = []
    impact.ablation_rows(bench(lambda arguments, timeout_s: told.append(arguments) or document(arguments)))
    assert len(told) == 2 * len(impact.ABLATIONS)
    assert all("impact.broadcast_updates=1000000000" in arguments for arguments in told)
    args = build_parser().parse_args(["impact", "--ablations", "ratio R1", "K 2", "--parts", "ablation"])
    assert args.ablations == ["ratio R1", "K 2"]
