"""Environments that do not end, can be there once, are heavy or slow, or die without a word."""

import json
import os
import subprocess
import sys

import numpy as np
import odd_envs
import pytest
from harness import PATIENCE_S, REPO, SUPPORT, run_command, train_until
from linear_policy import SPEC, arrays, meta

from spreeze.cli.planning import allowed, untunable_env
from spreeze.config.layers import USER, Layer, resolve
from spreeze.envs.probe import Probe, probe_env
from spreeze.errors import ConfigError, EnvError, ResourceError, described, error_place
from spreeze.machine import logs
from spreeze.machine.logs import ending, last_words_of, oom_kills
from spreeze.machine.processes import OutOfTime, close_in_time, no_child_left, time_limit
from spreeze.runtime.assembly import Assembly
from spreeze.runtime.plan import RunPlan
from spreeze.transport.weights import WeightsStore

MODULE = "odd_envs"


def probed(name, *args, **more):
    return probe_env(f"{name}-v0", MODULE, steps=0, args=args, second=True, **more)


# --- what is said of an error ---


def raised(act):
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def _assert():
    odd_envs.Wordless().step(None)  # pytest gives words to an assert in a test


def _key():
    raise KeyError(0)


def _stop():
    next(iter([]))


def _value():
    raise ValueError


@pytest.mark.parametrize(
    ("act", "kind", "line"),
    [
        (_assert, "AssertionError (odd_envs.py:", ": assert action)"),
        (_key, "KeyError: 0 (test_odd_envs.py:", ": raise KeyError(0))"),
        (_stop, "StopIteration (test_odd_envs.py:", ": next(iter([])))"),
        (_value, "ValueError (test_odd_envs.py:", ": raise ValueError)"),
    ],
)
def test_an_error_without_words_is_told_with_its_place_and_its_line(act, kind, line):
    text = described(raised(act))
    assert text.startswith(kind)
    assert text.endswith(line)


def test_an_error_with_words_is_told_with_its_place_alone_and_one_of_a_library_with_the_caller_s():
    error = raised(lambda: json.loads("{"))
    assert described(error) == f"JSONDecodeError: {error} ({error_place(error)})"
    assert error_place(error).startswith("test_odd_envs.py:")


def test_an_error_that_cannot_say_what_it_is_is_told_all_the_same():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def act():
        raise Broken

    assert described(raised(act)).startswith("Broken: its message cannot be formatted: RuntimeError (test_odd_envs.py:")


def test_an_error_of_this_package_alone_has_no_place():
    error = raised(lambda: resolve([Layer(USER, {"sac": {"gamma": "x"}})]))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # what the test itself called
    assert error_place(error) is None


# --- the last words of a process ---


def test_of_a_stack_the_line_of_the_environment_stays_after_what_it_said(tmp_path):
    stack = ("Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n"
             f'  File "{tmp_path}/other.py", line 3 in wait\n\nCurrent thread 0x02 (most recent call first):\n'
             f'  File "{REPO}/spreeze/envs/make.py", line 9 in make_env\n'
             f'  File "{SUPPORT}/odd_envs.py", line 12 in __init__\n'
             '\nExtension modules: numpy.core (total: 1)\n')  # fmt: skip
    assert last_words_of(f"one\ntwo\nthree\n\nfour\x1b[31m\n{stack}") == "two | three | four [31m | at odd_envs.py:12"
    assert last_words_of("") == ""


