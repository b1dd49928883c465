import importlib

import pytest

from spreeze.metrics.table import SLOTS
from spreeze.runtime.worker_pool import RestartState
from spreeze.workers import jobs
from spreeze.workers.roles import ROLES, RestartLimit


def _failures(limit, times):
    """Delay until the next start after each failure; None: never."""
    restarts = RestartState(limit)
    delays = []
    for now in times:
        restarts.failed(now)
        delays.append(None if restarts.due_s is None else round(restarts.due_s - now, 9))
    return restarts, delays


def test_a_sampler_comes_back_at_once_then_after_doubling_pauses_then_rests_five_minutes():
    restarts, delays = _failures(ROLES["sampler"].limit, [0, 1, 2, 3, 4])
    assert delays == [0.0, 0.5, 1.0, 2.0, 300.0]
    assert restarts.quarantined
    assert not restarts.given_up
    assert not restarts.due(303.9)
    assert restarts.due(304.0)
    restarts.restarted()
    assert (restarts.total, restarts.due_s, restarts.quarantined) == (1, None, False)


def test_old_failures_are_forgotten():
    restarts, delays = _failures(ROLES["sampler"].limit, [0, 61, 122, 183, 244, 305])
    assert delays == [0.0] * 6
    assert not restarts.quarantined


def test_a_learner_is_given_up_at_the_third_failure_in_ten_minutes():
    restarts, delays = _failures(ROLES["learner"].limit, [0, 100, 200])
    assert delays == [0.0, 0.5, None]
    assert restarts.given_up
    assert not restarts.due(1e9)


def test_a_learner_that_fails_rarely_is_never_given_up():
    restarts, _ = _failures(ROLES["learner"].limit, [0, 301, 602, 903])
    assert not restarts.given_up


def test_evaluator_and_visualizer_leave_the_others_a_second_first():
    assert _failures(ROLES["evaluator"].limit, [0])[1] == [1.0]
    assert _failures(ROLES["visualizer"].limit, [0])[1] == [1.0]


def test_pauses_have_an_upper_bound():
    limit = RestartLimit(failures=100, window_s=1e9, quarantine_s=None)
    assert max(_failures(limit, range(60))[1]) == 30.0


def test_the_table_of_roles_is_the_whole_truth_about_each():
    writers = set(SLOTS) - {"host"}  # the row of another host has no process here
    assert {role.slots for role in ROLES.values()} >= writers
    assert all(name == role.name for name, role in ROLES.items())


JOBS = [one for name, one in vars(jobs).items() if name.endswith("Job") and hasattr(one, "entry_point")]


@pytest.mark.parametrize("job", JOBS)
def test_every_job_names_a_function_that_can_be_loaded(job):
    module, _, function = job.entry_point.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
