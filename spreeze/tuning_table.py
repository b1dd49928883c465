"""The tuner's result as tables for a person."""

from __future__ import annotations

from typing import Any, TextIO

from rich.table import Table

from spreeze.autotune.records import median, spread
from spreeze.formats import clean, number, percent
from spreeze.terminal import Screen

_PLAIN_WIDTH = 118
"""Columns where the output is no terminal."""


def show(record: dict[str, Any], stream: TextIO, *, reasons: bool) -> None:
    """Prints every candidate, then what bounds the choice; with ``reasons`` also the choice itself."""
    screen = Screen(file=stream, width=None if stream.isatty() else _PLAIN_WIDTH, highlight=False)
    choice = record["choice"]
    if record["update_rates"]:
        screen.print(_learner_table(record["update_rates"], choice))
    if record.get("rollout_rates"):
        screen.print(_rollout_table(record["rollout_rates"], choice))
    if record["joint_rates"]:
        screen.print(_joint_table(record["joint_rates"], choice))
    lines = [f"objective {record['objective']}: {record['formula']}"]
    if reasons:
        lines += [f"{name} = {choice[name]}: {reason}" for name, reason in record["reasons"].items()]
    if record.get("paper_batch_size"):
        lines.append(f"(the Spreeze paper's rule would take batch {record['paper_batch_size']})")
    lines += [f"limit: {text}" for text in record["limits"]] + [f"note: {text}" for text in record["notes"]]
    for line in lines:
        screen.print(f"  {clean(line, 1000)}", soft_wrap=True)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in ("device", "") else "right", no_wrap=name != "")
    return table


def _learner_table(rates: list[dict[str, Any]], choice: dict[str, Any]) -> Table:
    table = _table("updates alone", ("batch", "threads", "device", "updates/s", "spread", "update frames/s", ""))
    for rate in rates:
        middle = median(rate["updates_per_s"]) if rate["updates_per_s"] else None
        table.add_row(
            str(rate["batch_size"]), str(rate["threads"]), _place(rate), number(middle),
            percent(spread(rate["updates_per_s"])), number(None if middle is None else middle * rate["batch_size"]),
            _remark(rate, _learner_chosen(rate, choice)),
        )
    return table


def _joint_table(rates: list[dict[str, Any]], choice: dict[str, Any]) -> Table:
    table = _table("samplers beside the learner", ("samplers", "envs", "samples/insert", "batch", "threads", "device",
                                                   "env steps/s", "updates/s", "spread", "cpu", ""))
    for rate in rates:
        learner = rate["learner"]
        same = _learner_chosen(learner, choice) and all(
            rate[name.split(".")[1]] == choice.get(name)
            for name in ("sampling.samplers", "sampling.envs_per_sampler", "replay.samples_per_insert_min")
        )
        spreads = [one for one in (spread(rate["env_steps_per_s"]), spread(rate["updates_per_s"])) if one is not None]
        shown = [median(rate[name]) if rate[name] else None for name in ("env_steps_per_s", "updates_per_s")]
        table.add_row(
            str(rate["samplers"]), str(rate["envs_per_sampler"]), f">= {rate['samples_per_insert_min']:g}",
            str(learner["batch_size"]), str(learner["threads"]), _place(learner), *(number(value) for value in shown),
            percent(max(spreads, default=None)), percent(median(rate["cpu_share"]) if rate["cpu_share"] else None),
            _remark(rate, same),
        )
    return table


def _rollout_table(rates: list[dict[str, Any]], choice: dict[str, Any]) -> Table:
    table = _table("executors and actors beside the learner", (
        "executors", "envs", "actors", "interval", "minibatches", "env steps/s", "spread", "cpu", ""))
    for rate in rates:
        same = all(rate[name] == choice[f"rollout.{name}"] for name in ("executors", "envs_per_executor", "actors",
                                                                         "sync_interval"))
        table.add_row(
            *(str(rate[name]) for name in ("executors", "envs_per_executor", "actors", "sync_interval", "minibatches")),
            number(median(rate["env_steps_per_s"]) if rate["env_steps_per_s"] else None),
            percent(spread(rate["env_steps_per_s"])), percent(median(rate["cpu_share"]) if rate["cpu_share"] else None),
            _remark(rate, same),
        )
    return table


def _place(learner: dict[str, Any]) -> str:
    precision = "" if learner["precision"] == "float32" else f" {learner['precision']}"
    return f"{learner['device']}{precision}"


def _learner_chosen(learner: dict[str, Any], choice: dict[str, Any]) -> bool:
    return all(learner[name] == choice.get(f"learner.{name}", learner[name])
               for name in ("batch_size", "threads", "device", "precision"))


def _remark(rate: dict[str, Any], chosen: bool) -> str:
    if rate["failure"]:
        return clean(rate["failure"], 80)
    return "chosen" if chosen else ""
