"""Spreeze: the reinforcement-learning trainer that tunes itself to the machine it runs on.

===================  ==========================================  =====================================================
to add               touch                                       as follows
===================  ==========================================  =====================================================
an algorithm         algorithms/NAME.py, config/algorithms.py    settings, class and row; the other names the file
a mode               config/modes.py, modes/NAME.py              its declaration; ``assemble`` if its path is its own
a knob of the tuner  tuner/knobs.py                              its row, for the data flows that it names
a metric or chart    metrics/table.py                            its row, with ``chart=`` to be drawn on the page; its
                                                                 worker posts it, an algorithm returns it
a setting or a flag  config/schema.py                            ``setting(..., flag="--name")``, then its reader; a
                                                                 flag that is no setting: cli/arguments.py
a kind of worker     workers/NAME.py, workers/roles.py           its job and what does it; its row; a mode ``add``s it
a family of tasks    envs/families.py                            its row, and what makes its environments
a vector engine      envs/families.py                            its row without ``team``; ``make`` takes ``num_envs``
a replay transport   transport/replay_ring.py                    its writer for samplers, its reader for the learner;
                                                                 modes/replay_modes.py creates it, workers/jobs.py
                                                                 carries its handle
an observation       envs/obs_flattening.py, envs/make.py        what becomes of its space; where ``make`` wraps it
an end of a run      metrics/stop_conditions.py                  its ``StopReason`` with its sentence, and its place
                                                                 among the conditions
a bottleneck         metrics/bottleneck.py                       its sentence; facts behind it: metrics/snapshot.py
a kind of policy     inference/heads.py, policy_formats.py       its head; its operations in exported files
an export format     inference/policy_formats.py, types.py       its codec in ``_CODECS``; its ``POLICY_FORMATS`` row
a weight transport   transport/weights.py, workers/context.py    for files; each rollout mode creates its own memory
===================  ==========================================  =====================================================

The effect of a worker's death is defined in ``workers/roles.py`` (policy) and ``runtime/worker_pool.py`` (restarts);
which episodes are kept, in ``workers/episodes/episode_recorder.py``; how samplers of other hosts deliver rows, in
``runtime/cluster`` (``host``, ``row_bridge``).

With a knob of replay that is not in ``tuner/in_run.py``, a run is tuned before it trains instead of meanwhile.

Each algorithm also has a line in the docstring of ``algorithms/__init__.py``. A metric of the machine is measured in
``machine/utilisation.py``. A mode with a data path of its own may need more files: see ``assets/docs/architecture.md``.
A weight transport has the methods of ``ParameterPublisher`` and ``ParameterSource``.

``tests/contract/test_newcomer.py`` adds one of each, except a kind of policy, an export format and a transport, and
checks that all of Spreeze knows it. There, the family of tasks is a vector engine.

A module that ``--import`` names may declare algorithms, modes, knobs, metrics and networks of its own in one file.

From Python: ``from spreeze import train, load_policy, Run, BaseCallback`` (``api.py``).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spreeze.api import Run, load_policy, train
    from spreeze.runtime.callback import BaseCallback

__version__ = "0.2.0"
__all__ = ["BaseCallback", "Run", "load_policy", "train"]


def __getattr__(name: str) -> Any:
    """Imports a name of ``__all__`` on first access; the processes of a run never access one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spreeze import api

    return getattr(api, name)
