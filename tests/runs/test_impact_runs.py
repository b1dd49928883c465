"""Mode impact with real processes: any of them killed, stopped, resumed; and what it refuses."""

import contextlib
import dataclasses
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import HIDDEN_SIZES, Run, refused, train, train_until

from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithms import check_algorithm
from spreeze.config.layers import Layer, Settings, resolve
from spreeze.errors import ConfigError
from spreeze.metrics.table import SLOTS
from spreeze.modes import assemble
from spreeze.runtime.assembly import assembled
from spreeze.runtime.plan import RunPlan
from spreeze.transport.rollouts import Rollouts, RolloutsHandle
from spreeze.transport.shared_memory import Wakeup
from spreeze.types import Choices, EnvSpec, TeamSpec
from spreeze.workers import buffer_learner, torch_devices
from spreeze.workers.collectors.collector import SamplerStats
from spreeze.workers.samplers import _BufferSampler

SPEC = EnvSpec(env_id="T-v0", import_module=None, obs_dim=4, action=Choices((2,)),
               max_episode_steps=500, reward_threshold=None)  # fmt: skip

_CART = ("--env", "CartPole-v1", "--algo", "impact", "--sync-interval", "8")
_SMALL = ("--samplers", "2", "--envs-per-sampler", "2", "--set", f"impact.hidden_sizes={HIDDEN_SIZES}",
          "--set", "evaluation.episodes=2", "--set", "learner.checkpoint_interval_s=0.5", "--no-visualizer",
          "--no-governor")  # fmt: skip


def test_any_process_may_die_and_a_resumed_run_goes_on(tmp_path):
    with Run(tmp_path, *_CART, tiny=_SMALL) as run:
        run.wait_for(lambda: any("checkpoint" in entry.name for entry in run.path.glob("checkpoints*")), what="files")
        run.until_updates(100)
        for name in ("sampler-0", "learner"):
            victim, version = run.children()[name], run.version()
            os.kill(victim.pid, signal.SIGKILL)
            run.wait_for(lambda victim=victim, name=name: run.children().get(name) not in (None, victim), what=name)
            run.until_progress()
            run.wait_for(lambda version=version: run.version() > version, what="weights")
        rates = [run.numbers().get(f"sampler_env_steps_per_s/{index}") for index in range(2)]
        assert all(rate is not None for rate in rates)
        code, document = run.stop()
    assert (code, document["restarts"], document["error"], document["mode"]) == (0, 2, None, "impact")
    assert document["policy_lag_mean"] > 0.0
    wanted = document["updates"] + 50
    _, code, second = train(tmp_path, "--resume", "run", "--updates", str(wanted), tiny=())
    assert code == 0
    assert second["updates"] >= wanted
    assert second["env_steps"] > document["env_steps"]


_FRAMES = ("--set", "image.max_episode_frames=400", "--set", "{}.cnn=impala_small", "--set", "{}.hidden_sizes=[32]")


@pytest.mark.parametrize(("env", "algo", "extra"), [
    ("Pendulum-v1", "impact", ()),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("Pendulum-v1", "appo", ()), ("Pendulum-v1", "impala", ()), ("ALE/Pong-v5", "impact", _FRAMES))),
], ids=["continuous-impact", "continuous-appo", "continuous-impala", "images-impact"])  # fmt: skip
def test_continuous_actions_and_images_are_learned_evaluated_and_resumed(tmp_path, env, algo, extra):
    def seen(run):
        return run.numbers().get("updates", 0) >= 20 and "eval_return" in run.numbers()

    tiny = ("--samplers", "1", "--envs-per-sampler", "2", "--sync-interval", "8", "--set", "evaluation.episodes=1",
            "--set", f"{algo}.hidden_sizes={HIDDEN_SIZES}", "--no-visualizer", "--no-governor")  # fmt: skip
    tiny = (*tiny, *(word.format(algo) for word in extra))
    run, code, document = train_until(tmp_path, seen, "--env", env, "--algo", algo, tiny=tiny)
    assert code == 0, run.stderr
    assert (document["algo"], document["mode"], document["restarts"]) == (algo, "impact", 0)
    assert document["eval_return_mean"] is not None
    wanted = document["updates"] + 10
    again, code, second = train(tmp_path, "--resume", str(run.path), "--updates", str(wanted), tiny=())
    assert code == 0, again.stderr
    assert second["updates"] >= wanted
    assert second["env_steps"] > document["env_steps"]


