"""The autotuner: one search over declared knobs.

*Knobs* are the settings that the tuner chooses (``problem.Knob``; table ``knobs.KNOBS``). The ``--import`` module may
declare more as ``KNOBS``.

*Objectives* are formulas of updates/s U, env steps/s E and batch size B of the whole run (``model.FORMULAS``):

========  ==================================================================================================
return    (default) ``U * B / (B + B0) * E / (E + U / R)``: the worth of an update grows with its batch and
          falls with more than R updates per env step (``model.BATCH_HALF_WORTH``, ``UPDATES_PER_STEP``)
paper     the smallest power of two with ``b B / (a + b B) >= gpu_target``, where an update takes ``a + b B`` seconds;
          then E, while the run uses at most ``cpu_target`` of the cores
sampling  E, with the configured batch size
updates   U, with the configured batch size
rollout   E, for on-policy modes; rows and minibatches stay about as configured, so that tuning does not change
          learning. Asynchronous modes: U, with at most 20 uses of a rollout; N and K stay as configured
========  ==================================================================================================

*Search* (``search``; ``measure`` measures, ``explanation`` explains the choice):

1. Memory limits replay, batch size, samplers and environments. A pinned setting that does not fit is rejected.
2. Learners alone, if the mode has such knobs: devices and numbers of threads in the same turns, with growing batch
   sizes while they pay on the fastest. ``t(B) = a + b B`` is fitted. A crash, a hang or lack of memory rules out larger
   batch sizes.
3. Whole runs with these learners: numbers of samplers without a rate limit. A model of shared cores predicts all
   combinations of learner, batch size, samplers and samples per insert. Scores within 3 % are ties, which the knobs
   decide. Finally the choice and its neighbours are measured together.
4. Whole runs, for all other knobs: one step by each in the same turns. If the cores are busy and no step is better,
   the search ends; else each knob is varied in turn around the choice.

Steps 3 and 4 alternate between candidates in short windows and compare turn by turn: the speed of a shared machine
changes within seconds. A change needs a gain of 5 %, or 10 % if it changes rollouts. Settings that affect learning also
need a gain above the measured spread, and a machine without other load. Reported rates are those beside evaluator,
visualizer and supervisor (``model.share_in_a_run``).

*Doubts.* Candidates whose repeats vary by more than 75 % of their median are measured again, then ignored. If too
little remains, profile and defaults are used (``Search.fall_back``). A result is provisional if other programs used 15
% of the cores, on battery, or if measurements were doubtful. It is used with a notice, and measured again once other
programs use half as much, on mains, or otherwise at the next two starts and then once a day.

*Measuring.* With one learner on this machine, ``train --auto`` measures while the run trains (``in_run``): in mode
spreeze on its workers, in modes with rollouts in processes of their own, taking turns with it. Elsewhere it measures
first. A candidate in new child processes has a deadline and a memory limit; all take 60 s at most
on a quiet machine. Results are cached by machine, environment, algorithm, knobs, objective, pins and package versions,
and hold while an env step takes between half and twice as long (``run``). One tuner measures at a time.
"""
