"""The counting runs of the score bench: ratio held, given up in time, kept in a file and not repeated."""

from argparse import Namespace

from spreeze.bench.command import _plan
from spreeze.bench.score import Goal, read_records, run_all


def test_runs_hold_the_ratio_and_are_kept_so_that_none_is_repeated(tmp_path):
    plan = _plan(Namespace(env="Pendulum-v1", samplers=1, envs_per_sampler=8, plain_env=False, import_module=None,
                           env_arg=()))  # fmt: skip
    out, said = tmp_path / "runs.jsonl", []
    goal = Goal(target_return=1e9, max_updates=200)
    records = run_all(plan, goal, [(32, 0.25), (16, 2.0)], 1, out, said.append)
    for record in records:
        assert not record["reached"]
        assert 200 <= record["updates"] < 216
        after_start = record["env_steps"] - plan.config.replay.learning_starts
        assert abs(record["updates"] - record["updates_per_env_step"] * after_start) <= 32
    assert read_records(out) == records
    assert len(said) == 2
    assert run_all(plan, goal, [(32, 0.25), (16, 2.0)], 1, out, said.append) == records
    assert len(said) == 2
