"""Values of the states of an episode, in NumPy, by what a learner publishes beside its policy (``value_snapshot``)."""

from __future__ import annotations

import numpy as np

from spreeze.inference.heads import Deterministic
from spreeze.inference.obs_scale import obs_scale, scaled
from spreeze.inference.policy import Policy, expected_returns
from spreeze.transport.weights import Weights
from spreeze.types import EnvSpec


def step_values(values: Weights, policy: Weights, obs: np.ndarray, action: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """Values float32 [T] in the unit of the task's rewards: V of each state, or Q of the state and the action.

    Args:
        values: what was published beside ``policy``.
        policy: weights that the episode was played with, whose normaliser of observations is taken.
        obs: [T, O], the states that the actions were chosen in.
        action: [T, A], as the environment took them.
        spec: the environment.

    Raises:
        KeyError, ValueError, WeightsError: the arrays do not fit.
    """
    kind, scale = values.meta["values"], np.float32(values.meta["scale"])
    obs = np.ascontiguousarray(obs, np.float32)
    if kind == "policy":
        if spec.team is not None or "recurrent" in policy.meta or spec.choices is None or spec.choices.dim != 1:
            return np.zeros(0, np.float32)
        out = Policy.from_weights(policy.arrays, policy.meta).outputs(obs)
        return np.asarray(np.take_along_axis(out, action.astype(np.int64), 1)[:, 0] * scale, np.float32)
    x = scaled(obs, obs_scale(policy.arrays, obs.shape[1]))
    if kind == "actions":
        x = np.concatenate((x, _unit(action, spec)), 1)
    names = [(f"w{index}", f"b{index}") for index in range(values.meta["layers"])]
    layers = [(values.arrays[weight], values.arrays[bias]) for weight, bias in [*names, ("head_w", "head_b")]]
    head = Deterministic({"action_dim": layers[-1][0].shape[1]}, {})
    activation, normed = values.meta.get("activation", "relu"), bool(values.meta.get("layer_norm"))
    out = Policy(layers, head, None, activation=activation, layer_norm=normed).outputs(x)
    if "atoms" in values.arrays:
        found = expected_returns(out, values.arrays["atoms"])[:, 0]
    else:  # quantiles have their mean, and the value network of two that are stacked has its first output
        found = out.mean(1) if kind == "actions" else out[:, 0]
    return np.asarray(found * scale, np.float32)


def _unit(action: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """Actions [T, A] in [-1, 1], as critics take them."""
    if spec.box is None or spec.choices is not None:
        raise ValueError("critics of actions take numbers only")
    low, high = spec.box.float32_bounds()
    half = (high - low) * np.float32(0.5)
    unit: np.ndarray = np.clip((action - (low + half)) / half, -1.0, 1.0).astype(np.float32)
    return unit
