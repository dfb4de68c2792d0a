# PYTHON_ARGCOMPLETE_OK
"""``python -m provider_llamacpp``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
