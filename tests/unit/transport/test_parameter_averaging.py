"""Learners that average their parameters: the mean by numbers, only with the living, and a run of mode tianji."""

import contextlib
import json

import numpy as np
import pytest
from harness import FAULT, HIDDEN_SIZES, Run, train

from spreeze.algorithms import create
from spreeze.algorithms.sac import SACConfig
from spreeze.config.modes import modes
from spreeze.run_directory import TIMELINE, group_folder, send_request
from spreeze.transport.gossip import Gossip
from spreeze.transport.weights import VersionedParameters, WeightsStore
from spreeze.workers.replay_learner import PeerAverage

_TWO = ("--mode", "tianji", "--learners", "2", "--samplers", "2")


def sac(scale):
    """SAC whose parameters and moments are those of seed 1 times ``scale``."""
    made = create("sac", 3, 1, SACConfig(hidden_sizes=(8,)), 1)
    made.load_state_arrays(
        {
            name: array * np.float32(scale) if array.dtype == np.float32 else array
            for name, array in made.state_arrays().items()
        }
    )
    made.critics.adam._m.fill_(scale)
    return made


def gossip(shared, index, epoch=1):
    return Gossip(index, shared, topology="full", max_staleness=None, epoch=epoch)


@pytest.fixture
def shared():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(VersionedParameters.create())) for _ in range(3)]


class Statistics:
    """Of observations and returns, as a trainer has them."""

    def __init__(self, *values):
        self.values = np.array(values)

    def statistics_to_average(self):
        return self.values

    def set_average_statistics(self, values):
        self.values = values


def test_the_units_of_the_networks_are_averaged_with_them(shared):
    units = [Statistics(10.0, 1e6, 1.0), Statistics(30.0, 1e6 + 1.0, 5.0)]
    averages = [
        PeerAverage(sac(scale), gossip(shared, index), 1, statistics=units[index])
        for index, scale in enumerate((1.0, 3.0))
    ]
    for average in averages:
        average.advance(0)
    for average in averages:
        average.advance(1)
    np.testing.assert_allclose(units[1].values, [20.0, 1e6 + 0.5, 3.0], rtol=1e-13)
    assert units[0].values.tolist() == [10.0, 1e6, 1.0], "nobody had sent yet"


def test_a_learner_takes_the_mean_of_its_parameters_and_of_those_that_still_publish(shared):
    learners = [sac(scale) for scale in (1.0, 2.0, 6.0)]
    unit = learners[0].state_arrays()
    averages = [PeerAverage(learner, gossip(shared, index), 10) for index, learner in enumerate(learners)]
    assert [average.advance(1) for average in averages] == [None, None, None]
    assert averages[0].advance(10) is None, "ten updates after the first"
    assert averages[0].advance(11) == "update 11: averages parameters with 0 other learners"
    assert averages[1].advance(11) == "update 11: averages parameters with 1 other learner"
    assert averages[2].advance(11) == "update 11: averages parameters with 2 other learners"

    def scales(index):
        found = learners[index].state_arrays()
        names = ("critics.online", "critics.target", "actor.online")
        return {name: round(float(found[name].sum(dtype=float) / unit[name].sum(dtype=float)), 4) for name in names}

    # What was published: 1, then 2, then 6; each before it took the mean.
    assert [set(scales(index).values()) for index in range(3)] == [{1.0}, {1.5}, {3.0}]
    assert averages[0].advance(21).endswith("with 2 other learners")
    assert set(scales(0).values()) == {3.0}, "the mean of 1, 2 and 6"
    assert [averages[0].advance(updates) for updates in (31, 41, 51)] == [None] * 3
    assert set(scales(0).values()) == {3.963}, "(3 + 8) / 3, and so on"
    assert averages[0].advance(61).endswith("with 0 other learners"), "nothing new for four times: they are left out"
    assert set(scales(0).values()) == {3.963}
    assert [float(learner.critics.adam._m[0]) for learner in learners] == [1.0, 2.0, 6.0]


def test_a_learner_that_began_again_is_newer_than_before(shared):
    first, again, other = (PeerAverage(sac(scale), gossip(shared, index, epoch), 1)
                           for scale, index, epoch in ((1.0, 0, 1), (1.0, 0, 2), (2.0, 1, 1)))  # fmt: skip
    for updates in range(5):
        first.advance(updates)
    other.advance(0)
    other.advance(1)
    again.advance(0)
    assert again.advance(1) == "update 1: averages parameters with 1 other learner"
    assert other.advance(2) is None, "one other, as before"


