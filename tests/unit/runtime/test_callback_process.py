"""Callbacks before and beside a run: names, arguments, and requests to change an environment's arguments."""

import json
from types import SimpleNamespace

import own_callbacks
import pytest

from spreeze.envs.task import CHANGED_ARGS, merged_args
from spreeze.errors import ConfigError, UsageError
from spreeze.run_directory import RunDir, send_request
from spreeze.runtime.callback import BaseCallback, Logger
from spreeze.runtime.callback_process import EnvironmentArguments, _Link, callbacks_of, check_callbacks, open_callbacks
from spreeze.runtime.loggers import Sink


@pytest.mark.parametrize("text", ["x", "x:", ":X", "x:X Y", "x:X.", "", "x(1):Y"])
def test_what_names_no_class_is_refused_before_anything_starts(text):
    with pytest.raises(ConfigError, match="expected MODULE:CLASS"):
        check_callbacks((text,))


def test_a_script_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/gone.py"):
        check_callbacks((f"{tmp_path}/gone.py:Mine",))


def test_names_with_arguments_are_taken():
    check_callbacks(("a.b:C", f"{own_callbacks.__file__}:C.D(x=1)", "a:C(text='b:c')"))
    (made,) = open_callbacks("own_callbacks:Curriculum(most=50)")
    assert (type(made), made.most) == (own_callbacks.Curriculum, 50)
    assert [type(made) for made in open_callbacks("own_callbacks:CALLBACKS")] == [own_callbacks.Journal]


@pytest.mark.parametrize(("text", "reason"), [
    ("own_callbacks:Curriculum(50)", "an argument without a name"),
    ("own_callbacks:Curriculum(most=len)", "malformed"),
    ("own_callbacks:Curriculum(most=1", "never closed"),
    ("own_callbacks:Walk", "has no class Walk that is a spreeze.BaseCallback"),
    ("own_callbacks:Gone", "has no class Gone"),
])  # fmt: skip
def test_what_is_no_callback_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        open_callbacks(text)


def test_a_module_s_own_callbacks_follow_those_of_the_command_line(tmp_path):
    def of(module):
        config = SimpleNamespace(env=SimpleNamespace(import_module=module), callback=SimpleNamespace(classes=("a:B",)))
        return callbacks_of(SimpleNamespace(config=config))

    assert of("own_callbacks") == ("a:B", "own_callbacks:CALLBACKS")
    assert of("nested_env") == of("nowhere") == of(None) == of(str(tmp_path / "gone.py")) == ("a:B",)


def test_a_callback_may_change_what_can_change_and_nothing_else(tmp_path):
    (tmp_path / "control").mkdir()
    callback = BaseCallback()
    callback.run_dir = tmp_path
    for key, value, reason in (
        ("sac.gamma", 0.5, "cannot change while a run goes on; env.args and tuning.leave_free can"),
        ("env.args", 3, "expected a mapping"),
        ("env.args", {"a b": 3}, "expected a mapping"),
        ("env.args", {"x": "y" * 2000}, "at most 900 fit"),
    ):
        with pytest.raises(UsageError, match=reason):
            callback.set(key, value)
    with pytest.raises(UsageError, match="only finite numbers"):
        Logger(lambda *_: None).record("x", float("nan"))
    callback.set("env.args", {"length": 20, "name": "x"})
    callback.set("tuning.leave_free", 0.25)
    assert json.loads((tmp_path / "control" / "env-args").read_text()) == ["length=20", "name='x'"]
    assert (tmp_path / "control" / "leave-free").read_text() == "0.25"


def test_changed_arguments_add_up_and_wrong_requests_are_told(tmp_path):
    events = []
    plan = SimpleNamespace(spec=SimpleNamespace(env_id="Walk-v0"), single_env=False)
    run_dir = RunDir.create(tmp_path, "run")
    try:
        arguments = EnvironmentArguments(plan, run_dir, lambda level, text: events.append((level, text)))
        for text in ('["length=20"]', '["length=30", "x=1"]'):
            send_request(run_dir.path, "env-args", text)
            arguments.poll()
        assert arguments.version == 2
        assert json.loads((run_dir.path / CHANGED_ARGS).read_text()) == ["length=30", "x=1"]
        for text in ("{", "3", '["nonsense"]', '["id=3"]', "[3]"):
            send_request(run_dir.path, "env-args", text)
            arguments.poll()
        plan.spec.env_id = "vector:CartPole-v1"
        send_request(run_dir.path, "env-args", '["length=20"]')
        arguments.poll()
        assert arguments.version == 2
        assert [level for level, _ in events] == ["info", "info", *["warning"] * 6]
        assert EnvironmentArguments(plan, run_dir, print).version == 1  # a resume continuing with them
    finally:
        run_dir.close()
    assert merged_args(("a=1", "b=2"), ["b=3", "c=4"]) == ("a=1", "b=3", "c=4")


@pytest.mark.parametrize(
    ("calls", "named"),
    [("Mine.on_metrics", "; callback.deadline_s allows more"), ("Mine.on_training_end", ""), ("", "")],
)
def test_the_setting_is_named_only_where_it_allows_more(monkeypatch, calls, named):
    told = []
    monkeypatch.setattr(Sink, "_switch_off", lambda _, why: told.append(why))
    link = object.__new__(_Link)
    link._calls = calls
    link._switch_off("no answer for 10 s")
    assert told == [f"no answer for 10 s to {calls}{named}" if calls else "no answer for 10 s"]
