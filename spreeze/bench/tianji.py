"""TianJi: the controller's choice in the curve over samplers, balance under a foreign load, groups, QMIX.

Every figure is a whole ``python -m spreeze.train`` in processes of its own, cases in turn, seed by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.bench import Row, ratios, row, row_of_reached
from spreeze.bench.hts import scores
from spreeze.bench.runs import (
    Axes,
    Document,
    RunsBench,
    Say,
    busy_core,
    env_steps_to_target,
    linear_rows,
    picture,
    rows_of_parts,
    sleeping,
    time_row,
)
from spreeze.machine.hardware import read_machine
from spreeze.metrics import median
from spreeze.metrics.store import MetricsReader
from spreeze.testing import SYNTHETIC_ID

PARTS = ("curve", "sleeping", "balance", "serial", "modes", "groups", "collect", "game", "qmix")
SAMPLERS = (1, 2, 4, 8)
MANY_SAMPLERS = (1, 2, 4, 8, 16, 24)
"""Of part ``sleeping``."""
GROUPS = (1, 2, 4)
SIZES = (8, 1_000, 20_000)
"""Numbers in an observation, for part ``collect``."""
CONTROLLER = "controller"
TOLERANCE = 0.05
"""By which consumption over production (TR_L over TR_A) may miss the serial value."""
_SETTLED_S, _PERIOD_S = 10.0, 20.0
_START_S = 6.0
_PATIENCE_S = 7200.0
"""Longest run where env steps are counted, not seconds."""
_MODE = ("--mode", "tianji")
_SMALL = ("--algo", "sac", "--envs-per-sampler", "1", "--batch-size", "32", "--set", "sac.hidden_sizes=[32,32]",
          "--set", "replay.capacity=20000", "--set", "replay.learning_starts=100")
GAME = "spreeze.envs.two_step_game"
_GAME = ("--samplers", "1", "--env", f"parallel:{GAME}", "--import", GAME, "--samples-per-insert", "8:8", "--set",
         "replay.learning_starts=200", "--set", "qmix.epsilon_end=1.0", "--set", "qmix.hidden_sizes=[32]", "--set",
         "qmix.lr=0.005", "--set", "qmix.tau=0.05")
_SYNTHETIC_RETURN = 140.0
_CARTPOLE_RETURN = 475.0
"""Of the 200 that are the best there."""


@dataclass(frozen=True, kw_only=True)
class TianjiBench(RunsBench):
    """Runs whose production and consumption are balanced."""

    env_id: str
    algo: str
    step_seconds: float
    """What a rate is measured over [s]."""
    samplers: tuple[int, ...] = SAMPLERS
    groups: tuple[int, ...] = GROUPS
    sleep_s: float = 0.002
    """Mean step time of environments that sleep."""
    env_steps: int | None = None
    """Of a run of part qmix; None: ``seconds`` of it."""

    @property
    def task(self) -> list[str]:
        return ["--env", self.env_id, "--algo", self.algo, "--target-return", str(self.target_return)]


def curve_rows(bench: TianjiBench) -> list[Row]:
    """Time to the return by number of samplers, and with the number that tuner and governor choose (paper: Table 1)."""
    return _curve(bench, bench.task, bench.samplers, bench.env_id)


def sleeping_rows(bench: TianjiBench) -> list[Row]:
    """The same where environments sleep, as if each sampler had a core: a small network, four samples per insert."""
    task = [*sleeping(bench.sleep_s), *_SMALL, "--samples-per-insert", "4:4", "--target-return", str(_SYNTHETIC_RETURN)]
    return _curve(bench, task, MANY_SAMPLERS, SYNTHETIC_ID)


def _curve(bench: TianjiBench, task: list[str], samplers: tuple[int, ...], env_id: str) -> list[Row]:
    """The controller's machine is measured beforehand, once, which does not count."""
    chosen = ["--auto", *_MODE]
    bench.train([*task, *chosen, "--fresh"], 1.0)
    cases = {str(count): [*_MODE, "--samplers", str(count)] for count in samplers}
    found = bench.in_turn(cases | {CONTROLLER: chosen}, task, bench.seconds)
    rows, medians = [], {}
    for case, documents in found.items():
        told: dict[str, Any] = {"samplers": median([float(one["samplers"]) for one in documents]), "env": env_id}
        times = time_row(documents, case=case, **told)
        medians[case] = times["value"]
        rows += [times, row("env_steps", "env steps", [one["env_steps"] for one in documents], case=case, **told),
                 row("updates", "updates", [one["updates"] for one in documents], case=case, **told)]
    known = [time_s for case, time_s in medians.items() if case != CONTROLLER and time_s is not None]
    over = medians[CONTROLLER] / min(known) if known and medians[CONTROLLER] is not None else None
    return [*rows, row("controller_over_best", "ratio", [over], env=env_id, target="<= 1.1")]


