"""Policies in NumPy, for all processes that need no gradients.

Nothing here imports torch, so samplers and supervisor start in a fraction of its import time.
"""

import warnings

# OpenBLAS sometimes sets the processor's flag for invalid values although inputs and outputs are finite, and NumPy
# reports it (numpy/numpy#24067, scipy/scipy#22720). Weights and observations are checked when they are read.
warnings.filterwarnings("ignore", r"invalid value encountered in (dot|matmul)", RuntimeWarning, r"spreeze\.")
