"""The one place where all parts are put together: a `LaunchConfig` in, a running job out."""

import sys

if sys.platform != "linux":
    from rallypoint.base.errors import NEEDS_LINUX

    raise ImportError(NEEDS_LINUX)
