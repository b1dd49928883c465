"""The search: what a trial is worth, which are ended early, what the journal keeps; runs are formulas here."""

import contextlib
import importlib.util
import json
import math
from types import SimpleNamespace

import pytest

from spreeze.cli import sweep, sweep_runs, sweep_search
from spreeze.cli.sweep_search import Axis, SettingSearch, late_return, return_front, returns_by_part
from spreeze.config.layers import Layer, parse_assignment, resolve
from spreeze.config.schema import StopConfig
from spreeze.metrics.store import EvaluationRow
from spreeze.runtime.interrupts import Interrupts

pytestmark = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is not installed")
CONFIG = resolve([Layer("x", {"run": {"algo": "sac"}, "stop": {"updates": 100}})]).config
AXES = (Axis("sac.actor_lr", 1e-5, 1e-1), Axis("sac.critics", choices=("twin", "quantile")))
GONE = {"pid": 2**22 + 1, "boot_id": "another", "start_ticks": 1}


def _evaluation(updates, value, t=0.0, episodes=10):
    return EvaluationRow(t, 10 * updates, updates, 1, updates, episodes, value, 0.0, 200.0)


def _curve(setting):
    """Returns that rise to 0 for an actor_lr of 0.01 with twin critics, lower ones for all others."""
    lr, critics = (text.partition("=")[2] for text in setting.split())
    best = -10.0 * abs(math.log10(float(lr)) + 2.0) - 5.0 * (critics != "twin")
    return [_evaluation(5 * part, best - (10 - part / 2), t=part / 2) for part in range(1, 21)]


class Runs:
    """Stands for the processes: a run has one more evaluation each time that it is looked at."""

    def __init__(self, tmp_path, monkeypatch):
        self.begun, self.seen, self.stopped = [], {}, []
        self.sweep = sweep_runs.Sweep("s", None, None, 1, [], {"trials": 12, "arguments": [], "set": [], "seeds": [1]})
        self.folder, self.last = tmp_path, 0.0
        monkeypatch.setattr(sweep_search, "POLL_S", 0.0)
        monkeypatch.setattr(sweep_search, "_LOOK_S", 0.0)
        monkeypatch.setattr(sweep_search, "start", self._start)
        monkeypatch.setattr(sweep_search, "note_end", self._note_end)
        monkeypatch.setattr(sweep_search, "end", lambda children, at_once: None)
        monkeypatch.setattr(sweep_search, "send_request", lambda path, name: self.stopped.append(path.name))
        monkeypatch.setattr(sweep_search, "MetricsReader", self._reader)
        monkeypatch.setattr(
            sweep_search.comparison, "read_curve", lambda path: SimpleNamespace(evaluations=self.curves[path.name])
        )
        monkeypatch.setattr(SettingSearch, "_write_profile", lambda self, run, value, trials: self._runs_dir / "s.toml")
        self.curves = {}

    def _start(self, run, cores, runs_dir):
        run.state = "running"
        self.begun.append(run)
        self.curves[run.name], self.seen[run.name] = _curve(run.setting), 0
        (runs_dir / run.name / "control").mkdir(parents=True)
        return sweep_runs.RunProcess(run, SimpleNamespace(poll=lambda: self._ended(run.name)), None)

    def _ended(self, name):
        return 0 if self.seen[name] >= 20 or name in self.stopped else None

    def _reader(self, path):
        name = path.parent.name
        self.seen[name] += 1
        return SimpleNamespace(evaluations=lambda: self.curves[name][: self.seen[name]])

    def _note_end(self, child, runs_dir, tell):
        child.run.state = "interrupted" if child.run.name in self.stopped else "finished"

    def search(self, trials=12, side_by_side=1):
        self.sweep.search["trials"] = trials
        found = SettingSearch(self.sweep, self.folder, AXES, [], CONFIG, lambda text: None)
        with Interrupts() as interrupts:
            found.carry_out([[0]] * side_by_side, interrupts)
        return found


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return Runs(tmp_path, monkeypatch)


