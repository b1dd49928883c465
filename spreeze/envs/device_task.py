"""Vector environments whose observations, rewards and ends are tensors on the learner's device.

They have the signature of Gymnasium's vector environments: ``step`` takes actions, a torch tensor [N, A], and returns
torch tensors or anything with ``__dlpack__``. The mask of ``reset`` and the values of ``infos`` are tensors, too: with
autoreset mode ``SameStep`` each step has ``infos["final_obs"]`` [N, O], read where an episode ended; with ``Disabled``,
and after a bad value, ``reset(options={"reset_mask": mask})`` starts new episodes where the mask [N] is true. Nothing
here waits for the device.
"""

from __future__ import annotations

from typing import Any

from spreeze.envs.vector_task import VectorStep, autoreset_mode
from spreeze.errors import BadTransition, EnvError
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import EnvSpec


class DeviceTask:
    """N environments of one vector environment on a device, whatever its autoreset mode."""

    def __init__(self, env: Any, spec: EnvSpec, device: torch.device) -> None:
        """Takes a vector environment; an EnvError if its metadata has no autoreset mode."""
        self.env, self.num_envs, self._spec, self._device = env, int(env.num_envs), spec, device
        self.mode = autoreset_mode(env, spec.env_id)
        assert spec.box is not None
        self._low, self._high = (torch.from_numpy(bound).to(device) for bound in spec.box.float32_bounds())
        self._shape = tuple(getattr(env, "single_action_space", env.action_space).shape or ())
        self._all = torch.ones(self.num_envs, dtype=torch.bool, device=device)
        self._ended = ~self._all

    def reset(self, seed: int | None = None) -> Tensor:
        """Starts an episode everywhere; returns the observations, float32 [N, O] (waits for the device once).

        A BadTransition if an observation is not finite, an EnvError if tensors are on another device.
        """
        first, _ = self.env.reset(seed=seed)
        obs, self._ended = self._rows(first), ~self._all
        if not bool(torch.isfinite(obs).all()):
            raise BadTransition("observation", "NaN or infinity at a reset", self._spec.env_id)
        return obs

    def restart(self, mask: Tensor, obs: Tensor) -> Tensor:
        """Starts an episode where ``mask`` [N]; returns the observations, elsewhere those of ``obs`` [N, O]."""
        first, _ = self.env.reset(options={"reset_mask": mask})
        self._ended = self._ended & ~mask
        return torch.where(mask.unsqueeze(1), self._rows(first), obs)

    def step(self, actions: Tensor) -> VectorStep:
        """Steps all with ``actions`` [N, A] in [-1, 1], which are scaled to the bounds of the action space."""
        native = self._low + (actions.clamp(-1.0, 1.0) + 1.0) * (0.5 * (self._high - self._low))
        raw, reward, terminated, truncated, infos = self.env.step(native.reshape(self.num_envs, *self._shape))
        reward = self._per_env("reward", reward, torch.float32)
        terminated = self._per_env("terminated", terminated, torch.bool)
        truncated = self._per_env("truncated", truncated, torch.bool)
        obs, valid, ended = self._rows(raw), self._all, terminated | truncated
        next_obs = obs
        if self.mode == "NextStep":
            valid = ~self._ended
            self._ended = ended & valid
        elif self.mode == "SameStep":
            if "final_obs" not in infos:
                raise EnvError(
                    f"{self._spec.env_id}: a step has no infos['final_obs'], a tensor [N, O] with the last observation "
                    "of each episode that ended; autoreset mode SameStep needs it"
                )
            next_obs = torch.where(ended.unsqueeze(1), self._rows(infos["final_obs"]), obs)
        else:
            obs = self.restart(ended, obs)
        return VectorStep(valid, next_obs, reward, terminated, truncated, obs)

    def _per_env(self, field: str, values: Any, dtype: torch.dtype) -> Tensor:
        tensor = self._tensor(values)
        if tensor.numel() != self.num_envs:
            text = f"shape {tuple(tensor.shape)} for {self.num_envs} environments"
            raise BadTransition(field, text, self._spec.env_id)
        return tensor.reshape(self.num_envs).to(dtype, copy=True)  # environments may overwrite their own tensor

    def _rows(self, obs: Any) -> Tensor:
        """A new tensor [N, O]; the parts of a nested observation are sorted by key."""
        parts = [self._tensor(part).reshape(self.num_envs, -1).float() for part in _leaves(obs)]
        rows = torch.cat(parts, 1) if len(parts) > 1 else parts[0].clone()
        if rows.shape[1] != self._spec.obs_dim:
            text = f"{rows.shape[1]} values for each environment; expected {self._spec.obs_dim}"
            raise BadTransition("observation", text, self._spec.env_id)
        return rows

    def _tensor(self, values: Any) -> Tensor:
        tensor = as_tensor(values)
        if tensor.device != self._device:
            raise EnvError(
                f"{self._spec.env_id} gives tensors on {tensor.device}, and the learner is on {self._device}: use "
                f"--device {tensor.device}, or --env-arg device={self._device} if the environment takes it"
            )
        return tensor

    def close(self) -> None:
        self.env.close()


def as_tensor(values: Any) -> Tensor:
    """A tensor that shares the memory of any array with ``__dlpack__``."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.utils.dlpack.from_dlpack(values) if hasattr(values, "__dlpack__") else torch.as_tensor(values)


def _leaves(obs: Any) -> list[Any]:
    return [leaf for key in sorted(obs) for leaf in _leaves(obs[key])] if isinstance(obs, dict) else [obs]
