"""--json: one document on standard output with everything that was promised, also when the answer is no."""

import errno
import json
import math
import os

import pytest
from harness import PENDULUM, TINY, Run, refused, run_command, train

from spreeze.__main__ import COMMANDS, main
from spreeze.cli.arguments import guarded
from spreeze.errors import ConfigError, ResourceError, WorkerError
from spreeze.machine.output import emit

PROMISED = (
    "run_dir", "env", "algo", "mode", "seed", "device", "samplers", "envs_per_sampler", "batch_size",
    "learner_threads", "wall_s", "env_steps", "updates", "env_steps_per_s", "updates_per_s", "update_frames_per_s",
    "samples_per_insert", "policy_lag_mean", "episodes", "eval_return_mean", "eval_return_best", "target_return",
    "eval_episodes", "eval_episodes_cut", "eval_episodes_lost", "env_errors", "transitions_rejected",
    "time_to_target_s", "time_to_target_held_s", "eval_return_final", "eval_return_final_evaluations",
    "eval_return_worst_of_20", "restarts", "stopped_by", "parameters_sha256", "versions", "machine",
)  # fmt: skip


def test_a_finished_run_answers_with_one_complete_document(tmp_path):
    with Run(tmp_path, *PENDULUM, "--target-return", "1000") as run:
        run.until_rates()
        run.wait_for(
            lambda: run.numbers().get("policy_lag", 0.0) > 0.0 and "eval_return" in run.numbers(),
            what="a lag and a return",
        )
        code, document = run.stop()
    assert code == 0
    assert json.loads(run.stdout) == document, "nothing but the document is on standard output"
    assert [key for key in PROMISED if key not in document] == []
    assert json.loads((run.path / "summary.json").read_text()) == document
    assert document["stopped_by"] == "interrupt (Ctrl-C)"
    assert (document["target_return"], document["time_to_target_s"]) == (1000.0, None)
    assert (document["env"], document["algo"], document["seed"]) == ("Pendulum-v1", "sac", 1)
    for name in ("wall_s", "env_steps", "updates", "env_steps_per_s", "updates_per_s", "policy_lag_mean"):
        assert document[name] > 0, name
    assert document["update_frames_per_s"] == pytest.approx(document["batch_size"] * document["updates_per_s"])
    assert document["rates_warmup_s"] is not None
    for name in ("env_steps", "updates"):
        assert document[f"{name}_per_s"] * document["rates_measured_s"] <= document[name], "rates fit the totals"
    assert -2000 < document["eval_return_mean"] < 0
    assert document["eval_return_best"] >= document["eval_return_mean"]
    assert document["versions"]["torch"]
    assert len(document["parameters_sha256"]) == 64


