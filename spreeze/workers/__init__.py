"""The workers: processes that sample, infer, learn, evaluate and draw, and what they are made of.

``roles`` lists them with their priority and what failures mean; ``jobs`` has what each is told, the handles of its
channels, and the function that does it. ``main`` is where each process begins, with a ``context`` of its own.
``samplers``, ``learner`` with its ``feeds``, ``evaluator`` and ``visualizer`` have the loops.
Mode serial has the same workers, in turns in one process (``runtime.turns``).
"""
