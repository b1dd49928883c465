"""Policies in NumPy for all processes that need no gradients: torch is never loaded here.

So samplers start in a fraction of the time that importing torch takes. The supervisor does not load torch either.
"""
