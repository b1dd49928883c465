"""The tuner in a thread of its run: what the user is told where it comes to no choice."""

import dataclasses
import tempfile
import types

import pytest

from spreeze.runtime.interrupts import Interrupts
from spreeze.tuner.in_run import TunerThread
from spreeze.tuner.problem import Setting
from spreeze.tuner.trials import TrialFailed


@dataclasses.dataclass
class _Listener:
    say: object = None


@pytest.mark.parametrize(("raised", "told"), [
    (KeyboardInterrupt(), "not tuned: the run ended first"),
    (TrialFailed("the learner was restarted"), "not tuned: the learner was restarted"),
    (OSError("no room"), "not tuned: no room"),
])  # fmt: skip
def test_a_tuner_that_is_stopped_or_fails_says_why_it_chose_nothing(raised, told, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the lock of other tuners on this machine is there

    class Stopped(TunerThread):
        begins = "begins"

        def _measured(self, run, workers, beside):
            raise raised

        def _conclude(self, record):
            assert record is None

        def _as_choice(self, record, plan):
            return record, plan

    tuner = Stopped(types.SimpleNamespace(interrupts=Interrupts(), listener=_Listener()), Setting({}), None)
    tuner.begin(None, None)
    tuner.end()
    assert tuner.notes() == ["begins", told]
    assert tuner.choice() == (None, None)