@pytest.mark.parametrize("args", [["--env", "Pendulm-v1"], [*PENDULUM, "--set", "sac.gamma=2"]], ids=["env", "set"])
def test_a_refusal_of_the_command_is_one_document_one_line_and_code_2(tmp_path, args):
    run, code, document = train(tmp_path, *args)
    assert code == 2, run.stderr
    assert list(document) == ["error", "kind"]
    assert "Traceback" not in run.stderr
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [run.stderr.splitlines()[-1]] == [f"error: {document['error']}"]
    assert not run.path.exists(), "nothing was started, nothing is left"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--env", "Pendulm-v1"], "did you mean 'Pendulum-v1'"),
        (["--env", "CartPole-v1", "--algo", "td3"], "CartPole-v1 has 2 discrete actions; dqn and sac fit"),
        ([*PENDULUM, "--algo", "dqn"], "Pendulum-v1 has one continuous action; sac, crossq, td3 and ddpg fit"),
        ([*PENDULUM, "--algo", "ppoo"], "did you mean 'ppo'"),
        ([*PENDULUM, "--set", "sac.gama=1"], "user: unknown setting 'sac.gama'; did you mean 'sac.gamma'"),
        ([*PENDULUM, "--set", "sac.gamma=2"], "user: sac.gamma = 2.0: must be 0 to 1"),
        ([*PENDULUM, "--batch-size", "4096", "--replay-capacity", "100"], "learner.batch_size = 4096 is larger than"),
        ([*PENDULUM, "--samples-per-insert", "9:8"], "would deadlock"),
        ([*PENDULUM, "--name", "../x"], "name '../x'"),
        ([*PENDULUM, "--profile", "nope"], "no profile 'nope'"),
        ([*PENDULUM, "--replay-capacity", "9000000000"], "available"),
        ([*PENDULUM, "--set", "learner.device=cuda:77"], "cuda:77"),
        ([*PENDULUM, "--set", "sac.gamma"], "expected section.field=value"),
        (["--resume", "nothing"], "no run 'nothing'"),
        (["--env", "Pendulum-v1", "--import", "no_such_module"], "no_such_module"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_a_refusal_says_why(tmp_path, capsys, args, words):
    document, told = refused(capsys, tmp_path, *TINY, *args)
    assert words in document["error"]
    assert told.count("error: ") == 1
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "runs").exists(), "nothing was started, nothing is left"


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--batch-size", "many"],
        ["runs", "leave-free", "latest", "much"],
        *([command, "--nonsense"] for command in COMMANDS if command != "play"),
    ],
    ids=" ".join,
)
def test_arguments_that_cannot_be_read_are_refused_in_the_same_way(capsys, argv):
    with pytest.raises(SystemExit) as ended:
        main([argv[0], "--json", *argv[1:]])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert list(json.loads(told.out)) == ["error", "kind"]
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1
    assert f"(see python -m spreeze {argv[0]}" in told.err


def test_errors_on_purpose_become_a_line_and_a_code(capsys):
    def fail(error):
        raise error

    for error, code in ((ConfigError("a\nb"), 2), (WorkerError("dead"), 1)):
        assert guarded(lambda error=error: fail(error), as_json=True) == code
        captured = capsys.readouterr()
        text = " ".join(str(error).split())
        assert captured.err == f"error: {text}\n"
        assert json.loads(captured.out) == {"error": text, "kind": type(error).__name__}
    assert guarded(lambda: fail(KeyboardInterrupt()), as_json=True) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted", "kind": "KeyboardInterrupt"}


def test_a_full_or_forbidden_disk_is_one_line_and_another_error_of_the_system_is_not_hidden(capsys):
    def fail(number):
        raise OSError(number, os.strerror(number), "there/file")

    assert guarded(lambda: fail(errno.ENOSPC)) == ResourceError.exit_code
    assert capsys.readouterr().err.startswith(
        "error: [Errno 28] No space left on device: 'there/file'; free some disk space"
    )
    assert guarded(lambda: fail(errno.EACCES)) == ResourceError.exit_code
    assert "Permission denied: 'there/file'; choose another path" in capsys.readouterr().err
    with pytest.raises(OSError, match="Bad file"):
        guarded(lambda: fail(errno.EBADF))


def test_an_error_that_nobody_foresaw_is_not_hidden():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded(fail)


def test_numbers_that_json_does_not_know_become_null(capsys):
    emit({"a": math.nan, "b": [math.inf, (1.5, -math.inf)], "c": {"d": math.nan, 1: 2}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, [1.5, None]], "c": {"d": None, "1": 2}}


def test_an_unknown_verb_names_the_known(tmp_path):
    done = run_command("trian")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no command 'trian'; did you mean 'train'?")
    assert done.stderr.count("\n") == 1


def test_two_runs_at_once_do_not_meet(tmp_path):
    with Run(tmp_path, *PENDULUM, "--updates", "60", name="a") as first, \
         Run(tmp_path, *PENDULUM, "--updates", "60", name="b") as second:  # fmt: skip
        for run in (first, second):
            code, document = run.end()
            assert (code, document["updates"], document["restarts"]) == (0, 60, 0)
