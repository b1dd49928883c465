"""The bench against another trainer: refused where it is missing, and a ratio of rates where it is there."""

import sys
import types

import pytest

from spreeze.bench import learner
from spreeze.bench.learner import against_rows
from spreeze.errors import UsageError


class Model:
    """What the bench uses of the other's SAC."""

    def __init__(self, policy, env, **options):
        self.options, self.replay_buffer, self.steps = options, self, 0
        self.rows = 0

    def set_logger(self, logger):
        pass

    def add(self, obs, next_obs, action, reward, done, infos):
        assert obs.shape == next_obs.shape == (1, 3)
        assert action.shape == (1, 1)
        self.rows += 1

    def train(self, gradient_steps, batch_size):
        assert self.rows >= batch_size
        assert self.options["policy_kwargs"] == {"net_arch": [256, 256]}
        self.steps += gradient_steps


def test_it_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(UsageError, match="pip install stable-baselines3"):
        against_rows("Pendulum-v1", 64, 1)


def test_each_repeat_gives_both_rates_and_their_ratio(monkeypatch):
    logger = types.SimpleNamespace(Logger=lambda folder, output_formats: None)
    monkeypatch.setitem(sys.modules, "stable_baselines3", types.SimpleNamespace(SAC=Model, __version__="9"))
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.logger", logger)
    monkeypatch.setattr(learner, "_PEER_BLOCKS", 1)
    ours, theirs, ratio = against_rows("Pendulum-v1", 32, 2)
    assert ratio["against"] == "stable-baselines3 9"
    assert ratio["repeats"] == pytest.approx(
        [one / other for one, other in zip(ours["repeats"], theirs["repeats"], strict=True)]
    )
    assert len(ratio["repeats"]) == 2
