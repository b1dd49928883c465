"""Shared memory, files and arithmetic between processes; knows no algorithm and no environment."""
