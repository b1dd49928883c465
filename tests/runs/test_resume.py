"""Resume: counters, networks and settings go on; no burst of updates; what cannot be continued is refused."""

import shutil

import pytest
from harness import BATCH_SIZE, FAULT, Run, refused, train

from spreeze.transport.checkpoint import CheckpointStore

_BARE = ()
"""No settings: a resumed run brings its own."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run, code, document = train(folder, *FAULT, "--updates", "100", "--save-replay", "--samples-per-insert", "4:4.5")
    assert code == 0
    assert run.state()["sessions"] == 1
    return folder, document


def test_a_resumed_run_goes_on_where_it_was(finished):
    folder, first = finished
    stored = CheckpointStore(folder / "runs" / "run" / "checkpoints").load_latest()
    picture = folder / "runs" / "run" / "live.jpg"
    picture.write_bytes(b"of the first session")
    # No further update: the networks have to be the very same.
    _, code, second = train(folder, "--resume", "latest", "--updates", "100", tiny=_BARE)
    assert code == 0
    assert not picture.is_file() or picture.read_bytes() != b"of the first session"
    assert second["updates"] == 100
    assert second["parameters_sha256"] == first["parameters_sha256"]
    assert second["wall_s"] > first["wall_s"]
    assert second["env_steps"] >= first["env_steps"]
    assert stored is not None
    assert stored.replay_path is not None
    # And with updates, under the settings of the first session.
    run, code, third = train(folder, "--resume", "run", "--updates", "250", tiny=_BARE)
    assert code == 0
    assert third["updates"] == 250
    assert third["parameters_sha256"] != first["parameters_sha256"]
    assert third["env_steps"] > first["env_steps"]
    assert (third["batch_size"], third["envs_per_sampler"]) == (first["batch_size"], first["envs_per_sampler"])
    assert third["samples_per_insert_band"] == [4.0, 4.5]
    assert 4.0 * 0.95 <= third["samples_per_insert"] <= 4.5 * 1.05, "no burst that catches up"
    # 150 updates at 4.5 samples per insert need at least that many new transitions.
    assert third["env_steps"] - second["env_steps"] >= 150 * BATCH_SIZE / (4.5 * 1.05)
    events = run.events()
    assert any("learner continues from update 100" in event for event in events)
    began = [int(event.split(" after ")[1].split()[0]) for event in events if "learning resumed after" in event]
    # While the last checkpoint is written samplers may go on to the lower bound: these steps are in no replay.
    beyond = 100 * BATCH_SIZE * (1 / 4.0 - 1 / 4.5)
    assert began[-1] >= first["env_steps"] - beyond - 3 * first["envs_per_sampler"], "replay was kept"
    assert run.state()["sessions"] == 3


def test_a_session_that_ends_at_once_keeps_what_the_run_has_reached(finished):
    folder, first = finished
    run, code, document = train(folder, "--resume", "run", "--seconds", "0.01", tiny=_BARE)
    assert code == 0
    assert document["updates"] >= first["updates"]
    assert document["eval_return_final"] is not None
    assert run.state()["updates"] == document["updates"]


def test_another_algorithm_task_or_network_is_refused(finished, capsys):
    folder, _ = finished
    for changed, words in ((("--algo", "td3"), "run.algo = td3 cannot change on resume: the run has sac"),
                           (("--env", "Pendulum-v1"), "env.id = Pendulum-v1 cannot change"),
                           (("--name", "other"), "--name other: the resumed run keeps its name, run; remove it"),
                           (("--set", "sac.activation=tanh"), "sac.activation = tanh cannot change"),
                           (("--set", "sac.n_step=3"), "sac.n_step = 3 cannot change")):  # fmt: skip
        document, told = refused(capsys, folder, "--resume", "run", "--import", "fault_envs", *changed)
        assert words in document["error"]
        assert told.count("\n") == 1


def test_what_a_run_imports_is_imported_again_only_where_the_command_says_so(finished, tmp_path, capsys):
    folder, _ = finished
    copy = shutil.copytree(folder / "runs" / "run", tmp_path / "runs" / "run")
    settings = (copy / "config.toml").read_text()
    assert 'import_module = "fault_envs"' in settings
    other_id = settings.replace("spreeze/Fault-v0", "someones_module:Fault-v0")
    for changed, words in (
        (settings.replace("fault_envs", "someones_module"), "if you trust it, add --import someones_module"),
        (
            other_id.replace('import_module = "fault_envs"', "# import_module is not set"),
            "config.toml has env.id = someones_module:Fault-v0, but run.json tells spreeze/Fault-v0",
        ),
    ):
        (copy / "config.toml").write_text(changed)
        for allowed in ((), ("--import", "fault_envs")):
            document, told = refused(capsys, tmp_path, "--resume", "run", *allowed)
            assert words in document["error"]
            assert told.count("\n") == 1
    (copy / "config.toml").write_text(settings.replace("fault_envs", "someones_module"))
    document, _ = refused(capsys, tmp_path, "--resume", "run", "--import", "someones_module")
    assert "No module named 'someones_module'" in document["error"]


def test_a_running_run_is_not_resumed(tmp_path, capsys):
    with Run(tmp_path, *FAULT) as run:
        run.until_updates(1)
        document, _ = refused(capsys, tmp_path, "--resume", "run", "--import", "fault_envs")
        assert f"run is running (process {run.process.pid}); stop it first: spreeze runs stop run" in document["error"]
        document, _ = refused(capsys, tmp_path, *FAULT, "--name", "run")
        assert "exists; choose another --name" in document["error"]
        run.until_progress()
        run.process.kill()


def test_without_a_run_there_is_nothing_to_resume(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, "--resume", "latest")
    assert "no run in" in document["error"]
