"""`python -m rallypoint.launch`, like `python -m torch.distributed.launch`. The command itself is in `cli.rallyrun`."""

from __future__ import annotations

import sys

from rallypoint.cli.rallyrun import main_deprecated as main

if __name__ == "__main__":
    sys.exit(main())
