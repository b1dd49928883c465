"""HTS-RL's promise in one process: in whatever order samplers, inference workers and learner move, the same bits.

A seeded dice chooses who moves next, and who is thrown away in mid-run and made anew. The algorithm is a double;
environments, storages, mailbox, inference and the learner's cycle are the real ones.
"""

import json

import gymnasium
import numpy as np
import pytest
from fault_envs import FaultWrapper
from fingerprints import fingerprinted
from fingerprints import read as fingerprints
from rollout_double import Ascent

from spreeze.envs.small_tasks import SYNTHETIC_ID as ENV_ID
from spreeze.envs.task import Task, make_task, open_task
from spreeze.errors import WorkerError
from spreeze.transport.rollouts import InferenceMailbox, LearnerMemory, Rollouts, RolloutSpec, restore_rollouts
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.collectors.rollout_collector import RolloutCollector, RolloutPolicy, reset_seed
from spreeze.workers.rollout_learner import OnPolicyTrainer
from spreeze.workers.samplers import Inference, MailboxClient

T, ROLLOUT_SAMPLERS, ENVS = 5, 2, 2
INTERVALS = 6


@pytest.fixture(scope="module")
def spec():
    task = make_task(ENV_ID, args=("obs_dim=3", "action_dim=2", "episode_steps=7",
                                                             "p_terminated=0.1"))  # fmt: skip
    task.close()
    return task.spec


class HandMovedRun:
    """A run's parts, moved by hand."""

    def __init__(self, spec, path, *, inference_workers, lag=1, step_synchronous=False, seed=1, saved=None,
                 make_asking=MailboxClient, make_task=open_task, told=None, policy_average=0.0):  # fmt: skip
        self.spec, self.lag, self.path, self.inference_workers = spec, lag, path, inference_workers
        self._make_task, self.told = make_task, [] if told is None else told
        self._policy_average = policy_average
        self.step_synchronous, self.seed = step_synchronous, seed
        self._make_asking = make_asking
        rollout_spec = RolloutSpec.of(spec, T, ROLLOUT_SAMPLERS * ENVS)
        self.rollouts, self.mailbox = Rollouts.create(rollout_spec), InferenceMailbox.create(rollout_spec)
        self.memory = LearnerMemory(policies=VersionedParameters.create(), states=VersionedParameters.create())
        if saved is not None:
            restore_rollouts(*saved, self.rollouts, self.memory)
        self.learning = self.new_learning()
        self.samplers = [self.new_sampler(index) for index in range(ROLLOUT_SAMPLERS)]
        self.asking = [self.new_asking(index) for index in range(ROLLOUT_SAMPLERS)]
        self.policies = [self.new_policies() for _ in range(ROLLOUT_SAMPLERS)]
        self.inferences = [self.new_inference(index) for index in range(inference_workers)]

    def new_learning(self):
        trainer = OnPolicyTrainer(
            Ascent(self.spec.obs_dim, self.spec.action_dim, policy_average=self._policy_average), self.rollouts,
            self.memory, lag=self.lag, meta={}, batch_size=T * ROLLOUT_SAMPLERS * ENVS,
            progress=lambda env_steps: min(1.0, env_steps / 1000),
        )  # fmt: skip
        return trainer if self.path is None else fingerprinted(trainer, self.path)

    def new_sampler(self, index):
        return RolloutCollector(
            lambda: self._make_task(self.spec), self.spec, self.rollouts, first=index * ENVS, num_envs=ENVS,
            seed=self.seed, step_synchronous=self.step_synchronous,
            on_error=lambda where, error, count, **effect: self.told.append((where, str(error))),
        )  # fmt: skip

    def new_inference(self, index):
        return Inference(self.new_policies(), self.mailbox, slice(index, None, self.inference_workers))

    def new_asking(self, index):
        return self._make_asking(self.samplers[index], self.mailbox, index * ENVS, ENVS)

    def new_policies(self):
        return RolloutPolicy(self.rollouts, self.memory.policies)

    def move(self, dice, deaths):
        """One of them does one thing, or dies and comes back."""
        who, dies = dice.integers(5), dice.random() < deaths
        if who == 0:
            self.learning = self.new_learning() if dies else self.learning
            self.learning.learn()
            self.learning.swap()
        elif who <= 2:
            index = int(dice.integers(ROLLOUT_SAMPLERS))
            if dies:
                self.samplers[index].close()
                self.samplers[index] = self.new_sampler(index)
                self.asking[index], self.policies[index] = self.new_asking(index), self.new_policies()
            if not self.inference_workers:
                self.samplers[index].advance(self.policies[index])
            elif dice.random() < 0.5:
                self.asking[index].request()
            else:
                self.asking[index].step()
        elif self.inference_workers:
            index = int(dice.integers(len(self.inferences)))
            self.inferences[index] = self.new_inference(index) if dies else self.inferences[index]
            self.inferences[index].respond()

    def run(self, intervals, *, schedule, deaths=0.0):
        dice = np.random.default_rng(schedule)
        while self.rollouts.current < intervals:
            self.move(dice, deaths)

    def close(self):
        for sampler in self.samplers:
            sampler.close()
        for part in (self.rollouts, self.mailbox, self.memory.policies, self.memory.states):
            part.close()


