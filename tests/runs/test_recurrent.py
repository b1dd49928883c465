"""Policies with memory in real runs: the same bits whoever dies, resumed or not; every mode; evaluated and exported."""

import os
import signal

import numpy as np
import pytest
from harness import refused, run_command
from hts_runs import ROWS, SMALL, SYNTHETIC, Run, fingerprints, kill_in_turn, played, train

import spreeze
from spreeze.errors import UsageError

SETTINGS = ("--set", "{algo}.recurrent={kind}", "--set", "{algo}.recurrent_size=6", "--set", "{algo}.sequence_length=8",
            "--set", "{algo}.burn_in=3")  # fmt: skip


def memory(kind="lstm", algo="ppo"):
    return [part.format(kind=kind, algo=algo) for part in SETTINGS]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run, document = played(folder, "reference", *memory(), intervals=5)
    return folder, fingerprints(run), document["parameters_sha256"]


def test_inference_workers_and_a_resume_change_no_bit(reference, tmp_path):
    first, _ = played(tmp_path, "run", *memory(), "--inference-workers", "2", intervals=2)
    _, code, document = train(
        tmp_path, "--resume", "run", "--inference-workers", "1", "--env-steps", str(ROWS * 5), tiny=()
    )
    assert code == 0
    assert document["parameters_sha256"] == reference[2]
    assert fingerprints(first) == reference[1]


def test_every_role_is_killed_in_turn_and_the_memory_is_kept(tmp_path):
    args = (*SYNTHETIC, *memory("gru"), "--env-arg", "law=exponential", "--env-arg", "mean_s=0.02",
            "--inference-workers", "1")  # fmt: skip
    with Run(tmp_path, *args, name="killed", tiny=SMALL) as run:
        kill_in_turn(run, ("sampler-1", "inference-0", "learner"))
        code, document = run.stop()
        assert (code, document["error"], document["restarts"]) == (0, None, 3)
        lines = fingerprints(run)
        calm, _ = played(tmp_path, "calm", *memory("gru"), intervals=len(lines))
        assert lines == fingerprints(calm)


def test_one_process_and_several_learn_the_same_from_rollouts_in_turns(tmp_path):
    serial = ("--mode", "serial", "--algo", "a2c", "--set", "a2c.hidden_sizes=[8,8]", *memory("gru", "a2c"))
    several, document = played(tmp_path, "several", *serial, "--inference-workers", "1", intervals=4)
    assert document["updates"] == 4
    alone, _ = played(tmp_path, "alone", *serial, "--samplers", "1", "--envs-per-sampler", "4", intervals=4)
    assert fingerprints(alone) == fingerprints(several)


def test_a_run_is_evaluated_played_by_a_program_of_ones_own_and_exported(reference, tmp_path):
    folder, _, _ = reference
    run = str(folder / "runs" / "reference")
    shown = run_command(
        "evaluate", run, "--episodes", "2", "--import", "spreeze.envs.small_tasks", "--checkpoint", "latest"
    )
    assert shown.returncode == 0, shown.stderr
    out = tmp_path / "policy.npz"
    shown = run_command("export", run, "--format", "numpy", "--checkpoint", "latest", "--out", str(out))
    assert shown.returncode == 0, shown.stderr
    assert "checked beside our policy on 1,000 observations" in shown.stdout
    assert "actions, state = run_with_state(policy, x, state)" in (tmp_path / "policy_numpy_example.py").read_text()
    policy = spreeze.load_policy(run, "latest", import_module="spreeze.envs.small_tasks")
    obs, state = np.zeros(policy.spec.obs_dim, np.float32), ()
    found = []
    for _ in range(3):
        action, state = policy.act(obs, state)
        found.append(action)
    assert state[0].shape == (1, 12)
    np.testing.assert_array_equal(policy.act(obs, ())[0], found[0])
    with pytest.raises(UsageError, match="use act: action, state = "):
        policy.predict(obs)


