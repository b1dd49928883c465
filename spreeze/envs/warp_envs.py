"""Gymnasium's MuJoCo walkers, N at a time on one device, stepped by MuJoCo Warp (package ``mujoco-warp``).

Model, frame skip, reward weights, healthy ranges and reset noise are read from the Gymnasium environment of that name,
which is made once for this. The physics differ: MuJoCo Warp computes in float32 with its own solvers, Newton's instead
of PGS, so returns should be measured with Gymnasium's engine, as evaluation does. New episodes start from one of N
states drawn by ``reset`` without a mask.
"""

from __future__ import annotations

import importlib
import json
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from spreeze.envs.make import make_env
from spreeze.errors import EnvError, did_you_mean
from spreeze.inference.lazy_torch import Tensor, torch


class _Kind(NamedTuple):
    hidden: int  # number of leading positions that are not observed
    height: int  # index of the height among the positions
    gaussian: bool  # True: initial velocities are drawn from a Gaussian; False: uniformly
    fastest: float | None = None  # bound of observed velocities
    forces: bool = False  # True: contact forces are part of observation and reward


_KINDS = {
    "HalfCheetahEnv": _Kind(1, 1, True),
    "HopperEnv": _Kind(1, 1, False, fastest=10.0),
    "Walker2dEnv": _Kind(1, 1, False, fastest=10.0),
    "SwimmerEnv": _Kind(2, 2, False),
    "AntEnv": _Kind(2, 2, True, forces=True),
    "HumanoidEnv": _Kind(2, 2, False, forces=True),
}
"""Class in Gymnasium -> properties that only its code has."""
_STATE = ("qpos", "qvel", "ctrl", "qacc_warmstart", "xpos", "xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
"""Arrays of MuJoCo Warp that are read or written here."""
_NAMES = [f"{name.removesuffix('Env')}-v5" for name in _KINDS]


class WarpEnv(VectorEnv[Any, Any, Any]):
    """The vector environment; tensors are float32, new or views of Warp's memory."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # as in Gymnasium

    def __init__(
        self,
        name: str,
        num_envs: int,
        seed: int,
        device: str | None = None,
        nconmax: int | None = None,
        njmax: int | None = None,
        **args: Any,
    ) -> None:
        """``args`` are those of Gymnasium's environment; an EnvError for other tasks than these walkers.

        ``device``: a name such as ``cuda:0`` (None: Warp's preferred one). ``nconmax`` and ``njmax`` limit contacts and
        constraints of each environment (None: MuJoCo Warp's choice).
        """
        if name not in _NAMES:
            raise EnvError(f"warp has no '{name}'{did_you_mean(name, _NAMES)}; it has {', '.join(_NAMES)}")
        mujoco_warp: Any = importlib.import_module("mujoco_warp")
        warp: Any = importlib.import_module("warp")
        mujoco: Any = importlib.import_module("mujoco")
        made = make_env(name, args=tuple(f"{key}={json.dumps(value)}" for key, value in args.items()))
        task: Any = made.unwrapped
        self._task, self._kind = task, _KINDS[type(task).__name__]
        self._limit = int(made.spec.max_episode_steps or 2**31)  # type: ignore[union-attr]
        self.num_envs, self.spec = num_envs, made.spec
        self.single_observation_space, self.single_action_space = task.observation_space, task.action_space
        self.observation_space, self.action_space = (
            gymnasium.vector.utils.batch_space(space, num_envs) for space in (task.observation_space, task.action_space)
        )
        warp.config.log_level = warp.LOG_WARNING
        self._warp, self._physics = warp, mujoco_warp
        self._warp_device = warp.get_device(device) if device else warp.get_preferred_device()
        self.device = torch.device(warp.device_to_torch(self._warp_device))
        if task.model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:  # a humanoid's, which MuJoCo Warp does not have
            task.model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        with warp.ScopedDevice(self._warp_device):
            self._model = mujoco_warp.put_model(task.model)
            self._data = mujoco_warp.make_data(task.model, nworld=num_envs, nconmax=nconmax, njmax=njmax)
        self._state: dict[str, Tensor] = {key: warp.to_torch(getattr(self._data, key)) for key in _STATE}
        mass = torch.from_numpy(np.asarray(task.model.body_mass, np.float32)).to(self.device)
        self._mass_fraction = mass / mass.sum()
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._graph: Any = None
        self._x = self._obs = torch.zeros(0)
        self._make_starts()
        self._run(self._simulate)  # compiles now, so that it does not count towards a step's deadline
        self._make_starts()
        made.close()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:
            self._generator.manual_seed(seed)
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self._make_starts()
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._obs = self._restarted(mask, self._obs)
        return self._obs, {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        task, state, before = self._task, self._state, self._x
        state["ctrl"].copy_(actions)
        self._advance()
        self._x = self._position()
        reward = task._forward_reward_weight * (self._x - before) / task.dt
        reward = reward - task._ctrl_cost_weight * actions.square().sum(1)
        healthy = self._healthy()
        reward = reward + getattr(task, "_healthy_reward", 0.0) * healthy
        if self._kind.forces:
            reward = reward - self._contact_cost()
        self._steps += 1
        terminated = ~healthy if getattr(task, "_terminate_when_unhealthy", False) else torch.zeros_like(healthy)
        truncated = (self._steps >= self._limit) & ~terminated
        final = self._observe()
        self._obs = self._restarted(terminated | truncated, final)
        return self._obs, reward, terminated, truncated, {"final_obs": final}

    def _make_starts(self) -> None:
        state, task = self._state, self._task
        noise = task._reset_noise_scale
        for name, first, gaussian in (("qpos", task.init_qpos, False), ("qvel", task.init_qvel, self._kind.gaussian)):
            draw = torch.randn if gaussian else torch.rand
            drawn = draw(state[name].shape, generator=self._generator, device=self.device)
            middle = torch.from_numpy(np.asarray(first, np.float32)).to(self.device)
            state[name].copy_(middle + noise * (drawn if gaussian else 2.0 * drawn - 1.0))
        state["cfrc_ext"].zero_()
        self._run(lambda: self._physics.forward(self._model, self._data))
        self._x, self._obs = self._position(), self._observe()
        self._starts = [part.clone() for part in (state["qpos"], state["qvel"], self._x, self._obs)]

    def _restarted(self, mask: Tensor, obs: Tensor) -> Tensor:
        """Resets the environments of ``mask`` [N]; returns the observations [N, O], those of ``obs`` for the others."""
        chosen = torch.randint(self.num_envs, (self.num_envs,), generator=self._generator, device=self.device)
        qpos, qvel, x, first = (part[chosen] for part in self._starts)
        rows, state = mask.unsqueeze(1), self._state
        for name, start in (("qpos", qpos), ("qvel", qvel), ("qacc_warmstart", torch.zeros_like(qvel))):
            state[name].copy_(torch.where(rows, start, state[name]))
        self._x, self._steps = torch.where(mask, x, self._x), self._steps.masked_fill(mask, 0)
        return torch.where(rows, first, obs)

    def _position(self) -> Tensor:
        """Forward position [m] of each torso or, for a humanoid, of its centre of mass."""
        if "Humanoid" in type(self._task).__name__:
            return self._state["xipos"][:, :, 0] @ self._mass_fraction
        position: Tensor = self._state["xpos"][:, 1, 0] if self._kind.forces else self._state["qpos"][:, 0]
        return position.clone()

    def _healthy(self) -> Tensor:
        """Bool [N]: True within the healthy ranges, if the task has some."""
        qpos, qvel, task = self._state["qpos"], self._state["qvel"], self._task
        healthy = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        ranges = ((qpos[:, self._kind.height], "_healthy_z_range"), (qpos[:, 2], "_healthy_angle_range"))
        for values, name in ranges:
            low, high = getattr(task, name, (-np.inf, np.inf))
            if np.isfinite([low, high]).any():
                healthy = healthy & (values > low) & (values < high)
        if (limits := getattr(task, "_healthy_state_range", None)) is not None:
            state = torch.cat((qpos[:, 2:], qvel), 1)
            healthy = healthy & ((state > limits[0]) & (state < limits[1])).all(1)
        return healthy

    def _forces(self) -> Tensor:
        """Contact forces [N, bodies, 6], bounded where the task bounds them."""
        limits = getattr(self._task, "_contact_force_range", None)
        forces = self._state["cfrc_ext"]
        return forces if limits is None else forces.clamp(*limits)

    def _contact_cost(self) -> Tensor:
        cost: Tensor = self._task._contact_cost_weight * self._forces().square().sum((1, 2))
        return cost.clamp(*getattr(self._task, "_contact_cost_range", (-np.inf, np.inf)))

    def _observe(self) -> Tensor:
        """Observations [N, O], a new tensor."""
        state, kind, task = self._state, self._kind, self._task
        qvel = state["qvel"] if kind.fastest is None else state["qvel"].clamp(-kind.fastest, kind.fastest)
        hidden = kind.hidden if task._exclude_current_positions_from_observation else 0
        parts = [state["qpos"][:, hidden:], qvel]
        for name, first in (("cinert", 1), ("cvel", 1), ("qfrc_actuator", 6)):
            if getattr(task, f"_include_{name}_in_observation", False):
                parts.append(state[name][:, first:].flatten(1))
        if getattr(task, "_include_cfrc_ext_in_observation", False):
            parts.append(self._forces()[:, 1:].flatten(1))
        return torch.cat(parts, 1)

    def _simulate(self) -> None:
        for _ in range(self._task.frame_skip):
            self._physics.step(self._model, self._data)
        if self._kind.forces:
            self._physics.rne_postconstraint(self._model, self._data)

    def _advance(self) -> None:
        """One env step of all; on a GPU as one graph, because MuJoCo Warp launches hundreds of kernels."""
        if self.device.type == "cuda" and self._graph is None:
            stream = self._warp.get_stream(self._warp_device)
            torch.cuda.synchronize(self.device)
            with self._warp.ScopedCapture(device=self._warp_device, stream=stream) as captured:
                self._simulate()
            self._graph = captured.graph
        self._run(self._simulate if self._graph is None else lambda: self._warp.capture_launch(self._graph))

    def _run(self, work: Any) -> None:
        """Runs Warp's work in order with torch's: on a GPU their streams wait for each other; the host does not."""
        warp = self._warp
        with warp.ScopedDevice(self._warp_device):
            if self.device.type != "cuda":
                work()
                return
            stream = warp.get_stream(self._warp_device)
            torch_stream = warp.stream_from_torch(torch.cuda.current_stream(self.device))
            stream.wait_stream(torch_stream)
            work()
            torch_stream.wait_stream(stream)
