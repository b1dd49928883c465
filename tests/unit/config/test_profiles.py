"""Profiles that travel between machines: what is written, what holds elsewhere."""

import tomllib

import pytest

from spreeze.config.layers import Layer, resolve
from spreeze.config.profiles import applicable, export_path, profile_text, read_profile
from spreeze.config.schema import marked
from spreeze.errors import ConfigError

RECORD = {
    "machine_id": "2c-8g-0gpu-abc", "env": "Pendulum-v1", "measured_at": "2026-01-01 10:00", "objective": "return",
    "formula": "U * B", "reasons": {"learner.batch_size": "batch 128:\nbest score"},
}  # fmt: skip


@pytest.fixture
def profile(tmp_path):
    settings = resolve([
        Layer("profile pendulum", {"sac": {"gamma": 0.98, "hidden_sizes": [64, 64]}, "evaluation": {"episodes": 3}}),
        Layer("tuner", {"learner": {"batch_size": 128, "threads": 1}, "sampling": {"samplers": 2}}),
        Layer("user", {"env": {"id": "Pendulum-v1", "normalize_obs": True}, "run": {"name": "mine", "algo": "sac"},
                       "replay": {"demonstrations": "of/mine.npz"}, "stop": {"seconds": 5.0}}),
    ])  # fmt: skip
    path = tmp_path / "shared.toml"
    path.write_text(profile_text(settings, RECORD, '2 cores of "Some" CPU'))
    return path


def test_a_written_profile_says_unit_and_reason_of_each_value_and_holds_nothing_private(profile):
    values = tomllib.loads(profile.read_text())
    assert values.pop("about") == {
        "format": 1,
        "machine": '2 cores of "Some" CPU', "machine_id": "2c-8g-0gpu-abc", "tuned_for": "Pendulum-v1",
        "measured": "2026-01-01 10:00", "objective": "return",
    }  # fmt: skip
    assert values == {
        "run": {"algo": "sac"}, "env": {"normalize_obs": True}, "sac": {"gamma": 0.98, "hidden_sizes": [64, 64]},
        "sampling": {"samplers": 2}, "learner": {"batch_size": 128, "threads": 1},
    }  # fmt: skip
    lines = profile.read_text().splitlines()
    assert "batch_size = 128  # [transitions]; batch 128: best score" in lines
    assert all("#" in line for line in lines if "=" in line)


def test_a_profile_of_a_provisional_result_says_so(tmp_path):
    path = tmp_path / "shared.toml"
    record = RECORD | {"provisional": {"load": "other programs used\n1.9 of 2 cores"}}
    path.write_text(profile_text(resolve([]), record, "2 cores"))
    assert "# Provisional: other programs used 1.9 of 2 cores" in path.read_text().splitlines()
    assert "about" in tomllib.loads(path.read_text())


def test_defaults_of_one_algorithm_do_not_reach_another(tmp_path):
    path = tmp_path / "shared.toml"
    layers = [Layer("default of ppo", {"rollout": {"correction": "none"}}), Layer("user", {"run": {"algo": "ppo"}})]
    path.write_text(profile_text(resolve(layers), RECORD, "2 cores"))
    assert "rollout" not in tomllib.loads(path.read_text())


def test_a_mode_travels_with_its_algorithm(tmp_path):
    path = tmp_path / "shared.toml"
    chosen = Layer("profile bullet-locomotion", {"run": {"algo": "ppo", "mode": "hts"}})
    path.write_text(profile_text(resolve([chosen]), RECORD, "2 cores"))
    config = resolve([read_profile(str(path))]).config
    assert (config.run.algo, config.run.mode) == ("ppo", "hts")


def test_learners_travel_with_their_mode_to_the_same_machine_alone_and_nothing_of_the_user_s_own(tmp_path):
    path = tmp_path / "shared.toml"
    chosen = Layer("tuner", {"run": {"algo": "ppo", "mode": "gala", "learners": 4}, "rollout": {"samplers": 8}})
    own = Layer(
        "user", {"cluster": {"address": "127.0.0.1:1"}, "logging": {"sinks": ["wandb"]}, "tuning": {"leave_free": 0.5}}
    )
    path.write_text(profile_text(resolve([chosen, own]), RECORD, "2 cores"))
    layer, notes = applicable(read_profile(str(path)), "2c-8g-0gpu-abc")
    config = resolve([layer]).config
    assert (config.run.learners, config.rollout.samplers, notes) == (4, 8, [])
    assert (config.cluster.address, config.logging.sinks, config.tuning.leave_free) == (None, (), 0.0)
    other_mode = resolve([layer, Layer("user", {"run": {"mode": "hts"}})]).config
    assert (other_mode.run.mode, other_mode.run.learners) == ("hts", 1)
    elsewhere, notes = applicable(read_profile(str(path)), "another")
    assert resolve([elsewhere]).config.run.learners == 1
    assert "run.learners = 4" in " ".join(notes)


def test_on_its_own_machine_all_of_it_holds(profile):
    layer, notes = applicable(read_profile(str(profile)), "2c-8g-0gpu-abc")
    assert notes == []
    assert layer.values["sampling"] == {"samplers": 2}
    resolve([layer])


def test_elsewhere_the_machine_s_fields_are_named_and_left_out(profile):
    layer, notes = applicable(read_profile(str(profile)), "another")
    config = resolve([layer]).config
    assert (config.sampling.samplers, config.learner.batch_size, config.algorithm.gamma) == (None, 128, 0.98)
    text = " ".join(notes)
    assert '2 cores of "Some" CPU' in text
    assert "sampling.samplers = 2, learner.threads = 1" in text
    assert "batch of 128 is kept" in text


def test_a_task_s_profile_holds_everywhere():
    layer = read_profile("pendulum")
    assert applicable(layer, "any") == (layer, [])


@pytest.mark.parametrize(("name", "batch"), [("desktop", 8192), ("server", 16384), ("laptop", 2048)])
def test_the_paper_s_machines_give_their_batch_and_nothing_that_is_theirs_alone(name, batch):
    layer, notes = applicable(read_profile(f"paper-{name}"), "any")
    assert layer.values == {"learner": {"batch_size": batch}}
    assert "learner.device = cuda" in " ".join(notes)
    assert {"learner.device", "sampling.samplers"} <= set(marked("machine"))


def test_a_profile_whose_about_is_no_table_is_refused(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text("about = 3\n")
    with pytest.raises(ConfigError, match="about = 3: expected a table"):
        read_profile(str(path))
    for text in ("samplers = 4", "run = 5", "[only.ppo]\nrollout = 4"):
        path.write_text(f"{text}\n[about]\nmachine_id = 'of another'\n")
        with pytest.raises(ConfigError, match="expected a table of fields"):
            read_profile(str(path))


@pytest.mark.parametrize("name", ["../up", "", "pendulum", "a/b/c.toml"])
def test_impossible_and_taken_names_are_refused_before_anything_is_measured(name):
    with pytest.raises(ConfigError):
        export_path(name)


def test_a_path_is_taken_as_it_is(tmp_path):
    assert export_path(str(tmp_path / "x.toml")) == tmp_path / "x.toml"
