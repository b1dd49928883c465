"""Steps environments on the learner's device, and reports to the host at intervals.

Rows go from the environments to replay or to a rollout within the device. Beside them a log keeps reward and ends of
the last steps; every ``BLOCK`` steps the host reads it in one copy and counts env steps, episodes and returns as other
samplers do. Which step that is depends on counts alone, so that a run repeats.

An environment that gives a value that is not finite stores nothing from then on, and is reset when the log is read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from spreeze.envs.on_device.device_task import DeviceStep, DeviceTask
from spreeze.envs.task import Task
from spreeze.errors import BadTransition
from spreeze.inference.normalizer import DiscountedReturns
from spreeze.workers.collectors.collector import Collector, OnError, OnProgress
from spreeze.workers.on_device.device_actor import DeviceActor
from spreeze.workers.on_device.device_replay import DeviceRows
from spreeze.workers.on_device.device_rollout import DeviceRollout
from spreeze.workers.roles import Phase

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
