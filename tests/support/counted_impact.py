"""Mode impact by counts: samplers, buffer and learner take turns in one process.

Who is fast or slow does not matter then: a seed gives the same curve on every machine of one kind, and lag is a setting
(``broadcast_updates``). The learner goes on while there is a rollout whose turn it is; else the next sampler fills one.
So the samplers are what everybody waits for, and each rollout is used K times.
"""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

from whole_runs import task_settings

from spreeze.algorithms import create_on_policy
from spreeze.algorithms.impact import AsyncOnPolicy
from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithm_bases import AsyncOnPolicyConfig
from spreeze.config.layers import Layer, Settings
from spreeze.envs.task import Task, open_task
from spreeze.errors import ConfigError
from spreeze.inference.policy import Policy
from spreeze.machine.output import stdout_to_stderr
from spreeze.runtime.plan import RunPlan
from spreeze.transport.rollouts import Rollouts
from spreeze.transport.weights import VersionedParameters
from spreeze.types import EnvSpec
from spreeze.workers.buffer_learner import BufferTrainer
from spreeze.workers.collectors.rollout_collector import RolloutCollector
from spreeze.workers.episodes.lockstep import envs_at_once, run_episodes, score
from spreeze.workers.samplers import NewestPolicy
from spreeze.workers.torch_devices import learner_threads

COUNTED_SAMPLERS = 2
"""The same on every machine."""


class CountedCurve(NamedTuple):
    """Greedy returns of one seed, and the mean lag of its updates."""

    env_steps: list[int]
    updates: list[int]
    returns: list[float]
    lag: float


def counted_curve(flags: list[str], env_steps: int, every: int, until: float = math.inf) -> CountedCurve:
    """Learns with the flags of ``spreeze.train`` and evaluates greedy episodes each ``every`` env steps.

    It ends with ``env_steps``, or with the first return above ``until``.
    """
    with stdout_to_stderr(), contextlib.ExitStack() as stack:
        settings, spec = _settings(flags)
        plan = RunPlan(settings=settings, spec=spec, samplers=COUNTED_SAMPLERS, free_core=True)
        config, each = settings.config, settings.config.rollout.envs_per_sampler
        if not isinstance(config.on_policy, AsyncOnPolicyConfig):
            raise ConfigError(f"--algo {config.run.algo}: it does not learn from rollouts of any age")
        stack.enter_context(learner_threads(spec, 1, "cpu"))
        rollouts = stack.enter_context(contextlib.closing(Rollouts.create(plan.rollout_spec())))
        algorithm = create_on_policy(
            config.run.algo,
            spec,
            config.on_policy,
            config.run.seed,
            "cpu",
            correction="none",
            normalize_obs=config.env.normalize_obs,
        )
        assert isinstance(algorithm, AsyncOnPolicy)
        trainer = BufferTrainer(
            algorithm,
            rollouts,
            each,
            meta={},
            previous_env_steps=0,
            session=0.0,
            progress=lambda done: min(1.0, done / env_steps),
        )
        samplers = [
            stack.enter_context(
                contextlib.closing(
                    RolloutCollector(
                        lambda: open_task(spec),
                        spec,
                        rollouts,
                        first=index * each,
                        num_envs=each,
                        seed=config.run.seed,
                        replays=False,
                    )
                )
            )
            for index in range(COUNTED_SAMPLERS)
        ]
        return _turns(
            trainer,
            samplers,
            _Greedy(settings, spec, stack),
            config.on_policy.broadcast_updates,
            range(every, env_steps + 1, every),
            until,
        )


def _turns(
    trainer: BufferTrainer,
    samplers: list[RolloutCollector],
    greedy: _Greedy,
    broadcast_updates: int,
    due: range,
    until: float,
) -> CountedCurve:
    curve, lags, turn, version = CountedCurve([], [], [], 0.0), list[float](), 0, 0
    with contextlib.closing(VersionedParameters.create()) as weights:
        policies = [NewestPolicy(weights) for _ in samplers]
        _publish(trainer.algorithm, weights)
        while len(curve.returns) < len(due) and max(curve.returns, default=-math.inf) <= until:
            if trainer.learn():
                if trainer.updates - version >= broadcast_updates:
                    version = trainer.updates
                    _publish(trainer.algorithm, weights)
                continue
            # The next sampler; one that waits for uses of its oldest rollout is left out.
            turn = next(
                number % len(samplers)
                for number in range(turn + 1, turn + 1 + len(samplers))
                if samplers[number % len(samplers)].may_step()
            )
            policies[turn].refresh()
            while samplers[turn].advance(policies[turn]) and not samplers[turn].columns.filled:
                pass
            if trainer.env_steps >= due[len(curve.returns)]:
                curve.env_steps.append(trainer.env_steps)
                curve.updates.append(trainer.updates)
                curve.returns.append(greedy.mean(trainer.algorithm))
                lags.append(trainer.metrics(wait_s=0.0, publish_s=0.0)["policy_lag"])
    return curve._replace(lag=sum(lags) / max(1, len(lags)))


def _publish(algorithm: AsyncOnPolicy, weights: VersionedParameters) -> None:
    weights.publish(algorithm.policy_arrays(), algorithm.policy_meta(), 1, algorithm.updates)


class _Greedy:
    """The evaluator's episodes."""

    def __init__(self, settings: Settings, spec: EnvSpec, stack: contextlib.ExitStack) -> None:
        evaluation = settings.config.evaluation
        self._spec, self._seeds = spec, range(evaluation.seed, evaluation.seed + evaluation.episodes)
        self._tasks: list[Task] = []
        stack.callback(self._close)

    def _close(self) -> None:
        for task in self._tasks:
            task.close()

    def mean(self, algorithm: AsyncOnPolicy) -> float:
        policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
        return score(
            run_episodes(
                lambda: open_task(self._spec, whole_games=True),
                policy.act,
                self._seeds,
                max_envs=envs_at_once(self._spec),
                tasks=self._tasks,
            )
        )["return_mean"]


def _settings(flags: list[str]) -> tuple[Settings, EnvSpec]:
    """The settings that ``spreeze.train`` would have with these flags, and the task."""
    return task_settings([Layer("user", user_values(build_parser().parse_args(flags)))])
