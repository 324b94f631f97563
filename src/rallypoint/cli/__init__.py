"""`rallyrun`: torchrun's command line, read by a table of flags and turned into a `LaunchConfig`."""

import sys

if sys.platform != "linux":
    from rallypoint.base.errors import NEEDS_LINUX

    sys.stderr.write(f"error: {NEEDS_LINUX}\n")
    sys.exit(2)