@contextlib.contextmanager
def load_that_comes_and_goes(core: int, period_s: float) -> Iterator[None]:
    """Another program keeps a core busy for every other ``period_s``."""
    over = threading.Event()

    def turns() -> None:
        while not over.wait(period_s):
            with busy_core(core):
                over.wait(period_s)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def balance_rows(bench: TianjiBench) -> list[Row]:
    """How far consumption over production strays from the serial value while a foreign load comes and goes."""
    with load_that_comes_and_goes(max(os.sched_getaffinity(0)), _PERIOD_S):
        found = bench.in_turn({"balance": [*_MODE]}, ["--env", bench.env_id, "--algo", bench.algo], bench.seconds)
    rows: list[Row] = []
    strays, within, changes = [], [], []
    for document in found["balance"]:
        reader, ratio = MetricsReader(Path(document["run_dir"]) / "metrics.db"), document["samples_per_insert_band"][0]
        now = reader.series("samples_per_insert_now", max_points=100_000)
        settled = [abs(value / ratio - 1.0) for t, value in zip(now.t, now.mean, strict=True)
                   if t - now.t[0] >= _SETTLED_S]
        strays.append(max(settled, default=None))
        within.append(sum(one <= TOLERANCE for one in settled) / len(settled) if settled else None)
        said = sum(event.text.startswith("governor:") for event in reader.events(1000))
        changes.append(60.0 * said / bench.seconds)
        rows.append(row("ratio_whole_run", "ratio", [document["samples_per_insert"] / ratio], env=bench.env_id))
    return [*rows, row("largest_stray", "share", strays, env=bench.env_id),
            row("time_within_5_percent", "share", within, env=bench.env_id, target="1"),
            row("changes_of_samplers", "1/min", changes, env=bench.env_id)]


def serial_rows(bench: TianjiBench) -> list[Row]:
    """Env steps to the return beside mode serial, where each row is drawn as often: those of the policy that has it."""
    found = bench.in_turn({"tianji": [*_MODE], "serial": ["--mode", "serial"]}, bench.task, bench.seconds)
    rows, taken = [], {}
    for case, documents in found.items():
        taken[case] = [env_steps_to_target(document, bench.target_return) for document in documents]
        rows += [row_of_reached("env_steps_to_target", "env steps", taken[case], case=case, env=bench.env_id),
                 time_row(documents, case=case, env=bench.env_id)]
    # Where only serial did not get there, all of its env steps count: the true ratio is lower.
    others = [b or document["env_steps"] for b, document in zip(taken["serial"], found["serial"], strict=True)]
    return [*rows, row_of_reached("env_steps_over_serial", "ratio", ratios(taken["tianji"], others), env=bench.env_id)]


def modes_rows(bench: TianjiBench) -> list[Row]:
    """Time to the return of PPO and DQN in this mode and in those that were made for them, on CartPole."""
    cases = {"tianji ppo": [*_MODE, "--algo", "ppo"], "hts ppo": ["--mode", "hts", "--algo", "ppo"],
             "impact": ["--mode", "impact", "--algo", "impact"], "tianji dqn": [*_MODE, "--algo", "dqn"],
             "spreeze dqn": ["--mode", "spreeze", "--algo", "dqn"]}
    found = bench.in_turn(cases, ["--env", "CartPole-v1", "--target-return", str(_CARTPOLE_RETURN)],
                          bench.seconds)
    rows = []
    for case, documents in found.items():
        steps = [env_steps_to_target(one, _CARTPOLE_RETURN) for one in documents]
        rows += [time_row(documents, case=case), row_of_reached("env_steps_to_target", "env steps", steps, case=case)]
    return rows


def groups_rows(bench: TianjiBench) -> list[Row]:
    """Env steps a second by the number of groups whose environments sleep (gamma, coefficient of variation 1)."""
    common = [*sleeping(bench.sleep_s), *_SMALL, *_MODE, "--samples-per-insert", "4:4", "--set",
              "evaluation.episodes=1"]
    cases = {str(count): ["--learners", str(count), "--samplers", str(2 * count)] for count in bench.groups}
    found = bench.in_turn(cases, common, bench.step_seconds + _START_S)
    return linear_rows(found, "groups")


