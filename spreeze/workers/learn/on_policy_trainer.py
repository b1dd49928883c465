"""From rollout storages to parameters, interval by interval: what the learner process and serial mode have in common.

With a lag of 1 (HTS-RL): while interval j is collected with theta(j), theta(j+1) is learned from D(j-1), which
theta(j-1) collected; in interval 0 there is nothing to learn, theta(1) = theta(0). With a lag of 0 (the synchronous
baseline): D(j) is collected with theta(j), and then theta(j+1) is learned from it.

All that a later interval depends on is handed to memory that outlives this process before the swap: a
killed learner's successor takes the state of the interval and learns the same once more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.errors import WorkerError
from spreeze.metrics.table import blank_learner
from spreeze.transport.rollouts import LEARNER, ROLLOUTS, Handover, Rollouts
from spreeze.transport.weights import StoredParameters, VersionedParameters

Arrays = dict[str, np.ndarray]
FINGERPRINTS = "fingerprints.jsonl"
_MAX_REFUSED_INTERVALS = 5


class OnPolicyTrainer:
    """One step of learning an interval. Knows no process."""

    def __init__(
        self, algorithm: OnPolicyAlgorithm, rollouts: Rollouts, handover: Handover, *, lag: int, meta: dict[str, Any],
        batch_size: int, progress_env_steps: int | None, fingerprints: Path | None,
    ) -> None:
        """Goes on from the state of the interval, if there is one.

        Args:
            algorithm: fresh.
            rollouts: where the samplers are.
            handover: where state and policies go.
            lag: 1 or 0 intervals between the policy that collected and the one that learns.
            meta: facts that are published with every policy.
            batch_size: rows of one update, for the metrics.
            progress_env_steps: env steps at which the step size's schedule ends; None: it does not.
            fingerprints: file that gets a line of hashes at each swap; None: no hashes.

        Raises:
            CheckpointError: the state is that of another network.
            WorkerError: there should be a state, but there is none.
        """
        self.algorithm, self._rollouts, self._handover = algorithm, rollouts, handover
        self.batch_size, self._lag, self._meta = batch_size, lag, meta
        self._progress_env_steps, self._fingerprints = progress_env_steps, fingerprints
        self.learn_s = self.hand_s = 0.0
        self._learned = -1
        state = handover.states.read(rollouts.interval)
        if state is not None:
            algorithm.load_state_arrays(state.arrays)
            algorithm.load_state_json(state.meta["algorithm"])
        elif rollouts.interval > 0:
            raise WorkerError(f"the learner's state of interval {rollouts.interval} is gone")
        self._hand_over(rollouts.interval)
        self.continued = state is not None
        self.updates = algorithm.updates
        """Updates behind this interval."""
        self._refused, self._skipped = 0, algorithm.updates_skipped()

    def _hand_over(self, interval: int) -> None:
        """State and policy of an interval, where inference workers and a successor find them."""
        start = perf_counter()
        algorithm = self.algorithm
        state = {"algorithm": algorithm.state_json(), "updates": algorithm.updates}
        self._handover.states.publish(algorithm.state_arrays(), state, 0, interval)
        meta = {**algorithm.policy_meta(), **self._meta, "updates": algorithm.updates}
        self._handover.policies.publish(dict(algorithm.policy_arrays()), meta, 0, interval)
        self.hand_s += perf_counter() - start

    def learn(self) -> bool:
        """Learns what this interval has to, once; False if that is done, or has to wait until the interval is full.

        Raises:
            WorkerError: the rows were not collected by the policy that they have to be from.
        """
        interval = self._rollouts.interval
        if self._learned == interval or (self._lag == 0 and not self._rollouts.full):
            return False
        source = interval - self._lag
        if source >= 0:
            start = perf_counter()
            self._check_lag(source)
            self.algorithm.learn(self._rollouts.batch(source), self._progress(source))
            self.learn_s += perf_counter() - start
            self._check_progress()
        self._hand_over(interval + 1)
        self._learned = interval
        return True

    def _check_lag(self, source: int) -> None:
        versions = self._rollouts.versions(source)
        if (versions != source).any():
            found = sorted(set(versions.reshape(-1).tolist()))
            raise WorkerError(f"rows of interval {source} were collected by the policies of {found[:5]}")

    def _check_progress(self) -> None:
        algorithm = self.algorithm
        skipped, self._skipped = algorithm.updates_skipped() - self._skipped, algorithm.updates_skipped()
        self._refused = self._refused + 1 if 0 < skipped == algorithm.updates - self.updates else 0
        if self._refused > _MAX_REFUSED_INTERVALS:
            raise WorkerError(
                f"in {self._refused} intervals in a row every update had a non-finite loss or gradient; lower the step "
                "size, or look at the rewards' size"
            )

    def _progress(self, source: int) -> float | None:
        if self._progress_env_steps is None:
            return None
        return min(1.0, source * self._rollouts.spec.rows / self._progress_env_steps)

    def swap(self) -> bool:
        """Begins the next interval if this one is full and what it has to learn is learned."""
        interval = self._rollouts.interval
        if self._learned != interval or not self._rollouts.full:
            return False
        self._rollouts.mark()
        if self._fingerprints is not None:
            self._write_fingerprints(self._fingerprints, interval)
        self.updates = self.algorithm.updates
        self._rollouts.swap()
        return True

    def _write_fingerprints(self, path: Path, interval: int) -> None:
        state = json.dumps(self.algorithm.state_json(), sort_keys=True).encode()
        line = {
            "interval": interval, "trajectories": self._rollouts.trajectories_sha256(interval),
            "parameters": sha256_of(dict(self.algorithm.policy_arrays())),
            "learner": sha256_of(self.algorithm.state_arrays(), state),
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @property
    def env_steps(self) -> int:
        """Env steps of all finished intervals since the run began."""
        return self._rollouts.interval * self._rollouts.spec.rows

    def policy_snapshot(self) -> tuple[Callable[[], Arrays], dict[str, Any]]:
        """Policy of this interval, theta(j), as it was handed over.

        Raises:
            WorkerError: it is not there.
        """
        found = _found(self._handover.policies, self._rollouts.interval)
        return lambda: found.arrays, found.meta

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """All that a resume needs to begin this interval once more: tensors and JSON."""
        rollouts = self._rollouts
        state = _found(self._handover.states, rollouts.interval)
        tensors = {LEARNER + name: array for name, array in state.arrays.items()}
        kept = rollouts.state_arrays(with_batch=self._lag == 1)
        tensors |= {ROLLOUTS + name: array for name, array in kept.items()}
        return tensors, {"interval": rollouts.interval, "lag": self._lag, "learner": state.meta,
                         "updates": state.meta["updates"]}

    def parameters_sha256(self) -> str:
        """Hash of the learner's arrays at the beginning of this interval: equal runs have equal ones."""
        return sha256_of(_found(self._handover.states, self._rollouts.interval).arrays)

    def numbers(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        return {
            **blank_learner(), "updates": self.algorithm.updates, "wait_s": wait_s,
            "learn_s": self.learn_s, "publish_s": publish_s + self.hand_s, "policy_lag": self._lag,
            "batch_size": self.batch_size, "updates_skipped": self.algorithm.updates_skipped(),
            **self.algorithm.metrics(),
        }


def _found(parameters: VersionedParameters, interval: int) -> StoredParameters:
    held = parameters.read(interval)
    if held is None:
        raise WorkerError(f"what was handed over for interval {interval} is gone")
    return held


def sha256_of(arrays: Arrays, more: bytes = b"") -> str:
    """Hash of arrays, names included, and of further bytes."""
    digest = hashlib.sha256(more)
    for name, array in sorted(arrays.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
