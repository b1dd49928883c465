"""The choice of an algorithm on a task without a profile: when it is made, and who wins."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from rollouts import FRAMES

from spreeze.cli import algorithm_choice
from spreeze.cli.algorithm_choice import (
    AlgorithmChoice,
    ComparedAlgorithm,
    candidates_for,
    continued,
    latest_level,
    rounds_of,
    too_slow,
)
from spreeze.cli.arguments import build_parser, user_values
from spreeze.cli.planning import layers_of
from spreeze.cli.sweep_runs import checked_settings
from spreeze.config.layers import resolve
from spreeze.envs.probe import Probe
from spreeze.errors import RunError
from spreeze.machine.hardware import read_machine
from spreeze.metrics import tuning_record
from spreeze.metrics.return_curve import Level
from spreeze.metrics.store import EvaluationRow
from spreeze.types import Box, Choices, EnvSpec


def spec_of(**actions):
    return EnvSpec(env_id="Task-v0", import_module=None, obs_dim=3, max_episode_steps=None, reward_threshold=None,
                   **actions)  # fmt: skip


BOX, CHOICES = spec_of(action=Box((-1.0,), (1.0,))), spec_of(action=Choices((3,), (0,)))
SEVERAL = spec_of(action=Choices((3, 2), (0, 0)))


def command(*words):
    args = build_parser().parse_args(["--auto", "--env", "Task-v0", *words])
    return args, resolve(layers_of(args, None, read_machine())[0])


@pytest.mark.parametrize(("spec", "words", "names"), [
    (BOX, (), ["sac", "crossq", "ppo"]),
    (CHOICES, (), ["dqn", "ppo"]),
    (CHOICES, ("--seconds", "600"), ["dqn", "ppo"]),
    (SEVERAL, (), []),
    (BOX, ("--algo", "sac"), []),
    (BOX, ("--mode", "spreeze"), []),
    (BOX, ("--seconds", "60"), []),
    (BOX, ("--updates", "1000"), []),
    (BOX, ("--no-evaluator",), []),
    (BOX, ("--set", "tuning.algorithm_share=0"), []),
])  # fmt: skip
def test_algorithms_are_compared_where_none_is_named_and_there_is_time(spec, words, names):
    assert candidates_for(*command(*words), spec) == names


def test_a_task_with_a_profile_keeps_its_algorithm():
    assert candidates_for(*command("--env", "Pendulum-v1"), BOX) == []
    assert candidates_for(*command("--env", "Pendulum-v1", "--profile", "none"), BOX) == ["sac", "crossq", "ppo"]


@pytest.mark.parametrize(("words", "candidates", "rounds"), [
    ((), 2, (60.0, 120.0)), ((), 3, (60.0,)), (("--seconds", "0"), 2, (60.0, 120.0, 240.0)),
    (("--seconds", "400"), 2, (40.0,)), (("--seconds", "400"), 3, (20.0,)), (("--seconds", "100"), 2, ()),
    (("--seconds", "300"), 3, ()), (("--seconds", "3600"), 2, (60.0, 120.0, 240.0)),
    (("--seconds", "3600"), 3, (60.0, 120.0)),
])  # fmt: skip
def test_all_but_the_best_may_take_a_tenth_of_the_run_at_most_five_minutes(words, candidates, rounds):
    assert rounds_of(command(*words)[1], candidates) == rounds


def test_an_environment_so_slow_that_a_round_would_show_nothing_is_not_compared():
    settings = command()[1]
    assert too_slow(settings, ["dqn", "ppo"], None, 2.0) is None
    assert too_slow(settings, ["dqn", "ppo"], 59_000.0, 2.0) is None
    assert too_slow(settings, ["dqn", "ppo"], 700_000.0, 17.0) is None, "16 samplers"
    assert too_slow(settings, ["dqn", "ppo"], 700_000.0, 2.0) == (
        "dqn, ppo are not compared: with 700 ms an env step, 60 s each would show nothing; dqn is the default, "
        "--algo NAME chooses another"
    )


class Runs:
    """Runs of candidates whose levels after each round are written down."""

    def __init__(self, monkeypatch, tmp_path, levels):
        self.levels, self.commands, self.said = levels, [], []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(AlgorithmChoice, "_run_training", self._run_training)
        monkeypatch.setattr(algorithm_choice, "read_curve", lambda run: SimpleNamespace(evaluations=[run, run]))
        monkeypatch.setattr(algorithm_choice, "latest_level", lambda rows: self._level)
        self.runs_dir, self.step_us = tmp_path / "runs", None

    def _run_training(self, arguments, algo, interrupts):
        self.commands.append((algo, list(arguments)))
        found = self.levels[algo].pop(0)
        if isinstance(found, str):
            return 1, found
        self._level = Level(*found, 0.0)
        (self.runs_dir / f"r-{algo}").mkdir(parents=True, exist_ok=True)
        return 0, ""

    def choice(self, *words, spec=BOX):
        args, settings = command("--runs-dir", str(self.runs_dir), "--name", "r", *words)
        typed = ["--auto", "--env", "Task-v0", "--json", *words]
        probe = Probe(spec=spec, step_us_median=self.step_us, step_cv=None, memory_bytes=0)
        return AlgorithmChoice(typed, args, settings, probe, read_machine(), self.said.append)


def test_one_that_is_clearly_worse_gets_no_further_round_and_the_winner_is_known_next_time(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, {"sac": [(10.0, 2.0)], "ppo": [(50.0, 3.0)]})
    assert runs.choice().known(["sac", "ppo"]) is None
    best = runs.choice().best(["sac", "ppo"], None)
    assert (best.algo, best.run.name, best.seconds) == ("ppo", "r-ppo", 60.0)
    assert [algo for algo, _ in runs.commands] == ["sac", "ppo"]
    assert runs.commands[0][1][-8:] == ["--algo", "sac", "--runs-dir", str(runs.runs_dir), "--name", "r-sac",
                                        "--seconds", "60"]  # fmt: skip
    assert "--json" not in runs.commands[0][1]
    assert [[word in words for word in ("--auto", "--save-replay")] for _, words in runs.commands] == [
        [False, True], [False, False]
    ], "the best one is tuned as it goes on, with its replay"  # fmt: skip
    record = json.loads((runs.runs_dir / "r-ppo" / "algorithms.json").read_text())
    assert [(one["algo"], one["return_mean"]) for one in record["candidates"]] == [("sac", 10.0), ("ppo", 50.0)]
    for algo in ("sac", "ppo"):
        (runs.runs_dir / f"r-{algo}" / "run.json").write_text(json.dumps({"algo": algo}))
    better = [tuning_record.better_run(runs.runs_dir / name) for name in ("r-sac", "r-ppo", "other")]
    assert better == ["r-ppo", None, None]
    assert runs.choice().known(["sac", "ppo"]) == "ppo"
    assert runs.choice("--fresh").known(["sac", "ppo"]) is None
    assert runs.choice().known(["sac"]) is None


def test_settings_that_a_comparison_gives_its_runs_come_from_it_alone(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, {"sac": [(10.0, 5.0), (40.0, 5.0)], "ppo": [(12.0, 5.0), (30.0, 5.0)]})
    words = ("--set", "stop.seconds=1800", "--set=run.name=x", "--set", "sac.tau=0.1", "--callback", "mine:Own")
    runs.choice(*words).best(["sac", "ppo"], None)
    first, later = runs.commands[0][1], runs.commands[2][1]
    assert not any("stop.seconds" in word or "run.name" in word for word in first)
    assert "sac.tau=0.1" in first
    assert later[:2] == ["--resume", str(runs.runs_dir.absolute() / "x-sac")]
    assert later[later.index("--callback") + 1] == "mine:Own"
    args, _ = command("--set", "stop.seconds=1800", "--name", "r")
    found = continued(args, ComparedAlgorithm("ppo", tmp_path), 130.0)
    assert (getattr(found, "--seconds"), found.set) == (1670.0, [])


def test_candidates_know_how_long_a_step_takes_without_measuring_it_again(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, {"sac": [(10.0, 2.0)], "ppo": [(50.0, 3.0)]})
    runs.step_us = 4_000.0
    runs.choice().best(["sac", "ppo"], None)
    assert all("tuning.step_us=4000" in words for _, words in runs.commands)


def test_a_comparison_in_which_nobody_was_evaluated_is_not_kept_for_the_next_start(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, {"sac": [(10.0, 2.0)] * 2, "ppo": [(50.0, 3.0)] * 2})
    monkeypatch.setattr(algorithm_choice, "read_curve", lambda run: SimpleNamespace(evaluations=[]))
    assert runs.choice().best(["sac", "ppo"], None).algo == "sac"
    assert (runs.runs_dir / "r-sac" / "algorithms.json").is_file()
    assert runs.choice().known(["sac", "ppo"]) is None


def test_replay_over_images_is_not_saved_for_the_next_round(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, {"dqn": [(9.0, 1.0)], "ppo": [(1.0, 1.0)]})
    frames = dataclasses.replace(CHOICES, frames=FRAMES)
    runs.choice(spec=frames).best(["dqn", "ppo"], None)
    assert "--save-replay" not in runs.commands[0][1]


def evaluation(t, mean, episodes=10):
    return EvaluationRow(t, 0, 0, 0, 0, episodes, mean, 6.0, 100.0)


def test_the_level_of_a_candidate_is_that_of_the_second_half_of_its_time():
    rows = [evaluation(10.0, -500.0), evaluation(25.0, -300.0), evaluation(30.0, -20.0), evaluation(50.0, -10.0)]
    assert latest_level(rows) == Level(pytest.approx(-110.0), pytest.approx(95.04, abs=0.01), 50.0)
    assert latest_level(rows[:1]) == Level(-500.0, 2.0, 10.0), "one evaluation has the error of its episodes"
    assert latest_level([evaluation(10.0, 1.0, episodes=1)]) is None


def test_near_candidates_go_on_in_turn_until_the_last_round_decides(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, {"sac": [(10.0, 5.0), (40.0, 5.0)], "ppo": [(12.0, 5.0), (30.0, 5.0)]})
    best = runs.choice().best(["sac", "ppo"], None)
    assert (best.algo, best.seconds, best.level.mean) == ("sac", 120.0, 40.0)
    assert [words[:2] for _, words in runs.commands[2:]] == [
        ["--resume", str(runs.runs_dir / "r-sac")], ["--resume", str(runs.runs_dir / "r-ppo")]
    ]  # fmt: skip


def test_one_that_fails_is_left_out_and_if_all_fail_their_errors_are_told(monkeypatch, tmp_path):
    runs = Runs(monkeypatch, tmp_path, {"sac": ["no memory"], "ppo": [(1.0, 1.0)]})
    assert runs.choice().best(["sac", "ppo"], None).algo == "ppo"
    runs.levels = {"sac": ["no memory"], "ppo": ["no module"]}
    with pytest.raises(RunError, match=r"sac failed \(no memory\); ppo failed \(no module\)"):
        runs.choice().best(["sac", "ppo"], None)


def test_the_winner_goes_on_with_the_time_that_is_left_and_with_its_own_settings(tmp_path):
    args, _ = command("--seconds", "600", "--profile", "none", "--name", "r", "--fresh")
    chosen = ComparedAlgorithm("ppo", tmp_path)
    found = continued(args, chosen, 130.0)
    assert (found.resume, found.profile, getattr(found, "--seconds")) == (str(tmp_path), None, 470.0)
    assert (getattr(found, "--name"), getattr(found, "--algo"), found.auto) == (None, None, True)
    assert found.fresh, "no candidate was tuned"
    assert "replay" not in user_values(found)
    assert user_values(continued(args, ComparedAlgorithm("sac", tmp_path), 0.0))["replay"] == {"save": False}
    (tmp_path / "tune.json").write_text("{}")
    tuned = continued(args, chosen, 0.0)
    assert (tuned.auto, tuned.fresh) == (False, False), "what it has is the tuner's choice"


def test_a_task_that_only_rollouts_fit_gets_their_algorithm_and_its_mode_without_a_word():
    arguments = ["--env", "tests/Choices-v0", "--import", "choices_env", "--updates", "1"]
    settings, _ = checked_settings(arguments, {})
    assert (settings.config.run.algo, settings.config.run.mode) == ("ppo", "hts")
