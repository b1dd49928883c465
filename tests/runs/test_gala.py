"""Mode gala with real processes: learners that mix, one alone, the ways to compare it with, kills and bad input."""

import os
import signal
from types import SimpleNamespace

import fingerprints
import numpy as np
import pytest
from harness import FINGERPRINTED, HIDDEN_SIZES, Run, train, train_until

from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithms import check_algorithm
from spreeze.config.layers import Layer, resolve
from spreeze.errors import ConfigError
from spreeze.metrics.store import MetricsReader
from spreeze.modes import assemble
from spreeze.modes.rollout_modes import LearnerSpread
from spreeze.run_directory import group_folder
from spreeze.runtime.assembly import assembled
from spreeze.runtime.plan import RunPlan
from spreeze.transport.mixing import Mixer, MixMemory, MixSpec
from spreeze.types import Choices, EnvSpec

SPEC = EnvSpec(env_id="T-v0", import_module=None, obs_dim=4, action=Choices((2,)),
               max_episode_steps=500, reward_threshold=None)  # fmt: skip
_CART = ("--env", "CartPole-v1", "--algo", "a2c", "--sync-interval", "8")
_SMALL = ("--envs-per-sampler", "2", "--set", f"a2c.hidden_sizes={HIDDEN_SIZES}", "--no-evaluator",
          "--set", "learner.checkpoint_interval_s=0.5", "--no-visualizer", "--no-governor")  # fmt: skip
LIVE = ("gossip_radius", "gossip_bound_1", "gossip_bound_2", "gossip_staleness", "policy_lag", "learners_spread")
_TWO = ("--mode", "gala", "--learners", "2")


def _prints(run, group):
    """The hash of a learner's parameters after each of its updates."""
    path = group_folder(run.path, group) / fingerprints.FILE
    return [line["parameters"] for line in fingerprints.read(path)] if path.exists() else []


def test_a_learner_alone_is_plain_a2c_bit_for_bit(tmp_path):
    found = [
        train(tmp_path, *_CART, "--mode", mode, "--samplers", "1", "--env-steps", "800", name=mode, tiny=_SMALL)[2]
        for mode in ("gala", "serial")
    ]
    assert found[0]["parameters_sha256"] == found[1]["parameters_sha256"]
    assert found[0]["updates"] == found[1]["updates"] == 50


def _common(run):
    """The hashes of both learners after the updates that both have made."""
    prints = [_prints(run, group) for group in (0, 1)]
    count = min(map(len, prints))
    return [one[:count] for one in prints]


def test_gradients_of_all_keep_learners_equal(tmp_path):
    run, code, document = train(tmp_path, *_CART, *_TWO, "--set", "gala.mixing=all_reduce", "--env-steps", "1600",
                                tiny=_SMALL, program=FINGERPRINTED)  # fmt: skip
    assert code == 0, document
    first, second = _common(run)
    assert len(first) > 10
    assert first == second


def test_learners_that_share_nothing_differ(tmp_path):
    run, code, document = train_until(
        tmp_path, lambda run: len(_common(run)[0]) > 10, *_CART, *_TWO, "--set", "gala.mixing=none",
        tiny=_SMALL, program=FINGERPRINTED,
    )  # fmt: skip
    assert code == 0, document
    first, second = _common(run)
    assert len(first) > 10
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "mixing"), [("a2c", "hogwild"), ("ppo", "gossip")])
def test_learners_without_locks_and_learners_of_ppo_learn_too(tmp_path, algo, mixing):
    _, code, document = train(tmp_path, *_CART, *_TWO, "--algo", algo, "--set", f"gala.mixing={mixing}", "--set",
                              f"ppo.hidden_sizes={HIDDEN_SIZES}", "--env-steps", "1600", tiny=_SMALL)  # fmt: skip
    assert (code, document["error"], len(document["learners"])) == (0, None, 2)


@pytest.mark.slow
def test_a_learner_that_is_ten_times_slower_is_named_at_most_once_a_minute(tmp_path):
    told = []
    plan = SimpleNamespace(config=asked("--mode", "gala", "--algo", "a2c", "--learners", "4"), learners=4,
                           earlier=SimpleNamespace(sessions=0))  # fmt: skip
    spread, recorder = LearnerSpread(plan, None), SimpleNamespace(event=lambda _, text: told.append(text))
    for second in range(70):
        spread._report_slow([100.0 * second, 90.0 * second, 110.0 * second, 10.0 * second], float(second), recorder)
    assert [text.partition(";")[0] for text in told] == ["learner-g3 is slow: 10 updates/s, the others 100"] * 2


