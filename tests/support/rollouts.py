"""Rollouts for on-policy algorithms: random ones, and ones drawn by the algorithm's own published policy."""

import numpy as np
import torch
from batches import exact

from spreeze.algorithms import create_on_policy
from spreeze.algorithms.a2c import A2CConfig
from spreeze.algorithms.impact import AppoConfig, ImpactConfig, ImpalaConfig
from spreeze.algorithms.ppo import PPOConfig
from spreeze.inference.policy import Policy
from spreeze.types import Box, Choices, EnvSpec, FrameSpec, RolloutBatch

CONFIGS = {"ppo": PPOConfig, "a2c": A2CConfig, "impact": ImpactConfig, "appo": AppoConfig, "impala": ImpalaConfig}


def task(*, obs_dim=3, actions=2, discrete=False, frames=None):
    return EnvSpec(
        env_id="Task-v0", import_module=None, obs_dim=obs_dim, frames=frames,
        action=Choices((actions,)) if discrete else Box((-1.0,) * actions, (1.0,) * actions),
        max_episode_steps=None, reward_threshold=None,
    )  # fmt: skip


FRAMES = FrameSpec(channels=1, height=36, width=36, stack=2, sign_rewards=False, options={})


def learner(name, spec, correction="on-policy", seed=1, *, normalize_obs=False, dtype=torch.float32, **settings):
    config = CONFIGS[name](**{"normalize_returns": False, **settings})  # rewards by hand
    return exact(
        create_on_policy, name, spec, config, seed, correction=correction, normalize_obs=normalize_obs, dtype=dtype
    )


def rollout(algorithm, spec, rng, steps=8, envs=4):
    """An interval as the algorithm's present policy would draw it, with random observations and rewards."""
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    if spec.frames is None:
        obs = rng.standard_normal((steps + 1, envs, spec.obs_dim)).astype(np.float32)
    else:
        shape = (steps + 1, envs, spec.frames.stack, *spec.frames.shape)
        obs = rng.integers(0, 256, shape).astype(np.uint8)
    ended = rng.random((steps, envs))
    terminated, truncated = ended < 0.1, ended > 0.9
    next_obs = obs[1:].copy()
    next_obs[truncated] = obs[0, 0]
    flat, rows = obs[:-1].reshape(steps * envs, *obs.shape[2:]), steps * envs
    action, log_prob, _ = policy.sample(flat, _noise(spec, rng, rows))
    return RolloutBatch(
        obs[:-1], action.reshape(steps, envs, -1), log_prob.reshape(steps, envs),
        rng.standard_normal((steps, envs)).astype(np.float32), terminated, truncated, next_obs,
    )  # fmt: skip


def _noise(spec, rng, rows):
    numbers = spec.box.dim if spec.box else 0
    noise = rng.random((rows, spec.action_dim)) if numbers < spec.action_dim else np.empty((rows, numbers))
    noise[:, :numbers] = rng.standard_normal((rows, numbers))
    return noise.astype(np.float32)


def recurrent_rollout(algorithm, spec, rng, steps=8, envs=4):
    """An interval as the algorithm's present policy, with or without memory, would draw it, from random states on."""
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    obs = rng.standard_normal((steps + 1, envs, spec.obs_dim)).astype(np.float32)
    if spec.mask_dim:
        mask = rng.random((steps + 1, envs, spec.mask_dim)) < 0.5
        mask[:, :, [part.start for part in spec.choices.slices]] = True  # each choice has an option
        obs[:, :, -spec.mask_dim :] = mask
    ended = rng.random((steps, envs))
    terminated, truncated = ended < 0.1, ended > 0.9
    next_obs = obs[1:].copy()
    next_obs[truncated] = rng.standard_normal((truncated.sum(), spec.obs_dim))
    first = state = rng.standard_normal((envs, policy.state_dim)).astype(np.float32)
    drawn = []
    for step in range(steps):
        *chosen, after = policy.sample(obs[step], _noise(spec, rng, envs), (state,) if policy.state_dim else ())
        state = after[0] if after else state
        state = np.where((terminated | truncated)[step, :, None], np.float32(0.0), state)
        drawn.append(chosen)
    action, log_prob = (np.stack(column) for column in zip(*drawn, strict=True))
    reward = rng.standard_normal((steps, envs)).astype(np.float32)
    return RolloutBatch(obs[:-1], action, log_prob, reward, terminated, truncated, next_obs, first)
