"""TianJi: the controller's choice in the curve over samplers, balance under a foreign load, groups, QMIX.

Every figure is a whole ``python -m spreeze.train`` in processes of its own, cases in turn, seed by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spreeze.bench import Row, row
from spreeze.bench.hts import scores
from spreeze.bench.runs import Document, Say, busy_core, in_turn, times_to_target, train
from spreeze.metrics import median
from spreeze.metrics.store import MetricsReader
from spreeze.testing import SYNTHETIC_ID

PARTS = ("curve", "sleeping", "balance", "serial", "modes", "groups", "collect", "qmix")
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
_STEP_S, _START_S, _OUTSIDE_S = 0.002, 6.0, 180.0
_MODE = ("--mode", "tianji")
_SLEEPY = ("--env", SYNTHETIC_ID, "--env-arg=law=gamma", f"--env-arg=mean_s={_STEP_S}", "--env-arg=cv=1")
_SMALL = ("--algo", "sac", "--envs-per-sampler", "1", "--batch-size", "32", "--set", "sac.hidden_sizes=[32,32]",
          "--set", "replay.capacity=20000", "--set", "replay.learning_starts=100")
_SYNTHETIC_RETURN = 140.0
"""Of the 200 that are the best there."""


@dataclass(frozen=True, kw_only=True)
class TianjiBench:
    """What is trained, for how long, and how it is told."""

    env_id: str
    algo: str
    target_return: float
    seeds: int
    seconds: float
    """Training of one run [s], at most where it has a target."""
    step_seconds: float
    """What a rate is measured over [s]."""
    runs_dir: str
    say: Say
    samplers: tuple[int, ...] = SAMPLERS
    groups: tuple[int, ...] = GROUPS
    run: Callable[..., Document] = train

    def train(self, flags: list[str], seconds: float) -> Document:
        return self.run([*flags, "--seconds", str(seconds), "--runs-dir", self.runs_dir, "--no-visualizer"],
                        seconds + _OUTSIDE_S)

    def in_turn(self, cases: dict[str, list[str]], common: list[str], seconds: float) -> dict[str, list[Document]]:
        """The documents of each case, seed by seed."""
        return in_turn(cases, self.seeds, lambda own: self.train([*common, *own], seconds), self.say)

    @property
    def task(self) -> list[str]:
        return ["--env", self.env_id, "--algo", self.algo, "--target-return", str(self.target_return)]


def curve_rows(bench: TianjiBench) -> list[Row]:
    """Time to the return by number of samplers, and with the number that tuner and governor choose (paper: Table 1)."""
    return _curve(bench, bench.task, bench.samplers, bench.env_id)


def sleeping_rows(bench: TianjiBench) -> list[Row]:
    """The same where environments sleep, as if each sampler had a core: a small network, four samples per insert."""
    task = [*_SLEEPY, *_SMALL, "--samples-per-insert", "4:4", "--target-return", str(_SYNTHETIC_RETURN)]
    return _curve(bench, task, MANY_SAMPLERS, SYNTHETIC_ID)


def _curve(bench: TianjiBench, task: list[str], samplers: tuple[int, ...], env_id: str) -> list[Row]:
    """The controller's machine is measured beforehand, once, which does not count."""
    chosen = ["--auto", *_MODE]
    bench.train([*task, *chosen, "--fresh"], 1.0)
    cases = {str(count): [*_MODE, "--samplers", str(count)] for count in samplers}
    found = bench.in_turn(cases | {CONTROLLER: chosen}, task, bench.seconds)
    rows, medians = [], {}
    for case, documents in found.items():
        times, reached = times_to_target(documents)
        medians[case] = median(times)
        told = {"samplers": median([float(one["samplers"]) for one in documents]), "env": env_id}
        rows += [row("time_to_target_s", "s", times, case=case, reached=reached, **told),
                 row("env_steps", "env steps", [one["env_steps"] for one in documents], case=case, **told),
                 row("updates", "updates", [one["updates"] for one in documents], case=case, **told)]
    best = min(time_s for case, time_s in medians.items() if case != CONTROLLER)
    return [*rows, row("controller_over_best", "ratio", [medians[CONTROLLER] / best], env=env_id, target="<= 1.1")]


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
    with load_that_comes_and_goes(0, _PERIOD_S):
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
    """Env steps to the return beside mode serial, where every row is drawn as often."""
    found = bench.in_turn({"tianji": [*_MODE], "serial": ["--mode", "serial"]}, bench.task, bench.seconds)
    rows = []
    for case, documents in found.items():
        times, reached = times_to_target(documents)
        rows += [row("env_steps_to_target", "env steps", [one["env_steps"] for one in documents], case=case,
                     env=bench.env_id, reached=reached),
                 row("time_to_target_s", "s", times, case=case, env=bench.env_id)]
    over = [a["env_steps"] / b["env_steps"] for a, b in zip(found["tianji"], found["serial"], strict=True)]
    return [*rows, row("env_steps_over_serial", "ratio", over, env=bench.env_id)]


