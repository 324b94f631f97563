"""`python -m rallypoint.run`: the same command as `rallyrun`."""

from __future__ import annotations

import sys

from rallypoint.cli.rallyrun import main

if __name__ == "__main__":
    sys.exit(main())
