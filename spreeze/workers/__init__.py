"""The workers: processes that sample, infer, learn, evaluate and draw, and what they are made of.

``roles`` lists them with their code, priority and what failures mean; ``main`` is where each process begins, with a
``context`` of its own. ``sampler``, ``rollout_workers``, ``learner``, ``evaluator`` and ``visualizer`` have the loops.
Collectors and trainers know no processes: mode serial takes the same ones in turns.
"""
