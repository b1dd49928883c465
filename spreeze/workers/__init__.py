"""One process body in each file."""
