"""GALA against A2C and other ways to share: the ball and its bounds, slow, sleeping and killed learners, equal time.

Every figure is a whole ``python -m spreeze.train`` in processes of its own, cases in turn, seed by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import textwrap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from spreeze.bench import Row, ratios, row
from spreeze.bench.hts import scores
from spreeze.bench.runs import (
    Axes,
    Document,
    RunsBench,
    Say,
    linear_rows,
    picture,
    rows_of_parts,
    sleeping,
    time_row,
)
from spreeze.errors import ConfigError
from spreeze.machine.hardware import read_machine
from spreeze.machine.processes import is_worker, marked
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import read_run
from spreeze.testing import FAULT_ID

PARTS = ("slow", "steps", "radius", "kills", "converge", "paired")
TOPOLOGIES = ("ring", "exponential", "full")
LEARNERS = (1, 2, 4, 8)
ENVS = (8, 16, 32)
TEAM = 4
_SLOWER = 10
_PATIENCE_S = 1800.0
"""Longest run where env steps are counted, not seconds."""
_ROUNDING = 1e-3
"""Distance that sums in another order make; the bound is 0 where each learner takes the mean of all."""
KILL_S = 10.0
"""Time between two kills of part ``kills``."""


@dataclass(frozen=True, kw_only=True)
class GalaBench(RunsBench):
    """Teams of learners."""

    env_ids: tuple[str, ...]
    step_seconds: float
    """What a rate is measured over [s]."""
    sleep_s: float = 0.002
    """Mean step time of environments that sleep."""
    env_steps: int = 100_000
    """Of a run of part converge."""
    team: int = TEAM
    """Learners of all parts but ``steps``."""
    learners: tuple[int, ...] = LEARNERS
    envs: tuple[int, ...] = ENVS

    def mixing(self, name: str) -> list[str]:
        """The flags of a team of learners that share in this way."""
        return ["--algo", "a2c", "--mode", "gala", "--learners", str(self.team), "--samplers", str(self.team), "--set",
                f"gala.mixing={name}"]

    def length_s(self, learners: int) -> float:
        """Of a run whose rate is measured: learners load one after the other where there are fewer cores."""
        return self.step_seconds + 4.0 + 3.0 * learners


def slow_rows(bench: GalaBench) -> list[Row]:
    """Env steps a second of four learners where the environments of one take ten times as long."""
    common = ["--env", FAULT_ID, "--import", "spreeze.testing", "--envs-per-sampler", "1", "--set",
              "evaluation.episodes=1"]
    slowed = {"SPREEZE_FAULT_STEP_S": str(bench.sleep_s), "SPREEZE_FAULT_P_STALL": "1",
              "SPREEZE_FAULT_STALL_S": str(bench.sleep_s * (_SLOWER - 1)),
              "SPREEZE_FAULT_WORKERS": f"sampler-g{bench.team - 1}-0"}
    cases = {name: bench.mixing(name) for name in ("gossip", "all_reduce")}
    found = bench.in_turn(cases, common, bench.length_s(bench.team), environment=slowed)
    rates = {name: [document["env_steps_per_s"] for document in documents] for name, documents in found.items()}
    return [*(row("env_steps_per_s", "1/s", values, mixing=name) for name, values in rates.items()),
            row("rate_over_all_reduce", "ratio", ratios(rates["gossip"], rates["all_reduce"]), target=">= 3")]


def steps_rows(bench: GalaBench) -> list[Row]:
    """Env steps a second by the number of learners whose environments sleep (gamma, coefficient of variation 1)."""
    common = [*sleeping(bench.sleep_s), "--algo", "a2c", "--mode", "gala", "--envs-per-sampler", "1",
              "--sync-interval", "64", "--set", "evaluation.episodes=1"]
    cases = {str(count): ["--learners", str(count), "--samplers", str(count), "--seconds",
                          str(bench.length_s(count))] for count in bench.learners}
    found = bench.in_turn(cases, common, bench.length_s(max(bench.learners)))
    return linear_rows(found, "learners")


def radius_rows(bench: GalaBench) -> list[Row]:
    """How far the learners are apart, over the bounds of Propositions 1 (all mix at every update) and 2 (any delay)."""
    rows = []
    for topology in TOPOLOGIES:
        each = [*bench.mixing("gossip"), "--topology", topology]
        cases = {"1": [*each, "--max-staleness", "0"], "2": each}
        found = bench.in_turn(cases, ["--env", bench.env_ids[0]], bench.length_s(bench.team))
        for proposition, documents in found.items():
            runs = [_beside_bound(Path(document["run_dir"]), f"gossip_bound_{proposition}") for document in documents]
            within = [sum(ratio <= 1.0 for ratio in _over(run)) / len(run) if run else None for run in runs]
            more = {"topology": topology, "proposition": int(proposition)}
            rows += [row("within_bound", "share", within, target="1", **more),
                     row("measured", "times", [len(run) for run in runs], **more),
                     row("largest_radius_over_bound", "ratio", [max(_over(run), default=None) for run in runs], **more,
                         curve=runs[0])]
    return rows


def _beside_bound(run: Path, bound: str) -> list[tuple[float, float, float]]:
    """Wall time [s], radius and bound at every recorded time at which both are known."""
    reader = MetricsReader(run / "metrics.db")
    radius, bounds = (reader.series(name, max_points=100_000) for name in ("gossip_radius", bound))
    known = dict(zip(bounds.t.tolist(), bounds.mean.tolist(), strict=True))
    return [(t, value, known[t]) for t, value in zip(radius.t.tolist(), radius.mean.tolist(), strict=True)
            if t in known]


def _over(run: Sequence[tuple[float, float, float]]) -> list[float]:
    """Radius over bound."""
    return [value / max(bound, _ROUNDING) for _, value, bound in run]


@contextlib.contextmanager
def learners_killed(every_s: float, found: list[int]) -> Iterator[None]:
    """Kills a learner among the processes that this one started now and then; ``found`` gets the process ids."""
    over, dice = threading.Event(), random.Random(1)

    def kill() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(psutil.Error):
                learners = [child for child in psutil.Process().children(recursive=True)
                            if is_worker(child.name(), "learner")]
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
    """A run in which a learner is killed every ten seconds, and the rate of one in which none is."""
    killed: list[int] = []
    found: dict[str, list[Document]] = {"killed": [], "left alone": []}
    for seed in range(bench.first_seed, bench.first_seed + bench.seeds):
        flags = ["--env", bench.env_ids[0], *bench.mixing("gossip"), "--seed", str(seed), "--set",
                 "run.forgiven_failures=1000000"]
        with learners_killed(KILL_S, killed):
            found["killed"].append(bench.train(flags, bench.seconds))
        found["left alone"].append(bench.train(flags, bench.length_s(bench.team)))
        bench.say(f"  seed {seed}: {len(killed)} kills so far")
    rows = [row("updates_per_s", "1/s", [one["updates_per_s"] for one in documents], case=case)
            for case, documents in found.items()]
    runs = [_beside_bound(Path(one["run_dir"]), "gossip_bound_2") for one in found["killed"]]
    return [row("kills", "kills", [len(killed)]), *rows,
            row("restarts", "restarts", [one["restarts"] for one in found["killed"]]),
            row("measured", "times", [len(run) for run in runs], proposition=2),
            row("largest_radius_over_bound", "ratio", [max(_over(run), default=None) for run in runs], proposition=2),
            row("largest_radius", "norm", [max((radius for _, radius, _ in run), default=None) for run in runs]),
            row("processes_left", "processes", [_left(Path(one["run_dir"])) for one in found["killed"]], target="0")]


def _left(run: Path) -> int:
    """Processes of a run that still live."""
    return len([*marked(str(read_run(run).get("nonce")))])


def converge_rows(bench: GalaBench) -> list[Row]:
    """Share of the seeds whose last policy has the return after so many env steps, by environments in all."""
    rows = []
    for env_id in bench.env_ids:
        for envs in bench.envs:
            each = ["--envs-per-sampler", str(envs // bench.team)]
            cases = {"gala": [*bench.mixing("gossip"), *each], "hogwild": [*bench.mixing("hogwild"), *each],
                     "a2c": ["--algo", "a2c", "--mode", "serial", "--envs-per-sampler", str(envs)]}
            found = bench.in_turn(cases, ["--env", env_id, "--env-steps", str(bench.env_steps)], _PATIENCE_S)
            for case, documents in found.items():
                last = [document["eval_return_mean"] for document in documents]
                reached = sum(one is not None and one >= bench.target_return for one in last)
                about = {"case": case, "env": env_id, "envs": envs}
                rows += [row("converged", "share", [reached / len(documents)], **about, runs=len(documents)),
                         row("eval_return_last", "return", last, **about),
                         row("eval_return_best", "return", [one["eval_return_best"] for one in documents], **about)]
    return rows


def paired_rows(bench: GalaBench) -> list[Row]:
    """GALA and A2C in mode hts for the same time: metrics of the protocol, seed by seed, rates, and time to the return.

    Runs go on after they have reached it.
    """
    rows = []
    for env_id in bench.env_ids:
        common = ["--env", env_id, "--target-return", str(bench.target_return), "--set", "stop.target_evaluations=0",
                  "--set", "a2c.lr_schedule=constant"]
        found = bench.in_turn({"gala": bench.mixing("gossip"), "hts a2c": ["--algo", "a2c", "--mode", "hts"]}, common,
                              bench.seconds)
        rows += [row(name, unit, [one.get(name) for one in documents], case=case, env=env_id)
                 for case, documents in found.items()
                 for name, unit in (("env_steps_per_s", "1/s"), ("energy_per_million_steps_kj", "kJ"))]
        rows += [time_row(documents, case=case, env=env_id) for case, documents in found.items()]
        rows += scores(found, env_id)
    return rows


# --- a picture ---


def draw_gala(rows: Sequence[Row], out: Path) -> None:
    """Draws the radius beside the bounds over a run of each topology, and the share of runs that converged."""
    curves = {(one["proposition"], one["topology"]): one["curve"] for one in rows if one.get("curve")}
    with picture(out, f"GALA, A2C: {read_machine().one_line()}") as (axes,):
        for axis, proposition, about in zip(axes, (1, 2), ("all mix at every update", "nobody waits"), strict=False):
            known = [topology for topology in TOPOLOGIES if curves.get((proposition, topology))]
            for topology in known:
                _draw_ball(axis, curves[proposition, topology], topology, f"C{TOPOLOGIES.index(topology)}")
            axis.set(xlabel="time since the first update [s]", yscale="log",
                     title=f"{about}: Proposition {proposition}")
            if known:
                axis.legend(fontsize=8)
        axes[0].set_ylabel("radius (line), its bound (dashed)")
        _draw_converged(axes[2], [one for one in rows if one["metric"] == "converged"])


def _draw_ball(axis: Axes, curve: Sequence[Sequence[float]], label: str, colour: str) -> None:
    times, radii, bounds = zip(*curve, strict=True)
    since = [t - times[0] for t in times]
    axis.plot(since, radii, color=colour, linewidth=1.2, label=label)
    if max(bounds) > 0.0:  # where all take the mean of all, it is 0, and what is left is rounding
        axis.plot(since, bounds, "--", color=colour, linewidth=1.0)


def _draw_converged(axis: Axes, rows: Sequence[Row]) -> None:
    """Bars side by side for each task and number of environments."""
    places = sorted({(one["env"], one["envs"]) for one in rows})
    cases = list(dict.fromkeys(one["case"] for one in rows))
    for number, case in enumerate(cases):
        shares = []
        for place in places:  # their seeds may come from several documents
            own = [one for one in rows if (one["env"], one["envs"], one["case"]) == (*place, case)]
            runs = sum(one["runs"] for one in own)
            shares.append(sum(one["value"] * one["runs"] for one in own) / runs if runs else 0.0)
        left = [place + (number - (len(cases) - 1) / 2) * 0.8 / len(cases) for place in range(len(places))]
        axis.bar(left, shares, 0.75 / len(cases), label=case)
    names = [textwrap.fill(re.sub("(?<=[a-z])(?=[A-Z])", " ", env.partition("-")[0]), 10) for env, _ in places]
    axis.set_xticks(range(len(places)), [f"{envs} envs\n{name}" for (_, envs), name in zip(places, names, strict=True)],
                    fontsize=7)
    axis.set(ylabel="share of runs that converged", ylim=(0.0, 1.3))  # the legend stands above the bars
    if cases:
        axis.legend(fontsize=8, loc="upper center", ncols=len(cases))


def add_gala_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="*", choices=PARTS, default=list(PARTS[:2]),
        help="slow: one learner of four slowed; steps: learners whose environments sleep; radius: distance from the "
        "mean over its bounds; kills: a learner killed every 10 s; converge: share of runs that reach a return; "
        "paired: equal time (default: slow steps)")
    add("--long", action="store_true", help="runs of 900 s, rates over 60 s (default: off)")
    add("--env", nargs="+", default=["CartPole-v1"], help="tasks (default: CartPole-v1)")
    add("--seconds", type=float, default=None, help="training of one run [s] (default: 60, with --long 900)")
    add("--target-return", type=float, default=475.0,
        help="mean of 10 greedy episodes of parts converge and paired (default: 475)")
    add("--team", type=int, default=TEAM, help=f"learners of the other parts (default: {TEAM})")
    add("--learners", type=int, nargs="+", default=list(LEARNERS), help="learners of part steps (default: 1 2 4 8)")
    add("--envs", type=int, nargs="+", default=list(ENVS),
        help="environments in all of part converge (default: 8 16 32)")
    add("--env-steps", type=int, default=100_000, help="env steps of a run of part converge (default: 100000)")
    add("--sleep", type=float, default=0.002, help="mean step time of environments that sleep [s] (default: 0.002)")
    add("--first-seed", type=int, default=1, help="seed of the first repeat (default: 1)")
    add("--out", default=None, help="picture of radius, bounds and converged runs to write (default: none)")
    add("--rows", nargs="+", default=[], metavar="FILE",
        help="earlier documents of this bench with --json to draw as well (default: none)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def gala_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for.

    Raises:
        ConfigError: environments of part converge that do not divide among the learners.
        SpreezeError: a run failed.
    """
    if "converge" in args.parts and any(envs % args.team for envs in args.envs):
        raise ConfigError(f"--envs {' '.join(map(str, args.envs))}: each has to be a multiple of --team {args.team}, "
                          "so that all cases have as many environments")
    bench = GalaBench(
        env_ids=tuple(args.env), seeds=args.repeats, seconds=args.seconds or (900.0 if args.long else 60.0),
        step_seconds=60.0 if args.long else 10.0, target_return=args.target_return, runs_dir=args.runs_dir, say=say,
        learners=tuple(args.learners), envs=tuple(args.envs), sleep_s=args.sleep, env_steps=args.env_steps,
        first_seed=args.first_seed, team=args.team,
    )
    parts = {"slow": slow_rows, "steps": steps_rows, "radius": radius_rows, "kills": kills_rows,
             "converge": converge_rows, "paired": paired_rows}
    return rows_of_parts(args, bench, parts, draw_gala, say)
