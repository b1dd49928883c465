"""``python -m spreeze.train``, the main command; implemented in ``spreeze.cli.train``.

Called from Python, the module is the function ``spreeze.api.train``, whose place in the package it takes.
"""

import os
import signal
import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        from spreeze.api import train

        return train(*args, **keywords)


if __name__ != "__main__":
    sys.modules[__name__].__class__ = _Callable
else:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the import prints no traceback
    from spreeze.machine.output import standard_streams
    from spreeze.machine.processes import ENDS_WITH, end_with_parent, exit_process

    with standard_streams():
        if os.environ.get(ENDS_WITH) == str(os.getppid()):  # a thread of that process waits for this one
            end_with_parent(signal.SIGINT)
        from spreeze.cli.train import main

        code = main()
    exit_process(code)
