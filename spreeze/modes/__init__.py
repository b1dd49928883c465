"""Modes: which workers, which buffers, which synchronisation. Wiring only, one file a mode.

*spreeze*: samplers write replay and the learner draws from it; nobody waits but for the band of samples per insert.
``run.learners`` of these can run side by side.

*hts* (HTS-RL): samplers step environments; inference workers, if any are asked for, choose actions for whatever
observations have arrived; the learner works on the rollout before. Two slots in shared memory change places only when
one is full and the other used up, so a policy lags by exactly one rollout, which is asserted. All randomness belongs to
environments and is counted (seed, environment, episode, step), and inference works in tiles of a fixed height. So
trajectories, parameters and optimiser are the same bits for any number of inference workers, any timing, and across a
resume, as long as the learner is on the CPU. Without inference workers samplers infer for themselves. That is the
default: an env step then costs half as much.

A killed sampler repeats its episode's actions and goes on; where that does not give the same observation, the run ends
and says that the environment is not repeatable. A step that raises or gives NaN is not stored: its episode ends,
truncated, at the last good observation, and a new environment collects the row, reset with the seed of its next
episode. No other environment's seeds or actions change. What waiting costs is in ``tests/hts_theory.py``, as
formulas and a simulation.

*serial*: the same parts in one process, one after the other.
"""
