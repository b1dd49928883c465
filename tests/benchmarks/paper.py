"""Table 1 and Figs. 3 and 4 of the Spreeze paper (arXiv 2312.06126) as this machine gives them.

Samplers side by side are in ``tests/support/processes_together.py``, queues in ``tests/slow/queue_ablation.py``.
"""

import argparse
from pathlib import Path

from common import PATIENCE_S, compare, main, on_cores, rows_of, say
from figures import Row, row
from whole_runs import Document, time_row

from spreeze.machine.hardware import read_machine
from spreeze.metrics.store import MetricsReader


def table(args: argparse.Namespace) -> list[Row]:
    """Columns of Table 1: the tuner's choice, and its choice with batch sizes that are given."""
    cases = {"chosen by the tuner": ["--auto"]}
    cases |= {f"batch {batch}": ["--auto", "--batch-size", str(batch)] for batch in args.batch_size}
    found = compare(args, cases, ["--env", args.env])
    rows = rows_of(found, "batch_size", "samplers", "env_steps_per_s", "update_frames_per_s", "updates_per_s")
    for case, documents in found.items():
        rows += [
            row(name, "share", [_settled(one, name) for one in documents], case=case) for name in ("cpu_use", "gpu_use")
        ]
        rows.append(
            row(
                "rows_lost_share",
                "share",
                [max(0.0, 1.0 - one["rows_stored"] / max(1, one["env_steps"])) for one in documents],
                case=case,
            )
        )
    return rows


def _settled(document: Document, metric: str) -> float | None:
    """Mean of a series without the run's first third, of several GPUs the first one's; None without such a series."""
    reader = MetricsReader(Path(document["run_dir"]) / "metrics.db")
    name = next((one for one in sorted(reader.names()) if one.partition("/")[0] == metric), None)
    series = None if name is None else reader.series(name, max_points=100_000)
    if series is None:
        return None
    values = [value for t, value in zip(series.t, series.mean, strict=True) if t >= series.t[-1] / 3.0]
    return float(sum(values) / len(values))


def cpu(args: argparse.Namespace) -> list[Row]:
    """The same run, tuned for what it has, on all, half and a quarter of the cores."""
    usable, rows = read_machine().cores.usable, []
    for share in (1.0, 0.5, 0.25):
        if usable * share < 1.0 or usable * share % 1.0:
            say(f"  {100 * share:.0f} % of {usable:g} cores: affinity gives whole cores only, so left out")
            continue
        with on_cores(int(usable * share)):
            found = compare(
                args,
                {f"{100 * share:.0f} %": ["--auto"]},
                ["--env", args.env, "--target-return", str(args.target_return)],
            )
        rows += _learned(found)
    return rows


def _learned(found: dict[str, list[Document]]) -> list[Row]:
    return [
        *rows_of(found, "env_steps_per_s", "updates_per_s", "eval_return_final", "eval_return_best"),
        *(time_row(documents, case=case) for case, documents in found.items()),
    ]


def algorithms(args: argparse.Namespace) -> list[Row]:
    """SAC and TD3; with ``--updates`` in mode serial after so many of them, which no other program changes."""
    common = ["--env", args.env]
    common += ["--mode", "serial", "--updates", str(args.updates)] if args.updates else ["--auto"]
    return _learned(
        compare(args, {algo: ["--algo", algo] for algo in ("sac", "td3")}, common, PATIENCE_S if args.updates else None)
    )


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"table": table, "cpu": cpu, "algorithms": algorithms},
        flags={"batch_size": (128, 8192), "updates": 0},
        env="Walker2DBulletEnv-v0",
        target_return=909.0,
    )
