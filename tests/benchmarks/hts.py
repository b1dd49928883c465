"""HTS-RL against its synchronous baselines: step times as given, and tasks that are learned."""

import argparse

from common import PATIENCE_S, compare, main, ratios, rows_of, sleeping, written_report
from figures import Row, row
from whole_runs import target_rows

LAWS = {
    "constant": ("constant", 0.0),
    "exponential": ("exponential", 1.0),
    "gamma 0.5": ("gamma", 0.5),
    "gamma 1": ("gamma", 1.0),
    "gamma 3": ("gamma", 3.0),
}
START_S = 6.0


def steps(args: argparse.Namespace) -> list[Row]:
    """Env steps/s of HTS-RL over baselines that wait at every step, and once an interval."""
    rows = []
    for law in args.laws:
        name, cv = LAWS[law]
        common = [
            *sleeping(0.002, name, cv),
            "--algo",
            "a2c",
            "--samplers",
            str(args.rollout_samplers),
            "--sync-interval",
            "64",
            "--set",
            "learner.publish_interval_s=60",
        ]
        found = compare(
            args,
            {
                "hts": ["--mode", "hts", "--inference-workers", "0"],
                "step": ["--mode", "serial", "--synchrony", "step"],
                "batch": ["--mode", "serial", "--synchrony", "batch"],
            },
            common,
            args.seconds + START_S,
        )
        rates = {mode: [one["env_steps_per_s"] for one in documents] for mode, documents in found.items()}
        rows += [
            row(f"hts_over_{mode}", "ratio", ratios(rates["hts"], rates[mode]), law=law) for mode in ("step", "batch")
        ]
        rows += [
            *rows_of(found, "env_steps_per_s", law=law),
            *rows_of({"hts": found["hts"]}, "policy_lag_mean", law=law),
        ]
    return rows


def _modes(args: argparse.Namespace) -> dict[str, list[str]]:
    """HTS-RL with its samplers, and mode serial with as many environments in one process."""
    each = str(args.envs // args.samplers)
    return {
        "hts": ["--mode", "hts", "--samplers", str(args.samplers), "--envs-per-sampler", each],
        "serial": ["--mode", "serial", "--samplers", "1", "--envs-per-sampler", str(args.envs)],
    }


def target(args: argparse.Namespace) -> list[Row]:
    """Wall time from process start to the target return."""
    found = compare(
        args, _modes(args), ["--env", args.env, "--algo", args.algo, "--target-return", str(args.target_return)]
    )
    return target_rows(found, args.env, {"hts": "<= 60 s"}, "<= 0.7")


def paired(args: argparse.Namespace) -> list[Row]:
    """Both modes for the same time: rates, and a report of what they learned."""
    found = compare(args, _modes(args), ["--env", args.env, "--algo", args.algo])
    written_report(args, found, "hts-paired")
    return rows_of(found, "env_steps_per_s", "eval_return_final", env=args.env)


def correction(args: argparse.Namespace) -> list[Row]:
    """Three corrections of data that is one interval old, for the same env steps."""
    cases = {name: [*_modes(args)["hts"], "--correction", name] for name in ("delayed", "none", "truncated-is")}
    found = compare(
        args, cases, ["--env", args.env, "--algo", args.algo, "--env-steps", str(args.env_steps)], PATIENCE_S
    )
    written_report(args, found, "hts-correction")
    return rows_of(found, "eval_return_final", env=args.env)


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"steps": steps, "target": target, "paired": paired, "correction": correction},
        flags={
            "algo": "ppo",
            "laws": tuple(LAWS),
            "rollout_samplers": 8,
            "samplers": 2,
            "envs": 16,
            "env_steps": 50_000,
        },
    )
