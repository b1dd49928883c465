"""The Start form: what the tables of modes, algorithms and settings allow together, and that it trains."""

import sys
from pathlib import Path

import pytest
import test_algorithm_extension as made_up
from harness import PATIENCE_S, poll
from test_mode_extension import MODULE, NAME, SOURCE
from test_pages import commands, open_page
from test_pages import components as components_told

pytest.importorskip("streamlit")

from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithms import ALGORITHMS, ON_POLICY, find_row, implied_mode
from spreeze.config.layers import Layer, resolve
from spreeze.config.modes import DECLARED, find_mode
from spreeze.config.schema import FLAG_OF, active_settings, field_of
from spreeze.dashboard import components, control, live_api, run_data
from spreeze.dashboard.start import known_task
from spreeze.errors import ConfigError
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.table import TABLE
from spreeze.run_directory import list_runs, read_run, state_of
from spreeze.tuner.knobs import tunable_settings

TAKEN = [(mode.name, algo) for mode in DECLARED for algo in ALGORITHMS if find_row(algo).runs_in(mode)
         and not (mode.on_device and algo in ("dqn", "qmix"))]  # fmt: skip
KINDS = [(mode.name, next(algo for taken, algo in TAKEN if taken == mode.name and (algo in ON_POLICY) is on_policy))
         for mode in DECLARED for on_policy in (False, True) if mode.data_flow(on_policy=on_policy)]  # fmt: skip

FEW = [("spreeze", "sac"), ("hts", "ppo"), ("device", "sac")]
"""Learns from replay, from rollouts, and on a device."""

OWN_ENVIRONMENT = """
import pathlib
import gymnasium

pathlib.Path(__file__).with_name("imported").touch()
gymnasium.register("Own-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=50)
"""
METRIC = """
from spreeze.metrics.table import TABLE, Chart, Metric

TABLE.extend([Metric("bonus", "reward", "added to every reward", "algorithm",
                     chart=Chart("bonus", "Made-up bonus", "Learning"))])
"""


