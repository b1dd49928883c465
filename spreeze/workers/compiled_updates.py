"""Fuses the kernels of an update by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spreeze.algorithms.off_policy import OffPolicyAlgorithm

_PARTS = ("actor_forward", "critic_step", "action_gradient", "actor_step")
"""Parts of an update that ``torch.compile`` fuses; the optimizers between them are one kernel each already."""


def compile_updates(off_policy: OffPolicyAlgorithm, update: Callable[[], None]) -> str:
    """Compiles the parts of an update by a few calls of ``update``, which leave the state as it was; returns a note.

    That takes up to a minute. Without Triton or a C++ compiler the update stays as it is, and the note says why.
    """
    algorithm: Any = off_policy
    compiler: Any = torch.compiler
    arrays, state = algorithm.state_arrays(), algorithm.state_json()
    plain = {"draw_noise": algorithm.draw_noise, "_actor_update_due": algorithm._actor_update_due}
    try:
        for name, function in plain.items():
            setattr(algorithm, name, compiler.disable(function))
        for adam in algorithm._optimizers:
            adam.step = compiler.disable(adam.step)
        for name in _PARTS:
            setattr(algorithm, name, torch.compile(getattr(algorithm, name), dynamic=False))
        for _ in range(max(3, min(algorithm.period, 16) + 1)):
            update()
        note = "updates are compiled by torch.compile"
    except Exception as error:  # the compiler raises many kinds; the update itself has run in tests
        for name in (*plain, *_PARTS):
            vars(algorithm).pop(name, None)
        for adam in algorithm._optimizers:
            vars(adam).pop("step", None)
        note = "updates are not compiled: " + " ".join(str(error).split())[:200]
    algorithm.load_state_arrays(arrays)
    algorithm.load_state_json(state)
    return note
