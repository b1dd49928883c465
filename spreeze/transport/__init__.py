"""Shared memory, files, sockets and arithmetic between processes; knows no algorithm and no environment.

*Seams.* Samplers write into a ``TransitionSink`` or a ``RolloutSink``, learners read a ``BatchSource`` or a
``RolloutSource``, parameters go from a ``ParameterPublisher`` to a ``ParameterSource``: see ``protocols``. Another way
to travel is one more class and one more line in the tests' tables of implementations.

*Nothing can hang on a dead process.* Between processes there are only shared memory, files, one-way pipes, exit
codes, and sockets that nobody waits for. ``multiprocessing`` locks, events and queues hang for ever after a SIGKILL of
a holder or waiter; none is used. Shared memory has no name, so it goes with the last process that holds it.

*The replay ring* has one shard a sampler. A writer announces what it is about to overwrite, writes rows in place, and
publishes last. The reader copies, looks again, and draws anew what may have been overwritten. The protocol is
model-checked over every interleaving with a crash at every step, and three natural mistakes are shown to be caught. It
relies on the order of stores on x86-64; other processors take a file lock for each shard. Rows older than the whole
capacity are left out, so a retired sampler's shard fades as it would in one common ring. A shard has room for its share
of the capacity only: all of the capacity can be drawn where samplers write equally much; a faster sampler keeps less of
its past.

*Samples per insert* is a band, with a proof in ``rate_limiter`` that it cannot deadlock. The default is 8:512.
Large-batch asynchronous systems run at 16 to 32, classic SAC at 256. Trainers between 15 and 256 needed the same number
of updates on the tasks measured for this design. So the learner is never slowed (512 is out of reach on most machines),
and samplers are held only where they would write more than one row for eight drawn: there their core is better used by
evaluation or learning. A resume or a learner's restart starts the count anew.

*Images.* Replay holds each frame once, as bytes: 7,080 bytes a transition of 84 x 84, where two stacks of four would
take 56,448. A draw follows its environment's rows back to rebuild both stacks; the first frame of an episode stands for
those before it. Checkpoints hold no frames.

*Rollouts* lie in N slots, rollout j in slot j mod N. HTS-RL has two, and its learner paces the samplers. In a circular
buffer like IMPACT's nobody waits, and a reader uses each rollout at most K times. One counter an environment, stored
last, says what is whole, what is overwritten next, and where a successor goes on. This is model-checked like the ring.

*Weights* travel as immutable files and a pointer that is replaced at once; a hint in shared memory makes looking for
news cost one load. Every score and every clip belongs to one version of the weights. On-policy policies travel through
slots in memory, without a file.
"""
