"""``spreeze.train`` whose learners of rollouts write fingerprints: ``python fingerprinted_train.py FLAG...``."""

import runpy

from fingerprints import FingerprintedJob

from spreeze.modes import rollout_modes

rollout_modes.OnPolicyLearnerJob = FingerprintedJob
runpy.run_module("spreeze.train", run_name="__main__", alter_sys=True)
