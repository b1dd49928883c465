"""Algorithms: losses, networks and updates. They know no process, no transport and no clock but their own.

To read one update, open its own file, the base of its kind, and the losses (``tests/test_reading.py`` follows one):

=============  ===========================
sac            sac, off_policy, losses
sac discrete   sac, off_policy, losses
td3            td3, off_policy, losses
ddpg           td3, off_policy, losses
dqn            dqn, off_policy, losses
ppo            ppo, on_policy, losses
a2c            a2c, on_policy, losses
=============  ===========================

*Updates are hand-derived.* ``fused_mlp`` stands where ``torch.nn`` and autograd stand elsewhere, ``optimizers`` where
``torch.optim`` does: forward and backward passes over flat parameter vectors. No gradient is computed that is thrown
away, both critics are one stacked network, Adam and the target update are one call each. Tests hold the gradients
against autograd and against NumPy; ``tests/lean_sac.py`` measures what they are worth: an update is 1.3 to 1.5 times as
fast as one by lean autograd, and below 1.25 they would go.

*Corrections.* What PPO and A2C do about data that is one rollout old in mode hts is told in ``on_policy`` and ``ppo``.
A2C takes ``delayed`` unless told otherwise. PPO takes ``none``, as the authors' release does: its ratios bound how far
old data may lead, while a displacement is made once more before the first one shows.

*Discrete actions.* SAC takes exact expectations over the actions (arXiv 1910.07207). DQN explores with a share of
random actions that falls from ``dqn.epsilon_start`` to ``dqn.epsilon_end``; its target network follows softly
(``dqn.tau``) or as a copy (``dqn.tau=1.0``, ``dqn.target_interval=100``).

*Images.* DQN, PPO and A2C have the network of Mnih et al. 2015 (``nature``) and the smaller one of IMPALA
(``impala_small``), both in ``conv_networks``; policy and value of PPO and A2C share it. Trunks work channels last, 128
images at once on a processor, so that what one layer gives is in the cache for the next.
"""