def modes_rows(bench: TianjiBench) -> list[Row]:
    """Time to the return of PPO and DQN in this mode and in those that were made for them, on CartPole."""
    cases = {"tianji ppo": [*_MODE, "--algo", "ppo"], "hts ppo": ["--mode", "hts", "--algo", "ppo"],
             "impact": ["--mode", "impact", "--algo", "impact"], "tianji dqn": [*_MODE, "--algo", "dqn"],
             "spreeze dqn": ["--mode", "spreeze", "--algo", "dqn"]}
    found = bench.in_turn(cases, ["--env", "CartPole-v1", "--target-return", "475"], bench.seconds)
    rows = []
    for case, documents in found.items():
        times, reached = times_to_target(documents)
        rows += [row("time_to_target_s", "s", times, case=case, reached=reached),
                 row("env_steps_to_target", "env steps", [one["env_steps"] for one in documents], case=case)]
    return rows


def groups_rows(bench: TianjiBench) -> list[Row]:
    """Env steps a second by the number of groups whose environments sleep (gamma, coefficient of variation 1)."""
    common = [*_SLEEPY, *_SMALL, *_MODE, "--samples-per-insert", "4:4", "--set", "evaluation.episodes=1"]
    cases = {str(count): ["--learners", str(count), "--samplers", str(2 * count)] for count in bench.groups}
    found = bench.in_turn(cases, common, bench.step_seconds + _START_S)
    rates = {count: [document["env_steps_per_s"] for document in documents] for count, documents in found.items()}
    alone, rows = rates[str(bench.groups[0])], []
    for count, values in rates.items():
        linear = [None if not one or not many else many / one * bench.groups[0] / int(count)
                  for one, many in zip(alone, values, strict=True)]
        rows += [row("env_steps_per_s", "1/s", values, groups=int(count)),
                 row("share_of_linear", "share", linear, groups=int(count), target=">= 0.9")]
    return rows


def collect_rows(bench: TianjiBench) -> list[Row]:
    """Time to collect 1,000 transitions by size and samplers, and by the paper's Eq. 1: (T_sp + T_sd) N_s / N_A.

    T_sp (environment and policy) and T_sd (writing) are those of one sampler. The paper prints the first case of Eq. 1
    without N_A, against its own text. Environments sleep, as if each sampler had a core.
    """
    rows = []
    for size in SIZES:
        common = [*_SLEEPY, f"--env-arg=obs_dim={size}", "--algo", "sac", "--mode", "spreeze", "--envs-per-sampler",
                  "1", "--batch-size", "8", "--samples-per-insert", "0:8", "--set", "sac.hidden_sizes=[8]", "--set",
                  "replay.capacity=2000", "--set", "replay.learning_starts=100", "--set", "evaluation.episodes=1"]
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


def qmix_rows(bench: TianjiBench) -> list[Row]:
    """QMIX and VDN on simple_spread for the same time: return of the team over its last evaluations."""
    env_id = "mpe2:simple_spread_v3"
    cases = {mixer: ["--set", f"qmix.mixer={mixer}"] for mixer in ("qmix", "vdn")}
    found = bench.in_turn(cases, ["--env", env_id, *_MODE], bench.seconds)
    return [row("env_steps", "env steps", [one["env_steps"] for one in documents], case=case, env=env_id)
            for case, documents in found.items()] + scores(found, env_id)


def add_tianji_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:2]),
        help="curve: time to a return by number of samplers, and the controller's; sleeping: the same with up to 24 "
        "samplers whose environments sleep; balance: under a load that comes "
        "and goes; serial: env steps to the return beside mode serial; modes: PPO and DQN beside hts, impact, spreeze; "
        "groups and collect: environments that sleep; qmix: beside VDN (default: curve balance)")
    add("--long", action="store_true", help="runs of 600 s, rates over 60 s (default: off)")
    add("--env", default="Pendulum-v1", help="task of the first three parts (default: Pendulum-v1)")
    add("--algo", default="sac", help="algorithm of these (default: sac)")
    add("--target-return", type=float, default=-200.0, help="mean of 10 greedy episodes (default: -200)")
    add("--seconds", type=float, default=None, help="training of one run [s] (default: 90, with --long 600)")
    add("--samplers", type=int, nargs="+", default=list(SAMPLERS), help="of parts curve and collect (default: 1 2 4 8)")
    add("--groups", type=int, nargs="+", default=list(GROUPS), help="of part groups (default: 1 2 4)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def tianji_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for; a SpreezeError if a run failed."""
    bench = TianjiBench(
        env_id=args.env, algo=args.algo, target_return=args.target_return, seeds=args.repeats,
        seconds=args.seconds or (600.0 if args.long else 90.0), step_seconds=60.0 if args.long else 10.0,
        runs_dir=args.runs_dir, say=say, samplers=tuple(args.samplers), groups=tuple(args.groups),
    )
    parts = {"curve": curve_rows, "sleeping": sleeping_rows, "balance": balance_rows, "serial": serial_rows,
             "modes": modes_rows, "groups": groups_rows, "collect": collect_rows, "qmix": qmix_rows}
    rows = []
    for part in args.parts:
        say(f"{part}:")
        rows += [{**one, "part": part} for one in parts[part](bench)]
    return rows
