"""GALA against A2C and other ways to share: the ball and its bounds, slow, sleeping and killed learners, equal time.

Every figure is a whole ``python -m spreeze.train`` in processes of its own, cases in turn, seed by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from spreeze.bench import Row, row
from spreeze.bench.hts import scores
from spreeze.bench.runs import Document, Say, in_turn, times_to_target, train
from spreeze.metrics.store import MetricsReader
from spreeze.testing import FAULT_ID, SYNTHETIC_ID

PARTS = ("slow", "steps", "radius", "kills", "converge", "paired")
TOPOLOGIES = ("ring", "exponential", "full")
LEARNERS = (1, 2, 4, 8)
ENVS = (8, 16, 32)
TEAM = 4
"""Learners of all parts but ``steps``."""
_STEP_S, _SLOWER = 0.002, 10
_START_S, _OUTSIDE_S = 6.0, 120.0
_ROUNDING = 1e-3
"""Distance that sums in another order make; the bound is 0 where each learner takes the mean of all."""
KILL_S = 10.0
"""Time between two kills of part ``kills``."""


def mixing(name: str) -> list[str]:
    """The flags of a team of learners that share in this way."""
    return ["--algo", "a2c", "--mode", "gala", "--learners", str(TEAM), "--samplers", str(TEAM), "--set",
            f"gala.mixing={name}"]


@dataclass(frozen=True, kw_only=True)
class GalaBench:
    """What is trained, for how long, and how it is told."""

    env_ids: tuple[str, ...]
    seeds: int
    seconds: float
    """Training of one run [s]; of part converge the most."""
    step_seconds: float
    """What a rate is measured over [s]."""
    target_return: float
    runs_dir: str
    say: Say
    learners: tuple[int, ...] = LEARNERS
    envs: tuple[int, ...] = ENVS
    run: Callable[..., Document] = train

    def in_turn(
        self, cases: dict[str, list[str]], common: list[str], seconds: float, environment: dict[str, str] | None = None
    ) -> dict[str, list[Document]]:
        """The documents of each case, seed by seed."""
        flags = [*common, "--seconds", str(seconds), "--runs-dir", self.runs_dir, "--no-visualizer"]
        return in_turn(cases, self.seeds, lambda own: self.run([*flags, *own], seconds + _OUTSIDE_S, environment),
                       self.say)


def slow_rows(bench: GalaBench) -> list[Row]:
    """Env steps a second of four learners where the environments of one take ten times as long."""
    common = ["--env", FAULT_ID, "--import", "spreeze.testing", "--envs-per-sampler", "1", "--set",
              "evaluation.episodes=1"]
    slowed = {"SPREEZE_FAULT_STEP_S": str(_STEP_S), "SPREEZE_FAULT_P_STALL": "1",
              "SPREEZE_FAULT_STALL_S": str(_STEP_S * (_SLOWER - 1)),
              "SPREEZE_FAULT_WORKERS": f"sampler-g{TEAM - 1}-0"}
    found = bench.in_turn({name: mixing(name) for name in ("gossip", "all_reduce")}, common,
                          bench.step_seconds + _START_S, slowed)
    rates = {name: [document["env_steps_per_s"] for document in documents] for name, documents in found.items()}
    over = [a / b if a and b else None for a, b in zip(rates["gossip"], rates["all_reduce"], strict=True)]
    return [*(row("env_steps_per_s", "1/s", values, mixing=name) for name, values in rates.items()),
            row("rate_over_all_reduce", "ratio", over, target=">= 3")]


def steps_rows(bench: GalaBench) -> list[Row]:
    """Env steps a second by the number of learners whose environments sleep (gamma, coefficient of variation 1)."""
    common = ["--env", SYNTHETIC_ID, "--env-arg=law=gamma", f"--env-arg=mean_s={_STEP_S}", "--env-arg=cv=1", "--algo",
              "a2c", "--mode", "gala", "--envs-per-sampler", "1", "--sync-interval", "64", "--set",
              "evaluation.episodes=1"]
    cases = {str(count): ["--learners", str(count), "--samplers", str(count)] for count in bench.learners}
    found = bench.in_turn(cases, common, bench.step_seconds + _START_S)
    rates = {count: [document["env_steps_per_s"] for document in documents] for count, documents in found.items()}
    alone = rates[str(bench.learners[0])]
    rows = []
    for count, values in rates.items():
        linear = [None if not one or not many else many / one * bench.learners[0] / int(count)
                  for one, many in zip(alone, values, strict=True)]
        rows += [row("env_steps_per_s", "1/s", values, learners=int(count)),
                 row("share_of_linear", "share", linear, learners=int(count), target=">= 0.9")]
    return rows


def radius_rows(bench: GalaBench) -> list[Row]:
    """How far the learners are apart, over the bounds of Propositions 1 (all mix at every update) and 2 (any delay)."""
    rows = []
    for topology in TOPOLOGIES:
        each = [*mixing("gossip"), "--topology", topology]
        cases = {"1": [*each, "--max-staleness", "0"], "2": each}
        found = bench.in_turn(cases, ["--env", bench.env_ids[0]], bench.step_seconds + _START_S)
        for proposition, documents in found.items():
            ratios = [_over_bound(Path(document["run_dir"]), f"gossip_bound_{proposition}") for document in documents]
            within = [None if not run else sum(ratio <= 1.0 for ratio in run) / len(run) for run in ratios]
            more = {"topology": topology, "proposition": int(proposition)}
            rows += [row("within_bound", "share", within, target="1", **more),
                     row("largest_radius_over_bound", "ratio", [max(run, default=None) for run in ratios], **more)]
    return rows


def _over_bound(run: Path, bound: str) -> list[float]:
    """The radius over a bound at every recorded time at which both are known."""
    reader = MetricsReader(run / "metrics.db")
    radius, bounds = (reader.series(name, max_points=100_000) for name in ("gossip_radius", bound))
    known = dict(zip(bounds.t.tolist(), bounds.mean.tolist(), strict=True))
    return [value / max(known[t], _ROUNDING) for t, value in zip(radius.t.tolist(), radius.mean.tolist(), strict=True)
            if t in known]


@contextlib.contextmanager
def learners_killed(every_s: float, found: list[int]) -> Iterator[None]:
    """Kills a learner among the processes that this one started now and then; ``found`` gets the process ids."""
    over, dice = threading.Event(), random.Random(1)

    def kill() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(psutil.Error):
                learners = [child for child in psutil.Process().children(recursive=True)
                            if any('"role": "learner"' in word for word in child.cmdline())]
                if learners:
                    found.append(dice.choice(learners).pid)
                    psutil.Process(found[-1]).kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def kills_rows(bench: GalaBench) -> list[Row]:
    """A run in which a learner is killed every ten seconds beside one in which none is."""
    killed: list[int] = []
    found: dict[str, list[Document]] = {"killed": [], "left alone": []}
    for seed in range(1, bench.seeds + 1):
        flags = ["--env", bench.env_ids[0], *mixing("gossip"), "--seed", str(seed), "--seconds", str(bench.seconds),
                 "--runs-dir", bench.runs_dir, "--no-visualizer", "--set", "run.forgiven_failures=1000000"]
        with learners_killed(KILL_S, killed):
            found["killed"].append(bench.run(flags, bench.seconds + _OUTSIDE_S, None))
        found["left alone"].append(bench.run(flags, bench.seconds + _OUTSIDE_S, None))
        bench.say(f"  seed {seed}: {len(killed)} kills so far")
    left = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    rows = [row("updates_per_s", "1/s", [one["updates_per_s"] for one in documents], case=case)
            for case, documents in found.items()]
    ratios = [max(_over_bound(Path(one["run_dir"]), "gossip_bound_2"), default=None) for one in found["killed"]]
    return [row("kills", "kills", [len(killed)]), *rows,
            row("restarts", "restarts", [one["restarts"] for one in found["killed"]]),
            row("largest_radius_over_bound", "ratio", ratios, proposition=2),
            row("processes_left", "processes", [len(left)], target="0")]


def converge_rows(bench: GalaBench) -> list[Row]:
    """Share of the seeds that reach the return in time, by the number of environments in all."""
    rows = []
    for env_id in bench.env_ids:
        for envs in bench.envs:
            each = ["--envs-per-sampler", str(max(1, envs // TEAM))]
            cases = {"gala": [*mixing("gossip"), *each], "hogwild": [*mixing("hogwild"), *each],
                     "a2c": ["--algo", "a2c", "--mode", "serial", "--envs-per-sampler", str(envs)]}
            common = ["--env", env_id, "--target-return", str(bench.target_return)]
            found = bench.in_turn(cases, common, bench.seconds)
            for case, documents in found.items():
                times, reached = times_to_target(documents)
                rows += [row("converged", "share", [reached / len(documents)], case=case, env=env_id, envs=envs),
                         row("time_to_target_s", "s", times, case=case, env=env_id, envs=envs)]
    return rows


def paired_rows(bench: GalaBench) -> list[Row]:
    """GALA and A2C in mode hts for the same time: the metrics of the protocol, seed by seed, and env steps a second."""
    rows = []
    for env_id in bench.env_ids:
        found = bench.in_turn({"gala": mixing("gossip"), "hts a2c": ["--algo", "a2c", "--mode", "hts"]},
                              ["--env", env_id], bench.seconds)
        rows += [row(name, unit, [one.get(name) for one in documents], case=case, env=env_id)
                 for case, documents in found.items()
                 for name, unit in (("env_steps_per_s", "1/s"), ("energy_per_million_steps_kj", "kJ"))]
        rows += scores(found, env_id)
    return rows


def add_gala_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:2]),
        help="slow: one learner of four slowed; steps: learners whose environments sleep; radius: distance from the "
        "mean over its bounds; kills: a learner killed every 10 s; converge: share of runs that reach a return; "
        "paired: equal time (default: slow steps)")
    add("--long", action="store_true", help="runs of 900 s, rates over 60 s (default: off)")
    add("--env", nargs="+", default=["CartPole-v1"], help="tasks (default: CartPole-v1)")
    add("--seconds", type=float, default=None, help="training of one run [s] (default: 60, with --long 900)")
    add("--target-return", type=float, default=475.0,
        help="mean of 10 greedy episodes of part converge (default: 475)")
    add("--learners", type=int, nargs="+", default=list(LEARNERS), help="learners of part steps (default: 1 2 4 8)")
    add("--envs", type=int, nargs="+", default=list(ENVS),
        help="environments in all of part converge (default: 8 16 32)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def gala_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for; a SpreezeError if a run failed."""
    bench = GalaBench(
        env_ids=tuple(args.env), seeds=args.repeats, seconds=args.seconds or (900.0 if args.long else 60.0),
        step_seconds=60.0 if args.long else 10.0, target_return=args.target_return, runs_dir=args.runs_dir, say=say,
        learners=tuple(args.learners), envs=tuple(args.envs),
    )
    parts = {"slow": slow_rows, "steps": steps_rows, "radius": radius_rows, "kills": kills_rows,
             "converge": converge_rows, "paired": paired_rows}
    rows = []
    for part in args.parts:
        say(f"{part}:")
        rows += [{**one, "part": part} for one in parts[part](bench)]
    return rows
