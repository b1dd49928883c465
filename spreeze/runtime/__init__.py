"""What the supervising process of a run does: decide, launch, watch, record, stop.

*Workers* are fresh interpreters with their thread counts set before any import. When the supervisor dies, however it
dies, they end within a moment.

*Groups.* A group is a learner with its own samplers, buffer, weights and checkpoints; mode spreeze runs
``run.learners`` of them. A worker's address is role/group/index (``workers.roles.Address``), and its name leaves out
what says nothing: ``learner``, ``sampler-3``, in group 1 ``learner-g1``, ``sampler-g1-3``. Group 0 uses the run
directory itself, group 1 ``groups/1/`` in it. One worker's death never disturbs another group; a learner that is given
up, or more than half of one group's samplers, ends the run. Metrics are those of the whole run: counters and rates are
sums over the groups, other numbers means, and the score is that of the learner whose latest one is the highest; where
there are several groups, ``updates_per_s/1`` is that of group 1, and so on. ``stop.updates`` holds for each learner,
all other stop conditions for the run.

*A learner loads while the run is still being decided.* Torch is most of what a short run waits for. Where two cores are
usable, the first learner's process starts before the environment is tried and waits with its libraries loaded; its job
and the descriptors of shared memory reach it over a socket (``launcher``). A tuner that has to measure ends it first;
one that does not fit, or has died, is replaced by a fresh process.

*Priorities are the first answer* to other programs, for the learner's sake: samplers run at nice 10, the evaluator
(which pauses by itself) at 5, the visualizer at 15, the learner at 0. So what another program takes is taken from the
samplers, within milliseconds. Where no core is free the evaluator keeps to 15 % and the visualizer to 10 % of a core.

*The governor* lets samplers rest for the others' sake: one at nice 10 still takes a share of their core, half of it
where the kernel shares cores among sessions first (autogroup), and memory bandwidth and the second thread of a core
know no priorities. It changes one thing, the number of active samplers (rules in ``cpu_governor``); each change is an
event with its reason. It begins five seconds after learning. It never touches learner, batch or threads, does not see
memory or GPU load, and counts a busy program however low its priority. Your other runs, tuners and the dashboard are
known by the names of their processes and do not count as other programs; those in another container are not seen.
Under a cgroup quota programs on cores beyond it do not count, but a quota that somebody else uses up does.

*Times*: ``wall_s`` counts from the start of training, ``time_to_target_s`` from the start of the process, imports
included. Rates in the summary leave out the first second after the first update, and what comes after the stop
condition.
"""
