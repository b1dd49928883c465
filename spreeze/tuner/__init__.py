"""The autotuner: what to measure, how to choose, and why."""
