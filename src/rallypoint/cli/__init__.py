"""`rallyrun`: parses torchrun's command line with a table of flags, and converts it to a `LaunchConfig`."""

import sys

if sys.platform != "linux":
    from rallypoint.base.errors import NEEDS_LINUX

    sys.stderr.write(f"error: {NEEDS_LINUX}\n")
    sys.exit(2)
