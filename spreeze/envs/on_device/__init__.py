"""Environments whose tensors stay on the learner's device: ``device_task`` steps any, ``warp_envs`` has MuJoCo's."""
