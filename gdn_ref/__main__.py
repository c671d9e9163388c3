"""python -m gdn_ref: see gdn_ref.cli."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