def test_a_part_is_worth_the_mean_over_the_fifth_before_it_where_that_was_evaluated_often_enough():
    stop = StopConfig(updates=100)
    evaluations = [
        _evaluation(updates, value)
        for updates, value in ((12, -8.0), (14, -4.0), (16, -3.0), (25, 0.0), (35, -1.0), (41, 2.0))
    ]
    assert returns_by_part(evaluations, stop) == [None, -5.0, -3.75, None]
    assert late_return(evaluations, stop) == pytest.approx(1.0 / 3.0)
    assert late_return(evaluations, StopConfig(updates=1000, env_steps=410)) == 0.5, "by what ends it first"
    assert returns_by_part([], stop) == []


def test_a_run_that_learned_late_is_not_judged_by_its_first_policies():
    times_and_returns = (5.66, 0.09), (7.82, 10.24), (9.53, 6.97), (12.01, 11.99), (15.12, 22.14), (17.0, 21.0)
    evaluations = [_evaluation(38 * n, value, t) for n, (t, value) in enumerate(times_and_returns)]
    assert returns_by_part(evaluations, StopConfig(seconds=30.0)) == [None] * 5
    evaluations.append(_evaluation(300, 20.0, 18.5))
    assert returns_by_part(evaluations, StopConfig(seconds=30.0))[5] == pytest.approx((11.99 + 22.14 + 21.0) / 3.0)
    untrained = [_evaluation(0, 0.0, t) for t in (1.0, 2.0, 3.0, 4.0, 5.0, 6.5)]
    assert returns_by_part(untrained, StopConfig(seconds=30.0)) == []


def test_the_present_settings_are_the_first_trial_and_others_come_nearer_to_the_best(runs):
    result = runs.search().result()
    assert runs.begun[0].setting == "sac.actor_lr=0.001 sac.critics=twin"
    assert sweep_search._result_text(result, []).endswith("best settings: --profile " + result["profile"])
    assert result["trials"] + result["pruned"] == 12
    assert result["best"]["return"] > -10.75, "the first trial's value"
    written = json.loads((runs.folder / "s.sweep.json").read_text())
    assert [run["stem"] for run in written["runs"]] == [f"s-t{number}-s1" for number in range(1, 13)]
    assert len(written["finished"]) == result["trials"]


def test_present_settings_that_no_trial_beats_are_no_find(runs):
    result = runs.search(trials=1).result()
    assert result["improved"] is False
    text = sweep_search._result_text(result, [])
    assert "no trial was better than the present settings" in text
    assert "best settings" not in text


def test_a_profile_says_which_values_the_search_found_and_which_it_kept(tmp_path, monkeypatch):
    def checked(arguments, probes):
        user = [parse_assignment(word) for word in arguments if "=" in word]
        profile = Layer("profile walker", {"run": {"algo": "sac"}, "sac": {"actor_lr": 3e-4}})
        return resolve([profile, *(Layer("user", values) for values in user)]), []

    monkeypatch.setattr(sweep_search, "checked_settings", checked)
    plan = {"trials": 1, "arguments": [], "set": [], "seeds": [1]}
    found = SettingSearch(
        sweep_runs.Sweep("s", None, None, 1, [], plan), tmp_path, AXES, ["sac.tau=0.01"], CONFIG, lambda text: None
    )
    words = ["sac.tau=0.01", "sac.actor_lr=0.0003", "sac.critics=quantile"]
    text = found._write_profile(sweep_runs.SweepRun("", 1, words, "s-t1-s1"), 1.0, 1).read_text()
    assert "actor_lr = 0.0003  # [1]; profile walker, kept by search s\n" in text
    assert 'critics = "quantile"  # [1]; search s\n' in text
    assert "tau = 0.01  # [1]; user\n" in text


def test_importance_is_told_from_ten_complete_trials_on(runs, monkeypatch):
    monkeypatch.setattr(sweep_search, "_WARMUP_TRIALS", 99)  # none is pruned
    few = runs.search(trials=9).result()
    assert few["importance"] is None
    assert "importance: cannot be told before 10 complete trials" in sweep_search._result_text(few, [])
    assert set(runs.search(trials=10).result()["importance"]) == {"sac.actor_lr", "sac.critics"}


