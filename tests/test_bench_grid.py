"""The tuner's bench: a grid measured beside a reference."""

import contextlib
import itertools

import pytest

from spreeze.bench.tune import measure_grid
from spreeze.errors import SpreezeError
from spreeze.tuner.problem import BATCH, JOINT, Setting, TrialResult


def _setting(batch_size, samplers=1):
    return Setting({
        "learner.device": "cpu", BATCH: batch_size, "learner.threads": 1, "learner.precision": "float32",
        "sampling.samplers": samplers, "sampling.envs_per_sampler": 8, "replay.samples_per_insert_min": 8.0,
    })  # fmt: skip


REFERENCE = _setting(64)


class _Machine:
    """A machine that is slower with each group; updates fall with the batch."""

    def __init__(self, failing=(), lucky=None):
        self.failing, self.lucky, self.groups = failing, lucky, []
        self._speeds = itertools.accumulate(itertools.repeat(0.8), lambda a, b: a * b)

    @contextlib.contextmanager
    def open(self, within_s):
        assert within_s > 4.0
        yield self

    def joint(self, settings, *, within_s, on_result):
        self.groups.append(list(settings))
        speed = next(self._speeds)
        return [self._rate(one, speed) for one in settings]

    def _rate(self, one, speed):
        if one[BATCH] in self.failing:
            return TrialResult(stage=JOINT, setting=one, failure="out of memory")
        if one[BATCH] == self.lucky:
            self.lucky, speed = None, 10 * speed
        turns = [speed * turn * 100.0 * 64 / one[BATCH] for turn in (1.0, 0.5, 2.0)]
        return TrialResult(stage=JOINT, setting=one, env_steps_per_s=(1e9,) * 3, updates_per_s=tuple(turns))


def test_a_machine_that_grows_slower_does_not_change_the_order():
    machine = _Machine()
    sizes = [16, 32, 64, 128, 256, 512]
    settings = [_setting(size) for size in sizes]
    points = measure_grid(settings, [REFERENCE], 2, "updates", machine.open, lambda text: None)
    assert {one[BATCH]: point.score for one, point in points.items()} == pytest.approx(
        {size: 64 / size for size in sizes}
    )
    assert all(group[0] == REFERENCE and group.count(REFERENCE) == 1 for group in machine.groups)
    assert len(points[_setting(32)].ratios) == 2 * 3


def test_settings_of_one_trial_stay_together():
    machine = _Machine()
    settings = [_setting(size, samplers) for size in (32, 128, 256) for samplers in (1, 2, 3)]
    measure_grid(settings, [REFERENCE], 1, "updates", machine.open, lambda text: None)
    assert len(machine.groups[0]) == 10


def test_the_luckiest_of_the_grid_is_measured_again_and_so_is_every_pick():
    machine = _Machine(lucky=256)
    others = [_setting(size) for size in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)]
    picks = [REFERENCE, REFERENCE, _setting(16384)]
    points = measure_grid(others, picks, 1, "updates", machine.open, lambda text: None)
    assert points[_setting(256)].ratios[0] == pytest.approx(10 * 64 / 256)
    assert points[_setting(256)].score == pytest.approx(64 / 256)
    assert {one[BATCH] for one, point in points.items() if point.final} == {
        64, 128, 256, 512, 1024, 2048, 4096, 16384,
    }
    assert len(points[_setting(256)].final) == 2 * 3


def test_what_cannot_run_has_no_score_and_says_why():
    machine = _Machine(failing={256})
    points = measure_grid([_setting(256)], [REFERENCE], 1, "return", machine.open, lambda text: None)
    assert points[_setting(256)].score == 0.0
    assert points[_setting(256)].failure == "out of memory"


def test_a_reference_that_cannot_run_is_an_error():
    with pytest.raises(SpreezeError, match="reference could not be measured: out of memory"):
        measure_grid([_setting(32)], [REFERENCE], 1, "return", _Machine(failing={64}).open, lambda text: None)
