"""What a resumed run takes from its files is checked first: complete, of this run, and the larger of two counters."""

import dataclasses
import itertools
import json
import random
import shutil

import numpy as np
import pytest

from spreeze.cli.arguments import build_parser
from spreeze.cli.planning import layers_of
from spreeze.cli.resume import check_environment, earlier_sessions, settings_of, write_settings
from spreeze.cli.train import main as trained
from spreeze.config.layers import RESUMED, Layer, iterate, resolve, to_toml
from spreeze.envs.task import make_task, spec_from
from spreeze.errors import EnvError, RunError, SpreezeError
from spreeze.files import write_json
from spreeze.machine.hardware import read_machine
from spreeze.metrics.comparison import sources_in
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter
from spreeze.run_directory import SUBDIRECTORIES
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.weights import WeightsStore
from spreeze.types import Box, Choices, FrameSpec

CHOICES = {"env": {"id": "Pendulum-v1"}, "run": {"algo": "sac", "mode": "serial", "seed": 7},
           "learner": {"batch_size": 64}}  # fmt: skip
SETTINGS = resolve([Layer("user", CHOICES)])
TOLD = {"state": "finished", "env_id": "Pendulum-v1", "algo": "sac", "mode": "serial", "sessions": 2, "seed": 7,
        "started": "2026-11-21T10:00:00+0000", "env_steps": 5000, "updates": 900, "episodes": 25, "wall_s": 61.5,
        "eval_best": -150.0, "session_starts": [0.0, 30.0]}  # fmt: skip
SAVED = {"updates": 800, "env_steps": 4800, "wall_s": 60.0, "algo": "sac", "env_id": "Pendulum-v1"}


@pytest.fixture(scope="module")
def spec():
    return make_task("Pendulum-v1").spec


@pytest.fixture
def run(tmp_path, spec):
    """The directory of a run of two sessions, as far as a resume reads it."""
    path = tmp_path / "runs" / "run"
    for name in SUBDIRECTORIES:
        (path / name).mkdir(parents=True)
    write_settings(path, SETTINGS)
    write_json(path / "run.json", TOLD)
    write_json(path / "env.json", dataclasses.asdict(spec))
    save(path, **SAVED)
    return path


def save(path, **state):
    CheckpointStore(path / "checkpoints").save({"w": np.zeros(3, np.float32)}, state, epoch=1, updates=state["updates"])


def test_a_value_that_a_resumed_run_keeps_also_keeps_its_source(run):
    tuned = {"learner": {"batch_size": 128}, "replay": {"capacity": 5000}}
    write_settings(run, resolve([Layer("user", CHOICES), Layer("tuner", tuned)]))
    kept = {part: {} for part, _, _ in iterate(SETTINGS.config)}
    for part, name, value in iterate(settings_of(run).config):
        kept[part][name] = value
    write_settings(run, resolve([Layer(RESUMED, kept), Layer("user", {"replay": {"capacity": 6000}})]))
    sources = sources_in(run)
    assert [sources[key] for key in ("learner.batch_size", "replay.capacity", "run.seed", "sac.gamma")] == [
        "tuner", "user", "user", "default"
    ]  # fmt: skip


@pytest.mark.parametrize("reason", ["updates", "interrupt", None])
def test_stop_conditions_hold_but_for_the_one_that_ended_the_run(run, reason):
    write_settings(run, resolve([Layer("user", CHOICES | {"stop": {"updates": 900, "target_return": -150.0}})]))
    write_json(run / "run.json", TOLD | {"exit_reason": reason})
    arguments = build_parser().parse_args(["--resume", "run", "--seconds", "60"])
    layers, notes = layers_of(arguments, run, read_machine())
    stop = resolve(layers).config.stop
    assert (stop.seconds, stop.target_return) == (60.0, -150.0)
    assert stop.updates == (None if reason == "updates" else 900)
    updates = "" if reason == "updates" else "--updates 900, "
    assert notes[1] == f"stop conditions as before: {updates}--target-return -150"


