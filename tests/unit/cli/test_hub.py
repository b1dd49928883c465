"""``push`` and ``pull``: what is sent, what is not, only on the user's word; what comes back is played as any run."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import hub_server
import numpy as np
import pytest
from harness import PATIENCE_S, REPO
from PIL import Image

from spreeze.cli import evaluate, export, play
from spreeze.cli.hub import _checked, pull, push
from spreeze.config.layers import Layer, resolve, to_toml
from spreeze.envs.make import describe
from spreeze.files import write_json
from spreeze.metrics import model_card
from spreeze.metrics.published_returns import published
from spreeze.run_directory import RunDir, read_config, read_run
from spreeze.transport.weights import encode, read_weights
from spreeze.workers.evaluator import COLUMNS

SECRET = "/home/me/secret-project"
BEST = {"return": -167.7, "std": 100.1, "played": 20}


@pytest.fixture
def runs(tmp_path):
    """A directory with a run that has ended: ``runs/one``."""
    run_dir = RunDir.create(tmp_path / "runs", "one")
    run = run_dir.path
    run_dir.write_state(state="finished", env_id="Pendulum-v1", algo="sac", mode="spreeze", seed=3,
                        versions={"spreeze": "0.2.0"}, machine="two cores", command=["spreeze", SECRET])  # fmt: skip
    run_dir.close()
    env = gymnasium.make("Pendulum-v1")
    spec = dataclasses.replace(describe(env), env_id="Pendulum-v1")
    env.close()
    arrays = {"head_w": np.zeros((3, 1), np.float32), "head_b": np.zeros(1, np.float32)}
    meta = {"policy": "deterministic", "hidden_sizes": [], "obs_dim": 3, "action_dim": 1, "num_actions": None,
            "algo": "sac", "updates": 9, "env_steps": 90, "env": dataclasses.asdict(spec)}  # fmt: skip
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "best.safetensors").write_bytes(encode(arrays, meta, 1, 1))
    write_json(run / "checkpoints" / "best.json", BEST)
    mine = {"callback": {"classes": (f"{SECRET}/own.py:Own",)}, "cluster": {"address": f"{SECRET}:6379"}}
    settings = resolve([Layer("user", {"run": {"algo": "sac", "runs_dir": SECRET}, "sac": {"gamma": 0.9}, **mine})])
    (run / "config.toml").write_text(to_toml(settings))
    write_json(run / "summary.json", {"run_dir": SECRET, "env_steps": 90, "updates": 9, "eval_return_final": -840.5})
    rows = [[1.0, 40, 4, 1, 1, 10, -900.0, 5.0, 200.0], [2.0, 90, 9, 1, 2, 10, -167.7, 5.0, 200.0]]
    lines = [",".join(COLUMNS), *(",".join(map(str, row)) for row in rows)]
    (run / "eval.csv").write_text("".join(f"{line}\n" for line in lines))
    (run / "videos").mkdir(exist_ok=True)
    (run / "videos" / "clip-0001-v1.mp4").write_bytes(b"clip")
    return tmp_path / "runs"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in of the hub's library, which keeps repositories in a folder; its calls and its error."""
    told = SimpleNamespace(calls=[], error=None, folder=tmp_path / "hub")

    class HfApi:
        endpoint = "https://hub.test"

        def create_repo(self, repo_id, repo_type, private, exist_ok):
            told.calls.append(("create", repo_id, private, exist_ok))
            if told.error:
                raise told.error
            return f"{self.endpoint}/{repo_id}"

        def upload_folder(self, repo_id, repo_type, folder_path, commit_message):
            told.calls.append(("upload", repo_id))
            shutil.copytree(folder_path, told.folder / repo_id, dirs_exist_ok=True)

    def snapshot_download(repo_id, repo_type, revision, local_dir, allow_patterns):
        told.calls.append(("download", repo_id, revision))
        if told.error:
            raise told.error
        source = told.folder / repo_id
        for path in source.rglob("*"):
            if path.is_file() and path.relative_to(source).as_posix() in allow_patterns:
                place = Path(local_dir) / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)

    module = ModuleType("huggingface_hub")
    module.HfApi, module.snapshot_download, module.__spec__ = HfApi, snapshot_download, SimpleNamespace()
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return told


def _sent(hub, name="me/robot"):
    return {path.relative_to(hub.folder / name).as_posix() for path in (hub.folder / name).rglob("*") if path.is_file()}


