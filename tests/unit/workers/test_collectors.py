import numpy as np
import pytest
from row_sinks import Rows

from spreeze.envs.task import BadTransition
from spreeze.errors import WorkerError
from spreeze.metrics.table import SLOTS
from spreeze.types import Box, EnvSpec
from spreeze.workers.collectors import transition_collector
from spreeze.workers.collectors.transition_collector import TransitionCollector
from spreeze.workers.roles import Phase

SPEC = EnvSpec(
    env_id="Script-v0", import_module=None, obs_dim=2, action=Box((-4.0,), (8.0,)),
    max_episode_steps=None, reward_threshold=None,
)  # fmt: skip


class Script:
    """A task that does what the test says: obs = (number of the task, step of the episode), reward = step."""

    made, success = 0, None

    def __init__(self, plan):
        self.number, self.plan, self.steps, self.closed = len(plan.made), plan, 0, False
        self.seeds, self.actions = [], []
        plan.made.append(self)

    def reset(self, seed=None):
        self.seeds.append(seed)
        self.steps = 0
        self.plan.fail("reset", self)
        return np.array([self.number, 0], np.float32)

    def step(self, action):
        self.steps += 1
        self.actions.append(action)
        self.plan.fail("step", self)
        end = self.plan.ends.get(self.steps)
        obs = np.array([self.number, self.steps], np.float32)
        return obs, float(self.steps), end == "terminated", end == "truncated"

    def close(self):
        self.closed = True
        self.plan.fail("close", self)


class Plan:
    def __init__(self, ends=None):
        self.made, self.ends, self.faults = [], ends or {}, {}

    def fail(self, where, task):
        for error in self.faults.get(where, lambda task: ())(task) or ():
            raise error


def _sampling(plan, num_envs=2, *, n_step=1, nan_policy="drop", heartbeat=lambda phase: None):
    rows = Rows()
    made = TransitionCollector(
        lambda: Script(plan), num_envs, SPEC, rows, n_step=n_step, gamma=0.5, seeds=list(range(num_envs)),
        nan_policy=nan_policy, heartbeat=heartbeat,
    )  # fmt: skip
    return made, rows


def _actions(*values):
    return np.array(values, np.float32).reshape(-1, 1)


def _raise_when(condition, error=None):
    return lambda task: (error or RuntimeError("bad luck"),) if condition(task) else ()


def test_rows_are_what_happened_and_actions_reach_the_environment_in_its_own_unit():
    plan = Plan()
    sampling, rows = _sampling(plan)
    actions = _actions(-1.0, 0.5)
    sampling.step(actions, 7)
    assert rows.rows == [[0, 0, -1.0, 1.0, 0.0, 0, 1], [1, 0, 0.5, 1.0, 0.0, 1, 1]]
    assert rows.versions == [7, 7]
    assert [task.actions[0].tolist() for task in plan.made] == [[-4.0], [5.0]]
    np.testing.assert_array_equal(actions, _actions(-1.0, 0.5))
    sampling.step(actions, 8)
    assert rows.rows[2] == [0, 1, -1.0, 2.0, 0.0, 0, 2]
    assert sampling.counts.env_steps == 4


def test_an_episode_that_ends_or_breaks_resets_its_own_row_of_the_policy_s_state():
    plan = Plan(ends={2: "truncated"})
    sampling, _ = _sampling(plan, 3)
    plan.faults["step"] = _raise_when(lambda task: task.number == 1)
    sampling.state = (np.ones((3, 4), np.float32),)
    sampling.step(_actions(0.0, 0.0, 0.0), 1)
    assert sampling.state[0].sum(1).tolist() == [4.0, 0.0, 4.0], "the one whose environment raised"
    sampling.step(_actions(0.0, 0.0, 0.0), 1)
    assert sampling.state[0].sum() == 0.0


def test_returns_of_every_block_of_steps_are_counted_and_posted_with_what_an_earlier_process_had():
    sampling, _ = _sampling(Plan())
    for _ in range(31):
        sampling.step(_actions(0.0, 0.0), 1)
    assert sampling.counts.returns == (0.0, 0.0, 0.0)
    sampling.step(_actions(0.0, 0.0), 1)
    count, total, squares = sampling.counts.returns
    assert count == 64
    assert total > 0.0
    assert squares >= total**2 / count
    slots, names = np.zeros(len(SLOTS["sampler"])), SLOTS["sampler"]
    sampling.counts.post(slots, [1.0] * len(slots))
    found = [slots[names.index(name)] for name in ("returns", "returns_sum", "returns_square_sum")]
    assert found == pytest.approx([1.0 + count, 1.0 + total, 1.0 + squares])