def contents(folder):
    return {
        path.relative_to(folder): (path.read_bytes() if path.is_file() else None, path.lstat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def refused(path, capsys, *arguments):
    """The one line with which the command refuses to resume; nothing has changed then."""
    before = contents(path)
    assert trained(["--resume", "run", "--runs-dir", str(path.parent), "--seconds", "1", *arguments]) == 2
    _, err = capsys.readouterr()
    assert contents(path) == before
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert "Traceback" not in err
    return lines[-1]


def config(path):
    return (path / "config.toml").read_text()


def taken(path):
    """The configuration that a resume takes, or the line with which it refuses."""
    try:
        return settings_of(path).config
    except SpreezeError as error:
        lines = str(error).splitlines()
    (line,) = lines
    return line


def unmarked(text):
    """The settings as a version wrote them that had no end mark."""
    return text[: text.index("# end of settings")]


# --- complete ---


def test_whole_settings_are_taken_with_and_without_the_end_mark(run):
    assert config(run).splitlines()[-1] == f"# end of settings: {len(iterate(SETTINGS.config))}"
    assert settings_of(run).config == SETTINGS.config
    (run / "config.toml").write_text(unmarked(config(run)))
    assert settings_of(run).config == SETTINGS.config


@pytest.mark.parametrize(("told", "kept"), [(0.25, 0.25), (0.0, 0.0), (None, 0.5), ("x", 0.5), (7.0, 0.5)])
def test_what_was_left_free_at_the_end_of_a_session_is_left_free_in_the_next(run, told, kept):
    write_settings(run, resolve([Layer("user", CHOICES), Layer("set", {"tuning": {"leave_free": 0.5}})]))
    write_json(run / "run.json", TOLD | {"leave_free": told})
    assert settings_of(run).config.tuning.leave_free == kept


@pytest.mark.parametrize("mark", [True, False])
def test_settings_that_were_cut_anywhere_are_refused(run, mark):
    """Cuts at the end of a line, each valid TOML, and within one: none gives other settings."""
    whole = config(run) if mark else unmarked(config(run)).rstrip() + "\n"
    ends = list(itertools.accumulate(len(line) for line in whole.splitlines(keepends=True)))
    rng = random.Random(0)
    for end in [0, *ends[:-30:5], *ends[-30:-1], *(rng.randrange(len(whole) - 12) for _ in range(60))]:
        (run / "config.toml").write_text(whole[:end])
        found = taken(run)
        assert found == SETTINGS.config or found.startswith("run cannot be resumed: config.toml"), f"cut at {end}"


def test_a_setting_that_is_missing_or_zeroed_in_the_middle_is_refused(run):
    whole, lines = config(run), config(run).splitlines(keepends=True)
    for gone in [number for number, line in enumerate(lines[:-1]) if " = " in line or "is not set" in line]:
        (run / "config.toml").write_text("".join(lines[:gone] + lines[gone + 1 :]))
        with pytest.raises(RunError, match=r"of \d+ settings"):
            settings_of(run)
    (run / "config.toml").write_bytes(whole.encode()[:2000] + bytes(4096) + whole.encode()[6096:])
    assert taken(run).startswith("run cannot be resumed: config.toml: ")


def test_a_changed_setting_is_no_damage(run):
    (run / "config.toml").write_text(config(run).replace("batch_size = 64", "batch_size = 128"))
    assert settings_of(run).config.learner.batch_size == 128


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# nothing\n",
        "[run]\n",
        "x = 1\n",
        "a = " + 3000 * "[" + 3000 * "]",
        "[" + 2000 * "a." + "b]\n",
        "[run]\nalgo = 'sac'\n",
        "\x00" * 3000,
        "[run\n",
        "[[run]]\nalgo = 'sac'\n",
        "run = 5\n",
    ],
)
def test_no_settings_are_one_line_and_change_nothing(run, capsys, text):
    (run / "config.toml").write_text(text)
    assert "run cannot be resumed: config.toml: " in refused(run, capsys)


def test_a_folder_in_the_place_of_the_settings_is_one_line(run, capsys):
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()
    assert "run cannot be resumed: config.toml: " in refused(run, capsys)


def test_odd_values_of_any_setting_are_one_line(run):
    odd = ["nan", "inf", "1" + 400 * "0", '"x"', "[]", "[nan, 'x']", "{ a = 1 }", "true", "-7", "0", "1e300",
           "1979-05-27", "'''\n'''"]  # fmt: skip
    whole = config(run)
    lines = whole.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if " = " not in line:
            continue
        name = line.split(" = ")[0]
        value = random.Random(number).choice(odd)
        (run / "config.toml").write_text("".join([*lines[:number], f"{name} = {value}\n", *lines[number + 1 :]]))
        assert taken(run), (name, value)