def test_what_was_pushed_comes_back_as_a_run_that_is_evaluated_played_and_exported(runs, hub, tmp_path, monkeypatch):
    place = ["--runs-dir", str(runs)]
    assert push(["one", "--to", "me/robot", "--yes", *place]) == 0
    assert hub.calls == [("create", "me/robot", False, True), ("upload", "me/robot")]
    assert pull(["me/robot", "--revision", "v1", *place]) == 0
    assert hub.calls[-1] == ("download", "me/robot", "v1")
    policies = [read_weights(runs / name / "checkpoints" / "best.safetensors") for name in ("one", "robot")]
    assert policies[0].meta == policies[1].meta
    assert (read_run(runs / "robot")["state"], read_run(runs / "robot")["seed"]) == ("finished", 3)
    assert read_config(runs / "robot")["sac"]["gamma"] == 0.9
    monkeypatch.chdir(tmp_path)
    assert evaluate.main(["robot", "--episodes", "1", *place]) == 0
    assert export.main(["robot", "--format", "numpy", *place]) == 0
    assert play.main(["robot", "--episodes", "1", "--clip", "clip.mp4", *place]) == 0
    assert push(["robot", "--to", "me/again", "--yes", *place]) == 0
    assert _sent(hub, "me/again") == _sent(hub)


def test_all_that_describes_the_policy_is_sent_and_nothing_of_the_machine_s_paths(runs, hub):
    assert push(["one", "--to", "me/robot", "--yes", "--private", "--runs-dir", str(runs)]) == 0
    assert hub.calls[0] == ("create", "me/robot", True, True)
    assert _sent(hub) == {"README.md", "return.png", "checkpoints/best.safetensors", "run.json", "config.toml",
                          "summary.json", "eval.csv", "replay.mp4"}  # fmt: skip
    for path in (hub.folder / "me" / "robot").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path
    state = json.loads((hub.folder / "me/robot/run.json").read_text())
    assert {"command", "pid", "host", "nonce", "boot_id"} & set(state) == set()


def test_the_page_has_returns_beside_the_published_one_settings_versions_and_how_to_use_it(runs):
    text = model_card.card(runs / "one", "me/robot", [(40, -900.0)], clip=True)
    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    told = dict(line.split(": ", 1) for line in head.splitlines())
    assert told["library_name"] == "spreeze"
    (result,) = json.loads(told["model-index"])[0]["results"]
    assert result["dataset"]["name"] == "Pendulum-v1"
    assert result["metrics"][0]["value"] == "-167.70 +/- 100.10"
    for words in ("-167.70 +/- 100.10 | 20 episodes", "| -840.5 |",
                  "| best published, td3 on Pendulum-v1, 20,000 env steps | -151.9 |",
                  "spreeze pull me/robot", "spreeze play robot", "gamma = 0.9", "spreeze 0.2.0", "two cores",
                  "(return.png)", 'src="replay.mp4"'):  # fmt: skip
        assert words in body, words
    assert "# default" not in body


def test_what_is_unknown_is_a_dash(tmp_path):
    (tmp_path / "config.toml").write_text("")
    text = model_card.card(tmp_path, "me/robot", [], clip=False)
    assert "| this policy | - | - episodes |" in text.replace("–", "-")
    assert "return.png" not in text
    assert "<video" not in text


@pytest.mark.parametrize("points", [[(10, -5.0)], [(0, 1.0), (10, 1.0)], [(0, -1600.0), (20_000, -150.0)]])
def test_the_curve_is_a_picture_with_a_line(points):
    for there in (None, published("Pendulum-v1")):
        with Image.open(io.BytesIO(model_card.curve(points, there))) as picture:
            assert picture.size == (800, 400)
            colours = {colour for _, colour in picture.convert("RGB").getcolors(10_000)}
    assert {(31, 111, 180), (196, 78, 0)} <= colours


@pytest.mark.parametrize(
    ("answer", "terminal", "sent"), [("y\n", True, True), ("\n", True, False), ("y\n", False, False)]
)
def test_nothing_is_sent_without_a_yes_and_what_would_be_is_listed_before(
    runs, hub, capsys, monkeypatch, answer, terminal, sent
):
    typed = io.StringIO(f"{answer}\n")
    typed.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", typed)
    code = push(["one", "--to", "me/robot", "--runs-dir", str(runs)])
    told = capsys.readouterr()
    assert "one -> me/robot at https://hub.test, public if it is new" in told.out
    assert "8 files" in told.out
    assert "checkpoints/best.safetensors" in told.out
    assert (code, bool(hub.calls)) == ((0, True) if sent else (2, False))
    assert sent or "nothing was sent: answer y, or give --yes" in told.err


def test_a_script_gets_one_document(runs, hub, capsys):
    place = ["--runs-dir", str(runs), "--json"]
    push(["one", "--to", "me/robot", "--yes", *place])
    document = json.loads(capsys.readouterr().out)
    assert (document["url"], len(document["files"])) == ("https://hub.test/me/robot", 8)
    pull(["me/robot", *place])
    document = json.loads(capsys.readouterr().out)
    assert document == {"run_dir": str(runs / "robot"), "repository": "me/robot", "env": "Pendulum-v1", "algo": "sac",
                        "import_module": None, "return": -840.5}  # fmt: skip


