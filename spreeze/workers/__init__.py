"""The workers: processes that sample, run inference, learn, evaluate and render.

``roles`` lists them with priority and failure policy. ``jobs`` defines what each one receives: settings, handles of its
channels, and the function to run. Each process starts in ``main``, with its own ``context``. The loops are in
``samplers``, ``learner`` (with ``feeds``), ``evaluator`` and ``visualizer``. Collectors and trainers are independent of
processes; mode serial calls them in turns.

To follow a row of replay through mode spreeze and SAC, read these functions:

======================================  ================================================================================
samplers: ``SamplerLoop.turn``          asks the policy for actions and steps the environments
collectors: ``TransitionCollector``     ``step`` makes transitions, its row writer appends them to the sink
transport.replay_ring: ``ShardWriter``  ``write`` puts them into the sampler's shard
feeds: ``ReplayFeed.advance``           updates when the limiter allows
replay_trainer: ``ReplayTrainer``       ``update`` draws a batch (``ReplayReader.sample``), scales it, learns from it
algorithms.off_policy, algorithms.sac   ``OffPolicyAlgorithm.update`` calls ``SAC.critic_step``, ``actor_step``
learner: ``Learner._publish``           offers a snapshot of the policy to ``Publisher``, a thread
transport.weights: ``WeightsStore``     ``publish`` writes a file; ``read_latest`` reads it
samplers: ``SamplerLoop``               ``_refresh_policy`` looks for it once a turn
======================================  ================================================================================
"""
