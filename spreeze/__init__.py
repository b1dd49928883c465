"""Spreeze: the reinforcement-learning trainer that tunes itself to the machine it runs on."""

__version__ = "0.1.0"