# --- of this run ---


@pytest.mark.parametrize(
    ("file", "name", "value", "words"),
    [
        ("run.json", "env_id", "CartPole-v1", "env.id = Pendulum-v1, but run.json tells CartPole-v1"),
        ("run.json", "algo", "td3", "run.algo = sac, but run.json tells td3"),
        ("run.json", "mode", "spreeze", "run.mode = serial, but run.json tells spreeze"),
        ("checkpoint", "env_id", "CartPole-v1", "env.id = Pendulum-v1, but its checkpoint tells CartPole-v1"),
        ("checkpoint", "algo", "dqn", "run.algo = sac, but its checkpoint tells dqn"),
    ],
)
def test_settings_of_another_run_are_refused(run, capsys, file, name, value, words):
    if file == "run.json":
        write_json(run / "run.json", TOLD | {name: value})
    else:
        save(run, **SAVED | {name: value, "updates": 810})
    assert words in refused(run, capsys)


def test_a_mode_that_changed_on_resume_is_no_contradiction_before_its_settings_are_written(run):
    write_json(run / "run.json", TOLD | {"mode": "spreeze", "mode_before": "serial"})
    assert settings_of(run).config.run.mode == "serial"


def test_an_id_with_its_module_is_that_of_the_run(run):
    write_settings(run, resolve([Layer("user", CHOICES | {"env": {"id": "mine:Pendulum-v1"}})]))
    assert settings_of(run).config.env.id == "mine:Pendulum-v1"


# --- the environment, case f08 ---


def changes(spec):
    frames = FrameSpec(channels=1, height=84, width=84, stack=4, sign_rewards=False, options={})
    return {
        "observation": {"obs_dim": 4, "obs_shape": (4,)}, "actions": {"action": Box((-2.0,) * 2, (2.0,) * 2, (2,))},
        "discrete": {"action": Choices((3,))}, "bounds": {"action": Box((-1.0,), (1.0,), (1,))},
        "one bound": {"action": Box((-2.0,), (2.5,), (1,))},
        "layout": {"obs_layout": ("0:1 a (Box)", "1:3 b (Box)"), "obs_shape": None},
        "shape": {"obs_shape": (1, 3)}, "action shape": {"action": Box((-2.0,), (2.0,), (1, 1))},
        "mask": {"action_mask": True, "action": Choices((2,)), "obs_dim": 5, "obs_shape": None},
        "frames": {"frames": frames, "obs_dim": 28224, "obs_shape": None},
    }  # fmt: skip


@pytest.mark.parametrize("name", list(changes(None)))
def test_another_environment_is_refused(run, spec, name):
    made = dataclasses.replace(spec, **changes(spec)[name])
    check_environment(run, spec)
    with pytest.raises(EnvError, match=r"run: trained .*; nothing was changed; resume it with"):
        check_environment(run, made)


def test_what_says_nothing_about_the_spaces_may_change(run, spec):
    check_environment(run, dataclasses.replace(spec, max_episode_steps=7, reward_threshold=1.0))


@pytest.mark.parametrize("damage", ["", "{}", '{"obs_dim": NaN}', "[]"])
def test_without_its_description_the_weights_tell_the_environment(run, spec, damage):
    (run / "env.json").write_text(damage)
    check_environment(run, dataclasses.replace(spec, action=Box((-2.0,), (9.0,), (1,))))  # nothing knows better
    WeightsStore(run / "weights").publish({"w": np.zeros(2, np.float32)}, {"env": dataclasses.asdict(spec)}, 1, 1)
    check_environment(run, spec)
    with pytest.raises(EnvError, match="actions within -2 to 2, but Pendulum-v1 has -2 to 9"):
        check_environment(run, dataclasses.replace(spec, action=Box((-2.0,), (9.0,), (1,))))


def test_a_resume_with_another_environment_changes_no_file(run, capsys, spec):
    write_json(run / "env.json", dataclasses.asdict(dataclasses.replace(spec, action=Box((-3.0,), (2.0,), (1,)))))
    assert "run: trained with actions within -3 to 2, but Pendulum-v1 has -2 to 2; nothing was changed" in refused(
        run, capsys
    )


