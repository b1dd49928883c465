import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import FRAMES

from spreeze.config import profiles
from spreeze.config.algorithms import rows
from spreeze.config.layers import (
    Layer,
    effect_notes,
    from_toml,
    iterate,
    parse_assignment,
    resolve,
    to_toml,
    with_algorithm,
    without_effect,
)
from spreeze.config.modes import find_mode
from spreeze.config.profiles import applicable, profile_names, reached_with, read_profile, task_profile
from spreeze.errors import ConfigError
from spreeze.types import Box, Choices, EnvSpec, GoalSpec


def test_later_layers_win_and_every_value_knows_where_it_came_from():
    merged = resolve(
        [
            Layer("profile p", {"sac": {"gamma": 0.9, "tau": 0.01}}),
            Layer("tuner", {"learner": {"batch_size": 512}}),
            Layer("user", {"sac": {"gamma": 0.95}}),
        ]
    )
    sac = merged.config.algorithm
    assert (sac.gamma, sac.tau, merged.config.learner.batch_size) == (0.95, 0.01, 512)
    assert merged.sources == {"sac.gamma": "user", "sac.tau": "profile p", "learner.batch_size": "tuner"}
    more = merged.with_layer(Layer("late", {"sac": {"tau": 0.5}}))
    assert more.config.algorithm.tau == 0.5
    assert (more.sources["sac.tau"], more.sources["sac.gamma"]) == ("late", "user")
    assert "run.seed" not in more.sources, "what nobody set has no source"


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"sacc": {"gamma": 1}}, r"^p: unknown section 'sacc'; did you mean 'sac'"),
        ({"sac": 3}, r"^p: sac = 3: expected a table"),
        ({"sac": {"gama": 1}}, r"^p: unknown setting 'sac.gama'; did you mean 'sac.gamma'"),
        ({"rollout": {"gamma": 0.9}}, r"'rollout.gamma'; 'gamma' is a setting of .*\bsac\b.*\bppo\b"),
        ({"rollout": {"learning_rate": 1}}, r"'rollout.learning_rate'; 'lr' is a setting of .*\bppo\b"),
        ({"sac": {"lr": 1}}, r"'sac.lr'; did you mean 'sac.actor_lr' or 'sac.critic_lr' or 'sac.alpha_lr'\?"),
        ({"sac": {"gamma": "x"}}, r"^p: sac.gamma = 'x': expected float, got str"),
        ({"sac": {"gamma": 2}}, r"^p: sac.gamma = 2.0: must be 0 to 1"),
        ({"learner": {"batch_size": -1}}, r"^p: learner.batch_size = -1: must be 1 to"),
        ({"learner": {"batch_size": 10**18}}, r"^p: learner.batch_size = 1000000000000000000: must be 1 to"),
        ({"run": {"algo": "ars"}}, r"^p: run.algo = 'ars': must be one of: sac, crossq, td3, ddpg"),
    ],
)  # fmt: skip
def test_bad_values_name_source_path_value_and_what_is_allowed(values, pattern):
    with pytest.raises(ConfigError, match=pattern) as caught:
        resolve([Layer("p", values)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "values", "unread"),
    [
        ({"algo": "ppo", "mode": "hts"}, {"learner": {"batch_size": 64}, "sac": {"gamma": 0.9}},
         ["--batch-size", "sac.gamma"]),
        ({"algo": "sac", "mode": "spreeze"}, {"learner": {"batch_size": 64}, "rollout": {"synchrony": "step"}},
         ["--synchrony"]),
        ({"algo": "ppo", "mode": "hts"}, {"tuning": {"objective": "updates", "give_way": True, "leave_free": 0.5}},
         ["--objective"]),
        ({"algo": "impact", "mode": "impact"}, {"tuning": {"give_way": True}}, []),
        ({"algo": "sac", "mode": "serial"}, {"sampling": {"samplers": 4, "envs_per_sampler": 2}}, ["--samplers"]),
        ({"algo": "ppo", "mode": "hts"}, {"sampling": {"samplers": 2}, "rollout": {"samplers": 2}}, []),
        ({"algo": "ppo", "mode": "hts"}, {"sampling": {"samplers": 2}}, ["--samplers"]),
        ({"algo": "sac", "mode": "spreeze"}, {"rollout": {"samplers": 2}}, ["--samplers"]),
        ({"algo": "ppo", "mode": "hts"}, {"sampling": {"memory_limit_bytes": 10**9}, "rollout": {"synchrony": "step"}},
         ["--synchrony"]),
        ({"algo": "a2c", "mode": "serial"}, {"learner": {"publish_interval_s": 9.0}, "rollout": {"correction": "none"}},
         ["learner.publish_interval_s", "--correction"]),
        ({"algo": "a2c", "mode": "serial"}, {"gala": {"mixing": "hogwild"}, "stop": {"seconds": 1.0}}, ["gala.mixing"]),
    ],
)  # fmt: skip
def test_what_a_user_sets_without_effect_is_named_as_it_was_given(chosen, values, unread):
    assert without_effect(resolve([Layer("user", {"run": chosen, **values})])) == unread
    assert without_effect(resolve([Layer("user", {"run": chosen}), Layer("profile p", values)])) == []


