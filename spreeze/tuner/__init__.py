"""The autotuner: one search over declared knobs.

*Knobs.* A knob is a setting that the tuner chooses (``problem.Knob``; table ``knobs.KNOBS``): its candidates, their
need of memory and cores, the data flows that have it, the trial that measures it, and its text. The ``--import``
module may declare more of them as ``KNOBS``; a mode may name its own (``DataFlow.knobs``).

*Objectives* are formulas of updates/s U, env steps/s E and batch size B of the whole run (``model``):

========  ==================================================================================================
return    (default) ``U * B / (B + B0) * E / (E + U / R)``: the worth of an update grows with its batch and
          falls with more than R updates per env step; B0 = 96, R = 2
paper     the smallest power of two with ``b B / (a + b B) >= gpu_target``, where an update takes ``a + b B`` seconds;
          then E, while the run uses at most ``cpu_target`` of the cores
sampling  E, with the configured batch size
updates   U, with the configured batch size
rollout   E, for on-policy modes; rows and minibatches of a rollout stay about as configured, so that tuning does not
          change learning. Asynchronous modes: U, with at most 20 uses of a rollout; N and K stay as configured
========  ==================================================================================================

B0 and R were fitted to early returns of easy tasks (``model.BATCH_HALF_WORTH``, ``assets/figures.md``); below a batch
size of ``knobs.LEAST_BATCH`` no B0 fits, so ``return`` chooses smaller ones only if they are set explicitly.

*Search* (``search``; ``measure`` does the measuring).

1. Memory limits replay (at least four batches), batch size, samplers and environments. A pinned setting that does not
   fit is rejected, with the limit that it exceeds.
2. Learners alone, if the mode has such knobs: growing batch sizes while they pay, on each device, then more threads.
   Two threads split an update, and are tried with two or more cores; more threads split each matmul, and are tried up
   to half of the cores, because a matmul stalls if one of its threads waits for a core. ``t(B) = a + b B`` is fitted.
   Updates slower than 1 s are not considered; a crash, a hang or lack of memory rules out larger batch sizes.
3. Whole runs with these learners: numbers of samplers, without a rate limit, up to one more than the remaining cores. A
   model of shared cores (physical cores, SMT siblings, quota) interpolates and predicts all combinations of learner,
   batch size, samplers and lower bound of samples per insert. Scores within 3 % are ties, which the knobs decide in
   table order, mostly for the configured value, then for the smaller one. Finally the choice and its neighbours (one
   step of one knob, and the best prediction with other threads or another device) are measured together.
4. Whole runs, for all other knobs: each knob is varied in turn around the choice.

Steps 3 and 4 alternate between candidates in many short windows and compare turn by turn, since the speed of a shared
machine changes within seconds. A change needs a gain of 5 %, or 10 % if it changes rollouts. Settings that affect
learning (batch size, samples per insert, rollouts, other modules' knobs) also need a gain above the measured spread,
and a machine without other load.

Reported rates are those of a run: the cores that evaluator, visualizer and supervisor will use are subtracted
(``model.share_in_a_run``). The upper bound of samples per insert is raised to twice the measured value, up to 8 updates
per env step.

*Other load.* A candidate whose repeats vary by more than 75 % of their median is measured again if time allows, and
ignored otherwise. If too little remains, profile and defaults are used (``Search.fall_back``). Errors are reported only
for settings that cannot work, and if every candidate fails with its own error. A result is provisional if other
programs used 15 % of the cores, on battery, or if measurements were doubtful. It is used with a notice at each start,
and measured again once other programs use half as much, on mains, or otherwise at the next two starts and then once a
day.

*Measuring.* In mode spreeze with one learner on a processor, ``train --auto`` measures on the workers of the run while
they train (``in_run``). Elsewhere, and in ``spreeze tune``, each candidate runs in new child processes with a deadline
and a memory limit; a crash, a hang or lack of memory is a result. Waiting candidates are suspended. Tuning takes at
most 60 s on a quiet machine. Results are cached by machine (processor, usable cores, quota, memory, GPUs, driver, power
supply), environment, algorithm, networks, knobs, objective, pinned settings and package versions, and are valid while
an env step takes between half and twice as long as before. A damaged cache is reported and replaced. Only one tuner
measures at a time, others wait for up to 75 s; those with another ``TMPDIR`` do not see each other. A resumed run keeps
settings that its stored data depend on.
"""
