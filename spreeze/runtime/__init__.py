"""The supervisor process of a run: planning, assembly, launch, monitoring, recording, shutdown.

assets/docs/architecture.md describes processes, groups, start-up and shutdown. In addition:

*Groups.* A dead worker does not affect other groups; the run ends if a learner or more than half of the samplers of a
group cannot be restarted. Its score is that of the best learner (metrics: ``rates``). ``stop.updates`` applies to each
learner, other stop conditions to the run.

*Prewarming.* Importing torch dominates the start of short runs, so a learner process loads its libraries during
planning (``launcher.Prewarm``). It is stopped if the tuner has to measure.

*Priorities.* Workers that others wait for run at normal priority, at which other programs do not starve samplers.
Evaluator and visualizer run at nice 5 and 15, and use at most 15 % and 10 % of a core while no core is free.
``tuning.give_way`` lowers the priority of all workers by 10. The governor (``cpu_governor``) pauses samplers to leave
cores free, or to give way further than priorities do.

*Times.* ``wall_s`` counts from the start of training, ``time_to_target_s`` from the start of the process. Rates in the
summary exclude the first second after the first update, and the time after the stop condition.
"""
