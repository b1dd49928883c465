"""Sweeps and searches: their runs, Optuna, and the space of settings."""
