"""``python -m spreeze.train``, the main command; implemented in ``spreeze.cli.train``."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the import prints no traceback
    from spreeze.cli.train import main

    sys.exit(main())
