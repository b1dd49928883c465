"""Policies in NumPy, for whoever acts without gradients: torch is never loaded here."""
