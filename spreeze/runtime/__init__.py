"""What the supervising process of a run does: decide, launch, watch, record, stop.

*Workers* are fresh interpreters with their thread counts set before any import. When the supervisor dies, however it
dies, they end within a moment.

*A learner loads while the run is still being decided.* Torch is most of what a short run waits for. Where two cores are
usable, the learner's process begins before the environment is tried and waits with its libraries loaded; its job and
the descriptors of shared memory reach it over a socket (``launcher``). A tuner that has to measure ends it first; one
that does not fit, or has died, is replaced by a fresh process.

*Priorities are the first answer* to other programs, for the learner's sake: samplers run at nice 10, the evaluator
(which pauses by itself) at 5, the visualizer at 15, the learner at 0. So what another program takes is taken from the
samplers, within milliseconds. Where no core is free the evaluator keeps to 15 % and the visualizer to 10 % of a core.

*The governor* lets samplers rest for the others' sake: one at nice 10 still takes a share of their core, half of it
where the kernel shares cores among sessions first (autogroup), and memory bandwidth and the second thread of a core
know no priorities. It changes one thing, the number of active samplers (rules in ``cpu_governor``); each change is an
event with its reason. It begins five seconds after learning. It never touches learner, batch or threads, does not see
memory or GPU load, and counts a busy program however low its priority. Your other runs, tuners and the dashboard are
known by the names of their processes and are no other programs; those in another container are not seen. Under a cgroup
quota programs on cores beyond it do not count, but a quota that somebody else uses up does.

*Times*: ``wall_s`` counts from the start of training, ``time_to_target_s`` from the start of the process, imports
included. Rates in the summary leave out the first second after the first update, and what comes after the stop
condition.
"""
