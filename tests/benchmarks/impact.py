"""IMPACT against PPO, APPO and IMPALA: samplers that sleep, time to a return, equal time, and the paper's ablations.

Part ``ablation`` is counted: samplers and learner take turns in one process, so that a busy machine changes nothing.
"""

import argparse
import statistics
import sys
from pathlib import Path

from common import compare, linear_rows, main, rows_of, say, sleeping, written_report
from figures import Row, row
from whole_runs import ratio_row, row_of_reached, time_row

CASES = {
    "impact": ["--algo", "impact"],
    "hts ppo": ["--algo", "ppo", "--mode", "hts"],
    "serial ppo": ["--algo", "ppo", "--mode", "serial"],
    "appo": ["--algo", "appo"],
    "impala": ["--algo", "impala"],
}
SLOW_WEIGHTS = {
    "broadcast_updates": 256,
    "slots": 4,
    "uses": 20,
    "minibatches": 1,
    "target_interval": 0,
    "vtrace": "true",
    "rho": 2.0,
    "lr": 1e-3,
}
"""New weights for the samplers after so many updates: the lag that the ablations are about, whatever the profile."""
ABLATIONS = {
    "ratio": ("R1", "R2", "R3"),
    "uses": (1, 2, 5, 10, 20, 40),
    "slots": (2, 4, 8, 16),
    "target_interval": (2, 5, 20, 80, 320, 1280),
}


def steps(args: argparse.Namespace) -> list[Row]:
    """Env steps/s by the number of samplers that sleep."""
    common = [
        *sleeping(0.002),
        "--algo",
        "impact",
        "--sync-interval",
        "64",
        "--set",
        "impact.least_uses=0",
        "--set",
        "impact.uses=2",
    ]
    return linear_rows(
        compare(args, {str(count): ["--samplers", str(count)] for count in args.samplers}, common), "samplers"
    )


def target(args: argparse.Namespace) -> list[Row]:
    """Wall time from process start to the target return, and IMPACT's over that of the others."""
    found = compare(args, CASES, ["--env", args.env, "--target-return", str(args.target_return)])
    return [
        *rows_of(found, "env_steps", env=args.env),
        *(time_row(documents, case=case, env=args.env) for case, documents in found.items()),
        *(
            ratio_row("time_over", found["impact"], others, case=case, env=args.env)
            for case, others in found.items()
            if case != "impact"
        ),
    ]


def paired(args: argparse.Namespace) -> list[Row]:
    """All of them for the same time: rates, and a report of what they learned."""
    found = compare(args, CASES, ["--env", args.env])
    written_report(args, found, "impact-paired")
    return rows_of(found, "env_steps_per_s", "updates_per_s", "eval_return_final", env=args.env)


def ablation(args: argparse.Namespace) -> list[Row]:
    """One setting at a time, by counts, with lag that slow weights force."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
    from counted_impact import counted_curve

    rows = []
    for name in args.ablations:
        for value in ABLATIONS[name]:
            settings = {**SLOW_WEIGHTS, name: value}
            flags = [
                "--env",
                args.env,
                "--algo",
                "impact",
                "--sync-interval",
                "16",
                *(f"--set=impact.{key}={one}" for key, one in settings.items()),
            ]
            curves = [
                counted_curve([*flags, "--seed", str(seed)], args.env_steps, args.env_steps // 30)
                for seed in range(args.first_seed, args.first_seed + args.repeats)
            ]
            final = [statistics.mean(curve.returns[-10:]) for curve in curves]
            reached = [
                next(
                    (
                        steps
                        for steps, value in zip(curve.env_steps, curve.returns, strict=True)
                        if value >= args.target_return
                    ),
                    None,
                )
                for curve in curves
            ]
            more = {"ablation": name, "case": str(value), "env": args.env}
            rows += [
                row("final_metric", "return", final, **more),
                row_of_reached("env_steps_to_target", "env steps", reached, **more),
                row("policy_lag", "updates", [curve.lag for curve in curves], **more),
            ]
            say(f"  {name} {value}: last ten {', '.join(f'{one:.1f}' for one in final)}")
    return rows


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"steps": steps, "target": target, "paired": paired, "ablation": ablation},
        flags={"samplers": (1, 2, 4, 8), "env_steps": 30_000, "ablations": tuple(ABLATIONS)},
    )
