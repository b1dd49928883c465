"""Sampler and learner beside each other, in short; figures by hand: ``python tests/support/processes_together.py``."""

import processes_together
from processes_together import memory_rows, scaling_rows, together_rows
from sampler_cost import task_plan


def test_each_side_is_measured_alone_and_together(monkeypatch):
    monkeypatch.setattr(processes_together, "_LEARNING_SETTLES_S", 1.0)  # no figure is judged here
    plan = task_plan("Pendulum-v1")
    rows = {row["metric"]: row for row in together_rows(plan, repeats=1, seconds=0.5)}
    assert rows["learner_kept_together"]["repeats"][0] > 0
    assert rows["sampler_kept_together"]["repeats"][0] > 0


def test_a_sampler_s_memory_and_a_row_have_their_sizes():
    rows = {row["metric"]: row for row in memory_rows(task_plan("Pendulum-v1"))}
    assert rows["row_bytes"]["value"] == 4 * (3 + 1 + 1 + 1 + 3), "the sum of the fields"
    assert 10e6 < rows["sampler_memory_bytes"]["value"] < 350e6


def test_samplers_at_once_are_compared_with_one():
    *rates, ratio = scaling_rows(task_plan("Pendulum-v1"), [2], repeats=2, seconds=0.3)
    assert [row["samplers"] for row in rates] == [1, 2]
    assert (ratio["metric"], ratio["samplers"], len(ratio["repeats"])) == ("over_one_sampler", 2, 2)