def test_a_learner_that_joins_others_begins_with_the_mean_of_theirs(shared):
    first, second, joins = (sac(scale) for scale in (2.0, 4.0, 9.0))
    averages = [PeerAverage(first, gossip(shared, 0), 1), PeerAverage(second, gossip(shared, 1), 1),
                PeerAverage(joins, gossip(shared, 2), 1, joins=True)]  # fmt: skip
    for updates in (0, 1):
        averages[0].advance(updates)
        averages[1].advance(updates)
        averages[2].advance(updates)
    unit = sac(1.0).state_arrays()["actor.online"]
    assert np.allclose(joins.state_arrays()["actor.online"], 3.0 * unit), "2 and 4 were sent, 9 counts for nothing"
    assert shared[2].read_latest() is None, "nobody takes what it had"
    averages[2].advance(2)
    assert shared[2].read_latest() is not None


def test_the_mode_runs_what_learns_from_replay_and_says_what_it_does():
    data_flow = modes()["tianji"].replay
    assert (data_flow.averages_parameters, data_flow.supports_learner_groups) == (True, True)
    assert not modes()["spreeze"].replay.averages_parameters


@pytest.mark.warm
def test_two_groups_average_and_one_goes_on_when_the_others_learner_is_killed(tmp_path):
    with Run(tmp_path, *FAULT, *_TWO, "--set", "learner.average_interval=5") as run:
        run.wait_for(lambda: sum("with 1 other learner" in event for event in run.events()) >= 2,
                     what="means of both learners")  # fmt: skip
        send_request(run.path, "timeline")
        run.wait_for((run.path / TIMELINE).exists, what="record the phases of all workers")
        before = len(run.events())
        run.children()["learner-g1"].kill()
        run.wait_for(lambda: any("with 0 other learners" in event for event in run.events()[before:]),
                     what="the first learner alone")  # fmt: skip
        alone = len(run.events())
        run.wait_for(lambda: sum("with 1 other learner" in event for event in run.events()[alone:]) >= 2,
                     what="means of both learners again")  # fmt: skip
        code, document = run.stop()
    assert (code, document["error"], document["mode"], len(document["learners"])) == (0, None, "tianji", 2)
    recorded = json.loads((run.path / TIMELINE).read_text())
    assert {"learner", "learner-g1"} <= {worker["name"] for worker in recorded["workers"]}
    ratio = float(document["batch_size"])
    assert document["samples_per_insert_band"] == [ratio, ratio], "an update after each env step, as in mode serial"
    assert "as in mode serial" in document["reasons"]["replay.samples_per_insert_min"]
    assert all(WeightsStore(group_folder(run.path, group) / "weights").read_latest() for group in (0, 1))


@pytest.mark.warm
def test_on_policy_learners_average_too_and_go_on_when_one_is_killed(tmp_path):
    small = ("--envs-per-sampler", "2", "--set", f"ppo.hidden_sizes={HIDDEN_SIZES}", "--no-evaluator",
             "--set", "learner.checkpoint_interval_s=0.5", "--no-visualizer", "--no-governor")  # fmt: skip
    with Run(
        tmp_path,
        "--env",
        "CartPole-v1",
        "--algo",
        "ppo",
        "--sync-interval",
        "16",
        "--set",
        "learner.average_interval=32",
        *_TWO,
        tiny=small,
    ) as run:
        run.wait_for(lambda: all(run.numbers().get(f"gossip_messages/{group}", 0) > 0.3 for group in (0, 1)),
                     what="messages of both")  # fmt: skip
        run.children()["learner-g1"].kill()
        before = run.numbers()["updates/0"]
        run.wait_for(lambda: run.numbers()["updates/0"] > before + 100, what="updates of the first")
        run.wait_for(lambda: run.numbers()["updates/1"] > before, what="updates of the second")
        run.wait_for(
            lambda: {"gossip_radius", "learners_spread"} <= run.numbers().keys(), what="metrics of both learners"
        )
        assert "gossip_bound_1" not in run.numbers(), "the learners' parameters may differ by any amount between means"
        code, document = run.stop()
    assert (code, document["error"], document["mode"], len(document["learners"])) == (0, None, "tianji", 2)


@pytest.mark.warm
def test_a_group_alone_learns_on_policy_as_in_mode_hts_bit_for_bit(tmp_path):
    cart = ("--env", "CartPole-v1", "--algo", "ppo", "--sync-interval", "16", "--samplers", "1", "--env-steps", "800")
    found = [train(tmp_path, *cart, "--mode", mode, name=mode)[2]["parameters_sha256"] for mode in ("tianji", "hts")]
    assert found[0] == found[1]


@pytest.mark.warm
def test_samplers_of_several_learners_infer_for_themselves(tmp_path):
    run, code, _ = train(tmp_path, "--env", "CartPole-v1", "--algo", "ppo", *_TWO, "--inference-workers", "1")
    assert code == 2
    assert "with several learners, samplers run the policy themselves; remove it" in run.stdout + run.stderr
