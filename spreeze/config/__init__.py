"""Settings: their schema, the layers they come from, and what fits what.

Layers: defaults, then the task's profile, then the tuner, then the user; each value remembers its source. A profile can
name no code and no path. ``tune --export NAME`` writes a choice as a profile with its machine in ``[about]``; on
another machine the fields that belong to the first one (device, threads, samplers, environments, replay size) are named
and left out. ``[only."ENV".part]`` holds for one of a profile's tasks, ``[only.ALGO.part]`` for one algorithm. What it
names in ``about.keep`` is not the tuner's to choose: a method may be a balance of batch, environments and samples per
insert (``profiles/flashsac.toml``, ``fasttd3.toml``).
"""
