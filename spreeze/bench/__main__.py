"""``python -m spreeze.bench``."""

import sys

from spreeze.bench import main

if __name__ == "__main__":
    sys.exit(main())
