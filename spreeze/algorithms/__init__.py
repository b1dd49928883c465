"""Algorithms: losses, networks and updates. They know no process, no transport and no clock but their own.

*Two contracts.* ``off_policy``: ``propose`` and ``critic_step``, and where there is an actor ``action_gradient`` and
``actor_step``, are separate; what crosses between actor and critic is in their arguments and nowhere else, so one
device, two devices or a recorded graph are only placements. ``on_policy``: an algorithm learns from intervals that its
own policy has just collected, perhaps one interval late, and says how it corrects for that.

*Updates are hand-derived.* Forward and backward passes are written out over flat parameter vectors: no gradient is
computed that is thrown away (no input gradients in the critic step, no critic weights in the actor step), both critics
are one stacked network, Adam and the target update are one call each. Tests hold the gradients against autograd and
against an independent NumPy computation.

*Corrections (PPO, A2C in mode hts).* ``delayed`` takes the update at the parameters that collected the data and applies
it to the newest ones (HTS-RL, eq. 6). PPO's update is a loop of epochs over minibatches: the loop runs from the old
parameters, and its whole displacement is added to the newest; with one epoch and one minibatch that is eq. 6. ``none``
and ``truncated-is`` are the paper's ablations. A2C takes ``delayed`` unless told otherwise. PPO takes ``none``, as the
authors' release does: its ratios bound how far old data may lead, while a displacement is made once more before the
first one shows. ``ppo.target_kl`` adapts the step size to how far an update leads the policy away, for runs that end by
the clock.

*Discrete actions.* SAC takes exact expectations over the actions (arXiv 1910.07207). DQN explores with a share of
random actions that falls from ``dqn.epsilon_start`` to ``dqn.epsilon_end``; its target network follows softly
(``dqn.tau``) or as a copy (``dqn.tau=1.0``, ``dqn.target_interval=100``).

*Images.* DQN, PPO and A2C have the network of Mnih et al. 2015 (``nature``) and the smaller one of IMPALA
(``impala_small``); policy and value of PPO and A2C share it. Trunks work channels last, 128 images at once on a
processor, so that what one layer gives is in the cache for the next.
"""
