"""Reasons for the end of a run: their names in files, and a sentence for each."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Reason for the end of a run; its value is ``exit_reason`` in ``run.json``, ``stopped_by`` in ``summary.json``."""

    TARGET_RETURN = "target_return"
    SECONDS = "seconds"
    ENV_STEPS = "env_steps"
    UPDATES = "updates"
    PLATEAU = "plateau"
    BUDGET = "budget"
    REQUEST = "stop request"
    INTERRUPT = "interrupt"  # In files the signal follows in brackets.
    FAILURE = "failure"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    StopReason.TARGET_RETURN: "the target return was reached",
    StopReason.SECONDS: "its training time was over",
    StopReason.ENV_STEPS: "its env steps were done",
    StopReason.UPDATES: "its updates were done",
    StopReason.PLATEAU: "returns no longer rose",
    StopReason.BUDGET: "its time budget was used up",
    StopReason.REQUEST: "it was stopped",
    StopReason.INTERRUPT: "it was interrupted",
    StopReason.FAILURE: "it failed",
}


def stop_reason(text: object) -> StopReason | None:
    """The reason that a file names; None for one that is unknown."""
    try:
        return StopReason(str(text).partition(" (")[0])
    except ValueError:
        return None
