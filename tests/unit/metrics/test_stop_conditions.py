"""Why a run ended, as files name it and as people read it."""

from dataclasses import replace

import pytest

from spreeze.config.schema import StopConfig
from spreeze.metrics.stop_conditions import Ending, Reached, StopReason, stop_reason, stop_reason_of


@pytest.mark.parametrize("reason", StopReason)
def test_each_reason_is_read_back_from_a_file_and_has_a_sentence(reason):
    assert stop_reason(str(reason)) is reason
    assert reason.sentence


def test_a_signal_in_brackets_and_an_unknown_reason_are_told_apart():
    assert stop_reason("interrupt (Ctrl-C)") is StopReason.INTERRUPT
    assert stop_reason("power loss") is None
    assert stop_reason(None) is None


NOT_REACHED = Reached(
    stop_requested=False, target_reached=False, trained_s=10.0, curve=[], updates=100.0, env_steps=1000.0
)


@pytest.mark.parametrize(
    ("stop", "changes", "reason"),
    [
        (StopConfig(), {}, None),
        (StopConfig(seconds=10.0), {}, StopReason.SECONDS),
        (StopConfig(updates=100), {}, StopReason.UPDATES),
        (StopConfig(updates=100), {"updates": None}, None),
        (StopConfig(env_steps=1000, updates=100), {"updates": 99.0}, StopReason.ENV_STEPS),
        (StopConfig(seconds=10.0), {"target_reached": True}, StopReason.TARGET_RETURN),
        (StopConfig(seconds=10.0), {"target_reached": True, "stop_requested": True}, StopReason.REQUEST),
    ],
)
def test_the_first_condition_that_is_met_gives_the_reason(stop, changes, reason):
    assert stop_reason_of(stop, None, replace(NOT_REACHED, **changes)) is reason


def test_a_run_that_ends_by_itself_ends_at_its_budget_whatever_its_updates():
    ending = Ending(None, 60.0)
    assert stop_reason_of(StopConfig(updates=1), ending, replace(NOT_REACHED, trained_s=60.0)) is StopReason.BUDGET