def test_a_run_below_the_median_is_stopped_and_says_why(runs):
    result = runs.search().result()
    assert result["pruned"] == len(runs.stopped) > 0
    ended = next(run for run in runs.sweep.runs if run.state == "pruned")
    assert ended.name in runs.stopped
    assert runs.seen[ended.name] < 21
    assert "below the median" in ended.error
    about = json.loads((runs.folder / ended.name / "about.json").read_text())
    assert about["tags"] == ["pruned"]
    assert about["note"] == f"pruned: {ended.error}"


def test_trials_side_by_side_are_no_more_than_were_asked_for(runs):
    runs.search(3, side_by_side=2)
    assert len(runs.begun) == 3


def test_a_search_goes_on_where_its_journal_ends(runs):
    runs.search(trials=5)
    assert len(runs.begun) == 5
    runs.search(trials=7)
    assert len(runs.begun) == 7
    assert len({run.name for run in runs.begun}) == 7


def test_a_trial_of_a_killed_process_is_done_again_and_one_of_a_living_one_counts(runs):
    found = runs.search(trials=1)
    living, killed = found._study.ask(), found._study.ask()
    living.set_user_attr("process", sweep_search.process_identity(1))
    killed.set_user_attr("process", GONE)
    wanted = [axis.ask(killed) for axis in AXES]
    runs.search(trials=3)
    assert len(runs.begun) == 2, "the living one is the third"
    assert runs.begun[1].setting == " ".join(wanted)


def test_settings_that_never_work_end_the_search(runs, monkeypatch):
    def fail(child, runs_dir, tell):
        child.run.state, child.run.error = "failed", "exit code 1: no such thing"

    monkeypatch.setattr(sweep_search, "note_end", fail)
    found = runs.search()
    assert len(runs.begun) == 3
    assert found.result()["best"] is None
    assert found.last_error == "exit code 1: no such thing"


def test_a_trial_of_two_seeds_is_worth_their_mean(runs):
    runs.sweep.search["seeds"] = [1, 2]
    found = runs.search(trials=1)
    assert [run.seed for run in runs.begun] == [1, 2]
    assert found._study.best_value == pytest.approx(-10.0 - 0.75)


def test_the_front_holds_what_no_run_had_reached_earlier(tmp_path, monkeypatch):
    curves = {
        "a": [_evaluation(t, value, float(t)) for t, value in enumerate([1, 1, 1, 1, 1, 1], 1)],
        "b": [_evaluation(t, value, t + 0.5) for t, value in enumerate([0, 0, 0, 0, 0, 10], 1)],
    }
    monkeypatch.setattr(
        sweep_search, "MetricsReader", lambda path: SimpleNamespace(evaluations=lambda: curves[path.parent.name])
    )
    front = return_front([sweep_runs.SweepRun("", 1, [], name) for name in curves], tmp_path)
    assert [(point.seconds, point.return_mean, point.run) for point in front] == [(5.0, 1.0, "a"), (6.5, 2.0, "b")]


def test_help_says_how_many_seeds_a_search_has_and_that_trials_are_a_total(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "default: 3, or with --search 1" in text
    assert "in total, those before a --resume too" in text


@pytest.mark.parametrize(("flags", "words"), [
    (["--trials", "0", "--search", "--seconds", "1"], "at least 1"), (["--trials", "3", "--seconds", "1"], "--search"),
    (["--search", "--auto", "--seconds", "1"], "--auto"), (["--search"], "no stop condition"),
    (["--search", "--seconds", "1", "--set", "sac.gamma=0.9:2"], "within 0 to 1"),
])  # fmt: skip
def test_what_makes_no_search_is_refused_in_one_line(tmp_path, capsys, flags, words):
    asked = ["--env", "Pendulum-v1", "--algo", "sac", "--runs-dir", str(tmp_path / "runs"), *flags]
    with contextlib.suppress(SystemExit):
        assert sweep.main(asked) == 2
    assert words in capsys.readouterr().err