@pytest.mark.parametrize(("mode", "algo", "more"), [
    ("impact", "impact", ("--set", "impact.minibatches=2", "--set", "impact.uses=4")),
    ("gala", "ppo", ("--learners", "2")),
    pytest.param("impact", "impala", (), marks=pytest.mark.slow),
    pytest.param("tianji", "ppo", ("--learners", "2"), marks=pytest.mark.slow),
])  # fmt: skip
def test_each_other_mode_learns_with_memory(tmp_path, mode, algo, more):
    tiny = ("--samplers", "2", "--envs-per-sampler", "2", "--sync-interval", "16", "--no-evaluator", "--no-visualizer",
            "--set", f"{algo}.hidden_sizes=[8,8]")  # fmt: skip
    args = (*SYNTHETIC, "--mode", mode, "--algo", algo, *memory("gru", algo), *more, "--updates", "8")
    run, code, document = train(tmp_path, *args, tiny=tiny)
    assert code == 0, run.stderr[-3000:]
    assert document["updates"] >= 8
    assert document["error"] is None
    policy = spreeze.load_policy(str(run.path), "latest", import_module="spreeze.envs.small_tasks")
    assert policy.act(np.zeros(policy.spec.obs_dim, np.float32), ())[1][0].shape == (1, 6)


REPLAY = ("--set", "{algo}.recurrent={kind}", "--set", "{algo}.recurrent_size=6", "--set", "{algo}.sequence_length=8",
          "--set", "{algo}.burn_in=3", "--set", "{algo}.hidden_sizes=[8]", "--set", "replay.learning_starts=128",
          "--batch-size", "32", "--no-visualizer", "--samplers", "1", "--envs-per-sampler", "2",
          "--replay-capacity", "4000", "--set", "evaluation.episodes=2")  # fmt: skip


def replayed(algo, kind, *more):
    return (*SYNTHETIC, "--algo", algo, *(part.format(algo=algo, kind=kind) for part in (*REPLAY, *more)))


def test_sequences_of_replay_count_as_their_env_steps_and_repeat_bit_for_bit(tmp_path):
    args = (*replayed("sac", "lstm", "--set", "env.normalize_obs=true"), "--mode", "serial", "--env-steps", "240")
    first, code, document = train(tmp_path, *args, name="first", tiny=())
    assert code == 0, first.stderr[-3000:]
    assert document["env_steps"] == pytest.approx(240, abs=2)
    assert document["updates"] == pytest.approx(240 - 128, abs=32)  # one an env step, as soon as a sequence is full
    assert document["samples_per_insert"] == pytest.approx(32.0, rel=0.1)
    _, _, again = train(tmp_path, *args, name="again", tiny=())
    assert again["parameters_sha256"] == document["parameters_sha256"]
    policy = spreeze.load_policy(str(first.path), "latest", import_module="spreeze.envs.small_tasks")
    assert policy.act(np.zeros(policy.spec.obs_dim, np.float32), ())[1][0].shape == (1, 12)
    out = tmp_path / "policy.npz"
    shown = run_command("export", str(first.path), "--format", "numpy", "--checkpoint", "latest", "--out", str(out))
    assert shown.returncode == 0, shown.stderr
    assert "checked beside our policy on 1,000 observations" in shown.stdout


def test_a_sampler_and_a_learner_are_killed_and_saved_sequences_are_drawn_again(tmp_path):
    args = ("--env", "CartPole-v1", *replayed("dqn", "gru", "--set", "{algo}.priority_exponent=0.6")[len(SYNTHETIC) :])
    with Run(tmp_path, *args, "--save-replay", "--no-governor", name="killed", tiny=()) as run:
        run.until_updates(20)
        for count, name in enumerate(("sampler-0", "learner"), 1):
            os.kill(run.children()[name].pid, signal.SIGKILL)
            run.wait_for(lambda count=count: run.numbers().get("restarts", 0) >= count, what=f"another {name}")
            run.until_progress()
        code, document = run.stop()
    assert (code, document["error"]) == (0, None)
    more = ("--updates", str(document["updates"] + 50), "--no-visualizer")
    run, code, document = train(tmp_path, "--resume", "killed", *more, tiny=())
    assert (code, document["error"]) == (0, None), run.stderr[-3000:]


def test_a_replay_algorithm_without_memory_refuses_it_in_one_line(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, *SYNTHETIC, "--set", "td3.recurrent=lstm")
    assert (
        "td3.recurrent: its policy has no memory; use --algo sac, dqn, ppo, a2c, impact, appo or impala"
        in (document["error"])
    )
