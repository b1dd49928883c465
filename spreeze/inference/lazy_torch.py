"""Lazy import of torch for the modules of ``spreeze.algorithms``: it is imported at its first use.

An algorithm's settings are defined in the file of its update. Processes that only read settings (the command line,
samplers and the page) also import that file, but without torch, which takes seconds and hundreds of megabytes. (Python
3.15 has ``lazy import`` for this.) The first use puts the real module in place, so that nothing is slower afterwards.
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

    class _LazyModule:
        """Placeholder for a module until its first use."""

        def __init__(self, name: str) -> None:
            self.__dict__["_name"] = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._module(), attribute)

        def __setattr__(self, attribute: str, value: Any) -> None:
            setattr(self._module(), attribute, value)

        def _module(self) -> Any:
            """Imports the module, and replaces all placeholders in Spreeze's modules by the real ones."""
            for name, user in list(sys.modules.items()):
                if name.startswith("spreeze."):
                    for attribute, value in list(vars(user).items()):
                        if isinstance(value, _LazyModule):
                            setattr(user, attribute, importlib.import_module(value._name))
            return importlib.import_module(self._name)

    torch, functional, Tensor = _LazyModule("torch"), _LazyModule("torch.nn.functional"), Any
