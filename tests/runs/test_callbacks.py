"""Callbacks of a user in real runs: what they hear, what they may do, and that none of their errors costs a run."""

import os
import subprocess
import sys

import pytest
from harness import PATIENCE_S, REPO, SUPPORT, TINY, Run

from spreeze.config.schema import CallbackConfig

CONTINUOUS = ("--env", "Walk-v0", "--import", "own_callbacks", *TINY)
CHOOSING = (
    *("--env", "Walk-v0", "--import", "own_callbacks", "--env-arg", "choices=2", "--no-visualizer", "--no-governor"),
)
WAYS = [
    (*CONTINUOUS, "--algo", "sac"),
    (*CONTINUOUS, "--algo", "sac", "--mode", "serial"),
    (*CHOOSING, "--algo", "ppo", "--samplers", "2"),
    (*CHOOSING, "--algo", "ppo", "--mode", "serial", "--set", "rollout.samplers=1"),
    (*CHOOSING, "--algo", "impala", "--samplers", "1"),
]


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def journal(run):
    return [line.split() for line in (run.path / "journal.txt").read_text().splitlines()]


@pytest.mark.parametrize("flags", [*WAYS[:3], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[3:])])
def test_a_callback_hears_of_all_that_happens_in_a_run(tmp_path, flags):
    with Run(tmp_path, *flags, tiny=()) as run:
        run.wait_for(
            lambda: (
                (run.path / "journal.txt").exists()
                and {"metrics", "evaluation", "checkpoint", "episode"} <= {words[0] for words in journal(run)}
            ),
            what="all hooks",
        )
        code, _ = run.stop()
    assert code == 0
    lines = journal(run)
    assert lines[0][:2] == ["start", "Walk-v0"]
    assert lines[-1][0] == "end"
    assert lines[-1][1] == "interrupt"
    assert ["evaluation", "10.0"] in [words[:2] for words in lines]
    episode = next(words for words in lines if words[0] == "episode")
    assert episode[:4] == ["episode", "10.0", "10", "None"]
    assert episode[4].startswith("sampler-")
    assert any("checkpoint written on request" in event for event in run.events())


@pytest.mark.parametrize(
    "flags", [WAYS[0], WAYS[2], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1::2])]
)
def test_a_curriculum_raises_an_argument_of_the_environment_as_the_return_grows(tmp_path, flags):
    with Run(tmp_path, *flags, "--callback", "own_callbacks:Curriculum(most=30)", tiny=()) as run:
        run.wait_for(lambda: run.numbers().get("episode_return", 0.0) > 29.0, what="episodes of 30 steps")
        assert run.numbers()["callback/length"] == 30.0
        run.wait_for(lambda: "eval_return" in run.numbers(), what="an evaluation")
        code, summary = run.stop()
    assert code == 0
    assert summary["eval_return_mean"] == 10.0  # by the run's own arguments
    assert summary["restarts"] == summary["env_errors"] == 0
    if flags is not WAYS[0]:
        return
    with Run(tmp_path, "--import", "own_callbacks", "--resume", "run", tiny=()) as again:
        told = "it had callbacks (--callback 'own_callbacks:Curriculum(most=30)')"
        again.wait_for(lambda: told in again.stderr, what="the word on callbacks")
        again.until_progress()
        assert 29.0 < again.numbers()["episode_return"] <= 30.0
        code, summary = again.stop()
        assert code == 0, (summary, again.stderr)


def test_what_callbacks_do_wrong_is_told_by_name_and_costs_the_run_nothing(tmp_path):
    flags = ("--callback", "own_callbacks:Wrong", "--callback", "nowhere:Gone", "--callback", "own_callbacks:Walk")
    with Run(tmp_path, *CONTINUOUS, *flags, tiny=()) as run:
        code, summary = run.end()
    assert (code, summary["stopped_by"], summary["restarts"]) == (0, "stop request", 0)
    told = "\n".join(run.events())
    for text in (
        "callback own_callbacks:Wrong: Wrong.on_training_start raised UsageError: sac.gamma cannot change while a run",
        "callback own_callbacks:Wrong: Wrong.on_metrics raised ZeroDivisionError: division by zero (own_callbacks.py:",
        "callback own_callbacks:Wrong: Wrong.on_evaluation stops the run",
        "callback nowhere:Gone is disabled; the run continues: ModuleNotFoundError",
        "callback own_callbacks:Walk is disabled; the run continues: ConfigError: own_callbacks has no class "
        "Walk that is",
    ):
        assert text in told


def test_a_callback_that_hangs_is_ended_after_its_deadline_and_named(tmp_path):
    flags = ("--callback", "own_callbacks:Hanging", "--set", "callback.deadline_s=0.5")
    with Run(tmp_path, *CONTINUOUS, *flags, tiny=()) as run:
        text = (
            "callback own_callbacks:Hanging is disabled; the run continues: no answer for 0.5 s to Hanging.on_metrics"
        )
        run.wait_for(lambda: any(text in event for event in run.events()), what="the end of the callback")
        run.until_progress()
        assert run.stop()[0] == 0
    assert CallbackConfig().deadline_s == 10.0


SCRIPT = """
import gymnasium
import spreeze
from own_callbacks import Walk
from spreeze import BaseCallback

class Own(BaseCallback):
    def __init__(self, name):
        self.name = name
    def on_training_start(self):
        self.logger.record(self.name, 3.5)
        self.stop()

for wrong in (Own("x"), 3, "nonsense", lambda: [Own("x")]):
    try:
        spreeze.train(Walk, callbacks=[wrong], quiet=True)
    except spreeze.errors.UsageError as error:
        print(error)
run = spreeze.train(Walk, callbacks=[lambda: Own(name="mine")], mode="serial", quiet=True)
print(run.metric("callback/mine").value[-1], run.summary["stopped_by"])
"""


def test_train_takes_callbacks_of_the_calling_script(tmp_path):
    lines = SCRIPT.strip().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("for"))
    guarded = [*lines[:start], "if __name__ == '__main__':", *(f"    {line}" for line in lines[start:])]
    (tmp_path / "walks.py").write_text("\n".join(guarded) + "\n")
    done = subprocess.run([sys.executable, "walks.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
                          timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": f"{REPO}:{SUPPORT}"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    instance, number, text, several, result = done.stdout.splitlines()
    assert "callbacks: an instance of Own cannot be sent to another process; give Own itself" in instance
    assert number == "callbacks: 3 is not a subclass of spreeze.BaseCallback"
    assert text == "--callback 'nonsense': expected MODULE:CLASS, such as my_callbacks:Curriculum"
    assert "<lambda>" in several
    assert several.endswith("is not a subclass of spreeze.BaseCallback")
    assert result == "3.5 stop request"
