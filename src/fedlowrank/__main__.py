"""``python -m fedlowrank`` is the command ``fedlowrank``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