def play(spec, path, intervals=INTERVALS, *, schedule=0, deaths=0.0, **options):
    parts = HandMovedRun(spec, path, **options)
    try:
        parts.run(intervals, schedule=schedule, deaths=deaths)
        return parts.learning.state()
    finally:
        parts.close()


@pytest.fixture(scope="module")
def reference(spec, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "f.jsonl"
    play(spec, path, inference_workers=1)
    assert len(fingerprints(path)) == INTERVALS
    return fingerprints(path)


@pytest.mark.parametrize("inference_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_inference_workers_and_order_change_no_bit(spec, reference, tmp_path, inference_workers, schedule):
    play(spec, tmp_path / "f", inference_workers=inference_workers, schedule=schedule)
    assert fingerprints(tmp_path / "f") == reference


@pytest.mark.parametrize("schedule", range(4, 10))
def test_deaths_and_replays_change_no_bit(spec, reference, tmp_path, schedule):
    play(spec, tmp_path / "f", inference_workers=schedule % 3, schedule=schedule, deaths=0.03)
    assert fingerprints(tmp_path / "f") == reference


def test_what_was_handed_over_before_a_death_is_not_learned_again(spec, tmp_path):
    """Mixed with what other learners have by then it would be another policy than the one that samplers have."""
    parts = HandMovedRun(spec, tmp_path / "f", inference_workers=0)
    try:
        parts.run(2, schedule=0)
        assert parts.learning.learn()
        parts.learning = parts.new_learning()
        assert not parts.learning.learn()
        assert parts.learning.parameters_sha256() == parts.new_learning().parameters_sha256()
    finally:
        parts.close()


@pytest.mark.parametrize("point", [1, 3, 5])
def test_resume_points_change_no_bit(spec, reference, tmp_path, point):
    tensors, state = play(spec, tmp_path / "f", point, inference_workers=2, schedule=11)
    state = json.loads(json.dumps(state))
    play(spec, tmp_path / "f", inference_workers=1, schedule=12, saved=(tensors, state))
    assert fingerprints(tmp_path / "f") == reference


@pytest.mark.parametrize("point", [2, 4])
def test_the_baseline_resumes_without_the_rows_it_has_learned_from(spec, tmp_path, point):
    play(spec, tmp_path / "whole", inference_workers=0, lag=0)
    tensors, state = play(spec, tmp_path / "f", point, inference_workers=0, lag=0, schedule=11)
    assert not [name for name in tensors if "side_" in name]
    play(spec, tmp_path / "f", inference_workers=0, lag=0, schedule=12, saved=(tensors, state))
    assert fingerprints(tmp_path / "f") == fingerprints(tmp_path / "whole")


def test_the_resume_point_may_be_the_very_beginning(spec, reference, tmp_path):
    saved = play(spec, tmp_path / "f", 0, inference_workers=1)
    play(spec, tmp_path / "f", inference_workers=1, saved=saved)
    assert fingerprints(tmp_path / "f") == reference


def test_an_average_of_the_policy_changes_no_step_and_survives_deaths_and_a_resume(spec, reference, tmp_path):
    options = {"inference_workers": 1, "policy_average": 0.7}
    tensors, _ = play(spec, tmp_path / "f", **options)
    averaged = {name: array for name, array in tensors.items() if "policy_average/" in name}
    assert {name.rpartition("/")[2] for name in averaged} == {"head_w", "head_b", "log_std", ""}
    half = play(spec, tmp_path / "f", 3, **options, schedule=5)
    for found, _ in (
        play(spec, tmp_path / "f", **options, schedule=4, deaths=0.05),
        play(spec, tmp_path / "f", **options, schedule=6, saved=half),
    ):
        for name, array in averaged.items():
            np.testing.assert_array_equal(found[name], array)
    assert [line["trajectories"] for line in fingerprints(tmp_path / "f")] == [
        line["trajectories"] for line in reference
    ]
    assert not np.array_equal(averaged["learner/policy_average/head_w"], tensors["learner/w"])


def test_another_seed_gives_other_bits(spec, reference, tmp_path):
    play(spec, tmp_path / "f", inference_workers=1, seed=2)
    for mine, theirs in zip(fingerprints(tmp_path / "f"), reference, strict=True):
        assert mine["trajectories"] != theirs["trajectories"]


def faulty(spec, **faults):
    """Makes tasks whose errors depend on the seed of their episode and on its steps alone."""

    def make(spec):
        task = open_task(spec)
        return Task(FaultWrapper(task.env, **({"p_crash": 0.04, "p_nan": 0.03, "p_crash_reset": 0.1} | faults)), spec)

    return make


@pytest.fixture(scope="module")
def faulty_reference(spec, tmp_path_factory):
    path, told = tmp_path_factory.mktemp("faulty") / "f.jsonl", []
    play(spec, path, inference_workers=1, make_task=faulty(spec), told=told)
    assert len(fingerprints(path)) == INTERVALS
    assert told, "there were errors"
    return fingerprints(path)


@pytest.mark.parametrize("inference_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_the_same_errors_give_the_same_bits_whatever_the_inference_workers_and_the_order(
    spec, faulty_reference, tmp_path, inference_workers, schedule
):
    play(spec, tmp_path / "f", inference_workers=inference_workers, schedule=schedule, make_task=faulty(spec))
    assert fingerprints(tmp_path / "f") == faulty_reference


@pytest.mark.parametrize("schedule", range(4, 10))
def test_the_same_errors_give_the_same_bits_through_deaths(spec, faulty_reference, tmp_path, schedule):
    play(spec, tmp_path / "f", inference_workers=schedule % 3, schedule=schedule, deaths=0.03, make_task=faulty(spec))
    assert fingerprints(tmp_path / "f") == faulty_reference


@pytest.mark.parametrize("point", [1, 3, 5])
def test_the_same_errors_give_the_same_bits_through_a_resume(spec, faulty_reference, tmp_path, point):
    tensors, state = play(spec, tmp_path / "f", point, inference_workers=2, schedule=11, make_task=faulty(spec))
    state = json.loads(json.dumps(state))
    play(spec, tmp_path / "f", inference_workers=1, schedule=12, saved=(tensors, state), make_task=faulty(spec))
    assert fingerprints(tmp_path / "f") == faulty_reference


def test_the_baseline_bears_errors_too_with_the_same_bits_in_both_synchronies(spec, tmp_path):
    play(spec, tmp_path / "batch", inference_workers=0, lag=0, deaths=0.02, make_task=faulty(spec))
    play(spec, tmp_path / "step", inference_workers=2, lag=0, step_synchronous=True, make_task=faulty(spec))
    assert fingerprints(tmp_path / "batch") == fingerprints(tmp_path / "step")


class ErrsAtThird(gymnasium.Wrapper):
    """Gives NaN at the third step of the episodes with these seeds."""

    def __init__(self, env, seeds):
        super().__init__(env)
        self.seeds = seeds

    def reset(self, *, seed=None, options=None):
        self.seed, self.count = seed, 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        self.count += 1
        return obs, float("nan") if self.seed in self.seeds and self.count == 3 else reward, *rest


def collected(spec, make_task=open_task):
    """Copies of the first interval, and what was told."""
    parts = HandMovedRun(spec, None, inference_workers=0, make_task=make_task)
    try:
        parts.run(1, schedule=1)
        batch = parts.rollouts.batch(0)  # views of memory that is closed below
        copies = {name: array.copy() for name, array in batch._asdict().items() if array is not None}
        del batch
        return copies, parts.told
    finally:
        parts.close()


def test_an_error_cuts_its_episode_at_the_last_good_row_and_changes_nothing_for_the_others(spec):
    env, seed = 2, 1
    clean, _ = collected(spec)
    assert not clean["terminated"][:4, env].any()
    bad = {reset_seed(seed, env, 0)}
    found, told = collected(spec, lambda spec: Task(ErrsAtThird(open_task(spec).env, bad), spec))
    others = [0, 1, 3]
    assert all((found[name][:, others] == clean[name][:, others]).all() for name in clean)
    assert all((found[name][:1, env] == clean[name][:1, env]).all() for name in clean), "rows before"
    assert (found["next_obs"][1, env] == clean["next_obs"][1, env]).all(), "the last good observation"
    assert (found["truncated"][1, env], found["terminated"][1, env]) == (1, 0)
    task = open_task(spec)
    assert (found["obs"][2, env] == task.reset(reset_seed(seed, env, 1))).all(), "its next episode's own seed"
    task.close()
    assert told == [("environment 2, episode 0, step 3", f"{spec.env_id} returned reward = nan")]


class RaisesOnce(gymnasium.Wrapper):
    """Raises at the second step that any of them takes after ``armed`` was set."""

    armed = None

    def step(self, action):
        if RaisesOnce.armed is not None:
            RaisesOnce.armed -= 1
            if RaisesOnce.armed == 0:
                RaisesOnce.armed = None
                raise RuntimeError("out of luck")
        return self.env.step(action)


def test_an_error_while_an_episode_is_repeated_is_tried_again_and_changes_no_bit(spec, reference, tmp_path):
    RaisesOnce.armed = None
    parts = HandMovedRun(
        spec, tmp_path / "f", inference_workers=0, make_task=lambda spec: Task(RaisesOnce(open_task(spec).env), spec)
    )
    try:
        parts.run(2, schedule=1)
        index = next(env for env in range(ROLLOUT_SAMPLERS * ENVS) if len(parts.rollouts.played(env)) > 1) // ENVS
        parts.samplers[index].close()
        RaisesOnce.armed = 2
        parts.samplers[index] = parts.new_sampler(index)
        assert RaisesOnce.armed is None
        assert [error for _, error in parts.told] == ["out of luck"]
        assert parts.told[0][0].endswith("repeated")
        parts.run(INTERVALS, schedule=2)
    finally:
        parts.close()
    assert fingerprints(tmp_path / "f") == reference


def test_an_environment_that_always_fails_ends_its_sampler_with_what_it_said(spec, tmp_path):
    parts = HandMovedRun(spec, tmp_path / "f", inference_workers=0, make_task=faulty(spec, p_crash=1.0))
    try:
        words = r"20 environment errors within 0 env steps; the last: environment \d, episode \d+, step 1: RuntimeError"
        with pytest.raises(WorkerError, match=words):
            parts.run(1, schedule=1)
    finally:
        parts.close()


class ArrivalOrder(MailboxClient):
    """A mutant: noise is drawn from one stream in the order in which environments ask."""

    stream = np.random.default_rng(0)

    def request(self):
        envs = super().request()
        self._mailbox.noise[envs] = self.stream.standard_normal((len(envs), 2), np.float32)
        return envs


def test_noise_in_order_of_arrival_would_be_seen(spec, tmp_path):
    for schedule in (1, 2):
        ArrivalOrder.stream = np.random.default_rng(0)
        play(spec, tmp_path / str(schedule), inference_workers=1, schedule=schedule, make_asking=ArrivalOrder)
    assert fingerprints(tmp_path / "1") != fingerprints(tmp_path / "2")


@pytest.mark.parametrize("schedule", [1, 2])
def test_the_synchronous_baseline_has_no_lag_and_the_same_bits_in_both_synchronies(spec, tmp_path, schedule):
    play(spec, tmp_path / "batch", inference_workers=0, lag=0, schedule=schedule, deaths=0.02)
    play(spec, tmp_path / "step", inference_workers=2, lag=0, schedule=schedule, step_synchronous=True)
    assert fingerprints(tmp_path / "batch") == fingerprints(tmp_path / "step")


def test_each_update_learns_from_the_policy_of_one_interval_before(spec, tmp_path):
    parts = HandMovedRun(spec, tmp_path / "f", inference_workers=1)
    try:
        seen = []
        learn = parts.learning.algorithm.learn
        parts.learning.algorithm.learn = lambda batch, progress: (
            seen.append(set(parts.rollouts.versions(parts.rollouts.current - 1).reshape(-1).tolist())),
            learn(batch, progress),
        )
        parts.run(4, schedule=1)
        assert seen[:3] == [{0}, {1}, {2}]
        parts.run(5, schedule=1)
        parts.rollouts.versions(4)[2, 1] = 3
        with pytest.raises(WorkerError, match=r"rows of rollout 4 were collected by the policies of \[3, 4\]"):
            parts.run(7, schedule=1)
    finally:
        parts.close()


def test_a_number_that_the_algorithm_does_not_give_is_left_out(spec, tmp_path):
    parts = HandMovedRun(spec, tmp_path / "f", inference_workers=0)
    try:
        numbers = parts.learning.metrics(wait_s=1.0, publish_s=0.0)
        assert (numbers["policy_loss"], numbers["wait_s"], numbers["updates"]) == (0.5, 1.0, 0)
        assert not {"clip_share", "approx_kl", "grad_norm"} & numbers.keys()
    finally:
        parts.close()


def test_gradients_that_are_refused_for_several_intervals_end_the_learner(spec, tmp_path):
    parts = HandMovedRun(spec, tmp_path / "f", inference_workers=1)
    try:
        parts.learning.algorithm.refuses = True
        with pytest.raises(WorkerError, match="in 6 rollouts in a row every update had a non-finite loss"):
            parts.run(20, schedule=1)
    finally:
        parts.close()


def test_an_episode_that_is_longer_than_the_log_is_not_repeated(spec, tmp_path, monkeypatch):
    parts = HandMovedRun(spec, tmp_path / "f", inference_workers=0)
    try:
        parts.run(2, schedule=1)
        monkeypatch.setattr(Rollouts, "played", lambda self, env: None)
        parts.new_sampler(0).close()
        ((where, text),) = parts.told
        assert where == f"environment 0 of {spec.env_id}"
        assert text.startswith("its episode is longer than the ")
    finally:
        parts.close()


@pytest.mark.parametrize("inference_workers", [0, 1])
def test_an_environment_that_does_not_repeat_begins_a_new_episode_in_which_the_run_goes_on(
    spec, tmp_path, inference_workers
):
    parts = HandMovedRun(spec, tmp_path / "f", inference_workers=inference_workers)
    try:
        parts.run(2, schedule=1)
        env = next(e for e in range(4) if len(parts.rollouts.played(e)))
        index, place = env // ENVS, env % ENVS
        episode = parts.samplers[index].columns.episode[place]
        parts.rollouts.last_obs(env)[0] += 1.0
        parts.samplers[index].close()
        parts.samplers[index] = parts.new_sampler(index)
        parts.asking[index], parts.policies[index] = parts.new_asking(index), parts.new_policies()
        assert parts.samplers[index].columns.episode[place] == episode + 1
        assert len(parts.rollouts.played(env)) == 0
        ((where, text),) = parts.told
        assert where == f"environment {env} of {spec.env_id}"
        assert "differs; a new episode begins in its place, so this run does not repeat exactly" in text
        parts.run(6, schedule=2)
        assert parts.learning.updates
    finally:
        parts.close()
