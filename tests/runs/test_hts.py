"""The HTS-RL mode and its baseline with real processes: the same bits, whoever dies, and refusals with a reason."""

import json
import time

import pytest
from harness import refused, shared_memory
from hts_runs import ROWS, SMALL, SYNTHETIC, Run, fingerprints, kill_in_turn, played, slow, train

from spreeze.config.layers import Layer, resolve
from spreeze.errors import ConfigError
from spreeze.runtime.plan import RunPlan
from spreeze.types import Box, EnvSpec


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    run, document = played(tmp_path_factory.mktemp("reference"), "reference")
    lines = fingerprints(run)
    assert len(lines) == 20
    assert document["policy_lag_mean"] in (1.0, None)
    assert (document["samplers"], document["inference_workers"], document["updates"]) == (2, 0, 19 * 4)
    return lines, document["parameters_sha256"]


def test_another_number_of_inference_workers_and_slow_steps_change_no_bit(reference, tmp_path):
    run, document = played(tmp_path, "run", "--inference-workers", "1", *slow(2))
    assert fingerprints(run) == reference[0]
    assert document["parameters_sha256"] == reference[1]


@pytest.mark.slow
def test_a_resumed_run_with_other_inference_workers_gives_the_bits_of_one_that_never_stopped(reference, tmp_path):
    first, _ = played(tmp_path, "run", "--inference-workers", "2", intervals=7)
    _, code, document = train(
        tmp_path, "--resume", "run", "--inference-workers", "1", "--env-steps", str(ROWS * 20), tiny=()
    )
    assert code == 0
    assert (document["env_steps"], document["parameters_sha256"]) == (ROWS * 20, reference[1])
    assert fingerprints(first) == reference[0]


def test_every_role_is_killed_in_turn_and_no_bit_changes(tmp_path):
    """Slow steps keep the number of intervals small; the law of the time is no part of the trajectories."""
    shared = shared_memory()
    args = (*SYNTHETIC, "--env-arg", "law=exponential", "--env-arg", "mean_s=0.02", "--inference-workers", "1")
    with Run(tmp_path, *args, name="killed", tiny=SMALL) as run:
        kill_in_turn(run, ("sampler-1", "inference-0", "learner", "sampler-0"))
        code, document = run.stop()
        assert (code, document["error"], document["restarts"]) == (0, None, 4)
        assert any("learner continues from update" in event for event in run.events())
        lines = fingerprints(run)
        calm, _ = played(tmp_path, "calm", intervals=len(lines))
        assert lines == fingerprints(calm)
        assert run.nonce_processes() == []
    assert shared_memory() == shared


@pytest.mark.slow
def test_a_sampler_that_keeps_failing_ends_the_run_with_its_name(tmp_path):
    faults = {"p_crash": "1.0", "workers": "sampler-1"}
    run, code, document = train(tmp_path, "--env", "spreeze/Fault-v0", "--import", "fault_envs",
                                tiny=SMALL, faults=faults)  # fmt: skip
    assert code == 1
    assert "sampler-1 failed 5 times" in document["error"]
    assert "20 environment errors within 0 env steps; the last: environment 3, episode" in document["error"]
    assert "step 1: RuntimeError: injected fault" in document["error"]
    assert run.nonce_processes() == []


ERRORS = {"p_crash": 0.01, "p_nan": 0.01, "p_crash_reset": 0.02, "seed": 3}


def errors_of(run, process):
    """Told errors of a process: their text, from the files in the run's ``errors``."""
    records = [json.loads(path.read_text()) for path in sorted((run.path / "errors").glob(f"{process}-*environment-*"))]
    assert all("Traceback" in record["traceback"] for record in records)
    return [record["error"] for record in records]


@pytest.mark.slow
def test_environments_that_raise_or_give_nan_cost_their_episodes_and_no_bit_depends_on_the_inference_workers(tmp_path):
    task = ("--env", "spreeze/Fault-v0", "--import", "fault_envs", "--env-steps", str(ROWS * 15))
    faults = ERRORS | {"workers": "sampler-0,sampler-1"}
    found = []
    for inference_workers in ("0", "1"):
        run, code, document = train(tmp_path, *task, "--inference-workers", inference_workers,
                                    name=f"with-{inference_workers}", tiny=SMALL,
                                    faults=faults)  # fmt: skip
        assert (code, document["env_steps"], document["restarts"], document["error"]) == (0, ROWS * 15, 0, None)
        assert document["env_errors"] + document["transitions_rejected"] > 3
        told = errors_of(run, "sampler-0") + errors_of(run, "sampler-1")
        assert any("injected fault" in text or "nan" in text for text in told)
        assert any("; its episode is lost" in event for event in run.events() if event.startswith("sampler-"))
        assert "env errors" in run.stderr
        found.append((fingerprints(run), document["parameters_sha256"]))
    assert found[0] == found[1]
    clean, _, _ = train(tmp_path, *task, name="clean", tiny=SMALL)
    assert fingerprints(clean) != found[0][0]


@pytest.mark.parametrize("algo", ["ppo", pytest.param("a2c", marks=pytest.mark.slow)])
def test_one_process_bears_errors_of_its_environments_too(tmp_path, algo):
    task = ("--env", "spreeze/Fault-v0", "--import", "fault_envs", "--env-steps", str(ROWS * 10))
    sizes = ("--mode", "serial", "--algo", algo, "--samplers", "1", "--envs-per-sampler", "4",
             "--set", "evaluation.episodes=8")  # fmt: skip
    # Few enough for the trial before the run, whose every error is a reason to refuse the task.
    faults = {"p_crash": 0.01, "p_nan": 0.01, "seed": 3}
    evaluated = [argument for argument in SMALL if argument != "--no-evaluator"]
    run, code, document = train(tmp_path, *task, *sizes, tiny=evaluated, faults=faults)
    assert code == 0, run.stderr[-2000:]
    assert (document["env_steps"], document["error"]) == (ROWS * 10, None)
    assert document["env_errors"] + document["transitions_rejected"] > 1
    assert document["eval_episodes"] > 0
    assert document["eval_episodes_lost"] > 0
    assert errors_of(run, "sampler-0")
    assert any("environment" in event and "its episode is lost" in event for event in run.events())


