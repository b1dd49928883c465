"""Measurements of each part, and of the whole against others."""