TASKS = {"device": "vector:DevicePendulum-v0", "dqn": "CartPole-v1", "qmix": "mpe2:simple_spread_v3"}
"""Mode or algorithm -> a task that it fits; Pendulum for the others."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "runs"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module with a made-up mode that the page was started with."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(control.IMPORT, MODULE)
    yield MODULE
    sys.modules.pop(MODULE, None)


@pytest.fixture
def engine(request, monkeypatch):
    """For mode ``device``: the page was started with a module whose tasks an engine steps."""
    if request.node.callspec.params["mode"] == "device":
        monkeypatch.setenv(control.IMPORT, "device_envs")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
        monkeypatch.setattr("spreeze.dashboard.start.tasks", lambda: ["Pendulum-v1", TASKS["device"]])


def chosen(mode, algo, *, auto=False):
    """The Live page with a mode and an algorithm chosen."""
    if algo == "qmix":
        pytest.importorskip("mpe2")
    page = open_page("live")
    page.selectbox(key="start_env").select(TASKS.get(mode) or TASKS.get(algo, "Pendulum-v1")).run()
    page.selectbox(key="start_algo").select(algo).run()
    page.selectbox(key="start_mode").select(mode).run()  # it decides whether the switch can be used
    if not page.toggle(key="start_auto").disabled:
        page.toggle(key="start_auto").set_value(auto).run()
    assert not page.exception, [error.message for error in page.exception]
    return page


def asked(page):
    """The values that the shown command asks for, as the command line reads them."""
    (line,) = (line for line in commands(page) if "spreeze.train" in line)
    import shlex

    return user_values(build_parser().parse_args(shlex.split(line)[3:]))


@pytest.mark.parametrize(
    ("env_id", "unfit", "first"),
    [("Pendulum-v1", ["dqn", "qmix"], "sac"), ("CartPole-v1", ["crossq", "td3", "ddpg", "qmix"], "dqn")],
)
def test_only_what_fits_the_task_is_offered_and_the_rest_is_grey_with_its_reason(env_id, unfit, first):
    page = open_page("live")
    page.selectbox(key="start_env").select(env_id).run()
    algorithms = page.selectbox(key="start_algo").options
    assert set(algorithms) == set(ALGORITHMS) - set(unfit)
    assert algorithms[0] == first
    grey = " ".join(caption.value for caption in page.caption)
    assert f"{', '.join(unfit)}." in grey
    assert "action" in grey
    assert "Mode device is not for this environment: environments on a device come from an engine" in grey
    for algo in (first, "ppo", "impact"):
        page.selectbox(key="start_algo").select(algo).run()
        taking = [mode.name for mode in DECLARED if find_row(algo).runs_in(mode) and not mode.on_device]
        options = page.selectbox(key="start_mode").options
        assert (options[0], sorted(options)) == (implied_mode(find_row(algo)), sorted(taking))
        assert any(
            components.plain(find_mode(page.selectbox(key="start_mode").value).doc) in caption.value
            for caption in page.caption
        )


def test_a_task_that_cannot_be_made_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr("spreeze.dashboard.start.tasks", lambda: ["Pendulum-v1", "NoSuchTask-v0"])
    page = open_page("live")
    page.selectbox(key="start_env").select("NoSuchTask-v0").run()
    assert "NoSuchTask" in page.warning[0].value
    assert page.button(key="start").disabled
    page.selectbox(key="start_env").select("Pendulum-v1").run()
    assert not page.button(key="start").disabled


def test_profile_arguments_and_what_the_machine_keeps_are_in_the_command():
    page = chosen("spreeze", "sac", auto=True)
    assert page.selectbox(key="start_profile").options[0] == "the task's own (pendulum)"
    page.selectbox(key="start_profile").select("pendulum")
    page.text_area(key="start_args").set_value("g=9.0\n")
    page.checkbox(key="start_fresh").check()
    page.selectbox(key="start_tuning.objective").select("updates")
    page.number_input(key="start_tuning.leave_free").set_value(0.5).run()
    values = asked(page)
    assert values["tuning"] == {"objective": "updates", "leave_free": 0.5}
    assert values["env"]["args"] == ("g=9.0",)
    (line,) = (line for line in commands(page) if "spreeze.train" in line)
    assert "--profile pendulum --mode spreeze --algo sac" in line  # else the profile's mode would hold
    assert "--auto --fresh" in line


@pytest.mark.warm
def test_a_module_of_the_users_is_tried_and_offered_only_after_it_was_trusted(folder, tmp_path, monkeypatch):
    (tmp_path / "own_env.py").write_text(OWN_ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("spreeze.dashboard.start.tasks", lambda: ["Pendulum-v1", "Own-v0"])
    page = open_page("live")
    page.text_input(key="start_module").set_value("own_env").run()
    assert not (tmp_path / "imported").exists()
    assert "start" not in [button.key for button in page.button]
    page.checkbox(key="start_trust_own_env").check().run()
    assert (tmp_path / "imported").exists()
    assert page.selectbox(key="start_algo").options[:5] == ["sac", "crossq", "td3", "ddpg", "ppo"]
    assert asked(page)["env"] == {"id": "Own-v0", "import_module": "own_env"}
    page.button(key="examine").click().run()
    assert any("env speed" in text.value for text in page.markdown), [error.value for error in page.error]
    assert "own_env" not in sys.modules, "the page's own process imports nothing"


@pytest.mark.warm
def test_the_ids_of_a_module_are_offered_and_the_first_is_taken_once_it_is_trusted(folder, tmp_path, monkeypatch):
    (tmp_path / "own_ids.py").write_text(OWN_ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    page = open_page("live")
    page.text_input(key="start_module").set_value("own_ids").run()
    assert "Own-v0" not in page.selectbox(key="start_env").options
    page.checkbox(key="start_trust_own_ids").check().run()
    assert page.selectbox(key="start_env").options[:2] == ["Own-v0", "Pendulum-v1"]
    assert asked(page)["env"] == {"id": "Own-v0", "import_module": "own_ids"}
    assert "own_ids" not in sys.modules, "the page's own process imports nothing"


@pytest.mark.warm
def test_the_algorithm_follows_the_actions_of_a_module_once_it_is_trusted(folder, tmp_path, monkeypatch):
    (tmp_path / "own_cart.py").write_text(OWN_ENVIRONMENT.replace("PendulumEnv", "CartPoleEnv"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("spreeze.dashboard.start.tasks", lambda: ["Pendulum-v1", "Own-v0"])
    page = open_page("live")
    assert page.selectbox(key="start_algo").value == "sac", "nothing is known of the task"
    page.text_input(key="start_module").set_value("own_cart").run()
    page.checkbox(key="start_trust_own_cart").check().run()
    assert page.selectbox(key="start_algo").value == "dqn"


@pytest.mark.parametrize(("mode", "algo"), [
    pair if pair in FEW else pytest.param(*pair, marks=pytest.mark.slow) for pair in TAKEN
])  # fmt: skip
@pytest.mark.usefixtures("engine")
def test_each_pair_shows_its_knobs_and_a_command_that_the_command_line_takes(mode, algo):
    page = chosen(mode, algo)
    values = asked(page)
    assert (values["run"].get("mode", DECLARED[0].name), values["run"]["algo"]) == (mode, algo)
    config = resolve([Layer("user", values)]).config
    knobs = tunable_settings(config)
    others = [key for key in active_settings(config) if key not in knobs]
    shown = {widget.key for kind in (page.number_input, page.selectbox, page.text_input) for widget in kind}
    assert {f"start_{key}" for key in knobs} <= shown
    others = [key for key in others if f"start_{key}" not in shown]
    assert [option.partition(":")[0] for option in page.multiselect(key="start_more").options] == others
    assert all(key.split(".")[0] not in ALGORITHMS or key.startswith(f"{algo}.") for key in (*knobs, *others))


def test_autotune_is_off_where_the_mode_leaves_the_tuner_nothing():
    assert open_page("live").toggle(key="start_auto").disabled is False
    page = chosen("serial", "ppo", auto=True)
    assert page.toggle(key="start_auto").disabled
    assert not any("--auto" in line for line in commands(page))


def test_a_mode_that_does_not_run_the_next_algorithm_gives_way_to_one_that_does():
    page = chosen("spreeze", "td3")
    page.selectbox(key="start_algo").select("ppo").run()
    assert find_row("ppo").runs_in(find_mode(page.selectbox(key="start_mode").value))
    assert not page.exception


def test_the_form_takes_algorithm_and_mode_of_a_profile_that_names_them_until_the_user_does():
    page = open_page("live")
    boxes = [page.selectbox(key=f"start_{name}") for name in ("algo", "mode")]

    def shown(task):
        page.selectbox(key="start_env").select(task).run()
        assert not page.exception
        return [page.selectbox(key=box.key).value for box in boxes]

    def tells():
        return any("are what profile bullet-locomotion sets" in one.value for one in page.caption)

    assert shown("HalfCheetahBulletEnv-v0") == ["ppo", "hts"]
    assert tells()
    assert shown("Pendulum-v1") == ["sac", "spreeze"]
    assert not tells()
    assert shown("HalfCheetahBulletEnv-v0") == ["ppo", "hts"]
    page.selectbox(key="start_algo").select("td3").run()
    page.number_input(key="start_seed").set_value(3).run()
    assert page.selectbox(key="start_algo").value == "td3"
    assert not tells()


def test_another_task_brings_its_own_default_algorithm_and_loses_the_target_of_the_last_one():
    page = open_page("live")
    assert page.selectbox(key="start_algo").value == "sac"
    page.number_input(key="start_stop.target_return").set_value(1500.0).run()
    page.selectbox(key="start_env").select("CartPole-v1").run()
    assert [page.selectbox(key=f"start_{name}").value for name in ("algo", "mode")] == ["dqn", "spreeze"]
    assert page.number_input(key="start_stop.target_return").value is None
    page.selectbox(key="start_algo").select("ppo").run()
    assert page.selectbox(key="start_mode").value == "hts"
    page.selectbox(key="start_env").select("Pendulum-v1").run()
    assert [page.selectbox(key=f"start_{name}").value for name in ("algo", "mode")] == ["ppo", "hts"], "it was chosen"


def test_the_limits_of_a_run_that_was_started_do_not_end_one_of_another_task(monkeypatch):
    monkeypatch.setattr("spreeze.dashboard.control.start", lambda request, folder: None)
    page = open_page("live")
    page.number_input(key="start_stop.seconds").set_value(30.0).run()
    assert any("(seconds 30)" in one.value for one in page.caption)
    page.selectbox(key="start_env").select("CartPole-v1").run()
    assert any("(seconds 30)" in one.value for one in page.caption), "nothing was started with it"
    page.button(key="start").click().run()
    page.session_state["start_open"] = True
    page.run()
    assert page.number_input(key="start_stop.seconds").value == 30.0
    page.selectbox(key="start_env").select("Pendulum-v1").run()
    assert page.number_input(key="start_stop.seconds").value is None


def test_the_form_is_as_it_was_after_a_visit_to_another_page():
    page = open_page("live")
    page.selectbox(key="start_env").select("CartPole-v1").run()
    page.selectbox(key="start_algo").select("ppo").run()
    page.number_input(key="start_stop.seconds").set_value(30.0).run()
    page.session_state["page"] = "runs"
    for name in ("runs", "live"):
        page.session_state["page"] = name
        page.run()
    assert page.selectbox(key="start_algo").value == "ppo"
    assert page.number_input(key="start_stop.seconds").value == 30.0


def test_fields_stay_filled_in_while_another_field_has_to_be_mended(monkeypatch):
    monkeypatch.setattr("spreeze.dashboard.start.tasks", lambda: ["os:Pendulum-v1", "Pendulum-v1"])
    page = chosen("serial", "td3")
    page.number_input(key="start_seed").set_value(7)
    page.number_input(key="start_stop.seconds").set_value(30.0)
    page.multiselect(key="start_more").set_value(["td3.tau"]).run()
    page.number_input(key="start_td3.tau").set_value(0.5).run()
    before = asked(page)
    for kind, key, bad, good in (
        ("text_input", "start_module", "own_env", ""),
        ("text_area", "start_args", "malformed", ""),
        ("selectbox", "start_env", "os:Pendulum-v1", "Pendulum-v1"),
    ):
        for _ in range(2):
            getattr(page, kind)(key=key).set_value(bad).run()
            assert not page.exception
            assert "start" not in [button.key for button in page.button]
        getattr(page, kind)(key=key).set_value(good).run()
        assert asked(page) == before
    assert (before["run"]["algo"], before["run"]["seed"], before["stop"]["seconds"]) == ("td3", 7, 30.0)
    assert before["td3"] == {"tau": 0.5}


def test_settings_of_each_kind_that_are_filled_in_are_in_the_command_and_others_are_not():
    page = chosen("hts", "ppo")
    page.number_input(key="start_rollout.sync_interval").set_value(16)
    page.number_input(key="start_stop.seconds").set_value(30.0)
    keys = ["ppo.lr", "ppo.clip_value", "ppo.hidden_sizes", "rollout.correction", "visualizer.enabled"]
    page.multiselect(key="start_more").set_value(keys).run()
    page.number_input(key="start_ppo.lr").set_value(1e-3)
    page.selectbox(key="start_ppo.clip_value").select(True)
    page.text_input(key="start_ppo.hidden_sizes").input("32, 16")
    page.selectbox(key="start_rollout.correction").select("truncated-is")
    page.selectbox(key="start_visualizer.enabled").select(False)
    page.run()
    values = asked(page)
    assert values["rollout"] == {"sync_interval": 16, "correction": "truncated-is"}
    assert values["ppo"] == {"lr": 1e-3, "clip_value": True, "hidden_sizes": [32, 16]}
    assert (values["stop"], values["visualizer"]) == ({"seconds": 30.0}, {"enabled": False})
    assert "learner" not in values


def test_a_setting_out_of_its_bounds_is_told_in_one_line_and_nothing_starts():
    page = chosen("spreeze", "sac")
    page.number_input(key="start_replay.capacity").set_value(10).run()
    assert "learner.batch_size = 128 is larger than replay.capacity = 10" in page.error[0].value.replace("\\", "")
    assert "start" not in [button.key for button in page.button]


def test_every_setting_has_a_title_with_its_unit_and_a_flag_that_names_it():
    assert components.title("learner.batch_size") == "Learner: batch size [transitions]"
    assert components.title("ppo.lr") == "PPO: lr"
    assert all(field_of(key).metadata["flag"] == flag for key, flag in FLAG_OF.items())


def test_a_request_that_no_mode_runs_is_rejected_before_anything_starts():
    with pytest.raises(ConfigError, match="--mode hts does not run --algo sac"):
        control.Request(env_id="Pendulum-v1", mode="hts", algo="sac")
    with pytest.raises(ConfigError, match="has nothing to tune"):
        control.Request(env_id="Pendulum-v1", mode="serial", algo="ppo")
    with pytest.raises(ConfigError, match="must be one of: spreeze, serial, hts"):
        control.Request(env_id="Pendulum-v1", mode=NAME)


def start(page, folder, algo, *, on_policy):
    """Presses Start for a tiny run that ends by itself; the finished run's state."""
    page.number_input(key="start_stop.updates").set_value(20)
    tiny = {f"{algo}.hidden_sizes": "8", "visualizer.enabled": False, "evaluation.episodes": 1}
    tiny |= {} if on_policy else {"replay.learning_starts": 100}
    page.multiselect(key="start_more").set_value(list(tiny)).run()
    for key, value in tiny.items():
        if isinstance(value, bool):
            page.selectbox(key=f"start_{key}").select(value)
        elif isinstance(value, str):
            page.text_input(key=f"start_{key}").input(value)
        else:
            page.number_input(key=f"start_{key}").set_value(value)
    page.run()
    assert not any("--auto" in line for line in commands(page)), "no test here asks for the tuner's minute"
    page.button(key="start").click().run()
    assert not page.error, [error.value for error in page.error]
    name = control.activity(folder).name
    log = folder / ".launches" / f"{name}.log"
    poll(lambda: ([path.name for path in list_runs(folder)] == [name] and state_of(folder / name) == "finished")
         or (control.launching(folder) is None and control.activity(folder).name is None),
         what=lambda: log.read_text(), timeout_s=PATIENCE_S)  # fmt: skip
    assert list_runs(folder), log.read_text()
    return read_run(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "algo"), KINDS)