def collect_rows(bench: TianjiBench) -> list[Row]:
    """Time to collect 1,000 transitions by size and samplers, and by the paper's Eq. 1: (T_sp + T_sd) N_s / N_A.

    T_sp (environment and policy) and T_sd (writing) are those of one sampler. The paper prints the first case of Eq. 1
    without N_A, against its own text. Environments sleep, as if each sampler had a core.
    """
    rows = []
    for size in SIZES:
        common = [*sleeping(bench.sleep_s), f"--env-arg=obs_dim={size}", "--algo", "sac", "--mode", "spreeze",
                  "--batch-size", "8", "--envs-per-sampler", "1", "--samples-per-insert", "0:8", "--set",
                  "sac.hidden_sizes=[8]", "--set", "replay.capacity=2000", "--set", "replay.learning_starts=100",
                  "--set", "evaluation.episodes=1"]
        cases = {str(count): ["--samplers", str(count)] for count in bench.samplers}
        found = bench.in_turn(cases, common, bench.step_seconds + _START_S)
        one = [document["env_steps_per_s"] for document in found[str(bench.samplers[0])]]
        for count, documents in found.items():
            rates = [document["env_steps_per_s"] for document in documents]
            taken = [1000.0 / rate if rate else None for rate in rates]
            formula = [1000.0 * bench.samplers[0] / (rate * int(count)) if rate else None for rate in one]
            about = {"samplers": int(count), "obs_bytes": 4 * size}
            rows += [row("collect_1000_s", "s", taken, **about), row("by_equation_1_s", "s", formula, **about),
                     row("writing_share", "share", [_writing(document) for document in documents], **about)]
    return rows


def _writing(document: Document) -> float | None:
    """Share of the samplers' working time that goes into writing rows: what sending costs (T_sd)."""
    split = document["time_split"]
    parts = [split.get(f"sampler_{name}_share") for name in ("policy", "env", "write")]
    total = sum(part for part in parts if part is not None)
    return None if parts[2] is None or not total else parts[2] / total


def game_rows(bench: TianjiBench) -> list[Row]:
    """The two-step game of the QMIX paper (table 2), explored at random: what the greedy team gets."""
    cases = {mixer: ["--set", f"qmix.mixer={mixer}"] for mixer in ("qmix", "vdn")}
    found = bench.in_turn(cases, [*_GAME, *_MODE, "--env-steps", "20000"], bench.seconds)
    return [row("greedy_return", "return", [one["eval_return_mean"] for one in documents], case=case,
                target={"qmix": "8", "vdn": "7"}[case]) for case, documents in found.items()]


def qmix_rows(bench: TianjiBench) -> list[Row]:
    """QMIX and VDN on simple_spread: return of the team over its last evaluations, after a time or env steps.

    With ``env_steps`` in mode serial, where the figure does not depend on the machine's speed.
    """
    env_id = "mpe2:simple_spread_v3"
    cases = {mixer: ["--set", f"qmix.mixer={mixer}"] for mixer in ("qmix", "vdn")}
    counted = bench.env_steps is not None
    common = ["--env", env_id, *(("--mode", "serial", "--env-steps", str(bench.env_steps)) if counted else _MODE)]
    found = bench.in_turn(cases, common, _PATIENCE_S if counted else bench.seconds)
    taken = [row(name, name.replace("_", " "), [one[name] for one in documents], case=case, env=env_id)
             for case, documents in found.items() for name in ("env_steps", "updates")]
    return taken + scores(found, env_id)


# --- a picture ---


def draw_tianji(rows: Sequence[Row], out: Path) -> None:
    """Draws time to a return over samplers with the controller's choice marked, and time to collect (Fig. 5).

    Parts that were not measured have no panel.
    """
    parts = {"curve": "environments as they are", "sleeping": "environments that sleep"}
    times = {title: [one for one in rows if (one["metric"], one.get("part")) == ("time_to_target_s", part)]
             for part, title in parts.items()}
    times = {title: own for title, own in times.items() if own}
    collected = [one for one in rows if one["metric"] in ("collect_1000_s", "by_equation_1_s")]
    panels = max(1, len(times) + bool(collected))
    with picture(out, f"Mode tianji: {read_machine().one_line()}", panels=panels) as (axes,):
        for axis, (title, own) in zip(axes, times.items(), strict=False):
            for number, env_id in enumerate(dict.fromkeys(one["env"] for one in own)):
                _draw_times(axis, [one for one in own if one["env"] == env_id], f"C{number}")
            axis.set(xlabel="samplers", ylabel="time to the return [s]", title=title)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0.0)
            axis.legend(fontsize=8)
        if collected:
            _draw_collection(axes[-1], collected)


