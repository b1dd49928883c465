"""The table of roles: who waits for whom in each mode, and at which priority."""

import pytest
from rollouts import task

from spreeze.config.layers import Layer, resolve
from spreeze.config.modes import modes
from spreeze.machine.processes import LOW_PRIORITY
from spreeze.modes import assemble
from spreeze.runtime.assembly import assembled
from spreeze.runtime.plan import RunPlan
from spreeze.workers.roles import ROLES

RUNS = (
    ("spreeze", "dqn", {}), ("hts", "ppo", {}), ("hts", "ppo", {"rollout": {"inference_workers": 1}}),
    ("impact", "impact", {}), ("gala", "a2c", {}), ("tianji", "dqn", {}), ("tianji", "ppo", {}),
    ("serial", "ppo", {}),  # by several samplers
)  # fmt: skip
OBSERVERS = {"evaluator", "visualizer"}
"""Nobody waits for them; in every mode learner, samplers and inference workers wait for each other."""


def test_every_mode_is_tried():
    assert {mode for mode, _, _ in RUNS} == set(modes()) - {"device"}, "whose learner waits for nobody"


def specs_of(tmp_path, mode, algo, values):
    """The workers that a mode would start, without starting them."""
    learners = 2 if mode in ("gala", "tianji") else 1
    values = {"run": {"algo": algo, "mode": mode, "learners": learners}, **values}
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=task(discrete=True), samplers=2, free_core=False,
                   inference_workers=values.get("rollout", {}).get("inference_workers", 0))  # fmt: skip
    with assembled(assemble, plan, tmp_path, 0.0) as run:
        return run.specs


@pytest.mark.parametrize(("mode", "algo", "values"), RUNS)
def test_no_worker_that_others_wait_for_has_a_lower_priority_than_they(tmp_path, mode, algo, values):
    """Beside a program that computes it would starve, and those that wait with it."""
    roles = {spec.role.name: spec.role for spec in specs_of(tmp_path, mode, algo, values).values()}
    assert roles.keys() >= {"learner"} | OBSERVERS
    assert any(role.steps for role in roles.values())
    for gives_way in (False, True):
        niceness = {name: role.niceness(gives_way=gives_way) for name, role in roles.items()}
        waited_for = {niceness[name] for name in roles.keys() - OBSERVERS}
        assert waited_for == {LOW_PRIORITY if gives_way else 0}
        assert all(niceness[name] > max(waited_for) for name in OBSERVERS)


def test_only_observers_ever_have_a_low_priority_of_their_own_and_giving_way_keeps_the_order():
    assert {name for name, role in ROLES.items() if role.nice} == OBSERVERS
    assert {name for name, role in ROLES.items() if role.may_end} == OBSERVERS
    by_nice = sorted(ROLES.values(), key=lambda role: role.nice)
    giving_way = [role.niceness(gives_way=True) for role in by_nice]
    assert giving_way == sorted(giving_way)
    assert [lower - role.nice for role, lower in zip(by_nice, giving_way, strict=True)] == [LOW_PRIORITY] * len(ROLES)
