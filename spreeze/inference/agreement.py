"""Compares an exported policy with the original one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spreeze.errors import WeightsError
from spreeze.inference import policy_formats
from spreeze.inference.policy import State
from spreeze.types import Choices, EnvSpec

TOLERANCE = 1e-5  # largest difference of a continuous action from our policy's, in halves of its range


class Agreement(NamedTuple):
    """Comparison of an exported file with our policy."""

    observations: int
    difference: float
    """Largest difference of an action, in halves of its range; discrete: number of actions that differ."""
    ties: int  # observations left out, since two actions are equally good up to rounding
    mean: float = 0.0  # mean difference of a continuous action, in halves of its range
    wrong: int = 0  # observations for which the exported policy chose another option


def check(
    act: policy_formats.Act,
    steps: list[policy_formats.Operation],
    expected: np.ndarray,
    obs: np.ndarray,
    spec: EnvSpec,
    state: State = (),
    expected_state: State = (),
    *,
    exact: bool = True,
) -> Agreement:
    """Compares an exported file with our policy's actions ``expected``, in the file's format, and next states.

    A WeightsError if they differ, and the file is ``exact``.
    """
    obs = policy_formats.file_input(spec, obs)
    actual, next_state = act(obs, state)
    count = len(obs)
    for wanted, received in zip(expected_state, next_state, strict=True):
        if exact and not np.allclose(wanted, received, rtol=0.0, atol=TOLERANCE):
            raise WeightsError(
                f"the exported policy's next states differ by up to {np.abs(wanted - received).max():.2g}, more than "
                f"{TOLERANCE:g}; no file was written"
            )
    if actual.shape != expected.shape or (exact and isinstance(spec.action, Choices) and actual.dtype != np.int64):
        raise WeightsError(
            f"the exported policy gives actions of shape {actual.shape} and type {actual.dtype}, expected "
            f"{expected.shape}; no file was written"
        )
    wrong, ties, difference, mean = 0, 0, 0.0, 0.0
    if spec.choices is not None:
        clear = _is_clear(steps, obs, state)
        differs = actual != expected if spec.box is None else (actual != expected)[:, spec.box.dim :]
        wrong, ties = (int(rows.reshape(count, -1).any(1).sum()) for rows in (differs & clear, ~clear))
        if exact and wrong:
            raise WeightsError(
                f"the exported policy chose another action for {wrong} of {count} observations; no file was written"
            )
    if spec.box is not None:
        low, high = np.array(spec.box.low, np.float32), np.array(spec.box.high, np.float32)
        half = 0.5 * (high - low)
        rounding = np.spacing(np.maximum(np.abs(high), np.abs(low)))
        gap = np.abs(actual - expected)[:, : len(low)]
        difference, mean = float(np.max(gap / half)), float(np.mean(gap / half))
        if exact and not np.all(gap <= TOLERANCE * half + rounding):
            raise WeightsError(
                f"the exported policy's actions differ by up to {difference:.2g} of half their "
                f"range, more than {TOLERANCE:g}; no file was written"
            )
    return Agreement(count, wrong if spec.box is None else difference, ties, mean, wrong)


def _is_clear(steps: list[policy_formats.Operation], obs: np.ndarray, state: State) -> np.ndarray:
    """True [N, ...] for each choice whose best option exceeds the second best by more than rounding."""
    last = next(index for index, step in enumerate(steps) if step.kind in ("choose", "argmax"))
    arrays = policy_formats.numpy_arrays(steps[:last])
    values = policy_formats.run_with_state(arrays, obs, *state)[0] if state else policy_formats.run(arrays, obs)
    if steps[last].kind == "choose":
        _, columns, unused = steps[last].values
        values = values[:, columns] + unused
    values = np.sort(values, -1)
    best = values[..., -1]
    clear: np.ndarray = best - values[..., -2] > TOLERANCE * np.maximum(1.0, np.abs(best))
    return clear