def test_what_only_the_tuner_or_a_cluster_reads_is_named_with_the_flag_that_is_missing():
    values = {
        "run": {"algo": "sac", "mode": "serial"},
        "cluster": {"samplers": 2},
        "tuning": {"objective": "updates", "leave_free": 0.5},
        "sampling": {"samplers": 3},
    }
    settings = resolve([Layer("user", values)])
    assert effect_notes(settings, tuned=False) == [
        "no effect with --algo sac in --mode serial: --leave-free, --samplers", "no effect without --auto: --objective",
        "no effect without --cluster: --host-samplers"]  # fmt: skip
    assert effect_notes(settings, tuned=True)[1] == "no effect without --cluster: --host-samplers"
    on_policy = resolve([Layer("user", {"run": {"algo": "ppo", "mode": "hts"}, "tuning": {"objective": "updates"}})])
    assert effect_notes(on_policy, tuned=False) == ["no effect with --algo ppo in --mode hts: --objective"]
    by_set = resolve([Layer("user", {"run": {"mode": "spreeze"}, "tuning": {"budget_s": 5.0}})])
    assert effect_notes(by_set, tuned=False) == ["no effect without --auto: tuning.budget_s"]


def test_a_value_set_twice_is_blamed_on_the_layer_that_set_it_last():
    with pytest.raises(ConfigError, match=r"^user: sac.gamma"):
        resolve([Layer("profile p", {"sac": {"gamma": 0.9}}), Layer("user", {"sac": {"gamma": 7}})])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("sac.gamma=0.98", {"sac": {"gamma": 0.98}}),
        ("sac.hidden_sizes=[64, 64]", {"sac": {"hidden_sizes": [64, 64]}}),
        ("env.id=Pendulum-v1", {"env": {"id": "Pendulum-v1"}}),
        ('env.id="a=b"', {"env": {"id": "a=b"}}),
        ("replay.save=true", {"replay": {"save": True}}),
        (" sac.gamma = 1 ", {"sac": {"gamma": 1}}),
        ("run.name=", {"run": {"name": ""}}),
        ("replay.save=False", {"replay": {"save": False}}),
        ("stop.seconds=None", {"stop": {"seconds": None}}),
        ("sac.hidden_sizes=(64, 64)", {"sac": {"hidden_sizes": (64, 64)}}),
        ("gala.mixing=none", {"gala": {"mixing": "none"}}),
        ("run.name='a b'", {"run": {"name": "a b"}}),
    ],
)
def test_assignments_are_values_of_json_or_python_or_bare_text(text, values):
    assert parse_assignment(text) == values


@pytest.mark.parametrize("text", ["env.normalize_obs=off", "env.normalize_obs=TRUE", "learner.compile=[true"])
def test_a_switch_takes_no_text(text):
    with pytest.raises(ConfigError, match="expected bool, True or False, got str"):
        resolve([Layer("user", parse_assignment(text))])


@pytest.mark.parametrize("text", ["", "x", "gamma=1", "sac.=1", ".gamma=1", "sac.gamma", "=1"])
def test_malformed_assignments_are_refused(text):
    with pytest.raises(ConfigError, match=r"expected section.field=value"):
        parse_assignment(text)


@given(st.text(max_size=60).filter(lambda t: "\n" not in t))
def test_any_assignment_gives_values_or_one_error(text):
    with contextlib.suppress(ConfigError):
        resolve([Layer("user", parse_assignment(text))])


def test_what_is_written_is_read_back_the_same():
    made = resolve(
        [
            Layer(
                "user",
                {
                    "run": {"name": "x", "seed": 7},
                    "sac": {"hidden_sizes": [8], "gamma": 1e-7, "tune_alpha": False},
                    "env": {"id": 'q"\\\u00e4\t'},
                    "stop": {"target_return": -200.0},
                },
            )
        ]
    )
    text = to_toml(made)
    assert iterate(from_toml(text, "again").config) == iterate(made.config)
    assert "seed = 7  # user" in text
    assert "# seconds is not set  # default" in text


