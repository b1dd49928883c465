"""``python -m spreeze.train`` itself: what a run leaves behind, for each algorithm, and learning that can be seen."""

import json
import os
import time

import pytest
from harness import FAULT, HIDDEN_SIZES, PATIENCE_S, PENDULUM, NoView, train, train_until

from spreeze.config.layers import Layer, from_toml, resolve
from spreeze.envs.probe import probe_env
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.table import METRICS, by_name
from spreeze.modes import run_mode
from spreeze.run_directory import RunDir
from spreeze.runtime import supervisor
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import split_names
from spreeze.transport.weights import WeightsStore

REQUIRED_SERIES = (
    "env_steps", "env_steps_per_s", "sampler_env_steps_per_s/0", "updates", "updates_per_s", "update_frames_per_s",
    "samples_per_insert", "policy_lag", "transition_age", "replay_fill", "sampler_policy_share", "sampler_env_share",
    "sampler_write_share", "sampler_wait_share", "learner_wait_share", "learner_gather_share", "learner_critic_share",
    "learner_actor_share", "learner_publish_share", "critic_loss", "actor_loss", "q_mean", "alpha", "critic_grad_norm",
    "actor_grad_norm", "eval_return", "episode_return", "cpu_use", "memory_used_bytes",
    f"cpu_core_use/{min(os.sched_getaffinity(0))}",
    "process_cpu_use/learner", "process_memory_bytes/learner", "disk_write_bytes_per_s", "restarts",
)  # fmt: skip


@pytest.mark.cold
def test_a_run_leaves_everything_that_is_known_of_it(tmp_path):
    def missing(run):
        numbers = run.numbers()
        return [name for name in REQUIRED_SERIES if name not in numbers]

    run, code, document = train_until(tmp_path, lambda run: not missing(run), *PENDULUM, "--seed", "3")
    assert code == 0
    config = from_toml((run.path / "config.toml").read_text(), "test").config
    assert (config.env.id, config.run.seed) == ("Pendulum-v1", 3)
    assert list(config.algorithm.hidden_sizes) == json.loads(HIDDEN_SIZES)
    assert "seed = 3  # user" in (run.path / "config.toml").read_text()
    state = run.state()
    assert (state["state"], state["exit_reason"]) == ("finished", document["stopped_by"])
    assert state["env_steps"] == document["env_steps"]
    numbers = run.numbers()
    assert missing(run) == []
    assert all(by_name(name) in METRICS for name in numbers), "every series is in the one table"
    assert 0 < numbers["replay_fill"] <= 1
    weights = WeightsStore(run.path / "weights").read_latest()
    assert weights is not None
    assert weights.version == document["updates"]
    assert (run.path / "logs" / "learner.log").exists()
    assert list((run.path / "errors").iterdir()) == []


@pytest.mark.parametrize(("condition", "value"), [
    ("seconds", 0.5), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("env_steps", 300), ("updates", 5))),
])  # fmt: skip
def test_a_stop_condition_ends_a_run_and_what_is_not_known_by_then_is_none(tmp_path, condition, value):
    _, code, document = train(tmp_path, *PENDULUM, f"--{condition.replace('_', '-')}", str(value))
    assert code == 0
    assert document["stopped_by"] == condition
    assert document[{"seconds": "wall_s"}.get(condition, condition)] >= value
    assert set(document["time_split"]) == set(split_names(on_policy=False, inference_workers=False)), "known or not"
    if document["rates_measured_s"] is None:
        unknown = {document[name] for name in ("env_steps_per_s", "updates_per_s", "update_frames_per_s")}
        assert unknown | set(document["time_split"].values()) == {None}


def test_the_last_score_is_that_of_the_last_weights(tmp_path, monkeypatch):
    for name in (
        "_EVALUATION_S",
        "_FIRST_EVALUATION_S",
        "_EXIT_S",
    ):  # the user's patience, which a slow machine would need more of
        monkeypatch.setattr(supervisor, name, PATIENCE_S)
    values = {"env": {"id": "Pendulum-v1"}, "sac": {"hidden_sizes": [8]}, "learner": {"batch_size": 8},
              "replay": {"capacity": 20_000, "learning_starts": 200}, "visualizer": {"enabled": False},
              "evaluation": {"episodes": 1}, "stop": {"updates": 20}}  # fmt: skip
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=probe_env("Pendulum-v1", steps=0).spec, samplers=1,
                   free_core=False)  # fmt: skip
    run_dir = RunDir.create(tmp_path, "run")
    try:
        with Interrupts() as interrupts:
            outcome = run_mode(plan, run_dir, NoView(), interrupts)
    finally:
        run_dir.close()
    last = MetricsReader(run_dir.path / "metrics.db").evaluations()[-1]
    assert (outcome.updates, last.version) == (20, 20)
    assert outcome.eval_return_mean == pytest.approx(last.return_mean)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["td3", "ddpg"])
def test_the_other_algorithms_run_too_with_n_step_returns_and_normalized_observations(tmp_path, algo):
    run, code, document = train(
        tmp_path, *FAULT, "--algo", algo, "--set", f"{algo}.hidden_sizes={HIDDEN_SIZES}", "--set", f"{algo}.n_step=3",
        "--set", "env.normalize_obs=true", "--updates", "300",
    )  # fmt: skip
    assert code == 0
    assert (document["algo"], document["updates"]) == (algo, 300)
    assert "alpha" not in run.numbers()
    weights = WeightsStore(run.path / "weights").read_latest()
    assert weights is not None
    assert weights.arrays["obs_std"].shape == (3,)


def test_pendulum_is_learned(tmp_path):
    # Some 4,000 updates on any machine; what it takes in seconds is the bench's to say.
    start_s = time.monotonic()
    run, code, document = train(
        tmp_path, *PENDULUM, "--target-return", "-250", "--updates", "60000", "--set", "sac.hidden_sizes=[64,64]",
        "--set", "sac.actor_lr=0.001", "--set", "sac.critic_lr=0.001", "--set", "sac.alpha_lr=0.003",
        "--set", "evaluation.episodes=10", "--batch-size", "128", "--samples-per-insert", "64:256",
    )  # fmt: skip
    assert code == 0
    evaluations = [e.return_mean for e in MetricsReader(run.path / "metrics.db").evaluations()]
    assert document["stopped_by"] == "target_return", evaluations
    assert document["eval_return_best"] >= -250
    assert 0.0 < document["time_to_target_s"] < time.monotonic() - start_s, "from the start of the process"
