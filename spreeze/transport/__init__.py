"""Communication between processes: shared memory, files, sockets. Independent of algorithms and environments.

*Ways.* Samplers write by a ``ShardWriter`` or a ``RolloutWriter``, learners read by a ``ReplayReader`` or a
``RolloutReader``, and parameters go from a ``ParameterPublisher`` to a ``ParameterSource`` (``weights``). A new
transport of weights is one more class, and one more line in the contract tests.

``assets/docs/architecture.md`` describes channels, the protocols by which processes write and read them, and both ways
of weights. This page adds reasons and limits.

*A dead process never blocks another one*, so there are no locks, events and queues of ``multiprocessing``, which can
block forever after a SIGKILL.

*The replay ring* relies on the store order of x86-64; on other processors each shard has a file lock. Rows older than
the total capacity are not drawn, so the shard of a retired sampler fades out. A sampler that is faster than others
keeps less of its past.

*Samples per insert* is kept within bounds by ``rate_limiter``, without deadlocks. With the default, 8:512, the learner
is practically never slowed down, and samplers wait only if they would insert more than one row per eight drawn. A
resume or a restarted learner resets the count.

*Images.* Replay stores each frame once, as bytes: 7,080 bytes per transition of 84 x 84 instead of 56,448 for two
stacks of four. Drawing a transition reassembles both stacks from earlier rows of its environment; at the start of an
episode the first frame is repeated. Checkpoints contain no frames.

*Rollouts* are stored in N slots, rollout j in slot j mod N. HTS-RL has two slots, and its learner paces the samplers.
In a circular buffer as in IMPACT, samplers wait only for bounds on uses: a reader may use a rollout at most K times,
and a writer may have to wait for a minimum before it overwrites one. One counter per environment, stored last, tells
which rows are complete, and where a restarted sampler continues.

*Weights.* Each evaluation and each clip belongs to one version. With ``policy_average``, a file contains both the
averaged and the newest weights.
"""
