"""HTS-RL's promise in one process: whatever the order in which executors, actors and learner move, the same bits.

A seeded dice chooses who moves next, and who is thrown away in mid-run and made anew. The algorithm is a double;
environments, storages, exchange, inference and the learner's cycle are the real ones.
"""

import json

import numpy as np
import pytest
from rollout_double import Ascent

from spreeze.envs.synthetic import ENV_ID, register
from spreeze.envs.task import make_task, open_task
from spreeze.errors import WorkerError
from spreeze.transport.exchange import Exchange
from spreeze.transport.parameters import Handover, Parameters, put_back
from spreeze.transport.rollouts import Rollouts, RolloutSpec
from spreeze.workers.executor import Asking
from spreeze.workers.inference import Inference, IntervalPolicy
from spreeze.workers.rollout import RolloutEnvs
from spreeze.workers.rollout_learning import RolloutLearning

T, EXECUTORS, ENVS = 5, 2, 2
INTERVALS = 6


@pytest.fixture(scope="module")
def spec():
    register()
    task = make_task(ENV_ID, "spreeze.envs.synthetic", args=("obs_dim=3", "action_dim=2", "episode_steps=7",
                                                             "p_terminated=0.1"))  # fmt: skip
    task.close()
    return task.spec


class Troupe:
    """A run's parts, moved by hand."""

    def __init__(self, spec, path, *, actors, lag=1, step_synchronous=False, seed=1, saved=None, make_asking=Asking):
        self.spec, self.lag, self.path, self.actors = spec, lag, path, actors
        self.step_synchronous, self.seed = step_synchronous, seed
        self._make_asking = make_asking
        rollout_spec = RolloutSpec.of(spec, T, EXECUTORS * ENVS)
        self.rollouts, self.exchange = Rollouts.create(rollout_spec), Exchange.create(rollout_spec)
        self.handover = Handover(policies=Parameters.create(), states=Parameters.create())
        if saved is not None:
            put_back(*saved, self.rollouts, self.handover)
        self.learning = self.new_learning()
        self.executors = [self.new_executor(index) for index in range(EXECUTORS)]
        self.asking = [self.new_asking(index) for index in range(EXECUTORS)]
        self.policies = [self.new_policies() for _ in range(EXECUTORS)]
        self.inferences = [self.new_inference(index) for index in range(actors)]

    def new_learning(self):
        return RolloutLearning(
            Ascent(self.spec.obs_dim, self.spec.action_dim), self.rollouts, self.handover, lag=self.lag, meta={},
            batch_size=T * EXECUTORS * ENVS, progress_env_steps=1000, fingerprints=self.path,
        )  # fmt: skip

    def new_executor(self, index):
        return RolloutEnvs(
            lambda: open_task(self.spec), self.spec, self.rollouts, first=index * ENVS, num_envs=ENVS, seed=self.seed,
            step_synchronous=self.step_synchronous,
        )  # fmt: skip

    def new_inference(self, index):
        return Inference(self.new_policies(), self.exchange, slice(index, None, self.actors))

    def new_asking(self, index):
        return self._make_asking(self.executors[index], self.exchange, index * ENVS, ENVS)

    def new_policies(self):
        return IntervalPolicy(self.rollouts, self.handover.policies)

    def move(self, dice, deaths):
        """One of them does one thing, or dies and comes back."""
        who, dies = dice.integers(5), dice.random() < deaths
        if who == 0:
            self.learning = self.new_learning() if dies else self.learning
            self.learning.learn()
            self.learning.swap()
        elif who <= 2:
            index = int(dice.integers(EXECUTORS))
            if dies:
                self.executors[index].close()
                self.executors[index] = self.new_executor(index)
                self.asking[index], self.policies[index] = self.new_asking(index), self.new_policies()
            if not self.actors:
                self.executors[index].advance(self.policies[index])
            elif dice.random() < 0.5:
                self.asking[index].ask()
            else:
                self.asking[index].step()
        elif self.actors:
            index = int(dice.integers(len(self.inferences)))
            self.inferences[index] = self.new_inference(index) if dies else self.inferences[index]
            self.inferences[index].answer()

    def run(self, intervals, *, schedule, deaths=0.0):
        dice = np.random.default_rng(schedule)
        while self.rollouts.interval < intervals:
            self.move(dice, deaths)

    def close(self):
        for executor in self.executors:
            executor.close()
        for part in (self.rollouts, self.exchange, self.handover.policies, self.handover.states):
            part.close()


def fingerprints(path):
    """interval -> line; a line that was written twice must be the same."""
    found = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        assert found.setdefault(line["interval"], line) == line
    return [found[interval] for interval in sorted(found)]


def play(spec, path, intervals=INTERVALS, *, schedule=0, deaths=0.0, **options):
    troupe = Troupe(spec, path, **options)
    try:
        troupe.run(intervals, schedule=schedule, deaths=deaths)
        return troupe.learning.checkpoint()
    finally:
        troupe.close()


