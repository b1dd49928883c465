"""Hashes of each rollout and of the learner at its end, by which runs are compared bit by bit."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

from spreeze.transport.weights import sha256_of
from spreeze.workers import rollout_learner
from spreeze.workers.jobs import OnPolicyLearnerJob
from spreeze.workers.rollout_learner import OnPolicyTrainer

FILE = "fingerprints.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FingerprintedJob(OnPolicyLearnerJob):
    """The job of a learner that writes its fingerprints into the folder of its group."""

    entry_point = "fingerprints:learn_from_rollouts"


def learn_from_rollouts(context, job):
    def trainer(*args, **options):
        return fingerprinted(OnPolicyTrainer(*args, **options), Path(job.group_dir) / FILE)

    with mock.patch.object(rollout_learner, "OnPolicyTrainer", trainer):
        turns = rollout_learner.learn_from_rollouts(context, job)
        first = next(turns, None)
    yield first
    yield from turns


def fingerprinted(trainer, path):
    """The trainer; from now on it adds a line to the file at each swap of rollouts."""
    rollouts, real = trainer._rollouts, trainer.swap

    def swap():
        def swapped():
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(_line(trainer)) + "\n")
            type(rollouts).swap(rollouts)

        with mock.patch.object(rollouts, "swap", swapped):
            return real()

    trainer.swap = swap
    return trainer


def _line(trainer):
    algorithm, rollouts = trainer.algorithm, trainer._rollouts
    state = json.dumps(algorithm.state_json(), sort_keys=True).encode()
    return {
        "rollout": rollouts.current,
        "trajectories": trajectories_sha256(rollouts, rollouts.current),
        "parameters": sha256_of(dict(algorithm.policy_arrays())),
        "learner": sha256_of(algorithm.state_arrays(), state),
    }


def trajectories_sha256(rollouts, rollout):
    """Hash of everything in a rollout."""
    return sha256_of({name: rollouts.fields[name][rollout % rollouts.spec.num_slots] for name in rollouts.columns})


def read(path):
    """Lines of the file in the order of rollouts; one that a restarted learner wrote again must be the same."""
    found = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        assert found.setdefault(line["rollout"], line) == line
    return [found[rollout] for rollout in sorted(found)]
