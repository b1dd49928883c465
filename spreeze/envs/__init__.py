"""Environments: construction by id, spaces, and the probe process. No other package imports Gymnasium.

*Episode ends.* ``terminated`` cuts the bootstrap, ``truncated`` does not. All three autoreset modes of vector
environments lead to the same transitions: with the true last observation, and without reset steps.

*Observations.* ``Dict`` is flattened by sorted key, ``Tuple`` by index, and ``Discrete`` as one-hot, into one float32
vector; ``env.json`` of a run describes its layout. ``envpool:ID`` and ``vector:ID`` (``vector_entry_point`` of the id)
step all environments of a sampler in one call and are written to replay as whole arrays. Images (``pictures``,
``images``) become frames of bytes; numbers beside them share the frame (``types.FrameSpec``).

*Actions.* A Box is scaled from [-1, 1]. Discrete, MultiDiscrete and MultiBinary are choices by index
(``types.Choices``, ``action_spaces``). Action masks (``masks``) are appended to the observation.

Tasks of several agents (``team_env``) have one observation and one action. The usual ids of Bullet tasks use the faster
version in ``bullet`` if verified for the installed packages; the choice is printed, ``--plain-env`` disables it. MuJoCo
renders through EGL or OSMesa without a display.
"""