@given(st.text(max_size=100))
def test_any_text_survives_the_toml_file(text):
    made = resolve([Layer("user", {"env": {"id": text}})])
    assert from_toml(to_toml(made), "again").config.env.id == text


def _profile(tmp_path, text):
    path = tmp_path / "p.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[sac\n", "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        ("[env]\nimport_module = 'os'", r"env.import_module may only be set on the command line"),
        ("[run]\nruns_dir = '/'", r"run.runs_dir may only be set on the command line"),
        ("[run]\nname = 'x'", r"run.name may only be set on the command line"),
        ("[about]\nkeep = ['sac.gamma']\n[sac]\ntau = 0.5", "about.keep = .*expected a list of settings in this"),
        ("[about]\nkeep = 3\n[sac]\ntau = 0.5", "about.keep = 3: expected a list"),
        ("#" * 1_000_001, "at most 1000000"),
        ("a: &a [x]\nb: *a", "not valid TOML"),
    ],
    ids=["unfinished", "deep", "bytes", "import", "runs_dir", "name", "keep", "keep number", "huge", "yaml"],
)
def test_hostile_profiles_are_refused_at_once(tmp_path, text, pattern):
    with pytest.raises(ConfigError, match=pattern):
        read_profile(_profile(tmp_path, text))


def test_a_profile_is_a_layer_that_names_itself(tmp_path):
    layer = read_profile(_profile(tmp_path, "[about]\nenvs = ['A-v0']\n[sac]\ngamma = 0.5"))
    assert layer == Layer("profile p", {"sac": {"gamma": 0.5}}, about={"envs": ["A-v0"]})


def test_a_profile_keeps_settings_from_the_tuner_unless_the_user_says_otherwise(tmp_path):
    kept, sac, learner = "keep = ['learner.batch_size', 'sac.tau']", "tau = 0.5\ngamma = 0.5", "batch_size = 64"
    layer = read_profile(_profile(tmp_path, f"[about]\n{kept}\n[sac]\n{sac}\n[learner]\n{learner}"))
    assert resolve([layer]).kept == {"learner.batch_size", "sac.tau"}
    asked = resolve([layer, Layer("user", {"learner": {"batch_size": 32}})])
    assert asked.kept == {"sac.tau"}
    assert asked.with_layer(Layer("more", {"sac": {"gamma": 0.9}})).kept == {"sac.tau"}


def test_a_damaged_profile_is_no_task_s_and_none_means_no_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "PROFILE_DIR", tmp_path)
    for name, text in zip("abcd", ("about = [", "about = 3", "[about]\nenvs = 3", "[about]\nenvs = [3]"), strict=True):
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "z.toml").write_text("[about]\nenvs = ['E-*']\n[sac]\ngamma = 0.5")
    assert profiles.task_profile("F-v1") is None
    assert profiles.chosen_profile(None, "E-v1").values == {"sac": {"gamma": 0.5}}
    assert profiles.chosen_profile("none", "E-v1") is None
    with pytest.raises(ConfigError, match="--profile none is reserved for no profile"):
        profiles.export_path("none")


def test_an_unknown_profile_lists_the_known(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "PROFILE_DIR", tmp_path)
    (tmp_path / "walker.toml").write_text("[about]\nenvs = ['W-v0']\n[sac]\ngamma = 0.5")
    with pytest.raises(ConfigError, match="no profile 'walkr'; did you mean 'walker'"):
        read_profile("walkr")
    with pytest.raises(ConfigError, match=r"name '\.\./walker'"):
        read_profile("../walker")
    assert task_profile("W-v0") == read_profile("walker")
    assert task_profile("V-v0") is None


@pytest.mark.parametrize("name", profile_names())
def test_the_profiles_that_come_along_are_valid_and_found_by_their_task(name):
    layer = read_profile(name)
    for algo in ("sac", *layer.of_algorithm):
        resolve(layer.for_algorithm(algo))
    path = profiles.PROFILE_DIR / f"{name}.toml"
    about = profiles.tomllib.loads(path.read_text())["about"]
    assert {"envs", "machine_id", "method"} & about.keys(), "found by its task, or an example of a machine or method"
    for env_id in about.get("envs", []):
        assert task_profile(env_id) is not None
    for env_id in [*about.get("envs", []), *([about["tuned_for"]] if "tuned_for" in about else [])]:
        reached = reached_with(layer, env_id)
        assert reached is not None, f"{env_id}: what it reached, or that it was not measured"
        assert "seed" in reached or reached.startswith("not measured"), "over how many seeds"


