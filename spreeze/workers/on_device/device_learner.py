"""The learner of mode ``device``: it steps the environments itself, on its device, and learns in turns with that.

With replay, each step of all environments is followed by the updates that are due, as many as draw
``replay.samples_per_insert_min`` rows for each new one; with rollouts, one is collected, then learned from, without a
copy to the host. Advantages are those of ``losses.advantages``, in torch; a step without a transition (a reset, a bad
value) has advantage 0 and its own value as the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from spreeze.algorithms.on_policy import OnPolicyAlgorithm, Samples
from spreeze.envs.families import family_of
from spreeze.envs.make import import_user_module, parse_args
from spreeze.envs.on_device.device_task import DeviceTask
from spreeze.envs.vector_task import make_vector
from spreeze.inference.normalizer import REWARD_CLIP, DiscountedReturns
from spreeze.metrics.table import SLOTS
from spreeze.transport.checkpoint import Checkpoint
from spreeze.workers.buffer_learner import RestoredRolloutTrainer
from spreeze.workers.context import WorkerContext
from spreeze.workers.gpu_replay import CudaGraph
from spreeze.workers.jobs import DeviceReplayJob, DeviceRolloutJob
from spreeze.workers.learner import Learner, RestoredUpdateLoop
from spreeze.workers.on_device.device_collector import (
    DeviceActor,
    DeviceCollector,
    DeviceRollout,
    DeviceSink,
    scaled,
    statistics_of,
)
from spreeze.workers.on_device.device_replay import DeviceReplay, DeviceRows
from spreeze.workers.on_policy_trainer import Progress
from spreeze.workers.replay_learner import ReplayUpdateLoop
from spreeze.workers.roles import Phase
from spreeze.workers.rollout_learner import on_policy_algorithm, progress_of
from spreeze.workers.torch_devices import open_device, resolve_device

_UPDATES, _ENV_STEPS = SLOTS["learner"].index("updates"), SLOTS["sampler"].index("env_steps")
_POLICY_VERSION = SLOTS["sampler"].index("policy_version")


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

        def make(seed: int) -> DeviceTask:
            if spec.import_module is not None:
                import_user_module(spec.import_module)
            return DeviceTask(
                make_vector(spec.env_id, job.envs.num_envs, seed, parse_args(spec.args)), spec, actor.device
            )

        self.collector = DeviceCollector(
            make, job.envs.num_envs, sink, actor, returns,
            seed=job.envs.seed + seed_offset, nan_policy=job.envs.nan_policy, on_error=context.env_error,
            on_progress=context.heartbeat,
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
        self.ends_by_env_steps = self._updates_in_turn = True
        self._rows, trainer, config = replay, self.trainer, job.settings
        trainer.use_gpu_replay(replay, lambda: CudaGraph(device))
        self._actor = DeviceActor(trainer.algorithm, job.envs.seed + 2)
        returns = None if trainer.statistics.returns is None else DiscountedReturns(config.gamma)
        sink = DeviceRows(replay, config.n_step, config.gamma, job.envs.num_envs)
        self._sampling = Sampling(context, job, sink, self._actor, returns, stack)

    def train(self) -> bool:
        """One step of all environments, then the updates that are due."""
        updates, known = self.trainer.updates, self._rows.inserted
        self._sampling.step(updates, uniform=not self.began and updates == 0)
        if not self.began and self._rows.total_committed() >= self._job.limiter.learning_starts:
            self._sampling.read_back(updates)  # some steps may have given no row
        if self._rows.inserted != known:
            self._update_statistics()
            self._actor.scale_by(self.trainer.statistics.normalizer)
        start = perf_counter()
        self.stepping_s = self._sampling.stepping_s
        super().train()
        self._sampling.collector.counts.wait_s += perf_counter() - start
        return True


class DeviceRolloutUpdateLoop(RestoredUpdateLoop):
    """Rollouts on the device, collected by this process."""

    _job: DeviceRolloutJob
    trainer: DeviceRolloutTrainer

    def __init__(self, context: WorkerContext, job: DeviceRolloutJob, stack: contextlib.ExitStack) -> None:
        super().__init__(context, job)
        algorithm, envs, spec = on_policy_algorithm(job, "on-policy"), job.envs, job.spec
        algorithm.on_gradient = lambda: context.heartbeat(Phase.UPDATE)
        actor = self._actor = DeviceActor(algorithm, envs.seed + 2)
        self._rollout = DeviceRollout(envs.steps, envs.num_envs, spec.obs_dim, spec.action_dim, actor)
        progress = progress_of(job, self.session_s)
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
        if self._rollout.full:
            self._sampling.read_back(self.trainer.updates)
            start, self.stepping_s = perf_counter(), self._sampling.stepping_s
            self._context.heartbeat(Phase.UPDATE)
            self.trainer.learn(self._rollout, self.env_steps())
            self._actor.scale_by(self.trainer.algorithm.normalizer)
            self._context.slots[_UPDATES] = self.trainer.updates
            self._sampling.collector.counts.wait_s += perf_counter() - start
        return True

    def env_steps(self) -> int:
        return self._job.previous_env_steps + int(self._sampling.slots[_ENV_STEPS])


class DeviceRolloutTrainer(RestoredRolloutTrainer[OnPolicyAlgorithm]):
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


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, over: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Value targets and generalized advantage estimates [T, N], as ``losses.advantages``; ``over`` ends an episode."""
    delta = reward + gamma * next_value.masked_fill(terminated, 0.0) - value
    carried = gamma * lam * (~over).float()
    for t in range(len(delta) - 2, -1, -1):
        delta[t].addcmul_(carried[t], delta[t + 1])
    return delta + value, delta


def learn_rollout(algorithm: OnPolicyAlgorithm, rollout: DeviceRollout, progress: float | None) -> None:
    """Learns from a full rollout that the current parameters have collected."""
    settings = algorithm.settings
    with torch.no_grad():
        obs, next_obs = (part.flatten(0, 1).nan_to_num(0.0, 0.0, 0.0) for part in (rollout.obs, rollout.next_obs))
        if algorithm.normalizer is not None:
            statistics = statistics_of(algorithm.normalizer, obs.device)
            obs, next_obs = scaled(obs, statistics), scaled(next_obs, statistics)
        value, next_value = (_values(algorithm, part).reshape(rollout.reward.shape) for part in (obs, next_obs))
        reward = rollout.reward
        if algorithm.returns is not None:
            reward = (reward / algorithm.return_scale).clamp_(-REWARD_CLIP, REWARD_CLIP)
        target, advantage = advantages(
            reward, value, next_value, rollout.terminated, rollout.over, settings.gamma, settings.gae_lambda
        )
        if settings.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
        target, advantage = torch.where(rollout.good, target, value), advantage * rollout.good
        columns = (part.flatten() for part in (rollout.log_prob, advantage, target, value))
        algorithm.learn_samples(Samples.of((obs, rollout.action.flatten(0, 1), *columns), None), progress)


def _values(algorithm: OnPolicyAlgorithm, obs: Tensor) -> Tensor:
    values: Tensor = algorithm.net.values(obs)  # without memory, which plans refuse
    return values
