"""Completion of command lines: what the last word may become, and a real shell that asks for it."""

import os
import shutil
import subprocess
import sys

import pytest
from command_parsers import parser_of
from harness import PATIENCE_S, REPO

from spreeze.cli import completion
from spreeze.cli.arguments import COMPLETION_VARIABLE, build_parser
from spreeze.cli.completion import candidates
from spreeze.cli.evaluate import main as evaluate_main
from spreeze.cli.runs import main as runs_main

TRAIN = build_parser()


@pytest.fixture
def runs(tmp_path):
    for name in ("walker-1", "walker-2", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "grid.sweep.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("words", "found"), [
    (["--target"], ["--target-return"]),
    (["--algo", "im"], ["impact", "impala"]),
    (["--env", "Pendulum-"], ["Pendulum-v1"]),
    (["CartPole-"], ["CartPole-v0", "CartPole-v1"]),
    (["--seed", "1", "--profile", "pend"], ["pendulum"]),
    (["--set", "sac.gam"], ["sac.gamma="]),
    (["--import", "my"], []),
])  # fmt: skip
def test_a_word_becomes_what_its_place_allows(words, found):
    assert candidates(TRAIN, words) == found


def test_runs_are_those_of_the_directory_that_the_line_names(runs):
    assert candidates(TRAIN, ["--runs-dir", str(runs), "--resume", "wal"])[:2] == ["walker-1", "walker-2"]
    assert candidates(TRAIN, ["--runs-dir", str(runs), "--resume", "gr"]) == ["grid"]
    assert candidates(parser_of(evaluate_main), ["--runs-dir", str(runs), "o"]) == ["other"]
    assert "walker2d" in candidates(parser_of(evaluate_main), ["walker2"])


def test_a_line_is_completed_and_not_obeyed(runs, monkeypatch, capsys):
    monkeypatch.setenv(COMPLETION_VARIABLE, "1")
    with pytest.raises(SystemExit):
        runs_main(["--runs-dir", str(runs), "stop", "walker-"])
    assert capsys.readouterr().out == "walker-1\nwalker-2\n"
    with pytest.raises(SystemExit):
        runs_main(["st"])
    assert capsys.readouterr().out == "stop\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_by_the_script(tmp_path, capsys):
    assert completion.main(["bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "spreeze").write_text(f'#!/bin/sh\nexec {sys.executable} -m spreeze "$@"\n')
    (tmp_path / "spreeze").chmod(0o755)
    asked = f""". {tmp_path}/script; compopt() {{ :; }}
        for line in "spreeze swe" "spreeze train --algo dd"; do
            COMP_WORDS=($line); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _spreeze; echo "${{COMPREPLY[@]}}"
        done"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        ["bash", "-c", asked], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    assert done.stdout.split() == ["sweep", "ddpg"], done.stderr
