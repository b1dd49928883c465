"""The hardware of this machine, and its current use."""