@pytest.mark.slow
def test_a_learner_may_die_the_others_learn_on_and_a_resumed_run_brings_all_back(tmp_path):
    with Run(tmp_path, *_CART, *_TWO, tiny=_SMALL) as run:
        run.wait_for(lambda: all(run.numbers().get(f"updates/{group}", 0) >= 50 for group in (0, 1)), what="updates")
        for name in ("learner-g1", "learner"):
            victim, other = run.children()[name], 1 if name == "learner" else 0
            before = run.numbers()[f"updates/{other}"]
            os.kill(victim.pid, signal.SIGKILL)
            run.wait_for(
                lambda before=before, other=other: run.numbers()[f"updates/{other}"] > before + 20,
                what="updates of the other",
            )
            run.wait_for(lambda victim=victim, name=name: run.children().get(name) not in (None, victim), what=name)
            own = 1 - other
            since = run.numbers()[f"updates/{own}"]
            run.wait_for(lambda since=since, own=own: run.numbers()[f"updates/{own}"] > since, what="its own updates")
        numbers = run.numbers()
        assert 0.0 <= numbers["gossip_radius"] <= numbers["gossip_bound_2"]
        code, document = run.stop()
    assert (code, document["restarts"], document["error"], document["mode"]) == (0, 2, None, "gala")
    series = {name: MetricsReader(run.path / "metrics.db").series(name) for name in ("updates", *LIVE)}
    learning = int((series["updates"].mean > 0).sum())
    assert all(len(series[name].t) > learning / 2 for name in LIVE), "known throughout the run, not at its end"
    with Run(tmp_path, "--resume", "run", tiny=()) as resumed:
        # Learners come up in their own time, so the end is what each of them did, never a total of env steps.
        resumed.wait_for(
            lambda: all(
                resumed.numbers().get(f"updates/{group}", 0) > learner["updates"]
                for group, learner in enumerate(document["learners"])
            ),
            what="updates of both",
        )
        numbers = resumed.numbers()
        assert numbers["gossip_radius"] <= numbers["gossip_bound_2"], "the distance at the resume is in the bound"
        code, second = resumed.stop()
    assert (code, second["error"]) == (0, None)


def test_a_topology_needs_no_second_learner_before_the_tuner_has_chosen_their_number():
    settings = resolve([Layer("user", {"run": {"algo": "a2c", "mode": "gala"}, "gala": {"topology": "exponential"}})])
    RunPlan(settings=settings, spec=SPEC, samplers=1, free_core=False, to_tune=True)
    with pytest.raises(ConfigError, match="has no neighbours"):
        RunPlan(settings=settings, spec=SPEC, samplers=1, free_core=False)


@pytest.mark.parametrize(("changes", "lr", "factor"), [
    ({}, 1e-3, 2.0), ({"scale_lr": False}, 1e-3, 1.0), ({"mixing": "all_reduce"}, 1e-3, 1.0),
    ({"mixing": "none"}, 1e-3, 1.0), ({}, 3.2e-3, 1.25), ({}, 8e-3, 1.0),
])  # fmt: skip
def test_the_step_size_grows_with_the_root_of_the_number_of_learners_that_gossip(tmp_path, changes, lr, factor):
    values = {"run": {"algo": "a2c", "mode": "gala", "learners": 4}, "gala": changes, "a2c": {"lr": lr}}
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=SPEC, samplers=4, free_core=False)
    with assembled(assemble, plan, tmp_path, 0.0) as run:
        step_sizes = [spec.job.algorithm["lr"] for spec in run.specs.values() if spec.role.learns]
    assert step_sizes == pytest.approx([factor * lr] * 4)


@pytest.mark.parametrize(("mixing", "expected"), [("gossip", 0.03), ("all_reduce", None)])
def test_learners_of_one_mean_gradient_take_steps_of_one_size(tmp_path, mixing, expected):
    """A learning rate by each learner's own divergence would lead them apart forever."""
    values = {
        "run": {"algo": "ppo", "mode": "gala", "learners": 2},
        "gala": {"mixing": mixing},
        "ppo": {"target_kl": 0.03},
    }
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=SPEC, samplers=2, free_core=False)
    with assembled(assemble, plan, tmp_path, 0.0) as run:
        jobs = [spec.job for spec in run.specs.values() if spec.role.learns]
        assert [job.algorithm["target_kl"] for job in jobs] == [expected] * 2


