"""``GrandchildEnv-v0``: the fault environment, with helper processes of its own (as simulators have)."""

import subprocess

import gymnasium
from fault_envs import FaultEnv


class GrandchildEnv(FaultEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        for own_session in (False, True):
            subprocess.Popen(
                ["sleep", "1000"], start_new_session=own_session, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip


if "GrandchildEnv-v0" not in gymnasium.registry:
    gymnasium.register(id="GrandchildEnv-v0", entry_point=GrandchildEnv, max_episode_steps=50)
