"""Short and long forms of a stress test: CI takes the short one, a person with time the long one.

``SPREEZE_LONG_TESTS=1`` switches the long forms on; each parameter has a default and a variable, for example
``SPREEZE_STRESS_MINUTES=10``. The figures are printed as ``spreeze bench`` prints its own.
"""

import os

import pytest

LONG = "SPREEZE_LONG_TESTS" in os.environ
by_hand = pytest.mark.skipif(not LONG, reason="takes minutes to hours; set SPREEZE_LONG_TESTS=1")
PATIENCE_S = 240.0
"""Longest wait for what has to come. It ends what hangs; no short form judges how fast a machine is."""
LIMIT_S = 60.0 if LONG else PATIENCE_S
"""Who does nothing until then counts as hung."""
LEFT_S = 5.0 if LONG else PATIENCE_S
"""Processes of a run that are left so long after its end are orphans."""


def asked(name, default):
    """Parameter of a long form: ``SPREEZE_STRESS_<NAME>``, as a value of the default's type."""
    text = os.environ.get(f"SPREEZE_STRESS_{name}")
    return default if text is None else type(default)(text)
