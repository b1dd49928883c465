"""Settings: schema, layers, and compatibility of algorithms, modes and environments.

Layers are, in increasing priority: defaults, the environment's profile, the tuner, the user. Each value remembers its
layer. Profiles cannot name code or paths. ``tune --export NAME`` writes a profile with its machine in ``[about]``; on
other machines, its machine-specific settings (device, threads, samplers, environments, replay size) are ignored and
reported. ``[only."ENV".section]`` and ``[only.ALGO.section]`` apply to one environment or one algorithm. The tuner does
not change settings in ``about.keep``, for methods that depend on a certain ratio of batch size, environments and
samples per insert (``profiles/flashsac.toml``, ``fasttd3.toml``).
"""
