"""Collectors step environments and store the transitions, as replay rows or as rollouts.

An environment that raises or gives a bad transition loses only its own episode. For replay, the row is dropped and the
environment replaced. In a rollout, the episode ends, truncated, at the last good observation, whose value is still
used, and a new environment, reset with the seed of the next episode, collects the row. So a rollout keeps its T
rows of every environment, and the others are not affected: their actions and noise depend only on their own number,
episode and step. If the error depends only on an episode's seed and actions, the run repeats bit for bit, with any
number of inference workers and any deaths.

``assets/docs/architecture.md`` follows one transition through its collector to the weights' file.
"""
