"""The verbs that look at a trained policy: evaluate and play, and how they find it."""

import csv
import errno
import json
import shutil
import subprocess
import sys

import av
import pytest
from command_parsers import parser_of
from harness import PATIENCE_S
from linear_policy import BAD, FAULT, FAULT_MODULE, GOOD, IDLE, arrays, meta, policy_of, publish

from spreeze.cli import evaluate, play
from spreeze.cli.evaluate import find_weights, spec_of
from spreeze.config.schema import EvaluationConfig
from spreeze.envs.task import make_task
from spreeze.errors import ConfigError, EnvError, ResourceError, RunError
from spreeze.files import replace_bytes
from spreeze.transport.weights import WeightsStore, encode, read_weights
from spreeze.workers.episodes.lockstep import run_episodes, score


def make_run(runs_dir, name, started, best=None, module=FAULT_MODULE):
    run = runs_dir / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "videos").mkdir()
    (run / "run.json").write_text(json.dumps({"started": started, "state": "finished"}))
    publish(WeightsStore(run / "weights"), IDLE, 1)
    publish(WeightsStore(run / "weights"), BAD, 2)
    if best is not None:
        told = meta(1)
        told["env"]["import_module"] = module
        (run / "checkpoints" / "best.safetensors").write_bytes(encode(arrays(best), told, 1, 1))
    return run


@pytest.fixture
def runs_dir(tmp_path):
    make_run(tmp_path / "r", "second", "2026-02-01", best=GOOD)
    make_run(tmp_path / "r", "first", "2026-01-01")
    make_run(tmp_path / "r", "foreign", "2025-12-01", best=GOOD, module="someones_module")
    return tmp_path / "r"


def expected(gain, episodes=3, seed=1_000_000):
    tasks = run_episodes(lambda: make_task(FAULT, FAULT_MODULE), policy_of(gain).act, range(seed, seed + episodes))
    return score(tasks)


def run_evaluate(runs_dir, *args):
    return evaluate.main([*args, "--runs-dir", str(runs_dir), "--import", FAULT_MODULE, "--episodes", "3"])


@pytest.mark.parametrize("verb", [evaluate, play])
def test_a_run_of_the_plain_environment_is_shown_in_it(runs_dir, monkeypatch, verb):
    told = meta(3)
    told["env"]["plain"] = True
    weights = runs_dir / "second" / "checkpoints" / "best.safetensors"
    weights.write_bytes(encode(arrays(GOOD), told, 3, 3))
    asked = []

    def make(*_, **options):
        asked.append(options["plain"])
        raise EnvError("enough")

    monkeypatch.setattr(evaluate, "make_task", make)
    assert verb.main([str(weights), "--import", FAULT_MODULE]) != 0
    assert asked == [True]


# --- finding weights ---


def test_latest_is_the_newest_run_and_best_its_best_weights(runs_dir):
    assert find_weights("latest", runs_dir, "best") == runs_dir / "second" / "checkpoints" / "best.safetensors"
    assert find_weights("second", runs_dir, "latest").name.endswith("000002.safetensors")


def test_without_a_best_the_newest_weights_are_taken(runs_dir):
    assert find_weights("first", runs_dir, "best").name.endswith("000002.safetensors")


def test_a_path_of_a_run_or_of_a_file_is_accepted(runs_dir, tmp_path):
    assert find_weights(str(runs_dir / "first"), tmp_path / "elsewhere", "latest").parent.parent.name == "first"
    file = runs_dir / "second" / "checkpoints" / "best.safetensors"
    assert find_weights(str(file), tmp_path, "latest") == file


def test_a_damaged_pointer_leaves_the_highest_version(runs_dir):
    (runs_dir / "first" / "weights" / "LATEST.json").write_text("{")
    assert find_weights("first", runs_dir, "latest").name.endswith("000002.safetensors")


def test_a_pointer_cannot_lead_out_of_the_run(runs_dir):
    (runs_dir / "first" / "weights" / "LATEST.json").write_text(
        json.dumps({"file": "../../second/checkpoints/best.safetensors"})
    )
    assert find_weights("first", runs_dir, "latest").parent == runs_dir / "first" / "weights"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("secnd", RunError, "did you mean 'second'"),
        ("nothing.safetensors", RunError, "no weights file"),
        ("..", ConfigError, "expected"),
    ],
)
def test_what_cannot_be_found_is_said_in_one_line(runs_dir, name, error, words):
    with pytest.raises(error, match=words) as caught:
        find_weights(name, runs_dir, "best")
    assert "\n" not in str(caught.value)


