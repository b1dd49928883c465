"""``python -m spreeze.bench``: measure Spreeze on this machine; every repeat is kept."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``spreeze bench``; returns the exit code."""
    from spreeze.bench.command import main as command

    return command(argv)
