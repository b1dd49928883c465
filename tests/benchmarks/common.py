"""Shared by the scripts of this folder: their flags, runs of several cases in turn, and rows of results.

Each script is started from the repository: ``python tests/benchmarks/hts.py --repeats 3 --parts steps target``. A run
is a ``python -m spreeze.train`` in processes of its own; cases take turns seed by seed, so that drift of the machine
meets all alike. Runs stay in ``--runs-dir``, where ``python -m spreeze report`` and ``curve.py`` find them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1] / "support"
"""Folder of what tests and scripts share, and of environments that fail on purpose, for this process and for runs."""
sys.path.insert(0, str(SUPPORT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))

import whole_runs
from figures import Row, line, row, row_of_reached
from whole_runs import OUTSIDE_S, Document, in_turn

from spreeze.cli.runs import report
from spreeze.envs.small_tasks import SYNTHETIC_ID
from spreeze.machine.hardware import read_machine
from spreeze.metrics.return_curve import reached
from spreeze.metrics.store import MetricsReader

Part = Callable[[argparse.Namespace], list[Row]]
PATIENCE_S = 7200.0
"""Longest run where env steps or updates are counted, not seconds."""


def main(about: str, parts: Mapping[str, Part], *, flags: Mapping[str, Any] | None = None, **defaults: Any) -> None:
    """Measures the parts that ``--parts`` names and prints their rows.

    Args:
        about: the script's docstring.
        parts: name -> what measures it.
        flags: further flags and their defaults; a tuple takes several values (an empty one: integers), a list is
            repeated.
        defaults: of ``env``, ``seconds`` and ``target_return``, where the script has other ones.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=tuple(parts), default=list(parts)[:1])
    add("--repeats", type=int, default=3, help="seeds")
    add("--first-seed", type=int, default=1)
    add("--runs-dir", default="runs")
    add("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="of all runs, as often as needed")
    add("--json", action="store_true")
    known = {"env": "CartPole-v1", "seconds": 60.0, "target_return": 475.0, **defaults}
    for name, value in {**known, **(flags or {})}.items():
        flag, several = f"--{name.replace('_', '-')}", isinstance(value, tuple)
        if isinstance(value, bool):
            add(flag, action="store_true")
        elif isinstance(value, list):
            add(flag, action="append", default=value)
        else:
            kind = type(next(iter(value), 0) if several else value)
            add(flag, type=kind, default=value, **({"nargs": "+"} if several else {}))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that runs are ended too
    rows = []
    for part in args.parts:
        say(f"{part}:")
        rows += [{**one, "part": part} for one in parts[part](args)]
    machine = read_machine().one_line()
    print(json.dumps({"machine": machine, "rows": rows}) if args.json else "\n".join([machine, *map(line, rows)]))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare(
    args: argparse.Namespace,
    cases: Mapping[str, list[str]],
    common: list[str],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, list[Document]]:
    """The documents of each case's runs, seed by seed; ``seconds`` of training each at most, else ``--seconds``."""
    seconds = args.seconds if seconds is None else seconds
    always = ["--seconds", str(seconds), "--runs-dir", args.runs_dir, "--no-visualizer", *common]
    always += [f"--set={text}" for text in args.set]
    return in_turn(
        cases,
        args.repeats,
        lambda own: whole_runs.train([*always, *own], seconds + OUTSIDE_S, environment, **options),
        say,
        args.first_seed,
    )


def ratios(values: Sequence[float | None], others: Sequence[float | None]) -> list[float | None]:
    """Of each repeat; None where either is unknown or 0."""
    return [one / other if one and other else None for one, other in zip(values, others, strict=True)]


def rows_of(found: Mapping[str, list[Document]], *names: str, **more: Any) -> list[Row]:
    """These figures of the documents, case by case."""
    return [
        row(name, "", [one.get(name) for one in documents], case=case, **more)
        for case, documents in found.items()
        for name in names
    ]


def written_report(args: argparse.Namespace, found: Mapping[str, list[Document]], name: str) -> None:
    """Compares all runs by the protocol of ``python -m spreeze report``, in a file beside them."""
    names = [Path(one["run_dir"]).name for documents in found.values() for one in documents]
    report([*names, "--runs-dir", args.runs_dir, "--out", str(Path(args.runs_dir) / f"{name}.html")])


def sleeping(mean_s: float, law: str = "gamma", cv: float = 1.0) -> list[str]:
    """Flags of environments whose steps sleep; ``cv`` is the coefficient of variation of their times."""
    return [
        "--env",
        SYNTHETIC_ID,
        f"--env-arg=law={law}",
        f"--env-arg=mean_s={mean_s}",
        f"--env-arg=cv={cv}",
        "--envs-per-sampler",
        "1",
        "--set",
        "evaluation.episodes=1",
    ]


def linear_rows(found: Mapping[str, list[Document]], name: str) -> list[Row]:
    """Env steps/s by the number of ``name``, and what share they are of so many times the first number's."""
    rates = {int(count): [one["env_steps_per_s"] for one in documents] for count, documents in found.items()}
    first, alone = next(iter(rates.items()))
    rows = []
    for count, values in rates.items():
        linear = [over and over * first / count for over in ratios(values, alone)]
        rows += [
            row("env_steps_per_s", "1/s", values, **{name: count}),
            row("share_of_linear", "share", linear, target=">= 0.9", **{name: count}),
        ]
    return rows


def steps_to_target(document: Document, target: float) -> int | None:
    """Env steps of the first policy whose evaluation reached the target, without those collected meanwhile."""
    found = reached(MetricsReader(Path(document["run_dir"]) / "metrics.db").evaluations(), target, 1)
    return None if found is None else int(found.env_steps)


def rows_of_target(found: Mapping[str, list[Document]], target: float, **more: Any) -> list[Row]:
    """Env steps to the target, case by case."""
    return [
        row_of_reached(
            "env_steps_to_target", "env steps", [steps_to_target(one, target) for one in documents], case=case, **more
        )
        for case, documents in found.items()
    ]


_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    sum(range(10000))
"""


@contextlib.contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Another program that keeps a core busy, from a session of its own; it ends with this process at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SPIN, str(core), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={"PATH": os.defpath},
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def on_cores(count: int | None) -> Iterator[None]:
    """The first so many of this process's cores, for it and what it starts meanwhile; all if None."""
    own = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, own[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
