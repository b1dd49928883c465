"""Modes: which workers, which buffers, which synchronisation. Wiring only, one file a mode."""
