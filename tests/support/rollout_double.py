"""An on-policy algorithm in a few lines of NumPy, exact and quick, for tests of what is around one."""

import numpy as np


class Ascent:
    """Moves a linear policy towards rewarded actions; its parameters depend on every bit of what it was given."""

    name = "double"

    def __init__(self, obs_dim, action_dim, correction="delayed", policy_average=0.0):
        rng = np.random.default_rng(0)
        self._w = rng.standard_normal((obs_dim, action_dim)).astype(np.float32) * 0.1
        self._old = self._w.copy()
        self._action_dim, self._correction = action_dim, correction
        self.policy_average = policy_average
        self.updates = 0
        self.refuses = False
        self._skipped = 0

    def learn(self, batch, progress):
        self.updates += 1
        if self.refuses:
            self._skipped += 1
            return
        obs = batch.obs.reshape(-1, batch.obs.shape[-1]).astype(np.float64)
        action = batch.action.reshape(-1, self._action_dim).astype(np.float64)
        weight = (batch.reward.reshape(-1, 1) - batch.reward.mean()) + 0.1 * batch.log_prob.reshape(-1, 1)
        step = (obs.T @ (weight * action) / len(obs) * 0.05 + batch.next_obs.mean() * 1e-4).astype(np.float32)
        old = self._w
        self._w, self._old = self._w + step * np.float32(1.0 + 0.5 * (progress or 0.0)), old

    def metrics(self):
        return {"policy_loss": 0.5}

    def updates_skipped(self):
        return self._skipped

    def policy_arrays(self):
        return {"head_w": self._w.copy(), "head_b": np.zeros(self._action_dim, np.float32),
                "log_std": np.full(self._action_dim, -0.5, np.float32)}  # fmt: skip

    def policy_meta(self):
        return {"policy": "gaussian", "hidden_sizes": [], "obs_dim": len(self._w), "action_dim": self._action_dim}

    def state_arrays(self):
        return {"w": self._w.copy(), "old": self._old.copy()}

    def load_state_arrays(self, arrays):
        self._w, self._old = arrays["w"].copy(), arrays["old"].copy()

    def state_json(self):
        return {"updates": self.updates}

    def load_state_json(self, state):
        self.updates = state["updates"]