def test_a_kill_by_the_kernel_for_want_of_memory_is_said_as_such(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("pgfault 3\noom_kill 7\n")
    assert oom_kills(tmp_path) == 7
    assert oom_kills(tmp_path / "nowhere") is None
    monkeypatch.setattr(logs, "oom_kills", lambda: 8)
    assert "out of memory" in ending(-9, 7)
    assert [ending(-9, 8), ending(-11, 7), ending(3, 7)] == ["signal SIGKILL", "signal SIGSEGV", "exit code 3"]


# --- probes ---


@pytest.mark.parametrize("name", ["Thread", "AtExit", "NeverClosed", "Helper"])
def test_what_an_environment_leaves_in_a_probe_holds_no_result_back(name):
    assert probed(name).spec.obs_dim == 2


def test_a_second_environment_is_tried_and_measured():
    found = probed("Heavy")
    assert found.alone is None
    assert found.memory_bytes > 80_000_000
    assert found.further_env_bytes > 70_000_000


@pytest.mark.parametrize("name", ["One", "OneAtReset"])
def test_an_environment_of_which_there_can_be_one_is_found_out_and_closed(name, tmp_path):
    found = probed(name, f"path='{tmp_path}/held'")
    assert "FileExistsError" in found.alone
    assert "odd_envs.py:" in found.alone
    assert not found.alone_in_process
    assert not (tmp_path / "held").exists(), "the next one can be made"
    assert untunable_env(found) is not None


def test_one_in_each_process_is_not_one_on_the_machine():
    found = probed("OneInAProcess")
    assert "the engine runs already" in found.alone
    assert found.alone_in_process
    assert untunable_env(found) is None


def test_a_second_one_that_takes_its_process_down_costs_no_result():
    found = probed("SecondKills")
    assert found.alone == "the process ended with exit code 4: engine: already initialized"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Aborts", "its process ended with signal SIGABRT before the first step: FATAL: no licence | at odd_envs.py:"),
        ("Exits", "its process ended with exit code 3 before the first step: engine: out of licences"),
        ("Wordless", "failed in the probe: AssertionError (odd_envs.py:"),
    ],
)
def test_an_environment_that_dies_is_told_with_its_last_words(name, words):
    with pytest.raises(EnvError) as caught:
        probed(name)
    assert words in str(caught.value)


def test_one_that_starts_too_slowly_is_told_with_its_place_and_the_setting_and_waited_for_aloud(monkeypatch):
    monkeypatch.setattr("spreeze.envs.probe._FIRST_NOTICE_S", 1.0)
    said = []
    with pytest.raises(EnvError) as caught:
        probed("Late", deadline_s=5.0, on_wait=said.append)
    assert "no environment step within 5 s; the probe was ended: at odd_envs.py:" in str(caught.value)
    assert "--start-deadline-s 10" in str(caught.value)
    assert said
    assert "waiting for Late-v0 to start: " in said[0]


# --- the end of a process ---


@pytest.mark.parametrize(
    "left",
    [
        "threading.Thread(target=odd_envs._for_ever).start()",
        "atexit.register(odd_envs._for_ever)",
        # A thread that dies at its start for want of memory.
        "_thread.start_new_thread = threading._start_new_thread = lambda *arguments: 1",
    ],
)
def test_a_process_leaves_with_its_code_and_its_output_whatever_is_left_in_it(left):
    names = "_thread, atexit, threading, odd_envs, spreeze.machine.processes as end"
    code = f"import {names}; {left}; print(1); end.exit_process(3)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{SUPPORT}"},
    )
    assert (done.returncode, done.stdout) == (3, "1\n")


def test_closing_is_given_up_in_time_and_what_else_is_to_close_is_not_forgotten(monkeypatch):
    monkeypatch.setattr("spreeze.machine.processes.CLOSING_S", 0.3)
    closed = []
    close_in_time(lambda: 1 / 0, lambda: closed.append(1), odd_envs.NeverClosed().close, lambda: closed.append(2))
    assert closed == [1]


def test_a_limit_of_time_tells_meanwhile_and_ends_what_catches_every_exception():
    told = []

    def stubborn():
        while True:
            try:
                odd_envs._for_ever()
            except Exception:
                told.append("caught")

    with pytest.raises(OutOfTime), time_limit(0.5, every_s=0.1, on_wait=told.append):
        stubborn()
    assert told
    assert "caught" not in told


def test_children_of_a_block_end_with_it():
    with no_child_left():
        child = subprocess.Popen(["sleep", "1000"])
    assert child.wait(PATIENCE_S) == -9


