"""Imports the module, or the script by its path, that ``--import`` names, and runs a policy network from it.

Tables of algorithms, modes, networks and knobs are extended by the rows that the module declares.

A script without a main guard would train again whenever it is imported. So ``train`` ends the import of its script: the
definitions above that line exist, which is all that an environment needs.

A network runs here in processes that need no gradients. The samplers of such a run load torch, and step slower: for few
rows, a call of a module takes ten times as long as NumPy. In ``sample`` each row is a separate call, so that its result
cannot depend on other rows.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from spreeze.errors import ConfigError, WeightsError, described, did_you_mean
from spreeze.formatting import clean
from spreeze.types import Arrays

_Row = TypeVar("_Row")
_importing: list[str] = []  # modules and scripts that are being imported, innermost last


class TrainingReached(BaseException):
    """Ends the import of a module that trains; not an ``Exception``, so that no handler of the script catches it."""


def is_script(module: str) -> bool:
    """True if ``--import`` names the file of a script."""
    return module.endswith(".py")


def is_within(named: str, module: str | None) -> bool:
    """True if ``named:CLASS`` means a class of the ``--import`` module; a script is named by its file's name."""
    return module is not None and named in {module, Path(module).name if is_script(module) else module}


def end_import() -> None:
    """Ends the current import of a module or script, whose training this process has reached, if there is one."""
    if _importing:
        raise TrainingReached


def import_named(module: str) -> ModuleType:
    """Imports a module, or a script, which ``sys.modules`` then has under its path; errors of its code are raised.

    Raises:
        ImportError: the module trains when it is imported, or there is no such script.
    """
    if module in sys.modules:
        return sys.modules[module]
    _importing.append(module)
    try:
        if is_script(module):
            return _import_script(module)
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a console script lacks the working directory that python -m has
        return importlib.import_module(module)
    except TrainingReached:
        raise ImportError(
            f"{module} trains when it is imported: put its training under if __name__ == '__main__'"
        ) from None
    finally:
        _importing.pop()


def _import_script(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise ImportError(f"there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(path, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = sys.modules[path] = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, [str(file)]
    try:
        # Standard output is reserved for the document of --json.
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(TrainingReached):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path]
        if isinstance(error, SystemExit):  # a parser of arguments, for example
            raise ImportError(
                f"{path} ends when it is imported: put what it does under if __name__ == '__main__'"
            ) from error
        raise
    finally:
        sys.argv = arguments
    return module


def find(name: str, import_module: str | None, table: Callable[[str | None], dict[str, _Row]], key: str) -> _Row:
    """A row of a table; imports the module only if no declared row has that name. A ConfigError if there is none."""
    known = table(None)
    if name not in known and import_module is not None:
        known = table(import_module)
    if name not in known:
        more = "" if import_module else " (and those of the --import module)"
        raise ConfigError(f"{key} = {name!r}: must be one of: {', '.join(known)}{more}{did_you_mean(name, known)}")
    return known[name]


def extended(known: dict[str, Any], module: str | None, name: str, kind: type) -> dict[str, Any]:
    """A table extended by the rows that the module of ``--import`` declares; its name never comes from a file.

    A ConfigError if the module cannot be imported, or declares something other than new rows.
    """
    if module is None:
        return known
    try:
        declared = tuple(getattr(import_named(module), name, ()))
    except Exception as error:
        raise ConfigError(f"--import {module}: {described(error)}") from error
    for row in declared:
        if not isinstance(row, kind) or row.name in known:  # type: ignore[attr-defined]
            raise ConfigError(
                f"--import {module}: {name} holds {clean(repr(row), 200)}; expected a "
                f"{kind.__module__}.{kind.__name__} with a new name, other than {', '.join(known)}"
            )
        known[row.name] = row  # type: ignore[attr-defined]
    return known


class CustomNetwork:
    """The module named by the weights; maps [N, I] to [N, K] on the CPU."""

    def __init__(self, arrays: Arrays, meta: dict[str, Any], outputs: int) -> None:
        """Makes the network of the run's ``--import`` module, and loads the weights.

        Raises:
            WeightsError: that module declares no such network, or the weights do not fit it.
        """
        import torch

        self._torch = torch
        name, source = meta["network"], (meta.get("env") or {}).get("import_module")
        rows = getattr(import_named(source), "NETWORKS", ()) if source else ()
        row = next((row for row in rows if row.name == name), None)
        if row is None:
            raise WeightsError(f"weights need the network {name!r}, which --import {source} does not declare")
        self._module = row.make(int(meta["obs_dim"]), outputs).eval()
        with torch.no_grad():
            for parameter, tensor in self._module.named_parameters():
                array = arrays.get(f"net.{parameter}")
                if array is None or array.shape != tuple(tensor.shape):
                    raise WeightsError(
                        f"network {name!r} has a parameter {parameter!r} {tuple(tensor.shape)}; the weights "
                        f"have {None if array is None else array.shape}"
                    )
                tensor.copy_(torch.from_numpy(np.array(array)))

    def __call__(self, x: np.ndarray, out: np.ndarray, *, row_by_row: bool) -> np.ndarray:
        """Fills and returns ``out`` [N, K]."""
        with self._torch.inference_mode():
            rows = self._torch.from_numpy(np.array(x))
            parts = self._torch.split(rows, 1 if row_by_row else max(1, len(rows)))
            out[...] = self._torch.cat([self._module(part) for part in parts]).numpy()
        return out
