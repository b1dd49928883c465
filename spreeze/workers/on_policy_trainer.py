"""Learns from rollouts, one by one.

With a lag of 1 (HTS-RL): while rollout j is collected with theta(j), theta(j+1) is learned from D(j-1), which
theta(j-1) collected; in rollout 0 there is nothing to learn, so theta(1) = theta(0). With a lag of 0 (the synchronous
baseline): D(j) is collected with theta(j), and then theta(j+1) is learned from it. All that a later rollout depends on
is stored before the swap in memory that outlives this process. The successor of a killed learner reads the state of the
rollout and learns the same again, unless the next state is stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

from spreeze.algorithms.algorithm import LazySnapshot
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.errors import WorkerError
from spreeze.inference.policy import with_exploring
from spreeze.transport.mixing import Mixer
from spreeze.transport.rollouts import LEARNER, ROLLOUTS, LearnerMemory, Rollouts
from spreeze.transport.weights import VersionedParameters, Weights, sha256_of
from spreeze.types import Arrays, RolloutBatch

Progress = Callable[[int], float]  # env steps of a learner -> share of the run that is over
FINGERPRINTS = "fingerprints.jsonl"
_AVERAGE = "policy_average/"  # prefix of the averaged weights' names among the arrays of a learner's state
_MAX_SKIPPED_ROLLOUTS = 5


OnPolicy = TypeVar("OnPolicy", bound=OnPolicyAlgorithm)


class RolloutTrainer(Generic[OnPolicy]):
    """Base of the trainers that learn from rollouts; independent of processes."""

    algorithm: OnPolicy
    batch_size: int
    learn_s: float
    _lag: int = 0  # rollouts between the policy that collected and the one that learns

    def health(self) -> dict[str, float]:
        return self.algorithm.health()

    def value_snapshot(self) -> LazySnapshot | None:
        return self.algorithm.value_snapshot(self.algorithm.return_scale)

    def metrics(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        return {
            "updates": self.algorithm.updates,
            "wait_s": wait_s,
            "learn_s": self.learn_s,
            "publish_s": publish_s,
            "policy_lag": self._lag,
            "batch_size": self.batch_size,
            "updates_skipped": self.algorithm.updates_skipped(),
            "rollout_uses": math.nan,
            "rollouts_dropped": math.nan,  # there is no circular buffer
            **self.algorithm.metrics(),
        }


class OnPolicyTrainer(RolloutTrainer[OnPolicyAlgorithm]):
    def __init__(
        self,
        algorithm: OnPolicyAlgorithm,
        rollouts: Rollouts,
        memory: LearnerMemory,
        *,
        lag: int,
        meta: dict[str, Any],
        batch_size: int,
        progress: Progress,
        fingerprints: Path | None,
        mixer: Mixer | None = None,
    ) -> None:
        """Continues from the state of the current rollout, if there is one.

        ``lag``: 1 or 0 rollouts between the policy that collects and the one that learns; ``meta`` is published with
        every policy. The file ``fingerprints`` gets a line of hashes at each swap. A ``mixer`` shares what is learned
        with others. A WorkerError if the state is missing, a CheckpointError if it is of another network.
        """
        self.algorithm, self._rollouts, self._memory = algorithm, rollouts, memory
        self.batch_size, self._lag, self._meta = batch_size, lag, meta
        self._progress, self._fingerprints, self.mixer = progress, fingerprints, mixer
        self.learn_s = self.hand_s = 0.0
        self._learned = -1
        self._average = RolloutAverage(algorithm)
        state = memory.states.read(rollouts.current)
        if state is None and rollouts.current > 0:
            raise WorkerError(f"the learner's state of rollout {rollouts.current} is gone")
        # Samplers may have the policy that a predecessor handed over before it died. It is not learned again: mixed
        # with the others' present weights, it would be another policy with the same number.
        following = None if state is None else memory.states.read(rollouts.current + 1)
        latest = state if following is None else following
        if latest is not None:
            algorithm.load_state_arrays(latest.arrays)
            algorithm.load_state_json(latest.meta["algorithm"])
            self._average.restore(latest.arrays)
        if following is not None:
            self._learned = rollouts.current
        self._hand_over(rollouts.current + (following is not None))
        self.continued = state is not None
        self.updates = algorithm.updates if state is None else int(state.meta["updates"])
        """Updates at the start of this rollout."""
        self._skipped_rollouts, self._skipped = 0, algorithm.updates_skipped()
        if mixer is not None:
            if mixer.spec.mixing == "all_reduce":
                algorithm.share_gradients(mixer.reduce)
            mixer.statistics = algorithm.averaged_statistics()
            mixer.begin(algorithm.parameters(), rollouts.current)

    def _hand_over(self, current: int) -> None:
        """Stores state and policy of a rollout, for inference workers and a successor."""
        start = perf_counter()
        algorithm = self.algorithm
        state = {"algorithm": algorithm.state_json(), "updates": algorithm.updates}
        self._memory.states.publish(algorithm.state_arrays() | self._average.state_arrays(), state, 0, current)
        meta = {**algorithm.policy_meta(), **self._meta, "updates": algorithm.updates}
        self._memory.policies.publish(self._average.policy_arrays(), meta, 0, current)
        self.hand_s += perf_counter() - start

    def learn(self) -> bool:
        """Learns what is due in this rollout, once; False if that is done, or the rollout is not full yet (lag 0)."""
        current = self._rollouts.current
        if self._learned == current or (self._lag == 0 and not self._rollouts.full):
            return False
        source = current - self._lag
        if source >= self._rollouts.first:
            start = perf_counter()
            versions = self._rollouts.versions(source)
            if (versions != source).any():
                policies = np.unique(versions).tolist()
                raise WorkerError(f"rows of rollout {source} were collected by the policies of {policies[:5]}")
            progress = self._progress(self._rollouts.env_steps_before(source))
            waited_s = self.waited_s
            if self.mixer is None:
                self.algorithm.learn(self._rollouts.batch(source), progress)
            else:
                self._learn_and_mix(self.mixer, self._rollouts.batch(source), progress)
            self._average.advance()
            self.learn_s += perf_counter() - start - (self.waited_s - waited_s)
            self._check_progress()
        self._hand_over(current + 1)
        self._learned = current
        return True

    def _learn_and_mix(self, mixer: Mixer, batch: RolloutBatch, progress: float | None) -> None:
        algorithm, before = self.algorithm, self.algorithm.parameters()
        mixer.statistics = start = algorithm.averaged_statistics()
        algorithm.learn(batch, progress)
        learned = algorithm.averaged_statistics()
        mixer.statistics = learned + (mixer.statistics - start)  # shared gradients' ones are from before this rollout
        algorithm.set_parameters(mixer.mix(before, algorithm.parameters(), self._rollouts.current + 1))
        if not np.array_equal(mixer.statistics, learned):
            algorithm.set_averaged_statistics(mixer.statistics)

    @property
    def waited_s(self) -> float:
        """Time spent waiting for other learners."""
        return 0.0 if self.mixer is None else self.mixer.waited_s

    def _check_progress(self) -> None:
        algorithm = self.algorithm
        skipped, self._skipped = algorithm.updates_skipped() - self._skipped, algorithm.updates_skipped()
        self._skipped_rollouts = self._skipped_rollouts + 1 if 0 < skipped == algorithm.updates - self.updates else 0
        if self._skipped_rollouts > _MAX_SKIPPED_ROLLOUTS:
            raise WorkerError(
                f"in {self._skipped_rollouts} rollouts in a row every update had a non-finite loss or gradient; "
                "lower the learning rate, or check the scale of rewards"
            )

    def swap(self) -> bool:
        """Starts the next rollout if this one is full and learning is done; returns whether it did."""
        current = self._rollouts.current
        if self._learned != current or not self._rollouts.full:
            return False
        self._rollouts.mark()
        if self._fingerprints is not None:
            self._write_fingerprints(self._fingerprints, current)
        self.updates = self.algorithm.updates
        self._rollouts.swap()
        if self.mixer is not None:
            self.mixer.board["env_steps"][self.mixer.spec.learner] = self.env_steps
        return True

    def _write_fingerprints(self, path: Path, current: int) -> None:
        state = json.dumps(self.algorithm.state_json(), sort_keys=True).encode()
        line = {
            "interval": current,
            "trajectories": self._rollouts.trajectories_sha256(current),
            "parameters": sha256_of(dict(self.algorithm.policy_arrays())),
            "learner": sha256_of(self.algorithm.state_arrays(), state),
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @property
    def env_steps(self) -> int:
        """Env steps of all finished rollouts since the run started."""
        return self._rollouts.env_steps_before(self._rollouts.current)

    def policy_snapshot(self) -> tuple[Callable[[], Arrays], dict[str, Any]]:
        """Policy of this rollout, theta(j), as it was handed over; of several learners that mix, the mean of theirs."""
        weights, mixer = _read(self._memory.policies, self._rollouts.current), self.mixer
        return lambda: weights.arrays if mixer is None else mixer.mean_policy(weights.arrays), weights.meta

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Returns tensors and JSON from which a resume restarts this rollout."""
        rollouts = self._rollouts
        state, kept = _read(self._memory.states, rollouts.current), rollouts.state_arrays(with_batch=self._lag == 1)
        tensors = {LEARNER + name: array for name, array in state.arrays.items()}
        tensors |= {ROLLOUTS + name: array for name, array in kept.items()}
        return tensors, {
            "interval": rollouts.current,
            "collected_env_steps": self.env_steps,
            "lag": self._lag,
            "learner": state.meta,
            "updates": state.meta["updates"],
        }

    def parameters_sha256(self) -> str:
        """Hash of the learner's arrays at the start of this rollout; equal runs have equal hashes."""
        return sha256_of(_read(self._memory.states, self._rollouts.current).arrays)

    def metrics(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        metrics = super().metrics(wait_s=wait_s + self.waited_s, publish_s=publish_s + self.hand_s)
        return metrics | ({} if self.mixer is None else self.mixer.metrics())


class RolloutAverage:
    """An exponential average of an on-policy algorithm's policy, one step after each rollout learned from.

    With ``policy_average`` = 0 it is the newest policy. Over u updates it keeps ``policy_average ** u`` of itself,
    after r rollouts no more than r / (9 + r): the first weights are soon forgotten. The running mean and deviation of
    observations are averaged with the weights learned with them.
    """

    def __init__(self, algorithm: OnPolicyAlgorithm) -> None:
        self._algorithm, self._decay = algorithm, algorithm.policy_average
        self._arrays = {name: np.array(array) for name, array in algorithm.policy_arrays().items()}
        self._rollouts, self._updates = 0, algorithm.updates

    def advance(self) -> None:
        """Takes a step from the algorithm's policy."""
        if not self._decay:
            return
        self._rollouts += 1
        kept = min(self._decay ** (self._algorithm.updates - self._updates), self._rollouts / (9 + self._rollouts))
        self._updates = self._algorithm.updates
        for name, array in self._algorithm.policy_arrays().items():
            average = self._arrays[name]
            self._arrays[name] = average + np.float32(1.0 - kept) * (array - average)  # the old one may be being read

    def policy_arrays(self) -> Arrays:
        """The average, and beside it the newest weights, which collect rollouts."""
        newest = dict(self._algorithm.policy_arrays())
        return with_exploring(self._arrays, newest) if self._decay else newest

    def state_arrays(self) -> Arrays:
        if not self._decay:
            return {}
        return {_AVERAGE + name: array for name, array in self._arrays.items()} | {_AVERAGE: np.array(self._rollouts)}

    def restore(self, arrays: Arrays) -> None:
        """Continues the average among a learner's arrays; starts again at its policy where there is none."""
        self._updates, self._rollouts = self._algorithm.updates, int(arrays.get(_AVERAGE, 0))
        for name, array in self._algorithm.policy_arrays().items():
            self._arrays[name] = np.array(arrays.get(_AVERAGE + name, array))


def _read(channel: VersionedParameters, current: int) -> Weights:
    weights = channel.read(current)
    if weights is None:
        raise WorkerError(f"the stored policy or learner state of rollout {current} is missing")
    return weights
