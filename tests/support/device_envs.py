"""Vector environments in torch, whose tensors stay where they are made; register by import.

``DevicePendulum-v0`` is Gymnasium's Pendulum-v1, vectorized. ``DeviceCounter-v0`` counts its steps, so that rows can be
worked out by hand.
"""

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode


class DeviceEnv(gymnasium.vector.VectorEnv):
    """Episodes of at most ``limit`` steps in any autoreset mode; subclasses have ``begin``, ``move`` and ``seen``."""

    def __init__(self, num_envs=1, device="cpu", autoreset="SameStep", limit=200):
        self.num_envs, self.device, self.limit = num_envs, torch.device(device), limit
        self.metadata = {"autoreset_mode": AutoresetMode(autoreset)}
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.ended = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.state = self.begin()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.generator.manual_seed(seed)
        mask = (options or {}).get("reset_mask")
        mask = torch.ones_like(self.ended) if mask is None else mask
        self._restart(mask)
        self.ended = self.ended & ~mask
        return self.seen(), {}

    def _restart(self, mask):
        self.state = torch.where(mask.unsqueeze(1), self.begin(), self.state)
        self.steps = self.steps.masked_fill(mask, 0)

    def step(self, actions):
        mode = self.metadata["autoreset_mode"]
        reward, terminated = self.move(actions)
        self.steps += 1
        truncated = (self.steps >= self.limit) & ~terminated
        if mode is AutoresetMode.NEXT_STEP:
            self._restart(self.ended)
            reward, terminated = reward.masked_fill(self.ended, 0.0), terminated & ~self.ended
            truncated = truncated & ~self.ended
            self.ended = terminated | truncated
            return self.seen(), reward, terminated, truncated, {}
        final = self.seen().clone()
        if mode is AutoresetMode.SAME_STEP:
            self._restart(terminated | truncated)
        return self.seen(), reward, terminated, truncated, {"final_obs": final}


class DevicePendulum(DeviceEnv):
    single_observation_space = gymnasium.spaces.Box(np.array([-1, -1, -8], np.float32), np.array([1, 1, 8], np.float32))
    single_action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def begin(self):
        span = torch.tensor([np.pi, 1.0], device=self.device)
        return (torch.rand((self.num_envs, 2), generator=self.generator, device=self.device) * 2 - 1) * span

    def move(self, actions):
        angle, speed = self.state.unbind(1)
        torque = actions[:, 0].clamp(-2.0, 2.0)
        upright = torch.remainder(angle + np.pi, 2 * np.pi) - np.pi
        reward = -(upright**2 + 0.1 * speed**2 + 0.001 * torque**2)
        speed = (speed + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        self.state = torch.stack((angle + speed * 0.05, speed), 1)
        return reward, torch.zeros_like(self.ended)

    def seen(self):
        angle, speed = self.state.unbind(1)
        return torch.stack((angle.cos(), angle.sin(), speed), 1)


class DeviceCounter(DeviceEnv):
    """obs = (number of the episode, step), reward = step; environment i terminates at step ``terminate_at + i``."""

    single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, num_envs=1, terminate_at=1000, bad=None, **options):
        """``bad`` (environment, step of its first episode, "reward" or "obs"): a NaN there."""
        self.terminate_at, self.bad, self.episodes = terminate_at, bad, None
        super().__init__(num_envs, **options)

    def begin(self):
        if self.episodes is None:
            self.episodes = torch.full((self.num_envs,), -1.0, device=self.device)
        return torch.stack((self.episodes + 1.0, torch.zeros_like(self.episodes)), 1)

    def _restart(self, mask):
        super()._restart(mask)
        self.episodes = self.state[:, 0].clone()

    def move(self, actions):
        self.state = self.state + torch.tensor([0.0, 1.0], device=self.device)
        step = self.state[:, 1]
        reward = step.clone()
        if self.bad is not None:
            index, at, what = self.bad
            hit = (self.state[index, 0] == 0.0) & (step[index] == at)
            (reward if what == "reward" else self.state[:, 1])[index] += torch.where(hit, torch.nan, 0.0)
        return reward, step == self.terminate_at + torch.arange(self.num_envs, device=self.device)

    def seen(self):
        return self.state.clone()


for name, kind in (("DevicePendulum-v0", DevicePendulum), ("DeviceCounter-v0", DeviceCounter)):
    if name not in gymnasium.registry:
        gymnasium.register(name, vector_entry_point=kind, entry_point=None)
