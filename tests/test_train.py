"""``python -m spreeze.train`` itself: what a run leaves behind, for each algorithm, and learning that can be seen."""

import json
import sqlite3

import pytest
from harness import FAULT, PENDULUM, Run, train

from spreeze.metrics import METRICS, by_name
from spreeze.settings import from_toml
from spreeze.store_reader import MetricsReader
from spreeze.transport.weights import WeightsStore

REQUIRED_SERIES = (
    "env_steps", "env_steps_per_s", "sampler_env_steps_per_s/0", "updates", "updates_per_s", "update_frames_per_s",
    "samples_per_insert", "policy_lag", "transition_age", "replay_fill", "sampler_policy_share", "sampler_env_share",
    "sampler_write_share", "sampler_wait_share", "learner_wait_share", "learner_gather_share", "learner_critic_share",
    "learner_actor_share", "learner_publish_share", "critic_loss", "actor_loss", "q_mean", "alpha", "critic_grad_norm",
    "actor_grad_norm", "eval_return", "episode_return", "cpu_use", "cpu_core_use/0", "memory_used_bytes",
    "process_cpu_use/learner", "process_memory_bytes/learner", "disk_write_bytes_per_s", "restarts",
)  # fmt: skip


@pytest.mark.timeout(90)
def test_a_run_leaves_everything_that_is_known_of_it(tmp_path):
    run, code, document = train(tmp_path, *PENDULUM, "--env-steps", "12000", "--seed", "3")
    assert code == 0
    assert document["stopped_by"] == "env_steps"
    assert document["env_steps"] >= 12000
    config = from_toml((run.path / "config.toml").read_text(), "test").config
    assert (config.env.id, config.run.seed, config.sac.hidden_sizes) == ("Pendulum-v1", 3, (32, 32))
    assert "seed = 3  # user" in (run.path / "config.toml").read_text()
    state = run.state()
    assert (state["state"], state["exit_reason"]) == ("finished", "env_steps")
    assert state["env_steps"] == document["env_steps"]
    numbers = run.numbers()
    assert [name for name in REQUIRED_SERIES if name not in numbers] == []
    assert all(by_name(name) in METRICS for name in numbers), "every series is in the one table"
    assert 0 < numbers["replay_fill"] <= 1
    weights = WeightsStore(run.path / "weights").read_latest()
    assert weights is not None
    assert weights.version == document["updates"]
    assert (run.path / "logs" / "learner.log").exists()
    assert list((run.path / "errors").iterdir()) == []


@pytest.mark.timeout(90)
def test_scores_are_tied_to_versions_and_the_best_is_kept(tmp_path):
    with Run(tmp_path, *FAULT) as run:
        reader = MetricsReader(run.path / "metrics.db")
        run.wait_for(lambda: len(reader.evaluations()) >= 2, what="two evaluations")
        run.interrupt()
        code, document = run.end(20.0)
        evaluations = reader.evaluations()
    assert code == 0
    assert evaluations[-1].version == document["updates"], "the last score is that of the last weights"
    assert [e.version for e in evaluations] == sorted({e.version for e in evaluations})
    assert document["eval_return_mean"] == pytest.approx(evaluations[-1].return_mean)
    assert document["eval_return_best"] == pytest.approx(max(e.return_mean for e in evaluations))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("algo", ["td3", "ddpg"])
def test_the_other_algorithms_run_too_with_n_step_returns_and_normalised_observations(tmp_path, algo):
    run, code, document = train(
        tmp_path, *FAULT, "--algo", algo, "--set", f"{algo}.hidden_sizes=[32,32]", "--set", f"{algo}.n_step=3",
        "--set", "env.normalize_obs=true", "--updates", "300",
    )  # fmt: skip
    assert code == 0
    assert (document["algo"], document["updates"]) == (algo, 300)
    assert "alpha" not in run.numbers()
    weights = WeightsStore(run.path / "weights").read_latest()
    assert weights is not None
    assert weights.arrays["obs_std"].shape == (3,)


@pytest.mark.timeout(120)
def test_pendulum_is_learned_in_seconds(tmp_path):
    run, code, document = train(
        tmp_path, *PENDULUM, "--target-return", "-250", "--seconds", "80", "--set", "sac.hidden_sizes=[64,64]",
        "--set", "sac.actor_lr=0.001", "--set", "sac.critic_lr=0.001", "--set", "sac.alpha_lr=0.003",
        "--set", "evaluation.episodes=10", "--batch-size", "128", "--samples-per-insert", "64:256", timeout_s=110,
    )  # fmt: skip
    assert code == 0
    evaluations = [e.return_mean for e in MetricsReader(run.path / "metrics.db").evaluations()]
    assert document["stopped_by"] == "target_return", evaluations
    assert document["eval_return_best"] >= -250


@pytest.mark.timeout(60)
def test_no_file_of_a_run_holds_objects_that_would_be_executed(tmp_path):
    run, code, _ = train(tmp_path, *FAULT, "--updates", "40", "--save-replay")
    assert code == 0
    for path in run.path.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:4]
            assert path.suffix not in (".pt", ".pth", ".pkl", ".pickle")
            assert head[:2] not in (b"\x80\x04", b"\x80\x05", b"PK"), f"{path} looks like a pickle"
    json.loads((run.path / "summary.json").read_text())
    with sqlite3.connect(run.path / "metrics.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
