"""Why a run ended, as files name it and as people read it."""

import pytest

from spreeze.metrics.stop_reasons import StopReason, stop_reason


@pytest.mark.parametrize("reason", StopReason)
def test_each_reason_is_read_back_from_a_file_and_has_a_sentence(reason):
    assert stop_reason(str(reason)) is reason
    assert reason.sentence


def test_a_signal_in_brackets_and_an_unknown_reason_are_told_apart():
    assert stop_reason("interrupt (Ctrl-C)") is StopReason.INTERRUPT
    assert stop_reason("power loss") is None
    assert stop_reason(None) is None
