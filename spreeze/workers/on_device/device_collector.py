"""Steps environments on the learner's device, and reports to the host at intervals.

Actions are chosen by the parameters that the learner trains: no copy of them is made. The distributions are those of
``inference.heads`` for actions that are numbers. Noise has its own generator, so that the number of actions does not
affect updates.

Rows go from the environments to replay or to a rollout within the device. Beside them a log keeps reward and ends of
the last steps; every ``BLOCK`` steps the host reads it in one copy and counts env steps, episodes and returns as other
samplers do. Which step that is depends on counts alone, so that a run repeats.

An environment that gives a value that is not finite stores nothing from then on, and is reset when the log is read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.fused_mlp import MlpBuffers, mlp_forward
from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.algorithms.on_policy import MlpActorCritic, OnPolicyAlgorithm
from spreeze.envs.on_device.device_task import DeviceStep, DeviceTask
from spreeze.envs.task import Task
from spreeze.errors import BadTransition, UsageError
from spreeze.inference.heads import LOG_STD_MAX, LOG_STD_MIN
from spreeze.inference.normalizer import OBS_CLIP, DiscountedReturns, Normalizer
from spreeze.workers.collectors.collector import Collector, OnError, OnProgress
from spreeze.workers.on_device.device_replay import DeviceRows
from spreeze.workers.roles import Phase


class DeviceActor:
    """A policy for N environments at a time."""

    def __init__(self, algorithm: OffPolicyAlgorithm | OnPolicyAlgorithm, seed: int) -> None:
        """Raises a UsageError for a policy of another kind."""
        meta: dict[str, Any] = algorithm.policy_meta()
        self._kind, self._actions = meta["policy"], int(meta.get("action_dim", 0))
        net: Any = algorithm.net if isinstance(algorithm, OnPolicyAlgorithm) else algorithm.actor
        if self._kind not in ("squashed_gaussian", "deterministic", "gaussian") or net is None:
            raise UsageError(f"a policy of kind {self._kind} cannot act on a device; it needs numbers as actions")
        self._net: Any = net if isinstance(algorithm, OnPolicyAlgorithm) else net.online
        minimum = float(meta.get("exploration_noise", 0.0))
        self._noise = minimum, float(meta.get("exploration_noise_max", minimum))
        self.device = self._net.flat.device
        self._scale: Tensor | None = None
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._buffers: MlpBuffers | None = None
        self.log_prob: Tensor | None = None
        """[N], in nat, of the latest actions of an on-policy algorithm."""

    def scale_by(self, normalizer: Normalizer | None) -> None:
        """Scales observations by these statistics from now on."""
        if normalizer is not None:
            self._scale = statistics_of(normalizer, self.device)

    def uniform(self, rows: int) -> Tensor:
        """Actions [N, A], each as likely as any other."""
        return torch.rand((rows, self._actions), generator=self._generator, device=self.device) * 2.0 - 1.0

    def act(self, obs: Tensor) -> Tensor:
        """Actions [N, A] for observations [N, O], in [-1, 1]; those of on-policy algorithms are as sampled."""
        out = self._outputs(obs if self._scale is None else scaled(obs, self._scale))
        noise = torch.randn((len(obs), self._actions), generator=self._generator, device=self.device)
        if self._kind == "gaussian":
            action: Tensor = out.t() + self._net.log_std.exp() * noise
            self.log_prob = losses.gaussian(out, self._net.log_std, action.t())[1]
            return action
        if self._kind == "deterministic":
            sizes = torch.linspace(*self._noise, len(obs), device=self.device).unsqueeze(1)
            return (out.t().tanh() + sizes * noise).clamp(-1.0, 1.0)
        std = out[self._actions :].t().clamp(LOG_STD_MIN, LOG_STD_MAX).exp()
        return (out[: self._actions].t() + std * noise).tanh()

    def _outputs(self, obs: Tensor) -> Tensor:
        """Outputs [K, N] of the network, which the next call overwrites."""
        if isinstance(self._net, MlpActorCritic):
            return self._net.forward(obs)[0]
        if self._buffers is None or self._buffers.out.shape[2] != len(obs):
            self._buffers = MlpBuffers.allocate(self._net, len(obs))
        return mlp_forward(self._net, obs.unsqueeze(0), self._buffers)[0]


def statistics_of(normalizer: Normalizer, device: torch.device) -> Tensor:
    """Means and deviations of observations [2, O] on a device."""
    return torch.from_numpy(np.stack((normalizer.mean, normalizer.std)).astype(np.float32)).to(device)


def scaled(obs: Tensor, statistics: Tensor) -> Tensor:
    """Observations [M, O] as the networks take them, a new tensor."""
    return ((obs - statistics[0]) / statistics[1]).clamp_(-OBS_CLIP, OBS_CLIP)


class DeviceRollout:
    """T env steps of N environments on a device; ``store`` fills it from the first step on."""

    def __init__(self, steps: int, num_envs: int, obs_dim: int, action_dim: int, actor: DeviceActor) -> None:
        """``actor`` has the log-probabilities of the actions that are stored."""
        shape, device, self._actor = (steps, num_envs), actor.device, actor
        self.obs, self.next_obs = (torch.zeros((*shape, obs_dim), device=device) for _ in range(2))
        self.action = torch.zeros((*shape, action_dim), device=device)
        self.log_prob, self.reward = (torch.zeros(shape, device=device) for _ in range(2))
        self.terminated, self.over, self.good = (torch.zeros(shape, dtype=torch.bool, device=device) for _ in range(3))
        self.steps, self.at = steps, 0

    @property
    def full(self) -> bool:
        return self.at == self.steps

    def store(self, obs: Tensor, action: Tensor, step: DeviceStep, good: Tensor, ended: Tensor, version: int) -> None:
        """Adds a step; where it is not ``good`` [N], values may not be finite. ``ended`` [N]: an episode is over."""
        t = self.at
        assert self._actor.log_prob is not None
        self.obs[t], self.next_obs[t], self.action[t] = obs.nan_to_num(0.0, 0.0, 0.0), step.next_obs, action
        self.log_prob[t], self.reward[t] = self._actor.log_prob, torch.where(good, step.reward, 0.0)
        self.terminated[t], self.over[t], self.good[t] = step.terminated & good, ended | ~good, good
        self.at = t + 1

    def read_back(self) -> None:
        """Does nothing: the host knows where the rollout ends."""

    def forget(self) -> None:
        self.at = 0


BLOCK = 64  # steps of all environments between two reads of the log; reading costs the device a pause of its work
_MAX_NAMED = 8
_GOOD, _ENDED, _BAD_REWARD, _BAD_OBS = 1, 2, 4, 8

DeviceSink = DeviceRows | DeviceRollout


class DeviceCollector(Collector):
    """N environments on a device."""

    def __init__(
        self,
        make_env: Callable[[int], DeviceTask],
        num_envs: int,
        sink: DeviceSink,
        actor: DeviceActor,
        returns: DiscountedReturns | None,
        *,
        seed: int,
        nan_policy: str,
        on_error: OnError,
        on_progress: OnProgress,
    ) -> None:
        """``make_env`` makes all environments from a seed; their rewards are added to ``returns``."""
        super().__init__(_no_task, num_envs, nan_policy=nan_policy, on_error=on_error, on_progress=on_progress)
        self._make_env, self._sink, self._actor, self._discounted = make_env, sink, actor, returns
        device = actor.device
        self._reward_log = torch.zeros((BLOCK, num_envs), device=device)
        self._code_log = torch.zeros((BLOCK, num_envs), dtype=torch.uint8, device=device)
        self._sick = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._at, self._next_seed = 0, seed
        self.obs = torch.zeros(0)
        self._make_envs()

    def step(self, version: int, *, uniform: bool = False) -> None:
        """One step of all environments, by the actor or by ``uniform`` random actions."""
        start = perf_counter()
        with torch.no_grad():
            actions = self._actor.uniform(self.num_envs) if uniform else self._actor.act(self.obs)
            chosen = perf_counter()
            self.counts.policy_s += chosen - start
            try:
                step = self._env.step(actions)
            except Exception as error:
                self._lose_all(error)
                return
            stepped = perf_counter()
            self.counts.env_s += stepped - chosen
            self._store(actions, step, version)
        self.counts.env_steps += self.num_envs  # an estimate, which the log corrects
        written = perf_counter()
        self.counts.write_s += written - stepped
        if self._at == BLOCK:
            self.read_back()
            self.counts.env_s += perf_counter() - written

    def _store(self, actions: Tensor, step: DeviceStep, version: int) -> None:
        reward_ok, obs_ok = torch.isfinite(step.reward), torch.isfinite(step.next_obs).all(1)
        if step.obs is not step.next_obs:
            obs_ok = obs_ok & torch.isfinite(step.obs).all(1)
        good = step.valid & reward_ok & obs_ok & ~self._sick
        ended = (step.terminated | step.truncated) & good
        code = good * _GOOD + ended * _ENDED
        self._code_log[self._at] = code + (~reward_ok * _BAD_REWARD + ~obs_ok * _BAD_OBS) * ~self._sick
        self._reward_log[self._at] = step.reward
        self._sick |= ~(reward_ok & obs_ok)
        self._sink.store(self.obs, actions, step, good, ended, version)
        self.obs, self._at = step.obs, self._at + 1

    def read_back(self) -> None:
        """Reads the log, counts what it holds, and resets environments that gave a bad value."""
        steps, self._at = self._at, 0
        if not steps:
            return
        reward, code = self._reward_log[:steps].cpu().numpy(), self._code_log[:steps].cpu().numpy()
        self._sink.read_back()
        good, over = (code & _GOOD) > 0, (code & _ENDED) > 0
        reward = np.where(good, reward, np.float32(0.0))
        self.counts.env_steps += int(good.sum()) - steps * self.num_envs
        for t in range(steps):
            self._running += reward[t], good[t]
            for index in np.flatnonzero(over[t]).tolist():
                self._end_running(index)
                self._count_episode(index)
        if self._discounted is not None:
            self._discounted.add(reward, over | ~good)
            self.counts.returns = self._discounted.sums()
        self._heal(code)

    def _heal(self, code: np.ndarray) -> None:
        bad = np.argwhere(code >= _BAD_REWARD)
        if not len(bad):
            return
        t, first = bad[0].tolist()
        field = "reward" if code[t, first] & _BAD_REWARD else "observation"
        others = [index for index in dict.fromkeys(bad[:, 1].tolist()) if index != first]
        where = f"environment {first}" + (f" (and {', '.join(map(str, others[:_MAX_NAMED]))})" if others else "")
        self.counts.transitions_rejected += len(bad) - 1
        self._count_error(where, BadTransition(field, "NaN or infinity"))
        self._running[:, [first, *others]] = 0.0
        try:
            with torch.no_grad():
                self.obs = self._env.restart(self._sick, self.obs)
                if bool(torch.isfinite(self.obs).all()):
                    self._sick.zero_()
                    return
            raise BadTransition("observation", "NaN or infinity at a reset")
        except Exception as error:
            self._lose_all(error)

    def _lose_all(self, error: Exception) -> None:
        """Makes the environments again: all their episodes are lost."""
        self._count_error("environment 0", error)
        self.read_back()
        self._env.close()
        self._make_envs()

    def _make_envs(self) -> None:
        while True:
            self._on_progress(Phase.INIT)
            try:
                self._env = self._make_env(self._next_seed)
                with torch.no_grad():
                    self.obs = self._env.reset(self._next_seed)
                break
            except Exception as error:
                self._count_error("environment 0", error)
        self._next_seed += self.num_envs  # other episodes after an error
        self._sick.zero_()
        self._running[...] = 0.0
        self._sink.forget()

    def close(self) -> None:
        self._env.close()


def _no_task() -> Task:
    raise AssertionError("environments on a device are made together")