def test_a_description_comes_back_from_its_file(run, spec):
    assert spec_from(json.loads((run / "env.json").read_text())) == spec


# --- counters ---


def totals(path):
    found, note = earlier_sessions(path, SETTINGS.config)
    return (found.env_steps, found.updates, found.episodes, found.wall_s, found.sessions, found.best_return), note


def test_run_json_knows_more_than_the_checkpoint(run):
    assert totals(run) == ((5000, 900, 25, 61.5, 2, -150.0), None)


def test_the_checkpoint_knows_more_than_run_json(run):
    save(run, **SAVED | {"updates": 1000, "env_steps": 6000, "wall_s": 70.0})
    assert totals(run) == ((6000, 1000, 25, 70.0, 2, -150.0), None)
    shutil.rmtree(run / "checkpoints")
    assert totals(run) == ((5000, 900, 25, 61.5, 2, -150.0), None)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "null", '{"env_steps": NaN}', 500 * "[" + 500 * "]"])
def test_without_run_json_the_counters_come_from_the_checkpoint(run, text):
    (run / "run.json").write_text(text)
    assert totals(run) == ((4800, 800, 0, 60.0, 1, None), "run.json is damaged; from the checkpoint and the metrics: "
                           "env_steps 4,800, updates 800, episodes 0, wall_s 1:00")  # fmt: skip


def test_without_run_json_the_metrics_know_what_the_checkpoint_does_not(run):
    (run / "run.json").write_text("")
    writer = MetricsWriter(run / "metrics.db")
    writer.write(64.0, 5100, {"env_steps": 5100.0, "updates": 920.0, "episodes": 31.0})
    writer.evaluation(EvaluationRow(60.0, 4800, 800, 1, 800, 10, -170.0, 1.0, 200.0))
    writer.close()
    assert totals(run)[0] == (5100, 920, 31, 64.0, 1, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(
            ("env_steps", "updates", "episodes", "wall_s", "sessions", "eval_best", "session_starts"),
            ("x", float("nan"), float("inf"), 10**400, -1, [], {}, True, [float("nan"), "x"]),
        ),
        ("seed", "x"),
        ("data_flow", 5),
        ("sinks", []),
        ("command", "x"),
        ("state", 7),
        ("started", 7),
    ],
)
def test_odd_values_in_run_json_are_as_if_missing(run, name, value):
    write_json(run / "run.json", TOLD | {name: value})
    found, _ = totals(run)
    assert found[0] in (5000, 4800)
    assert found[1] in (900, 800)
    assert found[3] in (61.5, 60.0)
    assert found[4] == 2 or (name == "sessions" and found[4] == len(TOLD["session_starts"]))
    assert found[5] in (-150.0, None) or (name, value) == ("eval_best", -1)


@pytest.mark.parametrize("odd", ["x", float("nan"), None, [], -5.0, 10**30])
def test_odd_values_in_a_checkpoint_are_left_out(run, odd):
    save(run, **SAVED | {"updates": 1000, "env_steps": odd, "wall_s": odd})
    assert totals(run) == ((5000, 1000, 25, 61.5, 2, -150.0), None)


def test_a_damaged_checkpoint_counts_for_nothing(run):
    save(run, **SAVED | {"updates": 1000, "env_steps": 10**6})
    newest = CheckpointStore(run / "checkpoints").paths()[-1]
    for damage in ("state.json", "tensors.safetensors", "MANIFEST.json"):
        kept = (newest / damage).read_bytes()
        (newest / damage).write_bytes(kept[: len(kept) // 2])
        assert totals(run) == ((5000, 900, 25, 61.5, 2, -150.0), None), damage
        (newest / damage).write_bytes(kept)
    assert totals(run)[0][:2] == (10**6, 1000)


def test_several_learners_count_together(run):
    several = resolve([Layer("user", {"run": {"learners": 2, "mode": "gala", "algo": "a2c"}})])
    save(run / "groups" / "1", **SAVED | {"updates": 300, "env_steps": 7000})
    found, _ = earlier_sessions(run, several.config)
    assert (found.updates, found.env_steps) == (1100, 7000)


def test_toml_of_the_settings_has_no_mark_itself():
    assert "end of settings" not in to_toml(SETTINGS)