def _draw_times(axis: Axes, rows: Sequence[Row], colour: str) -> None:
    """A line of medians with all repeats as a band, and a star for the controller."""
    known = [one for one in rows if one["value"] is not None]
    swept = sorted((one for one in known if one["case"] != CONTROLLER), key=lambda one: float(one["samplers"]))
    samplers = [one["samplers"] for one in swept]
    taken = [[value for value in one["repeats"] if value is not None] for one in swept]
    axis.plot(samplers, [one["value"] for one in swept], marker="o", markersize=3, color=colour, label=rows[0]["env"])
    axis.fill_between(samplers, [*map(min, taken)], [*map(max, taken)], alpha=0.2, linewidth=0, color=colour)
    for one in known:
        if one["case"] == CONTROLLER:
            axis.plot([one["samplers"]], [one["value"]], "*", markersize=13, color=colour, markeredgecolor="black",
                      label="controller's choice")


def _draw_collection(axis: Axes, rows: Sequence[Row]) -> None:
    for number, size in enumerate(dict.fromkeys(one["obs_bytes"] for one in rows)):
        for metric, style in (("collect_1000_s", "o-"), ("by_equation_1_s", "--")):
            own = [one for one in rows if (one["metric"], one["obs_bytes"]) == (metric, size)]
            axis.plot([one["samplers"] for one in own], [one["value"] for one in own], style, markersize=3,
                      color=f"C{number}", label=f"{size} B" if style != "--" else None)
    axis.set(xlabel="samplers that sleep", ylabel="time to collect 1,000 [s], Eq. 1 dashed", yscale="log")
    axis.set_xscale("log", base=2)
    if rows:
        axis.legend(fontsize=8)


def add_tianji_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="*", choices=PARTS, default=list(PARTS[:2]),
        help="curve: time to a return by number of samplers, and the controller's; sleeping: the same with up to 24 "
        "samplers whose environments sleep; balance: under a load that comes "
        "and goes; serial: env steps to the return beside mode serial; modes: PPO and DQN beside hts, impact, spreeze; "
        "groups and collect: environments that sleep; game and qmix: beside VDN (default: curve sleeping)")
    add("--long", action="store_true", help="runs of 600 s, rates over 60 s (default: off)")
    add("--env", default="Pendulum-v1", help="task of the first three parts (default: Pendulum-v1)")
    add("--algo", default="sac", help="algorithm of these (default: sac)")
    add("--target-return", type=float, default=-200.0, help="mean of 10 greedy episodes (default: -200)")
    add("--seconds", type=float, default=None, help="training of one run [s] (default: 90, with --long 600)")
    add("--samplers", type=int, nargs="+", default=list(SAMPLERS), help="of parts curve and collect (default: 1 2 4 8)")
    add("--groups", type=int, nargs="+", default=list(GROUPS), help="of part groups (default: 1 2 4)")
    add("--env-steps", type=int, default=None,
        help="env steps of a run of part qmix, in mode serial (default: by time)")
    add("--sleep", type=float, default=0.002, help="mean step time of environments that sleep [s] (default: 0.002)")
    add("--first-seed", type=int, default=1, help="seed of the first repeat (default: 1)")
    add("--out", default=None, help="picture of parts curve, sleeping and collect to write (default: none)")
    add("--rows", nargs="+", default=[], metavar="FILE",
        help="earlier documents of this bench with --json to draw as well (default: none)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def tianji_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for; a SpreezeError if a run failed."""
    bench = TianjiBench(
        env_id=args.env, algo=args.algo, target_return=args.target_return, seeds=args.repeats,
        seconds=args.seconds or (600.0 if args.long else 90.0), step_seconds=60.0 if args.long else 10.0,
        runs_dir=args.runs_dir, say=say, samplers=tuple(args.samplers), groups=tuple(args.groups),
        sleep_s=args.sleep, env_steps=args.env_steps, first_seed=args.first_seed,
    )
    parts = {"curve": curve_rows, "sleeping": sleeping_rows, "balance": balance_rows, "serial": serial_rows,
             "modes": modes_rows, "groups": groups_rows, "collect": collect_rows, "game": game_rows,
             "qmix": qmix_rows}
    return rows_of_parts(args, bench, parts, draw_tianji, say)
