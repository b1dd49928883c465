"""Reasons for the end of a run: their names in files, and a sentence for each."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Reason for the end of a run; its value is ``exit_reason`` in ``run.json``, ``stopped_by`` in ``summary.json``."""

    sentence: str

    TARGET_RETURN = "target_return", "the target return was reached"
    SECONDS = "seconds", "its training time was over"
    ENV_STEPS = "env_steps", "its env steps were done"
    UPDATES = "updates", "its updates were done"
    PLATEAU = "plateau", "returns no longer rose"
    BUDGET = "budget", "its time budget was used up"
    REQUEST = "stop request", "it was stopped"
    INTERRUPT = "interrupt", "it was interrupted"  # In files the signal follows in brackets.
    FAILURE = "failure", "it failed"

    def __new__(cls, value: str, sentence: str) -> StopReason:
        reason = str.__new__(cls, value)
        reason._value_, reason.sentence = value, sentence
        return reason


def stop_reason(text: object) -> StopReason | None:
    """The reason that a file names; None for one that is unknown."""
    name = str(text).partition(" (")[0]
    return next((reason for reason in StopReason if reason == name), None)
