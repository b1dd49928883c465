"""Numbers in an environment's ``info`` become metrics in every way of collecting, and are in summary and report."""

import json

import pytest
from harness import SUPPORT, TINY, Run, run_command

OWN = ("--env", "Talkative-v0", "--import", "info_env", "--no-visualizer", "--no-governor")
CHOICE = ("--env", "TalkativeChoice-v0", "--import", "info_env", "--no-visualizer", "--no-governor")
EXPECTED = {"info/reward/forward": 1.5, "info/reward/control": -0.5, "info/episode/l": 10.0, "info/episode/r": 10.0}

HEALTH = {"update_size", "eval_terminated"}
"""Numbers of every algorithm."""


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.mark.parametrize(("flags", "tiny"), [
    ((*OWN, "--algo", "sac"), TINY),
    ((*CHOICE, "--algo", "ppo", "--samplers", "2"), ()),
    *(pytest.param((*task, *more), (), marks=pytest.mark.slow) for task, *more in (
        (OWN, "--algo", "sac", "--mode", "serial", "--set", "sac.hidden_sizes=[2]"),
        (CHOICE, "--algo", "impala", "--samplers", "1"))),
])  # fmt: skip
def test_numbers_in_info_become_metrics_however_they_are_collected(tmp_path, flags, tiny):
    with Run(tmp_path, *flags, tiny=tiny) as run:
        run.wait_for(lambda: {*EXPECTED, *HEALTH, "success_rate", "eval_success_rate"} <= run.numbers().keys(),
                     what="the numbers")  # fmt: skip
        numbers = run.numbers()
        assert {name: numbers[name] for name in EXPECTED} == pytest.approx(EXPECTED)
        assert 0.3 < numbers["success_rate"] < 0.7
        assert 0.0 < numbers["update_size"] < 1.0
        code, summary = run.stop()
    assert code == 0
    assert summary["eval_success_rate"] in (0.0, 0.5, 1.0)
    (told,) = (event for event in run.events() if "supervisor: info:" in event)
    assert "'picture' (ndarray), 'mission' (str)" in told


def test_more_numbers_than_the_cap_are_told_once_and_drawn_in_the_report(tmp_path):
    with Run(tmp_path, *OWN, "--env-arg", "more=50") as run:
        run.wait_for(lambda: "success_rate" in run.numbers(), what="the success rate")
        run.wait_for(lambda: sum(name.startswith("info/") for name in run.numbers()) == 32, what="all up to the cap")
        run.stop()
    assert sum(name.startswith("info/") for name in run.numbers()) == 32
    assert sum("beyond the first 32 numbers" in event for event in run.events()) == 1
    assert run_command("report", run.path, "--out", tmp_path / "report.html").returncode == 0
    text = (tmp_path / "report.html").read_text()
    assert "reward/forward [value]" in text
    assert "Success rate [%]" in text
    document = json.loads(run_command("evaluate", run.path, "--import", "info_env", "--json", "--episodes", "4").stdout)
    assert document["success_rate"] == 0.0  # four environments, the first episode of each