@pytest.fixture(scope="module")
def reference(spec, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "f.jsonl"
    play(spec, path, actors=1)
    assert len(fingerprints(path)) == INTERVALS
    return fingerprints(path)


@pytest.mark.parametrize("actors", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_actors_and_order_change_no_bit(spec, reference, tmp_path, actors, schedule):
    play(spec, tmp_path / "f", actors=actors, schedule=schedule)
    assert fingerprints(tmp_path / "f") == reference


@pytest.mark.parametrize("schedule", range(4, 10))
def test_deaths_and_replays_change_no_bit(spec, reference, tmp_path, schedule):
    play(spec, tmp_path / "f", actors=schedule % 3, schedule=schedule, deaths=0.03)
    assert fingerprints(tmp_path / "f") == reference


@pytest.mark.parametrize("point", [1, 3, 5])
def test_resume_points_change_no_bit(spec, reference, tmp_path, point):
    tensors, state = play(spec, tmp_path / "f", point, actors=2, schedule=11)
    state = json.loads(json.dumps(state))
    play(spec, tmp_path / "f", actors=1, schedule=12, saved=(tensors, state))
    assert fingerprints(tmp_path / "f") == reference


@pytest.mark.parametrize("point", [2, 4])
def test_the_baseline_resumes_without_the_rows_it_has_learned_from(spec, tmp_path, point):
    play(spec, tmp_path / "whole", actors=0, lag=0)
    tensors, state = play(spec, tmp_path / "f", point, actors=0, lag=0, schedule=11)
    assert not [name for name in tensors if "side_" in name]
    play(spec, tmp_path / "f", actors=0, lag=0, schedule=12, saved=(tensors, state))
    assert fingerprints(tmp_path / "f") == fingerprints(tmp_path / "whole")


def test_the_resume_point_may_be_the_very_beginning(spec, reference, tmp_path):
    saved = play(spec, tmp_path / "f", 0, actors=1)
    play(spec, tmp_path / "f", actors=1, saved=saved)
    assert fingerprints(tmp_path / "f") == reference


def test_another_seed_gives_other_bits(spec, reference, tmp_path):
    play(spec, tmp_path / "f", actors=1, seed=2)
    for mine, theirs in zip(fingerprints(tmp_path / "f"), reference, strict=True):
        assert mine["trajectories"] != theirs["trajectories"]


class ArrivalOrder(Asking):
    """A mutant: noise is drawn from one stream in the order in which environments ask."""

    stream = np.random.default_rng(0)

    def ask(self):
        envs = super().ask()
        self._exchange.noise[envs] = self.stream.standard_normal((len(envs), 2), np.float32)
        return envs


def test_noise_in_order_of_arrival_would_be_seen(spec, tmp_path):
    for schedule in (1, 2):
        ArrivalOrder.stream = np.random.default_rng(0)
        play(spec, tmp_path / str(schedule), actors=1, schedule=schedule, make_asking=ArrivalOrder)
    assert fingerprints(tmp_path / "1") != fingerprints(tmp_path / "2")


@pytest.mark.parametrize("schedule", [1, 2])
def test_the_synchronous_baseline_has_no_lag_and_the_same_bits_in_both_synchronies(spec, tmp_path, schedule):
    play(spec, tmp_path / "batch", actors=0, lag=0, schedule=schedule, deaths=0.02)
    play(spec, tmp_path / "step", actors=2, lag=0, schedule=schedule, step_synchronous=True)
    assert fingerprints(tmp_path / "batch") == fingerprints(tmp_path / "step")


def test_each_update_learns_from_the_policy_of_one_interval_before(spec, tmp_path):
    troupe = Troupe(spec, tmp_path / "f", actors=1)
    try:
        seen = []
        learn = troupe.learning.algorithm.learn
        troupe.learning.algorithm.learn = lambda batch, progress: (
            seen.append(set(troupe.rollouts.versions(troupe.rollouts.interval - 1).reshape(-1).tolist())),
            learn(batch, progress),
        )
        troupe.run(4, schedule=1)
        assert seen[:3] == [{0}, {1}, {2}]
        troupe.run(5, schedule=1)
        troupe.rollouts.versions(4)[2, 1] = 3
        with pytest.raises(WorkerError, match=r"rows of interval 4 were collected by the policies of \[3, 4\]"):
            troupe.run(7, schedule=1)
    finally:
        troupe.close()


def test_a_number_that_the_algorithm_does_not_give_is_unknown(spec, tmp_path):
    troupe = Troupe(spec, tmp_path / "f", actors=0)
    try:
        numbers = troupe.learning.numbers(wait_s=1.0, publish_s=0.0)
        assert (numbers["policy_loss"], numbers["wait_s"], numbers["updates"]) == (0.5, 1.0, 0)
        assert [name for name in ("clip_share", "approx_kl", "grad_norm") if not np.isnan(numbers[name])] == []
    finally:
        troupe.close()


def test_gradients_that_are_refused_for_several_intervals_end_the_learner(spec, tmp_path):
    troupe = Troupe(spec, tmp_path / "f", actors=1)
    try:
        troupe.learning.algorithm.refuses = True
        with pytest.raises(WorkerError, match="in 6 intervals in a row every update had a non-finite loss"):
            troupe.run(20, schedule=1)
    finally:
        troupe.close()


def test_an_environment_that_does_not_repeat_is_named(spec, tmp_path):
    troupe = Troupe(spec, tmp_path / "f", actors=1)
    try:
        troupe.run(2, schedule=1)
        env = next(e for e in range(4) if len(troupe.rollouts.played(e)))
        troupe.rollouts.last_obs(env)[0] += 1.0
        with pytest.raises(WorkerError, match=rf"environment {env} is not repeatable: .* observed something else"):
            troupe.new_executor(env // ENVS)
    finally:
        troupe.close()
