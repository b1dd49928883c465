"""The supervisor process of a run: planning, assembly, launch, monitoring, recording, shutdown.

*Groups.* A group is a learner with its own samplers, buffer, weights and checkpoints; ``run.learners`` of them run in
parallel. The address of a worker is role/group/index (``workers.roles.Address``), its name is ``learner`` or
``sampler-3``, in group 1 ``learner-g1`` or ``sampler-g1-3``. Group 0 uses the run directory itself, group 1
``groups/1/`` in it. A dead worker does not affect other groups; the run ends if a learner or more than half of the
samplers of a group cannot be restarted. Metrics are for the whole run: counters and rates are sums over groups, other
numbers are means, and the score is that of the best learner. With several groups, ``updates_per_s/1`` is that of group
1. ``stop.updates`` applies to each learner, the other stop conditions to the run.

*Samplers of other hosts* (``cluster``) belong to group 0, and each host looks like one sampler in the metrics.

*Prewarming.* Importing torch dominates the start of short runs, so a learner process loads its libraries while the run
is still being planned, and receives its job and descriptors over a socket (``launcher``). It is stopped if the tuner
has to measure, and replaced by a new process if it does not fit or has died.

*Priorities.* A run takes its fair share of the cores: workers that others wait for run at normal priority, since at a
lower one a sampler starves as soon as another program computes, and the learner waits for it. Evaluator and visualizer,
for which nobody waits, run at nice 5 and 15, and use at most 15 % and 10 % of a core while no core is free.
``tuning.give_way`` lowers the priority of all workers by 10. Linux may share the cores between sessions first
(autogroup): ``launcher.group_arguments`` decides when workers get their own sessions.

*The governor* pauses samplers to leave cores free (``tuning.leave_free``), or to give way further than priorities do.
Its rules are in ``cpu_governor``; each change is an event with its reason. It starts five seconds after learning, and
ignores memory and GPU load. Other runs, tuners and the dashboard of the same user are recognised by process name,
except in another container. Under a cgroup quota, programs on cores beyond it are not counted, unless they use up the
quota.

*Times.* ``wall_s`` counts from the start of training, ``time_to_target_s`` from the start of the process. Rates in the
summary exclude the first second after the first update, and the time after the stop condition.
"""