def test_a_run_without_weights_is_named(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text("{}")
    with pytest.raises(RunError, match="no weights: it ended"):
        find_weights("new", tmp_path, "latest")


@pytest.mark.parametrize(
    "named", [{"import_module": "someones_module"}, {"env_id": "someones_module:Fault-v0", "import_module": None}]
)
def test_a_weights_file_cannot_make_a_module_be_imported(runs_dir, named):
    weights = read_weights(find_weights("second", runs_dir, "best"))
    assert spec_of(weights, FAULT_MODULE).env_id == FAULT
    weights.meta["env"].update(named)
    for other in (None, FAULT_MODULE):
        with pytest.raises(EnvError, match="if you trust it, add --import someones_module"):
            spec_of(weights, other)
    assert spec_of(weights, "someones_module").import_module == weights.meta["env"]["import_module"]


def test_engines_of_the_package_need_no_leave(runs_dir):
    weights = read_weights(find_weights("second", runs_dir, "best"))
    weights.meta["env"].update(env_id="envpool:CartPole-v1", import_module=None)
    assert spec_of(weights, None).env_id == "envpool:CartPole-v1"
    weights.meta["env"].update(env_id="spreeze/Synthetic-v0", import_module="spreeze.envs.small_tasks")
    assert spec_of(weights, None).import_module == "spreeze.envs.small_tasks"


# --- evaluate ---


def test_evaluate_prints_one_json_document_with_the_interval(runs_dir, capfd):
    assert run_evaluate(runs_dir, "latest", "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document["return_mean"] == expected(GOOD)["return_mean"]
    assert document["return_std"] == expected(GOOD)["return_std"]
    assert document["return_low"] <= document["return_mean"] <= document["return_high"]
    assert (document["env"], document["episodes"], document["version"]) == (FAULT, 3, 1)
    assert [episode["seed"] for episode in document["per_episode"]] == [1_000_000, 1_000_001, 1_000_002]


def test_evaluate_takes_the_latest_weights_on_request_and_writes_csv_and_clip(runs_dir, tmp_path, capfd):
    table, clip = tmp_path / "out.csv", tmp_path / "out.mp4"
    args = ("second", "--checkpoint", "latest", "--csv", str(table), "--video", str(clip))
    assert run_evaluate(runs_dir, *args) == 0
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(float(row["return"]) for row in rows) / 3 == pytest.approx(expected(BAD)["return_mean"])
    assert [row["seed"] for row in rows] == ["1000000", "1000001", "1000002"]
    with av.open(str(clip)) as container:
        assert len(list(container.decode(video=0))) == 26  # every second of the 51 pictures of one episode
    out = capfd.readouterr().out
    assert "95 % interval" in out
    assert str(clip) in out


def test_an_evaluation_plays_none_of_the_episodes_that_chose_the_policy_and_one_episode_has_no_interval(
    runs_dir, capfd
):
    args = ["latest", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE, "--episodes", "1"]
    assert evaluate.main([*args, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["seed"] >= EvaluationConfig().seed + 100 * EvaluationConfig().episodes
    assert (document["return_low"], document["return_high"]) == (None, None)
    assert evaluate.main(args) == 0
    assert "interval" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["secnd"], "did you mean"),
        (["latest", "--episodes", "0"], "at least 1"),
        (["latest", "--seed", "-1"], "at least 0"),
        (["foreign"], "add --import"),
        (["latest", "--csv", "/no/such/folder/x.csv"], "no such directory"),
        (["latest", "--video", "/no/such/folder/x.mp4"], "no such directory"),
    ],
)
def test_evaluate_refuses_in_one_line_with_exit_code_2(runs_dir, capfd, args, words):
    assert evaluate.main([*args, "--runs-dir", str(runs_dir)]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_an_environment_that_raises_is_one_line(runs_dir, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SPREEZE_FAULT_P_CRASH", "1.0")
    assert run_evaluate(runs_dir, "latest", "--video", str(tmp_path / "x.mp4")) == 2
    assert (
        f"{FAULT}: none of 3 episodes finished; last error: seed 1000002, step 1: RuntimeError: injected fault"
    ) in capfd.readouterr().err
    assert not list(tmp_path.glob("*x.mp4*"))
    assert (
        play.main(["latest", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE, "--clip", str(tmp_path / "x.mp4")])
        == 2
    )
    assert not list(tmp_path.glob("*x.mp4*"))


def test_a_damaged_weights_file_is_one_line(runs_dir, tmp_path, capfd):
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    assert evaluate.main([str(tmp_path / "bad.safetensors")]) == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_evaluate_as_a_command(runs_dir):
    command = [sys.executable, "-m", "spreeze", "evaluate", "latest", "--runs-dir", str(runs_dir), "--json"]
    done = subprocess.run(
        [*command, "--import", FAULT_MODULE, "--episodes", "3"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["return_mean"] == expected(GOOD)["return_mean"]


# --- play ---


def test_play_writes_a_clip_into_the_run_where_there_is_no_display(runs_dir, monkeypatch, capfd):
    monkeypatch.setattr(play, "has_display", lambda: False)
    args = ["second", "--checkpoint", "latest", "--runs-dir", str(runs_dir)]
    assert play.main([*args, "--import", FAULT_MODULE]) == 0
    clip = runs_dir / "second" / "videos" / "play-v2.mp4"
    out = capfd.readouterr().out
    assert f"clip: {clip}" in out
    assert f"return {expected(BAD, 1, seed=10_000)['return_mean']:.1f} in 50 env steps" in out
    with av.open(str(clip)) as container:
        assert len(list(container.decode(video=0))) == 51, "the start and each step"


def test_a_pretrained_policy_leaves_its_clip_in_the_working_directory(runs_dir, tmp_path, monkeypatch, capfd):
    shipped = tmp_path / "shipped" / "walker.safetensors"
    shipped.parent.mkdir()
    shutil.copy(evaluate.find_weights("second", runs_dir), shipped)
    monkeypatch.setattr(evaluate, "_PRETRAINED", shipped.parent)
    monkeypatch.setattr(play, "has_display", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert play.main(["walker", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE]) == 0
    assert "clip: play-walker.mp4" in capfd.readouterr().out
    assert (tmp_path / "play-walker.mp4").is_file()
    assert [*shipped.parent.iterdir()] == [shipped]
    assert "a pretrained policy: walker" in " ".join(parser_of(play.main).format_help().split())


def test_play_writes_the_clip_that_was_asked_for(runs_dir, tmp_path, capfd):
    clip = tmp_path / "best.mp4"
    args = ["second", "--checkpoint", "best", "--clip", str(clip), "--episodes", "2", "--runs-dir", str(runs_dir)]
    assert play.main([*args, "--import", FAULT_MODULE]) == 0
    assert capfd.readouterr().out.count("weights 1-1") == 2
    with av.open(str(clip)) as container:
        assert len(list(container.decode(video=0))) == 2 * 51


def test_play_follows_a_run_that_is_still_training(runs_dir, monkeypatch, tmp_path, capfd):
    store = WeightsStore(runs_dir / "second" / "weights")
    monkeypatch.setattr(play, "_line", lambda source, episode: publish_next(source))
    versions = []

    def publish_next(source):
        versions.append(source.weights.version)
        publish(store, GOOD, 3 + len(versions))
        return ""

    args = [
        "second",
        "--checkpoint",
        "latest",
        "--clip",
        str(tmp_path / "c.mp4"),
        "--episodes",
        "3",
        "--runs-dir",
        str(runs_dir),
    ]
    assert play.main([*args, "--import", FAULT_MODULE]) == 0
    assert versions == [2, 4, 5]


def test_play_on_best_takes_better_weights_that_have_the_same_name(runs_dir, monkeypatch, tmp_path, capfd):
    best = runs_dir / "second" / "checkpoints" / "best.safetensors"
    versions = []

    def found_better(source, episode):
        versions.append(source.weights.version)
        if len(versions) == 1:
            replace_bytes(best, encode(arrays(IDLE), meta(7), 1, 7))
        elif len(versions) == 2:
            best.write_bytes(b"damaged")
        return ""

    monkeypatch.setattr(play, "_line", found_better)
    args = ["second", "--checkpoint", "best", "--clip", str(tmp_path / "c.mp4"), "--episodes", "3"]
    assert play.main([*args, "--runs-dir", str(runs_dir), "--import", FAULT_MODULE]) == 0
    assert versions == [1, 7, 7], "and what cannot be read is not taken"


def test_play_shows_episodes_in_a_window_in_real_time(runs_dir, monkeypatch, capfd):
    monkeypatch.setenv("DISPLAY", ":0")  # this environment opens no window
    assert play.main(["second", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE, "--episodes", "1"]) == 0
    assert "1 episode shown" in capfd.readouterr().out


def test_ctrl_c_ends_a_window_with_a_summary(runs_dir, monkeypatch, capfd):
    monkeypatch.setenv("DISPLAY", ":0")
    shown = iter(range(3))

    def line(source, episode):
        if next(shown) == 2:
            raise KeyboardInterrupt
        return "shown"

    monkeypatch.setattr(play, "_line", line)
    assert play.main(["second", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE]) == 0
    assert "3 episodes shown" in capfd.readouterr().out


@pytest.mark.parametrize(("args", "words"), [(["nobody"], "no run"), (["latest", "--episodes", "0"], "at least 1")])
def test_play_refuses_in_one_line_with_exit_code_2(runs_dir, capfd, args, words):
    assert play.main([*args, "--runs-dir", str(runs_dir)]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "play.mp4"), ResourceError.exit_code, "free some disk space"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_full_disk_and_ctrl_c_before_a_clip_is_written_are_one_line(monkeypatch, capfd, raised, code, words):
    def ended(args, stage):
        raise raised

    monkeypatch.setattr(play, "play", ended)
    assert play.main(["latest"]) == code
    told = capfd.readouterr().err
    assert words in told
    assert told.count("\n") == bool(words)


def test_every_flag_says_what_it_is_and_its_default(capsys):
    for module in (evaluate, play):
        for action in parser_of(module.main)._actions[2:]:
            assert "default" in action.help, action.dest


def test_an_error_of_the_environment_costs_an_episode_and_is_told(runs_dir, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SPREEZE_FAULT_P_NAN", "0.01")
    assert (
        evaluate.main(
            [
                "latest",
                "--runs-dir",
                str(runs_dir),
                "--import",
                FAULT_MODULE,
                "--json",
                "--csv",
                str(tmp_path / "x.csv"),
            ]
        )
        == 0
    )
    document = json.loads(capfd.readouterr().out)
    lost = document["episodes_lost"]
    assert 0 < lost < 10
    assert (document["episodes"], document["episodes_asked"]) == (10 - lost, 10)
    assert "nan" in document["last_error"]
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 11 - lost
    assert evaluate.main(["latest", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE]) == 0
    told = capfd.readouterr().out
    assert f"{10 - lost} of 10 episodes, {lost} lost)" in told
    assert "lost    seed 10000" in told
    assert (
        play.main(
            [
                "latest",
                "--runs-dir",
                str(runs_dir),
                "--import",
                FAULT_MODULE,
                "--episodes",
                "10",
                "--clip",
                str(tmp_path / "x.mp4"),
            ]
        )
        == 0
    )
    told = capfd.readouterr().out
    assert "episode lost at step" in told
    assert " of 10 episodes, " in told
    assert (tmp_path / "x.mp4").exists()


def test_a_window_ends_when_it_has_nothing_to_show(runs_dir, monkeypatch, capfd):
    monkeypatch.setenv("SPREEZE_FAULT_P_CRASH", "1.0")
    monkeypatch.setattr(play, "has_display", lambda: True)
    monkeypatch.setattr("spreeze.envs.make.has_display", lambda: True)
    monkeypatch.setattr(
        evaluate, "make_task", lambda env_id, module, mode, **more: make_task(env_id, module, "rgb_array")
    )
    assert play.main(["latest", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE]) == 2
    told = capfd.readouterr().err
    assert told.count("episode lost at step 1: RuntimeError: injected fault") == 2
    assert f"error: {FAULT} failed: RuntimeError: injected fault" in told


@pytest.mark.parametrize("verb", [evaluate, play])
def test_an_environment_that_is_not_made_in_time_is_told_with_the_setting(runs_dir, monkeypatch, capfd, verb):
    monkeypatch.setenv("SPREEZE_FAULT_INIT_S", "1000")
    assert verb.main(["latest", "--runs-dir", str(runs_dir), "--import", FAULT_MODULE, "--start-deadline-s", "1"]) == 2
    assert f"{FAULT} was not made within 1 s; if it needs longer to start, set --start-deadline-s 2" in (
        capfd.readouterr().err
    )
