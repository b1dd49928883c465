"""Our SAC update against stable-baselines3's, at the same networks, batch, rows and thread, in turn in one process.

Both draw their batches from their own replay, as they do in training. stable-baselines3 is no
dependency: whoever wants the figure installs it.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spreeze.bench.costs import Row, in_turn, updates_per_s
from spreeze.bench.learner import algorithm_config
from spreeze.envs.task import make_task
from spreeze.errors import UsageError
from spreeze.transport.frames import open_reader
from spreeze.transport.ring import Ring, RingSpec
from spreeze.types import EnvSpec, RowLayout
from spreeze.workers.filling import fill
from spreeze.workers.learning import Learning

_ROWS = 20_000
_STEPS_A_CALL = 10
"""Gradient steps in one call of the other's ``train``, so that what it does once a call weighs little."""
_HIDDEN = (256, 256)


def against_rows(env_id: str, batch_size: int, repeats: int) -> list[Row]:
    """Updates/s of both and their ratio, one thread.

    Raises:
        UsageError: stable-baselines3 is not installed.
    """
    try:
        peer: Any = importlib.import_module("stable_baselines3")
        logger: Any = importlib.import_module("stable_baselines3.common.logger")
    except ImportError as error:
        raise UsageError(f"--against sb3 needs stable-baselines3 ({error}): pip install stable-baselines3") from None
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        task = make_task(env_id)
        stack.callback(task.close)
        ours = _ours(task.spec, batch_size, stack)
        model = peer.SAC("MlpPolicy", task.env, buffer_size=_ROWS, batch_size=batch_size, device="cpu", seed=0,
                         policy_kwargs={"net_arch": list(_HIDDEN)})
        model.set_logger(logger.Logger(folder=None, output_formats=[]))
        _fill(model.replay_buffer, task.spec)

        def theirs() -> None:
            model.train(gradient_steps=_STEPS_A_CALL, batch_size=batch_size)

        theirs()
        pairs = in_turn(lambda: _STEPS_A_CALL * updates_per_s(theirs), lambda: updates_per_s(ours), repeats)
    return _rows(pairs, batch_size, f"stable-baselines3 {peer.__version__}")


def _ours(spec: EnvSpec, batch_size: int, stack: contextlib.ExitStack) -> Callable[[], object]:
    ring = Ring.create(RingSpec(RowLayout.of(spec), 1, _ROWS))
    stack.callback(ring.close)
    fill(ring, spec)
    learning = Learning(spec, "sac", algorithm_config("sac", _HIDDEN), ring.spec.layout, open_reader(ring),
                        batch_size=batch_size, device="cpu", seed=0, normalize_obs=False)
    learning.refresh()
    for _ in range(3):
        learning.update()
    return learning.update


def _fill(buffer: Any, spec: EnvSpec) -> None:
    """Rows of normal observations and uniform actions, as ours."""
    rng = np.random.default_rng(0)
    for _ in range(_ROWS):
        obs, next_obs = rng.standard_normal((2, 1, spec.obs_dim), np.float32)
        action = rng.uniform(-1.0, 1.0, (1, spec.action_dim)).astype(np.float32)
        buffer.add(obs, next_obs, action, rng.standard_normal(1), np.zeros(1), [{}])


def _rows(pairs: list[tuple[float, float]], batch_size: int, name: str) -> list[Row]:
    ratios = [ours / theirs for theirs, ours in pairs]
    more: Row = {"batch_size": batch_size, "against": name}
    return [
        {"metric": "updates_per_s", "value": statistics.median(ours for _, ours in pairs), "unit": "1/s",
         "repeats": [ours for _, ours in pairs], **more},
        {"metric": "updates_per_s_theirs", "value": statistics.median(theirs for theirs, _ in pairs), "unit": "1/s",
         "repeats": [theirs for theirs, _ in pairs], **more},
        {"metric": "over_theirs", "value": statistics.median(ratios), "unit": "ratio", "repeats": ratios,
         "target": ">= 1.6", **more},
    ]
