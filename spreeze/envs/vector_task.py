"""Vector environments of other engines: ``envpool:ID``, and ``vector:ID`` for an id's own vector entry point.

Engines differ in how they restart an ended episode, their autoreset mode. ``VectorTask`` turns all modes into the same
transitions: with the true last observation, without a row for a step that only started an episode, and with only
``terminated`` as the end of the MDP; ``DeviceTask`` does so with tensors, on the learner's device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spreeze.envs.families import FAMILIES, constructing
from spreeze.envs.obs_flattening import MASK, LeafError, mask_of
from spreeze.errors import BadTransition, EnvError
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import Choices, EnvSpec

if TYPE_CHECKING:
    import gymnasium

AUTORESET_MODES = ("NextStep", "SameStep", "Disabled")  # Gymnasium's names of the autoreset modes


class VectorStep(NamedTuple):
    """One step of N environments, as arrays or, on a device, as tensors."""

    valid: Any  # bool [N]: False where the step only started an episode, and its action was ignored
    next_obs: Any
    """float32 [N, O]: the true next observation, for an ended episode its last one; masks belong to the same states."""
    reward: Any  # float32 [N]
    terminated: Any  # bool [N]
    truncated: Any  # bool [N]
    obs: Any  # float32 [N, O]: observations for the next actions


class VectorTask:
    """N environments of one vector environment, whatever its autoreset mode."""

    def __init__(self, env: Any, spec: EnvSpec) -> None:
        """An EnvError if the environment's metadata has no autoreset mode."""
        self.env, self.spec, self.num_envs = env, spec, int(env.num_envs)
        self.mode = autoreset_mode(env, spec.env_id)
        space = getattr(env, "single_action_space", env.action_space)
        self._action_shape, self._action_dtype = tuple(space.shape or ()), space.dtype
        self._form = spec.form()
        self._masked = spec.choices if spec.action_mask else None
        self._ended = np.zeros(self.num_envs, bool)
        self._fresh = np.zeros(self.num_envs, bool)
        self._device: Any = None
        """The device of the engine's tensors; None: it returns arrays."""
        self.obs = np.zeros((self.num_envs, spec.obs_dim), np.float32)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Starts an episode everywhere; returns the observations, float32 [N, O]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # EnvPool warns that it takes the seed only when it is made
            result = self.env.reset(seed=seed)
        self._device = device_of(result[0])
        obs, infos = self._on_host(result)
        self._ended = np.zeros(self.num_envs, bool)
        self._fresh = ~self._ended
        self.obs = self._rows(obs, infos)
        return self.obs

    def restart(self) -> np.ndarray:
        """The first observations of new episodes; does not reset if the engine has just started them itself."""
        if self._fresh.all():
            return self.obs
        if self._ended.all():  # NextStep: the next step starts them, whatever the action
            started: np.ndarray = self.step(np.zeros((self.num_envs, self.spec.action_dim), np.float32)).obs
            return started
        return self.reset()

    def step(self, actions: np.ndarray) -> VectorStep:
        """Steps all with ``actions`` float32 [N, A], native or indices; a BadTransition for a bad result."""
        raw, reward, terminated, truncated, infos = self._on_host(self.env.step(self._on_device(self.native(actions))))
        with np.errstate(over="ignore", invalid="ignore"):  # overflows are found below
            reward = self._per_env("reward", np.asarray(reward, np.float32))
        terminated = self._per_env("terminated", np.asarray(terminated, bool))
        truncated = self._per_env("truncated", np.asarray(truncated, bool))
        obs = self._rows(raw, infos, None if self.mode == "SameStep" else terminated)
        valid, next_obs = np.ones(self.num_envs, bool), obs
        ended = terminated | truncated
        if self.mode == "NextStep":
            valid = ~self._ended
            ended &= valid
            self._ended = ended
        elif self.mode == "SameStep" and ended.any():
            next_obs = obs.copy()
            for index in np.flatnonzero(ended).tolist():
                last = self._checked(_of_one(infos["final_obs"][index]), 1)
                next_obs[index] = self._with_masks(last, infos.get("final_info", {}), [index], terminated)[0]
        elif self.mode == "Disabled" and ended.any():
            first, infos = self._on_host(self.env.reset(options={"reset_mask": self._on_device(ended)}))
            obs = np.where(ended[:, None], self._rows(first, infos, ~ended), obs)
        if not np.isfinite(reward[valid]).all():
            raise BadTransition("reward", str(reward.tolist()), self.spec.env_id)
        self.obs, self._fresh = obs, ~valid if self.mode == "NextStep" else ended
        return VectorStep(valid, next_obs, reward, terminated & valid, truncated & valid, obs)

    def _per_env(self, field: str, values: np.ndarray) -> np.ndarray:
        """One value for each environment [N], even if each is an array of one."""
        if values.size != self.num_envs:
            raise BadTransition(field, f"shape {values.shape} for {self.num_envs} environments", self.spec.env_id)
        return values.reshape(self.num_envs)

    def _on_device(self, array: np.ndarray) -> Any:
        """The array as a tensor on the engine's device, if the engine works with tensors."""
        if self._device is None:
            return array
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _on_host(self, value: Any) -> Any:
        if self._device is None:
            return value
        if isinstance(value, tuple):
            return tuple(self._on_host(part) for part in value)
        if isinstance(value, dict):
            return {name: self._on_host(part) for name, part in value.items()}
        return np.asarray(value.cpu() if hasattr(value, "cpu") else value)

    def native(self, actions: np.ndarray) -> Any:
        """Converts the actions of ``step`` to those of the engine's own ``step``."""
        if self.spec.action_parts:
            return self._form(actions)
        if self.spec.choices is not None:
            return self.spec.choices.to_env(actions).astype(self._action_dtype)
        return actions.reshape(self.num_envs, *self._action_shape).astype(self._action_dtype, copy=False)

    def _rows(self, obs: Any, infos: dict[str, Any], without: np.ndarray | None = None) -> np.ndarray:
        """Observations [N, O], checked and with their masks; where ``without`` [N] is true, all actions are allowed."""
        return self._with_masks(self._checked(obs, self.num_envs), infos, range(self.num_envs), without)

    def _with_masks(
        self, array: np.ndarray, infos: dict[str, Any], indices: Iterable[int], without: np.ndarray | None
    ) -> np.ndarray:
        """Observations of the environments ``indices``, followed by their masks if there are any."""
        if self._masked is None:
            return array
        masks = [self._mask(self._masked, infos, index, without) for index in indices]
        return np.concatenate((array, np.stack(masks)), 1)

    def _mask(self, choice: Choices, infos: dict[str, Any], index: int, without: np.ndarray | None) -> np.ndarray:
        """The mask of one environment; Gymnasium's ``_action_mask`` marks those that gave one."""
        masks, given = infos.get(MASK), infos.get(f"_{MASK}")
        info = {} if masks is None or (given is not None and not given[index]) else {MASK: _mask_at(masks, index)}
        try:
            terminated = without is not None and bool(without[index])
            return mask_of(info, choice, terminated=terminated, parts=self.spec.action_parts)
        except LeafError as error:
            raise BadTransition(error.name, f"{error.value} (environment {index})", self.spec.env_id) from None

    def _checked(self, obs: Any, count: int) -> np.ndarray:
        """A new float32 array [count, O] without masks, finite; the parts of a nested observation are sorted by key."""
        obs_dim = self.spec.obs_dim - self.spec.mask_dim
        with np.errstate(over="ignore", invalid="ignore"):
            array = _joined(obs, count) if isinstance(obs, dict) else np.array(obs, np.float32)
        if array.shape[:1] != (count,) or array.size != count * obs_dim:
            text = f"shape {array.shape} for {count} environments; expected {obs_dim} values each"
            raise BadTransition("observation", text, self.spec.env_id)
        if not np.isfinite(array).all():
            raise BadTransition("observation", str(array[~np.isfinite(array)][0]), self.spec.env_id)
        return array.reshape(count, -1)

    def close(self) -> None:
        self.env.close()


