"""Environments: made by id, described, stepped one at a time, probed in a child. Only here is Gymnasium known.

*Ends.* ``terminated`` cuts the bootstrap, ``truncated`` does not. Engines restart an ended episode in three ways; all
lead to the same rows: the true last observation, and none for a step that only began an episode.

*Vectors.* ``Dict`` goes by sorted key, ``Tuple`` by index, ``Discrete`` as one-hot, into one float32 vector;
``env.json`` of a run says where each part lies. ``envpool:ID`` and ``vector:ID`` (an id's own ``vector_entry_point``)
step all environments of a sampler in one call, and what they give goes to replay in whole arrays, be there hundreds.
MuJoCo draws through EGL or OSMesa where there is no display.

*Actions.* A Box is scaled from [-1, 1]; Discrete, MultiDiscrete and MultiBinary are choices, whose indices policies
give (``types.Choices``; ``action_spaces``).

*Action masks.* Where the first reset of a task with choices gives ``info["action_mask"]``, or its observation or a
method ``action_masks()`` does (``masks``), the mask of each state follows its observation as K values, those of several
choices one after the other, and so goes wherever that goes (``obs_flattening``). A task without masks has none.

*Teams.* ``mpe2:NAME``, ``lbf:ID`` and ``parallel:MODULE`` are tasks of several agents (``team_env``): one observation
for all of them and the state, one action index an agent, and the sum of their rewards.

*Images.* A Box of bytes to 255, ``[H, W]`` or with channels first or last, of at least 36 x 36 pixels, alone in its
Dict or without one, becomes one small frame a step (area mean; ``image.size``, ``image.grey``; ``pictures``); the last
``image.stack`` frames are an observation. Atari's protocol is in ``images`` and its values in ``profiles/atari.toml``;
evaluation always plays whole games, and returns are counted in full where replay clips rewards.

*Bullet tasks* are written anew in ``bullet``. The usual ids use them where the versions are those that equality was
proven for; the choice is printed, and ``--plain-env`` opts out.
"""