@pytest.mark.usefixtures("engine")
def test_every_mode_trains_each_kind_of_algorithm_from_the_page(folder, mode, algo):
    run = start(chosen(mode, algo), folder, algo, on_policy=algo in ON_POLICY)
    assert (run["state"], run["mode"], run["algo"]) == ("finished", mode, algo)
    assert run["updates"] >= 20


@pytest.mark.slow
def test_a_made_up_mode_of_the_imported_module_is_offered_and_trains(folder, module):
    page = chosen(NAME, "sac")
    mode = find_mode(NAME, module)
    assert page.selectbox(key="start_mode").value == mode.name
    assert asked(page)["env"]["import_module"] == module
    run = start(page, folder, "sac", on_policy=False)
    assert (run["state"], run["mode"]) == ("finished", NAME)


@pytest.mark.slow
def test_a_made_up_algorithm_of_the_module_brings_settings_and_metric_and_trains(folder, tmp_path, monkeypatch):
    name, module = made_up.NAME, made_up.MODULE
    (tmp_path / f"{module}.py").write_text(made_up.SOURCE.replace('{"alpha"', '{"bonus"') + METRIC)
    for attribute in ("metrics", "_by_name"):  # the module is imported in the page's process, which is this one
        monkeypatch.setattr(TABLE, attribute, getattr(TABLE, attribute))
    monkeypatch.setitem(TABLE.slots, "learner", TABLE.slots["learner"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(control.IMPORT, module)
    try:
        assert name in chosen("spreeze", "sac").selectbox(key="start_algo").options
        page = chosen("serial", name)
        options = page.multiselect(key="start_more").options
        assert any(option.startswith(f"{name}.bonus: ") for option in options)
        run = start(page, folder, name, on_policy=False)
        assert (run["state"], run["algo"]) == ("finished", name)
        path = folder / run_data.run_names(folder)[0]
        assert MetricsReader(path / "metrics.db").latest()["bonus"].value == 0.0
        assert live_api.live_response(path, 0.0, 0, "")["series"]["bonus"]["y"][-1] == 0.0
        (told,) = components_told(open_page("live"), "spreeze_live")
        assert [chart["title"] for chart in told["charts"] if "bonus" in chart["series"]] == ["Made-up bonus"]
    finally:
        sys.modules.pop(module, None)


def test_a_module_that_cannot_be_imported_is_told_and_the_other_modes_stay(monkeypatch):
    monkeypatch.setenv(control.IMPORT, "no_such_module_here")
    page = open_page("live")
    assert "no_such_module_here: ModuleNotFoundError" in page.error[0].value.replace("\\", "")
    assert page.selectbox(key="start_algo").options == list(ALGORITHMS)


@pytest.mark.slow
def test_a_start_that_fails_says_why_until_it_is_dismissed(folder, monkeypatch):
    monkeypatch.setattr("spreeze.dashboard.start.tasks", lambda: ["Pendulum-v1", "NoSuchTask-v0"])
    page = open_page("live")
    page.selectbox(key="start_env").select("NoSuchTask-v0").run()
    (told,) = (text.value.replace("\\", "") for text in page.warning)
    assert told.endswith("(on this page: Your environment, Module that has it)")
    monkeypatch.setattr("spreeze.dashboard.start.imports_only", lambda env_id, module: False)  # as if it could be made
    page.selectbox(key="start_env").select("NoSuchTask-v0").run()
    page.button(key="start").click().run()
    poll(lambda: control.launching(folder) is None, what="end of the start")
    for name in ("live", "runs", "live"):  # on every visit, not only the first
        page = open_page(name)
        (error,) = (error.value.replace("\\", "") for error in page.error)
        assert "did not start" in error
        assert "NoSuchTask-v0" in error
        assert any("NoSuchTask-v0" in code.value for code in page.code), "its log"
    page.button(key="dismiss_start").click().run()
    assert not page.error
    assert not open_page("live").error


def test_a_start_beside_a_live_run_is_rejected_with_a_lasting_message(folder, monkeypatch):
    def start(request, folder):
        raise ConfigError("one is running: stop it first")

    monkeypatch.setattr(control, "start", start)
    page = open_page("live")
    page.button(key="start").click().run()
    for _ in range(3):
        assert [error.value for error in page.error] == ["one is running\\: stop it first"]
        page.run()
    page.button(key="dismiss_error").click().run()
    assert not page.error


def test_the_form_is_as_it_was_after_a_run(monkeypatch):
    page = open_page("live")
    page.selectbox(key="start_env").select("CartPole-v1").run()
    page.selectbox(key="start_algo").select("ppo").run()
    page.selectbox(key="start_mode").select("hts").run()
    with monkeypatch.context() as patch:
        patch.setattr(control, "activity", lambda folder: control.Activity("running", "a1"))
        page.run()
        assert not [box for box in page.selectbox if box.key == "start_algo"]
    page.run()
    found = [page.selectbox(key=f"start_{name}").value for name in ("env", "algo", "mode")]
    assert found == ["CartPole-v1", "ppo", "hts"]


def test_a_task_is_found_in_small_letters_and_without_its_version():
    assert [known_task(text) for text in ("cartpole-v1", "CARTPOLE", "pendulum", "Own-v0", "-v1")] == [
        "CartPole-v1", "CartPole-v1", "Pendulum-v1", "Own-v0", "-v1"]  # fmt: skip


def test_a_begun_name_is_taken_where_one_task_begins_so():
    assert [known_task(text) for text in ("HopperBul", "acro", "mountaincar", "MountainCarC", "Half")] == [
        "HopperBulletEnv-v0", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Half"]  # fmt: skip