def test_an_action_that_an_environment_keeps_stays_as_it_was():
    plan = Plan()
    sampling, _ = _sampling(plan)
    for value in (0.5, -0.5, 0.0):
        sampling.step(_actions(value, value), 0)
    assert [[action.item() for action in task.actions] for task in plan.made] == [[5.0, -1.0, 2.0]] * 2


@pytest.mark.parametrize(("end", "flag"), [("terminated", 1.0), ("truncated", 0.0)])
def test_an_ended_episode_keeps_its_true_last_observation_and_only_termination_is_stored(end, flag):
    plan = Plan({3: end})
    sampling, rows = _sampling(plan, 1)
    for _ in range(4):
        sampling.step(_actions(0.0), 0)
    assert rows.rows[2] == [0, 2, 0.0, 3.0, flag, 0, 3]
    assert rows.rows[3] == [0, 0, 0.0, 1.0, 0.0, 0, 1]
    assert (sampling.counts.episodes, sampling.counts.episode_return, sampling.counts.episode_length) == (1, 6.0, 3.0)
    assert plan.made[0].seeds == [0, None], "seeded once, then free"


def test_returns_are_the_mean_of_the_last_ten_episodes():
    plan = Plan({1: "terminated"})
    sampling, _ = _sampling(plan, 1)
    for count in range(25):
        plan.ends = {1: "terminated"} if count < 15 else {2: "terminated"}
        sampling.step(_actions(0.0), 0)
    assert sampling.counts.episodes == 20
    assert sampling.counts.episode_return == pytest.approx((5 * 1.0 + 5 * 3.0) / 10)


def test_a_raising_environment_loses_its_episode_and_is_built_anew_while_the_other_goes_on():
    plan = Plan()
    sampling, rows = _sampling(plan)
    sampling.step(_actions(0, 0), 0)
    plan.faults["step"] = _raise_when(lambda task: task.number == 0)
    sampling.step(_actions(0, 0), 0)
    assert [row[0] for row in rows.rows] == [0, 1, 1], "no row of the failed step"
    assert plan.made[0].closed
    assert sampling.counts.env_errors == 1
    assert sampling.counts.env_steps == 3
    sampling.step(_actions(0, 0), 0)
    assert rows.rows[3][:2] == [2, 0], "the new environment begins a new episode"
    again = Plan()
    again.faults = plan.faults
    _sampling(again)[0].step(_actions(0, 0), 0)
    assert plan.made[2].seeds == again.made[2].seeds != [None], "and is seeded, alike in every run"


def test_an_environment_that_raises_when_closed_is_replaced_all_the_same():
    plan = Plan()
    sampling, _ = _sampling(plan, 1)
    plan.faults["step"] = _raise_when(lambda task: task.number == 0)
    plan.faults["close"] = _raise_when(lambda task: task.number == 0)
    sampling.step(_actions(0), 0)
    assert sampling.counts.env_errors == 2
    assert len(plan.made) == 2


def test_a_bad_transition_is_counted_refused_and_never_stored():
    plan = Plan()
    sampling, rows = _sampling(plan, 1)
    plan.faults["step"] = _raise_when(lambda task: task.number == 0, BadTransition("reward", "nan"))
    sampling.step(_actions(0), 0)
    assert rows.rows == []
    assert (sampling.counts.transitions_rejected, sampling.counts.env_errors) == (1, 0)


def test_the_first_bad_transition_ends_it_when_asked_so():
    plan = Plan()
    sampling, _ = _sampling(plan, nan_policy="fail")
    plan.faults["step"] = _raise_when(lambda task: task.number == 1, BadTransition("observation[0]", "inf"))
    with pytest.raises(WorkerError, match=r"environment 1 returned an invalid transition: .*observation\[0\] = inf"):
        sampling.step(_actions(0, 0), 0)


def test_too_many_errors_in_a_window_end_the_process_with_the_last_one():
    plan = Plan()
    sampling, _ = _sampling(plan, 1)
    plan.faults["step"] = _raise_when(lambda task: True)
    for _ in range(19):
        sampling.step(_actions(0), 0)
    with pytest.raises(WorkerError, match=r"20 environment errors within 0 env steps; .*RuntimeError: bad luck"):
        sampling.step(_actions(0), 0)