def test_a_profile_may_have_settings_for_one_of_its_tasks_alone(tmp_path):
    path = _profile(
        tmp_path, '[sac]\ngamma = 0.5\ntau = 0.1\n[only."A-v0".sac]\ngamma = 0.9\n[only."A-v0".td3]\ntau = 1.0'
    )
    assert read_profile(path).values == {"sac": {"gamma": 0.5, "tau": 0.1}} == read_profile(path, "B-v0").values
    assert read_profile(path, "A-v0").values == {"sac": {"gamma": 0.9, "tau": 0.1}, "td3": {"tau": 1.0}}
    with pytest.raises(ConfigError, match=r"only = 3: expected tables such as \[only.\"ENV\".sac\]"):
        read_profile(_profile(tmp_path, "only = 3"))
    with pytest.raises(ConfigError, match=r"env.args may only be set on the command line"):
        read_profile(_profile(tmp_path, '[only."A-v0".env]\nargs = ["a=1"]'), "A-v0")


@pytest.mark.parametrize(
    ("algo", "asked", "expected"),
    [("a2c", {}, (8, "profile p")), ("ppo", {}, (32, "profile p")), ("a2c", {"sync_interval": 5}, (5, "user"))],
)
def test_a_profile_may_have_settings_for_one_algorithm_alone(tmp_path, algo, asked, expected):
    path = tmp_path / "p.toml"
    path.write_text("[rollout]\nsync_interval = 32\n[only.a2c.rollout]\nsync_interval = 8\n")
    spec = EnvSpec(
        env_id="T-v0", import_module=None, obs_dim=4, action=Choices((2,)), max_episode_steps=10, reward_threshold=None
    )
    layers = [read_profile(str(path)), Layer("user", {"run": {"algo": algo, "mode": "hts"}, "rollout": asked})]
    _, settings, _ = with_algorithm(layers, spec)
    assert (settings.config.rollout.sync_interval, settings.sources["rollout.sync_interval"]) == expected
    path.write_text('[only.a2c.env]\nargs = ["a=1"]\n')
    with pytest.raises(ConfigError, match=r"env.args may only be set on the command line"):
        read_profile(str(path))


@pytest.mark.parametrize(
    ("algo", "step_us", "asked", "expected"),
    [
        ("dqn", None, {}, (5000, "default")),
        ("dqn", 4_000.0, {}, (5000, "default")),
        ("dqn", 4_100.0, {}, (2000, "slow environment")),
        ("dqn", 90_000.0, {}, (200, "slow environment")),
        ("dqn", 4e6, {}, (200, "slow environment")),
        ("dqn", 90_000.0, {"replay": {"learning_starts": 3000}}, (3000, "user")),
        ("ppo", 9_000.0, {}, (2048, "default")),
        ("ppo", 30_000.0, {}, (512, "slow environment")),
        ("ppo", 4e6, {}, (256, "slow environment")),
        ("a2c", 4e6, {}, (128, "default of a2c")),
    ],
)
def test_the_first_update_of_a_slow_environment_comes_after_fewer_env_steps(algo, step_us, asked, expected):
    spec = EnvSpec(
        env_id="T-v0", import_module=None, obs_dim=4, action=Choices((2,)), max_episode_steps=10, reward_threshold=None
    )
    mode = "spreeze" if algo == "dqn" else "hts"
    user = Layer("user", {"run": {"algo": algo, "mode": mode}} | asked)
    settings = with_algorithm([user], spec, step_us).settings
    key = "replay.learning_starts" if algo == "dqn" else "rollout.size"
    section, name = key.split(".")
    assert (getattr(getattr(settings.config, section), name), settings.source_of(key)) == expected


@pytest.mark.parametrize(
    ("algo", "limit", "asked", "expected"),
    [
        ("ppo", 1000, {}, 0.997),
        ("a2c", 1600, {}, 0.998125),
        ("ppo", 300_000, {}, 0.99999),
        ("ppo", 999, {}, 0.99),
        ("ppo", None, {}, 0.99),
        ("dqn", 1000, {}, 0.99),
        ("ppo", 1000, {"ppo": {"gamma": 0.9}}, 0.9),
    ],
)
def test_the_discount_of_on_policy_algorithms_follows_a_long_time_limit_unless_it_is_set(algo, limit, asked, expected):
    spec = EnvSpec(
        env_id="T-v0",
        import_module=None,
        obs_dim=4,
        action=Choices((2,)),
        max_episode_steps=limit,
        reward_threshold=None,
    )
    layers = [Layer("user", {"run": {"algo": algo}, **asked})]
    _, settings, _ = with_algorithm(layers, spec)
    assert settings.config.algo_settings.gamma == expected