class DeviceTask:
    """N environments of one vector environment on the learner's device, whatever its autoreset mode.

    Such environments have the signature of Gymnasium's vector environments: ``step`` takes actions, a torch tensor
    [N, A], and returns torch tensors or anything with ``__dlpack__``. The mask of ``reset`` and the values of ``infos``
    are tensors, too: with autoreset mode ``SameStep`` each step has ``infos["final_obs"]`` [N, O], read where an
    episode ended; with ``Disabled``, and after a bad value, ``reset(options={"reset_mask": mask})`` starts new episodes
    where the mask [N] is true. Nothing here waits for the device.
    """

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


def device_of(obs: Any) -> Any:
    """The torch device of observations that are tensors of any package; None for NumPy arrays."""
    part = next(iter(obs.values())) if isinstance(obs, dict) else obs
    if isinstance(part, np.ndarray | np.generic) or not hasattr(part, "__dlpack__"):
        return None
    return torch.utils.dlpack.from_dlpack(part).device


def autoreset_mode(env: Any, env_id: str) -> str:
    """The autoreset mode of a vector environment; an EnvError if its metadata has none."""
    mode = (env.metadata or {}).get("autoreset_mode")
    name = str(getattr(mode, "value", mode))
    if name not in AUTORESET_MODES:
        raise EnvError(
            f"{env_id}: metadata['autoreset_mode'] is {mode!r}; expected one of {', '.join(AUTORESET_MODES)}"
        )
    return name


