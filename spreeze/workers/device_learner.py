"""The learner of mode ``device``: it steps the environments itself, on its device, and learns in turns with that.

With replay, each step of all environments is followed by the updates that are due, as many as draw
``replay.samples_per_insert_min`` rows for each new one; with rollouts, one is collected, then learned from, without a
copy to the host. ``algorithms.on_device`` chooses the actions and learns from such a rollout.

Rows go from the environments to replay or to a rollout within the device. Beside them a log keeps reward and ends of
the last steps; every ``BLOCK`` steps the host reads it in one copy and counts env steps, episodes and returns as other
samplers do. Which step that is depends on counts alone, so that a run repeats.

An environment that gives a value that is not finite stores nothing from then on, and is reset when the log is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms.on_device import DeviceActor, DeviceRollout, learn_rollout
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.envs.families import family_of
from spreeze.envs.task import vector_env
from spreeze.envs.vector_task import DeviceTask, VectorStep
from spreeze.errors import BadTransition
from spreeze.inference.normalizer import DiscountedReturns
from spreeze.machine.processes import close_in_time
from spreeze.metrics.table import SLOTS
from spreeze.transport.checkpoint import Checkpoint
from spreeze.workers.buffer_learner import CheckpointedRolloutTrainer
from spreeze.workers.collectors.collector import Collector, Heartbeat, OnError
from spreeze.workers.context import WorkerContext
from spreeze.workers.gpu_replay import CudaGraph, DeviceReplay, DeviceRows
from spreeze.workers.jobs import DeviceReplayJob, DeviceRolloutJob
from spreeze.workers.learner import CheckpointedUpdateLoop, Learner
from spreeze.workers.replay_learner import ReplayUpdateLoop
from spreeze.workers.roles import Phase
from spreeze.workers.rollout_learner import Progress, on_policy_algorithm, progress_of
from spreeze.workers.torch_devices import open_device, resolve_device

_UPDATES, _ENV_STEPS = SLOTS["learner"].index("updates"), SLOTS["sampler"].index("env_steps")
_POLICY_VERSION = SLOTS["sampler"].index("policy_version")
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
        heartbeat: Heartbeat,
    ) -> None:
        """``make_env`` makes all environments from a seed; their rewards are added to ``returns``."""
        super().__init__(num_envs, nan_policy=nan_policy, on_error=on_error, heartbeat=heartbeat)
        self._make_env, self._sink, self._actor, self._discounted = make_env, sink, actor, returns
        device = actor.device
        self._reward_log = torch.zeros((BLOCK, num_envs), device=device)
        self._code_log = torch.zeros((BLOCK, num_envs), dtype=torch.uint8, device=device)
        self._needs_reset = torch.zeros(num_envs, dtype=torch.bool, device=device)
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

    def _store(self, actions: Tensor, step: VectorStep, version: int) -> None:
        reward_ok, obs_ok = torch.isfinite(step.reward), torch.isfinite(step.next_obs).all(1)
        if step.obs is not step.next_obs:
            obs_ok = obs_ok & torch.isfinite(step.obs).all(1)
        good = step.valid & reward_ok & obs_ok & ~self._needs_reset
        ended = (step.terminated | step.truncated) & good
        code = good * _GOOD + ended * _ENDED
        self._code_log[self._at] = code + (~reward_ok * _BAD_REWARD + ~obs_ok * _BAD_OBS) * ~self._needs_reset
        self._reward_log[self._at] = step.reward
        self._needs_reset |= ~(reward_ok & obs_ok)
        self._sink.store(self.obs, actions, step, good, ended, version)
        self.obs, self._at = step.obs, self._at + 1

    def read_back(self, *, resets: bool = True) -> None:
        """Reads the log, counts what it holds, and resets environments that gave a bad value if it ``resets`` them."""
        steps, self._at = self._at, 0
        if not steps:
            return
        reward, code = self._reward_log[:steps].cpu().numpy(), self._code_log[:steps].cpu().numpy()
        self._sink.read_back()
        good, over = (code & _GOOD) > 0, (code & _ENDED) > 0
        reward = np.where(good, reward, np.float32(0.0))
        self.counts.env_steps += int(good.sum()) - steps * self.num_envs
        for t in range(steps):
            self._episode_totals += reward[t], good[t]
            for index in np.flatnonzero(over[t]).tolist():
                self._end_episode_totals(index)
                self._count_episode(index)
        if self._discounted is not None:
            self._discounted.add(reward, over | ~good)
            self.counts.returns = self._discounted.sums()
        if resets:
            self._reset_bad_envs(code)

    def _reset_bad_envs(self, code: np.ndarray) -> None:
        bad = np.argwhere(code >= _BAD_REWARD)
        if not len(bad):
            return
        t, first = bad[0].tolist()
        field = "reward" if code[t, first] & _BAD_REWARD else "observation"
        others = [index for index in dict.fromkeys(bad[:, 1].tolist()) if index != first]
        where = f"environment {first}" + (f" (and {', '.join(map(str, others[:_MAX_NAMED]))})" if others else "")
        self.counts.transitions_rejected += len(bad) - 1
        self._count_error(where, BadTransition(field, "NaN or infinity"))
        self._episode_totals[:, [first, *others]] = 0.0
        try:
            with torch.no_grad():
                self.obs = self._env.restart(self._needs_reset, self.obs)
                if bool(torch.isfinite(self.obs).all()):
                    self._needs_reset.zero_()
                    return
            raise BadTransition("observation", "NaN or infinity at a reset")
        except Exception as error:
            self._lose_all(error)

    def _lose_all(self, error: Exception) -> None:
        """Makes the environments again: all their episodes are lost."""
        self._count_error("the environments", error, effect="all their episodes are lost")
        self.read_back(resets=False)
        close_in_time(self._env.close)
        self._make_envs()

    def _make_envs(self) -> None:
        while True:
            self._heartbeat(Phase.INIT)
            made: DeviceTask | None = None
            try:
                made = self._make_env(self._next_seed)
                with torch.no_grad():
                    self.obs = made.reset(self._next_seed)
                self._env = made
                break
            except Exception as error:
                close_in_time(*() if made is None else (made.close,))
                self._count_error("the environments", error, effect="they are made again")
        self._next_seed += self.num_envs  # other episodes after an error
        self._needs_reset.zero_()
        self._episode_totals[...] = 0.0
        self._sink.forget()

    def close(self) -> None:
        close_in_time(self._env.close)


def learn_from_device_replay(context: WorkerContext, job: DeviceReplayJob) -> Iterator[None]:
    """Collects and learns until asked to stop; writes a final checkpoint and final weights."""
    with contextlib.ExitStack() as device:
        yield from Learner(context, job, DeviceReplayUpdateLoop(context, job, device)).turns()


def learn_from_device_rollouts(context: WorkerContext, job: DeviceRolloutJob) -> Iterator[None]:
    """Collects and learns until asked to stop; writes a final checkpoint and final weights."""
    with contextlib.ExitStack() as stack, open_device(job.learner, job.spec, job.settings.hidden_sizes, job.batch_size):
        yield from Learner(context, job, DeviceRolloutUpdateLoop(context, job, stack)).turns()


class Sampling:
    """The sampler's part of the learner: its environments, and the row of the status table with their counters."""

    def __init__(
        self,
        context: WorkerContext,
        job: DeviceReplayJob | DeviceRolloutJob,
        sink: DeviceSink,
        actor: DeviceActor,
        returns: DiscountedReturns | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """``stack`` closes the environments."""
        spec, self._context = job.spec, context
        self.slots = context.status.slots(job.envs.row)
        self._base = self.slots.tolist()  # a restarted learner goes on counting
        # Another stream of random numbers after a restart, so that no episode is repeated.
        seed_offset = int(self._base[_ENV_STEPS]) % 2**31
        num_envs = job.envs.num_envs
        self.collector = DeviceCollector(
            lambda seed: DeviceTask(vector_env(spec, num_envs, seed), spec, actor.device),
            num_envs, sink, actor, returns,
            seed=job.envs.seed + seed_offset, nan_policy=job.envs.nan_policy, on_error=context.env_error,
            heartbeat=context.heartbeat,
        )  # fmt: skip
        stack.callback(self.collector.close)
        self.collector.on_episode = context.episode
        family, physics = family_of(spec.env_id), ""
        if family is not None and family.own_args is not None:
            physics = f"; evaluations use Gymnasium's engine on the CPU, whose physics differ from {family.prefix}'s"
        text = f"{job.envs.num_envs} environments, their rows and the updates are on {actor.device}, in this process"
        context.event("info", text + physics)

    def step(self, version: int, *, uniform: bool = False) -> None:
        self._context.heartbeat(Phase.STEP)
        self.collector.step(version, uniform=uniform)
        self.post(version)

    @property
    def stepping_s(self) -> float:
        counts = self.collector.counts
        return counts.policy_s + counts.env_s + counts.write_s

    def read_back(self, version: int) -> None:
        self.collector.read_back()
        self.post(version)

    def post(self, version: int) -> None:
        self.collector.counts.post(self.slots, self._base)
        self.slots[_POLICY_VERSION] = version


class DeviceReplayUpdateLoop(ReplayUpdateLoop):
    """Replay on the device, filled by this process."""

    _job: DeviceReplayJob

    def __init__(self, context: WorkerContext, job: DeviceReplayJob, stack: contextlib.ExitStack) -> None:
        device = torch.device(resolve_device(job.learner.device))
        launched = job.learner.updates_per_launch if device.type == "cuda" else 0
        learner = dataclasses.replace(job.learner, gpu_replay=False, updates_per_launch=launched)
        job = dataclasses.replace(job, learner=learner)
        replay = DeviceReplay(job.layout, job.envs.capacity, learner.batch_size, device, job.seed)
        super().__init__(context, job, replay, stack, replay)
        self.ends_by_env_steps = self._is_serial = True
        self._rows, trainer, config = replay, self.trainer, job.settings
        trainer.use_gpu_replay(replay, lambda: CudaGraph(device))
        self._actor = DeviceActor(trainer.algorithm, job.envs.seed + 2)
        returns = None if trainer.statistics.returns is None else DiscountedReturns(config.gamma)
        sink = DeviceRows(replay, config.n_step, config.gamma, job.envs.num_envs)
        self._sampling = Sampling(context, job, sink, self._actor, returns, stack)

    def train(self) -> bool:
        """One step of all environments, then the updates that are due."""
        updates, known = self.trainer.updates, self._rows.inserted
        self._sampling.step(updates, uniform=not self.learning_started and updates == 0)
        if not self.learning_started and self._rows.total_committed() >= self._job.limiter.learning_starts:
            self._sampling.read_back(updates)  # some steps may have given no row
        if self._rows.inserted != known:
            self._update_statistics()
            self._actor.scale_by(self.trainer.statistics.normalizer)
        start = perf_counter()
        self.stepping_s = self._sampling.stepping_s
        super().train()
        self._sampling.collector.counts.wait_s += perf_counter() - start
        return True


class DeviceRolloutUpdateLoop(CheckpointedUpdateLoop):
    """Rollouts on the device, collected by this process."""

    _job: DeviceRolloutJob
    trainer: DeviceRolloutTrainer

    def __init__(self, context: WorkerContext, job: DeviceRolloutJob, stack: contextlib.ExitStack) -> None:
        super().__init__(context, job)
        algorithm, envs, spec = on_policy_algorithm(job, "on-policy"), job.envs, job.spec
        algorithm.on_gradient = lambda: context.heartbeat(Phase.UPDATE)
        actor = self._actor = DeviceActor(algorithm, envs.seed + 2)
        self._rollout = DeviceRollout(envs.steps, envs.num_envs, spec.obs_dim, spec.action_dim, actor)
        progress = progress_of(job, self.training_s)
        self.trainer = DeviceRolloutTrainer(
            algorithm, progress, job.batch_size, {"algo": job.algo, "env": dataclasses.asdict(spec)}
        )
        self._sampling = Sampling(context, job, self._rollout, actor, algorithm.returns, stack)

    def restore(self, checkpoint: Checkpoint | None, epoch: int) -> None:
        super().restore(checkpoint, epoch)
        self._actor.scale_by(self.trainer.algorithm.normalizer)

    def train(self) -> bool:
        """One step of all environments; at the end of a rollout also all updates from it."""
        self._sampling.step(self.trainer.updates)
        self.stepping_s = self._sampling.stepping_s
        if self._rollout.full:
            self._sampling.read_back(self.trainer.updates)
            start = perf_counter()
            self._context.heartbeat(Phase.UPDATE)
            self.trainer.learn(self._rollout, self.env_steps())
            self._actor.scale_by(self.trainer.algorithm.normalizer)
            self._context.slots[_UPDATES] = self.trainer.updates
            self._sampling.collector.counts.wait_s += perf_counter() - start
        return True

    def env_steps(self) -> int:
        return self._job.previous_env_steps + int(self._sampling.slots[_ENV_STEPS])


class DeviceRolloutTrainer(CheckpointedRolloutTrainer[OnPolicyAlgorithm]):
    """Learns from one rollout after another, each collected by the newest policy."""

    def __init__(self, algorithm: OnPolicyAlgorithm, progress: Progress, batch_size: int, meta: dict[str, Any]) -> None:
        """The learning rate follows ``progress``; ``meta`` is published with every policy."""
        super().__init__(algorithm, meta)
        self._progress, self.batch_size = progress, batch_size

    def learn(self, rollout: DeviceRollout, env_steps: int) -> None:
        """Takes all updates from a full rollout, counts its last observations, and empties it."""
        start = perf_counter()
        learn_rollout(self.algorithm, rollout, self._progress(env_steps))
        if self.algorithm.normalizer is not None:
            last = rollout.obs[-1][rollout.good[-1]].cpu().numpy()
            if len(last):
                self.algorithm.normalizer.update(last)
        rollout.at = 0
        self._average.advance()
        self.learn_s += perf_counter() - start
