"""From collected data to gradient steps, on whichever device.

*The second core.* Two learner threads are a pair: each critic has its thread, the actor's passes are halved by rows or
by what they compute, and no sum is cut, so the numbers are those of one core. The threads of one matmul spin while they
wait and stall beside any busy process; the pair sleeps.

*The second device.* ``--device split`` puts the actor on one GPU, critics and targets on the other (Spreeze, section
3.1). Only actions, log-densities, dQ/da and SAC's temperature cross, 4 B x batch x (3 x action + 1) a float32 update,
and results are those of one device. With ``learner.overlap`` dQ/da comes from the critics of before their step, so both
work at once.

*On a GPU* replay is mirrored as far as memory allows: only new rows travel, on a stream of their own, and draws never
leave the device. Whole updates are CUDA graphs, several in one launch with ``learner.updates_per_launch``. What does
not fit or cannot be recorded falls back and says why. These paths are tested as ``cpu+cpu`` and with stand-ins for
streams and graphs.

*Precision* is float32, tf32 (GPU) or bfloat16 (processors with such units; weights, sums and optimiser stay float32, so
no loss needs scaling).

*Numbers below 1e-38 become zero in a learner's threads.* A unit that the ReLU has switched off has gradient zero;
Adam's mean of it shrinks by a tenth with each update and is a denormal number after 900 of them, for which a processor
takes about a hundred times as long. Only real runs show it, never synthetic rows (figures in ``assets/figures.md``).
"""
