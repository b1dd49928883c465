"""The autotuner: one search over declared knobs.

*Knobs.* A knob is a setting that the tuner chooses (``problem.Knob``, the table is ``knobs.KNOBS``): its candidates,
what they need of memory and cores, the trial that measures it, how it reads in a reason. A mode names its knobs in
``config/modes.py``. A module that ``--import`` names may declare more of them, one row each, as ``KNOBS``.

*Objectives.* Each is a formula of U updates/s, E env steps/s and batch size B, with everything running (``model``):

========  ==================================================================================================
return    (default) ``U * B / (B + B0) * E / (E + U / R)``: an update's worth grows with its batch, and falls where
          more than R updates are made from one env step; B0 = 96, R = 2
paper     the smallest power of two with ``b B / (a + b B) >= gpu_target``, where an update takes ``a + b B`` seconds;
          then E, while the run keeps at most ``cpu_target`` of the cores busy
sampling  E, with the configured batch
updates   U, with the configured batch
rollout   E: modes with rollouts. A rollout keeps about its rows and exactly its minibatches, so that tuning does not
          change what is learned; more environments mean fewer steps of each. Rollouts of any age: U, as long as a
          rollout is used at most 20 times; N and K stay as configured, whose reasons say what counted runs showed
========  ==================================================================================================

R describes early returns of easy tasks. B0 differs from task to task; it is the one that loses least where it is wrong
(``model.BATCH_HALF_WORTH``). Below a batch of 128 no B0 fits (``assets/figures.md``). So ``return`` takes no batch
below ``knobs.LEAST_BATCH`` unless the user or the profile sets a smaller one.

*Search* (``search``; it knows no clock, ``measure`` does the measuring).

1. Memory bounds replay (which holds at least four batches), batch, samplers and environments. A pin that does not fit
   is rejected with the limit that it breaks.
2. Learners alone, where the mode has such knobs: growing batches while larger ones pay, on each device, then more
   threads. Two threads share an update and are tried wherever there are two cores; more share each matmul and are tried
   up to half of the cores, because a matmul stalls when one of its threads waits for a core. ``t(B) = a + b B`` is
   fitted. An update slower than 1 s is never chosen; a crash, a hang or lack of memory rules out all larger batches.
3. Everything running, with learners measured alone: samplers beside the best one, unthrottled, up to one more than the
   cores that it leaves. A model of shared cores (physical ones, SMT siblings, quota) interpolates between them and
   forecasts every combination of learner, batch, samplers and lower bound of samples per insert. Scores within 3 % are
   ties; the knobs decide them in the order of their table, mostly for the configured value, then for the smaller one.
   The choice and its neighbours (one step of one knob, and the best forecast with other threads or another device) are
   then measured together, as time allows.
4. Everything running, without such knobs, and for other modules' knobs: each knob is varied in turn around the choice.

Steps 3 and 4 measure in short windows and many turns and compare turn by turn: the speed of a shared machine changes
within seconds, and what slows one turn slows all of it. Only a gain of 5 % moves the choice,
of 10 % where it changes the rollouts that are learned from. What is learned (batch size, samples per insert, rollouts,
other modules' knobs) moves only for a gain above the spread of the rows that show it, and not beside other programs.

Rates in the reasons are those of a run: evaluator, visualizer and supervisor, which do not run while the tuner
measures, take idle cores, and what these lack is taken off (``model.share_in_a_run``).

The upper bound of samples per insert is raised to twice what was measured, never above 8 updates per env step.

*A machine that others use too.* A row whose repeats scatter by more than 75 % of their median is measured again as far
as time allows, then left out. Where too little is left for a choice, it is what a run without the tuner has: the values
of the profile and the defaults (``Search.fall_back``). No load ends a start: errors are what a user has set that cannot
work, and candidates of which each fails by an error of its own. A result is provisional if other programs kept 15 % of
the cores busy, on battery, and where rows left doubts. It is used, told with its reasons at each start, and measured
again by itself: once other programs keep half of what they kept, on mains, or, without load, at the next two starts
and then once a day.

*Measuring.* Each candidate runs in fresh child processes with a deadline and a memory cap; its crash, hang or lack of
memory is a result with a reason. Trials take turns, and those that wait for theirs are stopped. All of it takes at most
60 s where the machine is quiet. The result is cached by machine (processor, usable cores, quota, memory, GPUs, driver,
mains or battery), task, algorithm, networks, knobs, targets, pins and versions, the environment's and its simulators'
too. It holds while an env step takes between half and twice the time that it took. A damaged cache is reported and
measured anew. One tuner measures at a time: others wait for it for 75 s at most, and measure then. Those with another
``TMPDIR`` do not see each other. A resumed run keeps what its stored data depend on.
"""