@pytest.mark.parametrize("name", ["Thread", "NeverClosed"])
def test_evaluate_ends_after_its_output(name, tmp_path):
    told = meta(1)
    told |= {"obs_dim": 2}
    told["env"] |= {
        "env_id": f"{name}-v0",
        "import_module": MODULE,
        "obs_dim": 2,
        "obs_shape": [2],
        "action": {"low": [-1.0], "high": [1.0], "shape": [1]},
        "max_episode_steps": 50,
    }
    store = WeightsStore(tmp_path / "weights")
    store.publish(arrays(np.array([[-2.0, -4.0]], np.float32)), told, 1, 1)
    (path,) = (tmp_path / "weights").glob("w-*.safetensors")
    done = run_command("evaluate", path, "--import", MODULE, "--episodes", "2")
    assert done.returncode == 0, done.stderr
    assert "2 episodes" in done.stdout


# --- plans ---


def probe_with(**more):
    return Probe(spec=SPEC, step_us_median=None, step_cv=None, **{"memory_bytes": 400_000_000, **more})


def limits(probe, samplers=2, free_gb=3.0, user=None, set_samplers=False):
    settings = resolve([Layer(USER, user or {})])
    return allowed(
        settings,
        probe,
        samplers,
        free_bytes=int(free_gb * 1e9),
        shared_bytes=100_000_000,
        samplers_are_set=set_samplers,
    )


def test_heavy_environments_are_as_many_as_there_is_memory_for_with_the_reason():
    found = limits(probe_with())
    assert (found.samplers, found.settings.config.sampling.envs_per_sampler, found.max_envs) == (2, 1, 1)
    assert found.reasons["sampling.envs_per_sampler"] == (
        "1: an environment takes 381.5 MiB of memory, 2.8 GiB are free"
    )
    assert found.settings.config.visualizer.enabled
    tight = limits(probe_with(), free_gb=2.0)
    assert (tight.samplers, tight.settings.config.visualizer.enabled) == (1, False)
    more = limits(probe_with(), free_gb=16.0)
    assert (more.samplers, more.max_envs, more.reasons) == (2, None, {})
    light = limits(probe_with(memory_bytes=1_000_000), free_gb=1.0)
    assert light.reasons == {}
    first = limits(probe_with(further_env_bytes=0), samplers=1)
    assert first.settings.config.sampling.envs_per_sampler == 8, "what the first takes alone is taken once a process"


def test_numbers_of_the_user_that_do_not_fit_are_refused_with_what_would():
    with pytest.raises(
        ResourceError,
        match=r"1 sampler with 8 each, one of the evaluator and the learner need 4\.\d "
        r"GiB, 2\.8 GiB are free; use --envs-per-sampler 3",
    ):
        limits(probe_with(), samplers=1, user={"sampling": {"envs_per_sampler": 8}})
    with pytest.raises(ResourceError, match="use fewer --samplers"):
        limits(probe_with(), samplers=8, set_samplers=True)
    with pytest.raises(ResourceError, match="close other programs"):
        limits(probe_with(memory_bytes=2_500_000_000))


def test_an_environment_that_can_be_there_once_has_one_sampler_which_evaluates():
    found = limits(probe_with(alone="port in use"), samplers=2)
    config = found.settings.config
    assert (found.samplers, found.single_env, config.sampling.envs_per_sampler, config.visualizer.enabled) == (
        1,
        True,
        1,
        False,
    )
    assert "port in use" in found.reasons["sampling.envs_per_sampler"]
    assert "by the sampler" in found.reasons["evaluation.enabled"]
    ppo = limits(probe_with(alone="port in use"), user={"run": {"algo": "ppo", "mode": "hts"}})
    assert (ppo.samplers, ppo.settings.config.rollout.envs_per_sampler) == (1, 1)
    each = limits(probe_with(alone="engine runs", alone_in_process=True), samplers=2)
    assert (each.samplers, each.single_env, each.max_envs, each.settings.config.sampling.envs_per_sampler) == (
        2,
        False,
        1,
        1,
    )
    serial = limits(
        probe_with(alone="engine runs", alone_in_process=True), samplers=1, user={"run": {"mode": "serial"}}
    )
    assert (serial.single_env, serial.settings.config.visualizer.enabled) == (True, False)


