"""An environment that says much in ``info``: terms of its reward, its success, arrays, texts, and what is no number."""

import gymnasium
import numpy as np

LENGTH = 10


class Talkative(gymnasium.Env):
    """Ten steps of reward 1; every other episode is a success."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, more=0, discrete=False):
        self.metadata = {"render_modes": []}
        self.more, self.steps, self.episodes = more, 0, 0
        self.action_space = (
            gymnasium.spaces.Discrete(2) if discrete else gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        info = {
            "step number": self.steps,
            "reward": {"forward": np.float32(1.5), "control": -0.5},
            "late": float("nan") if self.steps == 1 else 2.0,
            "picture": np.zeros((4, 4)),
            "mission": "walk",
            **{f"more {index}": index for index in range(self.more)},
        }
        ended = self.steps == LENGTH
        if ended:
            self.episodes += 1
            info |= {"is_success": self.episodes % 2 == 0, "episode": {"r": 10.0, "l": LENGTH}}
        return np.zeros(1, np.float32), 1.0, ended, False, info


gymnasium.register("Talkative-v0", Talkative)
gymnasium.register("TalkativeChoice-v0", Talkative, kwargs={"discrete": True})
