"""Algorithms that compute in another precision than float32, to compare them with exact numbers."""

import torch


def exact(make, *args, dtype=torch.float64, **options):
    """What ``make`` returns, with its networks in that precision; all else follows theirs."""
    torch.set_default_dtype(dtype)
    try:
        return make(*args, **options)
    finally:
        torch.set_default_dtype(torch.float32)
