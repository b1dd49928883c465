"""From collected data to gradient steps, on whichever device.

*The second core.* Two learner threads are a pair: each critic has its thread, and the actor's passes are split by rows
or by outputs. No sum is split, so results equal those of one core. The threads of a parallel matmul spin while they
wait and stall beside any busy process; the pair sleeps.

*The second device.* ``--device split`` puts the actor on one GPU, critics and targets on the other (Spreeze, section
3.1). Only actions, log-densities, dQ/da and SAC's temperature cross, 4 B x batch x (3 x action + 1) a float32 update,
and results are those of one device. With ``learner.overlap`` dQ/da comes from the critics before their step, so both
work at once.

*On a GPU* replay is copied to the device as far as memory allows (GPU replay): only new rows are copied, on their own
stream, and draws never leave the device. Whole updates are CUDA graphs, several in one launch with
``learner.updates_per_launch``. Both fall back with a message if memory is short or recording fails. Tests run these
paths as ``cpu+cpu`` and with stand-ins for streams and graphs.

*Precision* is float32, tf32 (GPU) or bfloat16 (processors with such units; weights, sums and optimiser stay float32, so
no loss scaling is needed).

*Numbers below 1e-38 become zero in a learner's threads.* A unit switched off by the ReLU has gradient zero; Adam's mean
of it shrinks by a tenth with each update and is a denormal number after 900 updates, which slows a processor down about
a hundred times. Only real runs show it, never synthetic rows (figures in ``assets/figures.md``).
"""
