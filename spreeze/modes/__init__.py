"""Modes: workers, buffers and synchronisation. Wiring only: one file each, declared in ``config/modes.py``.

*spreeze*: samplers write replay and the learner draws from it; they wait only for the band of samples per
insert. ``run.learners`` of these can run side by side.

*hts* (HTS-RL): samplers step environments; inference workers, if any are asked for, choose actions for the
observations that have arrived; the learner works on the previous rollout. Two slots in shared memory are swapped only
when one is full and the other used up, so a policy lags by exactly one rollout, which is asserted. Random numbers are
counter-based (seed, environment, episode, step), and inference works in tiles of a fixed height. So trajectories,
parameters and optimiser are the same bits for any number of inference workers, any timing, and across a resume, as long
as the learner is on the CPU. Without inference workers, the default, samplers compute their own actions; an env step
then costs half as much.

The successor of a killed sampler repeats the episode's actions and continues; if the observation differs, the run ends
with an error that the environment is not repeatable. A step that raises or gives NaN is not stored (see
``workers.collectors``). The cost of waiting is in ``tests/hts_theory.py``, as formulas and a simulation.

*serial*: the same parts in one process, one after the other.
"""