def test_rare_errors_are_borne_for_ever():
    plan = Plan()
    sampling, _ = _sampling(plan, 1)
    plan.faults["step"] = _raise_when(lambda task: task.steps == 60)
    for _ in range(3000):
        sampling.step(_actions(0), 0)
    assert sampling.counts.env_errors == 50


def test_a_reset_that_always_raises_ends_the_process_instead_of_looping():
    plan = Plan()
    plan.faults["reset"] = _raise_when(lambda task: True)
    with pytest.raises(WorkerError, match="20 environment errors"):
        _sampling(plan, 1)


def test_making_environments_keeps_the_heartbeat_going():
    beats = []
    _sampling(Plan(), 5, heartbeat=beats.append)
    assert beats.count(Phase.INIT) == 5


@pytest.mark.parametrize(("slow_s", "rounds"), [(1000.0, 1), (0.0, 3)])
def test_each_environment_has_a_heartbeat_where_a_step_of_all_takes_long(monkeypatch, slow_s, rounds):
    monkeypatch.setattr(transition_collector, "SLOW_S", slow_s)
    beats = []
    sampling, _ = _sampling(Plan(), 5, heartbeat=beats.append)
    for _ in range(3):
        sampling.step(_actions(*[0.0] * 5), 0)
    assert beats.count(Phase.STEP) == 5 * rounds, "how long a step takes is not known before the first"


def test_n_step_rows_by_hand():
    # gamma 0.5, rewards 1, 2, 3, the episode is cut at step 3: 1 + 2/2 = 2, 2 + 3/2 = 3.5, 3.
    sampling, rows = _sampling(Plan({3: "truncated"}), 1, n_step=2)
    for _ in range(3):
        sampling.step(_actions(0), 0)
    assert [row[3] for row in rows.rows] == [2.0, 3.5, 3.0]
    assert [row[6] for row in rows.rows] == [2.0, 3.0, 3.0]
    assert rows.spans == [2.0, 2.0, 1.0]
    assert {row[4] for row in rows.rows} == {0.0}


def test_an_error_breaks_the_n_step_window():
    plan = Plan()
    sampling, rows = _sampling(plan, 1, n_step=3)
    for _ in range(2):
        sampling.step(_actions(0), 0)
    plan.faults["step"] = _raise_when(lambda task: task.number == 0)
    for _ in range(4):
        sampling.step(_actions(0), 0)
    assert {row[0] for row in rows.rows} == {1.0}, "nothing reaches over the failure"


def test_closing_closes_all():
    plan = Plan()
    sampling, _ = _sampling(plan, 3)
    sampling.close()
    assert all(task.closed for task in plan.made)


class _InlineEvaluation:
    """Notes (environment, step) at each turn; ``keeps`` says how often it gives the environment back."""

    def __init__(self, keeps=100):
        self.turns, self.keeps, self.overdue = [], keeps, False

    def play(self, task):
        self.turns.append((task.number, task.steps))
        self.overdue = False
        return task if len(self.turns) <= self.keeps else None


def test_between_two_episodes_an_environment_may_do_something_else_and_is_made_anew_where_it_was_lost():
    plan = Plan(ends={2: "truncated"})
    sampling, _ = _sampling(plan)
    sampling.inline_evaluation = inline_evaluation = _InlineEvaluation(keeps=2)
    for _ in range(4):
        sampling.step(_actions(0.0, 0.0), 0)
    assert inline_evaluation.turns == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert len(plan.made) == 4, "two were lost"
    assert sampling.obs[:, 0].tolist() == [2.0, 3.0]
    assert [task.steps for task in plan.made[2:]] == [0, 0]


def test_an_episode_that_does_not_end_is_truncated_for_what_is_overdue():
    plan = Plan()
    sampling, rows = _sampling(plan, 1)
    sampling.inline_evaluation = inline_evaluation = _InlineEvaluation()
    for step in range(5):
        inline_evaluation.overdue = step == 2
        sampling.step(_actions(0.0), 0)
    assert inline_evaluation.turns == [(0, 3)]
    assert [row[4] for row in rows.rows] == [0.0] * 5, "it has not terminated"
    assert [row[6] for row in rows.rows] == [1, 2, 3, 1, 2]
    assert sampling.counts.episodes == 1
