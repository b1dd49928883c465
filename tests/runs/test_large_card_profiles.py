"""The profiles for one large card, on a small machine: their settings stand, and runs with them are whole."""

import pytest
from harness import BATCH_SIZE, HIDDEN_SIZES, train

from spreeze.algorithms import create
from spreeze.algorithms.distributional import CategoricalCritics
from spreeze.config.layers import Layer, resolve
from spreeze.config.profiles import read_profile
from spreeze.inference.policy import Policy

PROFILES = {"flashsac": ("sac", 2048, (4.0, 16.0)), "fasttd3": ("td3", 32_768, (16.0, 512.0))}


@pytest.mark.parametrize("name", PROFILES)
def test_many_environments_large_batches_and_few_updates_are_kept_from_the_tuner(name):
    algo, batch, band = PROFILES[name]
    settings = resolve([read_profile(name)])
    config = settings.config
    assert (config.run.algo, config.learner.batch_size, config.env.normalize_obs) == (algo, batch, True)
    assert (config.replay.samples_per_insert_min, config.replay.samples_per_insert_max) == band
    assert settings.kept == {
        "learner.batch_size",
        "sampling.envs_per_sampler",
        "replay.samples_per_insert_min",
        "replay.samples_per_insert_max",
    }
    algorithm = create(algo, 17, 6, config.algorithm, 1)
    assert isinstance(algorithm.critics, CategoricalCritics)
    assert algorithm.critics.online.sizes == (23, 1024, 512, 256, 101)
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    assert algorithm.policy_meta()["hidden_sizes"] == [512, 256, 128]
    assert policy.obs_dim == 17


def test_what_the_user_sets_is_stronger_than_what_a_profile_keeps():
    settings = resolve([read_profile("flashsac"), Layer("user", {"learner": {"batch_size": 256}})])
    assert settings.config.learner.batch_size == 256
    assert "learner.batch_size" not in settings.kept


@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES)
def test_a_run_with_it_is_whole_and_holds_its_band(tmp_path, name):
    algo, _, band = PROFILES[name]
    small = (
        "--samplers",
        "1",
        "--envs-per-sampler",
        "16",
        "--batch-size",
        str(16 * BATCH_SIZE),
        "--set",
        f"{algo}.hidden_sizes={HIDDEN_SIZES}",
        "--set",
        f"{algo}.actor_hidden_sizes={HIDDEN_SIZES}",
        "--set",
        "replay.learning_starts=500",
        "--set",
        "replay.capacity=100000",
        "--set",
        "evaluation.episodes=2",
        "--no-visualizer",
        "--no-governor",
    )
    run, code, document = train(tmp_path, "--profile", name, "--env", "Pendulum-v1", "--updates", "400", tiny=small)
    assert (code, document["updates"], document["algo"]) == (0, 400, algo), run.stderr
    assert document["samples_per_insert_band"] == list(band)
    # The ratio is of counts; at most a batch and a write beyond the band (see RateLimiter).
    assert 0.9 * band[0] <= document["samples_per_insert"] <= 1.1 * band[1]
    assert document["rows_stored"] >= 0.99 * document["env_steps"]