@pytest.mark.parametrize(
    ("algo", "asked", "sparse", "expected"),
    [
        ("sac", {}, True, ("future", True)),
        ("sac", {}, False, ("off", True)),
        ("ddpg", {}, True, ("future", True)),
        ("sac", {"replay": {"her": "off"}}, True, ("off", True)),
        ("sac", {"sac": {"recurrent": "lstm"}}, True, ("off", True)),
        ("sac", {"replay": {"capacity": 20_000, "learning_starts": 5_000}}, True, ("off", True)),
        ("sac", {"run": {"mode": "device"}}, True, ("off", True)),
        ("ppo", {}, True, ("off", False)),
    ],
)
def test_hindsight_is_the_default_where_a_reward_comes_only_at_a_goal(algo, asked, sparse, expected):
    goals = GoalSpec(achieved=(0, 2), desired=(2, 4), computes_reward=True, sparse=sparse)
    spec = EnvSpec(env_id="T-v0", import_module=None, obs_dim=7, action=Box((-1.0,), (1.0,)), max_episode_steps=50,
                   reward_threshold=None, goals=goals)  # fmt: skip
    layers = [Layer("user", {**asked, "run": {"algo": algo, **asked.get("run", {})}})]
    _, settings, _ = with_algorithm(layers, spec)
    assert (settings.config.replay.her, settings.config.env.normalize_obs) == expected


@pytest.mark.parametrize(
    ("algo", "asked", "action", "expected"),
    [
        ("sac", {}, Box((-1.0,), (1.0,)), True),
        ("sac", {"env": {"normalize_obs": False}}, Box((-1.0,), (1.0,)), False),
        ("sac", {}, Choices((2,)), False),
        ("td3", {}, Box((-1.0,), (1.0,)), True),
        ("ddpg", {}, Box((-1.0,), (1.0,)), False),
        ("ddpg", {"replay": {"her": "future"}}, Box((-1.0,), (1.0,)), True),
        ("dqn", {"replay": {"her": "final"}, "env": {"normalize_obs": False}}, Choices((2,)), False),
        ("ppo", {"replay": {"her": "future"}}, Choices((2,)), False),
    ],
)
def test_sac_td3_and_hindsight_normalize_observations_unless_it_is_set(algo, asked, action, expected):
    spec = EnvSpec(
        env_id="T-v0", import_module=None, obs_dim=7, action=action, max_episode_steps=50, reward_threshold=None
    )
    layers = [Layer("user", {"run": {"algo": algo}, **asked})]
    _, settings, _ = with_algorithm(layers, spec)
    assert settings.config.env.normalize_obs is expected


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, ("ppo", "hts")),
        ({"algo": "ppo"}, ("ppo", "hts")),
        ({"mode": "hts"}, ("ppo", "hts")),
        ({"algo": "td3"}, ("td3", "spreeze")),
        ({"mode": "serial"}, ("sac", "serial")),
        ({"algo": "a2c", "mode": "hts"}, ("a2c", "hts")),
    ],
)
def test_a_profile_takes_algorithm_and_mode_together_or_neither(tmp_path, user, expected):
    spec = EnvSpec(
        env_id="T-v0",
        import_module=None,
        obs_dim=4,
        action=Box((-1.0,), (1.0,)),
        max_episode_steps=10,
        reward_threshold=None,
    )
    path = _profile(tmp_path, '[only."T-v0".run]\nalgo = "ppo"\nmode = "hts"\n')
    layers = [read_profile(path, "T-v0"), Layer("user", {"run": user})]
    _, settings, reason = with_algorithm(layers, spec)
    assert (settings.config.run.algo, settings.config.run.mode) == expected
    assert ("sets them for this environment" in (reason or "")) is (expected == ("ppo", "hts"))


