"""The autotuner: what to measure, how to choose, and why.

*What is made best.* Every objective is one formula of U updates/s, E env steps/s and batch size B, taken with learner
and samplers running together (``objective``):

========  ==================================================================================================
return    (default) ``U * B / (B + B0) * E / (E + U / R)``: an update's worth grows with its batch, and falls where
          more than R updates are made from one env step; B0 = 16, R = 2
paper     the smallest power of two with ``b B / (a + b B) >= gpu_target``, where an update takes ``a + b B`` seconds;
          then E, while the run keeps at most ``cpu_target`` of the cores busy
sampling  E, with the configured batch
updates   U, with the configured batch
========  ==================================================================================================

The constants of ``return`` describe early returns of easy tasks. They do not say which batch reaches a later return
first: on Walker2D batches below 128 learned less in the same time (figures in ``assets/figures.md``). So ``return``
takes no batch below ``candidates.LEAST_BATCH`` unless it is pinned or the profile has a smaller one.

*How it chooses.* The choice knows no clock; ``measure`` does the measuring.

1. Memory bounds replay (which holds at least four batches), batch, samplers and environments. A pin that does not fit
   is refused with the limit that it breaks.
2. Learners alone: growing batches while larger ones pay, then threads, devices and precisions near the best. Two
   threads share an update as a pair and are tried wherever there are two cores; more share each matmul and are tried up
   to half of the cores, because a matmul stalls when one of its threads waits for a core. ``t(B) = a + b B`` is fitted
   with relative weights; a deviation counts only beyond two standard errors. An update slower than 1 s is never chosen;
   what crashes, hangs or runs out of memory rules out all larger batches.
3. Samplers beside the best learner, unthrottled, up to one more than the cores it leaves. A model of shared cores
   (physical ones, SMT siblings, quota) is fitted and forecasts every combination of learner, batch, samplers and lower
   bound of samples per insert. Scores within 3 % are ties: they go to the configured batch, else the smaller, then to
   fewer threads, the configured ratio and fewer samplers.
4. The choice and its neighbours (batch doubled and halved, samplers one step up and down, ratio x4 and /4, and the best
   forecast with another number of threads, device or precision) are measured together, as time allows, in short windows
   and many turns, and compared turn by turn: the speed of a shared machine changes within seconds, and what slows one
   turn slows all of it. Measurement and forecast are weighed by the inverse squares of their errors; a gain of 5 %
   moves the choice.

The upper bound of samples per insert is raised to twice what was measured, never above 8 updates per env step.

*How it measures.* Each candidate runs in fresh child processes with a deadline and a memory cap; its crash, hang or
lack of memory is a row with a reason. A rate is the median of three repeats after a warm-up, taken in turns, so that
drift meets all alike; whoever waits for a turn is stopped, not idle. All of it takes at most 60 s. Programs that kept
cores busy meanwhile are named. The result is cached by machine (processor, usable cores, quota, memory, GPUs, driver),
task, algorithm, networks, targets, pins and versions. A damaged cache is reported and measured anew. One tuner measures
at a time.

*Modes with rollouts.* Executors, actors and environments of an executor are varied in turn, each candidate with
everything running, by env steps/s. What is learned is not touched: an interval keeps about its rows and exactly its
minibatches, so more environments mean fewer steps of each. After a resume only the actors may still change.
"""
