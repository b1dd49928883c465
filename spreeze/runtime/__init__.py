"""The supervising process of a run: decide, put together (``assembly``), launch, watch, record, stop.

*Workers* are fresh interpreters with thread counts set before any import. They end at once when the supervisor dies.

*Groups.* A group is a learner with its own samplers, buffer, weights and checkpoints; mode spreeze runs
``run.learners`` of them. A worker's address is role/group/index (``workers.roles.Address``), and its name is short:
``learner``, ``sampler-3``, in group 1 ``learner-g1``, ``sampler-g1-3``. Group 0 uses the run
directory itself, group 1 ``groups/1/`` in it. A worker's death never disturbs another group; the run ends when a
learner is given up, or more than half of one group's samplers. Metrics are those of the whole run: counters and rates
are sums over the groups, other numbers means, and the score is that of the learner whose latest one is the highest.
With several groups, ``updates_per_s/1`` is that of group 1, and so on. ``stop.updates`` holds for each learner,
all other stop conditions for the run.

*Other hosts* (``--cluster``) have samplers too, through Ray: see ``cluster``. They belong to group 0, and each looks
like one sampler in the metrics.

*A learner loads while the run is still being decided*, since a short run mostly waits for torch: the first learner's
process waits with its libraries loaded, and gets its job and descriptors over a socket (``launcher``). A tuner that has
to measure ends it first; if it does not fit or has died, a fresh process replaces it.

*Priorities.* A run takes its fair share of the cores beside other programs: no worker that others wait for has a lower
priority than they, or than any program. A sampler at a lower one starves as soon as another program computes, and the
learner waits for its rows. Nobody waits for the watchers, so the evaluator runs at nice 5, the visualizer at 15; if no
core is free they also keep to 15 % and 10 % of a core.

*Who wants other programs to go first* sets ``tuning.give_way``: all workers are lower by the same, 10, in every mode.
Linux may share the cores between sessions before it looks at priorities (autogroup): ``launcher.leads`` says when
workers have sessions of their own.

*The governor* pauses samplers where the user wants cores left free, or wants them to give way further than priorities
do. Its rules are in ``cpu_governor``; each change is an event with its reason. It begins five seconds after learning
and does not see memory or GPU load. Your other runs, tuners and the dashboard are recognised by their process names,
except in another container. Under a cgroup quota, programs on cores beyond it do not count, but other programs that use
up the quota do.

*Times*: ``wall_s`` counts from the start of training, ``time_to_target_s`` from the start of the process, imports
included. Rates in the summary leave out the first second after the first update, and all after the stop condition.
"""
