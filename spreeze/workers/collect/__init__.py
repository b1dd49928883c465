"""Stepping environments, and what becomes of the steps."""
