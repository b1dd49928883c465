"""Numbers too small to matter never slow a learner."""

import torch

from spreeze.types import Box, EnvSpec
from spreeze.workers.torch_devices import learner_threads

SPEC = EnvSpec(env_id="Pendulum-v1", import_module=None, obs_dim=3, action=Box((-2.0,), (2.0,)),
               max_episode_steps=200, reward_threshold=None)  # fmt: skip


def _halved():
    return (torch.full((64,), 2e-38) * 0.25).count_nonzero().item()


def test_numbers_below_the_normal_ones_become_zero_in_both_threads_of_a_learner_and_only_there():
    assert _halved() == 64
    found = {}
    with learner_threads(SPEC, 2, "cpu") as pair:
        pair.both(lambda: found.update(here=_halved()), lambda: found.update(there=_halved()))
    assert found == {"here": 0, "there": 0}
    assert _halved() == 64
