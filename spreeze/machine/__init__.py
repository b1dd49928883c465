"""Hardware of this machine, and its current load."""
