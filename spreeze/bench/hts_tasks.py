"""HTS-RL on tasks that are learned: against the serial mode in the same time, and its corrections against each other.

Whole runs, one at a time, modes or corrections in turn and seed by seed; scored by the protocol of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.bench.runs import Row, row, times_to_target, train
from spreeze.protocol import Report, Rules, Spread
from spreeze.protocol_table import report_of

CORRECTIONS = ("delayed", "none", "truncated-is")
_OUTSIDE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TasksBench:
    """What is trained, for how long, and how it is told."""

    env_ids: tuple[str, ...]
    algo: str
    seeds: int
    seconds: float
    """Training of one run [s]; of ``target_rows`` the most."""
    target_return: float
    runs_dir: str
    say: Callable[[str], None]
    executors: int = 2
    envs: int = 16
    """Environments in all, the same for every mode."""
    extra: tuple[str, ...] = ()
    run: Callable[[list[str], float], dict[str, Any]] = train

    def modes(self) -> dict[str, list[str]]:
        """HTS-RL with its executors, and the synchronous mode with as many environments in one process."""
        return {
            "hts": ["--mode", "hts", "--executors", str(self.executors),
                    "--envs-per-executor", str(self.envs // self.executors)],
            "serial": ["--mode", "serial", "--executors", "1", "--envs-per-executor", str(self.envs)],
        }

    def trained(self, env_id: str, seed: int, flags: Sequence[str]) -> dict[str, Any]:
        """One run; returns its document."""
        arguments = ["--env", env_id, "--algo", self.algo, *flags, "--seed", str(seed), "--seconds", str(self.seconds),
                     "--runs-dir", self.runs_dir, "--no-visualizer", *self.extra]
        return self.run(arguments, self.seconds + _OUTSIDE_S)

    def in_turn(self, env_id: str, cases: dict[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
        """The documents of each case, seed by seed."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
        for seed in range(1, self.seeds + 1):
            for name, flags in cases.items():
                document = self.trained(env_id, seed, flags)
                found[name].append(document)
                best = document["eval_return_best"]
                self.say(f"  {env_id}, seed {seed}, {name}: {document['env_steps']} env steps, {document['updates']} "
                         f"updates, best return {'-' if best is None else format(best, '.1f')}")
        return found


def target_rows(bench: TasksBench) -> list[Row]:
    """Wall time from process start to the target return, HTS-RL and serial in turn."""
    rows = []
    for env_id in bench.env_ids:
        target = ["--target-return", str(bench.target_return)]
        found = bench.in_turn(env_id, {name: [*flags, *target] for name, flags in bench.modes().items()})
        times = {}
        for mode, documents in found.items():
            times[mode], reached = times_to_target(documents)
            rows.append(row("time_to_target_s", unit="s", values=times[mode], env=env_id, mode=mode, reached=reached,
                            target="<= 60 s, all seeds" if mode == "hts" and env_id == "CartPole-v1" else None))
            env_steps = [document["env_steps"] for document in documents]
            rows.append(row("env_steps", unit="env steps", values=env_steps, env=env_id, mode=mode))
        ratios = [a / b for a, b in zip(*times.values(), strict=True)]
        rows.append(row("time_over_serial", unit="ratio", values=ratios, env=env_id, target="<= 0.7"))
    return rows


def paired_rows(bench: TasksBench) -> list[Row]:
    """HTS-RL and serial in the same time: the paper's metrics seed by seed, and env steps a second."""
    rows = []
    for env_id in bench.env_ids:
        found = bench.in_turn(env_id, bench.modes())
        rates = {mode: [d["env_steps_per_s"] for d in documents] for mode, documents in found.items()}
        rows += [row("env_steps_per_s", values=values, env=env_id, mode=mode) for mode, values in rates.items()]
        ratios = [a / b if a and b else None for a, b in zip(rates["hts"], rates["serial"], strict=True)]
        rows.append(row("rate_over_serial", unit="ratio", values=ratios, env=env_id))
        rows += _scores(_report(found), env_id)
    return rows


def correction_rows(bench: TasksBench) -> list[Row]:
    """What is done about data one interval old: the final metric of each correction."""
    rows = []
    for env_id in bench.env_ids:
        flags = bench.modes()["hts"]
        found = bench.in_turn(env_id, {name: [*flags, "--correction", name] for name in CORRECTIONS})
        rows += _scores(_report(found), env_id)
    return rows


def _report(found: dict[str, list[dict[str, Any]]]) -> Report:
    paths = [Path(document["run_dir"]) for documents in found.values() for document in documents]
    return report_of(paths, (), Rules())


def _scores(report: Report, env_id: str) -> list[Row]:
    """Metrics of each group, and of each two groups seed by seed; means and intervals as the protocol has them."""
    rows = []
    for group in report.groups:
        runs = [run for run in report.runs if run.group == group.group]
        more = {"env": env_id, "group": group.group.label}
        rows.append(_spread_row("final_metric", group.final, [run.final for run in runs], **more))
        rows.append(_spread_row("final_time_metric", group.final_time, [run.final_time for run in runs], **more))
    return rows + [_spread_row("final_metric_difference", pair.final, [], env=env_id,
                               group=f"{pair.group.label} less {pair.against.label}") for pair in report.pairs]


def _spread_row(metric: str, spread: Spread | None, repeats: list[float | None], **more: Any) -> Row:
    mean, low, high = (None, None, None) if spread is None else (spread.mean, spread.low, spread.high)
    return {"metric": metric, "unit": "return", "value": mean, "low": low, "high": high, "repeats": repeats, **more}
