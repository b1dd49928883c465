"""The workers: processes that sample, run inference, learn, evaluate and render.

``roles`` lists them with priority and failure policy. ``jobs`` defines what each one receives: settings, handles of its
channels, and the function to run. Each process starts in ``main``, with its own ``context``. The loops are in
``samplers``, ``learner``, ``evaluator`` and ``visualizer``; what a learner learns from, in ``replay_learner``,
``rollout_learner`` and ``buffer_learner``. Collectors (``collectors``) and trainers are independent of processes.
``assets/docs/architecture.md`` lists the functions from an observation to the file of weights.
"""
