"""`rallyrun`: torchrun's command line, read by a table of flags and turned into a `LaunchConfig`."""

import sys

if sys.platform == "win32":
    from rallypoint.base.errors import NOT_ON_WINDOWS

    sys.stderr.write(f"error: {NOT_ON_WINDOWS}\n")
    sys.exit(2)
