"""Environments: construction by id, spaces, and the probe process. No other package imports Gymnasium.

*Episode ends.* ``terminated`` cuts the bootstrap, ``truncated`` does not. All three autoreset modes of vector
environments lead to the same transitions: with the true last observation, and without reset steps.

*Observations.* ``Dict`` is flattened by sorted key, ``Tuple`` by index, and ``Discrete`` as one-hot, into one float32
vector; ``env.json`` of a run describes its layout. ``envpool:ID`` and ``vector:ID`` (``vector_entry_point`` of the id)
step all environments of a sampler in one call and are written to replay as whole arrays. MuJoCo renders through EGL or
OSMesa without a display.

*Actions.* A Box is scaled from [-1, 1]. Discrete, MultiDiscrete and MultiBinary are choices by index
(``types.Choices``, ``action_spaces``).

*Action masks.* A mask comes from ``info["action_mask"]``, from the observation, or from a method ``action_masks()``,
whichever the first reset has (``masks``). It is appended to the observation as K values, one block per choice
(``obs_flattening``).

*Teams.* ``mpe2:NAME``, ``lbf:ID`` and ``parallel:MODULE`` are environments with several agents (``team_env``): the
observation is that of all agents and the state, the action is one index per agent, and the reward is the sum.

*Images.* A Box of bytes (0 to 255), ``[H, W]`` or with channels first or last, of at least 36 x 36 pixels, is an image,
alone or among other parts (``pictures``). It is shrunk (area mean; ``image.size``, ``image.grey``), and the last
``image.stack`` frames form an observation. Several, or one beside numbers, share a frame: their bytes, then those of
the numbers (``types.FrameSpec``), so code that stores, stacks and sends frames ignores the parts. ``images`` implements
the Atari protocol, with values in ``profiles/atari.toml``; evaluation plays whole games and reports unclipped returns.

*Bullet tasks* are reimplemented in ``bullet``. The usual ids use this faster version if it is verified for the
installed packages; the choice is printed, and ``--plain-env`` disables it.
"""
