"""Policies in NumPy, for whoever acts without gradients: torch is never loaded here.

A sampler infers for its eight environments in one batch, and starts in a fraction of the time that importing torch
takes. The supervisor does not load torch either.
"""
