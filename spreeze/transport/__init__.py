"""Communication between processes: shared memory, files, sockets. Independent of algorithms and environments.

Samplers write by a ``ShardWriter`` or a ``RolloutWriter``, learners read by a ``ReplayReader`` or a ``RolloutReader``,
and parameters go from a ``ParameterPublisher`` to a ``ParameterSource`` (``weights``). A new transport of weights is
one more class, and one more line in the contract tests. assets/docs/architecture.md tells the protocols and why there
are no locks, events and queues of ``multiprocessing``.

The protocols rely on the store order of x86-64; elsewhere memory fences (``in_order``) keep it. A sampler that
is faster than others keeps less of its past. With the default bounds of samples per insert, 8:512 (``rate_limiter``),
samplers wait only if they would insert more than one row per eight drawn, and the learner practically never. Replay
stores each frame of images once: 7,080 bytes per transition of 84 x 84 instead of 56,448 for two stacks of four.
Checkpoints contain no frames. Each evaluation and each clip belongs to one version of the weights. With
``policy_average``, a file contains both the averaged and the newest weights.
"""