def _joined(obs: Any, count: int) -> np.ndarray:
    """A nested observation of ``count`` environments as [count, O], with parts sorted by key as in ``Flattener``."""
    if isinstance(obs, dict):
        return np.concatenate([_joined(obs[key], count) for key in sorted(obs)], 1)
    array: np.ndarray = np.asarray(obs, np.float32).reshape(count, -1)
    return array


def _mask_at(masks: Any, index: int) -> Any:
    """The mask of one environment; of a structure only the parts that have Gymnasium's ``_`` flags beside them."""
    if not isinstance(masks, dict):
        return masks[index]
    return {key: _mask_at(part, index) for key, part in masks.items() if f"_{key}" in masks}


def _of_one(obs: Any) -> Any:
    return {key: _of_one(part) for key, part in obs.items()} if isinstance(obs, dict) else obs[None]


def as_tensor(values: Any) -> Tensor:
    """A tensor that shares the memory of any array with ``__dlpack__``."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.utils.dlpack.from_dlpack(values) if hasattr(values, "__dlpack__") else torch.as_tensor(values)


def _leaves(obs: Any) -> list[Any]:
    return [leaf for key in sorted(obs) for leaf in _leaves(obs[key])] if isinstance(obs, dict) else [obs]


def make_vector(env_id: str, num_envs: int, seed: int, args: dict[str, Any]) -> Any:
    """The vector environment of an id with an engine's prefix; the engine derives the seeds of its environments.

    An EnvError if the engine is not installed, or does not know the id.
    """
    prefix, _, name = env_id.partition(":")
    with constructing(env_id):
        return FAMILIES[prefix].make(name, num_envs, seed, args)


def make_single(env_id: str, render_mode: str | None, args: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """One environment of an engine with the plain Gymnasium interface, for evaluation and probes.

    Errors as ``make_vector``, or because a picture is wanted, which engines do not draw.
    """
    if render_mode is not None:
        name = env_id.partition(":")[2]
        raise EnvError(f"{env_id} cannot render; a run of {name} does")
    from spreeze.envs.single_env import SingleEnv

    return SingleEnv(env_id, lambda seed: make_vector(env_id, 1, seed, args))