def test_a_buffer_that_does_not_fit_into_memory_is_refused_before_anything_is_written(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, *_CART, "--set", "impact.slots=60000", "--sync-interval", "65536",
                          "--envs-per-sampler", "64")  # fmt: skip
    assert "circular buffer needs" in document["error"]
    assert "lower impact.slots or --sync-interval" in document["error"]
    assert list(tmp_path.glob("runs/*")) == []


def asked(*argv, spec=SPEC):
    config = resolve([Layer("user", user_values(build_parser().parse_args(argv)))]).config
    check_algorithm(config.run.algo, spec, config.mode)
    return config


@pytest.mark.parametrize("algo", ["impact", "appo", "impala"])
def test_the_algorithm_implies_its_mode_and_is_refused_in_others(algo):
    config = asked("--algo", algo)
    assert config.run.mode == "impact"
    assert config.data_flow.asynchronous
    with pytest.raises(ConfigError, match="rollouts of any age, which mode hts does not provide; use --mode impact"):
        asked("--algo", algo, "--mode", "hts")


@pytest.mark.parametrize(("argv", "words"), [
    (("--algo", "impact", "--set", "impact.uses=0"), "impact.uses = 0: must be 1 to 65535"),
    (("--algo", "impala", "--set", "impala.slots=0"), "impala.slots = 0: must be 1 to 65536"),
    (("--algo", "impact", "--set", "impact.rho=0.5"), "impact.rho = 0.5: must be 1 to 1e"),
    (("--algo", "impact", "--set", "impact.ratio=R4"), "impact.ratio = 'R4': must be one of: R1, R2, R3"),
    (("--algo", "appo", "--set", "appo.uses=1", "--set", "appo.least_uses=4"), "least_uses = 4 is above uses = 1"),
    (("--mode", "impact", "--algo", "ppo"), "--algo ppo: it learns from what its own policy has just collected"),
    (("--mode", "impact", "--algo", "dqn"), "--algo dqn: it learns from replay, which mode impact does not provide"),
])  # fmt: skip
def test_what_cannot_run_is_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        asked(*argv)


def test_a_team_of_agents_is_refused_with_what_would_learn_it():
    team = TeamSpec(actions=(2, 2), obs_dim=2, state_dim=4)
    with pytest.raises(ConfigError, match="with 2 discrete actions each; qmix fits: use --algo qmix with --mode "):
        asked("--algo", "impact", spec=dataclasses.replace(SPEC, team=team))


def plan(samplers, *argv):
    return RunPlan(settings=Settings(config=asked(*argv), sources={}), spec=SPEC, samplers=samplers, free_core=True)


def learner_job(one, folder):
    """The learner's job, and an end to what it refers to."""
    with assembled(assemble, one, folder, 0.0) as run:
        return run.specs["learner"].job


@pytest.mark.parametrize(("samplers", "slots"), [(1, 4), (2, 4), (3, 6), (16, 16)])
def test_each_sampler_has_equally_many_rollouts_and_the_learner_knows_how_many_there_are(samplers, slots, tmp_path):
    one = plan(samplers, "--algo", "impact", "--set", "impact.slots=4", "--sync-interval", "4")
    assert learner_job(one, tmp_path).algorithm["slots"] == one.buffer_slots == slots


def test_the_learner_computes_with_the_kernels_that_its_batches_ask_for(tmp_path, monkeypatch):
    one = plan(1, "--algo", "impact", "--sync-interval", "8", "--set", "impact.hidden_sizes=[256,256]")
    job, seen = learner_job(one, tmp_path), []

    class Noting:
        def __init__(self, *arguments):
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)

        def turns(self):
            yield
            assert torch.full((1,), 2e-38).mul(0.25).count_nonzero() == 0, "denormal numbers are zero"

    monkeypatch.setattr(torch_devices, "mkl_lacks_avx512", lambda: True)
    monkeypatch.setattr(torch_devices, "_matmuls_round", lambda: False)
    monkeypatch.setattr(buffer_learner, "BufferUpdateLoop", lambda context, job, rollouts: None)
    monkeypatch.setattr(buffer_learner, "Learner", Noting)
    with contextlib.closing(Rollouts.create(one.rollout_spec())) as rollouts:
        for batch_size in (one.batch_size, one.batch_size - 1):
            handle = RolloutsHandle(fds=(os.dup(rollouts.handle.fds[0]),), spec=rollouts.spec)
            list(
                buffer_learner.learn_from_buffer(None, dataclasses.replace(job, rollouts=handle, batch_size=batch_size))
            )
    assert seen == ["bf16", "ieee"]


