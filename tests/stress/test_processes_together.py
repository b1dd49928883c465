"""Sampler and learner beside each other, in short; the figures by hand: ``python tests/processes_together.py``."""

from processes_together import samplers_rows, together_rows

from spreeze.bench.sampling import task_plan


def test_each_side_is_measured_alone_and_together():
    plan = task_plan("Pendulum-v1")
    rows = {row["metric"]: row for row in together_rows(plan, repeats=1, seconds=0.5)}
    assert rows["learner_kept_together"]["repeats"][0] > 0
    assert rows["sampler_kept_together"]["repeats"][0] > 0


def test_two_samplers_are_compared_with_one():
    rows = {row["metric"]: row for row in samplers_rows(task_plan("Pendulum-v1"), repeats=2, seconds=0.3)}
    assert rows["row_bytes"]["value"] == 4 * (3 + 1 + 1 + 1 + 3), "the sum of the fields"
    assert 10e6 < rows["sampler_memory_bytes"]["value"] < 350e6
    assert len(rows["two_samplers_over_one"]["repeats"]) == 2
