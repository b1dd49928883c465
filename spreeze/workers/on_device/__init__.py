"""Collecting and learning in one process on one device, for mode ``device``.

``device_learner``
    the job: its feeds, and the trainer of rollouts.
``device_collector``, ``device_actor``
    step the environments, and choose their actions.
``device_replay``, ``device_rollout``
    store the transitions, on the device.
"""