def test_the_memory_that_is_asked_for_counts_what_the_learner_keeps():
    one = plan(2, "--algo", "impact", "--set", "impact.slots=4", "--sync-interval", "16", "--envs-per-sampler", "2")
    spec = one.rollout_spec()
    rows = spec.num_slots * 16 * 4
    assert one.shared_bytes()[1] == spec.size_bytes + rows * (4 * 4 + 4 * (1 + 4 + 2))  # SPEC: 4 numbers, 2 actions


def test_inference_workers_are_refused_where_samplers_wait_for_nobody():
    with pytest.raises(ConfigError, match=r"inference_workers = 1: in mode impact samplers run the policy themselves"):
        plan(2, "--algo", "impact", "--set", "rollout.inference_workers=1")


def test_minibatches_divide_the_rollout_of_one_sampler():
    settings = ("--algo", "impact", "--sync-interval", "6", "--envs-per-sampler", "2", "--set")
    assert plan(2, *settings, "impact.minibatches=4").batch_size == 3
    with pytest.raises(ConfigError, match=r"12 rows \(sync_interval 6 x 2 environments\), which"):
        plan(2, *settings, "impact.minibatches=8")


def test_samplers_wait_for_half_of_the_uses_unless_told_otherwise():
    for uses, least, expected in ((2, None, 1), (1, None, 0), (8, 0, 0), (8, 8, 8)):
        more = () if least is None else ("--set", f"impact.least_uses={least}")
        assert plan(2, "--algo", "impact", "--set", f"impact.uses={uses}", *more).rollout_spec().least_uses == expected


def test_each_sampler_has_a_slot_to_fill_besides_its_share_of_those_to_read():
    for samplers, slots in ((1, 5), (2, 3), (3, 3), (8, 2)):
        spec = plan(samplers, "--algo", "impact").rollout_spec()
        assert (spec.num_slots, spec.max_uses, spec.least_uses, spec.asynchronous) == (slots, 20, 10, True)


def test_a_sampler_wakes_the_learner_at_each_complete_rollout_and_not_before():
    filled = iter([False, False, True, False])
    columns = SimpleNamespace()
    envs = SimpleNamespace(counts=SamplerStats(), columns=columns, info=None, may_step=lambda: [0])

    def advance(policies):
        columns.filled = next(filled)
        return True

    envs.advance = advance
    context = SimpleNamespace(
        pause_if_requested=lambda now_s: False,
        account_work=lambda since_s: None,
        heartbeat=lambda phase: None,
        report_info=lambda info, start_s: None,
        slots=np.zeros(len(SLOTS["sampler"])),
        earlier_counters=[0.0] * len(SLOTS["sampler"]),
    )
    with contextlib.closing(Wakeup.create()) as wakeup:
        loop = _BufferSampler(context, envs, None, wakeup)
        loop._policy = SimpleNamespace(current=lambda: object(), refresh=lambda: None, version=0)
        told = []
        for _ in range(4):
            loop.turn()
            told.append(wakeup.wait(0.0))
    assert told == [False, False, True, False]


@pytest.mark.parametrize(("algo", "mode"), [
    ("impact", "impact"), *(pytest.param("ppo", mode, marks=pytest.mark.slow) for mode in ("hts", "serial")),
])  # fmt: skip
def test_the_step_size_of_a_run_that_ends_by_the_clock_alone_falls_with_it(tmp_path, algo, mode):
    def seen(run):
        return 0.0 < run.numbers().get("learning_rate", 1.0) < 1e-3

    args = ("--env", "Pendulum-v1", "--algo", algo, "--mode", mode, "--sync-interval", "8", "--seconds", "3600",
            "--set", f"{algo}.lr=1e-3", "--set", f"{algo}.lr_schedule=linear")  # fmt: skip
    tiny = ("--envs-per-sampler", "2", "--set", f"{algo}.hidden_sizes={HIDDEN_SIZES}", "--set", "evaluation.episodes=1",
            "--no-visualizer")  # fmt: skip
    run, code, _ = train_until(tmp_path, seen, *args, tiny=tiny)
    assert code == 0, run.stderr
    assert run.numbers()["learning_rate"] > 0.5e-3, "an hour is far away"