@pytest.mark.parametrize(
    ("user", "set_samplers", "words"),
    [
        ({"sampling": {"envs_per_sampler": 2}}, False, "use --envs-per-sampler 1"),
        ({}, True, "use --samplers 1"),
        ({"run": {"learners": 2}}, False, "run.learners = 2"),
    ],
)
def test_what_would_need_a_second_one_is_refused(user, set_samplers, words):
    with pytest.raises(ConfigError, match=words):
        limits(probe_with(alone="port in use"), user=user, set_samplers=set_samplers)


def test_an_environment_that_is_slow_to_start_is_made_few_times():
    found = limits(probe_with(start_s=15.0, memory_bytes=0))
    assert found.settings.config.sampling.envs_per_sampler == 2
    assert found.reasons["sampling.envs_per_sampler"] == "2: an environment takes 15 s to start"
    assert limits(probe_with(start_s=75.0, memory_bytes=0)).settings.config.sampling.envs_per_sampler == 1
    asked = limits(probe_with(start_s=75.0, memory_bytes=0), user={"sampling": {"envs_per_sampler": 4}})
    assert asked.settings.config.sampling.envs_per_sampler == 4
    assert "75 s to start" in untunable_env(probe_with(start_s=75.0))


def test_a_target_needs_evaluations():
    with pytest.raises(ConfigError, match=r"--no-evaluator\); remove one of them"):
        RunPlan(
            settings=resolve([Layer(USER, {"stop": {"target_return": 1.0}, "evaluation": {"enabled": False}})]),
            spec=SPEC,
            samplers=1,
            free_core=False,
        )


@pytest.mark.parametrize(
    ("single_env", "enabled", "observers", "in_turn"),
    [
        (False, True, {"evaluator", "visualizer"}, False),
        (False, False, {"visualizer"}, False),
        (True, True, {"visualizer"}, True),
        (True, False, {"visualizer"}, False),
    ],
)
def test_who_evaluates(tmp_path, single_env, enabled, observers, in_turn):
    settings = resolve([Layer(USER, {"evaluation": {"enabled": enabled}, "sampling": {"start_deadline_s": 300.0}})])
    plan = RunPlan(settings=settings, spec=SPEC, samplers=1, free_core=False, single_env=single_env, max_envs=1)
    with Assembly(plan, tmp_path, 0.0) as run:
        run.complete()
        assert set(run.specs) == observers
        assert {spec.start_deadline_s for spec in run.specs.values()} == {300.0}
        assert (run.turn_evaluation is not None) == in_turn


@pytest.mark.parametrize("mode", ["spreeze", "hts", pytest.param("impact", marks=pytest.mark.slow)])
def test_a_run_with_an_environment_that_can_be_there_once_is_evaluated_too(tmp_path, mode):
    args = [
        "--env",
        "OneAtReset-v0",
        "--import",
        MODULE,
        "--env-arg",
        f"path='{tmp_path}/held'",
        "--mode",
        mode,
        "--set",
        "evaluation.episodes=1",
        "--no-governor",
    ]
    if mode == "spreeze":
        args += ["--batch-size", "32", "--set", "replay.learning_starts=200", "--set", "sac.hidden_sizes=[8]"]

    def seen(run):
        return (run.path / "eval.csv").exists() and run.numbers().get("updates", 0) > 20

    run, code, document = train_until(tmp_path, seen, *args, tiny=())
    assert code == 0, run.stderr
    assert document["samplers"] == 1
    assert document["restarts"] == 0
    assert document["eval_return_mean"] is not None
    assert "in turn with sampling" in run.stderr
    assert not (tmp_path / "held").exists()
