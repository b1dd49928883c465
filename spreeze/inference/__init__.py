"""Policies in NumPy, for all processes that need no gradients.

Nothing here imports torch, so samplers and supervisor start in a fraction of its import time.
"""
