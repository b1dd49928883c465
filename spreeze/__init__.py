"""Spreeze: the reinforcement-learning trainer that tunes itself to the machine it runs on.

===================  ======================  ==============================================================
to add               declare it in           implement it in
===================  ======================  ==============================================================
an algorithm         algorithms/NAME.py      there: settings, class and row; config/algorithms.py names the file
a mode               config/modes.py         modes/NAME.py
a knob of the tuner  tuner/knobs.py          there; the modes that have it name it in config/modes.py
a metric             metrics/table.py        its worker posts it; those of the supervisor: runtime/recorder.py
a setting or a flag  config/schema.py        whoever reads it; ``setting(..., flag="--name")`` makes the flag
a kind of worker     workers/roles.py        workers/NAME.py
a family of tasks    envs/vector_engines.py  there, or envs/make.py for a package with Gymnasium ids
a weight transport   transport/protocols.py  transport/weights.py; opened in one place: workers/context.py
===================  ======================  ==============================================================

A module that ``--import`` names may declare algorithms, modes, knobs, metrics and networks of its own in one file.

From Python: ``from spreeze import train, load_policy, Run`` (``api.py``).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spreeze.api import Run, load_policy, train

__version__ = "0.2.0"
__all__ = ["Run", "load_policy", "train"]


def __getattr__(name: str) -> Any:
    """Imports what ``__all__`` names when it is first asked for: processes of a run never do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spreeze import api

    return getattr(api, name)