def test_in_lockstep_the_radius_is_that_of_one_mix_though_a_learner_is_three_ahead():
    memory = MixMemory.create(4, lockstep=True)
    try:
        for learner, mixes in enumerate((4, 1, 2, 3)):
            for number in range(1, mixes + 1):
                memory.mixed[learner].publish({"theta": np.full(2, number, np.float32)}, {}, 0, number)
                memory.board["number"][learner] = number
        assert [parameters.tolist() for parameters in memory.aligned()] == [[1.0, 1.0]] * 4
    finally:
        memory.close()


def test_a_learner_that_returns_gives_the_others_nothing_of_its_old_parameters():
    memory = MixMemory.create(2)

    def mixer(learner):
        spec = MixSpec(
            learner=learner,
            learners=2,
            mixing="gossip",
            topology="ring",
            max_staleness=None,
            average_interval=1,
            rows=(0, 1),
            memory=memory.handle,
        )
        return Mixer(spec, lambda: (0, 1), lambda: False)

    try:
        old, new = np.full(2, -100.0, np.float32), np.full(2, 8.0, np.float32)
        first, killed = mixer(0), mixer(1)
        for each in (first, killed):
            each.begin(old, 0)
        assert first.mix(old, new, 1).tolist() == [8.0, 8.0]
        returned = mixer(1)
        returned.begin(old, 0)
        assert returned.mix(old, old, 1).tolist() == [8.0, 8.0], "a neighbour's parameters"
        assert first.mix(new, new, 2).tolist() == [8.0, 8.0]
    finally:
        memory.close()


@pytest.mark.parametrize("mixing", ["gossip", "all_reduce", "average", "none"])
def test_statistics_are_averaged_with_the_parameters_or_the_gradients_to_more_digits_than_these(mixing):
    memory = MixMemory.create(2)
    try:
        mixers = []
        for learner in (0, 1):
            spec = MixSpec(
                learner=learner,
                learners=2,
                mixing=mixing,
                topology="full",
                max_staleness=None,
                average_interval=1,
                rows=(0, 1),
                memory=memory.handle,
            )
            mixers.append(Mixer(spec, lambda: (0, 1), lambda: False))
            mixers[-1].statistics = np.array([100.0 + 200.0 * learner, 1e6 + 1.0 + learner, 2.0 + learner])
            mixers[-1].begin(np.full(2, learner, np.float32), 0)
        own, before = mixers[0], np.zeros(2, np.float32)
        if mixing == "all_reduce":
            mixers[1]._gossip.send(mixers[1]._joined(np.full(2, 4.0, np.float32)), 1)
            assert own.reduce(np.full(2, 2.0, np.float32), 1).tolist() == [3.0, 3.0]
        else:
            mixers[1].mix(before, np.full(2, 4.0, np.float32), 1)
            found = own.mix(before, np.full(2, 2.0, np.float32), 1)
            assert found.tolist() == ([2.0] if mixing == "none" else [3.0]) * 2
        expected = [100.0, 1e6 + 1.0, 2.0] if mixing == "none" else [200.0, 1e6 + 1.5, 2.5]
        np.testing.assert_allclose(own.statistics, expected, rtol=1e-13)
    finally:
        memory.close()


def asked(*argv):
    settings = resolve([Layer("user", user_values(build_parser().parse_args([*argv])))])
    check_algorithm(settings.config.run.algo, SPEC, settings.config.mode)
    return settings.config


@pytest.mark.parametrize(("argv", "words"), [
    (("--mode", "gala", "--algo", "dqn"), "--algo dqn: it learns from replay, which mode gala does not provide"),
    (("--mode", "gala", "--algo", "a2c", "--learners", "0"), "run.learners = 0: must be 1 to 16"),
    (("--mode", "gala", "--set", "gala.topology=star"), "topology = .star.: must be one of: ring, exponential, full"),
    (("--mode", "gala", "--algo", "a2c", "--max-staleness", "-1"), "max_staleness = -1: must be 0 to"),
    (("--set", "cluster.learners=1"), "cluster.learners = 1: must be 2 to 64"),
])  # fmt: skip
def test_what_cannot_run_is_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        asked(*argv)
