"""Collecting and learning in one process on one device, for mode ``device``.

``device_learner`` has update loops and trainers; ``device_collector`` chooses actions, steps the environments and fills
rollouts; ``device_replay`` is the memory of the others.
"""
