"""An environment whose argument a curriculum raises, and callbacks as users write them, good and bad."""

import time

import gymnasium
import numpy as np

from spreeze import BaseCallback


class Walk(gymnasium.Env):
    """Each step gives 1 until ``length`` steps are over."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, length=10, choices=0):
        self.length, self.steps, self.metadata = length, 0, {"render_modes": []}
        self.action_space = (
            gymnasium.spaces.Discrete(choices) if choices else gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps >= self.length, False, {}


class Curriculum(BaseCallback):
    """Lets episodes become longer as soon as the return says that the agent masters the length of today."""

    def __init__(self, most=30):
        self.length, self.most = 10, most

    def on_metrics(self, metrics):
        if metrics.get("episode_return", 0.0) >= self.length and self.length < self.most:
            self.length += 10
            self.set("env.args", {"length": self.length})
        self.logger.record("length", self.length)


class Journal(BaseCallback):
    """Writes down what it hears; asks for a checkpoint and an evaluation."""

    def _note(self, *words):
        with open(self.run_dir / "journal.txt", "a", encoding="utf-8") as file:
            print(*words, file=file)

    def on_training_start(self):
        self._note("start", self.env_id, self.algo, self.settings["run.seed"])

    def on_metrics(self, metrics):
        self._note("metrics", self.num_timesteps, metrics["env_steps"])
        if metrics.get("updates", 0) > 5 and not hasattr(self, "asked"):
            self.asked = True
            self.save_checkpoint()
            self.evaluate()

    def on_evaluation(self, evaluation):
        self._note("evaluation", evaluation["return_mean"], evaluation["episodes"])

    def on_checkpoint(self, updates):
        self._note("checkpoint", updates)

    def on_episode_end(self, episode):
        self._note("episode", episode["return"], episode["length"], episode["success"], episode["sampler"])

    def on_training_end(self, reason):
        self._note("end", reason)


class Wrong(BaseCallback):
    """Raises in one method, asks for what cannot be, and stops the run when its evaluation comes."""

    def on_metrics(self, metrics):
        return 1 / 0

    def on_training_start(self):
        self.set("sac.gamma", 0.5)

    def on_evaluation(self, evaluation):
        return False


class Hanging(BaseCallback):
    def on_metrics(self, metrics):
        time.sleep(1e6)


CALLBACKS = (Journal,)
gymnasium.register("Walk-v0", Walk)
