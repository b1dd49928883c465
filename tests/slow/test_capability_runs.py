"""Each capability through the life of a run: killed, resumed, evaluated, played, exported, on the page, in the report.

Three kinds of file are exported; each command checks its file beside our policy on 1,000 observations.
"""

import json
import os
import signal
from typing import NamedTuple

import numpy as np
import pytest
from harness import PATIENCE_S, Run, run_command, train

import spreeze

TASKS = "spreeze.envs.small_tasks"
WORKERS = ("--samplers", "1", "--envs-per-sampler", "2", "--no-visualizer", "--no-governor",
           "--set", "evaluation.episodes=2")  # fmt: skip
REPLAY = ("--batch-size", "16", "--replay-capacity", "4000", "--set", "replay.learning_starts=100")
ROLLOUTS = ("--sync-interval", "16")
MEMORY = ("recurrent_size=6", "sequence_length=8", "burn_in=3")


class Capability(NamedTuple):
    """One line of the README's tables of spaces and algorithms."""

    module: str | None
    env: str
    algo: str
    settings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("numpy", "onnx", "c")

    @property
    def imports(self):
        return () if self.module is None else ("--import", self.module)

    @property
    def words(self):
        own = (word for text in self.settings for word in ("--set", f"{self.algo}.{text}"))
        return (*self.imports, "--env", self.env, "--algo", self.algo, "--set", f"{self.algo}.hidden_sizes=[8]",
                *own, *WORKERS, *self.flags)  # fmt: skip


def goals(env, algo, her):
    return Capability("goal_tasks", env, algo, flags=("--env-arg", "bits=4", "--set", f"replay.her={her}", *REPLAY))


IMAGE = ("--set", "image.size=36", "--set", "image.stack=2")
RAINBOW = ("critics=categorical", "noisy=true", "dueling=true", "priority_exponent=0.6", "n_step=3")
CAPABILITIES = {
    "several choices, PPO": Capability("choices_env", "tests/Choices-v0", "ppo", flags=ROLLOUTS),
    "several choices, IMPALA": Capability("choices_env", "tests/Choices-v0", "impala", flags=ROLLOUTS),
    "nested actions with masks, A2C": Capability(
        "parts_env", "tests/Parts-v0", "a2c", flags=(*ROLLOUTS, "--env-arg", "masked=True")
    ),
    "choice beside numbers, SAC": Capability("parts_env", "tests/Hybrid-v0", "sac", flags=REPLAY),
    "image beside numbers, SAC": Capability(TASKS, "Docking-v0", "sac", ("cnn=impala_small",), (*IMAGE, *REPLAY)),
    "image beside numbers, PPO": Capability(TASKS, "Docking-v0", "ppo", ("cnn=impala_small",), (*IMAGE, *ROLLOUTS)),
    "image, TD3": Capability(TASKS, "PendulumImage-v0", "td3", ("cnn=impala_small",), (*IMAGE, *REPLAY)),
    "LSTM, PPO": Capability(TASKS, "CartPoleNoVel-v1", "ppo", ("recurrent=lstm", *MEMORY), ROLLOUTS),
    "GRU, IMPACT": Capability(TASKS, "TMaze-v0", "impact", ("recurrent=gru", *MEMORY), ROLLOUTS),
    "GRU from replay, DQN": Capability(TASKS, "CartPoleNoVel-v1", "dqn", ("recurrent=gru", *MEMORY), REPLAY),
    "LSTM from replay, SAC": Capability(TASKS, "PendulumNoVel-v1", "sac", ("recurrent=lstm", *MEMORY), REPLAY),
    "hindsight, DQN": goals("BitFlip-v0", "dqn", "future"),
    "Rainbow": Capability(None, "CartPole-v1", "dqn", RAINBOW, REPLAY),
    "quantile heads, DQN": Capability(None, "CartPole-v1", "dqn", ("critics=quantile",), REPLAY),
    "priorities, TD3": Capability(None, "Pendulum-v1", "td3", ("priority_exponent=0.6",), REPLAY),
}


def learned(name, folder):
    """The run of a capability whose sampler and learner were killed, and which was stopped and resumed."""
    case = CAPABILITIES[name]
    with Run(folder, *case.words, name="run", tiny=()) as run:
        run.until_updates(5)
        for count, victim in enumerate((next(who for who in run.children() if "sampler" in who), "learner"), 1):
            run.until_progress()
            os.kill(run.wait_for(lambda victim=victim: run.children().get(victim), what=victim).pid, signal.SIGKILL)
            run.wait_for(lambda count=count: run.numbers().get("restarts", 0) >= count, what=f"another {victim}")
        run.until_progress()
        code, first = run.stop()
    assert (code, first["error"]) == (0, None), run.stderr[-3000:]
    again, code, second = train(
        folder, "--resume", "run", *case.imports, "--updates", str(first["updates"] + 5), tiny=()
    )
    assert (code, second["error"]) == (0, None), again.stderr[-3000:]
    assert second["updates"] >= first["updates"] + 5
    assert second["env_steps"] >= first["env_steps"]
    return run.path


def shown_on_the_page(run, monkeypatch):
    """Opens the pages that show a run; none may raise."""
    from streamlit.testing.v1 import AppTest

    def script(name):
        from spreeze.dashboard import navigation

        navigation.sidebar()
        navigation.load(name)()

    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(run.parent))
    for name in ("live", "runs", "compare", "watch", "logs"):
        page = AppTest.from_function(script, kwargs={"name": name}, default_timeout=PATIENCE_S).run()
        assert not page.exception, (name, [one.value for one in page.exception])


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_is_killed_resumed_evaluated_played_exported_and_shown(name, tmp_path, monkeypatch):
    pytest.importorskip("streamlit")
    case, run = CAPABILITIES[name], learned(name, tmp_path)
    done = run_command("evaluate", run, *case.imports, "--episodes", 2, "--checkpoint", "latest", "--json")
    assert done.returncode == 0, done.stderr
    assert np.isfinite(json.loads(done.stdout)["return_mean"])
    clip = tmp_path / "clip.mp4"
    done = run_command("play", run, *case.imports, "--checkpoint", "latest", "--clip", clip)
    assert (done.returncode == 0 and clip.stat().st_size > 0) or "render" in done.stderr, done.stderr
    for kind in case.formats:
        out = tmp_path / f"policy.{kind}"
        done = run_command("export", run, "--format", kind, "--checkpoint", "latest", "--out", out)
        assert done.returncode == 0, (kind, done.stderr)
        assert "1,000 observations" in done.stdout, (kind, done.stdout)
    report = tmp_path / "report.html"
    done = run_command("report", run, "--out", report)
    assert done.returncode == 0, done.stderr
    assert case.env in report.read_text()
    shown_on_the_page(run, monkeypatch)
    spreeze.load_policy(str(run), "latest", import_module=case.module)
