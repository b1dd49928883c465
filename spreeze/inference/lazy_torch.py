"""Torch for the modules of ``spreeze.algorithms``, imported when something of it is first used.

An algorithm's settings stand in the file of its update. Processes that only read settings, which are the command line,
samplers and the page, import that file too: without torch, which takes seconds and hundreds of megabytes. (Python 3.15
has ``lazy import`` for this.) From the first use on, these modules have the real one: nothing is slower.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "functional", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional
else:

    class _Later:
        """Stands for a module until something of it is used."""

        def __init__(self, name: str) -> None:
            self.__dict__["_name"] = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._module(), attribute)

        def __setattr__(self, attribute: str, value: Any) -> None:
            setattr(self._module(), attribute, value)

        def _module(self) -> Any:
            """The module; from now on all that have such objects have modules instead."""
            for name, user in list(sys.modules.items()):
                if name.startswith("spreeze."):
                    for held, value in list(vars(user).items()):
                        if isinstance(value, _Later):
                            setattr(user, held, importlib.import_module(value._name))
            return importlib.import_module(self._name)

    torch, functional, Tensor = _Later("torch"), _Later("torch.nn.functional"), Any
