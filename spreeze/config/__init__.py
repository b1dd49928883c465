"""Settings: schema, layers, and compatibility of algorithms, modes and environments.

Layers are, in increasing priority: defaults, the environment's profile, the tuner, the user. Each value remembers its
layer. On other machines than its own, a profile's machine-specific settings are ignored and reported. The tuner does
not change settings in ``about.keep``, for methods that depend on a certain ratio of batch size, environments and
samples per insert (``profiles/flashsac.toml``, ``fasttd3.toml``).

Shipped files (profiles, trained policies, the recorded run, ``app.py``) lie at the top of a checkout, or below
``share/spreeze`` of an installation (``data-files`` of ``pyproject.toml``).
"""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
"""Folder that holds the package: the top of a checkout, or ``site-packages``."""


def python_path(*first: str) -> str:
    """PYTHONPATH for a child that imports this package: ``first``, then the package, then that of this process."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*first, str(PACKAGE_PARENT), *filter(None, known)]))


def _root() -> Path:
    if (PACKAGE_PARENT / "pyproject.toml").is_file():
        return PACKAGE_PARENT
    # A virtual environment or the system; pip --target; pip --user.
    bases = (sysconfig.get_path("data"), PACKAGE_PARENT, site.getuserbase())
    folders = [Path(base, "share", "spreeze") for base in bases]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


SHIPPED = _root()
"""Folder of the shipped files."""
