"""The evaluation of the last weights, whose process is killed when its time is over."""

import dataclasses
from types import SimpleNamespace

import pytest

from spreeze.machine.logs import LogKeeper
from spreeze.metrics.stop_conditions import StopReason
from spreeze.runtime import launcher, supervisor
from spreeze.workers.evaluator import COLUMNS, append_row

RECORD = dict.fromkeys(COLUMNS, 1) | {"version": 7, "return_mean": 318.3}


@dataclasses.dataclass
class Job:
    target_return: float | None = 5.0

    def to_json(self):
        return {}


@pytest.mark.parametrize(("episodes", "whole"), [(10, True), (4, False)])
def test_a_row_that_was_written_before_the_process_was_killed_counts(tmp_path, monkeypatch, episodes, whole):
    """The evaluator writes its row, then keeps episodes, and only then answers."""
    rows = tmp_path / "eval.csv"
    append_row(rows, RECORD)
    append_row(tmp_path / "next.csv", RECORD | {"episodes": episodes})
    late = tmp_path / "late"
    late.write_text(f"#!/bin/sh\ntail -n 1 {tmp_path}/next.csv >> {rows}\nkill -9 $$\n")
    late.chmod(0o755)
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(launcher, "sys", SimpleNamespace(executable=str(late)))
    monkeypatch.setattr(supervisor, "evaluator_job", lambda *args, **options: Job())
    config = SimpleNamespace(tuning=SimpleNamespace(give_way=False), evaluation=SimpleNamespace(episodes=10))
    plan = SimpleNamespace(config=config, policies=1)
    run_dir, notes = SimpleNamespace(path=tmp_path, nonce="0123456789abcdef", requested=lambda name: False), []
    with LogKeeper() as logs:
        record = supervisor._last_evaluation(
            plan, run_dir, SimpleNamespace(event=notes.append), SimpleNamespace(count=0), logs, 60.0
        )
    assert (record["return_mean"], record["whole"], record["episodes_cut"]) == (318.3, whole, 10 - episodes)
    assert notes == []


@pytest.mark.parametrize(("eval_return", "interrupts", "stopped_by", "budget_s"), [
    (None, 0, StopReason.SECONDS, 45.0), (None, 1, StopReason.INTERRUPT, 6.0), (7.0, 0, StopReason.SECONDS, 6.0),
    (None, 0, StopReason.REQUEST, 6.0), (None, 0, StopReason.FAILURE, 6.0),
], ids=["first", "interrupted", "another", "asked to stop", "failed"])  # fmt: skip
def test_the_only_return_of_a_run_may_take_longer_unless_the_user_wants_to_leave(
    monkeypatch, eval_return, interrupts, stopped_by, budget_s
):
    """With slow environments a short run may end before its first evaluation."""
    budgets, notes = [], []
    monkeypatch.setattr(supervisor, "_last_evaluation", lambda *args: budgets.append(args[-1]))
    plan = SimpleNamespace(config=SimpleNamespace(evaluation=SimpleNamespace(enabled=True)), start_s=0.1)
    recorder = SimpleNamespace(
        outcome=SimpleNamespace(updates=5, eval_return_mean=eval_return, stopped_by=stopped_by),
        event=lambda level, text: notes.append(text), no_final_evaluation=lambda budget_s: None,
    )  # fmt: skip
    supervisor._evaluate_at_the_end(
        plan, None, recorder, SimpleNamespace(count=interrupts, urgent=False), None, stopping_s=0.5
    )
    assert budgets == [budget_s]
    assert len(notes) == (budget_s > 6.0)
