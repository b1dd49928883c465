import dataclasses

import pytest

from spreeze.cli.arguments import FLAG_OF, build_parser, parse_band, user_values
from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import SECTIONS
from spreeze.errors import ConfigError

ISSUE_FLAGS = [
    "--env", "--algo", "--mode", "--auto", "--profile", "--samplers", "--envs-per-sampler", "--batch-size",
    "--replay-capacity", "--learner-threads", "--device", "--samples-per-insert", "--seconds", "--env-steps",
    "--updates", "--target-return", "--seed", "--runs-dir", "--name", "--resume", "--no-visualizer", "--json",
    "--set", "--save-replay", "--import", "--env-arg", "--objective", "--cpu-target", "--gpu-target", "--leave-free",
    "--no-governor",
]  # fmt: skip


def shown_by(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_flags_needed_first_in_groups_and_help_all_every_one(capsys):
    first, every = shown_by(capsys, "--help"), shown_by(capsys, "--help-all")
    flags = {flag for action in build_parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert {flag for flag in flags if f"\n  {flag}" in first} >= {"--env", "--algo", "--auto", "--seconds", "--resume"}
    assert len([flag for flag in flags if f"\n  {flag} " in first or f"\n  {flag}\n" in first]) <= 11
    assert all(flag in every for flag in flags)
    for title in ("task", "learning", "machine", "stop and resume", "output"):
        assert f"\n{title}:\n" in every
    of_groups = {id(action) for group in build_parser()._action_groups if group.title == "options" for action in
                 group._group_actions}  # fmt: skip
    assert len(of_groups) == 2, "every flag but the two of help stands in a group"


def _values(*argv):
    return user_values(build_parser().parse_args(argv))


def test_nothing_given_is_nothing_set():
    assert _values() == {}


def test_all_promised_flags_exist_and_help_says_default_and_unit():
    help_text = " ".join(build_parser().format_help().split())
    for flag in ISSUE_FLAGS:
        assert flag in help_text
    for action in build_parser()._actions:
        if action.dest not in ("help", "help_all"):
            assert "(default: " in action.help, action.option_strings
    for key, flag in FLAG_OF.items():
        part, name = key.split(".")
        unit = next(i for i in dataclasses.fields(SECTIONS[part]) if i.name == name).metadata["unit"]
        if unit:
            action = next(a for a in build_parser()._actions if flag in a.option_strings)
            assert f"[{unit}]" in action.help


def test_flags_become_settings():
    values = _values(
        "--env", "A-v0", "--algo", "td3", "--mode", "serial", "--samplers", "3", "--envs-per-sampler", "2",
        "--batch-size", "64", "--replay-capacity", "1000", "--learner-threads", "2", "--device", "cpu", "--seconds",
        "1.5", "--env-steps", "10", "--updates", "20", "--target-return", "-200", "--seed", "9", "--name", "n",
        "--import", "m", "--runs-dir", "r", "--samples-per-insert", "2:4", "--save-replay", "--no-visualizer",
        "--set", "td3.policy_delay=3", "--set", "td3.gamma=0.9", "--objective", "paper", "--cpu-target", "0.5",
        "--gpu-target", "0.9", "--leave-free", "0.25", "--no-governor",
    )  # fmt: skip
    assert values == {
        "env": {"id": "A-v0", "import_module": "m"},
        "run": {"algo": "td3", "mode": "serial", "seed": 9, "runs_dir": "r", "name": "n"},
        "sampling": {"samplers": 3, "envs_per_sampler": 2},
        "learner": {"batch_size": 64, "threads": 2, "device": "cpu"},
        "replay": {"capacity": 1000, "samples_per_insert_min": 2.0, "samples_per_insert_max": 4.0, "save": True},
        "stop": {"seconds": 1.5, "env_steps": 10, "updates": 20, "target_return": -200.0},
        "visualizer": {"enabled": False},
        "rollout": {"samplers": 3, "envs_per_sampler": 2},
        "td3": {"policy_delay": 3, "gamma": 0.9},
        "tuning": {"objective": "paper", "cpu_target": 0.5, "gpu_target": 0.9, "leave_free": 0.25, "govern": False},
    }
    resolve([Layer("user", values)])


@pytest.mark.parametrize(
    ("text", "band"),
    [("8:512", (8.0, 512.0)), (":4", (0.0, 4.0)), ("2:", (2.0, 1e9)), ("0.5:0.5", (0.5, 0.5)), (":", (0.0, 1e9))],
)
def test_bands(text, band):
    assert parse_band(text) == band


@pytest.mark.parametrize("text", ["", "8", "a:b", "1:2:3", "8;9"])
def test_malformed_bands_are_refused(text):
    with pytest.raises(ConfigError, match="expected MIN:MAX"):
        parse_band(text)


@pytest.mark.parametrize("argv", [["--batch-size", "many"], ["--objective", "most"], ["--nonsense"], ["--env"]])
def test_arguments_that_cannot_be_read_end_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""
