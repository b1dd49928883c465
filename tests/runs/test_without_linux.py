"""Whole runs without Linux's own calls, as on macOS: what Spreeze does in their place (no Mac was at hand).

``tests/support/without_linux`` takes the calls away in every process of a run; what is seen here is seen from outside.
"""

import json
import os

import psutil
import pytest
from harness import PENDULUM, SUPPORT, TINY, Run, poll, run_command, train

from spreeze.machine import processes
from spreeze.workers.roles import role_of

MODES = {
    "serial": (TINY, "--mode", "serial", "--updates", "100"),
    "hts": (("--no-visualizer",), "--mode", "hts", "--algo", "ppo", "--samplers", "2", "--envs-per-sampler", "2",
            "--sync-interval", "16", "--set", "ppo.hidden_sizes=[8,8]", "--set", "evaluation.episodes=2",
            "--env-steps", "2000"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_linux(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SUPPORT / "without_linux"), os.environ["PYTHONPATH"])))
    monkeypatch.setattr(processes, "_marks_by_limit", lambda: False)


class RunWithoutNames(Run):
    """A run whose processes cannot take names: their variables tell who they are."""

    def children(self):
        super().children()  # which notes them
        found = {}
        for pid in self._seen:
            try:
                child = psutil.Process(pid)
                name = child.environ().get("SPREEZE_WORKER", "")
                if child.ppid() == self.process.pid and child.status() != psutil.STATUS_ZOMBIE and role_of(name):
                    found[name] = child
            except psutil.Error:
                continue
        return found

    def kill(self, name):
        """Kills a worker, and waits until another process has its place and the run goes on."""
        self.children()[name].kill()
        self.wait_for(lambda: any(f"{name} is back" in event for event in self.events()), what=f"the next {name}")
        self.until_progress()


def test_a_killed_sampler_is_replaced_and_a_killed_supervisor_leaves_nothing(tmp_path):
    with RunWithoutNames(tmp_path, *PENDULUM) as run:
        run.until_updates(20)
        assert not any(role_of(child.name()) for child in run.children().values()), "no process can take a name"
        run.kill("sampler-0")
        assert len(run.nonce_processes()) >= 2
        run.process.kill()
        poll(lambda: not run.nonce_processes(), what=lambda: f"the end of {run.nonce_processes()}")


@pytest.mark.parametrize("mode", ["serial", pytest.param("hts", marks=pytest.mark.slow)])
def test_a_run_ends_with_a_policy_and_an_evaluation(tmp_path, mode):
    tiny, *more = MODES[mode]
    run, code, document = train(tmp_path, *PENDULUM, *more, tiny=tiny)
    assert code == 0, run.stderr[-3000:]
    assert document["eval_return_best"] is not None
    assert not run.nonce_processes()


@pytest.mark.slow
def test_a_killed_learner_is_replaced_and_the_run_resumed_evaluated_and_exported(tmp_path):
    with RunWithoutNames(tmp_path, *PENDULUM) as run:
        run.until_updates(20)
        run.kill("learner")
        code, document = run.stop()
        assert code == 0, run.stderr[-3000:]
    resumed = train(tmp_path, "--resume", "run", "--updates", str(document["updates"] + 50))
    assert resumed[1] == 0, resumed[0].stderr[-3000:]
    evaluated = run_command("evaluate", run.path, "--episodes", "2", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    exported = run_command("export", run.path, "--format", "numpy", "--out", tmp_path / "policy.npz")
    assert exported.returncode == 0, exported.stderr


@pytest.mark.slow
def test_the_doctor_says_what_is_missing_and_lets_the_default_command_work():
    document = json.loads(run_command("doctor", "--json").stdout)
    assert document["ok"], document["checks"]
    (system,) = [check for check in document["checks"] if check["name"] == "system"]
    assert system["status"] == "warn"
    assert "never run on this system" in system["text"]


@pytest.mark.slow
def test_the_tuner_measures_updates_in_fresh_processes(tmp_path, monkeypatch):
    for name in ("TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    tuned = run_command("tune", *PENDULUM, "--set", "sac.hidden_sizes=[32,32]", "--samplers", "1", "--json")
    assert tuned.returncode == 0, tuned.stderr[-3000:]
    rates = json.loads(tuned.stdout)["update_rates"]
    assert rates
    assert not any(rate["failure"] for rate in rates), rates
