"""GALA against A2C and other ways to share: slow, sleeping and killed learners, radius over its bounds, equal time."""

import argparse
import random
import threading
from pathlib import Path

import psutil
from common import PATIENCE_S, compare, linear_rows, main, ratios, rows_of, say, sleeping, written_report
from figures import Row, row
from watched_run import FORGIVING
from whole_runs import time_row

from spreeze.metrics.store import MetricsReader
from spreeze.workers.roles import ROLES, role_of

FAULTY = [
    "--env",
    "spreeze/Fault-v0",
    "--import",
    "fault_envs",
    "--envs-per-sampler",
    "1",
    "--set",
    "evaluation.episodes=1",
]
ROUNDING = 1e-3
"""Distance that sums in another order make; the bound is 0 where each learner takes the mean of all."""


def _team(args: argparse.Namespace, mixing: str = "gossip") -> list[str]:
    return [
        "--algo",
        "a2c",
        "--mode",
        "gala",
        "--learners",
        str(args.team),
        "--samplers",
        str(args.team),
        "--set",
        f"gala.mixing={mixing}",
    ]


def slow(args: argparse.Namespace) -> list[Row]:
    """Env steps/s of gossip over all-reduce where the environments of one learner take ten times as long."""
    slowed = {
        "SPREEZE_FAULT_STEP_S": str(args.sleep),
        "SPREEZE_FAULT_P_STALL": "1",
        "SPREEZE_FAULT_STALL_S": str(9 * args.sleep),
        "SPREEZE_FAULT_WORKERS": f"sampler-g{args.team - 1}-0",
    }
    found = compare(args, {name: _team(args, name) for name in ("gossip", "all_reduce")}, FAULTY, environment=slowed)
    rates = [[one["env_steps_per_s"] for one in documents] for documents in found.values()]
    return [*rows_of(found, "env_steps_per_s"), row("rate_over_all_reduce", "ratio", ratios(*rates), target=">= 3")]


def steps(args: argparse.Namespace) -> list[Row]:
    """Env steps/s by the number of learners whose environments sleep."""
    cases = {str(count): ["--learners", str(count), "--samplers", str(count)] for count in args.learners}
    return linear_rows(
        compare(args, cases, [*sleeping(args.sleep), "--algo", "a2c", "--mode", "gala", "--sync-interval", "64"]),
        "learners",
    )


def radius(args: argparse.Namespace) -> list[Row]:
    """Distance of the learners from their mean over the bounds: all mix at every update, and any delay."""
    rows = []
    for topology in ("ring", "exponential", "full"):
        each = [*_team(args), "--topology", topology]
        found = compare(args, {"1": [*each, "--max-staleness", "0"], "2": each}, ["--env", args.env])
        for bound, documents in found.items():
            over = [_over_bound(Path(one["run_dir"]), f"gossip_bound_{bound}") for one in documents]
            rows.append(
                row(
                    "largest_radius_over_bound",
                    "ratio",
                    [max(one, default=None) for one in over],
                    topology=topology,
                    bound=int(bound),
                    target="<= 1",
                )
            )
    return rows


def _over_bound(run: Path, bound: str) -> list[float]:
    """Radius over its bound at every recorded time at which both are known."""
    reader = MetricsReader(run / "metrics.db")
    radii, bounds = (reader.series(name, max_points=100_000) for name in ("gossip_radius", bound))
    known = dict(zip(bounds.t.tolist(), bounds.mean.tolist(), strict=True))
    return [
        value / max(known[t], ROUNDING)
        for t, value in zip(radii.t.tolist(), radii.mean.tolist(), strict=True)
        if t in known
    ]


def kills(args: argparse.Namespace) -> list[Row]:
    """Updates/s of a run in which a learner is killed every ten seconds, beside those of one that is left alone."""
    over, dice, killed = threading.Event(), random.Random(1), []

    def kill() -> None:
        while not over.wait(10.0):
            learners = [
                child
                for child in psutil.Process().children(recursive=True)
                if role_of(child.name()) is ROLES["learner"]
            ]
            if learners:
                killed.append(dice.choice(learners).pid)
                psutil.Process(killed[-1]).kill()

    common = ["--env", args.env, *_team(args)]
    alone = compare(args, {"left alone": []}, common)
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        found = alone | compare(args, {"killed": []}, common, program=FORGIVING)
    finally:
        over.set()
        thread.join()
    say(f"  {len(killed)} learners killed")
    return [row("kills", "kills", [len(killed)]), *rows_of(found, "updates_per_s", "restarts")]


def converge(args: argparse.Namespace) -> list[Row]:
    """Last returns after as many env steps, by environments in all."""
    rows = []
    for envs in args.envs:
        each = ["--envs-per-sampler", str(envs // args.team)]
        cases = {
            "gala": [*_team(args), *each],
            "hogwild": [*_team(args, "hogwild"), *each],
            "a2c": ["--algo", "a2c", "--mode", "serial", "--envs-per-sampler", str(envs)],
        }
        found = compare(args, cases, ["--env", args.env, "--env-steps", str(args.env_steps)], PATIENCE_S)
        rows += rows_of(found, "eval_return_mean", "eval_return_best", env=args.env, envs=envs)
    return rows


def paired(args: argparse.Namespace) -> list[Row]:
    """GALA and A2C in mode hts for the same time: rates, time to the return, and a report."""
    common = [
        "--env",
        args.env,
        "--target-return",
        str(args.target_return),
        "--set",
        "stop.target_evaluations=0",
        "--set",
        "a2c.lr_schedule=constant",
    ]
    found = compare(args, {"gala": _team(args), "hts a2c": ["--algo", "a2c", "--mode", "hts"]}, common)
    written_report(args, found, "gala-paired")
    return [
        *rows_of(found, "env_steps_per_s", "energy_per_million_steps_kj", env=args.env),
        *(time_row(documents, case=case, env=args.env) for case, documents in found.items()),
    ]


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"slow": slow, "steps": steps, "radius": radius, "kills": kills, "converge": converge, "paired": paired},
        flags={"team": 4, "learners": (1, 2, 4, 8), "envs": (8, 16, 32), "env_steps": 100_000, "sleep": 0.002},
    )
