"""The bottleneck sentence, over a table of situations and over a small simulated pipeline."""

import dataclasses

import pytest

from spreeze.metrics.bottleneck import bottleneck
from spreeze.metrics.snapshot import GpuSnapshot, Snapshot

SAMPLER = ("Samplers are", "Collecting is", "Environments are", "Paused samplers are")
LEARNER, LIMITER, BALANCED = "Learner is", "The rate limiter is", ("Balanced", "Collecting and", "Sampling and")
WARMING_UP, OTHERS = "Warming up", "Other programs are"
EVALUATOR, TUNER = "No evaluation", ("The tuner measures", "It ended before the tuner")
UNKNOWN = ("Bottleneck unknown", "Neither side makes progress", "No update")
BASE = Snapshot(
    env_id="Any-v0",
    algo="sac",
    updates=1000,
    env_steps=50_000,
    learning_starts=5_000,
    samples_per_insert=32.0,
    samples_per_insert_min=8.0,
    samples_per_insert_max=512.0,
    cpu_use=0.7,
    samplers_wanted=3,
    learner_device="cpu",
)


def _snapshot(learner_wait, sampler_wait, **fields):
    learner = {"wait": learner_wait, "gather": 0.02, "critic": 0.9 - learner_wait, "publish": 0.01}
    sampler = {"wait": sampler_wait, "env": 0.8 * (1 - sampler_wait), "policy": 0.2 * (1 - sampler_wait)}
    shares = {"learner_shares": learner, "sampler_shares": sampler} | fields
    return dataclasses.replace(BASE, **shares)


GPU_IDLE = (GpuSnapshot(index=0, use=0.3),)
GPU_BUSY = (GpuSnapshot(index=0, use=0.95),)
GPU_LAUNCHES = (GpuSnapshot(index=0, use=0.95, power_w=130.0, power_limit_w=700.0),)
GPU_COMPUTES = (GpuSnapshot(index=0, use=0.95, power_w=500.0, power_limit_w=700.0),)
ANOTHER_IDLE = (*GPU_COMPUTES, GpuSnapshot(index=1, use=0.0, power_w=60.0, power_limit_w=700.0))


@pytest.mark.parametrize(("env", "critic", "lag", "side", "words"), [
    (0.5, 0.3, None, SAMPLER, "stepping takes 60 % (the engine 50 %), learning 32 %; more of them"),
    (0.1, 0.7, None, LEARNER, "learning 72 %; fewer samples per insert (replay.samples_per_insert_min) or larger"),
    (0.1, 0.7, 0, LEARNER, "learning 72 %; a larger minibatch or fewer epochs would help."),
])  # fmt: skip
def test_a_process_that_steps_and_learns_on_a_device_is_judged_by_its_times(env, critic, lag, side, words):
    sampler = {"wait": 0.0, "env": env, "policy": 0.06, "write": 0.04}
    learner = {"wait": 0.0, "gather": 0.02, "critic": critic}
    found = bottleneck(_snapshot(0.0, 0.0, on_device=True, lag=lag, sampler_shares=sampler, learner_shares=learner))
    assert found.startswith(side)
    assert words in found


