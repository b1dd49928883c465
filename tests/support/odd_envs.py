"""Environments as people write them: threads that never end, one instance only, much memory, errors without words."""

import atexit
import os
import subprocess
import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Line(gymnasium.Env):
    """A point on a line that should be pushed to 0."""

    def __init__(self):
        self.observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.v = float(self.np_random.uniform(-1, 1)), 0.0
        return self._obs(), {}

    def step(self, action):
        self.v = 0.9 * self.v + 0.1 * float(action[0])
        self.x += self.v
        return self._obs(), 1.0 - abs(self.x), abs(self.x) > 5, False, {}

    def _obs(self):
        return np.array([self.x, self.v], np.float32)


def _for_ever():
    while True:
        time.sleep(0.1)


class Thread(Line):
    """A receiver's thread that is no daemon."""

    def __init__(self):
        super().__init__()
        threading.Thread(target=_for_ever).start()


class AtExit(Line):
    """A handler at the end of the process that waits for a server forever."""

    def __init__(self):
        super().__init__()
        atexit.register(_for_ever)


class NeverClosed(Line):
    def close(self):
        _for_ever()


class Helper(Line):
    """A process beside it, which nobody ends."""

    def __init__(self):
        super().__init__()
        subprocess.Popen(["sleep", "1000"])


class Late(Line):
    def __init__(self, late_s=1000.0):
        super().__init__()
        time.sleep(late_s)


class One(Line):
    """There can be only one on a machine, as of a simulator that binds a port: here it is a file's name."""

    def __init__(self, path):
        super().__init__()
        self._path = path
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))

    def close(self):
        os.unlink(self._path)


class OneAtReset(One):
    """As ``One``, but it only shows when an episode begins."""

    def __init__(self, path):
        Line.__init__(self)
        self._path, self._holds = path, False

    def reset(self, *, seed=None, options=None):
        if not self._holds:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL))
        self._holds = True
        return super().reset(seed=seed)

    def close(self):
        if self._holds:
            os.unlink(self._path)


class OneInAProcess(Line):
    """There can be one in each process, as of an engine with global state."""

    living = 0

    def __init__(self):
        super().__init__()
        if OneInAProcess.living:
            raise RuntimeError("the engine runs already")
        OneInAProcess.living += 1

    def close(self):
        OneInAProcess.living -= 1


class SecondKills(Line):
    """A second one takes the process down."""

    living = 0

    def __init__(self):
        super().__init__()
        if SecondKills.living:
            os.write(2, b"engine: already initialized\n")
            os._exit(4)
        SecondKills.living += 1


class Heavy(Line):
    def __init__(self):
        super().__init__()
        self.room = np.ones(10_000_000)


class Aborts(Line):
    def __init__(self):
        super().__init__()
        os.write(2, b"FATAL: no licence\n")
        os.abort()


class Wordless(Line):
    """Raises what says nothing."""

    def step(self, action):
        action = None
        assert action


class Exits(Line):
    def step(self, action):
        os.write(2, b"engine: out of licences\n")
        os._exit(3)


for _kind in (*Line.__subclasses__(), OneAtReset):
    gymnasium.register(f"{_kind.__name__}-v0", _kind, max_episode_steps=50)
gymnasium.register("Line-v0", Line, max_episode_steps=50)
