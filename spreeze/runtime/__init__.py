"""The supervisor process of a run: planning, assembly, launch, monitoring, recording, shutdown.

*Groups.* ``run.learners`` learners run in parallel, each with its own samplers, buffer, weights and checkpoints
(``workers.roles.Address``). A dead worker does not affect other groups; the run ends if a learner or more than half of
the samplers of a group cannot be restarted. The score of the run is that of the best learner (metrics: ``rates``).
``stop.updates`` applies to each learner, the other stop conditions to the run.

*Prewarming.* Importing torch dominates the start of short runs, so a learner process loads its libraries while the run
is still being planned (``launcher.Prewarm``). It is stopped if the tuner has to measure.

*Priorities.* Workers that others wait for run at normal priority: at a lower one a sampler starves as soon as another
program computes, and the learner waits for it. Evaluator and visualizer run at nice 5 and 15, and use at most 15 % and
10 % of a core while no core is free. ``tuning.give_way`` lowers the priority of all workers by 10. The governor
(``cpu_governor``) pauses samplers to leave cores free, or to give way further than priorities do.

*Times.* ``wall_s`` counts from the start of training, ``time_to_target_s`` from the start of the process. Rates in the
summary exclude the first second after the first update, and the time after the stop condition.
"""
