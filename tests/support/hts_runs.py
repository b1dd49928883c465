"""Small runs of the HTS-RL mode with real processes, and their fingerprints."""

import functools
import os
import signal

import fingerprints as prints
import harness
from harness import FINGERPRINTED, PATIENCE_S

Run = functools.partial(harness.Run, program=FINGERPRINTED)
train = functools.partial(harness.train, program=FINGERPRINTED)
SMALL = (
    "--mode", "hts", "--algo", "ppo", "--envs-per-sampler", "2", "--sync-interval", "16", "--samplers", "2",
    "--set", "ppo.hidden_sizes=[8,8]", "--set", "ppo.epochs=2", "--set", "ppo.minibatch_size=32",
    "--set", "ppo.lr_schedule=constant",
    "--no-evaluator", "--no-visualizer",
)  # fmt: skip
SYNTHETIC = ("--env", "spreeze/Synthetic-v0", "--import", "spreeze.envs.small_tasks", "--env-arg", "episode_steps=25",
             "--env-arg", "p_terminated=0.02", "--env-arg", "obs_dim=3")  # fmt: skip
ROWS = 16 * 4
"""Env steps of one interval."""


def fingerprints(run):
    return prints.read(run.path / prints.FILE)


def kill_in_turn(run, names):
    """Kills workers one after the other, each once the run makes progress; another one takes its place."""
    for count, name in enumerate(names, 1):
        run.until_progress()
        victim = run.wait_for(lambda name=name: run.children().get(name), what=f"{name} to be there")
        os.kill(victim.pid, signal.SIGKILL)
        run.wait_for(lambda count=count: run.numbers().get("restarts", 0) >= count, what=f"another {name}")
    run.until_progress()


def played(tmp_path, name, *args, intervals=20, rows=ROWS, timeout_s=PATIENCE_S):
    """A run of so many intervals of ``rows`` env steps, its document checked."""
    steps = ("--env-steps", str(rows * intervals))
    run, code, document = train(tmp_path, *SYNTHETIC, *steps, *args, name=name, tiny=SMALL, timeout_s=timeout_s)
    assert code == 0, run.stderr[-3000:]
    assert document["env_steps"] == rows * intervals
    assert document["stopped_by"] == "env_steps"
    return run, document


def slow(schedule):
    """Arguments of the task that change when its steps are done, and nothing else."""
    laws = ((), ("law=exponential", "mean_s=0.002"), ("law=gamma", "mean_s=0.001", "cv=3"))
    return [part for text in laws[schedule] for part in ("--env-arg", text)]
