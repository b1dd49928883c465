"""A sink of transitions that keeps them in lists."""

import numpy as np


class Rows:
    def __init__(self):
        self.rows, self.versions, self.spans = [], [], []

    def write(self, obs, action, reward, terminated, next_obs, num_steps=None, version=0):
        rows = np.concatenate([obs, action, np.c_[reward], np.c_[terminated], next_obs], axis=1)
        self.rows += rows.tolist()
        self.versions += [version] * len(rows)
        self.spans += [] if num_steps is None else num_steps.tolist()
