"""Shared memory, files, sockets and arithmetic between processes; knows no algorithm and no environment.

*Interfaces.* Samplers write into a ``TransitionSink`` or a ``RolloutSink``, learners read from a ``BatchSource`` or a
``RolloutReader``, and parameters go from a ``ParameterPublisher`` to a ``ParameterSource``: see ``protocols``. A new
transport is one more class and one more line in the tests' tables of implementations.

*Channels.* The supervisor creates them, so they outlive every worker; a job carries a ``handle`` of each to its worker,
which attaches to it (``handles``). What a process inherits follows from the handles of its job.

*Nothing can hang on a dead process.* Processes share only memory, files, pipes, sockets and exit codes.
``multiprocessing`` locks, events and queues can hang forever after their holder or waiter gets a SIGKILL, so none is
used. Shared memory has no name and is freed with the last process that holds it.

*The replay ring* has one shard per sampler. A writer announces what it is about to overwrite, writes rows in place, and
publishes last. The reader copies, checks again, and redraws rows that may have been overwritten. The protocol is
model-checked over every interleaving with a crash at every step; the check catches three plausible mistakes. It relies
on the store order of x86-64; other processors take a file lock per shard. Rows older than the whole capacity are left
out, so the shard of a retired sampler fades as it would in one common ring. All of the capacity can be drawn where
samplers write at the same rate; a faster sampler keeps less of its past, since its shard is no larger.

*Samples per insert* is a band; ``rate_limiter`` proves that it cannot deadlock. The default is 8:512. Large-batch
asynchronous systems run at 16 to 32, classic SAC at 256; trainers in between needed the same number of updates on the
tasks measured for this design. So the learner is practically never slowed, and samplers wait only where they would
write more than one row for eight drawn. A resume or a restarted learner resets the count.

*Images.* Replay holds each frame once, as bytes: 7,080 bytes per transition of 84 x 84, where two stacks of four would
take 56,448. A draw follows its environment's rows back to rebuild both stacks; the first frame of an episode stands in
for the frames before it. Checkpoints hold no frames.

*Rollouts* lie in N slots, rollout j in slot j mod N. HTS-RL has two, and its learner paces the samplers. In a circular
buffer like that of IMPACT they wait only for bounds on a rollout's uses: a reader has K of each at most, and a writer
may wait for some before it overwrites one. One counter per environment, stored last, tells which rows are complete,
which are overwritten next, and where a restarted sampler continues. This is model-checked like the ring.

*Between learners* parameters go through slots in shared memory (``Gossip``). Each host has slots for the learners of
all hosts, which a process of its own keeps equal to the other hosts', so that no learner waits for a network.

*Weights* travel as immutable files and an atomically replaced pointer; thanks to a hint in shared memory, a check for
new weights costs one load. Every score and every clip belongs to one version of the weights. Where the policy is an
average of many weights (``policy_average``), its file holds the newest ones too, for the samplers.
On-policy modes pass their policies through slots in memory, without a file.
"""
