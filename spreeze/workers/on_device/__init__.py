"""Collecting and learning in one process on one device, for mode ``device``.

``device_learner`` has update loops and trainer; ``device_collector`` steps the environments with the actions of
``device_actor``; ``device_replay`` or ``device_rollout`` stores the transitions.
"""