@pytest.mark.slow
def test_the_first_bad_transition_ends_the_run_where_it_shall(tmp_path):
    task = ("--env", "spreeze/Fault-v0", "--import", "fault_envs", "--set", "sampling.nan_policy=fail")
    faults = {"p_nan": 0.05, "workers": "sampler-0,sampler-1"}
    _, code, document = train(tmp_path, *task, "--env-steps", str(ROWS * 50), tiny=SMALL, faults=faults)
    assert code == 1
    assert "returned an invalid transition" in document["error"]


def test_ctrl_c_leaves_whole_intervals_and_waiting_processes_use_no_core(tmp_path):
    slow_task = (*SYNTHETIC, "--env-arg", "mean_s=0.5", "--inference-workers", "1")
    with Run(tmp_path, *slow_task, tiny=SMALL) as run:
        run.wait_for(lambda: run.numbers().get("env_steps", 0) > 0, what="env steps")
        watched = {name: child for name, child in run.children().items()
                   if name.startswith(("sampler", "inference"))}  # fmt: skip
        assert sorted(watched) == ["inference-0", "sampler-0", "sampler-1"]
        start_s, before = time.monotonic(), {name: sum(child.cpu_times()[:2]) for name, child in watched.items()}
        steps = run.numbers()["env_steps"]
        run.wait_for(lambda: run.numbers()["env_steps"] >= steps + 8, what="eight more env steps, a second and more")
        for name, child in watched.items():
            cores = (sum(child.cpu_times()[:2]) - before[name]) / (time.monotonic() - start_s)
            assert cores < 0.3, f"{name} spins"
        code, document = run.stop()
        assert code == 0
        assert document["env_steps"] % ROWS == 0
        assert document["stopped_by"] == "interrupt (Ctrl-C)"


@pytest.mark.slow
def test_the_baseline_gives_the_same_bits_in_one_process_and_in_several(tmp_path):
    serial = ("--mode", "serial", "--inference-workers", "1")
    several, document = played(tmp_path, "several", *serial, "--synchrony", "step", intervals=5)
    assert document["updates"] == 5 * 4, "no interval is behind"
    assert document["policy_lag_mean"] in (0.0, None)
    alone, _ = played(tmp_path, "alone", *serial, "--samplers", "1", "--envs-per-sampler", "4", intervals=5)
    assert fingerprints(alone) == fingerprints(several)
    _, code, document = train(tmp_path, "--resume", "alone", "--env-steps", str(ROWS * 6), tiny=())
    assert (code, document["env_steps"]) == (0, ROWS * 6)


SPEC = EnvSpec(env_id="Any-v0", import_module=None, obs_dim=3, action=Box((-1.0,), (1.0,)),
               max_episode_steps=50, reward_threshold=None)  # fmt: skip


@pytest.mark.parametrize(("values", "inference_workers", "words"), [
    ({}, 3, "rollout.inference_workers = 3: more than the 2 samplers"),
    ({"learner": {"device": "cpu+cpu"}}, 1, "ppo trains one network on one device"),
    ({"learner": {"overlap": True}}, 1, "ppo trains one network on one device"),
    ({"learner": {"precision": "bfloat16"}}, 1, "learner.precision = bfloat16: mode hts learns in float32"),
])  # fmt: skip
def test_sizes_that_do_not_go_together_are_refused_with_the_reason(values, inference_workers, words):
    settings = resolve([Layer("user", {"run": {"mode": "hts", "algo": "ppo"}} | values)])
    with pytest.raises(ConfigError, match=words):
        RunPlan(settings=settings, spec=SPEC, samplers=2, inference_workers=inference_workers, free_core=False)


def test_a_refusal_leaves_nothing_behind(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, *SMALL, *SYNTHETIC, "--inference-workers", "3")
    assert "more than the 2 samplers" in document["error"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_resume_with_another_seed_is_refused(tmp_path):
    played(tmp_path, "run", intervals=2)
    _, code, document = train(tmp_path, "--resume", "run", "--seed", "2", tiny=())
    assert code == 2
    assert "run.seed = 2 cannot change on resume: the run has" in document["error"]
    _, code, document = train(tmp_path, "--resume", "run", "--env-steps", str(ROWS * 3), tiny=())
    assert (code, document["env_steps"]) == (0, ROWS * 3), "a refusal leaves the settings as they were"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hts", "serial"])
def test_a_resume_may_have_fewer_environments_and_shorter_rollouts(tmp_path, mode):
    played(tmp_path, "run", "--mode", mode, "--samplers", "1", "--envs-per-sampler", "4", intervals=2)
    steps, told = 2 * ROWS, []
    for args in (("--envs-per-sampler", "2"), (), ("--sync-interval", "8")):
        steps += 2 * ROWS
        run, code, document = train(tmp_path, "--resume", "run", *args, "--env-steps", str(steps), tiny=())
        assert (code, document["env_steps"]) == (0, steps)
        told.append(sum("all begin new episodes" in text for text in run.events()))
    assert told == [1, 1, 2], "the second resume had the sizes of the first"
