"""Imports the module, or the script by its path, that ``--import`` names.

A script without a main guard would train again whenever it is imported. So ``train`` ends the import of its script: the
definitions above that line exist, which is all that an environment needs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

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