@pytest.mark.parametrize(
    ("snapshot", "side", "words"),
    [
        (
            _snapshot(0.03, 0.40),
            LEARNER,
            "a smaller batch or a GPU, but not more cores (70 % of these are in use), would",
        ),
        (_snapshot(0.03, 0.40), LEARNER, "samplers wait 40 % for it."),
        (_snapshot(0.03, 0.40, samples_per_insert=8.1), LEARNER, "at the lower bound of 8 samples per insert"),
        (_snapshot(0.03, 0.40, cpu_use=0.99), LEARNER, "fewer samplers"),
        (_snapshot(0.03, 0.40, learner_device="cuda:0", gpus=GPU_IDLE), LEARNER, "a larger batch"),
        (_snapshot(0.03, 0.40, learner_device="cuda:0", gpus=GPU_BUSY), LEARNER, "second GPU"),
        (
            _snapshot(0.03, 0.40, learner_device="cuda:0", gpus=GPU_LAUNCHES),
            LEARNER,
            "a larger batch (kernels run 95 % of the time but draw 130 of 700 W: limited by launches",
        ),
        (_snapshot(0.03, 0.40, learner_device="cuda:0", gpus=ANOTHER_IDLE), LEARNER, "a second GPU"),
        (_snapshot(0.03, 0.40, learner_device="cuda:0+cuda:1", gpus=ANOTHER_IDLE), LEARNER, "a second GPU"),
        (_snapshot(0.03, 0.40, learner_device="cuda:1", gpus=ANOTHER_IDLE), LEARNER, "kernels run only 0 %"),
        (_snapshot(0.03, 0.40, learner_shares={"wait": 0.0, "gather": 0.5}), LEARNER, "gathering rows takes 50 %"),
        (_snapshot(0.03, 0.40, learner_shares={"wait": 0.0, "publish": 0.4}), LEARNER, "publishing less often"),
        (_snapshot(0.50, 0.02, unevaluated=True), EVALUATOR, "the target return cannot be reached"),
        (_snapshot(0.50, 0.02, tuner_measures=True, state="finished"), TUNER, "It ended before the tuner had chosen."),
        (_snapshot(0.50, 0.02, tuner_measures=True), TUNER, "measures on the running workers: rates change"),
        (
            _snapshot(0.50, 0.02, tuner_measures=True, lag=1),
            TUNER,
            "taking turns with the run, which is paused meanwhile",
        ),
        (_snapshot(0.50, 0.02), SAMPLER, "more samplers (the cores are 70 % busy)"),
        (_snapshot(0.50, 0.02, cpu_use=0.97), SAMPLER, "more cores or a faster environment"),
        (_snapshot(0.50, 0.02, samples_per_insert=500.0), SAMPLER, "bound above 512, which now limits the learner"),
        (_snapshot(0.50, 0.0, sampler_shares={"wait": 0.0, "env": 0.2, "policy": 0.7}), SAMPLER, "per sampler"),
        (_snapshot(0.30, 0.30, samples_per_insert_max=9.0), LIMITER, "a wider band would help"),
        (_snapshot(0.02, 0.03, samplers_active=1.0, external_cpu_cores=1.5), OTHERS, "1 of 3 samplers are active"),
        (
            _snapshot(0.02, 0.03, external_cpu_cores=0.6, cpu_use=1.0),
            BALANCED,
            "100 % busy; less load from other programs, which keep 0.60 cores busy (mean of 20 s), would help.",
        ),
        (
            _snapshot(0.50, 0.02, external_cpu_cores=0.6, cpu_use=1.0),
            SAMPLER,
            "which keep 0.60 cores busy (mean of 20 s), or a faster environment would help.",
        ),
        (_snapshot(0.50, 0.02, lag=1, external_cpu_cores=0.6, cpu_use=1.0), SAMPLER, "less load from other programs"),
        (_snapshot(0.02, 0.03, samplers_active=0.1, external_cpu_cores=0.0), BALANCED, "0.10 of 3 samplers are active"),
        (_snapshot(0.02, 0.03, updates_per_s=0.0), UNKNOWN, "No update in the last seconds"),
        (_snapshot(0.50, 0.02, updates_per_s=0.0), SAMPLER, "Samplers are the limit"),
        (
            _snapshot(0.02, 0.03, external_cpu_cores=1.5),
            BALANCED,
            "; other programs keep 1.50 cores busy (mean of 20 s).",
        ),
        (
            _snapshot(0.03, 0.40, external_cpu_cores=0.5),
            LEARNER,
            "less load from other programs, which keep 0.50 cores busy (mean of 20 s),",
        ),
        (
            _snapshot(0.03, 0.40, external_cpu_cores=0.5, cpu_use=1.0),
            LEARNER,
            "Learner is the limit: it computes or waits for a core 97 % of its time; less load",
        ),
        (
            _snapshot(0.03, 0.40, sibling_cpu_cores=0.9),
            LEARNER,
            "the page, other runs and programs of low priority, which keep 0.90 cores busy (mean of 20 s),",
        ),
        (
            _snapshot(0.03, 0.40, lag=1, external_cpu_cores=0.3, sibling_cpu_cores=0.9),
            LEARNER,
            "which keep 1.20 cores busy (mean of 20 s), fewer epochs or a smaller network would help.",
        ),
        (
            _snapshot(0.02, 0.03, external_cpu_cores=0.1, sibling_cpu_cores=0.9, cpu_use=1.0),
            BALANCED,
            "from the page, other runs and programs of low priority, which keep 1 cores busy (mean of 20 s), would",
        ),
        (_snapshot(0.03, 0.40, external_cpu_cores=0.4), LEARNER, "samplers wait 40 % for it."),
        (_snapshot(0.02, 0.03, samplers_active=1.0, external_cpu_cores=0.0, cpu_use=0.40), BALANCED, "Balanced"),
        (
            _snapshot(0.50, 0.03, samplers_active=1.0, external_cpu_cores=0.0),
            SAMPLER,
            "of the balance of samples per insert",
        ),
        (
            _snapshot(0.50, 0.03, samplers_active=1.0, external_cpu_cores=0.4, core_uses=(0.5, 0.5), leave_free=0.75),
            SAMPLER,
            "Paused samplers are the limit: 1 of 3 samplers are active because 75 % of the cores are to be left free",
        ),
        (
            _snapshot(0.50, 0.03, samplers_active=1.0, external_cpu_cores=0.4, core_uses=(0.5, 0.5), leave_free=0.1),
            SAMPLER,
            "because 10 % of the cores are to be left free, and other programs keep 0.40 cores busy (mean of 20 s)",
        ),
        (
            _snapshot(0.50, 0.03, samplers_active=1.0, external_cpu_cores=0.4),
            OTHERS,
            "Other programs are the limit: they keep 0.40 cores busy (mean of 20 s), so 1 of 3",
        ),
        (_snapshot(0.02, 0.60, samplers_active=1.0, external_cpu_cores=0.3), LEARNER, "samplers wait 60 % for it"),
        (_snapshot(0.0, 0.0, cpu_use=0.53, serial=True), BALANCED, "learning alternate in one process"),
        (_snapshot(0.02, 0.03, cpu_use=0.99), BALANCED, "only more cores or a GPU would help"),
        (_snapshot(0.02, 0.03, cpu_use=0.40), BALANCED, "another sampler would add env steps"),
        (_snapshot(0.02, 0.03, cpu_use=None), BALANCED, "faster hardware"),
        (_snapshot(1.0, 0.0, updates=0, env_steps=1200), WARMING_UP, "1,200 of 5,000 env steps"),
        (_snapshot(1.0, 0.0, updates=None, env_steps=None), WARMING_UP, "- of 5,000 env steps"),
        (
            _snapshot(1.0, 0.0, updates=900, env_steps=8000, samples_per_insert=None, state="training"),
            WARMING_UP,
            "replay is refilled with 5,000 env steps before learning continues",
        ),
        (_snapshot(0.0, 0.0, learner_shares={}), UNKNOWN, "no times of the learner in"),
        (_snapshot(0.0, 0.0, sampler_shares={}), UNKNOWN, "no times of the samplers in"),
        (Snapshot(env_id="Any-v0", algo="sac"), UNKNOWN, "Bottleneck unknown"),
        (_snapshot(0.50, 0.02, lag=1), SAMPLER, "Collecting is the limit: learner waits 50 %, samplers 2 %"),
        (_snapshot(0.15, 0.41, lag=1), LEARNER, "Learner is the limit: learner waits 15 %, samplers 41 %"),
        (_snapshot(0.50, 0.02, lag=1, cpu_use=0.99), SAMPLER, "more cores or a faster environment"),
        (_snapshot(0.11, 0.13, lag=1), BALANCED, "Balanced: learner waits 11 %, samplers 13 %"),
        (
            _snapshot(1.0, 0.95, lag=1, updates_per_s=0.0, env_steps_per_s=0.0),
            UNKNOWN,
            "Neither side makes progress: learner waits 100 %, samplers 95 %",
        ),
        (_snapshot(0.02, 0.60, lag=1), LEARNER, "fewer epochs, a smaller network or a GPU"),
        (_snapshot(0.02, 0.60, lag=1, asynchronous=True), LEARNER, "fewer uses of a rollout, a smaller network"),
        (_snapshot(0.02, 0.03, lag=1), BALANCED, "Balanced: learner waits 2 %, samplers 3 %"),
        (
            _snapshot(0.60, 0.40, lag=0, serial=True),
            BALANCED,
            "alternate: learner waits 60 %, samplers 40 %; --mode hts",
        ),
        (_snapshot(0.60, 0.40, lag=0), BALANCED, "alternate: learner waits 60 %, samplers 40 %; with several learners"),
    ],
)
def test_sentence_names_the_limit_and_a_remedy(snapshot, side, words):
    found = bottleneck(snapshot)
    assert found.startswith(side)
    assert words in found
    assert found.endswith(".")
    assert "\n" not in found


