"""A real run on Atari: processes start, learn from pixels, score, stop and go on; the verbs around it work."""

import json

import pytest
from harness import BATCH_SIZE, refused, run_command, train, train_until

from spreeze.transport.weights import WeightsStore

SMALL = (
    "--samplers", "1", "--envs-per-sampler", "2", "--batch-size", str(min(8, BATCH_SIZE)),
    "--replay-capacity", "2000", "--set", "dqn.cnn=impala_small", "--set", "dqn.hidden_sizes=[32]",
    "--set", "replay.learning_starts=100", "--set", "evaluation.episodes=1",
    "--set", "image.max_episode_frames=400", "--no-visualizer",
)  # fmt: skip


@pytest.mark.slow
def test_pong_is_trained_evaluated_stopped_and_resumed(tmp_path):
    def seen(run):
        return run.numbers().get("updates", 0) >= 30 and "eval_return" in run.numbers()

    run, code, document = train_until(tmp_path, seen, "--env", "ALE/Pong-v5", tiny=SMALL)
    assert code == 0, run.stderr
    assert (document["algo"], document["env"]) == ("dqn", "ALE/Pong-v5")
    assert document["eval_return_mean"] is not None
    weights, updates = WeightsStore(run.path / "weights").read_latest(), document["updates"]
    assert weights.version == updates >= 30
    assert weights.meta["env"]["frames"]["options"]["max_episode_frames"] == 400
    assert list((run.path / "errors").iterdir()) == []
    again, code, document = train(tmp_path, "--resume", str(run.path), "--updates", str(updates + 10), tiny=())
    assert code == 0, again.stderr
    assert document["updates"] == updates + 10
    found = run_command("evaluate", run.path, "--episodes", 1, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["length_mean"] <= 100
    clip = tmp_path / "pong.mp4"
    shown = run_command("play", run.path, "--clip", clip)
    assert shown.returncode == 0, shown.stderr
    assert clip.stat().st_size > 1000


def test_serial_mode_learns_from_images_and_repeats_bit_for_bit(tmp_path):
    args = ("--mode", "serial", "--env", "ALE/Pong-v5", "--updates", "4", "--set", "replay.learning_starts=20",
            "--set", "image.max_episode_frames=100")  # fmt: skip
    first, second = (train(tmp_path, *args, tiny=SMALL, name=name)[2] for name in ("first", "second"))
    assert first["parameters_sha256"] == second["parameters_sha256"] is not None


def test_replay_of_images_is_not_stored_and_says_so(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, *SMALL, "--env", "ALE/Pong-v5", "--save-replay")
    assert "frames in replay take" in document["error"]