def test_what_cannot_be_done_is_one_line(runs, hub, capsys):
    place = ["--runs-dir", str(runs)]
    push(["one", "--to", "me/robot", "--yes", *place])

    def refused(main, *arguments):
        capsys.readouterr()
        code = main([*arguments, *place])
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        return code, told

    for name in ("robot", "me/", "me/../x", "a/b/c"):
        told = f"error: --to {name}: expected OWNER/NAME, as the hub has it\n"
        assert refused(push, "one", "--to", name, "--yes") == (2, told)
    assert "runs/one exists: choose another --name" in refused(pull, "me/robot", "--name", "one")[1]
    (hub.folder / "me/robot/checkpoints/best.safetensors").write_bytes(b"damaged")
    assert refused(pull, "me/robot")[0] == 1
    (hub.folder / "me/robot/checkpoints/best.safetensors").unlink()
    assert "holds no policy of Spreeze" in refused(pull, "me/robot")[1]
    hub.error = ConnectionError("no route")
    code, told = refused(pull, "me/robot")
    assert (code, "pull of me/robot failed: ConnectionError: no route; log in with: hf auth login" in told) == (1, True)
    assert refused(push, "one", "--to", "me/robot", "--yes")[0] == 1
    (runs / "one" / "checkpoints" / "best.safetensors").unlink()
    assert "one has no evaluated policy to push" in refused(push, "one", "--to", "me/robot", "--yes")[1]
    assert [path.name for path in runs.iterdir()] == ["one"], "nothing is left of what failed"


def test_a_link_in_a_repository_is_not_taken(runs, hub, tmp_path):
    push(["one", "--to", "me/robot", "--yes", "--runs-dir", str(runs)])
    (tmp_path / "come").mkdir()
    shutil.copytree(hub.folder / "me" / "robot", tmp_path / "come", dirs_exist_ok=True)
    (tmp_path / "come" / "eval.csv").unlink()
    (tmp_path / "come" / "eval.csv").symlink_to("/etc/hostname")
    _checked(tmp_path / "come", tmp_path / "kept", "me/robot")
    assert not (tmp_path / "kept" / "eval.csv").exists()


def test_a_run_with_a_link_is_not_sent(runs, hub, tmp_path, capsys):
    (runs / "one" / "eval.csv").unlink()
    (runs / "one" / "eval.csv").symlink_to(tmp_path / "elsewhere")
    assert push(["one", "--to", "me/robot", "--yes", "--runs-dir", str(runs)]) == 2
    assert "eval.csv" in capsys.readouterr().err
    assert hub.calls == []


def test_what_was_pulled_cannot_be_resumed_as_if_it_had_a_checkpoint(runs, hub):
    from spreeze.cli.resume import settings_of
    from spreeze.errors import RunError

    place = ["--runs-dir", str(runs)]
    push(["one", "--to", "me/robot", "--yes", *place])
    pull(["me/robot", *place])
    with pytest.raises(RunError, match=r"robot cannot be resumed: it was pulled from me/robot"):
        settings_of(runs / "robot")


def test_without_the_package_the_remedy_is_told(runs, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert push(["one", "--to", "me/robot", "--runs-dir", str(runs)]) == 2
    assert "pip install 'spreeze[hub]'" in capsys.readouterr().err


def test_the_hub_s_own_library_takes_and_gives_it_over_http(runs, tmp_path):
    pytest.importorskip("huggingface_hub", reason="pip install 'spreeze[hub]'")
    with hub_server.served() as server:
        environment = {**os.environ, "PYTHONPATH": str(REPO), "HF_ENDPOINT": server.url, "HF_TOKEN": hub_server.TOKEN,
                       "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip

        def spreeze(*words):
            command = [sys.executable, "-m", "spreeze", *words, "--runs-dir", str(runs)]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
                                  stdin=subprocess.DEVNULL, check=False)  # fmt: skip

        done = spreeze("push", "one", "--to", "me/robot", "--private", "--yes")
        assert done.returncode == 0, done.stderr
        assert (server.private, len(server.repositories["me/robot"])) == ({"me/robot"}, 8)
        done = spreeze("pull", "me/robot")
        assert done.returncode == 0, done.stderr
        server.refuses = True
        done = spreeze("push", "one", "--to", "me/robot", "--yes")
        assert done.returncode == 1
        assert "push to me/robot failed: " in done.stderr
    sent, come = (runs / name / "checkpoints" / "best.safetensors" for name in ("one", "robot"))
    assert sent.read_bytes() == come.read_bytes()