def _simulate(env_step_s, update_s, batch=256, low=8.0, high=512.0, seconds=60.0):
    """Shares of one sampler and one learner held by a limiter: whoever is ahead of its bound waits 1 ms."""
    t_sampler = t_learner = 0.0
    busy = {"sampler": 0.0, "learner": 0.0}
    inserted, drawn = 1, 0
    while min(t_sampler, t_learner) < seconds:
        if t_sampler <= t_learner:
            if drawn + batch >= low * inserted:
                inserted, busy["sampler"], step = inserted + 1, busy["sampler"] + env_step_s, env_step_s
            else:
                step = 1e-3
            t_sampler += step
        else:
            if drawn + batch <= high * inserted:
                drawn, busy["learner"], step = drawn + batch, busy["learner"] + update_s, update_s
            else:
                step = 1e-3
            t_learner += step
    waits = 1 - busy["learner"] / t_learner, 1 - busy["sampler"] / t_sampler
    return _snapshot(*waits, samples_per_insert=drawn / inserted)


def test_slow_environment_makes_the_samplers_the_limit():
    assert bottleneck(_simulate(env_step_s=50e-3, update_s=5e-3)).startswith(SAMPLER)


def test_slow_learner_makes_the_learner_the_limit():
    found = bottleneck(_simulate(env_step_s=0.5e-3, update_s=100e-3))
    assert found.startswith(LEARNER)
    assert "at the lower bound of 8" in found


def test_rates_inside_the_band_are_balanced():
    assert bottleneck(_simulate(env_step_s=5e-3, update_s=10e-3)).startswith(BALANCED)