def test_settings_for_one_algorithm_that_hold_on_their_machine_alone_are_left_out_elsewhere(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text("[about]\nmachine_id = 'there'\n[only.a2c.rollout]\nsync_interval = 8\n[only.a2c.a2c]\nlr = 0.1\n")
    layer, notes = applicable(read_profile(str(path)), "here")
    assert layer.of_algorithm == {"a2c": {"a2c": {"lr": 0.1}}}
    assert any("rollout.sync_interval = 8" in note for note in notes)


def test_what_a_profile_reached_is_told_by_task_or_pattern_and_as_plain_text(tmp_path):
    layer = read_profile(_profile(tmp_path, '[about]\nreached."A-v0" = "a\\u001bb"\nreached."A*" = "c"'))
    assert [reached_with(layer, env_id) for env_id in ("A-v0", "A-v1", "B-v0")] == ["a b", "c", None]
    assert reached_with(read_profile(_profile(tmp_path, "[about]\nreached = 3")), "A-v0") is None


@pytest.mark.parametrize(
    ("algo", "asked", "band"),
    [
        ("td3", {}, (16.0, 512.0)),
        ("sac", {}, (8.0, 512.0)),
        ("td3", {"samples_per_insert_max": 4.0, "samples_per_insert_min": 1.0}, (1.0, 4.0)),
        ("td3", {"samples_per_insert_max": 9.0}, (8.0, 9.0)),
    ],
)
def test_the_band_of_samples_per_insert_is_the_algorithm_s_own_unless_either_bound_is_set(algo, asked, band):
    spec = EnvSpec(
        env_id="T-v0",
        import_module=None,
        obs_dim=4,
        action=Box((-1.0,), (1.0,)),
        max_episode_steps=10,
        reward_threshold=None,
    )
    layers = [Layer("user", {"run": {"algo": algo}, "replay": dict(asked)})]
    _, settings, _ = with_algorithm(layers, spec)
    replay = settings.config.replay
    assert (replay.samples_per_insert_min, replay.samples_per_insert_max) == band
    source = settings.sources.get("replay.samples_per_insert_min")
    assert source == ("default of td3" if algo == "td3" and not asked else "user" if len(asked) == 2 else None)


DISCRETE = EnvSpec(env_id="T-v0", import_module=None, obs_dim=4, action=Choices((2,)),
                   max_episode_steps=None, reward_threshold=None)  # fmt: skip


@pytest.mark.parametrize(("asked", "expected"), [
    ({"algo": "ppo"}, "hts"), ({"algo": "a2c"}, "hts"), ({"algo": "impact"}, "impact"), ({"algo": "impala"}, "impact"),
    ({"algo": "appo"}, "impact"), ({"algo": "sac"}, "spreeze"), ({"algo": "qmix"}, "spreeze"), ({}, "spreeze"),
    ({"algo": "ppo", "mode": "serial"}, "serial"), ({"algo": "a2c", "mode": "gala"}, "gala"),
])  # fmt: skip
def test_the_mode_follows_the_algorithm_unless_one_is_asked_for(asked, expected):
    assert resolve([Layer("user", {"run": asked})]).config.run.mode == expected


def test_the_mode_of_every_algorithm_that_comes_with_spreeze_runs_it():
    for row in rows().values():
        assert row.runs_in(find_mode(resolve([Layer("user", {"run": {"algo": row.name}})]).config.run.mode)), row.name


@pytest.mark.parametrize(
    ("mode", "expected"), [("hts", "ppo"), ("gala", "ppo"), ("impact", "impact"), ("spreeze", "dqn")]
)
def test_a_mode_alone_takes_the_first_algorithm_that_it_runs_for_the_task(mode, expected):
    layers = [Layer("user", {"run": {"mode": mode}})]
    assert with_algorithm(layers, DISCRETE).settings.config.run.algo == expected


def test_only_a_mode_that_was_asked_for_can_be_wrong():
    layers = [Layer("user", {"run": {"mode": "spreeze", "algo": "ppo"}})]
    with pytest.raises(ConfigError, match="which mode spreeze does not provide; use --mode serial, --mode hts"):
        with_algorithm(layers, DISCRETE)


def test_a_setting_that_does_not_fit_the_task_is_named_with_its_section_before_a_run_begins():
    images = dataclasses.replace(DISCRETE, frames=FRAMES)
    with pytest.raises(ConfigError, match=r"^dqn\.layer_norm = True: networks for images"):
        with_algorithm([Layer("user", {"run": {"algo": "dqn"}, "dqn": {"layer_norm": True}})], images)
    with pytest.raises(ConfigError, match=r"^user: crossq\.activation = tanh: CrossQ has"):
        resolve([Layer("user", {"crossq": {"activation": "tanh"}})])
